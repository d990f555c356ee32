"""How much is under way at once, in all protocols together: nothing waits here, beyond it callers are told so."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from weightd.gateway.callers import Caller
from weightd.gateway.codes import TooLarge
from weightd.gateway.shares import Shares
from weightd.protocol.errors import ResourceExhausted

# A guess: by then some of what is under way has been answered.
_RETRY_S = 1.0


class Seats:
    """Requests that are received or answered.

    Args:
        most: of them; how many each caller may have of that is for `Shares` to say, as of the bytes.
        most_bytes: of all of them.

    Attributes:
        most: as above.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most = most
        self._most_bytes = most_bytes
        self._shares = Shares(most)
        self._bytes = Shares(most_bytes)

    @property
    def taken(self) -> int:
        """How many there are."""
        return self._shares.taken

    @property
    def taken_bytes(self) -> int:
        """How many bytes are kept of all of them."""
        return self._bytes.taken

    @contextlib.contextmanager
    def one(self, caller: Caller | None) -> Generator[Seat, None, None]:
        """Have a request under way within the block; None: of whoever asks.

        Raises:
            ResourceExhausted: there are as many as there may be.
        """
        if not self._shares.take(caller):
            raise _exhausted(f"its share of {self.most} requests", "max_in_flight")
        seat = Seat(self._bytes, self._most_bytes, caller)
        try:
            yield seat
        finally:
            self._shares.give(caller)
            seat.leave()

    def keep(self, caller: Caller | None, nbytes: int) -> Seat:
        """Return a seat of an answer with so many bytes, which outlasts that of its request: until `Seat.leave`.

        Raises:
            TooLarge: there will never be room for them.
            ResourceExhausted: there is none now.
        """
        seat = Seat(self._bytes, self._most_bytes, caller)
        seat.take(nbytes)
        return seat


class Seat:
    """A request that is under way.

    Args:
        shares: of bytes.
        most: bytes.
        caller: whose request it is.
    """

    def __init__(self, shares: Shares, most: int, caller: Caller | None) -> None:
        self._shares = shares
        self._most = most
        self._caller = caller
        self._nbytes = 0

    def take(self, nbytes: int) -> None:
        """Keep so many more bytes of the request, until its end.

        Raises:
            TooLarge: there will never be room for so many.
            ResourceExhausted: there is none now.
        """
        if self._nbytes + nbytes > self._most:
            raise TooLarge(f"expected at most {self._most} bytes of a request or an answer (max_memory_bytes)")
        if not self._shares.take(self._caller, nbytes, self._nbytes):
            raise _exhausted(f"its share of {self._most} bytes of requests", "max_memory_bytes")
        self._nbytes += nbytes

    def leave(self) -> None:
        """Nothing is kept of it any more."""
        self._shares.give(self._caller, self._nbytes)
        self._nbytes = 0


def _exhausted(what: str, key: str) -> ResourceExhausted:
    return ResourceExhausted(f"the caller has {what} under way at this gateway ({key})", retry_after=_RETRY_S)
