"""Reads what clients send, in portions: no message keeps the loop from its other work, whatever it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import zmq

from weightd.protocol.framing import MAX_FRAMES
from weightd.shared import multipart

# Plain integers: pyzmq's own are slower.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

# A wake-up reads at most so many messages: there is more to do.
_BATCH = 64

# Frames that nobody wants are read for a few milliseconds at a time.
_PORTION = 4096


class Received(NamedTuple):
    """A message: who sent it, as its first frame tells, and its own frames; too many where it is not whole."""

    identity: zmq.Frame
    frames: list[Any]
    is_whole: bool


class Reader:
    """Reads the messages of a ROUTER socket.

    The library gives a message as a whole, and no other before its end: of one with too many frames the first are
    returned, to be refused, and the rest is dropped by and by.

    Args:
        socket: bound.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._has_rest = False

    @property
    def is_ready(self) -> bool:
        """Whether there is something to read: where the library has told that once, it does not again."""
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def read(self) -> Iterator[Received]:
        """Yield the messages that wait, at most a batch. Large frames are not copied."""
        if self._has_rest:
            self._has_rest = multipart.skip(self._socket, _PORTION)
            return
        for _ in range(_BATCH):
            try:
                identity, *frames = whole = multipart.begin(self._socket, multipart.NOBLOCK)
            except zmq.Again:
                return
            self._has_rest = whole[-1].more
            contents = [multipart.content(frame) for frame in frames]
            yield Received(identity, contents, not self._has_rest and len(frames) <= MAX_FRAMES)
            # The second is cheaper than the exception of a read that finds nothing.
            if self._has_rest or not self.is_ready:
                return
