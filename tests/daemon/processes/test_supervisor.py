"""The backend with processes and a socket, before its loop has been told of anything."""

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
from weightd_daemon.processes.events import Snapshot
from weightd_daemon.processes.files import GenerationFiles
from weightd_daemon.processes.fork_coordinator import ForkCoordinator, ForkRequest
from weightd_daemon.processes.launcher import DirectLauncher
from weightd_daemon.processes.spec import ProcessSpec, WorkerProgram
from weightd_daemon.processes.supervisor import ProcessSupervisor
from weightd_daemon.scheduling.request import Request
from weightd_protocol.codec import decode, encode
from weightd_protocol.framing import message_prefix
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


class Scene:
    """A model on a card with one worker, whose processes only sleep; the test speaks for them."""

    def __init__(self, directory: Path, runtime: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        python = directory / "python"
        python.write_text("#!/bin/sh\nexec sleep 1000\n")
        python.chmod(0o700)
        # Stands for the copy of it, too.
        path = directory / "m.mindir"
        path.write_bytes(b"a model")
        self.snapshot = Snapshot(str(path), "", SHA, 100)
        daemon = DaemonConfig("ipc://s", str(runtime), str(directory))
        self.backend_directory = daemon.private_dir
        self.backend_directory.mkdir()
        self.loop = EventLoop()
        self.backend = ProcessSupervisor(context, daemon, self.loop, {})
        self.inner = vars(self.backend)
        self.connection = vars(self.backend.messenger)
        # The worker's channel is the test's own, and no snapshot is taken but by the test.
        find = self.inner["_process_table"].find
        self.inner["_process_table"].find = lambda pid: WORKER if pid == os.getpid() else find(pid)
        self.snapshots = mock.patch.object(self.backend.snapshots, "take_snapshot")
        self.snapshots.start()
        self.answers: list[int] = []
        self.table = ModelConfig("/m.mindir", "mindspore_lite", str(python), spares=0, devices=("ascend:0",))
        self.model = self.model_of(self.table)
        self.worker = context.socket(zmq.DEALER)
        self.worker.setsockopt(zmq.ROUTING_ID, WORKER.encode())
        self.worker.setsockopt(zmq.RCVTIMEO, 30_000)
        self.worker.connect(daemon.children_address)
        self.lane = Stream(socket.socket(socket.AF_UNIX))
        self.path = str(daemon.channel_socket)

    def model_of(self, table: ModelConfig) -> ServedModel:
        clients: Any = SimpleNamespace(reply_result=self._answer)
        devices = {device: DeviceBudget(device) for device in table.devices}
        return model_factory(devices, self.backend, clients).make("m", table, IdSequence())

    def _answer(self, request: Request, outputs: Sequence[TensorSpec], frames: Sequence[Any]) -> None:
        self.answers.append(request.number)

    def serve(self) -> None:
        # An order to who is not connected yet is lost.
        self.worker.send_multipart(encode(Reconnected()))
        self.hear()
        self.model.start(0.0)
        self.model.on_snapshot_taken(ModelSource("/m.mindir"), self.snapshot, 0.0)
        for name in (HOLDER, WORKER):
            self.model.deployments.process_events.on_message(
                name, Hello(name, SHA, {"weightd": VERSION}, CARD), (), 0.0
            )
        self.model.deployments.process_events.on_message(
            HOLDER, Built("7", (X,), (X,), ({"x": (1,)},), "canary", 100), (), 0.0
        )
        self.model.deployments.process_events.on_message(WORKER, Attached("canary", 100), (), 0.0)

    def hear(self) -> None:
        """Wait for a message on the socket, and let it be handled."""
        assert self.connection["_socket"].poll(30_000)
        self.connection["_schedule_receive"]()
        self.loop.run_once(30)

    def answer(self, *, by_lane: bool = True, is_dead: bool = False) -> None:
        """Have the model asked, and the worker answer; if it is dead, its exit is the first that can be noticed."""
        self.model.dispatcher.infer(
            Request(1, b"c", "1", RequestDescription("m", (SPEC,)), (bytes(16),), 0.0, 1e9, 16), 0.0
        )
        (predict,) = self.asked(1)
        assert isinstance(predict, Predict)
        message = [*encode(PredictResult(predict.request, ResponseDescription("m", (SPEC,)))), bytes(16)]
        if is_dead:
            self.kill(WORKER)
        if by_lane:
            # More than is read at once.
            pong = encode(Pong())
            self.lane.connection.send((message_prefix(pong) + pong[0]) * 4000)
            self.lane.send(message)
        else:
            self.worker.send_multipart(message)
            assert self.connection["_socket"].poll(30_000)

    def asked(self, count: int) -> list[Any]:
        """Connect the worker's channel; return as many orders that come by it."""
        self.lane.connection.connect(self.path)
        orders: list[Any] = []
        while len(orders) < count:
            self.loop.run_once(1)
            orders += [decode(message.frames, TO_CHILD) for message in self.lane.receive()]
        return orders

    def kill(self, name: str) -> None:
        """Kill a child; nobody tells the backend."""
        child = self.backend.processes[name]
        processes.kill(child)
        assert select.select([child.pidfd], [], [], 30)[0]

    def close(self) -> None:
        self.backend.kill_all()
        for process in self.backend.processes.values():
            processes.reap(process)
        self.worker.close(linger=0)
        self.lane.close()
        self.backend.messenger.close()
        mock.patch.stopall()
        self.loop.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="wd-", dir="/tmp") as runtime, zmq.Context() as context:
        scene = Scene(tmp_path, Path(runtime), context)
        yield scene
        scene.close()
        context.destroy(linger=0)


def test_an_answer_that_is_read_after_the_holders_death_is_dropped_before_that_is_told(scene: Scene) -> None:
    scene.serve()
    scene.answer()
    assert scene.backend.is_alive(HOLDER)
    scene.kill(HOLDER)
    # Nobody has told the backend: it asks.
    assert [scene.backend.is_alive(each) for each in (HOLDER, WORKER, "m.1.w2")] == [False, True, False]
    while HOLDER in scene.backend.processes:
        scene.loop.run_once(30)
    assert scene.answers == []


@pytest.mark.parametrize("by_lane", [True, False])
def test_what_a_child_said_before_it_died_is_heard_first(scene: Scene, by_lane: bool) -> None:
    scene.serve()
    worker = scene.backend.processes[WORKER]
    scene.answer(by_lane=by_lane, is_dead=True)
    while worker in scene.backend.processes.values():
        scene.loop.run_once(30)
    assert scene.answers == [1]


def test_a_worker_stops_when_it_has_done_what_waits_for_its_lane(scene: Scene) -> None:
    scene.serve()
    predict = Predict(1, RequestDescription("m", ()))
    scene.backend.messenger.send_order(WORKER, predict)
    scene.backend.messenger.send_order(WORKER, Stop())
    assert scene.asked(2) == [predict, Stop()]
    scene.lane.connection.shutdown(socket.SHUT_RDWR)
    for _ in range(2):
        scene.loop.run_once(0.1)
    # It has said by another way that it is broken.
    scene.backend.messenger.send_order(WORKER, Stop())
    orders = iter(lambda: decode(scene.worker.recv_multipart(), TO_CHILD), Stop())
    assert [type(order) for order in orders] == [Attach]


@pytest.mark.parametrize("said", [[bytes(10)], [b"\0" * 2_000_000], encode(Forked("nobody's", 1))])
def test_a_child_that_breaks_the_protocol_on_its_lane_is_broken(
    scene: Scene, said: Sequence[Any], caplog: pytest.LogCaptureFixture
) -> None:
    scene.serve()
    scene.answer()
    scene.lane.send(said)
    while not scene.lane.flush():
        scene.loop.run_once(1)
    while "protocol error" not in caplog.text:
        scene.loop.run_once(1)


LIMIT = "cannot start a process or thread: the limit of processes and threads is reached"


@pytest.mark.parametrize("by_lane", [True, False])
def test_the_limit_is_named_that_keeps_a_child_from_its_work(
    scene: Scene, by_lane: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scene.serve()
    scene.answer()
    broken = encode(ProcessFailed("pthread_create failed, error code: 11"))
    if by_lane:
        scene.lane.send(broken)
    else:
        scene.worker.send_multipart(broken)
    while "pthread_create failed" not in caplog.text:
        scene.loop.run_once(1)
    assert LIMIT in caplog.text


def test_the_limit_is_named_that_keeps_a_child_from_being_started(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    monkeypatch.setattr(scene.inner["_launcher"], "start", mock.Mock(side_effect=refused))
    scene.model.start(0.0)
    scene.model.on_snapshot_taken(ModelSource("/m.mindir"), scene.snapshot, 0.0)
    while "cannot start /" not in caplog.text:
        scene.loop.run_once(1)
    assert LIMIT in caplog.text


def test_who_says_that_a_process_was_forked_which_is_there_already_is_broken(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.serve()
    launch = ProcessSpec("m.1.w2", [], [], Path(os.devnull), {})
    nursery: ForkCoordinator = scene.inner["_fork_coordinator"]
    nursery.fork(ForkRequest(launch, WORKER, float("inf"), print))
    pid = scene.backend.processes[HOLDER].pid
    scene.asked(1)
    scene.lane.send(encode(Forked(launch.name, pid)))
    while f"expected a new process, got pid {pid}" not in caplog.text:
        scene.loop.run_once(1)
    assert scene.inner["_pending_forks"].parents() == [WORKER]


def test_what_waits_for_the_lane_of_a_child_goes_with_it_where_that_is_never_forked(scene: Scene) -> None:
    messenger = scene.backend.messenger
    messenger.handlers["m.1.w2"] = mock.Mock()
    messenger.set_channel_only("m.1.w2")
    launch = ProcessSpec("m.1.w2", [], [], Path(os.devnull), {})
    scene.inner["_fork_coordinator"].fork(ForkRequest(launch, "m.1.w1", float("inf"), print))
    scene.backend.messenger.send_order("m.1.w2", Stop())
    assert messenger.channels.is_open_or_pending("m.1.w2")
    scene.backend.kill("m.1.w2")
    assert not messenger.channels.is_open_or_pending("m.1.w2")


def test_with_one_that_could_not_tell_any_more_what_it_has_forked_that_is_ended(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.serve()
    end = mock.Mock()
    monkeypatch.setattr(DirectLauncher, "kill_orphans_of", end)
    nursery: ForkCoordinator = scene.inner["_fork_coordinator"]
    nursery.fork(ForkRequest(ProcessSpec("m.1.w2", [], [], Path(os.devnull), {}), HOLDER, float("inf"), print))
    pid = scene.backend.processes[HOLDER].pid
    for each in (WORKER, HOLDER):
        scene.kill(each)
    while HOLDER in scene.backend.processes:
        scene.loop.run_once(30)
    [told] = end.call_args_list
    assert told.args[0] == pid


def test_nobody_else_can_speak_for_a_child(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    path = Path(scene.worker.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("ipc://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    scene.model.start(0.0)
    scene.model.on_snapshot_taken(ModelSource("/m.mindir"), scene.snapshot, 0.0)
    expected = scene.backend.processes[WORKER].pid
    scene.worker.send_multipart(encode(Hello("7", SHA, {"weightd": VERSION}, CARD)))
    scene.hear()
    assert f"hello: expected from pid {expected}, got it from {os.getpid()}" in caplog.text


def test_the_sample_of_the_configuration_is_copied_and_every_process_is_told_where(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, sample = tmp_path / "m.mindir", tmp_path / "sample.npz"
    file.write_bytes(b"a model")
    sample.write_bytes(b"a sample")
    scene.snapshots.stop()
    table = replace(scene.table, path=str(file), devices=("cpu",), selftest=str(sample), selftest_tolerance=0.25)
    children: list[list[str]] = []

    def start(argv: Sequence[str], *more: Any, **named: Any) -> processes.ChildProcess:
        if "weightd_worker" in argv:
            children.append(json.loads(named["stdin_data"]))
        return original(argv, *more, **named)

    original = processes.start
    monkeypatch.setattr(processes, "start", start)
    model = scene.model_of(table)
    model.start(0.0)
    while WORKER not in scene.backend.processes:
        scene.loop.run_once(30)
    sample.write_bytes(b"another")
    assert len(children) == 2
    for argv in children:
        assert Path(argv[argv.index("--selftest-inputs") + 1]).read_bytes() == b"a sample"
        assert argv[argv.index("--tolerance") + 1] == "0.25"


def test_a_child_is_not_started_where_files_that_it_needs_have_vanished(scene: Scene, tmp_path: Path) -> None:
    ends: list[ExitCause] = []
    owner: Any = SimpleNamespace(on_exit=lambda name, end, now: ends.append(end))
    generation = Generation(GenerationSetup("x.1", GenerationSpec(1, 5.0)))
    program = WorkerProgram(
        scene.table.python, "mindspore_lite", scene.snapshot.path, "cpu", spawn_reason="it is a test"
    )
    files = GenerationFiles(scene.backend_directory / "x.1")

    def spawn(role: Role, program: WorkerProgram = program) -> ChildProcess | None:
        name = f"x.1.{len(ends)}{len(scene.backend.processes)}"
        scene.backend.spawn(owner, generation, program, name, role)
        return scene.backend.processes.get(name)

    assert spawn(Role.HOLDER)
    files.store.write_bytes(b"pages")
    scene.backend.storage.on_exported(generation)
    assert spawn(Role.WORKER)
    # Nothing but logs: they are made anew. Where weights were shared, nobody can attach to them any more.
    shutil.rmtree(scene.backend_directory)
    assert spawn(Role.HOLDER)
    assert (scene.backend_directory.stat().st_mode & 0o777, files.directory.is_dir()) == (0o700, True)
    assert not spawn(Role.WORKER)
    Path(scene.snapshot.path).unlink()
    assert not spawn(Role.HOLDER)
    assert not spawn(Role.HOLDER, replace(program, model=scene.table.python, sample=str(tmp_path / "none")))
    Path(scene.path).unlink()
    assert not spawn(Role.WORKER)
    while len(ends) < 4:
        scene.loop.run_once(30)
    assert [end.missing_file for end in ends] == [
        MissingFile.STORE,
        MissingFile.SNAPSHOT,
        MissingFile.SNAPSHOT,
        MissingFile.NONE,
    ]
    assert [end.is_transient for end in ends] == [True, True, True, False]
    assert str(ends[3]) == f"the daemon's socket is missing: {scene.path}; restart weightd"
    assert str(ends[0]) == f"the shared weights in the cache directory are missing: {files.store}"
    assert str(ends[1]) == f"the copy of the model in the cache directory is missing: {scene.snapshot.path}"
