"""CURVE without I/O, with correct and hostile clients; transport/test_zmq_proxies.py has tests with libzmq."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as some
from nacl import bindings
from zmq.utils import z85

from weightd_daemon.zmq_proxy import zmtp
from weightd_daemon.zmq_proxy.curve import CurveMechanism, decode_secret_key
from weightd_daemon.zmq_proxy.zmtp import CRYPTO_THREAD_BYTES, ZmtpConnection, ZmtpLimits
from weightd_protocol.framing import MAX_FRAMES

from .peer import COMMAND, CURVE_GREETING, DEALER, MORE, SEALED_COMMAND, CurveClient, frame, metadata

SERVER, SECRET = bindings.crypto_box_keypair()
OTHER, _ = bindings.crypto_box_keypair()
BOUNDS = ZmtpLimits(max_frame_bytes=2 * CRYPTO_THREAD_BYTES, max_message_bytes=3 * CRYPTO_THREAD_BYTES)

Change = Callable[[bytes], bytes]


class CurveHarness:
    """The server's side of a connection and its client."""

    def __init__(self, client: CurveClient | None = None, *, is_known: bool = True) -> None:
        self.client = client or CurveClient(SERVER, bindings.crypto_box_keypair()[1])
        self.keys: list[str] = []
        self.is_known = is_known
        self.connection = ZmtpConnection(CurveMechanism(SECRET, self.is_allowed), BOUNDS)
        assert self.connection.receive(CURVE_GREETING) == []
        self.connection.replies.clear()

    def is_allowed(self, key: str) -> bool:
        self.keys.append(key)
        return self.is_known

    def command(self, content: bytes) -> bytes:
        """Send a command and return the reply, or b"" without one."""
        assert self.connection.receive(frame(COMMAND, content)) == []
        if not self.connection.replies:
            return b""
        [reply] = self.connection.replies
        self.connection.replies.clear()
        return reply[2:]

    def handshake(self, data: bytes = DEALER) -> bytes:
        return self.command(self.client.initiate(self.command(self.client.hello()), data))

    def send(self, flags: int, content: bytes) -> list[list[bytes]]:
        connection = self.connection
        found = connection.receive(frame(0, self.client.message(flags, content)))
        while connection.pending_work is not None or connection.is_backlogged:
            work = connection.pending_work
            found += connection.receive(b"") if work is None else connection.on_work_done(work())
        return [[bytes(each) for each in frames] for frames in found]


@pytest.fixture
def harness() -> CurveHarness:
    made = CurveHarness()
    assert made.handshake().startswith(b"\5READY")
    return made


def test_client_proves_its_key(harness: CurveHarness) -> None:
    mechanism = harness.connection.mechanism
    public = bindings.crypto_scalarmult_base(harness.client.secret)
    assert harness.keys == [mechanism.peer_key]
    assert z85.decode(mechanism.peer_key) == public
    assert (mechanism.is_complete, harness.connection.error) == (True, "")


def test_decodes_secret_keys_of_libzmq() -> None:
    public, secret = zmq.curve_keypair()
    assert bindings.crypto_scalarmult_base(decode_secret_key(secret.decode())) == z85.decode(public)


@pytest.mark.parametrize(
    "size", [0, 1, 255, 5000, CRYPTO_THREAD_BYTES - 1, CRYPTO_THREAD_BYTES, 2 * CRYPTO_THREAD_BYTES]
)
def test_decrypts_large_frames_on_a_thread(harness: CurveHarness, size: int) -> None:
    content = bytes(size)
    assert harness.send(MORE, b"head") == []
    assert harness.send(0, content) == [[b"head", content]]
    head, body, *rest = zmtp.encode_message(harness.connection.mechanism, [b"answer", content])[1::2]
    assert [harness.client.opened(bytes(each)) for each in (head, body)] == [(MORE, b"answer"), (0, content)]
    assert rest == []


def test_pong_is_encrypted(harness: CurveHarness) -> None:
    assert harness.send(SEALED_COMMAND, b"\4PING\0\0context") == []
    assert harness.connection.pending_pong == b"\4PONGcontext"
    sent = zmtp.encode_pong(harness.connection.mechanism, b"\4PONGcontext")
    assert harness.client.opened(sent[2:]) == (SEALED_COMMAND, b"\4PONGcontext")


def test_unknown_key_gets_the_error_of_libzmq() -> None:
    harness = CurveHarness(is_known=False)
    assert harness.handshake() == b"\5ERROR\x03400"
    assert "no tenant has the key " in harness.connection.error
    assert not harness.connection.is_ready


def flipped(at: int) -> Change:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("change", [flipped(6), flipped(80), flipped(112), flipped(199), lambda data: data[:-1]])
def test_rejects_hello_for_another_server(change: Change) -> None:
    harness = CurveHarness()
    assert harness.command(change(harness.client.hello())) == b""
    assert harness.connection.error


@pytest.mark.parametrize(
    "change", [flipped(9), flipped(104), flipped(113), lambda data: data[:-1], lambda data: data[:120]]
)
def test_rejects_modified_initiate(change: Change) -> None:
    harness = CurveHarness()
    initiate = harness.client.initiate(harness.command(harness.client.hello()))
    assert harness.command(change(initiate)) == b""
    assert harness.connection.error
    assert harness.keys == []


def test_rejects_client_of_another_server_key() -> None:
    harness = CurveHarness(CurveClient(OTHER, SECRET))
    assert harness.command(harness.client.hello()) == b""
    assert harness.connection.error == "a command was not made with the keys of client and server"


@pytest.mark.parametrize("is_this_server", [False, True])
def test_rejects_vouch_for_another_server_or_connection(is_this_server: bool) -> None:
    """Otherwise a hostile server could replay what a client has sent to it."""
    client = CurveClient(SERVER, bindings.crypto_box_keypair()[1])
    client.vouched = OTHER + SERVER if is_this_server else client.public + OTHER
    harness = CurveHarness(client)
    assert harness.handshake() == b""
    assert harness.connection.error == "the vouch is for another connection or another server"
    assert harness.keys == []


def test_rejects_vouch_of_another_key() -> None:
    client = CurveClient(SERVER, bindings.crypto_box_keypair()[1])
    harness = CurveHarness(client)
    welcome = harness.command(client.hello())
    box = client._box

    def lying(plain: bytes, nonce: bytes) -> bytes:
        return box(OTHER + plain[32:], nonce)

    client._box = lying  # type: ignore[method-assign]
    assert harness.command(client.initiate(welcome)) == b""
    assert (harness.keys, harness.connection.is_ready) == ([], False)


def test_rejects_cookie_of_another_connection() -> None:
    first, second = CurveHarness(), CurveHarness()
    second.command(second.client.hello())
    assert second.command(first.client.initiate(first.command(first.client.hello()))) == b""
    assert "with the cookie of this connection" in second.connection.error


def test_rejects_other_socket_types() -> None:
    harness = CurveHarness()
    assert harness.handshake(metadata(Socket_Type=b"PULL")).startswith(b"\5ERROR")
    assert not harness.connection.is_ready


@pytest.mark.parametrize("change", [flipped(0), flipped(15), flipped(16), flipped(40), lambda data: data[:32]])
def test_modified_message_ends_the_connection(harness: CurveHarness, change: Change) -> None:
    assert harness.connection.receive(frame(0, change(harness.client.message(0, bytes(20))))) == []
    assert harness.connection.error


def test_replayed_message_ends_the_connection(harness: CurveHarness) -> None:
    sent = frame(0, harness.client.message(0, b"pay"))
    assert [*map(harness.connection.receive, (sent, sent))] == [[[b"pay"]], []]
    assert harness.connection.error == "a command was sent twice"


def test_unencrypted_message_ends_the_connection(harness: CurveHarness) -> None:
    assert harness.connection.receive(frame(0, b"plain")) == []
    assert harness.connection.error == "expected a MESSAGE command"


def test_modified_large_frame_ends_the_connection(harness: CurveHarness) -> None:
    sealed = harness.client.message(0, bytes(CRYPTO_THREAD_BYTES))
    assert harness.connection.receive(frame(0, sealed[:-1] + b"x")) == []
    work = harness.connection.pending_work
    assert work is not None
    assert harness.connection.on_work_done(work()) == []
    assert "was not made with the keys of this connection" in harness.connection.error


def test_limits_apply_to_encrypted_frames(harness: CurveHarness) -> None:
    for _ in range(MAX_FRAMES):
        assert harness.send(MORE, b"") == []
    assert harness.send(0, b"") == []
    assert "a message of at most 66 frames" in harness.connection.error


@given(some.binary(max_size=300), some.booleans(), some.sampled_from([b"", b"\5HELLO\1\0", b"\x08INITIATE"]))
def test_random_commands_fail_the_handshake(data: bytes, is_second: bool, begin: bytes) -> None:
    harness = CurveHarness()
    if is_second:
        harness.command(harness.client.hello())
    harness.command(begin + data)
    assert harness.connection.error
    assert not harness.connection.is_ready
