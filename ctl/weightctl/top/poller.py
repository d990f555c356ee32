"""Asks the daemon again and again, beside who looks at the screen: a daemon that hangs stops no key."""

from __future__ import annotations

import threading
import time
from typing import Callable, NamedTuple, Optional

from weightctl.text import clean
from weightd.client import Client
from weightd_common.dashboard.history import History
from weightd_common.dashboard.overview import Overview
from weightd_protocol.errors import RequestError, WeightdError

# For an answer: metrics are told at once, so that a daemon which has not answered by then hangs. A status may take as
# long as there are processes.
METRICS_TIMEOUT_S = 5.0
_STATUS_TIMEOUT_S = 30.0


class PollResult(NamedTuple):
    """What came of asking.

    Attributes:
        overview: the picture; None where there was no answer.
        polled_at: when that was, by the monotonic clock.
        error: why there was none.
    """

    overview: Optional[Overview]
    polled_at: float
    error: str = ""


class Poller:
    """Makes pictures of what a daemon answers.

    Args:
        client: for this one alone.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._history = History()

    def poll(self) -> Overview:
        """Ask once.

        Raises:
            WeightdError: there is no answer, or not this one.
        """
        self._history.on_metrics(self._client.metrics(timeout=min(METRICS_TIMEOUT_S, self._client.timeout)))
        if self._history.should_request_status(time.monotonic()):
            self._history.on_status(self._client.status(timeout=min(_STATUS_TIMEOUT_S, self._client.timeout)))
        return self._history.overview()


class PollThread:
    """A thread that asks until the block ends.

    Args:
        poller: asks.
        delay_s: seconds between two questions.
        on_result: takes what comes of it, in that thread.
    """

    def __init__(self, poller: Poller, delay_s: float, on_result: Callable[[PollResult], None]) -> None:
        self._poller = poller
        self._delay_s = delay_s
        self._on_result = on_result
        self._wake = threading.Event()
        self._is_stopping = False
        # A daemon that hangs does not keep who wants to leave.
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PollThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._wake.set()

    def poll_now(self, delay_s: float) -> None:
        """Ask now, and from now on so often."""
        self._delay_s = delay_s
        self._wake.set()

    def _run(self) -> None:
        while not self._wake.wait(self._delay_s) or not self._is_stopping:
            self._wake.clear()
            self._on_result(self._poll_once())

    def _poll_once(self) -> PollResult:
        try:
            overview = self._poller.poll()
        except RequestError as error:
            return PollResult(None, time.monotonic(), f"{error.code}: {clean(str(error))}")
        except WeightdError as error:
            return PollResult(None, time.monotonic(), clean(str(error)))
        return PollResult(overview, time.monotonic())
