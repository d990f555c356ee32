"""Tests of a worker session that runs several predicts at once; the test determines the order of their starts and
ends.

`test_session` covers the behaviour that such a session shares with every other worker.
"""

from __future__ import annotations

import select
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.fakeengine import FakeEngine
from weightd_protocol.codec import decode, encode
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import RequestDescription, TensorSignature
from weightd_protocol.messages.regions import UnmapRegion
from weightd_protocol.messages.worker import (
    FROM_CHILD,
    BeginBatch,
    CancelPredict,
    Hello,
    Ping,
    Pong,
    Predict,
    PredictCancelled,
    PredictFailed,
    PredictResult,
    Reconnected,
    Stop,
)
from weightd_protocol.tensors import frame_of, spec_of
from weightd_worker import batch_guard, exit_codes
from weightd_worker.engines.engine import Arrays, MaybeCorrupted, ModelCorrupted, ModelSignature
from weightd_worker.sessions.build import ModelInputs
from weightd_worker.sessions.concurrent import ConcurrentSession

SIGNATURE = ModelSignature((TensorSignature("x", "FP32", (-1, 1)),), (TensorSignature("y", "FP32", (-1, 1)),))
SIZE = 3
LIMIT_S = 60
STOP = encode(Stop())
REQUESTS = {"predict": 1, "together": 2}
PING = encode(Ping(run_selftest=False))

Frames = Sequence[Any]
Orders = Sequence[Optional[Frames]]


class Engine(FakeEngine):
    """An engine that returns twice the input, or the outcome set for the input, when the test releases the predict."""

    @property
    def concurrency(self) -> int:
        return SIZE

    def __init__(self) -> None:
        super().__init__(self._answer, SIGNATURE)
        self.outcomes: Dict[float, BaseException] = {}
        self.begun: List[float] = []
        self.gates: Dict[float, threading.Event] = {}

    def _answer(self, inputs: Arrays) -> Arrays:
        number = float(inputs["x"].ravel()[0])
        gate = self.gates[number] = threading.Event()
        self.begun.append(number)
        assert gate.wait(LIMIT_S)
        if number in self.outcomes:
            raise self.outcomes[number]
        return {"y": inputs["x"] * 2}


class Script:
    """A scripted connection. Whenever the session can only wait, the test chooses the next event.

    Args:
        orders: the orders in sequence; None stands for a new daemon.
        choose: receives the numbers of the running predicts and returns the one to end, or None for the next order.
        late: whether an order arrives before the session waits for it.
    """

    def __init__(
        self,
        engine: Engine,
        orders: Orders,
        choose: Callable[[List[float]], Optional[float]],
        late: Callable[[], bool] = lambda: False,
    ) -> None:
        self.sent: List[Any] = []
        self.values: Dict[int, List[float]] = {}
        self.running_at: Dict[str, List[int]] = {"pong": [], "unmap": []}
        self._engine = engine
        self._orders = list(orders)
        self._choose = choose
        self._late = late
        self.session: Any = cast(Any, ConcurrentSession)(self, engine, ModelInputs("/m", "/s"))
        self.session._predictor.regions.unmap = self._unmap

    def run(self) -> int:
        status: int = self.session.run("ab" * 32)
        assert not self._orders
        return status

    def watch(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def receive(self, timeout_s: float = -1) -> Optional[List[Frames]]:
        if not timeout_s:
            return [self._next()] if self._orders and self._orders[0] and self._late() else []
        # Continue when a message has arrived or all predicts wait at the gate.
        while not select.select([self._descriptor], [], [], 0.0005)[0]:
            if len(self._engine.gates) == self.session._threads._unfinished:
                break
        else:
            return []
        running = sorted(self._engine.gates)
        ends = self._choose(running) if running and self._orders else next(iter(running), None)
        if ends is not None:
            self._engine.gates.pop(ends).set()
            return []
        if self._orders[0] is None:
            self._orders.pop(0)
            while self._engine.gates:
                self._engine.gates.popitem()[1].set()
            return None
        return [self._next()]

    def _next(self) -> Frames:
        return cast(Frames, self._orders.pop(0))

    def send(self, frames: Frames) -> bool:
        sent: Any = decode(list(map(bytes, frames)), FROM_CHILD)
        self.sent.append(sent)
        if isinstance(sent, Pong):
            self.running_at["pong"].append(len(self._engine.gates))
        return True

    def reply(self, *messages: Frames) -> None:
        for frames in messages:
            kept = list(map(bytes, frames))
            answer: Any = decode(kept, FROM_CHILD)
            self.sent.append(answer)
            if isinstance(answer, PredictResult):
                self.values[answer.request] = [float(each) for each in np.frombuffer(kept[2], np.float32)]

    def _unmap(self, region: int) -> None:
        self.running_at["unmap"].append(len(self._engine.gates))


def predict(number: int) -> Frames:
    x = np.full((1, 1), number, np.float32)
    return [*encode(Predict(number, RequestDescription("m", (spec_of("x", x),)))), bytes(frame_of(x))]


def replies(script: Script) -> List[Any]:
    """Return the replies in order: the number of a request, or its error."""
    kinds = (PredictResult, PredictFailed, PredictCancelled, Pong, Reconnected)
    return [
        each.request if isinstance(each, PredictResult) else each for each in script.sent if isinstance(each, kinds)
    ]


def in_order(*numbers: Optional[float]) -> Callable[[List[float]], Optional[float]]:
    """Return a function that ends predicts in this order; None stands for the next order."""
    left = list(numbers)
    return lambda running: left.pop(0) if left else running[0]


def test_hello_reports_concurrency() -> None:
    script = Script(Engine(), [STOP], in_order())
    assert script.run() == exit_codes.OK
    assert script.sent[0].concurrency == SIZE
    assert isinstance(script.sent[0], Hello)


@st.composite
def asked(draw: st.DrawFn) -> Tuple[List[str], List[Frames], Dict[float, BaseException]]:
    """Return the kinds of orders, the orders and the failing requests; requests are numbered from 0."""
    kinds = draw(st.lists(st.sampled_from(["predict", "predict", "together", "skip", "ping", "unmap"]), max_size=20))
    orders: List[Frames] = []
    fails: Dict[float, BaseException] = {}
    count = 0
    for kind in kinds:
        if kind == "together":
            orders.append(encode(BeginBatch(REQUESTS[kind], 0)))
        orders += map(predict, range(count, count + REQUESTS.get(kind, 0)))
        if kind in REQUESTS and draw(st.booleans()):
            fails[count] = InvalidArgument("not this one")
        elif kind == "skip":
            orders.append(encode(CancelPredict(draw(st.integers(0, max(0, count - 1))))))
        elif kind not in REQUESTS:
            orders.append(PING if kind == "ping" else encode(UnmapRegion(7)))
        count += REQUESTS.get(kind, 0)
    return kinds, orders, fails


@settings(max_examples=100, deadline=None)
@given(asked(), st.data())
def test_answers_each_request_once_and_orders_in_sequence(orders: Any, data: st.DataObject) -> None:
    engine = Engine()
    kinds, frames, engine.outcomes = orders

    def choose(running: List[float]) -> Optional[float]:
        assert len(running) <= SIZE
        return data.draw(st.sampled_from([None, *running]))

    script = Script(engine, [*frames, STOP], choose, lambda: data.draw(st.booleans()))
    assert script.run() == exit_codes.OK
    answers = [each for each in script.sent if isinstance(each, (PredictResult, PredictFailed, PredictCancelled))]
    assert sorted(each.request for each in answers) == [*range(sum(REQUESTS.get(kind, 0) for kind in kinds))]
    assert all(values == [2.0 * number] for number, values in script.values.items())
    assert {each.request for each in answers if isinstance(each, PredictFailed)} == engine.outcomes.keys() & set(
        engine.begun
    )
    # The session obeyed these orders while no predict ran, in sequence with the requests.
    assert script.running_at == {"pong": [0] * kinds.count("ping"), "unmap": [0] * kinds.count("unmap")}
    pings = [index for index, kind in enumerate(kinds) if kind == "ping"]
    pongs = [index for index, each in enumerate(script.sent) if isinstance(each, Pong)]
    for ping, pong in zip(pings, pongs):
        count = sum(REQUESTS.get(kind, 0) for kind in kinds[:ping])
        before = [
            each for each in script.sent[:pong] if isinstance(each, (PredictResult, PredictFailed, PredictCancelled))
        ]
        assert {each.request for each in before} >= set(range(count))
        assert all(each.request < count or isinstance(each, PredictCancelled) for each in before)


def test_answers_each_request_when_it_ends() -> None:
    script = Script(Engine(), [predict(1), predict(2), predict(3), STOP], in_order(None, None, 3, 1, 2))
    assert script.run() == exit_codes.OK
    assert replies(script) == [3, 1, 2]


def test_corruption_is_reported_last() -> None:
    engine = Engine()
    engine.outcomes = {2: ModelCorrupted("gone"), 3: MaybeCorrupted("perhaps")}
    orders = [predict(1), predict(2), predict(3), predict(4), STOP]
    script = Script(engine, orders, in_order(None, None, None, 2, 3, 1))
    assert script.run() == exit_codes.MODEL_CORRUPTED
    # The third and the fourth request run again on another worker.
    assert replies(script) == [1, PredictFailed(2, "INTERNAL", "gone", is_exiting=True)]
    assert engine.begun == [1, 2, 3]


def test_reports_each_of_two_corruptions() -> None:
    engine = Engine()
    engine.outcomes = {1: ModelCorrupted("one"), 2: RuntimeError("two")}
    script = Script(engine, [predict(1), predict(2), predict(3), STOP], in_order(None, None, 2, 1, 3))
    assert script.run() == exit_codes.MODEL_CORRUPTED
    assert replies(script) == [
        3,
        PredictFailed(2, "INTERNAL", "RuntimeError: two", is_exiting=False),
        PredictFailed(1, "INTERNAL", "one", is_exiting=True),
    ]


def test_next_daemon_gets_no_old_answers() -> None:
    """Running predicts end before their regions are unmapped; queued requests are dropped, other orders are kept."""
    engine = Engine()
    orders: List[Optional[Frames]] = [*map(predict, range(1, 6)), PING, None, predict(9), STOP]
    script = Script(engine, orders, in_order(*[None] * 6, None, 9))
    assert script.run() == exit_codes.OK
    assert replies(script) == [Reconnected(), Pong(), 9]
    assert engine.begun[SIZE:] == [9]


@pytest.mark.parametrize("ends_before", [False, True])
def test_corrupted_worker_ends_silently_on_reconnect(ends_before: bool) -> None:
    engine = Engine()
    engine.outcomes = {1: ModelCorrupted("gone")}
    chosen = in_order(None, 1, None) if ends_before else in_order(None, None)
    script = Script(engine, [predict(1), predict(2), None], chosen)
    assert script.run() == exit_codes.MODEL_CORRUPTED
    assert replies(script) == []


def test_unexpected_exception_ends_process() -> None:
    engine = Engine()
    engine.outcomes = {1: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        Script(engine, [predict(1), STOP], in_order(1)).run()


class TwoPredicts(FakeEngine):
    """An engine that runs two predicts at once."""

    @property
    def concurrency(self) -> int:
        return 2


def test_rechecks_batches_while_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_guard, "_RECHECK_INTERVAL", 1)
    engine = TwoPredicts(lambda inputs: {"y": inputs["x"] * 2}, SIGNATURE)
    job = [encode(BeginBatch(2)), predict(1), predict(2)]
    orders: List[List[Frames]] = [job, job, [], [STOP]]

    class Quiet(Script):
        def receive(self, timeout_s: float = -1) -> Optional[List[Frames]]:
            if timeout_s and self.session._threads._unfinished:
                assert select.select([self._descriptor], [], [], LIMIT_S)[0]
                return []
            return orders.pop(0) if timeout_s else []

    socket = Quiet(cast(Any, engine), (), lambda _: None)
    socket.session._batch_guard.configure(2, (), is_exact=True)
    assert socket.run() == exit_codes.OK
    assert [len(each["x"]) for each in engine.received_inputs] == [2, 1, 1, 2, 1, 1]


class Rebuilt(Engine):
    """An engine that builds a new model during the first predict."""

    def __init__(self, script: List[Script]) -> None:
        super().__init__()
        self.shared_at: List[List[float]] = []
        self._script = script
        self._is_rebuilt = False

    @property
    def has_unshared_weights(self) -> bool:
        return self._is_rebuilt

    def reshare_weights(self) -> None:
        assert not self._script[0].session._threads._unfinished
        self._is_rebuilt = False
        self.shared_at.append([*self.begun])

    def _answer(self, inputs: Arrays) -> Arrays:
        self._is_rebuilt = self._is_rebuilt or not self.begun
        return super()._answer(inputs)


def test_shares_pages_of_rebuilt_model_while_idle() -> None:
    scripts: List[Script] = []
    engine = Rebuilt(scripts)
    orders = [predict(1), predict(2), predict(3), STOP]
    scripts.append(Script(engine, orders, in_order(1, 2, None, 3)))
    assert scripts[0].run() == exit_codes.OK
    assert engine.shared_at == [[1.0]]
    assert sorted(scripts[0].values) == [1, 2, 3]
