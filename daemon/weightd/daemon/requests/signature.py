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
    with_declared_shapes,
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
        # The descriptions that were checked, by their identity. Each is kept, so that no other object takes its
        # identity, with the one that `check` returns for it.
        self._fitting: dict[int, tuple[RequestDescription, RequestDescription]] = {}
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

    def check(self, description: RequestDescription) -> RequestDescription:
        """Check a request against the signature; while no signature is known, `refusals` does so later.

        Returns:
            The request as the engine is to receive it: a scalar has the shape that the model declares.

        Raises:
            InvalidArgument: the model does not have such inputs or outputs.
        """
        # The decoder returns the same object for equal bytes, so most requests were checked before.
        known = self._fitting.get(id(description))
        if known is not None:
            return known[1]
        if self.built is None:
            return description
        check_inputs(self._inputs, description.inputs)
        declared = with_declared_shapes(self._inputs, description)
        check_rows(self.built, self._rows, declared.inputs)
        check_gears(self.built, self._rows, declared.inputs)
        if description.outputs is not None:
            check_outputs(self._outputs, description.outputs)
        if len(self._fitting) >= _MAX_FITTING:
            self._fitting.clear()
        self._fitting[id(description)] = description, declared
        return declared

    def refusals(self, requests: Sequence[Request]) -> dict[int, InvalidArgument]:
        """Check requests that came before the signature was known; return the errors of those refused, by number."""
        refusals: dict[int, InvalidArgument] = {}
        for request in requests:
            try:
                request.description = self.check(request.description)
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
        taken = [request for request in self._waiters if chosen(request)]
        self._waiters = [request for request in self._waiters if not chosen(request)]
        return taken


def example(built: Built) -> tuple[tuple[int, ...], ...] | None:
    """Return a shape for each input that the model runs on, where requests choose any; None if none is known."""
    is_open = any(each.shape is None or -1 in each.shape for each in built.inputs)
    known = built.canary_cases[0] if built.canary_cases else {}
    shapes = tuple(known[each.name] for each in built.inputs if each.name in known)
    is_known = len(shapes) == len(built.inputs) and sum(map(len, shapes)) <= _MOST_DIMS
    return shapes if is_open and is_known else None
