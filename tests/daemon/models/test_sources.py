"""What a model serves and can go back to: the rest of its snapshots goes."""

from __future__ import annotations

from weightd.daemon.children.owner import Snapshot
from weightd.daemon.generations.plan import Source
from weightd.daemon.models.sources import Numbers, Sources


class Shelf:
    """The sources of a model, and the numbers of those that have a snapshot."""

    def __init__(self) -> None:
        self.there: set[int] = set()
        self.sources = Sources("/one.onnx", Numbers(), self.pin, lambda source: self.there.remove(source.number))
        self.snapshot(self.sources.current)

    def pin(self, source: Source) -> None:
        self.there.add(source.number)

    def snapshot(self, source: Source) -> Source:
        self.sources.snapshots.want(source, float("inf"))
        self.sources.snapshots.taken(source, Snapshot(f"/cache/{source.number}", "", "5" * 64, source.number))
        return source

    def updated(self, path: str = "", weights: str = "") -> Source:
        source = self.snapshot(self.sources.new(path, weights))
        self.sources.took_over(source)
        return source


def test_a_new_source_is_the_present_file_unless_it_names_one_and_has_a_number_of_its_own() -> None:
    sources = Shelf().sources
    assert sources.current == Source("/one.onnx", number=1)
    assert sources.new("", "/w.npz") == Source("/one.onnx", "/w.npz", 2)
    assert sources.new("/two.onnx", "") == Source("/two.onnx", "", 3)


def test_what_serves_and_what_served_before_are_kept_and_nothing_else() -> None:
    shelf = Shelf()
    first = shelf.sources.current
    second = shelf.updated("/two.onnx")
    assert (shelf.sources.current, shelf.sources.previous, shelf.there) == (second, first, {1, 2})
    third = shelf.updated("/three.onnx")
    assert (shelf.sources.current, shelf.sources.previous, shelf.there) == (third, second, {2, 3})
    # An update that came to nothing.
    shelf.sources.drop(shelf.snapshot(shelf.sources.new("/four.onnx", "")))
    for each in (second, third):
        shelf.sources.drop(each)
    assert (shelf.there, shelf.sources.undone) == ({2, 3}, None)


def test_who_goes_back_goes_once_and_is_remembered_until_the_next_update() -> None:
    shelf = Shelf()
    first, second = shelf.sources.current, shelf.updated("/two.onnx")
    shelf.sources.took_over(first)
    assert (shelf.sources.current, shelf.sources.previous, shelf.sources.undone) == (first, None, second)
    assert shelf.there == {1}
    shelf.updated("/three.onnx")
    assert (shelf.sources.previous, shelf.sources.undone, shelf.there) == (first, None, {1, 3})


def test_the_next_daemon_goes_on_with_both_and_with_those_alone_that_have_a_snapshot() -> None:
    shelf = Shelf()
    second = shelf.updated("/two.onnx", "/w.npz")
    records = shelf.sources.records()
    assert [each.number for each in records] == [2, 1]
    following = Shelf()
    by_number = following.sources.restore(2, 1, records)
    assert (following.sources.current, following.sources.previous) == (second, by_number[1])
    assert following.sources.records() == records
    assert following.sources.restore(2, 0, records[:1]) == {2: second}
    assert following.sources.previous is None
    shelf.sources.snapshots.drop(second)
    assert [each.number for each in shelf.sources.records()] == [1]


def test_numbers_go_on_where_they_were() -> None:
    numbers = Numbers((7, 3))
    assert (numbers.generation(), numbers.generation(), numbers.source()) == (8, 9, 4)
    assert numbers.made == (9, 4)
