"""Identifies the peer of a connection before it has sent anything: a user of this host, or another host.

The kernel names the user of a Unix socket, and by its socket diagnostics also that of a TCP connection from this host.
So two users of one host have limits of their own although both come from 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from typing import NamedTuple, Optional, Tuple, Union

# struct ucred of the kernel: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")

# The kernel shows users that a user namespace hides as this one.
_HIDDEN_UID = 65534

# NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, and struct nlmsghdr, inet_diag_req_v2 and inet_diag_msg of the kernel.
_SOCK_DIAG = 4
_BY_FAMILY = 20
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_NO_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_ADDRESS_BYTES = 16
_STATE_AT = _HEADER.size + 1
_UID_AT = _HEADER.size + 4 + 4 + 2 * _ADDRESS_BYTES + 12 + 12
_NLM_F_REQUEST = 1
_TCP_ESTABLISHED = 1

# Clients of one network are one peer: a host may choose any address within it.
_IPV6_NETWORK = 64

_Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]


class Peer(NamedTuple):
    """The other end of a connection.

    Attributes:
        key: identifies the user or host; connections with equal keys share their limits.
        uid: the user at the other end of a Unix socket; None of TCP.
        common_name: of a certificate that TLS has verified; None without one.
        is_local: whether the peer is on this host.
        is_operator: whether it is root or the user that this process runs as, who have no limits of their own.
    """

    key: str
    uid: Optional[int] = None
    common_name: Optional[str] = None
    is_local: bool = False
    is_operator: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the connection was there when the kernel was asked."""
        return self is not UNKNOWN


UNKNOWN = Peer("unknown")


class Peers:
    """Identifies peers; asks the kernel for the users of TCP connections from this host where it can."""

    def __init__(self) -> None:
        self._diagnostics: Optional[socket.socket] = None
        with contextlib.suppress(OSError):
            self._diagnostics = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _SOCK_DIAG)
            # The kernel answers within the call that sends the question.
            self._diagnostics.setblocking(False)

    def of(self, connection: socket.socket) -> Peer:
        """Return the peer of a connection; one that has left already may be any user of its host."""
        try:
            if connection.family == socket.AF_UNIX:
                uid = _uid_of_unix(connection)
                return Peer(_user(uid), uid, is_local=True, is_operator=_is_operator(uid))
            far, near = connection.getpeername(), connection.getsockname()
            address = _address(far[0])
            if not (address.is_loopback or far[0] == near[0]):
                return Peer(_host(address))
            found = self._uid_of_tcp((address, far[1]), (_address(near[0]), near[1]))
        except OSError:
            return UNKNOWN
        if found is None or found == _HIDDEN_UID:
            return Peer(_host(address), is_local=True)
        return Peer(_user(found), is_local=True, is_operator=_is_operator(found))

    def close(self) -> None:
        """Close the socket to the kernel."""
        if self._diagnostics is not None:
            self._diagnostics.close()
            self._diagnostics = None

    def _uid_of_tcp(self, far: Tuple[_Address, int], near: Tuple[_Address, int]) -> Optional[int]:
        """Return the user who owns the socket at the far end of a connection within this host."""
        if self._diagnostics is None:
            return None
        family = socket.AF_INET if far[0].version == 4 else socket.AF_INET6
        body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + struct.pack("!HH", far[1], near[1])
        body += b"".join(each[0].packed.ljust(_ADDRESS_BYTES, b"\0") for each in (far, near)) + _NO_COOKIE
        try:
            self._diagnostics.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body)
            answer = self._diagnostics.recv(4096)
        except OSError:
            return None
        if len(answer) < _UID_AT + 4 or _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
            return None
        if answer[_STATE_AT] != _TCP_ESTABLISHED:
            # A socket that is closed has no owner, which reads as root.
            return None
        uid: int = struct.unpack_from("=I", answer, _UID_AT)[0]
        return uid


def _uid_of_unix(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid


def _address(text: str) -> _Address:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        raise OSError(f"not an address: {text!r}") from None
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


def _host(address: _Address) -> str:
    if address.version == 6:
        return f"host {ipaddress.ip_network((address, _IPV6_NETWORK), strict=False)}"
    return f"host {address}"


def _user(uid: int) -> str:
    return f"uid {uid}"


def _is_operator(uid: int) -> bool:
    return uid in (0, os.getuid())
