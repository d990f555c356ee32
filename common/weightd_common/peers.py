"""Identifies the peer of an accepted connection, before the peer has sent data: a user of this host, or another host.

The kernel reports the user at the other end of a unix socket and, through its socket diagnostics, also of a TCP
connection from this host. So two users of this host have separate limits although both connect from 127.0.0.1, and a
user cannot multiply the limits by connecting from several addresses of this host.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from typing import NamedTuple, Optional, Tuple, Union

from weightd_common.peer_credentials import is_operator, peer_credentials

# Layout of the kernel's struct nlmsghdr, the header of a netlink message.
_HEADER = struct.Struct("=IHHII")
_NLM_F_REQUEST = 1

# Socket diagnostics, see sock_diag(7): NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, and the layouts of struct
# inet_diag_req_v2 (the query) and struct inet_diag_msg (the answer).
_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST = struct.Struct("=BBBBI")
_NO_COOKIE = struct.pack("=II", 0xFFFFFFFF, 0xFFFFFFFF)
_ADDRESS_BYTES = 16
_STATE_AT = 1
_OWNER = struct.Struct("=II")  # uid, inode
_OWNER_AT = 4 + 4 + 2 * _ADDRESS_BYTES + 12 + 12

# Queries of the routing table, see rtnetlink(7): NETLINK_ROUTE, RTM_NEWROUTE, RTM_GETROUTE, and the layouts of struct
# rtmsg and struct rtattr.
_ROUTE = 0
_NEW_ROUTE = 24
_GET_ROUTE = 26
_ROUTE_MESSAGE = struct.Struct("=8BI")
_ROUTE_TYPE_AT = 7
_ATTRIBUTE = struct.Struct("=HH")
_RTM_F_FIB_MATCH = 0x2000
_RTN_LOCAL = 2
_RTA_DST = 1
_RTA_OIF = 4
_LOOPBACK_INTERFACE = 1

# TCP states of the client's socket while the service's socket is open: before and after the client has sent a FIN.
_ESTABLISHED, _FIN_WAIT_1, _FIN_WAIT_2 = 1, 4, 5

# Prefix length of IPv6 networks. All clients in one such network count as one peer, because a single host may use any
# address of its network.
_IPV6_NETWORK = 64

_Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]


class Peer(NamedTuple):
    """The client at the other end of a connection.

    Attributes:
        key: identifies the client's user or host; connections with equal keys share their limits.
        uid: the user at the other end of a unix socket; None for TCP.
        common_name: the common name of a certificate verified by TLS; None without one.
        is_local: whether the peer is on this host.
        is_operator: whether the peer is root or the user of this process, who have no per-user limits. Never true for a
            user that a user namespace hides.
    """

    key: str
    uid: Optional[int] = None
    common_name: Optional[str] = None
    is_local: bool = False
    is_operator: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the peer could be identified. If not, the connection has already ended and must not be served."""
        return self is not UNKNOWN


UNKNOWN = Peer("unknown")

# Common peer of all TCP connections from this host for which the kernel does not report the user.
THIS_HOST = Peer("this host", is_local=True)


class Peers:
    """Identifies the peers of connections. For a TCP connection from this host, it asks the kernel for the user."""

    def __init__(self) -> None:
        self._routes = _Netlink(_ROUTE)
        self._diagnostics = _Netlink(_SOCK_DIAG)

    def identify(self, connection: socket.socket) -> Peer:
        """Return the peer of a connection that has just been accepted.

        The result is `UNKNOWN` if the peer has already ended the connection. A client on this host that has only shut
        down its sending direction is still identified, unless packet filters of this host redirect the connection.
        """
        try:
            if connection.family == socket.AF_UNIX:
                uid = peer_credentials(connection).uid
                return Peer(_user(uid), uid, is_local=True, is_operator=is_operator(uid))
            remote, local = connection.getpeername(), connection.getsockname()
            address = _address(remote[0])
            interface = _LOOPBACK_INTERFACE if address.is_loopback else self._local_interface(address)
            if interface is None and remote[0] == local[0]:
                # The connection is from this host, but the kernel cannot be asked which interface has the address. So
                # assume the loopback interface.
                interface = _LOOPBACK_INTERFACE
            if interface is None:
                return Peer(_host(address))
            found = self._uid_of_tcp((address, remote[1]), (_address(local[0]), local[1]), interface)
            if found is None:
                return UNKNOWN if self._diagnostics.is_open and _has_ended(connection) else THIS_HOST
        except OSError:
            return UNKNOWN
        return Peer(_user(found), is_local=True, is_operator=is_operator(found))

    def close(self) -> None:
        """Close the netlink sockets."""
        self._routes.close()
        self._diagnostics.close()

    def _local_interface(self, address: _Address) -> Optional[int]:
        """Return the number of this host's interface that has the address, or None for an address of another host."""
        packed = address.packed
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        body = _ROUTE_MESSAGE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, _RTM_F_FIB_MATCH)
        body += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), _RTA_DST) + packed
        answer = self._routes.request(_GET_ROUTE, body, _NEW_ROUTE)
        if answer is None or answer[_ROUTE_TYPE_AT] != _RTN_LOCAL:
            return None
        at = _ROUTE_MESSAGE.size
        while at + _ATTRIBUTE.size < len(answer):
            size, kind = _ATTRIBUTE.unpack_from(answer, at)
            if kind == _RTA_OIF:
                interface: int = struct.unpack_from("=I", answer, at + _ATTRIBUTE.size)[0]
                return interface
            at += max(_ATTRIBUTE.size, (size + 3) & ~3)
        return _LOOPBACK_INTERFACE

    def _uid_of_tcp(self, remote: Tuple[_Address, int], local: Tuple[_Address, int], interface: int) -> Optional[int]:
        """Return the user who owns the client's socket of a TCP connection within this host.

        The query contains the number of the interface that has the client's address. The kernel finds the client's
        socket with this number, because the socket is either bound to this interface or to none: if it were bound to
        another interface, it could not connect from the address.

        Args:
            remote: address and port of the client's socket.
            local: address and port of the service's socket.
            interface: the number of the interface that has the client's address.

        Returns:
            The user id; None if the kernel finds no such socket.

        Raises:
            OSError: the client has closed its socket, so that no user owns it.
        """
        family = socket.AF_INET if remote[0].version == 4 else socket.AF_INET6
        body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + struct.pack("!HH", remote[1], local[1])
        body += b"".join(each[0].packed.ljust(_ADDRESS_BYTES, b"\0") for each in (remote, local))
        body += struct.pack("=I", interface) + _NO_COOKIE
        answer = self._diagnostics.request(_BY_FAMILY, body, _BY_FAMILY)
        if answer is None or answer[_STATE_AT] not in (_ESTABLISHED, _FIN_WAIT_1, _FIN_WAIT_2):
            # A socket in another state is not the client's: if the kernel finds no exact match, it reports a socket
            # that listens on the client's port.
            return None
        uid: int
        uid, inode = _OWNER.unpack_from(answer, _OWNER_AT)
        if not inode:
            # The kernel reports inode 0, and root as the owner, for a socket that its process has closed.
            raise OSError("the client has closed its socket")
        return uid


class _Netlink:
    """A socket of one netlink family, for queries of the kernel. If it cannot be created, every query fails."""

    def __init__(self, family: int) -> None:
        self._socket: Optional[socket.socket] = None
        self._sequence_number = 0
        with contextlib.suppress(OSError):
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, family)
            # The socket need not wait: when `send` has returned, the kernel has already queued its answer.
            self._socket.setblocking(False)

    @property
    def is_open(self) -> bool:
        """Whether the netlink socket could be created."""
        return self._socket is not None

    def request(self, kind: int, body: bytes, expected: int) -> Optional[bytes]:
        """Send a query of type `kind`. Return the answer without its header, or None if its type is not `expected`."""
        if self._socket is None:
            return None
        self._sequence_number = (self._sequence_number + 1) & 0xFFFFFFFF
        header = _HEADER.pack(_HEADER.size + len(body), kind, _NLM_F_REQUEST, self._sequence_number, 0)
        try:
            self._socket.send(header + body)
            while True:
                answer = self._socket.recv(4096)
                _, got, _, number, _ = _HEADER.unpack_from(answer)
                if number == self._sequence_number:
                    return answer[_HEADER.size :] if got == expected else None
        except OSError:
            return None

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _has_ended(connection: socket.socket) -> bool:
    """Return whether the other end of a TCP connection has shut down its sending direction."""
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state != _ESTABLISHED


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
