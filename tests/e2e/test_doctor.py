"""`weightd doctor` on simulated machines: real worker processes with a simulated library and simulated cards."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ascendsim import Host, environment, models
from testkit import mindir, surroundings
from testkit.waiting import until
from weightd_daemon.doctor import checks, ranks
from weightd_daemon.doctor.findings import PROCESS_EXITS
from weightd_daemon.doctor.selftest.sharing import ATTACH, BUILD, CHECK_NAMES, HOLDER_EXIT, MEMORY
from weightd_daemon.engines import ranktable
from weightd_daemon.engines.ranktable import RankDevice

from .support import LIMIT_S, children_of

pytestmark = pytest.mark.e2e

COMMAND = [sys.executable, "-m", "weightd_daemon", "doctor"]
# Findings about files of the vendor's installers and device nodes, which a test cannot create, and about the service,
# which does not exist here.
UNSEEN = {"driver", "cann", "device nodes", "service"}

# The lines that npu-smi prints for a chip without processes.
IDLE_CHIP = "    No process in device.\n    Chip ID                        : {}\n"


class Done(NamedTuple):
    """Exit status and findings of the doctor, by name; each finding has a result, a detail and advice."""

    status: int
    findings: dict[str, dict[str, str]]

    def those(self, verdict: str) -> set[str]:
        return {name for name, each in self.findings.items() if each["result"] == verdict}

    def text(self, name: str) -> str:
        return f"{self.findings[name]['result']}: {self.findings[name]['detail']} -> {self.findings[name]['advice']}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.mlp(tmp_path / "mlp.mindir")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host")


@pytest.fixture
def programs(tmp_path: Path) -> Callable[[str, str], None]:
    """Write a program of the host: a shell script that prints the text."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name: str, text: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (folder / name).chmod(0o755)

    return write


@pytest.fixture
def variables(tmp_path: Path, host: Host, programs: Callable[[str, str], None]) -> dict[str, str]:
    """The environment of the host, with an npu-smi that lists one card and no process."""
    programs("npu-smi", "  0  0  0  Ascend910\n    No process in device.\n    Chip ID                        : 0")
    return {**os.environ, **environment(host), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def doctor(variables: dict[str, str], *arguments: object, under: Sequence[str] = ()) -> Done:
    command = [*under, *COMMAND, "--json", *map(str, arguments)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["exit_status"] == done.returncode
    return Done(done.returncode, {each["name"]: each for each in report["findings"]})


def directories() -> set[Path]:
    return set(Path("/tmp").glob("weightd-doctor-*"))


def not_reached(done: Done, *but: str) -> None:
    """Check that all steps of the self-test except these are reported as not reached."""
    steps = set(CHECK_NAMES) - set(but)
    assert {name for name in steps if done.text(name).startswith("not testable: not reached")} == steps


def test_healthy_host_passes_all_checks(tmp_path: Path, host: Host, model: Path, variables: dict[str, str]) -> None:
    before = directories()
    done = doctor(variables, "--model", model, "--limit", LIMIT_S)
    assert (done.status, done.those("not testable")) == (0, UNSEEN)
    assert set(CHECK_NAMES) <= done.those("pass")
    assert "container" in done.text("current_pid")
    assert re.search("pass: 0 of (63|32) on ascend:0", done.text("processes"))  # fewer in a virtual machine
    assert "a worker with a private copy takes 218 MiB" in done.text(MEMORY)
    assert "reference-counted" in done.text(HOLDER_EXIT)
    # holder, worker, a private copy, a later worker, an unlisted worker, a late worker
    assert host.count("build") == 6
    assert "is not on the list" in host.driver_log()[-1]
    assert (children_of(tmp_path), directories(), host.card_state().used) == (set(), before, 0)


def test_oldest_interpreter_with_selftest_tolerance(host: Host, model: Path, variables: dict[str, str]) -> None:
    python = mindir.interpreter()
    if python is None:
        pytest.skip(mindir.HOW_TO_GET_IT)
    host.switch(noise=1e-4, lifetime="strict")
    keys = ("--selftest", "{x = [3, 64]}", "--selftest-tolerance", "1e-3")
    done = doctor(variables, "--model", model, "--limit", LIMIT_S, "--python", python, *keys)
    assert (done.status, done.those("not testable")) == (0, UNSEEN)
    assert "Python 3.7" in done.text("interpreter")
    assert "strict: the worker cannot continue" in done.text(HOLDER_EXIT)


def test_virtual_instance_fails_to_attach(host: Host, model: Path, variables: dict[str, str]) -> None:
    host.switch(vnpu=True)
    done = doctor(variables, "--model", model, "--limit", LIMIT_S)
    assert (done.status, done.those("fail")) == (1, {ATTACH})
    assert "virtual instance" in done.text(ATTACH)
    assert done.findings["virtual instance"]["result"] == "not testable"
    not_reached(done, BUILD, ATTACH)


def test_prints_table_without_model(host: Host, variables: dict[str, str]) -> None:
    done = subprocess.run(COMMAND, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, host.count("build")) == (0, 0)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("pass          interpreter")
    assert lines[-1] == "9 pass, 0 fail, 6 not testable"


def test_judges_environment_of_service_instead_of_shell(
    host: Host, model: Path, variables: dict[str, str], programs: Callable[[str, str], None]
) -> None:
    def judged(service: dict[str, str], shell: dict[str, str]) -> Done:
        lines = ["LoadState=loaded", "User=root", *(f"Environment={key}={value}" for key, value in service.items())]
        programs("systemctl", "\n".join(lines))
        return doctor({**shell, "PATH": variables["PATH"]}, "--model", model.with_name("missing.mindir"))

    done = judged(environment(host), dict(os.environ))
    assert done.text("service").startswith("pass: checked the environment of weightd.service: user root")
    assert done.findings["devices"]["result"] == "pass"
    assert "No such file or directory" in done.text(BUILD)
    not_reached(done)
    done = judged({}, variables)
    assert "No module named 'mindspore_lite'" in done.text("mindspore_lite")
    assert (done.status, host.count("build")) == (1, 0)
    not_reached(done)


def test_checks_requirements_of_ranks(
    tmp_path: Path, variables: dict[str, str], programs: Callable[[str, str], None]
) -> None:
    two = {**variables, **environment(Host(tmp_path / "two", cards=2)), "PATH": variables["PATH"]}
    programs("npu-smi", "  0  0  0  Ascend910\n  0  1  1  Ascend910\n" + IDLE_CHIP.format(0) + IDLE_CHIP.format(1))
    (tmp_path / "libhccl.so").touch()
    two["LD_LIBRARY_PATH"] = str(tmp_path)
    table = tmp_path / "table.json"
    table.write_text(ranktable.generate([RankDevice(0), RankDevice(1)]))
    done = doctor(two, "--ranks", "--rank-table", table)
    assert done.status == 0, done
    # A machine without /etc/hccn.conf does not know the addresses of its devices.
    assert {*ranks.CHECKS} - done.those("pass") <= {"device addresses"}
    assert done.text(ranks.TABLE) == f"pass: {table}: 2 ranks on localhost -> "
    done = doctor({**two, "ASCEND_RT_VISIBLE_DEVICES": "1"}, "--ranks", "ascend:0,ascend:1", "--rank-table", table)
    assert (done.status, done.those("fail")) == (1, {"cards of ranks", ranks.TABLE})


def test_reports_how_daemon_detects_process_exits() -> None:
    pidfds, other = (
        doctor(dict(os.environ), under=each).text(PROCESS_EXITS) for each in ((), surroundings.command("ENOSYS"))
    )
    assert re.fullmatch(r"pass: Linux \S+: pidfds -> ", pidfds)
    assert re.search(r"because pidfds are unavailable: pidfd_open: Function not implemented", other)


@pytest.mark.parametrize("python", [sys.executable, "/nonexistent/python"])
def test_host_without_ascend(python: str) -> None:
    if list(Path("/dev").glob("davinci[0-9]*")):
        pytest.skip("this machine has cards")
    done = doctor(dict(os.environ), "--model", "any.mindir", "--ranks", "--python", python)
    good = python == sys.executable
    assert (done.status, done.those("pass")) == ((69, {"interpreter", PROCESS_EXITS}) if good else (1, {PROCESS_EXITS}))
    assert good or "cannot be run: No such file or directory" in done.text("interpreter")
    assert "no Ascend driver or library found" in done.text("ascend")
    assert len(done.those("not testable")) == 1 + len(checks.CHECKS) + len(ranks.CHECKS) + len(CHECK_NAMES)
    not_reached(done)


def test_report_exits_with_doctor(tmp_path: Path, variables: dict[str, str]) -> None:
    library = tmp_path / "sleeping" / "mindspore_lite" / "__init__.py"
    library.parent.mkdir(parents=True)
    library.write_text("import time\nopen(__file__ + '.begun', 'w').close()\ntime.sleep(999)\n")
    variables["PYTHONPATH"] = f"{tmp_path}/sleeping{os.pathsep}{variables['PYTHONPATH']}"
    with subprocess.Popen(COMMAND, env=variables, stdout=subprocess.DEVNULL) as process:
        report = Path(f"weightd_worker.report --device 0 --parent {process.pid}")
        until(Path(f"{library}.begun").exists, "the report starts")
        assert children_of(report)
        process.kill()
        process.wait(LIMIT_S)
    until(lambda: not children_of(report), "the report exits")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_children_exit_with_doctor(
    host: Host, model: Path, variables: dict[str, str], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    host.fault("build", "hang", "holder")
    before = directories()
    command = [*COMMAND, "--model", str(model)]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        until(lambda: host.count("build"), "the holder builds")
        process.send_signal(number)
        assert process.wait(LIMIT_S) == status
    until(lambda: not children_of(tmp_path), "the children exit")
    assert host.card_state().used == 0
    left = directories() - before
    # The doctor cannot clean up after SIGKILL.
    assert len(left) == (0 if number is signal.SIGTERM else 1)
    for each in left:
        shutil.rmtree(each)
