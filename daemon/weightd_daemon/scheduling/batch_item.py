"""A part of a request: what one batch runs of it."""

from __future__ import annotations

from dataclasses import dataclass

from weightd_daemon.scheduling.batching.split import SplitRequest
from weightd_daemon.scheduling.request import Request
from weightd_protocol import limits

_ALL_ROWS = range(limits.MAX_DIM)

# Parts that are not all of a request have numbers from here on, which no request has.
FIRST_SPLIT_NUMBER = 2**62


@dataclass(eq=False, slots=True)
class BatchItem:
    """All of a request, or some of its rows.

    Attributes:
        number: by which its slot calls it; that of the request, if it is all of it.
        request: whose it is.
        split: the request, if this is not all of it.
        first_row: the first of the rows, then.
        rows: how many there are, as far as that is known.
    """

    number: int
    request: Request
    split: SplitRequest | None = None
    first_row: int = 0
    rows: int = 0

    @property
    def row_range(self) -> range:
        """Those of the request that it has, and more if that is all of them."""
        return _ALL_ROWS if self.split is None else range(self.first_row, self.first_row + self.rows)

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for what comes of it."""
        return not (self.request.is_ended or (self.split is not None and self.split.is_ended))
