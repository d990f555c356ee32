"""Where clients connect, as the configuration and a service manager say it.

`ipc://PATH` and `tcp://HOST:PORT` are for clients that speak ZeroMQ. `unix://PATH` is for weightd's own transport: no
configuration has one, it lies beside `daemon.socket`; of what a service manager has opened it is known by its suffix.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from weightd_common import endpoints
from weightd_protocol import limits
from weightd_protocol.schema import FieldError

EXPECTED_FORM = f"ipc:///ABSOLUTE/PATH or {endpoints.TCP_ADDRESS_FORM}"

_IPC = "ipc://"
_UNIX = "unix://"
_UNIX_PREFIX = "unix:"
_IPC_PATTERN = re.compile(r"ipc:///.*[^/]")


def check_address(address: str, suffix: str = "") -> Iterator[FieldError]:
    """Say what is wrong with an address for clients that speak ZeroMQ.

    Args:
        address: as given.
        suffix: of the longest path that lies beside that of an ipc:// one.
    """
    if not _IPC_PATTERN.fullmatch(address) and not endpoints.is_tcp_address(address):
        yield FieldError(f"expected {EXPECTED_FORM}, got {address!r}")
    elif address.startswith(_IPC) and address.endswith(endpoints.UNIX_SUFFIX):
        yield FieldError(f"expected a path without {endpoints.UNIX_SUFFIX}, the end of unix sockets', got {address!r}")
    elif address.startswith(_IPC):
        yield from check_socket_path(address.removeprefix(_IPC) + suffix)


def check_metrics_address(address: str) -> Iterator[FieldError]:
    """Say what is wrong with where metrics are told: HOST:PORT, or unix:/ABSOLUTE/PATH."""
    path = address.removeprefix(_UNIX_PREFIX)
    if path != address and path.startswith("/") and not path.endswith("/"):
        yield from check_socket_path(path)
    elif path != address or not endpoints.is_tcp_address(f"tcp://{address}"):
        yield FieldError(f"expected HOST:PORT or unix:/ABSOLUTE/PATH, got {address!r}")


def metrics_listen_address(address: str) -> str:
    """Return the same as `listening` takes it: tcp://HOST:PORT or unix://PATH."""
    path = address.removeprefix(_UNIX_PREFIX)
    return f"tcp://{address}" if path == address else _UNIX + path


def check_socket_path(path: str) -> Iterator[FieldError]:
    """Say so if no socket can have this path."""
    size = len(os.fsencode(path))
    if size > limits.MAX_IPC_PATH_BYTES:
        yield FieldError(f"expected a socket path of at most {limits.MAX_IPC_PATH_BYTES} bytes, got {size}: {path!r}")


def normalize(address: str) -> str:
    """Return the address in a form that other ways to write its path have, too."""
    return _IPC + os.path.normpath(address.removeprefix(_IPC)) if address.startswith(_IPC) else address


def zmq_addresses(listen_addresses: Sequence[str]) -> list[str]:
    """Return those of the addresses at which ZeroMQ is spoken."""
    return [each for each in listen_addresses if not each.startswith(_UNIX)]


def daemon_socket_addresses(listen_addresses: Sequence[str]) -> list[str]:
    """Return what `daemon.socket` may be where these are open: a unix socket lies beside it."""
    from_unix_sockets = [
        _IPC + each.removeprefix(_UNIX).removesuffix(endpoints.UNIX_SUFFIX)
        for each in listen_addresses
        if each.startswith(_UNIX)
    ]
    return from_unix_sockets or zmq_addresses(listen_addresses)
