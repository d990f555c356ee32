"""The health protocol of gRPC, for probes: whoever reaches the port may ask, and hears yes or no."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import grpc

from weightd_gateway.daemon_client import DaemonClient
from weightd_gateway.grpc.field_limits import checked_parser
from weightd_gateway.grpc.handlers import PROBE_CALLER, Context, Handler, RpcContext, RpcHandlers, report_errors
from weightd_gateway.grpc.messages import HEALTH
from weightd_gateway.grpc.streams import WaitingCalls
from weightd_protocol.errors import NotFound, RequestError

NAME = "grpc.health.v1.Health"

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3

# How old an answer may be, and how often those who watch look: what strangers ask costs the daemon no more than this.
CACHE_TTL_S = 1.0

_Response = HEALTH["HealthCheckResponse"]
_parse = checked_parser(HEALTH["HealthCheckRequest"])


class Health:
    """Tells whether all models are ready.

    Args:
        daemon_client: the daemon.
        names: of the services whose health that is; "" is the whole server.
        streams: those who watch are among them.
        clock: of seconds.
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
        """Return what gRPC wants for each method."""

        async def watch(messages: object, context: Context) -> None:
            with self._streams.admit(calls.anonymous_caller(context)):
                await self._watch((await calls.receive_probe(context, _parse)).service, context)

        return {
            "Check": calls.unary_handler("Check", _parse, self._check, is_unauthenticated=True),
            "Watch": grpc.stream_stream_rpc_method_handler(report_errors(watch)),
        }

    async def status(self, service: str) -> int:
        """Return the status of a service, as it was a second ago at most."""
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
