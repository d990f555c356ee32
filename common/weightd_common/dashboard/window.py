"""What was answered between two looks, and how soon."""

from __future__ import annotations

from typing import Callable, Dict, NamedTuple, Optional, Tuple

from weightd_common.dashboard.rates import count_difference, quantile, rate
from weightd_protocol.messages.accounts import AccountStatus
from weightd_protocol.messages.metrics import MetricsResponse, ModelMetrics

Counts = Tuple[int, ...]


class CounterSnapshot:
    """What the daemon had counted when it was looked at; found by name.

    Attributes:
        metrics: its answer.
    """

    def __init__(self, response: MetricsResponse) -> None:
        self.metrics = response
        self.models: Dict[str, ModelMetrics] = {each.name: each for each in response.models}

    def served(self, tenant: str = "", model: str = "") -> Optional[int]:
        """Return how many requests were answered, of all tenants and models or of one; None where there is no such."""
        return self._sum(lambda account: account.served, tenant, model)

    def refused(self, tenant: str = "", model: str = "") -> Optional[int]:
        """Return how many were refused, or ended in an error, likewise."""
        return self._sum(lambda account: sum(account.failed.values()), tenant, model)

    def _sum(self, count: Callable[[AccountStatus], int], tenant: str, model: str) -> Optional[int]:
        tenants = [each for each in self.metrics.tenants if tenant in ("", each.name)]
        accounts = [account for each in tenants for account in each.accounts if model in ("", account.model)]
        return sum(map(count, accounts)) if tenants else None


class CounterWindow(NamedTuple):
    """Two looks at the same daemon, one after the other."""

    before: CounterSnapshot
    now: CounterSnapshot

    @property
    def seconds(self) -> float:
        """How long it is, by the daemon's clock."""
        return self.now.metrics.uptime_s - self.before.metrics.uptime_s

    def answered_counts(self, model: str) -> Optional[Counts]:
        """Return how many requests of a model were answered, by the buckets of time; None where that is not known."""
        before, now = self.before.models.get(model), self.now.models.get(model)
        if before is None or now is None:
            return None
        return count_difference(before.request_seconds, now.request_seconds) or None

    def all_answered_counts(self) -> Optional[Counts]:
        """Return the same of all models of which it is known."""
        counts = [each for each in map(self.answered_counts, self.now.models) if each]
        return tuple(map(sum, zip(*counts))) if counts else None

    def rate(self, before: Optional[float], now: Optional[float]) -> Optional[float]:
        """Return how much a counter has grown in a second; None where it has begun anew, or was not there."""
        return None if before is None or now is None else rate(before, now, self.seconds)

    def quantile(self, fraction: float, counts: Counts) -> Optional[float]:
        """Return the seconds that this share of those answered did not exceed."""
        return quantile(fraction, self.now.metrics.seconds_bounds, counts)
