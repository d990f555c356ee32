from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator, List, Sequence

import numpy as np
import pytest
import zmq

from testkit.fakedaemon import LIMIT_S, FakeDaemon, echo, silent
from weightd.client import (
    Client,
    ClientClosed,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ProtocolError,
    ResourceExhausted,
    Unavailable,
    WrongThread,
)
from weightd.client.address import check
from weightd.protocol.codec import encode
from weightd.protocol.messages.data import Error, Infer
from weightd.protocol.messages.types import ClientMessage
from weightd.shared import multipart

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def in_thread(work: Callable[[], object]) -> BaseException | None:
    """Return what `work` raises in another thread."""
    raised: List[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is looked at by the test
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT_S)
    return raised[0] if raised else None


def run_python(script: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *options, "-c", script]
    return subprocess.run(command, env=environment, stderr=subprocess.PIPE, timeout=LIMIT_S, check=False)


# --- questions and answers ------------------------------------------------------------------------------------------


def test_infer_returns_the_outputs(client: Client) -> None:
    outputs = client.infer("echo", {"x": X, "scalar": np.array(7, np.int64), "none": np.zeros((0, 4), np.uint8)})
    assert np.array_equal(outputs["x"], X)
    assert outputs["scalar"].tolist() == 7
    assert outputs["none"].shape == (0, 4)


def test_large_tensors_pass_unchanged(client: Client) -> None:
    large = np.random.default_rng(0).standard_normal((512, 1024))
    assert np.array_equal(client.infer("echo", {"x": large})["x"], large)


def test_metadata_server_and_status(client: Client) -> None:
    assert client.metadata("m").platform == "echo"
    assert client.server().version == "9.9"
    assert client.status().state == "running"


def test_the_daemon_is_told_the_timeout(client: Client, daemon: FakeDaemon) -> None:
    client.infer("echo", {"x": X}, timeout=2.5)
    message, _ = daemon.next()
    assert isinstance(message, Infer)
    assert message.parameters.timeout == 2_500_000


def test_results_in_any_order(client: Client) -> None:
    pending = [client.submit("echo", {"x": np.array([i])}) for i in range(50)]
    assert [int(each.result()["x"][0]) for each in reversed(pending)] == list(range(49, -1, -1))


def test_more_under_way_than_any_queue_of_zeromq_holds(client: Client, daemon: FakeDaemon) -> None:
    held: List[List[Any]] = []
    all_sent = threading.Event()

    def answer_all_at_the_end(message: ClientMessage, tensors: Sequence[bytes]) -> Iterator[List[Any]]:
        held.extend(echo(message, tensors))
        if isinstance(message, Infer) and message.model_name == "last":
            yield from held
            all_sent.set()

    daemon.handle = answer_all_at_the_end
    pending = [client.submit("m" if i < 5999 else "last", {"x": np.array([i])}) for i in range(6000)]
    # The daemon is not held up by a client that does something else.
    assert all_sent.wait(LIMIT_S)
    assert all(int(each.result()["x"][0]) == i for i, each in enumerate(pending))


def test_an_error_is_the_exception_of_its_code(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = lambda message, _: [[encode(Error(message.id, "NOT_FOUND", "no model 'm'"))]]
    with pytest.raises(NotFound, match="no model 'm'"):
        client.infer("m", {"x": X})
    daemon.handle = echo
    assert client.infer("m", {"x": X})


def test_done_does_not_wait(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    pending = client.submit("m", {"x": X})
    assert not pending.done()
    message, tensors = daemon.next()
    daemon.send(*echo(message, tensors)[0])
    result = pending.result()
    assert pending.done()
    assert pending.result() is result


def test_what_nobody_waits_for_is_taken_in_and_forgotten(client: Client) -> None:
    for _ in range(200):
        client.submit("echo", {"x": X})
    assert client.infer("echo", {"x": X})
    gc.collect()
    assert client._core.waiting == 0  # pyright: ignore[reportPrivateUsage]


def test_answers_that_nobody_waits_for_do_not_pile_up(client: Client, daemon: FakeDaemon) -> None:
    socket = client._connection._socket  # pyright: ignore[reportPrivateUsage]
    client.submit("echo", {"x": X})
    assert socket.poll(int(1000 * LIMIT_S))
    daemon.handle = silent
    client.submit("m", {"x": X})
    assert not socket.poll(0)


# --- deadlines ------------------------------------------------------------------------------------------------------


def test_a_silent_daemon_is_waited_for_until_the_deadline(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="does not answer"):
        client.infer("m", {"x": X}, timeout=0.2)
    assert 0.2 <= time.monotonic() - started < LIMIT_S / 2


def test_a_late_answer_is_dropped(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    with pytest.raises(DeadlineExceeded):
        client.infer("m", {"x": X}, timeout=0.01)
    message, tensors = daemon.next()
    daemon.send(*echo(message, tensors)[0])
    daemon.handle = echo
    assert client.infer("m", {"x": X + 1})["x"][0, 0] == 1


def test_an_answer_that_came_in_time_is_there_after_the_deadline(client: Client) -> None:
    late = client.submit("echo", {"x": X}, timeout=0.001)
    client.infer("echo", {"x": X})
    assert late.done()
    assert np.array_equal(late.result()["x"], X)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 3601])
def test_a_timeout_out_of_bounds_is_refused(client: Client, daemon: FakeDaemon, timeout: float) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        client.infer("m", {"x": X}, timeout=timeout)
    with pytest.raises(InvalidArgument, match="timeout"):
        Client(daemon.address, timeout=timeout)


def submit_without_end(client: Client, timeout: float) -> None:
    large = np.zeros(256 * 1024, np.uint8)
    while True:
        client.submit("m", {"x": large}, timeout=timeout)


@pytest.fixture
def deaf(address: str) -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A daemon at `address` that reads nothing, until its context is destroyed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.bind(address)
    yield context
    context.destroy(linger=0)


def test_a_daemon_that_reads_nothing_ends_in_the_deadline(address: str, deaf: zmq.Context[zmq.Socket[bytes]]) -> None:
    with Client(address, timeout=LIMIT_S) as client, pytest.raises(DeadlineExceeded, match="does not read"):
        submit_without_end(client, 0.1)


def test_a_daemon_that_reads_nothing_and_dies_ends_the_wait(address: str, deaf: zmq.Context[zmq.Socket[bytes]]) -> None:
    with Client(address, timeout=LIMIT_S) as client:
        with pytest.raises(DeadlineExceeded):
            submit_without_end(client, 0.1)
        # Dies while the client waits: its queue is full.
        death = threading.Timer(0.2, deaf.destroy, [0])
        death.start()
        started = time.monotonic()
        with pytest.raises(Unavailable):
            submit_without_end(client, LIMIT_S)
        assert time.monotonic() - started < LIMIT_S / 2
        death.join()


def test_who_listens_and_does_not_answer_ends_in_the_deadline(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(directory / "mute.sock"))
        mute.listen(5)
        with pytest.raises(DeadlineExceeded, match="no handshake"):
            Client(f"ipc://{directory}/mute.sock", timeout=0.1)


# --- a lost daemon --------------------------------------------------------------------------------------------------


def test_a_dying_daemon_ends_all_calls_at_once(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    pending = [client.submit("m", {"x": X}) for _ in range(3)]
    for _ in pending:
        daemon.next()
    started = time.monotonic()
    daemon.stop()
    for each in pending:
        with pytest.raises(Unavailable, match="is lost"):
            each.result()
    assert all(each.done() for each in pending)
    assert time.monotonic() - started < LIMIT_S / 2


def test_an_answer_that_came_before_the_loss_counts(client: Client, daemon: FakeDaemon) -> None:
    first = client.submit("echo", {"x": X})
    daemon.next()
    daemon.handle = silent
    second = client.submit("echo", {"x": X})
    daemon.next()
    daemon.stop()
    with pytest.raises(Unavailable):
        second.result()
    assert np.array_equal(first.result()["x"], X)


def test_without_a_daemon_the_next_call_says_so_at_once(client: Client, daemon: FakeDaemon) -> None:
    daemon.stop()
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(Unavailable, match=r"is lost|no daemon at "):
            client.infer("m", {"x": X})
        assert time.monotonic() - started < LIMIT_S / 2


def use_until_lost(client: Client) -> None:
    while True:
        client.server(timeout=LIMIT_S)


def test_the_next_call_reaches_a_new_daemon_by_itself(client: Client, daemon: FakeDaemon) -> None:
    assert client.infer("echo", {"x": X})
    daemon.stop()
    with pytest.raises(Unavailable):
        use_until_lost(client)
    for _ in range(3):
        new = FakeDaemon(daemon.address)
        assert np.array_equal(client.infer("echo", {"x": X})["x"], X)
        new.stop()
        with pytest.raises(Unavailable):
            use_until_lost(client)


def test_an_idle_client_does_not_notice(client: Client, daemon: FakeDaemon) -> None:
    assert client.infer("echo", {"x": X})
    daemon.stop()
    new = FakeDaemon(daemon.address)
    assert client._connection._alarm.poll(1000 * LIMIT_S)  # pyright: ignore[reportPrivateUsage]
    assert client.infer("echo", {"x": X})
    new.stop()


def test_a_daemon_that_ends_while_one_connects(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: List[str] = []

    def there_at_the_first_look(where: str) -> None:
        looks.append(where)
        if len(looks) > 1:
            check(where)

    monkeypatch.setattr("weightd.client.connection.addresses.check", there_at_the_first_look)
    with pytest.raises(Unavailable, match="there is no socket"):
        Client(address, timeout=LIMIT_S)


def test_a_new_daemon_is_not_sent_the_old_ones_requests(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    old = client.submit("old", {"x": X})
    daemon.next()
    daemon.stop()
    with pytest.raises(Unavailable):
        old.result()
    new = FakeDaemon(daemon.address)
    assert client.infer("new", {"x": X})
    message, _ = new.next()
    assert isinstance(message, Infer)
    assert message.model_name == "new"
    assert new.seen.empty()
    new.stop()


def test_a_killed_process_ends_all_calls(directory: Path) -> None:
    script = f"""
import zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind("ipc://{directory}/d.sock")
print("up", flush=True)
while True:
    socket.recv_multipart()
    print("heard", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        with Client(f"ipc://{directory}/d.sock", timeout=LIMIT_S) as client:
            pending = client.submit("m", {"x": X})
            assert process.stdout.readline() == b"heard\n"
            process.send_signal(signal.SIGKILL)
            with pytest.raises(Unavailable, match="is lost"):
                pending.result()
            # The socket is there still, and nobody behind it.
            process.wait()
            with pytest.raises(Unavailable, match="nobody listens"):
                client.infer("m", {"x": X})


def test_tcp_is_reached_lost_and_refused() -> None:
    fake = FakeDaemon("tcp://127.0.0.1:*", silent)
    with Client(fake.address, timeout=LIMIT_S) as client:
        pending = client.submit("m", {"x": X})
        fake.next()
        fake.stop()
        with pytest.raises(Unavailable, match="is lost"):
            pending.result()
        with pytest.raises(Unavailable, match="nobody answers"):
            client.infer("m", {"x": X})
    with pytest.raises(Unavailable, match="nobody answers"):
        Client(fake.address, timeout=LIMIT_S)


def test_a_connection_that_broke_the_protocol_is_not_used_again(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    pending = [client.submit("m", {"x": X}) for _ in range(2)]
    for _ in pending:
        daemon.next()
    daemon.send(b"\xc1")
    for each in pending:
        with pytest.raises(ProtocolError, match="header"):
            each.result()
    daemon.handle = echo
    assert client.infer("m", {"x": X})


def test_ctrl_c_in_the_middle_of_a_message_costs_the_connection_only(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = client.submit("echo", {"x": X})

    us = threading.get_ident()
    receive = multipart.receive

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if threading.get_ident() == us:
            raise KeyboardInterrupt
        return receive(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(multipart, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pending.result()
    assert np.array_equal(client.infer("echo", {"x": X})["x"], X)
    with pytest.raises(Unavailable):
        pending.result()


# --- ownership ------------------------------------------------------------------------------------------------------


def test_another_thread_is_refused(client: Client) -> None:
    pending = client.submit("echo", {"x": X})
    uses: Sequence[Callable[[], Any]] = [
        lambda: client.infer("echo", {"x": X}),
        lambda: client.submit("echo", {"x": X}),
        lambda: client.metadata("echo"),
        client.server,
        client.status,
        client.close,
        pending.done,
        pending.result,
    ]
    for use in uses:
        assert isinstance(in_thread(use), WrongThread)
    assert pending.result()


def test_a_forked_process_is_refused_and_harms_nothing(client: Client) -> None:
    assert client.infer("echo", {"x": X})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons: fork with threads
        child = os.fork()
    if child == 0:
        status = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(LIMIT_S))  # should it hang, it must not outlive the test
        try:
            client.close()  # allowed, and does nothing
            client.infer("echo", {"x": X})
        except WrongThread:
            status = 42
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] >> 8 == 42
    assert client.infer("echo", {"x": X})


def test_a_forked_process_ends_normally_and_can_have_a_client_of_its_own(daemon: FakeDaemon) -> None:
    script = f"""
import os, sys
from weightd.client import Client
client = Client({daemon.address!r})
client.server()
child = os.fork()
if child == 0:
    with Client({daemon.address!r}) as own:
        own.server()
    del client
    sys.exit(42)
status = os.waitpid(child, 0)[1] >> 8
client.server()
client.close()
sys.exit(status)
"""
    assert run_python(script).returncode == 42


def test_a_closed_client_says_so(client: Client) -> None:
    pending = client.submit("echo", {"x": X})
    client.close()
    client.close()
    for use in (client.server, pending.result, pending.done):
        with pytest.raises(ClientClosed):
            use()


# --- leaks ----------------------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - Python 3.7


def test_nothing_leaks_descriptors(address: str) -> None:
    def round_trip() -> None:
        fake = FakeDaemon(address)
        client = Client(address, timeout=LIMIT_S)
        client.server()
        fake.stop()
        with pytest.raises(Unavailable):
            use_until_lost(client)
        with pytest.raises(Unavailable):
            client.server()
        client.close()
        with pytest.raises(Unavailable):
            Client(address)

    round_trip()
    before, threads = descriptors(), threading.active_count()
    for _ in range(5):
        round_trip()
    assert descriptors() <= before
    assert threading.active_count() <= threads


def test_a_client_that_is_dropped_unclosed_is_a_resource_warning_and_no_hang(daemon: FakeDaemon) -> None:
    script = f"""
from weightd.client import Client
client = Client({daemon.address!r})
client.server()
del client
"""
    done = run_python(script, "-W", "always::ResourceWarning")
    assert done.returncode == 0
    assert b"ResourceWarning: Unclosed" in done.stderr


def test_a_refused_request_names_the_bound(client: Client, daemon: FakeDaemon) -> None:
    def refuse(message: ClientMessage, tensors: Sequence[bytes]) -> Sequence[List[Any]]:
        return [[encode(Error(message.id, "RESOURCE_EXHAUSTED", "1024 requests wait already"))]]

    daemon.handle = refuse
    with pytest.raises(ResourceExhausted, match="1024"):
        client.infer("m", {"x": X})
