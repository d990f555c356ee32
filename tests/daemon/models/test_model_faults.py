"""A model whose workers hang, lie or lose their store, and clients that change their minds."""

from __future__ import annotations

import dataclasses
import itertools
import signal

import pytest

from weightd.daemon.generations.states import GenerationState
from weightd.daemon.host.ends import By, End
from weightd.daemon.models.budget import Device
from weightd.daemon.models.model import Model
from weightd.daemon.requests.blame.contents import SLICE_BYTES
from weightd.daemon.requests.blame.guard import MAX_LOSSES
from weightd.daemon.requests.blame.suspects import NEAR_DEATHS
from weightd.daemon.requests.request import Origin, Request
from weightd.protocol.errors import Internal, ResourceExhausted, Unavailable
from weightd.protocol.messages.children import (
    Attached,
    Broken,
    Built,
    Failed,
    Hello,
    OrderMessage,
    Ping,
    Pong,
    Result,
    Skip,
)
from weightd.protocol.messages.data import TensorSpec
from weightd.protocol.version import VERSION

from .test_model import CPU, HOLDER, OUT, SHA, W1, W2, FakeHost, Stage, X, Y, request

_contents = itertools.count()


def some(stage: Stage, count: int) -> list[int]:
    """Submit requests of different contents."""
    made = [request() for _ in range(count)]
    for each in made:
        each.frames = (f"content {next(_contents)}".encode(),)
    return stage.submit(*made)


def orders(stage: Stage, kind: type[OrderMessage]) -> list[tuple[str, OrderMessage]]:
    return [each for each in stage.host.orders if isinstance(each[1], kind)]


def passes(stage: Stage, seconds: float) -> None:
    stage.now += seconds
    stage.model.tick(stage.now)


# --- a seat of several processes --------------------------------------------------------------------------------------


def pair(stage: Stage) -> None:
    """The two workers are one seat from now on."""
    scheduler = stage.model.desk.scheduler
    for worker in (W1, W2):
        scheduler.release(worker)
    scheduler.enlist("pair", (W1, W2))


def test_each_process_of_a_seat_is_given_its_jobs_and_who_loses_one_has_lost_all() -> None:
    stage = Stage().serving()
    pair(stage)
    [number] = some(stage, 1)
    assert stage.host.predicts() == [(W1, number), (W2, number)]
    stage.model.exited(W1, End(-signal.SIGKILL), stage.now)
    assert stage.host.aborted == [W2]
    assert [each.number for each in stage.model.desk.scheduler.waiting()] == [number]


def test_who_computes_for_too_long_is_ended_with_all_of_its_seat() -> None:
    stage = Stage().serving()
    pair(stage)
    some(stage, 1)
    passes(stage, 60.0)
    assert stage.host.aborted == [W1, W2]


def test_who_of_a_seat_answers_wrongly_is_ended_with_all_of_it() -> None:
    stage = Stage().serving()
    pair(stage)
    stage.says(W1, Pong("another"))
    assert stage.host.aborted == [W1, W2]


# --- workers that compute for too long --------------------------------------------------------------------------------


def test_a_worker_that_computes_for_too_long_is_aborted_killed_and_replaced() -> None:
    stage = Stage().serving()
    first, second = some(stage, 2)
    stage.host.predicts()
    passes(stage, 59.9)
    assert stage.host.refused() == []
    stage.says(W2, Result(second, (OUT,)))
    passes(stage, 0.2)
    why = "a predict took longer than predict_timeout, 60 s"
    assert stage.host.refused() == [(first, "DEADLINE_EXCEEDED", f"request id{first}: {why}")]
    assert stage.host.aborted == [W1]
    assert "digits.1.w3" in [name for name, _ in stage.host.spawned]
    # It does not end by itself.
    passes(stage, 2.1)
    assert stage.host.killed == [W1]
    # What it says now, nobody hears.
    stage.says(W1, Result(first, (OUT,)))
    assert [number for number, _, _ in stage.host.answers] == [second]
    stage.model.exited(W1, End(-signal.SIGKILL), stage.now)
    assert stage.model.deaths == 1
    assert stage.host.refused() == []


def test_what_waits_behind_a_long_predict_goes_elsewhere() -> None:
    stage = Stage().serving()
    numbers = some(stage, 4)
    given = stage.host.predicts()
    [behind] = [number for name, number in given[2:] if name == W1]
    stage.says(W2, Result(numbers[1], (OUT,)))
    stage.says(W2, Result(numbers[3], (OUT,)))
    passes(stage, 0.3)
    assert orders(stage, Skip) == [(W1, Skip(behind))]
    assert stage.host.predicts() == [(W2, behind)]


def test_a_content_that_workers_hang_in_is_kept_from_the_next_one() -> None:
    stage = Stage().serving()
    for _ in range(2):
        [number] = stage.submit(request())
        [(worker, _)] = stage.host.predicts()
        passes(stage, 60.0)
        stage.model.exited(worker, End(-signal.SIGABRT), stage.now)
        [(refused, code, _)] = stage.host.refused()
        assert (refused, code) == (number, "DEADLINE_EXCEEDED")
    with pytest.raises(Internal, match="workers died of this content or hung in it"):
        stage.submit(request())
    assert stage.model.desk.guard.quarantine.count(stage.now) == 1
    other = some(stage, 1)
    assert len(other) == 1


def test_a_content_that_workers_died_of_is_kept_from_the_next_one_and_so_are_its_equals() -> None:
    stage = Stage().serving()
    numbers = stage.submit(request())
    stage.model.exited(W1, End(-signal.SIGSEGV, "what it said"), stage.now)
    numbers += stage.submit(*(request() for _ in range(6)))
    stage.model.exited(W2, End(-signal.SIGSEGV, "what it said"), stage.now)
    refused = stage.host.refused()
    words = "was on 2 workers when they died, the last one killed by SIGSEGV"
    assert refused[0] == (numbers[0], "INTERNAL", f"request id{numbers[0]} {words}")
    assert sorted(number for number, _, _ in refused) == numbers
    assert {code for _, code, _ in refused} == {"INTERNAL"}
    with pytest.raises(Internal):
        stage.submit(request())


# --- whose death it is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [
        End(-signal.SIGKILL),
        End(-signal.SIGTERM),
        End(-signal.SIGKILL, by=By.KERNEL),
        End(-signal.SIGABRT, by=By.DAEMON),
        End(None, by=By.KEEPER),
    ],
)
def test_a_death_that_came_from_outside_blames_no_request_and_no_client(end: End) -> None:
    stage = Stage().serving()
    [number] = stage.submit(request())
    for _ in range(MAX_LOSSES - 1):
        [(worker, given)] = stage.host.predicts()
        assert given == number
        stage.model.exited(worker, end, stage.now)
        returns(stage)
    assert stage.host.refused() == []
    assert stage.model.desk.guard.quarantine.count(stage.now) == 0
    assert stage.model.desk.guard.suspects.names(stage.now) == []
    assert len(some(stage, 1)) == 1


@pytest.mark.parametrize(("by", "code"), [(By.UNKNOWN, "UNAVAILABLE"), (By.KERNEL, "RESOURCE_EXHAUSTED")])
def test_whatever_ends_its_workers_no_request_runs_for_ever(by: By, code: str) -> None:
    stage = Stage().serving()
    [number] = stage.submit(request())
    for _ in range(MAX_LOSSES):
        [(worker, _)] = stage.host.predicts()
        stage.model.exited(worker, End(-signal.SIGKILL, by=by), stage.now)
        returns(stage)
    [(refused, how, text)] = stage.host.refused()
    assert (refused, how) == (number, code)
    assert text.startswith(f"request id{number} was on 5 workers when they ended, the last one killed by SIGKILL (")
    # It is no poison: who sends it again is served.
    stage.submit(request())
    assert len(stage.host.predicts()) == 1


def returns(stage: Stage) -> None:
    """Every worker that was started serves."""
    stage.now += 40.0
    stage.model.tick(stage.now)
    stage.loads(1)


# --- clients whose requests kill --------------------------------------------------------------------------------------


HOSTILE = Origin("process 13 of user 7", "user 7")


def test_who_ran_before_a_killer_is_not_taken_for_it() -> None:
    """The answer to the first of two may be lost with the worker, which died of the second."""
    stage = Stage(workers=1).serving()
    [good] = some(stage, 1)
    [bad] = poisons(stage, 1)
    for worker in (W1, "digits.1.w2", "digits.1.w3"):
        given = [number for name, number in stage.host.predicts() if name == worker]
        if given == [good]:
            stage.says(worker, Result(good, (OUT,)))
            given = [number for name, number in stage.host.predicts() if name == worker]
        assert given in ([good, bad], [bad])
        dies(stage, worker)
        returns(stage)
        if stage.host.refusals:
            break
    assert [number for number, _, _ in stage.host.answers] == [good]
    assert [(number, code) for number, code, _ in stage.host.refused()] == [(bad, "INTERNAL")]


def poisons(stage: Stage, count: int) -> list[int]:
    """Requests of one client, each of another content."""
    made = [request() for _ in range(count)]
    for each in made:
        each.client, each.origin, each.frames = b"hostile", HOSTILE, (f"poison {next(_contents)}".encode(),)
    return stage.submit(*made)


def dies(stage: Stage, worker: str) -> None:
    stage.model.exited(worker, End(-signal.SIGFPE), stage.now)


def test_a_client_whose_requests_kill_workers_is_confined_to_one() -> None:
    stage = Stage(workers=4, max_queue=50).serving()
    hostile = poisons(stage, 12)
    good = some(stage, 12)
    for worker in (W1, W2, "digits.1.w3", "digits.1.w4"):
        assert stage.model.desk.guard.suspects.names(stage.now) == []
        dies(stage, worker)
    assert stage.model.desk.guard.suspects.names(stage.now) == [HOSTILE.near]
    stage.host.predicts()
    returns(stage)
    given = dict(stage.host.predicts())
    assert len(given) == 4
    assert sum(number in hostile for number in given.values()) == 1
    [culprit] = [worker for worker, number in given.items() if number in hostile]
    assert stage.model.desk.scheduler.in_flight(culprit) == 1  # nobody waits behind it
    assert stage.model.desk.scheduler.queued == len(hostile) + len(good) - 1 - 6
    assert not stage.model.has_failed


def test_who_is_confined_and_kills_again_is_refused_for_a_while_and_others_are_not() -> None:
    stage = Stage(workers=3).serving()
    for _ in range(NEAR_DEATHS):
        stage.model.desk.guard.suspects.died(HOSTILE, 0.0, stage.now)
    first, *others = poisons(stage, 3)
    good = some(stage, 4)
    given = stage.host.predicts()
    assert [number for _, number in given] == [first, *good]
    dies(stage, given[0][0])
    refused = [(number, code) for number, code, _ in stage.host.refused()]
    assert refused == [(first, "INTERNAL"), *((number, "RESOURCE_EXHAUSTED") for number in others)]
    with pytest.raises(ResourceExhausted, match=r"^5 workers were lost to requests of process 13 of user 7") as error:
        poisons(stage, 1)
    assert error.value.retry_after == 10.0
    assert len(some(stage, 1)) == 1
    stage.now += 10.0
    assert len(poisons(stage, 1)) == 1


def test_a_client_whose_requests_hang_is_suspect_too() -> None:
    stage = Stage(workers=4).serving()
    poisons(stage, 4)
    passes(stage, 60.0)
    assert stage.model.desk.guard.suspects.names(stage.now) == [HOSTILE.near]


def test_a_client_whose_requests_spoil_workers_is_suspect_too_though_it_takes_them_back() -> None:
    stage = Stage(workers=NEAR_DEATHS).serving()
    poisons(stage, NEAR_DEATHS)
    stage.model.vanished(b"hostile", stage.now)
    for worker, number in stage.host.predicts():
        assert stage.model.desk.guard.suspects.names(stage.now) == []
        stage.says(worker, Failed(number, "INTERNAL", "x", leaving=True))
    assert stage.model.desk.guard.suspects.names(stage.now) == [HOSTILE.near]


def test_a_request_that_killed_and_was_taken_back_counts_for_its_client() -> None:
    stage = Stage(workers=4).serving()
    for number in poisons(stage, 4):
        stage.model.cancel(b"hostile", f"id{number}", stage.now)
    for worker in (W1, W2, "digits.1.w3", "digits.1.w4"):
        dies(stage, worker)
    assert stage.model.desk.guard.suspects.names(stage.now) == [HOSTILE.near]


def test_who_killed_the_old_model_may_ask_the_new_one() -> None:
    stage = Stage().serving()
    for _ in range(9):
        stage.model.desk.guard.suspects.died(HOSTILE, 0.0, stage.now)
    stage.updated(2, "/models/new.onnx")
    poisons(stage, 1)


# --- large contents ---------------------------------------------------------------------------------------------------

MEGABYTE = 2**20


def large(content: bytes) -> Request:
    made = request()
    made.frames, made.nbytes = (content,), len(content)
    return made


def test_a_large_content_is_looked_at_in_slices_while_it_waits() -> None:
    stage = Stage().serving()
    poison, other = bytes(MEGABYTE), bytes(600) + b"1" + bytes(MEGABYTE - 601)  # it has the same mark
    stage.model.desk.guard.quarantine.hold(large(poison), stage.now)
    poisoned, good = stage.submit(large(poison), large(other))
    assert (stage.host.predicts(), stage.model.next_event) == ([], 0.0)
    [unlike] = stage.submit(large(b"2" * MEGABYTE))  # it is not even looked at
    assert [number for _, number in stage.host.predicts()] == [unlike]
    ticks = 0
    while stage.model.next_event == 0.0:
        stage.model.tick(stage.now)
        ticks += 1
    assert ticks == 2 * (MEGABYTE // SLICE_BYTES + 1)
    assert [(number, code) for number, code, _ in stage.host.refused()] == [(poisoned, "INTERNAL")]
    assert [number for _, number in stage.host.predicts()] == [good]


def test_a_large_content_that_is_taken_back_is_looked_at_no_more() -> None:
    stage = Stage().serving()
    stage.model.desk.guard.quarantine.hold(large(bytes(MEGABYTE)), stage.now)
    [number] = stage.submit(large(bytes(MEGABYTE)))
    stage.model.tick(stage.now)
    stage.model.cancel(b"client", f"id{number}", stage.now)
    stage.model.tick(stage.now)
    assert stage.model.next_event > stage.now


def test_a_large_content_that_workers_died_of_is_known_a_moment_later() -> None:
    stage = Stage().serving()
    [number] = stage.submit(large(bytes(MEGABYTE)))
    stage.host.predicts()
    dies(stage, W1)
    equal = stage.submit(large(bytes(MEGABYTE)), large(bytes(MEGABYTE)), large(bytes(MEGABYTE)))
    dies(stage, W2)
    assert [each for each, _, _ in stage.host.refused()] == [number]
    while stage.model.desk.guard.looks:
        stage.model.tick(stage.now)
    assert [each for each, _, _ in stage.host.refused()] == equal
    assert stage.model.desk.guard.quarantine.count(stage.now) == 1


def test_a_large_content_that_was_answered_is_beyond_suspicion_a_moment_later() -> None:
    stage = Stage(workers=1).serving()
    stage.model.desk.guard.quarantine.hung(large(bytes(MEGABYTE)), stage.now)
    numbers = stage.submit(large(bytes(MEGABYTE)), large(bytes(MEGABYTE)))
    for number in numbers:
        stage.says(W1, Result(number, (OUT,)))
    assert stage.model.next_event == 0.0
    while stage.model.desk.guard.looks:
        stage.model.tick(stage.now)
    assert not stage.model.desk.guard.quarantine.hung(large(bytes(MEGABYTE)), stage.now)


# --- pings ------------------------------------------------------------------------------------------------------------


def test_idle_workers_are_pinged_and_one_that_does_not_answer_is_replaced() -> None:
    stage = Stage().serving()
    passes(stage, 15.0)
    assert orders(stage, Ping) == [(W1, Ping(canary=False)), (W2, Ping(canary=False))]
    stage.says(W1, Pong())
    passes(stage, 15.0)
    assert stage.host.aborted == [W2]
    assert stage.model.unready(stage.now) == ""


def test_what_a_silent_worker_was_given_it_has_not_begun_with() -> None:
    stage = Stage(workers=1).serving()
    passes(stage, 15.0)
    [number] = some(stage, 1)
    assert stage.host.predicts() == [(W1, number)]
    passes(stage, 15.0)
    assert (stage.host.aborted, stage.host.refused()) == ([W1], [])
    [waiting] = stage.model.desk.scheduler.waiting()
    assert (waiting.number, waiting.deaths) == (number, 0)


def test_a_worker_whose_canary_is_wrong_is_replaced() -> None:
    stage = Stage().serving()
    stage.says(W1, Pong("canary"))
    assert stage.host.aborted == []
    stage.says(W1, Pong("another"))
    assert stage.host.aborted == [W1]
    [number] = some(stage, 1)
    assert stage.host.predicts() == [(W2, number)]


def test_a_worker_that_breaks_is_not_blamed_on_its_request() -> None:
    stage = Stage(workers=1).serving()
    [number] = some(stage, 1)
    stage.says(W1, Broken("the canary fails"))
    stage.model.exited(W1, End(1), stage.now)
    [waiting] = stage.model.desk.scheduler.waiting()
    assert (waiting.number, waiting.deaths) == (number, 0)


# --- health -----------------------------------------------------------------------------------------------------------


def test_it_is_ready_while_a_worker_has_been_heard_of() -> None:
    stage = Stage(workers=1)
    assert stage.model.unready(stage.now) == "digits: pinning"
    stage.serving()
    assert stage.model.unready(stage.now + 30.0) == ""
    assert stage.model.unready(stage.now + 30.1) == "digits: no worker has answered for 30.1 s, watchdog is 30 s"
    [number] = some(stage, 1)
    stage.now += 20.0
    stage.says(W1, Result(number, (OUT,)))
    assert stage.model.unready(stage.now + 30.0) == ""
    stage.model.exited(W1, End(-signal.SIGKILL), stage.now)
    assert stage.model.unready(stage.now) == "digits: no worker is there; they are being replaced"


def test_a_model_that_failed_says_so() -> None:
    stage = Stage()
    stage.model.pin_failed(stage.host.sources[0], "no such file", stage.now)
    assert stage.model.unready(stage.now) == "digits failed: no such file"


# --- the store --------------------------------------------------------------------------------------------------------


def test_what_was_computed_on_a_damaged_store_is_not_passed_on_and_runs_again() -> None:
    stage = Stage().serving()
    assert stage.host.sealed == {"digits.1"}
    [number] = some(stage, 1)
    stage.host.predicts()
    stage.host.damaged.add("digits.1")
    stage.says(W1, Result(number, (OUT,)))
    assert (stage.host.answers, stage.host.refused()) == ([], [])
    assert stage.host.killed == [W1, W2, HOLDER][:2]
    stage.goes(1)
    stage.loads(2)
    assert stage.host.predicts() == [("digits.2.w1", number)]
    stage.says("digits.2.w1", Result(number, (OUT,)))
    assert [each for each, _, _ in stage.host.answers] == [number]
    assert stage.host.sources == stage.host.sources[:1]  # the same bytes


def test_who_dies_of_a_damaged_store_is_not_blamed_on_its_request() -> None:
    stage = Stage().serving()
    [number] = some(stage, 1)
    stage.host.damaged.add("digits.1")
    stage.model.exited(W1, End(-signal.SIGBUS), stage.now)
    [waiting] = stage.model.desk.scheduler.waiting()
    assert (waiting.number, waiting.deaths) == (number, 0)


def test_a_damaged_store_is_noticed_where_nobody_asks() -> None:
    stage = Stage().serving()
    stage.host.damaged.add("digits.1")
    passes(stage, 15.0)
    assert stage.model.deployments[0].generations[0].state is not GenerationState.SERVING


# --- clients ----------------------------------------------------------------------------------------------------------


def test_what_is_taken_back_ends_wherever_it_is() -> None:
    stage = Stage(workers=1).serving()
    running, ready, waiting, other = some(stage, 4)
    stage.host.predicts()
    for number in (waiting, ready, running):
        stage.model.cancel(b"client", f"id{number}", stage.now)
        assert stage.host.refused() == [(number, "CANCELLED", "taken back by the client")]
        stage.model.cancel(b"client", f"id{number}", stage.now)
    assert stage.host.refused() == []
    assert orders(stage, Skip) == [(W1, Skip(ready))]
    # In the place of the one that was ready.
    assert stage.host.predicts() == [(W1, other)]
    stage.says(W1, Result(running, (OUT,))).says(W1, Result(other, (OUT,)))
    assert [number for number, _, _ in stage.host.answers] == [other]


def test_nobody_can_take_back_what_another_one_asked() -> None:
    stage = Stage(workers=1).serving()
    [number] = some(stage, 1)
    stage.model.cancel(b"another", f"id{number}", stage.now)
    assert stage.host.refused() == []


def test_what_a_client_asked_that_is_gone_is_dropped() -> None:
    stage = Stage(workers=1)
    some(stage, 3)
    stage.model.metadata(b"client", "q")
    stage.model.metadata(b"another", "r")
    stage.model.vanished(b"client", stage.now)
    assert stage.model.desk.scheduler.idle
    stage.built()
    assert [client for client, _ in stage.host.metadata] == [b"another"]


def test_a_deadline_that_has_passed_is_not_begun_with() -> None:
    stage = Stage(workers=1)
    late = request(deadline=stage.now + 5.0)
    [number] = stage.submit(late)
    stage.built()
    stage.now += 5.0
    stage.says(W1, Attached("canary", 4000))
    assert stage.host.predicts() == []
    assert stage.model.desk.scheduler.next_event <= stage.now
    stage.model.tick(stage.now)
    assert [each for each, _, _ in stage.host.refused()] == [number]


# --- one model after another ------------------------------------------------------------------------------------------


def test_what_waits_is_the_successors() -> None:
    old, new = Stage(workers=1), Stage(workers=1).serving()
    numbers = some(old, 2)
    unfit = old.submit(request(TensorSpec("z", "FP32", (5, 2))))
    old.model.metadata(b"curious", "7")
    new.model.adopt(old.model, new.now)
    assert [number for _, number in new.host.predicts()] == numbers
    assert [number for number, _, _ in new.host.refused()] == unfit
    assert [client for client, _ in new.host.metadata] == [b"curious"]
    assert old.model.desk.scheduler.idle


def test_what_a_worker_had_that_dies_while_its_model_leaves_is_the_successors() -> None:
    old, new = Stage(workers=1).serving(), Stage(workers=1).serving()
    numbers = some(old, 2)
    old.model.drain(old.now, patience=60.0, replaced=True)
    old.model.exited(W1, End(-signal.SIGKILL), old.now)
    assert old.host.refused() == []
    new.model.adopt(old.model, new.now)
    assert [number for _, number in new.host.predicts()] == numbers


def test_what_a_worker_had_that_dies_while_weightd_stops_is_given_up() -> None:
    stage = Stage(workers=1).serving()
    numbers = some(stage, 2)
    stage.model.drain(stage.now)
    stage.model.exited(W1, End(-signal.SIGKILL), stage.now)
    assert [number for number, _, _ in stage.host.refused()] == numbers


def test_a_model_that_was_drained_is_gone_when_nothing_is_left() -> None:
    stage = Stage(workers=1).serving()
    is_gone = [stage.model.gone]
    stage.model.drain(stage.now, patience=60.0)
    with pytest.raises(Unavailable, match="being unloaded"):
        some(stage, 1)
    is_gone.append(stage.model.gone)
    stage.goes(1)
    assert [*is_gone, stage.model.gone] == [False, False, True]
    stage.model.dispose()
    assert stage.host.unpinned == stage.host.sources


def with_canary(every: float) -> Stage:
    """Two workers that serve, and prove themselves every so many seconds."""
    stage = Stage()
    stage.host = FakeHost()
    config = dataclasses.replace(stage.model.config, canary_interval=every)
    stage.model = Model("digits", config, {"cpu": Device("cpu")}, stage.host, stage.host)
    stage.model.start(stage.now)
    return stage.serving()


def test_a_request_that_was_taken_back_and_hangs_is_refused_once_and_still_counts() -> None:
    stage = Stage(workers=1).serving()
    [number] = some(stage, 1)
    stage.model.cancel(b"client", f"id{number}", stage.now)
    assert stage.host.refused() == [(number, "CANCELLED", "taken back by the client")]
    passes(stage, 60.0)
    assert (stage.host.refused(), stage.host.aborted) == ([], [W1])


def test_who_waits_with_the_content_that_workers_hang_in_is_refused_and_others_of_its_size_are_not() -> None:
    stage = Stage(workers=1).serving()
    stage.submit(request())
    passes(stage, 60.0)
    stage.host.refused()
    [second] = stage.submit(request())
    stage.loads(1)  # the one that was started in its place: digits.1.w2
    assert stage.host.predicts()[-1] == ("digits.1.w2", second)
    [equal] = stage.submit(request())
    other = request()
    other.frames = (b"other",)  # five bytes, too
    stage.submit(other)
    sized = request()
    sized.nbytes = 6  # told apart without a look at its content
    sized.frames = ()
    stage.submit(sized)
    passes(stage, 60.0)
    assert [(number, code) for number, code, _ in stage.host.refused()] == [
        (second, "DEADLINE_EXCEEDED"),
        (equal, "INTERNAL"),
    ]
    assert [each.number for each in stage.model.desk.scheduler.waiting()] == [other.number, sized.number]


def test_who_computes_is_not_pinged() -> None:
    stage = Stage().serving()
    some(stage, 1)
    passes(stage, 15.0)
    assert orders(stage, Ping) == [(W2, Ping(canary=False))]


def test_workers_prove_themselves_as_often_as_it_is_asked_for() -> None:
    stage = with_canary(10.0)
    some(stage, 1)
    passes(stage, 10.0)
    assert orders(stage, Ping) == [(W1, Ping(canary=True)), (W2, Ping(canary=True))]
    # Two predicts may be in front of it, and it is the third.
    stage.says(W2, Pong("canary"))
    stage.says(W1, Result(stage.host.predicts()[0][1], (OUT,)))
    stage.host.orders.clear()
    passes(stage, 179.9)
    assert stage.host.aborted == []
    passes(stage, 0.1)
    assert stage.host.aborted == [W1]


def test_where_there_is_no_canary_none_is_wrong() -> None:
    stage = Stage().building()
    stage.says(HOLDER, Built("/store", (X,), (Y,), ({"x": (2,)},), "", 4096))
    for worker in (W1, W2):
        stage.says(worker, Attached("any", 4000))
    stage.says(W1, Pong("another"))
    assert stage.host.aborted == []


@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_a_worker_that_has_answered_something_is_replaced_at_once_each_time(how: str) -> None:
    stage = Stage(workers=1).serving()
    for serial in range(1, 5):
        worker, heir = f"digits.1.w{serial}", f"digits.1.w{serial + 1}"
        [number] = some(stage, 1)
        stage.says(worker, Result(number, (OUT,)))
        if how == "hangs":
            stage.says(worker, Pong("another"))
        else:
            stage.model.exited(worker, End(-signal.SIGSEGV), stage.now)
        assert heir in [name for name, _ in stage.host.spawned]
        stage.says(heir, Hello("1", SHA, {"weightd": VERSION}, CPU)).says(heir, Attached("canary", 4000))


def test_who_is_dead_is_not_pinged() -> None:
    stage = Stage().serving()
    stage.model.exited(W1, End(-signal.SIGKILL), stage.now)
    passes(stage, 15.0)
    assert orders(stage, Ping) == [(W2, Ping(canary=False))]


def test_who_has_refused_a_request_has_answered() -> None:
    stage = Stage().serving()
    [number] = some(stage, 1)
    stage.now += 10.0
    stage.says(W1, Failed(number, "INVALID_ARGUMENT", "too large", leaving=False))
    passes(stage, 5.0)
    assert orders(stage, Ping) == [(W2, Ping(canary=False))]


def test_a_content_that_was_answered_after_a_hang_is_beyond_suspicion() -> None:
    stage = Stage(workers=1).serving()
    stage.model.desk.guard.quarantine.hung(request(), stage.now)
    [number] = stage.submit(request())
    stage.says(W1, Result(number, (OUT,)))
    assert not stage.model.desk.guard.quarantine.hung(request(), stage.now)


def test_what_killed_the_old_model_may_be_asked_of_the_new_one() -> None:
    stage = Stage().serving()
    stage.model.desk.guard.quarantine.hold(request(), stage.now)
    stage.updated(2, "/models/new.onnx")
    stage.submit(request())


def test_what_ran_on_a_damaged_store_waits_again_before_its_worker_is_dead() -> None:
    stage = Stage(workers=1).serving()
    [number] = some(stage, 1)
    stage.host.damaged.add("digits.1")
    stage.says(W1, Result(number, (OUT,)))
    assert stage.model.desk.scheduler.queued == 1


def test_a_model_that_failed_is_gone_only_when_it_was_told_to_go() -> None:
    stage = Stage()
    stage.model.pin_failed(stage.host.sources[0], "no such file", stage.now)
    assert not stage.model.gone
    stage.model.drain(stage.now)
    assert stage.model.gone


def test_a_snapshot_that_is_being_taken_is_given_up_with_its_model() -> None:
    stage = Stage()
    stage.model.drain(stage.now)
    assert stage.host.unpinned == stage.host.sources


def runs(stage: Stage, until: float) -> int:
    """As the loop does: tick when the model says so, answer each ping at once; return how many there were."""
    count = 0
    while (due := stage.model.next_event) <= until and count < 1000:
        stage.now = max(stage.now, due)
        stage.model.tick(stage.now)
        pings = [(name, order) for name, order in stage.host.orders if isinstance(order, Ping)]
        stage.host.orders.clear()
        for name, order in pings:
            count += 1
            stage.says(name, Pong("canary" if order.canary else ""))
    stage.now = until
    return count


def test_idle_workers_that_prove_themselves_stay_ready() -> None:
    stage = Stage(workers=1)
    stage.host = FakeHost()
    config = dataclasses.replace(stage.model.config, canary_interval=10.0)
    stage.model = Model("digits", config, {"cpu": Device("cpu")}, stage.host, stage.host)
    stage.model.start(stage.now)
    stage.serving()
    pings = runs(stage, stage.now + 100.0)
    assert stage.model.unready(stage.now) == ""
    assert pings >= 9


def test_time_that_a_request_waited_elsewhere_is_not_its_workers() -> None:
    old, new = Stage(workers=1), Stage(workers=1).serving()
    waits = request(arrived=1000.0)
    old.submit(waits)
    now = 1061.0
    new.model.adopt(old.model, now)
    assert [each for _, each in new.host.predicts()] == [waits.number]
    new.model.tick(now)
    assert (new.host.aborted, new.host.refused()) == ([], [])
