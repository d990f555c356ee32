"""Cause of a child's exit, and whether the child's own work may have caused it."""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable
from dataclasses import dataclass

from weightd_common.transient import mentions_transient

# Signals that a process raises by its own instructions. Any other signal was sent from outside.
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
    """The party that ended a child, if known; the value describes it in messages."""

    UNKNOWN = ""
    DAEMON = "sent by weightd"
    SHIM = "its shim exited"
    KERNEL = "the kernel was out of memory"


class MissingFile(enum.Enum):
    """Kind of the daemon's own files that are missing, so that a child cannot be started."""

    NONE = "nothing"
    SNAPSHOT = "snapshot"  # the copy of the model's files
    STORE = "store"  # the page store that the generation's workers map


@dataclass(frozen=True)
class ExitCause:
    """How a child ended.

    Attributes:
        status: the exit status, negative for a signal; None if it is unknown, or if the child was not started.
        detail: the last lines of the child's log, or the reason why it was not started.
        initiator: the party that ended the child.
        has_transient_start_failure: the child was not started, for a cause that may go away by itself.
        missing_file: the kind of files that were missing to start the child.
    """

    status: int | None
    detail: str = ""
    initiator: ExitInitiator = ExitInitiator.UNKNOWN
    has_transient_start_failure: bool = False
    missing_file: MissingFile = MissingFile.NONE

    @property
    def is_transient(self) -> bool:
        """Whether the cause may go away by itself, as far as it is known."""
        return self.has_transient_start_failure or self.is_external or mentions_transient(self.detail)

    @property
    def may_be_own_fault(self) -> bool:
        """Whether the child's own work may be the cause: it has crashed or exited, and was not ended from outside."""
        if self.status is None or self.initiator is not ExitInitiator.UNKNOWN:
            return False
        return self.status >= 0 or -self.status in _CRASH_SIGNALS

    @property
    def is_external(self) -> bool:
        """Whether the child was ended from outside: by a person, by the kernel when out of memory, or with its shim."""
        return self.is_killed and not self.may_be_own_fault

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended the child, as far as is known: another attempt may succeed."""
        return self.initiator is ExitInitiator.SHIM if self.status is None else self.status < 0

    @property
    def description(self) -> str:
        """Exit status, or signal and its sender, in words; "" if the child was not started."""
        return self.initiator.value if self.status is None else describe_status(self.status, self.initiator)

    def __str__(self) -> str:
        return ": ".join(each for each in (self.description, self.detail) if each)


class ExitClassifier:
    """Classifier of the exits of children.

    Args:
        count_oom_kills: returns how many processes the kernel has killed so far because memory ran out.
    """

    def __init__(self, count_oom_kills: Callable[[], int]) -> None:
        self._count_oom_kills = count_oom_kills
        # OOM kills that have been attributed to a child, or happened before.
        self._attributed_oom_kills = count_oom_kills()
        self._signalled: set[str] = set()

    def record_signal(self, name: str) -> None:
        """Remember that the daemon has sent the child a signal."""
        self._signalled.add(name)

    def classify(self, name: str, status: int | None, detail: str) -> ExitCause:
        """Return how a child has ended.

        Args:
            name: the name of the child.
            status: its exit status, negative for a signal; None if it ended with its shim.
            detail: the last lines of its log.
        """
        was_signalled = name in self._signalled
        self._signalled.discard(name)
        if status is None:
            return ExitCause(None, detail, ExitInitiator.SHIM)
        if was_signalled and status < 0:
            return ExitCause(status, detail, ExitInitiator.DAEMON)
        if status == -signal.SIGKILL and self._count_oom_kills() > self._attributed_oom_kills:
            # Count one kill only: the exits of several killed children are classified one after another.
            self._attributed_oom_kills += 1
            return ExitCause(status, detail, ExitInitiator.KERNEL)
        return ExitCause(status, detail)


def describe_status(status: int, initiator: ExitInitiator = ExitInitiator.UNKNOWN) -> str:
    """Return an exit status (negative: the signal) in words, with a hint on the cause if there is one."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = initiator.value
    if -status == signal.SIGKILL and not hint:
        hint = "possibly by the kernel, out of memory: see dmesg"
    return f"killed by {name}{f' ({hint})' if hint else ''}"
