"""gRPC services without authentication: health checks for probes, and reflection for tools.

Every client that can connect may call these services. They reveal only whether all models are ready, and the names of
the methods, which docs/gateway.md describes. The package grpcio-health-checking is not used: when one watcher of a
service disconnects, the asyncio servicer of this package drops all watchers of the service. The package also limits
neither the fields of a message nor the number of watchers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection
from functools import partial
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from weightd_gateway.daemon_client import DaemonClient
from weightd_gateway.grpc.handlers import (
    PROBE_CALLER,
    Context,
    Handler,
    RpcContext,
    RpcHandlers,
    check_length,
    parse_message,
    receive_deadline,
    report_errors,
)
from weightd_gateway.grpc.schema import (
    HEALTH,
    HEALTH_SERVICE,
    INFERENCE_SERVICE,
    POOL,
    REFLECTION_SERVICE,
    REFLECTION_V1ALPHA_SERVICE,
)
from weightd_gateway.grpc.streams import WaitingCalls
from weightd_gateway.grpc.wire_format import checked_parser
from weightd_protocol.errors import NotFound, RequestError

# Seconds without a request after which a reflection stream is closed, so that other clients can open one.
REFLECTION_TIMEOUT_S = 10.0

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3

# Seconds for which a health status is cached, and between two checks of a watch. So health checks, which need no
# authentication, cause little load on the daemon.
CACHE_TTL_S = 1.0

_Response = HEALTH["HealthCheckResponse"]
_parse_health = checked_parser(HEALTH["HealthCheckRequest"])
_parse_reflection = checked_parser(reflection_pb2.ServerReflectionRequest)


class Health:
    """Reports whether all models are ready.

    Args:
        daemon_client: the client of the daemon.
        names: the names of the services whose status reports whether all models are ready; "" is the name of the whole
            server.
        streams: limits the number of watches.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        daemon_client: DaemonClient,
        names: Collection[str],
        streams: WaitingCalls,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._daemon_client = daemon_client
        self._names = names
        self._streams = streams
        self._clock = clock
        self._lock = asyncio.Lock()
        self._cached_status = NOT_SERVING
        self._fetched_at = float("-inf")

    def handlers(self, calls: RpcHandlers) -> dict[str, Handler]:
        """Return the gRPC handler of each method, by the method's name."""

        async def watch(messages: object, context: Context) -> None:
            with self._streams.admit(calls.anonymous_caller(context)):
                await self._watch((await calls.receive_probe(context, _parse_health)).service, context)

        return {
            "Check": calls.unary_handler("Check", _parse_health, self._check, is_unauthenticated=True),
            "Watch": grpc.stream_stream_rpc_method_handler(report_errors(watch)),
        }

    async def status(self, service: str) -> int:
        """Return the status of a service, at most one second old."""
        if service not in self._names:
            return SERVICE_UNKNOWN
        async with self._lock:
            if self._clock() - self._fetched_at >= CACHE_TTL_S:
                try:
                    self._cached_status = (
                        SERVING if (await self._daemon_client.ready(PROBE_CALLER)).ready else NOT_SERVING
                    )
                except RequestError:
                    self._cached_status = NOT_SERVING
                self._fetched_at = self._clock()
            return self._cached_status

    async def _check(self, call: RpcContext, request: Any) -> bytes:
        status = await self.status(request.service)
        if status == SERVICE_UNKNOWN:
            raise NotFound(f"expected one of {sorted(self._names)}")
        return _response(status)

    async def _watch(self, service: str, context: Context) -> None:
        last_sent = None
        while True:
            status = await self.status(service)
            if status != last_sent:
                await context.write(_response(status))
                last_sent = status
            await self._streams.wait(partial(asyncio.sleep, CACHE_TTL_S))


def _response(status: int) -> bytes:
    content: bytes = _Response(status=status).SerializeToString()
    return content


class _MethodPool:
    """A descriptor pool that also finds the file of a method. Protobuf's own pool finds only the file of a service."""

    def FindFileContainingSymbol(self, name: str) -> Any:  # noqa: N802 - protobuf's name
        """Return the file that describes a symbol; raise `KeyError` if there is no such symbol."""
        try:
            return POOL.FindFileContainingSymbol(name)
        except KeyError:
            return POOL.FindMethodByName(name).containing_service.file

    def __getattr__(self, name: str) -> Any:
        return getattr(POOL, name)


class Reflection:
    """The reflection service, which lists services and messages for `grpcurl` and similar tools.

    The package grpcio-reflection creates the responses. This class adds limits that the package lacks: the number of
    streams, the time between two requests, and the fields of a request. The package implements only v1alpha of the
    protocol; its responses are valid for v1, too, because the messages have the same encoding.

    Args:
        streams: limits the number of reflection streams.
    """

    def __init__(self, streams: WaitingCalls) -> None:
        self._answers: Any = reflection.aio.ReflectionServicer(
            (INFERENCE_SERVICE, HEALTH_SERVICE, REFLECTION_SERVICE, REFLECTION_V1ALPHA_SERVICE), _MethodPool()
        )
        self._streams = streams

    def handlers(self, calls: RpcHandlers) -> dict[str, Handler]:
        """Return the gRPC handler of each method, by the method's name."""

        async def info(messages: object, context: Context) -> None:
            with self._streams.admit(calls.anonymous_caller(context)):
                async for answer in self._answers.ServerReflectionInfo(self._receive_requests(context), context):
                    answer.valid_host = answer.original_request.host
                    await context.write(answer.SerializeToString())

        return {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(report_errors(info))}

    async def _receive_requests(self, context: Context) -> AsyncGenerator[Any, None]:
        while True:
            with receive_deadline(REFLECTION_TIMEOUT_S):
                message: Any = await self._streams.wait(context.read)
            if message is grpc.aio.EOF:
                return
            check_length(message)
            yield parse_message(message, _parse_reflection)
