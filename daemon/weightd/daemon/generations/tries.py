"""The search for a canary, as the daemon sees it: what the next holder is told, because the last one died of it.

A holder says what it is about to run the model on. If it dies then, or takes too long, that input was not the one; the
next holder leaves it out. Each costs a build, so there is a bound. Who is killed from outside meanwhile has shown
nothing: the next holder tries the same again, once, for the kernel may have been out of memory because of it.
"""

from __future__ import annotations

from dataclasses import replace

from weightd.daemon.generations.plan import NO_ROWS, Canary, Rows
from weightd.protocol import limits
from weightd.protocol.messages.children import Attach, Build, Built, Probing
from weightd.protocol.messages.findings import Case, Cases

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
        rows: what is to be found out of rows.

    Attributes:
        known: by now.
        trying: what the holder runs its model on; nothing while it does something else.
    """

    def __init__(self, known: Canary, rows: Rows = NO_ROWS) -> None:
        self.known = known
        self._rows = rows
        self.trying: Cases = ()
        self._deaths = 0
        self._again: Cases | None = None
        self._has_run = False

    def order(self, pids: tuple[str, ...]) -> Build:
        """Return what the holder is told."""
        known, (rows, sizes, exact) = self.known, self._rows
        self._has_run = False
        return Build(pids, known.search, known.cases, known.unfit, rows, sizes, exact)

    def attach(self, built: Built) -> Attach:
        """Return what a worker is told, after the holder has `built`."""
        return Attach(built.handle, built.canary_cases, *self._rows, built.rows, built.by_shape, built.first)

    def told(self, probing: Probing) -> None:
        """The holder has said what it tries."""
        # A configured canary comes first.
        self._has_run = self._has_run or bool(self.trying and not probing.trying)
        self.trying = probing.trying
        if self.known.search:
            self.known = replace(self.known, unfit=probing.unfit)

    def found(self, built: Built) -> None:
        """The holder has built, with this canary or none."""
        self.trying = ()
        self.known = replace(self.known, cases=built.canary_cases)

    def lost(self, *, is_slow: bool = False, from_outside: bool = False) -> bool:
        """The holder is lost; return whether that was in a try, and another holder may do better.

        Args:
            is_slow: it took too long. The next one would wait as long: it is to build without a canary.
            from_outside: another has ended it.
        """
        tried, self.trying = self.trying, ()
        if not tried:
            return False
        if from_outside and tried != self._again:
            self._again = tried
            return True
        if not self.known.search and not self._has_run:
            return False
        self._deaths += 1
        unfit = (*self.known.unfit, *(case for case in tried if case not in self.known.unfit))
        if not self.known.search:
            self.known = replace(self.known, unfit=unfit[: limits.MAX_CANARY_UNFIT])
            return self._deaths < MAX_DEATHS
        over = is_slow or self._deaths >= MAX_DEATHS or len(unfit) > limits.MAX_CANARY_UNFIT
        self.known = Canary(not over, (), unfit[: limits.MAX_CANARY_UNFIT])
        return True
