"""Somebody reads as long as somebody waits, and only one does: whatever they do, in whatever order."""

from __future__ import annotations

import threading
from typing import List, Tuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weightd.pending import PendingCall
from weightd.threaded import ReaderElection, Waiter
from weightd_protocol.errors import Unavailable
from weightd_protocol.messages.control import ReadyResponse


class World(RuleBasedStateMachine):
    """Threads that do not run: each is where its last step has left it."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = ReaderElection(lambda: self.thread)
        self.thread = 0
        self.threads = 0
        self.readers: List[Tuple[int, PendingCall]] = []
        self.waiting: List[Waiter] = []

    @rule()
    def wait(self) -> None:
        call = PendingCall("1", ReadyResponse)
        self._new_thread()
        turn = self.turns.join(call)
        if turn is None:
            self.readers.append((self.thread, call))
        else:
            self.waiting.append(turn)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        calls = [*(call for _, call in self.readers), *(turn.call for turn in self.waiting)]
        if calls:
            data.draw(st.sampled_from(calls)).fail(Unavailable())

    @rule()
    def read_no_more(self) -> None:
        if self.readers:
            self.thread, _ = self.readers.pop()
            self._leave()

    @rule(data=st.data())
    def wake_up_or_give_up(self, data: st.DataObject) -> None:
        if self.waiting:
            turn = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
            self.thread = turn.thread
            if self.turns.withdraw(turn):
                self.readers.append((turn.thread, turn.call))

    @rule()
    def look(self) -> None:
        self._new_thread()
        if self.turns.try_read():
            assert not self._reading()
            self._leave()

    @rule(stuck=st.integers(0, 2))
    def others_are_stuck(self, stuck: int) -> None:
        self.turns.blocked_count = stuck

    def _leave(self) -> None:
        assert self.turns.step_down() == self.turns.blocked_count
        assert self.thread not in self.turns.reader.values()

    def _new_thread(self) -> None:
        self.thread = self.threads = self.threads + 1

    def _reading(self) -> Tuple[object, ...]:
        return (*self.readers, *(turn for turn in self.waiting if turn.is_reader))

    @invariant()
    def one_reads_if_one_waits(self) -> None:
        assert len(self._reading()) <= 1
        assert [*self.turns.reader.values()] == [
            *(thread for thread, _ in self.readers),
            *(turn.thread for turn in self.waiting if turn.is_reader),
        ]
        assert self._reading() or all(turn.call.done for turn in self.waiting)

    @invariant()
    def who_has_a_reason_is_awake(self) -> None:
        for turn in self.waiting:
            assert (turn.is_reader or turn.call.done) == turn.is_awake


TestTurns = World.TestCase


def test_who_could_not_leave_reads_when_it_is_back() -> None:
    turns, call = ReaderElection(), PendingCall("1", ReadyResponse)
    others: List[object] = []

    def other() -> None:
        turn = turns.join(call)
        others.append(turn is not None and turns.withdraw(turn))

    assert turns.join(call) is None
    for _ in range(2):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert not turns.try_read(reentrant=False)
        assert turns.try_read()
        assert turns.join(call) is None
    assert others == [False, False]
    turns.step_down()
    assert not turns.reader
