"""Tests of one client in several threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Iterator, List, Sequence, Tuple

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from testkit.fakedaemon import LIMIT_S, FakeDaemon, echo, silent
from weightd import Client, ClientClosed, DeadlineExceeded, Unavailable, WeightdError
from weightd.pending import PendingCall
from weightd.reader_election import ReaderElection, Waiter
from weightd.session import ClientSession
from weightd_protocol.messages.control import ReadyResponse
from weightd_protocol.messages.inference import Infer
from weightd_protocol.messages.types import ClientMessage

X = np.arange(6, dtype=np.float32)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def until_all_wait(client: Client, count: int) -> None:
    """Wait until `count` calls wait: one thread reads, the others do not."""
    deadline = time.monotonic() + LIMIT_S
    while len(client._transport._election._waiters) < count - 1 or not client._transport._election.reader:  # pyright: ignore[reportPrivateUsage]
        assert time.monotonic() < deadline
        time.sleep(0.001)


def asks(client: Client, model: str = "m", timeout: float = LIMIT_S) -> Any:
    return client.infer(model, {"x": X}, timeout=timeout)


def test_each_thread_gets_its_answers(client: Client, pool: ThreadPoolExecutor) -> None:
    def ask(number: int) -> None:
        for index in range(40):
            # Some arrays exceed one read or write.
            x = np.full((1, 100, 100_000, 300_000)[(number + index) % 4], 100 * number + index, np.float64)
            assert np.array_equal(client.infer("echo", {"x": x})["x"], x)

    assert [*pool.map(ask, range(8))] == [None] * 8


def test_slow_calls_do_not_delay_others(client: Client, daemon: FakeDaemon, pool: ThreadPoolExecutor) -> None:
    daemon.handle = lambda message, tensors: echo(message, tensors) if "quick" in model_of(message) else []
    slow = [pool.submit(asks, client) for _ in range(3)]
    until_all_wait(client, 3)
    with pytest.raises(DeadlineExceeded):
        asks(client, timeout=0.05)
    assert asks(client, "quick")
    seen = [daemon.next() for _ in range(3)]
    for message, tensors in seen:
        daemon.send(*echo(message, tensors)[0])
    assert all(each.result(LIMIT_S) for each in slow)


def model_of(message: ClientMessage) -> str:
    return message.description.model_name if isinstance(message, Infer) else ""


def test_reader_hands_over_at_its_deadline(client: Client, daemon: FakeDaemon, pool: ThreadPoolExecutor) -> None:
    daemon.handle = silent
    hasty = pool.submit(asks, client, timeout=1.0)
    until_all_wait(client, 1)
    patient = pool.submit(asks, client)
    until_all_wait(client, 2)
    assert isinstance(hasty.exception(LIMIT_S), DeadlineExceeded)
    daemon.next()
    message, tensors = daemon.next()
    daemon.send(*echo(message, tensors)[0])
    assert patient.result(LIMIT_S)


def test_several_threads_wait_for_one_request(client: Client, daemon: FakeDaemon, pool: ThreadPoolExecutor) -> None:
    daemon.handle = silent
    pending = client.submit("m", {"x": X})
    waiting = [pool.submit(pending.result) for _ in range(4)]
    until_all_wait(client, 4)
    assert not pending.done()
    message, tensors = daemon.next()
    daemon.send(*echo(message, tensors)[0])
    results = [each.result(LIMIT_S) for each in waiting]
    assert all(each is results[0] for each in results)


def test_close_ends_calls_of_other_threads(client: Client, daemon: FakeDaemon, pool: ThreadPoolExecutor) -> None:
    daemon.handle = silent
    waiting = [pool.submit(asks, client) for _ in range(4)]
    until_all_wait(client, 4)
    client.close()
    assert all(isinstance(each.exception(LIMIT_S), ClientClosed) for each in waiting)


def test_signal_handler_may_close_client_during_send(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    send = ClientSession.send

    def closed_before(session: ClientSession, *args: Any) -> int:
        client.close()
        return send(session, *args)

    monkeypatch.setattr(ClientSession, "send", closed_before)
    errors: List[BaseException] = []

    def ask() -> None:
        try:
            asks(client)
        except WeightdError as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert [type(each) for each in errors] == [ClientClosed]


def test_connection_loss_ends_calls_of_all_threads(
    client: Client, daemon: FakeDaemon, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.handle = silent
    waiting = [pool.submit(asks, client) for _ in range(4)]
    until_all_wait(client, 4)
    daemon.stop()
    assert all(isinstance(each.exception(LIMIT_S), Unavailable) for each in waiting)
    made: List[None] = []
    connecting = ClientSession.connect_steps

    def counted(session: ClientSession) -> Any:
        made.append(None)
        return connecting(session)

    monkeypatch.setattr(ClientSession, "connect_steps", counted)
    again = FakeDaemon(daemon.address)
    assert all(pool.map(asks, [client] * 8))
    assert len(made) == 1
    again.stop()


def test_blocked_sender_and_reader_make_progress(client: Client, daemon: FakeDaemon, pool: ThreadPoolExecutor) -> None:
    goes_on = threading.Event()

    def reads_no_more(message: ClientMessage, tensors: Sequence[bytes]) -> Sequence[List[Any]]:
        if model_of(message) == "stop":
            goes_on.wait(LIMIT_S)
        return echo(message, tensors)

    daemon.handle = reads_no_more
    stopped: Future[Any] = pool.submit(asks, client, "stop", timeout=1.0)
    until_all_wait(client, 1)
    # More than the socket's buffers hold, with equally large answers: a thread that only sent would block forever.
    large = np.zeros(4 * 1024 * 1024, np.uint8)
    sending = [pool.submit(client.infer, "m", {"x": large}, timeout=LIMIT_S) for _ in range(6)]
    with pytest.raises(DeadlineExceeded):
        asks(client, timeout=0.05)
    assert isinstance(stopped.exception(LIMIT_S), DeadlineExceeded)
    goes_on.set()
    assert all(len(each.result(LIMIT_S)["x"]) == len(large) for each in sending)


# --- stopped processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [True, False])
def test_answer_that_arrives_while_stopped_is_in_time(
    client: Client, daemon: FakeDaemon, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """The kernel ends a wait at its time-out even while the process is stopped; the answer can be read a moment
    later."""
    daemon.handle = silent
    stops = [True]

    def oversleep(seconds: float) -> None:
        time.sleep(seconds + 0.2)
        for _ in range(1 if reads else 2):
            message, tensors = daemon.next()
            if model_of(message) == "m":
                threading.Timer(0.1, daemon.send, echo(message, tensors)[0]).start()

    class StoppedPoll:
        def poll(self, wait: float) -> List[Any]:
            if wait and stops and stops.pop():
                oversleep(wait / 1000)
                return []
            ready: List[Any] = poller.poll(wait)
            return ready

    poller = client._transport._poller  # pyright: ignore[reportPrivateUsage]
    if reads:
        monkeypatch.setattr(client._transport, "_poller", StoppedPoll())  # pyright: ignore[reportPrivateUsage]
    else:
        other = pool.submit(asks, client, "other", 5.0)
        until_all_wait(client, 1)
        sleep = Waiter.wait
        monkeypatch.setattr(
            Waiter, "wait", lambda turn, seconds: oversleep(seconds) if stops and stops.pop() else sleep(turn, seconds)
        )
    assert np.array_equal(asks(client, timeout=0.2)["x"], X)
    assert not stops
    if not reads:
        client.close()
        assert isinstance(other.exception(LIMIT_S), ClientClosed)


class ElectionMachine(RuleBasedStateMachine):
    """State machine of threads that do not run: each stays where its last step has left it."""

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
    def block_other_threads(self, stuck: int) -> None:
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
    def thread_with_a_reason_is_awake(self) -> None:
        for turn in self.waiting:
            assert (turn.is_reader or turn.call.done) == turn.is_awake


TestElection = ElectionMachine.TestCase


def test_interrupted_reader_reads_when_it_returns() -> None:
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
