"""Whoever owns children: what it is told of them. `now` is the clock, in monotonic seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weightd.daemon.generations.plan import Source
from weightd.daemon.host.ends import End
from weightd.protocol.messages.children import ChildMessage


@dataclass(frozen=True)
class Snapshot:
    """The immutable copy of a source that every process of its generations loads.

    Attributes:
        path: the copy of the model file.
        weights: the copy of the arrays to load over its weights, or "".
        sha256: of the model.
        nbytes: of all files of the model.
        sample: the copy of the inputs that the canary is run on, or "".
        identity: of the files of the model: another one as soon as one was written or replaced.
    """

    path: str
    weights: str
    sha256: str
    nbytes: int
    sample: str = ""
    identity: str = ""


class Owner(Protocol):
    """Who has children started and snapshots taken. One object may stand for several that own a child together."""

    def heard(self, child: str, message: ChildMessage, frames: Sequence[Any], now: float) -> None:
        """A child has sent `message`, with these tensor frames behind it."""

    def exited(self, child: str, end: End, now: float) -> None:
        """A child has exited, or could not be started. What it had sent was told before."""

    def pinned(self, source: Source, snapshot: Snapshot, now: float) -> None:
        """The snapshot of a source exists, and its devices have said what they have."""

    def pin_failed(self, source: Source, cause: str, now: float) -> None:
        """There is no snapshot of a source."""
