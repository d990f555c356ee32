"""A model whose workers hang, lie or lose their store, and clients that change their minds."""

from __future__ import annotations

import itertools

import pytest

from weightd.daemon.states import GenerationState
from weightd.protocol.errors import Internal, Unavailable
from weightd.protocol.messages import TensorSpec
from weightd.protocol.worker_messages import Attached, Broken, OrderMessage, Ping, Pong, Result, Skip

from .test_model import HOLDER, OUT, W1, W2, Stage, request

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
    stage.model.exited(W1, "killed by SIGKILL", stage.now)
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
        stage.model.exited(worker, "killed by SIGABRT", stage.now)
        [(refused, code, _)] = stage.host.refused()
        assert (refused, code) == (number, "DEADLINE_EXCEEDED")
    with pytest.raises(Internal, match="workers died of this content or hung in it"):
        stage.submit(request())
    assert stage.model.guard.quarantine.count(stage.now) == 1
    other = some(stage, 1)
    assert len(other) == 1


def test_a_content_that_workers_died_of_is_kept_from_the_next_one_and_so_are_its_equals() -> None:
    stage = Stage().serving()
    numbers = stage.submit(request())
    stage.model.exited(W1, "killed by SIGSEGV: what it said", stage.now)
    numbers += stage.submit(*(request() for _ in range(6)))
    stage.model.exited(W2, "killed by SIGSEGV: what it said", stage.now)
    refused = stage.host.refused()
    words = "was on 2 workers when they died, the last one killed by SIGSEGV"
    assert refused[0] == (numbers[0], "INTERNAL", f"request id{numbers[0]} {words}")
    assert sorted(number for number, _, _ in refused) == numbers
    assert {code for _, code, _ in refused} == {"INTERNAL"}
    with pytest.raises(Internal):
        stage.submit(request())


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
    [waiting] = stage.model.scheduler.waiting()
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
    stage.model.exited(W1, "exited with status 1", stage.now)
    [waiting] = stage.model.scheduler.waiting()
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
    stage.model.exited(W1, "killed by SIGKILL", stage.now)
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
    stage.model.exited(W1, "killed by SIGBUS", stage.now)
    [waiting] = stage.model.scheduler.waiting()
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
    assert stage.model.scheduler.idle
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
    assert stage.model.scheduler.next_event <= stage.now
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
    assert old.model.scheduler.idle


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
