"""How far a generation is that loads: by the bytes that were copied, and by how long it took the last time.

Without I/O, fed with the clock in monotonic seconds. A load is the copy of its files, then the wait for room, of which
nobody knows anything, then the processes until the first one serves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from weightd.protocol import limits
from weightd.protocol.schema import integer, number, record, text

# What takes longer than the last time is told by no number that reaches the end: it comes nearer and nearer.
_KNOWN = 0.9
_MOST = 0.99

# A month. What is said to take longer has been damaged in the file, or is of another size: it is no number for people.
_MOST_S = 30 * 86400.0

# Of a copy that has just begun nobody can tell how fast it is.
_LEAST_S = 0.5


@dataclass(frozen=True)
class Pace:
    """How long so many bytes of a model took: `copy_s` for their copy if there was one, and `load_s` after that."""

    nbytes: int = field(metadata=integer(0, limits.MAX_COUNT))
    load_s: float = field(metadata=number(_MOST_S))
    copy_s: float | None = field(default=None, metadata=number(_MOST_S))

    def load_of(self, nbytes: int) -> float:
        """Return how long so many bytes would take after their copy."""
        return self.load_s * self._times(nbytes)

    def copy_of(self, nbytes: int) -> float | None:
        """Return how long their copy would take; None where there was none."""
        return None if self.copy_s is None else self.copy_s * self._times(nbytes)

    def _times(self, nbytes: int) -> float:
        return nbytes / self.nbytes if nbytes and self.nbytes else 1.0


@dataclass(frozen=True)
class PaceFigures:
    """What is written down of a model's pace, for the next daemon."""

    model: str = field(metadata=text(limits.MAX_MODEL_NAME_BYTES))
    pace: Pace = field(metadata=record(Pace))

    @property
    def key(self) -> str:
        """Whose it is."""
        return self.model


class Share(NamedTuple):
    """How far it is.

    Attributes:
        done: of all of it, from 0 to less than 1; None where nothing is known.
        left_s: seconds until it serves; likewise.
        copied: of its files, from 0 to 1; None while nothing was copied, and afterwards.
    """

    done: float | None = None
    left_s: float | None = None
    copied: float | None = None


class Load:
    """One generation, while it loads. What was told never goes back.

    Args:
        before: how long it took the last time; None if that is not known.
        now: the clock.
    """

    def __init__(self, before: Pace | None, now: float) -> None:
        self._before = before
        self._begun = now
        self._nbytes = 0
        self._copied = 0
        # How long the copy took, once it is over, and when the processes began.
        self._copy_s: float | None = None
        self._loads_at: float | None = None
        self._told = 0.0

    @property
    def is_pinned(self) -> bool:
        """Whether all its files are there."""
        return self._copy_s is not None

    def copying(self, copied: int, nbytes: int) -> None:
        """So many bytes of so many were copied."""
        if self._copy_s is None:
            self._copied = max(self._copied, min(copied, nbytes))
            self._nbytes = nbytes

    def pinned(self, nbytes: int, now: float) -> None:
        """All were, be it long ago; now it waits for room."""
        if self._copy_s is None:
            self._copy_s = now - self._begun
            self._nbytes = nbytes or self._nbytes

    def loads(self, now: float) -> None:
        """There is room: processes start."""
        self.pinned(0, now)
        if self._loads_at is None:
            self._loads_at = now

    def serves(self, now: float) -> Pace | None:
        """The first one serves; return how long that took, None where nobody has seen it begin."""
        if self._loads_at is None:
            return None
        before = None if self._before is None else self._before.copy_of(self._nbytes)
        copy_s = self._copy_s if self._copied else before
        return Pace(self._nbytes, min(now - self._loads_at, _MOST_S), None if copy_s is None else min(copy_s, _MOST_S))

    def share(self, now: float) -> Share:
        """Return how far it is."""
        copied = self._copied / self._nbytes if self._copied and self._copy_s is None else None
        ahead = None if self._before is None else self._before.load_of(self._nbytes)
        copy_s = self._copy(now)
        if ahead is None or copy_s is None:
            return Share(copied=copied)
        gone = 0.0 if self._loads_at is None else now - self._loads_at
        total = copy_s + ahead
        if self._copy_s is None:
            part, left = min(now - self._begun, copy_s), total - (now - self._begun)
        else:
            part, left = copy_s + ahead * _nearing(gone / ahead if ahead else 1.0), ahead - gone
        self._told = max(self._told, min(_MOST, part / total if total else 0.0))
        is_known = 0 < left <= _MOST_S and (self._copy_s is None or self._loads_at is not None)
        return Share(self._told, left if is_known else None, copied)

    def _copy(self, now: float) -> float | None:
        """How long the copy takes in all, as far as that can be told."""
        if self._copy_s is not None:
            # What was linked, or was there, took no time of all.
            return self._copy_s
        gone = now - self._begun
        if self._copied and gone > _LEAST_S:
            return gone * self._nbytes / self._copied
        return None if self._before is None else self._before.copy_of(self._nbytes)


def _nearing(times: float) -> float:
    """The share that is done after so many times of what the last one took: less than 1, whatever it is."""
    return times if times < _KNOWN else 1 - (1 - _KNOWN) ** 2 / (times - _KNOWN + 1 - _KNOWN)
