"""What is told of a generation: why it has failed or lacks workers, and each new thing in the log."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from weightd_daemon.generations.process import LossReason
from weightd_daemon.generations.selftest_search import describe_cases
from weightd_daemon.generations.spec import GenerationSpec
from weightd_daemon.platform.log_setup import subject_extra
from weightd_protocol.messages.worker import Attached, Built

_log = logging.getLogger("weightd.generation")


class RetryHint(enum.Enum):
    """What another generation may expect where one has failed."""

    SAME_FAILURE = "same failure"  # the same end
    WAIT_FOR_MEMORY = "wait for memory"  # there was none on the card, and some may come free late
    MAY_SUCCEED = "may succeed"  # a signal has ended the holder: that may go better the next time

    @classmethod
    def after(cls, loss: LossReason, *, may_succeed: bool) -> RetryHint:
        """Return what follows from the loss of a process without which the generation cannot go on."""
        if loss.is_out_of_memory:
            return cls.WAIT_FOR_MEMORY
        return cls.MAY_SUCCEED if may_succeed else cls.SAME_FAILURE


@dataclass(frozen=True)
class FailureReason:
    """Why a generation has failed, or has fewer workers than it should; as text it is for people.

    Attributes:
        reason: what has happened.
        child: to whom, or "".
        log_tail: the last ones of its log, as soon as they are known.
        prefix: what this has led to.
        suffix: what follows from it.
        retry_hint: of the next generation, if this one has failed of it.
        is_transient: whether the cause may go away by itself, at whatever time.
    """

    reason: str = ""
    child: str = ""
    log_tail: str = ""
    prefix: str = ""
    suffix: str = ""
    retry_hint: RetryHint = RetryHint.SAME_FAILURE
    is_transient: bool = False

    @classmethod
    def from_loss(
        cls, loss: LossReason, child: str, retry_hint: RetryHint = RetryHint.SAME_FAILURE, *, suffix: str = ""
    ) -> FailureReason:
        """Return that a process was lost in this way."""
        is_transient = loss.is_transient or loss.is_out_of_memory
        return cls(loss.reason, child, suffix=suffix, retry_hint=retry_hint, is_transient=is_transient)

    def with_prefix(self, prefix_text: str) -> FailureReason:
        """Return it with what it has led to."""
        return replace(self, prefix=f"{prefix_text}{self.prefix}")

    def __str__(self) -> str:
        child = f"{self.child}: " if self.child else ""
        words = f"; its log ends: {self.log_tail}" if self.log_tail else ""
        return f"{self.prefix}{child}{self.reason}{words}{self.suffix}"


class ProgressLogger:
    """Tells of one generation in the log, each thing once.

    Args:
        label: of the generation.
        number: the one in its label.
    """

    def __init__(self, label: str, number: int) -> None:
        self._label = label
        self._number = number
        self._progress = ""
        self._notes: set[str] = set()

    def log_extra(self, child: str = "") -> Mapping[str, Any]:
        """Return `extra` of an event of this generation, or of one of its children."""
        return subject_extra(self._label.rpartition(".")[0], self._number, child)

    def log(self, text: str, child: str = "", *, level: int = logging.WARNING) -> None:
        """Tell something, of one of its children or of itself."""
        _log.log(level, "%s: %s", self._label, text, extra=self.log_extra(child))

    def log_progress(self, progress: str, *, has_failed: bool) -> None:
        """One line each time that there is something new; a failure is told by who knows what follows."""
        if progress != self._progress:
            self._progress = progress
            if not has_failed:
                self.log(progress, level=logging.INFO)

    def log_built(self, built: Built, holder: str, spec: GenerationSpec) -> None:
        """The holder may have found no self-test, or nothing for anybody to attach to.

        That there is nothing to share is no loss.
        """
        if not built.selftest_digest:
            self.log(f"no self-test: {built.selftest_note}")
        self.log_row_test(built, is_exact=spec.row_test.is_exact)
        if spec.is_sharing and not (built.handle or built.is_template):
            self._log_unshared(built.note, holder, logging.WARNING if built.has_sharing_failed else logging.INFO)

    def log_row_test(self, built: Built, *, is_exact: bool) -> None:
        """Requests were to be put together, or cut; the model may not be one of which that is right.

        That it was not tested is no loss where answers need not be `is_exact`.
        """
        if built.row_support is not None and built.row_support.note:
            is_loss = is_exact or not built.row_support.outputs
            self.log(f"rows of requests: {built.row_support.note}", level=logging.WARNING if is_loss else logging.INFO)

    def log_attached(self, built: Built, attached: Attached, worker: str) -> None:
        """A worker may not have got what the holder has; that there is nothing, the holder has told."""
        if built.shared_bytes and not attached.shared_bytes:
            self._log_unshared(attached.note, worker, logging.WARNING)

    def _log_unshared(self, note: str, child: str, level: int) -> None:
        """Each cause once, however many workers meet it."""
        note = note or "weights are not shared"
        if note not in self._notes:
            self._notes.add(note)
            self.log(note, child, level=level)


def describe_selftest(built: Built | None) -> str:
    """Return what the self-test of a model is run on, or why it has none; "" before that is known. For people."""
    if built is None:
        return ""
    return describe_cases(built.selftest_cases) if built.selftest_digest else f"none: {built.selftest_note}"


class UnmergedPrincipal(NamedTuple):
    """A tenant or a user whose requests are not put together with others any more.

    Attributes:
        name: of the tenant or the user.
        note: what has differed.
    """

    name: str
    note: str
