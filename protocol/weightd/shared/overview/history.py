"""Collects what the daemon told of late, and makes the picture of it. No clock is looked at but the daemon's own."""

from __future__ import annotations

import math
from collections import deque
from typing import Deque, Dict, List

from weightd.protocol.messages.metrics import MetricsResponse
from weightd.protocol.messages.status import StatusResponse
from weightd.shared.overview import memory, picture
from weightd.shared.overview.rows import Moment, Overview, Pace
from weightd.shared.overview.window import Sample, Window

# Of a spark: a minute, where it is looked at each second.
MOMENTS = 60

# What is told of now is of so many seconds: of one alone it would flicker.
WINDOW_S = 5.0

# Of a window. Whoever asks more often than ten times a second is told of a shorter time.
_MOST_SAMPLES = 50

# A status reads the memory of each process, which costs the daemon a millisecond for each.
_STATUS_S = 10.0
_SOON_S = 2.0

# The name of all models together: no model has it.
_ALL = ""


class History:
    """What was told of late: of the last minute what a spark needs, of the last seconds all.

    Args:
        most_gap_s: where nobody has looked for longer, what was before is forgotten.
    """

    def __init__(self, most_gap_s: float = math.inf) -> None:
        self._most_gap_s = most_gap_s
        self._samples: Deque[Sample] = deque(maxlen=_MOST_SAMPLES)
        self._moments: Dict[str, Deque[Moment]] = {}
        self._statuses: Deque[StatusResponse] = deque(maxlen=2)
        self._asked_at = -math.inf
        self._asked_about: object = None

    def counted(self, metrics: MetricsResponse) -> None:
        """The daemon has told what it has counted."""
        if self._samples:
            last = self._samples[-1].told
            seconds = metrics.uptime_s - last.uptime_s
            if seconds == 0 and metrics.models == last.models:
                return  # it is the same answer
            if seconds <= 0 or metrics.seconds_bounds != last.seconds_bounds:
                self._is_another()
            elif seconds > self._most_gap_s:
                self._samples.clear()
                self._moments.clear()
        self._samples.append(Sample(metrics))
        while len(self._samples) > 2 and self._samples[1].told.uptime_s <= metrics.uptime_s - WINDOW_S:
            self._samples.popleft()
        self._remember()

    def looked(self, status: StatusResponse) -> None:
        """The daemon has told its status."""
        self._statuses.append(status)

    def wants_status(self, now: float) -> bool:
        """Whether it is time to ask for the status: now and then, and soon after processes have come or gone.

        It counts as asked for then.

        Args:
            now: monotonic seconds.
        """
        about = [(each.name, each.generation, each.processes) for each in self._samples[-1].told.models]
        if now < self._asked_at + (_SOON_S if about != self._asked_about else _STATUS_S):
            return False
        self._asked_at, self._asked_about = now, about
        return True

    def overview(self) -> Overview:
        """Return the picture; something must have been counted."""
        now = self._samples[-1].told
        status = self._statuses[-1] if self._statuses else None
        windows = self._windows()
        return Overview(
            version=now.version,
            state=now.state,
            uptime_s=now.uptime_s,
            whole=status is None or status.pid != 0,
            queued=sum(each.queued for each in now.models),
            running=sum(each.running for each in now.models),
            pace=self._pace(_ALL, windows),
            memory=None if status is None else memory.of_service(status),
            held_bytes=now.held_bytes,
            max_held_bytes=now.max_memory_bytes,
            models=tuple(picture.models(now, status, windows, lambda name: self._pace(name, windows))),
            processes=tuple(picture.processes(self._statuses)),
            tenants=tuple(picture.tenant(each, windows) for each in now.tenants),
            note="" if status is None else status.note,
        )

    def _is_another(self) -> None:
        """The daemon that tells is not the one that told before: nothing can be counted between the two."""
        self._samples.clear()
        self._statuses.clear()
        self._asked_at = -math.inf

    def _windows(self) -> List[Window]:
        """All that end now, the longest first."""
        *before, now = self._samples
        return [Window(each, now) for each in before]

    def _remember(self) -> None:
        """Add what has just passed to each spark, and forget those of models that are gone."""
        last = self._windows()[-1:]
        kept: Dict[str, Deque[Moment]] = {}
        for name in [_ALL, *self._samples[-1].models]:
            kept[name] = self._moments.get(name, deque(maxlen=MOMENTS))
            kept[name].append(self._moment(name, last))
        self._moments = kept

    def _moment(self, name: str, last: List[Window]) -> Moment:
        pace = self._measured(name, last)
        return Moment(pace.rate, pace.p99_s)

    def _pace(self, name: str, windows: List[Window]) -> Pace:
        return self._measured(name, windows)._replace(moments=tuple(self._moments[name]))

    def _measured(self, name: str, windows: List[Window]) -> Pace:
        """What is known of the longest of these in which nothing has begun anew."""
        for window in windows:
            counts = window.answered(name) if name != _ALL else window.answered_of_all()
            if counts is not None:
                return Pace(window.rate(0, sum(counts)), window.quantile(0.5, counts), window.quantile(0.99, counts))
            rate = window.rate(window.before.served(model=name), window.now.served(model=name))
            if rate is not None and not window.now.told.seconds_bounds:
                return Pace(rate)  # whoever sees its own alone is told of no times
        return Pace()
