"""The tables [groups.NAME]: model groups, whose models share one process on each device and some of its memory."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from weightd_common import toml_schema
from weightd_common.toml_schema import ErrorCollector, check_name, derived
from weightd_daemon.config.model import Membership, ModelConfig
from weightd_protocol import limits
from weightd_protocol.schema import FieldError, label, list_of, one_of, text

# The only engine that supports model groups. It needs version 2.1 or later.
_GROUP_ENGINE = "mindspore_lite"

_NAME = text(limits.MAX_NAME_BYTES)

WEIGHTS = "weights"
WORKSPACE = "workspace"
BOTH = "both"


@dataclass(frozen=True)
class GroupConfig:
    """A table [groups.NAME]."""

    models: tuple[str, ...] = field(metadata=list_of(_NAME, limits.MAX_GROUP_MODELS))
    """Names of at least two models. On each of their devices, one process serves all of them, one predict at a time. If
    it has to be replaced, all models of the group are loaded again."""

    share: str = field(default=WORKSPACE, metadata=one_of([WORKSPACE, WEIGHTS, BOTH]))
    """Memory that the models share. "workspace": the working memory, as large as the largest model needs. "weights",
    for models with the same `path`. "both"."""

    devices: tuple[str, ...] = field(default=(), metadata=derived(list_of(_NAME, limits.MAX_DEVICES)))
    """The devices of the group's models, the same for each of them."""

    @property
    def shares_workspace(self) -> bool:
        """Whether the group's models use the same working memory."""
        return self.share != WEIGHTS

    @property
    def shares_weights(self) -> bool:
        """Whether the group's models with the same path share one copy of the weights."""
        return self.share != WORKSPACE


def read_groups(content: Any, names: Collection[str], problems: ErrorCollector) -> dict[str, GroupConfig]:
    """Return the valid tables [groups.NAME] by name; errors are added to `problems`.

    Args:
        content: the parsed TOML.
        names: the names of all tables [models.NAME].
        problems: as in `toml_schema.read_table`.

    Raises:
        FieldError: `content` is not a table with tables [groups.NAME].
    """
    if type(content) is not dict:
        raise FieldError("expected tables [groups.NAME]")
    groups: dict[str, GroupConfig] = {}
    group_by_model: dict[str, str] = {}
    for name, table in cast("dict[str, Any]", content).items():
        before = len(problems.errors)
        with problems.at(f".{label(name)}"):
            problems.add(check_name("group", name))
            group = toml_schema.read_table(GroupConfig, table, problems, section=f"groups.{name}")
            problems.add(_check_members(group.models or (), name, names, group_by_model), "models")
            if len(problems.errors) == before:
                groups[name] = group
    return groups


def with_member_defaults(config: ModelConfig) -> ModelConfig:
    """Return a model of a group with the defaults for groups: no spares, and no sharing with other processes."""
    return dataclasses.replace(config, spares=config.spares or 0, sharing=config.sharing or "off")


def complete_groups(
    groups: Mapping[str, GroupConfig], models: Mapping[str, ModelConfig], problems: ErrorCollector
) -> dict[str, GroupConfig]:
    """Return the groups with the derived key `devices` filled in; errors are added to `problems`.

    Args:
        groups: the groups as they were read.
        models: the valid models; a group that names any other model is left out.
        problems: as in `toml_schema.read_table`.
    """
    complete: dict[str, GroupConfig] = {}
    for name, group in groups.items():
        if not models.keys() >= {*group.models}:
            continue
        members = {each: models[each] for each in group.models}
        with problems.at(f".{label(name)}"):
            problems.add(_check_group(group, members))
        complete[name] = dataclasses.replace(group, devices=members[group.models[0]].devices)
    return complete


def with_memberships(groups: Mapping[str, GroupConfig], models: Mapping[str, ModelConfig]) -> dict[str, ModelConfig]:
    """Return the models of all groups with the derived key `group` filled in."""
    members: dict[str, ModelConfig] = {}
    for name, group in groups.items():
        there = [models[each] for each in group.models]
        digest = hashlib.sha256(repr((group, there)).encode()).hexdigest()
        ours = Membership(name, group.share, group.models, digest)
        members.update((each, dataclasses.replace(models[each], group=ours)) for each in group.models)
    return members


def _check_members(
    models: tuple[str, ...], group: str, names: Collection[str], group_by_model: dict[str, str]
) -> Iterator[FieldError]:
    if len(models) < 2:
        yield FieldError(f"expected at least two models, got {len(models)}").at(".models")
    for index, name in enumerate(models):
        at = f".models[{index}]"
        if name in models[:index]:
            yield FieldError(f"{label(name)} is given twice").at(at)
        elif name not in names:
            yield FieldError(f"there is no model {label(name)}").at(at)
        elif group_by_model.setdefault(name, group) != group:
            yield FieldError(f"{label(name)} is already in the group {label(group_by_model[name])}").at(at)


def _check_group(group: GroupConfig, members: Mapping[str, ModelConfig]) -> Iterator[FieldError]:
    first_model, *other_models = members.values()
    for index, (name, model) in enumerate(members.items()):
        problem = _member_problem(model, group)
        if problem:
            yield FieldError(f"{label(name)}: {problem}").at(f".models[{index}]")
    for key in ("devices", "python"):
        for index, other in enumerate(other_models, 1):
            theirs, own = getattr(other, key), getattr(first_model, key)
            if theirs != own:
                text = (
                    f"{label(group.models[index])}: expected the {key} of {label(group.models[0])}, {own}, because one "
                )
                yield FieldError(f"{text}process serves both models; got {theirs}").at(f".models[{index}]")
    if group.shares_weights and len({model.path for model in members.values()}) == len(members):
        text = f'only models with the same path share weights, but all paths differ; set share = "{WORKSPACE}"'
        yield FieldError(text).at(".share")


def _member_problem(model: ModelConfig, group: GroupConfig) -> str:
    """Return the most fundamental reason why a model cannot be in a group; "" if it can."""
    rows = model.batching.max_rows
    reasons = {
        f"expected engine {_GROUP_ENGINE}, the only one with groups, got {model.engine}": model.engine != _GROUP_ENGINE,
        "expected a model on cards: on the CPU, a group would share nothing": not model.is_on_cards,
        "a model with ranks cannot be in a group": model.ranks is not None,
        'provider "ge" does not support groups': model.mindspore_lite.provider == "ge",
        f'expected sharing = "off", got "{model.sharing}": the library ignores it in a group': model.sharing != "off",
        f'expected load = "start", got "{model.load}": the models of a group share a process': not model.loads_at_start,
        f"expected workers = 1, got {model.max_workers}: the group has one process on each device": (
            model.max_workers != 1
        ),
        f"expected spares = 0, got {model.spares}: the group has one process on each device": bool(model.spares),
        "MindSpore Lite rejects groups with variable_weights": model.mindspore_lite.variable_weights,
        f"expected batching.max_rows = 1, got {rows}: a model with several sizes shares no workspace": (
            rows > 1 and group.shares_workspace
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
