"""How much is under way at once, in all protocols together: nothing waits here, beyond it callers are told so."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from weightd.protocol.errors import ResourceExhausted

# A guess: by then some of what is under way has been answered.
_RETRY_S = 1.0


class Seats:
    """Requests that are received or answered.

    Args:
        most: of them.
        most_bytes: of all of them.

    Attributes:
        taken: how many there are.
        taken_bytes: how many bytes.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.taken = 0
        self.taken_bytes = 0

    @contextlib.contextmanager
    def one(self) -> Generator[Seat, None, None]:
        """Have a request under way within the block.

        Raises:
            ResourceExhausted: there are as many as there may be.
        """
        if self.taken >= self._most:
            raise ResourceExhausted(
                f"{self._most} requests are under way at this gateway (max_in_flight)", retry_after=_RETRY_S
            )
        self.taken += 1
        seat = Seat(self)
        try:
            yield seat
        finally:
            self.taken -= 1
            seat.leave()

    def keep(self, nbytes: int) -> Seat:
        """Return a seat of an answer with so many bytes, which outlasts that of its request: until `Seat.leave`.

        Raises:
            ResourceExhausted: there is no room for them.
        """
        seat = Seat(self)
        seat.take(nbytes)
        return seat

    def take(self, seat: Seat, nbytes: int) -> None:
        """Have so many more bytes of a request; see `Seat.take`."""
        if self.taken_bytes + nbytes > self._most_bytes:
            raise ResourceExhausted(
                f"{self._most_bytes} bytes of requests are under way at this gateway (max_memory_bytes)",
                retry_after=_RETRY_S,
            )
        self.taken_bytes += nbytes
        seat.nbytes += nbytes


class Seat:
    """A request that is under way.

    Attributes:
        nbytes: what is kept of it.
    """

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self.nbytes = 0

    def take(self, nbytes: int) -> None:
        """Keep so many more bytes of the request, until its end.

        Raises:
            ResourceExhausted: there is no room for them.
        """
        self._seats.take(self, nbytes)

    def leave(self) -> None:
        """Nothing is kept of it any more."""
        self._seats.taken_bytes -= self.nbytes
        self.nbytes = 0
