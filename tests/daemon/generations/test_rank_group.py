"""Scripted tests of a rank group: the exact actions that it requests after each event."""

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

from .rank_group_harness import (
    BROKER,
    CASES,
    CONNECT_TIMEOUT_S,
    JOIN_GROUP,
    LOAD_TIMEOUT_S,
    PREDICT_TIMEOUT_S,
    R0,
    R1,
    R2,
    RUN_SELFTEST,
    SELFTEST_DONE,
    SHA,
    SLOT,
    STOP,
    RankGroupHarness,
    X,
    Y,
    digest,
    kills,
    sends,
)

FOREVER = float("inf")


def test_life_cycle(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    group = RankGroupHarness()
    rank_group, states = group.rank_group, GenerationState
    warm_timeout = CONNECT_TIMEOUT_S + PREDICT_TIMEOUT_S
    spawned: list[Action] = [Spawn(BROKER, Role.BROKER), Spawn(R0, Role.RANK), Spawn(R1, Role.RANK)]
    steps: list[tuple[Callable[[], list[Action]], list[Action], GenerationState, str, float]] = [
        (group.take_actions, [TakeSnapshot()], states.SNAPSHOTTING, "snapshotting", FOREVER),
        (group.snapshot_taken, spawned, states.SPAWNING, "spawned, 0/3 processes up", LOAD_TIMEOUT_S),
        (lambda: group.hello(R1), [], states.GATHERING, "spawned, 1/3 processes up", LOAD_TIMEOUT_S),
        (lambda: group.hello(R0), [], states.GATHERING, "spawned, 2/3 processes up", LOAD_TIMEOUT_S),
        (
            lambda: group.hello(BROKER),
            sends(JOIN_GROUP, BROKER, R0, R1),
            states.BUILDING,
            "loading, 0/2 ranks have joined",
            LOAD_TIMEOUT_S,
        ),
        (lambda: group.joined(R1), [], states.BUILDING, "loading, 1/2 ranks have joined", LOAD_TIMEOUT_S),
        (lambda: group.joined(R0), sends(RUN_SELFTEST, R0, R1), states.ATTACHING, "attaching 0/2", warm_timeout),
        (lambda: group.selftest_done(R0), [], states.ATTACHING, "attaching 1/2", warm_timeout),
        (lambda: group.selftest_done(R1), [AddSlot(SLOT)], states.SERVING, "serving", FOREVER),
        (lambda: group.after(1e6), [], states.SERVING, "serving", FOREVER),
        (group.drain, [RemoveSlot(SLOT), *sends(STOP, R0, R1)], states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: group.exits(R1, end=ExitCause(0)), [], states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: group.exits(R0, end=ExitCause(0)), sends(STOP, BROKER), states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: group.exits(BROKER, end=ExitCause(0)), [], states.GONE, "gone", FOREVER),
    ]
    for event, take_actions, state, progress, wait in steps:
        assert not rank_group.is_ended
        assert (event(), group.state) == (take_actions, state)
        assert (rank_group.progress, rank_group.next_tick_at - group.now) == (progress, wait)
        assert rank_group.processes.slots == ({SLOT: (R0, R1)} if state is states.SERVING else {})
    assert (rank_group.is_ended, rank_group.cause, rank_group.processes.deaths) == (True, "", 0)
    lines = [record.getMessage() for record in caplog.records]
    assert [lines.count(f"m.7: {progress}") for *_, progress, _ in steps] == [1] * len(steps)


def test_signature_and_selftest_come_from_ranks() -> None:
    group = RankGroupHarness(3, reply_rank=1, rows=RowTestSpec(8, (4, 8))).loading()
    other = replace(X, name="other")
    assert group.joined(R0, R1, R2, joined=JoinedGroup((X, other), (Y,))) == sends(RunSelfTest(8, (4, 8)), R0, R1, R2)
    built = group.rank_group.built
    # The signature is known before the group serves; the result of the self-test is not.
    assert built is not None
    assert (built.inputs, built.outputs, built.selftest_digest, describe_selftest(group.rank_group.built)) == (
        (X, other),
        (Y,),
        "",
        "none: the ranks have not run it yet",
    )
    found = Found(("x",), ("y",), False, "one by one")
    group.selftest_done(R0, R2, selftest_done=SelfTestDone("", ()))
    group.selftest_done(R1, selftest_done=replace(SELFTEST_DONE, row_support=found))
    built = group.rank_group.built
    assert built is not None
    assert (built.inputs, built.selftest_cases, built.selftest_digest, built.row_support) == (
        (X, other),
        CASES,
        "digest",
        found,
    )
    assert (built.handle, built.shared_bytes, describe_selftest(group.rank_group.built)) == ("", 0, "x [1, 4]")
    assert group.rank_group.models == (built,)


def test_concat_multiplies_rows_by_number_of_ranks() -> None:
    group = RankGroupHarness(3, reply_rank=CONCAT).loading()
    free, scalar = TensorSignature("free", "FP32", (-1, 3)), TensorSignature("scalar", "FP32", ())
    anything = TensorSignature("anything", "FP32", None)
    group.joined(R0, R1, R2, joined=JoinedGroup((X,), (Y, free, scalar, anything)))
    group.selftest_done(R0, R1, R2)
    built = group.rank_group.built
    assert built is not None
    assert (built.inputs, built.outputs) == ((X,), (replace(Y, shape=(6, 3)), free, scalar, anything))


def test_spec_without_ranks_is_rejected() -> None:
    with pytest.raises(ValueError, match="expected a specification of ranks"):
        RankGroup(GenerationSetup("m.7", GenerationSpec(1, 10.0)))


# --- rejected processes ---------------------------------------------------------------------------------------------

INVALID_HELLOS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another version": (R1, {"versions": {"weightd": "9"}}, f"has weightd 9, the daemon is {VERSION}"),
    "no version": (BROKER, {"versions": {}}, f"has weightd unknown, the daemon is {VERSION}"),
    "another slice": (R1, {"sha256": digest(0)}, "expected a model with sha256 111111111111, got 000000000000"),
    "no rank": (R1, {"slice": None}, "expected rank 1 of a sliced model, got a process without a rank"),
    "another rank": (R1, {"slice": RankSlice(0, (X,), (Y,))}, "expected rank 1, got rank 0"),
}


@pytest.mark.parametrize("why", INVALID_HELLOS)
def test_invalid_hello_ends_group(why: str) -> None:
    name, fields, words = INVALID_HELLOS[why]
    group = RankGroupHarness().spawned()
    group.hello(R0)
    assert group.hello(name, **fields) == kills(BROKER, R0, R1)
    assert group.state is GenerationState.FAILED
    assert group.cause.startswith(f"{name}: ")
    assert words in group.cause


DIFFERENT_SIGNATURES: dict[str, tuple[Any, Any, str]] = {
    "input": ((replace(X, shape=(-1, 5)),), (Y,), "input 0 is x FP32 [-1, 5] here, x FP32 [-1, 4] there"),
    "name": ((X,), (replace(Y, name="z"),), "output 0 is z FP32 [2, 3] here, y FP32 [2, 3] there"),
    "datatype": ((X,), (replace(Y, datatype="FP16"),), "output 0 is y FP16 [2, 3] here, y FP32 [2, 3] there"),
    "number": ((X, X), (Y,), "inputs: 2 here, 1 there"),
}


@pytest.mark.parametrize("what", DIFFERENT_SIGNATURES)
def test_ranks_with_different_signatures_end_group(what: str) -> None:
    inputs, outputs, words = DIFFERENT_SIGNATURES[what]
    expected = f"{R1} and {R0} are not ranks of the same model: {words}"
    by_file, by_engine = RankGroupHarness().spawned(), RankGroupHarness().loading()
    by_file.hello(BROKER, R0)
    assert by_file.hello(R1, slice=RankSlice(1, inputs, outputs)) == kills(BROKER, R0, R1)
    by_engine.joined(R0)
    assert by_engine.joined(R1, joined=JoinedGroup(inputs, outputs)) == kills(BROKER, R0, R1)
    for group in (by_file, by_engine):
        assert (group.state, group.cause) == (GenerationState.FAILED, expected)


@pytest.mark.parametrize(("reply", "silent"), [(1, R1), (CONCAT, R0), (CONCAT, R1)])
def test_replying_ranks_must_compare_with_known_answer(reply: int, silent: str) -> None:
    group = RankGroupHarness(reply_rank=reply).warming()
    for name in (R0, R1):
        group.selftest_done(
            name, selftest_done=replace(SELFTEST_DONE, selftest_digest="" if name == silent else "digest")
        )
    assert group.state is GenerationState.FAILED
    assert (
        group.cause == f"rank {silent[-1]} returns results, but has not compared any with the self-test's known answer"
    )
    assert group.rank_group.processes.slots == {}


# --- loss of a process ----------------------------------------------------------------------------------------------

STAGES: dict[str, Callable[[RankGroupHarness], RankGroupHarness]] = {
    "spawned": RankGroupHarness.spawned,
    "loading": RankGroupHarness.loading,
    "warming": RankGroupHarness.warming,
    "serving": RankGroupHarness.serving,
    "resumed": lambda group: group.serving().resumed(),
}
LOSSES: dict[str, tuple[Callable[[RankGroupHarness, str], list[Action]], str]] = {
    "exit": (lambda group, name: group.exits(name), "exited with status 3"),
    "death": (lambda group, name: group.exits(name, end=ExitCause(-signal.SIGSEGV)), "killed by SIGSEGV"),
    "broken": (lambda group, name: group.reports_failure(name, "step: expected 8, got 9"), "step: expected 8, got 9"),
    "hang": (lambda group, name: group.hangs(name), "silence"),
    "leaving": (lambda group, name: group.leaves(name, "no kernel"), "a predict failed: no kernel"),
    "stray": (lambda group, name: group.sends_unexpected(name), "unexpected message attach_allowed"),
}


@pytest.mark.parametrize("name", [BROKER, R0, R1])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("when", STAGES)
def test_loss_of_one_process_ends_group(when: str, loss: str, name: str) -> None:
    group = STAGES[when](RankGroupHarness())
    group.take_actions()
    lose, why = LOSSES[loss]
    gone = loss in ("exit", "death")
    others = [each for each in (BROKER, R0, R1) if not (gone and each == name)]
    removed_slot: list[Action] = [RemoveSlot(SLOT)] if when == "serving" else []
    assert lose(group, name) == [*removed_slot, *kills(*others)]
    assert (group.state, group.cause, group.rank_group.processes.deaths) == (
        GenerationState.FAILED,
        f"{name}: {why}",
        1,
    )
    assert (group.rank_group.processes.slots, group.rank_group.attach_control.is_valid) == ({}, False)
    # The group ignores later messages and starts no process.
    assert group.hello(R0, R1) + group.joined(R0, R1) + group.selftest_done(R0, R1) + group.reconnected(R0, R1) == []
    assert (
        group.reports_failure(R0, "late") + group.leaves(R1) + group.hangs(R0) + group.drain() + group.after(1e6) == []
    )
    assert not group.rank_group.is_ended
    assert group.exits(*others, end=ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON)) == []
    assert (group.rank_group.is_ended, group.cause, group.rank_group.processes.deaths) == (True, f"{name}: {why}", 1)


TIMEOUTS: dict[str, tuple[float, str]] = {
    "spawned": (LOAD_TIMEOUT_S, f"{BROKER}: spawned took too long"),
    "loading": (LOAD_TIMEOUT_S, f"{R0}: building took too long"),
    "warming": (CONNECT_TIMEOUT_S + PREDICT_TIMEOUT_S, f"{R0}: attaching took too long"),
    "resumed": (RECONNECT_TIMEOUT_S + PREDICT_TIMEOUT_S, f"{R0}: attaching took too long"),
}


@pytest.mark.parametrize("when", TIMEOUTS)
def test_timeout_ends_group(when: str) -> None:
    timeout, cause = TIMEOUTS[when]
    group = STAGES[when](RankGroupHarness())
    group.take_actions()
    assert group.after(timeout - 0.1) == []
    assert group.after(0.1) == kills(BROKER, R0, R1)
    assert (group.cause, group.rank_group.failure.retry_hint, group.rank_group.processes.deaths) == (
        cause,
        RetryHint.SAME_FAILURE,
        1,
    )


def test_connect_timeout_extends_load_timeout() -> None:
    group = RankGroupHarness()
    group.rank_group.spec = replace(group.terms, load_timeout=1.0)
    group.loading()
    assert group.after(CONNECT_TIMEOUT_S - 0.1) == []
    assert group.after(0.1) == kills(BROKER, R0, R1)


# --- first cause ----------------------------------------------------------------------------------------------------

OUR_KILL = ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON)


def test_cause_is_rank_that_exited_independently(caplog: pytest.LogCaptureFixture) -> None:
    group = RankGroupHarness(3).serving()
    group.reports_failure(R0, "Launch kernel failed")
    assert group.cause == f"{R0}: Launch kernel failed"
    group.exits(R0, end=ExitCause(1, "Launch kernel failed"))
    assert group.cause == f"{R0}: Launch kernel failed; its log ends: Launch kernel failed"
    group.exits(R1, end=ExitCause(-signal.SIGSEGV, "a bad address", ExitInitiator.DAEMON))
    assert group.cause == f"{R1}: killed by SIGSEGV: a bad address"
    assert f"first failure: {R1}" in caplog.text
    # Later exits do not change the cause again.
    group.exits(R2, end=ExitCause(9))
    group.exits(BROKER, end=ExitCause(2))
    assert group.cause.startswith(R1)
    assert group.rank_group.processes.deaths == 1


def test_log_tail_is_added_to_cause_after_exit() -> None:
    group = RankGroupHarness().loading()
    group.reports_failure(R1, "no such file")
    group.exits(R0, end=ExitCause(-signal.SIGKILL, "of no interest", ExitInitiator.DAEMON))
    group.exits(R1, end=OUR_KILL)
    assert group.cause == f"{R1}: no such file"
    another = RankGroupHarness().loading()
    another.reports_failure(R1, "no such file")
    another.exits(R1, end=ExitCause(1, "Traceback"))
    assert another.cause == f"{R1}: no such file; its log ends: Traceback"


EI = "EI0006: wait socket establish timeout"
RETRY_HINTS: dict[str, tuple[Callable[[RankGroupHarness], object], RetryHint]] = {
    "broken": (lambda group: group.reports_failure(R0, "no such file"), RetryHint.SAME_FAILURE),
    "no room": (lambda group: group.reports_failure(R0, "no memory", no_room=True), RetryHint.WAIT_FOR_MEMORY),
    "port": (lambda group: group.exits(BROKER, end=ExitCause(1)), RetryHint.WAIT_FOR_MEMORY),
    "killed": (lambda group: group.exits(R0, end=ExitCause(-signal.SIGKILL)), RetryHint.MAY_SUCCEED),
    "status": (lambda group: group.exits(R0, end=ExitCause(3)), RetryHint.SAME_FAILURE),
    "symptom": (lambda group: group.reports_failure(R0, EI), RetryHint.MAY_SUCCEED),
}


@pytest.mark.parametrize("how", RETRY_HINTS)
def test_retry_hint_depends_on_failure(how: str) -> None:
    fail, retry_hint = RETRY_HINTS[how]
    group = RankGroupHarness().loading()
    fail(group)
    assert group.rank_group.failure.retry_hint is retry_hint


def test_broker_exit_means_busy_port_only_while_loading() -> None:
    for group, status in (
        (RankGroupHarness().spawned(), 1),
        (RankGroupHarness().warming(), 5),
        (RankGroupHarness().loading(), 69),
    ):
        group.exits(BROKER, end=ExitCause(status))
        assert group.rank_group.failure.retry_hint is RetryHint.SAME_FAILURE


# --- drain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["spawned", "loading", "warming", "resumed"])
def test_drain_while_loading_kills_processes(when: str) -> None:
    group = STAGES[when](RankGroupHarness())
    group.take_actions()
    assert group.drain() == kills(BROKER, R0, R1)
    group.exits(BROKER, R0, R1, end=OUR_KILL)
    assert (group.state, group.rank_group.is_ended, group.rank_group.processes.deaths) == (
        GenerationState.GONE,
        True,
        0,
    )


DRAIN_LOSSES: dict[str, Callable[[RankGroupHarness], list[Action]]] = {
    "crash": lambda group: group.exits(R0, end=ExitCause(-signal.SIGSEGV)),
    "broken": lambda group: group.reports_failure(R0, "gap"),
    "leaving": lambda group: group.leaves(R0),
    "hang": lambda group: group.hangs(R0),
    "time": lambda group: group.after(STOP_TIMEOUT_S + 5.0),
    "broker": lambda group: group.exits(BROKER, end=ExitCause(1)),
}


@pytest.mark.parametrize("how", DRAIN_LOSSES)
def test_draining_group_stops_after_loss(how: str) -> None:
    group = RankGroupHarness().serving()
    group.drain(timeout=5.0)
    assert group.after(STOP_TIMEOUT_S + 4.9) == []
    killed = DRAIN_LOSSES[how](group)
    gone = {"crash": R0, "broker": BROKER}.get(how)
    assert killed == kills(*(each for each in (BROKER, R0, R1) if each != gone))
    group.exits(*group.names, end=OUR_KILL)
    assert (group.state, group.rank_group.cause, group.rank_group.processes.deaths) == (
        GenerationState.GONE,
        "",
        int(how == "broker"),
    )


def test_broker_may_exit_before_ranks_while_draining() -> None:
    group = RankGroupHarness().serving()
    group.drain()
    assert group.exits(BROKER, end=ExitCause(0)) == []
    assert group.exits(R0, R1, end=ExitCause(0)) == []
    assert (group.state, group.rank_group.processes.deaths) == (GenerationState.GONE, 0)


# --- restart of the daemon ------------------------------------------------------------------------------------------


def test_serves_again_after_all_ranks_reconnected() -> None:
    group = RankGroupHarness().serving()
    built, before = group.rank_group.built, record_generation(group.rank_group, None)
    group.resumed()
    rank_group = group.rank_group
    assert (group.state, group.take_actions(), rank_group.processes.slots, rank_group.is_reconnecting) == (
        GenerationState.RESUMING,
        [],
        {},
        True,
    )
    assert (rank_group.built, rank_group.models, rank_group.sha256, rank_group.number) == (built, (built,), SHA, 7)
    assert [(each.name, each.device) for each in rank_group.children.values()] == [
        (BROKER, "cpu"),
        (R0, "ascend:0"),
        (R1, "ascend:1"),
    ]
    assert record_generation(rank_group, None) == before
    assert (group.reconnected(R1, step=41), rank_group.is_complete, rank_group.progress) == ([], False, "attaching 1/2")
    assert record_generation(rank_group, None) == before
    assert (group.reconnected(R0, step=41), rank_group.is_complete, rank_group.has_all_workers) == (
        [AddSlot(SLOT)],
        True,
        True,
    )
    assert (rank_group.step, rank_group.processes.slots, rank_group.next_tick_at, rank_group.processes.deaths) == (
        41,
        {SLOT: (R0, R1)},
        FOREVER,
        0,
    )
    assert (group.after(1e6), group.resumed().rank_group.is_reconnecting) == ([], True)


def test_different_steps_after_reconnect_end_group() -> None:
    group = RankGroupHarness().serving().resumed()
    group.reconnected(R0, step=41)
    assert group.reconnected(R1, step=42) == kills(BROKER, R0, R1)
    assert group.cause == f"the ranks have run different steps: {R0} at step 41, {R1} at step 42"


@pytest.mark.parametrize("missing", [BROKER, R0, R1])
def test_incomplete_record_cannot_be_resumed(missing: str) -> None:
    group = RankGroupHarness().serving()
    written = record_generation(group.rank_group, None)
    assert written is not None
    children = tuple(each for each in written.children if each.name != missing)
    rank_group = resume_generation(group.setup, replace(written, children=children), group.now)
    assert rank_group.state is GenerationState.FAILED
    assert rank_group.take_actions() == kills(*(each.name for each in children))
    assert rank_group.cause.startswith(f"expected {BROKER}, {R0}, {R1}, got ")


@pytest.mark.parametrize("when", ["spawned", "loading", "warming", "draining", "failed"])
def test_only_serving_groups_are_recorded(when: str) -> None:
    if when in STAGES:
        group = STAGES[when](RankGroupHarness())
    else:
        group = RankGroupHarness().serving()
        group.drain() if when == "draining" else group.exits(R0)
    assert record_generation(group.rank_group, None) is None


# --- model groups: several models in one process --------------------------------------------------------------------

MEMBERS = JoinedGroup((), (), members=(GroupModelSignature((X,), (Y,)), GroupModelSignature((Y,), (X,))))


def start_model_group() -> RankGroupHarness:
    group = RankGroupHarness(1, reply_rank=0, has_broker=False, is_sliced=False, model_count=2)
    group.rank_group.on_snapshot_taken(digest(0), group.now)
    group.take_actions()
    assert group.hello(R0, slice=None) == sends(JOIN_GROUP, R0)
    return group


def test_one_process_serves_several_models() -> None:
    group = start_model_group()
    assert group.joined(R0, joined=MEMBERS) == sends(RUN_SELFTEST, R0)
    assert group.selftest_done(
        R0, selftest_done=SelfTestDone("", (), members=(SelfTestResult("one", CASES), SelfTestResult("", ())))
    ) == [AddSlot(SLOT)]
    one, other = group.rank_group.models
    assert (one.inputs, one.outputs, one.selftest_digest, one.selftest_cases) == ((X,), (Y,), "one", CASES)
    assert (other.inputs, other.outputs, other.selftest_digest, other.selftest_cases) == ((Y,), (X,), "", ())
    assert other.selftest_note == "the model has no key selftest"
    assert (group.rank_group.built, group.rank_group.processes.slots) == (one, {SLOT: (R0,)})
    models = group.rank_group.models
    group.resumed()
    assert (group.reconnected(R0), group.rank_group.models) == ([AddSlot(SLOT)], models)


def test_process_with_other_models_ends_group() -> None:
    loaded = start_model_group()
    loaded.joined(R0, joined=replace(MEMBERS, members=MEMBERS.members[:1]))
    assert loaded.cause == "expected 2 models in one process, got 1"
    selftest_done = start_model_group()
    selftest_done.joined(R0, joined=MEMBERS)
    selftest_done.selftest_done(R0, selftest_done=SELFTEST_DONE)
    assert selftest_done.cause == f"{R0}: expected self-tests of 2 models, got 0"
    for group in (loaded, selftest_done):
        assert group.state is GenerationState.FAILED
