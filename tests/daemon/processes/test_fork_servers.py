from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.platform.event_loop import Timers
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.processes.fork_servers import FORK_TIMEOUT_S, IDLE_S, START_TIMEOUT_S, ForkServers
from weightd_daemon.processes.spec import ProcessSpec, WorkerProgram

ONNX = ModelConfig("/m.onnx", "onnxruntime", "/python")
LITE = ModelConfig("/m.mindir", "mindspore_lite", "/python37")
CARD = replace(LITE, devices=("ascend:0",))
FIRST, SECOND, THIRD = "forkserver.1", "forkserver.2", "forkserver.3"


class ForkServerHarness:
    """A ForkServers object that records the servers started and killed."""

    def __init__(self) -> None:
        self.started: list[ProcessSpec] = []
        self.ended: list[str] = []
        self.fails = False
        self.servers = ForkServers(Path("/private"), "ipc://s", self.start, self.ended.append)
        self.timers = Timers()
        self.timers.add(self.servers.timer)

    def reconcile(self, models: Iterable[ModelConfig], now: float = 0.0) -> None:
        self.servers.reconcile(models, now)

    def start(self, launch: ProcessSpec) -> None:
        if self.fails:
            raise OSError(errno.ENOENT, "No such file or directory")
        self.started.append(launch)

    def find(self, config: ModelConfig) -> str:
        server = self.servers.find(WorkerProgram(config.python, config.engine, config.path, "cpu"))
        return server.name or server.reason


def test_one_server_per_interpreter_and_engine() -> None:
    host = ForkServerHarness()
    host.reconcile([ONNX, replace(ONNX, path="/n.onnx"), LITE, CARD, replace(ONNX, python="/other", start="spawn")])
    assert [" ".join([*each.command, *each.arguments]) for each in host.started] == [
        "/python -m weightd_worker.forkserver --engine onnxruntime --address ipc://s --name forkserver.1",
        "/python37 -m weightd_worker.forkserver --engine mindspore_lite --address ipc://s --name forkserver.2",
    ]
    assert [each.log for each in host.started] == [Path("/private/forkserver.1.log"), Path("/private/forkserver.2.log")]
    assert (host.find(ONNX), host.find(LITE)) == (FIRST, SECOND)


def test_starts_no_server_without_loaded_models() -> None:
    host = ForkServerHarness()
    host.reconcile([])
    assert (host.started, host.servers.servers) == ([], {})
    # A process that has to be forked before the next `reconcile` starts its fork server.
    assert host.find(ONNX) == FIRST
    host.reconcile([ONNX])
    assert len(host.started) == 1


def test_stops_idle_server() -> None:
    host = ForkServerHarness()
    host.reconcile([ONNX, LITE])
    host.reconcile([LITE], 1.0)
    host.reconcile([LITE], 2.0)
    host.timers.run_due(IDLE_S + 0.5)
    assert not host.ended
    host.timers.run_due(IDLE_S + 1.0)
    assert (host.ended, len(host.started)) == ([FIRST], 2)
    assert not host.servers.is_fork_server(FIRST)
    assert host.servers.is_fork_server(SECOND)
    # The exit of a stopped server is not a failure.
    host.servers.on_exit(FIRST, ExitCause(-9))
    assert len(host.started) == 2


def test_load_keeps_idle_server() -> None:
    host = ForkServerHarness()
    host.reconcile([ONNX])
    host.reconcile([], 1.0)
    host.reconcile([ONNX], IDLE_S)
    host.timers.run_due(2 * IDLE_S)
    assert not host.ended


def test_does_not_restart_idle_server() -> None:
    host = ForkServerHarness()
    host.reconcile([ONNX])
    host.reconcile([])
    host.servers.on_exit(FIRST, ExitCause(-9))
    assert len(host.started) == 1
    assert host.find(ONNX) == SECOND


def test_kills_all_servers() -> None:
    host = ForkServerHarness()
    host.reconcile([ONNX, LITE])
    host.servers.kill_all()
    assert (host.ended, host.servers.servers) == ([FIRST, SECOND], {})


def test_restarts_lost_server_with_backoff() -> None:
    host = ForkServerHarness()
    host.reconcile([ONNX])
    host.servers.on_exit(FIRST, ExitCause(-9))
    assert host.find(ONNX) == SECOND
    host.servers.on_exit(SECOND, ExitCause(1, "No module named 'onnxruntime'"))
    assert "No module named 'onnxruntime'" in host.find(ONNX)
    (server,) = host.servers.servers.values()
    server.restart_backoff.due_at = 0.0
    assert host.find(ONNX) == THIRD
    assert not server.reason


def test_reports_why_a_server_cannot_start() -> None:
    host = ForkServerHarness()
    host.fails = True
    host.reconcile([ONNX])
    assert host.find(ONNX) == "its fork server cannot be started: No such file or directory"


def test_starting_server_has_a_longer_deadline() -> None:
    host = ForkServerHarness()
    host.reconcile([ONNX])
    (server,) = host.servers.servers.values()
    assert host.servers.fork_deadline(FIRST, has_channel=False) == server.started_at + START_TIMEOUT_S
    deadlines = [host.servers.fork_deadline(FIRST, has_channel=True)]
    host.servers.on_child_forked(FIRST)
    deadlines.append(host.servers.fork_deadline(FIRST, has_channel=False))
    assert all(server.started_at + FORK_TIMEOUT_S <= each < server.started_at + START_TIMEOUT_S for each in deadlines)


def test_counts_forks_over_restarts() -> None:
    host = ForkServerHarness()
    host.reconcile([ONNX])
    host.servers.on_child_forked(FIRST)
    host.servers.on_exit(FIRST, ExitCause(-9))
    host.servers.on_child_forked(SECOND)
    host.servers.on_child_forked("m.1.holder")
    (server,) = host.servers.servers.values()
    assert server.fork_count == 2
