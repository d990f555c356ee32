"""Polls the daemon in a separate thread, so that keys work even if the daemon hangs."""

from __future__ import annotations

import threading
import time
from typing import Callable, NamedTuple, Optional

from weightctl.text import clean
from weightd.client import Client
from weightd_common.dashboard.history import History
from weightd_common.dashboard.overview import Overview
from weightd_protocol.errors import RequestError, WeightdError

# Timeouts. The daemon returns metrics immediately unless it hangs. A status takes longer with more processes.
METRICS_TIMEOUT_S = 5.0
_STATUS_TIMEOUT_S = 30.0


class PollResult(NamedTuple):
    """The result of a poll.

    Attributes:
        overview: the new overview; None after an error.
        polled_at: when the poll ended, by the monotonic clock.
        error: why there is no overview; "" if there is one.
    """

    overview: Optional[Overview]
    polled_at: float
    error: str = ""


class Poller:
    """Builds overviews from the daemon's responses.

    Args:
        client: a client that nothing else uses.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._history = History()

    def poll(self) -> Overview:
        """Poll the daemon once.

        Raises:
            WeightdError: the daemon did not respond, or responded with an error.
        """
        self._history.on_metrics(self._client.metrics(timeout=min(METRICS_TIMEOUT_S, self._client.timeout)))
        if self._history.should_request_status(time.monotonic()):
            self._history.on_status(self._client.status(timeout=min(_STATUS_TIMEOUT_S, self._client.timeout)))
        return self._history.overview()


class PollThread:
    """A thread that polls until the end of the block.

    Args:
        poller: the poller.
        delay_s: seconds between two polls.
        on_result: receives each result, in this thread.
    """

    def __init__(self, poller: Poller, delay_s: float, on_result: Callable[[PollResult], None]) -> None:
        self._poller = poller
        self._delay_s = delay_s
        self._on_result = on_result
        self._wake = threading.Event()
        self._is_stopping = False
        # As a daemon thread, a poll that hangs does not delay the exit.
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PollThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._wake.set()

    def poll_now(self, delay_s: float) -> None:
        """Poll now, and set the delay between polls."""
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
