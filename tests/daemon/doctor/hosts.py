"""Fake host for the doctor: facts and files that a test describes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightd_daemon.doctor.findings import CheckResult, Verdict
from weightd_daemon.doctor.host import Host
from weightd_daemon.doctor.interpreter import InterpreterReport
from weightd_daemon.doctor.service import RunCommand
from weightd_protocol.version import VERSION

GIB = 1024**3
PASS, FAIL, OPEN = CheckResult.PASS, CheckResult.FAIL, CheckResult.NOT_TESTABLE

STEPS: dict[str, dict[str, Any]] = {
    "python": {"executable": "/opt/bin/python", "version": "3.9.2", "pid": "12"},
    "weightd": {"version": VERSION},
    "library": {"version": "2.7.0"},
    "current_pid": {"pid": "12"},
    "libascendcl": {},
    "soc": {"name": "Ascend910B3"},
    "devices": {"count": 2},
    "memory": {"free_bytes": 30 * GIB, "total_bytes": 32 * GIB},
}


def report(**steps: Any) -> InterpreterReport:
    """A report in which some steps went otherwise: with other values, or the error that is given as a text."""
    return InterpreterReport(
        {**STEPS, **{name: {"error": each} if isinstance(each, str) else each for name, each in steps.items()}}
    )


def known(root: Path, files: Mapping[str, str] | None = None, /, **facts: Any) -> Host:
    """A host with these files; `facts` are what it would have to find out, or options of the command line."""
    for path, text in (files or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    options = {"python": "p", "device": 0, "ranks": None, "rank_table": None, "model": None}
    options.update((name, facts.pop(name)) for name in list(facts) if name in options)
    host = Host(argparse.Namespace(unit="", **options), root, facts.pop("run_command", no_program))
    vars(host).update({"report": report(), "environment": {}, "sharing": {}, **facts})
    return host


def no_program(argv: list[str]) -> str:
    """There is no program that a host could be asked with."""
    raise OSError(f"{argv[0]} is not on PATH")


def prints(text: str) -> RunCommand:
    """Each program prints this."""

    def run(argv: list[str]) -> str:
        return text

    return run


def check(verdict: Verdict, expected: CheckResult, *texts: str) -> None:
    """The verdict is as expected, has these texts, and advice unless all is well."""
    assert verdict.result is expected, verdict
    assert [text for text in texts if text not in f"{verdict.detail} -> {verdict.advice}"] == [], verdict
    assert not (verdict.advice and expected is PASS)
    assert verdict.advice or expected is not FAIL
