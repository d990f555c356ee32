"""Scripted lives of a deployment: which generation loads, serves and leaves, and when."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Callable

import pytest

from weightd_daemon.config.model import ReplacementPolicy
from weightd_daemon.generations.actions import AddSlot, DeleteFiles, Kill, RemoveSlot, Role, Send, Spawn, TakeSnapshot
from weightd_daemon.generations.base import GenerationSetup
from weightd_daemon.generations.restarts import MAX_FAILED_STARTS
from weightd_daemon.generations.shared_weights import Generation
from weightd_daemon.generations.spec import GenerationSpec, ModelSource
from weightd_daemon.models.deployment import Deployment
from weightd_daemon.models.deployment_state import RolloutPolicy
from weightd_daemon.models.placement import DeviceBudget, Placement, ResourceRequest
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.platform.memory import MIB
from weightd_daemon.processes.events import Snapshot
from weightd_protocol.messages.worker import Attached, Built, Hello, ProcessFailed
from weightd_protocol.messages.worker_common import DeviceMemory
from weightd_protocol.version import VERSION

from .fakehost import ATTACHED, CARD, SHA, X

FIRST, SECOND = ModelSource("/m.onnx"), ModelSource("/m2.onnx", number=2)
WEIGHTS, EACH = 100 * MIB, 10 * MIB
ONE = 102 * MIB + 3 * EACH
FOREVER = float("inf")


class DeploymentHarness:
    """A deployment of two workers, and the children's side of the talk."""

    def __init__(
        self,
        policy: ReplacementPolicy = ReplacementPolicy.AUTO,
        capacity: int | None = None,
        *,
        frozen: bool = False,
        fall_back: bool = False,
        device: DeviceBudget | None = None,
        first: int = 1,
    ) -> None:
        self.now = 1000.0
        self.device = device or DeviceBudget("ascend:0", capacity)
        self.numbers = itertools.count(first)
        self.woken = 0
        self.there: dict[str, Generation] = {}
        terms = GenerationSpec(2, 500.0, can_outlive_holder=frozen)
        self.deployment = Deployment(self.device, terms, RolloutPolicy(policy, fall_back, EACH), self.make, self.wake)
        self.deployment.start(FIRST)

    def make(self, device: Placement, source: ModelSource, terms: GenerationSpec) -> Generation:
        number = next(self.numbers)
        self.there[f"m.{number}"] = Generation(GenerationSetup(f"m.{number}", terms, device.name, source, number))
        return self.there[f"m.{number}"]

    def wake(self) -> None:
        self.woken += 1

    def did(self) -> list[str]:
        """What was wanted since the last time, in words."""
        words: list[str] = []
        for generation, action in self.deployment.take_actions():
            match action:
                case TakeSnapshot() | DeleteFiles():
                    words.append(f"{type(action).__name__} {generation.label}")
                case Send(name, order):
                    words.append(f"{type(order).__name__} {name}")
                case Spawn(name, _) | Kill(name) | AddSlot(name) | RemoveSlot(name):
                    words.append(f"{type(action).__name__} {name}")
        return words

    def passed_on(self) -> list[str]:
        """Who was to take requests, or none any more, since the last time."""
        return [each for each in self.did() if each.startswith(("RemoveSlot", "AddSlot"))]

    @property
    def serving(self) -> str:
        return self.deployment.serving.label if self.deployment.serving else ""

    @property
    def coming(self) -> str:
        return self.deployment.loading.label if self.deployment.loading else ""

    @property
    def standing(self) -> tuple[str, str, list[str]]:
        """Who serves, who comes and who leaves."""
        return self.serving, self.coming, [each.label for each in self.deployment.draining]

    def pinned(self, source: ModelSource = FIRST) -> DeploymentHarness:
        self.deployment.on_snapshot_taken(source, Snapshot("", "", SHA, WEIGHTS))
        return self.settled()

    def greets(self, label: str) -> DeploymentHarness:
        for name in list(self.there[label].children):
            self.there[label].on_message(name, Hello(name, SHA, {"weightd": VERSION}, CARD), self.now)
        return self.settled()

    def takes_over(self) -> None:
        self.deployment.take_over(self.now)
        self.deployment.reconcile(self.now)

    def builds(self, label: str, device: DeviceMemory | None = None) -> DeploymentHarness:
        """Everybody says hello, and the holder builds."""
        self.greets(label)
        handle = "/store" if self.there[label].spec.is_sharing else ""
        built = Built(handle, (X,), (X,), (), "canary", 1, device=device)
        self.there[label].on_message(f"{label}.holder", built, self.now)
        return self.settled()

    def cannot(self, label: str, cause: str, *, no_room: bool = False) -> DeploymentHarness:
        """Everybody says hello, and the holder cannot build."""
        self.greets(label)
        self.there[label].on_message(f"{label}.holder", ProcessFailed(cause, is_out_of_memory=no_room), self.now)
        return self.settled()

    def attaches(self, *names: str) -> DeploymentHarness:
        for name in names:
            self.there[name.rpartition(".")[0]].on_message(name, ATTACHED, self.now)
            self.settled()
        return self

    def loads(self, label: str, source: ModelSource = FIRST) -> DeploymentHarness:
        self.pinned(source).builds(label)
        return self.attaches(*(each.name for each in self.there[label].children.values() if each.role is Role.WORKER))

    def exit(self, *names: str) -> DeploymentHarness:
        for name in names:
            self.there[name.rpartition(".")[0]].on_exit(name, ExitCause(-signal.SIGSEGV), self.now)
            self.settled()
        return self

    def all_leave(self, label: str) -> DeploymentHarness:
        names = list(self.there[label].children)
        return self.exit(*names[1:], *names[:1])

    def is_lost(self, label: str) -> DeploymentHarness:
        """All processes end, the holder first."""
        return self.exit(*list(self.there[label].children))

    def settled(self) -> DeploymentHarness:
        self.deployment.reconcile(self.now)
        return self

    def tick_when_due(self) -> DeploymentHarness:
        self.now = max(self.now, self.deployment.next_tick_at)
        self.deployment.tick(self.now)
        return self.settled()


def frozen(policy: ReplacementPolicy = ReplacementPolicy.AUTO, capacity: int | None = None) -> DeploymentHarness:
    """One that serves and has lost its holder."""
    life = DeploymentHarness(policy, capacity, frozen=True).loads("m.1")
    life.did()
    return life.exit("m.1.holder")


def updating(policy: ReplacementPolicy = ReplacementPolicy.AUTO, capacity: int | None = None) -> DeploymentHarness:
    """One that serves, and another source that is to take over."""
    life = DeploymentHarness(policy, capacity).loads("m.1")
    life.deployment.update(SECOND, life.now)
    life.did()
    return life


# --- the first one --------------------------------------------------------------------------------------------------


def test_a_first_holder_that_is_killed_is_tried_again_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    life = DeploymentHarness()
    for label in ("m.1", "m.2", "m.3"):
        assert (life.coming, life.deployment.has_failed) == (label, False)
        life.pinned().is_lost(label)
        assert life.deployment.cause == f"{label}.holder: killed by SIGSEGV"
        if label != "m.3":
            assert life.deployment.is_busy
            life.tick_when_due()
    assert (life.deployment.has_failed, life.deployment.next_tick_at) == (True, FOREVER)
    # Each is told once. A person is needed once nothing else is tried.
    told = [(each.levelname, each.getMessage()) for each in caplog.records if "failed" in each.getMessage()]
    assert told == [
        ("WARNING", "m.1 failed: m.1.holder: killed by SIGSEGV"),
        ("WARNING", "m.2 failed: m.2.holder: killed by SIGSEGV"),
        (
            "ERROR",
            "m.3 failed: m.3.holder: killed by SIGSEGV; no further attempt on ascend:0 before a reload or an update",
        ),
    ]


def test_the_first_one_serves_as_soon_as_one_worker_is_ready() -> None:
    life = DeploymentHarness()
    assert life.did() == ["TakeSnapshot m.1"]
    # What becomes of another source is not its concern.
    life.pinned(SECOND).deployment.on_snapshot_failed(SECOND, "no such file", life.now)
    life.settled()
    assert life.did() == []
    life.pinned().builds("m.1")
    assert life.standing == ("", "m.1", [])
    life.did()
    for worker in ("m.1.w1", "m.1.w2"):
        life.attaches(worker)
        assert life.standing == ("m.1", "", [])
        assert life.passed_on() == [f"AddSlot {worker}"]


def test_it_falls_back_to_private_weights_once() -> None:
    life = DeploymentHarness(fall_back=True).pinned().cannot("m.1", "no sharing")
    assert (life.standing, life.deployment.has_failed) == (("", "m.2", ["m.1"]), False)
    life.pinned()
    assert life.device.reserved["m.2"] == ResourceRequest(WEIGHTS, 2, 2, 3, EACH)
    assert not life.there["m.2"].spec.is_sharing
    life.cannot("m.2", "no memory")
    assert (life.deployment.has_failed, life.deployment.cause) == (True, "m.2.holder: no memory")


@pytest.mark.parametrize("fall_back", [False, True])
def test_a_holder_that_finds_no_room_is_tried_again_for_a_while(fall_back: bool) -> None:
    """What an earlier process had comes free late; copies in each process would need more."""
    life = DeploymentHarness(fall_back=fall_back)
    end, label = life.now + life.deployment.spec.memory_timeout_s, ""
    while not life.deployment.has_failed:
        label = life.tick_when_due().coming if life.coming == "" else life.coming
        life.pinned().cannot(label, "ret:207001", no_room=True)
        assert life.there[label].spec.is_sharing
        life.all_leave(label)
    assert end <= life.now < end + 3.0
    assert life.deployment.cause == f"{label}.holder: ret:207001"


# --- room -----------------------------------------------------------------------------------------------------------


def test_what_it_learns_counts_for_the_next_one_too() -> None:
    life = DeploymentHarness(frozen=True).pinned().builds("m.1", DeviceMemory(1000 * MIB, 500 * MIB))
    memory, generation = DeviceMemory(1000 * MIB, 470 * MIB), life.there["m.1"]
    generation.on_message("m.1.w1", Attached("canary", 1, device=memory), life.now)
    life.deployment.admission.on_device_memory(generation, memory)
    life.deployment.admission.on_device_memory(generation, None)
    assert (life.device.free_bytes, life.device.reserved["m.1"].process_bytes) == (470 * MIB, 30 * MIB)
    life.settled().attaches("m.1.w2").exit("m.1.holder").pinned()
    assert life.device.reserved["m.2"].process_bytes == 30 * MIB


def waiting() -> tuple[DeploymentHarness, DeploymentHarness]:
    """One that serves and will leave, and one of another model that waits for its room."""
    leaving = DeploymentHarness(capacity=ONE).loads("m.1")
    leaving.deployment.mark_leaving()
    return leaving, DeploymentHarness(device=leaving.device, first=2).pinned()


def leaves(life: DeploymentHarness) -> None:
    life.deployment.drain(life.now)
    life.settled()
    life.all_leave("m.1")


def test_it_waits_for_the_room_of_who_will_leave_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightd")
    leaving, life = waiting()
    for _ in range(3):
        # Until then nobody looks.
        assert (life.woken, life.deployment.next_tick_at) == (0, FOREVER)
        life.settled()
    leaving.deployment.drain(leaving.now)
    leaving.settled()
    leaving.exit("m.1.w1", "m.1.w2")
    assert (life.woken, list(life.device.reserved)) == (0, ["m.1"])
    leaving.exit("m.1.holder")
    assert (life.woken, life.deployment.next_tick_at, life.device.leaving) == (1, 0.0, set())
    life.deployment.tick(life.now)
    life.settled()
    assert (list(life.device.reserved), life.coming) == (["m.2"], "m.2")
    assert life.now < life.deployment.next_tick_at < FOREVER
    assert caplog.messages.count("m.2 waits for the memory of m.1") == 1
    leaving.device.release("m.1")
    assert life.woken == 1


def test_who_comes_too_late_for_what_was_released_is_refused() -> None:
    leaving, life = waiting()
    other = DeploymentHarness(device=leaving.device, first=3).pinned()
    leaves(leaving)
    for each in (life, other):
        assert each.deployment.next_tick_at == 0.0
        each.deployment.tick(each.now)
        each.settled()
    assert (list(life.device.reserved), other.deployment.has_failed) == (["m.2"], True)
    assert "m.2 has 132 MiB" in other.deployment.cause


@pytest.mark.parametrize(("ends", "woken"), [("drained", 0), ("no snapshot", 0), ("drained when it was told", 1)])
def test_one_that_is_given_up_while_it_waits_for_room_is_not_told_and_not_due_for_ever(ends: str, woken: int) -> None:
    leaving, life = waiting()
    if woken:
        leaves(leaving)
    if ends == "no snapshot":
        life.deployment.on_snapshot_failed(FIRST, "gone", life.now)
        life.settled()
    else:
        life.deployment.drain(life.now)
        life.settled()
    if not woken:
        leaves(leaving)
    assert (life.woken, life.deployment.next_tick_at) == (woken, FOREVER)


def test_it_does_not_wait_for_room_that_would_not_do() -> None:
    leaving = DeploymentHarness(capacity=ONE).loads("m.1")
    leaving.deployment.mark_leaving()
    leaving.device.capacity_bytes = ONE - 1
    assert DeploymentHarness(device=leaving.device, first=2).pinned().deployment.has_failed


# --- renewal --------------------------------------------------------------------------------------------------------


def test_a_frozen_one_is_renewed_beside_it_and_left_when_the_next_is_complete() -> None:
    life = frozen(ReplacementPolicy.OVERLAP)
    # The same bytes: nobody has asked for others.
    assert (life.did(), life.there["m.2"].source) == (["TakeSnapshot m.2"], FIRST)
    life.pinned().builds("m.2").attaches("m.2.w1")
    assert (life.standing, life.passed_on()) == (("m.1", "m.2", []), [])
    life.attaches("m.2.w2")
    assert life.standing == ("m.2", "", ["m.1"])
    assert life.passed_on() == ["RemoveSlot m.1.w1", "RemoveSlot m.1.w2", "AddSlot m.2.w1", "AddSlot m.2.w2"]
    life.all_leave("m.1")
    assert (life.did(), list(life.device.reserved)) == (["DeleteFiles m.1"], ["m.2"])


def test_replacing_waits_until_the_old_one_is_gone() -> None:
    life = frozen(ReplacementPolicy.REPLACE).pinned()
    assert life.standing == ("", "m.2", ["m.1"])
    assert life.did() == ["TakeSnapshot m.2", "RemoveSlot m.1.w1", "Stop m.1.w1", "RemoveSlot m.1.w2", "Stop m.1.w2"]
    assert life.exit("m.1.w1").did() == []
    assert life.exit("m.1.w2").did() == ["DeleteFiles m.1", "Spawn m.2.holder", "Spawn m.2.w1", "Spawn m.2.w2"]
    # Nobody else serves: its first worker does.
    assert life.builds("m.2").attaches("m.2.w1").standing == ("m.2", "", [])


@pytest.mark.parametrize(("capacity", "leaves"), [(2 * ONE, False), (2 * ONE - 1, True)])
def test_auto_replaces_only_where_there_is_no_room_beside(capacity: int, leaves: bool) -> None:
    life = frozen(ReplacementPolicy.AUTO, capacity).pinned()
    assert life.standing == (("", "m.2", ["m.1"]) if leaves else ("m.1", "m.2", []))
    assert ("m.2" in life.device.reserved) is not leaves
    if leaves:
        assert list(life.all_leave("m.1").device.reserved) == ["m.2"]


@pytest.mark.parametrize("policy", [ReplacementPolicy.AUTO, ReplacementPolicy.REPLACE])
def test_nobody_leaves_for_one_that_would_have_no_room_even_alone(policy: ReplacementPolicy) -> None:
    life = frozen(policy, ONE)
    life.device.capacity_bytes = ONE - 1
    assert life.pinned().serving == "m.1"
    assert "does not have enough memory: m.2 needs" in life.deployment.cause
    assert "m.1 has" not in life.deployment.cause


def test_overlapping_without_room_it_goes_on_with_what_is_left_and_tries_later_and_later_for_ever() -> None:
    life = frozen(ReplacementPolicy.OVERLAP, 2 * ONE - 1)
    waits: list[float] = []
    for number in range(2, 2 + MAX_FAILED_STARTS + 1):
        assert life.standing == ("m.1", f"m.{number}", [])
        life.pinned()
        assert (life.standing, life.deployment.is_busy, life.deployment.has_failed) == (("m.1", "", []), True, False)
        waits.append(life.deployment.next_tick_at - life.now)
        life.tick_when_due()
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert "m.1 has 132 MiB" in life.deployment.cause


def test_one_that_is_invalid_is_followed_at_once_and_later_if_it_did_not_live_long() -> None:
    life = DeploymentHarness().loads("m.1")
    life.now += 100.0
    assert life.exit("m.1.holder").standing == ("", "m.2", ["m.1"])
    life.is_lost("m.1").loads("m.2").exit("m.2.holder")
    assert life.coming == "m.3"
    life.is_lost("m.2").loads("m.3").exit("m.3.holder")
    assert life.coming == ""
    assert life.deployment.next_tick_at == pytest.approx(life.now + 0.1)
    assert life.tick_when_due().coming == "m.4"


# --- update ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(ReplacementPolicy))
def test_an_update_is_loaded_beside_and_waits_for_the_switch(policy: ReplacementPolicy) -> None:
    life = updating(policy).pinned(SECOND).builds("m.2").attaches("m.2.w1")
    assert (life.deployment.is_update_ready, life.deployment.is_updating) == (False, True)
    life.attaches("m.2.w2")
    assert (life.deployment.is_update_ready, life.deployment.is_updating) == (True, True)
    assert (life.standing, life.passed_on()) == (("m.1", "m.2", []), [])
    life.takes_over()
    assert (life.deployment.is_update_ready, life.deployment.is_updating) == (False, False)
    assert life.standing == ("m.2", "", ["m.1"])
    assert life.passed_on() == ["RemoveSlot m.1.w1", "RemoveSlot m.1.w2", "AddSlot m.2.w1", "AddSlot m.2.w2"]


@pytest.mark.parametrize("policy", list(ReplacementPolicy))
def test_nobody_leaves_for_an_update_that_has_no_room(policy: ReplacementPolicy) -> None:
    life = updating(policy, 2 * ONE - 1).pinned(SECOND)
    assert (life.standing, life.deployment.is_updating, life.deployment.is_busy) == (("m.1", "", []), False, False)
    assert life.deployment.cause.startswith("ascend:0 does not have enough memory: m.2 needs 132 MiB")
    assert not life.deployment.has_failed


def test_an_update_that_not_every_worker_can_load_does_not_take_over() -> None:
    life = updating().pinned(SECOND).builds("m.2").attaches("m.2.w1").exit("m.2.w2")
    for name in ("m.2.w3", "m.2.w4"):
        life.tick_when_due().exit(name)
    assert life.standing == ("m.1", "", ["m.2"])
    assert life.deployment.cause.startswith("not every worker could load the model: m.2.w4: killed by SIGSEGV")


def test_an_update_can_be_abandoned_once_and_is_not_tried_again() -> None:
    life = updating().loads("m.2", SECOND)
    life.deployment.abandon("another device failed", life.now)
    life.settled()
    life.deployment.abandon("twice", life.now)
    life.settled()
    life.takes_over()
    assert (life.standing, life.passed_on()) == (("m.1", "", ["m.2"]), ["RemoveSlot m.2.w1", "RemoveSlot m.2.w2"])
    assert life.deployment.cause == "another device failed"
    life.is_lost("m.2")
    assert (life.standing, life.deployment.is_busy, life.deployment.has_failed) == (("m.1", "", []), False, False)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_lost_during_an_update_is_loaded_again_only_if_that_fails(fails: bool) -> None:
    life = updating().pinned(SECOND).exit("m.1.holder")
    assert (life.standing, life.deployment.is_busy) == (("", "m.2", ["m.1"]), True)
    if fails:
        life.exit("m.2.holder")
        assert life.there[life.coming].source == FIRST
    else:
        life.builds("m.2").attaches("m.2.w1", "m.2.w2").takes_over()
        life.is_lost("m.1")
        assert (life.standing, life.deployment.is_busy) == (("m.2", "", []), False)


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_lost_can_be_updated_and_is_tried_on_if_that_fails(loads: bool, fails: bool) -> None:
    life = DeploymentHarness().loads("m.1").is_lost("m.1").pinned().is_lost("m.2")
    label = "m.4" if loads else "m.3"
    if loads:
        life.now += 40.0
        life.deployment.tick(life.now)
        life.settled()
        assert life.coming == "m.3"
    assert (life.deployment.is_lost, life.serving) == (True, "")
    life.deployment.update(SECOND, life.now)
    if fails:
        life.pinned(SECOND).is_lost(label)
        life.now += 40.0
        life.deployment.tick(life.now)
        life.settled()
        assert life.there[life.coming].source == FIRST
    else:
        life.loads(label, SECOND).takes_over()
        assert (life.standing[:2], life.deployment.is_busy, life.deployment.is_lost) == ((label, ""), False, False)


@pytest.mark.parametrize("steps", range(8))
def test_it_can_be_wound_down_at_every_moment(steps: int) -> None:
    life = DeploymentHarness(frozen=True)
    moments: list[Callable[[], object]] = [
        life.pinned,
        lambda: life.builds("m.1"),
        lambda: life.attaches("m.1.w1", "m.1.w2"),
        lambda: life.exit("m.1.holder"),
        life.pinned,
        lambda: life.builds("m.2"),
        lambda: life.attaches("m.2.w1", "m.2.w2"),
    ]
    for moment in moments[:steps]:
        moment()
    life.did()
    life.deployment.drain(life.now)
    life.settled()
    assert life.device.leaving == {each.label for each in life.deployment.generations}
    for label in list(life.there):
        life.all_leave(label)
    assert not any(each.startswith(("Spawn", "TakeSnapshot", "AddSlot")) for each in life.did())
    assert (life.standing, life.device.reserved) == (("", "", []), {})
    assert (life.deployment.next_tick_at, life.deployment.has_failed) == (FOREVER, False)
