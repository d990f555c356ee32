"""What a model serves and can go back to, and the snapshots of these: the rest goes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weightd_common.safe_open import OPERATOR, Grant
from weightd_daemon.generations.spec import ModelSource, SelfTestSpec
from weightd_daemon.models.versions import IdSequence, ModelVersions, Snapshots
from weightd_daemon.processes.events import SliceSnapshot, Snapshot


class Shelf(ModelVersions):
    """The sources of a model, and the numbers of those that have a snapshot."""

    def __init__(self) -> None:
        self.there: set[int] = set()
        super().__init__(
            "/one.onnx",
            IdSequence(),
            lambda source, _: self.there.add(source.number),
            lambda source: self.there.remove(source.number),
        )
        self.snapshot(self.current)

    @staticmethod
    def taken(number: int) -> Snapshot:
        slices = (SliceSnapshot(f"/cache/{number}", "5" * 64, number, "known", "/g"),) * 2
        return Snapshot(f"/cache/{number}", "", "5" * 64, number, "/s", "known", slices, ("/t0", "/t1"))

    def snapshot(self, source: ModelSource) -> ModelSource:
        self.snapshots.request(source, float("inf"))
        self.snapshots.on_taken(source, self.taken(source.number))
        return source

    def updated(self, path: str, weights: str = "", grant: Grant = OPERATOR) -> ModelSource:
        source = self.snapshot(self.create(path, weights, grant))
        self.on_take_over(source)
        return source


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def test_a_new_source_is_the_present_file_unless_it_names_one_and_has_a_number_of_its_own(shelf: Shelf) -> None:
    assert shelf.current == ModelSource("/one.onnx", number=1)
    assert shelf.create("", "/w.npz", OPERATOR) == ModelSource("/one.onnx", "/w.npz", 2)
    assert shelf.create("/two.onnx", "", OPERATOR) == ModelSource("/two.onnx", "", 3)
    alice, bob = Grant(1), Grant(2)
    theirs = shelf.updated("/two.onnx", grant=alice)
    assert (theirs.grant, theirs.weights_grant) == (alice, alice)
    # Who changes the weights has not named the model file, which is read again.
    other = shelf.create("", "/w.npz", bob)
    assert (other.grant, other.weights_grant) == (alice, bob)
    shelf.renew_current()
    assert (shelf.current.grant, shelf.current.number) == (alice, 6)
    numbers = IdSequence((7, 3))
    assert (numbers.next_generation(), numbers.next_generation(), numbers.next_source(), numbers.last_ids) == (
        8,
        9,
        4,
        (9, 4),
    )


def test_what_serves_and_what_served_before_are_kept_and_who_goes_back_goes_once(shelf: Shelf) -> None:
    first, second = shelf.current, shelf.updated("/two.onnx")
    assert (shelf.current, shelf.previous, shelf.rolled_back, shelf.there) == (second, first, None, {1, 2})
    third = shelf.updated("/three.onnx")
    assert (shelf.current, shelf.previous, shelf.rolled_back, shelf.there) == (third, second, None, {2, 3})
    # Updates that come to nothing; one may have been to what is kept.
    for each in (second, third, shelf.snapshot(shelf.create("/four.onnx", "", OPERATOR))):
        shelf.drop(each)
    assert shelf.there == {2, 3}
    shelf.on_take_over(second)
    assert (shelf.current, shelf.previous, shelf.rolled_back, shelf.there) == (second, None, third, {2})
    fifth = shelf.updated("/five.onnx")
    assert (shelf.current, shelf.previous, shelf.rolled_back, shelf.there) == (fifth, second, None, {2, 5})


def test_the_next_daemon_goes_on_with_both_and_with_those_alone_that_have_a_snapshot(shelf: Shelf) -> None:
    second = shelf.updated("/two.onnx", "/w.npz")
    records = shelf.records()
    assert [each.number for each in records] == [2, 1]
    following = Shelf()
    following.restore(2, 1, records)
    assert (following.current, following.previous, following.records()) == (second, shelf.previous, records)
    following.restore(2, 0, records[:1])
    assert (following.current, following.previous) == (second, None)
    shelf.snapshots.drop(second)
    assert [each.number for each in shelf.records()] == [1]


SOURCE, OTHER = ModelSource("/m.onnx", number=1), ModelSource("/m.onnx", number=2)
THERE = Snapshot("/cache/1", "", "5" * 64, 100)
CANARY = SelfTestSpec(cases=({"x": (1,)},))
FOREVER = float("inf")


class FakeSnapshots(Snapshots):
    """Snapshots, and the sources of which there is something on the disk, or is being made."""

    def __init__(self) -> None:
        self.disk: list[ModelSource] = []
        self.expected = ""
        super().__init__(self.pin, self.disk.remove)

    def pin(self, source: ModelSource, expected: str) -> None:
        self.disk.append(source)
        self.expected = expected


def test_a_source_is_taken_once_and_is_there_until_it_is_dropped() -> None:
    shelf = FakeSnapshots()
    shelf.request(SOURCE, 1010.0)
    shelf.request(SOURCE, 2000.0)
    assert (shelf.disk, shelf.next_event_at, shelf.find(SOURCE), shelf.ready()) == (
        [SOURCE],
        1010.0,
        None,
        [],
    )
    with pytest.raises(RuntimeError, match=r"/m\.onnx: a process cannot start before the snapshot is taken"):
        _ = shelf[SOURCE]
    shelf.on_taken(SOURCE, THERE)
    shelf.request(SOURCE, 2000.0)
    shelf.cancel_pending()
    assert (shelf.disk, shelf.next_event_at, shelf.take_overdue(3000.0)) == ([SOURCE], FOREVER, [])
    assert (shelf.find(SOURCE), shelf[SOURCE], shelf.ready()) == (THERE, THERE, [(SOURCE, THERE, None)])
    for _ in range(2):
        shelf.drop(SOURCE)
        assert (shelf.disk, shelf.find(SOURCE)) == ([], None)


def test_what_has_vanished_is_taken_anew_only_if_it_is_the_same() -> None:
    shelf = FakeSnapshots()
    shelf.request(SOURCE, 1010.0)
    shelf.on_lost(SOURCE)
    assert (shelf.disk, shelf.expected) == ([SOURCE], "")
    shelf.on_taken(SOURCE, THERE)
    shelf.on_lost(SOURCE)
    assert (shelf.find(SOURCE), shelf.ready()) == (None, [])
    for _ in range(2):
        shelf.disk.clear()
        shelf.request(SOURCE, 2000.0)
        assert (shelf.disk, shelf.expected, shelf.next_event_at) == ([SOURCE], THERE.sha256, 2000.0)
        shelf.on_failed(SOURCE)
    # Once nobody needs it, nothing is left or known of it.
    shelf.drop(SOURCE)
    assert shelf.disk == []
    shelf.request(SOURCE, 2000.0)
    assert shelf.expected == ""
    shelf.on_taken(SOURCE, THERE)
    shelf.on_lost(SOURCE)
    shelf.drop_all()
    assert shelf.disk == []


def test_what_takes_too_long_is_given_up() -> None:
    shelf = FakeSnapshots()
    shelf.request(SOURCE, 1010.0)
    shelf.request(OTHER, 1011.0)
    assert shelf.take_overdue(1009.9) == []
    assert (shelf.take_overdue(1010.0), shelf.disk, shelf.next_event_at) == ([SOURCE], [OTHER], 1011.0)
    # It came too late.
    shelf.on_taken(SOURCE, THERE)
    assert (shelf.find(SOURCE), shelf.ready()) == (None, [])


def test_nothing_is_left_of_what_is_being_taken_or_of_an_earlier_daemon() -> None:
    shelf = FakeSnapshots()
    shelf.request(SOURCE, FOREVER)
    shelf.disk.append(OTHER)
    shelf.restore(OTHER, THERE)
    assert shelf[OTHER] == THERE
    shelf.cancel_pending()
    assert shelf.disk == [OTHER]
    shelf.drop_all()
    assert shelf.disk == []


ENDS: dict[str, Callable[[FakeSnapshots], object]] = {
    "failed": lambda shelf: shelf.on_failed(SOURCE),
    "dropped": lambda shelf: shelf.drop(SOURCE),
    "overdue": lambda shelf: shelf.take_overdue(1010.0),
}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_what_was_learned_of_a_source_goes_with_its_snapshot(ends: Callable[[FakeSnapshots], object]) -> None:
    shelf = FakeSnapshots()
    shelf.set_selftest(SOURCE, CANARY)
    shelf.request(SOURCE, 1010.0)
    shelf.set_selftest(SOURCE, CANARY)
    ends(shelf)
    assert (shelf.find(SOURCE), shelf.next_event_at) == (None, FOREVER)
    # It can be wanted again.
    shelf.request(SOURCE, 1020.0)
    assert shelf.next_event_at == 1020.0
    shelf.on_taken(SOURCE, THERE)
    assert shelf.ready() == [(SOURCE, THERE, None)]
    shelf.set_selftest(SOURCE, CANARY)
    assert shelf.ready() == [(SOURCE, THERE, CANARY)]
