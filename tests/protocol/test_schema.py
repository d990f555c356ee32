"""Tests of the kinds of values; `test_messages` tests the limits of every field of every message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

import pytest

from weightd_protocol.schema import (
    FieldError,
    Metadata,
    boolean,
    decode,
    describe_fields,
    integer,
    label,
    list_of,
    mapping,
    nullable,
    number,
    omit_default,
    one_of,
    plain,
    record,
    short_repr,
    text,
)


@dataclass(frozen=True)
class Leaf:
    size: int = field(metadata=integer(0, 9))
    note: str = field(default="none", metadata=text(9, empty=True))
    extra: Optional[int] = field(default=None, metadata=integer(0, 9))


@dataclass(frozen=True)
class Tree:
    leaves: Tuple[Leaf, ...] = field(metadata=list_of(record(Leaf), 3))
    best: Optional[Leaf] = field(metadata=nullable(record(Leaf)))


@dataclass(frozen=True)
class Sparse:
    step: int = field(default=0, metadata=omit_default(integer(0, 9)))


class Text(str):
    __slots__ = ()


class Number(int):
    pass


def problem(kind: Metadata, value: object) -> str:
    with pytest.raises(FieldError) as caught:
        kind["field_type"].check(value)
    return str(caught.value)


def test_decoded_values_are_typed_and_not_shared() -> None:
    raw: Dict[str, Any] = {
        "leaves": [{"size": 1}, {"size": 2, "note": "", "extra": 3}],
        "best": {"extra": 0, "size": 9},
    }
    tree = decode(Tree, raw)
    raw["leaves"].append({"size": 2})
    raw["best"]["size"] = 3
    assert tree == Tree((Leaf(1), Leaf(2, "", 3)), Leaf(9, extra=0))
    assert hash(tree) == hash(Tree((Leaf(1), Leaf(2, "", 3)), Leaf(9, extra=0)))
    assert repr(tree.leaves[0]) == "Leaf(size=1, note='none', extra=None)"


def test_encodes_none_only_where_it_has_a_meaning() -> None:
    small: Dict[str, Any] = {"leaves": [], "best": {"size": 1, "note": "none"}}
    for tree, raw in ((Tree((), Leaf(1)), small), (Tree((), None), {**small, "best": None})):
        assert plain(tree) == raw
        assert decode(Tree, raw) == tree


def test_checks_values_before_omitting_defaults() -> None:
    assert (plain(Sparse()), plain(Sparse(2)), decode(Sparse, {"step": 0})) == ({}, {"step": 2}, Sparse())
    for wrong in (False, 10):
        with pytest.raises(FieldError, match="step: expected integer, 0 to 9"):
            plain(Sparse(wrong))


BROKEN: List[Tuple[Any, str]] = [
    ({}, "leaves: missing"),
    ({"leaves": []}, "best: missing"),
    ({"leaves": [], "best": {}}, "best.size: missing"),
    ({"leaves": [{"size": 1}, {"size": True}]}, "leaves[1].size: expected integer, 0 to 9, got bool True"),
    ({"leaves": [{"size": 1}, []], "best": {}}, "leaves[1]: expected map, got list of 0 items"),
    ({"leaves": [{"size": 1, "extra": None}]}, "leaves[0].extra: expected integer, 0 to 9, got NoneType None"),
    ({"leaves": [{}] * 4}, "leaves: expected at most 3 items, got 4"),
    ({"leaves": {}}, "leaves: expected list, got dict of 0 items"),
    ({"sizes": 1}, "sizes: unknown field; expected one of leaves, best"),
    ({"a\nb": 1}, r"'a\nb': unknown field; expected one of leaves, best"),
    ({1: 1}, "1: unknown field; expected one of leaves, best"),
    ([], "expected map, got list of 0 items"),
    (None, "expected map, got NoneType None"),
]


@pytest.mark.parametrize(("raw", "expected"), BROKEN)
def test_error_names_path(raw: object, expected: str) -> None:
    with pytest.raises(FieldError) as caught:
        decode(Tree, raw)
    assert str(caught.value) == expected


UNFIT: Any = [
    (Tree((Leaf(1), Leaf(10)), Leaf(1)), "leaves[1].size: expected integer, 0 to 9, got int 10"),
    (Tree([Leaf(1)], Leaf(1)), "leaves: expected tuple, got list of 1 items"),  # type: ignore[arg-type]
    (Tree((), {"size": 1}), "best: expected Leaf, got dict of 1 items"),  # type: ignore[arg-type]
    (Tree((), Leaf(1, None)), "best.note: expected text, 0 to 9 bytes, got NoneType None"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("message", "expected"), UNFIT)
def test_encoding_is_equally_strict(message: object, expected: str) -> None:
    with pytest.raises(FieldError) as caught:
        plain(message)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((text(8), value) for value in ("a", "a" * 8, "é" * 4, "€€aa", "\U0001f600" * 2, "\x00", "\n")),
        (text(8, empty=True), ""),
        *((integer(-1, 9), value) for value in (-1, 0, 9)),
        *((number(), value) for value in (0, 0.0, 1, 1.5, 5e-324, 1.7976931348623157e308, 2**64, 10**22)),
        *((number(9, positive=True), value) for value in (5e-324, 9)),
    ],
)
def test_accepts_value_within_limits(kind: Metadata, value: Any) -> None:
    checked = kind["field_type"].check(value)
    assert checked == value
    assert type(checked) is (float if kind["field_type"].description.startswith("number") else type(value))


@pytest.mark.parametrize(
    ("kind", "value", "got"),
    [
        (text(8), "a" * 9, "text, 1 to 8 bytes, got 9"),
        (text(8), "é" * 4 + "a", "text, 1 to 8 bytes, got 9"),
        (text(8), "", "text, 1 to 8 bytes, got 0"),
        (text(8), "a\ud800", "text that UTF-8 can encode, got 'a\\ud800'"),
        (text(8), b"a", "text, 1 to 8 bytes, got bytes b'a'"),
        (text(8, empty=True), "a" * 9, "text, 0 to 8 bytes, got 9"),
        (text(9), Text("a"), "text, 1 to 9 bytes, got Text 'a'"),
        (one_of(["a"]), Text("a"), "one of a, got Text 'a'"),
        (integer(0, 9), Number(1), "integer, 0 to 9, got Number 1"),
        (number(), Number(1), "number of at least 0, got Number 1"),
        (number(), 1j, "number of at least 0, got complex 1j"),
        (number(), 10**400, "number of at least 0, got int of 1329 bits"),
        *((number(), value, "number of at least 0, got ") for value in (-1, -5e-324, float("nan"), float("inf"), True)),
        *((number(9, positive=True), value, "number of more than 0 and at most 9, got") for value in (0, 0.0, 9.1)),
        *((integer(-1, 9), value, "integer, -1 to 9, got ") for value in (-2, 10, 1.0, True, "1", None, 10**400)),
        *((boolean(), value, "boolean, got ") for value in (0, 1, None, "true", 1.0)),
    ],
)
def test_rejects_value_beyond_limits(kind: Metadata, value: object, got: str) -> None:
    assert problem(kind, value).startswith(f"expected {got}")


def test_checks_names_and_values_of_maps() -> None:
    kind = mapping(number(), 2)
    given = {"a": 1, "b": 2.0}
    checked = kind["field_type"].check(given)
    given["c"] = 3
    assert checked == {"a": 1.0, "b": 2.0}
    assert type(checked["a"]) is float
    assert problem(kind, {"a": "x"}) == "a: expected number of at least 0, got str 'x'"
    assert problem(kind, given) == "expected at most 2 items, got 3"
    assert problem(kind, {1: 1}) == "1: expected text, 1 to 256 bytes, got int 1"
    assert problem(kind, {"": 1}) == "'': expected text, 1 to 256 bytes, got 0"
    assert problem(kind, {"x" * 257: 1}).endswith("expected text, 1 to 256 bytes, got 257")
    assert problem(kind, []) == "expected map, got list of 0 items"


def test_lists_nest() -> None:
    kind = list_of(list_of(integer(0, 9), 2), 2)
    assert kind["field_type"].check([[1, 2], []]) == ((1, 2), ())
    assert problem(kind, [[1], [2, 10]]) == "[1][1]: expected integer, 0 to 9, got int 10"


# --- error texts -------------------------------------------------------------------------------------------------


def test_truncates_values_in_errors() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, {"a": deep}, (deep,), "x" * 10**6, b"x" * 10**6, 10**30, 1.5, None, True, "a\nb"):
        assert len(short_repr(value)) <= 40
        assert "\n" not in short_repr(value)
    while deep:
        deep = deep.pop()


LABELS: Dict[Any, str] = {"a.b-c": "a.b-c", "é": "é", "": "''", "a\tb": r"'a\tb'", b"a": "b'a'", None: "None"}


@pytest.mark.parametrize(("name", "expected"), [*LABELS.items(), ("x" * 40, "x" * 40), ("x" * 41, f"'{'x' * 36}...")])
def test_quotes_names(name: object, expected: str) -> None:
    assert label(name) == expected


def test_fields_are_described_for_the_documentation() -> None:
    assert describe_fields(Leaf) == [
        ("size", "integer, 0 to 9", "required"),
        ("note", "text, 0 to 9 bytes", "none"),
        ("extra", "integer, 0 to 9", None),
    ]
    assert describe_fields(Tree) == [
        ("leaves", "list of at most 3: Leaf", "required"),
        ("best", "nil, or Leaf", "required"),
    ]
