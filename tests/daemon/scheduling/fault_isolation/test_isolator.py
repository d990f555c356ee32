"""FaultIsolator: requests of a failed batch run again alone, and only a single request is blamed for a failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from unittest import mock

import pytest

from weightd_common import memfd
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.platform.log_setup import client_of
from weightd_daemon.scheduling.batch import Batch, BatchItem
from weightd_daemon.scheduling.batching.policy import BatchingPolicy
from weightd_daemon.scheduling.direct import DirectLoss, ModelDirect, NoDirectWorkers
from weightd_daemon.scheduling.fault_isolation.contents import MAX_HANGS, SLICE_BYTES, SMALL_BYTES, compute_digest
from weightd_daemon.scheduling.fault_isolation.isolator import MAX_DEATHS, MAX_LOST_SLOTS, FaultIsolator
from weightd_daemon.scheduling.request import ClientOrigin, Isolation, Request
from weightd_daemon.scheduling.scheduler import Scheduler
from weightd_daemon.scheduling.slots import Slot
from weightd_daemon.scheduling.tenancy import REPLACEMENT_TIMEOUT_S
from weightd_daemon.scheduling.tensor_location import SharedRegion, TensorLocation, TensorLocations
from weightd_daemon.tenants.tenant import Tenant
from weightd_protocol.errors import FailedPrecondition, Internal, RequestError
from weightd_protocol.messages.inference import RequestDescription, TensorSpec

ANN, BOB = ClientOrigin("ann 1", "ann"), ClientOrigin("bob 2", "bob")
CRASH, KILL = ExitCause(-signal.SIGSEGV), ExitCause(-signal.SIGKILL)
TIMEOUT_S = 60.0


class IsolatorHarness:
    """A FaultIsolator with its scheduler; the test fills the slots."""

    def __init__(self) -> None:
        config = ModelConfig(path="/m.onnx", engine="onnxruntime", predict_timeout=TIMEOUT_S)
        self.scheduler = Scheduler(100, 10_000, TIMEOUT_S)
        self.direct = mock.create_autospec(NoDirectWorkers, instance=True)
        direct = ModelDirect("m", self.direct, config)
        self.isolator = FaultIsolator(config, self.scheduler, self.refuse, direct=direct)
        self.refused: dict[int, str] = {}
        self.slot_count = 0
        self.now = 0.0

    def refuse(self, request: Request, error: RequestError) -> None:
        assert request.number not in self.refused
        self.refused[request.number] = error.code
        request.is_ended = True

    def requests(self, *origins: ClientOrigin) -> list[Request]:
        """Return requests of different contents."""
        return [
            Request(number, b"", "", RequestDescription("m", ()), (), 0.0, 1e9, number, origin, digest=b"%d" % number)
            for number, origin in enumerate(origins)
        ]

    def add_slot(self, *batches: Batch) -> str:
        """Add a slot with two processes that has these batches; return the name of its second process."""
        self.slot_count += 1
        first, second = f"s{self.slot_count}.0", f"s{self.slot_count}.1"
        self.scheduler.slots.add(Slot(f"s{self.slot_count}", (first, second)))
        slot = self.scheduler.slots.slot_of(second)
        assert slot is not None
        for batch in batches:
            slot.add_batch(batch, self.now)
        return second

    def runs(self) -> list[list[int]]:
        """Assign due batches to a new slot; return the request numbers of each batch."""
        process = self.add_slot()
        given = [batch for _, batch in self.scheduler.assign(self.now)]
        assert all(batch.number == batch.requests[0].number for batch in given)
        self.last = process
        return [[*batch.items] for batch in given]


class SharedMemoryClient:
    """A client's shared memory, and requests whose only input is the whole of it."""

    def __init__(self, origin: ClientOrigin = ANN, nbytes: int = 2 * SLICE_BYTES + 1) -> None:
        self._origin = origin
        self._nbytes = nbytes
        self._descriptor = memfd.create(nbytes)
        self._memory = SharedRegion(1, self._descriptor, nbytes, os.close)
        self._count = 0

    def write(self, content: bytes) -> None:
        """Fill the memory with this content."""
        os.pwrite(self._descriptor, content * self._nbytes, 0)

    def request(self) -> Request:
        """Return a request for the current content."""
        self._count += 1
        specs = (TensorSpec("x", "UINT8", (self._nbytes,)),)
        request = Request(self._count, b"", "", RequestDescription("m", specs), (), 0.0, 1e9, 0, self._origin)
        request.locations = TensorLocations({0: TensorLocation(self._memory, 0, self._nbytes)}, {})
        return request


def read_contents(harness: IsolatorHarness) -> int:
    """Let the isolator read all pending contents; return the number of slices read."""
    slices = 0
    while harness.isolator.contents.has_work:
        harness.isolator.contents.continue_fingerprint(harness.now)
        slices += 1
    return slices


def crash_twice(harness: IsolatorHarness, request: Request) -> None:
    """Let two slots crash because of a request."""
    for _ in range(2):
        harness.isolator.on_exit(harness.add_slot(batch(request)), CRASH, harness.now)
        harness.scheduler.take_matching(lambda each: each is request)


def hang(harness: IsolatorHarness, request: Request) -> None:
    """Let a slot hang in a request."""
    slot = harness.scheduler.slots.slot_of(harness.add_slot())
    assert slot is not None
    harness.scheduler.running.assign(slot, batch(request), harness.now)
    harness.now += TIMEOUT_S
    assert len(list(harness.isolator.take_overdue(harness.now))) == 1


def check(harness: IsolatorHarness, request: Request) -> None:
    """Check a request, and read its content if the isolator asks for it."""
    if harness.isolator.check_request(request, harness.now):
        compute_digest(request)
        harness.isolator.contents.quarantine.check_request(request, harness.now)


def batch(*requests: Request) -> Batch:
    return Batch.from_items([BatchItem(each.number, each) for each in requests])


def test_reruns_requests_of_a_crashed_batch_alone() -> None:
    harness = IsolatorHarness()
    requests = harness.requests(ANN, BOB, ANN)
    harness.isolator.on_exit(harness.add_slot(batch(*requests)), CRASH, harness.now)
    assert [(each.isolation, each.deaths) for each in requests] == [(Isolation.ALONE, 0)] * 3
    assert harness.isolator._offenses.confined_names(harness.now) == []
    for _ in range(2):  # the first crash happened in a batch: only crashes alone count
        assert harness.refused == {}
        assert harness.runs() == [[0]]
        harness.isolator.on_exit(harness.last, CRASH, harness.now)
    assert harness.refused == {0: "INTERNAL"}
    assert harness.isolator.contents.quarantine.count(harness.now) == 1
    assert [harness.runs(), harness.runs()] == [[[1]], [[2]]]
    assert [each.deaths for each in requests] == [2, 0, 0]


def test_blames_the_client_of_a_whole_batch_at_once() -> None:
    harness = IsolatorHarness()
    for _ in range(4):
        assert harness.isolator._offenses.confined_names(harness.now) == []
        harness.isolator.on_exit(harness.add_slot(batch(*harness.requests(BOB, BOB))), CRASH, harness.now)
    assert harness.isolator._offenses.confined_names(harness.now) == [BOB.peer]


def test_batch_of_several_clients_blames_none() -> None:
    harness = IsolatorHarness()
    for _ in range(20):
        harness.isolator.on_exit(harness.add_slot(batch(*harness.requests(ANN, BOB))), CRASH, harness.now)
    assert harness.isolator._offenses.confined_names(harness.now) == []


@pytest.mark.parametrize("end", [CRASH, KILL])
def test_limits_reruns_after_lost_slots(end: ExitCause) -> None:
    harness = IsolatorHarness()
    requests = harness.requests(ANN, BOB)
    for _ in range(MAX_LOST_SLOTS):
        assert harness.refused == {}
        harness.isolator.on_exit(harness.add_slot(batch(*requests)), end, harness.now)
        assert harness.scheduler.take_matching(lambda each: each in requests) == [
            each for each in requests if not harness.refused
        ]
    assert harness.refused == {0: "UNAVAILABLE", 1: "UNAVAILABLE"}


def test_concurrent_losses_of_a_request_count_once() -> None:
    harness = IsolatorHarness()
    [request] = harness.requests(ANN)
    for turn in range(1, 1 + MAX_LOST_SLOTS):
        assert harness.refused == {}
        slots = [harness.add_slot(Batch.from_items([BatchItem(10 * turn + number, request)])) for number in range(2)]
        both = harness.scheduler.slots.slot_of(slots[0])
        assert both is not None
        both.concurrency = 2
        both.add_batch(Batch.from_items([BatchItem(10 * turn + 5, request)]), harness.now)
        harness.now += 1.0
        for each in slots:
            harness.isolator.on_exit(each, KILL, harness.now)
            harness.scheduler.take_matching(lambda each: each is request)
        assert request.lost_slots == turn
        harness.now += 1.0
    assert harness.refused == {0: "UNAVAILABLE"}


def test_recalls_ended_requests_of_a_waiting_batch() -> None:
    harness = IsolatorHarness()
    first, two, three = harness.requests(ANN, ANN, BOB)
    harness.add_slot(batch(first), batch(two, three))
    assert harness.scheduler.end_matching(lambda each: each is two) == [(two, False)]
    assert harness.scheduler.end_matching(lambda each: each is three) == [(three, False)]
    assert [(slot.name, number) for slot, number in harness.scheduler.running.take_recalled()] == [("s1", 1), ("s1", 2)]
    assert harness.scheduler.slots.in_flight("s1.0") == 1


def test_reruns_requests_of_a_hung_batch_alone() -> None:
    harness = IsolatorHarness()
    *requests, gone = harness.requests(ANN, BOB, ANN)
    gone.is_ended = True
    harness.scheduler.submit(requests[0], harness.now)
    assert harness.runs() == [[0]]
    [slot] = [harness.scheduler.slots.slot_of(harness.last)]
    assert slot is not None
    slot.batches[0] = batch(*requests, gone)
    slot.batches[0].started_at = harness.now
    harness.now += TIMEOUT_S
    assert [each.name for each, _ in harness.isolator.take_overdue(harness.now)] == ["s1"]
    assert (harness.refused, harness.scheduler.slots.slot_of(harness.last)) == ({}, None)
    assert [harness.runs(), harness.runs()] == [[[0]], [[1]]]
    assert harness.scheduler.queue.count == 0
    harness.now += TIMEOUT_S
    assert len(list(harness.isolator.take_overdue(harness.now))) == 2
    assert harness.refused == {0: "DEADLINE_EXCEEDED", 1: "DEADLINE_EXCEEDED"}


@pytest.mark.parametrize(("end", "deaths"), [(CRASH, 1), (KILL, 0)])
def test_charges_a_lost_slot_to_the_tenant(end: ExitCause, deaths: int) -> None:
    harness = IsolatorHarness()
    one, two, other = harness.requests(ANN, ANN, BOB)
    two.usage = one.usage
    process = harness.add_slot(batch(one, two))
    harness.now += 2.0
    harness.isolator.on_exit(process, end, harness.now)
    assert (one.usage.unexpected_exits, one.usage.slot_seconds) == (deaths, 2.0)
    # In a batch of two clients neither is blamed, but each is charged for its time.
    process = harness.add_slot(batch(one, other))
    harness.now += 2.0
    harness.isolator.on_exit(process, end, harness.now)
    assert (one.usage.unexpected_exits, other.usage.unexpected_exits) == (deaths, 0)
    assert other.usage.slot_seconds == 1.0


def test_unknown_tenant_has_one_slot_at_a_time() -> None:
    harness = IsolatorHarness()
    ann, ben = (ClientOrigin("process", f"tenant {name}", is_tenant=True) for name in ("ann", "ben"))
    first, other, later, without_tenant = harness.requests(ann, ben, ann, ANN)
    first.tenant = later.tenant = Tenant("ann", TenantConfig())
    other.tenant = Tenant("ben", TenantConfig())
    for each in (first, other, without_tenant):
        harness.isolator.check_request(each, 0.0)
    assert [each.isolation for each in (first, other, without_tenant)] == [
        Isolation.CONFINED,
        Isolation.CONFINED,
        Isolation.BATCHABLE,
    ]
    harness.isolator.on_answered(first, 0.0)
    for is_cleared in (False, True):
        if is_cleared:
            harness.isolator.clear()
        harness.isolator.check_request(later, 0.0)
        assert (later.isolation is Isolation.CONFINED) == is_cleared


def test_tenant_waits_until_its_lost_slot_is_replaced() -> None:
    harness = IsolatorHarness()
    eve, ben = (ClientOrigin("process", f"tenant {name}", is_tenant=True) for name in ("eve", "ben"))
    poison, more, innocent = harness.requests(eve, eve, ben)
    poison.tenant = more.tenant = Tenant("eve", TenantConfig())
    innocent.tenant = Tenant("ben", TenantConfig())
    tenancy = harness.scheduler.tenancy
    harness.isolator.on_exit(harness.add_slot(batch(poison)), CRASH, harness.now)
    assert harness.isolator._offenses.confined_names(harness.now) == ["tenant eve"]
    assert (harness.refused, poison.deaths) == ({}, 1)
    assert (tenancy.is_confined_running(poison.tenant), tenancy.is_confined_running(innocent.tenant)) == (True, False)
    harness.add_slot()
    tenancy.update_unreplaced(harness.now)
    assert not tenancy.is_confined_running(poison.tenant)
    # The second crash ends the request. Without a replacement, the tenant waits for the time-out only.
    harness.isolator.on_exit(harness.add_slot(batch(more)), CRASH, harness.now)
    assert harness.refused == {1: "INTERNAL"}
    for now, waits in ((REPLACEMENT_TIMEOUT_S - 0.1, True), (REPLACEMENT_TIMEOUT_S, False)):
        tenancy.update_unreplaced(now)
        assert tenancy.is_confined_running(more.tenant) is waits


def test_externally_killed_slot_is_not_held_against_the_tenant() -> None:
    harness = IsolatorHarness()
    [request] = harness.requests(ClientOrigin("process", "tenant eve", is_tenant=True))
    request.tenant = Tenant("eve", TenantConfig())
    harness.isolator.on_exit(harness.add_slot(batch(request)), KILL, harness.now)
    assert not harness.scheduler.tenancy.is_confined_running(request.tenant)
    assert harness.isolator._offenses.confined_names(harness.now) == []


def test_repeated_quarantines_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    harness = IsolatorHarness()
    for request in harness.requests(*[ClientOrigin("process 1 of uid 1", "uid 1")] * 20):
        harness.isolator.contents._quarantine_content(request, 1.0)  # pyright: ignore[reportPrivateUsage]
    lines = [each for each in caplog.records if "is in quarantine" in each.getMessage()]
    # A log period may end in between.
    assert 1 <= len(lines) <= 2
    assert client_of(lines[0]) == "uid 1"


@pytest.mark.parametrize("nbytes", [1, SMALL_BYTES, 2 * SLICE_BYTES + 1])
def test_quarantines_the_content_that_crashed_despite_changes(nbytes: int) -> None:
    harness, shared = IsolatorHarness(), SharedMemoryClient(nbytes=nbytes)
    shared.write(b"1")
    crash_twice(harness, shared.request())
    while not harness.refused:
        harness.isolator.contents.continue_fingerprint(harness.now)
    shared.write(b"2")
    read_contents(harness)
    check(harness, shared.request())
    shared.write(b"1")
    with pytest.raises(Internal):
        check(harness, shared.request())


def test_crash_with_shared_memory_ends_after_its_content_is_read() -> None:
    harness, shared = IsolatorHarness(), SharedMemoryClient()
    crash_twice(harness, shared.request())
    assert harness.refused == {}
    assert read_contents(harness) == 3
    assert harness.refused == {1: "INTERNAL"}


def test_hang_with_shared_memory_ends_after_its_content_is_read() -> None:
    harness, shared = IsolatorHarness(), SharedMemoryClient()
    for number in range(1, 1 + MAX_HANGS):
        shared.write(b"1")
        hang(harness, shared.request())
        assert number not in harness.refused
        read_contents(harness)
        assert harness.refused[number] == "DEADLINE_EXCEEDED"
        shared.write(b"2")
    assert harness.isolator.contents.quarantine.count(harness.now) == 1
    assert not harness.isolator.check_request(shared.request(), harness.now)


@pytest.mark.parametrize("how", ["hang", "crash"])
def test_split_request_in_shared_memory_ends_once(how: str) -> None:
    harness, shared = IsolatorHarness(), SharedMemoryClient()
    policy = BatchingPolicy(inputs=frozenset("x"), outputs=frozenset("y"), max_rows=1, max_split_rows=SLICE_BYTES + 1)
    for name in ("w0", "w1"):
        harness.scheduler.slots.add(Slot(name, (name,), policy=policy))
    request = shared.request()
    harness.scheduler.submit(request, harness.now)
    ran = [part.request for _, batch in harness.scheduler.assign(harness.now) for part in batch.items.values()]
    assert ran == [request] * 2
    request.deaths = MAX_DEATHS - 1
    harness.now += TIMEOUT_S
    if how == "hang":
        assert [slot.name for slot, _ in harness.isolator.take_overdue(harness.now)] == ["w0", "w1"]
    else:
        harness.isolator.on_exit("w1", CRASH, harness.now)
        harness.isolator.on_exit("w0", CRASH, harness.now)
    # The rest of the request must not run while its content is read.
    assert [*harness.scheduler.assign(harness.now)] == []
    assert harness.refused == {}
    read_contents(harness)
    assert [*harness.refused] == [request.number]


@pytest.mark.parametrize("fail", [crash_twice, hang])
def test_ended_requests_in_shared_memory_are_not_examined(
    fail: Callable[[IsolatorHarness, Request], None],
) -> None:
    harness, shared = IsolatorHarness(), SharedMemoryClient()
    request = shared.request()
    request.is_ended = True
    fail(harness, request)
    assert not harness.isolator.contents.has_work
    assert (harness.isolator.contents.quarantine.quarantined, harness.isolator.contents.quarantine.suspected) == (
        {},
        {},
    )


def test_fail_pending_ends_requests_whose_content_is_unread() -> None:
    harness, shared = IsolatorHarness(), SharedMemoryClient()
    crash_twice(harness, shared.request())
    harness.isolator.contents.fail_pending()
    assert (harness.refused, harness.isolator.contents.has_work) == ({1: "INTERNAL"}, False)


def test_clears_suspicion_with_the_content_read_before_the_run() -> None:
    harness, shared = IsolatorHarness(), SharedMemoryClient()
    hang(harness, shared.request())
    read_contents(harness)
    assert harness.isolator.contents.quarantine.suspected
    unread, harmless = shared.request(), shared.request()
    harness.isolator.on_answered(unread, harness.now)
    assert not harness.isolator.contents.has_work
    assert harness.isolator.check_request(harmless, harness.now)
    harness.scheduler.submit(harmless, harness.now, needs_check=True)
    assert read_contents(harness) == 3
    shared.write(b"2")
    harness.isolator.on_answered(harmless, harness.now)
    read_contents(harness)
    assert not harness.isolator.contents.quarantine.suspected


def test_tenant_cannot_quarantine_content_of_others() -> None:
    harness, ann, bob = IsolatorHarness(), SharedMemoryClient(ANN), SharedMemoryClient(BOB)
    ann.write(b"1")
    crash_twice(harness, ann.request())
    ann.write(b"2")  # before the isolator reads it
    read_contents(harness)
    bob.write(b"2")
    check(harness, bob.request())


def test_request_lost_on_a_channel_is_at_its_second_attempt() -> None:
    harness = IsolatorHarness()
    tenant = Tenant("t", TenantConfig())
    again, other = harness.requests(ANN, ANN)
    harness.isolator.on_direct_loss(DirectLoss(again.client, again.id, ANN, tenant, 1.0), harness.now)
    harness.direct.reclaim.assert_called_once_with("m")
    other.id = "other"
    for request in (other, again):
        check(harness, request)
    assert [(each.deaths, each.isolation is Isolation.BATCHABLE) for each in (other, again)] == [(0, True), (1, False)]
    harness.isolator.on_exit(harness.add_slot(batch(again)), CRASH, harness.now)
    assert harness.refused == {0: "INTERNAL"}
    assert harness.isolator.quarantined_count(harness.now) == 1


def test_losses_on_channels_confine_the_client() -> None:
    harness = IsolatorHarness()
    tenant = Tenant("t", TenantConfig())
    harness.isolator.check_direct(BOB, tenant, harness.now)
    for number in range(MAX_DEATHS + 4):
        harness.isolator.on_direct_loss(DirectLoss(b"", str(number), ANN, tenant, 1.0), harness.now)
    assert harness.isolator.confined_clients(harness.now) == [ANN.peer]
    with pytest.raises(FailedPrecondition, match="crashed or hung"):
        harness.isolator.check_direct(BOB, tenant, harness.now)


def test_tenant_gets_channels_after_its_first_answer() -> None:
    harness = IsolatorHarness()
    origin, tenant = ClientOrigin("pid 1", "tenant t", is_tenant=True), Tenant("t", TenantConfig())
    with pytest.raises(FailedPrecondition, match="has been answered yet"):
        harness.isolator.check_direct(origin, tenant, harness.now)
    [request] = harness.requests(origin)
    request.tenant = tenant
    harness.isolator.on_answered(request, harness.now)
    harness.isolator.check_direct(origin, tenant, harness.now)
