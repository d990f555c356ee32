"""The life of a child, with a socket that is a script and an engine that is a function."""

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
from weightd_protocol.messages.regions import MappedInput, MappedOutput, MappedRegions
from weightd_protocol.messages.worker import (
    FROM_CHILD,
    AllowAttach,
    AnnounceSelfTest,
    Attach,
    AttachAllowed,
    Attached,
    BatchMismatch,
    BeginBatch,
    Build,
    Built,
    CancelPredict,
    Fork,
    Forked,
    Hello,
    MapRegion,
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
    UnmapRegion,
)
from weightd_protocol.messages.worker_common import DeviceMemory, RowSupport
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
    """What is done with that of the session."""
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
    """An engine; steps of these names fail."""
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
    """Run a session over the orders, to its end: `ahead` come with the first one, `late` while that is obeyed."""
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


# --- coming up ------------------------------------------------------------------------------------------------


def test_it_says_what_it_is_and_stops_when_told() -> None:
    status, socket = play(fake(), STOP)
    assert status == exit_codes.OK
    hello = only(Hello, socket)
    assert (hello.engine_pid, hello.sha256, hello.sharing_traits) == ("4711", SHA256, FakeEngine.traits)
    assert (hello.versions["weightd"], hello.versions["fake"]) == (VERSION, "1.2")
    assert sorted(hello.versions) == ["fake", "numpy", "python", "weightd"]


def test_a_holder_builds_finds_the_canary_exports_and_asks_again() -> None:
    engine = fake()
    status, socket = play(engine, BUILD, STOP)
    assert status == exit_codes.OK
    predicts = ["predict"] * 2  # sizes 1 and 2
    export = ["give back", "export /s/store"]
    assert engine.done == ["build /m/model 11,12", *predicts, *predicts, *export, *predicts, "give back", "discard"]
    built = only(Built, socket)
    assert (built.handle, built.shared_bytes, built.note, built.device) == ("7", 1000, "half of it", CARD)
    assert built.inputs == SIGNATURE.inputs
    assert built.outputs == (TensorSignature("y", "FP32", (-1, 3)),)  # the engine knew nothing of it
    assert (built.selftest_cases, built.selftest_digest) == (CASES, selftest.run(engine, CASES).digest)


def test_a_worker_does_as_the_holder_did_before_it_attaches() -> None:
    engine = fake()
    status, socket = play(engine, ATTACH, STOP)
    assert status == exit_codes.OK
    predicts = ["predict"] * 2
    assert engine.done == ["build /m/model  7", *predicts, "give back", "attach 7", *predicts, "give back"]
    digest = selftest.run(engine, CASES).digest
    assert only(Attached, socket) == Attached(digest, 900, "less", CARD)


def test_a_worker_gives_the_answer_that_it_gives_after_it_attached() -> None:
    _, spoilt_by_attach = play(fake(sequence(ZEROS, ZEROS, ONES, ONES)), ATTACH, STOP)
    _, right = play(fake(sequence(*[ZEROS] * 4)), ATTACH, STOP)
    assert only(Attached, spoilt_by_attach).selftest_digest != only(Attached, right).selftest_digest


def test_a_model_without_a_canary_says_so() -> None:
    _, socket = play(fake(sequence(*[InvalidArgument("too small")] * 9)), BUILD, STOP)
    built = only(Built, socket)
    assert (built.selftest_cases, built.selftest_digest, built.note) == ((), "", "half of it")
    assert built.selftest_note.startswith("the model runs on none of 9 inputs generated from its signature")
    assert built.outputs == SIGNATURE.outputs
    worker = fake(sequence(InvalidArgument("no")))
    status, socket = play(worker, encode(Attach("7", ())), predict(1), STOP)
    assert (only(Attached, socket).selftest_digest, worker.done.count("predict")) == ("", 1)
    # It is not held against a worker that it cannot prove itself.
    assert (status, only(PredictFailed, socket).is_exiting) == (exit_codes.OK, False)


def test_a_canary_that_spoils_the_engine_is_followed_by_a_build_for_the_same_processes() -> None:
    engine = fake(sequence(ZEROS, ZEROS, ModelCorrupted("2"), ZEROS))
    status, socket = play(engine, BUILD, STOP)
    assert status == exit_codes.OK
    assert only(Built, socket).selftest_cases == CASES[:1]
    build, export = "build /m/model 11,12", "export /s/store"
    assert engine.done == [build, *["predict"] * 3, build, "give back", export, "predict", "give back", "discard"]


def test_a_holder_that_is_told_to_stop_while_it_searches_stops() -> None:
    class Deaf(Script):
        def send(self, frames: Sequence[Any]) -> bool:
            self.sent.append(decode(frames, FROM_CHILD))
            return True

    engine, socket = fake(), Deaf(BUILD, STOP)
    assert session(socket, engine).run(SHA256) == exit_codes.CANNOT_BUILD
    assert [type(each) for each in socket.sent] == [Hello, AnnounceSelfTest, ProcessFailed]
    assert "predict" not in engine.done


def test_a_worker_whose_answers_are_near_the_holders_gives_the_holders(tmp_path: Path) -> None:
    def played(order: Sequence[Any], factor: float, tolerance: float) -> Script:
        engine = fake(lambda inputs: {"y": inputs["x"] * np.float32(factor)})
        files = ModelInputs("/m/model", str(tmp_path / "store"))
        return play(engine, order, encode(Ping(run_selftest=True)), STOP, files=files, tolerance=tolerance)[1]

    canary_of_holder = only(Built, played(BUILD, 2.0, 1e-3)).selftest_digest
    near, far = played(ATTACH, 2.001, 1e-3), played(ATTACH, 2.01, 1e-3)
    assert only(Attached, near).selftest_digest == only(Pong, near).selftest_digest == canary_of_holder != ""
    assert only(Attached, far).selftest_digest == only(Pong, far).selftest_digest != canary_of_holder
    assert only(Attached, played(ATTACH, 2.001, 0.0)).selftest_digest != canary_of_holder


@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
def test_the_canarys_answers_are_not_shared_as_if_they_were_weights(tmp_path: Path, tolerance: float) -> None:
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


def test_an_answer_that_changes_when_the_weights_are_shared_is_the_end() -> None:
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
        # What is longer than the wire takes is clipped.
        (BuildError("x" * 10_000), clip("x" * 10_000), exit_codes.CANNOT_BUILD, False),
    ],
)
def test_what_cannot_be_built_is_told_and_waits_for_stop(
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
def test_a_signature_that_the_wire_cannot_carry_is_a_cause(signature: ModelSignature, cause: str) -> None:
    status, socket = play(FakeEngine(lambda _: {}, signature), BUILD, STOP)
    assert status == exit_codes.CANNOT_BUILD
    assert cause in only(ProcessFailed, socket).reason


def test_settle_reaches_the_engine_only_where_something_is_shared() -> None:
    engine = fake()
    play(engine, encode(TrimStore()), BUILD, encode(TrimStore()), STOP)
    assert [each for each in engine.done if "settle" in each] == ["settle 7"]


@pytest.mark.parametrize("refusal", ["", "the list is full" * 1000])
def test_further_processes_are_let_in_or_the_reason_is_told(refusal: str) -> None:
    engine = fake(fails={"allow": AttachRefused(refusal)} if refusal else None)
    status, socket = play(engine, BUILD, encode(AllowAttach(("13", "14"))), encode(TrimStore()), STOP)
    assert (status, engine.done[-2:]) == (exit_codes.OK, ["allow 13,14", "settle 7"])
    assert only(AttachAllowed, socket).error == clip(refusal)


@pytest.mark.parametrize(
    ("order", "build", "after"),
    [(BUILD, "build /m/model 11,12", "export /s/store"), (ATTACH, "build /m/model  7", "attach 7")],
)
def test_weights_are_changed_after_each_build_and_before_the_canary(
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
    """Forks nothing, and remembers what would have been given."""

    def __init__(self, reason: str = "") -> None:
        self.cannot_fork_reason = lambda: reason
        self.given: List[Any] = []
        self.freeze_count = 0

    def freeze_memory(self) -> None:
        self.freeze_count += 1

    def fork(self, order: Fork, report: ReportForked, inherited_model: Optional[InheritedModel] = None) -> None:
        self.given.append(inherited_model)
        assert report(Forked(order.name, 11))


def grows(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Have the process grow by so much with a build."""
    sizes = [1000, 1000 + nbytes]
    monkeypatch.setattr(session_module, "private_bytes", lambda: sizes.pop(0))


def test_a_template_exports_nothing_and_gives_all_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    grows(monkeypatch, 32 << 20)
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
def test_what_cannot_be_forked_or_may_not_repeat_itself_or_is_small_is_no_template(
    monkeypatch: pytest.MonkeyPatch, refusal: str, answers: List[Any], draws: bool, nbytes: int, handle: str
) -> None:
    grows(monkeypatch, nbytes)

    monkeypatch.setattr(FakeEngine, "is_stochastic", draws)
    forker = FakeForker(refusal)
    _, socket = play(fake(sequence(*answers * 6)), BUILD, FORK, STOP, sharing_plan=SharingPlan(2, cast(Any, forker)))
    built = only(Built, socket)
    assert (built.is_template, built.handle) == (False, handle)
    unshared = "sharing 31 MiB among 2 processes would save 31 MiB, and the holder would use 32 MiB"
    assert handle or built.note == f"weights are not shared: {unshared}"
    assert (only(Forked, socket).pid, forker.given) == (0, [])


def test_a_holder_that_may_be_one_takes_no_request() -> None:
    with pytest.raises(RemoteProtocolError, match="no predict in a template"):
        play(fake(), predict(1), STOP, sharing_plan=SharingPlan(2, cast(Any, FakeForker())))


def test_a_worker_of_a_template_builds_nothing_and_answers_once() -> None:
    engine = fake()
    origin = ProcessOrigin("template", "", InheritedModel(engine, SHA256, 1234))
    _, socket = play(engine, ATTACH, predict(1), STOP, origin=origin)
    hello = only(Hello, socket)
    assert (hello.origin, hello.origin_note, hello.sha256) == ("template", "", SHA256)
    assert engine.done == ["predict", "predict", "give back", "predict"]
    assert only(Attached, socket) == Attached(selftest.run(engine, CASES).digest, 1234, "", CARD)


def test_it_is_held_to_the_canary_as_every_other() -> None:
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
def test_an_output_of_any_form_is_little_endian_and_in_c_order_on_the_wire(name: str) -> None:
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
def test_an_answer_does_not_depend_on_those_before(
    requests: List[Tuple[Arrays, Optional[Tuple[str, ...]], Any]],
) -> None:
    def answers(some: Sequence[Tuple[Arrays, Optional[Tuple[str, ...]], Any]]) -> List[Any]:
        answering = iter([each for each, _, _ in some])
        orders = [predict(1, {"x": x}, outputs) for _, outputs, x in some]
        _, script = play(fake(lambda _: next(answering)), *orders, STOP)
        return list(zip(script.sent, script.frames))[1:]

    together = answers(requests)
    alone = [answer for each in requests for answer in answers([each])]
    # What is missing of the wanted ends the session.
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
def test_an_engine_gets_native_aligned_arrays_in_c_order_wherever_a_frame_lies(name: str, offset: int) -> None:
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
    # Those that are wanted come, in the order in which they are.
    for outputs, values in ((("a", "difference"), [[5, 6], [4, 5]]), (("difference",), [[4, 5]])):
        _, socket = play(engine, predict(1, inputs, outputs), STOP)
        assert [each.name for each in only(PredictResult, socket).description.outputs] == [*outputs]
        assert [np.frombuffer(frame, "<f4").tolist() for frame in socket.frames[-1]] == values


def test_what_the_engine_refuses_is_answered_and_the_next_request_served() -> None:
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
def test_after_a_predict_that_may_have_spoilt_the_model_only_stop_is_obeyed(
    error: Exception, text: str, caplog: pytest.LogCaptureFixture
) -> None:
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
        # One that does not repeat itself may stay.
        ([ZEROS, ZEROS, ONES, ONES], [ZEROS, ONES], False),
    ],
)
def test_after_a_refused_predict_a_worker_proves_itself_or_leaves(
    attached: List[Any], now: List[Any], leaving: bool
) -> None:
    engine = fake(sequence(*attached, InvalidArgument("too large"), *now, ZEROS))
    status, socket = play(engine, ATTACH, predict(1), predict(2), STOP)
    assert only(PredictFailed, socket) == PredictFailed(1, "INVALID_ARGUMENT", "too large", leaving)
    assert [each.request for each in socket.sent if isinstance(each, PredictResult)] == ([] if leaving else [2])
    assert status == (exit_codes.MODEL_CORRUPTED if leaving else exit_codes.OK)


def test_a_refusal_before_the_model_has_seen_a_request_costs_no_self_test() -> None:
    engine = fake(sequence(*[ZEROS] * 4, NotRun("too large"), ONES))
    _, socket = play(engine, ATTACH, predict(1), predict(2), STOP)
    assert only(PredictFailed, socket) == PredictFailed(1, "INVALID_ARGUMENT", "too large", is_exiting=False)
    assert [each.request for each in socket.sent if isinstance(each, PredictResult)] == [2]
    assert engine.done.count("predict") == 6


def test_a_daemon_that_follows_is_told_that_it_is_back() -> None:
    status, socket = play(fake(), ATTACH, None, None, predict(1), STOP)
    assert status == exit_codes.OK
    assert [type(each) for each in socket.sent] == [Hello, Attached, Reconnected, Reconnected, PredictResult]


def test_a_daemon_that_follows_gets_nobody_back_who_is_of_no_use() -> None:
    status, socket = play(fake(sequence(RuntimeError("broken"))), predict(1), None)
    assert status == exit_codes.MODEL_CORRUPTED
    assert [type(each) for each in socket.sent] == [Hello, PredictFailed]


def test_an_answer_for_another_batch_is_not_given() -> None:
    two = np.zeros((2, 3), np.float32)
    # The self-test's answers are right, but the same request has another answer now.
    three = np.ones((3, 3), np.float32)
    engine = fake(sequence(ZEROS, two, ZEROS, two, three, three, ZEROS, ZEROS, two, ONES))
    status, socket = play(engine, ATTACH, *(predict(number, {"x": three}) for number in range(3)), STOP)
    assert status == exit_codes.MODEL_CORRUPTED
    failed = only(PredictFailed, socket)
    assert (failed.request, failed.code, failed.is_exiting) == (2, "INTERNAL", True)
    assert "for a batch of 3" in failed.error


# --- orders that overtake others, and questions whether it still answers ------------------------------------------


def skip(number: int) -> List[Any]:
    return encode(CancelPredict(number))


@pytest.mark.parametrize(
    ("orders", "ahead", "late", "answered", "skipped"),
    [
        ([predict(1), predict(2), skip(2), predict(3)], 3, 0, [1, 3], [2]),
        ([predict(1), predict(2), skip(2), predict(3)], 1, 2, [1, 3], [2]),
        ([predict(1), skip(1), skip(7), predict(2)], 0, 0, [1, 2], []),  # it comes too late, or for nothing
        ([skip(1), skip(2), predict(3)], 1, 0, [3], []),  # alone it does not end the waiting
    ],
)
def test_a_request_that_nobody_wants_any_more_is_not_begun_with(
    orders: Sequence[Sequence[Any]], ahead: int, late: int, answered: List[int], skipped: List[int]
) -> None:
    engine = fake()
    _, socket = play(engine, *orders, STOP, ahead=ahead, late=late)
    assert [each.request for each in socket.sent if isinstance(each, PredictResult)] == answered
    assert [each.request for each in socket.sent if isinstance(each, PredictCancelled)] == skipped
    assert len(engine.received_inputs) == len(answered)


def test_orders_that_were_read_ahead_are_obeyed_in_their_order() -> None:
    engine = fake()
    _, socket = play(engine, ATTACH, predict(1), encode(Ping(False)), predict(2), STOP, ahead=4)
    assert [type(each) for each in socket.sent] == [Hello, Attached, PredictResult, Pong, PredictResult]


def test_a_ping_is_answered_with_the_canary_where_it_is_asked_for_and_there_is_one() -> None:
    proving = encode(Ping(True))
    _, socket = play(fake(), proving, ATTACH, encode(Ping(False)), proving, STOP)
    pongs = [each for each in socket.sent if isinstance(each, Pong)]
    assert pongs == [Pong(""), Pong(""), Pong(only(Attached, socket).selftest_digest)]


def test_a_canary_that_fails_is_the_end_of_the_worker() -> None:
    engine = fake(sequence(*[ZEROS] * 4, ModelCorrupted("predict failed!")))
    status, socket = play(engine, ATTACH, encode(Ping(True)), predict(1), STOP)
    assert status == exit_codes.CANNOT_BUILD
    assert [type(each) for each in socket.sent] == [Hello, Attached, ProcessFailed]
    assert only(ProcessFailed, socket).reason == "predict failed!"


@pytest.mark.parametrize(
    ("name", "output", "error"),
    [
        # A view of four bytes, which nobody may copy.
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
def test_an_output_that_the_wire_does_not_take_is_an_error_and_not_a_lost_connection(
    name: str, output: Any, error: str
) -> None:
    status, socket = play(fake(lambda _: {name: output}), predict(1), STOP)
    failed = only(PredictFailed, socket)
    assert error in failed.error
    assert (failed.code, failed.is_exiting) == (("INVALID_ARGUMENT", False) if name else ("INTERNAL", True))
    assert status == (exit_codes.OK if name else exit_codes.MODEL_CORRUPTED)


class Frame(bytearray):
    """One of which it can be told whether it is still there."""


def test_the_inputs_of_a_request_are_gone_while_the_next_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    *header, content = predict(1)
    frames = [*header, Frame(content)]
    there, socket = weakref.ref(frames[-1]), Script(ATTACH, frames, PAUSE, STOP)
    del frames
    rests: List[bool] = []
    engine = fake()

    def rest(_: WorkerSession) -> None:
        # What a test of the engine is kept for.
        engine.received_inputs.clear()
        rests.append(there() is not None)

    monkeypatch.setattr(WorkerSession, "_release_idle_memory", rest)
    assert session(socket, engine).run(SHA256) == exit_codes.OK
    assert rests == [False]


def test_log_and_heap_are_bounded_while_requests_come_and_nothing_is_kept_when_none_do(
    heap: List[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake()
    monkeypatch.setattr(nativelog, "truncate_if_too_large", lambda: heap.append("log"))
    at_once = ["log", "bound"]
    rest = ["log", "give back"]
    play(engine, ATTACH, predict(1), predict(2), PAUSE, predict(3), PAUSE, STOP)
    assert heap == ["keep", "give back", *at_once, *rest, *at_once, *rest]
    assert engine.done.count("give back") == 2 + 2
    heap.clear()
    monkeypatch.setattr(base, "HOUSEKEEPING_INTERVAL_S", 0)
    play(engine, ATTACH, predict(1), encode(Ping(False)), STOP)
    assert heap == ["keep", "give back", *at_once, *at_once, *at_once]
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


# --- requests that are run together ------------------------------------------------------------------------------


def together(*parts: Sequence[Any], rows: int = 0) -> List[Sequence[Any]]:
    return [encode(BeginBatch(len(parts), rows)), *parts]


def of_rows(number: int, *values: float) -> List[Any]:
    return predict(number, {"x": np.repeat(np.array([values], np.float32).T, 3, 1)})


def answers(socket: Script) -> Dict[int, List[float]]:
    """The first value of each row that each request was answered with."""
    return {
        each.request: array_of(socket, each)[:, 0].tolist() for each in socket.sent if isinstance(each, PredictResult)
    }


def one(inputs: Arrays) -> Arrays:
    """Refuses what is negative, and is spoilt by infinity."""
    if np.isinf(inputs["x"]).any():
        raise ModelCorrupted("infinite")
    if (inputs["x"] < 0).any():
        raise InvalidArgument("negative")
    return twice(inputs)


def test_requests_that_come_together_are_run_together_and_answered_each_for_itself() -> None:
    engine = fake()
    parts = of_rows(1, 1), of_rows(2, 2, 3), of_rows(3, 4)
    # The second time what is known of the first is used.
    status, socket = play(engine, *together(*parts), *together(*parts, rows=6), *together(*parts, rows=6), STOP)
    assert status == exit_codes.OK
    assert answers(socket) == {1: [2], 2: [4, 6], 3: [8]}
    assert [each["x"][:, 0].tolist() for each in engine.received_inputs] == [[1, 2, 3, 4], *[[1, 2, 3, 4, 4, 4]] * 2]
    assert [each.request for each in socket.sent if isinstance(each, PredictResult)] == [1, 2, 3] * 3
    assert socket.reply_counts == [3, 3, 3]


def test_the_outputs_that_each_wants_come_in_any_form_that_the_engine_gives() -> None:
    engine = fake(lambda inputs: {"y": np.asfortranarray(inputs["x"] * 2), "z": inputs["x"][:, :2]})
    parts = predict(1, {"x": ONES}, ("z",)), predict(2, {"x": 3 * ONES})
    # The second time what is known of the first is used, or is not.
    _, socket = play(engine, *together(*parts), *together(*parts), STOP)
    found = [[np.frombuffer(frame, "<f4").tolist() for frame in frames] for frames in socket.frames[1:]]
    assert found == [[[1, 1]], [[6, 6, 6], [3, 3]]] * 2


@pytest.mark.parametrize("number", [1, 2, 3])
def test_one_that_fails_fails_alone(number: int) -> None:
    values = {1: 1.0, 2: 2.0, 3: 3.0, number: -1.0}
    status, socket = play(fake(one), *together(*(of_rows(*each) for each in values.items())), STOP)
    assert status == exit_codes.OK
    assert only(PredictFailed, socket) == PredictFailed(number, "INVALID_ARGUMENT", "negative", is_exiting=False)
    assert answers(socket) == {each: [2 * value] for each, value in values.items() if each != number}


@pytest.mark.parametrize("error", [ModelCorrupted("no"), ValueError("no")])
def test_where_nobody_knows_who_has_spoilt_the_model_the_first_one_is_named_and_no_other_answered(
    error: Exception,
) -> None:
    status, socket = play(fake(sequence(error)), *together(predict(1), predict(2)), STOP)
    assert status == exit_codes.MODEL_CORRUPTED
    failed = only(PredictFailed, socket)
    assert (failed.request, failed.is_exiting, socket.sent[1:]) == (1, True, [failed])


@pytest.mark.parametrize("now", [[ZEROS, ZEROS], [ONES, ONES]], ids=["as before", "spoilt"])
def test_a_worker_whose_predict_of_many_was_refused_proves_itself(now: List[Any]) -> None:
    engine = fake(sequence(*[ZEROS] * 4, InvalidArgument("so many"), *now, ZEROS, ZEROS))
    _, socket = play(engine, ATTACH, *together(predict(1), predict(2)), STOP)
    good = now[0] is ZEROS
    expected = [(PredictResult, 1), (PredictResult, 2)] if good else [(PredictFailed, 1)]
    assert [
        (type(each), each.request) for each in socket.sent if isinstance(each, (PredictResult, PredictFailed))
    ] == expected


def test_an_answer_that_is_not_of_rows_is_told_once_and_nothing_is_run_together_again() -> None:
    engine = fake(lambda inputs: {"y": inputs["x"][:1]})
    status, socket = play(engine, *together(predict(1), predict(2)), *together(predict(3), predict(4)), STOP)
    assert status == exit_codes.OK
    assert only(BatchMismatch, socket).note == "output y has shape [1, 3] for 2 rows"
    assert [*answers(socket)] == [1, 2, 3, 4]
    assert len(engine.received_inputs) == 1 + 2 + 2


def test_one_by_itself_may_be_run_on_more_rows_than_it_has() -> None:
    engine = fake()
    _, socket = play(engine, *together(of_rows(1, 5), rows=4), STOP)
    assert (answers(socket), engine.received_inputs[0]["x"].shape) == ({1: [10]}, (4, 3))
    _, socket = play(fake(sequence(InvalidArgument("no"))), *together(of_rows(1, 5), rows=4), STOP)
    assert only(PredictFailed, socket) == PredictFailed(1, "INVALID_ARGUMENT", "no", is_exiting=False)
    _, socket = play(fake(sequence(ONES)), *together(of_rows(1, 5), rows=4), STOP)
    assert only(PredictFailed, socket).error == "output y has shape [1, 3] for 4 rows"


def test_a_part_is_taken_back_until_its_job_begins() -> None:
    parts = [of_rows(number, number) for number in (1, 2, 3, 4)]
    # Before all have come, and after.
    for at in (3, 4):
        orders = together(*parts[:3])
        orders.insert(at, skip(2))
        engine = fake()
        _, socket = play(engine, ATTACH, *orders, STOP, ahead=len(orders))
        assert (only(PredictCancelled, socket).request, answers(socket)) == (2, {1: [2], 3: [6]})
        # As it comes for the first time, they are also run alone.
        assert [each["x"][:, 0].tolist() for each in engine.received_inputs[-3:]] == [[1, 3], [1], [3]]
    # All of one job, of which one has not come yet; and of another.
    orders = [*together(*parts[:2]), *together(*parts[2:])]
    orders[2:2] = [skip(1)]
    orders += [skip(2), skip(3), skip(4)]
    _, socket = play(fake(), ATTACH, *orders, encode(Ping(False)), STOP, ahead=len(orders) + 1)
    assert [type(each) for each in socket.sent[1:]] == [*[PredictCancelled] * 4, Attached, Pong]


def test_what_comes_by_another_way_waits_for_those_that_are_together() -> None:
    first, *rest = together(predict(1), predict(2))
    ping = encode(Ping(False))
    _, socket = play(fake(), ATTACH, first, ping, rest[0], ping, rest[1], STOP)
    assert [type(each) for each in socket.sent[2:]] == [PredictResult, PredictResult, Pong, Pong]


def test_those_of_whom_some_have_not_come_are_forgotten_when_another_daemon_is_there() -> None:
    engine = fake()
    _, socket = play(engine, *together(predict(1), predict(2))[:-1], encode(Ping(False)), None, predict(3), STOP)
    assert [type(each) for each in socket.sent[1:]] == [Reconnected, Pong, PredictResult]
    assert [*answers(socket)] == [3]


def test_a_holder_tells_what_it_found_of_rows_and_a_worker_whether_it_answers_them_so(
    tmp_path: Path,
) -> None:
    engine = fake()
    build = encode(Build((), max_rows=8))
    _, socket = play(engine, build, STOP)
    rows = only(Built, socket).row_support
    assert rows is not None
    assert (rows.inputs, rows.outputs, rows.is_equal, rows.note) == (("x",), ("y",), True, "")
    # Where answers may differ a little, none is compared.
    _, near = play(fake(), build, STOP, tolerance=0.1, files=ModelInputs("/m", str(tmp_path / "store")))
    assert only(Built, near).row_support == dataclasses.replace(rows, batch_digest="")
    attach = encode(Attach("7", CASES, 8, row_support=rows))
    unsure = encode(Attach("7", CASES, 8, row_support=dataclasses.replace(rows, batch_digest="")))
    job = together(of_rows(1, 1), of_rows(2, 2))

    def more_of_many(inputs: Arrays) -> Arrays:
        return {"y": inputs["x"] * (2 + (len(inputs["x"]) > 2))}

    same, other = [Attached], [Attached, BatchMismatch]
    # What the holder has compared is not run alone where it is known that this process answers as that one.
    for order, answer, told, runs in (
        (attach, twice, same, [8, 2]),
        (attach, more_of_many, other, [8, 1, 1]),
        (unsure, twice, same, [2, 1, 1]),
    ):
        engine = fake(answer)
        _, socket = play(engine, order, *job, STOP)
        assert [type(each) for each in socket.sent] == [Hello, *told, PredictResult, PredictResult]
        assert [len(each["x"]) for each in engine.received_inputs[4:]] == runs
    # What was forked from a template has been told with it.
    made = ProcessOrigin("template", inherited_model=InheritedModel(fake(), SHA256, 5))
    engine = fake()
    play(engine, attach, STOP, origin=made)
    assert len(engine.received_inputs) == 2


def test_what_the_self_test_took_is_given_back_before_a_worker_is_ready() -> None:
    engine = fake()
    before: List[int] = []

    class Looks(Script):
        def send(self, frames: Sequence[Any]) -> bool:
            if isinstance(decode(frames, FROM_CHILD), Attached):
                before.append(engine.done.count("give back"))
            return super().send(frames)

    assert session(Looks(ATTACH, STOP), engine).run(SHA256) == exit_codes.OK
    assert before == [2]


def seldom(inputs: Arrays) -> Arrays:
    """Has another answer to two rows than to one, if one of them is 5."""
    return {"y": inputs["x"] * 2 + (len(inputs["x"]) > 1 and 5 in inputs["x"])}


def test_the_first_time_of_a_form_each_has_the_answer_that_it_has_alone() -> None:
    jobs = [*together(of_rows(1, 1), of_rows(2, 5)), *together(of_rows(3, 1), of_rows(4, 2))]
    for exact in (True, False):
        engine = fake(seldom)
        _, socket = play(engine, encode(Attach("7", CASES, 8, exact=exact)), *jobs, STOP)
        expected = {1: [2], 2: [10]} if exact else {1: [3], 2: [11]}
        assert answers(socket) == {**expected, 3: [2], 4: [4]}
        assert [type(each) for each in socket.sent].count(BatchMismatch) == exact
        assert [len(each["x"]) for each in engine.received_inputs[4:]] == ([2, 1, 1, 1, 1, 1, 1] if exact else [2, 2])


def test_who_has_rows_that_differ_is_run_alone_from_then_on_and_others_together() -> None:
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
    told = [each for each in socket.sent if isinstance(each, BatchMismatch)]
    # Where a daemon does not know of it, it is told again.
    assert [each.principal_ids for each in told] == [(8,), (8,)]
    # Of the first job: all, each alone, those of 8 without others, then one by one as the answers; of the second one
    # those of 7 and 9, which come in this form for the first time, and that of 8; of the third one those of 7 and 9,
    # whose form has come before.
    assert [len(each["x"]) for each in engine.received_inputs[4:]] == [3, 1, 1, 1, 3, 1, 1, 1, 2, 1, 1, 1, 2]
    # A part that is taken back is nobody's.
    skipped = job(1, 5, 1, 2, principal_ids=(8, 7, 9))
    engine = fake(fives)
    _, socket = play(
        engine, attach, *skipped[:2], skip(1), *skipped[2:], *job(4, 1, 2, principal_ids=(8, 7)), STOP, ahead=6
    )
    assert answers(socket) == {2: [2], 3: [4], 4: [2], 5: [4]}
    assert not [each for each in socket.sent if isinstance(each, BatchMismatch)]


@pytest.mark.parametrize("exact", [True, False])
def test_requests_with_special_values_are_run_alone_where_the_holder_has_found_that_they_differ(exact: bool) -> None:
    rows = RowSupport(("x",), ("y",), is_equal=True, compared_rows=8, unequal_specials=("nan", "negative zero"))
    engine = fake()
    parts = [of_rows(number, *values) for number, values in enumerate([(1,), (2, np.nan), (np.inf,), (-0.0,)], 1)]
    _, socket = play(engine, encode(Attach("7", CASES, 8, exact=exact, row_support=rows)), *together(*parts), STOP)
    assert sorted(answers(socket)) == [1, 2, 3, 4]
    asked = [each["x"][:, 0].tolist() for each in engine.received_inputs if len(each["x"]) > 1 or exact][-5:]
    if exact:
        # The form of the others comes for the first time: each is run alone, too.
        expected = [["1.0", "inf"], ["1.0"], ["inf"], ["2.0", "nan"], ["-0.0"]]
        assert [[str(value) for value in each] for each in asked] == expected
    else:
        assert len(asked[-1]) == 5
    assert not [each for each in socket.sent if isinstance(each, BatchMismatch)]


def test_who_sends_many_requests_with_special_values_shares_no_job_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_guard, "_MAX_SPECIAL_REQUESTS", 2)
    rows = RowSupport(("x",), ("y",), is_equal=True, compared_rows=8, unequal_specials=("nan",))
    job = [encode(BeginBatch(2, 0, (7, 8))), of_rows(1, np.nan), of_rows(2, 1)]
    _, socket = play(fake(), encode(Attach("7", CASES, 8, row_support=rows)), *job, *job, STOP)
    told = only(BatchMismatch, socket)
    assert (told.principal_ids, told.note) == ((7,), "many requests have values that must run alone (nan)")
    assert [each.request for each in socket.sent if isinstance(each, PredictResult)] == [2, 1] * 2


def test_where_too_many_have_rows_that_differ_nothing_is_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_guard, "_MAX_UNBATCHABLE_PRINCIPALS", 1)
    engine = fake(lambda inputs: {"y": inputs["x"] + len(inputs["x"])})
    parts = of_rows(1, 1), of_rows(2, 2)
    _, socket = play(engine, ATTACH, encode(BeginBatch(2, 0, (7, 8))), *parts, STOP)
    assert (only(BatchMismatch, socket).principal_ids, answers(socket)) == ((), {1: [2], 2: [3]})


@pytest.mark.parametrize("principal_ids", [(1,), (1, 2, 3)])
def test_whose_the_requests_are_is_said_of_each_or_of_none(principal_ids: Tuple[int, ...]) -> None:
    with pytest.raises(RemoteProtocolError, match=f"principal_ids: expected 2 or none, got {len(principal_ids)}"):
        play(fake(), encode(BeginBatch(2, 0, principal_ids)), predict(1), predict(2), STOP)


def test_a_form_of_which_there_are_too_many_is_not_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_guard, "_MAX_TESTED_SPECS", 0)
    engine = fake()
    job = together(predict(1), predict(2))
    _, socket = play(engine, ATTACH, *job, *together(predict(3), predict(4), predict(5)), STOP)
    assert [len(each["x"]) for each in engine.received_inputs[4:]] == [2, 1, 1, 1, 1, 1]
    assert [*answers(socket)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("tidy_s", [0.0, 10.0])
def test_what_was_run_together_is_now_and_then_run_again_when_nothing_comes(
    tidy_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_guard, "_RECHECK_INTERVAL", 1)
    monkeypatch.setattr(base, "HOUSEKEEPING_INTERVAL_S", tidy_s)
    good, bad = together(of_rows(1, 1), of_rows(2, 2)), together(of_rows(3, 3), of_rows(4, 5))
    engine = fake(seldom)
    status, socket = play(engine, ATTACH, *good, *good, PAUSE, PAUSE, *bad, PAUSE, *good, STOP)
    assert status == exit_codes.OK
    assert [type(each) for each in socket.sent[2:]] == [*[PredictResult] * 6, BatchMismatch, *[PredictResult] * 2]
    sizes = [len(each["x"]) for each in engine.received_inputs[4:]]
    assert sizes == [2, 1, 1, 2, *[1, 1], 2, *[1, 1], *[1, 1]]
    # The engine may fail with it: then it is of no use.
    left = [8]

    def failing(inputs: Arrays) -> Arrays:
        left[0] -= 1
        if left[0] < 0:
            raise ModelCorrupted("no")
        return twice(inputs)

    engine = fake(failing)
    status, socket = play(engine, ATTACH, *good, *good, PAUSE, STOP)
    assert (status, only(ProcessFailed, socket).reason) == (exit_codes.CANNOT_BUILD, "no")


def test_no_job_begins_within_another() -> None:
    with pytest.raises(RemoteProtocolError, match="type: expected predict, 1 more, got begin_batch"):
        play(fake(), encode(BeginBatch(1)), encode(BeginBatch(1)))


# --- memory of clients ------------------------------------------------------------------------------------------------


class Mapping(Script):
    """With a region that has descriptors coming."""

    def __init__(self, *orders: Optional[Sequence[Any]]) -> None:
        super().__init__(*orders)
        self.memory = memfd.create(4096)

    def take_descriptor(self) -> int:
        return os.dup(self.memory)


def placed(number: int, offset: int = 0, room: int = 4096, region: int = 7) -> List[Any]:
    regions = MappedRegions((MappedInput(0, region, offset),), (MappedOutput(0, region, 64, room),))
    return encode(Predict(number, RequestDescription("m", (spec_of("x", ONES),)), regions))


def test_tensors_in_memory_of_a_client_are_read_and_written_there() -> None:
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


@pytest.mark.parametrize("gone", [[encode(UnmapRegion(7))], [None]], ids=["taken away", "another daemon"])
def test_a_region_that_is_gone_fails_the_request_alone(gone: List[Any]) -> None:
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


def test_a_region_that_is_given_again_before_it_is_taken_away_stays() -> None:
    connection = Mapping(encode(MapRegion(7)), placed(1), encode(UnmapRegion(7)), encode(MapRegion(7)), placed(2), STOP)
    connection.ahead, connection.late = 2, 2
    assert session(connection, fake()).run(SHA256) == exit_codes.OK
    assert [type(each) for each in connection.sent] == [Hello, PredictResult, PredictResult]


def test_regions_of_requests_that_are_together_are_read_and_written_as_those_of_one() -> None:
    # The last one's has gone when it is begun with; the first one's is given back in between.
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
