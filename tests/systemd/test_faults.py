"""What systemd and the kernel do to a service that fails: the watchdog, the limits of memory and of restarts."""

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

# 2 GB in numbers of four bytes; the service may have a fifth of it.
TOO_MUCH = 500_000_000
LIMIT = "400M"
RECOVERY_S = 60.0


def test_a_service_that_replaces_its_workers_for_longer_than_systemd_waits_is_left_alone(weightd: Weightd) -> None:
    python = materials.slow_python(weightd.manager, LONGER_S)
    slow = {**MLP, "workers": 1, "python": python, "watchdog": 1}
    weightd.configure({"mlp": slow})
    weightd.drop_in(f"WatchdogSec={WATCHDOG_S}")
    weightd.start()
    before = weightd.main_pid
    for pid in weightd.wait_for_workers(1):
        weightd.manager.kill(pid, signal.SIGSTOP)
    until(lambda: weightd.status()["models"][0]["unexpected_exits"], "it is replaced")
    weightd.wait_for_workers(1)
    weightd.ask()
    assert (weightd.main_pid, weightd.restarts) == (before, 0)


def test_a_service_without_a_drop_in_is_watched(weightd: Weightd) -> None:
    weightd.start()
    assert weightd.show("WatchdogUSec") not in ("", "0", "infinity")
    assert weightd.show("WatchdogTimestampMonotonic") != "0"


def test_a_daemon_that_hangs_is_restarted_and_the_weights_stay(weightd: Weightd) -> None:
    weightd.drop_in(f"WatchdogSec={WATCHDOG_S}", "TimeoutAbortSec=1")
    weightd.start()
    workers = weightd.wait_for_workers()
    weightd.manager.kill(weightd.main_pid, signal.SIGSTOP)
    until(lambda: weightd.restarts, "systemd restarts it", RECOVERY_S)
    until(lambda: weightd.show("ActiveState") == "active", "it has started", RECOVERY_S)
    assert "Failed with result 'watchdog'" in weightd.journal()
    weightd.ask()
    assert weightd.wait_for_workers() == workers


def test_a_service_of_which_every_process_is_killed_begins_anew(weightd: Weightd) -> None:
    weightd.start()
    before = set(weightd.pids())
    weightd.manager.systemctl("kill", "--kill-whom=all", "--signal=KILL", weightd.service)
    until(lambda: weightd.restarts, "systemd restarts it")
    weightd.ask()
    assert not before & set(weightd.pids())


def test_without_its_keeper_it_goes_on_and_can_be_restarted_and_stopped(weightd: Weightd) -> None:
    weightd.start()
    weightd.wait_for_workers()
    [keeper] = [each for each in weightd.pids() if "processes.shim" in weightd.manager.proc(each, "cmdline")]
    weightd.manager.kill(keeper, signal.SIGKILL)
    weightd.ask()
    weightd.restart()
    weightd.ask()
    weightd.stop()


def test_of_a_service_that_uses_too_much_memory_a_worker_dies(weightd: Weightd) -> None:
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


def test_the_slice_leaves_memory_to_the_rest_of_the_host(weightd: Weightd) -> None:
    weightd.start()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < weightd.status()["memory"]["limit_bytes"] <= 0.9 * total


def test_it_is_not_started_for_ever(weightd: Weightd) -> None:
    weightd.drop_in("RestartSec=0", "[Unit]", "StartLimitIntervalSec=60", "StartLimitBurst=3")
    weightd.start()
    for _ in range(3):
        pid = until(lambda: weightd.main_pid, "it is started again")
        weightd.manager.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: weightd.main_pid != pid, "it is gone")  # type: ignore[misc]
    until(lambda: weightd.show("ActiveState") == "failed", "systemd gives up")
    until(lambda: not weightd.pids(), "no process is left")
