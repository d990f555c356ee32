"""Cause of a child process's exit, and whether the child's own work may have caused it."""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable
from dataclasses import dataclass

from weightd_common.transient import mentions_transient

# Signals of a process that crashes by itself. Any other signal that ends a process was sent by another process or the
# kernel.
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
    """External cause of a child's end; UNKNOWN if no such cause is known. The value describes the cause in words."""

    UNKNOWN = ""
    DAEMON = "sent by weightd"
    SHIM = "its shim exited"
    KERNEL = "the kernel was out of memory"


class MissingFile(enum.Enum):
    """File that a child needs for its start and that is missing in the daemon's directories."""

    NONE = "nothing"
    SNAPSHOT = "snapshot"  # the daemon's copy of the model's files
    STORE = "store"  # the page store that the generation's workers map


@dataclass(frozen=True)
class ExitCause:
    """How and why a child process ended, or why it was not started.

    Attributes:
        status: the exit status, negative for a signal; None if it is unknown, or if the child was not started.
        detail: the last lines of the child's log, or the reason why it was not started.
        initiator: weightd, the exit of the shim, or the kernel, if one of these is known to have ended the child.
        has_transient_start_failure: whether the child was not started, and another attempt may succeed.
        missing_file: the file without which the child could not be started.
    """

    status: int | None
    detail: str = ""
    initiator: ExitInitiator = ExitInitiator.UNKNOWN
    has_transient_start_failure: bool = False
    missing_file: MissingFile = MissingFile.NONE

    @property
    def is_transient(self) -> bool:
        """Whether the known cause may go away by itself, so that another attempt may succeed."""
        return self.has_transient_start_failure or self.is_external or mentions_transient(self.detail)

    @property
    def may_be_own_fault(self) -> bool:
        """Whether the child's own work may be the cause: the child crashed or exited, and no other process ended it."""
        if self.status is None or self.initiator is not ExitInitiator.UNKNOWN:
            return False
        return self.status >= 0 or -self.status in _CRASH_SIGNALS

    @property
    def is_external(self) -> bool:
        """Whether the child was killed from outside: by weightd, a person, the OOM killer, or its shim's exit."""
        return self.is_killed and not self.may_be_own_fault

    @property
    def is_killed(self) -> bool:
        """Whether the child was killed, by a signal or by its shim's exit."""
        return self.initiator is ExitInitiator.SHIM if self.status is None else self.status < 0

    @property
    def description(self) -> str:
        """The exit status in words, or the signal and its sender; "" if the child was not started."""
        return self.initiator.value if self.status is None else describe_status(self.status, self.initiator)

    def __str__(self) -> str:
        return ": ".join(each for each in (self.description, self.detail) if each)


class ExitClassifier:
    """Determines the causes of child processes' exits.

    Args:
        count_oom_kills: returns how many processes the kernel has killed so far because memory ran out.
    """

    def __init__(self, count_oom_kills: Callable[[], int]) -> None:
        self._count_oom_kills = count_oom_kills
        # Number of OOM kills that have been attributed to a child or happened before the daemon's start.
        self._attributed_oom_kills = count_oom_kills()
        self._signalled: set[str] = set()

    def record_signal(self, name: str) -> None:
        """Remember that the daemon has sent the child a signal."""
        self._signalled.add(name)

    def classify(self, name: str, status: int | None, detail: str) -> ExitCause:
        """Return the cause of a child's exit.

        Args:
            name: the name of the child.
            status: the child's exit status, negative for a signal; None if the child ended because its shim exited.
            detail: the last lines of the child's log.
        """
        was_signalled = name in self._signalled
        self._signalled.discard(name)
        if status is None:
            return ExitCause(None, detail, ExitInitiator.SHIM)
        if was_signalled and status < 0:
            return ExitCause(status, detail, ExitInitiator.DAEMON)
        if status == -signal.SIGKILL and self._count_oom_kills() > self._attributed_oom_kills:
            # Attribute one OOM kill to this child. Further OOM kills are attributed to the next children that are
            # classified.
            self._attributed_oom_kills += 1
            return ExitCause(status, detail, ExitInitiator.KERNEL)
        return ExitCause(status, detail)


def describe_status(status: int, initiator: ExitInitiator = ExitInitiator.UNKNOWN) -> str:
    """Return an exit status (negative: the signal) in words, with a hint on who sent a signal."""
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
