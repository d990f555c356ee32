"""Unusual process environments: inherited signal masks, old kernels, and orphans in containers."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from testkit import census, surroundings
from testkit.managed import ManagedService
from testkit.waiting import until
from weightd import Client

from .support import (
    LIMIT_S,
    ONE_ENGINE,
    DaemonPaths,
    Load,
    SampleRequest,
    Watched,
    Weightd,
    assert_same,
    children_of,
    kill_a_worker,
)

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

PROCESS_DIED = 2
# A new PID namespace, in which the command is PID 1.
UNSHARE = [
    "unshare",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    *([] if os.geteuid() == 0 else ["--map-root-user"]),
]


def zombies(pids: Sequence[int]) -> list[int]:
    """Return the children of these processes that have exited but were not reaped."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state == "Z" and int(parent) in pids:
                found.append(int(entry.name))
    return found


def assert_serves_and_replaces_worker(daemon: Weightd, place: DaemonPaths, question: SampleRequest) -> None:
    with daemon.client(place.address) as client:
        assert_same(client.infer("mlp", question.inputs), question.answer)
        workers = functools.partial(_workers, client)
        before = until(lambda: _of(2, workers()), "both workers serve")
        victim = next(iter(before))
        os.kill(before[victim], signal.SIGKILL)
        until(lambda: _of(2, workers()) if victim not in workers() else None, "the replacement serves")
        assert_same(client.infer("mlp", question.inputs), question.answer)
    assert f"{victim} lost: killed by SIGKILL" in daemon.log
    until(lambda: not zombies(census.families([daemon.pid])), "every child is reaped")


def _of(count: int, found: dict[str, int]) -> dict[str, int] | None:
    return found if len(found) == count else None


def _workers(client: Client) -> dict[str, int]:
    [model] = client.status().models
    processes = model.generations[-1].processes
    return {each.name: each.pid for each in processes if (each.role, each.state) == ("worker", "ready")}


@pytest.mark.parametrize("how", ["ignored,blocked", "ENOSYS", "EPERM"])
def test_daemon_serves_and_stops(
    how: str, mlp: Path, place: DaemonPaths, questions: list[SampleRequest], tmp_path: Path
) -> None:
    config = place.config({"mlp": {"path": mlp, "workers": 2}})
    with Weightd(tmp_path / "log", "--verbose", "serve", config, under=surroundings.command(how)) as daemon:
        assert_serves_and_replaces_worker(daemon, place, questions[0])
        with Watched(children_of(place.cache)) as watched:
            assert daemon.end() == PROCESS_DIED
            assert watched.survivors() == []
    assert "Traceback" not in daemon.log
    assert place.left == []


def test_check_loads_models_without_pidfds(mlp: Path, place: DaemonPaths, tmp_path: Path) -> None:
    config = place.config({"mlp": {"path": mlp}})
    with Weightd(tmp_path / "log", "check", "--load", config, under=surroundings.command("ENOSYS")) as check:
        assert check.wait() == 0
    assert f"{config}: valid" in check.log


class Surrounded(ManagedService):
    """A managed service whose daemons start in an unusual environment."""

    def __init__(self, how: str, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._how = how

    def _popen(self, command: list[str]) -> subprocess.Popen[str]:
        return super()._popen([*surroundings.command(self._how), *command])


def test_next_daemon_watches_surviving_processes(mlp: Path, questions: list[SampleRequest]) -> None:
    how = "ignored,blocked,ENOSYS"
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(Surrounded(how, {"mlp": {"path": mlp, "workers": 2}}, verbose=True))
        service.ready()
        with Load(service.address, "mlp", questions) as load:
            kill_a_worker(service, load)
        before = {each.name: each.pid for each in service.processes()}
        service.restart(signal.SIGTERM)
        service.ready()
        assert {each.name: each.pid for each in service.processes()} == before
        with Load(service.address, "mlp", questions) as load:
            kill_a_worker(service, load)
        everything = service.pids()
        until(lambda: not zombies(everything), "every child is reaped")
        assert "Traceback" not in service.log
        with Watched(everything) as watched:
            stack.close()
            until(lambda: not watched.survivors(), "the shim ends all processes")


def _adopting(how: str, seconds: str) -> list[str]:
    """Return a command prefix: a process that adopts orphans and already has one, `sleep` for this many seconds."""
    if how == "PID 1":
        if subprocess.run([*UNSHARE, "true"], stderr=subprocess.DEVNULL, check=False).returncode != 0:
            pytest.skip("PID namespaces are not available")
        return [*UNSHARE, *surroundings.command(f"orphan={seconds}")]
    return surroundings.command(f"subreaper,orphan={seconds}")


@pytest.mark.parametrize("how", ["subreaper", "PID 1"])
def test_daemon_reaps_adopted_orphans(
    how: str, mlp: Path, place: DaemonPaths, questions: list[SampleRequest], tmp_path: Path
) -> None:
    """In a container, no other process would reap them."""
    # The test finds the orphan by its argument, because its pid differs in another namespace.
    seconds = f"600.{os.getpid()}"
    config = place.config({"mlp": {"path": mlp, "workers": 2}})
    with Weightd(tmp_path / "log", "--verbose", "serve", config, under=_adopting(how, seconds)) as daemon:
        if how == "subreaper":
            # The daemon still learns the exit status of the worker that it started.
            assert_serves_and_replaces_worker(daemon, place, questions[0])
            assert_reaps_and_stops(daemon, how, seconds, PROCESS_DIED)
        else:
            with daemon.client(place.address) as client:
                assert_same(client.infer("mlp", questions[0].inputs), questions[0].answer)
            assert_reaps_and_stops(daemon, how, seconds)
    assert place.left == []


def test_gateway_reaps_adopted_orphans(tmp_path: Path) -> None:
    how, seconds = "subreaper", f"600.{os.getpid()}"
    config = tmp_path / "gateway.toml"
    config.write_text("[gateway]\nhttp = ['127.0.0.1:0']\ngrpc = []\nanonymous = '-'\n", "utf-8")
    with Weightd(tmp_path / "log", "gateway", config, under=_adopting(how, seconds)) as gateway:
        gateway.wait_for("serving at")
        assert_reaps_and_stops(gateway, how, seconds)


def assert_reaps_and_stops(program: Weightd, how: str, seconds: str, status: int = 0) -> None:
    [orphan] = [pid for pid in census.families([program.pid]) if command_line(pid) == ["sleep", seconds]]
    os.kill(orphan, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{orphan}").exists(), "the orphan is reaped")
    init = program.pid if how == "subreaper" else census.families([program.pid])[1]
    os.kill(init, signal.SIGTERM)
    assert program.wait() == status
    assert "Traceback" not in program.log


def test_processes_hide_model_names_and_environment(mlp: Path, tmp_path: Path) -> None:
    tables = {"private": {"path": mlp, "workers": 1}, "spawned": {"path": mlp, "workers": 1, "start": "spawn"}}
    env = {"A_PASSWORD": "secret", "A_LIBRARY_HOME": "/somewhere", "ASCEND_HOME_PATH": "/none"}
    more = {"pass_environment": ["A_LIBRARY_*"]}
    with ManagedService(tables, env=env, daemon=more) as service:
        service.ready()
        roles = service.roles()
        assert {"shim", "zygote", "proxy", "worker", "fork server"} <= {*roles.values()}
        children = [pid for pid in roles if pid != service.pid]
        for pid in children:
            for name in ("cmdline", "comm"):
                seen = Path(f"/proc/{pid}/{name}").read_text("utf-8", "replace")
                assert not any(each in seen for each in ("private", "spawned", "mlp", ".onnx")), (pid, name)
            seen = Path(f"/proc/{pid}/environ").read_text("utf-8", "replace")
            # The zygote and its proxies are forked from the daemon, so the kernel shows the daemon's initial
            # environment.
            if roles[pid] not in ("zygote", "proxy"):
                inherited = [name for name in env if name in seen]
                assert inherited == ["A_LIBRARY_HOME", "ASCEND_HOME_PATH"], roles[pid]


def test_weightctl_exits_on_sigterm(mlp: Path, place: DaemonPaths) -> None:
    with place.serve({"mlp": {"path": mlp, "workers": 1}}) as daemon:
        daemon.wait_for("listens on")
        command = [sys.executable, "-m", "weightctl", "--socket", place.address, "events", "--follow"]
        for how, status in (("blocked", -signal.SIGTERM), ("subreaper", 128 + signal.SIGTERM)):
            with subprocess.Popen([*surroundings.command(how), *command], stdout=subprocess.PIPE) as follower:
                assert follower.stdout is not None
                assert follower.stdout.readline()
                follower.terminate()
                assert follower.wait(LIMIT_S) == status


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace").rstrip("\0").split("\0")
