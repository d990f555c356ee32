"""One process's connection to another: chunks of numbers in the order in which they were sent, for each communicator.

Nobody says which request a chunk belongs to. That is what makes the collectives mix up what is not in step.
"""

from __future__ import annotations

import collections
import socket
import struct
from typing import Deque, Dict

_HEAD = struct.Struct("<HQ")  # the bytes of the communicator's name, and of the chunk
_BLOCK = 1 << 16


class Link:
    """What was not yet sent, and what has arrived and was not yet taken.

    Attributes:
        token: the process at the other end.
        is_open: False once the other end has gone; nobody is woken by that.
        unsent: what waits for room in the socket.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._incoming = bytearray()
        self._chunks: Dict[str, Deque[bytes]] = collections.defaultdict(collections.deque)
        self.token = token
        self.is_open = True
        self.unsent = bytearray()

    def fileno(self) -> int:
        """For a poll."""
        return self._connection.fileno()

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()

    def put(self, group: str, chunk: bytes) -> None:
        """Queue a chunk."""
        name = group.encode()
        self.unsent += _HEAD.pack(len(name), len(chunk)) + name + chunk

    def take(self, group: str) -> bytes:
        """The chunk that came first, whichever request it was meant for."""
        return self._chunks[group].popleft()

    def has(self, group: str) -> bool:
        """Whether one is there."""
        return bool(self._chunks[group])

    def flush(self) -> None:
        """Send what the socket takes."""
        try:
            while self.unsent and self.is_open:
                del self.unsent[: self._connection.send(self.unsent[:_BLOCK])]
        except BlockingIOError:
            return
        except OSError:
            self._lose()

    def read(self) -> None:
        """Read what is there."""
        try:
            while True:
                data = self._connection.recv(_BLOCK)
                if not data:
                    self._lose()
                    return
                self._incoming += data
                self._cut()
        except BlockingIOError:
            return
        except OSError:
            self._lose()

    def _cut(self) -> None:
        while len(self._incoming) >= _HEAD.size:
            name, size = _HEAD.unpack_from(self._incoming)
            end = _HEAD.size + name + size
            if len(self._incoming) < end:
                return
            group = self._incoming[_HEAD.size : _HEAD.size + name].decode()
            self._chunks[group].append(bytes(self._incoming[_HEAD.size + name : end]))
            del self._incoming[:end]

    def _lose(self) -> None:
        self.is_open = False
        self.unsent.clear()
