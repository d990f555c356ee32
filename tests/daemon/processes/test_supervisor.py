"""ProcessSupervisor with real processes and sockets, before its loop has processed any event."""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import zmq

from testkit.model_factory import model_factory
from weightd_common.stream import Stream
from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationSetup
from weightd_daemon.generations.shared_weights import Generation
from weightd_daemon.generations.spec import GenerationSpec, ModelSource
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.versions import IdSequence
from weightd_daemon.platform import processes
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.exit_cause import ExitCause, MissingFile
from weightd_daemon.platform.processes import ChildProcess
from weightd_daemon.processes import fork_servers
from weightd_daemon.processes.events import Snapshot
from weightd_daemon.processes.files import GenerationFiles
from weightd_daemon.processes.fork_coordinator import ForkCoordinator, ForkRequest
from weightd_daemon.processes.launcher import DirectLauncher
from weightd_daemon.processes.spec import ProcessSpec, WorkerProgram
from weightd_daemon.processes.supervisor import ProcessSupervisor
from weightd_daemon.scheduling.request import Request
from weightd_protocol.codec import decode, encode
from weightd_protocol.framing import message_prefix
from weightd_protocol.messages.channels import WatchWeights
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSignature, TensorSpec
from weightd_protocol.messages.worker import (
    TO_CHILD,
    Attach,
    Attached,
    Built,
    Forked,
    Hello,
    Pong,
    Predict,
    PredictResult,
    ProcessFailed,
    Reconnected,
    Stop,
)
from weightd_protocol.messages.worker_common import SharingTraits
from weightd_protocol.version import VERSION

SHA = "5" * 64
CARD = SharingTraits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)
X = TensorSignature("x", "FP32", (4,))
SPEC = TensorSpec("x", "FP32", (4,))
HOLDER, WORKER = "m.1.holder", "m.1.w1"


class SupervisorHarness:
    """A model on a card with one worker. Its processes only sleep, and the test sends messages in their names."""

    def __init__(self, directory: Path, runtime: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        python = directory / "python"
        python.write_text("#!/bin/sh\nexec sleep 1000\n")
        python.chmod(0o700)
        # Serves as the snapshot, too.
        path = directory / "m.mindir"
        path.write_bytes(b"a model")
        self.snapshot = Snapshot(str(path), "", SHA, 100)
        daemon = DaemonConfig("ipc://s", str(runtime), str(directory))
        self.private_dir = daemon.private_dir
        self.private_dir.mkdir()
        self.loop = EventLoop()
        self.supervisor = ProcessSupervisor(context, daemon, self.loop, {})
        self.inner = vars(self.supervisor)
        self.connection = vars(self.supervisor.messenger)
        # The worker's channel belongs to the test, and snapshots are reported only by the test.
        find = self.inner["_process_table"].find
        self.inner["_process_table"].find = lambda pid: WORKER if pid == os.getpid() else find(pid)
        self.snapshots = mock.patch.object(self.supervisor.snapshots, "take_snapshot")
        self.snapshots.start()
        self.replies: list[int] = []
        self.table = ModelConfig("/m.mindir", "mindspore_lite", str(python), spares=0, devices=("ascend:0",))
        self.model = self.model_of(self.table)
        self.worker = context.socket(zmq.DEALER)
        self.worker.setsockopt(zmq.ROUTING_ID, WORKER.encode())
        self.worker.setsockopt(zmq.RCVTIMEO, 30_000)
        self.worker.connect(daemon.children_address)
        self.channel = Stream(socket.socket(socket.AF_UNIX), accepts_descriptors=True)
        self.path = str(daemon.channel_socket)

    def model_of(self, table: ModelConfig) -> ServedModel:
        clients: Any = SimpleNamespace(reply_result=self._record_reply)
        devices = {device: DeviceBudget(device) for device in table.devices}
        return model_factory(devices, self.supervisor, clients).make("m", table, IdSequence())

    def _record_reply(self, request: Request, outputs: Sequence[TensorSpec], frames: Sequence[Any]) -> None:
        self.replies.append(request.number)

    def serve(self) -> None:
        # An order to a process that is not connected yet would be lost.
        self.worker.send_multipart(encode(Reconnected()))
        self.receive()
        self.model.start(0.0)
        self.model.on_snapshot_taken(ModelSource("/m.mindir"), self.snapshot, 0.0)
        for name in (HOLDER, WORKER):
            self.model.deployments.process_events.on_message(
                name, Hello(name, SHA, {"weightd": VERSION}, CARD), (), 0.0
            )
        self.model.deployments.process_events.on_message(
            HOLDER, Built("7", (X,), (X,), ({"x": (1,)},), "digest", 100), (), 0.0
        )
        self.model.deployments.process_events.on_message(WORKER, Attached("digest", 100), (), 0.0)

    def receive(self) -> None:
        """Wait for a message on the socket and let the messenger handle it."""
        assert self.connection["_socket"].poll(30_000)
        self.connection["_schedule_receive"]()
        self.loop.run_once(30)

    def answer_request(self, *, by_channel: bool = True, is_dead: bool = False) -> None:
        """Send a request to the model and answer it; with `is_dead`, kill the worker before its answer is read."""
        self.model.dispatcher.infer(
            Request(1, b"c", "1", RequestDescription("m", (SPEC,)), (bytes(16),), 0.0, 1e9, 16), 0.0
        )
        (predict,) = self.connect_channel(1)
        assert isinstance(predict, Predict)
        message = [*encode(PredictResult(predict.request, ResponseDescription("m", (SPEC,)))), bytes(16)]
        if is_dead:
            self.kill(WORKER)
        if by_channel:
            # More than is read at once.
            pong = encode(Pong())
            self.channel.connection.send((message_prefix(pong) + pong[0]) * 4000)
            self.channel.send(message)
        else:
            self.worker.send_multipart(message)
            assert self.connection["_socket"].poll(30_000)

    def connect_channel(self, count: int) -> list[Any]:
        """Connect the worker's channel and return the next `count` orders."""
        self.channel.connection.connect(self.path)
        orders: list[Any] = []
        while len(orders) < count:
            self.loop.run_once(1)
            orders += [decode(message.frames, TO_CHILD) for message in self.channel.receive()]
        return orders

    def kill(self, name: str) -> None:
        """Kill a child without a notification to the supervisor."""
        child = self.supervisor.processes[name]
        processes.kill(child)
        assert select.select([child.pidfd], [], [], 30)[0]

    def close(self) -> None:
        self.supervisor.kill_all()
        for process in self.supervisor.processes.values():
            processes.reap(process)
        self.worker.close(linger=0)
        self.channel.close()
        self.supervisor.messenger.close()
        mock.patch.stopall()
        self.loop.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[SupervisorHarness]:
    with tempfile.TemporaryDirectory(prefix="wd-", dir="/tmp") as runtime, zmq.Context() as context:
        harness = SupervisorHarness(tmp_path, Path(runtime), context)
        yield harness
        harness.close()
        context.destroy(linger=0)


def test_drops_result_read_after_the_holder_died(harness: SupervisorHarness) -> None:
    harness.serve()
    harness.answer_request()
    assert harness.supervisor.is_alive(HOLDER)
    harness.kill(HOLDER)
    # The exit has not been reported yet: the supervisor checks the processes itself.
    assert [harness.supervisor.is_alive(each) for each in (HOLDER, WORKER, "m.1.w2")] == [False, True, False]
    while HOLDER in harness.supervisor.processes:
        harness.loop.run_once(30)
    assert harness.replies == []


def test_worker_watches_its_holder(harness: SupervisorHarness) -> None:
    harness.channel.connection.connect(harness.path)
    while not harness.supervisor.messenger.channels.is_open(WORKER):
        harness.loop.run_once(1)
    harness.serve()
    orders: list[Any] = []
    while not any(isinstance(each, WatchWeights) for each in orders):
        orders += [decode(message.frames, TO_CHILD) for message in harness.channel.receive()]
    assert orders[-1] == WatchWeights(has_holder=True, store=())
    statm = harness.channel.descriptors.popleft()
    assert os.pread(statm, 100, 0) != b"0 0 0 0 0 0 0\n"
    harness.kill(HOLDER)
    assert os.pread(statm, 100, 0) == b"0 0 0 0 0 0 0\n"
    os.close(statm)


@pytest.mark.parametrize("by_channel", [True, False])
def test_handles_messages_before_the_exit_of_their_sender(harness: SupervisorHarness, by_channel: bool) -> None:
    harness.serve()
    worker = harness.supervisor.processes[WORKER]
    harness.answer_request(by_channel=by_channel, is_dead=True)
    while worker in harness.supervisor.processes.values():
        harness.loop.run_once(30)
    assert harness.replies == [1]


def test_worker_stops_after_its_queued_orders(harness: SupervisorHarness) -> None:
    harness.serve()
    predict = Predict(1, RequestDescription("m", ()))
    harness.supervisor.messenger.send_order(WORKER, predict)
    harness.supervisor.messenger.send_order(WORKER, Stop())
    assert harness.connect_channel(2) == [predict, Stop()]
    harness.channel.connection.shutdown(socket.SHUT_RDWR)
    for _ in range(2):
        harness.loop.run_once(0.1)
    # The channel is broken, so Stop is sent over the socket.
    harness.supervisor.messenger.send_order(WORKER, Stop())
    orders = iter(lambda: decode(harness.worker.recv_multipart(), TO_CHILD), Stop())
    assert [type(order) for order in orders] == [Attach]


@pytest.mark.parametrize("message", [[bytes(10)], [b"\0" * 2_000_000], encode(Forked("unknown", 1))])
def test_channel_protocol_error_fails_the_child(
    harness: SupervisorHarness, message: Sequence[Any], caplog: pytest.LogCaptureFixture
) -> None:
    harness.serve()
    harness.answer_request()
    harness.channel.send(message)
    while not harness.channel.flush():
        harness.loop.run_once(1)
    while "protocol error" not in caplog.text:
        harness.loop.run_once(1)


LIMIT = "cannot start a process or thread: the limit of processes and threads is reached"


@pytest.mark.parametrize("by_channel", [True, False])
def test_worker_failure_names_the_exceeded_limit(
    harness: SupervisorHarness, by_channel: bool, caplog: pytest.LogCaptureFixture
) -> None:
    harness.serve()
    harness.answer_request()
    broken = encode(ProcessFailed("pthread_create failed, error code: 11"))
    if by_channel:
        harness.channel.send(broken)
    else:
        harness.worker.send_multipart(broken)
    while "pthread_create failed" not in caplog.text:
        harness.loop.run_once(1)
    assert LIMIT in caplog.text


def test_spawn_failure_names_the_exceeded_limit(
    harness: SupervisorHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    monkeypatch.setattr(harness.inner["_launcher"], "start", mock.Mock(side_effect=refused))
    harness.model.start(0.0)
    harness.model.on_snapshot_taken(ModelSource("/m.mindir"), harness.snapshot, 0.0)
    while "cannot start /" not in caplog.text:
        harness.loop.run_once(1)
    assert LIMIT in caplog.text


def test_rejects_fork_reply_with_a_known_pid(harness: SupervisorHarness, caplog: pytest.LogCaptureFixture) -> None:
    harness.serve()
    launch = ProcessSpec("m.1.w2", [], [], Path(os.devnull), {})
    coordinator: ForkCoordinator = harness.inner["_fork_coordinator"]
    coordinator.fork(ForkRequest(launch, WORKER, float("inf"), print))
    pid = harness.supervisor.processes[HOLDER].pid
    harness.connect_channel(1)
    harness.channel.send(encode(Forked(launch.name, pid)))
    while f"expected a new process, got pid {pid}" not in caplog.text:
        harness.loop.run_once(1)
    assert harness.inner["_pending_forks"].parents() == [WORKER]


def test_cancelled_fork_drops_its_queued_orders(harness: SupervisorHarness) -> None:
    messenger = harness.supervisor.messenger
    messenger.handlers["m.1.w2"] = mock.Mock()
    messenger.set_channel_only("m.1.w2")
    launch = ProcessSpec("m.1.w2", [], [], Path(os.devnull), {})
    harness.inner["_fork_coordinator"].fork(ForkRequest(launch, "m.1.w1", float("inf"), print))
    harness.supervisor.messenger.send_order("m.1.w2", Stop())
    assert messenger.channels.is_open_or_pending("m.1.w2")
    harness.supervisor.kill("m.1.w2")
    assert not messenger.channels.is_open_or_pending("m.1.w2")


def test_kills_unreported_forks_of_a_dead_parent(harness: SupervisorHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.serve()
    end = mock.Mock()
    monkeypatch.setattr(DirectLauncher, "kill_orphans_of", end)
    coordinator: ForkCoordinator = harness.inner["_fork_coordinator"]
    coordinator.fork(ForkRequest(ProcessSpec("m.1.w2", [], [], Path(os.devnull), {}), HOLDER, float("inf"), print))
    pid = harness.supervisor.processes[HOLDER].pid
    for each in (WORKER, HOLDER):
        harness.kill(each)
    while HOLDER in harness.supervisor.processes:
        harness.loop.run_once(30)
    [call] = end.call_args_list
    assert call.args[0] == pid


def test_rejects_hello_from_another_process(harness: SupervisorHarness, caplog: pytest.LogCaptureFixture) -> None:
    path = Path(harness.worker.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("ipc://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    harness.model.start(0.0)
    harness.model.on_snapshot_taken(ModelSource("/m.mindir"), harness.snapshot, 0.0)
    expected = harness.supervisor.processes[WORKER].pid
    harness.worker.send_multipart(encode(Hello("7", SHA, {"weightd": VERSION}, CARD)))
    harness.receive()
    assert f"hello: expected from pid {expected}, got it from {os.getpid()}" in caplog.text


def test_all_processes_use_the_copied_sample(
    harness: SupervisorHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, sample = tmp_path / "m.mindir", tmp_path / "sample.npz"
    file.write_bytes(b"a model")
    sample.write_bytes(b"a sample")
    harness.snapshots.stop()
    table = replace(harness.table, path=str(file), devices=("cpu",), selftest=str(sample), selftest_tolerance=0.25)
    children: list[list[str]] = []

    def start(argv: Sequence[str], *more: Any, **named: Any) -> processes.ChildProcess:
        if "weightd_worker" in argv:
            children.append(json.loads(named["stdin_data"]))
        return original(argv, *more, **named)

    original = processes.start
    monkeypatch.setattr(processes, "start", start)
    # The interpreter of the test only sleeps, so the fork server never connects, and the processes start without it.
    monkeypatch.setattr(fork_servers, "START_TIMEOUT_S", 0.1)
    monkeypatch.setattr(fork_servers, "FORK_TIMEOUT_S", 0.1)
    model = harness.model_of(table)
    model.start(0.0)
    while WORKER not in harness.supervisor.processes:
        harness.loop.run_once(30)
    sample.write_bytes(b"another")
    assert len(children) == 2
    for argv in children:
        assert Path(argv[argv.index("--selftest-inputs") + 1]).read_bytes() == b"a sample"
        assert argv[argv.index("--tolerance") + 1] == "0.25"


def test_does_not_spawn_if_files_are_missing(harness: SupervisorHarness, tmp_path: Path) -> None:
    ends: list[ExitCause] = []
    owner: Any = SimpleNamespace(on_exit=lambda name, end, now: ends.append(end))
    generation = Generation(GenerationSetup("x.1", GenerationSpec(1, 5.0)))
    program = WorkerProgram(
        harness.table.python, "mindspore_lite", harness.snapshot.path, "cpu", spawn_reason="for this test"
    )
    files = GenerationFiles(harness.private_dir / "x.1")

    def spawn(role: Role, program: WorkerProgram = program) -> ChildProcess | None:
        name = f"x.1.{len(ends)}{len(harness.supervisor.processes)}"
        harness.supervisor.spawn(owner, generation, program, name, role)
        return harness.supervisor.processes.get(name)

    assert spawn(Role.HOLDER)
    files.store.write_bytes(b"pages")
    harness.supervisor.storage.on_exported(generation)
    assert spawn(Role.WORKER)
    # Missing logs are created again, but no worker can attach without the shared weights.
    shutil.rmtree(harness.private_dir)
    assert spawn(Role.HOLDER)
    assert (harness.private_dir.stat().st_mode & 0o777, files.directory.is_dir()) == (0o700, True)
    assert not spawn(Role.WORKER)
    Path(harness.snapshot.path).unlink()
    assert not spawn(Role.HOLDER)
    assert not spawn(Role.HOLDER, replace(program, model=harness.table.python, sample=str(tmp_path / "none")))
    Path(harness.path).unlink()
    assert not spawn(Role.WORKER)
    while len(ends) < 4:
        harness.loop.run_once(30)
    assert [end.missing_file for end in ends] == [
        MissingFile.STORE,
        MissingFile.SNAPSHOT,
        MissingFile.SNAPSHOT,
        MissingFile.NONE,
    ]
    assert [end.is_transient for end in ends] == [True, True, True, False]
    assert str(ends[3]) == f"the daemon's socket is missing: {harness.path}; restart weightd"
    assert str(ends[0]) == f"the shared weights in the cache directory are missing: {files.store}"
    assert str(ends[1]) == f"the copy of the model in the cache directory is missing: {harness.snapshot.path}"
