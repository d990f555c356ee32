"""A worker's row: the page that tells the daemon which request the worker has, and how many it has taken.

A worker may exit between any two stores. Therefore the order of the stores in each method is part of the contract; the
docstring of `weightd_daemon.channels` lists how the daemon reads each state that a worker can leave behind.
"""

from __future__ import annotations

from weightd_common.channels.pages import (
    ANSWER_BYTES,
    BYTES,
    CURRENT_CHANNEL,
    CURRENT_REQUEST,
    REQUESTS,
    SECONDS,
    SINCE,
    STAGE,
    STAGE_HANDING_OVER,
    STAGE_IDLE,
    STAGE_RUNNING,
    STAGE_TAKEN,
    STAGE_TAKING,
    Page,
)


class Row:
    """Writes a worker's row. No other process writes it while the worker runs.

    The methods take the index of the current channel's entry in the row.
    """

    __slots__ = ("_reals", "_words")

    def __init__(self, page: Page) -> None:
        self._words = page.words
        self._reals = page.reals

    def begin_taking(self, serial: int) -> None:
        """Record that the worker is about to read a request from a channel."""
        words = self._words
        words[CURRENT_CHANNEL] = serial
        words[STAGE] = STAGE_TAKING

    def set_taken(self, index: int, request: int, nbytes: int) -> None:
        """Record the request that the worker has read. Until it is recorded, the daemon does not know its number."""
        words = self._words
        words[CURRENT_REQUEST] = request
        words[index + REQUESTS] += 1
        words[index + BYTES] += nbytes
        words[STAGE] = STAGE_TAKEN

    def begin_running(self, now: float) -> None:
        """Record that the request may run from now on."""
        self._reals[SINCE] = now
        self._words[STAGE] = STAGE_RUNNING

    def add_seconds(self, index: int, seconds: float) -> None:
        """Add the measured device seconds of the current request."""
        self._reals[index + SECONDS] += seconds

    def begin_handover(self) -> None:
        """Record that the worker sends the request, which has not run, to the daemon."""
        self._words[STAGE] = STAGE_HANDING_OVER

    def end_request(self, index: int, outcome: int, answer_bytes: int) -> None:
        """Record that the worker has answered the request, or has handed it over. `outcome` is one of `OUTCOMES`."""
        words = self._words
        words[index + ANSWER_BYTES] += answer_bytes
        words[index + outcome] += 1
        words[STAGE] = STAGE_IDLE

    def cancel_taking(self) -> None:
        """Record that the worker has read no request."""
        self._words[STAGE] = STAGE_IDLE
