"""Control messages between daemon, zygote and proxies: JSON over `Stream`.

- Daemon to zygote: `ProxyConfig.to_frames`, with the proxy's end of its link and the listener, requests a proxy.
- Zygote to daemon: `ProxyEvent` reports the pid of a proxy, and later its exit status.
- Daemon to proxy: the public keys that may connect from now on, and the credentials of the tenants.
- Proxy to daemon: `PeerConnected` reports a client that has sent its first message, with one end of a pair of sockets
  over which the client's messages follow. A number reports how many peers are left after one has disconnected.
  `ProxyLogLine` is for the daemon's log.
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

# The levels of `logging`, which a proxy does not import.
DEBUG, WARNING, ERROR = 10, 30, 40

LogFunction = Callable[[int, str], object]
"""Writes a log line with its level."""


class ProxyConfig(NamedTuple):
    """The configuration of a proxy.

    Attributes:
        name: the name of the listener.
        address: the address of the listening socket, in the notation of ZeroMQ.
        max_frame_bytes: the largest frame. A client that announces a larger one is disconnected.
        max_memory_bytes: the limit of the bytes that are buffered for all clients.
        max_connections: the limit of clients; 0 for the limit that follows from the descriptors.
        max_user_connections: the limit of connections of one user or host; 0 for none.
        max_user_connection_rate: the limit of new connections of one user or host in a second; 0 for none.
        secret_key: the secret key of the listener for CURVE, in Z85; "" without CURVE.
        allowed_keys: the public keys that may connect with CURVE; None for all keys.
        tenant_members: the credentials of the tenants; None if no tenants are configured.
        error_prefix: the beginning of the message to a client that violates the protocol, see `error_frame`.
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
        """Return the request to the zygote to fork a proxy with this number."""
        return [json.dumps([number, *self[:-1]]).encode(), self.error_prefix]

    def __repr__(self) -> str:
        """Return a text without the secret key."""
        return f"Terms({self.name!r}, {self.address!r})"


class PeerIdentity(NamedTuple):
    """The identity of a peer. The kernel knows it of a Unix socket, and the user or host over TCP.

    Attributes:
        uid: the user id; None over TCP.
        pid: the process id; None over TCP, 0 in another pid namespace.
        user: the user or host by which limits are counted, see `Peer.key`.
        gids: the group ids, the primary one first; empty over TCP.
        public_key: the public key that the peer has proven to have, in Z85; "" without CURVE.
    """

    uid: int | None
    pid: int | None
    user: str
    gids: tuple[int, ...] = ()
    public_key: str = ""


class PeerConnected(NamedTuple):
    """A peer has sent its first message. `peer_count` peers have done so and are connected."""

    peer_count: int
    identity: PeerIdentity


class ProxyLogLine(NamedTuple):
    """A line for the daemon's log."""

    level: int
    text: str


class ProxyEvent(NamedTuple):
    """A report of the zygote about a proxy.

    Attributes:
        number: the number in the request to fork the proxy.
        pid: the pid of the proxy; 0 if it could not be forked.
        status: None while the proxy runs; else its exit status, negative for a signal, or the errno of the fork.
    """

    number: int
    pid: int
    status: int | None

    def to_frame(self) -> bytes:
        """Return the encoded event."""
        return json.dumps(self).encode()


def new_control_stream(connection: socket.socket, *, accepts_descriptors: bool = False) -> Stream:
    """Return a stream for control messages, which may be as long as the lists of keys and tenants require."""
    return Stream(connection, FrameReader(max_header_bytes=MAX_FRAME_BYTES), accepts_descriptors=accepts_descriptors)


def parse_fork_request(frames: Sequence[Any]) -> tuple[int, ProxyConfig]:
    """Return the number and the configuration from a request by `ProxyConfig.to_frames`."""
    number, *fields, tenants = json.loads(frames[0])
    values: list[Any] = [*fields, _parse_members(tenants), bytes(frames[1])]
    return number, ProxyConfig(*values)


def _parse_members(rows: Sequence[Any] | None) -> list[TenantCredentials] | None:
    return None if rows is None else [TenantCredentials(*each) for each in rows]


def error_prefix(message: bytes) -> bytes:
    """Return the value of `ProxyConfig.error_prefix` for an encoded error whose text is empty and last."""
    return message[:-1]


def error_frame(prefix: bytes, text: str) -> bytes:
    """Return an encoded error: `prefix` and the text, of at most 65,535 bytes, as a string of msgpack."""
    encoded = text.encode()
    return prefix + b"\xda" + len(encoded).to_bytes(2, "big") + encoded


def encode_allowed_peers(keys: Sequence[str] | None, tenants: Sequence[TenantCredentials] | None) -> bytes:
    """Return the encoded keys and tenants for a proxy; see `ProxyConfig`."""
    return json.dumps([keys, tenants]).encode()


def parse_allowed_peers(frame: Any) -> tuple[Sequence[str] | None, Sequence[TenantCredentials] | None]:
    """Return the keys and tenants from a message by `encode_allowed_peers`."""
    keys, tenants = json.loads(bytes(frame))
    return None if keys is None else [*keys], _parse_members(tenants)


def parse_proxy_event(frame: Any) -> ProxyEvent:
    """Return the event from a message by `ProxyEvent.to_frame`."""
    return ProxyEvent(*json.loads(bytes(frame)))


def encode_peer_connected(peer_count: int, identity: PeerIdentity) -> bytes:
    """Return an encoded `PeerConnected`."""
    return json.dumps([peer_count, *identity]).encode()


def encode_peer_count(peer_count: int) -> bytes:
    """Return an encoded number of peers."""
    return json.dumps([peer_count]).encode()


def encode_log_line(level: int, text: str) -> bytes:
    """Return an encoded `ProxyLogLine`."""
    return json.dumps([level, text]).encode()


def parse_proxy_message(frame: Any) -> PeerConnected | ProxyLogLine | int:
    """Return the content of a proxy's message; an int is the number of peers."""
    first, *rest = json.loads(bytes(frame))
    if not rest:
        return int(first)
    if len(rest) == 1:
        return ProxyLogLine(first, *rest)
    uid, pid, user, gids, key = rest
    return PeerConnected(first, PeerIdentity(uid, pid, user, tuple(gids), key))
