from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightd.daemon.config import load
from weightd.daemon.config.groups import GroupConfig
from weightd.daemon.config.load import ConfigError, parse

BASE = Path("/etc/weightd")


@pytest.fixture
def _served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "NOT_SERVED", {})


def tables(groups: object, **models: Any) -> dict[str, Any]:
    card = {"devices": ["ascend:0"], "sharing": "off"}
    given = models or {"one": {}, "two": {}}
    return {
        "models": {name: {"path": f"/srv/{name}.mindir", **card, **keys} for name, keys in given.items()},
        "groups": groups,
    }


def problems(content: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(content, BASE)
    return list(caught.value.problems)


def test_groups_are_refused_until_they_are_served() -> None:
    assert problems(tables({"g": {"models": ["one", "two"]}})) == [
        "groups: weightd does not serve groups of models yet"
    ]


@pytest.mark.usefixtures("_served")
def test_a_group_of_two() -> None:
    config = parse(tables({"g": {"models": ["one", "two"], "share": "both"}}), BASE)
    assert config.groups == {"g": GroupConfig(("one", "two"), "both", ("ascend:0",))}


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
@pytest.mark.usefixtures("_served")
def test_a_table_that_is_wrong(groups: object, problem: str) -> None:
    [told] = problems(tables(groups))
    assert told.startswith(problem.rstrip("*"))
