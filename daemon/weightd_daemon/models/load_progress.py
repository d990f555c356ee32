"""How far a generation is that loads: by the bytes that were copied, and by how long it took the last time.

Without I/O, fed with the clock in monotonic seconds. A load is the copy of its files, then the wait for room, of which
nobody knows anything, then the processes until the first one serves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from weightd_protocol import limits
from weightd_protocol.schema import integer, number, record, text

# What takes longer than the last time is told by no number that reaches the end: it comes nearer and nearer.
_LINEAR_UNTIL = 0.9
_MAX_PROGRESS = 0.99

# A month. What is said to take longer has been damaged in the file, or is of another size: it is no number for people.
_MAX_DURATION_S = 30 * 86400.0

# Of a copy that has just begun nobody can tell how fast it is.
_MIN_COPY_S = 0.5


@dataclass(frozen=True)
class LoadSpeed:
    """How long so many bytes of a model took: `copy_s` for their copy if there was one, and `load_s` after that."""

    nbytes: int = field(metadata=integer(0, limits.MAX_COUNT))
    load_s: float = field(metadata=number(_MAX_DURATION_S))
    copy_s: float | None = field(default=None, metadata=number(_MAX_DURATION_S))

    def load_time_s(self, nbytes: int) -> float:
        """Return how long so many bytes would take after their copy."""
        return self.load_s * self._size_ratio(nbytes)

    def copy_time_s(self, nbytes: int) -> float | None:
        """Return how long their copy would take; None where there was none."""
        return None if self.copy_s is None else self.copy_s * self._size_ratio(nbytes)

    def _size_ratio(self, nbytes: int) -> float:
        return nbytes / self.nbytes if nbytes and self.nbytes else 1.0


@dataclass(frozen=True)
class LoadSpeedRecord:
    """What is written down of a model's pace, for the next daemon."""

    model: str = field(metadata=text(limits.MAX_MODEL_NAME_BYTES))
    speed: LoadSpeed = field(metadata=record(LoadSpeed))

    @property
    def key(self) -> str:
        """Whose it is."""
        return self.model


class LoadProgress(NamedTuple):
    """How far it is.

    Attributes:
        fraction_done: of all of it, from 0 to less than 1; None where nothing is known.
        remaining_s: seconds until it serves; likewise.
        fraction_copied: of its files, from 0 to 1; None while nothing was copied, and afterwards.
    """

    fraction_done: float | None = None
    remaining_s: float | None = None
    fraction_copied: float | None = None


class LoadEstimate:
    """One generation, while it loads. What was told never goes back.

    Args:
        last_speed: how long it took the last time; None if that is not known.
        now: the clock.
    """

    def __init__(self, last_speed: LoadSpeed | None, now: float) -> None:
        self._last_speed = last_speed
        self._started_at = now
        self._total_bytes = 0
        self._copied_bytes = 0
        # How long the copy took, once it is over, and when the processes began.
        self._copy_s: float | None = None
        self._load_started_at: float | None = None
        self._reported_fraction = 0.0

    @property
    def is_copied(self) -> bool:
        """Whether all its files are there."""
        return self._copy_s is not None

    def on_copy_progress(self, copied_bytes: int, total_bytes: int) -> None:
        """So many bytes of so many were copied."""
        if self._copy_s is None:
            self._copied_bytes = max(self._copied_bytes, min(copied_bytes, total_bytes))
            self._total_bytes = total_bytes

    def on_copied(self, nbytes: int, now: float) -> None:
        """All were, be it long ago; now it waits for room."""
        if self._copy_s is None:
            self._copy_s = now - self._started_at
            self._total_bytes = nbytes or self._total_bytes

    def on_load_started(self, now: float) -> None:
        """There is room: processes start."""
        self.on_copied(0, now)
        if self._load_started_at is None:
            self._load_started_at = now

    def on_serving(self, now: float) -> LoadSpeed | None:
        """The first one serves; return how long that took, None where nobody has seen it begin."""
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
        """Return how far it is."""
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
        """How long the copy takes in all, as far as that can be told."""
        if self._copy_s is not None:
            # What was linked, or was there, took no time of all.
            return self._copy_s
        elapsed_s = now - self._started_at
        if self._copied_bytes and elapsed_s > _MIN_COPY_S:
            return elapsed_s * self._total_bytes / self._copied_bytes
        return None if self._last_speed is None else self._last_speed.copy_time_s(self._total_bytes)


def _asymptotic_fraction(elapsed_ratio: float) -> float:
    """The share that is done after so many times of what the last one took: less than 1, whatever it is."""
    return (
        elapsed_ratio
        if elapsed_ratio < _LINEAR_UNTIL
        else 1 - (1 - _LINEAR_UNTIL) ** 2 / (elapsed_ratio - _LINEAR_UNTIL + 1 - _LINEAR_UNTIL)
    )
