"""What a model takes and gives, as far as it is known, and who waits to be told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weightd.daemon.requests.request import Request
from weightd.daemon.requests.validation import (
    RowBounds,
    check_gears,
    check_inputs,
    check_outputs,
    check_rows,
    check_same,
)
from weightd.protocol.errors import InvalidArgument
from weightd.protocol.messages.children import Built
from weightd.protocol.messages.data import RequestDescription, TensorSignature

# As many as the decoder knows by their bytes.
_MAX_FITTING = 1024

ANY_ROWS = RowBounds()

# Dimensions of all inputs together: beside names as long as they may be, no more have room in a header.
_MOST_DIMS = 256


class Waiter(NamedTuple):
    """Who wants to be told.

    Attributes:
        client: who asks.
        request_id: the id of its question.
        user: on whose account it goes.
    """

    client: bytes
    request_id: str
    user: str = ""


class Signature:
    """The signature that all generations of a model have in common.

    Args:
        rows: how many a request may have.

    Attributes:
        built: what a holder has told of it; None while the first one loads.
    """

    def __init__(self, rows: RowBounds = ANY_ROWS) -> None:
        self._rows = rows
        self.built: Built | None = None
        self._inputs: dict[str, TensorSignature] = {}
        self._outputs: Sequence[str] = ()
        # By their identity, with themselves so that it stays theirs: those that have been checked.
        self._fitting: dict[int, RequestDescription] = {}
        self._waiters: list[Waiter] = []

    def bound(self, rows: RowBounds) -> None:
        """So many rows a request may have from now on."""
        self._rows = rows
        self._fitting.clear()

    def learn(self, built: Built) -> None:
        """A holder has built the model."""
        self.built = built
        self._inputs = {each.name: each for each in built.inputs}
        self._outputs = [each.name for each in built.outputs]
        self._fitting.clear()

    def differs(self, built: Built) -> str:
        """Return how what another holder has built differs so that a client would notice, or ""."""
        return check_same(self.built, built) if self.built is not None else ""

    def check(self, description: RequestDescription) -> None:
        """Check what is asked for, if it is known what that has to be; else it is done once it is.

        Raises:
            InvalidArgument: it is not what the model takes or gives.
        """
        # The decoder gives equal bytes the same object: one that fits is not looked at again.
        if id(description) in self._fitting or self.built is None:
            return
        check_inputs(self._inputs, description.inputs)
        check_rows(self.built, self._rows, description.inputs)
        check_gears(self.built, self._rows, description.inputs)
        if description.outputs is not None:
            check_outputs(self._outputs, description.outputs)
        if len(self._fitting) >= _MAX_FITTING:
            self._fitting.clear()
        self._fitting[id(description)] = description

    def refusals(self, requests: Sequence[Request]) -> dict[int, InvalidArgument]:
        """Return the errors of those requests that do not fit, by their numbers."""
        refusals: dict[int, InvalidArgument] = {}
        for request in requests:
            try:
                self.check(request.description)
            except InvalidArgument as error:
                refusals[request.number] = error
        return refusals

    def ask(self, waiter: Waiter, most: int) -> Waiter | None:
        """Somebody wants to be told; return who is not any more, where too many wait: the last one of who asks most."""
        self._waiters.append(waiter)
        if len(self._waiters) <= most:
            return None
        counts = Counter(each.user for each in self._waiters)
        last = max(reversed(self._waiters), key=lambda each: counts[each.user])
        self._waiters.remove(last)
        return last

    def adopt(self, old: Signature) -> None:
        """Take over who waits there."""
        self._waiters += old.take_waiters()

    def take_waiters(self, chosen: Callable[[Waiter], bool] = lambda _: True) -> list[Waiter]:
        """Return those who wait and are chosen, and forget them."""
        if not self._waiters:
            return []
        taken = [waiter for waiter in self._waiters if chosen(waiter)]
        self._waiters = [waiter for waiter in self._waiters if not chosen(waiter)]
        return taken


def example(built: Built) -> tuple[tuple[int, ...], ...] | None:
    """Return a shape for each input that the model runs on, where requests choose any; None if none is known."""
    is_open = any(each.shape is None or -1 in each.shape for each in built.inputs)
    known = built.canary_cases[0] if built.canary_cases else {}
    shapes = tuple(known[each.name] for each in built.inputs if each.name in known)
    is_known = len(shapes) == len(built.inputs) and sum(map(len, shapes)) <= _MOST_DIMS
    return shapes if is_open and is_known else None
