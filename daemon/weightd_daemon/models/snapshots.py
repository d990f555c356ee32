"""The snapshots of one model's sources: which exist, which are being taken, and which nobody needs any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from weightd_daemon.generations.spec import ModelSource, SelfTestSpec
from weightd_daemon.processes.events import Snapshot


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

    def selftest(self, source: ModelSource) -> SelfTestSpec | None:
        """Return what a generation has found out."""
        return self._selftests.get(source)

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

    def iter_ready(self) -> Iterator[tuple[ModelSource, Snapshot]]:
        """Yield each source that has a snapshot, with it."""
        yield from [(source, snapshot) for source, snapshot in self._by_source.items() if snapshot is not None]

    def __getitem__(self, source: ModelSource) -> Snapshot:
        snapshot = self._by_source[source]
        if snapshot is None:
            raise RuntimeError(f"{source.path}: a process was to be started before the snapshot was taken")
        return snapshot
