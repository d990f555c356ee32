"""Many inputs through a model, a bounded number of them at a time, in order: for threads."""

from __future__ import annotations

import contextlib
from collections import abc, deque
from typing import TYPE_CHECKING, Any, Callable, Deque, Generator, Iterable, Tuple

from weightd.client.pending import Pending
from weightd.protocol.errors import InvalidArgument, WeightdError
from weightd.protocol.schema import got

if TYPE_CHECKING:
    from weightd.client.inputs import Inputs

# More than that wait in the daemon's queue of a model by default, and their answers here.
MAX_IN_FLIGHT = 1024


def check(inputs: object, in_flight: Any, kinds: Tuple[type, ...]) -> None:
    """Raise what is wrong with the arguments of `map`, which goes through inputs of these kinds.

    Raises:
        InvalidArgument: something is.
    """
    if not (type(in_flight) is int and 1 <= in_flight <= MAX_IN_FLIGHT):
        raise InvalidArgument(f"in_flight: expected an integer from 1 to {MAX_IN_FLIGHT}, got {got(in_flight)}")
    kind = type(inputs)
    if issubclass(kind, (abc.Mapping, str)) or not issubclass(kind, kinds):
        raise InvalidArgument(f"inputs: expected one after another, as in [array, array], got {kind.__name__}")


def answers(begin: Callable[[Inputs], Pending], inputs: Iterable[Inputs], in_flight: int) -> Generator[Any, None, None]:
    """Begin a request for each of `inputs`, and give their answers in this order, as soon as they are there.

    However it ends, what is under way then is taken back.
    """
    under_way: Deque[Pending] = deque()
    try:
        for each in inputs:
            under_way.append(begin(each))
            while under_way and (len(under_way) == in_flight or under_way[0].done()):
                yield _first(under_way)
        while under_way:
            yield _first(under_way)
    finally:
        for pending in under_way:
            with contextlib.suppress(WeightdError):
                pending.cancel()


def _first(under_way: Deque[Pending]) -> Any:
    """Wait for the answer of the first, which is under way no longer then; nothing but the caller keeps it."""
    answer = under_way[0].result()
    under_way.popleft()
    return answer
