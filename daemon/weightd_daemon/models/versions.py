"""The versions of one model: its current and its previous source, their numbers and their snapshots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weightd_common.safe_open import Grant
from weightd_daemon.generations.spec import ModelSource, SelfTestSpec
from weightd_daemon.models.persisted import SourceRecord
from weightd_daemon.processes.events import Snapshot


class IdSequence:
    """Assigns the numbers of the generations and sources for one model name.

    No number is used twice for a name, even after a new model has replaced the model of this name.
    """

    def __init__(self, last_ids: Sequence[int] = (0, 0)) -> None:
        self._last_generation, self._last_source = last_ids

    @property
    def last_ids(self) -> tuple[int, int]:
        """The number last assigned to a generation, and the number last assigned to a source."""
        return self._last_generation, self._last_source

    def next_generation(self) -> int:
        """Return a new number for a generation."""
        self._last_generation += 1
        return self._last_generation

    def next_source(self) -> int:
        """Return a new number for a source."""
        self._last_source += 1
        return self._last_source


class ModelVersions:
    """Tracks the source that is served and the source for a rollback; only their snapshots are kept.

    Args:
        path: the path of the model file that is loaded first.
        ids: assigns the numbers of generations and sources for the name of the model.
        take_snapshot: begins to take the snapshot of a source; see `take` of `Snapshots`.
        remove_snapshot: removes a snapshot, or cancels it while it is being taken.

    Attributes:
        current: the source that the model serves or loads.
        previous: the source from before the last update; None if there was no update, or if the last one was a
            rollback.
        rolled_back: the source that the last update has replaced, if this update was a rollback under this daemon; None
            otherwise.
        snapshots: the snapshots of `current` and `previous`, and of the source that an update loads.
    """

    def __init__(
        self,
        path: str,
        ids: IdSequence,
        take_snapshot: Callable[[ModelSource, str], None],
        remove_snapshot: Callable[[ModelSource], None],
    ) -> None:
        self.current = ModelSource(path, number=ids.next_source())
        self.previous: ModelSource | None = None
        self.rolled_back: ModelSource | None = None
        self.snapshots = Snapshots(take_snapshot, remove_snapshot)
        self._ids = ids

    @property
    def last_ids(self) -> tuple[int, int]:
        """The number last assigned to a generation, and the number last assigned to a source."""
        return self._ids.last_ids

    def create(self, path: str, weights: str, grant: Grant) -> ModelSource:
        """Return a new source.

        Args:
            path: the path of the model file; "" for the path of the current source.
            weights: the path of a file of arrays that replace weights; "" for the weights in the model file.
            grant: the file permissions of the client that named these paths.
        """
        before = self.current
        return ModelSource(
            path or before.path, weights, self._ids.next_source(), grant if path else before.grant, weights_grant=grant
        )

    def renew_current(self) -> None:
        """Replace the current source by a new one of the same path, so that the files are read again.

        No generation may be serving the source.
        """
        before, self.current = self.current, dataclasses.replace(self.current, number=self._ids.next_source())
        self.drop(before)

    def forget_snapshots(self) -> None:
        """Remove all snapshots of a model that is not loaded; its next load reads the files again.

        A rollback is no longer possible, because only the snapshot had the files of the previous source.
        """
        previous, self.previous = self.previous, None
        if previous is not None:
            self.drop(previous)
        self.renew_current()

    def on_take_over(self, source: ModelSource) -> None:
        """Record that an update to this source has taken over.

        A rollback drops the source that it has replaced, so that no second rollback can return to that source. A
        replaced source without a snapshot has never served, so it is not kept for a rollback.
        """
        oldest, before = self.previous, self.current if self.snapshots.find(self.current) is not None else None
        is_rollback = source == oldest
        self.current, self.previous, self.rolled_back = (
            (source, None, before) if is_rollback else (source, before, None)
        )
        for each in (oldest, before):
            if each is not None:
                self.drop(each)

    def drop(self, source: ModelSource) -> None:
        """Drop the snapshot of a source, unless it is the current or the previous source."""
        if source not in (self.current, self.previous):
            self.snapshots.drop(source)

    def records(self) -> list[SourceRecord]:
        """Return the records for `restore`: the current source and the previous one, if they have snapshots."""
        return [
            SourceRecord.from_source(each, there)
            for each in (self.current, self.previous)
            if each is not None and (there := self.snapshots.find(each)) is not None
        ]

    def restore(self, current: int, previous: int, records: Sequence[SourceRecord]) -> None:
        """Restore the sources of the previous daemon from its records.

        `current` and `previous` are the numbers of sources; `previous` is 0 without a previous source.
        """
        sources = {each.number: each.restored_source for each in records}
        for each in records:
            self.snapshots.restore(sources[each.number], each.restored_snapshot)
        self.current, self.previous = sources[current], sources.get(previous)


class ReadySnapshot(NamedTuple):
    """A source that can be loaded, because its snapshot exists.

    Attributes:
        selftest: the self-test that a generation has found for the source; None if none has.
    """

    source: ModelSource
    snapshot: Snapshot
    selftest: SelfTestSpec | None = None


class Snapshots:
    """The snapshots of a model: one for each source, which all generations of the source load.

    Args:
        take: called with a source and a sha256; begins to take the snapshot of the source. If the sha256 is not "", the
            snapshot must have it.
        remove: removes the snapshot of a source, or stops taking it.
    """

    def __init__(self, take: Callable[[ModelSource, str], None], remove: Callable[[ModelSource], None]) -> None:
        self._take = take
        self._remove = remove
        # The snapshot of each source; None while the snapshot is being taken.
        self._by_source: dict[ModelSource, Snapshot | None] = {}
        self._selftests: dict[ModelSource, SelfTestSpec] = {}
        # The sha256 of each lost snapshot. A new snapshot of the source must have the same sha256, because all
        # generations of a source load the same bytes.
        self._expected_sha256: dict[ModelSource, str] = {}
        # The deadlines of the snapshots in progress, in monotonic seconds.
        self._deadlines: dict[ModelSource, float] = {}

    def request(self, source: ModelSource, deadline: float) -> None:
        """Begin to take the snapshot of a source, unless the snapshot exists or is being taken.

        If the snapshot is not complete at `deadline` (monotonic seconds), `take_overdue` cancels it.
        """
        if source not in self._by_source:
            self._by_source[source] = None
            self._deadlines[source] = deadline
            self._take(source, self._expected_sha256.get(source, ""))

    @property
    def next_event_at(self) -> float:
        """The earliest deadline of the snapshots in progress, in monotonic seconds."""
        return min(self._deadlines.values(), default=float("inf"))

    def take_overdue(self, now: float) -> list[ModelSource]:
        """Cancel the snapshots whose deadlines have passed, and return their sources."""
        overdue = [source for source, deadline in self._deadlines.items() if now >= deadline]
        for source in overdue:
            self.drop(source)
        return overdue

    def on_taken(self, source: ModelSource, snapshot: Snapshot) -> None:
        """Record a completed snapshot, unless its source was dropped meanwhile."""
        if source in self._by_source:
            self._by_source[source] = snapshot
            self._expected_sha256.pop(source, None)
            self._deadlines.pop(source, None)

    def restore(self, source: ModelSource, snapshot: Snapshot) -> None:
        """Record a snapshot that the previous daemon has taken."""
        self._by_source[source] = snapshot

    def on_lost(self, source: ModelSource) -> None:
        """Record that the files of a snapshot have vanished.

        The next `request` takes a new snapshot of the source, which must have the same sha256.
        """
        snapshot = self._by_source.get(source)
        if snapshot is not None:
            del self._by_source[source]
            self._expected_sha256[source] = snapshot.sha256

    def find(self, source: ModelSource) -> Snapshot | None:
        """Return the snapshot of a source; None if it does not exist or is still being taken."""
        return self._by_source.get(source)

    def set_selftest(self, source: ModelSource, selftest: SelfTestSpec) -> None:
        """Record the self-test that a generation has found, so that later generations need not search for one."""
        if source in self._by_source:
            self._selftests[source] = selftest

    def on_failed(self, source: ModelSource) -> None:
        """Record that the snapshot of a source could not be taken."""
        self._by_source.pop(source, None)
        self._selftests.pop(source, None)
        self._deadlines.pop(source, None)

    def drop(self, source: ModelSource) -> None:
        """Remove the snapshot of a source that no generation will load any more."""
        if source in self._by_source or source in self._expected_sha256:
            self._by_source.pop(source, None)
            self._expected_sha256.pop(source, None)
            self._selftests.pop(source, None)
            self._deadlines.pop(source, None)
            self._remove(source)

    def cancel_pending(self) -> None:
        """Cancel the snapshots in progress, because copying may take long and no generation waits for them any more."""
        for source in [source for source, snapshot in self._by_source.items() if snapshot is None]:
            self.drop(source)

    def drop_all(self) -> None:
        """Remove all snapshots."""
        for source in [*self._by_source, *self._expected_sha256]:
            self.drop(source)

    def ready(self) -> list[ReadySnapshot]:
        """Return each source that has a snapshot, with the snapshot."""
        return [
            ReadySnapshot(source, snapshot, self._selftests.get(source))
            for source, snapshot in self._by_source.items()
            if snapshot is not None
        ]

    def __getitem__(self, source: ModelSource) -> Snapshot:
        snapshot = self._by_source[source]
        if snapshot is None:
            raise RuntimeError(f"{source.path}: a process cannot start before the snapshot is taken")
        return snapshot
