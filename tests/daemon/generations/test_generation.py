"""Scripted lives of a generation: what it wants done after each event, exactly."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import signal

import pytest

from weightd.daemon.generations.access import ALLOW_TIMEOUT_S
from weightd.daemon.generations.actions import Action, Dismiss, Enlist, Kill, Pin, Role, Send, Spawn
from weightd.daemon.generations.child import Child
from weightd.daemon.generations.generation import (
    ABORT_TIMEOUT_S,
    HELLO_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Generation,
)
from weightd.daemon.generations.plan import Terms
from weightd.daemon.generations.progress import Outlook
from weightd.daemon.generations.restarts import MAX_FAILED_STARTS
from weightd.daemon.generations.states import ACTIVE, ChildState, GenerationState
from weightd.daemon.host.ends import End
from weightd.protocol.messages.children import (
    Allow,
    Allowed,
    Attach,
    Attached,
    Broken,
    Build,
    Built,
    DeviceMemory,
    Hello,
    Settle,
    Stop,
    Traits,
)
from weightd.protocol.messages.data import TensorSignature
from weightd.protocol.version import VERSION

SHA = "5" * 64
LOAD_TIMEOUT_S = 500.0
X = TensorSignature("x", "FP32", (-1, 4))
BUILT = Built("/store", (X,), (X,), ({"x": (2,)},), "canary", 4096, "a note")
ATTACHED = Attached("canary", 4000, "")
HOLDER = "m.1.holder"
CPU = Traits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)
CARD = Traits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)

_pids = itertools.count(1000)


def hello(traits: Traits = CPU, pid: str = "", sha256: str = SHA, version: str = VERSION) -> Hello:
    return Hello(pid or str(next(_pids)), sha256, {"weightd": version}, traits)


class Life:
    """A generation and what it wants done since it was last asked."""

    def __init__(
        self, workers: int = 2, traits: Traits = CPU, *, spares: int = 0, sharing: bool = True, frozen: bool = False
    ) -> None:
        limits = Terms(workers, LOAD_TIMEOUT_S, spares, sharing, frozen)
        self.generation = Generation("m.1", limits)
        self.traits = traits
        self.now = 1000.0
        self.generation.start()

    def state(self) -> GenerationState:
        return self.generation.state

    def actions(self) -> list[Action]:
        return self.generation.take_actions()

    def child(self, name: str) -> Child:
        return self.generation.children[name]

    # --- short cuts to where a test begins ---

    def spawned(self) -> Life:
        self.generation.pinned(SHA, self.now)
        self.actions()
        return self

    def greet(self, *names: str) -> Life:
        for name in names or tuple(self.generation.children):
            self.generation.hello(name, hello(self.traits), self.now)
        return self

    def building(self) -> Life:
        self.spawned().greet()
        self.actions()
        return self

    def built(self) -> Life:
        self.building()
        self.generation.holder_built(HOLDER, BUILT, self.now)
        self.actions()
        return self

    def serving(self) -> Life:
        self.built()
        for name in [each for each in self.generation.children if each != HOLDER]:
            self.generation.attached(name, ATTACHED, self.now)
        self.actions()
        return self

    def exit(self, name: str, end: End | None = None) -> list[Action]:
        self.generation.exited(name, end or End(3), self.now)
        return self.actions()

    def tick_at(self, now: float) -> list[Action]:
        self.now = now
        self.generation.tick(now)
        return self.actions()

    def tick_when_due(self) -> list[Action]:
        return self.tick_at(max(self.now, self.generation.next_tick))


# --- the way it should go -------------------------------------------------------------------------------------------


def test_a_whole_life() -> None:
    life = Life(workers=2)
    generation, now = life.generation, life.now
    assert (life.state(), life.actions()) == (GenerationState.PINNING, [Pin()])
    assert generation.next_tick == float("inf")

    generation.pinned(SHA, now)
    assert life.state() is GenerationState.SPAWNING
    assert life.actions() == [
        Spawn(HOLDER, Role.HOLDER),
        Spawn("m.1.w1", Role.WORKER),
        Spawn("m.1.w2", Role.WORKER),
    ]
    assert generation.next_tick == now + LOAD_TIMEOUT_S

    generation.hello("m.1.w1", hello(pid="11"), now)
    assert (life.state(), life.actions()) == (GenerationState.GATHERING, [])

    # On the CPU the holder need not know who comes.
    generation.hello(HOLDER, hello(), now)
    assert (life.state(), life.actions()) == (GenerationState.BUILDING, [Send(HOLDER, Build(("11",)))])
    generation.hello("m.1.w2", hello(), now)
    assert life.actions() == []
    assert generation.next_tick == now + LOAD_TIMEOUT_S

    generation.holder_built(HOLDER, BUILT, now)
    assert life.state() is GenerationState.ATTACHING
    assert life.actions() == [Send("m.1.w1", Attach("/store", ({"x": (2,)},)))]
    assert (generation.built, life.child(HOLDER).shared_bytes) == (BUILT, 4096)

    generation.attached("m.1.w1", ATTACHED, now)
    assert life.state() is GenerationState.SERVING
    assert life.actions() == [Enlist("m.1.w1"), Send("m.1.w2", Attach("/store", ({"x": (2,)},)))]
    assert life.child("m.1.w1").shared_bytes == 4000

    generation.attached("m.1.w2", ATTACHED, now)
    assert life.actions() == [Enlist("m.1.w2"), Send(HOLDER, Settle())]
    assert generation.next_tick == float("inf")

    generation.drain(now)
    assert life.state() is GenerationState.DRAINING
    assert life.actions() == [
        Dismiss("m.1.w1"),
        Send("m.1.w1", Stop()),
        Dismiss("m.1.w2"),
        Send("m.1.w2", Stop()),
    ]
    assert life.exit("m.1.w1") == []
    assert life.exit("m.1.w2") == [Send(HOLDER, Stop())]
    assert life.exit(HOLDER) == []
    assert life.state() is GenerationState.GONE
    assert generation.ended


def test_progress_is_told_in_words() -> None:
    life = Life(workers=2)
    told = [life.generation.progress]
    life.spawned()
    told.append(life.generation.progress)
    for name in ("m.1.w2", HOLDER, "m.1.w1"):
        life.greet(name)
        told.append(life.generation.progress)
    life.generation.holder_built(HOLDER, BUILT, life.now)
    told.append(life.generation.progress)
    for name in ("m.1.w1", "m.1.w2"):
        life.generation.attached(name, ATTACHED, life.now)
        told.append(life.generation.progress)
    assert told == [
        "pinning",
        "spawned, 0/3 processes up",
        "spawned, 1/3 processes up",
        "building",
        "building",
        "attaching 0/2",
        "attaching 1/2",
        "serving",
    ]


def test_progress_is_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    life = Life(workers=1).serving()
    life.generation.tick(life.now)
    # What follows from that its deployment knows, and tells.
    life.generation.failed("the cause", life.now)
    lines = [record.getMessage() for record in caplog.records]
    assert lines.count("m.1: attaching 0/1") == 1
    assert lines.count("m.1: serving") == 1
    assert "the cause" not in caplog.text


PRIVATE = dataclasses.replace(BUILT, handle="", shared_bytes=0, note="weights are not shared: no room", is_loss=True)
ALONE = dataclasses.replace(ATTACHED, shared_bytes=0, note="weights are not shared: another library")


@pytest.mark.parametrize(
    ("built", "attached", "sharing", "told"),
    [
        (BUILT, ATTACHED, True, []),
        (BUILT, ALONE, True, [ALONE.note]),
        (PRIVATE, dataclasses.replace(ALONE, note="the holder has no page store"), True, [PRIVATE.note]),
        # There is nothing to share, or nobody wants it.
        (dataclasses.replace(BUILT, shared_bytes=0), ALONE, True, []),
        (dataclasses.replace(PRIVATE, is_loss=False), ALONE, True, []),
        (PRIVATE, ALONE, False, []),
    ],
)
def test_weights_that_are_not_shared_are_a_warning_for_each_cause(
    caplog: pytest.LogCaptureFixture, built: Built, attached: Attached, sharing: bool, told: list[str]
) -> None:
    life = Life(workers=2, sharing=sharing).building()
    life.generation.holder_built(HOLDER, built, life.now)
    for _ in range(10):
        for name in [each for each in life.generation.children if each != HOLDER]:
            life.generation.hello(name, hello(CPU), life.now)
            life.generation.attached(name, attached, life.now)
            life.exit(name)
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING and "weights" in each.getMessage()]
    assert [each.getMessage() for each in warnings] == [f"m.1: {note}" for note in told]


def test_actions_are_taken_once() -> None:
    life = Life()
    assert life.actions() == [Pin()]
    assert life.actions() == []


# --- pinning --------------------------------------------------------------------------------------------------------


def test_without_a_snapshot_it_fails_and_starts_nothing() -> None:
    life = Life()
    life.actions()
    life.generation.failed("no such file", life.now)
    assert (life.state(), life.generation.cause, life.actions()) == (GenerationState.FAILED, "no such file", [])
    assert life.generation.ended


def test_a_snapshot_that_comes_after_the_end_starts_nothing() -> None:
    life = Life()
    life.actions()
    life.generation.drain(life.now)
    assert life.state() is GenerationState.GONE
    life.generation.pinned(SHA, life.now)
    assert (life.state(), life.actions()) == (GenerationState.GONE, [])


def test_a_second_snapshot_changes_nothing() -> None:
    life = Life().spawned()
    life.generation.pinned("6" * 64, life.now)
    assert (life.generation.sha256, life.actions()) == (SHA, [])


# --- the holder -----------------------------------------------------------------------------------------------------


def test_a_holder_that_cannot_build_ends_it_with_its_cause() -> None:
    life = Life(workers=2).building()
    life.generation.broken(HOLDER, Broken("not a model"), life.now)
    assert (life.state(), life.generation.cause) == (GenerationState.FAILED, f"{HOLDER}: not a model")
    assert life.actions() == [Send(HOLDER, Stop()), Send("m.1.w1", Stop()), Send("m.1.w2", Stop())]
    for name in (HOLDER, "m.1.w1", "m.1.w2"):
        assert not life.generation.ended
        assert life.exit(name) == []
    assert life.generation.ended
    assert life.generation.cause == f"{HOLDER}: not a model"


@pytest.mark.parametrize("greeted", [False, True])
def test_a_holder_that_dies_before_it_has_built_ends_it(greeted: bool) -> None:
    life = Life(workers=1).spawned()
    if greeted:
        life.greet()
        life.actions()
    stop: Action = Send("m.1.w1", Stop()) if greeted else Kill("m.1.w1")
    assert life.exit(HOLDER, End(-signal.SIGSEGV)) == [stop]
    assert (life.state(), life.generation.cause) == (GenerationState.FAILED, f"{HOLDER}: killed by SIGSEGV")


def test_on_the_cpu_nothing_is_lost_with_a_holder_that_has_built() -> None:
    life = Life(workers=2).built()
    assert life.exit(HOLDER) == []
    life.generation.attached("m.1.w1", ATTACHED, life.now)
    life.generation.attached("m.1.w2", ATTACHED, life.now)
    assert life.state() is GenerationState.SERVING
    # What the holder had to settle, a worker does.
    assert life.actions() == [
        Enlist("m.1.w1"),
        Send("m.1.w2", Attach("/store", ({"x": (2,)},))),
        Enlist("m.1.w2"),
        Send("m.1.w1", Settle()),
    ]


def test_where_the_memory_is_the_holders_all_is_lost_with_it() -> None:
    life = Life(workers=1, traits=CARD).serving()
    # It gets no time to finish: what it computes on may be anything.
    assert life.exit(HOLDER, End(-signal.SIGSEGV)) == [Dismiss("m.1.w1"), Kill("m.1.w1")]
    cause = f"{HOLDER}: killed by SIGSEGV; the shared weights are invalid without it"
    assert (life.state(), life.generation.cause) == (GenerationState.FAILED, cause)
    assert not life.generation.access.is_valid


def test_a_holder_that_builds_for_ever_is_killed_and_ends_it() -> None:
    life = Life(workers=1).building()
    assert life.tick_at(life.now + LOAD_TIMEOUT_S - 0.001) == []
    assert life.tick_when_due() == [Kill(HOLDER, abort=True), Send("m.1.w1", Stop())]
    assert (life.state(), life.generation.cause) == (GenerationState.FAILED, f"{HOLDER}: building took too long")


# --- the whitelist --------------------------------------------------------------------------------------------------


def test_where_pids_are_fixed_the_build_waits_for_every_worker() -> None:
    life = Life(workers=2, traits=CARD).spawned()
    life.generation.hello(HOLDER, hello(CARD, "9"), life.now)
    life.generation.hello("m.1.w2", hello(CARD, "12"), life.now)
    assert (life.state(), life.actions()) == (GenerationState.GATHERING, [])
    life.generation.hello("m.1.w1", hello(CARD, "11"), life.now)
    assert (life.state(), life.actions()) == (GenerationState.BUILDING, [Send(HOLDER, Build(("11", "12")))])


def test_where_pids_are_fixed_the_build_waits_for_the_worker_that_replaces_a_dead_one() -> None:
    life = Life(workers=2, traits=CARD).spawned().greet("m.1.w1", HOLDER)
    assert life.exit("m.1.w2") == []
    assert life.state() is GenerationState.GATHERING
    assert life.tick_when_due() == [Spawn("m.1.w3", Role.WORKER)]
    life.generation.hello("m.1.w3", hello(CARD, "13"), life.now)
    [order] = life.actions()
    assert isinstance(order, Send)
    assert isinstance(order.order, Build)
    assert "13" in order.order.pids
    assert len(order.order.pids) == 2


# --- hello ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (hello(sha256="6" * 64), "it would load a model of sha256 666666666666, pinned is 555555555555"),
        (
            hello(version="0.0.9"),
            f"its interpreter has weightd 0.0.9, the daemon is {VERSION}: install the same version in both",
        ),
        (
            Hello("1", SHA, {}, CPU),
            f"its interpreter has weightd unknown, the daemon is {VERSION}: install the same version in both",
        ),
    ],
    ids=["sha256", "version", "no version"],
)
def test_a_child_that_is_not_what_was_started_is_refused(message: Hello, cause: str) -> None:
    life = Life(workers=1).spawned()
    life.generation.hello("m.1.w1", message, life.now)
    assert life.actions() == [Kill("m.1.w1")]
    assert life.generation.cause == f"m.1.w1: {cause}"
    assert life.state() is GenerationState.SPAWNING
    life.generation.hello(HOLDER, message, life.now)
    assert (life.state(), life.generation.cause) == (GenerationState.FAILED, f"{HOLDER}: {cause}")


@pytest.mark.parametrize(
    ("load_timeout", "patience"), [(LOAD_TIMEOUT_S, LOAD_TIMEOUT_S), (1.5, HELLO_TIMEOUT_S)], ids=["large", "small"]
)
def test_a_child_that_never_says_hello_is_killed(load_timeout: float, patience: float) -> None:
    """Before it, a process reads the whole model: of 70 GB that takes more than a minute."""
    life = Life(workers=1, traits=CARD)
    life.generation.terms = dataclasses.replace(life.generation.terms, load_timeout=load_timeout)
    life.spawned().greet(HOLDER)
    life.actions()
    assert life.tick_at(life.now + patience - 0.1) == []
    life.now += 0.1
    assert life.tick_at(life.now) == [Kill("m.1.w1", abort=True)]
    assert life.generation.cause == "m.1.w1: spawned took too long"
    assert life.child("m.1.w1").state is ChildState.ABORTED
    # It is not killed a second time, and its exit is no second loss.
    assert life.tick_at(life.now + 0.1) == [Spawn("m.1.w2", Role.WORKER)]
    life.exit("m.1.w1", End(-signal.SIGKILL))
    assert life.generation.cause == "m.1.w1: spawned took too long"


# --- workers --------------------------------------------------------------------------------------------------------


def test_workers_attach_strictly_one_after_another() -> None:
    life = Life(workers=4).built()
    for number in range(1, 5):
        attaching = [each.name for each in life.generation.children.values() if each.state is ChildState.ATTACHING]
        assert attaching == [f"m.1.w{number}"]
        life.generation.attached(f"m.1.w{number}", ATTACHED, life.now)
        sent = [each for each in life.actions() if isinstance(each, Send) and isinstance(each.order, Attach)]
        assert [each.name for each in sent] == ([f"m.1.w{number + 1}"] if number < 4 else [])


def test_the_next_one_attaches_when_one_dies_attaching() -> None:
    life = Life(workers=2).built()
    assert life.exit("m.1.w1", End(-signal.SIGSEGV)) == [Send("m.1.w2", Attach("/store", ({"x": (2,)},)))]
    assert life.generation.cause == "m.1.w1: killed by SIGSEGV"
    assert life.tick_when_due() == [Spawn("m.1.w3", Role.WORKER)]
    life.generation.attached("m.1.w2", ATTACHED, life.now)
    assert life.generation.cause == ""
    # The holder settles only after the last.
    assert life.actions() == [Enlist("m.1.w2")]
    life.greet("m.1.w3")
    assert life.actions() == [Send("m.1.w3", Attach("/store", ({"x": (2,)},)))]
    life.generation.attached("m.1.w3", ATTACHED, life.now)
    assert life.actions() == [Enlist("m.1.w3"), Send(HOLDER, Settle())]


def test_a_worker_that_does_not_reproduce_the_canary_never_serves() -> None:
    life = Life(workers=2).built()
    life.generation.attached("m.1.w1", Attached("another", 0), life.now)
    assert life.actions() == [Send("m.1.w1", Stop()), Send("m.1.w2", Attach("/store", ({"x": (2,)},)))]
    assert life.generation.cause == "m.1.w1: the canary's answer is not the holder's: the worker would answer wrongly"
    assert life.state() is GenerationState.ATTACHING


def test_a_model_that_does_not_repeat_itself_has_no_canary() -> None:
    life = Life(workers=1).building()
    life.generation.holder_built(HOLDER, dataclasses.replace(BUILT, canary=""), life.now)
    life.generation.attached("m.1.w1", Attached("whatever", 0), life.now)
    assert life.state() is GenerationState.SERVING


def test_a_worker_that_dies_before_hello_is_replaced_after_a_while() -> None:
    life = Life(workers=1).spawned()
    assert life.exit("m.1.w1") == []
    assert life.generation.next_tick == pytest.approx(life.now + 0.1)
    assert life.tick_at(life.now + 0.05) == []
    assert life.tick_when_due() == [Spawn("m.1.w2", Role.WORKER)]


def test_a_ready_worker_that_dies_is_replaced_at_once() -> None:
    life = Life(workers=2).serving()
    assert life.exit("m.1.w1") == [Spawn("m.1.w3", Role.WORKER)]
    life.greet("m.1.w3")
    assert life.actions() == [Send("m.1.w3", Attach("/store", ({"x": (2,)},)))]
    life.generation.attached("m.1.w3", ATTACHED, life.now)
    assert life.actions() == [Enlist("m.1.w3"), Send(HOLDER, Settle())]


def test_a_worker_that_keeps_dying_is_replaced_later_and_later() -> None:
    life = Life(workers=1).serving()
    waits: list[float] = []
    for number in range(2, 7):
        born = life.now
        actions = life.exit(f"m.1.w{number - 1}") or life.tick_when_due()
        assert actions == [Spawn(f"m.1.w{number}", Role.WORKER)]
        waits.append(life.now - born)
        life.greet(f"m.1.w{number}")
        life.generation.attached(f"m.1.w{number}", ATTACHED, life.now)
        life.actions()
    assert waits == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8])


def test_a_worker_that_leaves_is_replaced_at_once_and_may_finish_leaving() -> None:
    life = Life(workers=1).serving()
    life.generation.leaving("m.1.w1", life.now)
    assert life.actions() == [Dismiss("m.1.w1"), Send("m.1.w1", Stop()), Spawn("m.1.w2", Role.WORKER)]
    assert life.generation.cause == ""
    assert life.exit("m.1.w1", End(75)) == []
    assert list(life.generation.children) == [HOLDER, "m.1.w2"]


@pytest.mark.parametrize("who", [HOLDER, "m.1.w1", "nobody"])
def test_only_a_ready_worker_can_leave(who: str) -> None:
    life = Life(workers=1).building()
    life.generation.leaving(who, life.now)
    assert (life.state(), life.actions()) == (GenerationState.BUILDING, [])


def test_an_attach_that_takes_too_long_is_killed() -> None:
    life = Life(workers=2).built()
    assert life.tick_at(life.now + LOAD_TIMEOUT_S) == [
        Kill("m.1.w1", abort=True),
        Send("m.1.w2", Attach("/store", ({"x": (2,)},))),
    ]
    assert life.generation.cause == "m.1.w1: attaching took too long"


def test_what_the_log_of_one_that_hung_ends_with_is_told_once_it_is_dead(caplog: pytest.LogCaptureFixture) -> None:
    life = Life(workers=2).built()
    life.tick_at(life.now + LOAD_TIMEOUT_S)
    life.tick_when_due()
    life.greet("m.1.w3").tick_at(life.now + LOAD_TIMEOUT_S)
    cause = "m.1.w2: attaching took too long"
    assert life.generation.cause == cause
    # The words of another one are its own.
    for name, words in (("m.1.w2", "Fatal: here"), ("m.1.w1", "of the first")):
        life.exit(name, End(-signal.SIGABRT, words))
        assert f"m.1: {name}: attaching took too long; its log ends: {words}" in caplog.text
    assert life.generation.cause == f"{cause}; its log ends: Fatal: here"


@pytest.mark.parametrize(
    ("broken", "end", "outlook"),
    [
        (Broken("no room", no_room=True), None, Outlook.ROOM),
        (Broken("no model"), None, Outlook.SAME),
        (None, End(-signal.SIGKILL), Outlook.BETTER),
        (None, End(1), Outlook.SAME),
    ],
)
def test_what_the_next_one_may_expect(broken: Broken | None, end: End | None, outlook: Outlook) -> None:
    life = Life(workers=1).building()
    if broken is not None:
        life.generation.broken(HOLDER, broken, life.now)
    life.exit(HOLDER, end)
    life.exit("m.1.w1", End(-signal.SIGKILL))
    assert (life.state(), life.generation.outlook) == (GenerationState.FAILED, outlook)


# --- giving up ------------------------------------------------------------------------------------------------------


def test_a_worker_that_finds_no_room_is_tried_again_for_a_while() -> None:
    life = Life(workers=1).built()
    end, number = life.now + life.generation.terms.room_timeout, 1
    while True:
        life.generation.broken(f"m.1.w{number}", Broken("ret:207001", no_room=True), life.now)
        if life.state() not in ACTIVE:
            break
        life.exit(f"m.1.w{number}")
        life.tick_when_due()
        number += 1
        life.greet(f"m.1.w{number}")
    assert end <= life.now < end + 3.0
    assert number > MAX_FAILED_STARTS + 10


def test_it_gives_up_when_no_worker_can_start() -> None:
    life = Life(workers=1).built()
    for number in range(1, MAX_FAILED_STARTS + 1):
        assert life.state() in ACTIVE
        name = f"m.1.w{number}"
        life.greet(name)
        life.generation.broken(name, Broken(f"no engine {number}"), life.now)
        life.exit(name)
        life.tick_when_due()
    assert (life.state(), life.generation.cause) == (GenerationState.FAILED, "m.1.w3: no engine 3")
    assert life.actions() == []
    assert life.exit(HOLDER) == []
    assert life.generation.ended


def _one_serves_and_the_other_never_starts() -> Life:
    life = Life(workers=2).built()
    life.generation.attached("m.1.w1", ATTACHED, life.now)
    life.generation.broken("m.1.w2", Broken("no memory"), life.now)
    life.exit("m.1.w2")
    for number in range(3, MAX_FAILED_STARTS + 2):
        life.tick_when_due()
        life.exit(f"m.1.w{number}")
    life.actions()
    return life


def test_those_that_serve_go_on_while_it_tries_the_others_again(caplog: pytest.LogCaptureFixture) -> None:
    life = _one_serves_and_the_other_never_starts()
    assert life.generation.complete
    assert (life.generation.progress, life.generation.cause) == (
        "serving 1/2, backing off",
        "m.1.w4: exited with status 3",
    )
    waits: list[float] = []
    for number in range(5, 25):
        waits.append(life.generation.next_tick - life.now)
        assert life.tick_when_due() == [Spawn(f"m.1.w{number}", Role.WORKER)]
        assert life.generation.progress == "attaching 1/2"
        life.exit(f"m.1.w{number}")
    assert waits[0] > 0.25
    assert 22.5 <= max(waits) <= 30.0
    assert "m.1: the next worker is started in" in caplog.text
    # Whatever was wrong is over.
    life.tick_when_due()
    life.greet("m.1.w25")
    life.generation.attached("m.1.w25", ATTACHED, life.now)
    assert life.generation.progress == "serving"


def test_it_settles_while_the_others_cannot_start() -> None:
    life = Life(workers=2).built()
    life.generation.attached("m.1.w1", ATTACHED, life.now)
    life.exit("m.1.w2")
    life.actions()
    seen: list[Action] = []
    for number in (3, 4):
        life.tick_when_due()
        seen += life.exit(f"m.1.w{number}")
    assert seen == [Send(HOLDER, Settle())]


def test_it_does_not_settle_while_one_attaches_though_the_others_cannot_start() -> None:
    life = Life(workers=3).built()
    life.generation.attached("m.1.w1", ATTACHED, life.now)
    seen = life.actions()
    for number in (3, 4):
        seen += life.exit(f"m.1.w{number}") + life.tick_when_due()
    seen += life.exit("m.1.w5")
    assert life.generation.complete
    assert Send(HOLDER, Settle()) not in seen
    assert life.child("m.1.w2").state is ChildState.ATTACHING


@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_one_that_has_served_is_not_given_up_when_the_last_one_goes(how: str) -> None:
    life = _one_serves_and_the_other_never_starts()
    if how == "dies":
        life.generation.exited("m.1.w1", End(-signal.SIGKILL), life.now)
    else:
        life.generation.leaving("m.1.w1", life.now)
    assert life.state() is GenerationState.SERVING
    spawned = [each for each in [*life.actions(), *life.tick_when_due()] if isinstance(each, Spawn)]
    assert spawned == [Spawn(f"m.1.w{number}", Role.WORKER) for number in (5, 6)]


def test_one_whose_workers_die_as_soon_as_they_serve_is_not_given_up() -> None:
    life = Life(workers=1).serving()
    for number in range(1, 50):
        life.exit(f"m.1.w{number}")
        if number > 1:
            assert life.generation.progress == "serving 0/1, backing off"
            assert life.generation.cause.startswith("workers die before they have answered anything; the last: m.1.w")
            life.tick_when_due()
        life.greet(f"m.1.w{number + 1}")
        life.generation.attached(f"m.1.w{number + 1}", ATTACHED, life.now)
        life.actions()
    assert life.state() is GenerationState.SERVING


def test_one_that_is_still_on_its_way_is_waited_for() -> None:
    life = Life(workers=4).built()
    for number in (2, 3, 4):
        life.generation.broken(f"m.1.w{number}", Broken("no memory"), life.now)
        life.exit(f"m.1.w{number}")
    assert life.state() is GenerationState.ATTACHING
    assert life.generation.next_tick == life.now + LOAD_TIMEOUT_S
    life.generation.attached("m.1.w1", ATTACHED, life.now)
    # It works after all: the others get new chances.
    assert life.actions() == [Enlist("m.1.w1")]
    assert life.tick_when_due() == [Spawn(f"m.1.w{number}", Role.WORKER) for number in (5, 6, 7)]


def test_a_worker_that_becomes_ready_gives_the_others_new_chances() -> None:
    life = Life(workers=2).built()
    for number in (2, 3):
        life.exit(f"m.1.w{number}")
        life.tick_when_due()
    life.generation.attached("m.1.w1", ATTACHED, life.now)
    life.exit("m.1.w4")
    assert life.tick_when_due() == [Spawn("m.1.w5", Role.WORKER)]


# --- spares ---------------------------------------------------------------------------------------------------------


def test_a_spare_is_attached_and_takes_no_requests() -> None:
    life = Life(workers=2, spares=1).built()
    seen: list[Action] = []
    for name in ("m.1.w1", "m.1.w2"):
        life.generation.attached(name, ATTACHED, life.now)
        seen += life.actions()
    assert not life.generation.complete
    life.generation.attached("m.1.w3", ATTACHED, life.now)
    seen += life.actions()
    assert [each.name for each in seen if isinstance(each, Enlist)] == ["m.1.w1", "m.1.w2"]
    assert list(life.generation.enlisted) == ["m.1.w1", "m.1.w2"]
    assert life.generation.complete


def test_a_spare_takes_the_place_at_once_and_before_a_replacement_is_started() -> None:
    life = Life(workers=2, spares=1).serving()
    assert life.exit("m.1.w1") == [Enlist("m.1.w3"), Spawn("m.1.w4", Role.WORKER)]
    life.greet("m.1.w4")
    life.generation.attached("m.1.w4", ATTACHED, life.now)
    # The replacement is the next spare.
    assert life.actions() == [Send("m.1.w4", Attach("/store", ({"x": (2,)},))), Send(HOLDER, Settle())]
    assert list(life.generation.enlisted) == ["m.1.w2", "m.1.w3"]


def test_a_spare_takes_the_place_of_one_that_leaves() -> None:
    life = Life(workers=1, spares=1).serving()
    life.generation.leaving("m.1.w1", life.now)
    assert life.actions() == [
        Dismiss("m.1.w1"),
        Send("m.1.w1", Stop()),
        Enlist("m.1.w2"),
        Spawn("m.1.w3", Role.WORKER),
    ]


def test_a_spare_that_dies_is_replaced_and_nobody_is_enlisted() -> None:
    life = Life(workers=1, spares=1).serving()
    assert life.exit("m.1.w2") == [Spawn("m.1.w3", Role.WORKER)]


# --- a replacement where pids are fixed at the build ----------------------------------------------------------------


def lost_two() -> Life:
    """Two of three workers are lost, and what replaces them is up."""
    life = Life(workers=3, traits=CARD).serving()
    life.exit("m.1.w1")
    life.exit("m.1.w2")
    life.tick_when_due()
    for name, pid in (("m.1.w4", "14"), ("m.1.w5", "15")):
        life.generation.hello(name, hello(CARD, pid), life.now)
    return life


def test_the_holder_is_asked_for_one_replacement_at_a_time() -> None:
    life = lost_two()
    assert life.actions() == [Send(HOLDER, Allow(("14",)))]
    life.generation.allowed(HOLDER, Allowed(), life.now)
    assert life.actions() == [Send("m.1.w4", Attach("/store", ({"x": (2,)},)))]
    life.generation.attached("m.1.w4", ATTACHED, life.now)
    assert life.actions() == [Enlist("m.1.w4"), Send(HOLDER, Allow(("15",)))]
    life.generation.allowed(HOLDER, Allowed(), life.now)
    assert life.actions() == [Send("m.1.w5", Attach("/store", ({"x": (2,)},)))]
    life.generation.attached("m.1.w5", ATTACHED, life.now)
    assert life.actions() == [Enlist("m.1.w5"), Send(HOLDER, Settle())]
    assert not life.generation.needs_renewal


def test_where_the_engine_lets_nobody_in_it_is_closed() -> None:
    life = lost_two()
    life.actions()
    life.generation.allowed(HOLDER, Allowed("no pids after the build"), life.now)
    assert life.actions() == [Send("m.1.w4", Stop()), Send("m.1.w5", Stop())]
    assert life.generation.access.why == "no pids after the build"
    assert (life.state(), life.generation.needs_renewal) == (GenerationState.SERVING, True)
    assert life.generation.progress == "serving 1/3, nobody can attach any more"
    assert life.exit("m.1.w4") + life.exit("m.1.w5") == []
    assert life.generation.next_tick == float("inf")
    # The last one: nothing can be done but by another generation.
    life.exit("m.1.w3")
    assert life.state() is GenerationState.FAILED
    assert life.generation.cause.startswith("every worker is lost, and nobody can attach any more")


def test_a_closed_one_needs_renewal_only_when_its_spares_are_used_up() -> None:
    life = Life(workers=1, spares=2, traits=CARD).serving()
    life.exit("m.1.w1")
    life.greet("m.1.w4")
    life.generation.allowed(HOLDER, Allowed("no"), life.now)
    assert not life.generation.needs_renewal
    life.exit("m.1.w4")
    life.actions()
    assert life.exit("m.1.w2") == [Enlist("m.1.w3")]
    assert not life.generation.needs_renewal
    life.exit("m.1.w3")
    assert life.state() is GenerationState.FAILED


def test_a_holder_that_never_answers_closes_it() -> None:
    life = lost_two()
    life.actions()
    assert life.generation.next_tick == life.now + ALLOW_TIMEOUT_S
    assert life.tick_at(life.now + ALLOW_TIMEOUT_S) == [Send("m.1.w4", Stop()), Send("m.1.w5", Stop())]
    assert life.generation.access.why == "the holder has not answered for 10 s"
    assert life.generation.needs_renewal
    # What it says after that opens nothing.
    life.generation.allowed(HOLDER, Allowed(), life.now)
    assert (life.actions(), life.state()) == ([], GenerationState.SERVING)


def test_an_answer_is_for_whom_it_was_asked_even_if_that_one_is_dead() -> None:
    life = lost_two()
    life.actions()
    life.exit("m.1.w4")
    # The question is still open: there is no second one.
    assert not any(isinstance(each, Send) for each in life.actions())
    life.generation.allowed(HOLDER, Allowed(), life.now)
    assert life.actions() == [Send(HOLDER, Allow(("15",)))]
    assert life.child("m.1.w5").state is ChildState.GREETED


def test_an_answer_without_a_question_changes_nothing() -> None:
    life = Life(workers=1, traits=CARD).serving()
    life.generation.allowed(HOLDER, Allowed("whatever"), life.now)
    life.generation.allowed("nobody", Allowed("whatever"), life.now)
    assert (life.actions(), life.generation.access.why) == ([], "")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_holder_may_die_of_the_question(frozen: bool) -> None:
    life = Life(workers=2, traits=CARD, frozen=frozen).serving()
    life.exit("m.1.w1")
    life.greet("m.1.w3")
    life.actions()
    if frozen:
        assert life.exit(HOLDER) == [Send("m.1.w3", Stop())]
        assert (life.state(), life.generation.access.is_frozen) == (GenerationState.SERVING, True)
        assert life.tick_at(life.now + ALLOW_TIMEOUT_S) == [Kill("m.1.w3", abort=True)]
    else:
        assert life.exit(HOLDER) == [Dismiss("m.1.w2"), Kill("m.1.w2"), Kill("m.1.w3")]
        assert life.generation.next_tick == float("inf")


# --- a holder that is lost ------------------------------------------------------------------------------------------


def test_frozen_stops_those_who_are_not_attached_and_goes_on() -> None:
    life = Life(workers=3, traits=CARD, frozen=True).built()
    life.generation.attached("m.1.w1", ATTACHED, life.now)
    life.actions()
    assert life.exit(HOLDER) == [Send("m.1.w3", Stop())]
    # Who is attaching may be in time.
    life.generation.attached("m.1.w2", ATTACHED, life.now)
    assert life.actions() == [Enlist("m.1.w2")]
    assert life.generation.access.is_frozen
    assert (life.generation.needs_renewal, life.generation.complete) == (True, True)
    assert life.generation.progress == "serving 2/3, frozen: the holder is lost"
    # Nobody is started in the place of who is lost.
    assert life.exit("m.1.w1") == []
    assert life.state() is GenerationState.SERVING
    life.exit("m.1.w2")
    assert life.state() is GenerationState.FAILED


def test_a_frozen_one_lets_its_spares_in() -> None:
    life = Life(workers=1, spares=1, traits=CARD, frozen=True).serving()
    assert life.exit(HOLDER) == []
    assert life.exit("m.1.w1") == [Enlist("m.1.w2")]


def test_answers_are_trusted_as_long_as_the_holder_lives() -> None:
    life = Life(workers=1, traits=CARD).building()
    assert life.generation.access.trusts(lambda _: False)
    life.generation.holder_built(HOLDER, BUILT, life.now)
    assert life.generation.access.trusts(lambda name: name == HOLDER)
    # Its death is known to the kernel before it is told.
    assert not life.generation.access.trusts(lambda _: False)
    life.exit(HOLDER)
    assert not life.generation.access.trusts(lambda _: True)


@pytest.mark.parametrize(
    "life",
    [Life(1), Life(1, CARD, frozen=True), Life(1, CARD, sharing=False)],
    ids=["cpu", "frozen", "private"],
)
def test_elsewhere_answers_are_trusted_without_it(life: Life) -> None:
    life.serving()
    assert life.generation.access.trusts(lambda _: False)


def test_who_was_told_to_leave_is_killed_too_when_its_weights_are_gone() -> None:
    life = Life(workers=2, traits=CARD).serving()
    life.generation.drain(life.now)
    life.actions()
    assert life.exit(HOLDER) == [Kill("m.1.w1"), Kill("m.1.w2")]
    assert not life.generation.access.is_valid
    assert life.tick_at(life.now + 1000.0) == []


# --- private weights ------------------------------------------------------------------------------------------------


def test_without_sharing_the_holder_leaves_before_each_worker_loads_its_own() -> None:
    life = Life(workers=2, traits=CARD, sharing=False).spawned()
    life.greet("m.1.w1", HOLDER)
    # It is given no pids, and waits for nobody.
    assert life.actions() == [Send(HOLDER, Build(()))]
    life.greet("m.1.w2")
    built = dataclasses.replace(BUILT, handle="")
    life.generation.holder_built(HOLDER, built, life.now)
    assert life.actions() == [Send(HOLDER, Stop())]
    assert life.exit(HOLDER, End(0)) == [Send("m.1.w1", Attach("", ({"x": (2,)},)))]
    life.generation.attached("m.1.w1", ATTACHED, life.now)
    assert life.actions() == [Enlist("m.1.w1"), Send("m.1.w2", Attach("", ({"x": (2,)},)))]
    life.generation.attached("m.1.w2", ATTACHED, life.now)
    assert life.generation.complete
    assert not life.generation.needs_renewal
    life.actions()
    # Nobody need be asked for a replacement.
    life.exit("m.1.w1")
    life.greet("m.1.w3")
    assert life.actions() == [Send("m.1.w3", Attach("", ({"x": (2,)},)))]


@pytest.mark.parametrize("traits", [CPU, CARD])
def test_where_nothing_could_be_shared_it_leaves_too(traits: Traits) -> None:
    """Nobody is left who would keep memory for nothing, and nobody's answers depend on it."""
    life = Life(workers=2, traits=traits).building()
    life.generation.holder_built(HOLDER, dataclasses.replace(BUILT, handle=""), life.now)
    assert life.actions() == [Send(HOLDER, Stop())]
    assert life.exit(HOLDER, End(0)) == [Send("m.1.w1", Attach("", ({"x": (2,)},)))]
    for name in ("m.1.w1", "m.1.w2"):
        life.generation.attached(name, ATTACHED, life.now)
    life.actions()
    assert (life.generation.complete, life.generation.deaths) == (True, 0)
    assert life.generation.access.trusts(lambda _: False)
    # Who comes later is held to the canary that the holder had found.
    life.exit("m.1.w1")
    life.greet("m.1.w3")
    assert life.actions() == [Send("m.1.w3", Attach("", ({"x": (2,)},)))]
    life.generation.attached("m.1.w3", dataclasses.replace(ATTACHED, canary="other"), life.now)
    assert life.child("m.1.w3").state is ChildState.STOPPING


def test_a_holder_that_does_not_leave_does_not_keep_the_others_waiting_for_ever() -> None:
    life = Life(workers=1, traits=CARD, sharing=False).built()
    assert life.tick_when_due() == [Kill(HOLDER, abort=True)]
    assert life.exit(HOLDER) == [Send("m.1.w1", Attach("/store", ({"x": (2,)},)))]


# --- what a process takes -------------------------------------------------------------------------------------------


def test_what_a_process_takes_is_what_the_card_lost_with_it() -> None:
    life = Life(workers=3, traits=CARD).building()
    life.generation.holder_built(HOLDER, dataclasses.replace(BUILT, device=DeviceMemory(1000, 900)), life.now)
    taken: list[int] = []
    for name, free in (("m.1.w1", 870), ("m.1.w2", 830), ("m.1.w3", 810)):
        life.generation.attached(name, dataclasses.replace(ATTACHED, device=DeviceMemory(1000, free)), life.now)
        taken.append(life.generation.footprint.process_bytes)
    # Whatever else was loaded on the card meanwhile only makes it more.
    assert taken == [30, 30, 20]


@pytest.mark.parametrize("sharing", [True, False])
def test_where_the_card_says_nothing_or_weights_are_in_it_nothing_is_learned(sharing: bool) -> None:
    life = Life(workers=1, traits=CARD, sharing=sharing).building()
    life.generation.holder_built(HOLDER, BUILT, life.now)
    if not sharing:
        life.exit(HOLDER)
    memory = None if sharing else DeviceMemory(1000, 10)
    life.generation.attached("m.1.w1", dataclasses.replace(ATTACHED, device=memory), life.now)
    assert life.generation.footprint.process_bytes == 0


# --- winding down ---------------------------------------------------------------------------------------------------


def test_workers_are_waited_for_before_the_holder_is_told() -> None:
    life = Life(workers=3).serving()
    life.generation.drain(life.now)
    told = [each.name for each in life.actions() if isinstance(each, Send)]
    assert told == ["m.1.w1", "m.1.w2", "m.1.w3"]
    for name in ("m.1.w3", "m.1.w1"):
        assert life.exit(name) == []
    assert life.exit("m.1.w2") == [Send(HOLDER, Stop())]


def test_who_does_not_leave_in_time_is_killed_once() -> None:
    life = Life(workers=1).serving()
    life.generation.drain(life.now)
    life.actions()
    assert life.tick_at(life.now + STOP_TIMEOUT_S - 0.001) == []
    assert life.tick_when_due() == [Kill("m.1.w1", abort=True)]
    assert life.tick_at(life.now + ABORT_TIMEOUT_S - 0.001) == []
    assert life.tick_when_due() == [Kill("m.1.w1")]
    assert life.tick_at(life.now + 1000) == []
    assert life.exit("m.1.w1") == [Send(HOLDER, Stop())]
    assert life.tick_when_due() == [Kill(HOLDER, abort=True)]
    life.exit(HOLDER)
    assert life.state() is GenerationState.GONE


def _pinning(life: Life) -> None:
    life.actions()


def _gathering(life: Life) -> None:
    life.spawned().greet("m.1.w1")


@pytest.mark.parametrize(
    ("reach", "state"),
    [
        (_pinning, GenerationState.PINNING),
        (Life.spawned, GenerationState.SPAWNING),
        (_gathering, GenerationState.GATHERING),
        (Life.building, GenerationState.BUILDING),
        (Life.built, GenerationState.ATTACHING),
        (Life.serving, GenerationState.SERVING),
    ],
    ids=lambda each: each.value if isinstance(each, GenerationState) else "",
)
@pytest.mark.parametrize("drained", [True, False], ids=["drain", "fail"])
def test_it_can_be_ended_in_every_state(reach: object, state: GenerationState, drained: bool) -> None:
    life = Life(workers=2)
    assert callable(reach)
    reach(life)
    assert life.state() is state
    if drained:
        life.generation.drain(life.now)
    else:
        life.generation.failed("a cause", life.now)
    seen = life.actions()
    for name in ("m.1.w1", "m.1.w2", HOLDER):
        if name in life.generation.children:
            assert life.child(name).state.told == "stopping"
            seen += life.exit(name)
    assert not any(isinstance(each, Spawn) for each in seen)
    assert life.state() is (GenerationState.GONE if drained else GenerationState.FAILED)
    assert life.generation.ended
    assert life.generation.cause == ("" if drained else "a cause")
    assert life.tick_at(life.now + 1e6) == []


def test_what_children_say_while_it_winds_down_changes_nothing() -> None:
    life = Life(workers=2).built()
    life.generation.drain(life.now)
    life.actions()
    life.generation.attached("m.1.w1", ATTACHED, life.now)
    life.generation.broken("m.1.w2", Broken("late"), life.now)
    life.generation.leaving("m.1.w2", life.now)
    life.greet()
    life.generation.drain(life.now)
    life.generation.failed("late", life.now)
    assert (life.state(), life.generation.cause, life.actions()) == (GenerationState.DRAINING, "", [])


def test_a_holder_that_has_built_only_now_is_stopped_in_its_turn() -> None:
    life = Life(workers=1).building()
    life.generation.drain(life.now)
    life.actions()
    life.generation.holder_built(HOLDER, BUILT, life.now)
    assert life.actions() == []
    assert life.exit("m.1.w1") == [Send(HOLDER, Stop())]


def test_nobody_is_known_by_a_name_that_was_never_given() -> None:
    life = Life(workers=1).serving()
    generation = life.generation
    before = list(generation.children)
    generation.hello("other", hello(), life.now)
    generation.holder_built("other", BUILT, life.now)
    generation.attached("other", ATTACHED, life.now)
    generation.broken("other", Broken("x"), life.now)
    generation.exited("other", End(3), life.now)
    assert (life.state(), life.actions(), list(generation.children)) == (GenerationState.SERVING, [], before)


@pytest.mark.parametrize("traits", [CARD, CPU])
def test_where_attaching_rewrites_the_weights_nothing_is_shared_without_a_canary(traits: Traits) -> None:
    life = Life(workers=1, traits=traits).building()
    without = dataclasses.replace(BUILT, canary="", canary_cases=(), canary_note="the model is not deterministic")
    life.generation.holder_built(HOLDER, without, life.now)
    cause = f"{HOLDER}: no canary: {without.canary_note}; name an input with the key canary, or set sharing to off"
    expected = (GenerationState.FAILED, cause) if traits is CARD else (GenerationState.ATTACHING, "")
    assert (life.state(), life.generation.cause) == expected


# --- workers that hang ----------------------------------------------------------------------------------------------


def test_a_worker_that_hangs_is_dismissed_aborted_and_replaced_and_killed_only_once() -> None:
    life = Life(workers=1).serving()
    life.generation.hung("m.1.w1", "silence", life.now)
    assert life.actions() == [Dismiss("m.1.w1"), Kill("m.1.w1", abort=True), Spawn("m.1.w2", Role.WORKER)]
    assert life.tick_at(life.now + ABORT_TIMEOUT_S) == [Kill("m.1.w1")]
    life.generation.hung("m.1.w1", "silence", life.now)
    assert life.actions() == []


def test_one_that_was_useful_before_it_hung_is_replaced_at_once_each_time() -> None:
    life = Life(workers=1).serving()
    for serial in range(1, 5):
        life.generation.hung(f"m.1.w{serial}", "silence", life.now, useful=True)
        assert Spawn(f"m.1.w{serial + 1}", Role.WORKER) in life.actions()
        life.greet(f"m.1.w{serial + 1}")
        life.generation.attached(f"m.1.w{serial + 1}", ATTACHED, life.now)


def test_a_store_that_is_lost_concerns_only_who_serves_from_it() -> None:
    loading, leaving = Life(workers=1).building(), Life(workers=1).serving()
    leaving.generation.drain(leaving.now)
    leaving.actions()
    for life in (loading, leaving):
        before = life.state()
        life.generation.store_lost("truncated", life.now)
        assert (life.state(), life.actions(), life.generation.access.is_valid) == (before, [], True)


# --- how long it may take to leave ----------------------------------------------------------------------------------


def test_who_leaves_has_as_much_more_time_as_it_was_given() -> None:
    life = Life(workers=1).serving()
    life.generation.drain(life.now, patience=60.0)
    life.actions()
    assert life.tick_at(life.now + STOP_TIMEOUT_S + 59.9) == []
    assert life.tick_when_due() == [Kill("m.1.w1", abort=True)]


def test_who_is_told_again_to_leave_has_no_more_time_than_before() -> None:
    life = Life(workers=1).serving()
    life.generation.drain(life.now)
    life.generation.drain(life.now + 5.0, patience=60.0)
    life.actions()
    assert life.tick_at(life.now + STOP_TIMEOUT_S) == [Kill("m.1.w1", abort=True)]


@pytest.mark.parametrize("event", ["drain", "holder"])
def test_who_is_killed_already_is_not_killed_again(event: str) -> None:
    life = Life(workers=1, traits=CARD).serving()
    life.generation.drain(life.now)
    life.actions()
    assert life.tick_when_due() == [Kill("m.1.w1", abort=True)]
    assert life.tick_when_due() == [Kill("m.1.w1")]
    if event == "drain":
        life.generation.drain(life.now)
    else:
        life.exit(HOLDER)
    assert life.tick_at(life.now + 1e6) == []


def test_without_sharing_there_is_nothing_to_settle() -> None:
    life = Life(workers=1, sharing=False).built()
    life.exit(HOLDER)
    life.generation.attached("m.1.w1", ATTACHED, life.now)
    assert life.actions() == [Enlist("m.1.w1")]
