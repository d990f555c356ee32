from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Generator, Iterator, List, Sequence

import msgpack
import numpy as np
import pytest
import zmq

from testkit.fakedaemon import LIMIT_S, FakeDaemon, echo, silent
from weightd import Client, ClientClosed, DeadlineExceeded, InvalidArgument, ProtocolError, Unavailable
from weightd.address import check_reachable, parse_address
from weightd.protocol_core import ClientCore
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.errors import Cancelled
from weightd_protocol.messages.control import ModelReady, ReadyResponse
from weightd_protocol.messages.inference import Cancel, Error, Infer
from weightd_protocol.messages.types import ClientMessage

X = np.arange(6, dtype=np.float32).reshape(2, 3)


# --- requests and responses -----------------------------------------------------------------------------------------


def test_infer_returns_the_outputs(client: Client) -> None:
    large = np.random.default_rng(0).standard_normal((512, 1024))
    inputs: Dict[str, Any] = {
        "x": X,
        "scalar": np.array(7, np.int64),
        "none": np.zeros((0, 4), np.uint8),
        "large": large,
    }
    outputs = client.infer("echo", inputs)
    assert [*outputs] == [*inputs]
    for name, value in inputs.items():
        assert np.array_equal(outputs[name], value)
        assert outputs[name].shape == value.shape


def test_metadata_server_and_status(client: Client) -> None:
    assert client.metadata("m").platform == "echo"
    assert client.server().version == "9.9"
    assert client.status().state == client.metrics().state == "running"


def readiness(message: ClientMessage, tensors: Sequence[bytes]) -> List[List[Any]]:
    """Reply that only the model "up" is ready."""
    ready = isinstance(message, ModelReady) and message.model_name == "up"
    return [encode(ReadyResponse(message.id, ready, "" if ready else "attaching"))]


def test_ready_is_a_boolean(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = readiness
    assert client.ready("up")
    assert not client.ready("down")
    assert not client.ready()
    assert client.ready("down").reason == "attaching"


def test_response_may_be_longer_than_a_request(client: Client, daemon: FakeDaemon) -> None:
    def long(message: ClientMessage, tensors: Sequence[bytes]) -> List[List[Any]]:
        ((answer,),) = echo(message, tensors)
        return [[msgpack.packb({**msgpack.unpackb(answer), "more": "x" * limits.MAX_HEADER_BYTES})]]

    daemon.handle = long
    assert client.status().state == "running"


def test_more_requests_than_queues_of_zeromq_hold(client: Client, daemon: FakeDaemon) -> None:
    held: List[List[Any]] = []
    all_sent = threading.Event()

    def answer_all_at_the_end(message: ClientMessage, tensors: Sequence[bytes]) -> Iterator[List[Any]]:
        held.extend(echo(message, tensors))
        if isinstance(message, Infer) and message.description.model_name == "last":
            yield from held
            all_sent.set()

    daemon.handle = answer_all_at_the_end
    # Each side's queue holds a thousand messages, and the kernel's buffer a few dozen of this size.
    inputs = np.arange(3000 * 1000, dtype=np.float32).reshape(3000, 1000)
    pending = [client.submit("m" if i < 2999 else "last", {"x": each}) for i, each in enumerate(inputs)]
    # A busy client does not block the daemon.
    assert all_sent.wait(LIMIT_S)
    assert all(np.array_equal(each.result()["x"], inputs[i]) for i, each in enumerate(pending))


def test_done_does_not_block(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    pending = client.submit("m", {"x": X})
    assert not pending.done()
    message, tensors = daemon.next()
    daemon.send(*echo(message, tensors)[0])
    result = pending.result()
    assert pending.done()
    assert pending.result() is result


def test_unclaimed_answers_do_not_accumulate(
    client: Client, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: List[object] = []

    def received(_: ClientCore, frames: Sequence[bytes]) -> None:
        heard.append(frames)

    monkeypatch.setattr(ClientCore, "on_message", received)
    client.submit("echo", {"x": X})
    daemon.next()
    daemon.handle = silent
    deadline = time.monotonic() + LIMIT_S
    while not heard:
        assert time.monotonic() < deadline
        client.submit("m", {"x": X})


# --- deadlines ------------------------------------------------------------------------------------------------------


def test_silent_daemon_ends_in_deadline(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    with pytest.raises(DeadlineExceeded, match="does not respond"):
        client.infer("m", {"x": X}, timeout=0.1)
    # The client drops the late answer.
    message, tensors = daemon.next()
    daemon.send(*echo(message, tensors)[0])
    daemon.handle = echo
    assert client.infer("m", {"x": X + 1})["x"][0, 0] == 1


def test_timely_answer_outlives_deadline(client: Client) -> None:
    late = client.submit("echo", {"x": X}, timeout=0.001)
    client.infer("echo", {"x": X})
    assert late.done()
    assert np.array_equal(late.result()["x"], X)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 3601])
def test_rejects_timeout_out_of_range(client: Client, daemon: FakeDaemon, timeout: float) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        client.infer("m", {"x": X}, timeout=timeout)
    with pytest.raises(InvalidArgument, match="timeout"):
        Client(daemon.address, timeout=timeout)


def submit_without_end(client: Client, timeout: float) -> None:
    large = np.zeros(256 * 1024, np.uint8)
    while True:
        client.submit("m", {"x": large}, timeout=timeout)


@contextlib.contextmanager
def unread_listener(address: str) -> Generator[Callable[[], None], None, None]:
    """Listen without reading; yield a function that closes the connection."""
    if address.startswith("ipc://"):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.RCVHWM, 1)
        router.bind(address)
        yield lambda: context.destroy(0)
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(parse_address(address).unix_path)
            listener.listen(1)
            yield listener.close


def test_daemon_that_does_not_read(address: str) -> None:
    with unread_listener(address) as end, Client(address, timeout=LIMIT_S) as client:
        with pytest.raises(DeadlineExceeded, match="does not read"):
            submit_without_end(client, 0.1)
        # The daemon exits while the client waits with a full queue.
        death = threading.Timer(0.1, end)
        death.start()
        with pytest.raises(Unavailable):
            submit_without_end(client, LIMIT_S)
        death.join()


def test_unanswered_connection_ends_in_deadline(address: str) -> None:
    ways = parse_address(address)
    with socket.socket(socket.AF_UNIX) as mute, socket.socket(socket.AF_UNIX) as first:
        mute.bind(ways.unix_path or ways.zmq_address[len("ipc://") :])
        mute.listen(0)
        first.connect(mute.getsockname())
        with pytest.raises(DeadlineExceeded, match=r"handshake with .* timed out"):
            Client(address, timeout=0.1)


# --- connection loss ------------------------------------------------------------------------------------------------


def test_daemon_exit_ends_calls_and_next_call_reconnects(client: Client, daemon: FakeDaemon) -> None:
    first = client.submit("first", {"x": X})
    daemon.next()
    daemon.handle = silent
    pending = [client.submit("old", {"x": X}) for _ in range(3)]
    for _ in pending:
        daemon.next()
    daemon.stop()
    for each in pending:
        with pytest.raises(Unavailable, match="lost the connection to "):
            each.result()
    assert all(each.done() for each in pending)
    # Answers that arrived before the loss are valid.
    assert np.array_equal(first.result()["x"], X)
    with pytest.raises(Unavailable, match="no daemon at "):
        client.infer("new", {"x": X})
    new = FakeDaemon(daemon.address)
    assert np.array_equal(client.infer("new", {"x": X})["x"], X)
    # The new daemon does not receive the requests for the old one.
    message, _ = new.next()
    assert isinstance(message, Infer)
    assert message.description.model_name == "new"
    assert new.seen.empty()
    new.stop()


def test_idle_client_survives_daemon_restart(client: Client, daemon: FakeDaemon) -> None:
    assert client.infer("echo", {"x": X})
    daemon.stop()
    new = FakeDaemon(daemon.address)
    if client.transport == "zmq":
        select.select([client._session.connection.descriptors[1]], [], [], LIMIT_S)  # pyright: ignore[reportPrivateUsage]
    assert client.infer("echo", {"x": X})
    new.stop()


def test_daemon_exit_during_zeromq_connect(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: List[str] = []

    def there_at_the_first_look(where: str) -> None:
        looks.append(where)
        if len(looks) > 1:
            check_reachable(where)

    monkeypatch.setattr("weightd.transport_zmq.addresses.check_reachable", there_at_the_first_look)
    with pytest.raises(Unavailable, match="there is no socket"):
        Client(f"ipc://{directory}/d.sock", timeout=LIMIT_S)


def test_zeromq_loss_is_reported_after_last_answer(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = FakeDaemon(f"ipc://{directory}/d.sock", silent)
    with Client(daemon.address, timeout=LIMIT_S) as client:
        first, second = (client.submit("echo", {"x": X}) for _ in range(2))
        message, tensors = daemon.next()
        daemon.next()
        connection: Any = client._session.connection  # pyright: ignore[reportPrivateUsage]
        for frames in echo(message, tensors):
            daemon.send(*frames)
        select.select([connection.descriptors[0]], [], [], LIMIT_S)
        daemon.stop()
        select.select([connection.descriptors[1]], [], [], LIMIT_S)
        # The answer arrives just after the client has polled.
        seen = connection._receive_available

        def nothing_yet() -> List[Any]:
            monkeypatch.setattr(connection, "_receive_available", seen)
            return []

        monkeypatch.setattr(connection, "_receive_available", nothing_yet)
        assert first.result()
        begin = time.monotonic()
        with pytest.raises(Unavailable, match="lost the connection to "):
            second.result()
        assert time.monotonic() - begin < LIMIT_S / 10


def test_tcp_connection_loss_and_refusal() -> None:
    fake = FakeDaemon("tcp://127.0.0.1:*", silent)
    with Client(fake.address, timeout=LIMIT_S) as client:
        pending = client.submit("m", {"x": X})
        fake.next()
        fake.stop()
        with pytest.raises(Unavailable, match="lost the connection to "):
            pending.result()
        with pytest.raises(Unavailable, match="no response"):
            client.infer("m", {"x": X})
    with pytest.raises(Unavailable, match="no response"):
        Client(fake.address, timeout=LIMIT_S)


def test_closes_connection_after_protocol_error(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    pending = [client.submit("m", {"x": X}) for _ in range(2)]
    for _ in pending:
        daemon.next()
    daemon.send(b"\xc1")
    for each in pending:
        with pytest.raises(ProtocolError, match="envelope"):
            each.result()
    daemon.handle = echo
    assert client.infer("m", {"x": X})


def test_interrupt_during_message_closes_connection(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = client.submit("echo", {"x": X})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ClientCore, "on_message", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pending.result()
    assert np.array_equal(client.infer("echo", {"x": X})["x"], X)
    with pytest.raises(Unavailable, match="in the middle of a message"):
        pending.result()


def test_reports_other_program_on_socket(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{directory}/d.sock.unix")
        other.listen(1)
        with Client(f"{directory}/d.sock", timeout=LIMIT_S) as client:
            accepted, _ = other.accept()
            accepted.send(b"HTTP/1.1 400 Bad Request")
            with accepted, pytest.raises(
                ProtocolError, match=r"d.sock.unix does not speak weightd's protocol: frames: expected"
            ):
                client.server()


# --- ownership ------------------------------------------------------------------------------------------------------


def test_forked_process_needs_a_new_client(daemon: FakeDaemon) -> None:
    script = f"""
import os, sys
from weightd import Client, WrongProcess
client = Client({daemon.address!r})
client.server()
child = os.fork()
if child == 0:
    client.close()  # allowed, and does nothing
    try:
        client.server()
    except WrongProcess:
        with Client({daemon.address!r}) as own:
            own.server()
        del client
        sys.exit(42)
status = os.waitpid(child, 0)[1] >> 8
client.server()
print("unclosed", file=sys.stderr, flush=True)
del client
sys.exit(status)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", script]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, timeout=LIMIT_S, check=False)
    assert done.returncode == 42
    # Dropping an open client in the child causes a warning and does not hang.
    assert b"ResourceWarning: " in done.stderr.partition(b"unclosed\n")[2]


def test_closed_client_raises_error(client: Client) -> None:
    pending = client.submit("echo", {"x": X})
    client.close()
    client.close()
    for use in (client.server, pending.result, pending.done):
        with pytest.raises(ClientClosed):
            use()


# --- leaks ----------------------------------------------------------------------------------------------------------


def test_clients_start_no_threads(client: Client, daemon: FakeDaemon) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - Python 3.7

    client.server()
    before = threads()
    with Client(daemon.address, timeout=LIMIT_S) as another:
        another.server()
        assert threads() == before


def test_leaks_no_descriptors(address: str) -> None:
    def round_trip() -> None:
        fake = FakeDaemon(address)
        client = Client(address, timeout=LIMIT_S)
        fake.handle = silent
        pending = client.submit("m", {"x": X})
        fake.stop()
        with pytest.raises(Unavailable):
            pending.result()
        with pytest.raises(Unavailable):
            client.server()
        client.close()
        with pytest.raises(Unavailable):
            Client(address)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - Python 3.7

    round_trip()
    before, threads = descriptors(), threading.active_count()
    for _ in range(3):
        round_trip()
    assert descriptors() <= before
    assert threading.active_count() <= threads


def cancels(message: ClientMessage, _: Sequence[bytes]) -> List[List[Any]]:
    return [encode(Error(message.id, "CANCELLED", "cancelled by the client"))] if isinstance(message, Cancel) else []


def test_cancelled_request_raises_cancelled(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = cancels
    pending = client.submit("m", {"x": X})
    other = client.submit("m", {"x": X})
    pending.cancel()
    with pytest.raises(Cancelled, match=r"^cancelled by the client$"):
        pending.result()
    assert not other.done()
    (infer, _), _, (cancel, _) = daemon.next(), daemon.next(), daemon.next()
    assert isinstance(infer, Infer)
    assert cancel == Cancel(infer.id)


def test_finished_request_is_not_cancelled(client: Client, daemon: FakeDaemon) -> None:
    pending = client.submit("echo", {"x": X})
    assert pending.result()
    pending.cancel()
    assert pending.result()
    daemon.next()
    assert client.infer("echo", {"x": X})
    assert isinstance(daemon.next()[0], Infer), "no cancel was sent"


def test_answer_beats_late_cancellation(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    pending = client.submit("echo", {"x": X})
    message, tensors = daemon.next()
    pending.cancel()
    daemon.next()
    daemon.send(*echo(message, tensors)[0])
    assert np.array_equal(pending.result()["x"], X)


def test_cancel_after_daemon_exit_is_unavailable(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    pending = client.submit("m", {"x": X})
    daemon.next()
    daemon.stop()
    pending.cancel()
    with pytest.raises(Unavailable):
        pending.result()


def test_cancel_during_a_read(client: Client, daemon: FakeDaemon) -> None:
    """The garbage collector cancels the remaining requests of a `map` in this way."""
    daemon.handle = lambda message, tensors: [] if isinstance(message, Cancel) else echo(message, tensors)
    pending = client.submit("echo", {"x": X})
    connection = client._session.connection  # pyright: ignore[reportPrivateUsage]
    readers = client._transport._election.reader  # pyright: ignore[reportPrivateUsage]
    receive, send = connection.receive, connection.send

    def stuck(frames: List[Any], descriptors: Sequence[int] = ()) -> bool:
        return False

    def collecting() -> List[Any]:
        connection.receive = receive  # type: ignore[method-assign]
        connection.send = stuck
        connection.get_sent_target = lambda: 1 << 30  # type: ignore[method-assign]
        before = dict(readers)
        pending.cancel()
        connection.send = send
        assert readers == before, "two threads read at the same time"
        return receive()

    connection.receive = collecting  # type: ignore[method-assign]
    assert client.infer("echo", {"x": X})


def test_cancel_during_a_send_follows_the_message(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = lambda message, tensors: [] if isinstance(message, Cancel) else echo(message, tensors)
    pending = client.submit("echo", {"x": X})
    connection = client._session.connection  # pyright: ignore[reportPrivateUsage]
    send = connection.send

    def collecting(frames: List[Any], descriptors: Sequence[int] = ()) -> bool:
        connection.send = send
        pending.cancel()
        return send(frames, descriptors)

    connection.send = collecting
    assert client.infer("echo", {"x": X})
    assert [type(daemon.next()[0]) for _ in range(3)] == [Infer, Infer, Cancel]
