"""The snapshots of a model's sources: each is taken once, and none is left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weightd_daemon.generations.spec import ModelSource, SelfTestSpec
from weightd_daemon.models.versions import Snapshots
from weightd_daemon.processes.events import Snapshot

SOURCE, OTHER = ModelSource("/m.onnx", number=1), ModelSource("/m.onnx", number=2)
THERE = Snapshot("/cache/1", "", "5" * 64, 100)
CANARY = SelfTestSpec(cases=({"x": (1,)},))
FOREVER = float("inf")


class Shelf(Snapshots):
    """Snapshots, and the sources of which there is something on the disk, or is being made."""

    def __init__(self) -> None:
        self.disk: list[ModelSource] = []
        self.expected = ""
        super().__init__(self.pin, self.disk.remove)

    def pin(self, source: ModelSource, expected: str) -> None:
        self.disk.append(source)
        self.expected = expected


def test_a_source_is_taken_once_and_is_there_until_it_is_dropped() -> None:
    shelf = Shelf()
    shelf.request(SOURCE, 1010.0)
    shelf.request(SOURCE, 2000.0)
    assert (shelf.disk, shelf.next_event_at, shelf.find(SOURCE), shelf.ready()) == (
        [SOURCE],
        1010.0,
        None,
        [],
    )
    with pytest.raises(RuntimeError, match=r"/m\.onnx: a process was to be started before the snapshot was taken"):
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
    shelf = Shelf()
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
    shelf = Shelf()
    shelf.request(SOURCE, 1010.0)
    shelf.request(OTHER, 1011.0)
    assert shelf.take_overdue(1009.9) == []
    assert (shelf.take_overdue(1010.0), shelf.disk, shelf.next_event_at) == ([SOURCE], [OTHER], 1011.0)
    # It came too late.
    shelf.on_taken(SOURCE, THERE)
    assert (shelf.find(SOURCE), shelf.ready()) == (None, [])


def test_nothing_is_left_of_what_is_being_taken_or_of_an_earlier_daemon() -> None:
    shelf = Shelf()
    shelf.request(SOURCE, FOREVER)
    shelf.disk.append(OTHER)
    shelf.restore(OTHER, THERE)
    assert shelf[OTHER] == THERE
    shelf.cancel_pending()
    assert shelf.disk == [OTHER]
    shelf.drop_all()
    assert shelf.disk == []


ENDS: dict[str, Callable[[Shelf], object]] = {
    "failed": lambda shelf: shelf.on_failed(SOURCE),
    "dropped": lambda shelf: shelf.drop(SOURCE),
    "overdue": lambda shelf: shelf.take_overdue(1010.0),
}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_what_was_learned_of_a_source_goes_with_its_snapshot(ends: Callable[[Shelf], object]) -> None:
    shelf = Shelf()
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
