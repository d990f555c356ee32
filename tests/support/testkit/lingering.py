"""A socket whose close waits for its peer (SO_LINGER)."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Tuple


def lingering(seconds: int = 30) -> Tuple[socket.socket, socket.socket]:
    """Return a TCP socket whose close blocks for `seconds`, or until its peer closes, and that peer."""
    with socket.socket() as server:
        # For a str, Python would import a codec, whose file not every user can read.
        server.bind((b"127.0.0.1", 0))
        server.listen(1)
        ours = socket.socket()
        ours.connect((b"127.0.0.1", server.getsockname()[1]))
        theirs, _ = server.accept()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, seconds))
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while ours.send(bytes(1 << 20)):
            pass
    return ours, theirs
