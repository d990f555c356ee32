"""A worker session with direct channels, over real connections to a daemon. Runs on Python 3.7."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Generator, List, Optional, Type, TypeVar

import numpy as np
import pytest
import zmq

from testkit.channels import (
    DESCRIPTION,
    GENERATION_SERIAL,
    LIMIT_S,
    SIGNATURE,
    Client,
    Device,
    digest_of,
    request,
)
from testkit.fakeengine import FakeEngine
from weightd_common.channels.pages import (
    CURRENT_CHANNEL,
    CURRENT_REQUEST,
    FAILED,
    REQUESTS,
    STAGE,
    STAGE_IDLE,
    STAGE_RUNNING,
)
from weightd_common.stream import Stream
from weightd_protocol.codec import decode, encode
from weightd_protocol.messages.channels import (
    AddChannel,
    AllowRequests,
    ChannelReleased,
    ReleaseChannel,
    RequestHandedOver,
    SetChannelRows,
)
from weightd_protocol.messages.inference import RequestDescription, TensorSpec
from weightd_protocol.messages.worker import (
    FROM_CHILD,
    Hello,
    Ping,
    Pong,
    Predict,
    PredictResult,
    ProcessFailed,
    Reconnected,
    Stop,
)
from weightd_worker import exit_codes, nativelog
from weightd_worker.connection import ChannelConnection, WorkerConnection
from weightd_worker.engines.engine import Arrays, ModelCorrupted
from weightd_worker.sessions import base
from weightd_worker.sessions.build import ModelInputs
from weightd_worker.sessions.model import WorkerSession

M = TypeVar("M")


class GatedEngine(FakeEngine):
    """An engine whose predicts of -1 wait until the test opens the gate. The predicts of -2 corrupt the model."""

    def __init__(self) -> None:
        super().__init__(self.run, SIGNATURE)
        self.gate = threading.Event()
        self.is_waiting = threading.Event()
        self.begun: List[float] = []

    def run(self, inputs: Arrays) -> Arrays:
        first = float(inputs["x"][0])
        self.begun.append(first)
        if first == -1:
            self.is_waiting.set()
            assert self.gate.wait(LIMIT_S)
        if first == -2:
            raise ModelCorrupted("broken")
        return {"y": inputs["x"] * 2}


class Daemon:
    """A daemon with one worker, which runs in a thread of this process.

    Args:
        context: for a worker with a ZeroMQ socket; None for a worker with a channel alone.
    """

    def __init__(self, context: Optional[zmq.Context[Any]]) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="weightd-", dir="/tmp"))
        self.address = f"ipc://{self.directory}/children"
        self.device = Device()
        self.engine = GatedEngine()
        self.status: Optional[int] = None
        self.context = context
        self.listener: Optional[socket.socket] = None
        self.router: Optional[zmq.Socket[Any]] = None
        self.stream: Any = None
        self.messages: List[Any] = []
        self.thread = threading.Thread(target=self.run_worker, daemon=True)
        self.start()
        self.thread.start()
        self.accept()
        self.receive(Hello)

    def start(self) -> None:
        """Start the daemon, or the next one."""
        listener = self.listener = socket.socket(socket.AF_UNIX)
        listener.settimeout(LIMIT_S)
        listener.bind(str(self.directory / "children.channel"))
        listener.listen()
        if self.context is not None:
            router = self.router = self.context.socket(zmq.ROUTER)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.bind(self.address)

    def accept(self) -> None:
        """Accept the worker's connection."""
        assert self.listener is not None
        self.stream = Stream(self.listener.accept()[0])
        self.stream.connection.settimeout(LIMIT_S)

    def end(self) -> None:
        """End the daemon."""
        assert self.listener is not None
        self.stream.close()
        self.listener.close()
        (self.directory / "children.channel").unlink()
        if self.router is not None:
            self.router.close(linger=0)

    def make_connection(self) -> Any:
        """Connect the worker."""
        if self.context is None:
            return ChannelConnection(self.address)
        worker = self.context.socket(zmq.DEALER)
        worker.setsockopt(zmq.ROUTING_ID, b"w1")
        worker.setsockopt(zmq.LINGER, 0)
        return WorkerConnection(worker, self.address)

    def run_worker(self) -> None:
        connection: Any = self.make_connection()
        try:
            session = WorkerSession(connection, self.engine, ModelInputs("/m/model", "/s/store"))
            self.status = session.run("ab" * 32)
        finally:
            channel: Any = vars(connection)["_channel"]
            if channel is not None:
                channel.close()

    def send(self, order: object, *frames: Any, descriptor: int = -1) -> None:
        self.stream.send([*encode(order), *frames], [descriptor] if descriptor >= 0 else [])

    def stop(self) -> None:
        """Send STOP as the daemon does: over the ZeroMQ socket, if the worker has one."""
        if self.router is None:
            self.send(Stop())
        else:
            self.router.send_multipart([b"w1", *encode(Stop())])

    def wait_stopped(self) -> int:
        """Wait until the session has ended, and return its status."""
        self.thread.join(LIMIT_S)
        assert self.status is not None
        return self.status

    def receive(self, kind: Type[M]) -> M:
        """Return the next message of the worker, which must have this type."""
        deadline = time.monotonic() + LIMIT_S
        while not self.messages:
            assert time.monotonic() < deadline
            select.select([self.stream.connection, *([self.router] if self.router else [])], [], [], 0.01)
            self.stream.connection.setblocking(False)
            self.messages += [each.frames for each in self.stream.receive()]
            while self.router is not None and self.router.poll(0):
                self.messages.append(self.router.recv_multipart()[1:])
        message = decode(self.messages.pop(0), FROM_CHILD)
        assert isinstance(message, kind), message
        return message

    def open(self, slot: int = 0, serial: int = 11) -> Client:
        """Open a channel to the worker."""
        if not self.device.clients:
            self.send(SetChannelRows(GENERATION_SERIAL, 0, 1, (0,)), descriptor=self.device.descriptor)
        client = self.device.open(slot, serial)
        self.send(AddChannel(slot, serial), descriptor=self.device.ends[serial].fileno())
        self.send(AllowRequests(serial, digest_of(DESCRIPTION)))
        return client

    def ask(self, number: int, first: float) -> None:
        """Send a request over the connection."""
        self.send(Predict(number, DESCRIPTION), np.full(4, first, np.float32).tobytes())

    def wait_at_gate(self) -> None:
        """Let the worker wait in a predict, so that further messages queue up."""
        self.ask(2**32, -1)
        assert self.engine.is_waiting.wait(LIMIT_S)

    def close(self) -> None:
        self.engine.gate.set()
        if self.thread.is_alive():
            self.stop()
            self.thread.join(LIMIT_S)
        self.end()
        self.device.close()
        shutil.rmtree(str(self.directory))


@pytest.fixture(params=["forked", "spawned"])
def daemon(request: Any) -> Generator[Daemon, None, None]:
    context: Optional[zmq.Context[Any]] = zmq.Context() if request.param == "spawned" else None
    made = Daemon(context)
    yield made
    made.close()
    if context is not None:
        context.destroy(linger=0)


def test_requests_of_channels_and_daemon_are_answered(daemon: Daemon) -> None:
    client = daemon.open()
    for number in range(1, 6):
        client.send(request(number, number, 0, 0, 0))
        assert client.answer() == (str(number), [2 * number, 0, 0, 0])
        daemon.ask(2**32 + number, number)
        assert daemon.receive(PredictResult).request == 2**32 + number
    daemon.stop()
    assert daemon.wait_stopped() == exit_codes.OK
    assert daemon.receive(ChannelReleased) == ChannelReleased(11, "ended")


def test_channels_and_daemon_take_turns(daemon: Daemon) -> None:
    clients = [daemon.open(), daemon.open(1, 22)]
    daemon.wait_at_gate()
    for number in range(10):
        daemon.ask(2**32 + 1 + number, number)
        clients[number % 2].send(request(100 + number, 100 + number, 0, 0, 0))
    daemon.engine.gate.set()
    for _ in range(11):
        daemon.receive(PredictResult)
    for number in range(10):
        clients[number % 2].answer()
    is_channel = [each >= 100 for each in daemon.engine.begun[1:]]
    assert sum(is_channel) == 10
    assert all(first != second for first, second in zip(is_channel, is_channel[1:]))


def test_channels_opened_while_idle_are_served(daemon: Daemon) -> None:
    clients: List[Client] = []
    for number in range(1, 4):
        clients.append(daemon.open(number, 10 + number))
        for each in clients:
            each.send(request(number))
            assert each.answer()[0] == str(number)
    daemon.send(ReleaseChannel(12))
    assert daemon.receive(ChannelReleased) == ChannelReleased(12, "ordered")
    clients[2].send(request(9))
    assert clients[2].answer()[0] == "9"


def test_stop_waits_for_queued_requests_of_channels(daemon: Daemon) -> None:
    client = daemon.open()
    daemon.wait_at_gate()
    for number in (1, 2, 3):
        client.send(request(number))
    daemon.stop()
    daemon.engine.gate.set()
    assert daemon.wait_stopped() == exit_codes.OK
    assert [client.answer()[0] for _ in range(3)] == ["1", "2", "3"]
    daemon.receive(PredictResult)
    assert daemon.receive(ChannelReleased) == ChannelReleased(11, "ended")


def test_unknown_description_is_handed_to_the_daemon(daemon: Daemon) -> None:
    client = daemon.open()
    client.send(request(7, description=RequestDescription("m", DESCRIPTION.inputs, ("y",))))
    assert daemon.receive(RequestHandedOver) == RequestHandedOver(11, 7)


def test_requests_are_answered_while_the_daemon_does_not_read(daemon: Daemon) -> None:
    client, other = daemon.open(), daemon.open(1, 22)
    serials = range(100, 250)
    for serial in serials:
        daemon.open(serial, serial)
    unknown = RequestDescription("m", (TensorSpec("x", "FP32", (25_000,)),))
    sent = 20
    for number in range(1, sent + 1):
        client.send(request(number, *[0.0] * 25_000, description=unknown))
        other.send(request(number))
        assert other.answer()[0] == str(number)
    deadline = time.monotonic() + LIMIT_S
    while daemon.device.ended() < sent:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    refused = daemon.device.count(FAILED)
    assert 0 < refused < sent
    for _ in range(refused):
        error, _ = client.receive()
        assert error.code == "UNAVAILABLE"
    assert not client.has_answer()
    # There is still room for small messages.
    for serial in serials:
        daemon.send(ReleaseChannel(serial))
    other.send(request(100))
    assert other.answer()[0] == "100"
    for _ in range(sent - refused):
        daemon.receive(RequestHandedOver)
    assert [daemon.receive(ChannelReleased).channel for _ in serials] == [*serials]


def test_failure_of_the_model_ends_the_process(daemon: Daemon) -> None:
    client, other = daemon.open(), daemon.open(1, 22)
    client.send(request(7, -2, 0, 0, 0))
    answer, _ = client.receive()
    assert (answer.id, answer.code) == ("7", "INTERNAL")
    assert "direct channel" in daemon.receive(ProcessFailed).reason
    # The worker reads no further request, also from channels that it gets now.
    other.send(request(8))
    third = daemon.open(2, 33)
    third.send(request(9))
    row = daemon.device.row()
    assert (row.words[STAGE], row.words[CURRENT_REQUEST]) == (STAGE_RUNNING, 7)
    begin = time.process_time()
    daemon.thread.join(0.2)
    assert time.process_time() - begin < 0.1
    daemon.stop()
    assert daemon.wait_stopped() == exit_codes.MODEL_CORRUPTED
    assert daemon.engine.begun == [-2]


def test_daemon_restart_ends_channels_and_loses_nothing(daemon: Daemon) -> None:
    client = daemon.open()
    daemon.wait_at_gate()
    daemon.end()
    client.send(request(1))
    daemon.engine.gate.set()
    # No daemon runs, and the worker serves the channel.
    assert client.answer()[0] == "1"
    client.send(request(2))
    assert client.answer()[0] == "2"
    daemon.start()
    daemon.accept()
    assert daemon.receive(Reconnected) == Reconnected()
    earlier, daemon.device = daemon.device, Device()
    earlier.ends[11].close()
    assert client.end.recv(1) == b""
    with pytest.raises(BrokenPipeError):
        client.send(request(3))
    other = daemon.open(0, 12)
    other.send(request(4))
    assert other.answer()[0] == "4"
    daemon.send(Ping(run_selftest=False))
    daemon.receive(Pong)
    assert (earlier.ended(), daemon.device.ended()) == (2, 1)
    earlier.close()


def test_idle_worker_with_channels_does_not_spin(daemon: Daemon) -> None:
    client = daemon.open()
    client.send(request(1))
    client.answer()
    begin = time.process_time()
    daemon.thread.join(0.3)
    assert time.process_time() - begin < 0.1


def test_housekeeping_goes_on_between_requests(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    done: List[float] = []
    monkeypatch.setattr(base, "HOUSEKEEPING_INTERVAL_S", 0.0)
    monkeypatch.setattr(nativelog, "truncate_if_too_large", lambda: done.append(time.monotonic()))
    client = daemon.open()
    for number in (1, 2, 3):
        client.send(request(number))
        client.answer()
    daemon.send(Ping(run_selftest=False))
    daemon.receive(Pong)
    assert len(done) >= 3


# --- SIGKILL ----------------------------------------------------------------------------------------------------------


class KillingDaemon(Daemon):
    """A daemon whose worker is a process. Its predicts of -1 never end."""

    process: subprocess.Popen[bytes]

    def run_worker(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        program = Path(__file__).with_name("sleeping_worker.py")
        self.process = subprocess.Popen([sys.executable, str(program), self.address], env=environment)

    def stop(self) -> None:
        self.thread.join()
        self.process.kill()
        self.process.wait()

    def replace_worker(self) -> None:
        """Kill the worker and start another one with the same row."""
        self.stop()
        self.stream.close()
        self.thread = threading.Thread(target=self.run_worker, daemon=True)
        self.thread.start()
        self.accept()
        self.receive(Hello)

    def close(self) -> None:
        self.stop()
        super().close()


@pytest.fixture
def killed() -> Generator[KillingDaemon, None, None]:
    made = KillingDaemon(None)
    yield made
    made.close()


def test_row_of_a_killed_worker_shows_its_request(killed: KillingDaemon) -> None:
    client = killed.open()
    client.send(request(1))
    client.answer()
    client.send(request(7, -1, 0, 0, 0))
    client.send(request(8))
    row = killed.device.row()
    deadline = time.monotonic() + LIMIT_S
    while (row.words[CURRENT_REQUEST], row.words[STAGE]) != (7, STAGE_RUNNING):
        assert time.monotonic() < deadline
    killed.replace_worker()
    assert (row.words[CURRENT_REQUEST], row.words[STAGE], row.words[CURRENT_CHANNEL]) == (7, STAGE_RUNNING, 11)
    assert (killed.device.count(REQUESTS), killed.device.ended()) == (2, 1)
    # The next worker continues the row. It takes the request that is still in the queue, perhaps before it may run it.
    row.words[STAGE] = STAGE_IDLE
    killed.send(SetChannelRows(GENERATION_SERIAL, 0, 1, (0,)), descriptor=killed.device.descriptor)
    killed.send(AddChannel(0, 11), descriptor=killed.device.ends[11].fileno())
    killed.send(AllowRequests(11, digest_of(DESCRIPTION)))
    select.select([client.end, killed.stream.connection], [], [], LIMIT_S)
    if client.has_answer():
        assert client.answer()[0] == "8"
    else:
        assert killed.receive(RequestHandedOver) == RequestHandedOver(11, 8)
    client.send(request(9))
    assert client.answer()[0] == "9"
    assert killed.device.count(REQUESTS) == 4
