"""Tests of the counters of a model across its generations: latencies, rows, exits and restarts."""

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
from .test_rank_rendezvous import RankModelHarness
from .test_shared_process import P1, P2, GroupHarness

EQUAL = RowSupport(("x",), ("y",), is_equal=True)


def counted(counters: ModelCounters) -> tuple[int, int, int, int]:
    return counters.unexpected_exits, counters.restarts, counters.selftest_failures, counters.batch_mismatches


def test_counts_latency_queue_and_compute_time() -> None:
    harness = ModelHarness(workers=1)
    counters = harness.model.dispatcher.counters
    harness.serving()
    first, second = harness.submit_new(2)
    harness.now += 0.3
    harness.answers(W1, first)
    harness.now += 0.2
    harness.answers(W1, second)
    assert [each.count for each in (counters.requests, counters.queue, counters.compute)] == [2, 2, 2]
    assert counters.requests.sum == pytest.approx(0.3 + 0.5)
    assert counters.queue.sum == 0.0
    assert counters.compute.sum == pytest.approx(0.5)
    # The model does not support batching, so it counts no rows.
    assert counters.rows.count == 0
    # A failed request has no latency.
    [third] = harness.submit_new(1)
    harness.deliver(W1, PredictFailed(third, "INTERNAL", "predict failed", is_exiting=False))
    assert (counters.requests.count, counters.queue.count, counters.compute.count) == (2, 3, 3)
    # Completed requests have no pending deadline.
    assert harness.model.dispatcher._scheduler.deadlines.requests == {}


def test_counts_queue_time_and_rows_of_batches() -> None:
    harness = ModelHarness(workers=1, batching=BatchingConfig(64))
    counters = harness.model.dispatcher.counters
    harness.snapshot_taken().loads(built=replace(BUILT, row_support=EQUAL))
    first, second, third = harness.submit_new(3)
    # The dispatcher forms the batch after it has read all available requests.
    for _ in range(2):
        harness.model.tick(harness.now)
    harness.now += 0.5
    harness.answers(W1, first, second, third)
    assert counters.queue.count == 3
    # three requests of five rows each
    assert (counters.rows.count, counters.rows.sum) == (1, 15)


def test_counts_unexpected_exits_and_restarts() -> None:
    harness = ModelHarness()
    counters = harness.model.dispatcher.counters
    harness.serving()
    assert counted(counters) == (0, 0, 0, 0)
    harness.exit_process(W1)
    harness.advance(1.0)
    assert W3 in harness.host.spawned
    assert counted(counters) == (1, 1, 0, 0)
    # A worker that leaves after a failed predict is replaced, but is not an unexpected exit.
    [submitted] = harness.submit_new(1)
    harness.deliver(W2, PredictFailed(submitted, "INTERNAL", "predict failed", is_exiting=True))
    harness.advance(1.0)
    assert counted(counters) == (1, 2, 0, 0)


def test_update_is_not_a_restart() -> None:
    harness = ModelHarness()
    counters = harness.model.dispatcher.counters
    harness.serving().updated(2)
    assert counted(counters) == (0, 0, 0, 0)


def test_generation_after_loss_counts_as_restart() -> None:
    harness = ModelHarness(CARD)
    counters = harness.model.dispatcher.counters
    harness.serving()
    harness.exit_process(HOLDER)
    for name in (W1, W2):
        harness.model.deployments.process_events.on_exit(name, ExitCause(0), harness.now)
    harness.advance(60.0)
    assert counted(counters) == (1, len(harness.processes_of(2)), 0, 0) == (1, 3, 0, 0)


def test_counts_selftest_failures() -> None:
    harness = ModelHarness()
    counters = harness.model.dispatcher.counters
    harness.snapshot_taken().builds()
    harness.deliver(W1, Attached("another", 0))
    assert counted(counters)[2] == 1
    harness.deliver(W2, ATTACHED)
    harness.advance(100.0)
    assert W2 in [name for name, _ in harness.host.orders_of(Ping)]
    harness.deliver(W2, Pong(selftest_digest="another"))
    assert counted(counters)[2] == 2


def test_counts_batch_mismatch_once_per_generation() -> None:
    harness = ModelHarness(batching=BatchingConfig(8))
    counters = harness.model.dispatcher.counters
    harness.snapshot_taken().loads(built=replace(BUILT, row_support=EQUAL))
    for name in (W1, W2):
        harness.deliver(name, BatchMismatch("they differ"))
    assert counted(counters)[3] == 1


def test_batch_mismatch_disables_batching_of_named_principals() -> None:
    harness = ModelHarness(batching=BatchingConfig(8), split=SplitConfig(4))
    counters, names = harness.model.dispatcher.counters, harness.model.dispatcher.principal_names
    harness.snapshot_taken().loads(built=replace(BUILT, row_support=EQUAL))
    a, b = names.number_of("tenant a"), names.number_of("tenant b")

    def unmerged_principals(name: str) -> frozenset[int]:
        slot = harness.model.dispatcher._scheduler.slots.slot_of(name)
        assert slot is not None
        assert (slot.policy.max_rows, slot.policy.is_exact) == (8, True)
        return slot.policy.unmerged_principals

    # Both workers report the same mismatch.
    for name in (W1, W2):
        harness.deliver(name, BatchMismatch("output y differs", (a,)))
    assert (unmerged_principals(W1), unmerged_principals(W2)) == (frozenset({a}), frozenset({a}))
    assert counted(counters)[3] == 1
    harness.deliver(W2, BatchMismatch("output z differs", (a, b)))
    assert unmerged_principals(W1) == {a, b}
    assert counted(counters)[3] == 2
    [generation] = harness.model.generations
    assert describe_batching(harness.model.config, generation).endswith(
        "tested bit-equal, requests of tenant a, tenant b are neither batched nor split: "
        "output y differs, output z differs"
    )
    # With too many principals, the model disables batching for all of them.
    harness.deliver(W1, BatchMismatch("many differ", tuple(range(limits.MAX_TENANTS))))
    slot = harness.model.dispatcher._scheduler.slots.slot_of(W1)
    assert slot is not None
    assert (slot.policy.max_rows, slot.policy.is_exact) == (1, False)


def test_loss_of_rank_group_counts_once() -> None:
    harness = RankModelHarness()
    counters = harness.model.dispatcher.counters
    harness.serving()
    ranks = harness.processes_of(1)
    assert counted(counters) == (0, 0, 0, 0)
    harness.model.deployments.process_events.on_exit(ranks[-1], ExitCause(-signal.SIGSEGV), harness.now)
    for name in ranks[:-1]:
        harness.model.deployments.process_events.on_exit(name, ExitCause(-signal.SIGKILL), harness.now)
    harness.now += 60.0
    harness.model.tick(harness.now)
    harness.snapshot_taken()
    assert len(harness.processes_of(2)) == len(ranks)
    assert counted(counters) == (1, len(ranks), 0, 0)


def test_loss_of_shared_process_counts_for_each_model() -> None:
    group = GroupHarness().serving()
    all_counters = [model.dispatcher.counters for model in group.models.values()]
    group.deliver(P1, ProcessFailed("it cannot go on"))
    group.exit_process(P1, ExitCause(1)).advance()
    assert P2 in group.host.spawned
    assert [counted(counters) for counters in all_counters] == 2 * [(1, 1, 0, 0)]
