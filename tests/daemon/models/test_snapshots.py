"""The snapshots of a model's sources, in any order of events: each is taken once, and none is left behind."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weightd.daemon.children.owner import Snapshot
from weightd.daemon.generations.plan import Canary, Source
from weightd.daemon.models.snapshots import Snapshots

SOURCES = [Source("/m.onnx", number=number) for number in (1, 2, 3)]
FOREVER = float("inf")


def snapshot(source: Source) -> Snapshot:
    return Snapshot(f"/cache/{source.number}", "", "5" * 64, source.number)


class World(RuleBasedStateMachine):
    """Wants, gets and gives up snapshots; `disk` is what there is, or is being made, on the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.disk: set[Source] = set()
        self.due: dict[Source, float] = {}
        self.there: set[Source] = set()
        self.canaries: dict[Source, Canary] = {}
        self.snapshots = Snapshots(self.pin, self.unpin)

    def pin(self, source: Source) -> None:
        assert source not in self.disk
        self.disk.add(source)

    def unpin(self, source: Source) -> None:
        self.disk.remove(source)

    def gone(self, *sources: Source) -> None:
        for source in sources:
            self.due.pop(source, None)
            self.there.discard(source)
            self.canaries.pop(source, None)

    @rule(source=st.sampled_from(SOURCES), patience=st.sampled_from([1.0, 5.0]))
    def is_wanted(self, source: Source, patience: float) -> None:
        if source not in self.due and source not in self.there:
            self.due[source] = self.now + patience
        self.snapshots.want(source, self.now + patience)

    @rule(source=st.sampled_from(SOURCES))
    def is_taken(self, source: Source) -> None:
        if source in self.due:
            del self.due[source]
            self.there.add(source)
        if source in self.disk:
            self.snapshots.taken(source, snapshot(source))
        else:
            self.snapshots.taken(source, snapshot(source))
            assert self.snapshots.find(source) is None

    @rule(source=st.sampled_from(SOURCES))
    def cannot_be_taken(self, source: Source) -> None:
        if source in self.due:
            self.snapshots.failed(source)
            self.disk.discard(source)
            self.gone(source)

    @rule(source=st.sampled_from(SOURCES))
    def is_dropped(self, source: Source) -> None:
        self.snapshots.drop(source)
        self.gone(source)

    @rule(source=st.sampled_from(SOURCES))
    def is_learned_of(self, source: Source) -> None:
        canary = Canary(cases=({"x": (source.number,)},))
        self.snapshots.learned(source, canary)
        if source in self.due or source in self.there:
            self.canaries[source] = canary

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = [source for source, due in self.due.items() if self.now >= due]
        assert self.snapshots.overdue(self.now) == late
        self.gone(*late)

    @rule()
    def nobody_waits_any_more(self) -> None:
        self.snapshots.abandon()
        self.gone(*list(self.due))

    @invariant()
    def what_there_is_is_known(self) -> None:
        assert self.disk == {*self.due, *self.there}
        assert dict(self.snapshots.ready()) == {source: snapshot(source) for source in self.there}
        assert self.snapshots.next_event == min(self.due.values(), default=FOREVER)
        for source in SOURCES:
            assert self.snapshots.find(source) == (snapshot(source) if source in self.there else None)
            assert self.snapshots.canary(source) == self.canaries.get(source)

    def teardown(self) -> None:
        self.snapshots.drop_all()
        assert not self.disk


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_what_an_earlier_daemon_took_is_there_and_goes_when_it_is_dropped() -> None:
    unpinned: list[Source] = []
    snapshots = Snapshots(lambda _: None, unpinned.append)
    snapshots.restore(SOURCES[0], snapshot(SOURCES[0]))
    assert snapshots[SOURCES[0]] == snapshot(SOURCES[0])
    snapshots.drop_all()
    assert unpinned == [SOURCES[0]]


def test_nothing_is_started_before_there_is_one() -> None:
    snapshots = Snapshots(lambda _: None, lambda _: None)
    snapshots.want(SOURCES[0], FOREVER)
    with pytest.raises(RuntimeError, match=r"/m\.onnx: a process was to be started before the snapshot was taken"):
        _ = snapshots[SOURCES[0]]


def test_what_was_learned_of_a_source_goes_with_a_snapshot_that_fails() -> None:
    snapshots = Snapshots(lambda _: None, lambda _: None)
    snapshots.want(SOURCES[0], FOREVER)
    snapshots.learned(SOURCES[0], Canary())
    snapshots.failed(SOURCES[0])
    assert snapshots.canary(SOURCES[0]) is None
