"""Usage accounts of tenants in status and metrics responses."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Dict, Iterable, Optional, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.schema import integer, list_of, mapping, number, omit_default, record, text

_COUNT = integer(0, limits.MAX_COUNT)


@dataclass(frozen=True)
class AccountStatus:
    """Usage of one model by one tenant. The counters start when the tenant is created and survive restarts.

    `model` is empty for requests that belong to no listed model: requests of removed models, requests that were
    rejected before their model was known and, if the response has no room for every model, requests of the least used
    models. `served` counts the requests that succeeded. `failed` counts the others, by error code or by the limit of
    the tenant that was reached. `rows` and `slot_seconds` count what workers ran, the latter in seconds of workers.
    `queue_seconds` is the time from the arrival of each request until a worker received it. `bytes_in` and `bytes_out`
    count transferred tensors. `unexpected_exits` counts workers that crashed because of the tenant's requests.
    `resident_byte_seconds` is the memory that was reserved for the model on the tenant's account, times its duration.
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
        """The number of requests that were rejected or failed."""
        return sum(self.failed.values())

    @property
    def mean_queue_s(self) -> Optional[float]:
        """Mean time of a request in the queue in seconds; None if no request was served."""
        return self.queue_seconds / self.served if self.served else None


def total_account(accounts: Iterable[AccountStatus]) -> AccountStatus:
    """Return the sum of accounts as an account without a model."""
    accounts = list(accounts)
    sums = {name: sum(getattr(each, name) for each in accounts) for name in _SUMMED_FIELDS}
    return AccountStatus(model="", failed=total_failed(accounts), **sums)


def total_failed(accounts: Iterable[AccountStatus]) -> Dict[str, int]:
    """Return the number of failed requests in these accounts by reason, sorted by reason."""
    counts: Dict[str, int] = {}
    for account in accounts:
        for reason, count in account.failed.items():
            counts[reason] = counts.get(reason, 0) + count
    return dict(sorted(counts.items()))


_SUMMED_FIELDS = [each.name for each in fields(AccountStatus) if each.name not in ("model", "failed")]


@dataclass(frozen=True)
class TenantStatus:
    """A tenant of the configuration, with an account for each model that it has used.

    `share` is the tenant's part of the seconds of all workers in the last minute; absent if the workers were idle.
    `merged_accounts` is the number of accounts that were merged into one because a response has limited room.
    `max_model_bytes` is the tenant's budget for the memory of models; 0: no limit.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    weight: float = field(metadata=number())
    accounts: Tuple[AccountStatus, ...] = field(metadata=list_of(record(AccountStatus), limits.MAX_MODELS + 1))
    share: Optional[float] = field(default=None, metadata=number())
    merged_accounts: int = field(default=0, metadata=omit_default(_COUNT))
    max_model_bytes: int = field(default=0, metadata=omit_default(_COUNT))
