"""Scripted lives of a unit: what it wants done after each event, exactly."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from weightd_daemon.generations.actions import Action, AddSlot, RemoveSlot, Role, Spawn, TakeSnapshot
from weightd_daemon.generations.base import GenerationSetup
from weightd_daemon.generations.persisted import RECONNECT_TIMEOUT_S, record_generation, resume_generation
from weightd_daemon.generations.process import STOP_TIMEOUT_S
from weightd_daemon.generations.progress import RetryHint, describe_selftest
from weightd_daemon.generations.rank_group import RankGroup
from weightd_daemon.generations.spec import CONCAT, GenerationSpec, RowTestSpec
from weightd_daemon.generations.states import GenerationState
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.ranks import (
    GroupModelSignature,
    JoinedGroup,
    RankSlice,
    RunSelfTest,
    SelfTestDone,
    SelfTestResult,
)
from weightd_protocol.messages.worker_common import RowSupport as Found
from weightd_protocol.version import VERSION

from .group import (
    BROKER,
    CASES,
    CONNECT_TIMEOUT_S,
    ENTER,
    LOAD_TIMEOUT_S,
    PREDICT_TIMEOUT_S,
    R0,
    R1,
    R2,
    SEAT,
    SHA,
    STOP,
    WARM,
    WARMED,
    RankGroupHarness,
    X,
    Y,
    digest,
    kills,
    sends,
)

FOREVER = float("inf")


def test_a_whole_life(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    group = RankGroupHarness()
    unit, states = group.unit, GenerationState
    warm_timeout = CONNECT_TIMEOUT_S + PREDICT_TIMEOUT_S
    spawned: list[Action] = [Spawn(BROKER, Role.BROKER), Spawn(R0, Role.RANK), Spawn(R1, Role.RANK)]
    steps: list[tuple[Callable[[], list[Action]], list[Action], GenerationState, str, float]] = [
        (group.wanted, [TakeSnapshot()], states.SNAPSHOTTING, "snapshotting", FOREVER),
        (group.pinned, spawned, states.SPAWNING, "spawned, 0/3 processes up", LOAD_TIMEOUT_S),
        (lambda: group.hello(R1), [], states.GATHERING, "spawned, 1/3 processes up", LOAD_TIMEOUT_S),
        (lambda: group.hello(R0), [], states.GATHERING, "spawned, 2/3 processes up", LOAD_TIMEOUT_S),
        (
            lambda: group.hello(BROKER),
            sends(ENTER, BROKER, R0, R1),
            states.BUILDING,
            "loading, 0/2 ranks have joined",
            LOAD_TIMEOUT_S,
        ),
        (lambda: group.entered(R1), [], states.BUILDING, "loading, 1/2 ranks have joined", LOAD_TIMEOUT_S),
        (lambda: group.entered(R0), sends(WARM, R0, R1), states.ATTACHING, "attaching 0/2", warm_timeout),
        (lambda: group.warmed(R0), [], states.ATTACHING, "attaching 1/2", warm_timeout),
        (lambda: group.warmed(R1), [AddSlot(SEAT)], states.SERVING, "serving", FOREVER),
        (lambda: group.after(1e6), [], states.SERVING, "serving", FOREVER),
        (group.drain, [RemoveSlot(SEAT), *sends(STOP, R0, R1)], states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: group.exits(R1, end=ExitCause(0)), [], states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: group.exits(R0, end=ExitCause(0)), sends(STOP, BROKER), states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: group.exits(BROKER, end=ExitCause(0)), [], states.GONE, "gone", FOREVER),
    ]
    for event, wanted, state, progress, wait in steps:
        assert not unit.is_ended
        assert (event(), group.state) == (wanted, state)
        assert (unit.progress, unit.next_tick_at - group.now) == (progress, wait)
        assert unit.processes.slots == ({SEAT: (R0, R1)} if state is states.SERVING else {})
    assert (unit.is_ended, unit.cause, unit.processes.deaths) == (True, "", 0)
    lines = [record.getMessage() for record in caplog.records]
    assert [lines.count(f"m.7: {progress}") for *_, progress, _ in steps] == [1] * len(steps)


def test_what_it_has_built_is_what_its_ranks_say() -> None:
    group = RankGroupHarness(3, reply_rank=1, rows=RowTestSpec(8, (4, 8))).loading()
    other = replace(X, name="other")
    assert group.entered(R0, R1, R2, entered=JoinedGroup((X, other), (Y,))) == sends(RunSelfTest(8, (4, 8)), R0, R1, R2)
    built = group.unit.built
    # Whether it is a drop-in is known before it serves; whether it computes rightly is not.
    assert built is not None
    assert (built.inputs, built.outputs, built.selftest_digest, describe_selftest(group.unit.built)) == (
        (X, other),
        (Y,),
        "",
        "none: the ranks have not run it yet",
    )
    found = Found(("x",), ("y",), False, "one by one")
    group.warmed(R0, R2, warmed=SelfTestDone("", ()))
    group.warmed(R1, warmed=replace(WARMED, row_support=found))
    built = group.unit.built
    assert built is not None
    assert (built.inputs, built.selftest_cases, built.selftest_digest, built.row_support) == (
        (X, other),
        CASES,
        "canary",
        found,
    )
    assert (built.handle, built.shared_bytes, describe_selftest(group.unit.built)) == ("", 0, "x [1, 4]")
    assert group.unit.models == (built,)


def test_where_each_has_a_share_a_client_gets_as_many_rows_as_all_have() -> None:
    group = RankGroupHarness(3, reply_rank=CONCAT).loading()
    free, scalar = TensorSignature("free", "FP32", (-1, 3)), TensorSignature("scalar", "FP32", ())
    anything = TensorSignature("anything", "FP32", None)
    group.entered(R0, R1, R2, entered=JoinedGroup((X,), (Y, free, scalar, anything)))
    group.warmed(R0, R1, R2)
    built = group.unit.built
    assert built is not None
    assert (built.inputs, built.outputs) == ((X,), (replace(Y, shape=(6, 3)), free, scalar, anything))


def test_terms_of_workers_make_no_unit() -> None:
    with pytest.raises(ValueError, match="expected a specification of ranks"):
        RankGroup(GenerationSetup("m.7", GenerationSpec(1, 10.0)))


# --- who is refused -------------------------------------------------------------------------------------------------

HELLOS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another version": (R1, {"versions": {"weightd": "9"}}, f"has weightd 9, the daemon is {VERSION}"),
    "no version": (BROKER, {"versions": {}}, f"has weightd unknown, the daemon is {VERSION}"),
    "another slice": (R1, {"sha256": digest(0)}, "expected a model with sha256 111111111111, got 000000000000"),
    "no rank": (R1, {"slice": None}, "expected rank 1 of a sliced model, got a process without a rank"),
    "another rank": (R1, {"slice": RankSlice(0, (X,), (Y,))}, "expected rank 1, got rank 0"),
}


@pytest.mark.parametrize("why", HELLOS)
def test_who_is_not_what_was_started_ends_all(why: str) -> None:
    name, fields, words = HELLOS[why]
    group = RankGroupHarness().spawned()
    group.hello(R0)
    assert group.hello(name, **fields) == kills(BROKER, R0, R1)
    assert group.state is GenerationState.FAILED
    assert group.cause.startswith(f"{name}: ")
    assert words in group.cause


OTHERS: dict[str, tuple[Any, Any, str]] = {
    "input": ((replace(X, shape=(-1, 5)),), (Y,), "input 0 is x FP32 [-1, 5] here, x FP32 [-1, 4] there"),
    "name": ((X,), (replace(Y, name="z"),), "output 0 is z FP32 [2, 3] here, y FP32 [2, 3] there"),
    "datatype": ((X,), (replace(Y, datatype="FP16"),), "output 0 is y FP16 [2, 3] here, y FP32 [2, 3] there"),
    "number": ((X, X), (Y,), "inputs: 2 here, 1 there"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_ranks_that_say_different_things_of_the_model_are_not_of_one(what: str) -> None:
    inputs, outputs, words = OTHERS[what]
    expected = f"{R1} and {R0} are not ranks of the same model: {words}"
    by_file, by_engine = RankGroupHarness().spawned(), RankGroupHarness().loading()
    by_file.hello(BROKER, R0)
    assert by_file.hello(R1, slice=RankSlice(1, inputs, outputs)) == kills(BROKER, R0, R1)
    by_engine.entered(R0)
    assert by_engine.entered(R1, entered=JoinedGroup(inputs, outputs)) == kills(BROKER, R0, R1)
    for group in (by_file, by_engine):
        assert (group.state, group.cause) == (GenerationState.FAILED, expected)


@pytest.mark.parametrize(("reply", "silent"), [(1, R1), (CONCAT, R0), (CONCAT, R1)])
def test_who_answers_must_have_compared_its_answer_with_the_known_one(reply: int, silent: str) -> None:
    group = RankGroupHarness(reply_rank=reply).warming()
    for name in (R0, R1):
        group.warmed(name, warmed=replace(WARMED, selftest_digest="" if name == silent else "canary"))
    assert group.state is GenerationState.FAILED
    assert (
        group.cause == f"rank {silent[-1]} returns results, but has not compared any with the self-test's known answer"
    )
    assert group.unit.processes.slots == {}


# --- one is lost ----------------------------------------------------------------------------------------------------

LOADS: dict[str, Callable[[RankGroupHarness], RankGroupHarness]] = {
    "spawned": RankGroupHarness.spawned,
    "loading": RankGroupHarness.loading,
    "warming": RankGroupHarness.warming,
    "serving": RankGroupHarness.serving,
    "resumed": lambda group: group.serving().resumed(),
}
LOSSES: dict[str, tuple[Callable[[RankGroupHarness, str], list[Action]], str]] = {
    "exit": (lambda group, name: group.exits(name), "exited with status 3"),
    "death": (lambda group, name: group.exits(name, end=ExitCause(-signal.SIGSEGV)), "killed by SIGSEGV"),
    "broken": (lambda group, name: group.broken(name, "step: expected 8, got 9"), "step: expected 8, got 9"),
    "hang": (lambda group, name: group.hangs(name), "silence"),
    "leaving": (lambda group, name: group.leaves(name, "no kernel"), "a predict failed: no kernel"),
    "stray": (lambda group, name: group.strays(name), "unexpected message attach_allowed"),
}


@pytest.mark.parametrize("name", [BROKER, R0, R1])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("when", LOADS)
def test_the_loss_of_one_is_the_end_of_all_at_once(when: str, loss: str, name: str) -> None:
    group = LOADS[when](RankGroupHarness())
    group.wanted()
    lose, why = LOSSES[loss]
    gone = loss in ("exit", "death")
    others = [each for each in (BROKER, R0, R1) if not (gone and each == name)]
    dismissed: list[Action] = [RemoveSlot(SEAT)] if when == "serving" else []
    assert lose(group, name) == [*dismissed, *kills(*others)]
    assert (group.state, group.cause, group.unit.processes.deaths) == (GenerationState.FAILED, f"{name}: {why}", 1)
    assert (group.unit.processes.slots, group.unit.attach_control.is_valid) == ({}, False)
    # Nothing more is said or done, and nobody is started.
    assert group.hello(R0, R1) + group.entered(R0, R1) + group.warmed(R0, R1) + group.back(R0, R1) == []
    assert group.broken(R0, "late") + group.leaves(R1) + group.hangs(R0) + group.drain() + group.after(1e6) == []
    assert not group.unit.is_ended
    assert group.exits(*others, end=ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON)) == []
    assert (group.unit.is_ended, group.cause, group.unit.processes.deaths) == (True, f"{name}: {why}", 1)


SLOW: dict[str, tuple[float, str]] = {
    "spawned": (LOAD_TIMEOUT_S, f"{BROKER}: spawned took too long"),
    "loading": (LOAD_TIMEOUT_S, f"{R0}: building took too long"),
    "warming": (CONNECT_TIMEOUT_S + PREDICT_TIMEOUT_S, f"{R0}: attaching took too long"),
    "resumed": (RECONNECT_TIMEOUT_S + PREDICT_TIMEOUT_S, f"{R0}: attaching took too long"),
}


@pytest.mark.parametrize("when", SLOW)
def test_whoever_takes_too_long_ends_all(when: str) -> None:
    patience, cause = SLOW[when]
    group = LOADS[when](RankGroupHarness())
    group.wanted()
    assert group.after(patience - 0.1) == []
    assert group.after(0.1) == kills(BROKER, R0, R1)
    assert (group.cause, group.unit.failure.retry_hint, group.unit.processes.deaths) == (
        cause,
        RetryHint.SAME_FAILURE,
        1,
    )


def test_ranks_have_as_long_to_find_each_other_as_the_library_gives_them() -> None:
    group = RankGroupHarness()
    group.unit.spec = replace(group.terms, load_timeout=1.0)
    group.loading()
    assert group.after(CONNECT_TIMEOUT_S - 0.1) == []
    assert group.after(0.1) == kills(BROKER, R0, R1)


# --- the first cause ------------------------------------------------------------------------------------------------

OUR_KILL = ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON)


def test_who_had_ended_by_itself_is_the_cause_of_what_was_noticed_first(caplog: pytest.LogCaptureFixture) -> None:
    group = RankGroupHarness(3).serving()
    group.broken(R0, "Launch kernel failed")
    assert group.cause == f"{R0}: Launch kernel failed"
    group.exits(R0, end=ExitCause(1, "Launch kernel failed"))
    assert group.cause == f"{R0}: Launch kernel failed; its log ends: Launch kernel failed"
    group.exits(R1, end=ExitCause(-signal.SIGSEGV, "a bad address", ExitInitiator.DAEMON))
    assert group.cause == f"{R1}: killed by SIGSEGV: a bad address"
    assert f"first failure: {R1}" in caplog.text
    # Only one can be the first.
    group.exits(R2, end=ExitCause(9))
    group.exits(BROKER, end=ExitCause(2))
    assert group.cause.startswith(R1)
    assert group.unit.processes.deaths == 1


def test_the_last_words_of_the_cause_are_told_when_it_has_ended() -> None:
    group = RankGroupHarness().loading()
    group.broken(R1, "no such file")
    group.exits(R0, end=ExitCause(-signal.SIGKILL, "of no interest", ExitInitiator.DAEMON))
    group.exits(R1, end=OUR_KILL)
    assert group.cause == f"{R1}: no such file"
    another = RankGroupHarness().loading()
    another.broken(R1, "no such file")
    another.exits(R1, end=ExitCause(1, "Traceback"))
    assert another.cause == f"{R1}: no such file; its log ends: Traceback"


EI = "EI0006: wait socket establish timeout"
OUTLOOKS: dict[str, tuple[Callable[[RankGroupHarness], object], RetryHint]] = {
    "broken": (lambda group: group.broken(R0, "no such file"), RetryHint.SAME_FAILURE),
    "no room": (lambda group: group.broken(R0, "no memory", no_room=True), RetryHint.WAIT_FOR_MEMORY),
    "port": (lambda group: group.exits(BROKER, end=ExitCause(1)), RetryHint.WAIT_FOR_MEMORY),
    "killed": (lambda group: group.exits(R0, end=ExitCause(-signal.SIGKILL)), RetryHint.MAY_SUCCEED),
    "status": (lambda group: group.exits(R0, end=ExitCause(3)), RetryHint.SAME_FAILURE),
    "symptom": (lambda group: group.broken(R0, EI), RetryHint.MAY_SUCCEED),
}


@pytest.mark.parametrize("how", OUTLOOKS)
def test_what_the_next_one_may_expect(how: str) -> None:
    happens, outlook = OUTLOOKS[how]
    group = RankGroupHarness().loading()
    happens(group)
    assert group.unit.failure.retry_hint is outlook


def test_a_broker_that_ends_otherwise_has_not_lost_its_port() -> None:
    for group, status in (
        (RankGroupHarness().spawned(), 1),
        (RankGroupHarness().warming(), 5),
        (RankGroupHarness().loading(), 69),
    ):
        group.exits(BROKER, end=ExitCause(status))
        assert group.unit.failure.retry_hint is RetryHint.SAME_FAILURE


# --- how it leaves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["spawned", "loading", "warming", "resumed"])
def test_who_loads_has_nothing_to_finish(when: str) -> None:
    group = LOADS[when](RankGroupHarness())
    group.wanted()
    assert group.drain() == kills(BROKER, R0, R1)
    group.exits(BROKER, R0, R1, end=OUR_KILL)
    assert (group.state, group.unit.is_ended, group.unit.processes.deaths) == (GenerationState.GONE, True, 0)


LEFT: dict[str, Callable[[RankGroupHarness], list[Action]]] = {
    "crash": lambda group: group.exits(R0, end=ExitCause(-signal.SIGSEGV)),
    "broken": lambda group: group.broken(R0, "gap"),
    "leaving": lambda group: group.leaves(R0),
    "hang": lambda group: group.hangs(R0),
    "time": lambda group: group.after(STOP_TIMEOUT_S + 5.0),
    "broker": lambda group: group.exits(BROKER, end=ExitCause(1)),
}


@pytest.mark.parametrize("how", LEFT)
def test_who_cannot_finish_without_another_does_not_wait(how: str) -> None:
    group = RankGroupHarness().serving()
    group.drain(patience=5.0)
    assert group.after(STOP_TIMEOUT_S + 4.9) == []
    killed = LEFT[how](group)
    gone = {"crash": R0, "broker": BROKER}.get(how)
    assert killed == kills(*(each for each in (BROKER, R0, R1) if each != gone))
    group.exits(*group.names, end=OUR_KILL)
    assert (group.state, group.unit.cause, group.unit.processes.deaths) == (
        GenerationState.GONE,
        "",
        int(how == "broker"),
    )


def test_a_broker_may_end_by_itself_when_its_ranks_have() -> None:
    group = RankGroupHarness().serving()
    group.drain()
    assert group.exits(BROKER, end=ExitCause(0)) == []
    assert group.exits(R0, R1, end=ExitCause(0)) == []
    assert (group.state, group.unit.processes.deaths) == (GenerationState.GONE, 0)


# --- one daemon after another ---------------------------------------------------------------------------------------


def test_it_serves_again_once_all_are_back_at_the_same_step() -> None:
    group = RankGroupHarness().serving()
    built, before = group.unit.built, record_generation(group.unit, None)
    group.resumed()
    unit = group.unit
    assert (group.state, group.wanted(), unit.processes.slots, unit.is_reconnecting) == (
        GenerationState.RESUMING,
        [],
        {},
        True,
    )
    assert (unit.built, unit.models, unit.sha256, unit.number) == (built, (built,), SHA, 7)
    assert [(each.name, each.device) for each in unit.children.values()] == [
        (BROKER, "cpu"),
        (R0, "ascend:0"),
        (R1, "ascend:1"),
    ]
    assert record_generation(unit, None) == before
    assert (group.back(R1, step=41), unit.is_complete, unit.progress) == ([], False, "attaching 1/2")
    assert record_generation(unit, None) == before
    assert (group.back(R0, step=41), unit.is_complete, unit.has_all_workers) == ([AddSlot(SEAT)], True, True)
    assert (unit.step, unit.processes.slots, unit.next_tick_at, unit.processes.deaths) == (
        41,
        {SEAT: (R0, R1)},
        FOREVER,
        0,
    )
    assert (group.after(1e6), group.resumed().unit.is_reconnecting) == ([], True)


def test_ranks_that_are_not_in_step_would_mix_requests() -> None:
    group = RankGroupHarness().serving().resumed()
    group.back(R0, step=41)
    assert group.back(R1, step=42) == kills(BROKER, R0, R1)
    assert group.cause == f"the ranks have run different steps: {R0} at step 41, {R1} at step 42"


@pytest.mark.parametrize("missing", [BROKER, R0, R1])
def test_if_not_all_were_written_down_none_goes_on(missing: str) -> None:
    group = RankGroupHarness().serving()
    written = record_generation(group.unit, None)
    assert written is not None
    children = tuple(each for each in written.children if each.name != missing)
    unit = resume_generation(group.setup, replace(written, children=children), group.now)
    assert unit.state is GenerationState.FAILED
    assert unit.take_actions() == kills(*(each.name for each in children))
    assert unit.cause.startswith(f"expected {BROKER}, {R0}, {R1}, got ")


@pytest.mark.parametrize("when", ["spawned", "loading", "warming", "draining", "failed"])
def test_only_what_serves_can_be_gone_on_with(when: str) -> None:
    if when in LOADS:
        group = LOADS[when](RankGroupHarness())
    else:
        group = RankGroupHarness().serving()
        group.drain() if when == "draining" else group.exits(R0)
    assert record_generation(group.unit, None) is None


# --- one process of several models ----------------------------------------------------------------------------------

MEMBERS = JoinedGroup((), (), members=(GroupModelSignature((X,), (Y,)), GroupModelSignature((Y,), (X,))))


def household() -> RankGroupHarness:
    group = RankGroupHarness(1, reply_rank=0, has_broker=False, is_sliced=False, model_count=2)
    group.unit.on_snapshot_taken(digest(0), group.now)
    group.wanted()
    assert group.hello(R0, slice=None) == sends(ENTER, R0)
    return group


def test_one_process_serves_several_models() -> None:
    group = household()
    assert group.entered(R0, entered=MEMBERS) == sends(WARM, R0)
    assert group.warmed(
        R0, warmed=SelfTestDone("", (), members=(SelfTestResult("one", CASES), SelfTestResult("", ())))
    ) == [AddSlot(SEAT)]
    one, other = group.unit.models
    assert (one.inputs, one.outputs, one.selftest_digest, one.selftest_cases) == ((X,), (Y,), "one", CASES)
    assert (other.inputs, other.outputs, other.selftest_digest, other.selftest_cases) == ((Y,), (X,), "", ())
    assert other.selftest_note == "none was configured"
    assert (group.unit.built, group.unit.processes.slots) == (one, {SEAT: (R0,)})
    models = group.unit.models
    group.resumed()
    assert (group.back(R0), group.unit.models) == ([AddSlot(SEAT)], models)


def test_a_process_of_other_models_is_refused() -> None:
    loaded = household()
    loaded.entered(R0, entered=replace(MEMBERS, members=MEMBERS.members[:1]))
    assert loaded.cause == "expected 2 models in one process, got 1"
    warmed = household()
    warmed.entered(R0, entered=MEMBERS)
    warmed.warmed(R0, warmed=WARMED)
    assert warmed.cause == f"{R0}: expected self-tests of 2 models, got 0"
    for group in (loaded, warmed):
        assert group.state is GenerationState.FAILED
