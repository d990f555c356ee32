"""The snapshots of a model's sources: each is taken once, and none is left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weightd.daemon.children.owner import Snapshot
from weightd.daemon.generations.plan import Canary, Source
from weightd.daemon.models.snapshots import Snapshots

SOURCE, OTHER = Source("/m.onnx", number=1), Source("/m.onnx", number=2)
THERE = Snapshot("/cache/1", "", "5" * 64, 100)
CANARY = Canary(cases=({"x": (1,)},))
FOREVER = float("inf")


class Shelf(Snapshots):
    """Snapshots, and the sources of which there is something on the disk, or is being made."""

    def __init__(self) -> None:
        self.disk: list[Source] = []
        self.expected = ""
        super().__init__(self.pin, self.disk.remove)

    def pin(self, source: Source, expected: str) -> None:
        self.disk.append(source)
        self.expected = expected


def test_a_source_is_taken_once_and_is_there_until_it_is_dropped() -> None:
    shelf = Shelf()
    shelf.want(SOURCE, 1010.0)
    shelf.want(SOURCE, 2000.0)
    assert (shelf.disk, shelf.next_event, shelf.find(SOURCE), list(shelf.ready())) == ([SOURCE], 1010.0, None, [])
    with pytest.raises(RuntimeError, match=r"/m\.onnx: a process was to be started before the snapshot was taken"):
        _ = shelf[SOURCE]
    shelf.taken(SOURCE, THERE)
    shelf.want(SOURCE, 2000.0)
    shelf.abandon()
    assert (shelf.disk, shelf.next_event, shelf.overdue(3000.0)) == ([SOURCE], FOREVER, [])
    assert (shelf.find(SOURCE), shelf[SOURCE], list(shelf.ready())) == (THERE, THERE, [(SOURCE, THERE)])
    for _ in range(2):
        shelf.drop(SOURCE)
        assert (shelf.disk, shelf.find(SOURCE)) == ([], None)


def test_what_has_vanished_is_taken_anew_only_if_it_is_the_same() -> None:
    shelf = Shelf()
    shelf.want(SOURCE, 1010.0)
    shelf.lost(SOURCE)
    assert (shelf.disk, shelf.expected) == ([SOURCE], "")
    shelf.taken(SOURCE, THERE)
    shelf.lost(SOURCE)
    assert (shelf.find(SOURCE), list(shelf.ready())) == (None, [])
    for _ in range(2):
        shelf.disk.clear()
        shelf.want(SOURCE, 2000.0)
        assert (shelf.disk, shelf.expected, shelf.next_event) == ([SOURCE], THERE.sha256, 2000.0)
        shelf.failed(SOURCE)
    # Once nobody needs it, nothing is left or known of it.
    shelf.drop(SOURCE)
    assert shelf.disk == []
    shelf.want(SOURCE, 2000.0)
    assert shelf.expected == ""
    shelf.taken(SOURCE, THERE)
    shelf.lost(SOURCE)
    shelf.drop_all()
    assert shelf.disk == []


def test_what_takes_too_long_is_given_up() -> None:
    shelf = Shelf()
    shelf.want(SOURCE, 1010.0)
    shelf.want(OTHER, 1011.0)
    assert shelf.overdue(1009.9) == []
    assert (shelf.overdue(1010.0), shelf.disk, shelf.next_event) == ([SOURCE], [OTHER], 1011.0)
    # It came too late.
    shelf.taken(SOURCE, THERE)
    assert (shelf.find(SOURCE), list(shelf.ready())) == (None, [])


def test_nothing_is_left_of_what_is_being_taken_or_of_an_earlier_daemon() -> None:
    shelf = Shelf()
    shelf.want(SOURCE, FOREVER)
    shelf.disk.append(OTHER)
    shelf.restore(OTHER, THERE)
    assert shelf[OTHER] == THERE
    shelf.abandon()
    assert shelf.disk == [OTHER]
    shelf.drop_all()
    assert shelf.disk == []


ENDS: dict[str, Callable[[Shelf], object]] = {
    "failed": lambda shelf: shelf.failed(SOURCE),
    "dropped": lambda shelf: shelf.drop(SOURCE),
    "overdue": lambda shelf: shelf.overdue(1010.0),
}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_what_was_learned_of_a_source_goes_with_its_snapshot(ends: Callable[[Shelf], object]) -> None:
    shelf = Shelf()
    shelf.learned(SOURCE, CANARY)
    assert shelf.canary(SOURCE) is None
    shelf.want(SOURCE, 1010.0)
    shelf.learned(SOURCE, CANARY)
    assert shelf.canary(SOURCE) == CANARY
    ends(shelf)
    assert (shelf.canary(SOURCE), shelf.find(SOURCE), shelf.next_event) == (None, None, FOREVER)
    # It can be wanted again.
    shelf.want(SOURCE, 1020.0)
    assert shelf.next_event == 1020.0
