"""Tests that a forked process inherits the server's modules and no other state."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple

import pytest

from weightd_protocol.messages.worker import Hello

if TYPE_CHECKING:
    from tests.worker.forking.conftest import Forking

ENGINE = "mindspore_lite" if importlib.util.find_spec("mindspore_lite") else "onnxruntime"


class ForkedProcess(NamedTuple):
    """A forked process and the state that it reports."""

    pid: int
    hello: Hello
    seen: List[Any]

    @property
    def proc(self) -> Path:
        return Path(f"/proc/{self.pid}")

    @property
    def status(self) -> Dict[str, str]:
        """Return the fields of the kernel's status file by name."""
        lines = (self.proc / "status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.fixture(scope="module")
def pair(leaky: Forking, tmp_path_factory: pytest.TempPathFactory) -> List[ForkedProcess]:
    """Return two workers forked from one server."""
    model = tmp_path_factory.mktemp("model") / "model"
    model.write_bytes(b"any")
    born: List[ForkedProcess] = []
    for name in ("a", "b"):
        pid = leaky.fork(name, model, "--role", "worker")
        hello = leaky.channel(name).receive(Hello)
        born.append(ForkedProcess(pid, hello, json.loads(hello.versions[ENGINE])))
    return born


def test_reports_its_origin(pair: List[ForkedProcess]) -> None:
    assert [(each.hello.origin, each.hello.origin_note) for each in pair] == [("forked", "")] * 2
    assert [each.hello.engine_pid for each in pair] == [str(each.pid) for each in pair]


def test_inherits_no_descriptors(pair: List[ForkedProcess]) -> None:
    for each in pair:
        names = {int(link.name): os.readlink(str(link)) for link in (each.proc / "fd").iterdir()}
        assert names[0] == os.devnull
        assert 77 not in names
        assert not any(name.endswith(".py") for name in names.values())


def test_writes_to_its_log(pair: List[ForkedProcess], leaky: Forking) -> None:
    for name, each in zip("ab", pair):
        log = leaky.daemon.directory / f"{name}.log"
        assert {os.readlink(str(each.proc / "fd" / number)) for number in "12"} == {str(log)}
        assert log.stat().st_mode & 0o777 == 0o600


def test_buffered_server_output_is_written_once(pair: List[ForkedProcess], leaky: Forking) -> None:
    assert [leaky.daemon.log(name) for name in "ab"] == ["", ""]
    assert leaky.daemon.log("server").count("unfinished") == 2


def test_resets_signals(pair: List[ForkedProcess]) -> None:
    for each in pair:
        caught, blocked, ignored = (int(each.status[f"Sig{name}"], 16) for name in ("Cgt", "Blk", "Ign"))
        assert not caught & 1 << (signal.SIGUSR1 - 1)
        # faulthandler catches this signal.
        assert caught & 1 << (signal.SIGABRT - 1)
        assert blocked == 0
        assert ignored & 1 << (signal.SIGINT - 1)


def test_has_directory_and_umask_of_daemon(pair: List[ForkedProcess]) -> None:
    umask = os.umask(0o22)
    os.umask(umask)
    for each in pair:
        assert os.readlink(str(each.proc / "cwd")) == str(Path.cwd())
        assert int(each.status["Umask"], 8) == umask


def test_has_new_session_and_daemon_as_parent(pair: List[ForkedProcess]) -> None:
    for each in pair:
        assert os.getsid(each.pid) == each.pid
        assert int(each.status["PPid"]) == os.getpid()


def test_random_generators_differ(pair: List[ForkedProcess]) -> None:
    one, other = (each.seen for each in pair)
    for index, what in enumerate(("random", "numpy", "names of files")):
        assert one[index] != other[index], what


def test_temporary_files_lie_beside_log(pair: List[ForkedProcess], leaky: Forking) -> None:
    assert [each.seen[3] for each in pair] == [str(leaky.daemon.directory)] * 2


def test_command_line_equals_spawned_process(pair: List[ForkedProcess], leaky: Forking) -> None:
    for each in pair:
        words = (each.proc / "cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
        parent = ["--parent", str(os.getpid())]
        assert words == [sys.executable, "-m", "weightd_worker", "--role", "worker", *parent]
        assert each.seen[4]  # sys.argv contains "--role" and not the arguments of the server.
        assert (each.proc / "comm").read_text() == Path(f"/proc/{leaky.server.pid}/comm").read_text()


@pytest.mark.parametrize(("role", "above"), [("worker", 400), ("holder", 200)])
def test_raises_oom_score_like_spawned_process(leaky: Forking, tmp_path: Path, role: str, above: int) -> None:
    (tmp_path / "model").write_bytes(b"any")
    pid = leaky.fork(role, tmp_path / "model", "--role", role)
    leaky.channel(role).receive(Hello)
    own, score = (int(Path(f"/proc/{each}/oom_score_adj").read_text("ascii")) for each in ("self", pid))
    assert score == min(own + above, 1000)
