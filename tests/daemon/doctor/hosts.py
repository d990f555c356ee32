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
    """Return a report in which some steps have other values, or fail with the error given as text."""
    return InterpreterReport(
        {**STEPS, **{name: {"error": each} if isinstance(each, str) else each for name, each in steps.items()}}
    )


def make_host(root: Path, files: Mapping[str, str] | None = None, /, **facts: Any) -> Host:
    """Return a host with these files.

    `facts` are results that the host would otherwise look up, or command-line options.
    """
    for path, text in (files or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    options = {"python": "p", "device": 0, "ranks": None, "rank_table": None, "model": None}
    options.update((name, facts.pop(name)) for name in list(facts) if name in options)
    host = Host(argparse.Namespace(unit="", **options), root, facts.pop("run_command", no_program))
    vars(host).update({"report": report(), "environment": {}, "sharing": {}, **facts})
    return host


def no_program(argv: list[str]) -> str:
    """Fail as if the program were not installed."""
    raise OSError(f"{argv[0]} is not on PATH")


def prints(text: str) -> RunCommand:
    """Return a function that returns this text for each command."""

    def run(argv: list[str]) -> str:
        return text

    return run


def check(verdict: Verdict, expected: CheckResult, *texts: str) -> None:
    """Check the result and its texts. PASS has no advice, and FAIL must have advice."""
    assert verdict.result is expected, verdict
    assert [text for text in texts if text not in f"{verdict.detail} -> {verdict.advice}"] == [], verdict
    assert not (verdict.advice and expected is PASS)
    assert verdict.advice or expected is not FAIL
