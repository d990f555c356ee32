"""Recent metrics and status responses of one daemon, and the overview computed from them.

Rates and quantiles are computed from the differences of counters between two responses. The time between two responses
is taken from the daemon's uptime in them, so delays on the way to the client do not distort the rates.
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

# Maximum number of points in a sparkline: one minute at one metrics response per second.
SPARKLINE_POINTS = 60

# Seconds over which rates are averaged. Rates of single seconds would flicker on the screen.
RATE_WINDOW_S = 5.0

# Maximum number of stored metrics responses. With more than ten responses per second, rates are averaged over less than
# RATE_WINDOW_S.
_MAX_SAMPLES = 50

# Seconds between two status requests. They are rare, because for each status request the daemon measures the memory of
# every process, which takes about a millisecond per process.
_STATUS_INTERVAL_S = 10.0

# Minimum number of seconds between two status requests when processes have started or exited.
_CHANGED_STATUS_INTERVAL_S = 2.0

# Key of the throughput of all models together, used instead of a model name. No model has an empty name.
_ALL_MODELS = ""


class History:
    """Recent metrics responses, the points of the sparklines, and the last two status responses of one daemon.

    Args:
        max_gap_s: if more seconds pass between two metrics responses, the earlier responses and all points are dropped.
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
        """Return whether the caller should request a status now: periodically, and soon after processes start or exit.

        If the result is True, `now` is stored as the time of the last status request.

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
                # The models of a group share their processes, so only the group's first model shows the memory use.
                memory=None if model_status is None or group in groups else memory.model_memory(model_status),
                group=group,
            )
            groups |= {group} - {""}

    def _on_daemon_change(self) -> None:
        """Drop all responses, because they are from an earlier daemon, whose counters cannot be compared."""
        self._samples.clear()
        self._statuses.clear()
        self._status_requested_at = -math.inf

    def _windows(self) -> List[CounterWindow]:
        """Return the windows from each earlier metrics response to the last one, the longest first."""
        *before, now = self._samples
        return [CounterWindow(each, now) for each in before]

    def _append_rate_points(self) -> None:
        """Append the rates between the last two responses to the sparklines, and drop sparklines of removed models."""
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
        """Return a model's throughput in the longest window in which the model's counters have not restarted at 0."""
        for window in windows:
            counts = window.answered_counts(name) if name != _ALL_MODELS else window.all_answered_counts()
            if counts is not None:
                return Throughput(
                    window.rate(0, sum(counts)), window.quantile(0.5, counts), window.quantile(0.99, counts)
                )
            rate = window.rate(window.before.served(model=name), window.now.served(model=name))
            if rate is not None and not window.now.metrics.seconds_bounds:
                return Throughput(rate)  # the daemon sends no durations to a client that may see only its own tenant
        return Throughput()


Counts = Tuple[int, ...]


class CounterSnapshot:
    """One metrics response, with methods that look up or add up its counters by model and tenant.

    Attributes:
        metrics: the metrics response.
        models: the metrics of each model, by name.
    """

    def __init__(self, response: MetricsResponse) -> None:
        self.metrics = response
        self.models: Dict[str, ModelMetrics] = {each.name: each for each in response.models}

    def served(self, tenant: str = "", model: str = "") -> Optional[int]:
        """Return the number of served requests of a tenant and model; "" selects all tenants or all models.

        The result is None if there is no such tenant.
        """
        return self._sum(lambda account: account.served, tenant, model)

    def refused(self, tenant: str = "", model: str = "") -> Optional[int]:
        """Return the number of rejected and failed requests of a tenant and model; see `served`."""
        return self._sum(lambda account: account.refused, tenant, model)

    def _sum(self, count: Callable[[AccountStatus], int], tenant: str, model: str) -> Optional[int]:
        tenants = [each for each in self.metrics.tenants if tenant in ("", each.name)]
        accounts = [account for each in tenants for account in each.accounts if model in ("", account.model)]
        return sum(map(count, accounts)) if tenants else None


class CounterWindow(NamedTuple):
    """Two metrics responses of the same daemon, for rates in the time between them."""

    before: CounterSnapshot
    now: CounterSnapshot

    @property
    def seconds(self) -> float:
        """Seconds between the two responses by the daemon's clock."""
        return self.now.metrics.uptime_s - self.before.metrics.uptime_s

    def answered_counts(self, model: str) -> Optional[Counts]:
        """Return how many requests the model served in the window, for each bucket of the duration histogram.

        The result is None if a response lacks the model or its histogram, or if the histogram has restarted at 0.
        """
        before, now = self.before.models.get(model), self.now.models.get(model)
        if before is None or now is None:
            return None
        return count_difference(before.request_seconds, now.request_seconds) or None

    def all_answered_counts(self) -> Optional[Counts]:
        """Return the sum of `answered_counts` over all models whose counts are known; None if none are known."""
        counts = [each for each in map(self.answered_counts, self.now.models) if each]
        return tuple(map(sum, zip(*counts))) if counts else None

    def rate(self, before: Optional[float], now: Optional[float]) -> Optional[float]:
        """Return the growth of a counter per second in the window.

        The result is None if the counter has restarted at 0, or if one of its two values is None.
        """
        return None if before is None or now is None else rate(before, now, self.seconds)

    def quantile(self, fraction: float, counts: Counts) -> Optional[float]:
        """Return the duration in seconds that this fraction of the counted requests did not exceed."""
        return quantile(fraction, self.now.metrics.seconds_bounds, counts)


def _find_generation(status: ModelStatus, number: int) -> Optional[GenerationStatus]:
    return next((each for each in status.generations if each.number == number), None)


def process_rows(statuses: Sequence[StatusResponse]) -> Iterator[ProcessRow]:
    """Yield a row for each process of the last status response, with its rate since the response before that."""
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
    """Return the row of a tenant, with its rates in the longest usable window."""
    return TenantRow(status, total_account(status.accounts), *_served_and_refused_rates(windows, status.name))


def _served_and_refused_rates(
    windows: Sequence[CounterWindow], tenant: str = "", model: str = ""
) -> Tuple[Optional[float], Optional[float]]:
    """Return two rates of a tenant and model in requests per second; see `CounterSnapshot.served` for the arguments.

    The first rate counts served requests, the second rejected and failed requests.

    The rates are averages over the longest window in which neither counter has restarted at 0; None if no window is
    usable.
    """
    for window in windows:
        served = window.rate(window.before.served(tenant, model), window.now.served(tenant, model))
        refused = window.rate(window.before.refused(tenant, model), window.now.refused(tenant, model))
        if served is not None and refused is not None:
            return served, refused
    return None, None


def rate(before: float, after: float, seconds: float) -> Optional[float]:
    """Return the growth of a counter per second; None if the counter has restarted at 0 or no time has passed."""
    return (after - before) / seconds if after >= before and seconds > 0 else None


def count_difference(before: Histogram, after: Histogram) -> Optional[Tuple[int, ...]]:
    """Return how much each bucket's count has grown; None if the counts restarted at 0 or the buckets changed."""
    if len(before.counts) != len(after.counts):
        return None
    counts = tuple(now - then for then, now in zip(before.counts, after.counts))
    return None if any(each < 0 for each in counts) else counts


def quantile(fraction: float, bounds: Sequence[float], counts: Sequence[int]) -> Optional[float]:
    """Return a quantile of the values in a histogram, interpolated linearly within its bucket.

    The result is at most the last bound, because the histogram does not tell how far larger values exceed it. The
    result is None if the histogram is empty.

    Args:
        fraction: the fraction of all values that are at most the result, such as 0.99 for p99.
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
