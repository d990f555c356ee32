"""Usage accounts of tenants, which are part of status and metrics responses."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Dict, Iterable, Optional, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.schema import integer, list_of, mapping, number, omit_default, record, text

_COUNT = integer(0, limits.MAX_COUNT)


@dataclass(frozen=True)
class AccountStatus:
    """Usage of one model by one tenant.

    The counters start when the tenant is created and survive restarts of the daemon.

    One account has an empty `model`. It is for requests of removed models, for requests that were rejected before their
    model was known and, if the response has no room for every model, for requests of the least used models.

    `served` counts the requests that succeeded. `failed` counts all other requests, by error code or, if a limit of the
    tenant was reached, by the name of this limit. `rows` counts the rows that workers ran, and `slot_seconds` the
    seconds for which workers were busy with them. `queue_seconds` is the sum of the seconds from the arrival of each
    request until a worker received it. `bytes_in` and `bytes_out` count the bytes of transferred tensors.
    `unexpected_exits` counts workers that crashed because of the tenant's requests. `resident_byte_seconds` is the
    memory that was reserved for the model and charged to the tenant, in bytes times seconds.
    """

    model: str = field(metadata=text(limits.MAX_MODEL_NAME_BYTES, empty=True))
    requests: int = field(metadata=_COUNT)
    served: int = field(metadata=_COUNT)
    rows: int = field(metadata=_COUNT)
    slot_seconds: float = field(metadata=number())
    queue_seconds: float = field(metadata=number())
    bytes_in: int = field(metadata=_COUNT)
    bytes_out: int = field(metadata=_COUNT)
    in_flight: int = field(metadata=_COUNT)
    queued: int = field(metadata=_COUNT)
    failed: Dict[str, int] = field(metadata=mapping(_COUNT, limits.MAX_REFUSAL_REASONS))
    unexpected_exits: int = field(default=0, metadata=omit_default(_COUNT))
    resident_byte_seconds: float = field(default=0.0, metadata=omit_default(number()))

    @property
    def refused(self) -> int:
        """The number of requests that were rejected or that failed."""
        return sum(self.failed.values())

    @property
    def mean_queue_s(self) -> Optional[float]:
        """Mean number of seconds that a request waited in the queue; None if no request was served."""
        return self.queue_seconds / self.served if self.served else None


def total_account(accounts: Iterable[AccountStatus]) -> AccountStatus:
    """Return the sum of several accounts. The field `model` of the result is ""."""
    accounts = list(accounts)
    sums = {name: sum(getattr(each, name) for each in accounts) for name in _SUMMED_FIELDS}
    return AccountStatus(model="", failed=total_failed(accounts), **sums)


def total_failed(accounts: Iterable[AccountStatus]) -> Dict[str, int]:
    """Return the number of failed requests in all of these accounts by reason, sorted by reason."""
    counts: Dict[str, int] = {}
    for account in accounts:
        for reason, count in account.failed.items():
            counts[reason] = counts.get(reason, 0) + count
    return dict(sorted(counts.items()))


_SUMMED_FIELDS = [each.name for each in fields(AccountStatus) if each.name not in ("model", "failed")]


@dataclass(frozen=True)
class TenantStatus:
    """A tenant of the configuration, with a usage account for each model that it has used.

    `share` is the part of the seconds of all workers that the tenant used in the last minute; it is absent if all
    workers were idle. `merged_accounts` is the number of accounts that were merged into one, because the size of a
    response is limited. `max_model_bytes` is the tenant's budget for the memory of models in bytes; 0 means no limit.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    weight: float = field(metadata=number())
    accounts: Tuple[AccountStatus, ...] = field(metadata=list_of(record(AccountStatus), limits.MAX_MODELS + 1))
    share: Optional[float] = field(default=None, metadata=number())
    merged_accounts: int = field(default=0, metadata=omit_default(_COUNT))
    max_model_bytes: int = field(default=0, metadata=omit_default(_COUNT))
