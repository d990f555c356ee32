"""Daemon addresses, connecting to unix sockets, and the CURVE keys for TCP."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Sequence, Union

from weightd_common import endpoints
from weightd_common.curve_keys import KeyFileError, read_public, read_secret
from weightd_protocol import limits
from weightd_protocol.errors import InvalidArgument, PermissionDenied, RequestError, Unavailable
from weightd_protocol.schema import describe_value

_START_HINT = "start it with `weightd serve CONFIG` or `weightd run MODEL`"

_UNIX_SCHEME, _IPC_SCHEME = "unix://", "ipc://"
_UNIX_SUFFIX = endpoints.unix_path(_IPC_SCHEME)

EXPECTED_FORMS = f"/PATH, unix:///PATH, ipc:///PATH or {endpoints.TCP_ADDRESS_FORM}"
"""The forms of an address that `parse_address` accepts, for error texts."""


class Address(NamedTuple):
    """Parsed address of a daemon.

    Attributes:
        text: the address as given.
        unix_path: the path of the unix socket; "" if it must not be used.
        zmq_address: the ZeroMQ address; "" if ZeroMQ must not be used.
    """

    text: str
    unix_path: str
    zmq_address: str


class NoDaemon(Unavailable):
    """No process listens at an address.

    Args:
        path: the path of the socket.
        reason: why the path has no listener.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"no daemon at {path}: {reason}; {_START_HINT}")
        self.path = path
        self.reason = reason


def no_daemon_error(failures: Sequence[NoDaemon]) -> Unavailable:
    """Return the error of a client that has tried several addresses. The text lists all of them."""
    tried = ", and none ".join(f"at {each.path}: {each.reason}" for each in failures)
    return Unavailable(f"no daemon {tried}; {_START_HINT}")


def parse_address(address: str) -> Address:
    """Parse an address. Without a scheme, it stands for both transports.

    Raises:
        InvalidArgument: `address` is not a valid address.
    """
    try:
        os.fsencode(address)
    except UnicodeEncodeError:
        raise InvalidArgument(f"expected an address {EXPECTED_FORMS}, got {address!r}") from None
    path = address[len(_UNIX_SCHEME) :] if address.startswith(_UNIX_SCHEME) else ipc_path(address) or address
    if path.startswith("/") and "\0" not in path:
        if address.startswith(_IPC_SCHEME):
            return Address(address, "", address)
        plain = path[: -len(_UNIX_SUFFIX)] if path.endswith(_UNIX_SUFFIX) else path
        zeromq = f"{_IPC_SCHEME}{plain}"
        return Address(address, endpoints.unix_path(zeromq), "" if address.startswith(_UNIX_SCHEME) else zeromq)
    if not endpoints.is_tcp_address(address):
        raise InvalidArgument(f"expected an address {EXPECTED_FORMS}, got {address!r}")
    return Address(address, "", address)


def default_addresses() -> List[str]:
    """Return the addresses that a client tries if none was given. The first one with a listener is used.

    This is $WEIGHTD_SOCKET alone if it is set, otherwise the address of this user's daemon and then of the system's.
    Whether a socket file exists does not matter: a killed daemon leaves its file behind.
    """
    configured = os.environ.get("WEIGHTD_SOCKET")
    if configured:
        return [configured]
    user_dir, system_dir = endpoints.runtime_dir(), endpoints.SYSTEM_RUNTIME_DIR
    directories = (
        [system_dir] if user_dir == system_dir or _is_owned_by_other_user(user_dir) else [user_dir, system_dir]
    )
    return [ipc_path(endpoints.socket_address(each)) for each in directories]


def _is_owned_by_other_user(directory: str) -> bool:
    """Return whether the directory belongs to another user: anyone can create it in /tmp and receive our tensors."""
    try:
        return os.lstat(directory).st_uid not in (os.getuid(), 0)
    except OSError:
        return False


def ipc_path(address: str) -> str:
    """Return the path of an ipc:// address, or "" for any other address."""
    return address[len(_IPC_SCHEME) :] if address.startswith(_IPC_SCHEME) else ""


def check_reachable(address: str) -> None:
    """Raise the error that a ZeroMQ connection to an ipc:// address would run into, if it can be known at once.

    libzmq connects in the background and retries forever: without this check, a wrong path or a missing permission
    would look like a slow daemon.

    Raises:
        RequestError: as `connect_unix`.
    """
    path = ipc_path(address)
    if path:
        with new_unix_socket() as probe:
            connect_unix(probe, path)


def new_unix_socket() -> socket.socket:
    """Return a non-blocking unix socket.

    Raises:
        Unavailable: no socket can be created, for example because no file descriptor is left.
    """
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise Unavailable(f"cannot create a socket: {error.strerror}") from None
    connection.setblocking(False)
    return connection


def connect_unix(connection: socket.socket, path: str) -> bool:
    """Connect a non-blocking unix socket. Return False if the backlog is full, which means that a daemon listens.

    Raises:
        InvalidArgument: the path is too long, or is not the path of a stream socket.
        PermissionDenied: this user may not connect.
        NoDaemon: no process listens at the path.
        Unavailable: the kernel refuses the connection for another reason.
    """
    size = len(os.fsencode(path))
    if size > limits.MAX_IPC_PATH_BYTES:
        raise InvalidArgument(
            f"expected a socket path of at most {limits.MAX_IPC_PATH_BYTES} bytes, got {size}: {path}"
        )
    try:
        connection.connect(path)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _connect_error(error, path) from None
    return True


def _connect_error(error: OSError, path: str) -> RequestError:
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDenied(
            f"this user may not connect to {path}: {error.strerror}; ask the administrator to add the user to the "
            "socket's group"
        )
    if error.errno == errno.ENOENT:
        return NoDaemon(path, "there is no socket")
    if error.errno == errno.EPROTOTYPE or _is_not_socket(path):
        return InvalidArgument(f"{path} is not a socket of weightd")
    if error.errno == errno.ECONNREFUSED:
        return NoDaemon(path, "no process listens on the socket")
    return Unavailable(f"cannot connect to {path}: {error.strerror}")


def _is_not_socket(path: str) -> bool:
    """Return whether the path exists and is not a socket."""
    try:
        return not stat.S_ISSOCK(Path(path).stat().st_mode)
    except FileNotFoundError:
        return False  # The socket existed a moment ago: a starting daemon removes the one of its predecessor.
    except OSError:
        return True


# --- keys ------------------------------------------------------------------------------------------------------------

KeyFile = Union[str, "os.PathLike[str]"]


class CurveKeys(NamedTuple):
    """CURVE keys of a connection, in Z85 encoding.

    Attributes:
        server_key: the public key of the daemon's listener.
        secret_key: the client's secret key.
    """

    server_key: str
    secret_key: str

    def __repr__(self) -> str:
        """Return a text without the secret key."""
        return f"Curve(server={self.server_key!r})"


def read_keys(key: Optional[KeyFile], server_key: Optional[KeyFile]) -> Optional[CurveKeys]:
    """Return the keys from the files, or None if no file is given.

    Args:
        key: the file with the client's secret key, as `weightctl keygen` writes it.
        server_key: the file with the public key of the daemon's listener.

    Raises:
        InvalidArgument: only one file is given, or a file contains no such key or is not safe to use.
    """
    if key is None and server_key is None:
        return None
    if key is None or server_key is None:
        missing = "key (the client's secret key)" if key is None else "server_key (the listener's public key)"
        raise InvalidArgument(f"expected both key files of CURVE, or neither: {missing} is missing")
    try:
        return CurveKeys(read_public(_to_path("server_key", server_key)), read_secret(_to_path("key", key)))
    except KeyFileError as error:
        raise InvalidArgument(str(error)) from None


def _to_path(name: str, file: Any) -> Path:
    try:
        return Path(file)
    except TypeError:
        raise InvalidArgument(f"{name}: expected the path of a file, got {describe_value(file)}") from None
