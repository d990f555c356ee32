"""Findings of the checks, as text for people and as JSON for programs."""

from __future__ import annotations

import enum
import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: of the check; it does not change between releases.
        result: how it ended.
        detail: what there is, in figures where there are any.
        advice: what to do; empty for what has passed, and for what another finding's advice settles too.
    """

    name: str
    result: CheckResult
    detail: str
    advice: str = ""


def passed(name: str, detail: str) -> Finding:
    """Nothing is to be done."""
    return Finding(name, CheckResult.PASS, detail)


def failed(name: str, detail: str, advice: str) -> Finding:
    """Weights cannot be shared, or not fully, until something is done."""
    return Finding(name, CheckResult.FAIL, detail, advice)


def untestable(name: str, detail: str, advice: str = "") -> Finding:
    """It may be well or not; there is no advice where another finding has it."""
    return Finding(name, CheckResult.NOT_TESTABLE, detail, advice)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if a check has failed, 69 if there was nothing of Ascend to test, else 0."""
    verdicts = {finding.name: finding.result for finding in findings}
    if CheckResult.FAIL in verdicts.values():
        return EXIT_FAILED
    tested = any(verdict is CheckResult.PASS for name, verdict in verdicts.items() if name not in _HOST_INDEPENDENT)
    return EXIT_PASSED if tested else EXIT_NOTHING_TESTABLE


def render_table(findings: Sequence[Finding]) -> str:
    """Return a line for each finding, with its advice below it, and a line that counts them."""
    verdict_width = max(len(each.value) for each in CheckResult)
    name_width = max((len(each.name) for each in findings), default=0)
    margin = " " * (verdict_width + name_width + 2 * len(_COLUMN_GAP))
    lines: list[str] = []
    for each in findings:
        head = f"{each.result.value:{verdict_width}}{_COLUMN_GAP}{each.name:{name_width}}{_COLUMN_GAP}"
        lines += _wrap(each.detail, head, margin)
        if each.advice:
            lines += _wrap(each.advice, f"{margin}-> ", f"{margin}   ")
    return "\n".join([*lines, _format_counts(findings)]) + "\n"


def render_json(findings: Sequence[Finding]) -> str:
    """Return one object: version, exit status and findings, in their order."""
    rows = [
        {"name": each.name, "result": each.result.value, "detail": each.detail, "advice": each.advice}
        for each in findings
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


def _format_counts(findings: Sequence[Finding]) -> str:
    verdicts = [each.result for each in findings]
    return ", ".join(f"{verdicts.count(verdict)} {verdict.value}" for verdict in CheckResult)
