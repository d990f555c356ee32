"""Merging requests into batches, splitting requests, order of batches, and joining of results."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.scheduling.batching import policy as merge_groups_module
from weightd_daemon.scheduling.batching.estimates import DurationEstimates
from weightd_daemon.scheduling.batching.former import (
    MAX_BATCH_S,
    BatchGroup,
    SlotConstraints,
    form_group,
    next_split_rows,
)
from weightd_daemon.scheduling.batching.policy import BatchingPolicy, BatchKey, RecentNames, principal_id
from weightd_daemon.scheduling.batching.split import PartialResult, SplitRequest, join_results
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.request import ClientOrigin, Isolation, Request, isolate
from weightd_daemon.scheduling.results import ResponseSink
from weightd_daemon.scheduling.scheduler import AT_ONCE, Scheduler
from weightd_daemon.scheduling.slots import Slot
from weightd_daemon.scheduling.tensor_location import SharedRegion, TensorLocation, TensorLocations
from weightd_daemon.tenants.tenant import DEFAULT_TENANT, Tenant
from weightd_protocol.errors import Internal, RequestError, ResourceExhausted
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSpec
from weightd_protocol.messages.regions import MappedOutput, MappedRegions
from weightd_protocol.messages.worker import BeginBatch, ChildOrder, Predict, PredictResult

ROWS = BatchingPolicy(inputs=frozenset("x"), outputs=frozenset("y"), max_rows=8)
SPLIT = replace(ROWS, max_split_rows=4)
FAST, SLOW = "cpu:0", "cpu:1"

_numbers = itertools.count(1)


def request(
    rows: int = 1,
    width: int = 1,
    deadline: float = 1e9,
    level: int = 0,
    principal: str = "",
    tenant: Tenant = DEFAULT_TENANT,
) -> Request:
    number = next(_numbers)
    asked = RequestDescription("m", (TensorSpec("x", "FP32", (rows, width)),))
    frames = [bytes(4 * rows * width)]
    origin = ClientOrigin(principal, principal)
    return Request(
        number,
        b"c",
        f"id{number}",
        asked,
        frames,
        0.0,
        deadline,
        len(frames[0]),
        origin,
        priority_level=level,
        tenant=tenant,
    )


def dispatcher(
    max_queue: int, slot_count: int = 1, policy: BatchingPolicy = ROWS, **callbacks: object
) -> tuple[Dispatcher, list[ChildOrder]]:
    """Return a dispatcher and the list of its orders."""
    orders: list[ChildOrder] = []

    def order(name: str, order: ChildOrder, frames: object, memories: object) -> None:
        orders.append(order)

    config = ModelConfig(path="/m.onnx", engine="onnxruntime", max_queue=max_queue)
    made = Dispatcher(
        "m", config, cast(ResponseSink, SimpleNamespace(reply_request_error=print, **callbacks)), order, lambda _: None
    )
    for number in range(slot_count):
        made.processes.add(f"w{number}", policy=policy)
    return made, orders


def group(
    first: Request, *others: Request, policy: BatchingPolicy = ROWS, times: DurationEstimates | None = None
) -> BatchGroup:
    where = SlotConstraints(policy, partial((times or DurationEstimates()).expected_s, FAST))
    return form_group(first, cast(BatchKey, policy.batch_key(first.description)), [first, *others], where, 0.0)


def scheduler(policy: BatchingPolicy, *requests: Request, slot_count: int = 1) -> Scheduler:
    made = Scheduler(1000, 10**9, levels=2)
    for number in range(slot_count):
        made.slots.add(Slot(f"w{number}", (f"w{number}",), device=FAST, policy=policy))
    for each in requests:
        made.submit(each, 0.0)
    return made


def run_batches(made: Scheduler, count: int = 1000) -> list[list[tuple[int, int]]]:
    """Run up to `count` batches, one after another on each slot; return each as pairs of request number and rows."""
    seen: list[list[tuple[int, int]]] = []
    running = [*made.assign(0.0)]
    while running and len(seen) < count:
        slot, batch = running.pop(0)
        seen.append([(part.request.number, part.rows or batch.rows) for part in batch.items.values()])
        for number in [*batch.items]:
            made.running.finish(slot.name, number, 0.0)
        running += made.assign(0.0)
    return seen


# --- merging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("runs_s", "rows"), [(1.0, 4), (5.0, 7)])
def test_divides_queue_among_slots_that_will_be_free(runs_s: float, rows: int) -> None:
    made = scheduler(ROWS, slot_count=2)
    kind = cast(BatchKey, ROWS.batch_key(request().description)).kind
    made._times.estimates.add(FAST, kind, 1, runs_s)
    made._times.estimates.add(FAST, kind, 7, 3.0)
    made.submit(request(), 0.0)
    assert len([*made.assign(0.0)]) == 1
    for _ in range(7):
        made.submit(request(), 0.1)
    [(_, batch)] = [*made.assign(0.1)]
    assert batch.rows == rows


def test_recent_answers_count_when_the_queue_is_divided() -> None:
    made = scheduler(ROWS, *[request() for _ in range(8)], slot_count=2)
    for slot, batch in [*made.assign(0.0)]:
        for number in [*batch.items]:
            made.running.finish(slot.name, number, 0.1)
    for at, sizes in ((0.2, [4]), (9.0, [2, 2])):
        for _ in range(4):
            made.submit(request(), at)
        began = [*made.assign(at)]
        assert [batch.rows for _, batch in began] == sizes
        for slot, batch in began:
            for number in [*batch.items]:
                made.running.finish(slot.name, number, at)


def test_merges_requests_that_differ_in_rows_only() -> None:
    first, wide, two, alone, five, one = request(2), request(1, 9), request(2), request(), request(5), request()
    isolate(alone, Isolation.ALONE)
    assert group(first, wide, two, alone, one) == ([first, two, one], 5, False)
    # Once a request does not fit, the batch is full: later requests must not overtake it.
    assert group(first, wide, two, five, one) == ([first, two], 4, True)
    assert group(request(8), one).is_full


def test_inexact_models_merge_one_principal_only() -> None:
    ann, bob, other = request(principal="ann"), request(principal="bob"), request(principal="ann")
    assert group(ann, bob, other).requests == [ann, bob, other]
    assert group(ann, bob, other, policy=replace(ROWS, is_exact=False)).requests == [ann, other]


def test_unmerged_principals_run_alone_and_unsplit() -> None:
    policy = replace(SPLIT, unmerged_principals=frozenset({principal_id("a")}))
    of_a, of_b = [request(principal="a") for _ in range(3)], [request(principal="b") for _ in range(3)]
    assert group(of_a[0], *of_b, *of_a, policy=policy).requests == [of_a[0]]
    assert group(of_b[0], *of_a, *of_b, policy=policy).requests == of_b
    form = cast(BatchKey, policy.batch_key(request(8).description))
    assert [policy.should_split(form, principal) for principal in ("a", "b")] == [False, True]
    made = scheduler(policy, request(8, principal="a"), request(8, principal="b"))
    assert [len(batch) for batch in run_batches(made)] == [1, 1, 1]
    # Policies that differ only in these principals are equal: split requests continue where one is added.
    assert policy == SPLIT


def test_workers_get_principals_to_compare_results() -> None:
    for policy, principals in (
        (ROWS, (principal_id("a"), principal_id("b"))),
        (replace(ROWS, is_exact=False, max_rows=2), ()),
    ):
        made, orders = dispatcher(10, slot_count=0, policy=policy)
        for principal in "ab" if policy.is_exact else "aa":
            made.infer(request(principal=principal), 0.0)
        made.processes.add("w0", policy=policy)
        made.dispatch(0.0)
        assert [each for each in orders if isinstance(each, BeginBatch)] == [BeginBatch(2, 0, principals)]
        assert [made.principal_names.name_of(each) for each in principals] == ["a", "b"][: len(principals)]


def test_forgets_oldest_principal_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_groups_module, "_MAX_NAMES", 2)
    names = RecentNames()
    numbers = [names.number_of(principal) for principal in "aabc"]
    assert numbers == [principal_id(principal) for principal in "aabc"]
    assert [names.name_of(each) for each in numbers[1:]] == ["a tenant or user of a previous daemon", "b", "c"]


def test_merging_does_not_miss_deadlines() -> None:
    times, kind = DurationEstimates(), ROWS.batch_key(request().description)
    assert kind is not None
    times.add(FAST, kind.kind, 1, 0.01)
    times.add(FAST, kind.kind, 3, 0.02)
    urgent, first, patient = request(deadline=0.015), request(deadline=0.025), request()
    assert group(first, urgent, patient, times=times).requests == [first, patient]
    assert group(urgent, first, patient, times=times).requests == [urgent]


def test_batches_are_short_while_another_shape_waits() -> None:
    times, form = DurationEstimates(), ROWS.batch_key(request().description)
    assert form is not None
    for rows in (1, 2, 4, 8):
        times.add(FAST, form.kind, rows, 0.4 * MAX_BATCH_S * rows)
    same = [request() for _ in range(6)]
    assert group(*same, times=times).rows == 6
    assert group(same[0], request(1, 9), *same[1:], times=times).rows == 2


def test_looks_at_a_limited_number_of_requests() -> None:
    first, others = request(), [request(1, 9) for _ in range(64)]
    assert group(first, *others[:63], request()).rows == 2
    assert group(first, *others, request()).rows == 1


# --- order ----------------------------------------------------------------------------------------------------------


def test_shapes_take_turns() -> None:
    waiting = [request(1, width) for _ in range(20) for width in (1, 2, 3)]
    ran = run_batches(scheduler(ROWS, *waiting))
    widths = [
        next(each for each in waiting if each.number == batch[0][0]).description.inputs[0].shape[1] for batch in ran
    ]
    assert widths == [1, 2, 3] * 2 + [1, 2, 3]
    assert sorted(number for batch in ran for number, _ in batch) == [each.number for each in waiting]


def test_higher_priority_runs_before_remaining_splits() -> None:
    large, urgent, other = request(12, level=1), request(), request(width=2)
    made = scheduler(SPLIT, large)
    assert [batch.requests for _, batch in made.assign(0.0)] == [[large], [large]]
    made.submit(urgent, 0.0)
    made.submit(other, 0.0)
    made.running.finish("w0", 2**62, 0.0)
    # The part that is ready runs first; no further part is assigned before the urgent request.
    assert list(made.assign(0.0)) == []
    for number, runs in ((2**62 + 1, [[urgent]]), (urgent.number, [[other], [large]])):
        made.running.finish("w0", number, 0.0)
        assert [batch.requests for _, batch in made.assign(0.0)] == runs


def test_started_splits_run_before_lower_priority() -> None:
    urgent, low = request(16), [request(width=width, level=1) for width in (1, 2)]
    ran = [number for batch in run_batches(scheduler(SPLIT, urgent, *low)) for number, _ in batch]
    assert ran == [urgent.number] * 4 + [each.number for each in low]


def test_splits_of_higher_priority_run_first() -> None:
    started, other, urgent = request(12, level=1), request(12, level=1), request(12)
    made = scheduler(SPLIT, started)
    first = [batch.number for _, batch in made.assign(0.0)]
    made.submit(other, 0.0)
    made.submit(urgent, 0.0)
    for number in first:
        made.running.finish("w0", number, 0.0)
    ran = [number for batch in run_batches(made) for number, _ in batch]
    assert ran == [*[urgent.number] * 3, started.number, *[other.number] * 3]


def test_isolated_request_waits_for_no_further_splits() -> None:
    alone, other = request(8), request(40)
    made = scheduler(SPLIT, alone, slot_count=2)
    given = [*made.assign(0.0)]
    made.submit(other, 0.0)
    given += made.assign(0.0)
    isolate(alone, Isolation.ALONE)
    made.release_slot("w0")
    ran: list[list[Request]] = []
    for number in [batch.number for slot, batch in given if slot.name == "w1"]:
        made.running.finish("w1", number, 0.0)
        ran += [batch.requests for _, batch in made.assign(0.0)]
    assert ran == [[alone]]


def test_does_not_gather_without_merging_slots() -> None:
    made = scheduler(ROWS, request())
    assert made.may_gather
    made.slots.set_policy("w0", replace(ROWS, max_rows=1))
    assert not made.slots.merging
    assert not made.may_gather


def test_only_full_batches_queue_behind_a_busy_slot() -> None:
    made = scheduler(ROWS, request(), *(request() for _ in range(7)))
    assert [batch.item_count for _, batch in made.assign(0.0)] == [8]
    made.submit(request(), 0.0)
    assert list(made.assign(0.0)) == []
    for _ in range(7):
        made.submit(request(), 0.0)
    assert [batch.item_count for _, batch in made.assign(0.0)] == [8]


def test_splits_run_on_one_model_version() -> None:
    made, large = scheduler(SPLIT, slot_count=0), request(12)
    for name, source in (("old", 1), ("new", 2)):
        made.slots.add(Slot(name, (name,), policy=replace(SPLIT, source_number=source)))
    made.submit(large, 0.0)
    first = [(slot.name, next(iter(batch.items.values()))) for slot, batch in made.assign(0.0)]
    assert [(name, part.rows) for name, part in first] == [("old", 4), ("old", 4)]
    made.slots.retire("old")
    assert [slot.name for slot, _ in made.assign(0.0)] == ["new", "new"]
    assert made.running.finish("old", first[0][1].number, 0.0) is None


def test_merges_requests_that_arrive_together() -> None:
    made, orders = dispatcher(max_queue=4)
    made.infer(request(), 0.0)
    assert made.next_event_at == AT_ONCE
    made.dispatch_gathered(0.0)
    made.infer(request(), 0.0)
    made.dispatch_gathered(0.0)
    assert orders == []
    made.dispatch_gathered(0.0)
    assert [type(each) for each in orders] == [BeginBatch, Predict, Predict]
    assert made.next_event_at > AT_ONCE
    for _ in range(4):
        made.infer(request(), 0.0)
    with pytest.raises(ResourceExhausted):
        made.infer(request(), 0.0)


def test_full_queue_accepts_requests_that_can_run() -> None:
    made, orders = dispatcher(max_queue=1, slot_count=2)
    for _ in range(3):
        made.infer(request(), 0.0)
    assert len(orders) == 2


# --- splitting ------------------------------------------------------------------------------------------------------


def split_request(part_rows: int = 1000, sizes: tuple[int, ...] = (), asked: Request | None = None) -> SplitRequest:
    asked, policy = asked or request(64), replace(SPLIT, max_split_rows=part_rows, sizes=sizes)
    form = policy.batch_key(asked.description)
    assert form is not None
    return SplitRequest(asked, policy, form)


def durations(whole: SplitRequest, **seconds: float) -> DurationEstimates:
    """Return the durations of devices for all rows of the request."""
    times = DurationEstimates()
    for device, each in seconds.items():
        times.add(device, whole.batch_key.kind, whole.batch_key.rows, each)
    return times


@pytest.mark.parametrize(
    ("part_rows", "a", "b", "split_sizes"),
    [
        (32, 1.0, 1.2, [32, 32]),  # 35 and 29 rows by speed; fewer would need a third part
        (32, 1.2, 1.0, [32, 32]),
        (64, 3.0, 1.0, [16, 48]),
        (64, 1.0, 3.0, [48, 16]),
        (64, 1.0, 5.0, [64]),
    ],
)
def test_split_sizes_follow_device_speed(part_rows: int, a: float, b: float, split_sizes: list[int]) -> None:
    whole = split_request(part_rows)
    times = durations(whole, a=a, b=b)
    taken: list[int] = []
    while whole.is_pending:
        rows = next_split_rows(whole, "ab"[len(taken) % 2], ["a", "b"], times, math.inf)
        taken.append(whole.take_rows(rows)[1])
    assert taken == split_sizes


def test_split_has_a_size_of_the_model() -> None:
    assert next_split_rows(split_request(sizes=(8, 16)), "a", ["a", "b"], DurationEstimates(), math.inf) == 16
    assert next_split_rows(split_request(sizes=(64,)), "a", ["a", "b"], DurationEstimates(), math.inf) == 64


def test_splits_are_short_only_while_others_wait() -> None:
    whole = split_request()
    slow = durations(whole, a=4 * MAX_BATCH_S)
    assert next_split_rows(whole, "a", ["a"], slow, math.inf) == 64
    assert next_split_rows(whole, "a", ["a"], slow, MAX_BATCH_S) == 16


def test_splits_grow_again_after_one_slow_batch() -> None:
    whole = split_request()
    times, kind = durations(whole, a=2 * MAX_BATCH_S), whole.batch_key.kind
    assert times.max_rows_within("a", kind, 64, MAX_BATCH_S) == 32
    times.add("a", kind, 32, 0.5 * MAX_BATCH_S)
    assert times.max_rows_within("a", kind, 32, MAX_BATCH_S) == 32


def test_partial_result_needs_all_outputs() -> None:
    whole = split_request()
    with pytest.raises(
        Internal,
        match=r"^outputs \[0\] of a split request: expected frames where no output memory was offered, got none$",
    ):
        whole.add_result(
            *whole.take_rows(32),
            PredictResult(1, ResponseDescription("m", (TensorSpec("y", "FP32", (32, 1)),)), (0,)),
            [],
        )


@pytest.mark.parametrize(
    ("begin", "nbytes", "areas"),
    [(256, 128, [(256, 64), (320, 64)]), (256, 96, []), (252, 128, []), (0, 64, [])],
    ids=["rows have fixed bytes", "bytes not divisible", "overlaps an input", "equals an input"],
)
def test_splits_write_their_own_rows(begin: int, nbytes: int, areas: list[tuple[int, int]]) -> None:
    asked, memory = request(64), SharedRegion(1, os.dup(0), 1000, os.close)
    asked.locations = TensorLocations({0: TensorLocation(memory, 0, 256)}, {0: TensorLocation(memory, begin, nbytes)})
    whole = split_request(asked=asked)
    outputs = [whole.tensors_of(*whole.take_rows(32))[1].outputs for _ in range(2)]
    assert [(each.offset, each.nbytes) for some in outputs for each in some.values()] == areas


def test_result_in_shared_memory_has_no_frames() -> None:
    answers: list[object] = []

    def answer(*each: object) -> None:
        answers.append(each)

    made, orders = dispatcher(4, 2, replace(SPLIT, max_rows=1), reserve_partial_result=print, reply_result=answer)
    asked, memory = request(8), SharedRegion(1, os.dup(0), 100, os.close)
    asked.locations = TensorLocations({}, {0: TensorLocation(memory, 10, 32)})
    made.infer(asked, 0.0)
    assert [each.regions for each in orders if isinstance(each, Predict)] == [
        MappedRegions((), (MappedOutput(0, 1, begin, 16),)) for begin in (10, 26)
    ]
    described = ResponseDescription("m", (TensorSpec("y", "FP32", (4, 1)),))
    for slot in (0, 1):
        made.results.on_result(f"w{slot}", PredictResult(2**62 + slot, described, (0,)), [], 1.0)
    whole = ResponseDescription("m", (TensorSpec("y", "FP32", (8, 1)),))
    assert (answers, asked.may_still_write) == ([(asked, PredictResult(asked.number, whole, (0,)), [])], False)


def partial_result(rows: int, y: bytes, t: bytes = b"t", shape: tuple[int, ...] = (2,)) -> PartialResult:
    outputs = TensorSpec("y", "UINT8", (rows, *shape)), TensorSpec("t", "UINT8", (1,))
    return PartialResult(rows, ResponseDescription("m", outputs), [y, t])


def test_joins_results_in_the_order_of_rows() -> None:
    description, frames = join_results([partial_result(1, b"aa"), partial_result(2, b"bbcc")], "y")
    assert ([each.shape for each in description.outputs], frames) == ([(3, 2), (1,)], [b"aabbcc", b"t"])


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            partial_result(1, b"b", shape=(1,)),
            r"^output y of a partial result: expected y UINT8 \[1, 2\], got y UINT8 \[1, 1\]$",
        ),
        (
            partial_result(1, b"bb", b"u"),
            "^output t has no rows, and differs between the partial results of the request$",
        ),
        (
            PartialResult(1, ResponseDescription("m", ()), []),
            r"^output y of a partial result: expected y UINT8 \[1, 2\], got none$",
        ),
    ],
)
def test_mismatching_partial_results_are_an_error(other: PartialResult, text: str) -> None:
    with pytest.raises(Internal, match=text):
        join_results([partial_result(1, b"aa"), other], "y")


# --- usage ----------------------------------------------------------------------------------------------------------


def test_slot_seconds_of_a_batch_are_divided_by_rows() -> None:
    small, large, whole = request(1), request(3), request(2)
    made = scheduler(ROWS, small, large)
    [(slot, batch)] = [*made.assign(2.0)]
    for number in [*batch.items]:
        made.running.finish(slot.name, number, 6.0)
    accounts = [each.usage for each in (small, large)]
    assert [(each.rows, each.slot_seconds, each.queue_seconds) for each in accounts] == [(1, 1.0, 2.0), (3, 3.0, 2.0)]
    alone = scheduler(BatchingPolicy(), whole)
    [(slot, batch)] = [*alone.assign(0.0)]
    alone.running.finish(slot.name, batch.number, 5.0)
    # Without batching, the number of rows is unknown here.
    assert (whole.usage.rows, whole.usage.slot_seconds) == (0, 5.0)


def test_split_request_counts_its_wait_and_rows_once() -> None:
    split_request = request(8)
    made = scheduler(SPLIT, split_request)
    # The second part is queued behind the first one.
    for end, (slot, batch) in zip((3.0, 5.0), [*made.assign(1.0)], strict=True):
        made.running.finish(slot.name, batch.number, end)
    assert (split_request.usage.rows, split_request.usage.slot_seconds, split_request.usage.queue_seconds) == (
        8,
        4.0,
        1.0,
    )


# --- tenants ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "loser"), [(2, "a"), (1, "b")])
def test_evicts_splitting_requests_that_have_not_begun(count: int, loser: str) -> None:
    a, b, c = (Tenant(name, TenantConfig(weight=weight)) for name, weight in (("a", 0.001), ("b", 1.0), ("c", 1.0)))
    made = Scheduler(6, 10**9)
    made.slots.add(Slot("w", ("w",), device=FAST, policy=SPLIT))
    evicted: list[tuple[Request, RequestError]] = []

    def ask(tenant: Tenant, rows: int) -> Request:
        asked = request(rows, tenant=tenant)
        made.on_request(asked, 0.0)
        evicted[:] = made.submit(asked, 0.0)
        return asked

    ask(c, 1)
    of_a = [ask(a, 12) for _ in range(count)]
    assert len(run_batches(made, 2)) == 2
    assert [*made.queue.splitting] == of_a
    of_b = [ask(b, 1) for _ in range(6 - count)]
    ask(c, 1)
    assert [each for each, _ in evicted] == [{"a": of_a, "b": of_b}[loser][-1]]
