from __future__ import annotations

import gc
from types import MappingProxyType
from typing import Any, List

import numpy as np
import pytest

from weightd.client.core import Call, ClientCore
from weightd.protocol import limits
from weightd.protocol.codec import decode, encode
from weightd.protocol.errors import ERRORS, InvalidArgument, RemoteProtocolError, RequestError, Unavailable
from weightd.protocol.messages.control import ServerMetadataResponse
from weightd.protocol.messages.data import Error, Infer, InferResponse, TensorSpec
from weightd.protocol.messages.status import Status
from weightd.protocol.messages.types import FROM_CLIENT


def ask(core: ClientCore) -> Call:
    call, _ = core.infer("m", {"x": np.zeros(2, np.float32)}, 1.0)
    return call


def answer(call: Call, *values: float) -> List[Any]:
    spec = TensorSpec("y", "FP32", (len(values),))
    return [encode(InferResponse(call.id, "m", (spec,))), np.array(values, "<f4").tobytes()]


def failure(request_id: str, code: str = "INTERNAL") -> List[Any]:
    return [encode(Error(request_id, code, "why"))]


def test_a_request_is_what_the_wire_wants() -> None:
    call, frames = ClientCore().infer("m", {"a": np.ones((2, 3), ">f4"), "b": np.array(7, np.int64)}, 1.5)
    message = decode(frames, FROM_CLIENT)
    assert isinstance(message, Infer)
    assert message.id == call.id
    assert message.parameters.timeout == 1_500_000
    assert message.inputs == (TensorSpec("a", "FP32", (2, 3)), TensorSpec("b", "INT64", ()))
    assert bytes(frames[1]) == np.ones(6, "<f4").tobytes()
    assert bytes(frames[2]) == np.array(7, "<i8").tobytes()


def test_answers_may_come_out_of_order() -> None:
    core = ClientCore()
    calls = [ask(core) for _ in range(5)]
    for call in reversed(calls):
        assert not call.done
        core.received(answer(call, float(calls.index(call))))
        assert call.done
    results: List[Any] = [call.result() for call in calls]
    assert [float(result["y"][0]) for result in results] == [0, 1, 2, 3, 4]


def test_a_result_can_be_had_twice() -> None:
    core = ClientCore()
    call = ask(core)
    core.received(answer(call, 1.0))
    assert call.result() is call.result()


def test_ids_are_never_used_again() -> None:
    core = ClientCore()
    assert len({ask(core).id for _ in range(100)}) == 100


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_each_code_is_its_own_exception(code: str) -> None:
    core = ClientCore()
    call = ask(core)
    core.received(failure(call.id, code))
    with pytest.raises(RequestError, match=r"^why$") as caught:
        call.result()
    assert type(caught.value) is ERRORS[code]
    assert caught.value.code == code


@pytest.mark.parametrize(
    "frames", [failure("no-such-id"), [encode(ServerMetadataResponse("no-such-id", "n", "v", ()))]]
)
def test_an_answer_to_nobody_is_dropped(frames: List[Any]) -> None:
    core = ClientCore()
    call = ask(core)
    core.received(frames)
    assert not call.done
    assert core.waiting == 1


def test_a_late_answer_is_dropped() -> None:
    core = ClientCore()
    call = ask(core)
    late = answer(call, 1.0)
    del call
    gc.collect()
    core.received(late)
    assert core.waiting == 0


def test_a_second_answer_changes_nothing() -> None:
    core = ClientCore()
    call = ask(core)
    core.received(answer(call, 1.0))
    core.received(failure(call.id))
    first: Any = call.result()
    assert float(first["y"][0]) == 1.0


def test_what_was_given_up_leaves_nothing_behind() -> None:
    core = ClientCore()
    for _ in range(1000):
        ask(core)
    gc.collect()
    assert core.waiting == 0


def test_what_is_done_leaves_nothing_behind() -> None:
    core = ClientCore()
    calls = [ask(core) for _ in range(10)]
    for call in calls:
        core.received(answer(call, 1.0))
    assert core.waiting == 0


def test_fail_all_ends_what_is_under_way_and_nothing_else() -> None:
    core = ClientCore()
    answered, first, second = ask(core), ask(core), ask(core)
    core.received(answer(answered, 1.0))
    core.fail_all(Unavailable, "gone")
    assert answered.result()
    for call in (first, second):
        with pytest.raises(Unavailable, match="gone"):
            call.result()
    assert core.waiting == 0
    assert not ask(core).done


def test_an_error_without_an_id_is_everybodys() -> None:
    core = ClientCore()
    call = ask(core)
    with pytest.raises(RemoteProtocolError, match="could not read a request: why"):
        core.received(failure(""))
    assert not call.done


def test_garbage_is_everybodys() -> None:
    with pytest.raises(RemoteProtocolError, match="header"):
        ClientCore().received([b"\xc1"])


def test_a_broken_answer_ends_the_call_that_it_names() -> None:
    core = ClientCore()
    broken, other = ask(core), ask(core)
    header, frame = answer(broken, 1.0)
    core.received([header, frame[:-1]])
    with pytest.raises(RemoteProtocolError, match="4 bytes, got 3"):
        broken.result()
    assert not other.done


def test_values_that_no_array_can_hold_end_the_call() -> None:
    core = ClientCore()
    call = ask(core)
    core.received([encode(InferResponse(call.id, "m", (TensorSpec("y", "BOOL", (2,)),))), b"\1\2"])
    with pytest.raises(RemoteProtocolError, match="outputs: y: expected 0 or 1"):
        call.result()


def test_an_answer_of_another_kind_ends_the_call() -> None:
    core = ClientCore()
    call = ask(core)
    core.received([encode(ServerMetadataResponse(call.id, "n", "v", ()))])
    with pytest.raises(RemoteProtocolError, match="expected a InferResponse, got a ServerMetadataResponse"):
        call.result()


@pytest.mark.parametrize("value", [np.array([object()]), np.array(["text"]), np.array([1j]), [[1], [1, 2]]])
@pytest.mark.filterwarnings("ignore:Creating an ndarray from ragged")
def test_what_is_no_tensor_is_refused_by_name(value: object) -> None:
    core = ClientCore()
    with pytest.raises(InvalidArgument, match=r"^input x: "):
        core.infer("m", {"x": value}, 1.0)
    assert core.waiting == 0


def test_an_input_that_the_daemon_would_hang_up_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_FRAME_BYTES", 8)
    with pytest.raises(InvalidArgument, match="input x: expected at most 8 bytes, got 16"):
        ClientCore().infer("m", {"x": np.zeros(2, np.float64)}, 1.0)


def test_a_question_for_status_is_one() -> None:
    call, frames = ClientCore().status()
    assert decode(frames, FROM_CLIENT) == Status(call.id)


@pytest.mark.parametrize("inputs", [np.zeros(2, np.float32), [1.0], None, 7, "x"])
def test_inputs_without_names_are_refused_with_what_to_do(inputs: Any) -> None:
    core = ClientCore()
    expected = rf"^inputs: expected an array for each input by its name, .*, got {type(inputs).__name__}; metadata"
    with pytest.raises(InvalidArgument, match=expected):
        core.infer("m", inputs, 1.0)
    assert core.waiting == 0


def test_inputs_may_be_any_mapping() -> None:
    _, frames = ClientCore().infer("m", MappingProxyType({"x": np.zeros(2, np.float32)}), 1.0)
    assert len(frames) == 2
