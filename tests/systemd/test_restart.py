"""Restarts and crashes of the service while clients send requests: no request is lost, and the weights stay loaded."""

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

# One client per transport.
SCHEMES = ("unix://", "ipc://")

# The only errors that a client may see while its daemon is replaced.
ALLOWED = {"UNAVAILABLE"}

# Not a requirement, but a longer gap means that a process was built again.
MAX_GAP_S = 15.0


@dataclass
class Load:
    """Reports of the clients, and of a probe that connects to the sockets."""

    reports: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    connects: Mapping[str, int] = field(default_factory=dict[str, int])


@contextmanager
def under_load(weightd: Weightd) -> Generator[Load, None, None]:
    """Run clients and a probe during the block; every answer must be right, and no connection may be rejected."""
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
    until(
        lambda: weightd.main_pid not in (0, before) and weightd.show("SubState") == "running",
        "the service is restarted",
    )


def holder(weightd: Weightd) -> Child:
    [child] = [each for each in weightd.children() if each.role == "holder"]
    return child


@pytest.mark.parametrize(("replace", "restarts"), [(by_systemctl, 0), (by_sigkill, 1)])
def test_replaced_daemon_loses_no_request(weightd: Weightd, replace: Callable[[Weightd], None], restarts: int) -> None:
    weightd.start()
    workers = weightd.wait_for_workers()
    before = weightd.main_pid, holder(weightd), weightd.generation()["number"]
    with under_load(weightd):
        replace(weightd)
    assert weightd.main_pid != before[0]
    assert (holder(weightd), weightd.generation()["number"]) == before[1:]
    assert weightd.wait_for_workers() == workers
    assert weightd.restarts == restarts


def test_kill_during_a_load_loses_no_request(weightd: Weightd) -> None:
    weightd.configure({"mlp": MLP, "late": {**MLP, "load": "on_demand", "required": False}})
    weightd.start()
    workers = weightd.wait_for_workers()
    with under_load(weightd):
        assert weightd.weightctl("load", "late").returncode == 0
        until(lambda: "late.1: " in weightd.journal(), "the model loads")
        by_sigkill(weightd)
    assert (weightd.wait_for_workers(), weightd.restarts) == (workers, 1)
    weightd.ask(model="late")


def test_next_daemon_serves_client_that_connects_during_restart(weightd: Weightd) -> None:
    weightd.start()
    before = weightd.main_pid
    # Between the two daemons, only the socket exists.
    weightd.drop_in("RestartSec=1s")
    weightd.manager.kill(before, signal.SIGKILL)
    until(lambda: weightd.show("SubState") == "auto-restart", "no daemon runs")
    weightd.ask()
    assert weightd.main_pid not in (0, before)


def test_stop_leaves_only_sockets(weightd: Weightd) -> None:
    weightd.start()
    weightd.wait_for_workers()
    weightd.restart()
    weightd.stop()
    found = weightd.manager.run(["find", "/run/weightd", "-not", "-type", "d"])
    assert {*found.split()} == {*weightd.sockets}
    left = weightd.manager.run(["find", "/var/cache/weightd", "-mindepth", "1", "-not", "-name", "*.counters"])
    assert left == ""
    assert weightd.show("Result") == "success"
    # The sockets remain and start the service again.
    weightd.ask()


def test_restart_with_invalid_file_keeps_configuration(weightd: Weightd) -> None:
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
        # Every user of the host may read the status text, so it contains neither names nor reasons.
        assert "the configuration file is not in force" in weightd.show("StatusText")
        assert "is not in force: keeping the previous configuration" in weightd.journal()
    weightd.configure({"mlp": MLP})
    weightd.manager.systemctl("reload", weightd.service)
    assert (weightd.status()["note"], weightd.wait_for_workers()) == ("", workers)
    # After a stop, the previous configuration is forgotten.
    weightd.write_config("nonsense")
    weightd.stop()
    assert weightd.manager.try_run(["systemctl", "start", weightd.service]).returncode != 0


def test_next_daemon_loads_changed_model(weightd: Weightd) -> None:
    weightd.start()
    old = weightd.wait_for_workers()
    weightd.configure({"mlp": {"path": materials.OTHER_MODEL, "workers": 1, "required": True}})
    weightd.restart()
    until(lambda: weightd.report("ask", materials.QUESTIONS).get("wrong"), "the other model answers")
    until(lambda: not set(old) & set(weightd.pids()), "the old workers exit")
