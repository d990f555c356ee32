"""What a check has found, and the exit status that all of them make."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

EXIT_PASSED = 0
EXIT_FAILED = 1
EXIT_NOTHING_TESTABLE = 69  # EX_UNAVAILABLE

# These say nothing of Ascend: they do not make a host testable.
INTERPRETER = "interpreter"
PROCESS_EXITS = "process exits"
_HOST_INDEPENDENT = (INTERPRETER, PROCESS_EXITS)


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
