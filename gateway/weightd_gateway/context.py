"""Objects that the HTTP and gRPC servers share, and the interface of these servers (frontends)."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weightd_gateway.auth import Authenticator
from weightd_gateway.config.schema import GatewayConfig
from weightd_gateway.daemon_client import DaemonClient
from weightd_gateway.parser_process import ParserPool
from weightd_gateway.system_shared_memory import RegisteredRegions
from weightd_gateway.tls_handshakes import Handshakes


@dataclass
class Gateway:
    """The state that all frontends share.

    Attributes:
        config: the table [gateway] of the configuration file.
        authenticator: finds the caller of a request; a reload of the configuration replaces the authenticator.
        daemon_client: the client of the daemon.
        regions: the shared-memory regions that callers have registered.
        parsers: the child processes that parse and render large requests and responses.
        sockets: the HTTP listening sockets that the service manager passed to this process.
        handshakes: the TLS handshakes in progress.
    """

    config: GatewayConfig
    authenticator: Authenticator
    daemon_client: DaemonClient
    regions: RegisteredRegions
    parsers: ParserPool
    sockets: Sequence[socket.socket] = ()
    handshakes: Handshakes = field(default_factory=Handshakes)


class Frontend(Protocol):
    """A server for one protocol, HTTP or gRPC, on all its addresses. All frontends run in one event loop."""

    async def start(self) -> Sequence[str]:
        """Start listening and return the addresses for the log.

        Raises:
            OSError: an address cannot be bound; the text names it.
        """
        ...

    async def stop(self, grace_s: float) -> None:
        """Stop accepting requests; return when the requests in flight have ended, or after `grace_s` seconds.

        This method may also be called before `start`, or after `start` has failed half-way.
        """
