"""What shares a batch, what is cut, whose turn it is, and how answers are put together."""

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
CUT = replace(ROWS, max_split_rows=4)
FAST, SLOW = "cpu:0", "cpu:1"

_numbers = itertools.count(1)


def request(
    rows: int = 1,
    width: int = 1,
    deadline: float = 1e9,
    level: int = 0,
    far: str = "",
    tenant: Tenant = DEFAULT_TENANT,
) -> Request:
    number = next(_numbers)
    asked = RequestDescription("m", (TensorSpec("x", "FP32", (rows, width)),))
    frames = [bytes(4 * rows * width)]
    origin = ClientOrigin(far, far)
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


def desk(
    max_queue: int, seats: int = 1, terms: BatchingPolicy = ROWS, **askers: object
) -> tuple[Dispatcher, list[ChildOrder]]:
    """A dispatcher, and the orders that it gives."""
    orders: list[ChildOrder] = []

    def order(name: str, order: ChildOrder, frames: object, memories: object) -> None:
        orders.append(order)

    config = ModelConfig(path="/m.onnx", engine="onnxruntime", max_queue=max_queue)
    made = Dispatcher(
        "m", config, cast(ResponseSink, SimpleNamespace(reply_request_error=print, **askers)), order, lambda _: None
    )
    for number in range(seats):
        made.processes.add(f"w{number}", policy=terms)
    return made, orders


def group(
    first: Request, *others: Request, terms: BatchingPolicy = ROWS, times: DurationEstimates | None = None
) -> BatchGroup:
    where = SlotConstraints(terms, partial((times or DurationEstimates()).expected_s, FAST))
    return form_group(first, cast(BatchKey, terms.batch_key(first.description)), [first, *others], where, 0.0)


def scheduler(terms: BatchingPolicy, *requests: Request, seats: int = 1) -> Scheduler:
    made = Scheduler(1000, 10**9, levels=2)
    for number in range(seats):
        made.slots.add(Slot(f"w{number}", (f"w{number}",), device=FAST, policy=terms))
    for each in requests:
        made.submit(each, 0.0)
    return made


def jobs(made: Scheduler, count: int = 1000) -> list[list[tuple[int, int]]]:
    """Run so many batches, one after another on each slot; return each as pairs of request and rows."""
    seen: list[list[tuple[int, int]]] = []
    running = [*made.assign(0.0)]
    while running and len(seen) < count:
        seat, job = running.pop(0)
        seen.append([(part.request.number, part.rows or job.rows) for part in job.items.values()])
        for number in [*job.items]:
            made.running.finish(seat.name, number, 0.0)
        running += made.assign(0.0)
    return seen


# --- what shares a batch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("runs_s", "rows"), [(1.0, 4), (5.0, 7)])
def test_what_waits_is_divided_with_seats_that_will_be_free_before_it_had_run(runs_s: float, rows: int) -> None:
    made = scheduler(ROWS, seats=2)
    kind = cast(BatchKey, ROWS.batch_key(request().description)).kind
    made._times.estimates.add(FAST, kind, 1, runs_s)
    made._times.estimates.add(FAST, kind, 7, 3.0)
    made.submit(request(), 0.0)
    assert len([*made.assign(0.0)]) == 1
    for _ in range(7):
        made.submit(request(), 0.1)
    [(_, job)] = [*made.assign(0.1)]
    assert job.rows == rows


def test_who_was_just_answered_is_counted_where_what_waits_is_divided() -> None:
    made = scheduler(ROWS, *[request() for _ in range(8)], seats=2)
    for seat, job in [*made.assign(0.0)]:
        for number in [*job.items]:
            made.running.finish(seat.name, number, 0.1)
    for at, sizes in ((0.2, [4]), (9.0, [2, 2])):
        for _ in range(4):
            made.submit(request(), at)
        began = [*made.assign(at)]
        assert [job.rows for _, job in began] == sizes
        for seat, job in began:
            for number in [*job.items]:
                made.running.finish(seat.name, number, at)


def test_what_waits_and_differs_in_its_rows_alone_goes_together_up_to_the_bound() -> None:
    first, wide, two, alone, five, one = request(2), request(1, 9), request(2), request(), request(5), request()
    isolate(alone, Isolation.ALONE)
    assert group(first, wide, two, alone, one) == ([first, two, one], 5, False)
    # Once something did not fit, the batch is full: what comes later shall not overtake it.
    assert group(first, wide, two, five, one) == ([first, two], 4, True)
    assert group(request(8), one).is_full


def test_where_answers_may_differ_only_one_user_s_requests_go_together() -> None:
    ann, bob, other = request(far="ann"), request(far="bob"), request(far="ann")
    assert group(ann, bob, other).requests == [ann, bob, other]
    assert group(ann, bob, other, terms=replace(ROWS, is_exact=False)).requests == [ann, other]


def test_requests_of_whom_rows_were_found_to_differ_share_no_job_and_run_in_one_piece() -> None:
    terms = replace(CUT, unmerged_principals=frozenset({principal_id("a")}))
    of_a, of_b = [request(far="a") for _ in range(3)], [request(far="b") for _ in range(3)]
    assert group(of_a[0], *of_b, *of_a, terms=terms).requests == [of_a[0]]
    assert group(of_b[0], *of_a, *of_b, terms=terms).requests == of_b
    form = cast(BatchKey, terms.batch_key(request(8).description))
    assert [terms.should_split(form, far) for far in ("a", "b")] == [False, True]
    made = scheduler(terms, request(8, far="a"), request(8, far="b"))
    assert [len(job) for job in jobs(made)] == [1, 1, 1]
    # What has begun in parts goes on where they are added.
    assert terms == CUT


def test_a_worker_is_told_whose_the_requests_of_a_job_are_where_their_answers_have_to_be_the_same() -> None:
    for terms, principals in (
        (ROWS, (principal_id("a"), principal_id("b"))),
        (replace(ROWS, is_exact=False, max_rows=2), ()),
    ):
        made, orders = desk(10, seats=0, terms=terms)
        for far in "ab" if terms.is_exact else "aa":
            made.infer(request(far=far), 0.0)
        made.processes.add("w0", policy=terms)
        made.dispatch(0.0)
        assert [each for each in orders if isinstance(each, BeginBatch)] == [BeginBatch(2, 0, principals)]
        assert [made.principal_names.name_of(each) for each in principals] == ["a", "b"][: len(principals)]


def test_names_are_forgotten_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_groups_module, "_MAX_NAMES", 2)
    names = RecentNames()
    numbers = [names.number_of(far) for far in "aabc"]
    assert numbers == [principal_id(far) for far in "aabc"]
    assert [names.name_of(each) for each in numbers[1:]] == ["a tenant or user of a previous daemon", "b", "c"]


def test_nobody_misses_a_deadline_for_company() -> None:
    times, kind = DurationEstimates(), ROWS.batch_key(request().description)
    assert kind is not None
    times.add(FAST, kind.kind, 1, 0.01)
    times.add(FAST, kind.kind, 3, 0.02)
    hasty, first, patient = request(deadline=0.015), request(deadline=0.025), request()
    assert group(first, hasty, patient, times=times).requests == [first, patient]
    assert group(hasty, first, patient, times=times).requests == [hasty]


def test_while_another_shape_waits_a_job_takes_no_longer_than_that_is_asked_to_wait() -> None:
    times, form = DurationEstimates(), ROWS.batch_key(request().description)
    assert form is not None
    for rows in (1, 2, 4, 8):
        times.add(FAST, form.kind, rows, 0.4 * MAX_BATCH_S * rows)
    same = [request() for _ in range(6)]
    assert group(*same, times=times).rows == 6
    assert group(same[0], request(1, 9), *same[1:], times=times).rows == 2


def test_a_look_at_what_waits_has_an_end() -> None:
    first, others = request(), [request(1, 9) for _ in range(64)]
    assert group(first, *others[:63], request()).rows == 2
    assert group(first, *others, request()).rows == 1


# --- whose turn it is -----------------------------------------------------------------------------------------------


def test_no_shape_waits_longer_than_one_job_of_each_other_shape_that_came_before() -> None:
    waiting = [request(1, width) for _ in range(20) for width in (1, 2, 3)]
    ran = jobs(scheduler(ROWS, *waiting))
    widths = [next(each for each in waiting if each.number == job[0][0]).description.inputs[0].shape[1] for job in ran]
    assert widths == [1, 2, 3] * 2 + [1, 2, 3]
    assert sorted(number for job in ran for number, _ in job) == [each.number for each in waiting]


def test_a_higher_priority_goes_before_what_has_begun() -> None:
    large, urgent, other = request(12, level=1), request(), request(width=2)
    made = scheduler(CUT, large)
    assert [job.requests for _, job in made.assign(0.0)] == [[large], [large]]
    made.submit(urgent, 0.0)
    made.submit(other, 0.0)
    made.running.finish("w0", 2**62, 0.0)
    # What is ready there runs first; nothing more of it is made ready before what is urgent.
    assert list(made.assign(0.0)) == []
    for number, runs in ((2**62 + 1, [[urgent]]), (urgent.number, [[other], [large]])):
        made.running.finish("w0", number, 0.0)
        assert [job.requests for _, job in made.assign(0.0)] == runs


def test_what_has_begun_goes_before_what_has_a_lower_priority() -> None:
    urgent, low = request(16), [request(width=width, level=1) for width in (1, 2)]
    ran = [number for job in jobs(scheduler(CUT, urgent, *low)) for number, _ in job]
    assert ran == [urgent.number] * 4 + [each.number for each in low]


def test_of_what_runs_in_parts_a_higher_priority_goes_first() -> None:
    begun, other, urgent = request(12, level=1), request(12, level=1), request(12)
    made = scheduler(CUT, begun)
    first = [job.number for _, job in made.assign(0.0)]
    made.submit(other, 0.0)
    made.submit(urgent, 0.0)
    for number in first:
        made.running.finish("w0", number, 0.0)
    ran = [number for job in jobs(made) for number, _ in job]
    assert ran == [*[urgent.number] * 3, begun.number, *[other.number] * 3]


def test_one_that_has_to_run_alone_waits_for_no_more_parts_of_another() -> None:
    alone, other = request(8), request(40)
    made = scheduler(CUT, alone, seats=2)
    given = [*made.assign(0.0)]
    made.submit(other, 0.0)
    given += made.assign(0.0)
    isolate(alone, Isolation.ALONE)
    made.release_slot("w0")
    ran: list[list[Request]] = []
    for number in [job.number for seat, job in given if seat.name == "w1"]:
        made.running.finish("w1", number, 0.0)
        ran += [job.requests for _, job in made.assign(0.0)]
    assert ran == [[alone]]


def test_nothing_waits_for_company_that_may_have_none_any_more() -> None:
    made = scheduler(ROWS, request())
    assert made.may_gather
    made.slots.set_policy("w0", replace(ROWS, max_rows=1))
    assert not made.slots.merging
    assert not made.may_gather


def test_a_job_that_may_grow_waits_for_a_free_seat_and_a_full_one_does_not() -> None:
    made = scheduler(ROWS, request(), *(request() for _ in range(7)))
    assert [job.item_count for _, job in made.assign(0.0)] == [8]
    made.submit(request(), 0.0)
    assert list(made.assign(0.0)) == []
    for _ in range(7):
        made.submit(request(), 0.0)
    assert [job.item_count for _, job in made.assign(0.0)] == [8]


def test_parts_of_a_request_run_on_one_model_and_all_anew_if_no_seat_has_it_any_more() -> None:
    made, large = scheduler(CUT, seats=0), request(12)
    for name, source in (("old", 1), ("new", 2)):
        made.slots.add(Slot(name, (name,), policy=replace(CUT, source_number=source)))
    made.submit(large, 0.0)
    first = [(seat.name, next(iter(job.items.values()))) for seat, job in made.assign(0.0)]
    assert [(name, part.rows) for name, part in first] == [("old", 4), ("old", 4)]
    made.slots.retire("old")
    assert [seat.name for seat, _ in made.assign(0.0)] == ["new", "new"]
    assert made.running.finish("old", first[0][1].number, 0.0) is None


def test_what_has_come_until_it_is_all_taken_in_goes_together() -> None:
    made, orders = desk(max_queue=4)
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


def test_a_queue_that_is_full_of_what_could_run_refuses_nobody() -> None:
    made, orders = desk(max_queue=1, seats=2)
    for _ in range(3):
        made.infer(request(), 0.0)
    assert len(orders) == 2


# --- parts ----------------------------------------------------------------------------------------------------------


def cut(part_rows: int = 1000, sizes: tuple[int, ...] = (), asked: Request | None = None) -> SplitRequest:
    asked, terms = asked or request(64), replace(CUT, max_split_rows=part_rows, sizes=sizes)
    form = terms.batch_key(asked.description)
    assert form is not None
    return SplitRequest(asked, terms, form)


def known(whole: SplitRequest, **seconds: float) -> DurationEstimates:
    """The times of devices for all rows of the request."""
    times = DurationEstimates()
    for device, each in seconds.items():
        times.add(device, whole.batch_key.kind, whole.batch_key.rows, each)
    return times


@pytest.mark.parametrize(
    ("part_rows", "a", "b", "parts"),
    [
        (32, 1.0, 1.2, [32, 32]),  # 35 and 29 of the rows: with any less there would be a third part
        (32, 1.2, 1.0, [32, 32]),
        (64, 3.0, 1.0, [16, 48]),
        (64, 1.0, 3.0, [48, 16]),
        (64, 1.0, 5.0, [64]),
    ],
)
def test_parts_are_as_devices_are_quick_and_leave_no_few_rows(
    part_rows: int, a: float, b: float, parts: list[int]
) -> None:
    whole = cut(part_rows)
    times = known(whole, a=a, b=b)
    taken: list[int] = []
    while whole.is_pending:
        rows = next_split_rows(whole, "ab"[len(taken) % 2], ["a", "b"], times, math.inf)
        taken.append(whole.take_rows(rows)[1])
    assert taken == parts


def test_a_part_has_one_of_the_sizes_of_the_model() -> None:
    assert next_split_rows(cut(sizes=(8, 16)), "a", ["a", "b"], DurationEstimates(), math.inf) == 16
    assert next_split_rows(cut(sizes=(64,)), "a", ["a", "b"], DurationEstimates(), math.inf) == 64


def test_a_part_is_short_only_while_others_wait() -> None:
    whole = cut()
    slow = known(whole, a=4 * MAX_BATCH_S)
    assert next_split_rows(whole, "a", ["a"], slow, math.inf) == 64
    assert next_split_rows(whole, "a", ["a"], slow, MAX_BATCH_S) == 16


def test_one_long_job_does_not_make_parts_short_for_good() -> None:
    whole = cut()
    times, kind = known(whole, a=2 * MAX_BATCH_S), whole.batch_key.kind
    assert times.max_rows_within("a", kind, 64, MAX_BATCH_S) == 32
    times.add("a", kind, 32, 0.5 * MAX_BATCH_S)
    assert times.max_rows_within("a", kind, 32, MAX_BATCH_S) == 32


def test_the_answer_to_a_part_has_all_of_its_outputs() -> None:
    whole = cut()
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
    ("begin", "nbytes", "rooms"),
    [(256, 128, [(256, 64), (320, 64)]), (256, 96, []), (252, 128, []), (0, 64, [])],
    ids=["a row has its bytes", "it has none of its own", "an input is there, too", "so it is"],
)
def test_each_part_has_room_for_its_own_rows_where_nobody_has_to_read(
    begin: int, nbytes: int, rooms: list[tuple[int, int]]
) -> None:
    asked, memory = request(64), SharedRegion(1, os.dup(0), 1000, os.close)
    asked.locations = TensorLocations({0: TensorLocation(memory, 0, 256)}, {0: TensorLocation(memory, begin, nbytes)})
    whole = cut(asked=asked)
    outputs = [whole.tensors_of(*whole.take_rows(32))[1].outputs for _ in range(2)]
    assert [(each.offset, each.nbytes) for some in outputs for each in some.values()] == rooms


def test_an_answer_of_which_all_rows_are_where_they_belong_has_no_frame() -> None:
    answers: list[object] = []

    def answer(*each: object) -> None:
        answers.append(each)

    made, orders = desk(4, 2, replace(CUT, max_rows=1), reserve_partial_result=print, reply_result=answer)
    asked, memory = request(8), SharedRegion(1, os.dup(0), 100, os.close)
    asked.locations = TensorLocations({}, {0: TensorLocation(memory, 10, 32)})
    made.infer(asked, 0.0)
    assert [each.regions for each in orders if isinstance(each, Predict)] == [
        MappedRegions((), (MappedOutput(0, 1, begin, 16),)) for begin in (10, 26)
    ]
    described = ResponseDescription("m", (TensorSpec("y", "FP32", (4, 1)),))
    for seat in (0, 1):
        made.results.on_result(f"w{seat}", PredictResult(2**62 + seat, described, (0,)), [], 1.0)
    whole = ResponseDescription("m", (TensorSpec("y", "FP32", (8, 1)),))
    assert (answers, asked.may_still_write) == ([(asked, PredictResult(asked.number, whole, (0,)), [])], False)


def piece(rows: int, y: bytes, t: bytes = b"t", shape: tuple[int, ...] = (2,)) -> PartialResult:
    outputs = TensorSpec("y", "UINT8", (rows, *shape)), TensorSpec("t", "UINT8", (1,))
    return PartialResult(rows, ResponseDescription("m", outputs), [y, t])


def test_answers_are_put_together_in_the_order_of_the_rows() -> None:
    description, frames = join_results([piece(1, b"aa"), piece(2, b"bbcc")], "y")
    assert ([each.shape for each in description.outputs], frames) == ([(3, 2), (1,)], [b"aabbcc", b"t"])


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            piece(1, b"b", shape=(1,)),
            r"^output y of a partial result: expected y UINT8 \[1, 2\], got y UINT8 \[1, 1\]$",
        ),
        (piece(1, b"bb", b"u"), "^output t has no rows, and differs between the partial results of the request$"),
        (
            PartialResult(1, ResponseDescription("m", ()), []),
            r"^output y of a partial result: expected y UINT8 \[1, 2\], got none$",
        ),
    ],
)
def test_answers_that_do_not_fit_together_are_an_error(other: PartialResult, text: str) -> None:
    with pytest.raises(Internal, match=text):
        join_results([piece(1, b"aa"), other], "y")


# --- whose time it is -----------------------------------------------------------------------------------------------


def test_the_seconds_of_a_job_are_divided_by_rows() -> None:
    small, large, whole = request(1), request(3), request(2)
    made = scheduler(ROWS, small, large)
    [(seat, job)] = [*made.assign(2.0)]
    for number in [*job.items]:
        made.running.finish(seat.name, number, 6.0)
    accounts = [each.usage for each in (small, large)]
    assert [(each.rows, each.slot_seconds, each.queue_seconds) for each in accounts] == [(1, 1.0, 2.0), (3, 3.0, 2.0)]
    alone = scheduler(BatchingPolicy(), whole)
    [(seat, job)] = [*alone.assign(0.0)]
    alone.running.finish(seat.name, job.number, 5.0)
    # How many rows it has nobody knows here.
    assert (whole.usage.rows, whole.usage.slot_seconds) == (0, 5.0)


def test_a_request_that_is_cut_has_waited_once_and_its_rows_count_once() -> None:
    cut = request(8)
    made = scheduler(CUT, cut)
    # The second part is ready behind the first.
    for end, (seat, job) in zip((3.0, 5.0), [*made.assign(1.0)], strict=True):
        made.running.finish(seat.name, job.number, end)
    assert (cut.usage.rows, cut.usage.slot_seconds, cut.usage.queue_seconds) == (8, 4.0, 1.0)


# --- tenants ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "whose"), [(2, "a"), (1, "b")])
def test_what_is_to_run_in_parts_gives_way_in_a_full_line_until_some_of_it_has_begun(count: int, whose: str) -> None:
    a, b, c = (Tenant(name, TenantConfig(weight=weight)) for name, weight in (("a", 0.001), ("b", 1.0), ("c", 1.0)))
    made = Scheduler(6, 10**9)
    made.slots.add(Slot("w", ("w",), device=FAST, policy=CUT))
    evicted: list[tuple[Request, RequestError]] = []

    def ask(tenant: Tenant, rows: int) -> Request:
        asked = request(rows, tenant=tenant)
        made.on_request(asked, 0.0)
        evicted[:] = made.submit(asked, 0.0)
        return asked

    ask(c, 1)
    of_a = [ask(a, 12) for _ in range(count)]
    assert len(jobs(made, 2)) == 2
    assert [*made.queue.splitting] == of_a
    of_b = [ask(b, 1) for _ in range(6 - count)]
    ask(c, 1)
    assert [each for each, _ in evicted] == [{"a": of_a, "b": of_b}[whose][-1]]
