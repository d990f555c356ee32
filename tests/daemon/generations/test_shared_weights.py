"""Scripted lives of a generation: what it wants done after each event, exactly."""

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

from .life import (
    ATTACHED,
    BUILT,
    CARD,
    CPU,
    FOREVER,
    HOLDER,
    LOAD_TIMEOUT_S,
    PREDICT_TIMEOUT_S,
    SETTLE,
    SHA,
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


# --- the way it should go -------------------------------------------------------------------------------------------


def test_a_whole_life(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    life = GenerationHarness(2)
    generation, states = life.generation, GenerationState
    all_spawned = [Spawn(HOLDER, Role.HOLDER), spawn(W1), spawn(W2)]
    all_told = [RemoveSlot(W1), stop(W1), RemoveSlot(W2), stop(W2)]
    steps: list[tuple[Callable[[], list[Action]], list[Action], GenerationState, str, float]] = [
        (life.wanted, [TakeSnapshot()], states.SNAPSHOTTING, "snapshotting", FOREVER),
        (life.pinned, all_spawned, states.SPAWNING, "spawned, 0/3 processes up", LOAD_TIMEOUT_S),
        (lambda: life.hello(W1), [], states.GATHERING, "spawned, 1/3 processes up", LOAD_TIMEOUT_S),
        # On the CPU the holder need not know who comes.
        (lambda: life.hello(HOLDER), [Send(HOLDER, Build((pid(W1),)))], states.BUILDING, "building", LOAD_TIMEOUT_S),
        (lambda: life.hello(W2), [], states.BUILDING, "building", LOAD_TIMEOUT_S),
        # They attach strictly one after another.
        (life.built, [attach(W1)], states.ATTACHING, "attaching 0/2", LOAD_TIMEOUT_S),
        (lambda: life.attached(W1), [AddSlot(W1), attach(W2)], states.SERVING, "attaching 1/2", LOAD_TIMEOUT_S),
        (lambda: life.attached(W2), [AddSlot(W2), SETTLE], states.SERVING, "serving", FOREVER),
        (lambda: life.after(0.0), [], states.SERVING, "serving", FOREVER),
        (life.drain, all_told, states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: life.exits(W2), [], states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: life.exits(W1), [stop(HOLDER)], states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: life.exits(HOLDER), [], states.GONE, "gone", FOREVER),
    ]
    for event, wanted, state, progress, wait in steps:
        assert not generation.is_ended
        assert (event(), life.state) == (wanted, state)
        assert (generation.progress, generation.next_tick_at - life.now) == (progress, wait)
        if state is states.SERVING:
            shared = [each.shared_bytes for each in generation.children.values()]
            assert (generation.built, shared[:2]) == (BUILT, [4096, 4000])
    assert (generation.is_ended, generation.cause) == (True, "")
    lines = [record.getMessage() for record in caplog.records]
    assert [lines.count(f"m.7: {progress}") for *_, progress, _ in steps] == [1] * len(steps)


def test_a_failure_is_told_by_its_deployment_which_knows_what_follows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    GenerationHarness().serving().fails("the cause")
    assert "the cause" not in caplog.text


ALONE = replace(ATTACHED, shared_bytes=0, note="weights are not shared: another library")


@pytest.mark.parametrize(
    ("built", "attached", "sharing", "told"),
    [
        (BUILT, ATTACHED, True, []),
        (BUILT, ALONE, True, [ALONE.note]),
        (PRIVATE, replace(ALONE, note="the holder has no page store"), True, [PRIVATE.note]),
        # There is nothing to share, or nobody wants it.
        (replace(BUILT, shared_bytes=0), ALONE, True, []),
        (replace(PRIVATE, has_sharing_failed=False), ALONE, True, []),
        (PRIVATE, ALONE, False, []),
    ],
)
def test_weights_that_are_not_shared_are_a_warning_for_each_cause(
    caplog: pytest.LogCaptureFixture, built: Built, attached: Attached, sharing: bool, told: list[str]
) -> None:
    life = GenerationHarness(2, is_sharing=sharing).building()
    life.built(built)
    for _ in range(10):
        for name in life.names():
            life.hello(name)
            life.attached(name, attached=attached)
            life.exits(name)
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING and "weights" in each.getMessage()]
    assert [each.getMessage() for each in warnings] == [f"m.7: {note}" for note in told]


@pytest.mark.parametrize(
    ("outputs", "exact", "level"), [("y", True, "WARNING"), ("y", False, "INFO"), ("", False, "WARNING")]
)
def test_of_rows_that_need_not_be_exact_it_is_a_loss_only_if_there_are_none(
    caplog: pytest.LogCaptureFixture, outputs: str, exact: bool, level: str
) -> None:
    caplog.set_level(logging.INFO)
    rows = RowSupport(("x",), tuple(outputs), is_equal=False, note="why not")
    ProgressLogger("m.1", 1).log_row_test(replace(BUILT, row_support=rows), is_exact=exact)
    assert [each.levelname for each in caplog.records] == [level]


def test_a_snapshot_starts_processes_once_and_of_nothing_that_has_ended() -> None:
    life, ended = GenerationHarness().spawned(), GenerationHarness()
    life.generation.on_snapshot_taken("6" * 64, life.now)
    assert (life.generation.sha256, life.wanted()) == (SHA, [])
    ended.drain()
    assert (ended.pinned(), ended.state) == ([], GenerationState.GONE)


# --- the holder -----------------------------------------------------------------------------------------------------


FAILURES: list[tuple[Event, list[Action], str, RetryHint]] = [
    (lambda life: life.broken(HOLDER, "no model"), [stop(HOLDER)], "no model", RetryHint.SAME_FAILURE),
    (lambda life: life.broken(HOLDER, "no room", no_room=True), [stop(HOLDER)], "no room", RetryHint.WAIT_FOR_MEMORY),
    (lambda life: life.exits(HOLDER, end=CRASH), [], "killed by SIGSEGV", RetryHint.MAY_SUCCEED),
    (lambda life: life.exits(HOLDER, end=ExitCause(1)), [], "exited with status 1", RetryHint.SAME_FAILURE),
    (lambda life: life.after(LOAD_TIMEOUT_S), [abort(HOLDER)], "building took too long", RetryHint.SAME_FAILURE),
]


@pytest.mark.parametrize(("event", "wanted", "cause", "outlook"), FAILURES)
def test_a_holder_that_does_not_build_ends_it_with_its_cause(
    event: Event, wanted: list[Action], cause: str, outlook: RetryHint
) -> None:
    life = GenerationHarness(2).building()
    assert life.after(LOAD_TIMEOUT_S - 0.1) == []
    life.now -= LOAD_TIMEOUT_S - 0.1
    assert event(life) == [*wanted, stop(W1), stop(W2)]
    for name in list(life.generation.children):
        assert not life.generation.is_ended
        assert life.exits(name) == []
    assert (life.state, life.cause) == (GenerationState.FAILED, f"{HOLDER}: {cause}")
    assert (life.generation.is_ended, life.generation.failure.retry_hint) == (True, outlook)


def test_on_the_cpu_nothing_is_lost_with_a_holder_that_has_built() -> None:
    life = GenerationHarness().attaching()
    assert life.exits(HOLDER) == []
    assert life.attached(W1) == [AddSlot(W1), attach(W2)]
    # What the holder had to settle, a worker does.
    assert life.attached(W2) == [AddSlot(W2), Send(W1, TrimStore())]


def test_where_the_memory_is_the_holders_all_is_lost_with_it() -> None:
    life, leaving = GenerationHarness(1, CARD).serving(), GenerationHarness(2, CARD).serving()
    # Who computes on it gets no time to finish: that may be anything. Nor does who was told to leave.
    assert life.exits(HOLDER, end=CRASH) == [RemoveSlot(W1), Kill(W1)]
    assert life.cause == f"{HOLDER}: killed by SIGSEGV; the shared weights are invalid without the holder"
    leaving.drain()
    assert leaving.exits(HOLDER) == [Kill(W1), Kill(W2)]
    assert [each.generation.attach_control.is_valid for each in (life, leaving)] == [False, False]
    assert leaving.after(1000.0) == []


@pytest.mark.parametrize("traits", [CARD, CPU])
def test_where_attaching_rewrites_the_weights_nothing_is_shared_without_a_canary(traits: SharingTraits) -> None:
    life = GenerationHarness(1, traits).building()
    life.built(replace(BUILT, selftest_digest="", selftest_cases=(), selftest_note="it is not deterministic"))
    cause = f"{HOLDER}: no self-test: it is not deterministic; set the key selftest, or turn sharing off"
    expected = (GenerationState.FAILED, cause) if traits is CARD else (GenerationState.ATTACHING, "")
    assert (life.state, life.cause) == expected


# --- who is up ------------------------------------------------------------------------------------------------------


def test_where_pids_are_fixed_the_build_waits_for_every_worker_and_for_who_replaces_one() -> None:
    life = GenerationHarness(2, CARD).spawned()
    assert life.hello(HOLDER, W2) + life.exits(W1) == []
    assert life.state is GenerationState.GATHERING
    assert life.when_due() == [spawn(W3)]
    assert life.hello(W3) == [Send(HOLDER, Build((pid(W2), pid(W3))))]


@pytest.mark.parametrize(
    ("sha256", "versions", "cause"),
    [
        ("6" * 64, VERSION, "expected a model with sha256 555555555555, got 666666666666"),
        (SHA, "0.0.9", f"its interpreter has weightd 0.0.9, the daemon is {VERSION}: install the same version in both"),
        (SHA, "", f"its interpreter has weightd unknown, the daemon is {VERSION}: install the same version in both"),
    ],
    ids=["sha256", "version", "no version"],
)
def test_a_child_that_is_not_what_was_started_is_refused(sha256: str, versions: str, cause: str) -> None:
    life, message = GenerationHarness(1).spawned(), Hello("1", sha256, {"weightd": versions} if versions else {}, CPU)
    for name, state in ((W1, GenerationState.SPAWNING), (HOLDER, GenerationState.FAILED)):
        life.generation.on_message(name, message, life.now)
        assert life.wanted() == [Kill(name)]
        assert (life.state, life.cause) == (state, f"{name}: {cause}")


@pytest.mark.parametrize(("load_timeout", "patience"), [(500.0, 500.0), (1.5, HELLO_TIMEOUT_S)])
def test_a_child_that_never_says_hello_is_killed(load_timeout: float, patience: float) -> None:
    """Before it, a process reads the whole model: of 70 GB that takes more than a minute."""
    life = GenerationHarness(1, CARD)
    life.generation.spec = replace(life.terms, load_timeout=load_timeout)
    life.spawned().hello(HOLDER)
    assert life.after(patience - 0.1) == []
    assert life.after(0.1) == [abort(W1)]
    # It is not killed a second time, and its exit is no second loss.
    assert life.after(0.1) == [spawn(W2)]
    life.exits(W1, end=ExitCause(-signal.SIGKILL))
    assert life.cause == f"{W1}: spawned took too long"


# --- workers --------------------------------------------------------------------------------------------------------


def test_the_next_one_attaches_when_one_dies_attaching_and_it_settles_after_the_last() -> None:
    life = GenerationHarness().attaching()
    assert life.exits(W1, end=CRASH) == [attach(W2)]
    assert life.cause == f"{W1}: killed by SIGSEGV"
    assert life.when_due() == [spawn(W3)]
    assert life.attached(W2) == [AddSlot(W2)]
    assert life.cause == ""
    assert life.hello(W3) == [attach(W3)]
    assert life.attached(W3) == [AddSlot(W3), SETTLE]


def test_a_worker_that_does_not_reproduce_the_canary_never_serves() -> None:
    life, without = GenerationHarness().attaching(), GenerationHarness(1).building()
    assert life.attached(W1, attached=Attached("another", 0)) == [stop(W1), attach(W2)]
    assert life.cause == f"{W1}: the self-test answer differs from the holder's: the worker would return wrong results"
    without.built(replace(BUILT, selftest_digest=""))
    assert without.attached(W1, attached=Attached("whatever", 0))[0] == AddSlot(W1)


def test_a_worker_that_dies_is_replaced_after_a_while_but_at_once_if_it_has_served() -> None:
    life = GenerationHarness(1).spawned()
    assert life.exits(W1) + life.after(0.09) == []
    assert life.after(0.02) == [spawn(W2)]
    life = GenerationHarness().serving()
    assert life.exits(W1) == [spawn(W3)]
    assert life.hello(W3) == [attach(W3)]
    assert life.attached(W3) == [AddSlot(W3), SETTLE]


def test_a_worker_that_leaves_is_replaced_at_once_and_may_finish_leaving() -> None:
    life = GenerationHarness(1).serving()
    assert life.leaves(W1) == [RemoveSlot(W1), stop(W1), spawn(W2)]
    assert life.exits(W1, end=ExitCause(75)) == []
    assert (life.cause, list(life.generation.children)) == ("", [HOLDER, W2])
    assert life.leaves(HOLDER) + life.leaves(W2) + life.leaves("nobody") == []  # it takes a READY worker


def test_what_the_log_of_one_that_hung_ends_with_is_told_once_it_is_dead(caplog: pytest.LogCaptureFixture) -> None:
    life = GenerationHarness().attaching()
    assert life.after(LOAD_TIMEOUT_S) == [abort(W1), attach(W2)]
    life.when_due()
    life.hello(W3)
    life.after(LOAD_TIMEOUT_S)
    cause = f"{W2}: attaching took too long"
    assert life.cause == cause
    # The words of another one are its own.
    for name, words in ((W2, "Fatal: here"), (W1, "of the first")):
        life.exits(name, end=ExitCause(-signal.SIGABRT, words))
        assert f"m.7: {name}: attaching took too long; its log ends: {words}" in caplog.text
    assert life.cause == f"{cause}; its log ends: Fatal: here"


# --- giving up ------------------------------------------------------------------------------------------------------


def test_a_worker_that_finds_no_room_is_tried_again_for_a_while() -> None:
    life, number = GenerationHarness(1).attaching(), 1
    end = life.now + life.terms.memory_timeout_s
    while life.broken(worker(number), "ret:207001", no_room=True) and life.state in ACTIVE:
        number += 1
        life.replaced(worker(number - 1), worker(number))
    assert end <= life.now < end + 3.0
    assert number > MAX_FAILED_STARTS + 10


def test_it_gives_up_when_no_worker_can_start() -> None:
    life = GenerationHarness(1).attaching()
    for number in range(1, MAX_FAILED_STARTS + 1):
        assert life.state in ACTIVE
        life.hello(worker(number))
        life.broken(worker(number), f"no engine {number}")
        life.exits(worker(number))
        life.when_due()
    assert (life.state, life.cause) == (GenerationState.FAILED, f"{W3}: no engine 3")
    assert life.exits(HOLDER) == []
    assert life.generation.is_ended


def one_serves_and_the_other_never_starts() -> GenerationHarness:
    life = GenerationHarness().attaching()
    life.attached(W1)
    assert life.exits(W2) == []
    for name in (W3, W4):
        assert SETTLE not in life.when_due()
        assert life.exits(name) == ([SETTLE] if name == W4 else [])
    return life


def test_those_that_serve_go_on_while_it_tries_the_others_again(caplog: pytest.LogCaptureFixture) -> None:
    life, waits = one_serves_and_the_other_never_starts(), list[float]()
    assert life.generation.is_complete
    assert (life.generation.progress, life.cause) == ("serving 1/2, backing off", f"{W4}: exited with status 3")
    for number in range(5, 25):
        waits.append(life.generation.next_tick_at - life.now)
        assert life.when_due() == [spawn(worker(number))]
        assert life.generation.progress == "attaching 1/2"
        life.exits(worker(number))
    assert (waits[0] > 0.25, 22.5 <= max(waits) <= 30.0) == (True, True)
    assert "m.7: starting the next worker in" in caplog.text
    # Whatever was wrong is over.
    life.when_due()
    life.hello(worker(25))
    life.attached(worker(25))
    assert life.generation.progress == "serving"


@pytest.mark.parametrize("go", [GenerationHarness.exits, GenerationHarness.leaves])
def test_one_that_has_served_is_not_given_up_when_the_last_one_goes(
    go: Callable[[GenerationHarness, str], list[Action]],
) -> None:
    life = one_serves_and_the_other_never_starts()
    seen = go(life, W1) + life.when_due()
    assert life.state is GenerationState.SERVING
    assert [each for each in seen if isinstance(each, Spawn)] == [spawn(W5), spawn(worker(6))]


def test_one_whose_workers_die_as_soon_as_they_serve_is_not_given_up() -> None:
    life, waits = GenerationHarness(1).serving(), list[float]()
    for number in range(1, 20):
        died = life.now
        seen = life.exits(worker(number))
        if number > 1:
            assert life.generation.progress == "serving 0/1, backing off"
            assert life.cause.startswith(f"workers exit before they answer any request; the last one: {worker(number)}")
        assert seen or life.when_due() == [spawn(worker(number + 1))]
        waits.append(life.now - died)
        life.hello(worker(number + 1))
        life.attached(worker(number + 1))
    assert waits[:5] == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8])
    assert life.state is GenerationState.SERVING


# --- spares ---------------------------------------------------------------------------------------------------------


def test_a_spare_is_attached_and_takes_a_place_at_once_before_a_replacement_is_started() -> None:
    life = GenerationHarness(2, spares=1).attaching()
    assert life.attached(W1) + life.attached(W2) == [AddSlot(W1), attach(W2), AddSlot(W2), attach(W3)]
    assert not life.generation.is_complete
    assert life.attached(W3) == [SETTLE]
    assert (list(life.generation.processes.serving), life.generation.is_complete) == ([W1, W2], True)
    assert life.exits(W1) == [AddSlot(W3), spawn(W4)]
    # The replacement is the next spare.
    assert life.hello(W4) + life.attached(W4) == [attach(W4), SETTLE]
    assert life.leaves(W2) == [RemoveSlot(W2), stop(W2), AddSlot(W4), spawn(W5)]


# --- sets of cores --------------------------------------------------------------------------------------------------

SETS = ("cpu:0", "cpu:1")


def test_where_nobody_can_attach_any_more_one_device_without_workers_is_reason_enough_for_another() -> None:
    life = GenerationHarness(1, spares=1, devices=SETS, can_fork_from_holder=True).building()
    life.built(TEMPLATE)
    life.hello(W1, W2, W3, W4)
    life.attached(W1, W2, W3, W4)
    life.exits(HOLDER, W4)
    assert not life.generation.should_be_replaced
    life.exits(W2)
    assert (list(life.generation.processes.serving), life.generation.should_be_replaced) == ([W1], True)


# --- workers that are forked of the holder --------------------------------------------------------------------------

TEMPLATE = replace(BUILT, handle="", is_template=True)


def heir(name: str) -> Action:
    return Spawn(name, Role.WORKER, HOLDER)


def with_heirs() -> GenerationHarness:
    """A template has built, and two workers are forked of it and serve."""
    life = GenerationHarness(2, can_fork_from_holder=True)
    assert life.pinned() == [TakeSnapshot(), Spawn(HOLDER, Role.HOLDER)]
    assert life.hello(HOLDER) == [Send(HOLDER, Build(()))]
    assert life.built(TEMPLATE) == [heir(W1), heir(W2)]
    assert life.hello(W1, W2) == [attach(W1, "")]
    assert life.attached(W1) == [AddSlot(W1), attach(W2, "")]
    assert life.attached(W2) == [AddSlot(W2), SETTLE]
    return life


def test_one_that_only_has_to_answer_has_no_longer_than_for_an_answer() -> None:
    life = with_heirs()
    life.exits(W1)
    life.hello(W3)
    assert life.generation.next_tick_at == life.now + PREDICT_TIMEOUT_S


def test_workers_outlive_their_template_and_the_next_one_that_is_needed_brings_another() -> None:
    life = with_heirs()
    assert life.exits(HOLDER) == []
    assert (life.state, life.generation.should_be_replaced) == (GenerationState.SERVING, False)
    assert life.generation.progress == "serving"
    assert life.exits(W1) == []
    assert life.generation.should_be_replaced
    assert life.generation.progress == "serving 1/2, no worker can attach any more"


@pytest.mark.parametrize(
    "life",
    [GenerationHarness(2), GenerationHarness(2, CARD, can_fork_from_holder=True)],
    ids=["not asked for", "on a card"],
)
def test_one_that_must_be_no_template_is_broken(life: GenerationHarness) -> None:
    life.building()
    life.built(TEMPLATE)
    assert life.state is GenerationState.FAILED
    assert "which the daemon had not requested" in life.cause


# --- a replacement where pids are fixed at the build ----------------------------------------------------------------


def lost_two() -> GenerationHarness:
    """Two of three workers are lost, what replaces them is up, and the holder is asked for the first of these."""
    life = GenerationHarness(3, CARD).serving()
    life.exits(W1, W2)
    life.when_due()
    assert life.hello(W4, W5) == [allow(W4)]
    return life


def test_one_that_crashes_while_it_attaches_is_replaced_and_who_replaces_it_is_let_in() -> None:
    life = lost_two()
    life.allowed()
    # The next one does not wait for a replacement.
    assert life.exits(W4, end=ExitCause(-signal.SIGSEGV)) == [allow(W5)]
    life.allowed()
    assert AddSlot(W5) in life.attached(W5)
    assert life.when_due() == [spawn(another := worker(6))]
    assert life.hello(another) + life.allowed() == [allow(another), attach(another)]
    assert life.state is GenerationState.SERVING


REFUSALS: dict[str, Event] = {
    "no pids after the build": lambda life: life.allowed("no pids after the build"),
    "the holder has not replied for 10 s": GenerationHarness.when_due,
}


@pytest.mark.parametrize("why", REFUSALS)
def test_where_the_holder_lets_nobody_in_it_is_closed(why: str) -> None:
    life = lost_two()
    assert life.generation.next_tick_at == life.now + ALLOW_TIMEOUT_S
    assert REFUSALS[why](life) == [stop(W4), stop(W5)]
    assert (life.generation.attach_control.closed_reason, life.generation.should_be_replaced) == (why, True)
    assert life.generation.progress == "serving 1/3, no worker can attach any more"
    # What it says after that opens nothing.
    assert life.allowed() + life.exits(W4, W5) == []
    assert (life.state, life.generation.next_tick_at) == (GenerationState.SERVING, FOREVER)
    # The last one: nothing can be done but by another generation.
    life.exits(W3)
    assert life.state is GenerationState.FAILED
    assert life.cause.startswith("all workers have exited, and no worker can attach any more")


def test_a_closed_one_needs_renewal_only_when_its_spares_are_used_up() -> None:
    life = GenerationHarness(1, CARD, spares=2).serving()
    assert life.replaced(W1, by=W4) == [allow(W4)]
    life.allowed("no")
    life.exits(W4)
    assert not life.generation.should_be_replaced
    assert life.exits(W2) == [AddSlot(W3)]
    assert not life.generation.should_be_replaced
    life.exits(W3)
    assert life.state is GenerationState.FAILED


@pytest.mark.parametrize("outlives", [False, True])
def test_a_holder_may_die_of_the_question(outlives: bool) -> None:
    life = GenerationHarness(2, CARD, can_outlive_holder=outlives).serving()
    assert life.replaced(W1, by=W3) == [allow(W3)]
    if outlives:
        assert life.exits(HOLDER) == [stop(W3)]
        assert (life.state, life.generation.attach_control.is_frozen) == (GenerationState.SERVING, True)
        assert life.after(ALLOW_TIMEOUT_S) == [abort(W3)]
    else:
        assert life.exits(HOLDER) == [RemoveSlot(W2), Kill(W2), Kill(W3)]
        assert life.generation.next_tick_at == FOREVER


# --- a holder that is lost, or has nothing to share -----------------------------------------------------------------


def test_frozen_stops_those_who_are_not_attached_and_goes_on() -> None:
    life = GenerationHarness(3, CARD, can_outlive_holder=True).attaching()
    life.attached(W1)
    assert life.exits(HOLDER) == [stop(W3)]
    # Who is attaching may be in time.
    assert life.attached(W2) == [AddSlot(W2)]
    assert (life.generation.attach_control.is_frozen, life.generation.should_be_replaced) == (True, True)
    assert (life.generation.is_complete, life.generation.progress) == (
        True,
        "serving 2/3, frozen: the holder has exited",
    )
    # Nobody is started in the place of who is lost.
    assert (life.exits(W1), life.state) == ([], GenerationState.SERVING)
    life.exits(W2)
    assert life.state is GenerationState.FAILED


def test_answers_are_trusted_as_long_as_the_holder_lives() -> None:
    life = GenerationHarness(1, CARD).building()
    access = life.generation.attach_control
    assert access.can_trust_answers(lambda _: False)
    life.built()
    assert access.can_trust_answers(lambda name: name == HOLDER)
    # Its death is known to the kernel before it is told.
    assert not access.can_trust_answers(lambda _: False)
    life.exits(HOLDER)
    assert not access.can_trust_answers(lambda _: True)


@pytest.mark.parametrize(
    "life",
    [
        GenerationHarness(1),
        GenerationHarness(1, CARD, can_outlive_holder=True),
        GenerationHarness(1, CARD, is_sharing=False),
    ],
    ids=["cpu", "frozen", "private"],
)
def test_elsewhere_answers_are_trusted_without_it(life: GenerationHarness) -> None:
    assert life.serving().generation.attach_control.can_trust_answers(lambda _: False)


@pytest.mark.parametrize(
    ("traits", "sharing"), [(CARD, False), (CARD, True), (CPU, True)], ids=["not wanted", "on a card", "on the cpu"]
)
def test_where_nothing_is_shared_the_holder_leaves_before_workers_load_their_own(
    traits: SharingTraits, sharing: bool
) -> None:
    life = GenerationHarness(2, traits, is_sharing=sharing).spawned()
    order = life.hello(W1, HOLDER) + life.hello(W2)
    if not sharing:  # it is given no pids, and waits for nobody
        assert order == [Send(HOLDER, Build(()))]
    assert life.built(replace(BUILT, handle="")) == [stop(HOLDER)]
    assert life.exits(HOLDER, end=ExitCause(0)) == [attach(W1, "")]
    assert life.attached(W1) == [AddSlot(W1), attach(W2, "")]
    assert life.attached(W2) == [AddSlot(W2)]  # and nothing to settle
    assert (life.generation.is_complete, life.generation.should_be_replaced, life.generation.processes.deaths) == (
        True,
        False,
        0,
    )
    assert life.generation.attach_control.can_trust_answers(lambda _: False)
    # Nobody need be asked for a replacement, which is held to the self-test that the holder had found.
    assert life.replaced(W1, by=W3) == [attach(W3, "")]
    life.attached(W3, attached=replace(ATTACHED, selftest_digest="other"))
    assert life.generation.children[W3].state is ChildState.STOPPING


# --- what a process takes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sharing", "free", "taken"),
    [
        # Whatever else was loaded on the card meanwhile only makes it more.
        (True, (900, 870, 830, 810), [30, 30, 20]),
        # The card says nothing, or its own weights are in what a worker takes.
        (True, (None, None, None, None), [0, 0, 0]),
        (False, (900, 870, 830, 810), [0, 0, 0]),
    ],
)
def test_what_a_process_takes_is_what_the_card_lost_with_it(
    sharing: bool, free: tuple[int | None, ...], taken: list[int]
) -> None:
    life, seen = GenerationHarness(3, CARD, is_sharing=sharing).building(), list[int]()
    devices = [None if each is None else DeviceMemory(1000, each) for each in free]
    life.built(replace(BUILT, device=devices[0]))
    if not sharing:
        life.exits(HOLDER)
    for name, device in zip((W1, W2, W3), devices[1:], strict=True):
        life.attached(name, attached=replace(ATTACHED, device=device))
        seen.append(life.generation.device_usage.process_bytes)
    assert seen == taken


# --- winding down ---------------------------------------------------------------------------------------------------


def test_a_worker_that_hangs_is_aborted_and_replaced_and_killed_only_once() -> None:
    life = GenerationHarness(1).serving()
    assert life.hangs(W1) == [RemoveSlot(W1), abort(W1), spawn(W2)]
    assert life.after(ABORT_TIMEOUT_S) == [Kill(W1)]
    assert life.hangs(W1) + life.hangs(W2) == []
    # One that was useful before is replaced at once each time.
    for number in range(2, 6):
        life.hello(worker(number))
        life.attached(worker(number))
        assert spawn(worker(number + 1)) in life.hangs(worker(number), useful=True)


def test_a_store_that_is_lost_concerns_only_who_serves_from_it() -> None:
    loading, leaving = GenerationHarness(1).building(), GenerationHarness(1).serving()
    leaving.drain()
    for life in (loading, leaving):
        before = life.state
        life.generation.on_store_lost("truncated", life.now)
        assert (life.state, life.wanted(), life.generation.attach_control.is_valid) == (before, [], True)


def test_who_leaves_has_as_much_more_time_as_it_was_given_the_first_time() -> None:
    patient, told_again = GenerationHarness(1).serving(), GenerationHarness(1).serving()
    patient.drain(patience=60.0)
    assert patient.after(STOP_TIMEOUT_S + 59.9) == []
    assert patient.when_due() == [abort(W1)]
    told_again.drain()
    told_again.after(5.0)
    told_again.drain(patience=60.0)
    assert told_again.after(STOP_TIMEOUT_S - 5.0) == [abort(W1)]
