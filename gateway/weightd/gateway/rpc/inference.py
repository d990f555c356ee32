"""`ModelInfer` and `ModelStreamInfer`: what a model is asked, and answers."""

from __future__ import annotations

import time

import grpc

from weightd.gateway.codes import told
from weightd.gateway.rpc.calls import Call, Calls, Context, Handler, guarded
from weightd.gateway.rpc.cutting import cut
from weightd.gateway.rpc.requests import Memory, asked
from weightd.gateway.rpc.responses import response, streamed, streamed_error
from weightd.gateway.rpc.streams import Streams
from weightd.gateway.service import Service
from weightd.protocol.errors import WeightdError

NAME = "inference.GRPCInferenceService"


class Inference:
    """Has models run.

    Args:
        service: the daemon.
        memory: where tensors may be that are not in messages.
        streams: calls with many requests are among them.
    """

    def __init__(self, service: Service, memory: Memory, streams: Streams) -> None:
        self._service = service
        self._memory = memory
        self._streams = streams

    def handlers(self, calls: Calls) -> dict[str, Handler]:
        """Return what gRPC wants for each method."""

        async def stream(messages: object, context: Context) -> None:
            with calls.seated(context) as call:
                caller = call.caller
            with self._streams.one(caller), calls.receiving(context):
                # What is sent ahead waits where it is: at most one message has been read.
                while (message := await self._streams.wait(context.read)) is not grpc.aio.EOF:
                    call = call._replace(left=context.time_remaining())
                    answer = await self._of_stream(calls, call, message)
                    sent = calls.seats.keep(caller, len(answer))
                    try:
                        await context.write(answer)
                    finally:
                        sent.leave()

        return {
            "ModelInfer": calls.single("ModelInfer", _whole, self._single, most=calls.most_bytes),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(guarded(stream)),
        }

    async def _single(self, call: Call, message: bytes) -> bytes:
        what = await asked(message, call, self._memory)
        return response(what, await self._service.infer(call.caller, what.question))

    async def _of_stream(self, calls: Calls, call: Call, message: bytes) -> bytes:
        """Return the answer to one request of a stream, which goes on if that is an error."""
        begun = time.monotonic()
        try:
            with calls.seats.one(call.caller) as seat:
                seat.take(len(message))
                what = await asked(message, call._replace(seat=seat), self._memory)
                answer = response(what, await self._service.infer(call.caller, what.question), final=True)
        except WeightdError as error:
            calls.note("ModelStreamInfer", call, begun, told(error))
            return streamed_error(cut(message).id, str(told(error)))
        calls.note("ModelStreamInfer", call, begun)
        return streamed(answer)


def _whole(message: bytes) -> bytes:
    return message
