"""What a status tells of tenants: who there is, and what each has asked and been given."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Dict, Iterable, Optional, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.schema import integer, list_of, mapping, number, omit_default, record, text

_COUNT = integer(0, limits.MAX_COUNT)


@dataclass(frozen=True)
class AccountStatus:
    """What a tenant has asked of one model, and what that has taken; since the tenant is there, over restarts.

    `model` is empty for what is no request of a model that there is: of those that are gone, what was refused before
    a model was known, and where an answer has no room for each model, those that were asked least. Each request that
    has ended is in `served`, or once in `refused`, by its error's code or by the bound of the tenant that was reached.
    `rows` and `slot_seconds` are what ran, the latter in seconds of workers; `queue_seconds` is from the arrival of
    each to the worker. Bytes are those of tensors that were sent. `unexpected_exits` are workers that were lost to its
    requests.
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

    @property
    def refused(self) -> int:
        """How many requests were refused, or ended in an error."""
        return sum(self.failed.values())

    @property
    def mean_queue_s(self) -> Optional[float]:
        """How long requests waited for a worker on average; None where none was served."""
        return self.queue_seconds / self.served if self.served else None


def total_account(accounts: Iterable[AccountStatus]) -> AccountStatus:
    """Return the sum of accounts, as one of no model."""
    accounts = list(accounts)
    sums = {name: sum(getattr(each, name) for each in accounts) for name in _SUMMED_FIELDS}
    return AccountStatus(model="", failed=total_failed(accounts), **sums)


def total_failed(accounts: Iterable[AccountStatus]) -> Dict[str, int]:
    """Return how many requests of these accounts were refused, by reason, in the order of their names."""
    counts: Dict[str, int] = {}
    for account in accounts:
        for reason, count in account.failed.items():
            counts[reason] = counts.get(reason, 0) + count
    return dict(sorted(counts.items()))


_SUMMED_FIELDS = [each.name for each in fields(AccountStatus) if each.name not in ("model", "failed")]


@dataclass(frozen=True)
class TenantStatus:
    """A tenant of the configuration, with an account for each model of which it has asked anything.

    `share` is its part of the seconds of all workers of the last minute; absent where none were used. `merged_accounts`
    are accounts that are one here: an answer has room for so many.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    weight: float = field(metadata=number())
    accounts: Tuple[AccountStatus, ...] = field(metadata=list_of(record(AccountStatus), limits.MAX_MODELS + 1))
    share: Optional[float] = field(default=None, metadata=number())
    merged_accounts: int = field(default=0, metadata=omit_default(_COUNT))
