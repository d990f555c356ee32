"""What a model takes and gives, as far as it is known, and who waits to be told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weightd.daemon.requests.request import Request
from weightd.daemon.requests.validation import check_gears, check_inputs, check_same
from weightd.protocol.errors import InvalidArgument, ResourceExhausted
from weightd.protocol.messages.children import Built
from weightd.protocol.messages.data import TensorSignature, TensorSpec

# A client, and the id of its question.
Waiter = tuple[bytes, str]


class Signature:
    """The signature that all generations of a model have in common.

    Attributes:
        built: what a holder has told of it; None while the first one loads.
    """

    def __init__(self) -> None:
        self.built: Built | None = None
        self._inputs: dict[str, TensorSignature] = {}
        self._fitting: Sequence[TensorSpec] | None = None
        self._waiters: list[Waiter] = []

    def learn(self, built: Built) -> None:
        """A holder has built the model."""
        self.built = built
        self._inputs = {each.name: each for each in built.inputs}
        self._fitting = None

    def differs(self, built: Built) -> str:
        """Return how what another holder has built differs so that a client would notice, or ""."""
        return check_same(self.built, built) if self.built is not None else ""

    def check(self, inputs: Sequence[TensorSpec]) -> None:
        """Check a request's inputs, if it is known what they have to be; else that is done once it is.

        Raises:
            InvalidArgument: they are not what the model takes.
        """
        # The decoder gives equal headers the same tuple: what fitted last time is not looked at again.
        if self.built is not None and inputs is not self._fitting:
            check_inputs(self._inputs, inputs)
            check_gears(self.built, inputs)
            self._fitting = inputs

    def refusals(self, requests: Sequence[Request]) -> dict[int, InvalidArgument]:
        """Return the errors of those requests that do not fit, by their numbers."""
        refusals: dict[int, InvalidArgument] = {}
        for request in requests:
            try:
                self.check(request.inputs)
            except InvalidArgument as error:
                refusals[request.number] = error
        return refusals

    def ask(self, waiter: Waiter, most: int) -> None:
        """Somebody wants to be told.

        Raises:
            ResourceExhausted: so many wait already.
        """
        if len(self._waiters) >= most:
            raise ResourceExhausted(f"{len(self._waiters)} requests wait for the metadata already")
        self._waiters.append(waiter)

    def adopt(self, old: Signature) -> None:
        """Take over who waits there."""
        self._waiters += old.take_waiters()

    def take_waiters(self, chosen: Callable[[Waiter], bool] = lambda _: True) -> list[Waiter]:
        """Return those who wait and are chosen, and forget them."""
        taken = [waiter for waiter in self._waiters if chosen(waiter)]
        self._waiters = [waiter for waiter in self._waiters if not chosen(waiter)]
        return taken
