"""What the checks have found, as text for people and as JSON for programs."""

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

# These say nothing of Ascend: they do not make a host testable.
INTERPRETER = "interpreter"

PROCESS_EXITS = "process exits"

_HOST_INDEPENDENT = (INTERPRETER, PROCESS_EXITS)

_WIDTH = 120

_COLUMN_GAP = "  "


class CheckResult(enum.Enum):
    """How a check ended."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    NOT_TESTABLE = "not testable"


class Verdict(NamedTuple):
    """What a check says.

    Attributes:
        result: how it ended.
        detail: what there is, in figures where there are any.
        advice: what to do; empty for what has passed, and for what another check's advice settles too.
    """

    result: CheckResult
    detail: str
    advice: str = ""


Findings = Mapping[str, Verdict]
"""The verdicts, by the names of the checks, which do not change between releases."""


def passed(detail: str) -> Verdict:
    """Nothing is to be done."""
    return Verdict(CheckResult.PASS, detail)


def failed(detail: str, advice: str) -> Verdict:
    """Weights cannot be shared, or not fully, until something is done."""
    return Verdict(CheckResult.FAIL, detail, advice)


def untestable(detail: str, advice: str = "") -> Verdict:
    """It may be well or not; there is no advice where another check has it."""
    return Verdict(CheckResult.NOT_TESTABLE, detail, advice)


def exit_status(findings: Findings) -> int:
    """Return 1 if a check has failed, 69 if there was nothing of Ascend to test, else 0."""
    if any(each.result is CheckResult.FAIL for each in findings.values()):
        return EXIT_FAILED
    passed_names = {name for name, each in findings.items() if each.result is CheckResult.PASS}
    return EXIT_PASSED if passed_names.difference(_HOST_INDEPENDENT) else EXIT_NOTHING_TESTABLE


def render_table(findings: Findings) -> str:
    """Return a line for each check, with its advice below it, and a line that counts them."""
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
    """Return one object: version, exit status and findings, in their order."""
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
