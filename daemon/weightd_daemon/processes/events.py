"""Interfaces that receive the events of child processes and of snapshots. All times `now` are monotonic seconds."""

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
    """The immutable copy of the slice that one rank loads.

    Attributes:
        path: the path of the copied slice.
        sha256: the digest of the slice.
        nbytes: the size of all files of the slice together, in bytes.
        identity: a text that changes when a file of the copy is written or replaced.
        group_info: the path of the copy of the rank's file of communication groups, or "".
    """

    path: str
    sha256: str
    nbytes: int
    identity: str
    group_info: str = ""


@dataclass(frozen=True)
class Snapshot:
    """The immutable copy of a model that every process of a generation loads.

    Attributes:
        path: the path of the copied model file; for a sliced model, the path of the slice of rank 0.
        weights: the path of the copied arrays that replace weights of the model, or "".
        sha256: the digest of the model; for a sliced model, the result of `digest_of` for its slices.
        nbytes: the size of all files of the model together, in bytes.
        sample: the path of the copied inputs of the self-test, or "".
        identity: a text that changes when a file of the copy is written or replaced.
        slices: the copied slice of each rank; empty if the model is not sliced.
        rank_tables: the path of the copied rank table of each rank group; empty if none is configured.
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
    """Return the digest of a sliced model: the sha256 of its slices' digests, one per line, ordered by rank."""
    return hashlib.sha256("".join(f"{each.sha256}\n" for each in slices).encode()).hexdigest()


class ProcessEventHandler(Protocol):
    """Handles the events of child processes."""

    def on_message(self, child: str, message: ChildMessage, frames: Sequence[Any], now: float) -> None:
        """Handle a message from a child. `frames` are the tensor frames that follow the message."""

    def on_exit(self, child: str, exit_cause: ExitCause, now: float) -> None:
        """Handle the exit of a child, or its failure to start. All its messages have been handled before this call."""


class SnapshotEventHandler(Protocol):
    """Handles the events of snapshots."""

    def on_snapshot_taken(self, source: ModelSource, snapshot: Snapshot, now: float) -> None:
        """Handle a complete snapshot. Before this call, the free memory of the model's cards was queried."""

    def on_snapshot_failed(self, source: ModelSource, cause: str, now: float, *, is_transient: bool = False) -> None:
        """Handle a snapshot that could not be taken. `is_transient`: whether a later attempt may succeed."""
