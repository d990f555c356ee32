"""Report at the end of a run."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .kinds import Fault, text_of
from .schedule import Event
from .verdict import Strike

_SHOWN = 40
_WIDTH = 300


@dataclass
class Report:
    """The result of a run; without problems it has passed."""

    seed: int
    seconds: float
    faults: Collection[Fault]
    workspace: Path
    managed: bool = False
    sent: int = 0
    evictions: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    strikes: list[Strike] = field(default_factory=list[Strike])
    skipped: list[Event] = field(default_factory=list[Event])
    problems: list[str] = field(default_factory=list[str])
    log: list[str] = field(default_factory=list[str])

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        command = f"python -m tests.chaos --seed {self.seed} --minutes {self.seconds / 60:g}"
        return f"{command} --faults {text_of(self.faults)}{' --managed' if self.managed else ''}"

    def history(self) -> str:
        """The faults as lines: begin and end (monotonic seconds), kind, model and target."""
        return "".join(
            f"{each.begin:.3f} {each.end:.3f} {each.fault.value} {each.model} {each.note}\n" for each in self.strikes
        )

    def text(self) -> str:
        """The report as text: tables of faults and requests, and problems."""
        lines = ["", *_faults(self.strikes, self.skipped), "", *_requests(self.sent, self.outcomes)]
        lines += [f"{'evictions':<24}{self.evictions:>10}", ""]
        if not self.problems:
            return "\n".join([*lines, f"PASSED, seed {self.seed}"])
        lines += [f"FAILED, {len(self.problems)} problems:", *(f"  {each}" for each in self.problems[:_SHOWN])]
        lines += [f"  ... and {len(self.problems) - _SHOWN} more"] if len(self.problems) > _SHOWN else []
        lines += ["", "faults, with begin and end:", *self.history().splitlines()[-_SHOWN:]]
        lines += ["", "warnings of the daemons:", *(each[:_WIDTH] for each in self.log[-_SHOWN:]), ""]
        return "\n".join([*lines, f"logs:  {self.workspace}", f"again: {self.command}"])


def summary(outcomes: Mapping[str, int]) -> str:
    """Format the outcomes on one line."""
    return "  ".join(f"{code} {count}" for code, count in sorted(outcomes.items())) or "no answers yet"


def _faults(strikes: Collection[Strike], skipped: Collection[Event]) -> list[str]:
    lines = [f"{'fault':<18}{'struck':>8}{'no target':>11}   seconds until its effect was over: median, longest"]
    for fault in Fault:
        struck = [each for each in strikes if each.fault is fault]
        missed = sum(event.fault is fault for event in skipped)
        if struck or missed:
            took = [each.end - each.begin for each in struck if each.end != float("inf")]
            times = f"{statistics.median(took):8.2f} {max(took):8.2f}" if took else ""
            lines.append(f"{fault.value:<18}{len(struck):>8}{missed:>11}   {times}")
    return lines


def _requests(sent: int, outcomes: Mapping[str, int]) -> list[str]:
    lines = [f"{'requests':<24}{sent:>10}"]
    lines += [f"  {code:<22}{count:>10}" for code, count in sorted(outcomes.items())]
    return lines
