"""Minimal HTTP client: one persistent connection, headers not parsed."""

from __future__ import annotations

import re
import socket
import struct
from typing import Any, NamedTuple

_LIMIT_S = 120
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_CHUNK = 2**16


class Reply(NamedTuple):
    """A response with status 200."""

    head: bytes
    body: bytes | bytearray


class RawHttp:
    """A persistent HTTP connection. It reads only the status and the length from the head of a response."""

    def __init__(self, connection: socket.socket) -> None:
        # With a timeout in Python, each call would begin with a poll; the kernel's timeout needs none.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _LIMIT_S, 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection

    def fileno(self) -> int:
        """Return the descriptor of the connection, for a selector."""
        return self._connection.fileno()

    def send(self, head: bytes, body: memoryview[Any]) -> None:
        """Send a request."""
        sent = self._connection.sendmsg([head, body]) - len(head)
        if sent < len(body):
            self._connection.sendall(body[sent:])

    def answer(self) -> Reply:
        """Wait for the answer to the sent request."""
        data = self._connection.recv(_CHUNK)
        end = data.find(b"\r\n\r\n") + 4
        found = _LENGTH.search(data, 0, end)
        if not data.startswith(b"HTTP/1.1 200 ") or found is None:
            raise ConnectionError(f"expected a response with status 200 and a length, got {data[:200]!r}")
        size = int(found[1])
        if len(data) == end + size:
            return Reply(data[:end], data[end:])
        answer = bytearray(size)
        answer[: len(data) - end] = data[end:]
        rest = memoryview(answer)[len(data) - end :]
        while rest:
            count = self._connection.recv_into(rest)
            if not count:
                raise ConnectionError("the server closed the connection within a response")
            rest = rest[count:]
        return Reply(data[:end], answer)
