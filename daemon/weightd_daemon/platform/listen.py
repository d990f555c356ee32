"""Listening sockets: addresses of sockets from the service manager; creation and removal of all other sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from weightd_common import endpoints
from weightd_daemon.platform.directories import PathInUse, make_directory

# Umask of a listening Unix socket. The socket's owner and group may connect; the operator adds users to the group.
_SOCKET_UMASK = 0o117

_UNIX_SCHEMES = ("unix://", "ipc://")


# --- passed sockets -----------------------------------------------------------------------------------------------


def listen_addresses(descriptors: Sequence[int]) -> list[str]:
    """Return the addresses of listening sockets, given their descriptors.

    An address is tcp://HOST:PORT, ipc://PATH, or unix://PATH if PATH ends in ".unix".

    Raises:
        PathInUse: a descriptor is not a stream socket with a path or a port.
    """
    return [_listen_address(descriptor) for descriptor in descriptors]


def _listen_address(descriptor: int) -> str:
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        raise PathInUse(f"descriptor {descriptor} from the service manager is not a socket: {error.strerror}") from None
    try:
        name: Any = listener.getsockname()
        is_stream = listener.type == socket.SOCK_STREAM
        if is_stream and listener.family == socket.AF_UNIX and isinstance(name, str) and name:
            return f"{'unix' if name.endswith(endpoints.UNIX_SUFFIX) else 'ipc'}://{name}"
        if is_stream and listener.family == socket.AF_INET:
            return f"tcp://{name[0]}:{name[1]}"
        if is_stream and listener.family == socket.AF_INET6:
            return f"tcp://[{name[0]}]:{name[1]}"
    finally:
        listener.detach()
    raise PathInUse(f"descriptor {descriptor} from the service manager: expected a stream socket with a path or a port")


# --- new sockets --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listen_on(address: str) -> Generator[socket.socket, None, None]:
    """Listen at unix://PATH, ipc://PATH or tcp://HOST:PORT within the block; remove the socket's file after the block.

    Raises:
        PathInUse: another program listens at the address, the path is not a socket, or the address cannot be bound.
    """
    path = _unix_path(address)
    with contextlib.ExitStack() as stack:
        if path is None:
            made = stack.enter_context(_bind_tcp(address))
        else:
            make_directory(path.parent.resolve(), mode=0o755)
            stack.enter_context(reserve_socket_path(path))
            made = stack.enter_context(bind_unix(path, address))
        # Request the largest backlog of unaccepted connections that the kernel allows, as systemd does for its sockets.
        made.listen(socket.SOMAXCONN)
        made.setblocking(False)
        yield made


@contextlib.contextmanager
def reserve_socket_path(path: Path) -> Generator[None, None, None]:
    """Reserve a path for a socket. Remove a stale socket file before the block, and the new file after the block.

    Raises:
        PathInUse: another program listens at the path, or the path is not a socket.
    """
    _check_no_listener(path)
    _remove_socket(path)
    try:
        yield
    finally:
        with contextlib.suppress(PathInUse):
            _remove_socket(path)


def _unix_path(address: str) -> Path | None:
    return next((Path(address.removeprefix(each)) for each in _UNIX_SCHEMES if address.startswith(each)), None)


def bind_unix(path: Path, address: str, umask: int = _SOCKET_UMASK) -> socket.socket:
    """Return a socket that is bound to the path.

    Args:
        path: the path at which the socket is created.
        address: the address of the socket, for error texts.
        umask: the file permissions that the socket does not get.

    Raises:
        PathInUse: the path cannot be bound.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The umask gives the socket its permissions at its creation. If a chmod set them later, another user could connect
    # before the chmod.
    old_umask = os.umask(umask)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise _listen_error(address, error) from None
    finally:
        os.umask(old_umask)
    return listener


def _bind_tcp(address: str) -> socket.socket:
    host, port = endpoints.split_tcp_address(address)
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Without this option, connections of an earlier daemon that the kernel still keeps (TIME_WAIT) would prevent
        # the bind.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        name = None if host == "*" else host.strip("[]")
        listener.bind(socket.getaddrinfo(name, port, family, socket.SOCK_STREAM, 0, socket.AI_PASSIVE)[0][4])
    except OSError as error:
        listener.close()
        raise _listen_error(address, error) from None
    return listener


def _listen_error(address: str, error: OSError) -> PathInUse:
    # An error that Python raises itself has no `strerror`, such as the error for a path that is too long.
    return PathInUse(f"cannot listen on {address}: {error.strerror or error}")


def _check_no_listener(path: Path) -> None:
    """Try to connect to the path; raise PathInUse if a program listens at it."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError as error:
            raise PathInUse(f"{path}: {error.strerror or error}") from None
    raise PathInUse(f"{path}: another program listens on this path")


def _remove_socket(path: Path) -> None:
    """Remove a socket file if it exists; raise PathInUse if the path is any other file."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise PathInUse(f"{path}: expected a socket or no file; weightd does not remove other files")
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise PathInUse(f"{path}: {error.strerror}") from None
