"""Mutation test of the units, one line at a time: `python -m tests.systemd.mutants [NAME ...]`.

Each mutation names the test that must fail with it. With the original units, all these tests pass.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from testkit import mindir

from .units import DIRECTORY

# Each of them boots a manager; mostly they wait.
AT_ONCE = 2
LIMIT_S = 240

# pytest: all passed, and some failed. Anything else is a mistake of this file.
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Mutant:
    """A line of a unit in place of another ("" removes it), and the test that has to notice: FILE::TEST."""

    name: str
    unit: str
    line: str
    instead: str
    noticed_by: str


def _service(name: str, line: str, instead: str, noticed_by: str) -> Mutant:
    return Mutant(name, "weightd.service", line, instead, noticed_by)


def _socket(name: str, line: str, instead: str, noticed_by: str) -> Mutant:
    return Mutant(name, "weightd.socket", line, instead, noticed_by)


_WATCHDOG = "test_faults.py::test_a_service_without_a_drop_in_is_watched"
_RESTART = "test_restart.py::test_clients_lose_nothing_when_the_daemon_is_replaced"
_START = "test_start.py::test_it_has_started_when_its_required_models_serve_however_long_that_takes"
_CLEAN = "test_units.py::test_systemd_has_nothing_to_say_about_a_unit"
_EXPOSED = "test_units.py::test_nothing_is_exposed_without_a_reason"
_CONFIG = "test_start.py::test_a_wrong_configuration_is_not_tried_again"
_STOP = "test_restart.py::test_a_stop_leaves_nothing_but_the_sockets"
_GROUP = "test_serving.py::test_a_socket_is_for_the_group_alone"
_DIR = "/run/weightd"
_INSTANCES = "test_instances.py"
_SERVING = "test_serving.py"
_RELOAD = "test_serving.py::test_a_broken_configuration_changes_nothing_and_who_reloads_is_told_why"
_PAGES = "test_start.py::test_mindspore_lite_runs_in_it_too"
_WEIGHTCTL = "ExecReload=/usr/bin/weightctl --socket /run/weightd/weightd.sock"
_GROUPS = "test_units.py::test_user_and_group"
_CALLS = "sched_setscheduler sched_setaffinity prlimit64 setrlimit"
_STRANGER = "test_serving.py::test_a_stranger_may_not_connect_and_is_told_so"

MUTANTS = [
    _service("no-watchdog", "WatchdogSec=60", "", _WATCHDOG),
    _service("type-simple", "Type=notify", "Type=simple", _START),
    _service("kill-mixed", "KillMode=process", "KillMode=mixed", _RESTART),
    _service("no-kill-mode", "KillMode=process", "", _RESTART),
    _service("no-store", "FileDescriptorStoreMax=4", "", _RESTART),
    _service("no-restart", "Restart=on-failure", "Restart=no", _RESTART),
    _service("restart-always-78", "RestartPreventExitStatus=64 73 78", "", _CONFIG),
    _service("misspelt", "ProtectHome=yes", "ProtectHoem=yes", _CLEAN),
    _service("writable-code", "MemoryDenyWriteExecute=yes", "", _EXPOSED),
    _service("new-privileges", "NoNewPrivileges=yes", "", _EXPOSED),
    _service("root", "User=weightd", "User=root", "test_serving.py::test_every_process_runs_as_its_user"),
    _service("capable", "CapabilityBoundingSet=", "", "test_serving.py::test_every_process_runs_as_its_user"),
    _service("private-users", "PrivateMounts=yes", "PrivateUsers=yes", "test_serving.py::test_it_sees_its_clients"),
    _service("no-oom-score", "OOMScoreAdjust=100", "", "test_serving.py::test_the_kernel_kills_other_services_later"),
    _service("oom-stop", "OOMPolicy=continue", "OOMPolicy=stop", "test_units.py::test_an_instance_differs"),
    _service("reload-hup", f"{_WEIGHTCTL} reload", "ExecReload=/bin/kill -HUP $MAINPID", _RELOAD),
    _service("no-reload", f"{_WEIGHTCTL} reload", "", _RELOAD),
    _service("cache-open", "CacheDirectoryMode=0700", "", "test_serving.py::test_nobody_else_can_read_what_it_caches"),
    _service("no-slice", "Slice=weightd.slice", "", "test_serving.py::test_it_is_in_the_slice_of_all"),
    _service("no-preserve", "RuntimeDirectoryPreserve=yes", "", _STOP),
    _service("zmq-killed", f"SystemCallFilter={_CALLS} mincore", "SystemCallFilter=mincore", _SERVING),
    _service("no-mincore", f"SystemCallFilter={_CALLS} mincore", f"SystemCallFilter={_CALLS}", _PAGES),
    _socket("open-socket", "SocketMode=0660", "SocketMode=0666", _STRANGER),
    _socket("no-group", "SocketGroup=weightd-clients", "", _GROUP),
    _socket("no-unix", f"ListenStream={_DIR}/weightd.sock.unix", "", _GROUP),
    _socket("elsewhere", "ListenStream=/run/weightd/weightd.sock", "ListenStream=/run/weightd.sock", _SERVING),
    Mutant("one-socket", "weightd@.socket", f"ListenStream={_DIR}/%i.sock", f"ListenStream={_DIR}/i.sock", _INSTANCES),
    Mutant("no-member", "sysusers.d/weightd.conf", "m weightd-gateway weightd-clients", "", _GROUPS),
]  # fmt: skip


def noticed(mutant: Mutant) -> str:
    """Try one; return "" if the test has failed as it should, else what happened instead."""
    with tempfile.TemporaryDirectory(prefix="weightd-mutant-") as scratch:
        directory = Path(scratch, "systemd")
        shutil.copytree(DIRECTORY, directory)
        unit = directory / mutant.unit
        lines = unit.read_text("utf-8").splitlines()
        if mutant.line not in lines:
            return f"{mutant.unit} has no line {mutant.line!r}"
        lines[lines.index(mutant.line)] = mutant.instead
        unit.write_text("\n".join(lines) + "\n", "utf-8")
        return "" if _status(directory, [mutant.noticed_by]) == FAILED else f"{mutant.noticed_by} does not fail"


def _status(directory: Path, tests: Iterable[str]) -> int:
    """Run the tests with the units of that directory; a module or a test is found by its name."""
    names = {test.rpartition("::")[2].removesuffix(".py") for test in tests}
    command = [sys.executable, "-m", "pytest", "-qx", "--timeout=60", "-p", "no:cacheprovider", "tests/systemd"]
    done = subprocess.run(
        [*command, "-k", " or ".join(sorted(names))],
        env={**os.environ, "WEIGHTD_UNITS": str(directory)},
        cwd=mindir.REPOSITORY,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode not in (PASSED, FAILED):
        print(done.stdout[-2000:], done.stderr[-2000:])
    return done.returncode


def main(names: list[str]) -> int:
    """Try all, or those that are named."""
    chosen = [each for each in MUTANTS if not names or each.name in names]
    begin = time.monotonic()
    if _status(DIRECTORY, {each.noticed_by for each in chosen}) != PASSED:
        print("the tests fail without any of them: nothing can be told")
        return 1
    survivors = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mutant, trouble in zip(chosen, pool.map(noticed, chosen), strict=True):
            survivors += bool(trouble)
            print(f"{mutant.name:20} {trouble or 'noticed'}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} noticed in {time.monotonic() - begin:.0f} s")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
