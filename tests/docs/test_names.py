"""The check of identifiers for replaced terms."""

from __future__ import annotations

import ast

import pytest
from tests.names import hint, names


@pytest.mark.parametrize(
    "name",
    ["seat_seconds", "_SeatPool", "MAX_SEATS", "weightd.canary", "--canary-tolerance", "SEAT s", "Room", "_cuts"],
)
def test_rejects_replaced_terms_in_any_style(name: str) -> None:
    assert hint(name)


@pytest.mark.parametrize("name", ["slot", "mushroom", "seating", "memory_room_bytes", "tale", "SLOT s", ""])
def test_accepts_other_names(name: str) -> None:
    assert not hint(name)


@pytest.mark.parametrize(
    "source",
    [
        "seat = 1",
        "x.seat",
        "def seat(): ...",
        "async def seat(): ...",
        "class seat: ...",
        "def f(seat): ...",
        "f(seat=1)",
        "import x as seat",
        "from x import seat",
        "import x.seat",
        "{'seat': 1}",
        "add_argument('--seat')",
    ],
)
def test_reads_all_kinds_of_identifiers(source: str) -> None:
    assert "seat" in {name.lstrip("-") for _, name in names(ast.parse(source))}


def test_reads_column_headings_but_not_sentences() -> None:
    assert [name for _, name in names(ast.parse("('SEAT s', 'a seat for one')"))] == ["SEAT s"]
