"""How a child has ended, and whether what it was doing may be why."""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable
from dataclasses import dataclass

from weightd_common.transient import mentions_transient

# By these a process dies of what it does itself. Whoever sends another one decides so from outside.
_CRASH_SIGNALS = frozenset(
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


class ExitInitiator(enum.Enum):
    """Who has ended it, as far as that is known; the value says it for people."""

    UNKNOWN = ""
    DAEMON = "weightd has ended it"
    SHIM = "its shim is lost"
    KERNEL = "the kernel was out of memory"


class MissingFile(enum.Enum):
    """What of the daemon's own files has vanished, so that a child cannot be started."""

    NONE = "nothing"
    SNAPSHOT = "snapshot"  # the copy of the model, or of what belongs to it
    STORE = "store"  # the pages that workers of the generation map


@dataclass(frozen=True)
class ExitCause:
    """The end of a child.

    Attributes:
        status: the exit status, negative for a signal; None where nobody knows it, or there was no process.
        detail: the last ones of its log, or why there was no process.
        initiator: who has ended it.
        has_transient_start_failure: there was no process for a cause that may go away by itself.
        missing_file: which files were missing to start it.
    """

    status: int | None
    detail: str = ""
    initiator: ExitInitiator = ExitInitiator.UNKNOWN
    has_transient_start_failure: bool = False
    missing_file: MissingFile = MissingFile.NONE

    @property
    def is_transient(self) -> bool:
        """Whether the cause of the end may go away by itself, as far as that is known."""
        return self.has_transient_start_failure or self.is_external or mentions_transient(self.detail)

    @property
    def may_be_own_fault(self) -> bool:
        """Whether what it was doing may be why: it has crashed or exited. What came from outside blames nobody."""
        if self.status is None or self.initiator is not ExitInitiator.UNKNOWN:
            return False
        return self.status >= 0 or -self.status in _CRASH_SIGNALS

    @property
    def is_external(self) -> bool:
        """Whether another has ended it: a person, the kernel for want of memory, its shim's end."""
        return self.is_killed and not self.may_be_own_fault

    @property
    def is_killed(self) -> bool:
        """Whether a signal has ended it, as far as is known: that may go better the next time."""
        return self.initiator is ExitInitiator.SHIM if self.status is None else self.status < 0

    @property
    def description(self) -> str:
        """Status or signal and who has sent it, in words; "" where there was no process."""
        return self.initiator.value if self.status is None else describe_status(self.status, self.initiator)

    def __str__(self) -> str:
        return ": ".join(each for each in (self.description, self.detail) if each)


class ExitClassifier:
    """Tells how children have ended.

    Args:
        count_oom_kills: returns how many processes the kernel has ended so far for want of memory.
    """

    def __init__(self, count_oom_kills: Callable[[], int]) -> None:
        self._count_oom_kills = count_oom_kills
        # As far as their ends have been told.
        self._attributed_oom_kills = count_oom_kills()
        self._signalled: set[str] = set()

    def record_signal(self, name: str) -> None:
        """The daemon has sent a child a signal."""
        self._signalled.add(name)

    def classify(self, name: str, status: int | None, detail: str) -> ExitCause:
        """Return how a child has ended: with this status, None if it has gone with its shim, and these last words."""
        was_signalled = name in self._signalled
        self._signalled.discard(name)
        if status is None:
            return ExitCause(None, detail, ExitInitiator.SHIM)
        if was_signalled and status < 0:
            return ExitCause(status, detail, ExitInitiator.DAEMON)
        if status == -signal.SIGKILL and self._count_oom_kills() > self._attributed_oom_kills:
            # One of them: the ends of several are told one after another.
            self._attributed_oom_kills += 1
            return ExitCause(status, detail, ExitInitiator.KERNEL)
        return ExitCause(status, detail)


def describe_status(status: int, initiator: ExitInitiator = ExitInitiator.UNKNOWN) -> str:
    """Return an exit status (negative: the signal) in words, with a hint where one helps."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = initiator.value
    if -status == signal.SIGKILL and not hint:
        hint = "if nobody sent it, the kernel was out of memory: see dmesg"
    return f"killed by {name}{f' ({hint})' if hint else ''}"
