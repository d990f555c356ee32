"""The text that all scrapes are answered with: made in small pieces between other work, and at most once a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from weightd.protocol.messages.metrics import MetricsResponse
from weightd.shared.exposition import iterate_text

# Whoever asks sooner is given the same text again: however many ask, it costs as much as one.
MAX_AGE_S = 1.0

# What is told is told in one piece, in a millisecond or less for some models and tenants, and in 0.1 s for all that
# there may be of both: so the same text is good for as many times as long.
_TIMES = 100

# Of the loop's time, at once.
_SLICE_S = 0.0005

# Between looks at the clock.
_PIECES = 32

Give = Callable[[bytes], object]


class Page:
    """Makes the text when somebody wants it.

    Args:
        tell: returns what is told in it.
        soon: has something called when all others have had their turn.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        tell: Callable[[], MetricsResponse],
        soon: Callable[[Callable[[], object]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._soon = soon
        self._clock = clock
        self._text = b""
        self._until = -float("inf")
        self._age = MAX_AGE_S
        self._waiting: list[Give] = []
        self._parts: list[str] = []
        self._left: Iterator[str] = iter(())

    def want(self, give: Give) -> None:
        """Have `give` called with the text, at once or soon."""
        now = self._clock()
        if now < self._until:
            give(self._text)
            return
        self._waiting.append(give)
        if len(self._waiting) == 1:
            self._parts, self._left = [], iterate_text(self._tell())
            self._age = max(MAX_AGE_S, _TIMES * (self._clock() - now))
            self._soon(self._go_on)

    def _go_on(self) -> None:
        end = self._clock() + _SLICE_S
        for number, piece in enumerate(self._left, 1):
            self._parts.append(piece)
            if number % _PIECES == 0 and self._clock() >= end:
                self._soon(self._go_on)
                return
        self._text, self._parts = "".join(self._parts).encode(), []
        self._until = self._clock() + self._age
        waiting, self._waiting = self._waiting, []
        for on_text in waiting:
            on_text(self._text)
