"""Tests of a model with hung or faulty workers, damaged page stores, and requests that crash workers."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from weightd_daemon.generations.states import GenerationState
from weightd_daemon.platform.exit_cause import ExitInitiator
from weightd_daemon.scheduling.fault_isolation.contents import SLICE_BYTES
from weightd_daemon.scheduling.fault_isolation.isolator import MAX_LOST_SLOTS
from weightd_daemon.scheduling.fault_isolation.offenders import MAX_PEER_DEATHS
from weightd_daemon.scheduling.request import ClientOrigin, Request
from weightd_daemon.scheduling.signature import MetadataRequest
from weightd_protocol.errors import Internal, ResourceExhausted
from weightd_protocol.messages.worker import Attached, Built, CancelPredict, Ping, Pong, PredictFailed, ProcessFailed

from .fakehost import BUILT, CARD, W1, W2, W3, W4, ModelHarness, request

Event = Callable[[ModelHarness], object]
Loss = Callable[[ModelHarness, str, int], object]

HOSTILE = ClientOrigin("process 13 of user 7", "user 7")
MEGABYTE = 2**20


def hostile_requests(count: int) -> list[Request]:
    """Return requests of one client with different contents."""
    return [request(origin=HOSTILE) for _ in range(count)]


def equal_requests(count: int, size: int = 5) -> list[Request]:
    """Return requests with the same content."""
    return [request(content=bytes(size)) for _ in range(count)]


def confined_clients(harness: ModelHarness) -> list[str]:
    return harness.model.dispatcher.isolator._offenses.confined_names(harness.now)


def restart_workers(harness: ModelHarness) -> None:
    """Let all started workers serve."""
    harness.advance(40.0).loads(1)


def compare_contents(harness: ModelHarness) -> int:
    """Tick while content checks are due; return the number of ticks."""
    ticks = 0
    while harness.model.timer.due_at == 0.0:
        harness.model.tick(harness.now)
        ticks += 1
    return ticks


# --- hung and faulty workers ------------------------------------------------------------------------------------------


def test_hung_worker_is_aborted_killed_and_replaced() -> None:
    harness = ModelHarness().serving()
    first, second = harness.submit_new(2)
    harness.advance(59.9).answers(W2, second)
    assert harness.host.refusals == []
    harness.advance(0.2)
    why = "a predict took longer than predict_timeout (60 s)"
    assert harness.host.refusals == [(first, "DEADLINE_EXCEEDED", f"request id{first}: {why}")]
    assert (harness.host.aborted, harness.host.killed, harness.host.spawned[-1]) == ([W1], [], W3)
    # The worker survives the abort, and the model ignores its late result.
    harness.advance(2.1).answers(W1, first).exit_process(W1, signal.SIGKILL)
    assert (harness.host.killed, harness.host.answers, harness.model.deployments.deaths) == ([W1], [second], 1)
    assert len(harness.host.refusals) == 1


def damage_store(harness: ModelHarness) -> ModelHarness:
    harness.host.damaged.add("digits.1")
    return harness


OTHER_REASONS: dict[str, Event] = {
    "never answers a ping": lambda harness: harness.advance(15.0),
    "reports a failure": lambda harness: harness.deliver(W1, ProcessFailed("the self-test failed")),
    "fails the self-test": lambda harness: harness.deliver(W1, Pong("another")),
    "has computed on a damaged store": lambda harness: damage_store(harness).answers(
        W1, harness.host.predicts()[-1][1]
    ),
    "has died of a damaged store": lambda harness: damage_store(harness).exit_process(W1, signal.SIGBUS),
}


@pytest.mark.parametrize("fails", OTHER_REASONS.values(), ids=OTHER_REASONS)
def test_requests_of_faulty_worker_are_requeued_without_blame(fails: Event) -> None:
    harness = ModelHarness(workers=1).serving().advance(15.0)
    [number] = harness.submit_new(1)
    fails(harness)
    assert (harness.host.answers, harness.host.refusals) == ([], [])
    [waiting] = harness.model.dispatcher._scheduler.queue
    assert (waiting.number, waiting.deaths) == (number, 0)


PINGED: dict[str, tuple[Event, list[str]]] = {
    "idle": (lambda harness: harness, [W1, W2]),
    "computes": (lambda harness: harness.submit_new(1), [W2]),
    "dead": (lambda harness: harness.exit_process(W1, signal.SIGKILL), [W2]),
    "answered": (
        lambda harness: harness.deliver(W1, PredictFailed(harness.submit_new(1)[0], "INTERNAL", "", is_exiting=False)),
        [W2],
    ),
}


@pytest.mark.parametrize(("act", "pinged"), PINGED.values(), ids=PINGED)
def test_idle_workers_are_pinged_and_silent_ones_replaced(act: Event, pinged: list[str]) -> None:
    harness = ModelHarness().serving()
    harness.now += 10.0
    act(harness)
    harness.advance(5.0)
    assert harness.host.orders_of(Ping) == [(each, Ping(run_selftest=False)) for each in pinged]
    harness.deliver(W1, Pong()).advance(15.0)
    assert harness.host.aborted == [W2]


@pytest.mark.parametrize(
    ("built", "later", "aborted"), [("digest", "digest", []), ("digest", "x", [W1]), ("", "x", [])]
)
def test_worker_with_wrong_selftest_answer_is_replaced(built: str, later: str, aborted: list[str]) -> None:
    harness = ModelHarness().snapshot_taken().builds(1, Built("/store", BUILT.inputs, BUILT.outputs, (), built, 4096))
    for worker in (W1, W2):
        harness.deliver(worker, Attached(built or "any", 4000))
    harness.deliver(W1, Pong(later))
    assert harness.host.aborted == aborted


def test_selftest_runs_at_configured_interval() -> None:
    harness = ModelHarness(selftest_interval=10.0).serving()
    [number] = harness.submit_new(1)
    harness.advance(10.0)
    assert harness.host.orders_of(Ping) == [(W1, Ping(run_selftest=True)), (W2, Ping(run_selftest=True))]
    # Up to two predicts may run before the self-test.
    harness.deliver(W2, Pong("digest")).answers(W1, number)
    harness.advance(179.9)
    assert harness.host.aborted == []
    harness.advance(0.1)
    assert harness.host.aborted == [W1]


@pytest.mark.parametrize("hangs", [True, False])
def test_worker_that_has_answered_is_replaced_at_once(hangs: bool) -> None:
    harness = ModelHarness(workers=1).serving()
    for serial in range(1, 5):
        worker = f"digits.1.w{serial}"
        harness.loads(1).answers(worker, *harness.submit_new(1))
        if hangs:
            harness.deliver(worker, Pong("another"))
        else:
            harness.exit_process(worker)
        assert harness.host.spawned[-1] == f"digits.1.w{serial + 1}"


# --- damaged page stores and lost holders -----------------------------------------------------------------------------


def test_results_from_damaged_store_are_discarded() -> None:
    harness = damage_store(ModelHarness().serving())
    [number] = harness.submit_new(1)
    harness.answers(W1, number)
    assert (harness.host.answers, harness.host.refusals, harness.host.killed) == ([], [], [W1, W2])
    harness.exit_all(1).loads(2)
    assert harness.host.predicts()[-1] == ("digits.2.w1", number)
    harness.answers("digits.2.w1", number)
    assert (harness.host.answers, len(harness.host.requested_snapshots)) == ([number], 1)  # the snapshot is still valid


def test_damaged_store_is_detected_without_requests() -> None:
    harness = damage_store(ModelHarness().serving()).advance(15.0)
    assert harness.model.generations[0].state is not GenerationState.SERVING


@pytest.mark.parametrize("first_event", ["holder", "worker"])
def test_results_after_loss_of_holder_are_discarded(first_event: str) -> None:
    harness = ModelHarness(CARD, workers=1, devices=("ascend:0",)).serving()
    [number] = harness.submit_new(1)
    for generation in range(1, MAX_LOST_SLOTS + 1):
        holder, worker = f"digits.{generation}.holder", f"digits.{generation}.w1"
        assert harness.host.predicts() == [(worker, number)]
        harness.now += 60.0
        # The kernel reports the exit before the model receives the event.
        harness.host.dead.add(holder)
        harness.deliver(worker, PredictFailed(number, "INTERNAL", "spoilt", is_exiting=True))
        harness.deliver(worker, PredictFailed(number, "INVALID_ARGUMENT", "no such batch", is_exiting=False))
        if first_event == "holder":
            harness.exit_process(holder).answers(worker, number)
            assert harness.host.killed[-1] == worker
        else:
            harness.answers(worker, number).exit_process(worker)
        assert (harness.host.answers, harness.host.refusals) == ([], [])
        harness.exit_all(generation).loads(generation + 1)
    harness.answers(f"digits.{MAX_LOST_SLOTS + 1}.w1", number)
    assert harness.host.answers == [number]


# --- requests that crash workers --------------------------------------------------------------------------------------


def test_content_that_crashes_workers_is_quarantined() -> None:
    harness = ModelHarness().serving()
    numbers = harness.submit(*equal_requests(1))
    harness.exit_process(W1)
    numbers += harness.submit(*equal_requests(6))
    harness.exit_process(W2)
    words = "was on 2 workers when they died, the last one killed by SIGSEGV"
    assert harness.host.refusals[0] == (numbers[0], "INTERNAL", f"request id{numbers[0]} {words}")
    assert sorted(harness.host.refused()) == [(number, "INTERNAL") for number in numbers]
    with pytest.raises(Internal):
        harness.submit(*equal_requests(1))
    assert harness.model.readiness.state_name == "serving"


def test_content_that_hangs_workers_is_quarantined() -> None:
    harness = ModelHarness(workers=1).serving()
    numbers = harness.submit(*equal_requests(1))
    harness.advance(60.0)
    numbers += harness.submit(*equal_requests(1))
    harness.loads(1)  # the replacement worker
    assert harness.host.predicts()[-1] == (W2, numbers[1])
    numbers += harness.submit(*equal_requests(1))
    others = harness.submit(request(content=b"other"), request(content=b"longer"))
    harness.advance(60.0)
    codes = ["DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "INTERNAL"]
    assert harness.host.refused() == list(zip(numbers, codes, strict=True))
    assert [each.number for each in harness.model.dispatcher._scheduler.queue] == others
    with pytest.raises(Internal, match="this content crashed or hung workers"):
        harness.submit(*equal_requests(1))


@pytest.mark.parametrize(
    ("end", "by", "code"),
    [
        (signal.SIGKILL, ExitInitiator.UNKNOWN, "UNAVAILABLE"),
        (signal.SIGTERM, ExitInitiator.UNKNOWN, "UNAVAILABLE"),
        (signal.SIGABRT, ExitInitiator.DAEMON, "UNAVAILABLE"),
        (signal.SIGKILL, ExitInitiator.KERNEL, "RESOURCE_EXHAUSTED"),
    ],
)
def test_external_kills_blame_no_request_but_limit_retries(end: signal.Signals, by: ExitInitiator, code: str) -> None:
    harness = ModelHarness().serving()
    [number] = harness.submit(*equal_requests(1))
    for _ in range(MAX_LOST_SLOTS):
        assert harness.host.refusals == []
        [(worker, _)] = harness.host.predicts()
        harness.exit_process(worker, end, by)
        restart_workers(harness)
    [(refused, how, text)] = harness.host.refusals
    assert (refused, how) == (number, code)
    assert text.startswith(f"request id{number} was on 5 workers when they exited, the last one killed by {end.name}")
    # The content is not quarantined, so a new request with it runs.
    assert (harness.model.dispatcher.isolator.contents.quarantine.count(harness.now), confined_clients(harness)) == (
        0,
        [],
    )
    harness.submit(*equal_requests(1))
    assert len(harness.host.predicts()) == 1


def test_earlier_request_on_crashed_worker_is_not_blamed() -> None:
    """The result of the first request may be lost with the worker that crashed on the second one."""
    harness = ModelHarness(workers=1).serving()
    [good, bad] = harness.submit_new(2)
    assert harness.host.predicts() == [(W1, good), (W1, bad)]
    for worker in (W1, W2, W3):
        given = [number for _, number in harness.host.predicts()]
        if given == [good]:
            harness.answers(worker, good)
        harness.exit_process(worker)
        restart_workers(harness)
    assert harness.host.answers == [good]
    assert harness.host.refused() == [(bad, "INTERNAL")]


# --- clients whose requests crash workers -----------------------------------------------------------------------------


def test_client_that_crashes_workers_is_confined_to_one() -> None:
    harness = ModelHarness(workers=4, max_queue=50).serving()
    hostile = harness.submit(*hostile_requests(12))
    good = harness.submit_new(12)
    for worker in (W1, W2, W3, W4):
        assert confined_clients(harness) == []
        harness.exit_process(worker)
    assert confined_clients(harness) == [HOSTILE.peer]
    harness.host.predicts()
    restart_workers(harness)
    given = dict(harness.host.predicts())
    [culprit] = [worker for worker, number in given.items() if number in hostile]
    # No request waits behind the one of the confined client.
    assert (len(given), harness.model.dispatcher._scheduler.slots.in_flight(culprit)) == (4, 1)
    assert harness.model.dispatcher._scheduler.queue.count == len(hostile) + len(good) - 1 - 6
    assert not harness.model.readiness.has_failed


def test_confined_client_is_rejected_after_another_crash() -> None:
    harness = ModelHarness(workers=3).serving()
    for _ in range(MAX_PEER_DEATHS):
        harness.model.dispatcher.isolator._offenses.record_death(HOSTILE, 0.0, harness.now)
    first, *others = harness.submit(*hostile_requests(3))
    good = harness.submit_new(4)
    given = harness.host.predicts()
    assert [number for _, number in given] == [first, *good]
    harness.exit_process(given[0][0])
    assert harness.host.refused() == [(first, "INTERNAL"), *((number, "RESOURCE_EXHAUSTED") for number in others)]
    with pytest.raises(
        ResourceExhausted, match=r"^requests of process 13 of user 7 crashed or hung 5 workers"
    ) as error:
        harness.submit(*hostile_requests(1))
    assert error.value.retry_after == 10.0
    assert len(harness.submit_new(1)) == 1
    harness.now += 10.0
    assert len(harness.submit(*hostile_requests(1))) == 1


def test_confined_client_runs_one_request_after_another() -> None:
    harness = ModelHarness(workers=3).serving()
    for _ in range(MAX_PEER_DEATHS):
        harness.model.dispatcher.isolator._offenses.record_death(HOSTILE, 0.0, harness.now)
    first, second = harness.submit(*hostile_requests(2))
    [(worker, given)] = harness.host.predicts()
    assert given == first
    harness.answers(worker, first)
    assert [number for _, number in harness.host.predicts()] == [second]


LOSSES: dict[str, Loss] = {
    "spoilt": lambda harness, worker, number: harness.deliver(
        worker, PredictFailed(number, "INTERNAL", "x", is_exiting=True)
    ),
    "dead": lambda harness, worker, number: harness.exit_process(worker),
    "hung": lambda harness, worker, number: harness.advance(1060.0 - harness.now),
}


@pytest.mark.parametrize("is_cancelled", [True, False])
@pytest.mark.parametrize("lost", LOSSES.values(), ids=LOSSES)
def test_cancelled_requests_still_count_against_client(lost: Loss, is_cancelled: bool) -> None:
    harness = ModelHarness(workers=MAX_PEER_DEATHS).serving()
    harness.submit(*hostile_requests(MAX_PEER_DEATHS))
    if is_cancelled:
        harness.model.dispatcher.on_disconnect(HOSTILE.peer.encode(), harness.now)
    for worker, number in harness.host.predicts():
        lost(harness, worker, number)
    assert confined_clients(harness) == [HOSTILE.peer]


def test_update_clears_quarantine_and_offenses() -> None:
    harness = ModelHarness().serving()
    isolator = harness.model.dispatcher.isolator
    isolator.contents.quarantine.add(equal_requests(1)[0], harness.now)
    for _ in range(2 * MAX_PEER_DEATHS + 1):
        isolator._offenses.record_death(HOSTILE, 0.0, harness.now)
    harness.updated(2).submit(*equal_requests(1), *hostile_requests(1))


# --- large contents ---------------------------------------------------------------------------------------------------


def test_large_content_is_compared_in_slices() -> None:
    harness = ModelHarness().serving()
    harness.model.dispatcher.isolator.contents.quarantine.add(equal_requests(1, MEGABYTE)[0], harness.now)
    same_sample = bytes(600) + b"1" + bytes(MEGABYTE - 601)
    cancelled, quarantined, good = harness.submit(*equal_requests(2, MEGABYTE), request(content=same_sample))
    assert (harness.host.predicts(), harness.model.timer.due_at) == ([], 0.0)
    [different] = harness.submit(request(content=b"2" * MEGABYTE))  # its sample differs, so it needs no comparison
    assert [number for _, number in harness.host.predicts()] == [different]
    # A cancelled request is not compared further.
    harness.model.tick(harness.now)
    harness.model.dispatcher.cancel(b"client", f"id{cancelled}", harness.now)
    assert compare_contents(harness) == 2 * (MEGABYTE // SLICE_BYTES + 1)
    assert harness.host.refused() == [(cancelled, "CANCELLED"), (quarantined, "INTERNAL")]
    assert [number for _, number in harness.host.predicts()] == [good]


def test_large_content_is_quarantined_after_comparison() -> None:
    harness = ModelHarness().serving()
    [number] = harness.submit(*equal_requests(1, MEGABYTE))
    harness.exit_process(W1)
    equal = harness.submit(*equal_requests(3, MEGABYTE))
    harness.exit_process(W2)
    assert harness.host.refused() == [(number, "INTERNAL")]
    compare_contents(harness)
    assert harness.host.refused() == [(each, "INTERNAL") for each in equal]
    assert harness.model.dispatcher.isolator.contents.quarantine.count(harness.now) == 1


@pytest.mark.parametrize("size", [5, MEGABYTE])
def test_answered_content_is_cleared_of_suspicion(size: int) -> None:
    harness = ModelHarness(workers=1).serving()
    quarantine = harness.model.dispatcher.isolator.contents.quarantine
    quarantine.on_hang(equal_requests(1, size)[0], harness.now)
    harness.answers(W1, *harness.submit(*equal_requests(2, size)))
    assert (harness.model.timer.due_at == 0.0) == (size == MEGABYTE)
    compare_contents(harness)
    assert not quarantine.on_hang(equal_requests(1, size)[0], harness.now)


# --- cancellation and disconnection -----------------------------------------------------------------------------------


def test_cancels_queued_ready_and_running_requests() -> None:
    harness = ModelHarness(workers=1).serving()
    running, ready, waiting, other, hangs = harness.submit_new(5)
    harness.host.predicts()
    for number in (waiting, ready, running) * 2:
        harness.model.dispatcher.cancel(b"client", f"id{number}", harness.now)
    text = "cancelled by the client"
    assert harness.host.refusals == [(number, "CANCELLED", text) for number in (waiting, ready, running)]
    assert harness.host.orders_of(CancelPredict) == [(W1, CancelPredict(ready))]
    # This request takes the place of the cancelled ready one.
    assert harness.host.predicts() == [(W1, other)]
    harness.answers(W1, running, other)
    assert harness.host.answers == [other]
    # A cancelled request that hangs is rejected once, and its worker is aborted as usual.
    harness.model.dispatcher.cancel(b"client", f"id{hangs}", harness.now)
    harness.advance(60.0)
    assert (harness.host.refused()[3:], harness.host.aborted) == ([(hangs, "CANCELLED")], [W1])


def test_requests_of_rejected_or_disconnected_client_are_dropped() -> None:
    harness = ModelHarness(workers=1)
    [shed] = harness.submit_new(1)
    harness.model.dispatcher.shed(
        lambda request: request.client == b"client", ResourceExhausted("it reads nothing"), harness.now
    )
    assert harness.host.refused() == [(shed, "RESOURCE_EXHAUSTED")]
    harness.submit_new(3)
    harness.model.dispatcher.metadata.request(MetadataRequest(b"client", "q"))
    harness.model.dispatcher.metadata.request(MetadataRequest(b"another", "r"))
    harness.model.dispatcher.on_disconnect(b"client", harness.now)
    assert harness.model.dispatcher.is_idle
    harness.snapshot_taken().builds()
    assert [client for client, _ in harness.host.metadata] == [b"another"]
