"""Batches of several requests: what becomes of one says nothing of any of its parts, until each has run alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from weightd_common import memfd
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.platform.log_setup import client_of
from weightd_daemon.scheduling.batch import Batch, BatchItem
from weightd_daemon.scheduling.batching.policy import BatchingPolicy
from weightd_daemon.scheduling.fault_isolation.contents import MAX_HANGS, SLICE_BYTES, SMALL_BYTES, compute_digest
from weightd_daemon.scheduling.fault_isolation.isolator import MAX_DEATHS, MAX_LOST_SLOTS, FaultIsolator
from weightd_daemon.scheduling.request import ClientOrigin, Isolation, Request
from weightd_daemon.scheduling.scheduler import Scheduler
from weightd_daemon.scheduling.slots import Slot
from weightd_daemon.scheduling.tenancy import REPLACEMENT_TIMEOUT_S
from weightd_daemon.scheduling.tensor_location import SharedRegion, TensorLocation, TensorLocations
from weightd_daemon.tenants.tenant import Tenant
from weightd_protocol.errors import Internal, RequestError
from weightd_protocol.messages.inference import RequestDescription, TensorSpec

ANN, BOB = ClientOrigin("ann 1", "ann"), ClientOrigin("bob 2", "bob")
CRASH, KILL = ExitCause(-signal.SIGSEGV), ExitCause(-signal.SIGKILL)
TIMEOUT_S = 60.0


class Bench:
    """A guard and its scheduler, and slots that are given what a test wants."""

    def __init__(self) -> None:
        config = ModelConfig(path="/m.onnx", engine="onnxruntime", predict_timeout=TIMEOUT_S)
        self.scheduler = Scheduler(100, 10_000, TIMEOUT_S)
        self.guard = FaultIsolator(config, self.scheduler, self.refuse)
        self.refused: dict[int, str] = {}
        self.seats = 0
        self.now = 0.0

    def refuse(self, request: Request, error: RequestError) -> None:
        assert request.number not in self.refused
        self.refused[request.number] = error.code
        request.is_ended = True

    def requests(self, *origins: ClientOrigin) -> list[Request]:
        """Requests of different contents."""
        return [
            Request(number, b"", "", RequestDescription("m", ()), (), 0.0, 1e9, number, origin, digest=b"%d" % number)
            for number, origin in enumerate(origins)
        ]

    def seat(self, *jobs: Batch) -> str:
        """Another slot, of two processes, that has these batches; return the name of its second process."""
        self.seats += 1
        first, second = f"s{self.seats}.0", f"s{self.seats}.1"
        self.scheduler.slots.add(Slot(f"s{self.seats}", (first, second)))
        seat = self.scheduler.slots.slot_of(second)
        assert seat is not None
        for job in jobs:
            seat.add_batch(job, self.now)
        return second

    def runs(self) -> list[list[int]]:
        """Give a new slot what is due; return its batches, each as the numbers of its requests."""
        process = self.seat()
        given = [job for _, job in self.scheduler.assign(self.now)]
        assert all(job.number == job.requests[0].number for job in given)
        self.last = process
        return [[*job.items] for job in given]


class Shared:
    """Memory of a client, and its requests whose one input is all of that."""

    def __init__(self, origin: ClientOrigin = ANN, nbytes: int = 2 * SLICE_BYTES + 1) -> None:
        self._origin = origin
        self._nbytes = nbytes
        self._descriptor = memfd.create(nbytes)
        self._memory = SharedRegion(1, self._descriptor, nbytes, os.close)
        self._count = 0

    def write(self, content: bytes) -> None:
        """Change the content."""
        os.pwrite(self._descriptor, content * self._nbytes, 0)

    def request(self) -> Request:
        """A request for what is there."""
        self._count += 1
        specs = (TensorSpec("x", "UINT8", (self._nbytes,)),)
        request = Request(self._count, b"", "", RequestDescription("m", specs), (), 0.0, 1e9, 0, self._origin)
        request.locations = TensorLocations({0: TensorLocation(self._memory, 0, self._nbytes)}, {})
        return request


def look(bench: Bench) -> int:
    """Have the guard read until it has nothing to read; return how many slices that took."""
    slices = 0
    while bench.guard.has_work:
        bench.guard.continue_fingerprint(bench.now)
        slices += 1
    return slices


def kill(bench: Bench, request: Request) -> None:
    """Have two slots die of a request."""
    for _ in range(2):
        bench.guard.on_exit(bench.seat(batch(request)), CRASH, bench.now)
        bench.scheduler.take_matching(lambda each: each is request)


def hang(bench: Bench, request: Request) -> None:
    """Have a slot hang in a request."""
    seat = bench.scheduler.slots.slot_of(bench.seat())
    assert seat is not None
    bench.scheduler.running.assign(seat, batch(request), bench.now)
    bench.now += TIMEOUT_S
    assert len(list(bench.guard.take_overdue(bench.now))) == 1


def check(bench: Bench, request: Request) -> None:
    """Have the guard check a request, and read its content if need be."""
    if bench.guard.check_request(request, bench.now):
        compute_digest(request)
        bench.guard._contents.quarantine.check_request(request, bench.now)


def batch(*requests: Request) -> Batch:
    return Batch.from_items([BatchItem(each.number, each) for each in requests])


def test_what_a_seat_died_of_is_found_by_running_the_parts_of_its_job_apart() -> None:
    bench = Bench()
    requests = bench.requests(ANN, BOB, ANN)
    bench.guard.on_exit(bench.seat(batch(*requests)), CRASH, bench.now)
    assert [(each.isolation, each.deaths) for each in requests] == [(Isolation.ALONE, 0)] * 3
    assert bench.guard._offenses.confined_names(bench.now) == []
    for _ in range(2):  # the first one kills, and only when it was alone that counts
        assert bench.refused == {}
        assert bench.runs() == [[0]]
        bench.guard.on_exit(bench.last, CRASH, bench.now)
    assert bench.refused == {0: "INTERNAL"}
    assert bench.guard._contents.quarantine.count(bench.now) == 1
    assert [bench.runs(), bench.runs()] == [[[1]], [[2]]]
    assert [each.deaths for each in requests] == [2, 0, 0]


def test_who_has_asked_all_of_a_job_answers_for_it_at_once() -> None:
    bench = Bench()
    for _ in range(4):
        assert bench.guard._offenses.confined_names(bench.now) == []
        bench.guard.on_exit(bench.seat(batch(*bench.requests(BOB, BOB))), CRASH, bench.now)
    assert bench.guard._offenses.confined_names(bench.now) == [BOB.peer]


def test_a_job_of_several_clients_accuses_none_of_them() -> None:
    bench = Bench()
    for _ in range(20):
        bench.guard.on_exit(bench.seat(batch(*bench.requests(ANN, BOB))), CRASH, bench.now)
    assert bench.guard._offenses.confined_names(bench.now) == []


@pytest.mark.parametrize("end", [CRASH, KILL])
def test_however_often_their_seats_end_the_parts_of_a_job_do_not_run_for_ever(end: ExitCause) -> None:
    bench = Bench()
    requests = bench.requests(ANN, BOB)
    for _ in range(MAX_LOST_SLOTS):
        assert bench.refused == {}
        bench.guard.on_exit(bench.seat(batch(*requests)), end, bench.now)
        assert bench.scheduler.take_matching(lambda each: each in requests) == [
            each for each in requests if not bench.refused
        ]
    assert bench.refused == {0: "UNAVAILABLE", 1: "UNAVAILABLE"}


def test_who_has_lost_several_seats_at_once_has_lost_one_and_is_told_once_of_the_last() -> None:
    bench = Bench()
    [request] = bench.requests(ANN)
    for turn in range(1, 1 + MAX_LOST_SLOTS):
        assert bench.refused == {}
        seats = [bench.seat(Batch.from_items([BatchItem(10 * turn + number, request)])) for number in range(2)]
        both = bench.scheduler.slots.slot_of(seats[0])
        assert both is not None
        both.concurrency = 2
        both.add_batch(Batch.from_items([BatchItem(10 * turn + 5, request)]), bench.now)
        bench.now += 1.0
        for each in seats:
            bench.guard.on_exit(each, KILL, bench.now)
            bench.scheduler.take_matching(lambda each: each is request)
        assert request.lost_slots == turn
        bench.now += 1.0
    assert bench.refused == {0: "UNAVAILABLE"}


def test_of_a_job_behind_another_what_nobody_waits_for_is_recalled() -> None:
    bench = Bench()
    first, two, three = bench.requests(ANN, ANN, BOB)
    bench.seat(batch(first), batch(two, three))
    assert bench.scheduler.end_matching(lambda each: each is two) == [(two, False)]
    assert bench.scheduler.end_matching(lambda each: each is three) == [(three, False)]
    assert [(seat.name, number) for seat, number in bench.scheduler.running.take_recalled()] == [("s1", 1), ("s1", 2)]
    assert bench.scheduler.slots.in_flight("s1.0") == 1


def test_what_a_seat_hangs_in_is_found_by_running_the_parts_of_its_job_apart() -> None:
    bench = Bench()
    *requests, gone = bench.requests(ANN, BOB, ANN)
    gone.is_ended = True
    bench.scheduler.submit(requests[0], bench.now)
    assert bench.runs() == [[0]]
    [seat] = [bench.scheduler.slots.slot_of(bench.last)]
    assert seat is not None
    seat.batches[0] = batch(*requests, gone)
    seat.batches[0].started_at = bench.now
    bench.now += TIMEOUT_S
    assert [each.name for each, _ in bench.guard.take_overdue(bench.now)] == ["s1"]
    assert (bench.refused, bench.scheduler.slots.slot_of(bench.last)) == ({}, None)
    assert [bench.runs(), bench.runs()] == [[[0]], [[1]]]
    assert bench.scheduler.queue.count == 0
    bench.now += TIMEOUT_S
    assert len(list(bench.guard.take_overdue(bench.now))) == 2
    assert bench.refused == {0: "DEADLINE_EXCEEDED", 1: "DEADLINE_EXCEEDED"}


@pytest.mark.parametrize(("end", "deaths"), [(CRASH, 1), (KILL, 0)])
def test_a_seat_that_was_lost_is_on_the_account_of_who_has_asked(end: ExitCause, deaths: int) -> None:
    bench = Bench()
    one, two, other = bench.requests(ANN, ANN, BOB)
    two.usage = one.usage
    process = bench.seat(batch(one, two))
    bench.now += 2.0
    bench.guard.on_exit(process, end, bench.now)
    assert (one.usage.unexpected_exits, one.usage.slot_seconds) == (deaths, 2.0)
    # Of two nobody can tell whose fault it was; the time they have had, whoever is to blame.
    process = bench.seat(batch(one, other))
    bench.now += 2.0
    bench.guard.on_exit(process, end, bench.now)
    assert (one.usage.unexpected_exits, other.usage.unexpected_exits) == (deaths, 0)
    assert other.usage.slot_seconds == 1.0


def test_until_a_tenant_was_answered_it_has_one_seat_at_a_time() -> None:
    bench = Bench()
    ann, ben = (ClientOrigin("process", f"tenant {name}", is_tenant=True) for name in ("ann", "ben"))
    first, other, later, nobody = bench.requests(ann, ben, ann, ANN)
    first.tenant = later.tenant = Tenant("ann", TenantConfig())
    other.tenant = Tenant("ben", TenantConfig())
    for each in (first, other, nobody):
        bench.guard.check_request(each, 0.0)
    assert [each.isolation for each in (first, other, nobody)] == [
        Isolation.CONFINED,
        Isolation.CONFINED,
        Isolation.BATCHABLE,
    ]
    bench.guard.on_answered(first, 0.0)
    for forgets in (False, True):
        if forgets:
            bench.guard.clear()
        bench.guard.check_request(later, 0.0)
        assert (later.isolation is Isolation.CONFINED) == forgets


def test_a_tenant_to_whom_a_seat_was_lost_has_no_other_before_that_is_replaced() -> None:
    bench = Bench()
    eve, ben = (ClientOrigin("process", f"tenant {name}", is_tenant=True) for name in ("eve", "ben"))
    poison, more, innocent = bench.requests(eve, eve, ben)
    poison.tenant = more.tenant = Tenant("eve", TenantConfig())
    innocent.tenant = Tenant("ben", TenantConfig())
    tenancy = bench.scheduler.tenancy
    bench.guard.on_exit(bench.seat(batch(poison)), CRASH, bench.now)
    assert bench.guard._offenses.confined_names(bench.now) == ["tenant eve"]
    assert (bench.refused, poison.deaths) == ({}, 1)
    assert (tenancy.is_confined_running(poison.tenant), tenancy.is_confined_running(innocent.tenant)) == (True, False)
    bench.seat()
    tenancy.update_unreplaced(bench.now)
    assert not tenancy.is_confined_running(poison.tenant)
    # The second one ends the request; where nothing replaces the slot, that is waited for so long and no longer.
    bench.guard.on_exit(bench.seat(batch(more)), CRASH, bench.now)
    assert bench.refused == {1: "INTERNAL"}
    for now, waits in ((REPLACEMENT_TIMEOUT_S - 0.1, True), (REPLACEMENT_TIMEOUT_S, False)):
        tenancy.update_unreplaced(now)
        assert tenancy.is_confined_running(more.tenant) is waits


def test_no_seat_is_missed_that_was_ended_from_outside() -> None:
    bench = Bench()
    [request] = bench.requests(ClientOrigin("process", "tenant eve", is_tenant=True))
    request.tenant = Tenant("eve", TenantConfig())
    bench.guard.on_exit(bench.seat(batch(request)), KILL, bench.now)
    assert not bench.scheduler.tenancy.is_confined_running(request.tenant)
    assert bench.guard._offenses.confined_names(bench.now) == []


def test_what_kills_workers_again_and_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    for request in bench.requests(*[ClientOrigin("process 1 of uid 1", "uid 1")] * 20):
        bench.guard._contents._quarantine_content(request, 1.0)  # pyright: ignore[reportPrivateUsage]
    lines = [each for each in caplog.records if "is in quarantine" in each.getMessage()]
    # A period may end meanwhile.
    assert 1 <= len(lines) <= 2
    assert client_of(lines[0]) == "uid 1"


@pytest.mark.parametrize("nbytes", [1, SMALL_BYTES, 2 * SLICE_BYTES + 1])
def test_a_client_whose_memory_changes_after_the_answer_has_the_content_refused_that_killed(nbytes: int) -> None:
    bench, shared = Bench(), Shared(nbytes=nbytes)
    shared.write(b"1")
    kill(bench, shared.request())
    while not bench.refused:
        bench.guard.continue_fingerprint(bench.now)
    shared.write(b"2")
    look(bench)
    check(bench, shared.request())
    shared.write(b"1")
    with pytest.raises(Internal):
        check(bench, shared.request())


def test_a_request_in_shared_memory_ends_once_its_content_was_read() -> None:
    bench, shared = Bench(), Shared()
    kill(bench, shared.request())
    assert bench.refused == {}
    assert look(bench) == 3
    assert bench.refused == {1: "INTERNAL"}


def test_a_request_in_shared_memory_that_hangs_ends_once_its_content_was_read() -> None:
    bench, shared = Bench(), Shared()
    for number in range(1, 1 + MAX_HANGS):
        shared.write(b"1")
        hang(bench, shared.request())
        assert number not in bench.refused
        look(bench)
        assert bench.refused[number] == "DEADLINE_EXCEEDED"
        shared.write(b"2")
    assert bench.guard._contents.quarantine.count(bench.now) == 1
    assert not bench.guard.check_request(shared.request(), bench.now)


@pytest.mark.parametrize("how", ["hang", "crash"])
def test_a_request_in_shared_memory_ends_once_where_seats_hang_in_two_parts_of_it(how: str) -> None:
    bench, shared = Bench(), Shared()
    terms = BatchingPolicy(inputs=frozenset("x"), outputs=frozenset("y"), max_rows=1, max_split_rows=SLICE_BYTES + 1)
    for name in ("w0", "w1"):
        bench.scheduler.slots.add(Slot(name, (name,), policy=terms))
    request = shared.request()
    bench.scheduler.submit(request, bench.now)
    ran = [part.request for _, job in bench.scheduler.assign(bench.now) for part in job.items.values()]
    assert ran == [request] * 2
    request.deaths = MAX_DEATHS - 1
    bench.now += TIMEOUT_S
    if how == "hang":
        assert [seat.name for seat, _ in bench.guard.take_overdue(bench.now)] == ["w0", "w1"]
    else:
        bench.guard.on_exit("w1", CRASH, bench.now)
        bench.guard.on_exit("w0", CRASH, bench.now)
    # Nobody runs the rest of it while its content is read.
    assert [*bench.scheduler.assign(bench.now)] == []
    assert bench.refused == {}
    look(bench)
    assert [*bench.refused] == [request.number]


@pytest.mark.parametrize("lose", [kill, hang])
def test_nothing_is_learned_of_shared_memory_whose_request_had_ended_before(
    lose: Callable[[Bench, Request], None],
) -> None:
    bench, shared = Bench(), Shared()
    request = shared.request()
    request.is_ended = True
    lose(bench, request)
    assert not bench.guard.has_work
    assert (bench.guard._contents.quarantine.quarantined, bench.guard._contents.quarantine.suspected) == ({}, {})


def test_what_waits_for_its_content_to_be_read_ends_when_all_is_given_up() -> None:
    bench, shared = Bench(), Shared()
    kill(bench, shared.request())
    bench.guard.fail_pending()
    assert (bench.refused, bench.guard.has_work) == ({1: "INTERNAL"}, False)


def test_a_suspected_content_in_shared_memory_is_cleared_by_what_was_read_before_it_ran() -> None:
    bench, shared = Bench(), Shared()
    hang(bench, shared.request())
    look(bench)
    assert bench.guard._contents.quarantine.suspected
    unread, harmless = shared.request(), shared.request()
    bench.guard.on_answered(unread, bench.now)
    assert not bench.guard.has_work
    assert bench.guard.check_request(harmless, bench.now)
    bench.scheduler.submit(harmless, bench.now, needs_check=True)
    assert look(bench) == 3
    shared.write(b"2")
    bench.guard.on_answered(harmless, bench.now)
    look(bench)
    assert not bench.guard._contents.quarantine.suspected


def test_a_tenant_cannot_have_the_content_of_another_refused() -> None:
    bench, ann, bob = Bench(), Shared(ANN), Shared(BOB)
    ann.write(b"1")
    kill(bench, ann.request())
    ann.write(b"2")  # before the daemon reads
    look(bench)
    bob.write(b"2")
    check(bench, bob.request())
