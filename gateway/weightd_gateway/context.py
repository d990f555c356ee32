"""What all protocols of a gateway share."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

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
