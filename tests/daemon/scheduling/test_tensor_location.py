"""The regions mapped and unmapped before each predict match those in the worker."""

from __future__ import annotations

import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from testkit.examples import examples
from weightd_daemon.scheduling.tensor_location import SharedRegion, WorkerRegions

MEMORIES = [SharedRegion(number, os.dup(0), 1, os.close) for number in range(8)]


class WorkerRegionsMachine(RuleBasedStateMachine):
    """A worker that maps and unmaps regions as ordered."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped = WorkerRegions(4)
        self.worker: set[int] = set()
        self.used: list[int] = []

    @rule(memories=st.lists(st.sampled_from(MEMORIES), max_size=4, unique=True))
    def predict(self, memories: list[SharedRegion]) -> None:
        surplus, missing = self.mapped.mark_used(memories)
        self.worker.difference_update(surplus)
        for memory in missing:
            assert memory.number not in self.worker
            self.worker.add(memory.number)
        numbers = [memory.number for memory in memories]
        self.used = [*(each for each in self.used if each not in numbers), *numbers][-4:]
        assert self.worker == {*self.used}

    @rule(number=st.integers(0, 7))
    def forget(self, number: int) -> None:
        assert self.mapped.remove(number) == (number in self.worker)
        self.worker.discard(number)
        self.used = [each for each in self.used if each != number]

    @invariant()
    def latest_region_is_the_last_used(self) -> None:
        assert self.mapped.latest_number is None or [self.mapped.latest_number] == self.used[-1:]


TestWorkerRegionsMachine = WorkerRegionsMachine.TestCase
TestWorkerRegionsMachine.settings = settings(max_examples=examples(30), stateful_step_count=20)
