"""Reactions of systemd and the kernel to a failing service: watchdog, memory limit and restart limit."""

from __future__ import annotations

import os
import signal

import pytest

from testkit.waiting import until

from . import materials
from .service import MLP, Weightd

pytestmark = [pytest.mark.e2e, pytest.mark.long]

WATCHDOG_S = 2
LONGER_S = 4

# 2 GB in numbers of four bytes, five times the service's memory limit.
TOO_MUCH = 500_000_000
LIMIT = "400M"
RECOVERY_S = 60.0


def test_watchdog_tolerates_slow_worker_replacement(weightd: Weightd) -> None:
    python = materials.slow_python(weightd.manager, LONGER_S)
    slow = {**MLP, "workers": 1, "python": python, "watchdog": 1}
    weightd.configure({"mlp": slow})
    weightd.drop_in(f"WatchdogSec={WATCHDOG_S}")
    weightd.start()
    before = weightd.main_pid
    for pid in weightd.wait_for_workers(1):
        weightd.manager.kill(pid, signal.SIGSTOP)
    until(lambda: weightd.status()["models"][0]["unexpected_exits"], "the worker is replaced")
    weightd.wait_for_workers(1)
    weightd.ask()
    assert (weightd.main_pid, weightd.restarts) == (before, 0)


def test_unit_enables_watchdog(weightd: Weightd) -> None:
    weightd.start()
    assert weightd.show("WatchdogUSec") not in ("", "0", "infinity")
    assert weightd.show("WatchdogTimestampMonotonic") != "0"


def test_watchdog_restarts_hung_daemon_and_weights_stay(weightd: Weightd) -> None:
    weightd.drop_in(f"WatchdogSec={WATCHDOG_S}", "TimeoutAbortSec=1")
    weightd.start()
    workers = weightd.wait_for_workers()
    weightd.manager.kill(weightd.main_pid, signal.SIGSTOP)
    until(lambda: weightd.restarts, "systemd restarts the service", RECOVERY_S)
    until(lambda: weightd.show("ActiveState") == "active", "the service has started", RECOVERY_S)
    assert "Failed with result 'watchdog'" in weightd.journal()
    weightd.ask()
    assert weightd.wait_for_workers() == workers


def test_restarts_service_after_all_processes_were_killed(weightd: Weightd) -> None:
    weightd.start()
    before = set(weightd.pids())
    weightd.manager.systemctl("kill", "--kill-whom=all", "--signal=KILL", weightd.service)
    until(lambda: weightd.restarts, "systemd restarts the service")
    weightd.ask()
    assert not before & set(weightd.pids())


def test_serves_restarts_and_stops_without_shim(weightd: Weightd) -> None:
    weightd.start()
    weightd.wait_for_workers()
    [shim] = [each for each in weightd.pids() if "processes.shim" in weightd.manager.proc(each, "cmdline")]
    weightd.manager.kill(shim, signal.SIGKILL)
    weightd.ask()
    weightd.restart()
    weightd.ask()
    weightd.stop()


def test_memory_limit_kills_worker(weightd: Weightd) -> None:
    weightd.configure({"mlp": MLP, "greedy": {"path": materials.GREEDY, "required": True}})
    weightd.drop_in(f"MemoryMax={LIMIT}", "MemorySwapMax=0")
    weightd.start()
    before, others = weightd.main_pid, weightd.wait_for_workers()
    assert weightd.report("greedy", "1000")["y"] == 1.0
    assert weightd.report("greedy", str(TOO_MUCH))["error"] in ("INTERNAL", "UNAVAILABLE", "RESOURCE_EXHAUSTED")
    weightd.wait_for_workers(1, "greedy")
    assert weightd.report("greedy", "1000")["y"] == 1.0
    assert (weightd.main_pid, weightd.restarts, weightd.wait_for_workers()) == (before, 0, others)
    assert weightd.show("ActiveState") == "active"
    weightd.ask()


def test_slice_limits_memory(weightd: Weightd) -> None:
    weightd.start()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < weightd.status()["memory"]["limit_bytes"] <= 0.9 * total


def test_start_limit_ends_restarts(weightd: Weightd) -> None:
    weightd.drop_in("RestartSec=0", "[Unit]", "StartLimitIntervalSec=60", "StartLimitBurst=3")
    weightd.start()
    for _ in range(3):
        pid = until(lambda: weightd.main_pid, "systemd starts the service")
        weightd.manager.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: weightd.main_pid != pid, "the process exits")  # type: ignore[misc]
    until(lambda: weightd.show("ActiveState") == "failed", "systemd gives up")
    until(lambda: not weightd.pids(), "all processes exit")
