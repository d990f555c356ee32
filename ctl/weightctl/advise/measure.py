"""Requests of one row and of several, one at a time, and what their answers say."""

from __future__ import annotations

import itertools
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Union

import numpy as np

from weightctl.advise.comparison import Comparison
from weightctl.advise.recommend import BatchSizeResult
from weightctl.advise.rounds import RowSlice, block_requests, count_blocks
from weightctl.advise.source import FileRows, SyntheticRows
from weightctl.measuring.counters import has_split, read_counters
from weightctl.measuring.samples import Arrays
from weightd.client import Client
from weightd_protocol.errors import Internal, InvalidArgument

Outputs = Mapping[str, Any]

# A request goes from client to daemon to worker and back; a question that the daemon answers itself half of that.
OVERHEAD_PINGS = 2


class AdvisePlan(NamedTuple):
    """What to measure.

    Attributes:
        model: which model is asked.
        sizes: how many rows a request has, in ascending order, 1 among them.
        source: where they come from.
        min_distinct_rows: how many different rows are compared at least.
        min_seconds: how long it goes on after that, all in all.
    """

    model: str
    sizes: Sequence[int]
    source: Union[SyntheticRows, FileRows]
    min_distinct_rows: int
    min_seconds: float


class Measurement:
    """Asks, and keeps what has come: it may be ended at any time.

    Args:
        client: asks.
        plan: for what.
    """

    def __init__(self, client: Client, plan: AdvisePlan) -> None:
        self._client = client
        self._plan = plan
        self._ping_times_s: List[float] = []
        self._request_times_s: Dict[int, List[float]] = {size: [] for size in plan.sizes}
        self._comparisons: Dict[int, Comparison] = {size: Comparison() for size in plan.sizes}
        self._refusals: Dict[int, str] = {}
        self._is_split: Dict[int, bool] = {}

    @property
    def results(self) -> List[BatchSizeResult]:
        """What is known, in ascending order; of a size that was refused, why."""
        overhead_s = OVERHEAD_PINGS * _median(self._ping_times_s)
        return [
            BatchSizeResult(
                size,
                _median(self._request_times_s[size]),
                overhead_s,
                len(self._request_times_s[size]),
                self._comparisons[size],
                self._is_split.get(size, False),
                self._refusals.get(size, ""),
            )
            for size in self._plan.sizes
        ]

    def run(self, on_progress: Callable[[int, int], None]) -> None:
        """Ask until there is enough.

        `on_progress` is called with how many rows have been compared, and how many will be.

        Raises:
            RequestError: a request was not answered, and not because of its rows.
        """
        begin = time.monotonic()
        sizes = self._warm_up()
        length = sizes[-1]
        block_count = count_blocks(sizes, self._plan.min_distinct_rows)
        for done in itertools.count():
            if done >= block_count and time.monotonic() - begin >= self._plan.min_seconds:
                return
            for each in self._measure_block(sizes, done):
                on_progress(done * length + each.end, block_count * length)

    def _warm_up(self) -> List[int]:
        """Ask for each size once, which is the warm-up, and return those that are answered."""
        rows = self._plan.source.block(0, self._plan.sizes[-1])
        accepted: List[int] = []
        for size in self._plan.sizes:
            before = read_counters(self._client.status(), self._plan.model)
            try:
                self._infer(rows, RowSlice(size, 0))
            except (InvalidArgument, Internal) as error:
                if size == 1:
                    raise
                self._refusals[size] = str(error)
            else:
                accepted.append(size)
                after = read_counters(self._client.status(), self._plan.model)
                self._is_split[size] = has_split(before, after)
        return accepted

    def _measure_block(self, sizes: Sequence[int], number: int) -> Iterator[RowSlice]:
        """Ask for the rows of a block in each size; yield what has been compared."""
        rows = self._plan.source.block(number, sizes[-1])
        single: List[Outputs] = []
        for each in block_requests(sizes):
            begin = time.monotonic()
            outputs = self._infer(rows, each)
            end = time.monotonic()
            self._request_times_s[each.rows].append(end - begin)
            if each.rows == 1:
                single.append(outputs)
                self._client.ready(self._plan.model)
                self._ping_times_s.append(time.monotonic() - end)
            else:
                self._comparisons[each.rows].compare(outputs, single[each.first : each.end])
            yield each
        self._comparisons[1].compare(self._infer(rows, RowSlice(1, 0)), single[:1])

    def _infer(self, rows: Arrays, row_slice: RowSlice) -> Outputs:
        inputs = {name: array[row_slice.first : row_slice.end] for name, array in rows.items()}
        return self._client.infer(self._plan.model, inputs)


def _median(seconds: Sequence[float]) -> float:
    """The module `statistics` takes longer to import than all of this."""
    return float(np.median(seconds)) if seconds else 0.0
