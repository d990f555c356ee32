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

# Each test run boots a manager and mostly waits.
AT_ONCE = 2
LIMIT_S = 240

# pytest's exit statuses for "all passed" and "some failed"; any other status is an error of this program.
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Mutant:
    """A change of one line of a unit ("" removes it), and the test that must fail with it: FILE::TEST."""

    name: str
    unit: str
    line: str
    instead: str
    failing_test: str


def _service(name: str, line: str, instead: str, failing_test: str) -> Mutant:
    return Mutant(name, "weightd.service", line, instead, failing_test)


def _socket(name: str, line: str, instead: str, failing_test: str) -> Mutant:
    return Mutant(name, "weightd.socket", line, instead, failing_test)


_WATCHDOG = "test_faults.py::test_unit_enables_watchdog"
_RESTART = "test_restart.py::test_replaced_daemon_loses_no_request"
_START = "test_start.py::test_start_waits_for_required_models"
_CLEAN = "test_units.py::test_units_are_valid"
_EXPOSED = "test_units.py::test_only_listed_settings_are_exposed"
_CONFIG = "test_start.py::test_invalid_configuration_is_not_retried"
_STOP = "test_restart.py::test_stop_leaves_only_sockets"
_GROUP = "test_serving.py::test_sockets_belong_to_group"
_DIR = "/run/weightd"
_INSTANCES = "test_instances.py"
_SERVING = "test_serving.py"
_RELOAD = "test_serving.py::test_reload_with_invalid_file_fails_with_reason"
_PAGES = "test_start.py::test_mindspore_lite_in_service"
_WEIGHTCTL = "ExecReload=/usr/bin/weightctl --socket /run/weightd/weightd.sock"
_GROUPS = "test_units.py::test_users_and_groups_are_static_without_login"
_CALLS = "sched_setscheduler sched_setaffinity setpriority prlimit64 setrlimit"
_STRANGER = "test_serving.py::test_other_users_may_not_connect"
_USER = "test_serving.py::test_processes_run_as_user_without_privileges"
_NAMESPACE = "test_serving.py::test_daemon_is_in_user_namespace_of_host"

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
    _service("root", "User=weightd", "User=root", _USER),
    _service("capable", "CapabilityBoundingSet=", "", _USER),
    _service("private-users", "PrivateMounts=yes", "PrivateUsers=yes", _NAMESPACE),
    _service("no-oom-score", "OOMScoreAdjust=100", "", "test_serving.py::test_oom_score_is_above_other_services"),
    _service("oom-stop", "OOMPolicy=continue", "OOMPolicy=stop", "test_units.py::test_template_unit_equals_plain_unit"),
    _service("reload-hup", f"{_WEIGHTCTL} reload", "ExecReload=/bin/kill -HUP $MAINPID", _RELOAD),
    _service("no-reload", f"{_WEIGHTCTL} reload", "", _RELOAD),
    _service("cache-open", "CacheDirectoryMode=0700", "", "test_serving.py::test_cache_is_private"),
    _service("no-slice", "Slice=weightd.slice", "", "test_serving.py::test_service_is_in_slice"),
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


def try_mutant(mutant: Mutant) -> str:
    """Try one mutant; return "" if the test fails as expected, otherwise a message."""
    with tempfile.TemporaryDirectory(prefix="weightd-mutant-") as scratch:
        directory = Path(scratch, "systemd")
        shutil.copytree(DIRECTORY, directory)
        unit = directory / mutant.unit
        lines = unit.read_text("utf-8").splitlines()
        if mutant.line not in lines:
            return f"{mutant.unit} has no line {mutant.line!r}"
        lines[lines.index(mutant.line)] = mutant.instead
        unit.write_text("\n".join(lines) + "\n", "utf-8")
        return "" if _status(directory, [mutant.failing_test]) == FAILED else f"{mutant.failing_test} does not fail"


def _status(directory: Path, tests: Iterable[str]) -> int:
    """Run the tests with the units of a directory; modules and tests are selected by name."""
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
    """Try all mutants, or only the named ones."""
    chosen = [each for each in MUTANTS if not names or each.name in names]
    begin = time.monotonic()
    if _status(DIRECTORY, {each.failing_test for each in chosen}) != PASSED:
        print("the tests fail with the original units, so no mutant can be tried")
        return 1
    survivors = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mutant, trouble in zip(chosen, pool.map(try_mutant, chosen), strict=True):
            survivors += bool(trouble)
            print(f"{mutant.name:20} {trouble or 'detected'}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} detected in {time.monotonic() - begin:.0f} s")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
