"""What a model serves and can go back to: the rest of its snapshots goes."""

from __future__ import annotations

import pytest

from weightd_common.safe_open import OPERATOR, Grant
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.models.versions import IdSequence, ModelVersions
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
