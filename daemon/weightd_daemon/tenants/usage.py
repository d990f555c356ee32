"""Usage counters of each tenant for each model, and the quotas of tenants.

The number of counters is limited by the configured tenants and models. The usage of models that no longer exist is
added up in one entry; the usage of a tenant that no longer exists is dropped. Both wait until the requests in flight
have ended.
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

# The quotas of a tenant. An error names the quota that was exceeded.
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

# All reasons of a refusal: the quotas, and the codes of the other errors in which a request may end.
REASONS = (*QUOTAS, *ERRORS)

# The model name of usage that belongs to no existing model.
OTHER_MODELS = ""

# The estimated time in seconds until one of the tenant's requests has ended.
_RETRY_AFTER_S = 0.1

_KNOWN_REASONS = frozenset(REASONS)

# The maximum of a sum, so that values from a damaged file can still be sent and added to.
_MAX_COUNT = 2**62

# The number of recent samples from which shares are computed.
_SHARE_SAMPLES = 6

# The maximum number of seconds in the file.
_MAX_SECONDS = 1e15

# The maximum number of byte-seconds in the file.
_MAX_BYTE_SECONDS = 1e27

_COUNT = integer(0, limits.MAX_COUNT)
_SECONDS = number(_MAX_SECONDS)


class QuotaExceeded(ResourceExhausted):
    """A quota of the tenant is exceeded.

    Attributes:
        quota: the name of the quota, one of `QUOTAS`.
    """

    def __init__(self, quota: str, text: str, *, retry_after: float | None = None) -> None:
        super().__init__(text, retry_after=retry_after)
        self.quota = quota


@dataclass(frozen=True)
class UsageRecord:
    """The stored form of a tenant's usage of a model; for the fields, see `Usage`."""

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
        requests: requests received, including those refused at once.
        served: requests answered.
        rows: rows that have run and were answered, as far as the model's row inputs are known.
        slot_seconds: seconds of slot time; a batch of several requests is divided by rows.
        queue_seconds: seconds from the arrival of each request until a slot received it.
        bytes_in: tensor bytes received in messages, without shared memory.
        bytes_out: tensor bytes sent in messages, without shared memory.
        unexpected_exits: slots that were lost to the tenant's requests.
        in_flight: requests that were accepted and have not ended.
        refused: the number of errors by reason, including errors of messages other than requests.
        resident_byte_seconds: the memory that the model has had reserved on the tenant's account, times its duration.
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

    def admit(self, quota: Quota, config: TenantConfig, description: RequestDescription, nbytes: int) -> None:
        """Count a request with `nbytes` tensor bytes, here and in the quota of its tenant.

        Raises:
            QuotaExceeded: the request exceeds a quota and is not counted.
        """
        quota.add_request(config, description, nbytes)
        self.count_accepted(nbytes)

    def withdraw(self, quota: Quota, nbytes: int) -> None:
        """Undo `admit` for a request that a later check has refused."""
        quota.end_request(nbytes, has_started=False)
        self.requests -= 1
        self.in_flight -= 1
        self.bytes_in -= nbytes

    def start(self, quota: Quota, nbytes: int, waited_s: float) -> None:
        """Record that a slot received an admitted request for the first time, `waited_s` seconds after its arrival."""
        quota.start_request(nbytes)
        self.add_queue_time(waited_s)

    def end(self, quota: Quota, nbytes: int, outcome: RequestError | int, *, has_started: bool) -> None:
        """Record the end of an admitted request, with an error or with an answer of `outcome` tensor bytes."""
        quota.end_request(nbytes, has_started=has_started)
        if isinstance(outcome, int):
            self.count_served(outcome)
        else:
            self.count_failed(outcome)

    def count_accepted(self, nbytes: int) -> None:
        """Count an accepted request with `nbytes` tensor bytes."""
        self.requests += 1
        self.in_flight += 1
        self.bytes_in += nbytes

    def add_queue_time(self, seconds: float) -> None:
        """Add the seconds from the arrival of a request until a slot received it."""
        self.queue_seconds += seconds

    def add_run(self, seconds: float, rows: int) -> None:
        """Add the slot time and the rows of a request, or of a part of one."""
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
        """Count a refused message; `requests` is 1 if the message is an inference request."""
        self.requests += requests
        reason = error.quota if isinstance(error, QuotaExceeded) else error.code
        self.refused[reason] = self.refused.get(reason, 0) + 1

    @property
    def refused_total(self) -> int:
        """The total number of refusals."""
        return sum(self.refused.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not (
            self.requests or self.refused or self.unexpected_exits or self.slot_seconds or self.resident_byte_seconds
        )

    def add(self, other: Usage | UsageRecord) -> None:
        """Add the counters of another usage, except its requests in flight and unknown reasons."""
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
        """Return the counters in stored form."""
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
    """The current use of a tenant's quotas. It is counted without limits, too, because a reload may set one.

    Attributes:
        in_flight: requests that were accepted and have not ended.
        waiting: requests in flight that no slot has received yet.
        waiting_bytes: the tensor bytes of these.
        connections: the number of connections.
    """

    __slots__ = ("_messages", "connections", "in_flight", "waiting", "waiting_bytes")

    def __init__(self) -> None:
        self.in_flight = 0
        self.waiting = 0
        self.waiting_bytes = 0
        self.connections = 0
        self._messages = TokenBucket()

    def count_message(self, config: TenantConfig, now: float) -> None:
        """Count a message of any kind from the tenant, or from another tenant on its account.

        Raises:
            QuotaExceeded: the tenant's rate is exceeded.
        """
        rate = config.max_rate
        if not rate:
            return
        # A rate below one message a second must allow a single message, too.
        burst = max(1.0, rate)
        if not self._messages.take(rate, burst, now):
            missing = 1.0 - self._messages.tokens(rate, burst, now)
            text = f"max_rate of this tenant is {rate:g} requests of any kind per second"
            raise QuotaExceeded("max_rate", text, retry_after=missing / rate)

    def add_request(self, config: TenantConfig, description: RequestDescription, nbytes: int) -> None:
        """Count a request with `nbytes` tensor bytes, which waits from now on.

        The number of rows is the largest first dimension of the inputs.

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
        # A single request may be larger.
        if config.max_queue_bytes and self.waiting and self.waiting_bytes + nbytes > config.max_queue_bytes:
            raise _quota_error("max_queue_bytes", config.max_queue_bytes, self.waiting_bytes)
        self.in_flight += 1
        self.waiting += 1
        self.waiting_bytes += nbytes

    def add_connection(self, config: TenantConfig) -> None:
        """Count a connection, even if an error is raised.

        Raises:
            QuotaExceeded: the tenant has too many connections; this one must be closed.
        """
        self.connections += 1
        if config.max_connections and self.connections > config.max_connections:
            text = f"max_connections of this tenant is {config.max_connections}; closing this connection"
            raise QuotaExceeded("max_connections", text, retry_after=_RETRY_AFTER_S)

    def start_request(self, nbytes: int) -> None:
        """Record that a slot has received a request for the first time."""
        self.waiting -= 1
        self.waiting_bytes -= nbytes

    def end_request(self, nbytes: int, *, has_started: bool) -> None:
        """Record the end of a request; `has_started` tells whether a slot had received it."""
        self.in_flight -= 1
        if not has_started:
            self.start_request(nbytes)


def _quota_error(name: str, limit: int, current: int) -> QuotaExceeded:
    return QuotaExceeded(
        name, f"{name} of this tenant is {limit}, and {current} are in use", retry_after=_RETRY_AFTER_S
    )


class UsageTable:
    """The usage of all tenants."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, Usage]] = {}
        self._samples: deque[dict[str, float]] = deque(maxlen=_SHARE_SAMPLES)

    def usage_of(self, tenant: str, model: str) -> Usage:
        """Return the usage of an existing model, or of `OTHER_MODELS`, by a tenant."""
        usages = self._tenants.get(tenant)
        if usages is None:
            usages = self._tenants[tenant] = {}
        usage = usages.get(model)
        if usage is None:
            usage = usages[model] = Usage()
        return usage

    def add_resident_time(self, tenant: str, model: str, byte_seconds: float) -> None:
        """Add the memory that a model has had reserved on the account of a tenant; "" is no tenant."""
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
        """Take a sample of the slot seconds, at regular intervals. Shares cover the time since the oldest sample."""
        self._samples.append({tenant: self.slot_seconds(tenant) for tenant in self._tenants})

    def shares(self) -> dict[str, float]:
        """Return each tenant's share of the recent slot seconds; empty if nothing has run."""
        oldest = self._samples[0] if self._samples else {}
        seconds_by_tenant = {
            tenant: max(0.0, self.slot_seconds(tenant) - oldest.get(tenant, 0.0)) for tenant in self._tenants
        }
        total = sum(seconds_by_tenant.values())
        return {tenant: seconds / total for tenant, seconds in seconds_by_tenant.items()} if total else {}

    def keep_only(self, tenants: Collection[str], models: Collection[str]) -> None:
        """Drop tenants that no longer exist, and merge the usage of models that no longer exist into `OTHER_MODELS`."""
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
        """Yield the records to store. Changes during the iteration may or may not be included."""
        for tenant in list(self._tenants):
            for model, usage in list(self.items(tenant)):
                yield usage.to_record(tenant, model)

    def restore(self, records: Iterable[UsageRecord]) -> None:
        """Add the stored records of an earlier daemon."""
        for each in records:
            self.usage_of(each.tenant, each.model).add(each)
        # Stored usage must not count in the shares.
        self.sample()
