"""What all protocols of a gateway share, and the interface of a protocol."""

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
    """What the fronts are made of.

    Attributes:
        config: as the file says.
        authenticator: who is who, now: a reload has others.
        daemon_client: the daemon.
        regions: memory that callers share.
        parsers: the processes that parse and render many values.
        sockets: on which a service manager listens for HTTP.
        handshakes: TLS handshakes under way.
    """

    config: GatewayConfig
    authenticator: Authenticator
    daemon_client: DaemonClient
    regions: RegisteredRegions
    parsers: ParserPool
    sockets: Sequence[socket.socket] = ()
    handshakes: Handshakes = field(default_factory=Handshakes)


class Frontend(Protocol):
    """One protocol, at all its addresses, on the one loop of the process."""

    async def start(self) -> Sequence[str]:
        """Listen; return where, for people.

        Raises:
            OSError: an address cannot be had; the text names it.
        """
        ...

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, and return when what is under way has been answered, or after so many seconds.

        It may not have been started, or only in part.
        """
