"""Tests that message classes behave like frozen dataclasses of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
from dataclasses import field
from typing import Any, Optional, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_protocol import messages
from weightd_protocol.frozen import dataclass
from weightd_protocol.messages.events import Event


@dataclass(frozen=True)
class FastPair:
    """Docstring of the pair."""

    first: int
    second: str = field(metadata={"some": "thing"})
    third: Optional[float] = None
    fourth: Tuple[int, ...] = field(default=(1, 2))


@dataclasses.dataclass(frozen=True)
class DataclassPair:
    """Docstring of the pair."""

    first: int
    second: str = field(metadata={"some": "thing"})
    third: Optional[float] = None
    fourth: Tuple[int, ...] = field(default=(1, 2))


@dataclass(frozen=True)
class NoFields:
    pass


PREFIX = "weightd_protocol.messages."

ARGUMENTS = st.tuples(st.integers(0, 1), st.text(max_size=1), st.floats(), st.just((3,)))


@given(ARGUMENTS, ARGUMENTS, st.integers(2, 4))
def test_eq_hash_and_repr_are_equal(one: Any, other: Any, count: int) -> None:
    ours, theirs = (
        [FastPair(*each[:count]) for each in (one, other)],
        [DataclassPair(*each[:count]) for each in (one, other)],
    )
    assert (ours[0] == ours[1]) is (theirs[0] == theirs[1])
    assert [*map(hash, ours)] == [*map(hash, theirs)]
    assert repr(ours) == repr(theirs).replace("DataclassPair", "FastPair")
    assert ours[0] != object()


def test_constructors_are_equal() -> None:
    assert inspect.signature(FastPair) == inspect.signature(DataclassPair)
    assert FastPair(second="2", first=1) == FastPair(1, "2", None, (1, 2))
    assert NoFields() == NoFields()
    with pytest.raises(TypeError, match="second"):
        FastPair(1)  # type: ignore[call-arg]


def test_fields_are_equal() -> None:
    fields = [
        [(each.name, each.type, each.default, each.metadata) for each in dataclasses.fields(c)]
        for c in (FastPair, DataclassPair)
    ]
    assert fields[0] == fields[1]


def test_instances_are_immutable() -> None:
    event = Event(1, 2.0, "info", "text")
    with pytest.raises(dataclasses.FrozenInstanceError, match="number"):
        event.number = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="number"):
        del event.number
    assert dataclasses.replace(event, number=2) == Event(2, 2.0, "info", "text")


def test_messages_use_only_supported_features() -> None:
    modules = [importlib.import_module(each.name) for each in pkgutil.iter_modules(messages.__path__, PREFIX)]
    made: list[Any] = [
        each for module in modules for each in vars(module).values() if isinstance(each, type) and is_made(each)
    ]
    assert Event in made
    for each in made:
        assert not hasattr(each, "__post_init__")
        for member in dataclasses.fields(each):
            assert member.default_factory is dataclasses.MISSING
            assert member.init
            assert member.repr
            assert member.compare


def is_made(each: type) -> bool:
    return getattr(each, "__repr__", None) is Event.__repr__


def test_instances_are_copyable() -> None:
    event = Event(1, 2.0, "info", "text")
    assert copy.deepcopy(event) == pickle.loads(pickle.dumps(event)) == event
