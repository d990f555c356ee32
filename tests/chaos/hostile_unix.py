"""Hostile peers of the daemon's Unix socket. Each takes the socket's address and ends without a signal."""

from __future__ import annotations

import array
import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Sequence

from weightd_common import endpoints
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.framing import MAX_FRAMES
from weightd_protocol.messages.control import ServerReady
from weightd_protocol.messages.inference import Infer, RequestDescription, TensorSpec

from . import hostile

_LIMIT_S = 1.0
_TRICKLE_S = 6
_TRICKLES = 8
# The kernel's limit of descriptors for one message.
_MAX_RIGHTS = 253
_POURED = 64
_MIB = bytes(1 << 20)


def connected(address: str) -> socket.socket:
    """Return a connection, which the daemon may close at any time. The daemon may also not be running."""
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(_LIMIT_S)
    try:
        peer.connect(endpoints.unix_path(f"ipc://{address.removeprefix('unix://')}"))
    except OSError:
        peer.close()
        raise
    return peer


def framed(frames: Sequence[bytes]) -> bytes:
    """Return a message in its framing."""
    return _head([*map(len, frames)]) + b"".join(frames)


def _head(lengths: Sequence[int]) -> bytes:
    """Do the same as `framing.head`, also for more frames than a message may have."""
    return struct.pack(f"<{1 + len(lengths)}I", len(lengths), *lengths)


def rights(descriptors: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    """Return the ancillary data that passes these descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]


def _good(rng: random.Random) -> bytes:
    description = RequestDescription("tiny", (TensorSpec("a", "INT32", (6,)),))
    return framed([*encode(Infer(f"good {rng.random()}", description)), b"\0" * 24])


def send_frames(address: str, rng: random.Random, count: int = 200) -> None:
    """Send garbage in valid framing; connect again after messages with too many frames, which break the framing."""
    while count > 0:
        with contextlib.suppress(OSError), connected(address) as peer:
            while count > 0:
                count -= 1
                peer.sendall(framed(hostile.frames(rng)))
            return
        count -= 10  # ends the loop if the daemon is not running


def send_bytes(address: str, rng: random.Random, count: int = 20) -> None:
    """Send bytes without valid framing, each over a new connection."""
    begins = (b"", struct.pack("<I", 0), struct.pack("<I", MAX_FRAMES + 1), b"\xff" * 8, hostile.SIGNATURE, _good(rng))
    for _ in range(count):
        with contextlib.suppress(OSError), connected(address) as peer:
            peer.sendall(rng.choice(begins) + rng.randbytes(rng.randrange(4096)))


def send_unfinished(address: str, rng: random.Random) -> None:
    """Send half a message and wait, or announce a message of gigabytes, and send as much of it as possible."""
    with contextlib.suppress(OSError), connected(address) as peer:
        if rng.random() < 0.5:
            good = _good(rng)
            peer.sendall(good[: rng.randrange(1, len(good))])
            time.sleep(_LIMIT_S)
            return
        header = encode(Infer("giant", RequestDescription("elastic", (TensorSpec("ids", "INT64", (1 << 24, 2)),))))
        size = rng.choice([1 << 28, limits.MAX_FRAME_BYTES])
        peer.sendall(_head([*map(len, header), *[size] * rng.randrange(1, limits.MAX_TENSORS)]) + b"".join(header))
        for _ in range(_POURED):
            peer.sendall(_MIB)
        # The unfinished message must not delay other clients.
        time.sleep(_LIMIT_S)


def trickle(address: str, rng: random.Random) -> None:
    """Send valid messages, one byte per second."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        peers = [stack.enter_context(connected(address)) for _ in range(_TRICKLES)]
        messages = [_good(rng) for _ in peers]
        for second in range(_TRICKLE_S):
            for peer, message in zip(peers, messages, strict=True):
                peer.sendall(message[second : second + 1])
            time.sleep(1.0)


def send_descriptors(address: str, rng: random.Random, count: int = 100) -> None:
    """Send descriptors with messages that need none: a few with each message, or as many as possible."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    message = framed(encode(ServerReady("flood")))
    try:
        for _ in range(10):
            most = rng.choice([1, 4, _MAX_RIGHTS])
            with contextlib.suppress(OSError), connected(address) as peer:
                for _ in range(count):
                    peer.sendmsg([message], rights([descriptor] * rng.randint(1, most)))
    finally:
        os.close(descriptor)
