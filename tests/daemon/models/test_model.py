"""Tests of a model: loading, requests, updates, rollback and drain."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
from collections.abc import Callable
from typing import Any

import pytest

from weightd_daemon.config.batching import BatchingConfig, SplitConfig
from weightd_daemon.generations.restarts import MAX_FAILED_STARTS
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.generations.states import GenerationState
from weightd_daemon.models.batching import describe_batching
from weightd_daemon.models.placement import DeviceBudget, ResourceRequest
from weightd_daemon.platform.exit_cause import ExitCause, MissingFile
from weightd_daemon.scheduling.signature import MetadataRequest
from weightd_protocol.errors import (
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    RequestError,
    ResourceExhausted,
    Unavailable,
)
from weightd_protocol.messages.control import ModelMetadataResponse, UpdateResponse
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSignature, TensorSpec
from weightd_protocol.messages.worker import (
    Attach,
    Build,
    Built,
    Hello,
    PredictFailed,
    PredictResult,
    ProcessFailed,
    Stop,
)
from weightd_protocol.messages.worker_common import DeviceMemory, RowSupport
from weightd_protocol.version import VERSION

from .fakehost import ATTACHED, BAD, BUILT, CARD, CPU, HOLDER, OUT, SHA, W1, W2, W3, ModelHarness, X, Y, request

# --- loading --------------------------------------------------------------------------------------------------------


def test_loads_its_generation() -> None:
    harness = ModelHarness()
    host = harness.host
    assert (len(host.requested_snapshots), host.spawned) == (1, [])
    harness.snapshot_taken().builds()
    assert host.spawned == [HOLDER, W1, W2]
    assert [type(order) for _, order in host.orders] == [Build, Attach]
    assert host.orders[-1] == (W1, Attach("/store", ({"x": (2,)},), selftest_digest="digest"))
    harness.deliver(W1, ATTACHED)
    assert (
        harness.model.readiness.is_serving,
        harness.model.readiness.is_complete,
        harness.model.readiness.main_generation.is_complete,
    ) == (
        True,
        False,
        False,
    )
    harness.deliver(W2, ATTACHED)
    assert (harness.model.readiness.is_complete, harness.model.readiness.main_generation.is_complete) == (True, True)


@pytest.mark.parametrize("copies", ["one", "each"])
def test_core_sets_share_one_copy_or_have_one_each(copies: str) -> None:
    harness = ModelHarness(workers=1, copies=copies, devices=("cpu:0", "cpu:1"), cores=("0-3", "4,6")).snapshot_taken()
    host = harness.host
    if copies == "one":
        assert host.placements == {HOLDER: ("cpu", "0-3,4,6"), W1: ("cpu:0", "0-3"), W2: ("cpu:1", "4,6")}
        assert [each.device for each in harness.model.generations] == ["cpu"]
    else:
        where = {"digits.1": ("cpu:0", "0-3"), "digits.2": ("cpu:1", "4,6")}
        assert host.placements == {
            f"{label}.{name}": place for label, place in where.items() for name in ("holder", "w1")
        }


EXACT, INEXACT = BatchingConfig(8), BatchingConfig(8, exact=False)


@pytest.mark.parametrize(
    ("before", "changed", "max_rows"),
    [
        (EXACT, {"batching": BatchingConfig(4)}, 4),
        (EXACT, {"batching": INEXACT}, 8),
        (EXACT, {"batching": BatchingConfig()}, 1),
        (EXACT, {"split": SplitConfig(4)}, 8),
        (EXACT, {"default_priority": 1}, 8),
        (EXACT, {"batching": BatchingConfig(9)}, None),
        (EXACT, {"split": SplitConfig(5)}, None),
        (EXACT, {"threads": 2}, None),
        (EXACT, {"priority_levels": 2}, None),
        (EXACT, {"batching": BatchingConfig(8, sizes=(8,))}, None),
        (INEXACT, {"batching": EXACT}, None),
        (BatchingConfig(), {"batching": INEXACT}, None),
    ],
)
def test_reconfigures_batching_as_far_as_tested(
    before: BatchingConfig, changed: dict[str, Any], max_rows: int | None
) -> None:
    rows = RowSupport(("x",), ("y",), is_equal=True)
    harness = (
        ModelHarness(workers=1, batching=before).snapshot_taken().loads(1, dataclasses.replace(BUILT, row_support=rows))
    )
    config = dataclasses.replace(harness.model.config, **changed)
    assert harness.model.reconfigure(config) == (max_rows is not None)
    slot = harness.model.dispatcher._scheduler.slots.slot_of(W1)
    assert slot is not None
    assert slot.policy.max_rows == (before.max_rows if max_rows is None else max_rows)
    if max_rows is not None:
        assert (harness.model.config, slot.policy.max_split_rows) == (config, config.split.part_rows)
        # The tested limit is still known.
        assert harness.model.reconfigure(dataclasses.replace(config, batching=before))


def test_input_without_rows_allows_split_but_no_batching() -> None:
    harness = ModelHarness(workers=1, batching=BatchingConfig(8), split=SplitConfig(4)).snapshot_taken()
    built = dataclasses.replace(BUILT, inputs=(*BUILT.inputs, TensorSignature("s", "FP32", (3,))))
    harness.loads(1, dataclasses.replace(built, row_support=RowSupport(("x",), ("y",), is_equal=True)))
    slot = harness.model.dispatcher._scheduler.slots.slot_of(W1)
    assert slot is not None
    assert (slot.policy.max_rows, slot.policy.max_split_rows) == (1, 4)
    [generation] = harness.model.generations
    assert describe_batching(harness.model.config, generation) == (
        "requests of more than 4 rows are split, tested bit-equal, no requests are batched: input s has no rows"
    )


@pytest.mark.parametrize(("exact", "is_split"), [(True, [True, False]), (False, [True, True])])
def test_exact_split_needs_tested_dimensions(exact: bool, is_split: list[bool]) -> None:
    harness = ModelHarness(workers=1, split=SplitConfig(4, exact=exact)).snapshot_taken()
    long = dataclasses.replace(BUILT.inputs[0], shape=(-1, -1))
    built = dataclasses.replace(BUILT, inputs=(long,), selftest_cases=({long.name: (1, 16)},))
    harness.loads(1, dataclasses.replace(built, row_support=RowSupport((long.name,), ("y",), is_equal=True)))
    slot = harness.model.dispatcher._scheduler.slots.slot_of(W1)
    assert slot is not None
    submitted = [RequestDescription("m", (TensorSpec(long.name, long.datatype, (8, width)),)) for width in (16, 37)]
    assert [
        slot.policy.should_split(batch_key, "")
        for each in submitted
        if (batch_key := slot.policy.batch_key(each)) is not None
    ] == is_split
    [generation] = harness.model.generations
    assert ("of the self-test's dimensions" in describe_batching(harness.model.config, generation)) == exact


def test_new_split_limits_apply_at_once() -> None:
    harness = ModelHarness(workers=1, split=SplitConfig(5)).snapshot_taken()
    harness.loads(1, dataclasses.replace(BUILT, row_support=RowSupport(("x",), ("y",), is_equal=True)))
    for max_rows in (8, 4, 5):  # the request has 5 rows
        config = dataclasses.replace(harness.model.config, split=SplitConfig(4, max_rows=max_rows))
        assert harness.model.reconfigure(config)
        with pytest.raises(InvalidArgument, match=r"split\.max_rows") if max_rows < 5 else contextlib.nullcontext():
            harness.submit_new(1)


@pytest.mark.parametrize(
    ("sharing", "device", "falls_back"),
    [("on", "ascend:0", False), ("auto", "ascend:0", True), ("off", "ascend:0", False), ("auto", "cpu:1", False)],
)
def test_only_auto_on_card_falls_back_to_private_copies(sharing: str, device: str, falls_back: bool) -> None:
    harness = ModelHarness(CARD, devices=(device,), sharing=sharing).snapshot_taken()
    assert harness.model.readiness.main_generation.spec.is_sharing == (sharing != "off")
    harness.deliver(HOLDER, ProcessFailed("it cannot share"))
    assert [each.spec.is_sharing for each in harness.model.generations if each.label != "digits.1"] == [
        False
    ] * falls_back
    assert harness.model.readiness.has_failed != falls_back


def test_wakes_when_memory_of_other_model_is_released() -> None:
    harness = ModelHarness(CARD, devices=("ascend:0",))
    device = next(iter(harness.model.deployments)).placement
    assert isinstance(device, DeviceBudget)
    device.max_processes, device.leaving = 3, {"other.1"}
    device.reserved["other.1"] = ResourceRequest(
        weight_bytes=100, copy_count=1, worker_count=2, process_count=3, process_bytes=10
    )
    harness.snapshot_taken()
    assert harness.host.spawned == []
    device.release("other.1")
    assert harness.model.timer.due_at <= harness.now
    harness.advance(0.0)
    assert harness.host.spawned == [HOLDER, W1, W2]


def test_load_timeouts_expire_exactly_when_due() -> None:
    slow = ModelHarness()
    for _ in range(2):
        assert slow.model.timer.due_at == slow.now + slow.model.config.load_timeout
        slow.now += 1.0
        slow.snapshot_taken()
    slow.advance(slow.model.config.load_timeout)
    assert (slow.host.aborted, slow.model.timer.due_at) == ([HOLDER], slow.now + 2.0)
    harness = ModelHarness()
    harness.advance(harness.model.timer.due_at - harness.now)
    assert harness.host.removed_snapshots == harness.host.requested_snapshots
    # The late result of the snapshot process is ignored.
    harness.model.on_snapshot_failed(harness.host.requested_snapshots[0], "killed by SIGKILL", harness.now)
    assert (harness.model.readiness.has_failed, harness.model.readiness.main_generation.cause) == (
        True,
        "no snapshot within load_timeout (600 s)",
    )


def test_requests_during_load_are_validated_after_build() -> None:
    harness = ModelHarness()
    good, bad, again = harness.submit(request(), request(BAD), request())
    harness.snapshot_taken().builds()
    [(number, code, text)] = harness.host.refusals
    assert (number, code, harness.model.dispatcher._replies.failed_count) == (bad, "INVALID_ARGUMENT", 1)
    assert "x is missing" in text
    assert harness.host.predicts() == []
    harness.deliver(W1, ATTACHED)
    assert harness.host.predicts() == [(W1, good), (W1, again)]
    with pytest.raises(InvalidArgument, match="x is missing"):
        harness.submit(request(BAD))


def test_metadata_requests_wait_for_build_within_limit() -> None:
    harness = ModelHarness(max_queue=2)
    harness.model.dispatcher.metadata.request(MetadataRequest(b"a", "1"))
    harness.model.dispatcher.metadata.request(MetadataRequest(b"b", "2"))
    with pytest.raises(ResourceExhausted, match="2 metadata requests are already queued"):
        harness.model.dispatcher.metadata.request(MetadataRequest(b"c", "3"))
    harness.submit_new(2)
    with pytest.raises(ResourceExhausted):
        harness.submit_new(1)
    assert harness.host.metadata == []
    harness.snapshot_taken().builds()
    harness.model.dispatcher.metadata.request(MetadataRequest(b"c", "3"))
    assert [client for client, _ in harness.host.metadata] == [b"a", b"b", b"c"]
    reply = ModelMetadataResponse("1", "digits", "onnxruntime", (X,), (Y,), example=((2,),))
    assert harness.host.metadata[0][1] == reply


@pytest.mark.parametrize(
    ("batching", "equal", "exact"),
    [
        (BatchingConfig(8), True, True),
        (BatchingConfig(8), False, None),  # no batches: each request runs alone
        (BatchingConfig(8, exact=False), False, False),
        (BatchingConfig(), None, None),
    ],
)
def test_metadata_reports_whether_results_are_exact(
    batching: BatchingConfig, equal: bool | None, exact: bool | None
) -> None:
    rows = None if equal is None else RowSupport(("x",), ("y",), is_equal=equal)
    harness = (
        ModelHarness(workers=1, batching=batching)
        .snapshot_taken()
        .loads(1, dataclasses.replace(BUILT, row_support=rows))
    )
    harness.model.dispatcher.metadata.request(MetadataRequest(b"a", "1"))
    assert [reply.exact for _, reply in harness.host.metadata] == [exact]


PRIVATE = dataclasses.replace(BUILT, handle="", shared_bytes=0)


def reloaded(built: Built = PRIVATE, **config: Any) -> ModelHarness:
    """Load a model whose holder has sent `built`, unload it and load it again."""
    harness = ModelHarness(workers=1, **config).snapshot_taken().builds(built=built)
    if not built.handle:
        harness.exit_process(HOLDER, 0)
    harness.deliver(W1, ATTACHED)
    harness.model.loading.unload(harness.now)
    harness.exit_all(1)
    harness.host.orders.clear()
    harness.model.loading.load(harness.now)
    return harness


def test_second_load_of_private_weights_has_no_holder() -> None:
    harness = reloaded()
    assert harness.processes_of(2) == ["digits.2.w1"]
    harness.deliver("digits.2.w1", Hello("1", SHA, {"weightd": VERSION}, CPU))
    assert harness.host.orders == [("digits.2.w1", Attach("", ({"x": (2,)},), selftest_digest="digest"))]
    harness.deliver("digits.2.w1", ATTACHED)
    assert harness.model.readiness.is_complete
    assert harness.submit_new(1) == [request_number for _, request_number in harness.host.predicts()]


@pytest.mark.parametrize(
    ("built", "config"),
    [
        (BUILT, {}),
        (dataclasses.replace(PRIVATE, has_sharing_failed=True), {}),
        (dataclasses.replace(PRIVATE, device=DeviceMemory(2, 1)), {}),
        (PRIVATE, {"selftest_tolerance": 0.1}),
    ],
    ids=["shared", "not shared after an error", "card", "tolerance"],
)
def test_second_load_has_holder(built: Built, config: dict[str, Any]) -> None:
    assert reloaded(built, **config).processes_of(2)[0] == "digits.2.holder"


def test_load_without_holder_that_fails_is_repeated_with_holder() -> None:
    harness = reloaded()
    for number in range(1, MAX_FAILED_STARTS + 1):
        harness.now += 60.0
        harness.model.tick(harness.now)
        worker = f"digits.2.w{number}"
        harness.deliver(worker, Hello("1", SHA, {"weightd": VERSION}, CPU))
        harness.deliver(worker, dataclasses.replace(ATTACHED, selftest_digest="wrong"))
        harness.exit_process(worker, 0)
    assert harness.processes_of(3)[0] == "digits.3.holder"
    assert not harness.model.readiness.has_failed


# --- serving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other_process", [HOLDER, W2, "other_process"])
def test_result_is_sent_once_and_counted(other_process: str) -> None:
    harness = ModelHarness().serving()
    submitted = request()
    [number] = harness.submit(submitted)
    assert (harness.host.predicts(), harness.host.frames) == ([(W1, number)], [*submitted.frames])
    harness.now += 0.25
    harness.answers(other_process, number).deliver(
        other_process, PredictFailed(number, "INTERNAL", "x", is_exiting=False)
    )
    harness.deliver(W1, PredictResult(number, ResponseDescription("m", (OUT,))), (b"answer",)).answers(W1, number)
    assert (harness.host.answers, harness.host.response_contents, harness.host.refused()) == (
        [number],
        [((OUT,), (b"answer",))],
        [],
    )
    dispatcher = harness.model.dispatcher
    assert (
        dispatcher._replies.latencies.count,
        dispatcher.results.latencies_by_process[W1].count,
        dispatcher.results.latencies_by_process[W2].count,
    ) == (1, 1, 0)
    assert (dispatcher._replies.latencies.percentile_us(50), dispatcher._replies.failed_count) == (250_000, 0)


def test_failed_predict_affects_only_its_request() -> None:
    harness = ModelHarness().serving()
    one, two, three, four, five, six = harness.submit_new(6)
    assert harness.host.predicts() == [(W1, one), (W2, two), (W1, three), (W2, four)]
    harness.deliver(W1, PredictFailed(one, "INVALID_ARGUMENT", "out of range", is_exiting=False))
    assert harness.host.predicts() == [(W1, five)]
    harness.deliver(W1, PredictFailed(three, "INTERNAL", "spoilt", is_exiting=True))
    assert harness.host.refusals == [(one, "INVALID_ARGUMENT", "out of range"), (three, "INTERNAL", "spoilt")]
    assert harness.host.orders_of(Stop) == [(W1, Stop())]
    assert harness.host.spawned[-1] == W3
    harness.answers(W2, two, four)
    # The requests of the leaving worker are at the head of the queue.
    assert harness.host.predicts() == [(W2, five), (W2, six)]
    harness.model.deployments.process_events.on_exit(W1, ExitCause(75), harness.now)
    assert (len(harness.host.refusals), harness.model.dispatcher._replies.failed_count) == (2, 2)
    assert W1 not in harness.model.dispatcher.results.latencies_by_process


def test_ready_while_a_worker_has_answered_recently() -> None:
    harness = ModelHarness(workers=1)
    assert harness.model.readiness.unready_reason(harness.now) == "digits: snapshotting"
    harness.serving()
    assert harness.model.readiness.unready_reason(harness.now + 30.0) == ""
    assert (
        harness.model.readiness.unready_reason(harness.now + 30.1)
        == "digits: no worker has answered for 30.1 s, the watchdog period is 30 s"
    )
    [number] = harness.submit_new(1)
    harness.now += 20.0
    harness.answers(W1, number)
    assert harness.model.readiness.unready_reason(harness.now + 30.0) == ""
    harness.exit_process(W1)
    assert (
        harness.model.readiness.unready_reason(harness.now) == "digits: all workers have exited and are being replaced"
    )


def test_deadline_error_without_worker_has_reason() -> None:
    harness = ModelHarness(CARD, workers=1, devices=("ascend:0",))
    numbers = harness.submit(request(deadline=1005.0))
    harness.advance(4.0)
    assert harness.host.refusals == []
    harness.advance(1.0)
    harness.serving()
    numbers += harness.submit(request(deadline=1010.0))
    harness.advance(5.0)
    harness.exit_process(HOLDER)
    numbers += harness.submit(request(deadline=1015.0))
    harness.exit_all(1).advance(5.0)
    spawned = (
        f"spawned, 0/2 processes up, {HOLDER}: killed by SIGSEGV; the shared weights are invalid without the holder"
    )
    assert harness.host.refusals == [
        (numbers[0], "UNAVAILABLE", "digits has no worker: snapshotting, not ready yet"),
        (numbers[1], "DEADLINE_EXCEEDED", "was running at its deadline"),
        (numbers[2], "UNAVAILABLE", f"digits has no worker: {spawned}"),
    ]


# --- update ---------------------------------------------------------------------------------------------------------


def test_complete_update_takes_over_and_is_acknowledged_once() -> None:
    harness = ModelHarness().serving().update("", weights="/w.npz")
    host = harness.host
    assert host.requested_snapshots[1:] == [ModelSource("/models/digits.onnx", "/w.npz", 2)]
    with pytest.raises(Unavailable, match="digits is already being updated"):
        harness.update()
    harness.snapshot_taken().builds(2).deliver("digits.2.w1", ATTACHED)
    first, second = harness.submit_new(2)
    assert (host.predicts(), host.updated) == ([(W1, first), (W2, second)], [])
    harness.deliver("digits.2.w2", ATTACHED)
    path = "/models/digits.onnx"
    assert host.updated == [UpdateResponse("u", "digits", (2,), path, "/w.npz", configured_path=path)]
    assert harness.model.versions.current == host.requested_snapshots[1]
    # New requests go to the new generation; the old workers finish theirs.
    [third] = harness.submit_new(1)
    assert host.predicts() == [("digits.2.w1", third)]
    harness.answers(W1, first).exit_all(1).deliver("digits.2.w1", ATTACHED)
    assert (host.answers, len(host.updated), host.errors, list(host.seals)) == ([first], 1, [], ["digits.2"])


def test_update_changes_accepted_batch_sizes() -> None:
    harness = ModelHarness(workers=1).snapshot_taken().loads(1, dataclasses.replace(BUILT, gears=((2,),))).update()
    with pytest.raises(InvalidArgument, match=r"expected 2, got 5"):
        harness.submit_new(1)
    harness.snapshot_taken().loads(2, dataclasses.replace(BUILT, gears=((2,), (5,))))
    [number] = harness.submit_new(1)
    assert harness.host.predicts() == [("digits.2.w1", number)]


def fail_all_workers(harness: ModelHarness) -> None:
    harness.snapshot_taken().builds(2).deliver(HOLDER_2, ProcessFailed("gone"))
    for number in (1, 2, 3):
        harness.exit_process(f"digits.2.w{number}").advance(1.0)


OTHER = Built("/store", (Y,), (Y,), ({"x": (2,)},), "digest", 4096)
INCOMPATIBLE = (
    "the new model is not compatible with the serving one: inputs: expected x FP32 [-1, 2], got y FP32 [-1, 3]"
)
PRECONDITION, UNAVAILABLE = "FAILED_PRECONDITION", "UNAVAILABLE"
HOLDER_2 = "digits.2.holder"
FAILURES: dict[str, tuple[Callable[[ModelHarness], object], str, str]] = {
    "no snapshot": (
        lambda it: it.model.on_snapshot_failed(it.host.requested_snapshots[-1], "no file", it.now),
        PRECONDITION,
        "no file",
    ),
    "no build": (
        lambda it: it.snapshot_taken().deliver(HOLDER_2, ProcessFailed("no model")),
        PRECONDITION,
        f"{HOLDER_2}: no model",
    ),
    "killed": (lambda it: it.snapshot_taken().exit_process(HOLDER_2), UNAVAILABLE, f"{HOLDER_2}: killed by SIGSEGV"),
    "other inputs": (lambda it: it.snapshot_taken().builds(2, OTHER), PRECONDITION, INCOMPATIBLE),
    "no worker": (fail_all_workers, PRECONDITION, "digits.2.w3: killed by SIGSEGV"),
}


@pytest.mark.parametrize(("fail_update", "code", "cause"), FAILURES.values(), ids=FAILURES)
def test_failed_update_changes_nothing_and_is_reported_once(
    fail_update: Callable[[ModelHarness], object], code: str, cause: str
) -> None:
    harness = ModelHarness(workers=1).serving().update()
    new = harness.host.requested_snapshots[-1]
    fail_update(harness)
    assert harness.host.errors == [("u", code, f"not updated: {cause}")]
    assert harness.host.removed_snapshots == ([new] if harness.host.spawned[2:] else [])
    [number] = harness.submit_new(1)
    assert harness.host.predicts() == [(W1, number)]
    harness.exit_all(2)
    assert (len(harness.host.errors), harness.host.updated) == (1, [])
    # The next update may succeed.
    harness.updated(3)
    assert [each.generations for each in harness.host.updated] == [(3,)]


def test_drain_cancels_update() -> None:
    harness = ModelHarness(workers=1).serving().update()
    new = harness.host.requested_snapshots[-1]
    for _ in range(2):
        harness.model.drain(harness.now)
        assert harness.host.errors == [("u", "UNAVAILABLE", "not updated: weightd is stopping")]
        assert harness.host.removed_snapshots == [new]
        harness.model.on_snapshot_failed(new, "killed by SIGKILL", harness.now)
        harness.exit_all(1)


SUFFIX = "expected a .onnx file for engine onnxruntime, got "


@pytest.mark.parametrize(
    ("loaded", "path", "error", "text"),
    [
        (False, "/models/new.onnx", Unavailable, "digits is loading on cpu: try again once the model serves"),
        (True, "", FailedPrecondition, "no version to roll back to: digits serves /models/digits.onnx"),
        (True, "/models/new.bin", InvalidArgument, SUFFIX + "'/models/new.bin'"),
        (True, "/models/new", InvalidArgument, SUFFIX + "'/models/new'"),
        (True, "/models/new.ONNX", InvalidArgument, SUFFIX + "'/models/new.ONNX'"),
    ],
)
def test_impossible_update_is_rejected(loaded: bool, path: str, error: type[RequestError], text: str) -> None:
    harness = ModelHarness().serving() if loaded else ModelHarness().snapshot_taken().builds()
    with pytest.raises(error, match=text):
        harness.update(path, rollback=not path)
    assert (len(harness.model.generations), harness.model.is_updating) == (1, False)


def test_rollback_loads_old_snapshot_and_works_once() -> None:
    harness = ModelHarness(workers=1).serving().updated(2)
    first, second = harness.host.requested_snapshots
    # A failed rollback keeps the previous version.
    harness.rollback().deliver("digits.3.holder", ProcessFailed("no memory")).exit_all(3)
    # The snapshot still exists, so the rollback copies no file.
    harness.rollback().loads(4).exit_all(2)
    assert harness.host.requested_snapshots == [first, second]
    assert [(each.generations, each.path) for each in harness.host.updated] == [((2,), second.path), ((4,), first.path)]
    assert (
        harness.model.readiness.main_generation.source,
        harness.model.versions.current,
        harness.host.removed_snapshots,
    ) == (
        first,
        first,
        [second],
    )
    with pytest.raises(FailedPrecondition) as caught:
        harness.rollback()
    went = "from /models/new.onnx to /models/digits.onnx"
    assert str(caught.value) == f"digits was already rolled back {went}: update the model to use a newer version"
    # After another update a rollback is possible again.
    harness.updated(5).rollback().loads(6)
    assert harness.model.versions.current == first


def test_all_devices_switch_together_or_none() -> None:
    harness = ModelHarness(workers=1, devices=("ascend:0", "ascend:1")).snapshot_taken().loads(1).loads(2)
    host = harness.host
    harness.update().snapshot_taken().loads(3).deliver("digits.4.holder", ProcessFailed("no memory"))
    assert host.errors == [("u", "FAILED_PRECONDITION", "not updated: digits.4.holder: no memory")]
    assert host.orders_of(Stop)[0] == ("digits.3.w1", Stop())
    assert host.removed_snapshots == host.requested_snapshots[1:]
    harness.exit_all(3).exit_all(4).update().snapshot_taken().loads(5)
    host.predicts()
    one, two = harness.submit_new(2)
    assert (host.predicts(), host.updated) == ([("digits.1.w1", one), ("digits.2.w1", two)], [])
    harness.loads(6)
    assert [each.generations for each in host.updated] == [(5, 6)]
    assert len(host.errors) == 1


# --- failure and drain ----------------------------------------------------------------------------------------------


def test_full_metadata_queue_rejects_largest_user() -> None:
    harness = ModelHarness(max_queue=2)
    for client, user in (("a", "ann"), ("b", "ann"), ("c", "ben")):
        harness.model.dispatcher.metadata.request(MetadataRequest(client.encode(), client, user))
    harness.model.dispatcher.metadata.reject(lambda client: client == b"a", PermissionDenied("not any more"))
    assert [reply[:2] for reply in harness.host.errors] == [("b", "RESOURCE_EXHAUSTED"), ("a", "PERMISSION_DENIED")]
    harness.snapshot_taken().builds()
    assert [client for client, _ in harness.host.metadata] == [b"c"]


def test_failed_model_rejects_all_requests_with_cause() -> None:
    harness = ModelHarness()
    harness.model.dispatcher.metadata.request(MetadataRequest(b"curious", "7"))
    [number] = harness.submit_new(1)
    harness.model.on_snapshot_failed(harness.host.requested_snapshots[0], "no such file", harness.now)
    text = "digits failed: no such file"
    assert harness.host.refusals == [(number, "FAILED_PRECONDITION", text)]
    assert harness.host.errors == [("7", "FAILED_PRECONDITION", text)]
    with pytest.raises(FailedPrecondition, match=text):
        harness.submit_new(1)
    with pytest.raises(FailedPrecondition, match=text):
        harness.model.dispatcher.metadata.request(MetadataRequest(b"curious", "8"))
    assert harness.model.loading.retry_delay_s(harness.now) is None
    assert (harness.model.readiness.has_failed, harness.model.readiness.unready_reason(harness.now)) == (True, text)
    # The failed model stays until it is drained.
    assert not harness.model.is_gone
    harness.model.drain(harness.now)
    assert harness.model.is_gone


def fail_snapshot(harness: ModelHarness, *, transient: bool = True) -> ModelHarness:
    """Let the last requested snapshot fail."""
    harness.model.on_snapshot_failed(
        harness.host.requested_snapshots[-1], "no such file", harness.now, is_transient=transient
    )
    return harness


def test_transient_failure_is_retried_with_backoff() -> None:
    harness = fail_snapshot(ModelHarness(workers=1))
    delays: list[float] = []
    for _ in range(9):
        with pytest.raises(Unavailable, match="digits failed: no such file"):
            harness.submit_new(1)
        delay = harness.model.loading.retry_delay_s(harness.now)
        assert delay is not None
        delays.append(delay)
        # An earlier tick does not start the retry.
        assert harness.model.timer.due_at == harness.now + delay
        harness.advance(0.9 * delay)
        assert harness.model.readiness.has_failed
        harness.advance(0.1 * delay + 1e-6)
        assert (harness.model.readiness.has_failed, harness.model.loading.retry_delay_s(harness.now)) == (False, None)
        fail_snapshot(harness)
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    # Each attempt takes a new snapshot.
    assert [each.number for each in harness.host.requested_snapshots] == list(range(1, 11))
    harness.advance(60.1)
    [number] = harness.submit_new(1)
    harness.snapshot_taken().loads(11)
    assert harness.host.predicts() == [("digits.11.w1", number)]
    assert harness.model.loading.retry_delay_s(harness.now) is None


def test_permanent_failure_is_retried_only_on_request() -> None:
    harness = fail_snapshot(ModelHarness(workers=1), transient=False)
    harness.advance(1e6)
    assert (
        harness.model.readiness.has_failed,
        harness.model.loading.may_retry,
        len(harness.host.requested_snapshots),
    ) == (
        True,
        True,
        1,
    )
    harness.model.loading.retry(harness.now)
    assert (harness.model.readiness.has_failed, harness.model.loading.may_retry) == (False, False)
    harness.model.loading.retry(harness.now)
    harness.snapshot_taken().loads(2)
    assert (harness.model.readiness.is_serving, len(harness.host.requested_snapshots)) == (True, 2)


@pytest.mark.parametrize(
    "end",
    [
        ExitCause(None, "cannot start python: Resource temporarily unavailable", has_transient_start_failure=True),
        ExitCause(-signal.SIGKILL),
    ],
)
def test_killed_or_unstartable_holder_is_retried_later(end: ExitCause) -> None:
    harness = ModelHarness(workers=1).snapshot_taken()
    for number in itertools.count(1):
        harness.model.deployments.process_events.on_exit(f"digits.{number}.holder", end, harness.now)
        harness.model.deployments.process_events.on_exit(f"digits.{number}.w1", ExitCause(0), harness.now)
        if harness.model.readiness.has_failed:
            break
        harness.advance(10.0)
    assert harness.model.loading.retry_delay_s(harness.now) == 1.0
    harness.advance(1.1)
    harness.snapshot_taken().loads(number + 1)
    assert harness.model.readiness.is_serving


@pytest.mark.parametrize("transient", [True, False])
def test_failed_update_of_failed_model_keeps_retry_mode(transient: bool) -> None:
    harness = fail_snapshot(ModelHarness(workers=1), transient=transient)
    harness.update()
    harness.model.on_snapshot_failed(harness.host.requested_snapshots[-1], "no model", harness.now)
    assert harness.host.errors == [("u", "FAILED_PRECONDITION", "not updated: no model")]
    assert harness.model.readiness.has_failed
    harness.advance(1.1)
    assert harness.model.loading.may_retry is not transient
    assert harness.host.requested_snapshots[-1].path == ("/models/digits.onnx" if transient else "/models/new.onnx")


def test_update_of_failed_model_allows_no_rollback() -> None:
    harness = fail_snapshot(ModelHarness(workers=1))
    harness.update()
    # The model does not retry while the update loads.
    harness.advance(5.0)
    assert len(harness.host.requested_snapshots) == 2
    harness.snapshot_taken().loads(2)
    assert (harness.model.readiness.is_serving, [each.path for each in harness.host.updated]) == (
        True,
        ["/models/new.onnx"],
    )
    with pytest.raises(FailedPrecondition, match="no version to roll back to"):
        harness.rollback()


def lose_file(harness: ModelHarness, child: str, lost: MissingFile = MissingFile.SNAPSHOT) -> ModelHarness:
    """Let the start of a process fail because a file is missing."""
    end = ExitCause(
        None,
        "the copy of the model in the cache directory is missing",
        has_transient_start_failure=True,
        missing_file=lost,
    )
    harness.model.deployments.process_events.on_exit(child, end, harness.now)
    return harness


def test_missing_snapshot_is_taken_again_while_serving() -> None:
    harness = ModelHarness().serving()
    lose_file(harness.exit_process(W1), W3)
    # The new snapshot must have the same content; the remaining worker still serves.
    assert (harness.host.requested_snapshots, harness.host.expected) == ([ModelSource("/models/digits.onnx")] * 2, SHA)
    [number] = harness.submit_new(1)
    assert harness.host.predicts() == [(W2, number)]
    assert "the copy of the model in the cache directory is missing" in harness.model.readiness.main_generation.cause
    assert harness.host.spawned == [HOLDER, W1, W2, W3]
    harness.answers(W2, number).snapshot_taken().loads(2)
    [number] = harness.submit_new(1)
    assert harness.host.predicts() == [("digits.2.w1", number)]
    assert [each.number for each in harness.model.generations] == [2, 1]


def test_changed_file_is_not_loaded_in_place_of_lost_snapshot() -> None:
    harness = ModelHarness().serving()
    lose_file(harness.exit_process(W1), W3)
    harness.model.on_snapshot_failed(harness.host.requested_snapshots[-1], "the file has changed", harness.now)
    harness.advance(10.0)
    # The model checks the file repeatedly and still serves.
    assert (len(harness.host.requested_snapshots), harness.host.expected) == (3, SHA)
    assert next(iter(harness.model.deployments)).cause == "the file has changed"
    [number] = harness.submit_new(1)
    assert harness.host.predicts() == [(W2, number)]
    harness.answers(W2, number)
    # An update accepts any content.
    harness.updated(4)
    assert [each.generations for each in harness.host.updated] == [(4,)]
    assert harness.host.expected == ""


def test_missing_page_store_is_rebuilt_from_snapshot() -> None:
    harness = ModelHarness().serving()
    lose_file(harness.exit_process(W1), W3, MissingFile.STORE)
    assert (len(harness.host.requested_snapshots), harness.host.spawned[4:]) == (
        1,
        ["digits.2.holder", "digits.2.w1", "digits.2.w2"],
    )


def test_drained_model_is_not_retried() -> None:
    harness = fail_snapshot(ModelHarness(workers=1))
    harness.model.drain(harness.now)
    harness.advance(100.0)
    assert (harness.model.is_gone, len(harness.host.requested_snapshots)) == (True, 1)


def test_drain_rejects_queued_and_finishes_running_requests() -> None:
    harness = ModelHarness(workers=1).serving()
    host = harness.host
    first, second, third = harness.submit_new(3)
    harness.model.drain(harness.now)
    assert host.refusals == [(third, "UNAVAILABLE", "weightd is stopping")]
    assert host.orders_of(Stop) == [(W1, Stop())]
    with pytest.raises(Unavailable, match="digits is being unloaded"):
        harness.submit_new(1)
    harness.answers(W1, first, second).exit_all(1)
    assert (host.orders_of(Stop)[1:], host.answers, len(host.refusals)) == ([(HOLDER, Stop())], [first, second], 1)
    assert (harness.model.is_gone, harness.model.readiness.main_generation.state) == (True, GenerationState.GONE)
    harness.model.versions.snapshots.drop_all()
    assert host.removed_snapshots == host.requested_snapshots


def test_drain_while_loading_rejects_all_requests() -> None:
    harness = ModelHarness(workers=1)
    [number] = harness.submit_new(1)
    harness.model.dispatcher.metadata.request(MetadataRequest(b"curious", "7"))
    harness.model.drain(harness.now)
    # The model cancels the pending snapshot.
    assert harness.host.removed_snapshots == harness.host.requested_snapshots
    assert harness.host.refusals == [(number, "UNAVAILABLE", "weightd is stopping")]
    assert harness.host.errors == [("7", "UNAVAILABLE", "digits is being unloaded")]


def test_successor_adopts_queued_requests() -> None:
    old, new = ModelHarness(workers=1), ModelHarness(workers=1).serving()
    numbers = old.submit_new(2)
    unfit = old.submit(request(BAD))
    old.model.dispatcher.metadata.request(MetadataRequest(b"curious", "7"))
    new.model.adopt_requests(old.model, new.now)
    assert [number for _, number in new.host.predicts()] == numbers
    assert new.host.refused() == [(*unfit, "INVALID_ARGUMENT")]
    assert [client for client, _ in new.host.metadata] == [b"curious"]
    assert old.model.dispatcher.is_idle


@pytest.mark.parametrize("replaced", [True, False])
def test_successor_adopts_requests_of_killed_worker(replaced: bool) -> None:
    old, new = ModelHarness(workers=1).serving(), ModelHarness(workers=1).serving()
    numbers = old.submit_new(2)
    old.model.drain(old.now, timeout_s=60.0, is_replaced=replaced)
    assert (old.model.is_draining, old.model.is_gone) == (True, False)
    old.exit_process(W1, signal.SIGKILL)
    assert [number for number, _ in old.host.refused()] == ([] if replaced else numbers)
    new.model.adopt_requests(old.model, new.now)
    assert [number for _, number in new.host.predicts()] == (numbers if replaced else [])
