"""Many inputs through a model, a bounded number of them at a time, in order: for threads."""

from __future__ import annotations

import contextlib
from collections import abc, deque
from typing import TYPE_CHECKING, Any, Callable, Deque, Generator, Iterable, Tuple

from weightd.pending import Pending
from weightd_protocol.errors import InvalidArgument, WeightdError
from weightd_protocol.schema import describe_value

if TYPE_CHECKING:
    from weightd.inputs import Inputs

# More than that wait in the daemon's queue of a model by default, and their answers here.
MAX_IN_FLIGHT = 1024


def check_map_arguments(inputs: object, in_flight: Any, iterable_types: Tuple[type, ...]) -> None:
    """Raise what is wrong with the arguments of `map`, which goes through inputs of these kinds.

    Raises:
        InvalidArgument: something is.
    """
    if not (type(in_flight) is int and 1 <= in_flight <= MAX_IN_FLIGHT):
        raise InvalidArgument(
            f"in_flight: expected an integer from 1 to {MAX_IN_FLIGHT}, got {describe_value(in_flight)}"
        )
    kind = type(inputs)
    if issubclass(kind, (abc.Mapping, str)) or not issubclass(kind, iterable_types):
        raise InvalidArgument(f"inputs: expected one after another, as in [array, array], got {kind.__name__}")


def map_ordered(
    submit: Callable[[Inputs], Pending], inputs: Iterable[Inputs], in_flight: int
) -> Generator[Any, None, None]:
    """Begin a request for each of `inputs`, and give their answers in this order, as soon as they are there.

    However it ends, what is under way then is taken back.
    """
    pending_requests: Deque[Pending] = deque()
    try:
        for each in inputs:
            pending_requests.append(submit(each))
            while pending_requests and (len(pending_requests) == in_flight or pending_requests[0].done()):
                yield _pop_first_result(pending_requests)
        while pending_requests:
            yield _pop_first_result(pending_requests)
    finally:
        for pending in pending_requests:
            with contextlib.suppress(WeightdError):
                pending.cancel()


def _pop_first_result(pending_requests: Deque[Pending]) -> Any:
    """Wait for the answer of the first, which is under way no longer then; nothing but the caller keeps it."""
    answer = pending_requests[0].result()
    pending_requests.popleft()
    return answer
