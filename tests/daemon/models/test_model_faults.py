"""A model whose workers hang, lie or lose their store, and clients that kill them or change their minds."""

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


def poisons(count: int) -> list[Request]:
    """Requests of one client, each of another content."""
    return [request(origin=HOSTILE) for _ in range(count)]


def equals(count: int, size: int = 5) -> list[Request]:
    """Requests of one content."""
    return [request(content=bytes(size)) for _ in range(count)]


def suspects(stage: ModelHarness) -> list[str]:
    return stage.model.dispatcher._isolator._offenses.confined_names(stage.now)


def returns(stage: ModelHarness) -> None:
    """Every worker that was started serves."""
    stage.passes(40.0).loads(1)


def looks(stage: ModelHarness) -> int:
    """Ticks as long as there is something to look at; return how often."""
    ticks = 0
    while stage.model.timer.due_at == 0.0:
        stage.model.tick(stage.now)
        ticks += 1
    return ticks


# --- who is ended, and what becomes of what it had --------------------------------------------------------------------


def test_a_worker_that_computes_for_too_long_is_aborted_killed_and_replaced() -> None:
    stage = ModelHarness().serving()
    first, second = stage.some(2)
    stage.passes(59.9).answers(W2, second)
    assert stage.host.refusals == []
    stage.passes(0.2)
    why = "a predict took longer than predict_timeout (60 s)"
    assert stage.host.refusals == [(first, "DEADLINE_EXCEEDED", f"request id{first}: {why}")]
    assert (stage.host.aborted, stage.host.killed, stage.host.spawned[-1]) == ([W1], [], W3)
    # It does not end by itself, and what it says now nobody hears.
    stage.passes(2.1).answers(W1, first).dies(W1, signal.SIGKILL)
    assert (stage.host.killed, stage.host.answers, stage.model.deployments.deaths) == ([W1], [second], 1)
    assert len(stage.host.refusals) == 1


def damaged(stage: ModelHarness) -> ModelHarness:
    stage.host.damaged.add("digits.1")
    return stage


OTHER_REASONS: dict[str, Event] = {
    "never answers a ping": lambda stage: stage.passes(15.0),
    "breaks": lambda stage: stage.says(W1, ProcessFailed("the canary fails")),
    "answers wrongly": lambda stage: stage.says(W1, Pong("another")),
    "has computed on a damaged store": lambda stage: damaged(stage).answers(W1, stage.host.predicts()[-1][1]),
    "has died of a damaged store": lambda stage: damaged(stage).dies(W1, signal.SIGBUS),
}


@pytest.mark.parametrize("fails", OTHER_REASONS.values(), ids=OTHER_REASONS)
def test_what_a_worker_had_that_is_ended_for_another_reason_waits_again_and_is_not_to_blame(fails: Event) -> None:
    stage = ModelHarness(workers=1).serving().passes(15.0)
    [number] = stage.some(1)
    fails(stage)
    assert (stage.host.answers, stage.host.refusals) == ([], [])
    [waiting] = stage.model.dispatcher._scheduler.queue
    assert (waiting.number, waiting.deaths) == (number, 0)


PINGED: dict[str, tuple[Event, list[str]]] = {
    "idle": (lambda stage: stage, [W1, W2]),
    "computes": (lambda stage: stage.some(1), [W2]),
    "dead": (lambda stage: stage.dies(W1, signal.SIGKILL), [W2]),
    "answered": (lambda stage: stage.says(W1, PredictFailed(stage.some(1)[0], "INTERNAL", "", is_exiting=False)), [W2]),
}


@pytest.mark.parametrize(("happens", "pinged"), PINGED.values(), ids=PINGED)
def test_idle_workers_are_pinged_and_those_that_do_not_answer_are_replaced(happens: Event, pinged: list[str]) -> None:
    stage = ModelHarness().serving()
    stage.now += 10.0
    happens(stage)
    stage.passes(5.0)
    assert stage.host.told(Ping) == [(each, Ping(run_selftest=False)) for each in pinged]
    stage.says(W1, Pong()).passes(15.0)
    assert stage.host.aborted == [W2]


@pytest.mark.parametrize(
    ("built", "later", "aborted"), [("canary", "canary", []), ("canary", "x", [W1]), ("", "x", [])]
)
def test_a_worker_whose_canary_is_wrong_is_replaced(built: str, later: str, aborted: list[str]) -> None:
    stage = ModelHarness().pinned().builds(1, Built("/store", BUILT.inputs, BUILT.outputs, (), built, 4096))
    for worker in (W1, W2):
        stage.says(worker, Attached(built or "any", 4000))
    stage.says(W1, Pong(later))
    assert stage.host.aborted == aborted


def test_workers_prove_themselves_as_often_as_it_is_asked_for() -> None:
    stage = ModelHarness(selftest_interval=10.0).serving()
    [number] = stage.some(1)
    stage.passes(10.0)
    assert stage.host.told(Ping) == [(W1, Ping(run_selftest=True)), (W2, Ping(run_selftest=True))]
    # Two predicts may be in front of it, and it is the third.
    stage.says(W2, Pong("canary")).answers(W1, number)
    stage.passes(179.9)
    assert stage.host.aborted == []
    stage.passes(0.1)
    assert stage.host.aborted == [W1]


@pytest.mark.parametrize("hangs", [True, False])
def test_a_worker_that_has_answered_something_is_replaced_at_once_each_time(hangs: bool) -> None:
    stage = ModelHarness(workers=1).serving()
    for serial in range(1, 5):
        worker = f"digits.1.w{serial}"
        stage.loads(1).answers(worker, *stage.some(1))
        if hangs:
            stage.says(worker, Pong("another"))
        else:
            stage.dies(worker)
        assert stage.host.spawned[-1] == f"digits.1.w{serial + 1}"


# --- the store, and weights that are gone with their holder -----------------------------------------------------------


def test_what_was_computed_on_a_damaged_store_is_not_passed_on_and_runs_again() -> None:
    stage = damaged(ModelHarness().serving())
    [number] = stage.some(1)
    stage.answers(W1, number)
    assert (stage.host.answers, stage.host.refusals, stage.host.killed) == ([], [], [W1, W2])
    stage.goes(1).loads(2)
    assert stage.host.predicts()[-1] == ("digits.2.w1", number)
    stage.answers("digits.2.w1", number)
    assert (stage.host.answers, len(stage.host.pinned)) == ([number], 1)  # of the same bytes


def test_a_damaged_store_is_noticed_where_nobody_asks() -> None:
    stage = damaged(ModelHarness().serving()).passes(15.0)
    assert stage.model.generations[0].state is not GenerationState.SERVING


@pytest.mark.parametrize("told_first", ["holder", "worker"])
def test_what_is_computed_on_lost_weights_is_dropped_and_run_again_without_blame(told_first: str) -> None:
    stage = ModelHarness(CARD, workers=1, devices=("ascend:0",)).serving()
    [number] = stage.some(1)
    for generation in range(1, MAX_LOST_SLOTS + 1):
        holder, worker = f"digits.{generation}.holder", f"digits.{generation}.w1"
        assert stage.host.predicts() == [(worker, number)]
        stage.now += 60.0
        # The kernel knows; the model is told later.
        stage.host.dead.add(holder)
        stage.says(worker, PredictFailed(number, "INTERNAL", "spoilt", is_exiting=True))
        stage.says(worker, PredictFailed(number, "INVALID_ARGUMENT", "no such batch", is_exiting=False))
        if told_first == "holder":
            stage.dies(holder).answers(worker, number)
            assert stage.host.killed[-1] == worker
        else:
            stage.answers(worker, number).dies(worker)
        assert (stage.host.answers, stage.host.refusals) == ([], [])
        stage.goes(generation).loads(generation + 1)
    stage.answers(f"digits.{MAX_LOST_SLOTS + 1}.w1", number)
    assert stage.host.answers == [number]


# --- requests that kill -----------------------------------------------------------------------------------------------


def test_a_content_that_workers_died_of_is_kept_from_the_next_one_and_so_are_its_equals() -> None:
    stage = ModelHarness().serving()
    numbers = stage.submit(*equals(1))
    stage.dies(W1)
    numbers += stage.submit(*equals(6))
    stage.dies(W2)
    words = "was on 2 workers when they died, the last one killed by SIGSEGV"
    assert stage.host.refusals[0] == (numbers[0], "INTERNAL", f"request id{numbers[0]} {words}")
    assert sorted(stage.host.refused()) == [(number, "INTERNAL") for number in numbers]
    with pytest.raises(Internal):
        stage.submit(*equals(1))
    assert stage.model.readiness.state is GenerationState.SERVING


def test_who_waits_with_the_content_that_workers_hang_in_is_refused_and_others_of_its_size_are_not() -> None:
    stage = ModelHarness(workers=1).serving()
    numbers = stage.submit(*equals(1))
    stage.passes(60.0)
    numbers += stage.submit(*equals(1))
    stage.loads(1)  # the one that was started in its place
    assert stage.host.predicts()[-1] == (W2, numbers[1])
    numbers += stage.submit(*equals(1))
    others = stage.submit(request(content=b"other"), request(content=b"longer"))
    stage.passes(60.0)
    codes = ["DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "INTERNAL"]
    assert stage.host.refused() == list(zip(numbers, codes, strict=True))
    assert [each.number for each in stage.model.dispatcher._scheduler.queue] == others
    with pytest.raises(Internal, match="this content crashed or hung workers"):
        stage.submit(*equals(1))


@pytest.mark.parametrize(
    ("end", "by", "code"),
    [
        (signal.SIGKILL, ExitInitiator.UNKNOWN, "UNAVAILABLE"),
        (signal.SIGTERM, ExitInitiator.UNKNOWN, "UNAVAILABLE"),
        (signal.SIGABRT, ExitInitiator.DAEMON, "UNAVAILABLE"),
        (signal.SIGKILL, ExitInitiator.KERNEL, "RESOURCE_EXHAUSTED"),
    ],
)
def test_whatever_ends_its_workers_from_outside_blames_no_request_and_none_runs_for_ever(
    end: signal.Signals, by: ExitInitiator, code: str
) -> None:
    stage = ModelHarness().serving()
    [number] = stage.submit(*equals(1))
    for _ in range(MAX_LOST_SLOTS):
        assert stage.host.refusals == []
        [(worker, _)] = stage.host.predicts()
        stage.dies(worker, end, by)
        returns(stage)
    [(refused, how, text)] = stage.host.refusals
    assert (refused, how) == (number, code)
    assert text.startswith(f"request id{number} was on 5 workers when they exited, the last one killed by {end.name}")
    # It is no poison: who sends it again is served.
    assert (stage.model.dispatcher._isolator._contents.quarantine.count(stage.now), suspects(stage)) == (0, [])
    stage.submit(*equals(1))
    assert len(stage.host.predicts()) == 1


def test_who_ran_before_a_killer_is_not_taken_for_it() -> None:
    """The answer to the first of two may be lost with the worker, which died of the second."""
    stage = ModelHarness(workers=1).serving()
    [good, bad] = stage.some(2)
    assert stage.host.predicts() == [(W1, good), (W1, bad)]
    for worker in (W1, W2, W3):
        given = [number for _, number in stage.host.predicts()]
        if given == [good]:
            stage.answers(worker, good)
        stage.dies(worker)
        returns(stage)
    assert stage.host.answers == [good]
    assert stage.host.refused() == [(bad, "INTERNAL")]


# --- clients whose requests kill --------------------------------------------------------------------------------------


def test_a_client_whose_requests_kill_workers_is_confined_to_one() -> None:
    stage = ModelHarness(workers=4, max_queue=50).serving()
    hostile = stage.submit(*poisons(12))
    good = stage.some(12)
    for worker in (W1, W2, W3, W4):
        assert suspects(stage) == []
        stage.dies(worker)
    assert suspects(stage) == [HOSTILE.peer]
    stage.host.predicts()
    returns(stage)
    given = dict(stage.host.predicts())
    [culprit] = [worker for worker, number in given.items() if number in hostile]
    assert (len(given), stage.model.dispatcher._scheduler.slots.in_flight(culprit)) == (4, 1)  # nobody waits behind it
    assert stage.model.dispatcher._scheduler.queue.count == len(hostile) + len(good) - 1 - 6
    assert not stage.model.readiness.has_failed


def test_who_is_confined_and_kills_again_is_refused_for_a_while_and_others_are_not() -> None:
    stage = ModelHarness(workers=3).serving()
    for _ in range(MAX_PEER_DEATHS):
        stage.model.dispatcher._isolator._offenses.record_death(HOSTILE, 0.0, stage.now)
    first, *others = stage.submit(*poisons(3))
    good = stage.some(4)
    given = stage.host.predicts()
    assert [number for _, number in given] == [first, *good]
    stage.dies(given[0][0])
    assert stage.host.refused() == [(first, "INTERNAL"), *((number, "RESOURCE_EXHAUSTED") for number in others)]
    with pytest.raises(
        ResourceExhausted, match=r"^requests of process 13 of user 7 crashed or hung 5 workers"
    ) as error:
        stage.submit(*poisons(1))
    assert error.value.retry_after == 10.0
    assert len(stage.some(1)) == 1
    stage.now += 10.0
    assert len(stage.submit(*poisons(1))) == 1


def test_who_is_confined_runs_as_soon_as_the_one_before_it_is_answered() -> None:
    stage = ModelHarness(workers=3).serving()
    for _ in range(MAX_PEER_DEATHS):
        stage.model.dispatcher._isolator._offenses.record_death(HOSTILE, 0.0, stage.now)
    first, second = stage.submit(*poisons(2))
    [(worker, given)] = stage.host.predicts()
    assert given == first
    stage.answers(worker, first)
    assert [number for _, number in stage.host.predicts()] == [second]


LOSSES: dict[str, Loss] = {
    "spoilt": lambda stage, worker, number: stage.says(worker, PredictFailed(number, "INTERNAL", "x", is_exiting=True)),
    "dead": lambda stage, worker, number: stage.dies(worker),
    "hung": lambda stage, worker, number: stage.passes(1060.0 - stage.now),
}


@pytest.mark.parametrize("taken_back", [True, False])
@pytest.mark.parametrize("lost", LOSSES.values(), ids=LOSSES)
def test_a_client_to_whom_workers_are_lost_is_suspect_though_it_takes_its_requests_back(
    lost: Loss, taken_back: bool
) -> None:
    stage = ModelHarness(workers=MAX_PEER_DEATHS).serving()
    stage.submit(*poisons(MAX_PEER_DEATHS))
    if taken_back:
        stage.model.dispatcher.on_disconnect(HOSTILE.peer.encode(), stage.now)
    for worker, number in stage.host.predicts():
        lost(stage, worker, number)
    assert suspects(stage) == [HOSTILE.peer]


def test_what_and_who_killed_the_old_model_says_nothing_of_the_new_one() -> None:
    stage = ModelHarness().serving()
    guard = stage.model.dispatcher._isolator
    guard._contents.quarantine.add(equals(1)[0], stage.now)
    for _ in range(2 * MAX_PEER_DEATHS + 1):
        guard._offenses.record_death(HOSTILE, 0.0, stage.now)
    stage.updated(2).submit(*equals(1), *poisons(1))


# --- large contents ---------------------------------------------------------------------------------------------------


def test_a_large_content_is_looked_at_in_slices_while_it_waits() -> None:
    stage = ModelHarness().serving()
    stage.model.dispatcher._isolator._contents.quarantine.add(equals(1, MEGABYTE)[0], stage.now)
    same_mark = bytes(600) + b"1" + bytes(MEGABYTE - 601)
    gone, poisoned, good = stage.submit(*equals(2, MEGABYTE), request(content=same_mark))
    assert (stage.host.predicts(), stage.model.timer.due_at) == ([], 0.0)
    [unlike] = stage.submit(request(content=b"2" * MEGABYTE))  # it is not even looked at
    assert [number for _, number in stage.host.predicts()] == [unlike]
    # Of what is taken back no more is looked at.
    stage.model.tick(stage.now)
    stage.model.dispatcher.cancel(b"client", f"id{gone}", stage.now)
    assert looks(stage) == 2 * (MEGABYTE // SLICE_BYTES + 1)
    assert stage.host.refused() == [(gone, "CANCELLED"), (poisoned, "INTERNAL")]
    assert [number for _, number in stage.host.predicts()] == [good]


def test_a_large_content_that_workers_died_of_is_known_a_moment_later() -> None:
    stage = ModelHarness().serving()
    [number] = stage.submit(*equals(1, MEGABYTE))
    stage.dies(W1)
    equal = stage.submit(*equals(3, MEGABYTE))
    stage.dies(W2)
    assert stage.host.refused() == [(number, "INTERNAL")]
    looks(stage)
    assert stage.host.refused() == [(each, "INTERNAL") for each in equal]
    assert stage.model.dispatcher._isolator._contents.quarantine.count(stage.now) == 1


@pytest.mark.parametrize("size", [5, MEGABYTE])
def test_a_content_that_was_answered_after_a_hang_is_beyond_suspicion(size: int) -> None:
    stage = ModelHarness(workers=1).serving()
    quarantine = stage.model.dispatcher._isolator._contents.quarantine
    quarantine.on_hang(equals(1, size)[0], stage.now)
    stage.answers(W1, *stage.submit(*equals(2, size)))
    assert (stage.model.timer.due_at == 0.0) == (size == MEGABYTE)
    looks(stage)
    assert not quarantine.on_hang(equals(1, size)[0], stage.now)


# --- clients ----------------------------------------------------------------------------------------------------------


def test_what_is_taken_back_ends_wherever_it_is() -> None:
    stage = ModelHarness(workers=1).serving()
    running, ready, waiting, other, hangs = stage.some(5)
    stage.host.predicts()
    for number in (waiting, ready, running) * 2:
        stage.model.dispatcher.cancel(b"client", f"id{number}", stage.now)
    text = "cancelled by the client"
    assert stage.host.refusals == [(number, "CANCELLED", text) for number in (waiting, ready, running)]
    assert stage.host.told(CancelPredict) == [(W1, CancelPredict(ready))]
    # In the place of the one that was ready.
    assert stage.host.predicts() == [(W1, other)]
    stage.answers(W1, running, other)
    assert stage.host.answers == [other]
    # What hangs though nobody waits for it is refused once, and its worker ended all the same.
    stage.model.dispatcher.cancel(b"client", f"id{hangs}", stage.now)
    stage.passes(60.0)
    assert (stage.host.refused()[3:], stage.host.aborted) == ([(hangs, "CANCELLED")], [W1])


def test_what_a_client_asked_that_is_shed_or_gone_is_dropped() -> None:
    stage = ModelHarness(workers=1)
    [shed] = stage.some(1)
    stage.model.dispatcher.shed(
        lambda request: request.client == b"client", ResourceExhausted("it reads nothing"), stage.now
    )
    assert stage.host.refused() == [(shed, "RESOURCE_EXHAUSTED")]
    stage.some(3)
    stage.model.dispatcher.metadata.request(MetadataRequest(b"client", "q"))
    stage.model.dispatcher.metadata.request(MetadataRequest(b"another", "r"))
    stage.model.dispatcher.on_disconnect(b"client", stage.now)
    assert stage.model.dispatcher.is_idle
    stage.pinned().builds()
    assert [client for client, _ in stage.host.metadata] == [b"another"]
