"""The tables [groups.NAME]: several models of one card in one process, which share what they work with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from weightd.daemon.config import tables
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.config.names import of_name
from weightd.daemon.config.tables import Problems, derived
from weightd.protocol import limits
from weightd.protocol.schema import FieldError, label, many, one_of, text

_NAME = text(limits.MAX_NAME_BYTES)


@dataclass(frozen=True)
class GroupConfig:
    """A table [groups.NAME]."""

    models: tuple[str, ...] = field(metadata=many(_NAME, limits.MAX_MODELS))
    """The models, by name, at least two: on each of their devices, one process serves all of them, one predict after
    another. Where one fails so that its process has to go, all of them come up again."""

    share: str = field(default="workspace", metadata=one_of(["workspace", "weights", "both"]))
    """What they have in common: the "workspace", as large as the largest of them needs; the "weights", which pays only
    for models with the same `path`; or both."""

    devices: tuple[str, ...] = field(default=(), metadata=derived(many(_NAME, limits.MAX_DEVICES)))
    """The devices of its models, which are the same for all."""


def read_groups(content: Any, models: Mapping[str, ModelConfig], problems: Problems) -> dict[str, GroupConfig]:
    """Return the tables by name; what is wrong is added to `problems`.

    Args:
        content: the tables, as TOML has them.
        models: those with which nothing is wrong.
        problems: as in `tables.read`.

    Raises:
        FieldError: these are no tables.
    """
    if type(content) is not dict:
        raise FieldError("expected tables [groups.NAME]")
    groups: dict[str, GroupConfig] = {}
    for name, table in cast("dict[str, Any]", content).items():
        before = len(problems.errors)
        with problems.at(f".{label(name)}"):
            problems.note(of_name("group", name))
            group = tables.read(GroupConfig, table, problems, section=f"groups.{name}")
            if len(problems.errors) == before:
                members = [models[each] for each in group.models if each in models]
                devices = dict.fromkeys(device for member in members for device in member.devices)
                groups[name] = dataclasses.replace(group, devices=tuple(devices))
    return groups
