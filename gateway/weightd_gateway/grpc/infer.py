"""`ModelInfer` and `ModelStreamInfer`: run models and encode the responses, copying each output only once."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import grpc

from weightd_gateway import oip_view, tensors
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
from weightd_gateway.tensors import Array
from weightd_protocol.errors import InvalidArgument, WeightdError
from weightd_protocol.schema import label
from weightd_protocol.tensors import frame_of

_Response, _Streamed = INFERENCE["ModelInferResponse"], INFERENCE["ModelStreamInferResponse"]

# Protobuf tags of `ModelInferResponse.id` (field 3), `ModelInferResponse.raw_output_contents` (6) and
# `ModelStreamInferResponse.infer_response` (2). In the message, a length and the bytes follow each tag.
_ID_TAG = b"\x1a"
_RAW_OUTPUT_TAG = b"\x32"
_INFER_RESPONSE_TAG = b"\x12"

# Maximum bytes of a protobuf message.
_MAX_BYTES = 2**31 - 1

# Triton's parameter that marks the last response to a request. In weightd, every request has exactly one response.
_FINAL_PARAMETER = "triton_final_response"


class GrpcInference:
    """Runs inference requests.

    Args:
        daemon_client: the client of the daemon.
        shm_resolver: gives access to tensors in shared memory.
        streams: limits the number of `ModelStreamInfer` calls.
    """

    def __init__(self, daemon_client: DaemonClient, shm_resolver: ShmResolver, streams: WaitingCalls) -> None:
        self._daemon_client = daemon_client
        self._shm_resolver = shm_resolver
        self._streams = streams

    def handlers(self, calls: RpcHandlers) -> dict[str, Handler]:
        """Return the gRPC handler of each method, by the method's name."""

        async def stream(messages: object, context: Context) -> None:
            with calls.admit(context) as call:
                caller = call.caller
            with self._streams.admit(caller), calls.receiving(context):
                # The next message is read only after the response to this message has been written.
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
        """Return the response to one request of a stream. If the request fails, the response contains the error."""
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
    """Return the bytes of a response; write the outputs for which the request names a region to shared memory.

    Args:
        infer_request: the parsed request.
        result: the outputs.
        is_final: whether to mark the response as the last one.

    Raises:
        InvalidArgument: an output does not fit into its region.
    """
    request, targets = infer_request
    if targets:
        head, contents = _encode_placed(infer_request, result, is_final=is_final)
    else:
        shapes = tuple([(name, tensors.datatype_of(array), array.shape) for name, array in result.items()])
        answered = getattr(result, "model", request.model)
        head, contents = _encode_head(answered, shapes, is_final=is_final), [*map(frame_of, result.values())]
    parts: list[bytes | memoryview] = [head]
    if request.id:
        request_id = request.id.encode()
        parts += (_ID_TAG, _encode_varint(len(request_id)), request_id)
    for content in contents:
        parts += (_RAW_OUTPUT_TAG, _encode_varint(len(content)), content)
    return _join(parts)


@functools.lru_cache(maxsize=256)
def _encode_head(model: str, shapes: tuple[tuple[str, str, tuple[int, ...]], ...], *, is_final: bool) -> bytes:
    """Return the bytes of a response without id and contents. Many responses share these bytes, so they are cached."""
    head = _new_response(model, is_final=is_final)
    for name, datatype, shape in shapes:
        head.outputs.add(name=name, datatype=datatype, shape=shape)
    content: bytes = head.SerializeToString()
    return content


def _encode_placed(
    infer_request: InferRequest, result: InferenceResult, *, is_final: bool
) -> tuple[bytes, list[memoryview]]:
    """Write outputs to shared memory; return the bytes of the response without id and contents, and the contents."""
    head = _new_response(getattr(result, "model", infer_request.request.model), is_final=is_final)
    contents: list[memoryview] = []
    for name, array in result.items():
        output = head.outputs.add(name=name, datatype=tensors.datatype_of(array), shape=array.shape)
        target = infer_request.targets.get(name)
        contents.append(frame_of(array) if target is None else _write_output(name, array, target, output))
    return head.SerializeToString(), contents


def _new_response(model: str, *, is_final: bool) -> Any:
    head = _Response(model_name=oip_view.model_of(model), model_version=oip_view.version_of(model))
    if is_final:
        head.parameters[_FINAL_PARAMETER].bool_param = True
    return head


def _join(parts: Sequence[bytes | memoryview]) -> bytes:
    size = sum(map(len, parts))
    if size > _MAX_BYTES:
        raise TooLarge(f"expected a response of at most {_MAX_BYTES} bytes, the limit of gRPC messages, got {size}")
    return b"".join(parts)


def encode_stream_response(response: bytes) -> bytes:
    """Return the bytes of a `ModelStreamInferResponse` that contains a response."""
    return b"".join((_INFER_RESPONSE_TAG, _encode_varint(len(response)), response))


def encode_stream_error(request_id: bytes, text: str) -> bytes:
    """Return the bytes of a `ModelStreamInferResponse` that contains the error of a request."""
    message = _Streamed(error_message=text)
    message.infer_response.id = request_id.decode(errors="replace")
    message.infer_response.parameters[_FINAL_PARAMETER].bool_param = True
    content: bytes = message.SerializeToString()
    return content


def _write_output(name: str, array: Array, target: OutputTarget, output: Any) -> memoryview:
    """Write an output to shared memory and its location to the message `output`; return empty contents."""
    region, shm_slice = target
    if array.nbytes > shm_slice.nbytes:
        raise InvalidArgument(f"output {label(name)}: {SIZE}: expected at least {array.nbytes}, got {shm_slice.nbytes}")
    shm_slice.region.write(shm_slice.offset, frame_of(array))
    output.parameters[REGION].string_param = region
    output.parameters[OFFSET].int64_param = shm_slice.offset
    output.parameters[SIZE].int64_param = array.nbytes
    # Clients match the contents of a message to its outputs by position, so this output, whose bytes are in shared
    # memory, needs empty contents.
    return memoryview(b"")


def _encode_varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)
