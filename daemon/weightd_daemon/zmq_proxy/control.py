"""What daemon, zygote and proxies say to each other: messages of JSON, over `Stream`.

daemon to zygote   ProxyConfig.to_frames, with the proxy's end of its link and its listening socket: make a proxy
zygote to daemon   ProxyEvent: a proxy's pid, and once it has ended how
daemon to proxy     the keys of CURVE that are let in from now on, and who belongs to which tenant
proxy to daemon     PeerConnected, with the end of a pair of sockets: somebody new, who speaks over that;
how many are left, once somebody has gone; Said, for the log
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from weightd_common.stream import Stream
from weightd_daemon.platform.tenant_lookup import TenantCredentials
from weightd_protocol.framing import FrameReader
from weightd_protocol.limits import MAX_FRAME_BYTES

# As in `logging`, which a proxy does not import.
DEBUG, WARNING, ERROR = 10, 30, 40

LogFunction = Callable[[int, str], object]
"""Writes a line, with its level."""


class ProxyConfig(NamedTuple):
    """What a proxy has to know.

    Attributes:
        name: of its listener.
        address: of the listening socket that it is given, as ZeroMQ writes it.
        max_frame_bytes: who announces a larger frame is hung up.
        max_memory_bytes: that it may take for what its peers send and do not read.
        max_connections: clients that may be there; 0 for as many as there are descriptors for.
        max_user_connections: connections that one user or host may have; 0 for no limit.
        max_user_connection_rate: new ones a second, likewise.
        secret_key: its key of CURVE in Z85; "" where clients speak without.
        allowed_keys: those of clients that are let in, with CURVE; None for any.
        tenant_members: who belongs to which tenant, see `TenantCredentials`; None where there are no tables.
        error_prefix: the beginning of the message to a client that breaks the protocol, see `error_frame`.
    """

    name: str
    address: str
    max_frame_bytes: int
    max_memory_bytes: int
    max_connections: int
    max_user_connections: int
    max_user_connection_rate: float
    secret_key: str
    allowed_keys: Sequence[str] | None
    tenant_members: Sequence[TenantCredentials] | None
    error_prefix: bytes

    def to_frames(self, number: int) -> list[bytes]:
        """Return the message by which the zygote is asked for the proxy of this number."""
        return [json.dumps([number, *self[:-1]]).encode(), self.error_prefix]

    def __repr__(self) -> str:
        """Return what may be shown: no secret."""
        return f"Terms({self.name!r}, {self.address!r})"


class PeerIdentity(NamedTuple):
    """Who a peer is, as the kernel knows it: over a unix socket user, groups and process, over TCP the user or host.

    Attributes:
        uid: None over TCP.
        pid: None there, too; 0 in another pid namespace.
        user: the key of the user or host by which limits hold, see `Peer`.
        gids: its groups, its own first; none over TCP.
        public_key: the public key that it has proven to have, in Z85; "" where it was not asked.
    """

    uid: int | None
    pid: int | None
    user: str
    gids: tuple[int, ...] = ()
    public_key: str = ""


class PeerConnected(NamedTuple):
    """Somebody has spoken for the first time; so many peers are there now."""

    peer_count: int
    identity: PeerIdentity


class ProxyLogLine(NamedTuple):
    """A line for the log."""

    level: int
    text: str


class ProxyEvent(NamedTuple):
    """What the zygote says of a proxy.

    Attributes:
        number: as it was asked for.
        pid: of the process; 0 where there is none, since it could not be made.
        status: None while it lives, then its exit status, negative for a signal; without a process the error number.
    """

    number: int
    pid: int
    status: int | None

    def to_frame(self) -> bytes:
        """Return it as it is sent."""
        return json.dumps(self).encode()


def new_control_stream(connection: socket.socket, *, accepts_descriptors: bool = False) -> Stream:
    """Return the end of a link that the daemon's messages come to: each has all keys and tenants, however many."""
    return Stream(connection, FrameReader(max_header_bytes=MAX_FRAME_BYTES), accepts_descriptors=accepts_descriptors)


def parse_fork_request(frames: Sequence[Any]) -> tuple[int, ProxyConfig]:
    """Return what `ProxyConfig.to_frames` has written."""
    number, *fields, tenants = json.loads(frames[0])
    values: list[Any] = [*fields, _parse_members(tenants), bytes(frames[1])]
    return number, ProxyConfig(*values)


def _parse_members(rows: Sequence[Any] | None) -> list[TenantCredentials] | None:
    return None if rows is None else [TenantCredentials(*each) for each in rows]


def error_prefix(message: bytes) -> bytes:
    """Return what is to be in `ProxyConfig.error_prefix`, from an encoded error without a text.

    Which has the text at its end.
    """
    return message[:-1]


def error_frame(prefix: bytes, text: str) -> bytes:
    """Return the error with a text: as msgpack writes a text of up to 65,535 bytes."""
    encoded = text.encode()
    return prefix + b"\xda" + len(encoded).to_bytes(2, "big") + encoded


def encode_allowed_peers(keys: Sequence[str] | None, tenants: Sequence[TenantCredentials] | None) -> bytes:
    """Return the message to a proxy with new keys and tenants, see `ProxyConfig`; `parse_allowed_peers` reads it."""
    return json.dumps([keys, tenants]).encode()


def parse_allowed_peers(frame: Any) -> tuple[Sequence[str] | None, Sequence[TenantCredentials] | None]:
    """Return what `encode_allowed_peers` has written."""
    keys, tenants = json.loads(bytes(frame))
    return None if keys is None else [*keys], _parse_members(tenants)


def parse_proxy_event(frame: Any) -> ProxyEvent:
    """Return what `ProxyEvent.to_frame` has written."""
    return ProxyEvent(*json.loads(bytes(frame)))


def encode_peer_connected(peer_count: int, identity: PeerIdentity) -> bytes:
    """Return a `PeerConnected`, to be read by `parse_proxy_message`."""
    return json.dumps([peer_count, *identity]).encode()


def encode_peer_count(peer_count: int) -> bytes:
    """Return how many peers are left, to be read by `parse_proxy_message`."""
    return json.dumps([peer_count]).encode()


def encode_log_line(level: int, text: str) -> bytes:
    """Return a `ProxyLogLine`, to be read by `parse_proxy_message`."""
    return json.dumps([level, text]).encode()


def parse_proxy_message(frame: Any) -> PeerConnected | ProxyLogLine | int:
    """Return what a proxy has said: somebody new, a line for the log, or how many are left."""
    first, *rest = json.loads(bytes(frame))
    if not rest:
        return int(first)
    if len(rest) == 1:
        return ProxyLogLine(first, *rest)
    uid, pid, user, gids, key = rest
    return PeerConnected(first, PeerIdentity(uid, pid, user, tuple(gids), key))
