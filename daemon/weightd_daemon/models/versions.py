"""What one model loads: its present source and the one before the last update, their numbers and their snapshots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weightd_common.safe_open import Grant
from weightd_daemon.generations.spec import ModelSource, SelfTestSpec
from weightd_daemon.models.persisted import SourceRecord
from weightd_daemon.processes.events import Snapshot


class IdSequence:
    """The numbers of a name's generations and sources: none is used twice, whatever model has the name."""

    def __init__(self, last_ids: Sequence[int] = (0, 0)) -> None:
        self._last_generation, self._last_source = last_ids

    @property
    def last_ids(self) -> tuple[int, int]:
        """The last ones."""
        return self._last_generation, self._last_source

    def next_generation(self) -> int:
        """Return the next one."""
        self._last_generation += 1
        return self._last_generation

    def next_source(self) -> int:
        """Return the next one."""
        self._last_source += 1
        return self._last_source


class ModelVersions:
    """Remembers what is served and what can be gone back to; nothing else keeps its snapshot.

    Args:
        path: of the model file that is loaded first.
        ids: of the model's name.
        take_snapshot: begins to take the snapshot of a source, see `Snapshots`.
        remove_snapshot: removes it, or stops taking it.

    Attributes:
        current: what is served, or to be.
        previous: what was served before the last update; None if there was none, or if that was gone back to.
        rolled_back: what was gone back from, since this daemon began; None if the last update was no such.
        snapshots: of these, and of what an update loads.
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
        """The numbers of the last generation and of the last source."""
        return self._ids.last_ids

    def create(self, path: str, weights: str, grant: Grant) -> ModelSource:
        """Return a new source: this file, "" for the present one, with these weights, "" for its own.

        Args:
            path: of the model file.
            weights: of the file of arrays.
            grant: the right by which these paths are named.
        """
        before = self.current
        return ModelSource(
            path or before.path, weights, self._ids.next_source(), grant if path else before.grant, weights_grant=grant
        )

    def renew_current(self) -> None:
        """Read the present source again, of which nothing serves: it gets a new number."""
        before, self.current = self.current, dataclasses.replace(self.current, number=self._ids.next_source())
        self.drop(before)

    def on_take_over(self, source: ModelSource) -> None:
        """An update has taken over. Who goes back gives up what was served until then: nothing goes forth again.

        What has no snapshot has not served: nobody can go back to it.
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
        """An update to it is over: nobody will load it any more, unless it is served or was served before."""
        if source not in (self.current, self.previous):
            self.snapshots.drop(source)

    def records(self) -> list[SourceRecord]:
        """Return what the next daemon needs to `restore` them: those with a snapshot, the present one first."""
        return [
            SourceRecord.from_source(each, there)
            for each in (self.current, self.previous)
            if each is not None and (there := self.snapshots.find(each)) is not None
        ]

    def restore(self, current: int, previous: int, records: Sequence[SourceRecord]) -> None:
        """Go on with what a daemon before this one had."""
        sources = {each.number: each.restored_source for each in records}
        for each in records:
            self.snapshots.restore(sources[each.number], each.restored_snapshot)
        self.current, self.previous = sources[current], sources.get(previous)


class ReadySnapshot(NamedTuple):
    """A source that can be loaded.

    Attributes:
        selftest: what a generation has found out of it; None: nothing.
    """

    source: ModelSource
    snapshot: Snapshot
    selftest: SelfTestSpec | None = None


class Snapshots:
    """Takes a snapshot of each source once, however many generations load it.

    Args:
        take: begins to take the snapshot of a source, which has to have this sha256; "": any.
        remove: removes it, or stops taking it.
    """

    def __init__(self, take: Callable[[ModelSource, str], None], remove: Callable[[ModelSource], None]) -> None:
        self._take = take
        self._remove = remove
        # None: it is being taken.
        self._by_source: dict[ModelSource, Snapshot | None] = {}
        self._selftests: dict[ModelSource, SelfTestSpec] = {}
        # The sha256 of what was lost: all generations of a source load the same.
        self._expected_sha256: dict[ModelSource, str] = {}
        # Until when, in monotonic seconds.
        self._deadlines: dict[ModelSource, float] = {}

    def request(self, source: ModelSource, deadline: float) -> None:
        """A generation needs the snapshot, by `deadline` (monotonic seconds)."""
        if source not in self._by_source:
            self._by_source[source] = None
            self._deadlines[source] = deadline
            self._take(source, self._expected_sha256.get(source, ""))

    @property
    def next_event_at(self) -> float:
        """Nothing is `take_overdue` before this, in monotonic seconds."""
        return min(self._deadlines.values(), default=float("inf"))

    def take_overdue(self, now: float) -> list[ModelSource]:
        """Stop taking what takes too long; return it."""
        overdue = [source for source, deadline in self._deadlines.items() if now >= deadline]
        for source in overdue:
            self.drop(source)
        return overdue

    def on_taken(self, source: ModelSource, snapshot: Snapshot) -> None:
        """It exists; if nobody wants it any more, that is of no consequence."""
        if source in self._by_source:
            self._by_source[source] = snapshot
            self._expected_sha256.pop(source, None)
            self._deadlines.pop(source, None)

    def restore(self, source: ModelSource, snapshot: Snapshot) -> None:
        """A daemon before this one has taken it."""
        self._by_source[source] = snapshot

    def on_lost(self, source: ModelSource) -> None:
        """Its files have vanished: who wants it next has it taken anew, if the model is still the same."""
        snapshot = self._by_source.get(source)
        if snapshot is not None:
            del self._by_source[source]
            self._expected_sha256[source] = snapshot.sha256

    def find(self, source: ModelSource) -> Snapshot | None:
        """Return the snapshot, if it exists."""
        return self._by_source.get(source)

    def set_selftest(self, source: ModelSource, selftest: SelfTestSpec) -> None:
        """A generation has found out what the model runs on: the next one need not."""
        if source in self._by_source:
            self._selftests[source] = selftest

    def on_failed(self, source: ModelSource) -> None:
        """There is none."""
        self._by_source.pop(source, None)
        self._selftests.pop(source, None)
        self._deadlines.pop(source, None)

    def drop(self, source: ModelSource) -> None:
        """No generation will load it any more."""
        if source in self._by_source or source in self._expected_sha256:
            self._by_source.pop(source, None)
            self._expected_sha256.pop(source, None)
            self._selftests.pop(source, None)
            self._deadlines.pop(source, None)
            self._remove(source)

    def cancel_pending(self) -> None:
        """Stop taking what is being taken: nobody waits for it any more, and copying may take long."""
        for source in [source for source, snapshot in self._by_source.items() if snapshot is None]:
            self.drop(source)

    def drop_all(self) -> None:
        """Leave nothing behind."""
        for source in [*self._by_source, *self._expected_sha256]:
            self.drop(source)

    def ready(self) -> list[ReadySnapshot]:
        """Return each source that has a snapshot, with it."""
        return [
            ReadySnapshot(source, snapshot, self._selftests.get(source))
            for source, snapshot in self._by_source.items()
            if snapshot is not None
        ]

    def __getitem__(self, source: ModelSource) -> Snapshot:
        snapshot = self._by_source[source]
        if snapshot is None:
            raise RuntimeError(f"{source.path}: a process was to be started before the snapshot was taken")
        return snapshot
