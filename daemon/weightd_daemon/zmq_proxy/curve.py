"""The server's side of the security mechanism CURVE, for one connection: https://rfc.zeromq.org/spec/26.

All commands of the client are encrypted and authenticated with keys that are generated for this connection. The
client's last command of the handshake proves that the client has the secret key that belongs to its public key.
"""

from __future__ import annotations

import base64
import importlib
import os
import time
from collections.abc import Callable
from typing import Any

from nacl import bindings
from nacl.exceptions import CryptoError

from weightd_daemon.zmq_proxy.zmtp import COMMAND, MORE, SOCKET_METADATA, MechanismError, check_metadata
from weightd_protocol.framing import allocate

# The alphabets of base64.b85encode and of Z85. The two encodings differ in nothing else.
_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"

_KEY_BYTES, _MAC_BYTES, _NONCE_BYTES = 32, 16, 8

_HELLO, _WELCOME, _INITIATE, _READY, _MESSAGE = b"\5HELLO\1\0", b"\7WELCOME", b"\x08INITIATE", b"\5READY", b"\7MESSAGE"

_HELLO_BYTES = 200
_COOKIE_BYTES = 96
# Offsets in an INITIATE command: of its nonce, of its box (the encrypted part), and of the metadata within the
# decrypted box.
_INITIATE_NONCE = len(_INITIATE) + _COOKIE_BYTES
_INITIATE_BOX = _INITIATE_NONCE + _NONCE_BYTES
_INITIATE_METADATA = 128

_MESSAGE_BOX = len(_MESSAGE) + _NONCE_BYTES
_FLAGS_BYTES = 1
# The bit that marks a command in the flags within an encrypted frame. It differs from the bit `COMMAND` in the header
# of a frame.
_ENCRYPTED_COMMAND_FLAG = 2

# The C functions behind PyNaCl. PyNaCl's public functions copy a frame three times and block other threads meanwhile.
_sodium: Any = importlib.import_module("nacl._sodium")
_from_buffer: Callable[[Any], Any] = _sodium.ffi.from_buffer

# Size in bytes of the chunks in which a frame is copied. Between two chunks, other threads can run.
_COPY_CHUNK_BYTES = 256 * 1024


class CurveMechanism:
    """The server's side of CURVE for one connection; see `Mechanism`.

    Args:
        secret: the secret key of the server.
        is_key_allowed: called with the public key of a client in Z85; returns whether the client may connect.
    """

    name, as_server = b"CURVE", True
    overhead_bytes = _MESSAGE_BOX + _MAC_BYTES + _FLAGS_BYTES

    def __init__(self, secret: bytes, is_key_allowed: Callable[[str], bool]) -> None:
        self.peer_key = ""
        self.is_complete = False
        self._server_secret_key = secret
        self._is_key_allowed = is_key_allowed
        # The temporary keys of the client (public) and of the server (secret), the cookie that the client has to return
        # in its INITIATE command, and the shared key that is derived from the temporary keys.
        self._client_ephemeral_key = self._ephemeral_secret_key = self._cookie = self._shared_key = b""
        self._last_received_nonce = -1
        self._sent_count = 0

    # --- the handshake ------------------------------------------------------------------------------------------

    def handle_handshake_command(self, command: bytes) -> bytes:
        """See `Mechanism.handle_handshake_command`."""
        try:
            return self._on_hello(command) if not self._cookie else self._on_initiate(command)
        except CryptoError:
            raise MechanismError("a command was not made with the keys of client and server") from None

    def _on_hello(self, command: bytes) -> bytes:
        if len(command) != _HELLO_BYTES or not command.startswith(_HELLO):
            raise MechanismError("expected a HELLO command")
        client, nonce, box = command[80:112], command[112:120], command[120:]
        self._check_nonce(nonce)
        bindings.crypto_box_open(box, b"CurveZMQHELLO---" + nonce, client, self._server_secret_key)
        public, self._ephemeral_secret_key = bindings.crypto_box_keypair()
        self._client_ephemeral_key, self._cookie = client, os.urandom(_COOKIE_BYTES)
        salt = os.urandom(16)
        sealed = bindings.crypto_box(public + self._cookie, b"WELCOME-" + salt, client, self._server_secret_key)
        return _WELCOME + salt + sealed

    def _on_initiate(self, command: bytes) -> bytes:
        cookie = command[len(_INITIATE) : _INITIATE_NONCE]
        if not command.startswith(_INITIATE) or cookie != self._cookie:
            raise MechanismError("expected an INITIATE command with the cookie of this connection")
        nonce = command[_INITIATE_NONCE:_INITIATE_BOX]
        self._check_nonce(nonce)
        opened = bindings.crypto_box_open(
            command[_INITIATE_BOX:], b"CurveZMQINITIATE" + nonce, self._client_ephemeral_key, self._ephemeral_secret_key
        )
        key, salt, vouch = opened[:32], opened[32:48], opened[48:_INITIATE_METADATA]
        if len(opened) < _INITIATE_METADATA:
            raise MechanismError("expected an INITIATE command with a vouch")
        server = bindings.crypto_scalarmult_base(self._server_secret_key)
        # The vouch is encrypted with the client's secret key. It contains the client's temporary key and the server's
        # public key, so it is not valid for another connection or another server.
        if (
            bindings.crypto_box_open(vouch, b"VOUCH---" + salt, key, self._ephemeral_secret_key)
            != self._client_ephemeral_key + server
        ):
            raise MechanismError("the vouch is for another connection or another server")
        encoded_key = base64.b85encode(key).translate(bytes.maketrans(_B85, _Z85)).decode()
        if not self._is_key_allowed(encoded_key):
            raise MechanismError(f"no tenant has the key {encoded_key}", "400")
        check_metadata(opened[_INITIATE_METADATA:])
        self._shared_key = bindings.crypto_box_beforenm(self._client_ephemeral_key, self._ephemeral_secret_key)
        self.peer_key, self.is_complete = encoded_key, True
        nonce = self._next_nonce()
        return (
            _READY + nonce + bindings.crypto_box_afternm(SOCKET_METADATA, b"CurveZMQREADY---" + nonce, self._shared_key)
        )

    # --- frames -------------------------------------------------------------------------------------------------

    def open(self, content: Any) -> tuple[int, Any]:
        """See `Mechanism.open`. A frame of type `bytes` is copied; any other frame is decrypted in place."""
        if len(content) < self.overhead_bytes or content[: len(_MESSAGE)] != _MESSAGE:
            raise MechanismError("expected a MESSAGE command")
        nonce = bytes(content[len(_MESSAGE) : _MESSAGE_BOX])
        self._check_nonce(nonce)
        is_small = isinstance(content, bytes)
        box = memoryview(bytearray(content) if is_small else content)[_MESSAGE_BOX:]
        box_pointer = _from_buffer(box)
        if _sodium.lib.crypto_secretbox_open_easy(
            box_pointer, box_pointer, len(box), b"CurveZMQMESSAGEC" + nonce, self._shared_key
        ):
            raise MechanismError("a MESSAGE command was not made with the keys of this connection")
        opened = box[_FLAGS_BYTES:-_MAC_BYTES]
        flags = box[0] & MORE | (COMMAND if box[0] & _ENCRYPTED_COMMAND_FLAG else 0)
        return flags, bytes(opened) if is_small else opened

    def seal(self, flags: int, content: Any) -> Any:
        """See `Mechanism.seal`."""
        nonce = self._next_nonce()
        sealed = allocate(self.overhead_bytes + len(content))
        view = memoryview(sealed)
        view[: len(_MESSAGE)], view[len(_MESSAGE) : _MESSAGE_BOX] = _MESSAGE, nonce
        box = view[_MESSAGE_BOX:]
        plain = box[_MAC_BYTES:]
        plain[0] = flags & MORE | (_ENCRYPTED_COMMAND_FLAG if flags & COMMAND else 0)
        _copy_in_chunks(plain[_FLAGS_BYTES:], content)
        _sodium.lib.crypto_secretbox_easy(
            _from_buffer(box), _from_buffer(plain), len(plain), b"CurveZMQMESSAGES" + nonce, self._shared_key
        )
        return sealed

    def _check_nonce(self, nonce: bytes) -> None:
        """Check that a nonce is larger than all earlier nonces of the client, so that no command is accepted twice."""
        number = int.from_bytes(nonce, "big")
        if number <= self._last_received_nonce:
            raise MechanismError("a command was sent twice")
        self._last_received_nonce = number

    def _next_nonce(self) -> bytes:
        self._sent_count += 1
        return self._sent_count.to_bytes(_NONCE_BYTES, "big")


def decode_secret_key(text: str) -> bytes:
    """Return the bytes of a secret key, given its text in Z85."""
    return base64.b85decode(text.encode().translate(bytes.maketrans(_Z85, _B85)))


def _copy_in_chunks(target: memoryview, content: Any) -> None:
    source = memoryview(content)
    for begin in range(0, len(source), _COPY_CHUNK_BYTES):
        if begin:
            time.sleep(0)
        target[begin : begin + _COPY_CHUNK_BYTES] = source[begin : begin + _COPY_CHUNK_BYTES]
