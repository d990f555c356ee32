from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightd_daemon.config.groups import GroupConfig
from weightd_daemon.config.load import ConfigError, parse

BASE = Path("/etc/weightd")


def tables(groups: object, **models: Any) -> dict[str, Any]:
    card = {"devices": ["ascend:0"]}
    given = models or {"one": {}, "two": {}}
    return {
        "models": {name: {"path": f"/srv/{name}.mindir", **card, **keys} for name, keys in given.items()},
        "groups": groups,
    }


def problems(content: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(content, BASE)
    return list(caught.value.problems)


def test_parses_group_of_two_models() -> None:
    config = parse(tables({"g": {"models": ["one", "two"]}}), BASE)
    group = GroupConfig(("one", "two"), "workspace", ("ascend:0",))
    assert config.groups == {"g": group}
    assert (group.shares_workspace, group.shares_weights) == (True, False)
    # A group has no spares, and the library ignores a weight handle in a group.
    assert [(model.spares, model.sharing) for model in config.models.values()] == [(0, "off")] * 2


@pytest.mark.parametrize("share", ["weights", "both"])
def test_sharing_weights_needs_equal_paths(share: str) -> None:
    same = {"path": "/srv/m.mindir"}
    group = {"g": {"models": ["one", "two"], "share": share}}
    assert parse(tables(group, one=same, two=same), BASE).groups["g"].shares_weights
    assert problems(tables(group)) == [
        'groups.g.share: only models with the same path share weights, but all paths differ; set share = "workspace"'
    ]


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        (3, "groups: expected tables [groups.NAME]"),
        ({"g": 3}, "groups.g: expected a table, got int 3"),
        ({"g": {}}, "groups.g.models: missing"),
        ({"g": {"models": ["one", "two"], "share": "all"}}, "groups.g.share: expected one of both, *"),
        (
            {"g": {"models": ["one", "two"], "device": "x"}},
            "groups.g.device: unknown key; expected*",
        ),
        ({".g": {"models": ["one", "two"]}}, "groups..g: expected a group name of 1 to 64 *"),
    ],
)
def test_invalid_group_table_is_rejected(groups: object, problem: str) -> None:
    [reported] = problems(tables(groups))
    assert reported.startswith(problem.rstrip("*"))


MODELS = ["one", "two"]
GROUP = {"g": {"models": MODELS}}


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ({"g": {"models": []}}, "g.models: expected at least two models, got 0"),
        ({"g": {"models": ["one"]}}, "g.models: expected at least two models, got 1"),
        ({"g": {"models": ["one"] * 17}}, "g.models: expected at most 16 items, got 17"),
        ({"g": {"models": ["one", "one"]}}, "g.models[1]: one is given twice"),
        ({"g": {"models": ["one", "three"]}}, "g.models[1]: there is no model three"),
        ({**GROUP, "h": {"models": ["two", "one"]}}, "h.models[0]: two is already in the group g"),
    ],
)
def test_invalid_members_are_rejected(groups: object, problem: str) -> None:
    reported, *_ = problems(tables(groups))
    assert reported == f"groups.{problem}"


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"path": "/m.onnx", "devices": ["cpu"]},
            "expected engine mindspore_lite, the only one with groups, got onnx*",
        ),
        ({"devices": ["cpu"]}, "expected a model on cards: on the CPU, a group would share nothing"),
        ({"sharing": "on"}, 'expected sharing = "off", got "on": the library ignores it in a group'),
        ({"sharing": "auto"}, 'expected sharing = "off", got "auto": the library ignores it in a group'),
        ({"load": "on_demand"}, 'expected load = "start", got "on_demand": the models of a group share a process'),
        ({"workers": 2}, "expected workers = 1, got 2: the group has one process on each device"),
        ({"spares": 1}, "expected spares = 0, got 1: the group has one process on each device"),
        ({"mindspore_lite": {"provider": "ge"}}, 'provider "ge" does not support groups'),
        ({"mindspore_lite": {"variable_weights": True}}, "MindSpore Lite rejects groups with variable_weights"),
        ({"batching": {"max_rows": 4}}, "expected batching.max_rows = 1, got 4: a model with several sizes shares *"),
        ({"batching": {"sizes": [1, 8]}}, "expected batching.max_rows = 1, got 8: a model with several sizes shares *"),
    ],
)
def test_rejects_models_that_cannot_be_members(keys: dict[str, Any], problem: str) -> None:
    reported, *_ = problems(tables(GROUP, one={}, two=keys))
    first, *rest = problem.split("*")
    assert reported.startswith(f"groups.g.models[1]: two: {first}")
    assert rest or reported == f"groups.g.models[1]: two: {first}"


def test_model_with_ranks_cannot_be_member() -> None:
    content = tables(GROUP)
    ranks = {"path": "/r{rank}.mindir", "ranks": {"devices": ["ascend:0", "ascend:1"]}, "selftest": "/c.npz"}
    content["models"]["two"] = ranks
    assert problems(content)[0] == "groups.g.models[1]: two: a model with ranks cannot be in a group"


@pytest.mark.parametrize(("key", "value"), [("devices", ["ascend:1"]), ("python", "/usr/bin/python3.9")])
def test_members_need_same_devices_and_interpreter(key: str, value: object) -> None:
    [reported] = problems(tables(GROUP, one={}, two={key: value}))
    assert reported.startswith(f"groups.g.models[1]: two: expected the {key} of one, ")


def test_model_errors_suppress_group_errors() -> None:
    assert [each.partition(":")[0] for each in problems(tables(GROUP, one={"worker": 1}, two={"sharing": "on"}))] == [
        "models.one.worker"
    ]


def test_members_that_share_weights_may_batch() -> None:
    same = {"path": "/srv/m.mindir", "batching": {"sizes": [1, 8]}}
    config = parse(tables({"g": {"models": MODELS, "share": "weights"}}, one=same, two=same), BASE)
    assert list(config.groups) == ["g"]
