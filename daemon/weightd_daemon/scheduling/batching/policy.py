"""What may be done with the rows of requests, and which requests have rows in common.

Workers tell the requests of tenants and users apart by numbers. A worker may outlive the daemon, so the number follows
from the name alone: 48 bits of a digest do not collide by chance.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weightd_protocol.messages.inference import RequestDescription

# Names that are remembered, for people.
_MAX_NAMES = 4096


@functools.lru_cache(_MAX_NAMES)
def principal_id(principal: str) -> int:
    """Return the number of a tenant or a user (`ClientOrigin.principal`)."""
    return int.from_bytes(hashlib.blake2b(principal.encode(), digest_size=6).digest(), "big")


class RecentNames:
    """The names of those whose numbers workers were told of late."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def number_of(self, principal: str) -> int:
        """Return the number of a tenant or a user, and remember whose it is."""
        number = principal_id(principal)
        if number not in self._names:
            if len(self._names) >= _MAX_NAMES:
                del self._names[next(iter(self._names))]
            self._names[number] = principal
        return number

    def update(self, other: RecentNames) -> None:
        """Remember the names that another one does, too."""
        for name in other._names.values():
            self.number_of(name)

    def name_of(self, number: int) -> str:
        """Return the tenant or the user with this number."""
        return self._names.get(number, "a tenant or user of a previous daemon")


# As many as the decoder knows by their bytes.
_MAX_CACHED = 1024


Dims = frozenset[tuple[str, tuple[int, ...]]]
"""Of each input its name and its shape, but for the rows."""


class BatchKey(NamedTuple):
    """What a request asks for, but for how many rows it has.

    Attributes:
        kind: what requests have in common whose rows may go together.
        rows: how many it has.
        has_only_row_inputs: whether each of its inputs has them; one that has not is given to each part as it is.
        dims: what it has beside the rows.
    """

    kind: tuple[Any, ...]
    rows: int
    has_only_row_inputs: bool
    dims: Dims


@dataclass(frozen=True)
class BatchingPolicy:
    """What may be done with the rows of requests where a slot runs them.

    Attributes:
        source_number: the number of what is loaded there: parts of one request run on one source.
        inputs: those whose first dimension counts rows.
        outputs: those whose first dimension follows.
        max_rows: of a batch that several requests share; 1: they share none.
        max_split_rows: that a batch takes of one request at most; 0: all.
        sizes: the only numbers of rows that the model takes, in ascending order; none: it takes any.
        is_exact: requests that share a batch have the answers that they would have alone, to the last bit. Where they
            have not, only those of one user share one.
        tested_dims: with these dimensions rows were found to be equal. A request with others does not run in parts:
            unlike what shares a batch, it is nowhere compared with what it is in one piece. None: it may have any.
        unmerged_principals: principals (`principals.number_of`) whose rows were found to differ: their requests share
            no batch, and do not run in parts.
    """

    source_number: int = 0
    inputs: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()
    max_rows: int = 1
    max_split_rows: int = 0
    sizes: tuple[int, ...] = ()
    is_exact: bool = True
    tested_dims: Dims | None = None
    # What has begun in parts goes on when this changes.
    unmerged_principals: frozenset[int] = field(default=frozenset(), compare=False)
    # By the identity of the description, with itself so that it stays that one's.
    _batch_keys: dict[int, tuple[RequestDescription, BatchKey | None]] = field(
        default_factory=dict[int, tuple[RequestDescription, BatchKey | None]], compare=False, repr=False
    )

    @property
    def can_merge(self) -> bool:
        """Whether requests may share a batch."""
        return self.max_rows > 1

    def should_split(self, batch_key: BatchKey, principal: str) -> bool:
        """Whether a request of this form runs in parts; `principal`: the tenant or the user that has sent it."""
        return (
            0 < self.max_split_rows < batch_key.rows
            and self.tested_dims in (None, batch_key.dims)
            and not self.is_unmerged(principal)
        )

    def is_unmerged(self, principal: str) -> bool:
        """Whether the rows of a tenant or a user were found to differ."""
        return bool(self.unmerged_principals) and principal_id(principal) in self.unmerged_principals

    def batch_key(self, description: RequestDescription) -> BatchKey | None:
        """Return what is asked for, but for the rows; None where it has none, or not as many in each input."""
        if not self.inputs:
            return None
        cached = self._batch_keys.get(id(description))
        if cached is None:
            if len(self._batch_keys) >= _MAX_CACHED:
                self._batch_keys.clear()
            cached = self._batch_keys[id(description)] = description, self._make_batch_key(description)
        return cached[1]

    def padded_rows(self, rows: int) -> int:
        """Return how many rows the model is given for so many; 0: just these."""
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
"""Each request is a job of its own."""


def next_size(rows: int, sizes: Iterable[int]) -> int:
    """Return the first of the ascending sizes that so many rows go into; 0 where there is none."""
    return next((size for size in sizes if size >= rows), 0)
