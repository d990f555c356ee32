"""The kinds of values by themselves; `test_messages` holds every field of every message to its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

import pytest

from weightd.protocol.schema import (
    FieldError,
    Metadata,
    boolean,
    decode,
    describe,
    integer,
    label,
    many,
    mapping,
    nullable,
    number,
    one_of,
    plain,
    record,
    shown,
    text,
)


@dataclass(frozen=True)
class Leaf:
    size: int = field(metadata=integer(0, 9))
    note: str = field(default="none", metadata=text(9, empty=True))
    extra: Optional[int] = field(default=None, metadata=integer(0, 9))


@dataclass(frozen=True)
class Tree:
    leaves: Tuple[Leaf, ...] = field(metadata=many(record(Leaf), 3))
    best: Leaf = field(metadata=record(Leaf))


def check(kind: Metadata, value: object) -> Any:
    return kind["kind"].check(value)


def problem(kind: Metadata, value: object) -> str:
    with pytest.raises(FieldError) as caught:
        check(kind, value)
    return str(caught.value)


def test_values_become_typed() -> None:
    raw = {"leaves": [{"size": 1}, {"size": 2, "note": "", "extra": 3}], "best": {"extra": 0, "size": 9}}
    tree = decode(Tree, raw)
    assert tree == Tree((Leaf(1), Leaf(2, "", 3)), Leaf(9, extra=0))
    assert hash(tree) == hash(decode(Tree, raw))
    assert repr(tree.leaves[0]) == "Leaf(size=1, note='none', extra=None)"


def test_nil_is_a_value_where_it_says_something() -> None:
    kind = nullable(many(integer(0, 9), 2))
    for raw, typed in ((None, None), ([], ()), ([1, 2], (1, 2))):
        assert check(kind, raw) == typed
        assert kind["kind"].plain(typed) == raw
    assert problem(kind, [10]) == "[0]: expected integer, 0 to 9, got int 10"

    @dataclass(frozen=True)
    class Holder:
        shape: Optional[Tuple[int, ...]] = field(metadata=kind)

    assert plain(Holder(None)) == {"shape": None}
    with pytest.raises(FieldError, match=r"^shape: missing$"):
        decode(Holder, {})


def test_the_way_back_leaves_out_what_is_none() -> None:
    assert plain(Tree((), Leaf(1))) == {"leaves": [], "best": {"size": 1, "note": "none"}}


def test_the_input_is_neither_changed_nor_shared() -> None:
    raw: Dict[str, Any] = {"leaves": [{"size": 1}], "best": {"size": 9}}
    tree = decode(Tree, raw)
    raw["leaves"].append({"size": 2})
    raw["best"]["size"] = 3
    assert tree == Tree((Leaf(1),), Leaf(9))
    names = {"a": 1}
    checked = check(mapping(integer(0, 9), 2), names)
    names["b"] = 2
    assert checked == {"a": 1}


BROKEN: List[Tuple[Any, str]] = [
    ({}, "leaves: missing"),
    ({"leaves": []}, "best: missing"),
    ({"leaves": [], "best": {}}, "best.size: missing"),
    (
        {"leaves": [{"size": 1}, {"size": True}], "best": {}},
        "leaves[1].size: expected integer, 0 to 9, got bool True",
    ),
    ({"leaves": [{"size": 1}, []], "best": {}}, "leaves[1]: expected map, got list of 0 items"),
    (
        {"leaves": [{"size": 1, "extra": None}], "best": {}},
        "leaves[0].extra: expected integer, 0 to 9, got NoneType None",
    ),
    ({"leaves": [{}] * 4}, "leaves: expected at most 3 items, got 4"),
    ({"leaves": {}}, "leaves: expected list, got dict of 0 items"),
    ({"sizes": 1}, "sizes: unknown field; expected one of leaves, best"),
    ({1: 1}, "1: unknown field; expected one of leaves, best"),
    ([], "expected map, got list of 0 items"),
    (None, "expected map, got NoneType None"),
]


@pytest.mark.parametrize(("raw", "expected"), BROKEN)
def test_an_error_names_the_path(raw: object, expected: str) -> None:
    with pytest.raises(FieldError) as caught:
        decode(Tree, raw)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Tree((Leaf(1), Leaf(10)), Leaf(1)), "leaves[1].size: expected integer, 0 to 9, got int 10"),
        (Tree([Leaf(1)], Leaf(1)), "leaves: expected tuple, got list of 1 items"),  # type: ignore[arg-type]
        (Tree((), {"size": 1}), "best: expected Leaf, got dict of 1 items"),  # type: ignore[arg-type]
        (Tree((), None), "best: expected Leaf, got NoneType None"),  # type: ignore[arg-type]
        (Tree((), Leaf(1, None)), "best.note: expected text, 0 to 9 bytes, got NoneType None"),  # type: ignore[arg-type]
    ],
)
def test_the_way_back_is_as_strict(message: object, expected: str) -> None:
    with pytest.raises(FieldError) as caught:
        plain(message)
    assert str(caught.value) == expected


def test_a_subclass_is_another_type() -> None:
    class Text(str):
        __slots__ = ()

    class Number(int):
        pass

    assert problem(text(9), Text("a")).startswith("expected text")
    assert problem(one_of(["a"]), Text("a")).startswith("expected one of a")
    assert problem(integer(0, 9), Number(1)).startswith("expected integer")
    assert problem(number(), Number(1)).startswith("expected number")


# --- text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["a", "a" * 8, "é" * 4, "€€aa", "\U0001f600" * 2, "\x00", "\n"])
def test_text_is_measured_in_bytes(value: str) -> None:
    assert check(text(8), value) == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a" * 9, "expected text, 1 to 8 bytes, got 9"),
        ("é" * 4 + "a", "expected text, 1 to 8 bytes, got 9"),
        ("\U0001f600" * 2 + "a", "expected text, 1 to 8 bytes, got 9"),
        ("", "expected text, 1 to 8 bytes, got 0"),
        ("a\ud800", "expected text that UTF-8 can encode, got 'a\\ud800'"),
        (b"a", "expected text, 1 to 8 bytes, got bytes b'a'"),
        (1, "expected text, 1 to 8 bytes, got int 1"),
        (None, "expected text, 1 to 8 bytes, got NoneType None"),
    ],
)
def test_text_beyond_its_bounds(value: object, expected: str) -> None:
    assert problem(text(8), value) == expected


def test_text_may_be_empty_where_it_says_so() -> None:
    assert check(text(8, empty=True), "") == ""
    assert problem(text(8, empty=True), "a" * 9) == "expected text, 0 to 8 bytes, got 9"


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 0.0, 1, 1.5, 5e-324, 1.7976931348623157e308, 2**64, 10**308])
def test_a_number_becomes_a_float(value: float) -> None:
    checked = check(number(), value)
    assert type(checked) is float
    assert checked == float(value)


@pytest.mark.parametrize(
    "value", [-1, -5e-324, float("nan"), float("inf"), float("-inf"), 10**309, 10**400, True, False, "1", None, [], 1j]
)
def test_no_number(value: object) -> None:
    assert problem(number(), value).startswith("expected number of at least 0, got ")


@pytest.mark.parametrize("value", [-1, 0, 9])
def test_an_integer_includes_its_bounds(value: int) -> None:
    assert check(integer(-1, 9), value) == value


@pytest.mark.parametrize("value", [-2, 10, 1.0, True, False, "1", None, 10**400])
def test_no_integer(value: object) -> None:
    assert problem(integer(-1, 9), value).startswith("expected integer, -1 to 9, got ")


@pytest.mark.parametrize("value", [0, 1, None, "true", 1.0])
def test_no_boolean(value: object) -> None:
    assert problem(boolean(), value).startswith("expected boolean, got ")


# --- lists and maps ----------------------------------------------------------------------------------------------


def test_a_map_holds_its_names_and_values_to_their_bounds() -> None:
    kind = mapping(number(), 2)
    checked = check(kind, {"a": 1, "b": 2.0})
    assert checked == {"a": 1.0, "b": 2.0}
    assert type(checked["a"]) is float
    assert problem(kind, {"a": "x"}) == "a: expected number of at least 0, got str 'x'"
    assert problem(kind, {"a": 1, "b": 2, "c": 3}) == "expected at most 2 items, got 3"
    assert problem(kind, {1: 1}) == "1: expected text, 1 to 256 bytes, got int 1"
    assert problem(kind, {"": 1}) == "'': expected text, 1 to 256 bytes, got 0"
    assert problem(kind, {"x" * 257: 1}).endswith("expected text, 1 to 256 bytes, got 257")
    assert problem(kind, []) == "expected map, got list of 0 items"


def test_lists_nest() -> None:
    kind = many(many(integer(0, 9), 2), 2)
    assert check(kind, [[1, 2], []]) == ((1, 2), ())
    assert problem(kind, [[1], [2, 10]]) == "[1][1]: expected integer, 0 to 9, got int 10"


# --- words -------------------------------------------------------------------------------------------------------


def test_no_value_is_shown_at_length() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, {"a": deep}, (deep,), "x" * 10**6, b"x" * 10**6, 10**30, 1.5, None, True, "a\nb"):
        assert len(shown(value)) <= 40
        assert "\n" not in shown(value)
    while deep:
        deep = deep.pop()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.b-c", "a.b-c"),
        ("é", "é"),
        ("", "''"),
        ("a\tb", r"'a\tb'"),
        ("x" * 40, "x" * 40),
        (b"a", "b'a'"),
        (None, "None"),
    ],
)
def test_a_name_is_quoted_where_it_must_be(name: object, expected: str) -> None:
    assert label(name) == expected
    assert len(label("x" * 41)) == 40


def test_fields_are_described_for_the_documentation() -> None:
    assert describe(Leaf) == [
        ("size", "integer, 0 to 9", "required"),
        ("note", "text, 0 to 9 bytes", "none"),
        ("extra", "integer, 0 to 9", None),
    ]
    assert describe(Tree) == [("leaves", "list of at most 3: Leaf", "required"), ("best", "Leaf", "required")]
