"""The tables of the gateway's configuration file as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weightd_common.toml_schema import derived, user_path
from weightd_gateway.config.addresses import ListenAddress
from weightd_protocol import limits
from weightd_protocol.schema import boolean, integer, list_of, number, text

# Maximum number of addresses of one protocol; each is a listening socket.
_MAX_ADDRESSES = 16

# Maximum length of a host name in DNS.
_MAX_HOST_BYTES = 253

_MAX_HOSTS = 256

_MAX_COUNT = 2**20

# One hour. A peer that may stay silent for longer could be gone without notice.
_MAX_SECONDS = limits.MAX_TIMEOUT_US / 1e6

_ADDRESSES = list_of(text(limits.MAX_PATH_BYTES), _MAX_ADDRESSES)


@dataclass(frozen=True)
class GatewayConfig:
    """The table [gateway]."""

    daemon: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    """Where the daemon is, as for `weightctl --socket`. Default: where weightctl looks."""

    http: tuple[str, ...] = field(default=("127.0.0.1:8000",), metadata=_ADDRESSES)
    """Where HTTP is spoken: each "HOST:PORT" or "unix:/ABSOLUTE/PATH". Sockets of a service manager take the place of
    these."""

    grpc: tuple[str, ...] = field(default=("127.0.0.1:8001",), metadata=_ADDRESSES)
    """Where gRPC is spoken, likewise. The kernel's word for who is at the other end of a unix socket is not known
    there."""

    tokens: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """The file with the tokens that callers send as `authorization: Bearer TOKEN`: on each line the sha256 of one, the
    tenant that it is for, or - for the gateway itself, and a name for the log if you like. SIGHUP has it read again."""

    anonymous: str = field(default="", metadata=text(limits.MAX_NAME_BYTES, empty=True))
    """The tenant that who proves nothing asks for, or "-" for the gateway itself. Default: nobody may ask so."""

    insecure: bool = field(default=False, metadata=boolean())
    """Needed for addresses that other hosts reach without TLS, or where `anonymous` is somebody: whoever reaches them
    may ask, or read tokens, and read and change what others say."""

    tls_cert: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """The file with the gateway's certificate, and those above it, in PEM: TLS is spoken at all HOST:PORT then."""

    tls_key: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """The file with its key in PEM, without a passphrase."""

    client_ca: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """The file with the authorities whose certificates callers have to have, in PEM. Default: callers need none."""

    hosts: tuple[str, ...] = field(
        default=("localhost", "127.0.0.1", "[::1]"), metadata=list_of(text(_MAX_HOST_BYTES), _MAX_HOSTS)
    )
    """The names, without a port, under which HTTP callers may know this host: what comes for another one is refused,
    for it may come from a page in somebody's browser. "*" is any."""

    max_body_bytes: int = field(default=64 * 1024 * 1024, metadata=integer(1024, limits.MAX_FRAME_BYTES))
    """Bytes of a request, once it is decompressed."""

    max_in_flight: int = field(default=256, metadata=integer(1, _MAX_COUNT))
    """Requests that are received or answered at once. Whoever comes beyond that is told so at once. A tenant has
    at most three times as many as it leaves to others, of these as of the bytes below: three quarters, if it is alone.
    """

    max_memory_bytes: int = field(default=1024 * 1024 * 1024, metadata=integer(1024, 2**62))
    """Bytes of all requests that are received or answered at once, likewise, and of answers that callers have not read;
    at least twice `max_body_bytes`."""

    max_connections: int = field(default=4096, metadata=integer(1, _MAX_COUNT))
    """Connections of HTTP, and of gRPC, at once. A user of this host, or another host, may have at most three times as
    many as it leaves to others; root and the gateway's own user have no such limit."""

    max_connection_rate: float = field(default=256.0, metadata=number(1e6))
    """New connections a second of one user of this host, or of another host, with each protocol; after a pause those
    of 4 seconds at once. Clients behind a proxy are one peer. 0: no limit."""

    timeout: float = field(default=30.0, metadata=number(_MAX_SECONDS, positive=True))
    """Seconds that a request takes at most which says nothing of that itself."""

    receive_timeout: float = field(default=30.0, metadata=number(_MAX_SECONDS, positive=True))
    """Seconds in which the header of a request has to come, and then its body."""

    idle_timeout: float = field(default=300.0, metadata=number(_MAX_SECONDS, positive=True))
    """Seconds that a caller may be connected and ask nothing."""

    drain_timeout: float = field(default=30.0, metadata=number(_MAX_SECONDS))
    """Seconds that requests may take that are under way when the gateway is asked to stop."""

    shared_memory: bool = field(default=False, metadata=boolean())
    """Whether callers may have tensors in files of /dev/shm, as Triton's clients do it; only where all addresses are on
    this host. Whoever may ask can name any such file of the user that the gateway runs as, and no other."""

    page: bool = field(default=True, metadata=boolean())
    """Whether there is a page at / that shows what goes on."""

    http_addresses: tuple[ListenAddress, ...] = field(default=(), metadata=derived(list_of(text(1), 0)))
    """What `http` says."""

    grpc_addresses: tuple[ListenAddress, ...] = field(default=(), metadata=derived(list_of(text(1), 0)))
    """What `grpc` says."""


@dataclass(frozen=True)
class GatewayFile:
    """The whole configuration file.

    Attributes:
        gateway: the table [gateway].
        certificates: the table [certificates]: a tenant, or "-" for the gateway's own identity, by the common name of a
            client certificate.
        users: the table [users]: a tenant, or "-", by the uid of a user of this host.
    """

    gateway: GatewayConfig
    certificates: Mapping[str, str]
    users: Mapping[int, str]
