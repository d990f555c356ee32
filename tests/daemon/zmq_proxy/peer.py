"""Test client of the ZeroMQ proxy: ZMTP 3 with NULL and CURVE, independent of the proxy's code."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from nacl import bindings

MORE, LONG, COMMAND = 1, 2, 4

# The command flag inside an encrypted frame, as libzmq uses it.
SEALED_COMMAND = 2

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
CURVE_GREETING = GREETING.replace(b"NULL\0", b"CURVE")


def frame(flags: int, content: bytes) -> bytes:
    if len(content) < 256:
        return bytes([flags, len(content)]) + content
    return bytes([flags | LONG]) + struct.pack(">Q", len(content)) + content


def message(frames: Sequence[bytes]) -> bytes:
    *first, last = frames
    return b"".join(frame(MORE, each) for each in first) + frame(0, last)


def metadata(**properties: bytes) -> bytes:
    return b"".join(
        bytes([len(name)]) + name.encode().replace(b"_", b"-") + struct.pack(">I", len(value)) + value
        for name, value in properties.items()
    )


DEALER = metadata(Socket_Type=b"DEALER", Identity=b"")
READY = frame(COMMAND, b"\5READY" + DEALER)
PING = frame(COMMAND, b"\4PING\0\0" + b"context")


class CurveClient:
    """The client's side of CURVE.

    Args:
        server: the public key that the client expects from the server.
        secret: the client's secret key.
        vouched: the content of the vouch, if not the short-term key and `server`.
    """

    def __init__(self, server: bytes, secret: bytes, vouched: bytes = b"") -> None:
        self.server, self.secret = server, secret
        self.public, self.short_secret = bindings.crypto_box_keypair()
        self.vouched = vouched or self.public + server
        self.nonce = 0
        self.shared = b""

    def _nonce(self) -> bytes:
        self.nonce += 1
        return self.nonce.to_bytes(8, "big")

    def hello(self) -> bytes:
        nonce = self._nonce()
        box = bindings.crypto_box(bytes(64), b"CurveZMQHELLO---" + nonce, self.server, self.short_secret)
        return b"\5HELLO\1\0" + bytes(72) + self.public + nonce + box

    def initiate(self, welcome: bytes, data: bytes = DEALER) -> bytes:
        salt, box = welcome[8:24], welcome[24:]
        opened = bindings.crypto_box_open(box, b"WELCOME-" + salt, self.server, self.short_secret)
        short, cookie = opened[:32], opened[32:]
        self.shared = bindings.crypto_box_beforenm(short, self.short_secret)
        vouch = bindings.crypto_box(self.vouched, b"VOUCH---" + bytes(16), short, self.secret)
        key = bindings.crypto_scalarmult_base(self.secret)
        nonce = self._nonce()
        plain = key + bytes(16) + vouch + data
        return b"\x08INITIATE" + cookie + nonce + self._box(plain, b"CurveZMQINITIATE" + nonce)

    def message(self, flags: int, content: bytes) -> bytes:
        """Return the content of the frame that carries this one encrypted."""
        nonce = self._nonce()
        return b"\7MESSAGE" + nonce + self._box(bytes([flags]) + content, b"CurveZMQMESSAGEC" + nonce)

    def opened(self, content: bytes) -> tuple[int, bytes]:
        """Return the flags and content of an encrypted frame from the server."""
        nonce = content[8:16]
        plain = bindings.crypto_box_open_afternm(content[16:], b"CurveZMQMESSAGES" + nonce, self.shared)
        return plain[0], plain[1:]

    def _box(self, plain: bytes, nonce: bytes) -> bytes:
        return bindings.crypto_box_afternm(plain, nonce, self.shared)
