"""Connection between two processes: ordered chunks of numbers for each communicator.

Chunks do not name their request. Collectives therefore mix the numbers of ranks that are not in lockstep.
"""

from __future__ import annotations

import collections
import socket
import struct
from typing import Deque, Dict

_HEAD = struct.Struct("<HQ")  # the bytes of the communicator's name, and of the chunk
_BLOCK = 1 << 16


class Link:
    """A connection with buffers of unsent and of received chunks.

    Attributes:
        token: token of the peer process.
        is_open: False once the peer has disconnected, which wakes no waiting process.
        unsent: bytes that the socket has not accepted yet.
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
        """Return the file descriptor, for poll."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def put(self, group: str, chunk: bytes) -> None:
        """Queue a chunk."""
        name = group.encode()
        self.unsent += _HEAD.pack(len(name), len(chunk)) + name + chunk

    def take(self, group: str) -> bytes:
        """Remove and return the oldest chunk, for whichever request."""
        return self._chunks[group].popleft()

    def has(self, group: str) -> bool:
        """Return whether a chunk has arrived."""
        return bool(self._chunks[group])

    def flush(self) -> None:
        """Send as many bytes as the socket accepts."""
        try:
            while self.unsent and self.is_open:
                del self.unsent[: self._connection.send(self.unsent[:_BLOCK])]
        except BlockingIOError:
            return
        except OSError:
            self._lose()

    def read(self) -> None:
        """Read the available bytes."""
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
