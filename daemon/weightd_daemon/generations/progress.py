"""Texts about a generation: why it has failed or lacks workers, and its progress in the log."""

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
    """The expected result of the next generation after a generation has failed."""

    SAME_FAILURE = "same failure"  # the next generation would fail in the same way
    WAIT_FOR_MEMORY = "wait for memory"  # the card had no free memory; the next generation may find some
    MAY_SUCCEED = "may succeed"  # a signal has ended a process, so the next generation may succeed

    @classmethod
    def after(cls, loss: LossReason, *, may_succeed: bool) -> RetryHint:
        """Return the hint for a generation that has failed because it lost a process."""
        if loss.is_out_of_memory:
            return cls.WAIT_FOR_MEMORY
        return cls.MAY_SUCCEED if may_succeed else cls.SAME_FAILURE


@dataclass(frozen=True)
class FailureReason:
    """Why a generation has failed, or has fewer workers than configured; `str` makes it a text for users.

    Attributes:
        reason: the event that caused the failure.
        child: the name of the process that failed, or "".
        log_tail: the last lines of the log of `child`; "" until they are known.
        prefix: a text before the reason, such as its consequence.
        suffix: a text after the reason, such as a further consequence.
        retry_hint: the expected result of the next generation, if this generation has failed.
        is_transient: whether the cause may go away by itself, even if only after a long time.
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
        """Return the failure that the loss of the process `child` causes."""
        is_transient = loss.is_transient or loss.is_out_of_memory
        return cls(loss.reason, child, suffix=suffix, retry_hint=retry_hint, is_transient=is_transient)

    def with_prefix(self, prefix_text: str) -> FailureReason:
        """Return a copy with `prefix_text` before the whole text."""
        return replace(self, prefix=f"{prefix_text}{self.prefix}")

    def __str__(self) -> str:
        child = f"{self.child}: " if self.child else ""
        words = f"; its log ends: {self.log_tail}" if self.log_tail else ""
        return f"{self.prefix}{child}{self.reason}{words}{self.suffix}"


class ProgressLogger:
    """Logs the events of one generation. Repeated progress texts and notes are logged once.

    Args:
        label: the name of the generation.
        number: the number at the end of `label`.
    """

    def __init__(self, label: str, number: int) -> None:
        self._label = label
        self._number = number
        self._progress = ""
        self._notes: set[str] = set()

    def log_extra(self, child: str = "") -> Mapping[str, Any]:
        """Return the `extra` of a log record about this generation, or about the process with the name `child`."""
        return subject_extra(self._label.rpartition(".")[0], self._number, child)

    def log(self, text: str, child: str = "", *, level: int = logging.WARNING) -> None:
        """Log an event of the generation, or of the process with the name `child`."""
        _log.log(level, "%s: %s", self._label, text, extra=self.log_extra(child))

    def log_progress(self, progress: str, *, has_failed: bool) -> None:
        """Log the progress if it has changed and the generation has not failed.

        The deployment logs the failure of a generation, together with its consequences.
        """
        if progress != self._progress:
            self._progress = progress
            if not has_failed:
                self.log(progress, level=logging.INFO)

    def log_built(self, built: Built, holder: str, spec: GenerationSpec) -> None:
        """Log what the holder could not do: find a self-test, support rows as configured, or share weights.

        Unshared weights are logged as a warning only if an attempt to share has failed, not if the model has nothing to
        share.
        """
        if not built.selftest_digest:
            self.log(f"no self-test: {built.selftest_note}")
        self.log_row_test(built, is_exact=spec.row_test.is_exact)
        if spec.is_sharing and not (built.handle or built.is_template):
            self._log_unshared(built.note, holder, logging.WARNING if built.has_sharing_failed else logging.INFO)

    def log_row_test(self, built: Built, *, is_exact: bool) -> None:
        """Log why requests cannot be batched or split as configured, if the holder has given a reason.

        The reason is logged as a warning if the results have to be exact (`is_exact`), or if batching is impossible.
        """
        if built.row_support is not None and built.row_support.note:
            is_loss = is_exact or not built.row_support.outputs
            self.log(f"rows of requests: {built.row_support.note}", level=logging.WARNING if is_loss else logging.INFO)

    def log_attached(self, built: Built, attached: Attached, worker: str) -> None:
        """Log a warning if a worker does not share the weights although the holder does."""
        if built.shared_bytes and not attached.shared_bytes:
            self._log_unshared(attached.note, worker, logging.WARNING)

    def _log_unshared(self, note: str, child: str, level: int) -> None:
        """Log why a process shares no weights. Each reason is logged once, even if several processes report it."""
        note = note or "weights are not shared"
        if note not in self._notes:
            self._notes.add(note)
            self.log(note, child, level=level)


def describe_selftest(built: Built | None) -> str:
    """Return the inputs of a model's self-test as a text, or why it has none; "" before the model has been built."""
    if built is None:
        return ""
    return describe_cases(built.selftest_cases) if built.selftest_digest else f"none: {built.selftest_note}"


class UnmergedPrincipal(NamedTuple):
    """A tenant or a user whose requests no longer share batches with others.

    Attributes:
        name: the name of the tenant or the user.
        note: how the results in shared batches differed from the results of single rows.
    """

    name: str
    note: str
