"""Polls the daemon in a separate thread, so that the screen reacts to keys even if the daemon does not respond."""

from __future__ import annotations

import threading
import time
from typing import Callable, NamedTuple, Optional

from weightctl.text import clean
from weightd.client import Client
from weightd_common.dashboard.history import History
from weightd_common.dashboard.overview import Overview
from weightd_protocol.errors import RequestError, WeightdError

# Seconds until a poll fails. The daemon replies to a query for metrics at once, unless it hangs. A status takes longer
# if there are many processes.
METRICS_TIMEOUT_S = 5.0
_STATUS_TIMEOUT_S = 30.0


class PollResult(NamedTuple):
    """The result of a poll: an overview or an error.

    Attributes:
        overview: the overview after the poll; None if the poll failed.
        polled_at: when the poll ended, in seconds of the monotonic clock.
        error: the reason why the poll failed; "" if it succeeded.
    """

    overview: Optional[Overview]
    polled_at: float
    error: str = ""


class Poller:
    """Polls the daemon, and builds an overview from its responses.

    Args:
        client: the client for the polls. No other code may use this client.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._history = History()

    def poll(self) -> Overview:
        """Poll the daemon once and return the overview.

        Raises:
            WeightdError: the daemon does not respond, or responds with an error.
        """
        self._history.on_metrics(self._client.metrics(timeout=min(METRICS_TIMEOUT_S, self._client.timeout)))
        if self._history.should_request_status(time.monotonic()):
            self._history.on_status(self._client.status(timeout=min(_STATUS_TIMEOUT_S, self._client.timeout)))
        return self._history.overview()


class PollThread:
    """Thread that polls the daemon until the end of the `with` block.

    Args:
        poller: polls the daemon and builds overviews.
        delay_s: seconds between two polls.
        on_result: a function that is called in this thread with the result of each poll.
    """

    def __init__(self, poller: Poller, delay_s: float, on_result: Callable[[PollResult], None]) -> None:
        self._poller = poller
        self._delay_s = delay_s
        self._on_result = on_result
        self._wake = threading.Event()
        self._is_stopping = False
        # A daemon thread, so that a poll without response does not delay the exit of the program.
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PollThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._wake.set()

    def poll_now(self, delay_s: float) -> None:
        """Start a poll at once, and set the seconds between later polls."""
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
