"""The gRPC frontend: its listening sockets and services, from start to stop."""

from __future__ import annotations

import logging
import os
import resource
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from weightd_common.peers import Peers
from weightd_gateway import listening
from weightd_gateway.config import addresses
from weightd_gateway.config.addresses import ListenAddress
from weightd_gateway.config.schema import GatewayConfig
from weightd_gateway.connection_limiter import GatewayConnectionLimiter
from weightd_gateway.context import Gateway
from weightd_gateway.grpc.handlers import MAX_PROBES, MAX_UNSENT_CALLS, Handler, RpcHandlers
from weightd_gateway.grpc.http2_filter import Http2Filter
from weightd_gateway.grpc.infer import GrpcInference
from weightd_gateway.grpc.model_api import ModelApi
from weightd_gateway.grpc.public_services import Health, Reflection
from weightd_gateway.grpc.requests import ShmResolver
from weightd_gateway.grpc.schema import (
    HEALTH_SERVICE,
    INFERENCE_SERVICE,
    REFLECTION_SERVICE,
    REFLECTION_V1ALPHA_SERVICE,
)
from weightd_gateway.grpc.streams import MAX_REFLECTION_STREAMS, MAX_STREAMS, MAX_WATCH_STREAMS, WaitingCalls
from weightd_gateway.listening import GatewayAcceptor

# Maximum number of unauthenticated calls of all kinds.
MAX_UNAUTHENTICATED = MAX_PROBES + MAX_WATCH_STREAMS + MAX_REFLECTION_STREAMS

# Number of calls that gRPC's library accepts beyond the sum of all limits. The handlers reject these calls with an
# error that names the exceeded limit.
SPARE_CALLS = 256

# Maximum number of concurrent calls of one connection. HTTP/2 recommends at least 100.
MAX_CALLS_PER_CONNECTION = 256

# Seconds between two keepalive pings of gRPC's library, and seconds after which it disconnects a client that has not
# replied.
KEEPALIVE_S = 60
KEEPALIVE_TIMEOUT_S = 20

# Minimum seconds between two pings of a client. gRPC's library disconnects clients that ping more often; some clients
# ping every six seconds.
MIN_PING_INTERVAL_S = 5

# Limits of a call's metadata in bytes: a token, a trace context, and additions of client libraries. gRPC's library
# rejects more than `MAX_METADATA_BYTES` always, and more than `_METADATA_BYTES` with a probability that grows with the
# size.
_METADATA_BYTES = 8 * 1024
MAX_METADATA_BYTES = 16 * 1024

# Number of file descriptors for each connection: the client's socket, both ends of the socket between relay and gRPC's
# library, and one in reserve.
_FDS_PER_CONNECTION = 4

# Silence gRPC's library, which writes messages about its peers to stderr, and logs an error whenever a client
# disconnects during a call. The handlers log their own errors.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
logging.getLogger("grpc").setLevel(logging.CRITICAL)


class GrpcServer:
    """The gRPC frontend.

    Args:
        gateway: the state that all frontends share.

    Attributes:
        http2_filter: the relay between clients and gRPC's library; set by `start`.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._streams = WaitingCalls()
        self._watch_streams = WaitingCalls(MAX_WATCH_STREAMS)
        self._reflection_streams = WaitingCalls(MAX_REFLECTION_STREAMS)
        self._peers = Peers()
        self._admission = GatewayConnectionLimiter(_max_connections(gateway.config), gateway.config.max_connection_rate)
        self._server: grpc.aio.Server | None = None
        self._acceptors: list[GatewayAcceptor] = []
        self._paths: list[Path] = []

    async def start(self) -> Sequence[str]:
        """Start listening and return the addresses for the log.

        Raises:
            OSError: an address cannot be bound; the text names it.
        """
        config = self._gateway.config
        max_calls = config.max_in_flight + MAX_UNSENT_CALLS + MAX_STREAMS + MAX_UNAUTHENTICATED + SPARE_CALLS
        # Only the gateway's user has access to the directory, so the relay is the only client of gRPC's library.
        self._directory = tempfile.TemporaryDirectory(prefix="weightd-grpc-")
        inner = Path(self._directory.name, "grpc")
        self.http2_filter = Http2Filter(inner, self._admission, config.receive_timeout, self._gateway.handshakes)
        self._server = grpc.aio.server(options=_options(config), maximum_concurrent_rpcs=max_calls)
        for name, handlers in self._services().items():
            self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, handlers)])
        try:
            self._server.add_insecure_port(f"unix:{inner}")
        except RuntimeError:
            raise OSError(f"the gRPC library cannot listen at {inner}; set TMPDIR to a shorter path") from None
        tls = listening.tls_context(config)
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        listeners = [self._bind(address) for address in config.grpc_addresses]
        await self._server.start()
        urls: list[str] = []
        for listener in listeners:
            used = None if listener.family == socket.AF_UNIX else tls
            admit = partial(self.http2_filter.on_connection, tls=used)
            self._acceptors.append(GatewayAcceptor(listener, self._admission, self._peers, admit))
            urls.append(f"{'grpcs' if used else 'grpc'} {addresses.address_of(listener)}")
        return urls

    async def stop(self, grace_s: float) -> None:
        """Stop accepting calls; return when the calls in flight have ended, or after `grace_s` seconds."""
        for accepting in self._acceptors:
            accepting.close()
        for each in (self._streams, self._watch_streams, self._reflection_streams):
            each.stop()
        if self._server is None:
            return
        end = time.monotonic() + grace_s
        await self._server.stop(grace_s)
        # Wait for the relay, which may still have to send responses to the clients.
        await self.http2_filter.drain(max(0.0, end - time.monotonic()))
        self.http2_filter.abort()
        self._peers.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._directory.cleanup()

    def _bind(self, address: ListenAddress) -> socket.socket:
        listener = listening.bind(address, "grpc")
        if address.path:
            self._paths.append(Path(address.path))
        return listener

    def _services(self) -> Mapping[str, dict[str, Handler]]:
        gateway, config = self._gateway, self._gateway.config
        daemon_client = gateway.daemon_client
        calls = RpcHandlers(
            lambda: gateway.authenticator,
            daemon_client.admission,
            config.max_body_bytes,
            config.receive_timeout,
            self.http2_filter,
        )
        shm_resolver = ShmResolver(gateway.regions, daemon_client.allocate, gateway.parsers)
        methods = ModelApi(
            daemon_client,
            gateway.regions,
            has_shared_memory=config.shared_memory,
            has_model_control=config.model_control,
        )
        reflection = Reflection(self._reflection_streams).handlers(calls)
        return {
            INFERENCE_SERVICE: {
                **methods.handlers(calls),
                **GrpcInference(daemon_client, shm_resolver, self._streams).handlers(calls),
            },
            HEALTH_SERVICE: Health(daemon_client, ("", INFERENCE_SERVICE), self._watch_streams).handlers(calls),
            REFLECTION_SERVICE: reflection,
            REFLECTION_V1ALPHA_SERVICE: reflection,
        }


def _max_connections(config: GatewayConfig) -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(config.max_connections, descriptors // _FDS_PER_CONNECTION))


def _options(config: GatewayConfig) -> list[tuple[str, Any]]:
    return [
        # The limit applies to a message before and after decompression. The library rejects a longer message as soon as
        # it has received the length prefix.
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
        ("grpc.max_connection_idle_ms", _ms(config.idle_timeout)),
        ("grpc.keepalive_time_ms", _ms(KEEPALIVE_S)),
        ("grpc.keepalive_timeout_ms", _ms(KEEPALIVE_TIMEOUT_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(MIN_PING_INTERVAL_S)),
    ]


def _ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))
