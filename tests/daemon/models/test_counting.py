"""What is counted of a model, whatever becomes of its generations: durations, rows, and mishaps of its processes."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from weightd_daemon.config.batching import BatchingConfig, SplitConfig
from weightd_daemon.counters import ModelCounters
from weightd_daemon.models.batching import describe_batching
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_protocol import limits
from weightd_protocol.messages.worker import Attached, BatchMismatch, Ping, Pong, PredictFailed, ProcessFailed
from weightd_protocol.messages.worker_common import RowSupport

from .fakehost import ATTACHED, BUILT, CARD, HOLDER, W1, W2, W3, ModelHarness
from .test_rank_rendezvous import Cut
from .test_shared_process import P1, P2, Home

EQUAL = RowSupport(("x",), ("y",), is_equal=True)


def counted(meter: ModelCounters) -> tuple[int, int, int, int]:
    return meter.unexpected_exits, meter.restarts, meter.selftest_failures, meter.batch_mismatches


def test_how_long_requests_take_wait_and_run() -> None:
    stage = ModelHarness(workers=1)
    meter = stage.model.dispatcher.counters
    stage.serving()
    first, second = stage.some(2)
    stage.now += 0.3
    stage.answers(W1, first)
    stage.now += 0.2
    stage.answers(W1, second)
    assert [each.count for each in (meter.requests, meter.queue, meter.compute)] == [2, 2, 2]
    assert meter.requests.sum == pytest.approx(0.3 + 0.5)
    assert meter.queue.sum == 0.0
    assert meter.compute.sum == pytest.approx(0.5)
    # Of this model nobody knows them.
    assert meter.rows.count == 0
    # One that fails is no answer.
    [third] = stage.some(1)
    stage.says(W1, PredictFailed(third, "INTERNAL", "predict failed", is_exiting=False))
    assert (meter.requests.count, meter.queue.count, meter.compute.count) == (2, 3, 3)
    # Nobody watches the deadlines of those that have ended.
    assert stage.model.dispatcher._scheduler.deadlines.requests == {}


def test_what_waits_is_counted_when_its_turn_comes_and_jobs_by_their_rows() -> None:
    stage = ModelHarness(workers=1, batching=BatchingConfig(64))
    meter = stage.model.dispatcher.counters
    stage.pinned().loads(built=replace(BUILT, row_support=EQUAL))
    first, second, third = stage.some(3)
    # Once all that comes with them has been taken in.
    for _ in range(2):
        stage.model.tick(stage.now)
    stage.now += 0.5
    stage.answers(W1, first, second, third)
    assert meter.queue.count == 3
    # Of five rows each.
    assert (meter.rows.count, meter.rows.sum) == (1, 15)


def test_deaths_and_what_is_started_in_the_place_of_the_dead() -> None:
    stage = ModelHarness()
    meter = stage.model.dispatcher.counters
    stage.serving()
    assert counted(meter) == (0, 0, 0, 0)
    stage.dies(W1)
    stage.passes(1.0)
    assert W3 in stage.host.spawned
    assert counted(meter) == (1, 1, 0, 0)
    # One that goes by its own word is no death, and is replaced.
    [asked] = stage.some(1)
    stage.says(W2, PredictFailed(asked, "INTERNAL", "predict failed", is_exiting=True))
    stage.passes(1.0)
    assert counted(meter) == (1, 2, 0, 0)


def test_another_generation_is_no_restart() -> None:
    stage = ModelHarness()
    meter = stage.model.dispatcher.counters
    stage.serving().updated(2)
    assert counted(meter) == (0, 0, 0, 0)


def test_a_generation_that_follows_one_that_was_lost_is() -> None:
    stage = ModelHarness(CARD)
    meter = stage.model.dispatcher.counters
    stage.serving()
    stage.dies(HOLDER)
    for name in (W1, W2):
        stage.model.deployments.process_events.on_exit(name, ExitCause(0), stage.now)
    stage.passes(60.0)
    assert counted(meter) == (1, len(stage.of(2)), 0, 0) == (1, 3, 0, 0)


def test_a_worker_that_does_not_reproduce_the_canary() -> None:
    stage = ModelHarness()
    meter = stage.model.dispatcher.counters
    stage.pinned().builds()
    stage.says(W1, Attached("another", 0))
    assert counted(meter)[2] == 1
    stage.says(W2, ATTACHED)
    stage.passes(100.0)
    assert W2 in [name for name, _ in stage.host.told(Ping)]
    stage.says(W2, Pong(selftest_digest="another"))
    assert counted(meter)[2] == 2


def test_a_generation_whose_rows_were_found_to_differ_is_counted_once() -> None:
    stage = ModelHarness(batching=BatchingConfig(8))
    meter = stage.model.dispatcher.counters
    stage.pinned().loads(built=replace(BUILT, row_support=EQUAL))
    for name in (W1, W2):
        stage.says(name, BatchMismatch("they differ"))
    assert counted(meter)[3] == 1


def test_whose_rows_were_found_to_differ_share_no_job_until_there_is_another_generation() -> None:
    stage = ModelHarness(batching=BatchingConfig(8), split=SplitConfig(4))
    meter, names = stage.model.dispatcher.counters, stage.model.dispatcher.principal_names
    stage.pinned().loads(built=replace(BUILT, row_support=EQUAL))
    a, b = names.number_of("tenant a"), names.number_of("tenant b")

    def apart(name: str) -> frozenset[int]:
        seat = stage.model.dispatcher._scheduler.slots.slot_of(name)
        assert seat is not None
        assert (seat.policy.max_rows, seat.policy.is_exact) == (8, True)
        return seat.policy.unmerged_principals

    # Each of two workers finds it out.
    for name in (W1, W2):
        stage.says(name, BatchMismatch("output y differs", (a,)))
    assert (apart(W1), apart(W2)) == (frozenset({a}), frozenset({a}))
    assert counted(meter)[3] == 1
    stage.says(W2, BatchMismatch("output z differs", (a, b)))
    assert apart(W1) == {a, b}
    assert counted(meter)[3] == 2
    [generation] = stage.model.generations
    assert describe_batching(stage.model.config, generation).endswith(
        "tested bit-equal, requests of tenant a, tenant b are neither batched nor split: "
        "output y differs, output z differs"
    )
    # More are not remembered: then it is nobody's.
    stage.says(W1, BatchMismatch("many differ", tuple(range(limits.MAX_TENANTS))))
    seat = stage.model.dispatcher._scheduler.slots.slot_of(W1)
    assert seat is not None
    assert (seat.policy.max_rows, seat.policy.is_exact) == (1, False)


def test_ranks_are_lost_together_and_started_together() -> None:
    stage = Cut()
    meter = stage.model.dispatcher.counters
    stage.serving()
    ranks = stage.of(1)
    assert counted(meter) == (0, 0, 0, 0)
    stage.model.deployments.process_events.on_exit(ranks[-1], ExitCause(-signal.SIGSEGV), stage.now)
    for name in ranks[:-1]:
        stage.model.deployments.process_events.on_exit(name, ExitCause(-signal.SIGKILL), stage.now)
    stage.now += 60.0
    stage.model.tick(stage.now)
    stage.pinned()
    assert len(stage.of(2)) == len(ranks)
    assert counted(meter) == (1, len(ranks), 0, 0)


def test_a_process_that_serves_several_models_is_lost_to_each() -> None:
    home = Home().serving()
    meters = [model.dispatcher.counters for model in home.models.values()]
    home.says(P1, ProcessFailed("it cannot go on"))
    home.ends(P1, ExitCause(1)).later()
    assert P2 in home.host.spawned
    assert [counted(meter) for meter in meters] == 2 * [(1, 1, 0, 0)]
