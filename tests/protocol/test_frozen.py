"""Classes of messages are what the standard library would have made of them."""

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
class Ours:
    """A pair, and more."""

    first: int
    second: str = field(metadata={"some": "thing"})
    third: Optional[float] = None
    fourth: Tuple[int, ...] = field(default=(1, 2))


@dataclasses.dataclass(frozen=True)
class Theirs:
    """A pair, and more."""

    first: int
    second: str = field(metadata={"some": "thing"})
    third: Optional[float] = None
    fourth: Tuple[int, ...] = field(default=(1, 2))


@dataclass(frozen=True)
class Nothing:
    """Nothing."""


PREFIX = "weightd_protocol.messages."

ARGUMENTS = st.tuples(st.integers(0, 1), st.text(max_size=1), st.floats(), st.just((3,)))


@given(ARGUMENTS, ARGUMENTS, st.integers(2, 4))
def test_they_compare_hash_and_show_themselves_likewise(one: Any, other: Any, count: int) -> None:
    ours, theirs = [Ours(*each[:count]) for each in (one, other)], [Theirs(*each[:count]) for each in (one, other)]
    assert (ours[0] == ours[1]) is (theirs[0] == theirs[1])
    assert [*map(hash, ours)] == [*map(hash, theirs)]
    assert repr(ours) == repr(theirs).replace("Theirs", "Ours")
    assert ours[0] != object()


def test_they_are_made_from_the_same_arguments() -> None:
    assert inspect.signature(Ours) == inspect.signature(Theirs)
    assert Ours(second="2", first=1) == Ours(1, "2", None, (1, 2))
    assert Nothing() == Nothing()
    with pytest.raises(TypeError, match="second"):
        Ours(1)  # type: ignore[call-arg]


def test_they_have_the_same_fields() -> None:
    told = [
        [(each.name, each.type, each.default, each.metadata) for each in dataclasses.fields(c)] for c in (Ours, Theirs)
    ]
    assert told[0] == told[1]


def test_they_do_not_change() -> None:
    event = Event(1, 2.0, "info", "text")
    with pytest.raises(dataclasses.FrozenInstanceError, match="number"):
        event.number = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="number"):
        del event.number
    assert dataclasses.replace(event, number=2) == Event(2, 2.0, "info", "text")


def test_messages_ask_for_no_more_than_they_are() -> None:
    modules = [importlib.import_module(each.name) for each in pkgutil.iter_modules(messages.__path__, PREFIX)]
    made: list[Any] = [
        each for module in modules for each in vars(module).values() if isinstance(each, type) and is_made(each)
    ]
    assert Event in made
    for each in made:
        assert not hasattr(each, "__post_init__")
        for told in dataclasses.fields(each):
            assert told.default_factory is dataclasses.MISSING
            assert told.init
            assert told.repr
            assert told.compare


def is_made(each: type) -> bool:
    return getattr(each, "__repr__", None) is Event.__repr__


def test_they_can_be_copied_and_sent() -> None:
    event = Event(1, 2.0, "info", "text")
    assert copy.deepcopy(event) == pickle.loads(pickle.dumps(event)) == event
