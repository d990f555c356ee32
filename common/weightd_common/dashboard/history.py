"""Collects what the daemon told of late, and makes the picture of it. No clock is looked at but the daemon's own."""

from __future__ import annotations

import math
from collections import deque
from typing import Deque, Dict, List

from weightd_common.dashboard import build, memory
from weightd_common.dashboard.rows import Overview, RatePoint, Throughput
from weightd_common.dashboard.window import CounterSnapshot, CounterWindow
from weightd_protocol.messages.metrics import MetricsResponse
from weightd_protocol.messages.status import StatusResponse

# Of a spark: a minute, where it is looked at each second.
SPARKLINE_POINTS = 60

# What is told of now is of so many seconds: of one alone it would flicker.
RATE_WINDOW_S = 5.0

# Of a window. Whoever asks more often than ten times a second is told of a shorter time.
_MAX_SAMPLES = 50

# A status reads the memory of each process, which costs the daemon a millisecond for each.
_STATUS_INTERVAL_S = 10.0
_CHANGED_STATUS_INTERVAL_S = 2.0

# The name of all models together: no model has it.
_ALL_MODELS = ""


class History:
    """What was told of late: of the last minute what a spark needs, of the last seconds all.

    Args:
        max_gap_s: where nobody has looked for longer, what was before is forgotten.
    """

    def __init__(self, max_gap_s: float = math.inf) -> None:
        self._max_gap_s = max_gap_s
        self._samples: Deque[CounterSnapshot] = deque(maxlen=_MAX_SAMPLES)
        self._rate_points: Dict[str, Deque[RatePoint]] = {}
        self._statuses: Deque[StatusResponse] = deque(maxlen=2)
        self._status_requested_at = -math.inf
        self._requested_processes: object = None

    def on_metrics(self, metrics: MetricsResponse) -> None:
        """The daemon has told what it has counted."""
        if self._samples:
            last = self._samples[-1].metrics
            seconds = metrics.uptime_s - last.uptime_s
            if seconds == 0 and metrics.models == last.models:
                return  # it is the same answer
            if seconds <= 0 or metrics.seconds_bounds != last.seconds_bounds:
                self._on_daemon_change()
            elif seconds > self._max_gap_s:
                self._samples.clear()
                self._rate_points.clear()
        self._samples.append(CounterSnapshot(metrics))
        while len(self._samples) > 2 and self._samples[1].metrics.uptime_s <= metrics.uptime_s - RATE_WINDOW_S:
            self._samples.popleft()
        self._append_rate_points()

    def on_status(self, status: StatusResponse) -> None:
        """The daemon has told its status."""
        self._statuses.append(status)

    def should_request_status(self, now: float) -> bool:
        """Whether it is time to ask for the status: now and then, and soon after processes have come or gone.

        It counts as asked for then.

        Args:
            now: monotonic seconds.
        """
        processes = [(each.name, each.generation, each.processes) for each in self._samples[-1].metrics.models]
        if now < self._status_requested_at + (
            _CHANGED_STATUS_INTERVAL_S if processes != self._requested_processes else _STATUS_INTERVAL_S
        ):
            return False
        self._status_requested_at, self._requested_processes = now, processes
        return True

    def overview(self) -> Overview:
        """Return the picture; something must have been counted."""
        now = self._samples[-1].metrics
        status = self._statuses[-1] if self._statuses else None
        windows = self._windows()
        return Overview(
            version=now.version,
            state=now.state,
            uptime_s=now.uptime_s,
            is_complete=status is None or status.pid != 0,
            queued=sum(each.queued for each in now.models),
            running=sum(each.running for each in now.models),
            throughput=self._throughput(_ALL_MODELS, windows),
            memory=None if status is None else memory.service_memory(status),
            buffered_bytes=now.buffered_bytes,
            max_buffered_bytes=now.max_memory_bytes,
            models=tuple(build.model_rows(now, status, windows, lambda name: self._throughput(name, windows))),
            processes=tuple(build.process_rows(self._statuses)),
            tenants=tuple(build.tenant_row(each, windows) for each in now.tenants),
            note="" if status is None else status.note,
        )

    def _on_daemon_change(self) -> None:
        """The daemon that tells is not the one that told before: nothing can be counted between the two."""
        self._samples.clear()
        self._statuses.clear()
        self._status_requested_at = -math.inf

    def _windows(self) -> List[CounterWindow]:
        """All that end now, the longest first."""
        *before, now = self._samples
        return [CounterWindow(each, now) for each in before]

    def _append_rate_points(self) -> None:
        """Add what has just passed to each spark, and forget those of models that are gone."""
        last = self._windows()[-1:]
        rate_points: Dict[str, Deque[RatePoint]] = {}
        for name in [_ALL_MODELS, *self._samples[-1].models]:
            rate_points[name] = self._rate_points.get(name, deque(maxlen=SPARKLINE_POINTS))
            rate_points[name].append(self._rate_point(name, last))
        self._rate_points = rate_points

    def _rate_point(self, name: str, last: List[CounterWindow]) -> RatePoint:
        pace = self._measure_throughput(name, last)
        return RatePoint(pace.rate, pace.p99_s)

    def _throughput(self, name: str, windows: List[CounterWindow]) -> Throughput:
        return self._measure_throughput(name, windows)._replace(rate_points=tuple(self._rate_points[name]))

    def _measure_throughput(self, name: str, windows: List[CounterWindow]) -> Throughput:
        """What is known of the longest of these in which nothing has begun anew."""
        for window in windows:
            counts = window.answered_counts(name) if name != _ALL_MODELS else window.all_answered_counts()
            if counts is not None:
                return Throughput(
                    window.rate(0, sum(counts)), window.quantile(0.5, counts), window.quantile(0.99, counts)
                )
            rate = window.rate(window.before.served(model=name), window.now.served(model=name))
            if rate is not None and not window.now.metrics.seconds_bounds:
                return Throughput(rate)  # whoever sees its own alone is told of no times
        return Throughput()
