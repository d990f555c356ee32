"""A model that loads, serves, is updated and leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
from collections.abc import Callable
from typing import Any

import pytest

from weightd_daemon.config.batching import BatchingConfig, SplitConfig
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
from weightd_protocol.messages.worker import Attach, Build, Built, PredictFailed, PredictResult, ProcessFailed, Stop
from weightd_protocol.messages.worker_common import RowSupport

from .fakehost import ATTACHED, BAD, BUILT, CARD, HOLDER, OUT, SHA, W1, W2, W3, ModelHarness, X, Y, request

# --- loading --------------------------------------------------------------------------------------------------------


def test_it_loads_as_its_generation_wants() -> None:
    stage = ModelHarness()
    host = stage.host
    assert (len(host.pinned), host.spawned) == (1, [])
    stage.pinned().builds()
    assert host.spawned == [HOLDER, W1, W2]
    assert [type(order) for _, order in host.orders] == [Build, Attach]
    assert host.orders[-1] == (W1, Attach("/store", ({"x": (2,)},)))
    stage.says(W1, ATTACHED)
    assert (
        stage.model.readiness.is_serving,
        stage.model.readiness.is_complete,
        stage.model.readiness.main_generation.is_complete,
    ) == (
        True,
        False,
        False,
    )
    stage.says(W2, ATTACHED)
    assert (stage.model.readiness.is_complete, stage.model.readiness.main_generation.is_complete) == (True, True)


@pytest.mark.parametrize("copies", ["one", "each"])
def test_on_sets_of_cores_there_is_one_copy_for_all_or_one_for_each(copies: str) -> None:
    stage = ModelHarness(workers=1, copies=copies, devices=("cpu:0", "cpu:1"), cores=("0-3", "4,6")).pinned()
    host = stage.host
    if copies == "one":
        assert host.places == {HOLDER: ("cpu", "0-3,4,6"), W1: ("cpu:0", "0-3"), W2: ("cpu:1", "4,6")}
        assert [each.device for each in stage.model.generations] == ["cpu"]
    else:
        where = {"digits.1": ("cpu:0", "0-3"), "digits.2": ("cpu:1", "4,6")}
        assert host.places == {f"{label}.{name}": place for label, place in where.items() for name in ("holder", "w1")}


EXACT, ANYWAY = BatchingConfig(8), BatchingConfig(8, exact=False)


@pytest.mark.parametrize(
    ("before", "changed", "most"),
    [
        (EXACT, {"batching": BatchingConfig(4)}, 4),
        (EXACT, {"batching": ANYWAY}, 8),
        (EXACT, {"batching": BatchingConfig()}, 1),
        (EXACT, {"split": SplitConfig(4)}, 8),
        (EXACT, {"default_priority": 1}, 8),
        (EXACT, {"batching": BatchingConfig(9)}, None),
        (EXACT, {"split": SplitConfig(5)}, None),
        (EXACT, {"threads": 2}, None),
        (EXACT, {"priority_levels": 2}, None),
        (EXACT, {"batching": BatchingConfig(8, sizes=(8,))}, None),
        (ANYWAY, {"batching": EXACT}, None),
        (BatchingConfig(), {"batching": ANYWAY}, None),
    ],
)
def test_other_requests_go_together_without_a_load_as_far_as_that_was_tested(
    before: BatchingConfig, changed: dict[str, Any], most: int | None
) -> None:
    rows = RowSupport(("x",), ("y",), is_equal=True)
    stage = ModelHarness(workers=1, batching=before).pinned().loads(1, dataclasses.replace(BUILT, row_support=rows))
    config = dataclasses.replace(stage.model.config, **changed)
    assert stage.model.reconfigure(config) == (most is not None)
    seat = stage.model.dispatcher._scheduler.slots.slot_of(W1)
    assert seat is not None
    assert seat.policy.max_rows == (before.max_rows if most is None else most)
    if most is not None:
        assert (stage.model.config, seat.policy.max_split_rows) == (config, config.split.part_rows)
        # Nothing is forgotten.
        assert stage.model.reconfigure(dataclasses.replace(config, batching=before))


def test_requests_with_an_input_without_rows_run_in_parts_but_never_together() -> None:
    stage = ModelHarness(workers=1, batching=BatchingConfig(8), split=SplitConfig(4)).pinned()
    built = dataclasses.replace(BUILT, inputs=(*BUILT.inputs, TensorSignature("s", "FP32", (3,))))
    stage.loads(1, dataclasses.replace(built, row_support=RowSupport(("x",), ("y",), is_equal=True)))
    seat = stage.model.dispatcher._scheduler.slots.slot_of(W1)
    assert seat is not None
    assert (seat.policy.max_rows, seat.policy.max_split_rows) == (1, 4)
    [generation] = stage.model.generations
    assert describe_batching(stage.model.config, generation) == (
        "requests of more than 4 rows are split, tested bit-equal, no requests are batched: input s has no rows"
    )


@pytest.mark.parametrize(("exact", "cut"), [(True, [True, False]), (False, [True, True])])
def test_where_it_has_to_be_exact_only_requests_of_dimensions_that_were_tested_run_in_parts(
    exact: bool, cut: list[bool]
) -> None:
    stage = ModelHarness(workers=1, split=SplitConfig(4, exact=exact)).pinned()
    long = dataclasses.replace(BUILT.inputs[0], shape=(-1, -1))
    built = dataclasses.replace(BUILT, inputs=(long,), selftest_cases=({long.name: (1, 16)},))
    stage.loads(1, dataclasses.replace(built, row_support=RowSupport((long.name,), ("y",), is_equal=True)))
    seat = stage.model.dispatcher._scheduler.slots.slot_of(W1)
    assert seat is not None
    asked = [RequestDescription("m", (TensorSpec(long.name, long.datatype, (8, width)),)) for width in (16, 37)]
    assert [
        seat.policy.should_split(form, "") for each in asked if (form := seat.policy.batch_key(each)) is not None
    ] == cut
    [generation] = stage.model.generations
    assert ("of the self-test's dimensions" in describe_batching(stage.model.config, generation)) == exact


def test_other_bounds_for_rows_hold_at_once() -> None:
    stage = ModelHarness(workers=1, split=SplitConfig(5)).pinned()
    stage.loads(1, dataclasses.replace(BUILT, row_support=RowSupport(("x",), ("y",), is_equal=True)))
    for most in (8, 4, 5):  # of which the request has 5
        config = dataclasses.replace(stage.model.config, split=SplitConfig(4, max_rows=most))
        assert stage.model.reconfigure(config)
        with pytest.raises(InvalidArgument, match=r"split\.max_rows") if most < 5 else contextlib.nullcontext():
            stage.some(1)


@pytest.mark.parametrize(
    ("sharing", "device", "falls_back"),
    [("on", "ascend:0", False), ("auto", "ascend:0", True), ("off", "ascend:0", False), ("auto", "cpu:1", False)],
)
def test_only_auto_on_a_card_falls_back_to_copies_in_each_process(sharing: str, device: str, falls_back: bool) -> None:
    stage = ModelHarness(CARD, devices=(device,), sharing=sharing).pinned()
    assert stage.model.readiness.main_generation.spec.is_sharing == (sharing != "off")
    stage.says(HOLDER, ProcessFailed("it cannot share"))
    assert [each.spec.is_sharing for each in stage.model.generations if each.label != "digits.1"] == [
        False
    ] * falls_back
    assert stage.model.readiness.has_failed != falls_back


def test_who_waits_for_the_room_of_another_model_is_due_once_that_has_left() -> None:
    stage = ModelHarness(CARD, devices=("ascend:0",))
    device = next(iter(stage.model.deployments)).placement
    assert isinstance(device, DeviceBudget)
    device.max_processes, device.leaving = 3, {"other.1"}
    device.reserved["other.1"] = ResourceRequest(
        weight_bytes=100, copy_count=1, worker_count=2, process_count=3, process_bytes=10
    )
    stage.pinned()
    assert stage.host.spawned == []
    device.release("other.1")
    assert stage.model.timer.due_at <= stage.now
    stage.passes(0.0)
    assert stage.host.spawned == [HOLDER, W1, W2]


def test_what_takes_too_long_is_given_up_at_the_moment_that_it_has_told() -> None:
    slow = ModelHarness()
    for _ in range(2):
        assert slow.model.timer.due_at == slow.now + slow.model.config.load_timeout
        slow.now += 1.0
        slow.pinned()
    slow.passes(slow.model.config.load_timeout)
    assert (slow.host.aborted, slow.model.timer.due_at) == ([HOLDER], slow.now + 2.0)
    stage = ModelHarness()
    stage.passes(stage.model.timer.due_at - stage.now)
    assert stage.host.unpinned == stage.host.pinned
    # What becomes of its process is of no interest any more.
    stage.model.on_snapshot_failed(stage.host.pinned[0], "killed by SIGKILL", stage.now)
    assert (stage.model.readiness.has_failed, stage.model.readiness.main_generation.cause) == (
        True,
        "no snapshot within load_timeout (600 s)",
    )


def test_requests_that_come_while_it_loads_wait_and_are_checked_when_it_is_known_what_fits() -> None:
    stage = ModelHarness()
    good, bad, again = stage.submit(request(), request(BAD), request())
    stage.pinned().builds()
    [(number, code, text)] = stage.host.refusals
    assert (number, code, stage.model.dispatcher._replies.failed_count) == (bad, "INVALID_ARGUMENT", 1)
    assert "x is missing" in text
    assert stage.host.predicts() == []
    stage.says(W1, ATTACHED)
    assert stage.host.predicts() == [(W1, good), (W1, again)]
    with pytest.raises(InvalidArgument, match="x is missing"):
        stage.submit(request(BAD))


def test_who_waits_for_metadata_is_told_once_it_is_known_and_only_so_many_may_wait() -> None:
    stage = ModelHarness(max_queue=2)
    stage.model.dispatcher.metadata.request(MetadataRequest(b"a", "1"))
    stage.model.dispatcher.metadata.request(MetadataRequest(b"b", "2"))
    with pytest.raises(ResourceExhausted, match="2 metadata requests are already queued"):
        stage.model.dispatcher.metadata.request(MetadataRequest(b"c", "3"))
    stage.some(2)
    with pytest.raises(ResourceExhausted):
        stage.some(1)
    assert stage.host.metadata == []
    stage.pinned().builds()
    stage.model.dispatcher.metadata.request(MetadataRequest(b"c", "3"))
    assert [client for client, _ in stage.host.metadata] == [b"a", b"b", b"c"]
    told = ModelMetadataResponse("1", "digits", "onnxruntime", (X,), (Y,), example=((2,),))
    assert stage.host.metadata[0][1] == told


@pytest.mark.parametrize(
    ("batching", "equal", "exact"),
    [
        (BatchingConfig(8), True, True),
        (BatchingConfig(8), False, None),  # each runs alone
        (BatchingConfig(8, exact=False), False, False),
        (BatchingConfig(), None, None),
    ],
)
def test_a_client_is_told_whether_answers_may_depend_on_what_runs_beside_them(
    batching: BatchingConfig, equal: bool | None, exact: bool | None
) -> None:
    rows = None if equal is None else RowSupport(("x",), ("y",), is_equal=equal)
    stage = ModelHarness(workers=1, batching=batching).pinned().loads(1, dataclasses.replace(BUILT, row_support=rows))
    stage.model.dispatcher.metadata.request(MetadataRequest(b"a", "1"))
    assert [told.exact for _, told in stage.host.metadata] == [exact]


# --- serving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stranger", [HOLDER, W2, "stranger"])
def test_an_answer_goes_to_who_asked_once_and_is_counted(stranger: str) -> None:
    stage = ModelHarness().serving()
    asked = request()
    [number] = stage.submit(asked)
    assert (stage.host.predicts(), stage.host.frames) == ([(W1, number)], [*asked.frames])
    stage.now += 0.25
    stage.answers(stranger, number).says(stranger, PredictFailed(number, "INTERNAL", "x", is_exiting=False))
    stage.says(W1, PredictResult(number, ResponseDescription("m", (OUT,))), (b"answer",)).answers(W1, number)
    assert (stage.host.answers, stage.host.answered, stage.host.refused()) == ([number], [((OUT,), (b"answer",))], [])
    desk = stage.model.dispatcher
    assert (
        desk._replies.latencies.count,
        desk.results.latencies_by_process[W1].count,
        desk.results.latencies_by_process[W2].count,
    ) == (1, 1, 0)
    assert (desk._replies.latencies.percentile_us(50), desk._replies.failed_count) == (250_000, 0)


def test_a_predict_that_fails_costs_nobody_else_and_who_is_spoilt_leaves_what_it_had_to_others() -> None:
    stage = ModelHarness().serving()
    one, two, three, four, five, six = stage.some(6)
    assert stage.host.predicts() == [(W1, one), (W2, two), (W1, three), (W2, four)]
    stage.says(W1, PredictFailed(one, "INVALID_ARGUMENT", "out of range", is_exiting=False))
    assert stage.host.predicts() == [(W1, five)]
    stage.says(W1, PredictFailed(three, "INTERNAL", "spoilt", is_exiting=True))
    assert stage.host.refusals == [(one, "INVALID_ARGUMENT", "out of range"), (three, "INTERNAL", "spoilt")]
    assert stage.host.told(Stop) == [(W1, Stop())]
    assert stage.host.spawned[-1] == W3
    stage.answers(W2, two, four)
    # The head of the queue is what the spoilt worker had.
    assert stage.host.predicts() == [(W2, five), (W2, six)]
    stage.model.deployments.process_events.on_exit(W1, ExitCause(75), stage.now)
    assert (len(stage.host.refusals), stage.model.dispatcher._replies.failed_count) == (2, 2)
    assert W1 not in stage.model.dispatcher.results.latencies_by_process


def test_it_is_ready_while_a_worker_has_been_heard_of() -> None:
    stage = ModelHarness(workers=1)
    assert stage.model.readiness.unready_reason(stage.now) == "digits: snapshotting"
    stage.serving()
    assert stage.model.readiness.unready_reason(stage.now + 30.0) == ""
    assert (
        stage.model.readiness.unready_reason(stage.now + 30.1)
        == "digits: no worker has answered for 30.1 s, the watchdog period is 30 s"
    )
    [number] = stage.some(1)
    stage.now += 20.0
    stage.answers(W1, number)
    assert stage.model.readiness.unready_reason(stage.now + 30.0) == ""
    stage.dies(W1)
    assert stage.model.readiness.unready_reason(stage.now) == "digits: all workers have exited and are being replaced"


def test_a_deadline_while_nobody_serves_tells_why_nobody_does() -> None:
    stage = ModelHarness(CARD, workers=1, devices=("ascend:0",))
    numbers = stage.submit(request(deadline=1005.0))
    stage.passes(4.0)
    assert stage.host.refusals == []
    stage.passes(1.0)
    stage.serving()
    numbers += stage.submit(request(deadline=1010.0))
    stage.passes(5.0)
    stage.dies(HOLDER)
    numbers += stage.submit(request(deadline=1015.0))
    stage.goes(1).passes(5.0)
    spawned = (
        f"spawned, 0/2 processes up, {HOLDER}: killed by SIGSEGV; the shared weights are invalid without the holder"
    )
    assert stage.host.refusals == [
        (numbers[0], "UNAVAILABLE", "digits has no worker: snapshotting, not ready yet"),
        (numbers[1], "DEADLINE_EXCEEDED", "was running at its deadline"),
        (numbers[2], "UNAVAILABLE", f"digits has no worker: {spawned}"),
    ]


# --- update ---------------------------------------------------------------------------------------------------------


def test_an_update_takes_over_when_it_is_complete_and_who_asked_is_told_once() -> None:
    stage = ModelHarness().serving().update("", weights="/w.npz")
    host = stage.host
    assert host.pinned[1:] == [ModelSource("/models/digits.onnx", "/w.npz", 2)]
    with pytest.raises(Unavailable, match="digits is already being updated"):
        stage.update()
    stage.pinned().builds(2).says("digits.2.w1", ATTACHED)
    first, second = stage.some(2)
    assert (host.predicts(), host.updated) == ([(W1, first), (W2, second)], [])
    stage.says("digits.2.w2", ATTACHED)
    path = "/models/digits.onnx"
    assert host.updated == [UpdateResponse("u", "digits", (2,), path, "/w.npz", configured_path=path)]
    assert stage.model.versions.current == host.pinned[1]
    # From now on requests go there; what the old ones have they may finish.
    [third] = stage.some(1)
    assert host.predicts() == [("digits.2.w1", third)]
    stage.answers(W1, first).goes(1).says("digits.2.w1", ATTACHED)
    assert (host.answers, len(host.updated), host.errors, list(host.seals)) == ([first], 1, [], ["digits.2"])


def test_after_an_update_it_takes_the_sizes_of_what_took_over() -> None:
    stage = ModelHarness(workers=1).pinned().loads(1, dataclasses.replace(BUILT, gears=((2,),))).update()
    with pytest.raises(InvalidArgument, match=r"expected 2, got 5"):
        stage.some(1)
    stage.pinned().loads(2, dataclasses.replace(BUILT, gears=((2,), (5,))))
    [number] = stage.some(1)
    assert stage.host.predicts() == [("digits.2.w1", number)]


def no_worker(stage: ModelHarness) -> None:
    stage.pinned().builds(2).says(HOLDER_2, ProcessFailed("gone"))
    for number in (1, 2, 3):
        stage.dies(f"digits.2.w{number}").passes(1.0)


OTHER = Built("/store", (Y,), (Y,), ({"x": (2,)},), "canary", 4096)
NO_DROP_IN = "the new model is not compatible with the serving one: inputs: expected x FP32 [-1, 2], got y FP32 [-1, 3]"
PRECONDITION, UNAVAILABLE = "FAILED_PRECONDITION", "UNAVAILABLE"
HOLDER_2 = "digits.2.holder"
FAILURES: dict[str, tuple[Callable[[ModelHarness], object], str, str]] = {
    "no snapshot": (
        lambda it: it.model.on_snapshot_failed(it.host.pinned[-1], "no file", it.now),
        PRECONDITION,
        "no file",
    ),
    "no build": (
        lambda it: it.pinned().says(HOLDER_2, ProcessFailed("no model")),
        PRECONDITION,
        f"{HOLDER_2}: no model",
    ),
    "killed": (lambda it: it.pinned().dies(HOLDER_2), UNAVAILABLE, f"{HOLDER_2}: killed by SIGSEGV"),
    "other inputs": (lambda it: it.pinned().builds(2, OTHER), PRECONDITION, NO_DROP_IN),
    "no worker": (no_worker, PRECONDITION, "digits.2.w3: killed by SIGSEGV"),
}


@pytest.mark.parametrize(("fails", "code", "cause"), FAILURES.values(), ids=FAILURES)
def test_an_update_that_fails_changes_nothing_and_who_asked_is_told_once(
    fails: Callable[[ModelHarness], object], code: str, cause: str
) -> None:
    stage = ModelHarness(workers=1).serving().update()
    new = stage.host.pinned[-1]
    fails(stage)
    assert stage.host.errors == [("u", code, f"not updated: {cause}")]
    assert stage.host.unpinned == ([new] if stage.host.spawned[2:] else [])
    [number] = stage.some(1)
    assert stage.host.predicts() == [(W1, number)]
    stage.goes(2)
    assert (len(stage.host.errors), stage.host.updated) == (1, [])
    # The next one may be tried.
    stage.updated(3)
    assert [each.generations for each in stage.host.updated] == [(3,)]


def test_an_update_is_given_up_when_it_is_drained() -> None:
    stage = ModelHarness(workers=1).serving().update()
    new = stage.host.pinned[-1]
    for _ in range(2):
        stage.model.drain(stage.now)
        assert stage.host.errors == [("u", "UNAVAILABLE", "not updated: weightd is stopping")]
        assert stage.host.unpinned == [new]
        stage.model.on_snapshot_failed(new, "killed by SIGKILL", stage.now)
        stage.goes(1)


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
def test_an_update_that_cannot_be_is_refused(loaded: bool, path: str, error: type[RequestError], text: str) -> None:
    stage = ModelHarness().serving() if loaded else ModelHarness().pinned().builds()
    with pytest.raises(error, match=text):
        stage.update(path, rollback=not path)
    assert (len(stage.model.generations), stage.model.is_updating) == (1, False)


def test_a_rollback_loads_the_old_bytes_again_and_a_second_one_is_refused() -> None:
    stage = ModelHarness(workers=1).serving().updated(2)
    first, second = stage.host.pinned
    # One that fails keeps what it can go back to.
    stage.rollback().says("digits.3.holder", ProcessFailed("no memory")).goes(3)
    # The snapshot was kept: nothing is copied, and what is in the file by now does not matter.
    stage.rollback().loads(4).goes(2)
    assert stage.host.pinned == [first, second]
    assert [(each.generations, each.path) for each in stage.host.updated] == [((2,), second.path), ((4,), first.path)]
    assert (stage.model.readiness.main_generation.source, stage.model.versions.current, stage.host.unpinned) == (
        first,
        first,
        [second],
    )
    with pytest.raises(FailedPrecondition) as caught:
        stage.rollback()
    went = "from /models/new.onnx to /models/digits.onnx"
    assert str(caught.value) == f"digits was already rolled back {went}: update the model to use a newer version"
    # A further update is one that can be gone back from.
    stage.updated(5).rollback().loads(6)
    assert stage.model.versions.current == first


def test_all_devices_take_over_together_and_if_one_cannot_none_does() -> None:
    stage = ModelHarness(workers=1, devices=("ascend:0", "ascend:1")).pinned().loads(1).loads(2)
    host = stage.host
    stage.update().pinned().loads(3).says("digits.4.holder", ProcessFailed("no memory"))
    assert host.errors == [("u", "FAILED_PRECONDITION", "not updated: digits.4.holder: no memory")]
    assert host.told(Stop)[0] == ("digits.3.w1", Stop())
    assert host.unpinned == host.pinned[1:]
    stage.goes(3).goes(4).update().pinned().loads(5)
    host.predicts()
    one, two = stage.some(2)
    assert (host.predicts(), host.updated) == ([("digits.1.w1", one), ("digits.2.w1", two)], [])
    stage.loads(6)
    assert [each.generations for each in host.updated] == [(5, 6)]
    assert len(host.errors) == 1


# --- the end --------------------------------------------------------------------------------------------------------


def test_of_those_who_wait_for_metadata_the_last_one_of_who_asks_most_gives_way() -> None:
    stage = ModelHarness(max_queue=2)
    for client, user in (("a", "ann"), ("b", "ann"), ("c", "ben")):
        stage.model.dispatcher.metadata.request(MetadataRequest(client.encode(), client, user))
    stage.model.dispatcher.metadata.reject(lambda client: client == b"a", PermissionDenied("not any more"))
    assert [told[:2] for told in stage.host.errors] == [("b", "RESOURCE_EXHAUSTED"), ("a", "PERMISSION_DENIED")]
    stage.pinned().builds()
    assert [client for client, _ in stage.host.metadata] == [b"c"]


def test_when_it_fails_everyone_who_waits_or_comes_is_told_why() -> None:
    stage = ModelHarness()
    stage.model.dispatcher.metadata.request(MetadataRequest(b"curious", "7"))
    [number] = stage.some(1)
    stage.model.on_snapshot_failed(stage.host.pinned[0], "no such file", stage.now)
    text = "digits failed: no such file"
    assert stage.host.refusals == [(number, "FAILED_PRECONDITION", text)]
    assert stage.host.errors == [("7", "FAILED_PRECONDITION", text)]
    with pytest.raises(FailedPrecondition, match=text):
        stage.some(1)
    with pytest.raises(FailedPrecondition, match=text):
        stage.model.dispatcher.metadata.request(MetadataRequest(b"curious", "8"))
    assert stage.model.retry_delay_s(stage.now) is None
    assert (stage.model.readiness.has_failed, stage.model.readiness.unready_reason(stage.now)) == (True, text)
    # It is gone only when it was told to go.
    assert not stage.model.is_gone
    stage.model.drain(stage.now)
    assert stage.model.is_gone


def failed(stage: ModelHarness, *, transient: bool = True) -> ModelHarness:
    """The snapshot that was asked for last cannot be taken."""
    stage.model.on_snapshot_failed(stage.host.pinned[-1], "no such file", stage.now, is_transient=transient)
    return stage


def test_a_model_that_failed_of_a_transient_cause_is_loaded_again_with_back_off() -> None:
    stage = failed(ModelHarness(workers=1))
    delays: list[float] = []
    for _ in range(9):
        with pytest.raises(Unavailable, match="digits failed: no such file"):
            stage.some(1)
        delay = stage.model.retry_delay_s(stage.now)
        assert delay is not None
        delays.append(delay)
        # Nothing is due before, and a tick before that changes nothing.
        assert stage.model.timer.due_at == stage.now + delay
        stage.passes(0.9 * delay)
        assert stage.model.readiness.has_failed
        stage.passes(0.1 * delay + 1e-6)
        assert (stage.model.readiness.has_failed, stage.model.retry_delay_s(stage.now)) == (False, None)
        failed(stage)
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    # Each attempt reads the files anew.
    assert [each.number for each in stage.host.pinned] == list(range(1, 11))
    stage.passes(60.1)
    [number] = stage.some(1)
    stage.pinned().loads(11)
    assert stage.host.predicts() == [("digits.11.w1", number)]
    assert stage.model.retry_delay_s(stage.now) is None


def test_a_model_that_failed_of_a_permanent_cause_is_loaded_again_when_that_is_asked_for() -> None:
    stage = failed(ModelHarness(workers=1), transient=False)
    stage.passes(1e6)
    assert (stage.model.readiness.has_failed, stage.model.may_retry, len(stage.host.pinned)) == (True, True, 1)
    stage.model.retry(stage.now)
    assert (stage.model.readiness.has_failed, stage.model.may_retry) == (False, False)
    stage.model.retry(stage.now)
    stage.pinned().loads(2)
    assert (stage.model.readiness.is_serving, len(stage.host.pinned)) == (True, 2)


@pytest.mark.parametrize(
    "end",
    [
        ExitCause(None, "cannot start python: Resource temporarily unavailable", has_transient_start_failure=True),
        ExitCause(-signal.SIGKILL),
    ],
)
def test_a_holder_that_cannot_be_started_for_now_or_is_killed_is_started_again_later(end: ExitCause) -> None:
    stage = ModelHarness(workers=1).pinned()
    for number in itertools.count(1):
        stage.model.deployments.process_events.on_exit(f"digits.{number}.holder", end, stage.now)
        stage.model.deployments.process_events.on_exit(f"digits.{number}.w1", ExitCause(0), stage.now)
        if stage.model.readiness.has_failed:
            break
        stage.passes(10.0)
    assert stage.model.retry_delay_s(stage.now) == 1.0
    stage.passes(1.1)
    stage.pinned().loads(number + 1)
    assert stage.model.readiness.is_serving


@pytest.mark.parametrize("transient", [True, False])
def test_a_model_that_has_failed_can_be_updated_and_is_retried_as_before_if_that_fails(transient: bool) -> None:
    stage = failed(ModelHarness(workers=1), transient=transient)
    stage.update()
    stage.model.on_snapshot_failed(stage.host.pinned[-1], "no model", stage.now)
    assert stage.host.errors == [("u", "FAILED_PRECONDITION", "not updated: no model")]
    assert stage.model.readiness.has_failed
    stage.passes(1.1)
    assert stage.model.may_retry is not transient
    assert stage.host.pinned[-1].path == ("/models/digits.onnx" if transient else "/models/new.onnx")


def test_an_update_of_a_model_that_has_failed_serves_and_leaves_nothing_to_go_back_to() -> None:
    stage = failed(ModelHarness(workers=1))
    stage.update()
    # No retry while it loads.
    stage.passes(5.0)
    assert len(stage.host.pinned) == 2
    stage.pinned().loads(2)
    assert (stage.model.readiness.is_serving, [each.path for each in stage.host.updated]) == (
        True,
        ["/models/new.onnx"],
    )
    with pytest.raises(FailedPrecondition, match="no version to roll back to"):
        stage.rollback()


def vanished(stage: ModelHarness, child: str, lost: MissingFile = MissingFile.SNAPSHOT) -> ModelHarness:
    """A process cannot be started, for files have vanished."""
    end = ExitCause(
        None,
        "the copy of the model in the cache directory is missing",
        has_transient_start_failure=True,
        missing_file=lost,
    )
    stage.model.deployments.process_events.on_exit(child, end, stage.now)
    return stage


def test_a_model_whose_copy_has_vanished_is_loaded_anew_beside_what_serves() -> None:
    stage = ModelHarness().serving()
    vanished(stage.dies(W1), W3)
    # The same bytes are expected, and the worker that is there goes on.
    assert (stage.host.pinned, stage.host.expected) == ([ModelSource("/models/digits.onnx")] * 2, SHA)
    [number] = stage.some(1)
    assert stage.host.predicts() == [(W2, number)]
    assert "the copy of the model in the cache directory is missing" in stage.model.readiness.main_generation.cause
    assert stage.host.spawned == [HOLDER, W1, W2, W3]
    stage.answers(W2, number).pinned().loads(2)
    [number] = stage.some(1)
    assert stage.host.predicts() == [("digits.2.w1", number)]
    assert [each.number for each in stage.model.generations] == [2, 1]


def test_what_is_another_model_by_now_is_not_loaded_in_its_place_but_an_update_is() -> None:
    stage = ModelHarness().serving()
    vanished(stage.dies(W1), W3)
    stage.model.on_snapshot_failed(stage.host.pinned[-1], "the file has changed", stage.now)
    stage.passes(10.0)
    # It is looked at again and again; who serves goes on.
    assert (len(stage.host.pinned), stage.host.expected) == (3, SHA)
    assert next(iter(stage.model.deployments)).cause == "the file has changed"
    [number] = stage.some(1)
    assert stage.host.predicts() == [(W2, number)]
    stage.answers(W2, number)
    # Whatever is on its way there.
    stage.updated(4)
    assert [each.generations for each in stage.host.updated] == [(4,)]
    assert stage.host.expected == ""


def test_where_only_the_shared_weights_have_vanished_the_copy_is_loaded_again() -> None:
    stage = ModelHarness().serving()
    vanished(stage.dies(W1), W3, MissingFile.STORE)
    assert (len(stage.host.pinned), stage.host.spawned[4:]) == (1, ["digits.2.holder", "digits.2.w1", "digits.2.w2"])


def test_a_model_that_is_drained_is_not_retried() -> None:
    stage = failed(ModelHarness(workers=1))
    stage.model.drain(stage.now)
    stage.passes(100.0)
    assert (stage.model.is_gone, len(stage.host.pinned)) == (True, 1)


def test_draining_gives_up_what_waits_and_finishes_what_runs() -> None:
    stage = ModelHarness(workers=1).serving()
    host = stage.host
    first, second, third = stage.some(3)
    stage.model.drain(stage.now)
    assert host.refusals == [(third, "UNAVAILABLE", "weightd is stopping")]
    assert host.told(Stop) == [(W1, Stop())]
    with pytest.raises(Unavailable, match="digits is being unloaded"):
        stage.some(1)
    stage.answers(W1, first, second).goes(1)
    assert (host.told(Stop)[1:], host.answers, len(host.refusals)) == ([(HOLDER, Stop())], [first, second], 1)
    assert (stage.model.is_gone, stage.model.readiness.main_generation.state) == (True, GenerationState.GONE)
    stage.model.versions.snapshots.drop_all()
    assert host.unpinned == host.pinned


def test_draining_while_it_loads_answers_everyone() -> None:
    stage = ModelHarness(workers=1)
    [number] = stage.some(1)
    stage.model.dispatcher.metadata.request(MetadataRequest(b"curious", "7"))
    stage.model.drain(stage.now)
    # The snapshot that is being taken is given up.
    assert stage.host.unpinned == stage.host.pinned
    assert stage.host.refusals == [(number, "UNAVAILABLE", "weightd is stopping")]
    assert stage.host.errors == [("7", "UNAVAILABLE", "digits is being unloaded")]


def test_what_waits_is_the_successors() -> None:
    old, new = ModelHarness(workers=1), ModelHarness(workers=1).serving()
    numbers = old.some(2)
    unfit = old.submit(request(BAD))
    old.model.dispatcher.metadata.request(MetadataRequest(b"curious", "7"))
    new.model.adopt_requests(old.model, new.now)
    assert [number for _, number in new.host.predicts()] == numbers
    assert new.host.refused() == [(*unfit, "INVALID_ARGUMENT")]
    assert [client for client, _ in new.host.metadata] == [b"curious"]
    assert old.model.dispatcher.is_idle


@pytest.mark.parametrize("replaced", [True, False])
def test_what_a_worker_had_that_dies_while_its_model_leaves_is_the_successors_if_there_is_one(replaced: bool) -> None:
    old, new = ModelHarness(workers=1).serving(), ModelHarness(workers=1).serving()
    numbers = old.some(2)
    old.model.drain(old.now, timeout_s=60.0, is_replaced=replaced)
    assert (old.model.is_draining, old.model.is_gone) == (True, False)
    old.dies(W1, signal.SIGKILL)
    assert [number for number, _ in old.host.refused()] == ([] if replaced else numbers)
    new.model.adopt_requests(old.model, new.now)
    assert [number for _, number in new.host.predicts()] == (numbers if replaced else [])
