"""`weightd doctor` on simulated machines: its children are real workers, their library and cards are simulated."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ascendsim import Host, environment, models
from testkit import mindir
from testkit.waiting import until
from weightd.daemon.doctor.verdicts import host as checks
from weightd.daemon.doctor.verdicts import trial as trial_checks
from weightd.daemon.doctor.verdicts.trial import ANSWER, ATTACH, BUILD, DEATH, LATER, MEMORY, STRANGER

from .support import LIMIT_S, children_of

pytestmark = pytest.mark.e2e

COMMAND = [sys.executable, "-m", "weightd.daemon", "doctor"]
# Of files of the vendor's installers and of device nodes, which no test can put there; and there is no service.
UNSEEN = {"driver", "cann", "device nodes", "service"}


class Done(NamedTuple):
    """What the doctor said. `findings` are by name; each has verdict, found and advice."""

    status: int
    findings: dict[str, dict[str, str]]

    def those(self, verdict: str) -> set[str]:
        return {name for name, each in self.findings.items() if each["verdict"] == verdict}

    def text(self, name: str) -> str:
        return f"{self.findings[name]['verdict']}: {self.findings[name]['found']} -> {self.findings[name]['advice']}"


Ask = Callable[..., Done]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.mlp(tmp_path / "mlp.mindir")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host")


@pytest.fixture
def variables(tmp_path: Path, host: Host) -> dict[str, str]:
    """The environment of the host, with an npu-smi that lists its card and no process."""
    return {**os.environ, **environment(host), "PATH": f"{npu_smi(tmp_path, 0)}:{os.environ['PATH']}"}


@pytest.fixture
def ask(tmp_path: Path, host: Host, model: Path, variables: dict[str, str]) -> Ask:
    """Run the doctor on the host, with the model; nothing of it may be left."""

    def ask(*arguments: object, **more: str) -> Done:
        before = directories()
        done = doctor({**variables, **more}, "--model", model, "--limit", LIMIT_S, *arguments)
        assert children_of(tmp_path) == set()
        assert directories() == before
        assert host.ledger().used == 0
        return done

    return ask


def doctor(variables: dict[str, str], *arguments: object) -> Done:
    command = [*COMMAND, "--json", *map(str, arguments)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["exit_status"] == done.returncode
    return Done(done.returncode, {each["name"]: each for each in report["findings"]})


def directories() -> set[str]:
    return {path.name for path in Path("/tmp").glob("weightd-doctor-*")}


def npu_smi(directory: Path, processes: int) -> Path:
    """Write an npu-smi for one card; return its folder."""
    folder = directory / "bin"
    folder.mkdir(exist_ok=True)
    lines = ["    Process id:1 Process name:x Process memory(MB):1"] * processes or ["    No process in device."]
    script = ['case "$*" in', '"info -m") echo "  0  0  0  Ascend910" ;;', "*) cat <<'END'", *lines]
    script += ["    Chip ID                        : 0", "END", ";;", "esac"]
    (folder / "npu-smi").write_text("#!/bin/sh\n" + "\n".join(script) + "\n")
    (folder / "npu-smi").chmod(0o755)
    return folder


def not_reached(done: Done, *but: str) -> None:
    """Every step of the self-test but these was not reached."""
    steps = set(trial_checks.NAMES) - set(but)
    assert {name for name in steps if done.text(name).startswith("not testable: not reached")} == steps


# --- A host that is well ----------------------------------------------------------------------------------------


def test_a_healthy_host_passes_everything(ask: Ask, host: Host) -> None:
    done = ask()
    assert done.status == 0
    assert done.those("fail") == set()
    assert done.those("not testable") == UNSEEN
    assert set(trial_checks.NAMES) <= done.those("pass")
    assert "container" in done.text("current_pid")
    assert re.search("pass: 0 of (63|32) on ascend:0", done.text("processes"))  # fewer in a virtual machine
    assert "one with a copy of its own takes 218 MiB" in done.text(MEMORY)
    assert "reference-counted" in done.text(DEATH)
    # holder, worker, a private copy, a later worker, a stranger, a late worker
    assert host.count("build") == 6
    assert "is not on the list" in host.driver_log()[-1]


def test_in_the_oldest_interpreter(ask: Ask) -> None:
    python = mindir.interpreter()
    if python is None:
        pytest.skip(mindir.HOW_TO_GET_IT)
    done = ask("--python", python)
    assert "Python 3.7" in done.text("interpreter")
    assert (done.status, done.those("not testable")) == (0, UNSEEN)


def test_as_a_table_without_a_model(host: Host, variables: dict[str, str]) -> None:
    done = subprocess.run(COMMAND, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, host.count("build")) == (0, 0)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("pass          interpreter")
    assert lines[-1] == "8 pass, 0 fail, 6 not testable"


def test_the_environment_of_the_service_counts_and_not_that_of_the_shell(
    host: Host, model: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    folder = npu_smi(tmp_path, 0)

    def judged(service: dict[str, str], shell: dict[str, str]) -> Done:
        lines = ["LoadState=loaded", "User=root", *(f"Environment={key}={value}" for key, value in service.items())]
        (folder / "systemctl").write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
        (folder / "systemctl").chmod(0o755)
        return doctor({**shell, "PATH": variables["PATH"]}, "--model", model, "--limit", LIMIT_S)

    done = judged(environment(host), dict(os.environ))
    assert (done.status, done.those("fail")) == (0, set())
    assert done.text("service").startswith("pass: the environment of weightd.service was judged: user root")
    assert {BUILD, ATTACH, ANSWER} <= done.those("pass")
    builds = host.count("build")
    done = judged({}, variables)
    assert "No module named 'mindspore_lite'" in done.text("mindspore_lite")
    assert (done.status, host.count("build")) == (1, builds)
    not_reached(done)


# --- A host that is not -----------------------------------------------------------------------------------------


def test_no_ascend_at_all(model: Path) -> None:
    if list(Path("/dev").glob("davinci[0-9]*")):
        pytest.skip("this machine has cards")
    done = doctor(dict(os.environ), "--model", model)
    assert done.status == 69
    assert done.those("pass") == {"interpreter"}
    assert done.those("fail") == set()
    assert "no Ascend driver or library is here" in done.text("ascend")
    assert len(done.those("not testable")) == 1 + len(checks.NAMES) + len(trial_checks.NAMES)
    not_reached(done)


def test_a_library_that_is_too_old(ask: Ask, tmp_path: Path, variables: dict[str, str]) -> None:
    old = tmp_path / "old" / "mindspore_lite"
    old.mkdir(parents=True)
    # As 2.0.0: a Model that knows nothing of processes.
    (old / "__init__.py").write_text('class Model: pass\n__version__ = "2.0.0"\n')
    done = ask(PYTHONPATH=f"{old.parent}{os.pathsep}{variables['PYTHONPATH']}")
    assert done.status == 1
    assert "2.0.0" in done.text("mindspore_lite")
    assert done.those("fail") == {"mindspore_lite", "current_pid", BUILD}
    assert "install 2.7 or later" in done.text(BUILD)
    not_reached(done, BUILD)


def test_a_library_that_has_no_driver_beneath(ask: Ask, host: Host) -> None:
    host.switch(ascend=False)
    done = ask()
    assert done.status == 1
    assert "empty: the library cannot reach the driver" in done.text("current_pid")
    assert "set_env.sh" in done.text("current_pid")
    assert "507899" in done.text("devices")
    not_reached(done, BUILD)


def test_no_libascendcl(ask: Ask, host: Host) -> None:
    host.switch(libascendcl=False)
    done = ask()
    assert "set_env.sh" in done.text("libascendcl")
    # Weights are shared all the same, by the library; what is asked of libascendcl itself cannot be.
    assert {BUILD, ATTACH, ANSWER, STRANGER, DEATH} <= done.those("pass")
    assert done.those("fail") == {"libascendcl", "devices", "device memory", LATER}
    assert "cannot be read" in done.text(MEMORY)


def test_a_device_that_is_not_there(ask: Ask) -> None:
    done = ask("--device", "ascend:1")
    assert "1 seen" in done.text("devices")
    assert {"devices", "device memory", BUILD} <= done.those("fail")
    assert "there is no card 1" in done.text(BUILD)


def test_a_virtual_instance_refuses_imports(ask: Ask, host: Host) -> None:
    host.switch(vnpu=True)
    done = ask()
    assert (done.status, done.those("fail")) == (1, {ATTACH})
    assert "virtual instance" in done.text(ATTACH)
    assert done.findings["virtual instance"]["verdict"] == "not testable"
    not_reached(done, BUILD, ATTACH)


def test_a_device_with_all_its_processes(ask: Ask, host: Host, tmp_path: Path) -> None:
    host.switch(max_processes=0)
    npu_smi(tmp_path, 63)
    done = ask()
    assert done.those("fail") == {"device memory", "processes", BUILD}
    assert re.search("fail: 63 of (63|32) on ascend:0", done.text("processes"))
    assert "takes no further process" in done.text(BUILD)


def test_pids_that_cannot_be_set(ask: Ask, host: Host) -> None:
    host.switch(acl_set_pid="unsupported")
    done = ask()
    assert (done.status, done.those("fail")) == (1, {BUILD})
    assert "Set pid to shareable_handle failed! ret:207000" in done.text(BUILD)


def test_answers_that_differ_within_the_models_keys_and_end_with_the_holder(ask: Ask, host: Host) -> None:
    host.switch(noise=1e-4, lifetime="strict")
    done = ask("--canary", "{x = [3, 64]}", "--canary-tolerance", "1e-3")
    assert done.status == 0
    assert "strict: the worker cannot go on" in done.text(DEATH)


def test_a_hang_names_the_step_and_shows_the_log(ask: Ask, host: Host) -> None:
    host.fault("build", "hang", "importer")
    done = ask("--limit", "15")
    assert (done.status, done.those("fail")) == (1, {ATTACH})
    assert "no answer within 15 s; its log" in done.text(ATTACH)
    not_reached(done, BUILD, ATTACH)


@pytest.fixture
def sleeping_library(tmp_path: Path, variables: dict[str, str]) -> dict[str, str]:
    """An environment in which `import mindspore_lite` never ends."""
    folder = tmp_path / "sleeping" / "mindspore_lite"
    folder.mkdir(parents=True)
    lines = ["import pathlib, sys, time", "print('loading the plugin', file=sys.stderr)"]
    lines += ["pathlib.Path(__file__).with_name('begun').touch()", "time.sleep(999)"]
    (folder / "__init__.py").write_text("\n".join(lines))
    return {**variables, "PYTHONPATH": f"{folder.parent}{os.pathsep}{variables['PYTHONPATH']}"}


def test_a_library_that_hangs_when_it_is_imported(sleeping_library: dict[str, str]) -> None:
    done = doctor(sleeping_library, "--limit", 10)
    assert (done.status, done.those("pass")) == (1, {"interpreter", "processes"})
    assert "did not answer within 10 s; its log ends: loading the plugin" in done.text("mindspore_lite")
    assert "in the step library" in done.text("devices")


def test_the_report_does_not_outlive_the_doctor(tmp_path: Path, sleeping_library: dict[str, str]) -> None:
    with subprocess.Popen(COMMAND, env=sleeping_library, stdout=subprocess.DEVNULL) as process:
        report = Path(f"weightd.worker.report --device 0 --parent {process.pid}")  # of its command line
        until(tmp_path.joinpath("sleeping", "mindspore_lite", "begun").exists, "the report begins")
        assert children_of(report)
        process.kill()
        process.wait(LIMIT_S)
    until(lambda: not children_of(report), "the report ends")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_child_outlives_the_doctor(
    host: Host, model: Path, variables: dict[str, str], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    host.fault("build", "hang", "holder")
    before = directories()
    command = [*COMMAND, "--model", str(model)]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        until(lambda: host.count("build"), "the holder builds")
        process.send_signal(number)
        assert process.wait(LIMIT_S) == status
    until(lambda: not children_of(tmp_path), "the children end")
    assert host.ledger().used == 0
    left = directories() - before
    # Nobody can tidy up after SIGKILL.
    assert len(left) == (0 if number is signal.SIGTERM else 1)
    for each in left:
        for file in (directory := Path("/tmp", each)).iterdir():
            file.unlink()
        directory.rmdir()


def test_a_wrong_interpreter(ask: Ask) -> None:
    done = ask("--python", "/nonexistent/python")
    assert done.status == 1
    assert "cannot be run: No such file or directory" in done.text("interpreter")


def test_a_wrong_model(ask: Ask, tmp_path: Path) -> None:
    done = ask("--model", tmp_path / "missing.mindir")
    assert "No such file or directory" in done.text(BUILD)
    not_reached(done)
