"""Invalid bytes on the client sockets: the daemon replies with an error that names the field, serves the other clients,
and its memory does not grow.

These bytes never reach an engine, so the tests use only one.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

from testkit.service import Service
from testkit.waiting import until
from weightd import Client
from weightd_protocol import limits
from weightd_protocol.codec import decode
from weightd_protocol.messages.inference import Error, InferResponse
from weightd_protocol.messages.types import TO_CLIENT

from .support import BareEngine, SampleRequest, Zoo, ask_all, pairs

pytestmark = pytest.mark.e2e

FLAT_BYTES = 32 * 1024 * 1024
A = {"name": "a", "datatype": "FP32", "shape": [2, 4]}
B = {**A, "name": "b"}
GOOD = {"v": 2, "type": "infer", "id": "good"}
ASKED = msgpack.packb({"model_name": "two_inputs", "inputs": [A, B]})
TENSOR = np.ones((2, 4), "<f4").tobytes()


def envelope(**changes: object) -> bytes:
    """Return a valid envelope with some fields changed."""
    return msgpack.packb({**GOOD, "id": "bad", **changes})


# Frames, the id that the error must carry, and words that it must contain. The decoder's tests cover the other errors.
CASES: dict[str, tuple[Sequence[bytes], str, str]] = {
    "frame too short": (
        [envelope(), ASKED, TENSOR[:-1], TENSOR],
        "bad",
        "frames[2] (a): FP32 of shape [2, 4] is 32 bytes, got 31",
    ),
    "unknown field": ([envelope(color="red"), ASKED, TENSOR, TENSOR], "bad", "color"),
    "message of a worker": ([envelope(type="hello"), ASKED, TENSOR, TENSOR], "bad", "hello"),
    "region through a ZeroMQ proxy": (
        [envelope(type="register")],
        "bad",
        "memory can be shared only on the unix socket",
    ),
    "tensor in a region through a ZeroMQ proxy": (
        [
            envelope(parameters={"regions": {"inputs": [{"tensor_index": 0, "region": "0" * 32, "offset": 0}]}}),
            ASKED,
            TENSOR,
        ],
        "bad",
        "parameters.regions: memory can be shared only on the unix socket",
    ),
    "id too long": ([envelope(id="x" * 200), ASKED, TENSOR, TENSOR], "", "id"),
    "empty message": ([b""], "", "envelope"),
    "nested maps": ([b"\x81\xa1a" * 20_000], "", "envelope"),
    "4 GB of bytes": ([b"\xc6\xff\xff\xff\xff"], "", "envelope"),
}


@pytest.fixture(scope="module")
def service(zoo: Zoo) -> Iterator[Service]:
    with Service({"two_inputs": {"path": zoo.path("two_inputs", "onnxruntime")}}) as service:
        service.ready()
        yield service


@pytest.fixture(scope="module")
def bystander(service: Service) -> Iterator[Client]:
    """A client that stays connected during all tests."""
    with service.client() as client:
        yield client


@pytest.fixture
def questions(zoo: Zoo, bare: BareEngine) -> list[SampleRequest]:
    return bare.questions(zoo.path("two_inputs", "onnxruntime"), pairs((2, 1)))


@pytest.fixture
def unharmed(service: Service, bystander: Client, questions: list[SampleRequest]) -> Iterator[None]:
    """Check after the test that the daemon serves old and new clients and has not grown."""
    ask_all(bystander, "two_inputs", questions)
    before = peak_bytes(service.pid)
    yield
    ask_all(bystander, "two_inputs", questions)
    with service.client() as newcomer:
        ask_all(newcomer, "two_inputs", questions)
    assert bystander.status().pid == service.pid
    assert peak_bytes(service.pid) - before < FLAT_BYTES


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of the process."""
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@contextlib.contextmanager
def dealer(service: Service) -> Generator[zmq.Socket[bytes]]:
    """Connect a ZeroMQ socket that sends any frames."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVTIMEO, 10_000)
        peer.connect(service.zmq_address)
        yield peer


def assert_good_works(peer: zmq.Socket[bytes]) -> None:
    peer.send_multipart([msgpack.packb(GOOD), ASKED, TENSOR, TENSOR])
    frames = peer.recv_multipart()
    answer = decode(frames, TO_CLIENT)
    assert isinstance(answer, InferResponse)
    assert answer.id == "good"
    outputs = {
        each.name: np.frombuffer(frame, "<f4")
        for each, frame in zip(answer.description.outputs, frames[2:], strict=True)
    }
    assert outputs["sum"].tolist() == [2.0] * 8


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("case", CASES)
def test_bad_message_gets_error_that_names_field(case: str, service: Service) -> None:
    frames, request_id, words = CASES[case]
    with dealer(service) as peer:
        assert_good_works(peer)
        peer.send_multipart(frames)
        answer = decode(peer.recv_multipart(), TO_CLIENT)
        assert isinstance(answer, Error)
        assert (answer.id, answer.code) == (request_id, "INVALID_ARGUMENT")
        assert words in answer.error
        assert_good_works(peer)


# --- below ZeroMQ: bytes on the unix socket ---------------------------------------------------------------------

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
SOCKET_TYPE = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
READY_BODY = b"\x05READY" + SOCKET_TYPE + b"\x08Identity" + struct.pack(">I", 0)
READY = bytes([4, len(READY_BODY)]) + READY_BODY


@contextlib.contextmanager
def stream(service: Service) -> Generator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(service.address)
        yield connection


def shake_hands(connection: socket.socket) -> None:
    """Complete the ZMTP 3.0 handshake of a DEALER."""
    connection.sendall(GREETING + READY)
    assert read(connection, 64)[:1] == b"\xff"
    flags, length = read(connection, 2)
    assert flags == 4
    assert read(connection, length).startswith(b"\x05READY")


def read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "the daemon has closed the connection"
        data += part
    return data


def assert_answered(connection: socket.socket) -> None:
    """Send an invalid message and expect an error."""
    connection.sendall(bytes([0, 5]) + b"hello")
    flags, length = read(connection, 2)
    assert flags == 0
    assert isinstance(decode([read(connection, length)], TO_CLIENT), Error)


def hangs_up(connection: socket.socket) -> bool:
    """Read until the daemon closes the connection."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize(
    "wrong",
    [
        b"\x02" + struct.pack(">Q", limits.MAX_FRAME_BYTES + 1) + b"x" * 1000,
        b"\x02" + struct.pack(">Q", 2**64 - 1) + b"x" * 1000,
        bytes([1, 0]) * 100_000 + bytes([0, 0]),
    ],
    ids=["too large", "huge", "too many frames"],
)
def test_oversized_frames_close_connection(wrong: bytes, service: Service) -> None:
    with stream(service) as connection:
        shake_hands(connection)
        assert_answered(connection)
        with contextlib.suppress(ConnectionError):
            connection.sendall(wrong)
        assert hangs_up(connection)


@pytest.mark.usefixtures("unharmed")
def test_incomplete_frames_of_maximum_size_use_no_memory(service: Service) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            connection = stack.enter_context(stream(service))
            shake_hands(connection)
            connection.sendall(b"\x03" + struct.pack(">Q", limits.MAX_FRAME_BYTES) + b"x" * 1000)


@pytest.mark.usefixtures("unharmed")
def test_garbage_and_silent_connections_harm_no_client(
    service: Service, bystander: Client, questions: list[SampleRequest]
) -> None:
    noise = random.Random(5)
    with contextlib.ExitStack() as stack:
        for start in (b"", b"\xff", GREETING[:12], GREETING, GREETING + READY, GREETING + READY + b"\x03"):
            stack.enter_context(stream(service)).sendall(start)
            with stream(service) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(start + noise.randbytes(10_000))
        stack.enter_context(stream(service)).sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        ask_all(bystander, "two_inputs", questions)


@pytest.mark.usefixtures("unharmed")
def test_ignores_unknown_peers_on_socket_of_children(service: Service) -> None:
    [path] = [each for each in service.config.parent.glob("*.sock") if each.name != "weightd.sock"]
    assert path.stat().st_mode & 0o177 == 0
    noise = random.Random(6)
    with zmq.Context() as context:
        for name in (b"stranger", b"two_inputs.1.w2", b"two_inputs.1.holder", b"\xff\xfe"):
            with context.socket(zmq.DEALER) as peer:
                peer.setsockopt(zmq.LINGER, 1000)
                peer.setsockopt(zmq.ROUTING_ID, name)
                peer.connect(f"ipc://{path}")
                for data in (b"", noise.randbytes(100), msgpack.packb({"v": 2, "type": "broken", "cause": "x"})):
                    peer.send(data)


# --- memory limit of clients --------------------------------------------------------------------------------------

MIB = 1024 * 1024
ROOM = 64 * MIB


@pytest.fixture(scope="module")
def tight(zoo: Zoo) -> Iterator[Service]:
    models = {"two_inputs": {"path": zoo.path("two_inputs", "onnxruntime")}}
    with Service(models, {"max_memory_bytes": ROOM}) as service:
        service.ready()
        yield service


def private_bytes(pid: int) -> int:
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text("ascii").split()
    return (int(resident) - int(shared)) * 4096


@contextlib.contextmanager
def flat(service: Service, questions: list[SampleRequest]) -> Generator[None]:
    """Check that old clients are served, that the daemon's memory stays bounded, and that it is freed in the end."""
    with service.client() as client:
        ask_all(client, "two_inputs", questions)
        before = private_bytes(service.pid)
        yield
        ask_all(client, "two_inputs", questions)
        assert peak_bytes(service.pid) - before < 6 * ROOM
        until(lambda: private_bytes(service.pid) - before < ROOM // 4, "the daemon frees the memory")
        # A ZeroMQ proxy may still have to read a large answer.
        until(lambda: client.status().buffered_bytes == 0, "no bytes are buffered")


def send_for_ever(connection: socket.socket) -> None:
    while True:
        connection.sendall(bytes([3]) + struct.pack(">Q", MIB) + bytes(MIB))


def test_closes_connection_of_endless_message(tight: Service, questions: list[SampleRequest]) -> None:
    with flat(tight, questions), stream(tight) as connection, stream(tight) as idle:
        shake_hands(idle)
        shake_hands(connection)
        with pytest.raises(ConnectionError):
            send_for_ever(connection)
        # The daemon does not close the idle connection in its stead.
        assert_answered(idle)


def test_total_of_unread_answers_is_bounded(tight: Service, questions: list[SampleRequest]) -> None:
    large = np.ones((MIB // 4, 4), "<f4").tobytes()  # 4 MiB
    shapes = [{**each, "shape": [MIB // 4, 4]} for each in (A, B)]
    with flat(tight, questions), contextlib.ExitStack() as stack:
        sent: list[zmq.MessageTracker | None] = []
        for _ in range(8):
            peer = stack.enter_context(dealer(tight))
            peer.setsockopt(zmq.RCVHWM, 1)
            asked = msgpack.packb({"model_name": "two_inputs", "inputs": shapes})
            frames = [envelope(), asked, large, large]
            sent += [peer.send_multipart(frames, copy=False, track=True) for _ in range(10)]
        with tight.client() as newcomer:
            # The daemon makes room by disconnecting the client with the most unread bytes.
            ask_all(newcomer, "two_inputs", questions * 3)
            # A disconnected peer that does not read never notices, so some messages stay unsent.
            counts = [-1, 0]
            while len(set(counts[-5:])) > 1 or newcomer.status().models[0].queued:
                counts.append(sum(each is not None and each.done for each in sent))
                ask_all(newcomer, "two_inputs", questions * 20)
            ask_all(newcomer, "two_inputs", questions * 3)
            assert newcomer.status().buffered_bytes <= ROOM == newcomer.status().max_memory_bytes
