"""gRPC, at all its addresses."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from weightd.gateway.config.places import Place
from weightd.gateway.config.table import GatewayConfig
from weightd.gateway.gateway import Gateway
from weightd.gateway.rpc import health, inference, reflection
from weightd.gateway.rpc.calls import MOST_PROBES, UNSENT_CALLS, Calls, Handler
from weightd.gateway.rpc.health import Health
from weightd.gateway.rpc.inference import Inference
from weightd.gateway.rpc.messages import HEALTH, INFERENCE, OLD_REFLECTION, REFLECTION
from weightd.gateway.rpc.methods import Methods
from weightd.gateway.rpc.reflection import Reflection
from weightd.gateway.rpc.requests import Memory
from weightd.gateway.rpc.streams import MOST_REFLECTING, MOST_STREAMS, MOST_WATCHING, Streams
from weightd.shared.regular import read_regular

# Calls of whoever asks.
MOST_OPEN = MOST_PROBES + MOST_WATCHING + MOST_REFLECTING

# Calls beyond those, and those that have a place, or are streams: such as are told that there is none.
SPARE_CALLS = 256

# Of one connection. HTTP/2 asks for no fewer than 100.
MOST_CALLS_OF_CONNECTION = 256

# A client that is stopped, or behind a net that is gone, answers no ping: after both it is hung up.
KEEPALIVE_S = 60
KEEPALIVE_TIMEOUT_S = 20

# Clients that ping more often are hung up: the tenth of a minute is what cautious ones are set to.
LEAST_PING_S = 5

# A token, a context of a trace, and what libraries add; what is longer than the first is refused more and more often.
_METADATA_BYTES = 8 * 1024

# Of a file of keys or certificates: hundreds of them.
_MAX_PEM_BYTES = 1024 * 1024
MOST_METADATA_BYTES = 16 * 1024

# Of a socket in a directory that others may enter: its owner and group may connect.
_MODE = 0o660

# gRPC's library has much to say of its peers, to stderr past every log, and to the log whenever one leaves while it is
# answered. What goes wrong in handlers is told by themselves.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
logging.getLogger("grpc").setLevel(logging.CRITICAL)


class RpcFront:
    """Speaks gRPC.

    Args:
        gateway: what it is made of.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._streams = Streams()
        self._watching = Streams(MOST_WATCHING)
        self._reflecting = Streams(MOST_REFLECTING)

    async def start(self) -> Sequence[str]:
        """Listen; return where, for people.

        Raises:
            OSError: an address cannot be had; the text names it.
        """
        config = self._gateway.config
        most = config.max_in_flight + UNSENT_CALLS + MOST_STREAMS + MOST_OPEN + SPARE_CALLS
        self._server = grpc.aio.server(options=_options(config), maximum_concurrent_rpcs=most)
        for name, handlers in self._services().items():
            self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, handlers)])
        credentials = _credentials(config)
        told = [self._listen(each, credentials) for each in config.grpc_places]
        await self._server.start()
        for place in config.grpc_places:
            if place.path:
                Path(place.path).chmod(_MODE)
        return told

    async def stop(self, grace: float) -> None:
        """Take nothing new, and return when what is under way has been answered, or after so many seconds."""
        for each in (self._streams, self._watching, self._reflecting):
            each.end()
        await self._server.stop(grace)

    def _services(self) -> Mapping[str, dict[str, Handler]]:
        gateway, config = self._gateway, self._gateway.config
        service = gateway.service
        calls = Calls(
            lambda: gateway.identities,
            service.seats,
            config.max_body_bytes,
            config.receive_timeout,
            certificates=bool(config.client_ca),
            peers=config.shared_memory,
        )
        memory = Memory(gateway.regions, service.room)
        methods = Methods(service, gateway.regions, shared_memory=config.shared_memory)
        told = (INFERENCE, HEALTH, REFLECTION, OLD_REFLECTION)
        return {
            inference.NAME: {**methods.handlers(calls), **Inference(service, memory, self._streams).handlers(calls)},
            health.NAME: Health(service, ("", inference.NAME), self._watching).handlers(calls),
            reflection.NAME: Reflection(told, REFLECTION, self._reflecting).handlers(),
            reflection.OLD_NAME: Reflection(told, OLD_REFLECTION, self._reflecting).handlers(),
        }

    def _listen(self, place: Place, credentials: grpc.ServerCredentials | None) -> str:
        """Listen at one address; return where that is.

        Raises:
            OSError: it cannot be had.
        """
        if _is_taken(place):
            raise OSError(errno.EADDRINUSE, f"{place}: somebody listens there")
        try:
            if credentials is None or place.path:
                port = self._server.add_insecure_port(str(place))
                return f"grpc {place if place.path else place._replace(port=port)}"
            port = self._server.add_secure_port(str(place), credentials)
            return f"grpcs {place._replace(port=port)}"
        except RuntimeError:
            raise OSError(f"cannot listen for gRPC at {place}: it is taken, or there is no such address") from None


def _is_taken(place: Place) -> bool:
    """Return whether somebody listens at a unix socket: gRPC would take that one's place."""
    if not place.path:
        return False
    with socket.socket(socket.AF_UNIX) as seeker:
        seeker.setblocking(False)
        return seeker.connect_ex(place.path) in (0, errno.EAGAIN)


def _options(config: GatewayConfig) -> list[tuple[str, Any]]:
    return [
        # Of a message, before and after it is decompressed: what is longer is refused by its announcement.
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MOST_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MOST_CALLS_OF_CONNECTION),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.server_handshake_timeout_ms", _ms(config.receive_timeout)),
        ("grpc.max_connection_idle_ms", _ms(config.idle_timeout)),
        ("grpc.keepalive_time_ms", _ms(KEEPALIVE_S)),
        ("grpc.keepalive_timeout_ms", _ms(KEEPALIVE_TIMEOUT_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(LEAST_PING_S)),
        # Two gateways at one address would have half of the calls each, and nobody would know.
        ("grpc.so_reuseport", 0),
    ]


def _ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))


def _credentials(config: GatewayConfig) -> grpc.ServerCredentials | None:
    """Return what TLS needs; None where it is not spoken.

    Raises:
        OSError: a file cannot be read.
    """
    if not config.tls_cert:
        return None
    key, certificate = (read_regular(path, _MAX_PEM_BYTES) for path in (config.tls_key, config.tls_cert))
    authorities = read_regular(config.client_ca, _MAX_PEM_BYTES) if config.client_ca else None
    return grpc.ssl_server_credentials([(key, certificate)], authorities, require_client_auth=authorities is not None)
