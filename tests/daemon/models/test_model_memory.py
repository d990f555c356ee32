"""Tests of output regions that clients provide: when the daemon reports that no worker writes to them any more."""

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


def region_request() -> Request:
    """Return a request with input and output in a shared memory region."""
    submitted = request()
    memory = SharedRegion(7, os.dup(0), 100, os.close)
    submitted.locations = TensorLocations(
        {0: TensorLocation(memory, 8, len(submitted.frames[0]))}, {0: TensorLocation(memory, 64, 32)}
    )
    submitted.frames = ()
    return submitted


def mapped_regions(harness: ModelHarness) -> list[MappedRegions]:
    orders = [order for _, order in harness.host.orders_of(Predict)]
    return [order.regions for order in orders if isinstance(order, Predict) and order.regions is not None]


def test_worker_receives_regions_and_descriptors() -> None:
    harness = ModelHarness().serving()
    submitted = region_request()
    harness.submit(submitted)
    [(_, order)] = harness.host.orders_of(Predict)
    assert isinstance(order, Predict)
    assert order.regions == MappedRegions((MappedInput(0, 7, 8),), (MappedOutput(0, 7, 64, 32),))
    assert (harness.host.frames, harness.host.memories) == ([], [*submitted.locations.regions])


ENDS: dict[str, Callable[[ModelHarness, int], object]] = {
    "answers": lambda harness, number: harness.answers(W1, number),
    "fails": lambda harness, number: harness.deliver(W1, PredictFailed(number, "INTERNAL", "x", is_exiting=False)),
    "fails and leaves": lambda harness, number: harness.deliver(
        W1, PredictFailed(number, "INTERNAL", "x", is_exiting=True)
    ),
    "dies": lambda harness, number: harness.exit_process(W1),
}


@pytest.mark.parametrize("end", ENDS)
def test_release_is_sent_after_cancelled_request_ends(end: str) -> None:
    harness = ModelHarness().serving()
    submitted, other = region_request(), region_request()
    number, _ = harness.submit(submitted, other)
    harness.model.dispatcher.cancel(submitted.client, submitted.id, harness.now)
    assert (submitted.may_still_write, harness.host.refused(), harness.host.releases) == (
        True,
        [(number, "CANCELLED")],
        [],
    )
    ENDS[end](harness, number)
    assert harness.host.releases == [number]
    harness.answers(W2, other.number)
    assert (other.may_still_write, harness.host.releases, harness.model.dispatcher._sender.output_leases.leases) == (
        False,
        [number],
        {},
    )


def test_undispatched_request_has_no_pending_writes() -> None:
    harness = ModelHarness(workers=1).serving()
    harness.submit(region_request(), region_request())
    queued = region_request()
    harness.submit(queued)
    assert len(harness.host.predicts()) == 2
    harness.model.dispatcher.cancel(queued.client, queued.id, harness.now)
    assert not queued.may_still_write


@pytest.mark.parametrize("begins", [False, True])
def test_cancelled_request_is_released_after_worker_confirms(begins: bool) -> None:
    harness = ModelHarness(workers=1).serving()
    ahead = region_request()
    harness.submit(region_request(), ahead)
    harness.model.dispatcher.cancel(ahead.client, ahead.id, harness.now)
    assert (harness.host.orders_of(CancelPredict), ahead.may_still_write, harness.host.releases) == (
        [(W1, CancelPredict(ahead.number))],
        True,
        [],
    )
    harness.answers(W1, ahead.number) if begins else harness.deliver(W1, PredictCancelled(ahead.number))
    assert harness.host.releases == [ahead.number]


def test_only_one_worker_writes_to_a_region() -> None:
    harness = ModelHarness().serving()
    long, other, ahead = region_request(), region_request(), region_request()
    harness.submit(long, other, ahead)
    harness.answers(W2, other.number)
    assert [regions.outputs != () for regions in mapped_regions(harness)] == [True, True, True]
    # The request behind the long one is moved to another worker, but the first worker may have started it.
    harness.advance(MAX_QUICK_S)
    assert mapped_regions(harness)[3:] == [MappedRegions((MappedInput(0, 7, 8),), ())]
    harness.answers(W2, ahead.number)
    assert (ahead.may_still_write, harness.host.releases) == (True, [])
    harness.deliver(W1, PredictCancelled(ahead.number))
    assert harness.host.releases == [ahead.number]


def test_successor_does_not_write_to_region_in_use() -> None:
    old, new = ModelHarness(workers=1).serving(), ModelHarness(workers=1).serving()
    submitted = region_request()
    [number] = old.submit(submitted)
    old.model.drain(old.now, timeout_s=60.0, is_replaced=True)
    old.model.dispatcher.processes.release(W1)
    new.model.adopt_requests(old.model, new.now)
    assert mapped_regions(new) == [MappedRegions((MappedInput(0, 7, 8),), ())]
    new.answers(W1, number)
    assert (submitted.may_still_write, old.host.releases) == (True, [])
    old.exit_process(W1)
    assert (old.host.releases, new.host.releases) == ([number], [])


def test_hung_request_is_released_after_worker_exits() -> None:
    harness = ModelHarness(predict_timeout=10.0).serving()
    submitted = region_request()
    [number] = harness.submit(submitted)
    harness.advance(10.0)
    assert (harness.host.refused(), submitted.may_still_write) == ([(number, "DEADLINE_EXCEEDED")], True)
    # The worker may still reply before the signal arrives.
    assert harness.host.releases == []
    harness.exit_process(W1)
    assert harness.host.releases == [number]


def test_request_moved_to_other_worker_is_released_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = ModelHarness().serving()
    submitted = region_request()
    [number] = harness.submit(submitted)
    # Simulate a worker that reports a failure: its requests are requeued while it still runs.
    harness.model.dispatcher.processes.release(W1)
    harness.model.tick(harness.now)
    harness.model.dispatcher.dispatch(harness.now)
    harness.answers(W2, number)
    assert (harness.host.answers, submitted.may_still_write, harness.host.releases) == ([number], True, [])
    harness.exit_process(W1)
    assert harness.host.releases == [number]
