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

    Attributes:
        taken: how many there are.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    @contextlib.contextmanager
    def one(self) -> Generator[None, None, None]:
        """Have a request under way within the block.

        Raises:
            ResourceExhausted: there are as many as there may be.
        """
        if self.taken >= self._most:
            raise ResourceExhausted(
                f"{self._most} requests are under way at this gateway (max_in_flight)", retry_after=_RETRY_S
            )
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1
