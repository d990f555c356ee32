"""gRPC, at all its addresses."""

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

from weightd.gateway import listening
from weightd.gateway.admission import Admission
from weightd.gateway.config import places
from weightd.gateway.config.places import Place
from weightd.gateway.config.table import GatewayConfig
from weightd.gateway.gateway import Gateway
from weightd.gateway.listening import Accepting
from weightd.gateway.rpc import health, inference, reflection
from weightd.gateway.rpc.calls import MOST_PROBES, UNSENT_CALLS, Calls, Handler
from weightd.gateway.rpc.health import Health
from weightd.gateway.rpc.inference import Inference
from weightd.gateway.rpc.messages import HEALTH, INFERENCE, OLD_REFLECTION, REFLECTION
from weightd.gateway.rpc.methods import Methods
from weightd.gateway.rpc.reflection import Reflection
from weightd.gateway.rpc.relay import Relay
from weightd.gateway.rpc.requests import Memory
from weightd.gateway.rpc.streams import MOST_REFLECTING, MOST_STREAMS, MOST_WATCHING, Streams
from weightd.shared.peers import Peers

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
MOST_METADATA_BYTES = 16 * 1024

# Descriptors of one connection, beside those for everything else: the client's, and both ends to gRPC's library.
_DESCRIPTORS = 4

# gRPC's library has much to say of its peers, to stderr past every log, and to the log whenever one leaves while it is
# answered. What goes wrong in handlers is told by themselves.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
logging.getLogger("grpc").setLevel(logging.CRITICAL)


class RpcFront:
    """Speaks gRPC.

    Args:
        gateway: what it is made of.

    Attributes:
        relay: the connections, once it has started.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._streams = Streams()
        self._watching = Streams(MOST_WATCHING)
        self._reflecting = Streams(MOST_REFLECTING)
        self._peers = Peers()
        self._admission = Admission(_most_connections(gateway.config), gateway.config.max_connection_rate)
        self._server: grpc.aio.Server | None = None
        self._accepting: list[Accepting] = []
        self._paths: list[Path] = []

    async def start(self) -> Sequence[str]:
        """Listen; return where, for people.

        Raises:
            OSError: an address cannot be had; the text names it.
        """
        config = self._gateway.config
        most = config.max_in_flight + UNSENT_CALLS + MOST_STREAMS + MOST_OPEN + SPARE_CALLS
        # Others may not enter it: the relay is the only client of gRPC's library.
        self._directory = tempfile.TemporaryDirectory(prefix="weightd-grpc-")
        inner = Path(self._directory.name, "grpc")
        self.relay = Relay(inner, self._admission, config.receive_timeout, self._gateway.handshakes)
        self._server = grpc.aio.server(options=_options(config), maximum_concurrent_rpcs=most)
        for name, handlers in self._services().items():
            self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, handlers)])
        try:
            self._server.add_insecure_port(f"unix:{inner}")
        except RuntimeError:
            raise OSError(f"gRPC's library cannot listen at {inner}: expected a short path (TMPDIR)") from None
        tls = listening.tls(config)
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        listeners = [self._bound(place) for place in config.grpc_places]
        await self._server.start()
        told: list[str] = []
        for listener in listeners:
            used = None if listener.family == socket.AF_UNIX else tls
            admit = partial(self.relay.admit, tls=used)
            self._accepting.append(Accepting(listener, self._admission, self._peers, admit))
            told.append(f"{'grpcs' if used else 'grpc'} {places.of_socket(listener)}")
        return told

    async def stop(self, grace: float) -> None:
        """Take nothing new, and return when what is under way has been answered, or after so many seconds."""
        for accepting in self._accepting:
            accepting.close()
        for each in (self._streams, self._watching, self._reflecting):
            each.end()
        if self._server is None:
            return
        end = time.monotonic() + grace
        await self._server.stop(grace)
        # Answers may still be on their way to the clients.
        await self.relay.drain(max(0.0, end - time.monotonic()))
        self.relay.abort()
        self._peers.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._directory.cleanup()

    def _bound(self, place: Place) -> socket.socket:
        listener = listening.bound(place, "grpc")
        if place.path:
            self._paths.append(Path(place.path))
        return listener

    def _services(self) -> Mapping[str, dict[str, Handler]]:
        gateway, config = self._gateway, self._gateway.config
        service = gateway.service
        calls = Calls(
            lambda: gateway.identities,
            service.seats,
            config.max_body_bytes,
            config.receive_timeout,
            self.relay,
        )
        memory = Memory(gateway.regions, service.room, gateway.helpers)
        methods = Methods(service, gateway.regions, shared_memory=config.shared_memory)
        told = (INFERENCE, HEALTH, REFLECTION, OLD_REFLECTION)
        return {
            inference.NAME: {**methods.handlers(calls), **Inference(service, memory, self._streams).handlers(calls)},
            health.NAME: Health(service, ("", inference.NAME), self._watching).handlers(calls),
            reflection.NAME: Reflection(told, REFLECTION, self._reflecting).handlers(calls),
            reflection.OLD_NAME: Reflection(told, OLD_REFLECTION, self._reflecting).handlers(calls),
        }


def _most_connections(config: GatewayConfig) -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(config.max_connections, descriptors // _DESCRIPTORS))


def _options(config: GatewayConfig) -> list[tuple[str, Any]]:
    return [
        # Of a message, before and after it is decompressed: what is longer is refused by its announcement.
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MOST_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MOST_CALLS_OF_CONNECTION),
        ("grpc.max_connection_idle_ms", _ms(config.idle_timeout)),
        ("grpc.keepalive_time_ms", _ms(KEEPALIVE_S)),
        ("grpc.keepalive_timeout_ms", _ms(KEEPALIVE_TIMEOUT_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(LEAST_PING_S)),
    ]


def _ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))
