from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from weightd_gateway.fair_runner import CHUNK_S, PIPELINE_PASSES, SLICE_S, FairRunner, ParseChunk


class World:
    """A loop whose time passes only in work."""

    def __init__(self) -> None:
        self.now = 0.0
        self.next: list[Callable[[], None]] = []
        self.done: list[str] = []
        self.turns = FairRunner(self.next.append, lambda: self.now)

    def want(self, key: str, seconds: float) -> None:
        def work() -> None:
            self.now += seconds
            self.done.append(key)

        self.turns.run(key, work)

    def one_pass(self) -> None:
        due, self.next[:] = [*self.next], []
        for each in due:
            each()


def test_work_is_done_at_once_while_the_pass_has_time() -> None:
    world = World()
    for _ in range(3):
        world.want("a", SLICE_S / 2)
    assert world.done == ["a"] * 2
    world.one_pass()
    assert world.done == ["a"] * 3


def test_a_peer_with_much_work_holds_up_another_by_one_piece() -> None:
    world = World()
    for _ in range(100):
        world.want("a", SLICE_S)
    world.want("b", SLICE_S)
    for _ in range(2):
        world.one_pass()
    assert world.done == ["a", "a", "b"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 3 * SLICE_S)), max_size=50))
def test_all_work_is_done_and_a_pass_ends_in_time(wanted: list[tuple[str, float]]) -> None:
    world = World()
    for key, seconds in wanted:
        world.want(key, seconds)
    while world.next:
        before = world.now
        world.one_pass()
        assert world.now - before <= SLICE_S + max(seconds for _, seconds in wanted) + 1e-9
    assert sorted(world.done) == sorted(key for key, _ in wanted)


def test_work_that_fails_leaves_the_rest() -> None:
    world = World()

    def fail() -> None:
        raise ValueError

    world.want("a", SLICE_S)
    world.turns.run("a", fail)
    world.want("a", 0.0)
    try:
        world.one_pass()
    except ValueError:
        world.one_pass()
    assert world.done == ["a", "a"]


def test_of_requests_that_were_sent_ahead_one_begins_in_some_passes() -> None:
    world = World()
    for key in "aaab":
        world.turns.pipelined.run(key, partial(world.done.append, key))
    begun = [len(world.done)]
    for _ in range(4 * PIPELINE_PASSES):
        world.one_pass()
        begun.append(len(world.done))
    assert begun == [1] * PIPELINE_PASSES + [2] * PIPELINE_PASSES + [3] * PIPELINE_PASSES + [4] * (PIPELINE_PASSES + 1)
    assert world.done == ["a", "a", "b", "a"]
    assert not world.next, "an idle loop has nothing to do"
    world.turns.pipelined.run("b", partial(world.done.append, "b"))
    assert world.done[-1] == "b"


def test_pieces_are_as_large_as_a_their_time_allows() -> None:
    piece = ParseChunk()
    for _ in range(20):
        piece.on_parsed(piece.size_bytes, 2 * CHUNK_S)
    assert piece.size_bytes == ParseChunk.MIN_BYTES
    piece.on_parsed(piece.size_bytes - 1, 0.0)
    assert piece.size_bytes == ParseChunk.MIN_BYTES, "a piece that was not full says nothing"
    for _ in range(20):
        piece.on_parsed(piece.size_bytes, 0.0)
    assert piece.size_bytes == ParseChunk.MAX_BYTES
