"""Asks the daemon again and again, beside who looks at the screen: a daemon that hangs stops no key."""

from __future__ import annotations

import threading
import time
from typing import Callable, NamedTuple, Optional

from weightd.client.client import Client
from weightd.ctl.text import clean
from weightd.protocol.errors import RequestError, WeightdError
from weightd.shared.overview.history import History
from weightd.shared.overview.rows import Overview

# For an answer: metrics are told at once, so that a daemon which has not answered by then hangs. A status may take as
# long as there are processes.
PATIENCE_S = 5.0
_STATUS_PATIENCE_S = 30.0


class Found(NamedTuple):
    """What came of asking.

    Attributes:
        overview: the picture; None where there was no answer.
        at: when that was, by the monotonic clock.
        trouble: why there was none.
    """

    overview: Optional[Overview]
    at: float
    trouble: str = ""


class Asker:
    """Makes pictures of what a daemon answers.

    Args:
        client: for this one alone.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._history = History()

    def ask(self) -> Overview:
        """Ask once.

        Raises:
            WeightdError: there is no answer, or not this one.
        """
        self._history.on_metrics(self._client.metrics(timeout=min(PATIENCE_S, self._client.timeout)))
        if self._history.should_request_status(time.monotonic()):
            self._history.on_status(self._client.status(timeout=min(_STATUS_PATIENCE_S, self._client.timeout)))
        return self._history.overview()


class Asking:
    """A thread that asks until the block ends.

    Args:
        asker: asks.
        delay: seconds between two questions.
        found: takes what comes of it, in that thread.
    """

    def __init__(self, asker: Asker, delay: float, found: Callable[[Found], None]) -> None:
        self._asker = asker
        self._delay = delay
        self._found = found
        self._wake = threading.Event()
        self._ends = False
        # A daemon that hangs does not keep who wants to leave.
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._wake.set()

    def soon(self, delay: float) -> None:
        """Ask now, and from now on so often."""
        self._delay = delay
        self._wake.set()

    def _run(self) -> None:
        while not self._wake.wait(self._delay) or not self._ends:
            self._wake.clear()
            self._found(self._once())

    def _once(self) -> Found:
        try:
            overview = self._asker.ask()
        except RequestError as error:
            return Found(None, time.monotonic(), f"{error.code}: {clean(str(error))}")
        except WeightdError as error:
            return Found(None, time.monotonic(), clean(str(error)))
        return Found(overview, time.monotonic())
