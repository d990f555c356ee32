"""The text that all scrapes are answered with: made in small pieces between other work, and at most once a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from weightd_common.exposition import iterate_text
from weightd_protocol.messages.metrics import MetricsResponse

# Whoever asks sooner is given the same text again: however many ask, it costs as much as one.
MAX_AGE_S = 1.0

# What is told is told in one piece, in a millisecond or less for some models and tenants, and in 0.1 s for all that
# there may be of both: so the same text is good for as many times as long.
_AGE_FACTOR = 100

# Of the loop's time, at once.
_SLICE_S = 0.0005

# Between looks at the clock.
_SECTIONS_PER_CLOCK_CHECK = 32

OnText = Callable[[bytes], object]


class MetricsPage:
    """Makes the text when somebody wants it.

    Args:
        collect_metrics: returns what is told in it.
        call_soon: has something called when all others have had their turn.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        collect_metrics: Callable[[], MetricsResponse],
        call_soon: Callable[[Callable[[], object]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collect_metrics = collect_metrics
        self._call_soon = call_soon
        self._clock = clock
        self._text = b""
        self._expires_at = -float("inf")
        self._max_age_s = MAX_AGE_S
        self._callbacks: list[OnText] = []
        self._sections: list[str] = []
        self._remaining_sections: Iterator[str] = iter(())

    def request_text(self, on_text: OnText) -> None:
        """Have `on_text` called with the text, at once or soon."""
        now = self._clock()
        if now < self._expires_at:
            on_text(self._text)
            return
        self._callbacks.append(on_text)
        if len(self._callbacks) == 1:
            self._sections, self._remaining_sections = [], iterate_text(self._collect_metrics())
            self._max_age_s = max(MAX_AGE_S, _AGE_FACTOR * (self._clock() - now))
            self._call_soon(self._continue)

    def _continue(self) -> None:
        slice_end = self._clock() + _SLICE_S
        for number, section in enumerate(self._remaining_sections, 1):
            self._sections.append(section)
            if number % _SECTIONS_PER_CLOCK_CHECK == 0 and self._clock() >= slice_end:
                self._call_soon(self._continue)
                return
        self._text, self._sections = "".join(self._sections).encode(), []
        self._expires_at = self._clock() + self._max_age_s
        callbacks, self._callbacks = self._callbacks, []
        for on_text in callbacks:
            on_text(self._text)
