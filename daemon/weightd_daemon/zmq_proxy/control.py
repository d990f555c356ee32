"""Control messages between daemon, zygote and proxies: JSON over `Stream`.

- Daemon to zygote: the frames of `ProxyConfig.to_frames` request a proxy. The descriptors of the listener and of the
  proxy's end of its control link come with them.
- Zygote to daemon: `ProxyEvent` reports the pid of a proxy, and later its exit status.
- Daemon to proxy: after a reload, the public keys that may connect and the credentials of the tenants.
- Proxy to daemon: `PeerConnected` reports a client that has sent its first message. With the report comes the
  descriptor of one end of a socket pair, over which the proxy relays the client's messages. A number reports, after
  such a client has disconnected, how many clients that have sent a message are still connected. `ProxyLogLine` is a
  line for the daemon's log.
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

# Log levels with the values of the module `logging`. A proxy does not import this module, to save memory.
DEBUG, WARNING, ERROR = 10, 30, 40

LogFunction = Callable[[int, str], object]
"""Type of a function that writes a log line; the arguments are the level and the text."""


class ProxyConfig(NamedTuple):
    """The configuration of a proxy.

    Attributes:
        name: the name of the listener.
        address: the address of the listening socket in ZeroMQ's notation, such as "tcp://127.0.0.1:5555".
        max_frame_bytes: the maximum size of a frame. A client that announces a larger frame is disconnected.
        max_memory_bytes: the maximum number of bytes that the proxy buffers for all clients together.
        max_connections: the maximum number of clients; 0 for as many as the limit of descriptors allows.
        max_user_connections: the maximum number of connections of one user or host; 0 for no limit.
        max_user_connection_rate: the maximum number of new connections of one user or host in a second, on average; 0
            for no limit.
        secret_key: the secret key of the listener for CURVE, in Z85; "" without CURVE.
        allowed_keys: the public keys that may connect with CURVE; None for all keys.
        tenant_members: the credentials of the tenants; None if no tenants are configured.
        error_prefix: the encoded beginning of the error that is sent to a client that violates the protocol, see
            `error_frame`.
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
        """Return the frames that request a proxy with this configuration from the zygote.

        `number` identifies the proxy in `ProxyEvent`.
        """
        return [json.dumps([number, *self[:-1]]).encode(), self.error_prefix]

    def __repr__(self) -> str:
        """Return a text without the secret key, so that the key cannot get into a log."""
        return f"Terms({self.name!r}, {self.address!r})"


class PeerIdentity(NamedTuple):
    """The identity of a client, as known from the kernel and from the handshake.

    Attributes:
        uid: the user id of the client's process on a Unix socket; None over TCP.
        pid: the pid of the client's process on a Unix socket, or 0 if the process is in another pid namespace; None
            over TCP.
        user: the name of the user or host whose limits apply to the client, see `Peer.key`.
        gids: the group ids, the primary one first; empty over TCP.
        public_key: the client's public key in Z85, which the handshake has verified; "" without CURVE.
    """

    uid: int | None
    pid: int | None
    user: str
    gids: tuple[int, ...] = ()
    public_key: str = ""


class PeerConnected(NamedTuple):
    """Report of a client's first message. `peer_count` is the number of connected clients that have sent a message."""

    peer_count: int
    identity: PeerIdentity


class ProxyLogLine(NamedTuple):
    """A line for the daemon's log."""

    level: int
    text: str


class ProxyEvent(NamedTuple):
    """Report of the zygote that a proxy was forked, could not be forked, or has exited.

    Attributes:
        number: the number of the proxy from `ProxyConfig.to_frames`.
        pid: the pid of the proxy; 0 if it could not be forked.
        status: None if the proxy was forked. If it has exited, the exit status, negative for a signal. If it could not
            be forked, the errno.
    """

    number: int
    pid: int
    status: int | None

    def to_frame(self) -> bytes:
        """Return the encoded event."""
        return json.dumps(self).encode()


def new_control_stream(connection: socket.socket, *, accepts_descriptors: bool = False) -> Stream:
    """Return a stream for control messages. Its size limit is large enough for the lists of keys and tenants."""
    return Stream(connection, FrameReader(max_header_bytes=MAX_FRAME_BYTES), accepts_descriptors=accepts_descriptors)


def parse_fork_request(frames: Sequence[Any]) -> tuple[int, ProxyConfig]:
    """Return the proxy's number and configuration from the frames of `ProxyConfig.to_frames`."""
    number, *fields, tenants = json.loads(frames[0])
    values: list[Any] = [*fields, _parse_members(tenants), bytes(frames[1])]
    return number, ProxyConfig(*values)


def _parse_members(rows: Sequence[Any] | None) -> list[TenantCredentials] | None:
    return None if rows is None else [TenantCredentials(*each) for each in rows]


def error_prefix(message: bytes) -> bytes:
    """Return the value for `ProxyConfig.error_prefix`, from an encoded error whose last field is an empty text."""
    return message[:-1]


def error_frame(prefix: bytes, text: str) -> bytes:
    """Return an encoded error: `prefix`, followed by `text` as a string of msgpack of at most 65,535 bytes."""
    encoded = text.encode()
    return prefix + b"\xda" + len(encoded).to_bytes(2, "big") + encoded


def encode_allowed_peers(keys: Sequence[str] | None, tenants: Sequence[TenantCredentials] | None) -> bytes:
    """Return an encoded message with `allowed_keys` and `tenant_members` of `ProxyConfig`."""
    return json.dumps([keys, tenants]).encode()


def parse_allowed_peers(frame: Any) -> tuple[Sequence[str] | None, Sequence[TenantCredentials] | None]:
    """Return `allowed_keys` and `tenant_members` from a message of `encode_allowed_peers`."""
    keys, tenants = json.loads(bytes(frame))
    return None if keys is None else [*keys], _parse_members(tenants)


def parse_proxy_event(frame: Any) -> ProxyEvent:
    """Return the event from a message of `ProxyEvent.to_frame`."""
    return ProxyEvent(*json.loads(bytes(frame)))


def encode_peer_connected(peer_count: int, identity: PeerIdentity) -> bytes:
    """Return an encoded `PeerConnected`."""
    return json.dumps([peer_count, *identity]).encode()


def encode_peer_count(peer_count: int) -> bytes:
    """Return an encoded message with the number of connected clients that have sent a message."""
    return json.dumps([peer_count]).encode()


def encode_log_line(level: int, text: str) -> bytes:
    """Return an encoded `ProxyLogLine`."""
    return json.dumps([level, text]).encode()


def parse_proxy_message(frame: Any) -> PeerConnected | ProxyLogLine | int:
    """Return the content of a proxy's message. An int is the number of connected clients that have sent a message."""
    first, *rest = json.loads(bytes(frame))
    if not rest:
        return int(first)
    if len(rest) == 1:
        return ProxyLogLine(first, *rest)
    uid, pid, user, gids, key = rest
    return PeerConnected(first, PeerIdentity(uid, pid, user, tuple(gids), key))
