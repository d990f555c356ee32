"""Tests of the gRPC server over real sockets with other projects' clients."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from testkit import certificates
from testkit.waiting import until
from weightd_gateway.auth import Authenticator, Caller, token_digest
from weightd_gateway.config import addresses
from weightd_gateway.daemon_client import InferenceRequest, InferenceResult
from weightd_gateway.grpc import handlers as calls
from weightd_gateway.grpc import http2_frames, public_services
from weightd_gateway.grpc import server as front
from weightd_protocol.errors import DeadlineExceeded, NotFound, ResourceExhausted, Unavailable

from .served import LIMIT_S, Served, connected, echo, served
from .test_http2_frames import frame

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
METHOD = "/inference.GRPCInferenceService/{}".format
TOKEN = "a secret"
KNOWN = Authenticator({token_digest(TOKEN): Caller("research", "token 1")}, {}, {})
BEARER = {"authorization": f"Bearer {TOKEN}"}


def tensor(array: Any, name: str = "x", datatype: str = "FP32") -> triton.InferInput:
    made = triton.InferInput(name, [*array.shape], datatype)
    made.set_data_from_numpy(array)
    return made


X = np.arange(4, dtype="<f4").reshape(2, 2)


def message(**fields: Any) -> bytes:
    content: bytes = service_pb2.ModelInferRequest(**{"model_name": "echo", **fields}).SerializeToString()
    return content


SMALL = message(id="7", inputs=[{"name": "x", "datatype": "FP32", "shape": [2, 2]}], raw_input_contents=[X.tobytes()])


def refusal(call: Callable[[], Any]) -> Any:
    """Return the error that ends a call."""
    with pytest.raises(grpc.RpcError) as ended:
        call()
    return ended.value


def code_of(call: Callable[[], Any]) -> grpc.StatusCode:
    code: grpc.StatusCode = refusal(call).code()
    return code


class BlockedModel:
    """A model that answers when the test releases it."""

    def __init__(self) -> None:
        self.running = 0
        self.cancelled = 0
        self.go = asyncio.Event()

    async def __call__(self, question: InferenceRequest) -> InferenceResult:
        self.running += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return await echo(question)


def test_serves_unmodified_client(server: Served, client: triton.InferenceServerClient) -> None:
    outputs = [triton.InferRequestedOutput("x")]
    result = client.infer("echo", [tensor(X)], outputs=outputs, request_id="42", timeout=5_000_000, priority=1)
    np.testing.assert_array_equal(result.as_numpy("x"), X)
    assert result.get_response().id == "42"
    _, question = server.service.asked[-1]
    assert (question.model, question.outputs, question.timeout, question.priority) == ("echo", ("x",), 5.0, 1)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_accepts_compressed_message(client: triton.InferenceServerClient, algorithm: str) -> None:
    result = client.infer("echo", [tensor(X)], compression_algorithm=algorithm)
    np.testing.assert_array_equal(result.as_numpy("x"), X)


def test_answers_metadata_requests(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo")
    assert client.get_server_metadata().version == "9.9"
    assert client.get_model_metadata("echo").inputs[0].shape == [-1, 2]
    config = client.get_model_config("echo").config
    assert (config.name, config.max_batch_size, config.input[0].data_type) == ("echo", 0, 11)
    assert not config.model_transaction_policy.decoupled
    assert [*client.get_trace_settings("echo").settings["trace_level"].value] == ["OFF"]
    assert client.get_log_settings().settings["log_info"].bool_param


@pytest.mark.parametrize(
    ("method", "arguments", "code"),
    [
        ("load_model", ("echo",), "PERMISSION_DENIED"),
        ("unload_model", ("echo",), "PERMISSION_DENIED"),
        ("update_trace_settings", ("echo", {"trace_level": ["MAX"]}), "INVALID_ARGUMENT"),
        ("update_log_settings", ({"log_verbose_level": 1},), "INVALID_ARGUMENT"),
        ("register_cuda_shared_memory", ("r", b"", 0, 8), "UNIMPLEMENTED"),
        ("register_system_shared_memory", ("r", "/r", 8), "INVALID_ARGUMENT"),
    ],
)
def test_rejects_unsupported_methods(
    client: triton.InferenceServerClient, method: str, arguments: tuple[Any, ...], code: str
) -> None:
    with pytest.raises(InferenceServerException) as refused:
        getattr(client, method)(*arguments)
    assert refused.value.status() == f"StatusCode.{code}"


def test_unregisters_absent_cuda_memory(client: triton.InferenceServerClient) -> None:
    client.unregister_cuda_shared_memory()
    assert not client.get_cuda_shared_memory_status().regions


def test_not_ready_without_daemon(server: Served, client: triton.InferenceServerClient) -> None:
    server.service.is_ready = Unavailable("no daemon")
    assert client.is_server_live()
    assert not client.is_server_ready()
    assert not client.is_model_ready("echo")
    server.service.is_ready = NotFound("no model")
    with pytest.raises(InferenceServerException):
        client.is_model_ready("no model")
    server.service.is_ready = True


def test_error_has_code_text_and_retry_time(server: Served) -> None:
    async def refuse(question: InferenceRequest) -> InferenceResult:
        raise ResourceExhausted("too many\n×", retry_after=0.25)

    server.service.model = refuse
    with connected(server.target) as channel:
        infer = channel.unary_unary(METHOD("ModelInfer"))
        error = refusal(partial(infer, SMALL, metadata=[("traceparent", TRACE)], timeout=LIMIT_S))
    server.service.model = echo
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many\n×")
    metadata = dict(error.trailing_metadata())
    assert (metadata["grpc-retry-pushback-ms"], metadata["traceparent"]) == ("250", TRACE)


def test_unexpected_error_appears_only_in_log(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(question: InferenceRequest) -> InferenceResult:
        raise ValueError("a secret")

    server.service.model = fail
    with connected(server.target) as channel:
        error = refusal(lambda: channel.unary_unary(METHOD("ModelInfer"))(SMALL, timeout=LIMIT_S))
    server.service.model = echo
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    assert "a secret" in caplog.text


@pytest.mark.parametrize("content", [b"\xff\xff", b"\x0a\x02\xff\xff", b"\x0a\xff\xff\xff\xff\x0f"])
def test_rejects_invalid_message(server: Served, content: bytes) -> None:
    with connected(server.target) as channel:
        infer = channel.unary_unary(METHOD("ModelInfer"))
        assert code_of(lambda: infer(content, timeout=LIMIT_S)) == grpc.StatusCode.INVALID_ARGUMENT


def test_rejects_call_without_message(server: Served) -> None:
    with connected(server.target) as channel:
        infer = channel.stream_unary(METHOD("ModelInfer"))
        assert code_of(lambda: infer(iter(()), timeout=LIMIT_S)) == grpc.StatusCode.INVALID_ARGUMENT


def test_unknown_method_is_unimplemented(server: Served) -> None:
    with connected(server.target) as channel:
        assert code_of(lambda: channel.unary_unary(METHOD("Other"))(b"")) == grpc.StatusCode.UNIMPLEMENTED


def test_limits_rate_of_logged_failures(caplog: pytest.LogCaptureFixture) -> None:
    away, unknown = (_away, grpc.StatusCode.UNAVAILABLE), (_unknown, grpc.StatusCode.NOT_FOUND)
    with served() as server, connected(server.target) as channel:
        infer = channel.unary_unary(METHOD("ModelInfer"))
        for model, code in (away, unknown, away, away):
            server.service.model = model
            error = refusal(partial(infer, SMALL, metadata=[("traceparent", TRACE)], timeout=LIMIT_S))
            assert (error.code(), dict(error.trailing_metadata())["traceparent"]) == (code, TRACE)
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith("ModelInfer for anonymous: UNAVAILABLE: no daemon in ")
    assert line.endswith(TRACE)


async def _away(question: InferenceRequest) -> InferenceResult:
    raise Unavailable("no daemon")


async def _unknown(question: InferenceRequest) -> InferenceResult:
    raise NotFound("no such model")


def test_deadline_becomes_request_timeout(server: Served, client: triton.InferenceServerClient) -> None:
    client.infer("echo", [tensor(X)], client_timeout=20.0)
    _, question = server.service.asked[-1]
    assert question.timeout is not None
    assert 2.0 < question.timeout < 21.0


def test_passes_trace_context(server: Served) -> None:
    with connected(server.target) as channel:
        infer = channel.unary_unary(METHOD("ModelInfer"))
        _, call = infer.with_call(SMALL, metadata=[("traceparent", TRACE)], timeout=LIMIT_S)
        infer(SMALL, metadata=[("traceparent", TRACE[:-1])], timeout=LIMIT_S)
    assert [each.traceparent for _, each in server.service.asked[-2:]] == [TRACE, ""]
    assert dict(call.trailing_metadata())["traceparent"] == TRACE


def test_cancelled_call_cancels_request(server: Served) -> None:
    held = server.service.model = BlockedModel()
    with connected(server.target) as channel:
        calls = [channel.unary_unary(METHOD("ModelInfer")).future(SMALL) for _ in range(50)]
        until(lambda: held.running == 50, "50 requests under way")
        for each in calls:
            each.cancel()
        until(lambda: held.cancelled == 50, "none under way")
        until(lambda: not server.service.admission.in_flight, "all seats free")
    server.service.model = echo


def test_rejects_call_beyond_in_flight_limit() -> None:
    with served(max_in_flight=4) as server, connected(server.target) as channel:
        held = server.service.model = BlockedModel()
        infer = channel.unary_unary(METHOD("ModelInfer"))
        calls = [infer.future(SMALL) for _ in range(3)]
        until(lambda: held.running == 3, "3 requests under way")
        assert code_of(lambda: infer(SMALL, timeout=LIMIT_S)) == grpc.StatusCode.RESOURCE_EXHAUSTED
        server.call(lambda: _set(held.go))
        for each in calls:
            each.result(LIMIT_S)
        infer(SMALL, timeout=LIMIT_S)


def test_excess_call_waits_only_on_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front, "MAX_CALLS_PER_CONNECTION", 1)
    own = ("grpc.use_local_subchannel_pool", 1)
    with served() as server, connected(server.target, own) as full, connected(server.target, own) as other:
        held = server.service.model = BlockedModel()
        infer = full.unary_unary(METHOD("ModelInfer"))
        first, second = infer.future(SMALL, timeout=LIMIT_S), infer.future(SMALL, timeout=LIMIT_S)
        until(lambda: held.running, "a request under way")
        assert code_of(partial(infer, SMALL, timeout=0.2)) == grpc.StatusCode.DEADLINE_EXCEEDED
        assert (held.running, held.cancelled, server.service.admission.in_flight) == (1, 0, 1)
        assert other.unary_unary(METHOD("ServerLive"))(b"", timeout=LIMIT_S)
        server.call(lambda: _set(held.go))
        assert first.result(LIMIT_S) == second.result(LIMIT_S)
        until(lambda: not server.service.admission.in_flight, "no request under way")
        assert not server.service.admission.reserved_bytes


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_silent_call_loses_its_permit() -> None:
    with served(max_in_flight=1, receive_timeout=0.2) as server, connected(server.target) as channel:
        never = threading.Event()

        def nothing() -> Any:
            never.wait(LIMIT_S)
            yield from ()

        call = channel.stream_unary(METHOD("ModelInfer")).future(nothing())
        assert code_of(lambda: call.result(LIMIT_S)) == grpc.StatusCode.DEADLINE_EXCEEDED
        never.set()
        channel.unary_unary(METHOD("ModelInfer"))(SMALL, timeout=LIMIT_S)


class SilentCalls:
    """Calls that send no message until the end of the block."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._said = threading.Event()

    def __enter__(self) -> SilentCalls:
        return self

    def __exit__(self, *_: object) -> None:
        self._said.set()

    def begin(self, path: str) -> Any:
        def nothing() -> Any:
            self._said.wait(LIMIT_S)
            yield from ()

        return self._channel.stream_unary(path).future(nothing(), timeout=LIMIT_S)


@pytest.mark.parametrize("came", [True, False])
def test_time_while_stopped_does_not_count(came: bool) -> None:
    """The loop's poll returns nothing after a stop beyond its time-out, and timers run before the next poll."""
    reader, writer = os.pipe()

    async def test() -> None:
        loop, message, stops = asyncio.get_running_loop(), asyncio.Event(), [True]
        selector = vars(loop)["_selector"]
        select = selector.select

        def stopped(timeout: float | None) -> Any:
            if timeout and stops and stops.pop():
                time.sleep(timeout + 0.6)
                return []
            return select(timeout)

        loop.add_reader(reader, message.set)
        if came:
            os.write(writer, b"x")
        with mock.patch.object(selector, "select", stopped), calls.receive_deadline(0.05):
            await message.wait()
        assert not stops

    with contextlib.nullcontext() if came else pytest.raises(DeadlineExceeded):
        asyncio.run(test())
    for descriptor in (reader, writer):
        os.close(descriptor)


def test_open_methods_need_no_permit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RECEIVE_GRACE_S", 0.5)
    with served(max_in_flight=1) as server, connected(server.target) as channel, SilentCalls(channel) as silent:
        open_to_all = [METHOD("ServerLive"), METHOD("ServerReady"), "/grpc.health.v1.Health/Check"]
        begun = [silent.begin(path) for path in open_to_all]
        channel.unary_unary(METHOD("ModelInfer"))(SMALL, timeout=LIMIT_S)
        for each in (*begun, silent.begin("/grpc.health.v1.Health/Watch")):
            assert refusal(partial(each.result, LIMIT_S)).details() == "the message did not arrive within 0.5 seconds"


def test_slow_call_keeps_memory_for_longest_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RECEIVE_GRACE_S", 0.05)
    most = 2**20
    with served(max_body_bytes=most, max_memory_bytes=2 * most) as server, connected(server.target) as channel:
        seats, infer = server.service.admission, channel.unary_unary(METHOD("ModelInfer"))
        with SilentCalls(channel) as silent:
            slow = silent.begin(METHOD("ModelInfer"))
            until(lambda: seats.reserved_bytes == most, "as many bytes are taken as a message may have")
            late = silent.begin(METHOD("ModelInfer"))
            assert code_of(partial(late.result, LIMIT_S)) == grpc.StatusCode.RESOURCE_EXHAUSTED
            slow.cancel()
            until(lambda: not seats.reserved_bytes, "none is")
        infer(SMALL, timeout=LIMIT_S)


def test_idle_reflection_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_services, "REFLECTION_TIMEOUT_S", 0.2)
    with served() as server, connected(server.target) as channel, SilentCalls(channel) as silent:
        call = silent.begin("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        assert refusal(partial(call.result, LIMIT_S)).details() == "the message did not arrive within 0.2 seconds"


@pytest.mark.parametrize("method", ["ServerLive", "ServerMetadata"])
def test_limits_calls_with_unread_answers(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(calls, "MAX_PROBES", 4)
    monkeypatch.setattr(calls, "MAX_UNSENT_CALLS", 0)
    no_room = ("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)
    with served(max_in_flight=4) as server, connected(server.target, *no_room) as channel:
        ask = channel.unary_stream(METHOD(method))
        unread = [ask(b"", timeout=LIMIT_S) for _ in range(3)]

        def is_limit_reached() -> bool:
            # gRPC's client may receive an answer before the test reads it.
            unread.append(ask(b"", timeout=LIMIT_S))
            return "calls with unread responses" in ask_another()

        def ask_another() -> str:
            try:
                next(ask(b"", timeout=LIMIT_S))
            except grpc.RpcError as error:
                return str(cast(Any, error).details())
            return ""

        # Below the limit other calls are still answered and get a permit.
        until(is_limit_reached, "the limit is reached")
        for each in unread:
            each.cancel()
        until(lambda: not ask_another(), "a free permit")


def test_limits_messages_without_tensors(server: Served) -> None:
    with connected(server.target) as channel:
        ask = channel.unary_unary(METHOD("TraceSetting"))
        # One setting, and a name of the remaining bytes.
        long = bytes.fromhex("0a00 12faff03") + b"m" * (calls.MAX_SMALL_MESSAGE_BYTES - 6)
        assert code_of(partial(ask, long, timeout=LIMIT_S)) == grpc.StatusCode.INVALID_ARGUMENT
        assert code_of(partial(ask, long + b"\x0a\x00", timeout=LIMIT_S)) == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "path",
    ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", METHOD("ServerLive"), METHOD("TraceSetting")],
)
def test_rejects_long_message_before_it_arrives(path: str) -> None:
    with served(tcp=True) as server, connected(server.target) as channel:
        ask = channel.stream_stream(path)
        error = refusal(lambda: list(ask(iter([bytes(16 * 2**20)]), timeout=LIMIT_S)))
        assert error.details().startswith("the calls of this connection have sent too many bytes before a response")
        assert error.details().endswith("a message of this method has at most 65536 bytes")
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        # The rest of the message does not delay other calls.
        assert channel.unary_unary(METHOD("ServerLive"))(b"", timeout=LIMIT_S)


def test_full_connection_does_not_block_others() -> None:
    own = ("grpc.use_local_subchannel_pool", 1)
    with served(tcp=True) as server, connected(server.target, own) as full, connected(server.target, own) as other:
        ask = full.stream_unary(METHOD("TraceSetting"))
        both = [ask.future(iter([bytes(16 * 2**20)]), timeout=LIMIT_S) for _ in range(2)]
        assert other.unary_unary(METHOD("ServerLive"))(b"", timeout=LIMIT_S)
        for each in both:
            assert code_of(partial(each.result, LIMIT_S)) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert full.unary_unary(METHOD("ModelInfer"))(SMALL, timeout=LIMIT_S)
        until(lambda: not server.service.admission.in_flight, "no call under way")
        assert not server.service.admission.reserved_bytes


def test_rejects_long_message_that_begins_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RECEIVE_GRACE_S", 0.05)
    with served(tcp=True) as server, connected(server.target) as channel:

        def late() -> Any:
            until(lambda: server.service.admission.reserved_bytes, "the first check of the call is over")
            yield bytes(16 * 2**20)

        ask = partial(channel.stream_unary(METHOD("TraceSetting")), late(), timeout=LIMIT_S)
        assert code_of(ask) == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_anonymous_streams_do_not_exhaust_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MAX_WATCH_STREAMS", "MAX_REFLECTION_STREAMS"):
        monkeypatch.setattr(front, name, 1)
    with served() as server, connected(server.target) as channel:
        ended = threading.Event()

        def once() -> Any:
            yield b""
            ended.wait(LIMIT_S)

        for path in ("/grpc.health.v1.Health/Watch", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"):
            ask = channel.stream_stream(path)
            # A call that the client has dropped is cancelled.
            first = ask(once(), timeout=LIMIT_S)
            next(first)
            assert code_of(partial(next, ask(iter([b""]), timeout=LIMIT_S))) == grpc.StatusCode.RESOURCE_EXHAUSTED
        ended.set()
        stream = channel.stream_stream(METHOD("ModelStreamInfer"))
        next(stream(iter([SMALL]), timeout=LIMIT_S))


LARGE = message(
    inputs=[{"name": "x", "datatype": "UINT8", "shape": [6_000_000]}], raw_input_contents=[bytes(6_000_000)]
)


def test_unread_answers_count_as_memory(caplog: pytest.LogCaptureFixture) -> None:
    with served(max_memory_bytes=18_000_000, max_body_bytes=8_000_000) as server, ExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        # Otherwise the flow-control window grows until it has room for a whole answer.
        options.append(("grpc.http2.bdp_probe", 0))
        first, other = (stack.enter_context(connected(server.target, *options)) for _ in range(2))
        # As streams: the client takes only as much of the answer as fits into the HTTP/2 window.
        unread = [first.unary_stream(METHOD("ModelInfer"))(LARGE) for _ in range(2)]
        until(
            lambda: server.service.admission.reserved_bytes >= 12_000_000 and not server.service.admission.in_flight,
            "two answers",
        )
        infer = other.unary_unary(METHOD("ModelInfer"), response_deserializer=len)
        assert code_of(partial(infer, LARGE, timeout=LIMIT_S)) == grpc.StatusCode.RESOURCE_EXHAUSTED
        infer(SMALL, timeout=LIMIT_S)
        for each in unread:
            each.cancel()
        until(lambda: server.service.admission.reserved_bytes == 0, "nothing that is kept")
        infer(LARGE, timeout=LIMIT_S)
    assert not [each for each in caplog.records if each.name.startswith(("weightd", "grpc"))]


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_rejects_too_long_message(compression: grpc.Compression) -> None:
    with served(max_body_bytes=64 * 1024) as server, connected(server.target) as channel:
        infer = channel.unary_unary(METHOD("ModelInfer"))
        large = bytes(16 * 1024 * 1024)
        refused = refusal(lambda: infer(large, compression=compression))
        # The library rejects the message before it has received all of it.
        assert (refused.code(), "larger than" in refused.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        infer(SMALL, timeout=LIMIT_S)


def test_token_identifies_caller() -> None:
    with served(KNOWN) as server, triton.InferenceServerClient(server.target) as client:
        client.infer("echo", [tensor(X)], headers=BEARER)
        assert server.service.asked[-1][0] == Caller("research", "token 1")
        for headers in ({}, {"authorization": "Bearer another"}, {"authorization": TOKEN}):
            with pytest.raises(InferenceServerException) as refused:
                client.infer("echo", [tensor(X)], headers=headers)
            assert refused.value.status() == "StatusCode.UNAUTHENTICATED"
        with connected(server.target) as channel:
            twice = [*BEARER.items(), *BEARER.items()]
            error = refusal(partial(channel.unary_unary(METHOD("ModelInfer")), SMALL, metadata=twice, timeout=LIMIT_S))
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        # The server rejects unauthenticated callers before it reads a message or looks up the method.
        server.gateway.authenticator = Authenticator({}, {}, {})
        with pytest.raises(InferenceServerException, match="token"):
            client.get_server_metadata(headers=BEARER)
        assert client.is_server_live(), "a probe has no token"
        assert client.is_server_live(headers={"authorization": "Basic no"}), "a token of a probe is not checked"


def _asks(*numbers: str) -> list[bytes]:
    return [SMALL.replace(b"\x1a\x017", b"\x1a\x01" + number.encode()) for number in numbers]


def _answers(content: Any) -> list[tuple[str, str]]:
    read = map(service_pb2.ModelStreamInferResponse.FromString, content)
    return [(each.infer_response.id, each.error_message) for each in read]


def test_stream_answers_in_order_after_errors(server: Served) -> None:
    with connected(server.target) as channel:
        stream = channel.stream_stream(METHOD("ModelStreamInfer"))
        first, last = _asks("1", "3")
        wrong = message(id="2", inputs=[{"name": "x", "datatype": "FP32", "shape": [1]}], raw_input_contents=[b"\0"])
        got = _answers(stream(iter([first, wrong, b"\xff", last]), timeout=LIMIT_S))
    assert [each for each, _ in got] == ["1", "2", "", "3"]
    assert [bool(text) for _, text in got] == [False, True, True, False]
    assert "x: expected 4 bytes" in got[1][1]


def test_stream_runs_one_request_at_a_time(server: Served) -> None:
    held = server.service.model = BlockedModel()
    before = len(server.service.asked)
    with connected(server.target) as channel:
        answers = channel.stream_stream(METHOD("ModelStreamInfer"))(iter(_asks("1", "2", "3")), timeout=LIMIT_S)
        until(lambda: held.running == 1, "a request under way")
        assert len(server.service.asked) == before + 1
        server.call(lambda: _set(held.go))
        assert [each for each, _ in _answers(answers)] == ["1", "2", "3"]
    server.service.model = echo


def test_serves_streams_of_clients(server: Served) -> None:
    answers: list[tuple[str, Any]] = []
    with triton.InferenceServerClient(server.target) as client:
        client.start_stream(lambda result, error: answers.append((result.get_response().id, error)))
        for number in range(5):
            client.async_stream_infer("echo", [tensor(X)], request_id=str(number))
        client.stop_stream()
    assert answers == [(str(number), None) for number in range(5)]


def test_stop_ends_streams_and_finishes_requests() -> None:
    with served() as server, connected(server.target) as channel:
        held = server.service.model = BlockedModel()
        call = channel.unary_unary(METHOD("ModelInfer")).future(SMALL)
        stop = threading.Event()

        def until_the_end() -> Any:
            yield SMALL
            stop.wait(LIMIT_S)

        stream = channel.stream_stream(METHOD("ModelStreamInfer"))(until_the_end(), timeout=LIMIT_S)
        until(lambda: held.running == 2, "two requests under way")
        stopping = threading.Thread(target=server.stop, args=(LIMIT_S,))
        stopping.start()
        until(lambda: code_of_new(server) == grpc.StatusCode.UNAVAILABLE, "no new calls")
        server.call(lambda: _set(held.go))
        call.result(LIMIT_S)
        assert _answers([next(stream)]) == [("7", "")]
        assert code_of(lambda: next(stream)) == grpc.StatusCode.UNAVAILABLE
        stop.set()
        stopping.join(LIMIT_S)
        assert not stopping.is_alive()


def test_stop_does_not_wait_for_idle_stream() -> None:
    with served() as server, connected(server.target) as channel:
        idle = threading.Event()

        def one_and_no_more() -> Any:
            yield SMALL
            idle.wait(LIMIT_S)

        stream = channel.stream_stream(METHOD("ModelStreamInfer"))(one_and_no_more(), timeout=LIMIT_S)
        next(stream)
        begin = time.monotonic()
        server.stop(LIMIT_S)
        assert time.monotonic() - begin < LIMIT_S / 2
        assert code_of(lambda: next(stream)) == grpc.StatusCode.UNAVAILABLE
        idle.set()


def test_stop_without_grace_does_not_wait() -> None:
    with served() as server, connected(server.target) as channel:
        held = server.service.model = BlockedModel()
        call = channel.unary_unary(METHOD("ModelInfer")).future(SMALL)
        until(lambda: held.running == 1, "a request under way")

        async def stop() -> None:
            patient = asyncio.create_task(server.front.stop(LIMIT_S))
            await asyncio.sleep(0)
            patient.cancel()
            await asyncio.wait([patient])
            await server.front.stop(0.0)

        server.call(stop)
        assert held.cancelled == 1
        assert code_of(lambda: call.result(LIMIT_S)) in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def code_of_new(server: Served) -> grpc.StatusCode | None:
    """Return the status of a call over a new connection."""
    with connected(server.target, ("grpc.use_local_subchannel_pool", 1)) as channel:
        try:
            channel.unary_unary(METHOD("ServerLive"))(b"", timeout=LIMIT_S)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return None


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, str]:
    """Return the settings of a gateway with TLS and client certificates."""
    certificate, key = certificates.SERVER.write(tmp_path, "server")
    authority = tmp_path / "ca.crt"
    authority.write_text(certificates.AUTHORITY)
    return {"tls_cert": str(certificate), "tls_key": str(key), "client_ca": str(authority)}


def dialled(server: Served, own: certificates.Certificate | None) -> Any:
    """Return a channel with this client certificate."""
    pair = (None, None) if own is None else (own.key.encode(), own.certificate.encode())
    credentials = grpc.ssl_channel_credentials(certificates.AUTHORITY.encode(), *pair)
    return grpc.secure_channel(server.target, credentials)


def test_certificate_identifies_caller(tls: dict[str, str]) -> None:
    robot = Caller("factory", "certificate robot")
    known = Authenticator({token_digest(TOKEN): Caller("research", "token 1")}, {"robot": robot}, {})
    with served(known, tcp=True, **tls) as server:
        with dialled(server, certificates.CLIENT) as channel:
            infer = channel.unary_unary(METHOD("ModelInfer"))
            infer(SMALL, timeout=LIMIT_S)
            assert server.service.asked[-1][0] == robot
            infer(SMALL, timeout=LIMIT_S, metadata=[*BEARER.items()])
            assert server.service.asked[-1][0].tenant == "research"
            server.gateway.authenticator = Authenticator({}, {}, {})
            assert code_of(lambda: infer(SMALL, timeout=LIMIT_S)) == grpc.StatusCode.UNAUTHENTICATED
        for own in (None, certificates.STRANGER):
            with dialled(server, own) as channel:
                infer = channel.unary_unary(METHOD("ModelInfer"))
                assert code_of(partial(infer, SMALL, timeout=LIMIT_S)) == grpc.StatusCode.UNAVAILABLE


def test_reports_address_in_use() -> None:
    with served() as first, pytest.raises(OSError, match=first.target), Served(first.gateway.config, KNOWN):
        pass
    with served(tcp=True) as first:
        taken = dataclasses.replace(first.gateway.config, grpc_addresses=(addresses.parse(first.target),))
        with pytest.raises(OSError, match=first.target), Served(taken, KNOWN):
            pass


def test_limits_connections() -> None:
    with served(max_connections=2) as server, ExitStack() as stack:
        options = ("grpc.use_local_subchannel_pool", 1)
        dialled = [stack.enter_context(connected(server.target, options)) for _ in range(3)]
        codes: list[Any] = []
        for channel in dialled:
            try:
                channel.unary_unary(METHOD("ServerLive"))(b"", timeout=LIMIT_S)
            except grpc.RpcError as error:
                codes.append(error.code())
        assert codes == [grpc.StatusCode.UNAVAILABLE]


FLOODS = {
    "PING": frame(http2_frames.PING, bytes(8)),
    "SETTINGS": frame(http2_frames.SETTINGS, b"\0\4\0\0\xff\xff"),
    "CONTINUATION": frame(http2_frames.HEADERS, b"\x82\x87") + 100 * frame(http2_frames.CONTINUATION, b"\x40\x01a\x7f"),
    "RST_STREAM": frame(http2_frames.RST_STREAM, bytes(4)),
    "DATA": frame(http2_frames.DATA),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_flood_of_frames_ends_only_its_connection(kind: str) -> None:
    with served(tcp=True) as server, connected(server.target) as channel, socket.socket() as flood:
        live = channel.unary_unary(METHOD("ServerLive"))
        live(b"", timeout=LIMIT_S)
        host, _, port = server.target.rpartition(":")
        flood.settimeout(LIMIT_S)
        flood.connect((host, int(port)))
        flood.sendall(http2_frames.PREFACE + frame(http2_frames.SETTINGS))
        assert flood.recv(9)[3] == http2_frames.SETTINGS
        with suppress(ConnectionError):
            flood.sendall(2000 * FLOODS[kind])
        received = bytearray()
        with suppress(ConnectionError):
            while part := flood.recv(65536):
                received += part
        live(b"", timeout=LIMIT_S)
        until(lambda: len(server.front.http2_filter.peers) == 1, "the end of the connection to gRPC's library")


def test_reports_exceeded_limit_to_client() -> None:
    with served(tcp=True) as server, socket.socket() as client:
        host, _, port = server.target.rpartition(":")
        client.settimeout(LIMIT_S)
        client.connect((host, int(port)))
        client.sendall(http2_frames.PREFACE + frame(http2_frames.SETTINGS))
        assert client.recv(9)[3] == http2_frames.SETTINGS
        # These must be the last bytes: otherwise the kernel resets the connection and drops the answer.
        client.sendall(frame(http2_frames.HEADERS, b"\x82") + frame(http2_frames.PING, bytes(8)))
        received = b""
        while part := client.recv(65536):
            received += part
        assert b"expected CONTINUATION after headers without END_HEADERS, got PING" in received


def test_closes_connection_without_preface() -> None:
    with served(tcp=True, receive_timeout=0.2) as server, socket.socket() as client:
        host, _, port = server.target.rpartition(":")
        client.settimeout(LIMIT_S)
        client.connect((host, int(port)))
        client.sendall(http2_frames.PREFACE[:-1])
        with suppress(ConnectionError):
            assert client.recv(1) == b""
        assert not server.front.http2_filter.peers
