"""The search for a canary, as the daemon sees it: what the next holder is told, because the last one died of it.

A holder says what it is about to run the model on. If it dies then, or takes too long, that input was not the one; the
next holder leaves it out. Each costs a build, so there is a bound.
"""

from __future__ import annotations

from dataclasses import replace

from weightd.daemon.plan import Canary
from weightd.protocol import limits
from weightd.protocol.worker_messages import Build, Built, Case, Cases, Probing

# Holders that may die in the search for one canary.
MAX_DEATHS = 6


def described(cases: Cases) -> str:
    """Return the inputs for people."""
    return " and ".join(map(_described, cases))


def _described(case: Case) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in case.items()) or "no input"


class Tries:
    """What is known of a generation's canary.

    Args:
        known: before its first holder.

    Attributes:
        known: by now.
        trying: what the holder runs its model on; nothing while it does something else.
    """

    def __init__(self, known: Canary) -> None:
        self.known = known
        self.trying: Cases = ()
        self._deaths = 0

    def order(self, pids: tuple[str, ...]) -> Build:
        """Return what the holder is told."""
        return Build(pids, self.known.search, self.known.cases, self.known.unfit)

    def told(self, probing: Probing) -> None:
        """The holder has said what it tries."""
        self.trying = probing.trying
        if self.known.search:
            self.known = replace(self.known, unfit=probing.unfit)

    def found(self, built: Built) -> None:
        """The holder has built, with this canary or none."""
        self.trying = ()
        self.known = replace(self.known, cases=built.canary_cases)

    def lost(self, *, slow: bool) -> bool:
        """The holder is lost; return whether that was the fault of what it tried, and another may do better.

        Args:
            slow: it took too long. The next one would wait as long: it is to build without a canary.
        """
        tried, self.trying = self.trying, ()
        if not tried or not self.known.search:
            return False
        self._deaths += 1
        unfit = (*self.known.unfit, *(case for case in tried if case not in self.known.unfit))
        over = slow or self._deaths >= MAX_DEATHS or len(unfit) > limits.MAX_CANARY_UNFIT
        self.known = Canary(not over, (), unfit[: limits.MAX_CANARY_UNFIT])
        return True
