"""A clean stop: accepted requests are answered, and no process or file remains."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from testkit.waiting import until
from weightd import Client, Pending, RequestError, Unavailable

from .support import (
    LIMIT_S,
    ONE_ENGINE,
    BareEngine,
    DaemonPaths,
    SampleRequest,
    Watched,
    Weightd,
    assert_same,
    children_of,
    mlp_inputs,
)

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

WORKERS = 2


@pytest.fixture(scope="module")
def question(mlp: Path, bare: BareEngine) -> SampleRequest:
    """A request that keeps a worker busy for some milliseconds."""
    return bare.questions(mlp, mlp_inputs((256,)))[0]


@pytest.fixture
def config(mlp: Path, place: DaemonPaths) -> Path:
    return place.config({"mlp": {"path": mlp, "workers": WORKERS}})


@pytest.fixture
def daemon(config: Path, tmp_path: Path) -> Iterator[Weightd]:
    """A daemon in a separate session, like in a separate terminal."""
    with Weightd(tmp_path / "weightd.log", "--verbose", "serve", config, session=True) as daemon:
        yield daemon


def submit(client: Client, question: SampleRequest, count: int) -> Sequence[Pending]:
    """Submit this many requests; return when the daemon has accepted them."""
    pending = [client.submit("mlp", question.inputs) for _ in range(count)]
    client.status()
    return pending


def to_process(pid: int, number: int) -> None:
    os.kill(pid, number)


def to_group(pid: int, number: int) -> None:
    """Signal the process group, as a terminal does on Ctrl-C."""
    os.killpg(pid, number)


def _exactly(count: int, pids: set[int]) -> set[int]:
    return pids if len(pids) == count else set()


@pytest.mark.parametrize(("number", "to"), [(signal.SIGTERM, to_process), (signal.SIGINT, to_group)])
def test_stop_answers_accepted_requests(
    number: int, to: Callable[[int, int], None], daemon: Weightd, question: SampleRequest, place: DaemonPaths
) -> None:
    with daemon.client(place.address) as client:
        assert_same(client.infer("mlp", question.inputs), question.answer)
        # The workers, the holder and the fork server. A library may run another program while it loads, so the
        # count may be higher for a moment.
        children = until(lambda: _exactly(WORKERS + 2, children_of(place.cache)), "all processes run")
        with Watched(children) as watched:
            pending = submit(client, question, 40)
            to(daemon.pid, number)
            daemon.wait_for("stopping; finishing accepted requests")
            # On a busy host the daemon may have exited before the client sends the request.
            with pytest.raises(Unavailable, match=r"stopping|no daemon"):
                client.infer("mlp", question.inputs)
            for each in pending:
                assert_same(each.result(), question.answer)
            assert daemon.wait() == 0
            assert watched.survivors() == []
    assert place.left == []
    assert_workers_exited_before_holder(daemon.log)


def assert_workers_exited_before_holder(log: str) -> None:
    steps = re.findall(r"mlp\.1\.(\w+): (\w+) -> (\w+)", log)
    holder_stops = steps.index(("holder", "holding", "stopping"))
    gone = [index for index, (_, _, state) in enumerate(steps) if state == "gone"]
    assert [steps[index][0] for index in gone[-1:]] == ["holder"]
    assert len(gone) == WORKERS + 1
    assert all(index < holder_stops for index in gone[:-1]), steps


@pytest.mark.parametrize("moment", ["snapshotting", "building", "attaching"])
def test_stop_while_model_loads(moment: str, daemon: Weightd, place: DaemonPaths) -> None:
    daemon.wait_for(f"mlp.1: {moment}")
    with Watched(children_of(place.cache)) as watched:
        assert daemon.end() == 0
        assert watched.survivors() == []
    assert children_of(place.cache) == set()
    assert place.left == []


def test_second_signal_stops_at_once(daemon: Weightd, question: SampleRequest, place: DaemonPaths) -> None:
    with daemon.client(place.address) as client:
        assert_same(client.infer("mlp", question.inputs), question.answer)
        until(lambda: "mlp.1: serving" in daemon.log, "every worker is READY")
        with Watched(children_of(place.cache)) as watched:
            pending = submit(client, question, 500)
            os.kill(daemon.pid, signal.SIGTERM)
            daemon.wait_for("stopping")
            os.kill(daemon.pid, signal.SIGTERM)
            daemon.wait(5)
            assert watched.survivors() == []
        assert f"w{WORKERS + 1}" not in daemon.log, "no worker is replaced"
        assert children_of(place.cache) == set()
        assert place.left == []
        endings = {ending_of(each, question) for each in pending}
    assert "UNAVAILABLE" in endings
    assert endings <= {"right", "UNAVAILABLE"}


def ending_of(pending: Pending, question: SampleRequest) -> str:
    try:
        assert_same(pending.result(), question.answer)
    except RequestError as error:
        return error.code
    return "right"


def test_drain_timeout_rejects_remaining_requests(mlp: Path, place: DaemonPaths, question: SampleRequest) -> None:
    tables = {"mlp": {"path": mlp}}
    with place.serve(tables, drain_timeout=0.2) as daemon, daemon.client(place.address) as client:
        assert_same(client.infer("mlp", question.inputs), question.answer)
        pending = submit(client, question, 500)
        os.kill(daemon.pid, signal.SIGTERM)
        assert {ending_of(each, question) for each in pending} == {"right", "UNAVAILABLE"}
        assert daemon.wait() == 0
    assert place.left == []


# Takes the terminal and runs in its foreground, like a program started from a shell.
IN_THE_FOREGROUND = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
os.execv(sys.executable, [sys.executable, "-m", "weightd_daemon", *sys.argv[2:]])
"""


class InTerminal:
    """The command `weightd` in a terminal that is closed in the middle of the block.

    Args:
        hangup: SIG_DFL, or SIG_IGN as under nohup.
        arguments: arguments of the command.
    """

    def __init__(self, hangup: str, *arguments: object) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", IN_THE_FOREGROUND, hangup, *map(str, arguments)],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.pid = self._process.pid

    def wait_for(self, text: str) -> None:
        """Wait until the command has written the text to its terminal."""
        output = b""
        while text.encode() not in output:
            output += os.read(self._master, 65536)

    def close_terminal(self) -> None:
        os.close(self._master)
        self._master = -1

    def wait(self) -> int:
        return self._process.wait(LIMIT_S)

    def end(self) -> int:
        self._process.terminate()
        return self.wait()

    def __enter__(self) -> InTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._master >= 0:
            self.close_terminal()


def test_foreground_commands_exit_with_terminal(mlp: Path, place: DaemonPaths, config: Path, tmp_path: Path) -> None:
    gateway = tmp_path / "gateway.toml"
    gateway.write_text("[gateway]\nhttp = ['127.0.0.1:0']\ngrpc = []\nanonymous = '-'\n", "utf-8")
    run = ("run", mlp, "--workers", 1, "--cache-dir", place.cache, "--socket", f"{place.runtime}/run.sock")
    with contextlib.ExitStack() as stack:
        commands = [run, ("serve", config), ("gateway", gateway)]
        programs = [stack.enter_context(InTerminal("SIG_DFL", *each)) for each in commands]
        for program, text in zip(programs, ("ready; try: ", "mlp.1: serving", "serving at"), strict=True):
            program.wait_for(text)
        children = children_of(place.cache)
        assert children
        with Watched(children) as watched:
            for each in programs:
                each.close_terminal()
            assert [each.wait() for each in programs] == [0, 0, 0]
            assert watched.survivors() == []
    assert place.left == []


def test_daemon_under_nohup_reloads_on_sighup(
    mlp: Path, place: DaemonPaths, config: Path, question: SampleRequest
) -> None:
    run = ("run", mlp, "--workers", 1, "--cache-dir", place.cache, "--socket", f"{place.runtime}/run.sock")
    with contextlib.ExitStack() as stack:
        programs = [stack.enter_context(InTerminal("SIG_IGN", *each)) for each in (run, ("serve", config))]
        for each in programs:
            each.wait_for(": serving")
            each.close_terminal()
        os.kill(programs[1].pid, signal.SIGHUP)
        with Client(f"{place.runtime}/run.sock") as one, Client(place.address) as other:
            for client in (one, other):
                assert_same(client.infer("mlp", question.inputs), question.answer)
            until(lambda: other.metrics().reloads.succeeded, "the daemon has reloaded the file")
        assert [each.end() for each in programs] == [0, 0]
