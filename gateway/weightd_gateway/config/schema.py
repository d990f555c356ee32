"""The tables of the gateway's configuration file as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weightd_common.toml_schema import derived, user_path
from weightd_gateway.config.addresses import ListenAddress
from weightd_protocol import limits
from weightd_protocol.schema import boolean, integer, list_of, number, text

# Maximum number of listen addresses of one protocol; the gateway opens one socket for each.
_MAX_ADDRESSES = 16

# Maximum bytes of a host name in DNS.
_MAX_HOST_BYTES = 253

_MAX_HOSTS = 256

_MAX_COUNT = 2**20

# Maximum of all timeouts: one hour. With longer timeouts the gateway could keep connections to peers that no longer
# exist.
_MAX_SECONDS = limits.MAX_TIMEOUT_US / 1e6

_ADDRESSES = list_of(text(limits.MAX_PATH_BYTES), _MAX_ADDRESSES)


@dataclass(frozen=True)
class GatewayConfig:
    """The table [gateway]."""

    daemon: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    """The daemon's address, as for `weightctl --socket`. Default: as for weightctl."""

    http: tuple[str, ...] = field(default=("127.0.0.1:8000",), metadata=_ADDRESSES)
    """Listen addresses of HTTP: each "HOST:PORT" or "unix:/ABSOLUTE/PATH". Sockets from the service manager replace
    them."""

    grpc: tuple[str, ...] = field(default=("127.0.0.1:8001",), metadata=_ADDRESSES)
    """Listen addresses of gRPC, in the same form."""

    tokens: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """Token file. Callers send tokens as `authorization: Bearer TOKEN`. Each line has the sha256 of a token, its
    tenant, or - for the gateway's own identity, and optionally a name for the log."""

    anonymous: str = field(default="", metadata=text(limits.MAX_NAME_BYTES, empty=True))
    """Tenant of callers without credentials, or "-" for the gateway's own identity. Default: the gateway rejects
    them."""

    insecure: bool = field(default=False, metadata=boolean())
    """Allow addresses that other hosts can reach without TLS or with `anonymous`. Without TLS, the network can read and
    change tokens and data; with `anonymous`, it can send requests."""

    tls_cert: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """File with the gateway's certificate chain in PEM; enables TLS for all HOST:PORT addresses."""

    tls_key: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """File with the certificate's key in PEM, without a passphrase."""

    client_ca: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """File with certificate authorities in PEM. Callers need a certificate of one of them. Default: callers need
    none."""

    hosts: tuple[str, ...] = field(
        default=("localhost", "127.0.0.1", "[::1]"), metadata=list_of(text(_MAX_HOST_BYTES), _MAX_HOSTS)
    )
    """Names of this host, without a port, that HTTP requests may contain in their Host header. Other names may come
    from a malicious web page in a browser. "*" allows any name."""

    max_body_bytes: int = field(default=64 * 1024 * 1024, metadata=integer(1024, limits.MAX_FRAME_BYTES))
    """Maximum bytes of a request after decompression."""

    max_in_flight: int = field(default=256, metadata=integer(1, _MAX_COUNT))
    """Maximum requests in progress, from receiving to answering; the gateway rejects further ones immediately. A tenant
    may have at most three times as many as remain free; the same applies to `max_memory_bytes`."""

    max_memory_bytes: int = field(default=1024 * 1024 * 1024, metadata=integer(1024, 2**62))
    """Maximum bytes of all requests in progress and of unread responses; at least twice `max_body_bytes`."""

    max_connections: int = field(default=4096, metadata=integer(1, _MAX_COUNT))
    """Maximum open connections of HTTP, and likewise of gRPC. A user of this host, or another host, may have at most
    three times as many as remain free; root and the gateway's own user have no limit."""

    max_connection_rate: float = field(default=256.0, metadata=number(1e6))
    """Maximum new connections per second and protocol of a user of this host, or of another host; after a pause, a
    burst of 4 seconds. Clients behind a proxy count as one. 0: no limit."""

    timeout: float = field(default=30.0, metadata=number(_MAX_SECONDS, positive=True))
    """Seconds after which a request without its own timeout fails."""

    receive_timeout: float = field(default=30.0, metadata=number(_MAX_SECONDS, positive=True))
    """Seconds within which the header of a request must arrive, and then its body."""

    idle_timeout: float = field(default=300.0, metadata=number(_MAX_SECONDS, positive=True))
    """Seconds after which an idle connection is closed."""

    drain_timeout: float = field(default=30.0, metadata=number(_MAX_SECONDS))
    """Seconds that requests in progress may take when the gateway stops."""

    shared_memory: bool = field(default=False, metadata=boolean())
    """Allow tensors in files in /dev/shm, as Triton's clients use them. Requires addresses local to this host. Callers
    can use every such file of the gateway's user, and no other."""

    model_control: bool = field(default=False, metadata=boolean())
    """Allow callers to load and unload models, as far as the daemon allows it: a tenant needs the right "load" or
    "operate". The gateway's own identity may load every model if the gateway runs as the daemon's user."""

    page: bool = field(default=True, metadata=boolean())
    """Serve the status page at /."""

    http_addresses: tuple[ListenAddress, ...] = field(default=(), metadata=derived(list_of(text(1), 0)))
    """The parsed addresses of `http`."""

    grpc_addresses: tuple[ListenAddress, ...] = field(default=(), metadata=derived(list_of(text(1), 0)))
    """The parsed addresses of `grpc`."""


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
