"""Scripted tests of a generation with shared weights: the exact actions that it requests after each event."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from weightd_daemon.generations.actions import Action, AddSlot, Kill, RemoveSlot, Role, Send, Spawn, TakeSnapshot
from weightd_daemon.generations.attach_control import ALLOW_TIMEOUT_S
from weightd_daemon.generations.base import HELLO_TIMEOUT_S
from weightd_daemon.generations.process import STOP_TIMEOUT_S
from weightd_daemon.generations.progress import ProgressLogger, RetryHint
from weightd_daemon.generations.restarts import MAX_FAILED_STARTS
from weightd_daemon.generations.shared_weights import ABORT_TIMEOUT_S
from weightd_daemon.generations.states import ACTIVE, ChildState, GenerationState
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_protocol.messages.worker import (
    Attached,
    Build,
    Built,
    Hello,
    TrimStore,
)
from weightd_protocol.messages.worker_common import DeviceMemory, RowSupport, SharingTraits
from weightd_protocol.version import VERSION

from .generation_harness import (
    ATTACHED,
    BUILT,
    CARD,
    CPU,
    FOREVER,
    HOLDER,
    LOAD_TIMEOUT_S,
    PREDICT_TIMEOUT_S,
    SHA,
    TRIM_STORE,
    W1,
    W2,
    W3,
    W4,
    W5,
    GenerationHarness,
    abort,
    allow,
    attach,
    pid,
    stop,
    worker,
)

CRASH = ExitCause(-signal.SIGSEGV)
PRIVATE = replace(BUILT, handle="", shared_bytes=0, note="weights are not shared: no room", has_sharing_failed=True)


Event = Callable[[GenerationHarness], list[Action]]


def spawn(name: str) -> Action:
    return Spawn(name, Role.WORKER)


# --- life cycle -----------------------------------------------------------------------------------------------------


def test_life_cycle(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    harness = GenerationHarness(2)
    generation, states = harness.generation, GenerationState
    all_spawned = [Spawn(HOLDER, Role.HOLDER), spawn(W1), spawn(W2)]
    all_stopped = [RemoveSlot(W1), stop(W1), RemoveSlot(W2), stop(W2)]
    steps: list[tuple[Callable[[], list[Action]], list[Action], GenerationState, str, float]] = [
        (harness.take_actions, [TakeSnapshot()], states.SNAPSHOTTING, "snapshotting", FOREVER),
        (harness.snapshot_taken, all_spawned, states.SPAWNING, "spawned, 0/3 processes up", LOAD_TIMEOUT_S),
        (lambda: harness.hello(W1), [], states.GATHERING, "spawned, 1/3 processes up", LOAD_TIMEOUT_S),
        # On the CPU the holder does not need the pids of all workers.
        (lambda: harness.hello(HOLDER), [Send(HOLDER, Build((pid(W1),)))], states.BUILDING, "building", LOAD_TIMEOUT_S),
        (lambda: harness.hello(W2), [], states.BUILDING, "building", LOAD_TIMEOUT_S),
        # Workers attach one after another.
        (harness.built, [attach(W1)], states.ATTACHING, "attaching 0/2", LOAD_TIMEOUT_S),
        (lambda: harness.attached(W1), [AddSlot(W1), attach(W2)], states.SERVING, "attaching 1/2", LOAD_TIMEOUT_S),
        (lambda: harness.attached(W2), [AddSlot(W2), TRIM_STORE], states.SERVING, "serving", FOREVER),
        (lambda: harness.after(0.0), [], states.SERVING, "serving", FOREVER),
        (harness.drain, all_stopped, states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: harness.exits(W2), [], states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: harness.exits(W1), [stop(HOLDER)], states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: harness.exits(HOLDER), [], states.GONE, "gone", FOREVER),
    ]
    for event, take_actions, state, progress, wait in steps:
        assert not generation.is_ended
        assert (event(), harness.state) == (take_actions, state)
        assert (generation.progress, generation.next_tick_at - harness.now) == (progress, wait)
        if state is states.SERVING:
            shared = [each.shared_bytes for each in generation.children.values()]
            assert (generation.built, shared[:2]) == (BUILT, [4096, 4000])
    assert (generation.is_ended, generation.cause) == (True, "")
    lines = [record.getMessage() for record in caplog.records]
    assert [lines.count(f"m.7: {progress}") for *_, progress, _ in steps] == [1] * len(steps)


def test_generation_does_not_log_failure_cause(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    GenerationHarness().serving().fails("the cause")
    assert "the cause" not in caplog.text


PRIVATE_WORKER = replace(ATTACHED, shared_bytes=0, note="weights are not shared: another library")


@pytest.mark.parametrize(
    ("built", "attached", "sharing", "expected_warnings"),
    [
        (BUILT, ATTACHED, True, []),
        (BUILT, PRIVATE_WORKER, True, [PRIVATE_WORKER.note]),
        (PRIVATE, replace(PRIVATE_WORKER, note="the holder has no page store"), True, [PRIVATE.note]),
        # There are no weights to share, or sharing is not configured.
        (replace(BUILT, shared_bytes=0), PRIVATE_WORKER, True, []),
        (replace(PRIVATE, has_sharing_failed=False), PRIVATE_WORKER, True, []),
        (PRIVATE, PRIVATE_WORKER, False, []),
    ],
)
def test_warns_once_for_each_cause_of_private_weights(
    caplog: pytest.LogCaptureFixture, built: Built, attached: Attached, sharing: bool, expected_warnings: list[str]
) -> None:
    harness = GenerationHarness(2, is_sharing=sharing).building()
    harness.built(built)
    for _ in range(10):
        for name in harness.names():
            harness.hello(name)
            harness.attached(name, attached=attached)
            harness.exits(name)
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING and "weights" in each.getMessage()]
    assert [each.getMessage() for each in warnings] == [f"m.7: {note}" for note in expected_warnings]


@pytest.mark.parametrize(
    ("outputs", "exact", "level"), [("y", True, "WARNING"), ("y", False, "INFO"), ("", False, "WARNING")]
)
def test_inexact_row_support_is_warning_only_without_outputs(
    caplog: pytest.LogCaptureFixture, outputs: str, exact: bool, level: str
) -> None:
    caplog.set_level(logging.INFO)
    rows = RowSupport(("x",), tuple(outputs), is_equal=False, note="why not")
    ProgressLogger("m.1", 1).log_row_test(replace(BUILT, row_support=rows), is_exact=exact)
    assert [each.levelname for each in caplog.records] == [level]


def test_snapshot_spawns_processes_once() -> None:
    harness, ended = GenerationHarness().spawned(), GenerationHarness()
    harness.generation.on_snapshot_taken("6" * 64, harness.now)
    assert (harness.generation.sha256, harness.take_actions()) == (SHA, [])
    ended.drain()
    assert (ended.snapshot_taken(), ended.state) == ([], GenerationState.GONE)


# --- the holder -----------------------------------------------------------------------------------------------------


FAILURES: list[tuple[Event, list[Action], str, RetryHint]] = [
    (lambda harness: harness.reports_failure(HOLDER, "no model"), [stop(HOLDER)], "no model", RetryHint.SAME_FAILURE),
    (
        lambda harness: harness.reports_failure(HOLDER, "no room", no_room=True),
        [stop(HOLDER)],
        "no room",
        RetryHint.WAIT_FOR_MEMORY,
    ),
    (lambda harness: harness.exits(HOLDER, end=CRASH), [], "killed by SIGSEGV", RetryHint.MAY_SUCCEED),
    (lambda harness: harness.exits(HOLDER, end=ExitCause(1)), [], "exited with status 1", RetryHint.SAME_FAILURE),
    (lambda harness: harness.after(LOAD_TIMEOUT_S), [abort(HOLDER)], "building took too long", RetryHint.SAME_FAILURE),
]


@pytest.mark.parametrize(("event", "take_actions", "cause", "retry_hint"), FAILURES)
def test_holder_failure_ends_generation(
    event: Event, take_actions: list[Action], cause: str, retry_hint: RetryHint
) -> None:
    harness = GenerationHarness(2).building()
    assert harness.after(LOAD_TIMEOUT_S - 0.1) == []
    harness.now -= LOAD_TIMEOUT_S - 0.1
    assert event(harness) == [*take_actions, stop(W1), stop(W2)]
    for name in list(harness.generation.children):
        assert not harness.generation.is_ended
        assert harness.exits(name) == []
    assert (harness.state, harness.cause) == (GenerationState.FAILED, f"{HOLDER}: {cause}")
    assert (harness.generation.is_ended, harness.generation.failure.retry_hint) == (True, retry_hint)


def test_cpu_generation_survives_holder_after_build() -> None:
    harness = GenerationHarness().attaching()
    assert harness.exits(HOLDER) == []
    assert harness.attached(W1) == [AddSlot(W1), attach(W2)]
    # A worker trims the store, because the holder has exited.
    assert harness.attached(W2) == [AddSlot(W2), Send(W1, TrimStore())]


def test_card_generation_ends_with_holder() -> None:
    harness, leaving = GenerationHarness(1, CARD).serving(), GenerationHarness(2, CARD).serving()
    # Its workers have no time to finish, because their results may be wrong. Draining workers have none either.
    assert harness.exits(HOLDER, end=CRASH) == [RemoveSlot(W1), Kill(W1)]
    assert harness.cause == f"{HOLDER}: killed by SIGSEGV; the shared weights are invalid without the holder"
    leaving.drain()
    assert leaving.exits(HOLDER) == [Kill(W1), Kill(W2)]
    assert [each.generation.attach_control.is_valid for each in (harness, leaving)] == [False, False]
    assert leaving.after(1000.0) == []


@pytest.mark.parametrize("traits", [CARD, CPU])
def test_card_needs_selftest_for_sharing(traits: SharingTraits) -> None:
    harness = GenerationHarness(1, traits).building()
    harness.built(replace(BUILT, selftest_digest="", selftest_cases=(), selftest_note="it is not deterministic"))
    cause = f"{HOLDER}: no self-test: it is not deterministic; set the key selftest, or turn sharing off"
    expected = (GenerationState.FAILED, cause) if traits is CARD else (GenerationState.ATTACHING, "")
    assert (harness.state, harness.cause) == expected


# --- start of the processes -----------------------------------------------------------------------------------------


def test_build_on_card_waits_for_all_workers() -> None:
    harness = GenerationHarness(2, CARD).spawned()
    assert harness.hello(HOLDER, W2) + harness.exits(W1) == []
    assert harness.state is GenerationState.GATHERING
    assert harness.when_due() == [spawn(W3)]
    assert harness.hello(W3) == [Send(HOLDER, Build((pid(W2), pid(W3))))]


@pytest.mark.parametrize(
    ("sha256", "versions", "cause"),
    [
        ("6" * 64, VERSION, "expected a model with sha256 555555555555, got 666666666666"),
        (SHA, "0.0.9", f"its interpreter has weightd 0.0.9, the daemon is {VERSION}: install the same version in both"),
        (SHA, "", f"its interpreter has weightd unknown, the daemon is {VERSION}: install the same version in both"),
    ],
    ids=["sha256", "version", "no version"],
)
def test_wrong_model_or_version_is_rejected(sha256: str, versions: str, cause: str) -> None:
    harness, message = (
        GenerationHarness(1).spawned(),
        Hello("1", sha256, {"weightd": versions} if versions else {}, CPU),
    )
    for name, state in ((W1, GenerationState.SPAWNING), (HOLDER, GenerationState.FAILED)):
        harness.generation.on_message(name, message, harness.now)
        assert harness.take_actions() == [Kill(name)]
        assert (harness.state, harness.cause) == (state, f"{name}: {cause}")


@pytest.mark.parametrize(("load_timeout", "timeout"), [(500.0, 500.0), (1.5, HELLO_TIMEOUT_S)])
def test_process_without_hello_is_killed(load_timeout: float, timeout: float) -> None:
    """Before its Hello a process reads the whole model, which takes more than a minute for 70 GB."""
    harness = GenerationHarness(1, CARD)
    harness.generation.spec = replace(harness.terms, load_timeout=load_timeout)
    harness.spawned().hello(HOLDER)
    assert harness.after(timeout - 0.1) == []
    assert harness.after(0.1) == [abort(W1)]
    # The exit of the killed process is not a second failure.
    assert harness.after(0.1) == [spawn(W2)]
    harness.exits(W1, end=ExitCause(-signal.SIGKILL))
    assert harness.cause == f"{W1}: spawned took too long"


# --- workers --------------------------------------------------------------------------------------------------------


def test_next_worker_attaches_after_crash() -> None:
    harness = GenerationHarness().attaching()
    assert harness.exits(W1, end=CRASH) == [attach(W2)]
    assert harness.cause == f"{W1}: killed by SIGSEGV"
    assert harness.when_due() == [spawn(W3)]
    assert harness.attached(W2) == [AddSlot(W2)]
    assert harness.cause == ""
    assert harness.hello(W3) == [attach(W3)]
    assert harness.attached(W3) == [AddSlot(W3), TRIM_STORE]


def test_worker_with_wrong_selftest_answer_never_serves() -> None:
    harness, without = GenerationHarness().attaching(), GenerationHarness(1).building()
    assert harness.attached(W1, attached=Attached("another", 0)) == [stop(W1), attach(W2)]
    assert (
        harness.cause == f"{W1}: the self-test answer differs from the holder's: the worker would return wrong results"
    )
    without.built(replace(BUILT, selftest_digest=""))
    assert without.attached(W1, attached=Attached("whatever", 0))[0] == AddSlot(W1)


def test_lost_worker_is_replaced_after_backoff() -> None:
    harness = GenerationHarness(1).spawned()
    assert harness.exits(W1) + harness.after(0.09) == []
    assert harness.after(0.02) == [spawn(W2)]
    harness = GenerationHarness().serving()
    assert harness.exits(W1) == [spawn(W3)]
    assert harness.hello(W3) == [attach(W3)]
    assert harness.attached(W3) == [AddSlot(W3), TRIM_STORE]


def test_leaving_worker_is_replaced_at_once() -> None:
    harness = GenerationHarness(1).serving()
    assert harness.leaves(W1) == [RemoveSlot(W1), stop(W1), spawn(W2)]
    assert harness.exits(W1, end=ExitCause(75)) == []
    assert (harness.cause, list(harness.generation.children)) == ("", [HOLDER, W2])
    # Only a worker that is READY can leave.
    assert harness.leaves(HOLDER) + harness.leaves(W2) + harness.leaves("unknown") == []


def test_log_tail_of_hung_worker_is_added_after_exit(caplog: pytest.LogCaptureFixture) -> None:
    harness = GenerationHarness().attaching()
    assert harness.after(LOAD_TIMEOUT_S) == [abort(W1), attach(W2)]
    harness.when_due()
    harness.hello(W3)
    harness.after(LOAD_TIMEOUT_S)
    cause = f"{W2}: attaching took too long"
    assert harness.cause == cause
    # The log of another worker is not part of this cause.
    for name, words in ((W2, "Fatal: here"), (W1, "of the first")):
        harness.exits(name, end=ExitCause(-signal.SIGABRT, words))
        assert f"m.7: {name}: attaching took too long; its log ends: {words}" in caplog.text
    assert harness.cause == f"{cause}; its log ends: Fatal: here"


# --- failed starts --------------------------------------------------------------------------------------------------


def test_out_of_memory_is_retried_until_timeout() -> None:
    harness, number = GenerationHarness(1).attaching(), 1
    end = harness.now + harness.terms.memory_timeout_s
    while harness.reports_failure(worker(number), "ret:207001", no_room=True) and harness.state in ACTIVE:
        number += 1
        harness.replaced(worker(number - 1), worker(number))
    assert end <= harness.now < end + 3.0
    assert number > MAX_FAILED_STARTS + 10


def test_generation_fails_if_no_worker_can_start() -> None:
    harness = GenerationHarness(1).attaching()
    for number in range(1, MAX_FAILED_STARTS + 1):
        assert harness.state in ACTIVE
        harness.hello(worker(number))
        harness.reports_failure(worker(number), f"no engine {number}")
        harness.exits(worker(number))
        harness.when_due()
    assert (harness.state, harness.cause) == (GenerationState.FAILED, f"{W3}: no engine 3")
    assert harness.exits(HOLDER) == []
    assert harness.generation.is_ended


def serve_with_one_failing_worker() -> GenerationHarness:
    harness = GenerationHarness().attaching()
    harness.attached(W1)
    assert harness.exits(W2) == []
    for name in (W3, W4):
        assert TRIM_STORE not in harness.when_due()
        assert harness.exits(name) == ([TRIM_STORE] if name == W4 else [])
    return harness


def test_serving_workers_continue_while_others_fail(caplog: pytest.LogCaptureFixture) -> None:
    harness, waits = serve_with_one_failing_worker(), list[float]()
    assert harness.generation.is_complete
    assert (harness.generation.progress, harness.cause) == ("serving 1/2, backing off", f"{W4}: exited with status 3")
    for number in range(5, 25):
        waits.append(harness.generation.next_tick_at - harness.now)
        assert harness.when_due() == [spawn(worker(number))]
        assert harness.generation.progress == "attaching 1/2"
        harness.exits(worker(number))
    assert (waits[0] > 0.25, 22.5 <= max(waits) <= 30.0) == (True, True)
    assert "m.7: starting the next worker in" in caplog.text
    # The problem is over: the next worker starts.
    harness.when_due()
    harness.hello(worker(25))
    harness.attached(worker(25))
    assert harness.generation.progress == "serving"


@pytest.mark.parametrize("go", [GenerationHarness.exits, GenerationHarness.leaves])
def test_generation_survives_loss_of_last_serving_worker(
    go: Callable[[GenerationHarness, str], list[Action]],
) -> None:
    harness = serve_with_one_failing_worker()
    seen = go(harness, W1) + harness.when_due()
    assert harness.state is GenerationState.SERVING
    assert [each for each in seen if isinstance(each, Spawn)] == [spawn(W5), spawn(worker(6))]


def test_early_exits_of_workers_do_not_fail_generation() -> None:
    harness, waits = GenerationHarness(1).serving(), list[float]()
    for number in range(1, 20):
        died = harness.now
        seen = harness.exits(worker(number))
        if number > 1:
            assert harness.generation.progress == "serving 0/1, backing off"
            assert harness.cause.startswith(
                f"workers exit before they answer any request; the last one: {worker(number)}"
            )
        assert seen or harness.when_due() == [spawn(worker(number + 1))]
        waits.append(harness.now - died)
        harness.hello(worker(number + 1))
        harness.attached(worker(number + 1))
    assert waits[:5] == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8])
    assert harness.state is GenerationState.SERVING


# --- spares ---------------------------------------------------------------------------------------------------------


def test_spare_takes_slot_before_replacement_starts() -> None:
    harness = GenerationHarness(2, spares=1).attaching()
    assert harness.attached(W1) + harness.attached(W2) == [AddSlot(W1), attach(W2), AddSlot(W2), attach(W3)]
    assert not harness.generation.is_complete
    assert harness.attached(W3) == [TRIM_STORE]
    assert (list(harness.generation.processes.serving), harness.generation.is_complete) == ([W1, W2], True)
    assert harness.exits(W1) == [AddSlot(W3), spawn(W4)]
    # The replacement is the next spare.
    assert harness.hello(W4) + harness.attached(W4) == [attach(W4), TRIM_STORE]
    assert harness.leaves(W2) == [RemoveSlot(W2), stop(W2), AddSlot(W4), spawn(W5)]


# --- sets of cores --------------------------------------------------------------------------------------------------

SETS = ("cpu:0", "cpu:1")


def test_device_without_workers_needs_new_generation() -> None:
    harness = GenerationHarness(1, spares=1, devices=SETS, can_fork_from_holder=True).building()
    harness.built(TEMPLATE)
    harness.hello(W1, W2, W3, W4)
    harness.attached(W1, W2, W3, W4)
    harness.exits(HOLDER, W4)
    assert not harness.generation.should_be_replaced
    harness.exits(W2)
    assert (list(harness.generation.processes.serving), harness.generation.should_be_replaced) == ([W1], True)


# --- workers forked from a template ----------------------------------------------------------------------------------

TEMPLATE = replace(BUILT, handle="", is_template=True)


def spawn_from_template(name: str) -> Action:
    return Spawn(name, Role.WORKER, HOLDER)


def serve_from_template() -> GenerationHarness:
    """Return a generation with a template and two workers forked from it."""
    harness = GenerationHarness(2, can_fork_from_holder=True)
    assert harness.snapshot_taken() == [TakeSnapshot(), Spawn(HOLDER, Role.HOLDER)]
    assert harness.hello(HOLDER) == [Send(HOLDER, Build(()))]
    assert harness.built(TEMPLATE) == [spawn_from_template(W1), spawn_from_template(W2)]
    assert harness.hello(W1, W2) == [attach(W1, "")]
    assert harness.attached(W1) == [AddSlot(W1), attach(W2, "")]
    assert harness.attached(W2) == [AddSlot(W2), TRIM_STORE]
    return harness


def test_attach_of_forked_worker_has_predict_timeout() -> None:
    harness = serve_from_template()
    harness.exits(W1)
    harness.hello(W3)
    assert harness.generation.next_tick_at == harness.now + PREDICT_TIMEOUT_S


def test_workers_outlive_template_until_one_is_lost() -> None:
    harness = serve_from_template()
    assert harness.exits(HOLDER) == []
    assert (harness.state, harness.generation.should_be_replaced) == (GenerationState.SERVING, False)
    assert harness.generation.progress == "serving"
    assert harness.exits(W1) == []
    assert harness.generation.should_be_replaced
    assert harness.generation.progress == "serving 1/2, no worker can attach any more"


@pytest.mark.parametrize(
    "harness",
    [GenerationHarness(2), GenerationHarness(2, CARD, can_fork_from_holder=True)],
    ids=["not requested", "card"],
)
def test_unrequested_template_fails_generation(harness: GenerationHarness) -> None:
    harness.building()
    harness.built(TEMPLATE)
    assert harness.state is GenerationState.FAILED
    assert "which the daemon had not requested" in harness.cause


# --- replacement workers on a card -----------------------------------------------------------------------------------


def lose_two_workers() -> GenerationHarness:
    """Return a generation that lost two of three workers and waits for the holder to admit the first replacement."""
    harness = GenerationHarness(3, CARD).serving()
    harness.exits(W1, W2)
    harness.when_due()
    assert harness.hello(W4, W5) == [allow(W4)]
    return harness


def test_replacement_that_crashes_is_replaced() -> None:
    harness = lose_two_workers()
    harness.allowed()
    # The next worker does not wait for the replacement.
    assert harness.exits(W4, end=ExitCause(-signal.SIGSEGV)) == [allow(W5)]
    harness.allowed()
    assert AddSlot(W5) in harness.attached(W5)
    assert harness.when_due() == [spawn(another := worker(6))]
    assert harness.hello(another) + harness.allowed() == [allow(another), attach(another)]
    assert harness.state is GenerationState.SERVING


REFUSALS: dict[str, Event] = {
    "no pids after the build": lambda harness: harness.allowed("no pids after the build"),
    "the holder has not replied for 10 s": GenerationHarness.when_due,
}


@pytest.mark.parametrize("why", REFUSALS)
def test_attaching_closes_if_holder_admits_no_worker(why: str) -> None:
    harness = lose_two_workers()
    assert harness.generation.next_tick_at == harness.now + ALLOW_TIMEOUT_S
    assert REFUSALS[why](harness) == [stop(W4), stop(W5)]
    assert (harness.generation.attach_control.closed_reason, harness.generation.should_be_replaced) == (why, True)
    assert harness.generation.progress == "serving 1/3, no worker can attach any more"
    # Late replies of the holder have no effect.
    assert harness.allowed() + harness.exits(W4, W5) == []
    assert (harness.state, harness.generation.next_tick_at) == (GenerationState.SERVING, FOREVER)
    # After the loss of the last worker only another generation can serve.
    harness.exits(W3)
    assert harness.state is GenerationState.FAILED
    assert harness.cause.startswith("all workers have exited, and no worker can attach any more")


def test_closed_generation_uses_spares_first() -> None:
    harness = GenerationHarness(1, CARD, spares=2).serving()
    assert harness.replaced(W1, by=W4) == [allow(W4)]
    harness.allowed("no")
    harness.exits(W4)
    assert not harness.generation.should_be_replaced
    assert harness.exits(W2) == [AddSlot(W3)]
    assert not harness.generation.should_be_replaced
    harness.exits(W3)
    assert harness.state is GenerationState.FAILED


@pytest.mark.parametrize("outlives", [False, True])
def test_holder_may_exit_on_allow_request(outlives: bool) -> None:
    harness = GenerationHarness(2, CARD, can_outlive_holder=outlives).serving()
    assert harness.replaced(W1, by=W3) == [allow(W3)]
    if outlives:
        assert harness.exits(HOLDER) == [stop(W3)]
        assert (harness.state, harness.generation.attach_control.is_frozen) == (GenerationState.SERVING, True)
        assert harness.after(ALLOW_TIMEOUT_S) == [abort(W3)]
    else:
        assert harness.exits(HOLDER) == [RemoveSlot(W2), Kill(W2), Kill(W3)]
        assert harness.generation.next_tick_at == FOREVER


# --- lost holders, and holders without shared weights ---------------------------------------------------------------


def test_frozen_generation_stops_unattached_workers() -> None:
    harness = GenerationHarness(3, CARD, can_outlive_holder=True).attaching()
    harness.attached(W1)
    assert harness.exits(HOLDER) == [stop(W3)]
    # A worker that is already attaching may succeed.
    assert harness.attached(W2) == [AddSlot(W2)]
    assert (harness.generation.attach_control.is_frozen, harness.generation.should_be_replaced) == (True, True)
    assert (harness.generation.is_complete, harness.generation.progress) == (
        True,
        "serving 2/3, frozen: the holder has exited",
    )
    # The frozen generation starts no replacement.
    assert (harness.exits(W1), harness.state) == ([], GenerationState.SERVING)
    harness.exits(W2)
    assert harness.state is GenerationState.FAILED


def test_answers_are_trusted_while_holder_lives() -> None:
    harness = GenerationHarness(1, CARD).building()
    access = harness.generation.attach_control
    assert access.can_trust_answers(lambda _: False)
    harness.built()
    assert access.can_trust_answers(lambda name: name == HOLDER)
    # The kernel reports the exit before the generation receives the event.
    assert not access.can_trust_answers(lambda _: False)
    harness.exits(HOLDER)
    assert not access.can_trust_answers(lambda _: True)


@pytest.mark.parametrize(
    "harness",
    [
        GenerationHarness(1),
        GenerationHarness(1, CARD, can_outlive_holder=True),
        GenerationHarness(1, CARD, is_sharing=False),
    ],
    ids=["cpu", "frozen", "private"],
)
def test_answers_are_trusted_without_holder(harness: GenerationHarness) -> None:
    assert harness.serving().generation.attach_control.can_trust_answers(lambda _: False)


@pytest.mark.parametrize(
    ("traits", "sharing"), [(CARD, False), (CARD, True), (CPU, True)], ids=["private", "card", "cpu"]
)
def test_holder_exits_before_workers_load_private_weights(traits: SharingTraits, sharing: bool) -> None:
    harness = GenerationHarness(2, traits, is_sharing=sharing).spawned()
    order = harness.hello(W1, HOLDER) + harness.hello(W2)
    if not sharing:  # The holder needs no pids and waits for no worker.
        assert order == [Send(HOLDER, Build(()))]
    assert harness.built(replace(BUILT, handle="")) == [stop(HOLDER)]
    assert harness.exits(HOLDER, end=ExitCause(0)) == [attach(W1, "")]
    assert harness.attached(W1) == [AddSlot(W1), attach(W2, "")]
    assert harness.attached(W2) == [AddSlot(W2)]  # There is no store to trim.
    assert (
        harness.generation.is_complete,
        harness.generation.should_be_replaced,
        harness.generation.processes.deaths,
    ) == (
        True,
        False,
        0,
    )
    assert harness.generation.attach_control.can_trust_answers(lambda _: False)
    # A replacement needs no permission, but must reproduce the self-test answer of the holder.
    assert harness.replaced(W1, by=W3) == [attach(W3, "")]
    harness.attached(W3, attached=replace(ATTACHED, selftest_digest="other"))
    assert harness.generation.children[W3].state is ChildState.STOPPING


# --- device memory of a process -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sharing", "free", "taken"),
    [
        # Other allocations on the card meanwhile only increase the result.
        (True, (900, 870, 830, 810), [30, 30, 20]),
        # The card reports no memory, or the worker's usage includes private weights.
        (True, (None, None, None, None), [0, 0, 0]),
        (False, (900, 870, 830, 810), [0, 0, 0]),
    ],
)
def test_process_memory_is_derived_from_free_memory(
    sharing: bool, free: tuple[int | None, ...], taken: list[int]
) -> None:
    harness, seen = GenerationHarness(3, CARD, is_sharing=sharing).building(), list[int]()
    devices = [None if each is None else DeviceMemory(1000, each) for each in free]
    harness.built(replace(BUILT, device=devices[0]))
    if not sharing:
        harness.exits(HOLDER)
    for name, device in zip((W1, W2, W3), devices[1:], strict=True):
        harness.attached(name, attached=replace(ATTACHED, device=device))
        seen.append(harness.generation.device_usage.process_bytes)
    assert seen == taken


# --- hung workers, lost stores and drain ----------------------------------------------------------------------------


def test_hung_worker_is_aborted_replaced_and_killed_once() -> None:
    harness = GenerationHarness(1).serving()
    assert harness.hangs(W1) == [RemoveSlot(W1), abort(W1), spawn(W2)]
    assert harness.after(ABORT_TIMEOUT_S) == [Kill(W1)]
    assert harness.hangs(W1) + harness.hangs(W2) == []
    # A worker that has answered requests is replaced without delay every time.
    for number in range(2, 6):
        harness.hello(worker(number))
        harness.attached(worker(number))
        assert spawn(worker(number + 1)) in harness.hangs(worker(number), useful=True)


def test_lost_store_affects_only_serving_generation() -> None:
    loading, leaving = GenerationHarness(1).building(), GenerationHarness(1).serving()
    leaving.drain()
    for harness in (loading, leaving):
        before = harness.state
        harness.generation.on_store_lost("truncated", harness.now)
        assert (harness.state, harness.take_actions(), harness.generation.attach_control.is_valid) == (before, [], True)


def test_drain_timeout_extends_stop_timeout() -> None:
    patient, drained_again = GenerationHarness(1).serving(), GenerationHarness(1).serving()
    patient.drain(timeout=60.0)
    assert patient.after(STOP_TIMEOUT_S + 59.9) == []
    assert patient.when_due() == [abort(W1)]
    drained_again.drain()
    drained_again.after(5.0)
    drained_again.drain(timeout=60.0)
    assert drained_again.after(STOP_TIMEOUT_S - 5.0) == [abort(W1)]
