from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from weightd.daemon.doctor.facts import interpreter
from weightd.daemon.doctor.facts.interpreter import Report, read


def lines(*objects: object) -> str:
    return "".join(json.dumps(each) + "\n" for each in objects)


def test_steps_that_went_well_or_not() -> None:
    report = read(
        lines({"begin": "python"}, {"step": "python", "pid": "7"}, {"begin": "soc"}, {"step": "soc", "error": "no"}),
        "",
        "",
    )
    assert report.value("python", "pid") == "7"
    assert report.error("python") == ""
    assert report.error("soc") == "no"
    assert report.error("memory") == "not reached"
    assert report.value("memory", "free_bytes") is None


def test_a_process_that_died_in_a_step() -> None:
    output = lines({"begin": "python"}, {"step": "python"}, {"begin": "devices"}) + '{"step": "devi'
    report = read(output, "killed by SIGSEGV", "one\n\n two  words \n")
    assert report.stopped == "devices"
    assert report.error("devices") == "the process killed by SIGSEGV; its log ends: one | two words"
    assert report.error("memory") == "not reached: the process killed by SIGSEGV in the step devices"
    assert report.error("python") == ""


def test_lines_that_are_none_of_ours() -> None:
    assert read("welcome\n" + lines({"begin": "soc"}, {"step": "soc", "name": "x"}), "", "") == Report(
        {"soc": {"name": "x"}}
    )


def fake(tmp_path: Path, script: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


def test_an_interpreter_that_hangs_is_killed_and_its_step_named(tmp_path: Path) -> None:
    python = fake(tmp_path, """echo '{"begin": "devices"}'; echo native log >&2; exec sleep 1000""")
    report = interpreter.ask(python, 0, 0.5)
    assert report.error("devices") == "the process was killed: it did not answer within 0.5 s; its log ends: native log"


def test_an_interpreter_that_fails(tmp_path: Path) -> None:
    report = interpreter.ask(fake(tmp_path, "echo No module named weightd >&2; exit 1"), 0, 10)
    assert (report.steps, report.end, report.log) == ({}, "exited with status 1", "No module named weightd")


def test_an_interpreter_that_is_not_there() -> None:
    with pytest.raises(OSError, match="No such file"):
        interpreter.ask("/nonexistent/python", 0, 10)


def test_the_real_report_of_this_interpreter() -> None:
    report = interpreter.ask(sys.executable, 0, 60)
    assert report.value("python", "executable") == sys.executable
    assert report.error("weightd") == ""
    assert report.stopped == ""
    assert list(report.steps) == [
        "python",
        "weightd",
        "library",
        "current_pid",
        "libascendcl",
        "soc",
        "devices",
        "memory",
    ]
