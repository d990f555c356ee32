"""Scripted lives of a deployment: which generation loads, serves and leaves, and when."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Callable

import pytest

from weightd.daemon.config.policies import Policy
from weightd.daemon.generations.actions import Dismiss, Enlist, Forget, Kill, Pin, Role, Send, Spawn
from weightd.daemon.generations.generation import Generation
from weightd.daemon.generations.plan import Source, Terms
from weightd.daemon.generations.restarts import MAX_FAILED_STARTS
from weightd.daemon.generations.states import GenerationState
from weightd.daemon.host.ends import End
from weightd.daemon.host.memory import MIB
from weightd.daemon.models.budget import Device, Need
from weightd.daemon.models.deployment import Deployment
from weightd.daemon.models.stage import Succession
from weightd.protocol.messages.children import Attached, Broken, Built, DeviceMemory, Hello, Traits
from weightd.protocol.messages.data import TensorSignature
from weightd.protocol.version import VERSION

SHA = "5" * 64
X = TensorSignature("x", "FP32", (4,))
FIRST, SECOND = Source("/m.onnx"), Source("/m2.onnx", number=2)
# Pids are fixed at the build: what is lost with the holder only the next generation can replace.
CARD = Traits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)
WEIGHTS, EACH = 100 * MIB, 10 * MIB
ONE = 102 * MIB + 3 * EACH


class Stage:
    """A deployment of two workers, and the children's side of the talk."""

    def __init__(
        self,
        policy: Policy = Policy.AUTO,
        capacity: int | None = None,
        *,
        frozen: bool = True,
        sharing: bool = True,
        fall_back: bool = False,
        device: Device | None = None,
        first: int = 1,
    ) -> None:
        self.now = 1000.0
        self.device = device or Device("ascend:0", capacity)
        self.numbers = itertools.count(first)
        self.woken = 0
        self.there: dict[str, Generation] = {}
        terms = Terms(2, 500.0, sharing=sharing, outlives_holder=frozen)
        self.deployment = Deployment(self.device, terms, Succession(policy, fall_back, EACH), self.make, self.wake)
        self.deployment.start(FIRST)

    def make(self, device: Device, source: Source, terms: Terms) -> Generation:
        number = next(self.numbers)
        generation = Generation(f"m.{number}", terms, device.name, source, number)
        self.there[generation.label] = generation
        return generation

    def wake(self) -> None:
        self.woken += 1

    def of(self, name: str) -> Generation:
        return self.there[name.rpartition(".")[0]]

    def did(self) -> list[str]:
        """What was wanted since the last time, in words."""
        words: list[str] = []
        for generation, action in self.deployment.take_actions():
            match action:
                case Pin() | Forget():
                    words.append(f"{type(action).__name__} {generation.label}")
                case Send(name, order):
                    words.append(f"{type(order).__name__} {name}")
                case Spawn(name, _) | Kill(name) | Enlist(name) | Dismiss(name):
                    words.append(f"{type(action).__name__} {name}")
        return words

    def standing(self) -> tuple[str, str, list[str]]:
        deployment = self.deployment
        serving, coming = deployment.serving, deployment.coming
        return serving.label if serving else "", coming.label if coming else "", [e.label for e in deployment.leaving]

    def pinned(self, source: Source = FIRST) -> Stage:
        self.deployment.pinned(source, SHA, WEIGHTS, self.now)
        return self

    def greets(self, label: str) -> Stage:
        generation = self.there[label]
        for name in list(generation.children):
            generation.hello(name, Hello(name, SHA, {"weightd": VERSION}, CARD), self.now)
        return self.settled()

    def builds(self, label: str, device: DeviceMemory | None = None) -> Stage:
        generation = self.there[label]
        handle = "/store" if generation.terms.sharing else ""
        generation.holder_built(f"{label}.holder", Built(handle, (X,), (X,), (), "canary", 1, device=device), self.now)
        return self.settled()

    def attaches(self, label: str, *names: str) -> Stage:
        generation = self.there[label]
        for name in names or [each.name for each in generation.children.values() if each.role is Role.WORKER]:
            generation.attached(name, Attached("canary", 1), self.now)
            self.settled()
        return self

    def loads(self, label: str, source: Source = FIRST) -> Stage:
        return self.pinned(source).greets(label).builds(label).attaches(label)

    def exit(self, *names: str) -> Stage:
        for name in names:
            self.of(name).exited(name, End(-signal.SIGSEGV), self.now)
            self.settled()
        return self

    def all_leave(self, label: str) -> Stage:
        names = list(self.there[label].children)
        return self.exit(*names[1:], *names[:1])

    def settled(self) -> Stage:
        self.deployment.reconcile(self.now)
        return self

    def tick_when_due(self) -> Stage:
        self.now = max(self.now, self.deployment.next_tick)
        self.deployment.tick(self.now)
        return self

    def frozen(self) -> Stage:
        """One that serves and has lost its holder."""
        self.loads("m.1")
        self.did()
        return self.exit("m.1.holder")


def of_holders(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "holder" in each.getMessage()]


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


# --- the first one --------------------------------------------------------------------------------------------------


def test_a_first_holder_that_is_killed_is_tried_again_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    for number in (1, 2, 3):
        label = f"m.{number}"
        assert stage.standing()[1] == label
        stage.pinned().greets(label)
        stage.exit(f"{label}.holder", f"{label}.w1", f"{label}.w2")
        assert stage.deployment.failed == (number == 3)
        # A person is needed once nothing else is tried, and told once.
        failed = "m.3 failed: m.3.holder: killed by SIGSEGV; no other is tried on ascend:0"
        assert errors(caplog) == ([failed] if number == 3 else [])
        # Once, with what follows from it.
        assert of_holders(caplog)[number - 1 :] == [
            failed if number == 3 else f"{label} failed: {label}.holder: killed by SIGSEGV"
        ]
        if number < 3:
            assert stage.deployment.busy
            stage.tick_when_due()
    assert stage.deployment.cause == "m.3.holder: killed by SIGSEGV"


def test_a_first_holder_that_says_what_is_wrong_is_believed() -> None:
    stage = Stage().pinned().greets("m.1")
    stage.of("m.1.holder").broken("m.1.holder", Broken("no such model"), stage.now)
    stage.settled()
    assert (stage.deployment.failed, stage.deployment.cause) == (True, "m.1.holder: no such model")


def test_the_first_one_serves_as_soon_as_one_worker_is_ready() -> None:
    stage = Stage()
    assert stage.did() == ["Pin m.1"]
    stage.pinned().greets("m.1").builds("m.1")
    stage.did()
    assert stage.standing() == ("", "m.1", [])
    stage.attaches("m.1", "m.1.w1")
    assert stage.standing() == ("m.1", "", [])
    assert [each for each in stage.did() if each.startswith("Enlist")] == ["Enlist m.1.w1"]
    stage.attaches("m.1", "m.1.w2")
    assert [each for each in stage.did() if each.startswith("Enlist")] == ["Enlist m.1.w2"]


def test_nothing_is_started_before_it_is_promised() -> None:
    stage = Stage(capacity=ONE - 1)
    stage.did()
    stage.pinned()
    assert stage.did() == ["Forget m.1"]
    assert stage.deployment.failed
    assert stage.deployment.cause.startswith("ascend:0 has no room: m.1 needs 132 MiB")
    assert stage.device.promised == {}


def waiting() -> tuple[Stage, Stage]:
    """One that serves and will leave, and one of another model that waits for its room."""
    leaving = Stage(capacity=ONE).loads("m.1")
    leaving.deployment.will_leave()
    return leaving, Stage(device=leaving.device, first=2).pinned()


def test_it_waits_for_the_room_of_who_will_leave_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightd")
    leaving, stage = waiting()
    for _ in range(3):
        # Until then nobody looks.
        assert (stage.woken, stage.deployment.next_tick) == (0, float("inf"))
        stage.settled()
    leaving.deployment.drain(leaving.now)
    leaving.exit("m.1.w1", "m.1.w2")
    assert (stage.woken, list(stage.device.promised)) == (0, ["m.1"])
    leaving.exit("m.1.holder")
    assert (stage.woken, stage.deployment.next_tick, stage.device.leaving) == (1, 0.0, set())
    stage.deployment.tick(stage.now)
    assert (list(stage.device.promised), stage.standing()[1]) == (["m.2"], "m.2")
    assert stage.now < stage.deployment.next_tick < float("inf")
    assert [record.message for record in caplog.records].count("m.2 waits for the room of m.1") == 1
    leaving.device.release("m.1")
    assert stage.woken == 1


def test_who_comes_too_late_for_what_was_released_waits_on_or_is_refused() -> None:
    leaving, stage = waiting()
    other = Stage(device=leaving.device, first=3).pinned()
    leaving.deployment.drain(leaving.now)
    leaving.all_leave("m.1")
    for each in (stage, other):
        assert each.deployment.next_tick == 0.0
        each.deployment.tick(each.now)
    assert list(stage.device.promised) == ["m.2"]
    assert other.deployment.failed
    assert "m.2 has 132 MiB" in other.deployment.cause


@pytest.mark.parametrize("how", ["drained", "no snapshot"])
def test_one_that_is_given_up_while_it_waits_for_room_is_not_told(how: str) -> None:
    leaving, stage = waiting()
    if how == "drained":
        stage.deployment.drain(stage.now)
    else:
        stage.deployment.pin_failed(FIRST, "gone", stage.now)
    leaving.deployment.drain(leaving.now)
    leaving.all_leave("m.1")
    assert (stage.woken, stage.deployment.next_tick) == (0, float("inf"))


def test_one_that_is_wound_down_when_it_has_just_been_told_is_not_due_for_ever() -> None:
    leaving, stage = waiting()
    leaving.deployment.drain(leaving.now)
    leaving.all_leave("m.1")
    stage.deployment.drain(stage.now)
    assert (stage.woken, stage.deployment.next_tick) == (1, float("inf"))


def test_it_does_not_wait_for_room_that_would_not_do() -> None:
    leaving = Stage(capacity=ONE).loads("m.1")
    leaving.deployment.will_leave()
    stage = Stage(capacity=ONE - 1, first=2)
    stage.device.promised, stage.device.leaving = leaving.device.promised, leaving.device.leaving
    stage.pinned()
    assert stage.deployment.failed


def test_what_is_started_was_promised_until_nothing_is_left() -> None:
    stage = Stage(capacity=ONE).pinned()
    assert stage.device.promised == {"m.1": Need(WEIGHTS, 1, 2, 3, EACH)}
    stage.deployment.drain(stage.now)
    stage.exit("m.1.w1", "m.1.w2")
    assert "m.1" in stage.device.promised
    stage.exit("m.1.holder")
    assert stage.device.promised == {}
    assert stage.did()[-1] == "Forget m.1"


def test_the_first_one_is_not_tried_twice() -> None:
    stage = Stage()
    stage.deployment.pin_failed(FIRST, "no such file", stage.now)
    assert (stage.deployment.failed, stage.deployment.cause) == (True, "no such file")
    assert stage.deployment.next_tick == float("inf")


def test_a_snapshot_of_another_source_is_not_for_it() -> None:
    stage = Stage().pinned(SECOND)
    stage.deployment.pin_failed(SECOND, "no such file", stage.now)
    assert stage.did() == ["Pin m.1"]
    assert not stage.deployment.failed


def test_what_it_learns_counts_for_the_next_one_too() -> None:
    stage = Stage().pinned().greets("m.1").builds("m.1", DeviceMemory(1000 * MIB, 500 * MIB))
    memory = DeviceMemory(1000 * MIB, 470 * MIB)
    generation = stage.there["m.1"]
    generation.attached("m.1.w1", Attached("canary", 1, device=memory), stage.now)
    stage.deployment.told(generation, memory)
    stage.deployment.told(generation, None)
    assert stage.device.free == 470 * MIB
    assert stage.device.promised["m.1"].process_bytes == 30 * MIB
    stage.settled().attaches("m.1", "m.1.w2").exit("m.1.holder").pinned()
    assert stage.device.promised["m.2"].process_bytes == 30 * MIB


# --- private loading ------------------------------------------------------------------------------------------------


def test_it_falls_back_to_private_weights_once() -> None:
    stage = Stage(fall_back=True).pinned().greets("m.1")
    stage.there["m.1"].broken("m.1.holder", Broken("no sharing"), stage.now)
    stage.settled()
    assert stage.standing() == ("", "m.2", ["m.1"])
    assert not stage.deployment.failed
    stage.pinned()
    assert stage.device.promised["m.2"] == Need(WEIGHTS, 2, 2, 3, EACH)
    assert not stage.there["m.2"].terms.sharing
    stage.greets("m.2")
    stage.there["m.2"].broken("m.2.holder", Broken("no memory"), stage.now)
    stage.settled()
    assert (stage.deployment.failed, stage.deployment.cause) == (True, "m.2.holder: no memory")


@pytest.mark.parametrize("fall_back", [False, True])
def test_a_holder_that_finds_no_room_is_tried_again_for_a_while(fall_back: bool) -> None:
    """What an earlier process had comes free late; copies in each process would need more."""
    stage = Stage(fall_back=fall_back).pinned()
    end, number = stage.now + stage.deployment.terms.room_timeout, 1
    while not stage.deployment.failed:
        label = f"m.{number}"
        stage.greets(label)
        assert stage.there[label].terms.sharing
        stage.there[label].broken(f"{label}.holder", Broken("ret:207001", no_room=True), stage.now)
        stage.settled().exit(*list(stage.there[label].children))
        stage.now = max(stage.now, stage.deployment.next_tick) if stage.deployment.busy else stage.now
        stage.deployment.tick(stage.now)
        stage.pinned()
        number += 1
    assert end <= stage.now < end + 3.0
    assert stage.deployment.cause == f"m.{number - 1}.holder: ret:207001"


def test_without_that_it_fails() -> None:
    stage = Stage().pinned().greets("m.1")
    stage.there["m.1"].broken("m.1.holder", Broken("no sharing"), stage.now)
    stage.settled()
    assert (stage.deployment.failed, stage.deployment.cause) == (True, "m.1.holder: no sharing")


# --- renewal --------------------------------------------------------------------------------------------------------


def test_a_frozen_one_is_renewed_beside_it_and_left_when_the_next_is_complete() -> None:
    stage = Stage(Policy.OVERLAP).frozen()
    assert stage.did() == ["Pin m.2"]
    # The same bytes: nobody has asked for others.
    assert stage.there["m.2"].source == FIRST
    stage.pinned().greets("m.2").builds("m.2").attaches("m.2", "m.2.w1")
    assert stage.standing() == ("m.1", "m.2", [])
    assert not any(each.startswith("Enlist") for each in stage.did())
    stage.attaches("m.2", "m.2.w2")
    assert stage.standing() == ("m.2", "", ["m.1"])
    did = stage.did()
    assert [each for each in did if each.startswith(("Dismiss", "Enlist"))] == [
        "Dismiss m.1.w1",
        "Dismiss m.1.w2",
        "Enlist m.2.w1",
        "Enlist m.2.w2",
    ]
    stage.all_leave("m.1")
    assert stage.did() == ["Forget m.1"]
    assert list(stage.device.promised) == ["m.2"]


def test_replacing_waits_until_the_old_one_is_gone() -> None:
    stage = Stage(Policy.REPLACE).frozen()
    stage.did()
    stage.pinned()
    assert stage.standing() == ("", "m.2", ["m.1"])
    assert stage.did() == ["Dismiss m.1.w1", "Stop m.1.w1", "Dismiss m.1.w2", "Stop m.1.w2"]
    stage.exit("m.1.w1")
    assert stage.did() == []
    stage.exit("m.1.w2")
    assert stage.did() == ["Forget m.1", "Spawn m.2.holder", "Spawn m.2.w1", "Spawn m.2.w2"]
    # Nobody else serves: its first worker does.
    stage.greets("m.2").builds("m.2").attaches("m.2", "m.2.w1")
    assert stage.standing() == ("m.2", "", [])


@pytest.mark.parametrize(("capacity", "leaves"), [(2 * ONE, False), (2 * ONE - 1, True)])
def test_auto_replaces_only_where_there_is_no_room_beside(capacity: int, leaves: bool) -> None:
    stage = Stage(Policy.AUTO, capacity).frozen().pinned()
    assert stage.standing() == (("", "m.2", ["m.1"]) if leaves else ("m.1", "m.2", []))
    assert ("m.2" in stage.device.promised) is not leaves
    if leaves:
        stage.all_leave("m.1")
        assert list(stage.device.promised) == ["m.2"]


@pytest.mark.parametrize("policy", [Policy.AUTO, Policy.REPLACE])
def test_nobody_leaves_for_one_that_would_have_no_room_even_alone(policy: Policy) -> None:
    stage = Stage(policy, ONE).frozen()
    stage.device.capacity = ONE - 1
    stage.pinned()
    assert stage.standing()[0] == "m.1"
    assert "no room: m.2 needs" in stage.deployment.cause
    assert "m.1 has" not in stage.deployment.cause


def test_overlapping_without_room_it_goes_on_with_what_is_left_and_tries_later_and_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(Policy.OVERLAP, 2 * ONE - 1).frozen()
    waits: list[float] = []
    for number in range(2, 2 + MAX_FAILED_STARTS + 1):
        assert stage.standing() == ("m.1", f"m.{number}", [])
        stage.pinned()
        assert stage.standing() == ("m.1", "", [])
        assert stage.deployment.busy
        waits.append(stage.deployment.next_tick - stage.now)
        stage.tick_when_due()
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert not stage.deployment.failed
    assert "m.1 has 132 MiB" in stage.deployment.cause
    assert errors(caplog) == []


def test_what_has_served_is_tried_again_for_ever_and_later_and_later() -> None:
    stage = Stage(frozen=False).loads("m.1").exit("m.1.holder", "m.1.w1", "m.1.w2")
    waits: list[float] = []
    for number in range(2, 20):
        before = stage.now
        if stage.standing()[1] == "":
            stage.tick_when_due()
        waits.append(stage.now - before)
        stage.pinned().exit(*(f"m.{number}.{name}" for name in ("holder", "w1", "w2")))
        assert (stage.deployment.failed, stage.deployment.busy) == (False, True)
        assert stage.deployment.cause == f"m.{number}.holder: killed by SIGSEGV"
    assert waits[:3] == pytest.approx([0.0, 0.1, 0.2])
    assert waits[-1] == pytest.approx(30.0)


def test_one_that_is_invalid_is_followed_at_once_and_later_if_it_did_not_live_long() -> None:
    stage = Stage(frozen=False).loads("m.1")
    stage.now += 100.0
    stage.exit("m.1.holder")
    assert stage.standing() == ("", "m.2", ["m.1"])
    stage.exit("m.1.w1", "m.1.w2").loads("m.2").exit("m.2.holder")
    assert stage.standing()[1] == "m.3"
    stage.exit("m.2.w1", "m.2.w2").loads("m.3").exit("m.3.holder")
    assert stage.standing()[1] == ""
    assert stage.deployment.next_tick == pytest.approx(stage.now + 0.1)
    assert stage.tick_when_due().standing()[1] == "m.4"


def test_there_are_never_more_than_two() -> None:
    stage = Stage(Policy.OVERLAP).frozen().pinned()
    stage.exit("m.2.holder").tick_when_due().pinned()
    # What is left of m.2 may still have weights.
    assert stage.standing() == ("m.1", "m.3", ["m.2"])
    assert not stage.there["m.3"].children
    stage.exit("m.2.w1", "m.2.w2")
    assert stage.there["m.3"].children


# --- update ---------------------------------------------------------------------------------------------------------


def updating(policy: Policy = Policy.AUTO, capacity: int | None = None) -> Stage:
    stage = Stage(policy, capacity, frozen=False).loads("m.1")
    stage.deployment.update(SECOND, stage.now)
    stage.did()
    return stage


@pytest.mark.parametrize("policy", list(Policy))
def test_an_update_is_loaded_beside_and_waits_for_the_switch(policy: Policy) -> None:
    stage = updating(policy).pinned(SECOND).greets("m.2").builds("m.2").attaches("m.2", "m.2.w1")
    assert not stage.deployment.complete
    stage.attaches("m.2", "m.2.w2")
    assert (stage.deployment.complete, stage.deployment.updating) == (True, True)
    assert stage.standing() == ("m.1", "m.2", [])
    assert not any(each.startswith("Enlist") for each in stage.did())
    stage.deployment.switch(stage.now)
    assert stage.standing() == ("m.2", "", ["m.1"])
    assert (stage.deployment.complete, stage.deployment.updating) == (False, False)
    assert [each for each in stage.did() if each.startswith(("Dismiss", "Enlist"))] == [
        "Dismiss m.1.w1",
        "Dismiss m.1.w2",
        "Enlist m.2.w1",
        "Enlist m.2.w2",
    ]


@pytest.mark.parametrize("policy", list(Policy))
def test_nobody_leaves_for_an_update_that_has_no_room(policy: Policy) -> None:
    stage = updating(policy, 2 * ONE - 1).pinned(SECOND)
    assert stage.standing() == ("m.1", "", [])
    assert (stage.deployment.updating, stage.deployment.busy) == (False, False)
    assert stage.deployment.cause.startswith("ascend:0 has no room: m.2 needs 132 MiB")
    assert not stage.deployment.failed


def test_an_update_that_fails_is_not_tried_again() -> None:
    stage = updating().pinned(SECOND).exit("m.2.holder")
    assert stage.standing() == ("m.1", "", ["m.2"])
    stage.exit("m.2.w1", "m.2.w2")
    assert (stage.standing(), stage.deployment.busy, stage.deployment.failed) == (("m.1", "", []), False, False)


def test_an_update_that_not_every_worker_can_load_does_not_take_over() -> None:
    stage = updating().pinned(SECOND).greets("m.2").builds("m.2").attaches("m.2", "m.2.w1").exit("m.2.w2")
    for name in ("m.2.w3", "m.2.w4"):
        stage.tick_when_due().exit(name)
    assert stage.standing() == ("m.1", "", ["m.2"])
    assert stage.deployment.cause.startswith("not every worker could load it: m.2.w4: killed by SIGSEGV")


def test_an_update_can_be_abandoned() -> None:
    stage = updating().loads("m.2", SECOND)
    stage.deployment.abandon("another device failed", stage.now)
    assert stage.standing() == ("m.1", "", ["m.2"])
    stage.deployment.abandon("twice", stage.now)
    stage.deployment.switch(stage.now)
    assert stage.deployment.cause == "another device failed"
    assert not any(each.startswith("Enlist") for each in stage.did())


def test_an_update_goes_on_when_what_serves_is_lost() -> None:
    stage = updating().pinned(SECOND).exit("m.1.holder")
    assert stage.standing() == ("", "m.2", ["m.1"])
    assert stage.deployment.busy
    stage.greets("m.2").builds("m.2").attaches("m.2")
    stage.deployment.switch(stage.now)
    assert stage.standing() == ("m.2", "", ["m.1"])
    stage.exit("m.1.w1", "m.1.w2")
    assert (stage.standing(), stage.deployment.busy) == (("m.2", "", []), False)


def test_what_was_lost_is_loaded_again_when_the_update_fails() -> None:
    stage = updating().pinned(SECOND).exit("m.1.holder", "m.2.holder")
    assert stage.standing()[1] == "m.3"
    assert stage.there["m.3"].source == FIRST
    assert not stage.deployment.failed


@pytest.mark.parametrize("loads", [False, True])
def test_what_is_lost_and_cannot_be_loaded_again_can_be_updated(loads: bool) -> None:
    stage = Stage(Policy.AUTO).frozen()
    stage.exit("m.1.w1", "m.1.w2")
    stage.pinned().exit("m.2.holder", "m.2.w1", "m.2.w2")
    if loads:
        stage.now += 40.0
        stage.deployment.tick(stage.now)
        assert stage.standing()[1] == "m.3"
    assert (stage.deployment.is_lost, stage.deployment.serving) == (True, None)
    stage.deployment.update(SECOND, stage.now)
    label = "m.4" if loads else "m.3"
    stage.loads(label, SECOND)
    stage.deployment.switch(stage.now)
    assert (stage.standing()[:2], stage.deployment.busy, stage.deployment.is_lost) == ((label, ""), False, False)


def test_what_is_lost_is_tried_on_when_an_update_fails() -> None:
    stage = Stage(Policy.AUTO).frozen()
    stage.exit("m.1.w1", "m.1.w2")
    stage.deployment.update(SECOND, stage.now)
    stage.pinned(SECOND).exit("m.3.holder", "m.3.w1", "m.3.w2")
    stage.now += 40.0
    stage.deployment.tick(stage.now)
    assert stage.there[stage.standing()[1]].source == FIRST
    assert not stage.deployment.failed


# --- winding down ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(9))
def test_it_can_be_wound_down_at_every_moment(steps: int) -> None:
    stage = Stage(Policy.AUTO)
    moments: list[Callable[[], object]] = [
        stage.pinned,
        lambda: stage.greets("m.1"),
        lambda: stage.builds("m.1"),
        lambda: stage.attaches("m.1"),
        lambda: stage.exit("m.1.holder"),
        stage.pinned,
        lambda: stage.greets("m.2").builds("m.2"),
        lambda: stage.attaches("m.2"),
    ]
    for moment in moments[:steps]:
        moment()
    stage.did()
    stage.deployment.drain(stage.now)
    for label in list(stage.there):
        stage.all_leave(label)
    assert not any(each.startswith(("Spawn", "Pin", "Enlist")) for each in stage.did())
    assert (stage.standing(), stage.device.promised) == (("", "", []), {})
    assert stage.deployment.next_tick == float("inf")
    assert not stage.deployment.failed
    assert stage.deployment.main.state is GenerationState.GONE


def test_an_update_ends_when_it_is_wound_down() -> None:
    stage = updating().pinned(SECOND)
    stage.deployment.drain(stage.now)
    assert not stage.deployment.updating
    assert stage.standing() == ("", "", ["m.2", "m.1"])


def test_a_renewal_that_is_due_is_not_begun_when_it_is_wound_down() -> None:
    stage = Stage(Policy.OVERLAP, 2 * ONE - 1).frozen().pinned()
    stage.did()
    stage.deployment.drain(stage.now)
    stage.now += 1000.0
    stage.deployment.tick(stage.now)
    assert stage.standing()[1] == ""
    assert not any(each.startswith("Pin") for each in stage.did())


def test_nothing_can_be_told_before_the_start() -> None:
    stage = Stage()
    deployment = Deployment(Device("cpu"), Terms(1, 1.0), Succession(Policy.AUTO), stage.make, stage.wake)
    with pytest.raises(RuntimeError, match="before the start"):
        _ = deployment.main
