"""Findings as text for people and as JSON for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from weightd_daemon.doctor.checks.finding import CheckResult, Finding, exit_status
from weightd_protocol.version import VERSION

_WIDTH = 120
_COLUMN_GAP = "  "


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
