"""Usage counters of each tenant for each model, and the current use of the tenants' quotas.

There is one entry for each pair of a configured tenant and a configured model. The usage of removed models is added up
in one entry for each tenant, and the usage of removed tenants is dropped, but only after the requests in flight of that
model or tenant have ended.
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

# The names of a tenant's quotas; an error has the name of the exceeded quota.
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

# The reasons by which `Usage.refused` counts errors: the exceeded quotas, and the codes of all other errors.
REASONS = (*QUOTAS, *ERRORS)

# The key, in place of a model's name, for the usage of removed models and for errors of messages that name no existing
# model.
OTHER_MODELS = ""

# Seconds after which a client may repeat a rejected request: the estimated time until a request of the tenant has
# ended.
_RETRY_AFTER_S = 0.1

_KNOWN_REASONS = frozenset(REASONS)

# Maximum of a counter after an addition, so that large values from a damaged counters file can still be sent and added.
_MAX_COUNT = 2**62

# The number of samples of slot seconds that are kept to compute the tenants' shares.
_SHARE_SAMPLES = 6

# Maximum seconds of a counter in the counters file.
_MAX_SECONDS = 1e15

# Maximum byte-seconds of a counter in the counters file.
_MAX_BYTE_SECONDS = 1e27

_COUNT = integer(0, limits.MAX_COUNT)
_SECONDS = number(_MAX_SECONDS)


class QuotaExceeded(ResourceExhausted):
    """The error for a request or connection that exceeds a quota of its tenant.

    Attributes:
        quota: the name of the quota, one of `QUOTAS`.
    """

    def __init__(self, quota: str, text: str, *, retry_after: float | None = None) -> None:
        super().__init__(text, retry_after=retry_after)
        self.quota = quota


@dataclass(frozen=True)
class UsageRecord:
    """The usage of a model by a tenant as stored in the counters file; `Usage` describes the fields."""

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
    resident_byte_seconds: float = field(default=0.0, metadata=number(_MAX_BYTE_SECONDS))

    @property
    def key(self) -> tuple[str, str]:
        """The tenant and the model, which identify the record."""
        return self.tenant, self.model


class Usage:
    """The usage of a model by a tenant. A request that ends counts once, in `served` or in `refused`.

    Attributes:
        requests: the number of requests received, including those refused at once.
        served: the number of requests answered.
        rows: the number of rows that were run and answered, if it is known which inputs of the model have rows.
        slot_seconds: the seconds for which slots ran requests of the tenant; the seconds of a batch are divided among
            its requests in proportion to their rows.
        queue_seconds: the sum of the seconds from the arrival of each request until a slot received it.
        bytes_in: tensor bytes received in messages, without shared memory; all bytes of packets on direct channels.
        bytes_out: the same for sent messages.
        unexpected_exits: the number of slots that were lost because of requests of the tenant.
        in_flight: the number of requests that were accepted and have not ended.
        refused: the number of errors by reason, including errors for messages other than requests.
        resident_byte_seconds: the memory of the model that was charged to the tenant, in bytes multiplied by seconds.
    """

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "in_flight",
        "queue_seconds",
        "refused",
        "requests",
        "resident_byte_seconds",
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
        self.resident_byte_seconds = 0.0

    def count_accepted(self, nbytes: int) -> None:
        """Count an accepted request with `nbytes` tensor bytes."""
        self.requests += 1
        self.in_flight += 1
        self.bytes_in += nbytes

    def uncount_accepted(self, nbytes: int) -> None:
        """Undo `count_accepted` for a request that a later check has refused."""
        self.requests -= 1
        self.in_flight -= 1
        self.bytes_in -= nbytes

    def add_queue_time(self, seconds: float) -> None:
        """Add the seconds from the arrival of a request until a slot received it."""
        self.queue_seconds += seconds

    def add_run(self, seconds: float, rows: int) -> None:
        """Add the slot time in seconds and the rows of a request, or of one part of a split request."""
        self.slot_seconds += seconds
        self.rows += rows

    def count_served(self, nbytes: int) -> None:
        """Count an answered request with `nbytes` tensor bytes in the answer."""
        self.in_flight -= 1
        self.served += 1
        self.bytes_out += nbytes

    def count_failed(self, error: RequestError) -> None:
        """Count an accepted request that has ended in an error."""
        self.in_flight -= 1
        self.count_refused(error)

    def count_refused(self, error: RequestError, *, requests: int = 0) -> None:
        """Count a refused message; `requests` is 1 if the message is an inference request, otherwise 0."""
        self.requests += requests
        self.count_errors(error.quota if isinstance(error, QuotaExceeded) else error.code, 1)

    def count_errors(self, reason: str, number: int) -> None:
        """Count a number of errors with the same reason."""
        if number:
            self.refused[reason] = self.refused.get(reason, 0) + number

    @property
    def refused_total(self) -> int:
        """The total number of errors in `refused`."""
        return sum(self.refused.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not (
            self.requests or self.refused or self.unexpected_exits or self.slot_seconds or self.resident_byte_seconds
        )

    def add(self, other: Usage | UsageRecord) -> None:
        """Add the counters of another usage, except requests in flight and refusals with reasons outside `REASONS`."""
        self.requests = min(self.requests + other.requests, _MAX_COUNT)
        self.served = min(self.served + other.served, _MAX_COUNT)
        self.rows = min(self.rows + other.rows, _MAX_COUNT)
        self.slot_seconds += other.slot_seconds
        self.queue_seconds += other.queue_seconds
        self.resident_byte_seconds += other.resident_byte_seconds
        self.bytes_in = min(self.bytes_in + other.bytes_in, _MAX_COUNT)
        self.bytes_out = min(self.bytes_out + other.bytes_out, _MAX_COUNT)
        self.unexpected_exits = min(self.unexpected_exits + other.unexpected_exits, _MAX_COUNT)
        for reason, count in other.refused.items():
            if reason in _KNOWN_REASONS:
                self.refused[reason] = min(self.refused.get(reason, 0) + count, _MAX_COUNT)

    def to_record(self, tenant: str, model: str) -> UsageRecord:
        """Return the counters as a record for the counters file."""
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
            min(self.resident_byte_seconds, _MAX_BYTE_SECONDS),
        )


class Quota:
    """The current use of a tenant's quotas, counted also for quotas without a limit, because a reload may set one.

    Attributes:
        in_flight: the number of requests that were accepted and have not ended.
        waiting: the number of requests in flight that no slot has received yet.
        waiting_bytes: the tensor bytes of the waiting requests.
        connections: the number of open connections of the tenant.
    """

    __slots__ = ("_messages", "connections", "in_flight", "waiting", "waiting_bytes")

    def __init__(self) -> None:
        self.in_flight = 0
        self.waiting = 0
        self.waiting_bytes = 0
        self.connections = 0
        self._messages = TokenBucket()

    def count_message(self, config: TenantConfig, now: float) -> None:
        """Count a message of any kind that the tenant, or another tenant on this tenant's account, has sent.

        Raises:
            QuotaExceeded: the tenant has exceeded its `max_rate`.
        """
        rate = config.max_rate
        if not rate:
            return
        # With a rate below one message per second, a single message must still be possible.
        burst = max(1.0, rate)
        if not self._messages.take(rate, burst, now):
            missing = 1.0 - self._messages.tokens(rate, burst, now)
            text = f"max_rate of this tenant is {rate:g} requests of any kind per second"
            raise QuotaExceeded("max_rate", text, retry_after=missing / rate)

    def add_request(self, config: TenantConfig, description: RequestDescription, nbytes: int) -> None:
        """Count a request with `nbytes` tensor bytes, which waits for a slot from now on.

        For `max_rows`, the number of rows is the largest first dimension of the inputs.

        Raises:
            QuotaExceeded: the request exceeds a quota and is not counted.
        """
        if config.max_rows:
            rows = max((each.shape[0] for each in description.inputs if each.shape), default=0)
            if rows > config.max_rows:
                text = f"max_rows of this tenant is {config.max_rows}, but the first dimension of an input is {rows}"
                raise QuotaExceeded("max_rows", text)
        if config.max_in_flight and self.in_flight >= config.max_in_flight:
            raise _quota_error("max_in_flight", config.max_in_flight, self.in_flight)
        if config.max_queue and self.waiting >= config.max_queue:
            raise _quota_error("max_queue", config.max_queue, self.waiting)
        # A request that is larger than the limit is accepted while no other request waits; otherwise it could never
        # run.
        if config.max_queue_bytes and self.waiting and self.waiting_bytes + nbytes > config.max_queue_bytes:
            raise _quota_error("max_queue_bytes", config.max_queue_bytes, self.waiting_bytes)
        self.in_flight += 1
        self.waiting += 1
        self.waiting_bytes += nbytes

    def add_connection(self, config: TenantConfig) -> None:
        """Count a new connection, even if this method raises an error.

        Raises:
            QuotaExceeded: the tenant has too many connections; the caller must close the new one.
        """
        self.connections += 1
        if config.max_connections and self.connections > config.max_connections:
            text = f"max_connections of this tenant is {config.max_connections}; closing this connection"
            raise QuotaExceeded("max_connections", text, retry_after=_RETRY_AFTER_S)

    def start_request(self, nbytes: int) -> None:
        """Record that a slot has received a waiting request of `nbytes` tensor bytes for the first time."""
        self.waiting -= 1
        self.waiting_bytes -= nbytes

    def end_request(self, nbytes: int, *, has_started: bool) -> None:
        """Record the end of a request; `has_started` tells whether a slot had received the request."""
        self.in_flight -= 1
        if not has_started:
            self.start_request(nbytes)


def _quota_error(name: str, limit: int, current: int) -> QuotaExceeded:
    return QuotaExceeded(
        name, f"{name} of this tenant is {limit}, and {current} are in use", retry_after=_RETRY_AFTER_S
    )


class UsageTable:
    """The usage of all tenants, and recent samples from which the tenants' shares are computed."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, Usage]] = {}
        self._samples: deque[dict[str, float]] = deque(maxlen=_SHARE_SAMPLES)

    def usage_of(self, tenant: str, model: str) -> Usage:
        """Return the usage of a model by a tenant, or of `OTHER_MODELS`; a missing entry is created."""
        usages = self._tenants.get(tenant)
        if usages is None:
            usages = self._tenants[tenant] = {}
        usage = usages.get(model)
        if usage is None:
            usage = usages[model] = Usage()
        return usage

    def add_resident_time(self, tenant: str, model: str, byte_seconds: float) -> None:
        """Add the byte-seconds of reserved memory of a model to the usage of a tenant; ignore the tenant ""."""
        if tenant:
            self.usage_of(tenant, model).resident_byte_seconds += byte_seconds

    def items(self, tenant: str) -> Iterator[tuple[str, Usage]]:
        """Yield each model for which a tenant has any usage, with the usage."""
        for model, usage in self._tenants.get(tenant, {}).items():
            if not usage.is_empty:
                yield model, usage

    def total(self, tenant: str) -> Usage:
        """Return the sum of a tenant's usage of all models, including requests in flight."""
        total = Usage()
        for usage in self._tenants.get(tenant, {}).values():
            total.add(usage)
            total.in_flight += usage.in_flight
        return total

    def slot_seconds(self, tenant: str) -> float:
        """Return the slot seconds of all requests of a tenant."""
        return sum(usage.slot_seconds for usage in self._tenants.get(tenant, {}).values())

    def sample(self) -> None:
        """Record the slot seconds of all tenants; the caller does so at regular intervals.

        `shares` covers the time since the oldest recorded sample.
        """
        self._samples.append({tenant: self.slot_seconds(tenant) for tenant in self._tenants})

    def shares(self) -> dict[str, float]:
        """Return each tenant's fraction of the slot seconds since the oldest sample; empty if nothing has run."""
        oldest = self._samples[0] if self._samples else {}
        seconds_by_tenant = {
            tenant: max(0.0, self.slot_seconds(tenant) - oldest.get(tenant, 0.0)) for tenant in self._tenants
        }
        total = sum(seconds_by_tenant.values())
        return {tenant: seconds / total for tenant, seconds in seconds_by_tenant.items()} if total else {}

    def keep_only(self, tenants: Collection[str], models: Collection[str]) -> None:
        """Drop removed tenants, and merge the usage of removed models into `OTHER_MODELS`.

        Tenants and models with requests in flight are kept.
        """
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
        """Yield the records for the counters file. Changes during the iteration may be missing."""
        for tenant in list(self._tenants):
            for model, usage in list(self.items(tenant)):
                yield usage.to_record(tenant, model)

    def restore(self, records: Iterable[UsageRecord]) -> None:
        """Add the stored records of an earlier daemon."""
        for each in records:
            self.usage_of(each.tenant, each.model).add(each)
        # Sample now, so that `shares` counts only later usage and not the restored usage.
        self.sample()
