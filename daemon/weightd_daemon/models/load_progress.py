"""Estimates the progress of a loading generation from the copied bytes and from the duration of the last load.

The estimates do no I/O and receive the current time in monotonic seconds. A load has three phases: the copy of the
model's files, the wait for memory on the device, whose duration is unknown, and the start of the processes until the
first one serves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from weightd_protocol import limits
from weightd_protocol.schema import integer, number, record, text

# The estimated progress grows in proportion to the elapsed time up to the fraction _LINEAR_UNTIL. Then it grows more
# and more slowly up to _MAX_PROGRESS, because the load may take longer than the last one.
_LINEAR_UNTIL = 0.9
_MAX_PROGRESS = 0.99

# Maximum seconds of a load that are stored or reported: a month. A longer duration comes from a damaged counters file
# or from a model of another size.
_MAX_DURATION_S = 30 * 86400.0

# Seconds that a copy must have run before its total duration is estimated.
_MIN_COPY_S = 0.5


@dataclass(frozen=True)
class LoadSpeed:
    """The measured duration of a load.

    Attributes:
        nbytes: the size of the model's files.
        load_s: the seconds from the start of the processes until the first one served.
        copy_s: the seconds of the copy of the files; None if no load has copied any.
    """

    nbytes: int = field(metadata=integer(0, limits.MAX_COUNT))
    load_s: float = field(metadata=number(_MAX_DURATION_S))
    copy_s: float | None = field(default=None, metadata=number(_MAX_DURATION_S))

    def load_time_s(self, nbytes: int) -> float:
        """Return the expected seconds from the start of the processes until a model of `nbytes` serves."""
        return self.load_s * self._size_ratio(nbytes)

    def copy_time_s(self, nbytes: int) -> float | None:
        """Return the expected seconds for a copy of `nbytes`; None if no load has copied files."""
        return None if self.copy_s is None else self.copy_s * self._size_ratio(nbytes)

    def _size_ratio(self, nbytes: int) -> float:
        return nbytes / self.nbytes if nbytes and self.nbytes else 1.0


@dataclass(frozen=True)
class LoadSpeedRecord:
    """The persisted `LoadSpeed` of a model, for the next daemon."""

    model: str = field(metadata=text(limits.MAX_MODEL_NAME_BYTES))
    speed: LoadSpeed = field(metadata=record(LoadSpeed))

    @property
    def key(self) -> str:
        """The name of the model, which identifies the record."""
        return self.model


class LoadProgress(NamedTuple):
    """The progress of a load.

    Attributes:
        fraction_done: the estimated completed fraction of the load, from 0 to less than 1; None if unknown.
        remaining_s: the estimated seconds until the generation serves; None if unknown.
        fraction_copied: the copied fraction of the model's files, from 0 to 1; None before the first byte and after the
            copy.
    """

    fraction_done: float | None = None
    remaining_s: float | None = None
    fraction_copied: float | None = None


class LoadEstimate:
    """The progress estimate of one generation while it loads. The reported fraction never decreases.

    Args:
        last_speed: the duration of the model's last load; None if unknown.
        now: the time at which the load begins, in monotonic seconds.
    """

    def __init__(self, last_speed: LoadSpeed | None, now: float) -> None:
        self._last_speed = last_speed
        self._started_at = now
        self._total_bytes = 0
        self._copied_bytes = 0
        # The seconds of the completed copy, and the time at which the processes started; None before.
        self._copy_s: float | None = None
        self._load_started_at: float | None = None
        self._reported_fraction = 0.0

    @property
    def is_copied(self) -> bool:
        """Whether all files of the model have been copied."""
        return self._copy_s is not None

    def on_copy_progress(self, copied_bytes: int, total_bytes: int) -> None:
        """Record that `copied_bytes` of `total_bytes` have been copied."""
        if self._copy_s is None:
            self._copied_bytes = max(self._copied_bytes, min(copied_bytes, total_bytes))
            self._total_bytes = total_bytes

    def on_copied(self, nbytes: int, now: float) -> None:
        """Record that all files of the model, of `nbytes` in total, are present; the wait for memory begins."""
        if self._copy_s is None:
            self._copy_s = now - self._started_at
            self._total_bytes = nbytes or self._total_bytes

    def on_load_started(self, now: float) -> None:
        """Record that the wait for memory has ended, and that the processes start."""
        self.on_copied(0, now)
        if self._load_started_at is None:
            self._load_started_at = now

    def on_serving(self, now: float) -> LoadSpeed | None:
        """Return the duration of the load that has just completed; None if `on_load_started` was not called."""
        if self._load_started_at is None:
            return None
        last_copy_s = None if self._last_speed is None else self._last_speed.copy_time_s(self._total_bytes)
        copy_s = self._copy_s if self._copied_bytes else last_copy_s
        return LoadSpeed(
            self._total_bytes,
            min(now - self._load_started_at, _MAX_DURATION_S),
            None if copy_s is None else min(copy_s, _MAX_DURATION_S),
        )

    def progress(self, now: float) -> LoadProgress:
        """Return the progress at `now`."""
        fraction_copied = (
            self._copied_bytes / self._total_bytes if self._copied_bytes and self._copy_s is None else None
        )
        expected_load_s = None if self._last_speed is None else self._last_speed.load_time_s(self._total_bytes)
        copy_s = self._copy_time_s(now)
        if expected_load_s is None or copy_s is None:
            return LoadProgress(fraction_copied=fraction_copied)
        elapsed_s = 0.0 if self._load_started_at is None else now - self._load_started_at
        total_s = copy_s + expected_load_s
        if self._copy_s is None:
            part, left = min(now - self._started_at, copy_s), total_s - (now - self._started_at)
        else:
            part, left = (
                copy_s
                + expected_load_s * _asymptotic_fraction(elapsed_s / expected_load_s if expected_load_s else 1.0),
                expected_load_s - elapsed_s,
            )
        self._reported_fraction = max(self._reported_fraction, min(_MAX_PROGRESS, part / total_s if total_s else 0.0))
        is_known = 0 < left <= _MAX_DURATION_S and (self._copy_s is None or self._load_started_at is not None)
        return LoadProgress(self._reported_fraction, left if is_known else None, fraction_copied)

    def _copy_time_s(self, now: float) -> float | None:
        """Return the seconds of the whole copy: estimated while it runs, measured afterwards; None if unknown."""
        if self._copy_s is not None:
            # Near 0 if the files were linked or existed already, so that nothing was copied.
            return self._copy_s
        elapsed_s = now - self._started_at
        if self._copied_bytes and elapsed_s > _MIN_COPY_S:
            return elapsed_s * self._total_bytes / self._copied_bytes
        return None if self._last_speed is None else self._last_speed.copy_time_s(self._total_bytes)


def _asymptotic_fraction(elapsed_ratio: float) -> float:
    """Return the estimated completed fraction of a load, which is always less than 1.

    Args:
        elapsed_ratio: the elapsed seconds of the load, divided by the expected seconds.
    """
    return (
        elapsed_ratio
        if elapsed_ratio < _LINEAR_UNTIL
        else 1 - (1 - _LINEAR_UNTIL) ** 2 / (elapsed_ratio - _LINEAR_UNTIL + 1 - _LINEAR_UNTIL)
    )
