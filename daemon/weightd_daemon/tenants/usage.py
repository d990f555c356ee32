"""What each tenant has asked of each model, what that has taken, and what it holds of its quotas: plain counters.

There are as many as tenants and models are configured. What a tenant has asked of models that are gone is kept in one
account; a tenant that is gone takes its own with it. Neither goes while something of it is in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from weightd_common.rate_limits import TokenBucket
from weightd_daemon.config.tenants import TenantConfig
from weightd_protocol import limits
from weightd_protocol.errors import ERRORS, RequestError, ResourceExhausted
from weightd_protocol.messages.inference import RequestDescription
from weightd_protocol.schema import integer, mapping, number, text

# The bounds of a tenant of which a refusal names the one that was reached.
QUOTAS = (
    "max_in_flight",
    "max_queue",
    "max_queue_bytes",
    "max_rate",
    "max_rows",
    "max_connections",
    "max_shared_bytes",
    "priority_max",
)

# All reasons: those, and the codes of the errors in which a request may end otherwise.
REASONS = (*QUOTAS, *ERRORS)

# The account of what is no request of a model that there is.
OTHER_MODELS = ""

# A guess: how long it takes until some of what there is has been computed.
_RETRY_AFTER_S = 0.1

_KNOWN_REASONS = frozenset(REASONS)

# Sums end here: whatever a file said that was damaged can be told, and counted on.
_MAX_COUNT = 2**62

# Of so many of the last ticks a share is taken.
_SHARE_SAMPLES = 6

# Of each number of seconds in the file.
_MAX_SECONDS = 1e15

_COUNT = integer(0, limits.MAX_COUNT)
_SECONDS = number(_MAX_SECONDS)


class QuotaExceeded(ResourceExhausted):
    """A bound of the tenant is reached.

    Attributes:
        quota: which, one of `QUOTAS`.
    """

    def __init__(self, quota: str, text: str, *, retry_after: float | None = None) -> None:
        super().__init__(text, retry_after=retry_after)
        self.quota = quota


@dataclass(frozen=True)
class UsageRecord:
    """An account as it is written down; the fields are those of `Usage`."""

    tenant: str = field(metadata=text(limits.MAX_NAME_BYTES))
    model: str = field(metadata=text(limits.MAX_MODEL_NAME_BYTES, empty=True))
    requests: int = field(metadata=_COUNT)
    served: int = field(metadata=_COUNT)
    rows: int = field(metadata=_COUNT)
    slot_seconds: float = field(metadata=_SECONDS)
    queue_seconds: float = field(metadata=_SECONDS)
    bytes_in: int = field(metadata=_COUNT)
    bytes_out: int = field(metadata=_COUNT)
    unexpected_exits: int = field(metadata=_COUNT)
    refused: dict[str, int] = field(metadata=mapping(_COUNT, len(REASONS)))

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from all others."""
        return self.tenant, self.model


class Usage:
    """What a tenant has asked of a model. One request counts in `served`, or in `refused`, once it has ended.

    Attributes:
        requests: that have come, those included that were refused at once.
        served: that were answered.
        rows: of them, as far as those of the model are known.
        slot_seconds: for which slots ran them; a batch of several is divided by their rows.
        queue_seconds: from the arrival of each to when a slot was given it.
        bytes_in: of their tensors, as far as these were sent.
        bytes_out: of the answers, likewise.
        unexpected_exits: slots that were lost to them.
        in_flight: that were accepted and have not ended.
        refused: that have ended in an error, by reason; messages that are no requests, too.
    """

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "in_flight",
        "queue_seconds",
        "refused",
        "requests",
        "rows",
        "served",
        "slot_seconds",
        "unexpected_exits",
    )

    def __init__(self) -> None:
        self.requests = 0
        self.served = 0
        self.rows = 0
        self.slot_seconds = 0.0
        self.queue_seconds = 0.0
        self.bytes_in = 0
        self.bytes_out = 0
        self.unexpected_exits = 0
        self.in_flight = 0
        self.refused: dict[str, int] = {}

    def admit(self, quota: Quota, config: TenantConfig, description: RequestDescription, nbytes: int) -> None:
        """Count a request with tensors of so many bytes, here and in the quota of its tenant.

        Raises:
            QuotaExceeded: the tenant may not have one more; it is not counted.
        """
        quota.add_request(config, description, nbytes)
        self.count_accepted(nbytes)

    def withdraw(self, quota: Quota, nbytes: int) -> None:
        """Do not count a request that was admitted, as it is refused after all."""
        quota.end_request(nbytes, has_started=False)
        self.requests -= 1
        self.in_flight -= 1
        self.bytes_in -= nbytes

    def start(self, quota: Quota, nbytes: int, waited_s: float) -> None:
        """A slot was given a request that was admitted, or the first of it, so long after it had come."""
        quota.start_request(nbytes)
        self.add_queue_time(waited_s)

    def end(self, quota: Quota, nbytes: int, outcome: RequestError | int, *, has_started: bool) -> None:
        """A request that was admitted is answered with tensors of `outcome` bytes, or has ended in that error."""
        quota.end_request(nbytes, has_started=has_started)
        if isinstance(outcome, int):
            self.count_served(outcome)
        else:
            self.count_failed(outcome)

    def count_accepted(self, nbytes: int) -> None:
        """A request is accepted, with tensors of so many bytes."""
        self.requests += 1
        self.in_flight += 1
        self.bytes_in += nbytes

    def add_queue_time(self, seconds: float) -> None:
        """A slot was given it, or the first of it, so long after it had come."""
        self.queue_seconds += seconds

    def add_run(self, seconds: float, rows: int) -> None:
        """A slot has run it, or a part of it."""
        self.slot_seconds += seconds
        self.rows += rows

    def count_served(self, nbytes: int) -> None:
        """It is answered, with tensors of so many bytes."""
        self.in_flight -= 1
        self.served += 1
        self.bytes_out += nbytes

    def count_failed(self, error: RequestError) -> None:
        """It has ended in an error."""
        self.in_flight -= 1
        self.count_refused(error)

    def count_refused(self, error: RequestError, *, requests: int = 0) -> None:
        """A message is refused; `requests`: how many it is."""
        self.requests += requests
        reason = error.quota if isinstance(error, QuotaExceeded) else error.code
        self.refused[reason] = self.refused.get(reason, 0) + 1

    @property
    def refused_total(self) -> int:
        """All that was refused."""
        return sum(self.refused.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not (self.requests or self.refused or self.unexpected_exits or self.slot_seconds)

    def add(self, other: Usage | UsageRecord) -> None:
        """Count what another one has counted, but for what is in flight there, and reasons that there are not."""
        self.requests = min(self.requests + other.requests, _MAX_COUNT)
        self.served = min(self.served + other.served, _MAX_COUNT)
        self.rows = min(self.rows + other.rows, _MAX_COUNT)
        self.slot_seconds += other.slot_seconds
        self.queue_seconds += other.queue_seconds
        self.bytes_in = min(self.bytes_in + other.bytes_in, _MAX_COUNT)
        self.bytes_out = min(self.bytes_out + other.bytes_out, _MAX_COUNT)
        self.unexpected_exits = min(self.unexpected_exits + other.unexpected_exits, _MAX_COUNT)
        for reason, count in other.refused.items():
            if reason in _KNOWN_REASONS:
                self.refused[reason] = min(self.refused.get(reason, 0) + count, _MAX_COUNT)

    def to_record(self, tenant: str, model: str) -> UsageRecord:
        """Return what it has counted, as it is written down."""
        return UsageRecord(
            tenant,
            model,
            self.requests,
            self.served,
            self.rows,
            min(self.slot_seconds, _MAX_SECONDS),
            min(self.queue_seconds, _MAX_SECONDS),
            self.bytes_in,
            self.bytes_out,
            self.unexpected_exits,
            dict(self.refused),
        )


class Quota:
    """The counts of one tenant. They are kept where nothing is bounded, too: a reload may bound it.

    Attributes:
        in_flight: requests that were accepted and have not ended.
        waiting: those of them that no slot has been given yet.
        waiting_bytes: of their tensors.
        connections: that it has.
    """

    __slots__ = ("_messages", "connections", "in_flight", "waiting", "waiting_bytes")

    def __init__(self) -> None:
        self.in_flight = 0
        self.waiting = 0
        self.waiting_bytes = 0
        self.connections = 0
        self._messages = TokenBucket()

    def count_message(self, config: TenantConfig, now: float) -> None:
        """A message of any kind has come, or is sent on its account by another one.

        Raises:
            QuotaExceeded: there are too many.
        """
        rate = config.max_rate
        if not rate:
            return
        # Less than one a second are one now and then.
        burst = max(1.0, rate)
        if not self._messages.take(rate, burst, now):
            missing = 1.0 - self._messages.tokens(rate, burst, now)
            text = f"max_rate of this tenant is {rate:g} requests of any kind a second"
            raise QuotaExceeded("max_rate", text, retry_after=missing / rate)

    def add_request(self, config: TenantConfig, description: RequestDescription, nbytes: int) -> None:
        """Count one more request, whose tensors come with so many bytes; it waits from now on.

        Its rows are the largest first dimension of its inputs.

        Raises:
            QuotaExceeded: the tenant may not have one more; it is not counted.
        """
        if config.max_rows:
            rows = max((each.shape[0] for each in description.inputs if each.shape), default=0)
            if rows > config.max_rows:
                text = f"max_rows of this tenant is {config.max_rows}, the first dimension of an input is {rows}"
                raise QuotaExceeded("max_rows", text)
        if config.max_in_flight and self.in_flight >= config.max_in_flight:
            raise _quota_error("max_in_flight", config.max_in_flight, self.in_flight)
        if config.max_queue and self.waiting >= config.max_queue:
            raise _quota_error("max_queue", config.max_queue, self.waiting)
        # One that is alone may be larger.
        if config.max_queue_bytes and self.waiting and self.waiting_bytes + nbytes > config.max_queue_bytes:
            raise _quota_error("max_queue_bytes", config.max_queue_bytes, self.waiting_bytes)
        self.in_flight += 1
        self.waiting += 1
        self.waiting_bytes += nbytes

    def add_connection(self, config: TenantConfig) -> None:
        """One more connection has come, and counts from now on, whatever becomes of it.

        Raises:
            QuotaExceeded: it is to be hung up.
        """
        self.connections += 1
        if config.max_connections and self.connections > config.max_connections:
            text = f"max_connections of this tenant is {config.max_connections}: this connection ends"
            raise QuotaExceeded("max_connections", text, retry_after=_RETRY_AFTER_S)

    def start_request(self, nbytes: int) -> None:
        """A slot is given it for the first time, or some of it."""
        self.waiting -= 1
        self.waiting_bytes -= nbytes

    def end_request(self, nbytes: int, *, has_started: bool) -> None:
        """It has ended; `has_started`: a slot had been given it."""
        self.in_flight -= 1
        if not has_started:
            self.start_request(nbytes)


def _quota_error(name: str, limit: int, current: int) -> QuotaExceeded:
    return QuotaExceeded(
        name, f"{name} of this tenant is {limit}, it has {current} already", retry_after=_RETRY_AFTER_S
    )


class UsageTable:
    """The accounts of all tenants."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, Usage]] = {}
        self._samples: deque[dict[str, float]] = deque(maxlen=_SHARE_SAMPLES)

    def usage_of(self, tenant: str, model: str) -> Usage:
        """Return the account of a tenant for a model that there is, or for what is `OTHER_MODELS`."""
        usages = self._tenants.get(tenant)
        if usages is None:
            usages = self._tenants[tenant] = {}
        usage = usages.get(model)
        if usage is None:
            usage = usages[model] = Usage()
        return usage

    def items(self, tenant: str) -> Iterator[tuple[str, Usage]]:
        """Yield the models of which a tenant has asked anything, each with the account."""
        for model, usage in self._tenants.get(tenant, {}).items():
            if not usage.is_empty:
                yield model, usage

    def total(self, tenant: str) -> Usage:
        """Return the sum of all that a tenant has; what is in flight, too."""
        total = Usage()
        for usage in self._tenants.get(tenant, {}).values():
            total.add(usage)
            total.in_flight += usage.in_flight
        return total

    def slot_seconds(self, tenant: str) -> float:
        """Return those that all requests of a tenant have taken."""
        return sum(usage.slot_seconds for usage in self._tenants.get(tenant, {}).values())

    def sample(self) -> None:
        """Some seconds have passed, about as many as since the last call: shares are those since the first of some."""
        self._samples.append({tenant: self.slot_seconds(tenant) for tenant in self._tenants})

    def shares(self) -> dict[str, float]:
        """Return of each tenant its part of the slot seconds of late; empty where nothing has run."""
        oldest = self._samples[0] if self._samples else {}
        seconds_by_tenant = {
            tenant: max(0.0, self.slot_seconds(tenant) - oldest.get(tenant, 0.0)) for tenant in self._tenants
        }
        total = sum(seconds_by_tenant.values())
        return {tenant: seconds / total for tenant, seconds in seconds_by_tenant.items()} if total else {}

    def keep_only(self, tenants: Collection[str], models: Collection[str]) -> None:
        """These are all there are: forget the other tenants, and put together what was asked of other models."""
        for tenant, usages in list(self._tenants.items()):
            is_idle = not any(usage.in_flight for usage in usages.values())
            if tenant not in tenants and is_idle:
                del self._tenants[tenant]
                continue
            for model, usage in list(usages.items()):
                if model != OTHER_MODELS and model not in models and not usage.in_flight:
                    del usages[model]
                    self.usage_of(tenant, OTHER_MODELS).add(usage)

    def records(self) -> Iterator[UsageRecord]:
        """Yield what is to be written down. What is asked meanwhile may be in it, or not."""
        for tenant in list(self._tenants):
            for model, usage in list(self.items(tenant)):
                yield usage.to_record(tenant, model)

    def restore(self, records: Iterable[UsageRecord]) -> None:
        """Go on from what was written down."""
        for each in records:
            self.usage_of(each.tenant, each.model).add(each)
        # What was before is nobody's share.
        self.sample()
