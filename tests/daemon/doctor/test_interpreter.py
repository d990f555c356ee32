from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ascendsim import Host, environment
from weightd_daemon.doctor import interpreter
from weightd_daemon.doctor.interpreter import InterpreterReport, parse_report

WriteInterpreter = Callable[[str], str]
STEPS = ["python", "weightd", "library", "current_pid", "libascendcl", "soc", "devices", "memory"]


def lines(*objects: object) -> str:
    return "".join(json.dumps(each) + "\n" for each in objects)


def test_parses_steps_and_ignores_other_lines() -> None:
    begins = {"begin": "python"}, {"step": "python", "pid": "7"}
    report = parse_report("welcome\n" + lines(*begins, {"begin": "soc"}, {"step": "soc", "error": "no"}), "", "")
    assert report == InterpreterReport({"python": {"pid": "7"}, "soc": {"error": "no"}})
    assert (report.value("python", "pid"), report.value("memory", "free_bytes")) == ("7", None)
    assert [report.error(each) for each in ("python", "soc", "memory")] == ["", "no", "not reached"]


def test_report_names_step_in_which_process_died() -> None:
    output = lines({"begin": "python"}, {"step": "python"}, {"begin": "devices"}) + '{"step": "devi'
    report = parse_report(output, "killed by SIGSEGV", "one\n\n two  words \n")
    assert report.unfinished_step == "devices"
    assert report.error("devices") == "process killed by SIGSEGV; its log ends: one | two words"
    assert report.error("memory") == "not reached: process killed by SIGSEGV in the step devices"
    assert report.error("python") == ""


@pytest.fixture
def write_interpreter(tmp_path: Path) -> WriteInterpreter:
    """Return a function that writes a shell script as interpreter."""

    def write(script: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        return str(path)

    return write


def test_hanging_interpreter_is_killed(write_interpreter: WriteInterpreter) -> None:
    python = write_interpreter("""echo '{"begin": "devices"}'; echo native log >&2; exec sleep 1000""")
    report = interpreter.run_report(python, 0, 0.5, os.environ)
    assert report.error("devices") == "process killed: no answer within 0.5 s; its log ends: native log"


def test_failing_or_missing_interpreter_is_reported(write_interpreter: WriteInterpreter) -> None:
    report = interpreter.run_report(write_interpreter("echo No module named weightd >&2; exit 1"), 0, 10, os.environ)
    assert (report.steps, report.exit_description, report.log_tail) == (
        {},
        "exited with status 1",
        "No module named weightd",
    )
    missing = interpreter.run_report("/nonexistent/python", 0, 10, os.environ)
    assert missing == InterpreterReport(exit_description="cannot be run: No such file or directory")


@pytest.mark.parametrize(
    ("switch", "device", "errors"),
    [
        ({}, 0, {}),
        ({}, 1, {"memory": "aclrtSetDevice"}),
        ({"ascend": False}, 0, {"devices": "507899"}),
        ({"libascendcl": False}, 0, dict.fromkeys(["libascendcl", "soc", "devices", "memory"], "libascendcl.so")),
    ],
)
def test_runs_report_in_this_interpreter(
    tmp_path: Path, switch: dict[str, bool], device: int, errors: dict[str, str]
) -> None:
    host = Host(tmp_path / "host")
    host.switch(**switch)
    report = interpreter.run_report(sys.executable, device, 60, {**os.environ, **environment(host)})
    assert (list(report.steps), report.unfinished_step) == (STEPS, "")
    assert report.value("python", "executable") == sys.executable
    assert bool(report.value("current_pid", "pid")) is ("ascend" not in switch)
    assert {each for each in STEPS if report.error(each)} == {*errors}
    assert all(text in report.error(step) for step, text in errors.items())


def test_library_without_current_pid(tmp_path: Path) -> None:
    (tmp_path / "mindspore_lite.py").write_text('class Model: pass\n__version__ = "2.0.0"\n')
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    report = interpreter.run_report(sys.executable, 0, 60, {**os.environ, "PYTHONPATH": paths})
    assert (report.value("library", "version"), report.value("current_pid", "pid")) == ("2.0.0", "")
