"""How a child has ended, and whether what it was doing may be why."""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable
from dataclasses import dataclass

from weightd.shared.transient import mentions_transient

# By these a process dies of what it does itself. Whoever sends another one decides so from outside.
_CRASHES = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGFPE,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)


class By(enum.Enum):
    """Who has ended it, as far as that is known; the value says it for people."""

    UNKNOWN = ""
    DAEMON = "weightd has ended it"
    KEEPER = "its keeper is lost"
    KERNEL = "the kernel was out of memory"


class Lost(enum.Enum):
    """What of the daemon's own files has vanished, so that a child cannot be started."""

    NOTHING = "nothing"
    SNAPSHOT = "snapshot"  # the copy of the model, or of what belongs to it
    STORE = "store"  # the pages that workers of the generation map


@dataclass(frozen=True)
class End:
    """The end of a child.

    Attributes:
        status: the exit status, negative for a signal; None where nobody knows it, or there was no process.
        words: the last ones of its log, or why there was no process.
        by: who has ended it.
        not_started: there was no process for a cause that may go away by itself.
        lost: which files were missing to start it.
    """

    status: int | None
    words: str = ""
    by: By = By.UNKNOWN
    not_started: bool = False
    lost: Lost = Lost.NOTHING

    @property
    def is_transient(self) -> bool:
        """Whether the cause of the end may go away by itself, as far as that is known."""
        return self.not_started or self.from_outside or mentions_transient(self.words)

    @property
    def blames(self) -> bool:
        """Whether what it was doing may be why: it has crashed or exited. What came from outside blames nobody."""
        if self.status is None or self.by is not By.UNKNOWN:
            return False
        return self.status >= 0 or -self.status in _CRASHES

    @property
    def from_outside(self) -> bool:
        """Whether another has ended it: a person, the kernel for want of memory, its keeper's end."""
        return self.killed and not self.blames

    @property
    def killed(self) -> bool:
        """Whether a signal has ended it, as far as is known: that may go better the next time."""
        return self.by is By.KEEPER if self.status is None else self.status < 0

    @property
    def how(self) -> str:
        """Status or signal and who has sent it, in words; "" where there was no process."""
        return self.by.value if self.status is None else explain(self.status, self.by)

    def __str__(self) -> str:
        return ": ".join(each for each in (self.how, self.words) if each)


class Coroner:
    """Tells how children have ended.

    Args:
        oom_kills: returns how many processes the kernel has ended so far for want of memory.
    """

    def __init__(self, oom_kills: Callable[[], int]) -> None:
        self._oom_kills = oom_kills
        # As far as their ends have been told.
        self._told = oom_kills()
        self._signalled: set[str] = set()

    def signalled(self, name: str) -> None:
        """The daemon has sent a child a signal."""
        self._signalled.add(name)

    def end(self, name: str, status: int | None, words: str) -> End:
        """Return how a child has ended: with this status, None if it has gone with its keeper, and these last words."""
        was_signalled = name in self._signalled
        self._signalled.discard(name)
        if status is None:
            return End(None, words, By.KEEPER)
        if was_signalled and status < 0:
            return End(status, words, By.DAEMON)
        if status == -signal.SIGKILL and self._oom_kills() > self._told:
            # One of them: the ends of several are told one after another.
            self._told += 1
            return End(status, words, By.KERNEL)
        return End(status, words)


def explain(status: int, by: By = By.UNKNOWN) -> str:
    """Return an exit status (negative: the signal) in words, with a hint where one helps."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = by.value
    if -status == signal.SIGKILL and not hint:
        hint = "if nobody sent it, the kernel was out of memory: see dmesg"
    return f"killed by {name}{f' ({hint})' if hint else ''}"
