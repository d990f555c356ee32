"""Results of the checks, as text for people and as JSON for programs."""

from __future__ import annotations

import enum
import json
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from weightd_protocol.version import VERSION

EXIT_PASSED = 0

EXIT_FAILED = 1

EXIT_NOTHING_TESTABLE = 69  # EX_UNAVAILABLE

# Names of the checks that do not need Ascend. If only these checks pass, the host has nothing of Ascend to test.
INTERPRETER = "interpreter"

PROCESS_EXITS = "process exits"

_HOST_INDEPENDENT = (INTERPRETER, PROCESS_EXITS)

_WIDTH = 120

_COLUMN_GAP = "  "


class CheckResult(enum.Enum):
    """Result of a check."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    NOT_TESTABLE = "not testable"


class Verdict(NamedTuple):
    """Verdict of a check.

    Attributes:
        result: the result of the check.
        detail: the facts that the check has found, as numbers where possible.
        advice: how to fix the problem; "" for a passed check, and if another check gives the same advice.
    """

    result: CheckResult
    detail: str
    advice: str = ""


Findings = Mapping[str, Verdict]
"""The verdicts by the name of the check. The names of checks stay the same in later releases."""


def passed(detail: str) -> Verdict:
    """Return the verdict of a check that found no problem."""
    return Verdict(CheckResult.PASS, detail)


def failed(detail: str, advice: str) -> Verdict:
    """Return the verdict of a check that found a problem, which prevents or limits the sharing of weights."""
    return Verdict(CheckResult.FAIL, detail, advice)


def untestable(detail: str, advice: str = "") -> Verdict:
    """Return the verdict of a check that has no result; without `advice` if another check gives the same advice."""
    return Verdict(CheckResult.NOT_TESTABLE, detail, advice)


def exit_status(findings: Findings) -> int:
    """Return the exit status: 1 if a check has failed, 69 if no check of Ascend could be run, otherwise 0."""
    if any(each.result is CheckResult.FAIL for each in findings.values()):
        return EXIT_FAILED
    passed_names = {name for name, each in findings.items() if each.result is CheckResult.PASS}
    return EXIT_PASSED if passed_names.difference(_HOST_INDEPENDENT) else EXIT_NOTHING_TESTABLE


def render_table(findings: Findings) -> str:
    """Return a line for each check with the advice below, and a last line with the number of checks by result."""
    result_width = max(len(each.value) for each in CheckResult)
    name_width = max(map(len, findings), default=0)
    margin = " " * (result_width + name_width + 2 * len(_COLUMN_GAP))
    lines: list[str] = []
    for name, each in findings.items():
        head = f"{each.result.value:{result_width}}{_COLUMN_GAP}{name:{name_width}}{_COLUMN_GAP}"
        lines += _wrap(each.detail, head, margin)
        if each.advice:
            lines += _wrap(each.advice, f"{margin}-> ", f"{margin}   ")
    results = [each.result for each in findings.values()]
    counts = ", ".join(f"{results.count(result)} {result.value}" for result in CheckResult)
    return "\n".join([*lines, counts]) + "\n"


def render_json(findings: Findings) -> str:
    """Return a JSON object with version, exit status and findings, in the order of the checks."""
    rows = [
        {"name": name, "result": each.result.value, "detail": each.detail, "advice": each.advice}
        for name, each in findings.items()
    ]
    return json.dumps({"weightd": VERSION, "exit_status": exit_status(findings), "findings": rows}, indent=2) + "\n"


def _wrap(text: str, first: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]
