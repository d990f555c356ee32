"""Hostile ZeroMQ peers: one that sends garbage, and a client that sends requests and never reads.

    python -m tests.chaos.hostile ADDRESS MODEL_NAME MODEL_PATH COUNT CLIENTS

sends COUNT requests with the model's largest input from each client, reports that on stdout, and waits to be stopped.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from weightd import Client
from weightd_protocol.codec import encode
from weightd_protocol.messages.inference import Infer, RequestDescription, TensorSpec

from .material import load

_SEND_LIMIT_MS = 1000
SIGNATURE = b"\xff\0\0\0\0\0\0\0\1\x7f"
# Complete messages of the two older protocols, which the proxy does not support.
_OLD = (b"\1\0\6\0hello", SIGNATURE + b"\1\5\0\0\0\5hello")
_GREETING = SIGNATURE + b"\3\0NULL" + b"\0" * 16 + b"\0" + b"\0" * 31
_READY = b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6DEALER"
_READY_TO_SEND = _GREETING + _READY
_COMMANDS = (b"\4\x07\4PING\0\0" * 1000, b"\4\5\4PONG" * 1000, b"\4\0" * 1000, b"\6" + b"\xff" * 8)


def frames(rng: random.Random) -> Sequence[bytes]:
    """Return a garbage message: random bytes, or a damaged valid message."""
    envelope, description = encode(Infer("good", RequestDescription("tiny", (TensorSpec("a", "INT32", (6,)),))))
    makers: list[Callable[[], Sequence[bytes]]] = [
        lambda: [rng.randbytes(rng.randrange(64)) for _ in range(rng.randrange(1, 6))],
        lambda: [_damaged(envelope, rng), description, rng.randbytes(24)],
        lambda: [envelope, _damaged(description, rng), rng.randbytes(24)],
        lambda: [envelope[: rng.randrange(len(envelope))], description, b"\0" * 24],
        lambda: [envelope, description, rng.randbytes(rng.choice([0, 23, 25, 1 << 20]))],
        lambda: [envelope, description, *[b"\0" * 24] * rng.randrange(2, 80)],
        lambda: [envelope, *[b"\0" * 24] * rng.randrange(2)],
        lambda: [b"\xdd\xff\xff\xff\xff" + rng.randbytes(32)],
        lambda: [b"", envelope, description, b"\0" * 24],
    ]
    return rng.choice(makers)()


def _damaged(frame: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def send_frames(address: str, rng: random.Random, count: int = 200) -> None:
    """Send garbage as ZeroMQ messages, from a socket that closes at once."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, _SEND_LIMIT_MS)
        dealer.setsockopt(zmq.SNDTIMEO, _SEND_LIMIT_MS)
        dealer.connect(address)
        with contextlib.suppress(zmq.Again):
            for _ in range(count):
                dealer.send_multipart(frames(rng))


def send_bytes(address: str, rng: random.Random, count: int = 20) -> None:
    """Send garbage that is not ZeroMQ either, each over a new connection."""
    for _ in range(count):
        commands = [_READY_TO_SEND + each for each in _COMMANDS]
        begins = [b"", SIGNATURE, _GREETING, _GREETING[: rng.randrange(64)], _READY_TO_SEND, *commands, *_OLD]
        begin = rng.choice(begins)
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(_SEND_LIMIT_MS / 1000)
            # The daemon may close the connection at any time, or may not be running.
            with contextlib.suppress(OSError):
                peer.connect(address.removeprefix("ipc://"))
                peer.sendall(begin + rng.randbytes(rng.randrange(4096)))


def send_unfinished(address: str, rng: random.Random, most: int = 1024) -> None:
    """Send a message without an end: at most `most` frames of 1 MiB or empty, until the daemon disconnects."""
    size = rng.choice([0, 1 << 20])
    frame = b"\3" + size.to_bytes(8, "big") + bytes(size)
    part = frame * (1 if size else 1000)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(_SEND_LIMIT_MS / 1000)
        with contextlib.suppress(OSError):
            peer.connect(address.removeprefix("ipc://"))
            peer.sendall(_READY_TO_SEND)
            for _ in range(most):
                peer.sendall(part)
            # For empty frames, the end of the message would delay the clients behind this one.
            peer.sendall(b"\0\0")
            peer.recv(1 << 16)


def main() -> None:
    """Send requests, and never read."""
    address, name, path, count, clients = sys.argv[1:]
    question = max(load(Path(path)), key=lambda each: sum(array.nbytes for array in each.inputs.values()))
    crowd = [Client(address) for _ in range(int(clients))]
    pending = [client.submit(name, question.inputs) for client in crowd for _ in range(int(count))]
    print(len(pending), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
