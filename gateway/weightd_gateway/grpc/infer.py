"""`ModelInfer` and `ModelStreamInfer`: what a model is asked, and answers."""

from __future__ import annotations

import time

import grpc

from weightd_gateway.daemon_client import DaemonClient
from weightd_gateway.error_codes import to_request_error
from weightd_gateway.grpc.fast_parse import fast_parse
from weightd_gateway.grpc.handlers import Context, Handler, RpcContext, RpcHandlers, report_errors
from weightd_gateway.grpc.requests import ShmResolver, parse_infer_request
from weightd_gateway.grpc.responses import encode_response, encode_stream_error, encode_stream_response
from weightd_gateway.grpc.streams import WaitingCalls
from weightd_protocol.errors import WeightdError

NAME = "inference.GRPCInferenceService"


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
