"""`ModelInfer` and `ModelStreamInfer`: runs models, and encodes the responses, each output copied once."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import grpc

from weightd_gateway import tensors
from weightd_gateway.daemon_client import DaemonClient, InferenceResult
from weightd_gateway.error_codes import TooLarge, to_request_error
from weightd_gateway.grpc.handlers import Context, Handler, RpcContext, RpcHandlers, report_errors
from weightd_gateway.grpc.requests import (
    OFFSET,
    REGION,
    SIZE,
    InferRequest,
    OutputTarget,
    ShmResolver,
    parse_infer_request,
)
from weightd_gateway.grpc.schema import INFERENCE
from weightd_gateway.grpc.streams import WaitingCalls
from weightd_gateway.grpc.wire_format import fast_parse
from weightd_gateway.oip_view import VERSION
from weightd_gateway.tensors import Array
from weightd_protocol.errors import InvalidArgument, WeightdError
from weightd_protocol.schema import label
from weightd_protocol.tensors import frame_of

_Response, _Streamed = INFERENCE["ModelInferResponse"], INFERENCE["ModelStreamInferResponse"]

# Fields 3, 6 and 2, of bytes, of which the length follows.
_ID_TAG = b"\x1a"
_RAW_OUTPUT_TAG = b"\x32"
_INFER_RESPONSE_TAG = b"\x12"

# Of a protobuf, by what its libraries read.
_MAX_BYTES = 2**31 - 1

# What clients of streams wait for: the answer to a request has one response here.
_FINAL_PARAMETER = "triton_final_response"


class GrpcInference:
    """Has models run.

    Args:
        daemon_client: the daemon.
        shm_resolver: where tensors may be that are not in messages.
        streams: calls with many requests are among them.
    """

    def __init__(self, daemon_client: DaemonClient, shm_resolver: ShmResolver, streams: WaitingCalls) -> None:
        self._daemon_client = daemon_client
        self._shm_resolver = shm_resolver
        self._streams = streams

    def handlers(self, calls: RpcHandlers) -> dict[str, Handler]:
        """Return what gRPC wants for each method."""

        async def stream(messages: object, context: Context) -> None:
            with calls.admit(context) as call:
                caller = call.caller
            with self._streams.admit(caller), calls.receiving(context):
                # What is sent ahead waits where it is: at most one message has been read.
                while (message := await self._streams.wait(context.read)) is not grpc.aio.EOF:
                    call = call._replace(time_left_s=context.time_remaining())
                    answer = await self._infer_streamed(calls, call, message)
                    sent = calls.admission.reserve_response(caller, len(answer))
                    try:
                        await context.write(answer)
                    finally:
                        sent.release()

        return {
            "ModelInfer": calls.unary_handler("ModelInfer", _as_received, self._infer, max_bytes=calls.max_bytes),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(report_errors(stream)),
        }

    async def _infer(self, call: RpcContext, message: bytes) -> bytes:
        request = await parse_infer_request(message, call, self._shm_resolver)
        return encode_response(request, await self._daemon_client.infer(call.caller, request.request))

    async def _infer_streamed(self, calls: RpcHandlers, call: RpcContext, message: bytes) -> bytes:
        """Return the answer to one request of a stream, which goes on if that is an error."""
        started_at = time.monotonic()
        try:
            with calls.admission.admit(call.caller) as permit:
                permit.reserve(len(message))
                what = await parse_infer_request(message, call._replace(permit=permit), self._shm_resolver)
                answer = encode_response(
                    what, await self._daemon_client.infer(call.caller, what.request), is_final=True
                )
        except WeightdError as error:
            calls.log_call("ModelStreamInfer", call, started_at, to_request_error(error))
            return encode_stream_error(fast_parse(message).id, str(to_request_error(error)))
        calls.log_call("ModelStreamInfer", call, started_at)
        return encode_stream_response(answer)


def _as_received(message: bytes) -> bytes:
    return message


# --- responses -------------------------------------------------------------------------------------------------------


def encode_response(infer_request: InferRequest, result: InferenceResult, *, is_final: bool = False) -> bytes:
    """Return the bytes of the response; what is to be in shared memory is written there.

    Args:
        infer_request: what was asked.
        result: what was answered.
        is_final: whether it says that no other one follows.

    Raises:
        InvalidArgument: an output does not fit where it is to be.
    """
    request, targets = infer_request
    if targets:
        head, contents = _encode_placed(infer_request, result, is_final=is_final)
    else:
        shapes = tuple([(name, tensors.datatype_of(array), array.shape) for name, array in result.items()])
        head, contents = _encode_head(request.model, shapes, is_final=is_final), [*map(frame_of, result.values())]
    parts: list[bytes | memoryview] = [head]
    if request.id:
        request_id = request.id.encode()
        parts += (_ID_TAG, _encode_varint(len(request_id)), request_id)
    for content in contents:
        parts += (_RAW_OUTPUT_TAG, _encode_varint(len(content)), content)
    return _join(parts)


@functools.lru_cache(maxsize=256)
def _encode_head(model: str, shapes: tuple[tuple[str, str, tuple[int, ...]], ...], *, is_final: bool) -> bytes:
    """Return the bytes of a response but for its id and its contents: the same for many."""
    head = _new_response(model, is_final=is_final)
    for name, datatype, shape in shapes:
        head.outputs.add(name=name, datatype=datatype, shape=shape)
    content: bytes = head.SerializeToString()
    return content


def _encode_placed(
    infer_request: InferRequest, result: InferenceResult, *, is_final: bool
) -> tuple[bytes, list[memoryview]]:
    """Return the same, and the contents, where outputs are to be elsewhere."""
    head = _new_response(infer_request.request.model, is_final=is_final)
    contents: list[memoryview] = []
    for name, array in result.items():
        output = head.outputs.add(name=name, datatype=tensors.datatype_of(array), shape=array.shape)
        target = infer_request.targets.get(name)
        contents.append(frame_of(array) if target is None else _write_output(name, array, target, output))
    return head.SerializeToString(), contents


def _new_response(model: str, *, is_final: bool) -> Any:
    head = _Response(model_name=model, model_version=VERSION)
    if is_final:
        head.parameters[_FINAL_PARAMETER].bool_param = True
    return head


def _join(parts: Sequence[bytes | memoryview]) -> bytes:
    size = sum(map(len, parts))
    if size > _MAX_BYTES:
        raise TooLarge(f"the answer has {size} bytes, and a message of gRPC at most {_MAX_BYTES}")
    return b"".join(parts)


def encode_stream_response(response: bytes) -> bytes:
    """Return the bytes of a `ModelStreamInferResponse` with a response."""
    return b"".join((_INFER_RESPONSE_TAG, _encode_varint(len(response)), response))


def encode_stream_error(request_id: bytes, text: str) -> bytes:
    """Return the bytes of a `ModelStreamInferResponse` with the error of a request."""
    message = _Streamed(error_message=text)
    message.infer_response.id = request_id.decode(errors="replace")
    message.infer_response.parameters[_FINAL_PARAMETER].bool_param = True
    content: bytes = message.SerializeToString()
    return content


def _write_output(name: str, array: Array, target: OutputTarget, output: Any) -> memoryview:
    """Write an output where it is wanted, say so in what describes it, and return what is sent in its place."""
    region, shm_slice = target
    if array.nbytes > shm_slice.nbytes:
        raise InvalidArgument(f"output {label(name)}: {SIZE}: expected at least {array.nbytes}, got {shm_slice.nbytes}")
    shm_slice.region.write(shm_slice.offset, frame_of(array))
    output.parameters[REGION].string_param = region
    output.parameters[OFFSET].int64_param = shm_slice.offset
    output.parameters[SIZE].int64_param = array.nbytes
    # Contents are counted by clients as outputs are: it has one that is empty.
    return memoryview(b"")


def _encode_varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)
