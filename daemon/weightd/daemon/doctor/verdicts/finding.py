"""What a check has found, and the exit status that all of them make."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

PASSED = 0
FAILED = 1
NOTHING_TESTABLE = 69  # EX_UNAVAILABLE

# These say nothing of Ascend: they do not make a host testable.
INTERPRETER = "interpreter"
EXITS = "process exits"
_OF_EVERY_HOST = (INTERPRETER, EXITS)


class Verdict(enum.Enum):
    """How a check ended."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    NOT_TESTABLE = "not testable"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: of the check; it does not change between releases.
        verdict: how it ended.
        found: what there is, in figures where there are any.
        advice: what to do; empty for what has passed, and for what another finding's advice settles too.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def passed(name: str, found: str) -> Finding:
    """Nothing is to be done."""
    return Finding(name, Verdict.PASS, found)


def failed(name: str, found: str, advice: str) -> Finding:
    """Weights cannot be shared, or not fully, until something is done."""
    return Finding(name, Verdict.FAIL, found, advice)


def untestable(name: str, found: str, advice: str = "") -> Finding:
    """It may be well or not; there is no advice where another finding has it."""
    return Finding(name, Verdict.NOT_TESTABLE, found, advice)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if a check has failed, 69 if there was nothing of Ascend to test, else 0."""
    verdicts = {finding.name: finding.verdict for finding in findings}
    if Verdict.FAIL in verdicts.values():
        return FAILED
    tested = any(verdict is Verdict.PASS for name, verdict in verdicts.items() if name not in _OF_EVERY_HOST)
    return PASSED if tested else NOTHING_TESTABLE
