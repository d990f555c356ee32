"""Tests of model versions and snapshots: only those of the current and the previous version are kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weightd_common.safe_open import OPERATOR, Grant
from weightd_daemon.generations.spec import ModelSource, SelfTestSpec
from weightd_daemon.models.versions import IdSequence, ModelVersions, Snapshots
from weightd_daemon.processes.events import SliceSnapshot, Snapshot


class VersionsHarness(ModelVersions):
    """Versions of a model, and the numbers of the sources that have a snapshot."""

    def __init__(self) -> None:
        self.existing: set[int] = set()
        super().__init__(
            "/one.onnx",
            IdSequence(),
            lambda source, _: self.existing.add(source.number),
            lambda source: self.existing.remove(source.number),
        )
        self.snapshot(self.current)

    @staticmethod
    def make_snapshot(number: int) -> Snapshot:
        slices = (SliceSnapshot(f"/cache/{number}", "5" * 64, number, "known", "/g"),) * 2
        return Snapshot(f"/cache/{number}", "", "5" * 64, number, "/s", "known", slices, ("/t0", "/t1"))

    def snapshot(self, source: ModelSource) -> ModelSource:
        self.snapshots.request(source, float("inf"))
        self.snapshots.on_taken(source, self.make_snapshot(source.number))
        return source

    def updated(self, path: str, weights: str = "", grant: Grant = OPERATOR) -> ModelSource:
        source = self.snapshot(self.create(path, weights, grant))
        self.on_take_over(source)
        return source


@pytest.fixture
def versions() -> VersionsHarness:
    return VersionsHarness()


def test_new_source_has_number_and_default_path(versions: VersionsHarness) -> None:
    assert versions.current == ModelSource("/one.onnx", number=1)
    assert versions.create("", "/w.npz", OPERATOR) == ModelSource("/one.onnx", "/w.npz", 2)
    assert versions.create("/two.onnx", "", OPERATOR) == ModelSource("/two.onnx", "", 3)
    alice, bob = Grant(1), Grant(2)
    theirs = versions.updated("/two.onnx", grant=alice)
    assert (theirs.grant, theirs.weights_grant) == (alice, alice)
    # The update changes only the weights, so the model file keeps its grant.
    other = versions.create("", "/w.npz", bob)
    assert (other.grant, other.weights_grant) == (alice, bob)
    versions.renew_current()
    assert (versions.current.grant, versions.current.number) == (alice, 6)
    numbers = IdSequence((7, 3))
    assert (numbers.next_generation(), numbers.next_generation(), numbers.next_source(), numbers.last_ids) == (
        8,
        9,
        4,
        (9, 4),
    )


def test_keeps_current_and_previous_version(versions: VersionsHarness) -> None:
    first, second = versions.current, versions.updated("/two.onnx")
    assert (versions.current, versions.previous, versions.rolled_back, versions.existing) == (
        second,
        first,
        None,
        {1, 2},
    )
    third = versions.updated("/three.onnx")
    assert (versions.current, versions.previous, versions.rolled_back, versions.existing) == (
        third,
        second,
        None,
        {2, 3},
    )
    # Failed updates; one of them may refer to a version that is kept.
    for each in (second, third, versions.snapshot(versions.create("/four.onnx", "", OPERATOR))):
        versions.drop(each)
    assert versions.existing == {2, 3}
    versions.on_take_over(second)
    assert (versions.current, versions.previous, versions.rolled_back, versions.existing) == (second, None, third, {2})
    fifth = versions.updated("/five.onnx")
    assert (versions.current, versions.previous, versions.rolled_back, versions.existing) == (
        fifth,
        second,
        None,
        {2, 5},
    )


def test_restores_versions_with_snapshots(versions: VersionsHarness) -> None:
    second = versions.updated("/two.onnx", "/w.npz")
    records = versions.records()
    assert [each.number for each in records] == [2, 1]
    following = VersionsHarness()
    following.restore(2, 1, records)
    assert (following.current, following.previous, following.records()) == (second, versions.previous, records)
    following.restore(2, 0, records[:1])
    assert (following.current, following.previous) == (second, None)
    versions.snapshots.drop(second)
    assert [each.number for each in versions.records()] == [1]


SOURCE, OTHER = ModelSource("/m.onnx", number=1), ModelSource("/m.onnx", number=2)
SNAPSHOT = Snapshot("/cache/1", "", "5" * 64, 100)
SELFTEST = SelfTestSpec(cases=({"x": (1,)},))
FOREVER = float("inf")


class FakeSnapshots(Snapshots):
    """Snapshots, and the sources that exist or are being copied on the fake disk."""

    def __init__(self) -> None:
        self.disk: list[ModelSource] = []
        self.expected = ""
        super().__init__(self.take, self.disk.remove)

    def take(self, source: ModelSource, expected: str) -> None:
        self.disk.append(source)
        self.expected = expected


def test_snapshot_is_taken_once_and_kept_until_dropped() -> None:
    versions = FakeSnapshots()
    versions.request(SOURCE, 1010.0)
    versions.request(SOURCE, 2000.0)
    assert (versions.disk, versions.next_event_at, versions.find(SOURCE), versions.ready()) == (
        [SOURCE],
        1010.0,
        None,
        [],
    )
    with pytest.raises(RuntimeError, match=r"/m\.onnx: a process cannot start before the snapshot is taken"):
        _ = versions[SOURCE]
    versions.on_taken(SOURCE, SNAPSHOT)
    versions.request(SOURCE, 2000.0)
    versions.cancel_pending()
    assert (versions.disk, versions.next_event_at, versions.take_overdue(3000.0)) == ([SOURCE], FOREVER, [])
    assert (versions.find(SOURCE), versions[SOURCE], versions.ready()) == (
        SNAPSHOT,
        SNAPSHOT,
        [(SOURCE, SNAPSHOT, None)],
    )
    for _ in range(2):
        versions.drop(SOURCE)
        assert (versions.disk, versions.find(SOURCE)) == ([], None)


def test_lost_snapshot_is_retaken_with_expected_digest() -> None:
    versions = FakeSnapshots()
    versions.request(SOURCE, 1010.0)
    versions.on_lost(SOURCE)
    assert (versions.disk, versions.expected) == ([SOURCE], "")
    versions.on_taken(SOURCE, SNAPSHOT)
    versions.on_lost(SOURCE)
    assert (versions.find(SOURCE), versions.ready()) == (None, [])
    for _ in range(2):
        versions.disk.clear()
        versions.request(SOURCE, 2000.0)
        assert (versions.disk, versions.expected, versions.next_event_at) == ([SOURCE], SNAPSHOT.sha256, 2000.0)
        versions.on_failed(SOURCE)
    # After the drop, neither the file nor its digest is kept.
    versions.drop(SOURCE)
    assert versions.disk == []
    versions.request(SOURCE, 2000.0)
    assert versions.expected == ""
    versions.on_taken(SOURCE, SNAPSHOT)
    versions.on_lost(SOURCE)
    versions.drop_all()
    assert versions.disk == []


def test_overdue_snapshot_is_cancelled() -> None:
    versions = FakeSnapshots()
    versions.request(SOURCE, 1010.0)
    versions.request(OTHER, 1011.0)
    assert versions.take_overdue(1009.9) == []
    assert (versions.take_overdue(1010.0), versions.disk, versions.next_event_at) == ([SOURCE], [OTHER], 1011.0)
    # The late result is ignored.
    versions.on_taken(SOURCE, SNAPSHOT)
    assert (versions.find(SOURCE), versions.ready()) == (None, [])


def test_removes_pending_and_restored_snapshots() -> None:
    versions = FakeSnapshots()
    versions.request(SOURCE, FOREVER)
    versions.disk.append(OTHER)
    versions.restore(OTHER, SNAPSHOT)
    assert versions[OTHER] == SNAPSHOT
    versions.cancel_pending()
    assert versions.disk == [OTHER]
    versions.drop_all()
    assert versions.disk == []


SNAPSHOT_ENDS: dict[str, Callable[[FakeSnapshots], object]] = {
    "failed": lambda versions: versions.on_failed(SOURCE),
    "dropped": lambda versions: versions.drop(SOURCE),
    "overdue": lambda versions: versions.take_overdue(1010.0),
}


@pytest.mark.parametrize("end_snapshot", SNAPSHOT_ENDS.values(), ids=SNAPSHOT_ENDS)
def test_selftest_is_dropped_with_snapshot(end_snapshot: Callable[[FakeSnapshots], object]) -> None:
    versions = FakeSnapshots()
    versions.set_selftest(SOURCE, SELFTEST)
    versions.request(SOURCE, 1010.0)
    versions.set_selftest(SOURCE, SELFTEST)
    end_snapshot(versions)
    assert (versions.find(SOURCE), versions.next_event_at) == (None, FOREVER)
    # The source can be requested again.
    versions.request(SOURCE, 1020.0)
    assert versions.next_event_at == 1020.0
    versions.on_taken(SOURCE, SNAPSHOT)
    assert versions.ready() == [(SOURCE, SNAPSHOT, None)]
    versions.set_selftest(SOURCE, SELFTEST)
    assert versions.ready() == [(SOURCE, SNAPSHOT, SELFTEST)]
