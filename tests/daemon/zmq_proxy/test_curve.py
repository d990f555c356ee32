"""CURVE without I/O: with a client that follows it, and with those that lie. For libzmq's see test_gates.py."""

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


class Scene:
    """A server's side of a connection, and its client."""

    def __init__(self, client: CurveClient | None = None, *, is_known: bool = True) -> None:
        self.client = client or CurveClient(SERVER, bindings.crypto_box_keypair()[1])
        self.shown: list[str] = []
        self.is_known = is_known
        self.connection = ZmtpConnection(CurveMechanism(SECRET, self.admits), BOUNDS)
        assert self.connection.receive(CURVE_GREETING) == []
        self.connection.replies.clear()

    def admits(self, key: str) -> bool:
        self.shown.append(key)
        return self.is_known

    def command(self, content: bytes) -> bytes:
        """Send a command; return the one that answers it, b"" for none."""
        assert self.connection.receive(frame(COMMAND, content)) == []
        if not self.connection.replies:
            return b""
        [reply] = self.connection.replies
        self.connection.replies.clear()
        return reply[2:]

    def shake_hands(self, data: bytes = DEALER) -> bytes:
        return self.command(self.client.initiate(self.command(self.client.hello()), data))

    def send(self, flags: int, content: bytes) -> list[list[bytes]]:
        connection = self.connection
        found = connection.receive(frame(0, self.client.message(flags, content)))
        while connection.pending_work is not None or connection.is_backlogged:
            work = connection.pending_work
            found += connection.receive(b"") if work is None else connection.on_work_done(work())
        return [[bytes(each) for each in frames] for frames in found]


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    assert made.shake_hands().startswith(b"\5READY")
    return made


def test_a_client_proves_which_key_it_has(scene: Scene) -> None:
    mechanism = scene.connection.mechanism
    public = bindings.crypto_scalarmult_base(scene.client.secret)
    assert scene.shown == [mechanism.peer_key]
    assert z85.decode(mechanism.peer_key) == public
    assert (mechanism.is_complete, scene.connection.error) == (True, "")


def test_a_key_is_read_as_libzmq_writes_it() -> None:
    public, secret = zmq.curve_keypair()
    assert bindings.crypto_scalarmult_base(decode_secret_key(secret.decode())) == z85.decode(public)


@pytest.mark.parametrize(
    "size", [0, 1, 255, 5000, CRYPTO_THREAD_BYTES - 1, CRYPTO_THREAD_BYTES, 2 * CRYPTO_THREAD_BYTES]
)
def test_frames_arrive_and_large_ones_are_decrypted_elsewhere(scene: Scene, size: int) -> None:
    content = bytes(size)
    assert scene.send(MORE, b"head") == []
    assert scene.send(0, content) == [[b"head", content]]
    head, body, *rest = zmtp.encode_message(scene.connection.mechanism, [b"answer", content])[1::2]
    assert [scene.client.opened(bytes(each)) for each in (head, body)] == [(MORE, b"answer"), (0, content)]
    assert rest == []


def test_a_ping_is_answered_encrypted(scene: Scene) -> None:
    assert scene.send(SEALED_COMMAND, b"\4PING\0\0context") == []
    assert scene.connection.pending_pong == b"\4PONGcontext"
    sent = zmtp.encode_pong(scene.connection.mechanism, b"\4PONGcontext")
    assert scene.client.opened(sent[2:]) == (SEALED_COMMAND, b"\4PONGcontext")


def test_a_client_with_an_unknown_key_is_told_so_as_libzmq_tells_it() -> None:
    scene = Scene(is_known=False)
    assert scene.shake_hands() == b"\5ERROR\x03400"
    assert "no tenant has the key " in scene.connection.error
    assert not scene.connection.is_ready


def flipped(at: int) -> Change:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("change", [flipped(6), flipped(80), flipped(112), flipped(199), lambda data: data[:-1]])
def test_a_hello_that_was_not_made_for_this_server_is_refused(change: Change) -> None:
    scene = Scene()
    assert scene.command(change(scene.client.hello())) == b""
    assert scene.connection.error


@pytest.mark.parametrize(
    "change", [flipped(9), flipped(104), flipped(113), lambda data: data[:-1], lambda data: data[:120]]
)
def test_an_initiate_that_was_changed_is_refused(change: Change) -> None:
    scene = Scene()
    initiate = scene.client.initiate(scene.command(scene.client.hello()))
    assert scene.command(change(initiate)) == b""
    assert scene.connection.error
    assert scene.shown == []


def test_a_client_that_takes_another_key_for_the_servers_is_refused() -> None:
    scene = Scene(CurveClient(OTHER, SECRET))
    assert scene.command(scene.client.hello()) == b""
    assert scene.connection.error == "a command was not made with the keys of client and server"


@pytest.mark.parametrize("is_this_server", [False, True])
def test_a_vouch_for_another_server_or_another_connection_is_no_proof(is_this_server: bool) -> None:
    """A server that is hostile could show what a client has sent to it, if that did not name both."""
    client = CurveClient(SERVER, bindings.crypto_box_keypair()[1])
    client.vouched = OTHER + SERVER if is_this_server else client.public + OTHER
    scene = Scene(client)
    assert scene.shake_hands() == b""
    assert scene.connection.error == "the vouch is for another connection or another server"
    assert scene.shown == []


def test_a_vouch_that_another_key_has_made_is_no_proof() -> None:
    client = CurveClient(SERVER, bindings.crypto_box_keypair()[1])
    scene = Scene(client)
    welcome = scene.command(client.hello())
    box = client._box

    def lying(plain: bytes, nonce: bytes) -> bytes:
        return box(OTHER + plain[32:], nonce)

    client._box = lying  # type: ignore[method-assign]
    assert scene.command(client.initiate(welcome)) == b""
    assert (scene.shown, scene.connection.is_ready) == ([], False)


def test_the_cookie_of_another_connection_is_refused() -> None:
    first, second = Scene(), Scene()
    second.command(second.client.hello())
    assert second.command(first.client.initiate(first.command(first.client.hello()))) == b""
    assert "with the cookie of this connection" in second.connection.error


def test_a_socket_of_another_type_is_refused() -> None:
    scene = Scene()
    assert scene.shake_hands(metadata(Socket_Type=b"PULL")).startswith(b"\5ERROR")
    assert not scene.connection.is_ready


@pytest.mark.parametrize("change", [flipped(0), flipped(15), flipped(16), flipped(40), lambda data: data[:32]])
def test_a_message_that_was_changed_ends_the_connection(scene: Scene, change: Change) -> None:
    assert scene.connection.receive(frame(0, change(scene.client.message(0, bytes(20))))) == []
    assert scene.connection.error


def test_a_message_that_is_sent_twice_ends_the_connection(scene: Scene) -> None:
    sent = frame(0, scene.client.message(0, b"pay"))
    assert [*map(scene.connection.receive, (sent, sent))] == [[[b"pay"]], []]
    assert scene.connection.error == "a command was sent twice"


def test_a_message_without_encryption_ends_the_connection(scene: Scene) -> None:
    assert scene.connection.receive(frame(0, b"plain")) == []
    assert scene.connection.error == "expected a MESSAGE command"


def test_a_large_frame_that_was_changed_ends_the_connection(scene: Scene) -> None:
    sealed = scene.client.message(0, bytes(CRYPTO_THREAD_BYTES))
    assert scene.connection.receive(frame(0, sealed[:-1] + b"x")) == []
    work = scene.connection.pending_work
    assert work is not None
    assert scene.connection.on_work_done(work()) == []
    assert "was not made with the keys of this connection" in scene.connection.error


def test_the_bounds_hold_for_what_is_encrypted(scene: Scene) -> None:
    for _ in range(MAX_FRAMES):
        assert scene.send(MORE, b"") == []
    assert scene.send(0, b"") == []
    assert "a message of at most 66 frames" in scene.connection.error


@given(some.binary(max_size=300), some.booleans(), some.sampled_from([b"", b"\5HELLO\1\0", b"\x08INITIATE"]))
def test_any_command_is_an_error_of_the_handshake(data: bytes, is_second: bool, begin: bytes) -> None:
    scene = Scene()
    if is_second:
        scene.command(scene.client.hello())
    scene.command(begin + data)
    assert scene.connection.error
    assert not scene.connection.is_ready
