"""A model whose clients offer room for outputs in their own memory: when that is theirs again."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.slots import MAX_QUICK_S
from weightd_daemon.scheduling.tensor_location import SharedRegion, TensorLocation, TensorLocations
from weightd_protocol.messages.regions import MappedInput, MappedOutput, MappedRegions
from weightd_protocol.messages.worker import CancelPredict, Predict, PredictCancelled, PredictFailed

from .fakehost import W1, W2, ModelHarness, request


def offering() -> Request:
    """A request whose input is in a region, which has room for its output, too."""
    asked = request()
    memory = SharedRegion(7, os.dup(0), 100, os.close)
    asked.locations = TensorLocations(
        {0: TensorLocation(memory, 8, len(asked.frames[0]))}, {0: TensorLocation(memory, 64, 32)}
    )
    asked.frames = ()
    return asked


def rooms(stage: ModelHarness) -> list[MappedRegions]:
    orders = [order for _, order in stage.host.told(Predict)]
    return [order.regions for order in orders if isinstance(order, Predict) and order.regions is not None]


def test_a_worker_is_told_where_and_given_the_memory() -> None:
    stage = ModelHarness().serving()
    asked = offering()
    stage.submit(asked)
    [(_, order)] = stage.host.told(Predict)
    assert isinstance(order, Predict)
    assert order.regions == MappedRegions((MappedInput(0, 7, 8),), (MappedOutput(0, 7, 64, 32),))
    assert (stage.host.frames, stage.host.memories) == ([], [*asked.locations.regions])


ENDS: dict[str, Callable[[ModelHarness, int], object]] = {
    "answers": lambda stage, number: stage.answers(W1, number),
    "fails": lambda stage, number: stage.says(W1, PredictFailed(number, "INTERNAL", "x", is_exiting=False)),
    "fails and leaves": lambda stage, number: stage.says(W1, PredictFailed(number, "INTERNAL", "x", is_exiting=True)),
    "dies": lambda stage, number: stage.dies(W1),
}


@pytest.mark.parametrize("end", ENDS)
def test_who_gives_up_is_told_when_nobody_writes_any_more(end: str) -> None:
    stage = ModelHarness().serving()
    asked, other = offering(), offering()
    number, _ = stage.submit(asked, other)
    stage.model.dispatcher.cancel(asked.client, asked.id, stage.now)
    assert (asked.may_still_write, stage.host.refused(), stage.host.releases) == (True, [(number, "CANCELLED")], [])
    ENDS[end](stage, number)
    assert stage.host.releases == [number]
    stage.answers(W2, other.number)
    assert (other.may_still_write, stage.host.releases, stage.model.dispatcher._sender.output_leases.leases) == (
        False,
        [number],
        {},
    )


def test_what_no_worker_was_given_is_nobodys_to_write() -> None:
    stage = ModelHarness(workers=1).serving()
    stage.submit(offering(), offering())
    waits = offering()
    stage.submit(waits)
    assert len(stage.host.predicts()) == 2
    stage.model.dispatcher.cancel(waits.client, waits.id, stage.now)
    assert not waits.may_still_write


@pytest.mark.parametrize("begins", [False, True])
def test_what_is_taken_back_may_be_written_until_the_worker_says_what_came_of_it(begins: bool) -> None:
    stage = ModelHarness(workers=1).serving()
    ahead = offering()
    stage.submit(offering(), ahead)
    stage.model.dispatcher.cancel(ahead.client, ahead.id, stage.now)
    assert (stage.host.told(CancelPredict), ahead.may_still_write, stage.host.releases) == (
        [(W1, CancelPredict(ahead.number))],
        True,
        [],
    )
    stage.answers(W1, ahead.number) if begins else stage.says(W1, PredictCancelled(ahead.number))
    assert stage.host.releases == [ahead.number]


def test_two_never_write_to_one_place() -> None:
    stage = ModelHarness().serving()
    long, other, ahead = offering(), offering(), offering()
    stage.submit(long, other, ahead)
    stage.answers(W2, other.number)
    assert [regions.outputs != () for regions in rooms(stage)] == [True, True, True]
    # What is behind one that runs long is given to another, and may have begun meanwhile.
    stage.passes(MAX_QUICK_S)
    assert rooms(stage)[3:] == [MappedRegions((MappedInput(0, 7, 8),), ())]
    stage.answers(W2, ahead.number)
    assert (ahead.may_still_write, stage.host.releases) == (True, [])
    stage.says(W1, PredictCancelled(ahead.number))
    assert stage.host.releases == [ahead.number]


def test_a_successor_does_not_write_where_a_worker_of_its_predecessor_still_may() -> None:
    old, new = ModelHarness(workers=1).serving(), ModelHarness(workers=1).serving()
    asked = offering()
    [number] = old.submit(asked)
    old.model.drain(old.now, timeout_s=60.0, is_replaced=True)
    old.model.dispatcher.processes.release(W1)
    new.model.adopt_requests(old.model, new.now)
    assert rooms(new) == [MappedRegions((MappedInput(0, 7, 8),), ())]
    new.answers(W1, number)
    assert (asked.may_still_write, old.host.releases) == (True, [])
    old.dies(W1)
    assert (old.host.releases, new.host.releases) == ([number], [])


def test_what_hangs_may_write_until_it_is_dead() -> None:
    stage = ModelHarness(predict_timeout=10.0).serving()
    asked = offering()
    [number] = stage.submit(asked)
    stage.passes(10.0)
    assert (stage.host.refused(), asked.may_still_write) == ([(number, "DEADLINE_EXCEEDED")], True)
    # Its own answer may cross the signal.
    assert stage.host.releases == []
    stage.dies(W1)
    assert stage.host.releases == [number]


def test_who_is_answered_by_another_than_the_one_that_is_ended_is_told_of_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = ModelHarness().serving()
    asked = offering()
    [number] = stage.submit(asked)
    # As a worker that says that it is broken: what it had waits again while it still lives.
    stage.model.dispatcher.processes.release(W1)
    stage.model.tick(stage.now)
    stage.model.dispatcher.dispatch(stage.now)
    stage.answers(W2, number)
    assert (stage.host.answers, asked.may_still_write, stage.host.releases) == ([number], True, [])
    stage.dies(W1)
    assert stage.host.releases == [number]
