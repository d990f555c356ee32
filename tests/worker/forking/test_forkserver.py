"""Tests of the fork server as the daemon starts it, with the real engine of this interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Callable, ContextManager, List

import numpy as np
import pytest

from testkit.waiting import until
from weightd_protocol.messages.worker import Attach, Attached, Build, Built, Fork, Forked, Hello, Ping, Pong, Stop
from weightd_worker import exit_codes

if TYPE_CHECKING:
    from tests.worker.conftest import Daemon
    from tests.worker.forking.conftest import Forking

Model = Callable[[str], Path]
Start = Callable[..., ContextManager["Forking"]]

ENGINE = "mindspore_lite" if importlib.util.find_spec("mindspore_lite") else "onnxruntime"

# Starts the server as a child, prints its pid, and waits.
PARENT = """
import os, subprocess, sys
server = subprocess.Popen([*sys.argv[1:], "--parent", str(os.getpid())], stdin=subprocess.PIPE)
server.stdin.write(sys.stdin.buffer.readline())
server.stdin.close()
print(server.pid, flush=True)
sys.stdin.readline()
"""


def alive(pid: int) -> bool:
    """Return whether the process runs. A zombie does not count, because it may have no parent that reaps it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_forks_holder_and_workers(forking: Forking, model: Model) -> None:
    daemon, path = forking.daemon, model("wide")
    for name, role in (("h", "holder"), ("w1", "worker"), ("w2", "worker")):
        forking.fork(name, path, "--role", role)
        hello = forking.channel(name).receive(Hello)
        assert hello.origin == "forked"
    forking.channel("h").send(Build(()))
    built = forking.channel("h").receive(Built)
    assert (built.handle, built.is_template) == (str(daemon.directory / "store"), False)
    x = (np.arange(1024) % 7 - 3).astype(np.float32).reshape(1, 1024)
    i, j = np.ogrid[:1024, :1024]
    for number, name in enumerate(("w1", "w2")):
        forking.channel(name).send(Attach(built.handle, built.selftest_cases))
        attached = forking.channel(name).receive(Attached)
        assert (attached.selftest_digest, attached.shared_bytes > 0.9 * built.shared_bytes) == (
            built.selftest_digest,
            True,
        )
        answer = forking.channel(name).ask(number, x=x)
        assert np.array_equal(answer, x @ ((i + 3 * j) % 5 - 2).astype(np.float32))
    for name in ("w1", "w2", "h"):
        forking.channel(name).send(Stop())
        assert forking.wait(name) == exit_codes.OK


def test_children_outlive_killed_server(served: Start, model: Model) -> None:
    with served() as forking:
        forking.fork("w", model("relu"))
        forking.channel("w").receive(Hello)
        server = forking.daemon.children["server"]
        server.kill()
        server.wait()
        forking.channel("w").send(Ping(run_selftest=False))
        forking.channel("w").receive(Pong)


def test_server_and_children_end_with_parent(served: Start, model: Model) -> None:
    with served() as forking:
        command = [sys.executable, "-c", PARENT, *forking.command(0)[:-2]]
        environment = {**os.environ, **forking.variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen(command, stdin=-1, stdout=-1, env=environment) as parent:
            assert parent.stdin
            parent.stdin.write(json.dumps(forking.arguments()).encode() + b"\n")
            parent.stdin.flush()
            channel = forking.accept()
            arguments = (*forking.daemon.arguments("w", model("relu")), "--address", forking.address)
            channel.send(Fork("w", arguments, str(forking.daemon.directory / "w.log")))
            pid = channel.receive(Forked).pid
            assert forking.accept().pid == pid
            assert alive(pid)
            assert alive(channel.pid)
            parent.kill()
        until(lambda: not alive(pid) and not alive(channel.pid), "the end of both")


@pytest.mark.parametrize("how", ["stop", "channel", "order"])
def test_server_ends_by_stop_channel_or_wrong_order(served: Start, how: str) -> None:
    with served() as forking:
        if how == "channel":
            forking.server.stream.close()
        else:
            forking.server.send(Stop() if how == "stop" else Ping(run_selftest=False))
        status = exit_codes.FAILED if how == "order" else exit_codes.OK
        assert forking.daemon.children["server"].wait(30) == status
    words = "RemoteProtocolError: type: expected fork or stop, got ping"
    assert (words in forking.daemon.log("server")) == (how == "order")


def test_server_ends_without_listener(daemon: Daemon) -> None:
    daemon.launch("server", command(), None, arguments(daemon))
    assert daemon.children["server"].wait(60) == exit_codes.FAILED
    assert f"{daemon.runtime}/children.channel: no process listens" in daemon.log("server")


def test_server_reports_failed_import(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / f"{ENGINE}.py").write_text("raise ValueError('numpy.ndarray size changed')")
    daemon.launch("server", command(), {"PYTHONPATH": str(tmp_path)}, arguments(daemon))
    assert daemon.children["server"].wait(60) == exit_codes.NO_ENGINE
    assert f"{sys.executable}: numpy.ndarray size changed" in daemon.log("server")


def test_server_survives_thread_started_by_import(served: Start, tmp_path: Path) -> None:
    lines = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    for package in (ENGINE, f"{ENGINE}/capi"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(lines if package == ENGINE else "")
    (tmp_path / ENGINE / "capi" / f"{ENGINE}_pybind11_state.py").write_text("")
    with served(PYTHONPATH=str(tmp_path)) as forking:
        for _ in range(2):
            forking.server.send(Fork("w", (), "/log"))
            forked = forking.server.receive(Forked)
            comm = Path(f"/proc/{forking.server.pid}/comm").read_text().strip()
            assert (forked.pid, forked.error) == (0, f"cannot fork: expected one thread, got 1 more: {comm}")


def test_server_survives_wrong_arguments(forking: Forking) -> None:
    for _ in range(2):
        forking.server.send(Fork("none", ("--role", "king"), "/log"))
        assert forking.server.receive(Forked) == Forked("none", 0, "cannot fork: invalid arguments: --role king")


def test_server_ignores_sigint(forking: Forking, model: Model) -> None:
    os.kill(forking.server.pid, signal.SIGINT)
    forking.fork("after", model("relu"))
    forking.channel("after").receive(Hello)


def command() -> List[str]:
    return [sys.executable, "-m", "weightd_worker.forkserver", "--engine", ENGINE, "--parent", str(os.getpid())]


def arguments(daemon: Daemon) -> List[str]:
    """Return the arguments of a server whose daemon does not listen."""
    return ["--name", "server", "--address", f"ipc://{daemon.runtime}/children"]
