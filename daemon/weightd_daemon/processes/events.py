"""What owners of child processes are told of them, and of snapshots. `now` is the clock, in monotonic seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_protocol.messages.worker import ChildMessage


@dataclass(frozen=True)
class SliceSnapshot:
    """The copy of what one rank loads; the fields are those of `Snapshot`.

    Attributes:
        group_info: the copy of what it is told of the groups of ranks within the model, or "".
    """

    path: str
    sha256: str
    nbytes: int
    identity: str
    group_info: str = ""


@dataclass(frozen=True)
class Snapshot:
    """The immutable copy of a source that every process of its generations loads.

    Attributes:
        path: the copy of the model file; where it is cut into slices, that of rank 0.
        weights: the copy of the arrays to load over its weights, or "".
        sha256: of the model, or of the digests of all slices in the order of their ranks.
        nbytes: of all files of the model.
        sample: the copy of the inputs that the self-test is run on, or "".
        identity: of the files of the model: another one as soon as one was written or replaced.
        slices: what each rank loads; none: the model is whole.
        rank_tables: the copy of the rank table of each group, if they are configured.
    """

    path: str
    weights: str
    sha256: str
    nbytes: int
    sample: str = ""
    identity: str = ""
    slices: tuple[SliceSnapshot, ...] = ()
    rank_tables: tuple[str, ...] = ()


def digest_of(slices: Sequence[SliceSnapshot]) -> str:
    """Return the sha256 that names a model that is cut into these: of their digests, each on a line."""
    return hashlib.sha256("".join(f"{each.sha256}\n" for each in slices).encode()).hexdigest()


class ProcessEventHandler(Protocol):
    """Who has children started."""

    def on_message(self, child: str, message: ChildMessage, frames: Sequence[Any], now: float) -> None:
        """A child has sent `message`, with these tensor frames behind it."""

    def on_exit(self, child: str, exit_cause: ExitCause, now: float) -> None:
        """A child has exited, or could not be started. What it had sent was told before."""


class SnapshotEventHandler(Protocol):
    """Who has snapshots taken."""

    def on_snapshot_taken(self, source: ModelSource, snapshot: Snapshot, now: float) -> None:
        """The snapshot of a source exists, and its devices have said what they have."""

    def on_snapshot_failed(self, source: ModelSource, cause: str, now: float, *, is_transient: bool = False) -> None:
        """There is no snapshot of a source; `is_transient`: the cause may go away by itself."""
