"""What one model loads: its present source and the one before the last update, with their numbers and snapshots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from weightd_common.safe_open import Grant
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.models.persisted import SourceRecord
from weightd_daemon.models.snapshots import Snapshots


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

    def renew_current(self) -> ModelSource:
        """Read the present source again, of which nothing serves: return it with a new number."""
        before, self.current = self.current, dataclasses.replace(self.current, number=self._ids.next_source())
        self.drop(before)
        return self.current

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

    def restore(self, current: int, previous: int, records: Sequence[SourceRecord]) -> Mapping[int, ModelSource]:
        """Go on with what a daemon before this one had; return every source by its number."""
        sources = {each.number: each.restored_source for each in records}
        for each in records:
            self.snapshots.restore(sources[each.number], each.restored_snapshot)
        self.current, self.previous = sources[current], sources.get(previous)
        return sources
