"""Tests of a rank session with a scripted socket and a fake engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable, Collection, Dict, List, Optional, Sequence, Tuple, Type, TypeVar

import numpy as np
import pytest

from testkit.fakeengine import Answer, sequence
from testkit.fakerank import FakeRank
from testkit.script import Script
from weightd_common import memfd
from weightd_common.launch_arguments import RendezvousInfo
from weightd_protocol.codec import encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.inference import RequestDescription, TensorSignature
from weightd_protocol.messages.ranks import JoinedGroup, JoinGroup, PredictDone, RankSlice, RunSelfTest, SelfTestDone
from weightd_protocol.messages.regions import MappedInput, MappedOutput, MappedRegions, MapRegion
from weightd_protocol.messages.worker import (
    Attach,
    BeginBatch,
    Build,
    CancelPredict,
    Hello,
    Ping,
    Pong,
    Predict,
    PredictFailed,
    PredictResult,
    ProcessFailed,
    Reconnected,
    Stop,
    TrimStore,
)
from weightd_protocol.messages.worker_common import DeviceMemory, RowSupport, SelfTestCases
from weightd_protocol.tensors import frame_of, spec_of, to_wire
from weightd_protocol.version import VERSION
from weightd_worker import exit_codes
from weightd_worker.engines.engine import (
    Arrays,
    BuildError,
    EngineMissing,
    ModelCorrupted,
    ModelSignature,
    OutOfDeviceMemory,
)
from weightd_worker.engines.ranks import RankRejected
from weightd_worker.selftest import selftest
from weightd_worker.sessions import rank as rank_module
from weightd_worker.sessions.rank import RankInputs, RankSession

M = TypeVar("M")

SHA256 = "ab" * 32
SIGNATURE = ModelSignature((TensorSignature("x", "FP32", (-1, 3)),), (TensorSignature("y", "FP32", (-1, 3)),))
FIXED = ModelSignature((TensorSignature("x", "FP32", (2, 3)),), (TensorSignature("y", "FP32", (2, 3)),))
ENTER, WARM, STOP = encode(JoinGroup()), encode(RunSelfTest()), encode(Stop())
X = np.arange(6, dtype=np.float32).reshape(2, 3)
CASES: SelfTestCases = ({"x": (2, 3)},)
CARD = DeviceMemory(100, 40)

Play = Callable[..., Tuple[int, Script]]
Write = Callable[..., str]


def twice(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] * 2}


def predict(number: int, step: int, rows: int = 1, *, regions: Optional[MappedRegions] = None) -> List[Any]:
    array = to_wire(np.full((rows, 3), number, np.float32))
    frames = [] if regions is not None else [bytes(frame_of(array))]
    order = Predict(number, RequestDescription("m", (spec_of("x", array),)), regions, step=step)
    return [*encode(order), *frames]


def together(*orders: List[Any]) -> List[Any]:
    return [encode(BeginBatch(len(orders))), *orders]


@pytest.fixture
def npz(tmp_path: Path) -> Write:
    """Return a function that writes a self-test file."""

    def write(**arrays: Any) -> str:
        path = tmp_path / "selftest.npz"
        np.savez(str(path), **(arrays or {"x": X, "y": X * 2}))
        return str(path)

    return write


@pytest.fixture
def play(npz: Write) -> Play:
    """Return a function that runs a session over the orders until it ends."""

    def run(
        engine: FakeRank,
        *orders: Optional[Sequence[Any]],
        rank: int = 1,
        reply: Optional[int] = 1,
        selftest_path: str = "",
        tolerance: float = 0.0,
        cores: str = "",
    ) -> Tuple[int, Script]:
        script: Any = Script(*orders)
        given = RankInputs("/m/rank1", SIGNATURE, {}, selftest_path or npz(), tolerance)
        status = RankSession(script, engine, RendezvousInfo(rank, 2, 120, 68, reply, cores=cores), given).run(SHA256)
        assert not script.orders, "it ended before its last order"
        return status, script

    return run


def fake(
    answer: Answer = twice, signature: ModelSignature = SIGNATURE, fails: Optional[Dict[str, Exception]] = None
) -> FakeRank:
    """Return a fake engine whose steps of these names fail."""
    engine = FakeRank(answer, signature)
    engine.fails.update(fails or {})
    return engine


def only(kind: Type[M], script: Script) -> M:
    (message,) = (each for each in script.sent if isinstance(each, kind))
    return message


def kinds(script: Script) -> List[str]:
    return [type(each).__name__ for each in script.sent]


# --- start ----------------------------------------------------------------------------------------------------


def test_hello_describes_slice(play: Play) -> None:
    status, script = play(fake(), STOP)
    assert status == exit_codes.OK
    hello = only(Hello, script)
    assert (hello.engine_pid, hello.sha256, hello.slice) == (str(os.getpid()), SHA256, RankSlice(1, *SIGNATURE))
    assert hello.versions["weightd"] == VERSION
    assert sorted(hello.versions) == ["fake", "numpy", "python", "weightd"]


def test_joins_loads_and_runs_selftest_on_order(play: Play) -> None:
    engine = fake()
    status, script = play(engine, ENTER, WARM, STOP)
    assert status == exit_codes.OK
    assert engine.done == ["enter", "load /m/rank1 {}", "predict", "leave"]
    assert np.array_equal(engine.received_inputs[0]["x"], X)
    assert only(JoinedGroup, script) == JoinedGroup(*SIGNATURE, CARD)
    assert only(SelfTestDone, script) == SelfTestDone(
        selftest.from_answers(CASES, [{"y": X * 2}]).digest, CASES, None, CARD
    )


@pytest.mark.parametrize(
    ("orders", "fails"),
    [([STOP], {}), ([ENTER, WARM, predict(1, 2), STOP], {}), ([ENTER, STOP], {"enter": BuildError("no")})],
)
def test_leaves_only_after_joining_and_clean_end(play: Play, orders: List[Any], fails: Dict[str, Exception]) -> None:
    engine = fake(fails=fails)
    play(engine, *orders)
    assert "leave" not in engine.done


def test_sets_affinity_after_selftest(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: List[Tuple[List[str], Any]] = []
    engine = fake()

    def set_cpu_affinity(cores: Collection[int]) -> None:
        kept.append((list(engine.done), cores))

    monkeypatch.setattr(rank_module, "set_cpu_affinity", set_cpu_affinity)
    play(engine, ENTER, WARM, STOP, cores="2-3")
    assert kept == [(["enter", "load /m/rank1 {}", "predict"], {2, 3})]


def test_silent_rank_compares_nothing(play: Play) -> None:
    _, script = play(fake(lambda _: {"half": X}), ENTER, WARM, STOP, rank=0)
    assert only(SelfTestDone, script) == SelfTestDone("", CASES, None, CARD)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_compares_its_rows(play: Play, rank: int) -> None:
    def mine(inputs: Arrays) -> Arrays:
        half = len(inputs["x"]) // 2
        return {"y": inputs["x"][rank * half : (rank + 1) * half] * 2}

    _, script = play(fake(mine), ENTER, encode(RunSelfTest(8)), STOP, rank=rank, reply=None)
    warmed = only(SelfTestDone, script)
    assert warmed.selftest_digest == selftest.from_answers(CASES, [mine({"x": X})]).digest
    note = "each rank returns different rows, so requests are neither batched nor split"
    assert warmed.row_support == RowSupport(("x",), (), is_equal=False, note=note)
    _, script = play(fake(mine), ENTER, WARM, STOP, rank=1 - rank, reply=None)
    assert only(ProcessFailed, script).reason.startswith("the answer to the self-test is wrong: output y: ")


@pytest.mark.parametrize("shape", [(3, 3), ()])
def test_rejects_selftest_with_unequal_shares(play: Play, npz: Write, shape: Tuple[int, ...]) -> None:
    path = npz(x=X, y=np.zeros(shape, np.float32))
    _, script = play(fake(), ENTER, WARM, STOP, reply=None, selftest_path=path)
    expected = f"selftest: {path}: y: expected rows that 2 ranks can share equally, got {list(shape)}"
    assert only(ProcessFailed, script).reason == expected


NOT_FAR = "differs where equality is required: in integers, in which values are finite, or from an output of zeros"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (X * 2 + np.float32(0.1), "differs by 0.01 of the largest value, expected at most 0.001"),
        ((X * 2).astype(np.float64), "expected float32 [2, 3], got float64 [2, 3]"),
        (X[:1] * 2, "expected float32 [2, 3], got float32 [1, 3]"),
        (X * np.float32("nan"), NOT_FAR),
    ],
)
def test_wrong_selftest_answer_ends_rank(play: Play, answer: Any, problem: str) -> None:
    status, script = play(fake(sequence(answer)), ENTER, WARM, predict(1, 1), STOP, tolerance=0.001)
    assert status == exit_codes.CANNOT_BUILD
    assert only(ProcessFailed, script).reason == f"the answer to the self-test is wrong: output y: {problem}"
    assert kinds(script) == ["Hello", "JoinedGroup", "ProcessFailed"]


def test_accepts_answer_within_tolerance(play: Play) -> None:
    _, script = play(fake(sequence(X * 2 + np.float32(0.005))), ENTER, WARM, STOP, tolerance=0.001)
    assert only(SelfTestDone, script).selftest_digest


def test_reports_unexpected_outputs(play: Play) -> None:
    _, script = play(fake(lambda _: {"z": X}), ENTER, WARM, STOP)
    assert only(ProcessFailed, script).reason == "selftest: expected outputs y, got z"


def test_selftest_file_needs_correct_answer(play: Play, npz: Write) -> None:
    path = npz(x=X)
    status, script = play(fake(), ENTER, WARM, STOP, selftest_path=path)
    assert status == exit_codes.CANNOT_BUILD
    expected = f"selftest: {path}: expected arrays x, y, the inputs and the correct outputs, got x"
    assert only(ProcessFailed, script).reason == expected
    same = ModelSignature(SIGNATURE.inputs, SIGNATURE.inputs)
    _, script = play(fake(signature=same), ENTER, WARM, STOP, selftest_path=path)
    assert "x is an input and an output" in only(ProcessFailed, script).reason


@pytest.mark.parametrize(("step", "orders"), [("enter", [ENTER]), ("load", [ENTER]), ("predict", [ENTER, WARM])])
@pytest.mark.parametrize(
    ("error", "reply", "expected"),
    [
        (BuildError("the others have not come"), ProcessFailed("the others have not come"), exit_codes.CANNOT_BUILD),
        (
            OutOfDeviceMemory("the card is full"),
            ProcessFailed("the card is full", is_out_of_memory=True),
            exit_codes.CANNOT_BUILD,
        ),
        (ModelCorrupted("Launch kernel failed"), ProcessFailed("Launch kernel failed"), exit_codes.CANNOT_BUILD),
        (MemoryError("x"), ProcessFailed("MemoryError: x", is_transient=True), exit_codes.FAILED),
    ],
)
def test_reports_failure_during_start(
    play: Play, step: str, orders: List[Any], error: Exception, reply: ProcessFailed, expected: int
) -> None:
    status, script = play(fake(fails={step: error}), *orders, STOP)
    assert (status, script.sent[-1]) == (expected, reply)


def test_ping_runs_no_selftest(play: Play) -> None:
    engine = fake()
    status, script = play(engine, ENTER, WARM, encode(Ping(run_selftest=True)), encode(TrimStore()), STOP)
    assert (status, only(Pong, script)) == (exit_codes.OK, Pong())
    assert engine.done.count("predict") == 1


def test_rejects_orders_for_workers(play: Play) -> None:
    _, script = play(fake(), encode(Attach("", ())), STOP)
    assert only(ProcessFailed, script).reason == "type: expected an order for a rank, got attach"
    with pytest.raises(RemoteProtocolError, match="expected no cancel_predict: all ranks must run the same predicts"):
        play(fake(), encode(CancelPredict(1)))


# --- rows -----------------------------------------------------------------------------------------------------


def test_runs_selftest_with_twice_the_rows(play: Play) -> None:
    engine = fake()
    _, script = play(engine, ENTER, encode(RunSelfTest(8)), STOP)
    assert np.array_equal(engine.received_inputs[1]["x"], np.concatenate([X, X]))
    note = "equality of batched and single answers was not tested: a rank runs only the requests that all ranks run"
    assert only(SelfTestDone, script).row_support == RowSupport(("x",), ("y",), is_equal=False, note=note)


def test_all_ranks_run_the_same_predicts(play: Play) -> None:
    engine = fake(lambda _: {"half": X})
    _, script = play(engine, ENTER, encode(RunSelfTest(8)), STOP, rank=0)
    assert [len(each["x"]) for each in engine.received_inputs] == [2, 4]
    assert only(SelfTestDone, script).row_support is None
    # A rank whose answer is wrong does so, too: the other ranks would wait for it.
    engine = fake(lambda inputs: {"y": inputs["x"]})
    _, script = play(engine, ENTER, encode(RunSelfTest(8)), STOP)
    assert [len(each["x"]) for each in engine.received_inputs] == [2, 4]
    assert kinds(script)[-1] == "ProcessFailed"


@pytest.mark.parametrize(("sizes", "rows"), [((1, 2, 4), 1), ((2, 4), 4)])
def test_second_selftest_uses_an_allowed_batch_size(play: Play, sizes: Tuple[int, ...], rows: int) -> None:
    engine = fake()
    play(engine, ENTER, encode(RunSelfTest(8, sizes)), STOP)
    assert [len(each["x"]) for each in engine.received_inputs] == [2, rows]


TOO_MANY = "the model does not run on another number of rows than the self-test has: too many"


@pytest.mark.parametrize(
    ("answers", "signature", "sizes", "inputs", "note"),
    [
        ([X * 2], FIXED, (), (), "input x has no rows"),
        ([X * 2], SIGNATURE, (2,), ("x",), "the model accepts only 2 rows"),
        ([X * 2, X], SIGNATURE, (), ("x",), "output y has shape [2, 3] for 4 rows"),
        ([X * 2, RankRejected("too many")], SIGNATURE, (), ("x",), TOO_MANY),
    ],
)
def test_reports_why_rows_are_unsupported(
    play: Play,
    answers: List[Any],
    signature: ModelSignature,
    sizes: Tuple[int, ...],
    inputs: Tuple[str, ...],
    note: str,
) -> None:
    _, script = play(fake(sequence(*answers), signature), ENTER, encode(RunSelfTest(8, sizes)), STOP)
    assert only(SelfTestDone, script).row_support == RowSupport(inputs, (), is_equal=False, note=note)


# --- predicts in step -----------------------------------------------------------------------------------------


def test_reply_rank_answers(play: Play) -> None:
    status, script = play(fake(), ENTER, WARM, predict(7, 1), predict(9, 2, rows=2), STOP)
    assert status == exit_codes.OK
    answers = [each for each in script.sent if isinstance(each, PredictResult)]
    assert [each.request for each in answers] == [7, 9]
    values = [np.frombuffer(script.frames[script.sent.index(each)][0], np.float32) for each in answers]
    assert [each.tolist() for each in values] == [[14.0] * 3, [18.0] * 6]


def test_other_rank_reports_predict_done(play: Play) -> None:
    engine = fake(lambda _: {"half": X})
    status, script = play(engine, ENTER, WARM, predict(7, 1), predict(9, 2), STOP, rank=0)
    assert status == exit_codes.OK
    assert script.sent[-2:] == [PredictDone(7), PredictDone(9)]
    assert engine.done.count("predict") == 3


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("orders", "cause"),
    [
        ([predict(1, 2)], "step: expected 1, got 2"),
        ([predict(1, 0)], "step: expected 1, got 0"),
        ([predict(1, 1), predict(2, 1)], "step: expected 2, got 1"),
        ([predict(1, 1), *together(predict(2, 2), predict(3, 4))], "step: expected 3, got 4"),
    ],
)
def test_wrong_step_ends_rank_before_predict(play: Play, orders: List[Any], cause: str, rank: int) -> None:
    engine = fake()
    status, script = play(engine, ENTER, WARM, *orders, predict(9, 9), STOP, rank=rank)
    assert status == exit_codes.MODEL_CORRUPTED
    assert script.sent[-1] == ProcessFailed(cause)
    assert engine.done.count("predict") == 1 + (len(orders) > 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_rejection_before_launch_keeps_rank(play: Play, rank: int) -> None:
    engine = fake(sequence(X * 2, RankRejected("no elements"), X))
    status, script = play(engine, ENTER, WARM, predict(1, 1), predict(2, 2), STOP, rank=rank)
    assert status == exit_codes.OK
    assert script.sent[3] == PredictFailed(1, "INVALID_ARGUMENT", "no elements", is_exiting=False)
    assert kinds(script)[4:] == ["PredictResult" if rank else "PredictDone"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("error", "message"), [(ModelCorrupted("EI0002"), "EI0002"), (RuntimeError("who knows"), "RuntimeError: who knows")]
)
def test_other_failures_end_rank(play: Play, error: Exception, message: str, rank: int) -> None:
    for job in ([predict(1, 1)], together(predict(1, 1), predict(2, 2))):
        status, script = play(fake(sequence(X * 2, error)), ENTER, WARM, *job, predict(9, 9), STOP, rank=rank)
        assert status == exit_codes.MODEL_CORRUPTED
        assert script.sent[3:] == [PredictFailed(1, "INTERNAL", message, is_exiting=True)]


def test_runs_batch_in_one_predict(play: Play) -> None:
    job = together(predict(4, 1, rows=1), predict(5, 2, rows=2))
    for rank, expected in ((1, PredictResult), (0, PredictDone)):
        engine = fake()
        status, script = play(engine, ENTER, WARM, *job, predict(6, 3), STOP, rank=rank)
        assert (status, engine.done.count("predict")) == (exit_codes.OK, 3)
        assert engine.received_inputs[1]["x"][:, 0].tolist() == [4, 5, 5]
        answers = [each for each in script.sent if isinstance(each, expected)]
        assert [each.request for each in answers] == [4, 5, 6]


@pytest.mark.parametrize("rank", [0, 1])
def test_never_runs_batch_items_alone(play: Play, rank: int) -> None:
    job = together(predict(4, 1), predict(5, 2))
    engine = fake(sequence(X * 2, RankRejected("no"), X))
    status, script = play(engine, ENTER, WARM, *job, predict(6, 3), STOP, rank=rank)
    assert (status, engine.done.count("predict")) == (exit_codes.OK, 3)
    refused = [PredictFailed(number, "INVALID_ARGUMENT", "no", is_exiting=False) for number in (4, 5)]
    assert script.sent[3:5] == refused


def test_indivisible_answer_ends_rank(play: Play) -> None:
    job = together(predict(4, 1), predict(5, 2))
    engine = fake(sequence(X * 2, X[:1]))
    status, script = play(engine, ENTER, WARM, *job, STOP)
    assert (status, engine.done.count("predict")) == (exit_codes.MODEL_CORRUPTED, 2)
    message = "output y has shape [1, 3] for 2 rows"
    assert script.sent[3:] == [PredictFailed(4, "INVALID_ARGUMENT", message, is_exiting=True)]


@pytest.mark.parametrize("rank", [0, 1])
def test_reply_rank_writes_to_client_memory(play: Play, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = memfd.create(4096)
    os.pwrite(descriptor, np.full(3, 21, np.float32).tobytes(), 0)

    def take_descriptor(_: Script) -> int:
        return os.dup(descriptor)

    monkeypatch.setattr(Script, "take_descriptor", take_descriptor, raising=False)
    outputs = (MappedOutput(0, 1, 1024, 12),) if rank else ()
    regions = MappedRegions((MappedInput(0, 1, 0),), outputs)
    engine = fake()
    _, script = play(engine, ENTER, WARM, encode(MapRegion(1)), predict(1, 1, regions=regions), STOP, rank=rank)
    assert engine.received_inputs[1]["x"].tolist() == [[21, 21, 21]]
    written = np.frombuffer(os.pread(descriptor, 12, 1024), np.float32)
    assert written.tolist() == [42 * rank] * 3
    assert kinds(script)[3:] == ["PredictResult" if rank else "PredictDone"]
    os.close(descriptor)


# --- reconnection ---------------------------------------------------------------------------------------------


def test_reports_last_step_to_next_daemon(play: Play) -> None:
    status, script = play(fake(), ENTER, WARM, None, predict(1, 1), predict(2, 2), None, predict(1, 3), STOP)
    assert status == exit_codes.OK
    assert [each for each in script.sent if isinstance(each, Reconnected)] == [Reconnected(0), Reconnected(2)]
    assert kinds(script)[-1] == "PredictResult"


def test_next_daemon_discards_incomplete_batch(play: Play) -> None:
    begun = together(predict(1, 1), predict(2, 2))[:1]
    engine = fake()
    status, script = play(engine, ENTER, WARM, *begun, None, predict(1, 1), STOP)
    assert (status, engine.done.count("predict")) == (exit_codes.OK, 2)
    assert only(Reconnected, script) == Reconnected(0)


def test_failed_rank_does_not_reconnect(play: Play) -> None:
    status, script = play(fake(sequence(X * 2, ModelCorrupted("x"))), ENTER, WARM, predict(1, 1), None)
    assert status == exit_codes.MODEL_CORRUPTED
    assert kinds(script)[3:] == ["PredictFailed"]


def broker(*orders: Any, serve: Optional[Callable[[], None]] = None) -> Tuple[int, Script]:
    script: Any = Script(*orders)
    status = rank_module.run_broker(script, serve or (lambda: None))
    assert not script.orders, "it ended before its last order"
    return status, script


def test_broker_life_cycle() -> None:
    done: List[str] = []
    status, script = broker(encode(Ping(run_selftest=False)), None, ENTER, serve=lambda: done.append("served"))
    assert (status, done) == (exit_codes.OK, ["served"])
    hello, *more = script.sent
    assert isinstance(hello, Hello)
    assert (hello.engine_pid, hello.sha256, hello.slice) == (str(os.getpid()), "none", None)
    assert hello.versions["weightd"] == VERSION
    assert more == [Pong(), Reconnected()]


def test_broker_stops_before_serving() -> None:
    done: List[str] = []
    assert broker(STOP, serve=lambda: done.append("served"))[0] == exit_codes.OK
    assert done == []


@pytest.mark.parametrize(
    ("error", "status"), [(BuildError("rank 1 is lost"), 1), (EngineMissing("install it"), exit_codes.NO_ENGINE)]
)
def test_broker_logs_why_it_failed(error: Exception, status: int, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise error

    ended, script = broker(ENTER, serve=fail)
    assert (ended, len(script.sent)) == (status, 1)
    assert caplog.messages[-1] == str(error)


def test_broker_rejects_other_orders() -> None:
    with pytest.raises(RemoteProtocolError, match="expected join_group, ping or stop, got build"):
        broker(encode(Build(())))
