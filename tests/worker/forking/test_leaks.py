"""What a forked process has of the one before it: its modules, and nothing else."""

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


class Born(NamedTuple):
    """A forked process, with what it says of itself."""

    pid: int
    hello: Hello
    seen: List[Any]

    @property
    def proc(self) -> Path:
        """What the kernel says of it."""
        return Path(f"/proc/{self.pid}")

    @property
    def status(self) -> Dict[str, str]:
        """That of the kernel, by name."""
        lines = (self.proc / "status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.fixture(scope="module")
def pair(leaky: Forking, tmp_path_factory: pytest.TempPathFactory) -> List[Born]:
    """Two workers of one server."""
    model = tmp_path_factory.mktemp("model") / "model"
    model.write_bytes(b"any")
    born: List[Born] = []
    for name in ("a", "b"):
        pid = leaky.fork(name, model, "--role", "worker")
        hello = leaky.channel(name).hear(Hello)
        born.append(Born(pid, hello, json.loads(hello.versions[ENGINE])))
    return born


def test_it_says_how_it_came_to_be(pair: List[Born]) -> None:
    assert [(each.hello.origin, each.hello.origin_note) for each in pair] == [("forked", "")] * 2
    assert [each.hello.engine_pid for each in pair] == [str(each.pid) for each in pair]


def test_it_has_no_descriptor_but_what_it_has_opened(pair: List[Born]) -> None:
    for each in pair:
        names = {int(link.name): os.readlink(str(link)) for link in (each.proc / "fd").iterdir()}
        assert names[0] == os.devnull
        assert 77 not in names
        assert not any(name.endswith(".py") for name in names.values())


def test_its_streams_are_its_own_log(pair: List[Born], leaky: Forking) -> None:
    for name, each in zip("ab", pair):
        log = leaky.daemon.directory / f"{name}.log"
        assert {os.readlink(str(each.proc / "fd" / number)) for number in "12"} == {str(log)}
        assert log.stat().st_mode & 0o777 == 0o600


def test_what_the_server_had_not_written_yet_is_written_once(pair: List[Born], leaky: Forking) -> None:
    assert [leaky.daemon.log(name) for name in "ab"] == ["", ""]
    assert leaky.daemon.log("server").count("unfinished") == 2


def test_its_signals_are_those_of_a_new_process(pair: List[Born]) -> None:
    for each in pair:
        caught, blocked, ignored = (int(each.status[f"Sig{name}"], 16) for name in ("Cgt", "Blk", "Ign"))
        assert not caught & 1 << (signal.SIGUSR1 - 1)
        # Those of faulthandler.
        assert caught & 1 << (signal.SIGABRT - 1)
        assert blocked == 0
        assert ignored & 1 << (signal.SIGINT - 1)


def test_its_directory_and_umask_are_the_daemon_s(pair: List[Born]) -> None:
    umask = os.umask(0o22)
    os.umask(umask)
    for each in pair:
        assert os.readlink(str(each.proc / "cwd")) == str(Path.cwd())
        assert int(each.status["Umask"], 8) == umask


def test_it_has_a_session_of_its_own_and_the_daemon_for_a_parent(pair: List[Born]) -> None:
    for each in pair:
        assert os.getsid(each.pid) == each.pid
        assert int(each.status["PPid"]) == os.getpid()


def test_what_it_draws_at_random_is_its_own(pair: List[Born]) -> None:
    one, other = (each.seen for each in pair)
    for index, what in enumerate(("random", "numpy", "names of files")):
        assert one[index] != other[index], what


def test_its_temporary_files_go_with_its_log(pair: List[Born], leaky: Forking) -> None:
    assert [each.seen[3] for each in pair] == [str(leaky.daemon.directory)] * 2


def test_its_command_line_is_that_of_a_spawned_one(pair: List[Born], leaky: Forking) -> None:
    for each in pair:
        words = (each.proc / "cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
        parent = ["--parent", str(os.getpid())]
        assert words == [sys.executable, "-m", "weightd_worker", "--role", "worker", *parent]
        assert each.seen[4]  # "--role" is in sys.argv: these are not the arguments of the server
        assert (each.proc / "comm").read_text() == Path(f"/proc/{leaky.server.pid}/comm").read_text()


@pytest.mark.parametrize(("role", "above"), [("worker", 400), ("holder", 200)])
def test_it_goes_as_far_before_the_daemon_as_a_spawned_one(
    leaky: Forking, tmp_path: Path, role: str, above: int
) -> None:
    (tmp_path / "model").write_bytes(b"any")
    pid = leaky.fork(role, tmp_path / "model", "--role", role)
    leaky.channel(role).hear(Hello)
    own, score = (int(Path(f"/proc/{each}/oom_score_adj").read_text("ascii")) for each in ("self", pid))
    assert score == min(own + above, 1000)
