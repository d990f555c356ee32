"""The tables [models.NAME.batching] and [models.NAME.split]: batching of requests, and splitting of large requests."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from weightd_protocol import limits
from weightd_protocol.schema import FieldError, boolean, integer, list_of

# Maximum number of rows in one predict. On a CPU, even much smaller batches reach the full throughput, and the tests of
# batching at load take longer for larger batches.
MAX_ROWS = 4096

# Maximum number of rows in one request. With rows of realistic size, a request reaches the limit of bytes earlier.
_MAX_REQUEST_ROWS = 2**24


@dataclass(frozen=True)
class BatchingConfig:
    """The table [models.NAME.batching]."""

    max_rows: int = field(default=1, metadata=integer(1, MAX_ROWS))
    """Maximum rows of a batch of several requests. With 1, every request runs alone. Default: 1; with `sizes`, the
    largest of them."""

    exact: bool = field(default=True, metadata=boolean())
    """Whether requests are combined only if a test at load has shown that every bit of their outputs stays the same.
    With false, requests of one client are combined without this test."""

    sizes: tuple[int, ...] = field(default=(), metadata=list_of(integer(1, MAX_ROWS), limits.MAX_TENSORS))
    """On a card: the only batch sizes, in rows, for which the graph was compiled, in ascending order. Smaller batches
    are padded, and outputs trimmed. Empty: any size."""

    def fill_defaults(self) -> BatchingConfig:
        """Return this table with its defaults filled in."""
        return dataclasses.replace(self, max_rows=self.sizes[-1]) if self.sizes and self.max_rows == 1 else self

    def problems(self, *, is_on_cards: bool) -> Iterator[FieldError]:
        """Yield errors for keys that contradict each other or have no effect."""
        if not self.exact and self.fill_defaults().max_rows == 1:
            yield FieldError("has no effect without max_rows").at(".exact")
        if not self.sizes:
            return
        if not is_on_cards:
            yield FieldError("has no effect on the CPU, only on a card").at(".sizes")
        for index, (one, other) in enumerate(itertools.pairwise(self.sizes), 1):
            if one >= other:
                yield FieldError(f"expected ascending numbers, got {other} after {one}").at(f".sizes[{index}]")
                return
        if self.max_rows not in (1, self.sizes[-1]):
            expected = f"expected {self.sizes[-1]}, the largest of sizes, or no max_rows, got {self.max_rows}"
            yield FieldError(expected).at(".max_rows")


@dataclass(frozen=True)
class SplitConfig:
    """The table [models.NAME.split]."""

    part_rows: int = field(default=0, metadata=integer(0, MAX_ROWS))
    """Maximum rows of one part; larger requests run in parts on all devices of the model. 0: requests are not split."""

    max_rows: int = field(default=65536, metadata=integer(1, _MAX_REQUEST_ROWS))
    """Maximum rows of one request; larger requests fail with INVALID_ARGUMENT."""

    exact: bool = field(default=True, metadata=boolean())
    """Whether requests are split only if a test at load has shown that every bit of their outputs stays the same. The
    test uses the dimensions of the self-test."""

    def problems(self, batching: BatchingConfig) -> Iterator[FieldError]:
        """Yield errors for keys that contradict each other or the batching table, or have no effect."""
        if not self.part_rows:
            for key in ("max_rows", "exact"):
                if getattr(self, key) != getattr(SplitConfig, key):
                    yield FieldError("has no effect without part_rows").at(f".{key}")
        elif self.max_rows < self.part_rows:
            yield FieldError(f"expected at least part_rows, {self.part_rows}, got {self.max_rows}").at(".max_rows")
        largest = max(batching.sizes, default=MAX_ROWS)
        if self.part_rows > largest:
            message = f"expected at most the largest of batching.sizes, {largest}, got {self.part_rows}"
            yield FieldError(message).at(".part_rows")
