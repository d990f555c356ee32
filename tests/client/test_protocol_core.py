from __future__ import annotations

import dataclasses
import gc
from types import MappingProxyType
from typing import Any, List

import numpy as np
import pytest

from weightd import queries
from weightd.inputs import NeedsMetadata
from weightd.pending import PendingCall
from weightd.protocol_core import ClientCore
from weightd_protocol import limits
from weightd_protocol.codec import decode, encode
from weightd_protocol.errors import (
    ERRORS,
    InvalidArgument,
    PermissionDenied,
    RemoteProtocolError,
    RequestError,
    Unavailable,
)
from weightd_protocol.messages.control import ModelMetadataResponse, ServerMetadataResponse
from weightd_protocol.messages.inference import (
    Error,
    Infer,
    InferResponse,
    ResponseDescription,
    TensorSignature,
    TensorSpec,
)
from weightd_protocol.messages.status import Status
from weightd_protocol.messages.types import FROM_CLIENT


@pytest.fixture
def core() -> ClientCore:
    return ClientCore()


def ask(core: ClientCore) -> PendingCall:
    call, frames = core.prepare_infer("m", {"x": np.zeros(2, np.float32)}, 1.0)
    core.track(call, frames)
    return call


def answer(call: PendingCall, *values: float) -> List[Any]:
    spec = TensorSpec("y", "FP32", (len(values),))
    return [*encode(InferResponse(call.id, ResponseDescription("m", (spec,)))), np.array(values, "<f4").tobytes()]


def failure(request_id: str, code: str = "INTERNAL") -> List[Any]:
    return encode(Error(request_id, code, "why", 500_000))


def test_encodes_request(core: ClientCore) -> None:
    inputs = MappingProxyType({"a": np.ones((2, 3), ">f4"), "b": np.array(7, np.int64)})
    call, frames = core.prepare_infer("m", inputs, 1.5)
    message = decode(frames, FROM_CLIENT)
    assert isinstance(message, Infer)
    assert message.id == call.id
    assert message.parameters.timeout_us == 1_500_000
    assert message.description.inputs == (TensorSpec("a", "FP32", (2, 3)), TensorSpec("b", "INT64", ()))
    assert [bytes(frame) for frame in frames[2:]] == [np.ones(6, "<f4").tobytes(), np.array(7, "<i8").tobytes()]
    message = decode(core.prepare_infer("m", inputs, 1.5, ["y", "x"])[1], FROM_CLIENT)
    assert isinstance(message, Infer)
    assert message.description.outputs == ("y", "x")
    with pytest.raises(InvalidArgument, match=r"^outputs: expected a list of names, got str 'y'$"):
        core.prepare_infer("m", inputs, 1.5, "y")
    call, frames = core.prepare_query(queries.STATUS)
    assert decode(frames, FROM_CLIENT) == Status(call.id)


def test_accepts_answers_in_any_order(core: ClientCore) -> None:
    calls = [ask(core) for _ in range(5)]
    assert len({call.id for call in calls}) == 5
    for call in reversed(calls):
        assert not call.done
        core.on_message(answer(call, float(calls.index(call))))
        # A second answer has no effect.
        core.on_message(failure(call.id))
        assert call.done
    results: List[Any] = [call.result() for call in calls]
    assert [float(result["y"][0]) for result in results] == [0, 1, 2, 3, 4]
    assert calls[0].result() is results[0]
    assert core.pending_count == 0


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_each_code_has_an_exception(core: ClientCore, code: str) -> None:
    call = ask(core)
    core.on_message(failure(call.id, code))
    with pytest.raises(RequestError, match=r"^why$") as caught:
        call.result()
    assert type(caught.value) is ERRORS[code]
    assert caught.value.retry_after == 0.5


@pytest.mark.parametrize(
    "frames", [failure("no-such-id"), encode(ServerMetadataResponse("no-such-id", "n", "v", (), ()))]
)
def test_drops_answer_to_unknown_request(core: ClientCore, frames: List[Any]) -> None:
    call = ask(core)
    core.on_message(frames)
    assert not call.done
    assert core.pending_count == 1


def test_forgets_abandoned_calls(core: ClientCore) -> None:
    call = ask(core)
    late = answer(call, 1.0)
    del call
    for _ in range(1000):
        ask(core)
    gc.collect()
    assert core.pending_count == 0
    assert len(core.calls) < 1000
    core.on_message(late)


def test_fail_all_ends_only_pending_calls(core: ClientCore) -> None:
    answered, first, second = ask(core), ask(core), ask(core)
    core.on_message(answer(answered, 1.0))
    core.fail_all(Unavailable, "gone")
    assert answered.result()
    for call in (first, second):
        with pytest.raises(Unavailable, match="gone"):
            call.result()
    assert core.pending_count == 0
    assert not ask(core).done


@pytest.mark.parametrize(
    ("frames", "expected"), [(failure(""), "closed this connection: why"), ([b"\xc1"], "envelope")]
)
def test_message_without_request_is_a_protocol_error(core: ClientCore, frames: List[Any], expected: str) -> None:
    call = ask(core)
    with pytest.raises(RemoteProtocolError, match=expected):
        core.on_message(frames)
    assert not call.done


def test_invalid_answer_ends_only_its_call(core: ClientCore) -> None:
    other = ask(core)
    for message, tensors, expected in (
        (InferResponse("", ResponseDescription("m", (TensorSpec("y", "FP32", (2,)),))), [bytes(7)], "8 bytes, got 7"),
        (
            InferResponse("", ResponseDescription("m", (TensorSpec("y", "BOOL", (2,)),))),
            [b"\1\2"],
            "outputs: y: expected 0 or 1",
        ),
        (ServerMetadataResponse("", "n", "v", (), ()), [], "expected a InferResponse, got a ServerMetadataResponse"),
    ):
        call = ask(core)
        core.on_message([*encode(dataclasses.replace(message, id=call.id)), *tensors])
        with pytest.raises(RemoteProtocolError, match=expected):
            call.result()
        assert not other.done


@pytest.mark.parametrize("value", [np.array([object()]), np.array(["text"]), np.array([1j]), None])
def test_error_names_invalid_input(core: ClientCore, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^input x: "):
        core.prepare_infer("m", {"x": value}, 1.0)
    assert core.pending_count == 0


def test_rejects_too_large_input(core: ClientCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_FRAME_BYTES", 8)
    with pytest.raises(InvalidArgument, match="input x: expected at most 8 bytes, got 16"):
        core.prepare_infer("m", {"x": np.zeros(2, np.float64)}, 1.0)


@pytest.mark.parametrize("inputs", [np.zeros(2, np.float32), [1.0], None, 7, {"x": [1.0]}, {"x": np.float32(1)}])
def test_untyped_inputs_need_metadata(core: ClientCore, inputs: Any) -> None:
    with pytest.raises(NeedsMetadata):
        core.prepare_infer("m", inputs, 1.0)
    assert core.pending_count == 0


def learn(core: ClientCore, model: str = "m", datatype: str = "INT8") -> None:
    call, frames = core.prepare_metadata_call(model)
    core.track(call, frames)
    core.on_message(encode(ModelMetadataResponse(call.id, model, "fake", (TensorSignature("x", datatype, (-1,)),), ())))


def knows(core: ClientCore, model: str = "m") -> bool:
    return core.typed_inputs(model, {}) is not None


def test_requests_metadata_once(core: ClientCore) -> None:
    first, frames = core.prepare_metadata_call("m")
    # A request that is never sent does not block other calls.
    assert core.prepare_metadata_call("m")[0] is not first
    first, frames = core.prepare_metadata_call("m")
    core.track(first, frames)
    assert core.prepare_metadata_call("m") == (first, [])
    assert not knows(core)
    learn(core, "other")
    core.on_message(encode(ModelMetadataResponse(first.id, "m", "fake", (), ())))
    assert first.result().platform == "fake"
    assert knows(core)
    assert not core.is_tracked(first)


def test_drops_outdated_metadata(core: ClientCore) -> None:
    learn(core)
    learn(core, "other")
    call = ask(core)
    core.on_message(failure(call.id, "INTERNAL"))
    assert knows(core)
    call = ask(core)
    core.on_message(failure(call.id, "INVALID_ARGUMENT"))
    assert not knows(core)
    assert knows(core, "other")
    core.fail_all(Unavailable, "gone")
    assert not knows(core, "other")
    learn(core)
    named = core.typed_inputs("m", [100])
    assert named
    assert named["x"].dtype == np.int8
    # The metadata may have been requested before the model was updated.
    assert core.typed_inputs("m", [300]) is None
    assert not knows(core)


def test_limits_cached_metadata(core: ClientCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightd.protocol_core._MAX_CACHED_METADATA", 2)
    for name in "abcde":
        learn(core, name)
    assert [name for name in "abcde" if knows(core, name)] == ["e"]


def test_aborted_metadata_request_ends_waiting_calls(core: ClientCore) -> None:
    question = core.prepare_metadata_call("m")
    call, frames = question
    core.track(call, frames)
    # The aborted request was sent nonetheless.
    core.abort_metadata_call(question, KeyboardInterrupt())
    assert not call.done
    joined = core.prepare_metadata_call("m")
    core.untrack(call)
    core.abort_metadata_call(joined, Unavailable("not mine"))
    assert not call.done
    core.abort_metadata_call(question, PermissionDenied("may not"))
    with pytest.raises(PermissionDenied, match="may not"):
        call.result()
