"""The objects that all frontends share, and the interface of a frontend."""

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
    """The shared state of all frontends.

    Attributes:
        config: the gateway's section of the configuration file.
        authenticator: the identities in force; a reload replaces it.
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
    """The server of one protocol at all its addresses. All frontends share the event loop of the process."""

    async def start(self) -> Sequence[str]:
        """Start listening and return the addresses for the log.

        Raises:
            OSError: an address cannot be bound; the text names it.
        """
        ...

    async def stop(self, grace_s: float) -> None:
        """Stop accepting requests; return when those in flight have ended, or after `grace_s` seconds.

        May be called before `start`, or after `start` has failed half-way.
        """
