"""Recent metrics and status responses of one daemon, and the overview computed from them.

Rates and quantiles are differences between two responses, timed by the daemon's clock only.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Callable, Deque, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from weightd_common.dashboard import memory
from weightd_common.dashboard.overview import ModelRow, Overview, ProcessRow, RatePoint, TenantRow, Throughput
from weightd_protocol.messages.accounts import AccountStatus, TenantStatus, total_account
from weightd_protocol.messages.metrics import Histogram, MetricsResponse, ModelMetrics
from weightd_protocol.messages.status import GenerationStatus, ModelStatus, ProcessStatus, StatusResponse

# Points of a sparkline: one minute at one response per second.
SPARKLINE_POINTS = 60

# Rates are averaged over this period. A single second would flicker.
RATE_WINDOW_S = 5.0

# Samples in that period. With more than ten samples per second the period becomes shorter.
_MAX_SAMPLES = 50

# Status requests are rare, because for each one the daemon reads the memory of every process, a millisecond each.
_STATUS_INTERVAL_S = 10.0

_CHANGED_STATUS_INTERVAL_S = 2.0

# The key of the total over all models. No model has this name.
_ALL_MODELS = ""


class History:
    """Recent responses: every sample of the rate window, the points of the sparklines, and the last two statuses.

    Args:
        max_gap_s: after a longer gap between two responses, earlier samples are dropped.
    """

    def __init__(self, max_gap_s: float = math.inf) -> None:
        self._max_gap_s = max_gap_s
        self._samples: Deque[CounterSnapshot] = deque(maxlen=_MAX_SAMPLES)
        self._rate_points: Dict[str, Deque[RatePoint]] = {}
        self._statuses: Deque[StatusResponse] = deque(maxlen=2)
        self._status_requested_at = -math.inf
        self._requested_processes: object = None

    def on_metrics(self, metrics: MetricsResponse) -> None:
        """Add a metrics response."""
        if self._samples:
            last = self._samples[-1].metrics
            seconds = metrics.uptime_s - last.uptime_s
            if seconds == 0 and metrics.models == last.models:
                return  # the same response
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
        """Add a status response."""
        self._statuses.append(status)

    def should_request_status(self, now: float) -> bool:
        """Return whether to request a status now: periodically, and soon after processes have started or exited.

        True also records the request.

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
        """Return the current overview. At least one metrics response must have been added."""
        now = self._samples[-1].metrics
        status = self._statuses[-1] if self._statuses else None
        windows = self._windows()
        return Overview(
            metrics=now,
            status=status,
            throughput=self._throughput(_ALL_MODELS, windows),
            memory=None if status is None else memory.service_memory(status),
            models=tuple(self._model_rows(now, status, windows)),
            processes=tuple(process_rows(self._statuses)),
            tenants=tuple(tenant_row(each, windows) for each in now.tenants),
        )

    def _model_rows(
        self, now: MetricsResponse, status: Optional[StatusResponse], windows: Sequence[CounterWindow]
    ) -> Iterator[ModelRow]:
        statuses = {} if status is None else {each.name: each for each in status.models}
        groups: Set[str] = set()
        for model in now.models:
            model_status = statuses.get(model.name)
            group = "" if model_status is None else model_status.group
            yield ModelRow(
                metrics=model,
                serving=None if model_status is None else _find_generation(model_status, model.generation),
                throughput=self._throughput(model.name, list(windows)),
                refused_rate=_served_and_refused_rates(windows, model=model.name)[1],
                # The processes of a group are counted with its first model.
                memory=None if model_status is None or group in groups else memory.model_memory(model_status),
                group=group,
            )
            groups |= {group} - {""}

    def _on_daemon_change(self) -> None:
        """Drop everything, because the responses come from another daemon and cannot be compared."""
        self._samples.clear()
        self._statuses.clear()
        self._status_requested_at = -math.inf

    def _windows(self) -> List[CounterWindow]:
        """Return all windows that end now, the longest first."""
        *before, now = self._samples
        return [CounterWindow(each, now) for each in before]

    def _append_rate_points(self) -> None:
        """Append the latest rates to the sparklines, and drop sparklines of removed models."""
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
        """Return the throughput in the longest window in which no counter has restarted."""
        for window in windows:
            counts = window.answered_counts(name) if name != _ALL_MODELS else window.all_answered_counts()
            if counts is not None:
                return Throughput(
                    window.rate(0, sum(counts)), window.quantile(0.5, counts), window.quantile(0.99, counts)
                )
            rate = window.rate(window.before.served(model=name), window.now.served(model=name))
            if rate is not None and not window.now.metrics.seconds_bounds:
                return Throughput(rate)  # a client that sees only its own data receives no durations
        return Throughput()


Counts = Tuple[int, ...]


class CounterSnapshot:
    """Metrics at one time, with lookup by name.

    Attributes:
        metrics: the metrics response.
    """

    def __init__(self, response: MetricsResponse) -> None:
        self.metrics = response
        self.models: Dict[str, ModelMetrics] = {each.name: each for each in response.models}

    def served(self, tenant: str = "", model: str = "") -> Optional[int]:
        """Return the number of served requests of a tenant and model, "" for all. None if there is no such tenant."""
        return self._sum(lambda account: account.served, tenant, model)

    def refused(self, tenant: str = "", model: str = "") -> Optional[int]:
        """Return the number of rejected or failed requests, selected like `served`."""
        return self._sum(lambda account: account.refused, tenant, model)

    def _sum(self, count: Callable[[AccountStatus], int], tenant: str, model: str) -> Optional[int]:
        tenants = [each for each in self.metrics.tenants if tenant in ("", each.name)]
        accounts = [account for each in tenants for account in each.accounts if model in ("", account.model)]
        return sum(map(count, accounts)) if tenants else None


class CounterWindow(NamedTuple):
    """Two samples of the same daemon."""

    before: CounterSnapshot
    now: CounterSnapshot

    @property
    def seconds(self) -> float:
        """The length of the window by the daemon's clock."""
        return self.now.metrics.uptime_s - self.before.metrics.uptime_s

    def answered_counts(self, model: str) -> Optional[Counts]:
        """Return a model's served requests by duration bucket; None if unknown."""
        before, now = self.before.models.get(model), self.now.models.get(model)
        if before is None or now is None:
            return None
        return count_difference(before.request_seconds, now.request_seconds) or None

    def all_answered_counts(self) -> Optional[Counts]:
        """Return the sum of `answered_counts` over all models for which it is known."""
        counts = [each for each in map(self.answered_counts, self.now.models) if each]
        return tuple(map(sum, zip(*counts))) if counts else None

    def rate(self, before: Optional[float], now: Optional[float]) -> Optional[float]:
        """Return the growth of a counter per second; None if it has restarted or did not exist."""
        return None if before is None or now is None else rate(before, now, self.seconds)

    def quantile(self, fraction: float, counts: Counts) -> Optional[float]:
        """Return the duration in seconds that this fraction of the counted requests did not exceed."""
        return quantile(fraction, self.now.metrics.seconds_bounds, counts)


def _find_generation(status: ModelStatus, number: int) -> Optional[GenerationStatus]:
    return next((each for each in status.generations if each.number == number), None)


def process_rows(statuses: Sequence[StatusResponse]) -> Iterator[ProcessRow]:
    """Yield a row for each process of the last status, with the rate since the status before it."""
    if not statuses:
        return
    *earlier, last = statuses
    before = {process.name: process.served for status in earlier for _, _, process in _iterate_processes(status)}
    seconds = last.uptime_s - earlier[-1].uptime_s if earlier else 0.0
    for model, generation, process in _iterate_processes(last):
        served = before.get(process.name)
        pace = None if served is None else rate(served, process.served, seconds)
        yield ProcessRow(model, process, process.device or generation.device, pace)


def _iterate_processes(status: StatusResponse) -> Iterator[Tuple[str, GenerationStatus, ProcessStatus]]:
    for model in status.models:
        for generation in model.generations:
            for process in generation.processes:
                yield model.name, generation, process


def tenant_row(status: TenantStatus, windows: Sequence[CounterWindow]) -> TenantRow:
    """Return the row of a tenant."""
    return TenantRow(status, total_account(status.accounts), *_served_and_refused_rates(windows, status.name))


def _served_and_refused_rates(
    windows: Sequence[CounterWindow], tenant: str = "", model: str = ""
) -> Tuple[Optional[float], Optional[float]]:
    """Return the rates in the longest window in which no counter has restarted."""
    for window in windows:
        served = window.rate(window.before.served(tenant, model), window.now.served(tenant, model))
        refused = window.rate(window.before.refused(tenant, model), window.now.refused(tenant, model))
        if served is not None and refused is not None:
            return served, refused
    return None, None


def rate(before: float, after: float, seconds: float) -> Optional[float]:
    """Return the growth per second; None if the counter has restarted or no time has passed."""
    return (after - before) / seconds if after >= before and seconds > 0 else None


def count_difference(before: Histogram, after: Histogram) -> Optional[Tuple[int, ...]]:
    """Return the growth of each bucket; None if the histogram has restarted or has other buckets."""
    if len(before.counts) != len(after.counts):
        return None
    counts = tuple(now - then for then, now in zip(before.counts, after.counts))
    return None if any(each < 0 for each in counts) else counts


def quantile(fraction: float, bounds: Sequence[float], counts: Sequence[int]) -> Optional[float]:
    """Return the value that this fraction of all values does not exceed, interpolated linearly within its bucket.

    The result is at most the last bound, because larger values are not resolved. It is None without values.

    Args:
        fraction: 0.99 for p99.
        bounds: the ascending upper bounds of the buckets; the first bucket starts at 0.
        counts: one count for each bound, and one for values above the last bound.
    """
    total = sum(counts)
    if not total or len(counts) != len(bounds) + 1:
        return None
    target_count, below, low = fraction * total, 0, 0.0
    for bound, count in zip(bounds, counts):
        if count and below + count >= target_count:
            return low + (bound - low) * (target_count - below) / count
        below += count
        low = bound
    return low
