"""The batching policy of a slot, and the batch key, by which the daemon finds requests that may share a batch.

Messages to and from workers identify tenants and users by numbers. A worker may outlive the daemon, and the next daemon
must use the same number for the same name. So the number is a digest of the name; its 48 bits are enough to avoid
accidental collisions.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weightd_protocol.messages.inference import RequestDescription

# Maximum number of tenants and users whose names `RecentNames` remembers. Workers report them by number, and operators
# are shown the names.
_MAX_NAMES = 4096


@functools.lru_cache(_MAX_NAMES)
def principal_id(principal: str) -> int:
    """Return the number that identifies a tenant or user (`ClientOrigin.principal`) in messages to workers."""
    return int.from_bytes(hashlib.blake2b(principal.encode(), digest_size=6).digest(), "big")


class RecentNames:
    """The names of the tenants and users whose numbers were recently sent to workers."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def number_of(self, principal: str) -> int:
        """Return the number of a tenant or a user, and remember its name."""
        number = principal_id(principal)
        if number not in self._names:
            if len(self._names) >= _MAX_NAMES:
                del self._names[next(iter(self._names))]
            self._names[number] = principal
        return number

    def update(self, other: RecentNames) -> None:
        """Add the names that another instance remembers."""
        for name in other._names.values():
            self.number_of(name)

    def name_of(self, number: int) -> str:
        """Return the tenant or the user with this number, or a placeholder text if the name is not remembered."""
        return self._names.get(number, "a tenant or user of a previous daemon")


# Maximum number of cached batch keys per policy. The protocol's decoder caches the same number of descriptions.
_MAX_CACHED = 1024


Dims = frozenset[tuple[str, tuple[int, ...]]]
"""The name of each input, and its shape without the dimension that is the number of rows."""


class BatchKey(NamedTuple):
    """The form of a request's inputs and outputs, by which the daemon finds requests that may share a batch.

    Attributes:
        kind: equal for requests whose rows may be in one batch.
        rows: the number of rows.
        has_only_row_inputs: whether every input has rows. If not, each part of a split request gets the inputs without
            rows unchanged.
        dims: the name of each input, and its shape without the dimension that is the number of rows.
    """

    kind: tuple[Any, ...]
    rows: int
    has_only_row_inputs: bool
    dims: Dims


@dataclass(frozen=True)
class BatchingPolicy:
    """How the rows of requests may be merged and split at a slot.

    Attributes:
        source_number: the number of the loaded model version. All parts of a request run on the same version.
        inputs: the names of the inputs whose first dimension is the number of rows.
        outputs: the names of the outputs whose first dimension is the number of rows.
        max_rows: the maximum rows of a batch of several requests; 1 if requests do not share batches.
        max_split_rows: the maximum rows of a part of a split request; 0 if requests are not split.
        sizes: the only numbers of rows that the model supports, in ascending order; empty if it supports any.
        is_exact: whether a request gets the same answer in a shared batch as alone, to the last bit. If not, only
            requests of the same principal share a batch.
        tested_dims: the input shapes for which the holder has found that rows have the same results in batches of
            different sizes; None for all shapes. Requests with other shapes are not split: workers check shared batches
            against separate runs, but never check the parts of a request against a run of the whole request.
        unmerged_principals: the numbers (`principal_id`) of principals whose rows had other results in a shared batch
            than alone. Their requests neither share batches nor are split.
    """

    source_number: int = 0
    inputs: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()
    max_rows: int = 1
    max_split_rows: int = 0
    sizes: tuple[int, ...] = ()
    is_exact: bool = True
    tested_dims: Dims | None = None
    # Comparisons of policies ignore this field. The parts of a split request run only on slots with equal policies, and
    # a change of this field must not keep the remaining parts from these slots.
    unmerged_principals: frozenset[int] = field(default=frozenset(), compare=False)
    # The batch key of each description, by the `id()` of the description. The description is kept in the entry so that
    # no other object gets the same `id()`.
    _batch_keys: dict[int, tuple[RequestDescription, BatchKey | None]] = field(
        default_factory=dict[int, tuple[RequestDescription, BatchKey | None]], compare=False, repr=False
    )

    @property
    def can_merge(self) -> bool:
        """Whether the policy allows several requests in a batch."""
        return self.max_rows > 1

    def should_split(self, batch_key: BatchKey, principal: str) -> bool:
        """Return whether a request with this batch key is split; `principal` is the sender of the request."""
        return (
            0 < self.max_split_rows < batch_key.rows
            and self.tested_dims in (None, batch_key.dims)
            and not self.is_unmerged(principal)
        )

    def is_unmerged(self, principal: str) -> bool:
        """Return whether the rows of a tenant or user had other results in a shared batch than alone."""
        return bool(self.unmerged_principals) and principal_id(principal) in self.unmerged_principals

    def batch_key(self, description: RequestDescription) -> BatchKey | None:
        """Return the batch key of a request; None if it has no rows, or if its inputs differ in the number of rows."""
        if not self.inputs:
            return None
        cached = self._batch_keys.get(id(description))
        if cached is None:
            if len(self._batch_keys) >= _MAX_CACHED:
                self._batch_keys.clear()
            cached = self._batch_keys[id(description)] = description, self._make_batch_key(description)
        return cached[1]

    def padded_rows(self, rows: int) -> int:
        """Return the number of rows to which `rows` rows are padded for the model; 0 without padding."""
        return next_size(rows, self.sizes)

    def _make_batch_key(self, description: RequestDescription) -> BatchKey | None:
        kind: list[Any] = [description.outputs]
        dims: list[tuple[str, tuple[int, ...]]] = []
        counts: set[int] = set()
        for each in description.inputs:
            if each.name in self.inputs and each.shape:
                counts.add(each.shape[0])
                kind.append((each.name, each.datatype, each.shape[1:]))
                dims.append((each.name, each.shape[1:]))
            else:
                kind.append(each)
                dims.append((each.name, each.shape))
        if len(counts) != 1 or counts == {0}:
            return None
        is_all_rows = all(each.name in self.inputs for each in description.inputs)
        return BatchKey(tuple(kind), counts.pop(), is_all_rows, frozenset(dims))


NO_BATCHING = BatchingPolicy()
"""The policy that never merges or splits requests."""


def next_size(rows: int, sizes: Iterable[int]) -> int:
    """Return the first of the ascending sizes that is at least `rows`; 0 if all sizes are smaller."""
    return next((size for size in sizes if size >= rows), 0)
