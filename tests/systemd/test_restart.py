"""A service that restarts or dies while clients ask: they lose nothing but time, and the weights stay in place."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from testkit.waiting import until

from . import materials
from .service import MLP, Child, Weightd, begun, ended

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# Of each transport a client.
SCHEMES = ("unix://", "ipc://")

# The only errors that a client may see while its daemon is replaced.
ALLOWED = {"UNAVAILABLE"}

# Nobody's requirement: beyond this, something has been built again that was there.
MAX_GAP_S = 15.0


@dataclass
class Load:
    """What clients and a probe of the socket reported."""

    reports: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    connects: Mapping[str, int] = field(default_factory=dict[str, int])


@contextmanager
def under_load(weightd: Weightd) -> Generator[Load, None, None]:
    """Have several processes ask during the block; every answer must be right, and no connection refused."""
    clients = [weightd.client("load", materials.QUESTIONS, scheme=each) for each in SCHEMES]
    probe = weightd.client("probe")
    load = Load()
    for each in (*clients, probe):
        begun(each)
    try:
        yield load
        weightd.ask()
    finally:
        load.connects = ended(probe)
        load.reports = [ended(each) for each in clients]
    assert set(load.connects) == {"connected"}, load.connects
    for report in load.reports:
        assert report["answered"], report
        assert not report["wrong"], report
        assert set(report["errors"]) <= ALLOWED, report
        assert report["gap"] < MAX_GAP_S, report


def by_systemctl(weightd: Weightd) -> None:
    weightd.restart()


def by_sigkill(weightd: Weightd) -> None:
    before = weightd.main_pid
    weightd.manager.kill(before, signal.SIGKILL)
    until(lambda: weightd.main_pid not in (0, before) and weightd.show("SubState") == "running", "it is restarted")


def holder(weightd: Weightd) -> Child:
    [child] = [each for each in weightd.children() if each.role == "holder"]
    return child


@pytest.mark.parametrize(("replace", "restarts"), [(by_systemctl, 0), (by_sigkill, 1)])
def test_clients_lose_nothing_when_the_daemon_is_replaced(
    weightd: Weightd, replace: Callable[[Weightd], None], restarts: int
) -> None:
    weightd.start()
    workers = weightd.wait_for_workers()
    before = weightd.main_pid, holder(weightd), weightd.generation()["number"]
    with under_load(weightd):
        replace(weightd)
    assert weightd.main_pid != before[0]
    assert (holder(weightd), weightd.generation()["number"]) == before[1:]
    assert weightd.wait_for_workers() == workers
    assert weightd.restarts == restarts


def test_a_client_that_comes_during_a_restart_is_served_by_the_next_daemon(weightd: Weightd) -> None:
    weightd.start()
    before = weightd.main_pid
    # Between the two daemons there is nobody but the socket.
    weightd.drop_in("RestartSec=1s")
    weightd.manager.kill(before, signal.SIGKILL)
    until(lambda: weightd.show("SubState") == "auto-restart", "nobody is there")
    weightd.ask()
    assert weightd.main_pid not in (0, before)


def test_a_stop_leaves_nothing_but_the_sockets(weightd: Weightd) -> None:
    weightd.start()
    weightd.wait_for_workers()
    weightd.restart()
    weightd.stop()
    found = weightd.manager.run(["find", "/run/weightd", "-not", "-type", "d"])
    assert {*found.split()} == {*weightd.sockets}
    left = weightd.manager.run(["find", "/var/cache/weightd", "-mindepth", "1", "-not", "-name", "*.counters"])
    assert left == ""
    assert weightd.show("Result") == "success"
    # They are still there for whoever comes next.
    weightd.ask()


def test_a_wrong_file_does_not_end_what_serves(weightd: Weightd) -> None:
    weightd.start()
    workers = weightd.wait_for_workers()
    nowhere = '[daemon]\ncache_dir = "/proc/none"\n[models.mlp]\npath = "/srv/weightd/mlp.onnx"\n'
    for wrong, replace in (("nonsense", by_systemctl), (nowhere, by_sigkill)):
        weightd.write_config(wrong)
        replace(weightd)
        weightd.ask()
        assert weightd.wait_for_workers() == workers
        note = weightd.status()["note"]
        assert "the previous configuration stays in force" in note
        # Every user of the host may read the status text, so it has neither names nor causes.
        assert "the configuration file is not in force" in weightd.show("StatusText")
        assert "is not in force: keeping the previous configuration" in weightd.journal()
    weightd.configure({"mlp": MLP})
    weightd.manager.systemctl("reload", weightd.service)
    assert (weightd.status()["note"], weightd.wait_for_workers()) == ("", workers)
    # What is stopped for good is not remembered.
    weightd.write_config("nonsense")
    weightd.stop()
    assert weightd.manager.try_run(["systemctl", "start", weightd.service]).returncode != 0


def test_a_changed_model_is_loaded_by_the_next_daemon(weightd: Weightd) -> None:
    weightd.start()
    old = weightd.wait_for_workers()
    weightd.configure({"mlp": {"path": materials.OTHER_MODEL, "workers": 1, "required": True}})
    weightd.restart()
    until(lambda: weightd.report("ask", materials.QUESTIONS).get("wrong"), "the other model answers")
    until(lambda: not set(old) & set(weightd.pids()), "the old workers are gone")
