"""Addresses on which the gateway listens: HOST:PORT or unix:/PATH."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterator
from typing import NamedTuple

from weightd_common.endpoints import MAX_PORT
from weightd_protocol import limits
from weightd_protocol.schema import FieldError

FORMAT = f"HOST:PORT, PORT from 0 to {MAX_PORT}, or unix:/ABSOLUTE/PATH"

_TCP = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
UNIX_PREFIX = "unix:"


class ListenAddress(NamedTuple):
    """An address to listen on.

    Attributes:
        path: the path of a Unix socket; "" for TCP.
        host: a host name or IP address; IPv6 without brackets.
        port: the TCP port; 0: any free port.
    """

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_local(self) -> bool:
        """Whether only clients on this host can connect to the address."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path:
            return f"{UNIX_PREFIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(address: str) -> ListenAddress:
    """Parse an address.

    Raises:
        FieldError: the text is not an address.
    """
    if address.startswith(f"{UNIX_PREFIX}/"):
        path = address.removeprefix(UNIX_PREFIX)
        size = len(os.fsencode(path))
        if size > limits.MAX_IPC_PATH_BYTES:
            raise FieldError(f"expected a path of at most {limits.MAX_IPC_PATH_BYTES} bytes, got {size}: {path!r}")
        return ListenAddress(path=path)
    match = _TCP.fullmatch(address)
    if match is None or int(match.group(2)) > MAX_PORT:
        raise FieldError(f"expected {FORMAT}, got {address!r}")
    return ListenAddress(host=match.group(1).strip("[]"), port=int(match.group(2)))


def address_of(listener: socket.socket) -> ListenAddress:
    """Return the address on which a socket listens."""
    name = listener.getsockname()
    return ListenAddress(path=name) if listener.family == socket.AF_UNIX else ListenAddress(host=name[0], port=name[1])


def check_addresses(addresses: tuple[str, ...]) -> Iterator[FieldError]:
    """Yield an error for each invalid address. The error contains the index of the address as its path."""
    for index, each in enumerate(addresses):
        try:
            parse(each)
        except FieldError as error:
            yield error.at(f"[{index}]")
