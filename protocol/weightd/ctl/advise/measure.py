"""Requests of one row and of several, one at a time, and what their answers say."""

from __future__ import annotations

import itertools
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Union

import numpy as np

from weightd.client.client import Client
from weightd.ctl.advise.evidence import Evidence
from weightd.ctl.advise.rounds import Slice, block, blocks
from weightd.ctl.advise.rule import Size
from weightd.ctl.advise.source import FromFile, MadeUp
from weightd.ctl.measuring.counters import counted, is_cut
from weightd.ctl.measuring.samples import Arrays
from weightd.protocol.errors import Internal, InvalidArgument

Outputs = Mapping[str, Any]

# A request goes from client to daemon to worker and back; a question that the daemon answers itself half of that.
WAY_ROUNDS = 2


class Plan(NamedTuple):
    """What to measure.

    Attributes:
        model: which model is asked.
        sizes: how many rows a request has, in ascending order, 1 among them.
        source: where they come from.
        different: how many different rows are compared at least.
        seconds: how long it goes on after that, all in all.
    """

    model: str
    sizes: Sequence[int]
    source: Union[MadeUp, FromFile]
    different: int
    seconds: float


class Measuring:
    """Asks, and keeps what has come: it may be ended at any time.

    Args:
        client: asks.
        plan: for what.
    """

    def __init__(self, client: Client, plan: Plan) -> None:
        self._client = client
        self._plan = plan
        self._rounds: List[float] = []
        self._seconds: Dict[int, List[float]] = {size: [] for size in plan.sizes}
        self._evidence: Dict[int, Evidence] = {size: Evidence() for size in plan.sizes}
        self._refused: Dict[int, str] = {}
        self._split: Dict[int, bool] = {}

    @property
    def sizes(self) -> List[Size]:
        """What is known, in ascending order; of a size that was refused, why."""
        way = WAY_ROUNDS * _median(self._rounds)
        return [
            Size(
                size,
                _median(self._seconds[size]),
                way,
                len(self._seconds[size]),
                self._evidence[size],
                self._split.get(size, False),
                self._refused.get(size, ""),
            )
            for size in self._plan.sizes
        ]

    def run(self, told: Callable[[int, int], None]) -> None:
        """Ask until there is enough; `told` is called with how many rows have been compared, and how many will be.

        Raises:
            RequestError: a request was not answered, and not because of its rows.
        """
        begin = time.monotonic()
        sizes = self._accepted()
        length = sizes[-1]
        number = blocks(sizes, self._plan.different)
        for done in itertools.count():
            if done >= number and time.monotonic() - begin >= self._plan.seconds:
                return
            for each in self._block(sizes, done):
                told(done * length + each.end, number * length)

    def _accepted(self) -> List[int]:
        """Ask for each size once, which is the warm-up, and return those that are answered."""
        rows = self._plan.source.block(0, self._plan.sizes[-1])
        accepted: List[int] = []
        for size in self._plan.sizes:
            before = counted(self._client.status(), self._plan.model)
            try:
                self._ask(rows, Slice(size, 0))
            except (InvalidArgument, Internal) as error:
                if size == 1:
                    raise
                self._refused[size] = str(error)
            else:
                accepted.append(size)
                after = counted(self._client.status(), self._plan.model)
                self._split[size] = is_cut(before, after)
        return accepted

    def _block(self, sizes: Sequence[int], number: int) -> Iterator[Slice]:
        """Ask for the rows of a block in each size; yield what has been compared."""
        rows = self._plan.source.block(number, sizes[-1])
        alone: List[Outputs] = []
        for each in block(sizes):
            begin = time.monotonic()
            outputs = self._ask(rows, each)
            end = time.monotonic()
            self._seconds[each.rows].append(end - begin)
            if each.rows == 1:
                alone.append(outputs)
                self._client.ready(self._plan.model)
                self._rounds.append(time.monotonic() - end)
            else:
                self._evidence[each.rows].compare(outputs, alone[each.first : each.end])
            yield each
        self._evidence[1].compare(self._ask(rows, Slice(1, 0)), alone[:1])

    def _ask(self, rows: Arrays, which: Slice) -> Outputs:
        inputs = {name: array[which.first : which.end] for name, array in rows.items()}
        return self._client.infer(self._plan.model, inputs)


def _median(seconds: Sequence[float]) -> float:
    """The module `statistics` takes longer to import than all of this."""
    return float(np.median(seconds)) if seconds else 0.0
