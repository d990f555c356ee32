"""Tests of a worker session with a scripted socket and a fake engine."""

from __future__ import annotations

import dataclasses
import os
import weakref
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Type, TypeVar, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import cases
from testkit.fakeengine import Answer, FakeEngine, sequence
from testkit.script import PAUSE, Script
from weightd_common import memfd
from weightd_protocol import limits
from weightd_protocol.codec import clip, decode, encode
from weightd_protocol.datatypes import NUMPY_DTYPE
from weightd_protocol.errors import InvalidArgument, RemoteProtocolError
from weightd_protocol.messages.inference import RequestDescription, TensorSignature
from weightd_protocol.messages.regions import MappedInput, MappedOutput, MappedRegions, MapRegion, UnmapRegion
from weightd_protocol.messages.worker import (
    FROM_CHILD,
    AnnounceSelfTest,
    Attach,
    Attached,
    BatchMismatch,
    BeginBatch,
    Build,
    Built,
    CancelPredict,
    Fork,
    Forked,
    Hello,
    Ping,
    Pong,
    Predict,
    PredictCancelled,
    PredictFailed,
    PredictResult,
    ProcessFailed,
    Reconnected,
    Stop,
    TrimStore,
)
from weightd_protocol.messages.worker_common import AllowAttach, AttachAllowed, DeviceMemory, RowSupport
from weightd_protocol.tensors import describe_response, frame_of, spec_of, to_wire
from weightd_protocol.version import VERSION
from weightd_worker import batch_guard, exit_codes, nativelog
from weightd_worker.engines.engine import (
    Arrays,
    AttachRefused,
    BuildError,
    Engine,
    ModelCorrupted,
    ModelSignature,
    NotRun,
    OutOfDeviceMemory,
    SharedWeights,
)
from weightd_worker.forking import InheritedModel, ReportForked
from weightd_worker.selftest import selftest
from weightd_worker.sessions import base
from weightd_worker.sessions import model as session_module
from weightd_worker.sessions.build import ModelInputs
from weightd_worker.sessions.model import ProcessOrigin, SharingPlan, WorkerSession

M = TypeVar("M")

SHA256 = "ab" * 32
FILES = ModelInputs("/m/model", "/s/store")
SIGNATURE = ModelSignature((TensorSignature("x", "FP32", (-1, 3)),), (TensorSignature("y", "FP32", None),))
CASES = cases.of(SIGNATURE, 1, 2)
STOP = encode(Stop())
BUILD = encode(Build(("11", "12")))
ATTACH = encode(Attach("7", CASES))
CARD = DeviceMemory(100, 40)
ZEROS, ONES = np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)


@pytest.fixture(autouse=True)
def heap(monkeypatch: pytest.MonkeyPatch) -> List[str]:
    """Return the list of calls that the session makes to its malloc tuner."""
    done: List[str] = []

    class FakeMallocTuner:
        def __init__(self, release_engine_memory: Callable[[], None]) -> None:
            self._release_engine_memory = release_engine_memory

        def retain_freed_memory(self) -> None:
            done.append("keep")

        def limit_retained(self) -> None:
            done.append("bound")

        def release_retained(self) -> None:
            done.append("give back")
            self._release_engine_memory()

        def trim(self) -> None:
            pass

    monkeypatch.setattr(session_module, "MallocTuner", FakeMallocTuner)
    return done


def session(
    connection: Any, engine: Engine, files: ModelInputs = FILES, tolerance: float = 0.0, **settings: Any
) -> WorkerSession:
    return WorkerSession(connection, engine, files._replace(tolerance=tolerance), **settings)


def twice(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] * 2}


def fake(answer: Answer = twice, fails: Optional[Dict[str, Exception]] = None) -> FakeEngine:
    """Return a fake engine whose steps of these names fail."""
    engine = FakeEngine(answer, SIGNATURE)
    engine.fails.update(fails or {})
    return engine


def predict(
    number: int, inputs: Optional[Dict[str, Any]] = None, outputs: Optional[Tuple[str, ...]] = None
) -> List[Any]:
    arrays = {name: to_wire(array) for name, array in (inputs or {"x": ONES}).items()}
    specs = tuple(spec_of(name, array) for name, array in arrays.items())
    return [
        *encode(Predict(number, RequestDescription("m", specs, outputs))),
        *(bytes(frame_of(array)) for array in arrays.values()),
    ]


def play(
    engine: Engine,
    *orders: Optional[Sequence[Any]],
    ahead: int = 0,
    late: int = 0,
    files: ModelInputs = FILES,
    **settings: Any,
) -> Tuple[int, Script]:
    """Run a session over the orders until it ends. `ahead` orders arrive with the first one, `late` while it is
    obeyed."""
    socket = Script(*orders)
    socket.ahead, socket.late = ahead, late
    status = session(socket, engine, files, **settings).run(SHA256)
    assert not socket.orders, "it ended before its last order"
    return status, socket


def only(kind: Type[M], socket: Script) -> M:
    (message,) = (each for each in socket.sent if isinstance(each, kind))
    return message


def array_of(socket: Script, result: PredictResult) -> Any:
    (spec,) = result.description.outputs
    (frame,) = socket.frames[socket.sent.index(result)]
    return np.frombuffer(frame, NUMPY_DTYPE[spec.datatype]).reshape(spec.shape)


# --- start ----------------------------------------------------------------------------------------------------


def test_hello_describes_worker() -> None:
    status, socket = play(fake(), STOP)
    assert status == exit_codes.OK
    hello = only(Hello, socket)
    assert (hello.engine_pid, hello.sha256, hello.sharing_traits) == ("4711", SHA256, FakeEngine.traits)
    assert (hello.versions["weightd"], hello.versions["fake"]) == (VERSION, "1.2")
    assert sorted(hello.versions) == ["fake", "numpy", "python", "weightd"]


def test_holder_builds_selftests_and_exports() -> None:
    engine = fake()
    status, socket = play(engine, BUILD, STOP)
    assert status == exit_codes.OK
    predicts = ["predict"] * 2  # sizes 1 and 2
    export = ["give back", "export /s/store"]
    assert engine.done == ["build /m/model 11,12", *predicts, *predicts, *export, *predicts, "give back", "discard"]
    built = only(Built, socket)
    assert (built.handle, built.shared_bytes, built.note, built.device) == ("7", 1000, "half of it", CARD)
    assert built.inputs == SIGNATURE.inputs
    assert built.outputs == (TensorSignature("y", "FP32", (-1, 3)),)  # the engine does not know this output
    assert (built.selftest_cases, built.selftest_digest) == (CASES, selftest.run(engine, CASES).digest)


def test_worker_repeats_selftest_before_attach() -> None:
    engine = fake()
    status, socket = play(engine, ATTACH, STOP)
    assert status == exit_codes.OK
    predicts = ["predict"] * 2
    assert engine.done == ["build /m/model  7", *predicts, "give back", "attach 7", *predicts]
    digest = selftest.run(engine, CASES).digest
    assert only(Attached, socket) == Attached(digest, 900, "less", CARD)


@pytest.mark.parametrize(("digest", "runs"), [("known", 1), ("", 2)], ids=["repeats its answers", "does not"])
def test_selftest_runs_once_if_nothing_is_shared(digest: str, runs: int) -> None:
    engine = fake()
    _, socket = play(engine, encode(Attach("", CASES, selftest_digest=digest)), STOP)
    assert engine.done.count("predict") == runs * len(CASES)
    assert only(Attached, socket).selftest_digest == selftest.run(engine, CASES).digest


def test_answers_do_not_change_after_attach() -> None:
    _, corrupted_by_attach = play(fake(sequence(ZEROS, ZEROS, ONES, ONES)), ATTACH, STOP)
    _, right = play(fake(sequence(*[ZEROS] * 4)), ATTACH, STOP)
    assert only(Attached, corrupted_by_attach).selftest_digest != only(Attached, right).selftest_digest


def test_model_without_selftest_has_a_note() -> None:
    _, socket = play(fake(sequence(*[InvalidArgument("too small")] * 9)), BUILD, STOP)
    built = only(Built, socket)
    assert (built.selftest_cases, built.selftest_digest, built.note) == ((), "", "half of it")
    assert built.selftest_note.startswith("the model runs on none of 9 inputs generated from its signature")
    assert built.outputs == SIGNATURE.outputs
    worker = fake(sequence(InvalidArgument("no")))
    status, socket = play(worker, encode(Attach("7", ())), predict(1), STOP)
    assert (only(Attached, socket).selftest_digest, worker.done.count("predict")) == ("", 1)
    # A worker without a self-test is accepted.
    assert (status, only(PredictFailed, socket).is_exiting) == (exit_codes.OK, False)


def test_rebuilds_after_selftest_corrupts_engine() -> None:
    engine = fake(sequence(ZEROS, ZEROS, ModelCorrupted("2"), ZEROS))
    status, socket = play(engine, BUILD, STOP)
    assert status == exit_codes.OK
    assert only(Built, socket).selftest_cases == CASES[:1]
    build, export = "build /m/model 11,12", "export /s/store"
    assert engine.done == [build, *["predict"] * 3, build, "give back", export, "predict", "give back", "discard"]


def test_holder_stops_during_search() -> None:
    class StoppingScript(Script):
        def send(self, frames: Sequence[Any]) -> bool:
            self.sent.append(decode(frames, FROM_CHILD))
            return True

    engine, socket = fake(), StoppingScript(BUILD, STOP)
    assert session(socket, engine).run(SHA256) == exit_codes.CANNOT_BUILD
    assert [type(each) for each in socket.sent] == [Hello, AnnounceSelfTest, ProcessFailed]
    assert "predict" not in engine.done


def test_near_answers_yield_the_holders_digest(tmp_path: Path) -> None:
    def played(order: Sequence[Any], factor: float, tolerance: float) -> Script:
        engine = fake(lambda inputs: {"y": inputs["x"] * np.float32(factor)})
        files = ModelInputs("/m/model", str(tmp_path / "store"))
        return play(engine, order, encode(Ping(run_selftest=True)), STOP, files=files, tolerance=tolerance)[1]

    holder_digest = only(Built, played(BUILD, 2.0, 1e-3)).selftest_digest
    near, far = played(ATTACH, 2.001, 1e-3), played(ATTACH, 2.01, 1e-3)
    assert only(Attached, near).selftest_digest == only(Pong, near).selftest_digest == holder_digest != ""
    assert only(Attached, far).selftest_digest == only(Pong, far).selftest_digest != holder_digest
    assert only(Attached, played(ATTACH, 2.001, 0.0)).selftest_digest != holder_digest


@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
def test_selftest_answers_are_not_exported(tmp_path: Path, tolerance: float) -> None:
    answers: List[weakref.ref[Any]] = []

    def answer(inputs: Arrays) -> Arrays:
        y = inputs["x"] * np.float32(2)
        answers.append(weakref.ref(y))
        return {"y": y}

    class Looking(FakeEngine):
        def export(self, store: str) -> SharedWeights:
            assert [each() for each in answers] == [None] * 4
            return super().export(store)

    files = ModelInputs("/m/model", str(tmp_path / "store"))
    _, socket = play(Looking(answer, SIGNATURE), BUILD, STOP, files=files, tolerance=tolerance)
    assert only(Built, socket).selftest_digest


def test_answer_changed_by_sharing_ends_holder() -> None:
    status, socket = play(fake(sequence(*[ZEROS] * 5, ONES)), BUILD, STOP)
    assert status == exit_codes.CANNOT_BUILD
    assert [type(each) for each in socket.sent] == [Hello, ProcessFailed]
    assert only(ProcessFailed, socket).reason == "the answer to the self-test changed when the weights were shared"


@pytest.mark.parametrize(
    ("order", "step"), [(BUILD, "build"), (BUILD, "export"), (ATTACH, "build"), (ATTACH, "attach")]
)
@pytest.mark.parametrize(
    ("error", "cause", "expected", "no_room"),
    [
        (BuildError("no such op"), "no such op", exit_codes.CANNOT_BUILD, False),
        (OutOfDeviceMemory("the card is full"), "the card is full", exit_codes.CANNOT_BUILD, True),
        (ModelCorrupted("the self-test died"), "the self-test died", exit_codes.CANNOT_BUILD, False),
        (MemoryError(), "MemoryError: ", exit_codes.FAILED, False),
        # A text beyond the limit of the protocol is clipped.
        (BuildError("x" * 10_000), clip("x" * 10_000), exit_codes.CANNOT_BUILD, False),
    ],
)
def test_failed_build_waits_for_stop(
    order: Sequence[Any], step: str, error: Exception, cause: str, expected: int, no_room: bool
) -> None:
    status, socket = play(fake(fails={step: error}), order, predict(1), ATTACH, STOP)
    assert status == expected
    assert socket.sent[1:] == [ProcessFailed(cause, no_room, is_transient=isinstance(error, MemoryError))]


@pytest.mark.parametrize(
    ("signature", "cause"),
    [
        (ModelSignature((SIGNATURE.inputs[0],) * 2, ()), "two inputs of the model have the name x"),
        (ModelSignature((), (SIGNATURE.outputs[0],) * 2), "two outputs of the model have the name y"),
        (ModelSignature((TensorSignature("n" * 300, "FP32", ()),), ()), "name: expected"),
        (ModelSignature((TensorSignature("x", "FP32", (1,) * 17),), ()), "shape: expected"),
        (ModelSignature(tuple(TensorSignature(f"x{i}", "FP32", ()) for i in range(65)), ()), "inputs: expected"),
    ],
)
def test_signature_beyond_protocol_limits_fails_build(signature: ModelSignature, cause: str) -> None:
    status, socket = play(FakeEngine(lambda _: {}, signature), BUILD, STOP)
    assert status == exit_codes.CANNOT_BUILD
    assert cause in only(ProcessFailed, socket).reason


def test_trims_store_only_after_build() -> None:
    engine = fake()
    play(engine, encode(TrimStore()), BUILD, encode(TrimStore()), STOP)
    assert [each for each in engine.done if "settle" in each] == ["settle 7"]


@pytest.mark.parametrize("refusal", ["", "the list is full" * 1000])
def test_allows_more_processes_or_reports_error(refusal: str) -> None:
    engine = fake(fails={"allow": AttachRefused(refusal)} if refusal else None)
    status, socket = play(engine, BUILD, encode(AllowAttach(("13", "14"))), encode(TrimStore()), STOP)
    assert (status, engine.done[-2:]) == (exit_codes.OK, ["allow 13,14", "settle 7"])
    assert only(AttachAllowed, socket).error == clip(refusal)


@pytest.mark.parametrize(
    ("order", "build", "after"),
    [(BUILD, "build /m/model 11,12", "export /s/store"), (ATTACH, "build /m/model  7", "attach 7")],
)
def test_updates_weights_between_build_and_selftest(
    order: Sequence[Any], build: str, after: str, tmp_path: Path
) -> None:
    np.savez(str(tmp_path / "new.npz"), a=np.zeros(1), b=np.zeros(2))
    files = FILES._replace(weights_update=str(tmp_path / "new.npz"))
    engine = fake(sequence(*[np.zeros((2, 3), np.float32)] * 8))
    play(engine, order, STOP, files=files)
    assert engine.done[:3] == [build, "update a,b", "predict"]
    assert engine.done.count("update a,b") == engine.done.count(after) == 1
    if order is BUILD:
        engine = fake(sequence(ModelCorrupted("1"), *[np.zeros((2, 3), np.float32)] * 8))
        play(engine, order, STOP, files=files)
        assert engine.done[:5] == [build, "update a,b", "predict", build, "update a,b"]


# --- templates ------------------------------------------------------------------------------------------------

FORK = encode(Fork("w", (), "/log"))


class FakeForker:
    """A forker that starts no process and records the model that each child would inherit."""

    def __init__(self, reason: str = "") -> None:
        self.cannot_fork_reason = lambda: reason
        self.given: List[Any] = []
        self.freeze_count = 0

    def freeze_memory(self) -> None:
        self.freeze_count += 1

    def fork(self, order: Fork, report: ReportForked, inherited_model: Optional[InheritedModel] = None) -> None:
        self.given.append(inherited_model)
        assert report(Forked(order.name, 11))


def fake_growth(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Make the process seem to grow by `nbytes` during the build."""
    sizes = [1000, 1000 + nbytes]
    monkeypatch.setattr(session_module, "private_bytes", lambda: sizes.pop(0))


class PagesEngine(FakeEngine):
    """An engine that records for each build whether pages may be shared."""

    def __init__(self, answer: Answer, signature: ModelSignature) -> None:
        super().__init__(answer, signature)
        self.builds: List[bool] = []

    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        self.builds.append(self.shares_pages)
        super().build(model, pids=pids, handle=handle)


@pytest.mark.parametrize("handle", ["7", ""])
def test_worker_shares_pages_only_of_a_store(handle: str) -> None:
    engine = PagesEngine(twice, SIGNATURE)
    play(engine, encode(Attach(handle, CASES)), STOP)
    assert engine.builds == [bool(handle)]


def test_template_passes_its_model_instead_of_exporting(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_growth(monkeypatch, 32 << 20)
    engine, forker = fake(), FakeForker()
    status, socket = play(engine, FORK, BUILD, FORK, STOP, sharing_plan=SharingPlan(2, cast(Any, forker)))
    assert status == exit_codes.OK
    built = only(Built, socket)
    assert (built.handle, built.is_template, built.shared_bytes, built.note) == ("", True, 32 << 20, "")
    assert built.selftest_digest == selftest.run(engine, CASES).digest
    assert engine.done.count("export /s/store") == 0
    assert (forker.freeze_count, forker.given) == (1, [InheritedModel(engine, SHA256, 32 << 20)])
    forked = [each for each in socket.sent if isinstance(each, Forked)]
    assert forked == [Forked("w", 0, "this process is not a template"), Forked("w", 11)]


@pytest.mark.parametrize(
    ("refusal", "answers", "draws", "nbytes", "handle"),
    [
        ("two threads", [ZEROS], False, 32 << 20, "7"),
        ("", [ZEROS, ONES], False, 32 << 20, "7"),
        ("", [ZEROS], True, 32 << 20, "7"),
        ("", [ZEROS], False, (32 << 20) - 1, ""),
    ],
)
def test_conditions_that_rule_out_a_template(
    monkeypatch: pytest.MonkeyPatch, refusal: str, answers: List[Any], draws: bool, nbytes: int, handle: str
) -> None:
    def is_stochastic(_: FakeEngine, model: str) -> bool:
        return draws and model == FILES.model

    fake_growth(monkeypatch, nbytes)
    monkeypatch.setattr(FakeEngine, "is_stochastic", is_stochastic)
    forker = FakeForker(refusal)
    engine = PagesEngine(sequence(*answers * 6), SIGNATURE)
    _, socket = play(engine, BUILD, FORK, STOP, sharing_plan=SharingPlan(2, cast(Any, forker)))
    built = only(Built, socket)
    assert (built.is_template, built.handle) == (False, handle)
    # The build for a template cannot share pages, so the model is built again. Random operators are known before.
    assert engine.builds == ([True] if draws else [False, True] if handle else [False])
    unshared = "sharing 31 MiB among 2 processes would save 31 MiB, and the holder would use 32 MiB"
    assert handle or built.note == f"weights are not shared: {unshared}"
    assert (only(Forked, socket).pid, forker.given) == (0, [])


def test_possible_template_rejects_predict() -> None:
    with pytest.raises(RemoteProtocolError, match="no predict in a template"):
        play(fake(), predict(1), STOP, sharing_plan=SharingPlan(2, cast(Any, FakeForker())))


def test_forked_worker_does_not_build() -> None:
    engine = fake()
    origin = ProcessOrigin("template", "", InheritedModel(engine, SHA256, 1234))
    _, socket = play(engine, ATTACH, predict(1), STOP, origin=origin)
    hello = only(Hello, socket)
    assert (hello.origin, hello.origin_note, hello.sha256) == ("template", "", SHA256)
    assert engine.done == ["predict"] * 3
    assert only(Attached, socket) == Attached(selftest.run(engine, CASES).digest, 1234, "", CARD)


def test_forked_worker_runs_selftest() -> None:
    engine = fake(sequence(ZEROS, ZEROS, ONES, ONES))
    origin = ProcessOrigin("template", "", InheritedModel(engine, SHA256, 1234))
    _, socket = play(engine, ATTACH, encode(Ping(run_selftest=True)), STOP, origin=origin)
    assert only(Pong, socket).selftest_digest != only(Attached, socket).selftest_digest


# --- requests -------------------------------------------------------------------------------------------------


OUTPUTS: Dict[str, Any] = {
    "F-order": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "big-endian": np.arange(6, dtype=">f4").reshape(2, 3),
    "big-endian F-order": np.arange(6, dtype=">i8").reshape(2, 3, order="F"),
    "0-d": np.array(7, np.int64),
    "bool, every second": np.array([True, True, False, False])[::2],
    "broadcast": np.broadcast_to(np.float16(0.5), (2, 2)),
    "empty": np.zeros((0, 4), np.float32),
    "read-only": np.frombuffer(b"\1\2\3\4", np.uint16),
    "unaligned": np.frombuffer(b"?\0\0\x80\x3f\0\0\0\x40", np.uint8)[1:].view("<f4"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_sends_outputs_little_endian_in_c_order(name: str) -> None:
    output = OUTPUTS[name]
    status, socket = play(fake(sequence(output)), predict(1), STOP)
    assert status == exit_codes.OK
    result = only(PredictResult, socket)
    assert result.description.outputs[0].shape == output.shape
    assert socket.frames[-1] == [output.astype(output.dtype.newbyteorder("<")).tobytes("C")]
    np.testing.assert_array_equal(array_of(socket, result), output)


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("ab"), st.sampled_from([*OUTPUTS.values(), ZEROS, ONES]), min_size=1),
            st.sampled_from([None, ("a",), ("b", "a")]),
            st.sampled_from([ONES, np.ones((2, 3), np.float32)]),
        ),
        max_size=8,
    )
)
def test_answers_do_not_depend_on_earlier_requests(
    requests: List[Tuple[Arrays, Optional[Tuple[str, ...]], Any]],
) -> None:
    def answers(some: Sequence[Tuple[Arrays, Optional[Tuple[str, ...]], Any]]) -> List[Any]:
        answering = iter([each for each, _, _ in some])
        orders = [predict(1, {"x": x}, outputs) for _, outputs, x in some]
        _, script = play(fake(lambda _: next(answering)), *orders, STOP)
        return list(zip(script.sent, script.frames))[1:]

    together = answers(requests)
    alone = [answer for each in requests for answer in answers([each])]
    # A missing requested output ends the session.
    assert together == alone[: len(together)]
    assert len(together) == len(requests) or together[-1][0].is_exiting


INPUTS: Dict[str, Any] = {
    "float": np.arange(6, dtype=np.float32).reshape(2, 3),
    "F-order": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
    "big-endian": np.arange(6, dtype=">i4"),
    "scalar": np.array(-3, np.int64),
    "bool": np.array([True, False, True]),
    "empty": np.zeros((0, 4), np.float32),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_engine_gets_native_aligned_c_order_arrays(name: str, offset: int) -> None:
    engine = fake(lambda inputs: {"y": inputs["x"]})
    *header, frame = predict(1, {"x": INPUTS[name]})
    buffer = np.zeros(len(frame) + 16, np.uint8)
    begin = -buffer.ctypes.data % 8 + offset
    buffer[begin : begin + len(frame)] = np.frombuffer(frame, np.uint8)
    _, socket = play(engine, [*header, memoryview(cast("Any", buffer))[begin : begin + len(frame)]], STOP)
    array = engine.received_inputs[0]["x"]
    assert array.flags.aligned
    assert array.flags.c_contiguous
    assert array.dtype.isnative
    assert array.shape == INPUTS[name].shape
    np.testing.assert_array_equal(array, INPUTS[name])
    np.testing.assert_array_equal(array_of(socket, only(PredictResult, socket)), INPUTS[name])


def test_several_inputs_and_outputs_keep_their_names() -> None:
    engine = fake(lambda inputs: {"difference": inputs["a"] - inputs["b"], "a": inputs["a"]})
    inputs = {"b": np.ones(2, np.float32), "a": np.array([5, 6], np.float32)}
    _, socket = play(engine, predict(1, inputs), STOP)
    result = only(PredictResult, socket)
    assert [each.name for each in result.description.outputs] == ["difference", "a"]
    assert [np.frombuffer(frame, "<f4").tolist() for frame in socket.frames[-1]] == [[4, 5], [5, 6]]
    # The session sends only the requested outputs, in the requested order.
    for outputs, values in ((("a", "difference"), [[5, 6], [4, 5]]), (("difference",), [[4, 5]])):
        _, socket = play(engine, predict(1, inputs, outputs), STOP)
        assert [each.name for each in only(PredictResult, socket).description.outputs] == [*outputs]
        assert [np.frombuffer(frame, "<f4").tolist() for frame in socket.frames[-1]] == values


def test_serves_next_request_after_rejected_one() -> None:
    refusals = [InvalidArgument("index out of bounds"), InvalidArgument("x" * 10_000)]
    status, socket = play(fake(sequence(*refusals, ZEROS)), predict(1), predict(2), predict(3), STOP)
    assert status == exit_codes.OK
    assert socket.sent[1:3] == [
        PredictFailed(1, "INVALID_ARGUMENT", "index out of bounds", is_exiting=False),
        PredictFailed(2, "INVALID_ARGUMENT", clip("x" * 10_000), is_exiting=False),
    ]
    assert only(PredictResult, socket).request == 3


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ModelCorrupted("predict failed!: InferShape fail!"), "predict failed!: InferShape fail!"),
        (KeyError("x"), "KeyError: 'x'"),
        (MemoryError(), "MemoryError: "),
    ],
)
def test_corrupted_model_obeys_only_stop(error: Exception, text: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = fake(sequence(error, ZEROS, ZEROS))
    orders = (predict(2), BUILD, ATTACH, encode(TrimStore()), predict(3))
    status, socket = play(engine, predict(1), *orders, STOP)
    assert status == exit_codes.MODEL_CORRUPTED
    assert [type(each) for each in socket.sent] == [Hello, PredictFailed]
    assert only(PredictFailed, socket) == PredictFailed(1, "INTERNAL", text, is_exiting=True)
    assert engine.done == ["predict"]
    assert ("Traceback" in caplog.text) != isinstance(error, ModelCorrupted)


@pytest.mark.parametrize(
    ("attached", "now", "leaving"),
    [
        ([ZEROS] * 4, [ZEROS, ZEROS], False),
        ([ZEROS] * 4, [ONES, ONES], True),
        # A worker of a model with varying answers may continue.
        ([ZEROS, ZEROS, ONES, ONES], [ZEROS, ONES], False),
    ],
)
def test_runs_selftest_after_rejected_predict(attached: List[Any], now: List[Any], leaving: bool) -> None:
    engine = fake(sequence(*attached, InvalidArgument("too large"), *now, ZEROS))
    status, socket = play(engine, ATTACH, predict(1), predict(2), STOP)
    assert only(PredictFailed, socket) == PredictFailed(1, "INVALID_ARGUMENT", "too large", leaving)
    assert [each.request for each in socket.sent if isinstance(each, PredictResult)] == ([] if leaving else [2])
    assert status == (exit_codes.MODEL_CORRUPTED if leaving else exit_codes.OK)


def test_no_selftest_if_rejected_before_predict() -> None:
    engine = fake(sequence(*[ZEROS] * 4, NotRun("too large"), ONES))
    _, socket = play(engine, ATTACH, predict(1), predict(2), STOP)
    assert only(PredictFailed, socket) == PredictFailed(1, "INVALID_ARGUMENT", "too large", is_exiting=False)
    assert [each.request for each in socket.sent if isinstance(each, PredictResult)] == [2]
    assert engine.done.count("predict") == 6


def test_reports_reconnected_to_next_daemon() -> None:
    status, socket = play(fake(), ATTACH, None, None, predict(1), STOP)
    assert status == exit_codes.OK
    assert [type(each) for each in socket.sent] == [Hello, Attached, Reconnected, Reconnected, PredictResult]


def test_corrupted_worker_does_not_reconnect() -> None:
    status, socket = play(fake(sequence(RuntimeError("broken"))), predict(1), None)
    assert status == exit_codes.MODEL_CORRUPTED
    assert [type(each) for each in socket.sent] == [Hello, PredictFailed]


def test_rejects_answer_for_another_batch() -> None:
    two = np.zeros((2, 3), np.float32)
    # The self-test answers are right, but a repeated request now gets another answer.
    three = np.ones((3, 3), np.float32)
    engine = fake(sequence(ZEROS, two, ZEROS, two, three, three, ZEROS, ZEROS, two, ONES))
    status, socket = play(engine, ATTACH, *(predict(number, {"x": three}) for number in range(3)), STOP)
    assert status == exit_codes.MODEL_CORRUPTED
    failed = only(PredictFailed, socket)
    assert (failed.request, failed.code, failed.is_exiting) == (2, "INTERNAL", True)
    assert "for a batch of 3" in failed.error


# --- orders that overtake others, and pings ----------------------------------------------------------------------


def skip(number: int) -> List[Any]:
    return encode(CancelPredict(number))


@pytest.mark.parametrize(
    ("orders", "ahead", "late", "answered", "skipped"),
    [
        ([predict(1), predict(2), skip(2), predict(3)], 3, 0, [1, 3], [2]),
        ([predict(1), predict(2), skip(2), predict(3)], 1, 2, [1, 3], [2]),
        # These cancellations are late, or name an unknown request.
        ([predict(1), skip(1), skip(7), predict(2)], 0, 0, [1, 2], []),
        ([skip(1), skip(2), predict(3)], 1, 0, [3], []),  # A cancellation alone does not end the wait.
    ],
)
def test_does_not_start_cancelled_request(
    orders: Sequence[Sequence[Any]], ahead: int, late: int, answered: List[int], skipped: List[int]
) -> None:
    engine = fake()
    _, socket = play(engine, *orders, STOP, ahead=ahead, late=late)
    assert [each.request for each in socket.sent if isinstance(each, PredictResult)] == answered
    assert [each.request for each in socket.sent if isinstance(each, PredictCancelled)] == skipped
    assert len(engine.received_inputs) == len(answered)


def test_obeys_orders_read_ahead_in_order() -> None:
    engine = fake()
    _, socket = play(engine, ATTACH, predict(1), encode(Ping(False)), predict(2), STOP, ahead=4)
    assert [type(each) for each in socket.sent] == [Hello, Attached, PredictResult, Pong, PredictResult]


def test_pong_has_selftest_digest_on_demand() -> None:
    proving = encode(Ping(True))
    _, socket = play(fake(), proving, ATTACH, encode(Ping(False)), proving, STOP)
    pongs = [each for each in socket.sent if isinstance(each, Pong)]
    assert pongs == [Pong(""), Pong(""), Pong(only(Attached, socket).selftest_digest)]


def test_failed_selftest_on_ping_ends_worker() -> None:
    engine = fake(sequence(*[ZEROS] * 4, ModelCorrupted("predict failed!")))
    status, socket = play(engine, ATTACH, encode(Ping(True)), predict(1), STOP)
    assert status == exit_codes.CANNOT_BUILD
    assert [type(each) for each in socket.sent] == [Hello, Attached, ProcessFailed]
    assert only(ProcessFailed, socket).reason == "predict failed!"


@pytest.mark.parametrize(
    ("name", "output", "error"),
    [
        # This view needs four bytes; a copy of it would need 1 GiB.
        (
            "y",
            np.broadcast_to(np.float32(0), (2**18 + 1, 1024)),
            "output y of shape [262145, 1024] cannot be sent: expected at most 1073741824 bytes, got 1073745920",
        ),
        ("y", np.zeros((1,) * (limits.MAX_RANK + 1)), "expected at most 16 dimensions, got 17"),
        ("y", np.array(["text"]), "is not a supported datatype"),
        ("", np.zeros(1), "name: expected"),
    ],
)
def test_output_beyond_protocol_limits_is_an_error(name: str, output: Any, error: str) -> None:
    status, socket = play(fake(lambda _: {name: output}), predict(1), STOP)
    failed = only(PredictFailed, socket)
    assert error in failed.error
    assert (failed.code, failed.is_exiting) == (("INVALID_ARGUMENT", False) if name else ("INTERNAL", True))
    assert status == (exit_codes.OK if name else exit_codes.MODEL_CORRUPTED)


class Frame(bytearray):
    """A frame that supports weak references, so that a test can see whether it is still alive."""


def test_releases_inputs_before_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    *header, content = predict(1)
    frames = [*header, Frame(content)]
    there, socket = weakref.ref(frames[-1]), Script(ATTACH, frames, PAUSE, STOP)
    del frames
    rests: List[bool] = []
    engine = fake()

    def rest(_: WorkerSession) -> None:
        # The fake engine keeps its inputs for assertions.
        engine.received_inputs.clear()
        rests.append(there() is not None)

    monkeypatch.setattr(WorkerSession, "_release_idle_memory", rest)
    assert session(socket, engine).run(SHA256) == exit_codes.OK
    assert rests == [False]


def test_trims_log_and_heap(heap: List[str], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake()
    monkeypatch.setattr(nativelog, "truncate_if_too_large", lambda: heap.append("log"))
    at_once = ["log", "bound"]
    rest = ["log", "give back"]
    play(engine, ATTACH, predict(1), predict(2), PAUSE, predict(3), PAUSE, STOP)
    assert heap == ["keep", *at_once, *rest, *at_once, *rest]
    assert engine.done.count("give back") == 1 + 2
    heap.clear()
    monkeypatch.setattr(base, "HOUSEKEEPING_INTERVAL_S", 0)
    play(engine, ATTACH, predict(1), encode(Ping(False)), STOP)
    assert heap == ["keep", *at_once, *at_once, *at_once]
    heap.clear()
    play(engine, BUILD, STOP)
    assert "keep" not in heap


def test_large_frames_are_not_copied() -> None:
    answer = np.zeros((512, 512), np.float32)
    seen: List[Any] = []

    class Uncopied(Script):
        def reply(self, *messages: Sequence[Any]) -> None:
            seen.extend(messages[0])

    session(Uncopied(predict(1), STOP), fake(sequence(answer))).run(SHA256)
    assert np.shares_memory(np.frombuffer(seen[-1], np.uint8), answer)


# --- batches of several requests ---------------------------------------------------------------------------------


def together(*parts: Sequence[Any], rows: int = 0) -> List[Sequence[Any]]:
    return [encode(BeginBatch(len(parts), rows)), *parts]


def of_rows(number: int, *values: float) -> List[Any]:
    return predict(number, {"x": np.repeat(np.array([values], np.float32).T, 3, 1)})


def answers(socket: Script) -> Dict[int, List[float]]:
    """Return, per request, the first value of each row of its answer."""
    return {
        each.request: array_of(socket, each)[:, 0].tolist() for each in socket.sent if isinstance(each, PredictResult)
    }


def one(inputs: Arrays) -> Arrays:
    """Double the input; reject negative values, and corrupt the model on infinity."""
    if np.isinf(inputs["x"]).any():
        raise ModelCorrupted("infinite")
    if (inputs["x"] < 0).any():
        raise InvalidArgument("negative")
    return twice(inputs)


def test_batched_requests_get_separate_answers() -> None:
    engine = fake()
    parts = of_rows(1, 1), of_rows(2, 2, 3), of_rows(3, 4)
    # The second batch uses the cached layout of the first one.
    status, socket = play(engine, *together(*parts), *together(*parts, rows=6), *together(*parts, rows=6), STOP)
    assert status == exit_codes.OK
    assert answers(socket) == {1: [2], 2: [4, 6], 3: [8]}
    assert [each["x"][:, 0].tolist() for each in engine.received_inputs] == [[1, 2, 3, 4], *[[1, 2, 3, 4, 4, 4]] * 2]
    assert [each.request for each in socket.sent if isinstance(each, PredictResult)] == [1, 2, 3] * 3
    assert socket.reply_counts == [3, 3, 3]


def test_batched_requests_choose_their_outputs() -> None:
    engine = fake(lambda inputs: {"y": np.asfortranarray(inputs["x"] * 2), "z": inputs["x"][:, :2]})
    parts = predict(1, {"x": ONES}, ("z",)), predict(2, {"x": 3 * ONES})
    # The second batch takes the cached layout where the layout permits it.
    _, socket = play(engine, *together(*parts), *together(*parts), STOP)
    found = [[np.frombuffer(frame, "<f4").tolist() for frame in frames] for frames in socket.frames[1:]]
    assert found == [[[1, 1]], [[6, 6, 6], [3, 3]]] * 2


@pytest.mark.parametrize("number", [1, 2, 3])
def test_failing_request_does_not_fail_its_batch(number: int) -> None:
    values = {1: 1.0, 2: 2.0, 3: 3.0, number: -1.0}
    status, socket = play(fake(one), *together(*(of_rows(*each) for each in values.items())), STOP)
    assert status == exit_codes.OK
    assert only(PredictFailed, socket) == PredictFailed(number, "INVALID_ARGUMENT", "negative", is_exiting=False)
    assert answers(socket) == {each: [2 * value] for each, value in values.items() if each != number}


@pytest.mark.parametrize("error", [ModelCorrupted("no"), ValueError("no")])
def test_corrupted_batch_fails_its_first_request(
    error: Exception,
) -> None:
    status, socket = play(fake(sequence(error)), *together(predict(1), predict(2)), STOP)
    assert status == exit_codes.MODEL_CORRUPTED
    failed = only(PredictFailed, socket)
    assert (failed.request, failed.is_exiting, socket.sent[1:]) == (1, True, [failed])


@pytest.mark.parametrize("now", [[ZEROS, ZEROS], [ONES, ONES]], ids=["unchanged", "corrupted"])
def test_runs_selftest_after_rejected_batch(now: List[Any]) -> None:
    engine = fake(sequence(*[ZEROS] * 4, InvalidArgument("so many"), *now, ZEROS, ZEROS))
    _, socket = play(engine, ATTACH, *together(predict(1), predict(2)), STOP)
    good = now[0] is ZEROS
    expected = [(PredictResult, 1), (PredictResult, 2)] if good else [(PredictFailed, 1)]
    assert [
        (type(each), each.request) for each in socket.sent if isinstance(each, (PredictResult, PredictFailed))
    ] == expected


def test_stops_batching_after_outputs_without_rows() -> None:
    engine = fake(lambda inputs: {"y": inputs["x"][:1]})
    status, socket = play(engine, *together(predict(1), predict(2)), *together(predict(3), predict(4)), STOP)
    assert status == exit_codes.OK
    assert only(BatchMismatch, socket).note == "output y has shape [1, 3] for 2 rows"
    assert [*answers(socket)] == [1, 2, 3, 4]
    assert len(engine.received_inputs) == 1 + 2 + 2


def test_pads_single_request_to_more_rows() -> None:
    engine = fake()
    _, socket = play(engine, *together(of_rows(1, 5), rows=4), STOP)
    assert (answers(socket), engine.received_inputs[0]["x"].shape) == ({1: [10]}, (4, 3))
    _, socket = play(fake(sequence(InvalidArgument("no"))), *together(of_rows(1, 5), rows=4), STOP)
    assert only(PredictFailed, socket) == PredictFailed(1, "INVALID_ARGUMENT", "no", is_exiting=False)
    _, socket = play(fake(sequence(ONES)), *together(of_rows(1, 5), rows=4), STOP)
    assert only(PredictFailed, socket).error == "output y has shape [1, 3] for 4 rows"


def test_cancels_batch_item_before_batch_starts() -> None:
    parts = [of_rows(number, number) for number in (1, 2, 3, 4)]
    # Before and after the last batch item has arrived.
    for at in (3, 4):
        orders = together(*parts[:3])
        orders.insert(at, skip(2))
        engine = fake()
        _, socket = play(engine, ATTACH, *orders, STOP, ahead=len(orders))
        assert (only(PredictCancelled, socket).request, answers(socket)) == (2, {1: [2], 3: [6]})
        # The batch has a new form, so the remaining requests also run alone.
        assert [each["x"][:, 0].tolist() for each in engine.received_inputs[-3:]] == [[1, 3], [1], [3]]
    # Cancel all items of a batch that is incomplete, and all items of the next one.
    orders = [*together(*parts[:2]), *together(*parts[2:])]
    orders[2:2] = [skip(1)]
    orders += [skip(2), skip(3), skip(4)]
    _, socket = play(fake(), ATTACH, *orders, encode(Ping(False)), STOP, ahead=len(orders) + 1)
    assert [type(each) for each in socket.sent[1:]] == [*[PredictCancelled] * 4, Attached, Pong]


def test_ping_waits_for_incomplete_batch() -> None:
    first, *rest = together(predict(1), predict(2))
    ping = encode(Ping(False))
    _, socket = play(fake(), ATTACH, first, ping, rest[0], ping, rest[1], STOP)
    assert [type(each) for each in socket.sent[2:]] == [PredictResult, PredictResult, Pong, Pong]


def test_new_daemon_discards_incomplete_batch() -> None:
    engine = fake()
    _, socket = play(engine, *together(predict(1), predict(2))[:-1], encode(Ping(False)), None, predict(3), STOP)
    assert [type(each) for each in socket.sent[1:]] == [Reconnected, Pong, PredictResult]
    assert [*answers(socket)] == [3]


def test_holder_and_worker_report_row_support(
    tmp_path: Path,
) -> None:
    engine = fake()
    build = encode(Build((), max_rows=8))
    _, socket = play(engine, build, STOP)
    rows = only(Built, socket).row_support
    assert rows is not None
    assert (rows.inputs, rows.outputs, rows.is_equal, rows.note) == (("x",), ("y",), True, "")
    # With a tolerance, no digests of batches are compared.
    _, near = play(fake(), build, STOP, tolerance=0.1, files=ModelInputs("/m", str(tmp_path / "store")))
    assert only(Built, near).row_support == dataclasses.replace(rows, batch_digest="")
    attach = encode(Attach("7", CASES, 8, row_support=rows))
    unsure = encode(Attach("7", CASES, 8, row_support=dataclasses.replace(rows, batch_digest="")))
    job = together(of_rows(1, 1), of_rows(2, 2))

    def more_of_many(inputs: Arrays) -> Arrays:
        return {"y": inputs["x"] * (2 + (len(inputs["x"]) > 2))}

    same, other = [Attached], [Attached, BatchMismatch]
    # A worker that is known to match the holder does not repeat the holder's comparison.
    for order, answer, mismatches, runs in (
        (attach, twice, same, [8, 2]),
        (attach, more_of_many, other, [8, 1, 1]),
        (unsure, twice, same, [2, 1, 1]),
    ):
        engine = fake(answer)
        _, socket = play(engine, order, *job, STOP)
        assert [type(each) for each in socket.sent] == [Hello, *mismatches, PredictResult, PredictResult]
        assert [len(each["x"]) for each in engine.received_inputs[4:]] == runs
    # A worker forked from a template inherits the result.
    made = ProcessOrigin("template", inherited_model=InheritedModel(fake(), SHA256, 5))
    engine = fake()
    play(engine, attach, STOP, origin=made)
    assert len(engine.received_inputs) == 2


def test_frees_memory_of_the_load_once_idle(heap: List[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits for the load is not delayed, and later requests find the library's pages in memory."""
    timeouts: List[float] = []

    class TimedScript(Script):
        def receive(self, timeout_s: float = -1) -> Optional[List[Sequence[Any]]]:
            timeouts.append(timeout_s)
            return super().receive(timeout_s)

    monkeypatch.setattr(session_module, "drop_unchanged_pages", lambda: heap.append("drop"))
    worker = TimedScript(ATTACH, predict(1), PAUSE, predict(2), PAUSE, STOP)
    assert session(worker, fake()).run(SHA256) == exit_codes.OK
    assert heap == ["keep", "bound", "give back", "drop", "bound", "give back"]
    assert (timeouts[1] == timeouts[2] < 1 < timeouts[4], timeouts[3]) == (True, -1)
    heap.clear()
    assert session(Script(BUILD, PAUSE, STOP), fake()).run(SHA256) == exit_codes.OK
    assert heap == ["bound", "give back", "drop"]


def differs_on_fives(inputs: Arrays) -> Arrays:
    """Return another answer for two rows than for one if one of the rows is 5."""
    return {"y": inputs["x"] * 2 + (len(inputs["x"]) > 1 and 5 in inputs["x"])}


def test_first_batch_of_a_form_answers_as_alone() -> None:
    jobs = [*together(of_rows(1, 1), of_rows(2, 5)), *together(of_rows(3, 1), of_rows(4, 2))]
    for exact in (True, False):
        engine = fake(differs_on_fives)
        _, socket = play(engine, encode(Attach("7", CASES, 8, exact=exact)), *jobs, STOP)
        expected = {1: [2], 2: [10]} if exact else {1: [3], 2: [11]}
        assert answers(socket) == {**expected, 3: [2], 4: [4]}
        assert [type(each) for each in socket.sent].count(BatchMismatch) == exact
        assert [len(each["x"]) for each in engine.received_inputs[4:]] == ([2, 1, 1, 1, 1, 1, 1] if exact else [2, 2])


def test_runs_principal_with_unequal_rows_alone() -> None:
    def job(first: int, *values: float, principal_ids: Tuple[int, ...]) -> List[Sequence[Any]]:
        parts = [of_rows(first + index, value) for index, value in enumerate(values)]
        return [encode(BeginBatch(len(parts), 0, principal_ids)), *parts]

    def fives(inputs: Arrays) -> Arrays:
        return {"y": inputs["x"] * 2 + (len(inputs["x"]) > 1) * (inputs["x"] == 5)}

    attach = encode(Attach("7", CASES, 8))
    engine = fake(fives)
    jobs = [
        *job(1, 1, 5, 2, principal_ids=(7, 8, 9)),
        *job(4, 1, 5, 2, principal_ids=(7, 8, 9)),
        *job(7, 1, 2, principal_ids=(7, 9)),
    ]
    _, socket = play(engine, attach, *jobs, STOP)
    assert answers(socket) == {1: [2], 2: [10], 3: [4], 4: [2], 5: [10], 6: [4], 7: [2], 8: [4]}
    mismatches = [each for each in socket.sent if isinstance(each, BatchMismatch)]
    # The next daemon gets the report again.
    assert [each.principal_ids for each in mismatches] == [(8,), (8,)]
    # First batch: all three requests, each alone, the request of 8 without the others, then each for its answer.
    # Second batch: the requests of 7 and 9, whose form is new, and the request of 8. Third: the requests of 7 and 9,
    # which have a known form.
    assert [len(each["x"]) for each in engine.received_inputs[4:]] == [3, 1, 1, 1, 3, 1, 1, 1, 2, 1, 1, 1, 2]
    # A cancelled batch item belongs to no principal.
    skipped = job(1, 5, 1, 2, principal_ids=(8, 7, 9))
    engine = fake(fives)
    _, socket = play(
        engine, attach, *skipped[:2], skip(1), *skipped[2:], *job(4, 1, 2, principal_ids=(8, 7)), STOP, ahead=6
    )
    assert answers(socket) == {2: [2], 3: [4], 4: [2], 5: [4]}
    assert not [each for each in socket.sent if isinstance(each, BatchMismatch)]


@pytest.mark.parametrize("exact", [True, False])
def test_runs_unequal_special_values_alone(exact: bool) -> None:
    rows = RowSupport(("x",), ("y",), is_equal=True, compared_rows=8, unequal_specials=("nan", "negative zero"))
    engine = fake()
    parts = [of_rows(number, *values) for number, values in enumerate([(1,), (2, np.nan), (np.inf,), (-0.0,)], 1)]
    _, socket = play(engine, encode(Attach("7", CASES, 8, exact=exact, row_support=rows)), *together(*parts), STOP)
    assert sorted(answers(socket)) == [1, 2, 3, 4]
    asked = [each["x"][:, 0].tolist() for each in engine.received_inputs if len(each["x"]) > 1 or exact][-5:]
    if exact:
        # The form of the other requests is new, so each of them also runs alone.
        expected = [["1.0", "inf"], ["1.0"], ["inf"], ["2.0", "nan"], ["-0.0"]]
        assert [[str(value) for value in each] for each in asked] == expected
    else:
        assert len(asked[-1]) == 5
    assert not [each for each in socket.sent if isinstance(each, BatchMismatch)]


def test_many_special_values_end_batching_of_principal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_guard, "_MAX_SPECIAL_REQUESTS", 2)
    rows = RowSupport(("x",), ("y",), is_equal=True, compared_rows=8, unequal_specials=("nan",))
    job = [encode(BeginBatch(2, 0, (7, 8))), of_rows(1, np.nan), of_rows(2, 1)]
    _, socket = play(fake(), encode(Attach("7", CASES, 8, row_support=rows)), *job, *job, STOP)
    mismatch = only(BatchMismatch, socket)
    assert (mismatch.principal_ids, mismatch.note) == ((7,), "many requests have values that must run alone (nan)")
    assert [each.request for each in socket.sent if isinstance(each, PredictResult)] == [2, 1] * 2


def test_many_unequal_principals_end_batching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_guard, "_MAX_UNBATCHABLE_PRINCIPALS", 1)
    engine = fake(lambda inputs: {"y": inputs["x"] + len(inputs["x"])})
    parts = of_rows(1, 1), of_rows(2, 2)
    _, socket = play(engine, ATTACH, encode(BeginBatch(2, 0, (7, 8))), *parts, STOP)
    assert (only(BatchMismatch, socket).principal_ids, answers(socket)) == ((), {1: [2], 2: [3]})


@pytest.mark.parametrize("principal_ids", [(1,), (1, 2, 3)])
def test_principal_ids_cover_all_items_or_none(principal_ids: Tuple[int, ...]) -> None:
    with pytest.raises(RemoteProtocolError, match=f"principal_ids: expected 2 or none, got {len(principal_ids)}"):
        play(fake(), encode(BeginBatch(2, 0, principal_ids)), predict(1), predict(2), STOP)


def test_forms_beyond_the_limit_are_not_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_guard, "_MAX_TESTED_SPECS", 0)
    engine = fake()
    job = together(predict(1), predict(2))
    _, socket = play(engine, ATTACH, *job, *together(predict(3), predict(4), predict(5)), STOP)
    assert [len(each["x"]) for each in engine.received_inputs[4:]] == [2, 1, 1, 1, 1, 1]
    assert [*answers(socket)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("tidy_s", [0.0, 10.0])
def test_rechecks_batches_while_idle(tidy_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_guard, "_RECHECK_INTERVAL", 1)
    monkeypatch.setattr(base, "HOUSEKEEPING_INTERVAL_S", tidy_s)
    good, bad = together(of_rows(1, 1), of_rows(2, 2)), together(of_rows(3, 3), of_rows(4, 5))
    engine = fake(differs_on_fives)
    status, socket = play(engine, ATTACH, *good, *good, PAUSE, PAUSE, *bad, PAUSE, *good, STOP)
    assert status == exit_codes.OK
    assert [type(each) for each in socket.sent[2:]] == [*[PredictResult] * 6, BatchMismatch, *[PredictResult] * 2]
    sizes = [len(each["x"]) for each in engine.received_inputs[4:]]
    assert sizes == [2, 1, 1, 2, *[1, 1], 2, *[1, 1], *[1, 1]]
    # The engine may fail during the recheck and is then unusable.
    left = [8]

    def failing(inputs: Arrays) -> Arrays:
        left[0] -= 1
        if left[0] < 0:
            raise ModelCorrupted("no")
        return twice(inputs)

    engine = fake(failing)
    status, socket = play(engine, ATTACH, *good, *good, PAUSE, STOP)
    assert (status, only(ProcessFailed, socket).reason) == (exit_codes.CANNOT_BUILD, "no")


def test_rejects_nested_batch() -> None:
    with pytest.raises(RemoteProtocolError, match="type: expected predict, 1 more, got begin_batch"):
        play(fake(), encode(BeginBatch(1)), encode(BeginBatch(1)))


# --- memory of clients ------------------------------------------------------------------------------------------------


class Mapping(Script):
    """A script that also receives file descriptors of a shared memory region."""

    def __init__(self, *orders: Optional[Sequence[Any]]) -> None:
        super().__init__(*orders)
        self.memory = memfd.create(4096)

    def take_descriptor(self) -> int:
        return os.dup(self.memory)


def placed(number: int, offset: int = 0, room: int = 4096, region: int = 7) -> List[Any]:
    regions = MappedRegions((MappedInput(0, region, offset),), (MappedOutput(0, region, 64, room),))
    return encode(Predict(number, RequestDescription("m", (spec_of("x", ONES),)), regions))


def test_uses_tensors_in_client_memory() -> None:
    connection = Mapping(encode(MapRegion(7)), placed(1, 16), placed(2, 16, 11), predict(3), STOP)
    os.pwrite(connection.memory, ONES.tobytes(), 16)
    session(connection, fake()).run(SHA256)
    description = describe_response("m", {"y": ONES})
    assert connection.sent[1:] == [
        PredictResult(1, description, (0,)),
        PredictResult(2, description),
        PredictResult(3, description),
    ]
    answer = (2 * ONES).tobytes()
    assert connection.frames[1:] == [[], [answer], [answer]]
    assert os.pread(connection.memory, len(answer), 64) == answer


@pytest.mark.parametrize("gone", [[encode(UnmapRegion(7))], [None]], ids=["unmapped", "new daemon"])
def test_missing_region_fails_only_its_request(gone: List[Any]) -> None:
    connection = Mapping(encode(MapRegion(7)), placed(1), *gone, placed(2), predict(3), STOP)
    assert session(connection, fake()).run(SHA256) == exit_codes.OK
    assert [type(each) for each in connection.sent if not isinstance(each, Reconnected)] == [
        Hello,
        PredictResult,
        PredictFailed,
        PredictResult,
    ]
    failed = next(each for each in connection.sent if isinstance(each, PredictFailed))
    assert (failed.request, failed.code, failed.is_exiting) == (2, "INTERNAL", False)


def test_region_mapped_again_before_unmap_stays() -> None:
    connection = Mapping(encode(MapRegion(7)), placed(1), encode(UnmapRegion(7)), encode(MapRegion(7)), placed(2), STOP)
    connection.ahead, connection.late = 2, 2
    assert session(connection, fake()).run(SHA256) == exit_codes.OK
    assert [type(each) for each in connection.sent] == [Hello, PredictResult, PredictResult]


def test_batched_requests_use_their_regions() -> None:
    # The first region is unmapped in the middle of the batch; the region of the last request may be missing.
    parts = [placed(1, 16), encode(UnmapRegion(7)), predict(2), placed(3, 0, region=8)]
    for lost in (False, True):
        orders = [encode(MapRegion(7)), *([] if lost else [encode(MapRegion(8))]), encode(BeginBatch(3)), *parts]
        connection = Mapping(*orders, STOP)
        os.pwrite(connection.memory, ONES.tobytes(), 16)
        assert session(connection, fake()).run(SHA256) == exit_codes.OK
        kinds = {
            each.request: type(each) for each in connection.sent if isinstance(each, (PredictResult, PredictFailed))
        }
        assert kinds == {1: PredictResult, 2: PredictResult, 3: PredictFailed if lost else PredictResult}
        assert next(each.shared_outputs for each in connection.sent if isinstance(each, PredictResult)) == (0,)
        if lost:
            assert os.pread(connection.memory, 12, 64) == (2 * ONES).tobytes()
