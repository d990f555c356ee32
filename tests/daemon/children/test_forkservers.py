from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

from weightd.daemon.children.forkservers import FORK_TIMEOUT_S, START_TIMEOUT_S, ForkServers
from weightd.daemon.children.launch import Launch, Program
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.host.ends import End

ONNX = ModelConfig("/m.onnx", "onnxruntime", "/python")
LITE = ModelConfig("/m.mindir", "mindspore_lite", "/python37")
CARD = replace(LITE, devices=("ascend:0",))
FIRST, SECOND, THIRD = "forkserver.1", "forkserver.2", "forkserver.3"


class Host:
    """Writes down what is started and ended."""

    def __init__(self) -> None:
        self.started: list[Launch] = []
        self.ended: list[str] = []
        self.fails = False
        self.servers = ForkServers(Path("/private"), "ipc://s", self.start, self.ended.append)

    def start(self, launch: Launch) -> None:
        if self.fails:
            raise OSError(errno.ENOENT, "No such file or directory")
        self.started.append(launch)

    def find(self, config: ModelConfig) -> str:
        server = self.servers.find(Program(config.python, config.engine, config.path, "cpu"))
        assert server is not None
        return server.name or server.why


def test_there_is_one_for_each_interpreter_and_engine_that_forks() -> None:
    host = Host()
    host.servers.want([ONNX, replace(ONNX, path="/n.onnx"), LITE, CARD, replace(ONNX, python="/other", start="spawn")])
    assert [" ".join([*each.command, *each.arguments]) for each in host.started] == [
        "/python -m weightd.worker.forkserver --engine onnxruntime --address ipc://s --name forkserver.1",
        "/python37 -m weightd.worker.forkserver --engine mindspore_lite --address ipc://s --name forkserver.2",
    ]
    assert [each.log for each in host.started] == [Path("/private/forkserver.1.log"), Path("/private/forkserver.2.log")]
    assert (host.find(ONNX), host.find(LITE)) == (FIRST, SECOND)
    assert host.servers.find(Program("/other", "onnxruntime", "/m.onnx", "cpu")) is None


def test_one_that_no_model_wants_any_more_is_ended() -> None:
    host = Host()
    host.servers.want([ONNX, LITE])
    host.servers.want([LITE])
    assert (host.ended, len(host.started)) == ([FIRST], 2)
    assert not host.servers.is_one(FIRST)
    assert host.servers.is_one(SECOND)
    # Its end says nothing.
    host.servers.exited(FIRST, End(-9))
    assert len(host.started) == 2


def test_one_that_is_lost_is_followed_by_another_at_once_but_not_for_ever() -> None:
    host = Host()
    host.servers.want([ONNX])
    host.servers.exited(FIRST, End(-9))
    assert host.find(ONNX) == SECOND
    host.servers.exited(SECOND, End(1, "No module named 'onnxruntime'"))
    assert "No module named 'onnxruntime'" in host.find(ONNX)
    (server,) = host.servers.all.values()
    server.restarts.due_at = 0.0
    assert host.find(ONNX) == THIRD
    assert not server.why


def test_one_that_cannot_be_started_is_told_as_the_reason() -> None:
    host = Host()
    host.fails = True
    host.servers.want([ONNX])
    assert host.find(ONNX) == "its fork server cannot be started: No such file or directory"


def test_one_that_loads_has_longer_to_answer() -> None:
    host = Host()
    host.servers.want([ONNX])
    (server,) = host.servers.all.values()
    assert host.servers.due(FIRST, has_lane=False) == server.since + START_TIMEOUT_S
    soon = [host.servers.due(FIRST, has_lane=True)]
    host.servers.forked(FIRST)
    soon.append(host.servers.due(FIRST, has_lane=False))
    assert all(server.since + FORK_TIMEOUT_S <= each < server.since + START_TIMEOUT_S for each in soon)


def test_what_all_of_a_kind_have_forked_is_counted() -> None:
    host = Host()
    host.servers.want([ONNX])
    host.servers.forked(FIRST)
    host.servers.exited(FIRST, End(-9))
    host.servers.forked(SECOND)
    host.servers.forked("m.1.holder")
    (server,) = host.servers.all.values()
    assert server.forked == 2
