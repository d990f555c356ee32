"""Parses daemon addresses, connects Unix sockets to a daemon, and reads the CURVE keys for TCP."""

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
"""The accepted forms of a daemon address. Error texts list them."""


class Address(NamedTuple):
    """Parsed address of a daemon.

    Attributes:
        text: the address as given.
        unix_path: the path of the daemon's Unix socket; "" if the client must not use the Unix socket.
        zmq_address: the address of the daemon's ZeroMQ socket; "" if the client must not use ZeroMQ.
    """

    text: str
    unix_path: str
    zmq_address: str


class NoDaemon(Unavailable):
    """No process listens on the Unix socket at `path`.

    Args:
        path: the path of the Unix socket.
        reason: why the connection failed, such as "there is no socket".
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"no daemon at {path}: {reason}; {_START_HINT}")
        self.path = path
        self.reason = reason


def no_daemon_error(failures: Sequence[NoDaemon]) -> Unavailable:
    """Return an error that lists every address the client has tried, with the reason of each failure."""
    tried = ", and none ".join(f"at {each.path}: {each.reason}" for each in failures)
    return Unavailable(f"no daemon {tried}; {_START_HINT}")


def parse_address(address: str) -> Address:
    """Parse an address. /PATH, without a scheme, allows both transports: the Unix socket and ZeroMQ.

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
    """Return the addresses that a client without a given address tries in turn.

    The client uses the first one that answers.

    The result is $WEIGHTD_SOCKET alone if this variable is set. Otherwise it is the address of the daemon that this
    user runs, followed by the address of the system's daemon. The result contains an address even if no socket file
    exists there: the file would not show that a daemon listens, because a killed daemon leaves its socket file behind.
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
    """Return whether a user other than this one and root owns the directory.

    Any user can create a directory in /tmp. A client that connected to a socket in such a directory would send its
    tensors to that user.
    """
    try:
        return os.lstat(directory).st_uid not in (os.getuid(), 0)
    except OSError:
        return False


def ipc_path(address: str) -> str:
    """Return the path of an ipc:// address, or "" for any other address."""
    return address[len(_IPC_SCHEME) :] if address.startswith(_IPC_SCHEME) else ""


def check_reachable(address: str) -> None:
    """Raise an error at once if no client of this user can connect to the Unix socket of an ipc:// address.

    libzmq connects in the background and retries forever. Without this check, a wrong path or a missing permission
    would look like a slow daemon. Addresses of other schemes are not checked.

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
    """Connect a non-blocking Unix socket to the listener at `path`. Return False if the listener's backlog is full.

    A full backlog shows that a daemon listens; the caller can try again.

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
        # No file exists at the path any more: a starting daemon has just removed the socket file of an earlier daemon.
        return False
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
        """Return a text without the secret key, so that the key does not get into logs."""
        return f"Curve(server={self.server_key!r})"


def read_keys(key: Optional[KeyFile], server_key: Optional[KeyFile]) -> Optional[CurveKeys]:
    """Read the CURVE keys from two key files. Return None if neither file is given.

    Args:
        key: the file with the client's secret key, as `weightctl keygen` writes it.
        server_key: the file with the public key of the daemon's listener.

    Raises:
        InvalidArgument: only one of the two files is given, a file contains no key of the expected kind (secret or
            public), or the mode or owner of the secret key's file is unsafe.
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
