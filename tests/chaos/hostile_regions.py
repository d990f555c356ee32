"""Hostile client of shared memory: it writes at any time, unregisters regions early, and disconnects."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import socket
import time

import numpy as np

from weightd_common import memfd
from weightd_protocol.codec import decode, encode
from weightd_protocol.framing import FrameReader
from weightd_protocol.messages.inference import Infer, Parameters, RequestDescription, TensorSpec
from weightd_protocol.messages.regions import InputLocation, OutputLocation, Regions, Register, Registered, Unregister
from weightd_protocol.messages.types import TO_CLIENT

from .hostile_unix import connected, framed, rights

_LASTS_S = 4.0
_REQUESTS = 12
_HALF = 1 << 20
_ROW = 16  # bytes, of the elastic model's input as of its output
_PATIENCE_US = 2_000_000


def scribble(address: str, rng: random.Random) -> None:
    """Run several short connections with a new region each; each ends with requests in flight."""
    deadline = time.monotonic() + _LASTS_S
    while time.monotonic() < deadline:
        descriptor = memfd.create(2 * _HALF)
        try:
            with contextlib.suppress(OSError), connected(address) as peer, mmap.mmap(descriptor, 2 * _HALF) as content:
                _live(peer, descriptor, content, rng)
        finally:
            os.close(descriptor)
        time.sleep(0.05)


def _live(peer: socket.socket, descriptor: int, content: mmap.mmap, rng: random.Random) -> None:
    incoming = FrameReader()
    region = _registered(peer, incoming, descriptor)
    for number in range(_REQUESTS):
        peer.sendall(_request(number, region, rng))
        # Valid indices, then invalid ones.
        for most in (100, 2**62):
            begin = 8 * rng.randrange(_HALF // 8 - 64)
            content[begin : begin + 512] = np.full(64, rng.randrange(most), np.int64).tobytes()
        with contextlib.suppress(PermissionError):
            os.ftruncate(descriptor, rng.choice([0, _HALF, 4 * _HALF]))
            raise AssertionError("the size of sealed memory was changed")
        if rng.random() < 0.1:
            peer.sendall(framed(encode(Unregister("early", region))))
            region = _registered(peer, incoming, descriptor)
        time.sleep(0.01)


def _registered(peer: socket.socket, incoming: FrameReader, descriptor: int) -> str:
    """Return the region's name from the daemon's reply; drop the replies to earlier requests."""
    peer.sendmsg([framed(encode(Register("region")))], rights([descriptor]))
    while True:
        data = peer.recv(1 << 16)
        if not data:
            raise ConnectionResetError
        for received in incoming.receive(data):
            message = decode(received.frames, TO_CLIENT)
            if isinstance(message, Registered):
                return message.region


def _request(number: int, region: str, rng: random.Random) -> bytes:
    rows = rng.randrange(1, _HALF // _ROW)
    description = RequestDescription("elastic", (TensorSpec("ids", "INT64", (rows, 2)),), ("rows",))
    # Most ranges are valid; others overlap, or reach beyond the end.
    begin = rng.choice([0, 0, 0, rng.randrange(2 * _HALF), 2**50])
    room = rng.choice([_HALF, _HALF, _ROW * rows, 1, 2**40])
    name = rng.choice([region] * 9 + ["another"])
    regions = Regions((InputLocation(0, name, begin),), (OutputLocation(0, region, _HALF, room),))
    return framed(encode(Infer(f"scribble {number}", description, Parameters(_PATIENCE_US, regions))))
