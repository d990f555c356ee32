"""Scripted tests of a deployment: which generation loads, serves and drains, and when."""

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
from weightd_daemon.models.admission import Admission
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
WEIGHTS, PROCESS_BYTES = 100 * MIB, 10 * MIB
GENERATION_BYTES = 102 * MIB + 3 * PROCESS_BYTES
FOREVER = float("inf")


NO_ATTEMPT = "no further attempt on ascend:0 before its files change, a retry, a reload or an update"


class DeploymentHarness:
    """Deployment with two workers; the test sends the messages of their processes."""

    def __init__(
        self,
        policy: ReplacementPolicy = ReplacementPolicy.AUTO,
        capacity: int | None = None,
        *,
        frozen_deployment: bool = False,
        fall_back: bool = False,
        device: DeviceBudget | None = None,
        first: int = 1,
    ) -> None:
        self.now = 1000.0
        self.device = device or DeviceBudget("ascend:0", capacity)
        self.numbers = itertools.count(first)
        self.wake_count = 0
        self.generations: dict[str, Generation] = {}
        terms = GenerationSpec(2, 500.0, can_outlive_holder=frozen_deployment)
        rollout_policy = RolloutPolicy(policy, fall_back, PROCESS_BYTES)
        admission = Admission(self.device, rollout_policy, self.wake)
        self.deployment = Deployment(self.device, terms, rollout_policy, self.make, admission)
        self.deployment.load(FIRST)

    def make(self, device: Placement, source: ModelSource, terms: GenerationSpec) -> Generation:
        number = next(self.numbers)
        self.generations[f"m.{number}"] = Generation(GenerationSetup(f"m.{number}", terms, device.name, source, number))
        return self.generations[f"m.{number}"]

    def wake(self) -> None:
        self.wake_count += 1

    def take_actions(self) -> list[str]:
        """Return descriptions of the actions since the last call."""
        actions: list[str] = []
        for generation, action in self.deployment.take_actions():
            match action:
                case TakeSnapshot() | DeleteFiles():
                    actions.append(f"{type(action).__name__} {generation.label}")
                case Send(name, order):
                    actions.append(f"{type(order).__name__} {name}")
                case Spawn(name, _) | Kill(name) | AddSlot(name) | RemoveSlot(name):
                    actions.append(f"{type(action).__name__} {name}")
        return actions

    def slot_changes(self) -> list[str]:
        """Return the added and removed slots since the last call."""
        return [each for each in self.take_actions() if each.startswith(("RemoveSlot", "AddSlot"))]

    @property
    def serving(self) -> str:
        return self.deployment.serving.label if self.deployment.serving else ""

    @property
    def loading(self) -> str:
        return self.deployment.loading.label if self.deployment.loading else ""

    @property
    def generation_labels(self) -> tuple[str, str, list[str]]:
        """Return the labels of the serving, loading and draining generations."""
        return self.serving, self.loading, [each.label for each in self.deployment.draining]

    def snapshot_taken(self, source: ModelSource = FIRST) -> DeploymentHarness:
        self.deployment.on_snapshot_taken(source, Snapshot("", "", SHA, WEIGHTS))
        return self.reconcile()

    def connect(self, label: str) -> DeploymentHarness:
        for name in list(self.generations[label].children):
            self.generations[label].on_message(name, Hello(name, SHA, {"weightd": VERSION}, CARD), self.now)
        return self.reconcile()

    def take_over(self) -> None:
        self.deployment.take_over(self.now)
        self.deployment.reconcile(self.now)

    def builds(self, label: str, device: DeviceMemory | None = None) -> DeploymentHarness:
        """Connect all processes, and let the holder build."""
        self.connect(label)
        handle = "/store" if self.generations[label].spec.is_sharing else ""
        built = Built(handle, (X,), (X,), (), "digest", 1, device=device)
        self.generations[label].on_message(f"{label}.holder", built, self.now)
        return self.reconcile()

    def fail_build(self, label: str, cause: str, *, no_room: bool = False) -> DeploymentHarness:
        """Connect all processes, and let the build of the holder fail."""
        self.connect(label)
        self.generations[label].on_message(f"{label}.holder", ProcessFailed(cause, is_out_of_memory=no_room), self.now)
        return self.reconcile()

    def attaches(self, *names: str) -> DeploymentHarness:
        for name in names:
            self.generations[name.rpartition(".")[0]].on_message(name, ATTACHED, self.now)
            self.reconcile()
        return self

    def loads(self, label: str, source: ModelSource = FIRST) -> DeploymentHarness:
        self.snapshot_taken(source).builds(label)
        return self.attaches(
            *(each.name for each in self.generations[label].children.values() if each.role is Role.WORKER)
        )

    def exit(self, *names: str) -> DeploymentHarness:
        for name in names:
            self.generations[name.rpartition(".")[0]].on_exit(name, ExitCause(-signal.SIGSEGV), self.now)
            self.reconcile()
        return self

    def exit_all(self, label: str) -> DeploymentHarness:
        names = list(self.generations[label].children)
        return self.exit(*names[1:], *names[:1])

    def lose_holder_first(self, label: str) -> DeploymentHarness:
        """Let all processes exit, the holder first."""
        return self.exit(*list(self.generations[label].children))

    def reconcile(self) -> DeploymentHarness:
        self.deployment.reconcile(self.now)
        return self

    def tick_when_due(self) -> DeploymentHarness:
        self.now = max(self.now, self.deployment.next_tick_at)
        self.deployment.tick(self.now)
        return self.reconcile()


def frozen_deployment(
    policy: ReplacementPolicy = ReplacementPolicy.AUTO, capacity: int | None = None
) -> DeploymentHarness:
    """Return a deployment that serves and has lost its holder."""
    harness = DeploymentHarness(policy, capacity, frozen_deployment=True).loads("m.1")
    harness.take_actions()
    return harness.exit("m.1.holder")


def updating_deployment(
    policy: ReplacementPolicy = ReplacementPolicy.AUTO, capacity: int | None = None
) -> DeploymentHarness:
    """Return a serving deployment with an update under way."""
    harness = DeploymentHarness(policy, capacity).loads("m.1")
    harness.deployment.update(SECOND, harness.now)
    harness.take_actions()
    return harness


# --- first generation -----------------------------------------------------------------------------------------------


def test_killed_first_holder_is_retried_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    harness = DeploymentHarness()
    for label in ("m.1", "m.2", "m.3"):
        assert (harness.loading, harness.deployment.has_failed) == (label, False)
        harness.snapshot_taken().lose_holder_first(label)
        assert harness.deployment.cause == f"{label}.holder: killed by SIGSEGV"
        if label != "m.3":
            assert harness.deployment.is_busy
            harness.tick_when_due()
    assert (harness.deployment.has_failed, harness.deployment.next_tick_at) == (True, FOREVER)
    # Each failure is logged once. Only the last one is an error, because the deployment makes no further attempt.
    failures = [(each.levelname, each.getMessage()) for each in caplog.records if "failed" in each.getMessage()]
    assert failures == [
        ("WARNING", "m.1 failed: m.1.holder: killed by SIGSEGV"),
        ("WARNING", "m.2 failed: m.2.holder: killed by SIGSEGV"),
        (
            "ERROR",
            f"m.3 failed: m.3.holder: killed by SIGSEGV; {NO_ATTEMPT}",
        ),
    ]


def test_first_generation_serves_with_one_worker() -> None:
    harness = DeploymentHarness()
    assert harness.take_actions() == ["TakeSnapshot m.1"]
    # The deployment ignores the snapshot of another source.
    harness.snapshot_taken(SECOND).deployment.on_snapshot_failed(SECOND, "no such file", harness.now)
    harness.reconcile()
    assert harness.take_actions() == []
    harness.snapshot_taken().builds("m.1")
    assert harness.generation_labels == ("", "m.1", [])
    harness.take_actions()
    for worker in ("m.1.w1", "m.1.w2"):
        harness.attaches(worker)
        assert harness.generation_labels == ("m.1", "", [])
        assert harness.slot_changes() == [f"AddSlot {worker}"]


def test_falls_back_to_private_weights_once() -> None:
    harness = DeploymentHarness(fall_back=True).snapshot_taken().fail_build("m.1", "no sharing")
    assert (harness.generation_labels, harness.deployment.has_failed) == (("", "m.2", ["m.1"]), False)
    harness.snapshot_taken()
    assert harness.device.reserved["m.2"] == ResourceRequest(WEIGHTS, 2, 2, 3, PROCESS_BYTES)
    assert not harness.generations["m.2"].spec.is_sharing
    harness.fail_build("m.2", "no memory")
    assert (harness.deployment.has_failed, harness.deployment.cause) == (True, "m.2.holder: no memory")


@pytest.mark.parametrize("fall_back", [False, True])
def test_holder_without_memory_is_retried_until_timeout(fall_back: bool) -> None:
    """Processes that exit free their memory late. Private copies would need even more memory."""
    harness = DeploymentHarness(fall_back=fall_back)
    end, label = harness.now + harness.deployment.spec.memory_timeout_s, ""
    while not harness.deployment.has_failed:
        label = harness.tick_when_due().loading if harness.loading == "" else harness.loading
        harness.snapshot_taken().fail_build(label, "ret:207001", no_room=True)
        assert harness.generations[label].spec.is_sharing
        harness.exit_all(label)
    assert end <= harness.now < end + 3.0
    assert harness.deployment.cause == f"{label}.holder: ret:207001"


# --- memory ---------------------------------------------------------------------------------------------------------


def test_measured_process_memory_applies_to_next_generation() -> None:
    harness = (
        DeploymentHarness(frozen_deployment=True).snapshot_taken().builds("m.1", DeviceMemory(1000 * MIB, 500 * MIB))
    )
    memory, generation = DeviceMemory(1000 * MIB, 470 * MIB), harness.generations["m.1"]
    generation.on_message("m.1.w1", Attached("digest", 1, device=memory), harness.now)
    harness.deployment.admission.on_device_memory(generation, memory)
    harness.deployment.admission.on_device_memory(generation, None)
    assert (harness.device.free_bytes, harness.device.reserved["m.1"].process_bytes) == (470 * MIB, 30 * MIB)
    harness.reconcile().attaches("m.1.w2").exit("m.1.holder").snapshot_taken()
    assert harness.device.reserved["m.2"].process_bytes == 30 * MIB


def waiting() -> tuple[DeploymentHarness, DeploymentHarness]:
    """Return a serving deployment that will drain, and a deployment of another model that waits for its memory."""
    leaving = DeploymentHarness(capacity=GENERATION_BYTES).loads("m.1")
    leaving.deployment.mark_leaving()
    return leaving, DeploymentHarness(device=leaving.device, first=2).snapshot_taken()


def leaves(harness: DeploymentHarness) -> None:
    harness.deployment.drain(harness.now)
    harness.reconcile()
    harness.exit_all("m.1")


def test_waits_for_memory_of_draining_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightd")
    leaving, harness = waiting()
    for _ in range(3):
        # The deployment does not poll; the release wakes it.
        assert (harness.wake_count, harness.deployment.next_tick_at) == (0, FOREVER)
        harness.reconcile()
    leaving.deployment.drain(leaving.now)
    leaving.reconcile()
    leaving.exit("m.1.w1", "m.1.w2")
    assert (harness.wake_count, list(harness.device.reserved)) == (0, ["m.1"])
    leaving.exit("m.1.holder")
    assert (harness.wake_count, harness.deployment.next_tick_at, harness.device.leaving) == (1, 0.0, set())
    harness.deployment.tick(harness.now)
    harness.reconcile()
    assert (list(harness.device.reserved), harness.loading) == (["m.2"], "m.2")
    assert harness.now < harness.deployment.next_tick_at < FOREVER
    assert caplog.messages.count("m.2 waits for the memory of m.1") == 1
    leaving.device.release("m.1")
    assert harness.wake_count == 1


def test_waits_for_memory_of_failed_generation() -> None:
    failing = DeploymentHarness(capacity=GENERATION_BYTES).snapshot_taken().fail_build("m.1", "broken")
    harness = DeploymentHarness(device=failing.device, first=2).snapshot_taken()
    assert (harness.deployment.has_failed, harness.loading) == (False, "m.2")
    failing.exit_all("m.1")
    assert (harness.wake_count, list(harness.device.reserved)) == (1, [])


def test_late_deployment_is_rejected_after_release() -> None:
    leaving, harness = waiting()
    other = DeploymentHarness(device=leaving.device, first=3).snapshot_taken()
    leaves(leaving)
    for each in (harness, other):
        assert each.deployment.next_tick_at == 0.0
        each.deployment.tick(each.now)
        each.reconcile()
    assert (list(harness.device.reserved), other.deployment.has_failed) == (["m.2"], True)
    assert "m.2 has 132 MiB" in other.deployment.cause


@pytest.mark.parametrize(("ends", "wake_count"), [("drained", 0), ("no snapshot", 0), ("drained after the release", 1)])
def test_drained_waiting_deployment_is_not_woken(ends: str, wake_count: int) -> None:
    leaving, harness = waiting()
    if wake_count:
        leaves(leaving)
    if ends == "no snapshot":
        harness.deployment.on_snapshot_failed(FIRST, "gone", harness.now)
        harness.reconcile()
    else:
        harness.deployment.drain(harness.now)
        harness.reconcile()
    if not wake_count:
        leaves(leaving)
    assert (harness.wake_count, harness.deployment.next_tick_at) == (wake_count, FOREVER)


def test_does_not_wait_for_insufficient_memory() -> None:
    leaving = DeploymentHarness(capacity=GENERATION_BYTES).loads("m.1")
    leaving.deployment.mark_leaving()
    leaving.device.capacity_bytes = GENERATION_BYTES - 1
    assert DeploymentHarness(device=leaving.device, first=2).snapshot_taken().deployment.has_failed


# --- renewal --------------------------------------------------------------------------------------------------------


def test_frozen_generation_is_renewed_and_drained() -> None:
    harness = frozen_deployment(ReplacementPolicy.OVERLAP)
    # The renewal loads the same source again.
    assert (harness.take_actions(), harness.generations["m.2"].source) == (["TakeSnapshot m.2"], FIRST)
    harness.snapshot_taken().builds("m.2").attaches("m.2.w1")
    assert (harness.generation_labels, harness.slot_changes()) == (("m.1", "m.2", []), [])
    harness.attaches("m.2.w2")
    assert harness.generation_labels == ("m.2", "", ["m.1"])
    assert harness.slot_changes() == ["RemoveSlot m.1.w1", "RemoveSlot m.1.w2", "AddSlot m.2.w1", "AddSlot m.2.w2"]
    harness.exit_all("m.1")
    assert (harness.take_actions(), list(harness.device.reserved)) == (["DeleteFiles m.1"], ["m.2"])


def test_replace_policy_drains_old_generation_first() -> None:
    harness = frozen_deployment(ReplacementPolicy.REPLACE).snapshot_taken()
    assert harness.generation_labels == ("", "m.2", ["m.1"])
    assert harness.take_actions() == [
        "TakeSnapshot m.2",
        "RemoveSlot m.1.w1",
        "Stop m.1.w1",
        "RemoveSlot m.1.w2",
        "Stop m.1.w2",
    ]
    assert harness.exit("m.1.w1").take_actions() == []
    assert harness.exit("m.1.w2").take_actions() == [
        "DeleteFiles m.1",
        "Spawn m.2.holder",
        "Spawn m.2.w1",
        "Spawn m.2.w2",
    ]
    # No other generation serves, so the first ready worker is enough.
    assert harness.builds("m.2").attaches("m.2.w1").generation_labels == ("m.2", "", [])


@pytest.mark.parametrize(("capacity", "leaves"), [(2 * GENERATION_BYTES, False), (2 * GENERATION_BYTES - 1, True)])
def test_auto_policy_replaces_only_without_memory_for_both(capacity: int, leaves: bool) -> None:
    harness = frozen_deployment(ReplacementPolicy.AUTO, capacity).snapshot_taken()
    assert harness.generation_labels == (("", "m.2", ["m.1"]) if leaves else ("m.1", "m.2", []))
    assert ("m.2" in harness.device.reserved) is not leaves
    if leaves:
        assert list(harness.exit_all("m.1").device.reserved) == ["m.2"]


@pytest.mark.parametrize("policy", [ReplacementPolicy.AUTO, ReplacementPolicy.REPLACE])
def test_serving_generation_stays_if_new_one_cannot_fit(policy: ReplacementPolicy) -> None:
    harness = frozen_deployment(policy, GENERATION_BYTES)
    harness.device.capacity_bytes = GENERATION_BYTES - 1
    assert harness.snapshot_taken().serving == "m.1"
    assert "does not have enough memory: m.2 needs" in harness.deployment.cause
    assert "m.1 has" not in harness.deployment.cause


def test_overlap_policy_retries_with_backoff() -> None:
    harness = frozen_deployment(ReplacementPolicy.OVERLAP, 2 * GENERATION_BYTES - 1)
    waits: list[float] = []
    for number in range(2, 2 + MAX_FAILED_STARTS + 1):
        assert harness.generation_labels == ("m.1", f"m.{number}", [])
        harness.snapshot_taken()
        assert (harness.generation_labels, harness.deployment.is_busy, harness.deployment.has_failed) == (
            ("m.1", "", []),
            True,
            False,
        )
        waits.append(harness.deployment.next_tick_at - harness.now)
        harness.tick_when_due()
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert "m.1 has 132 MiB" in harness.deployment.cause


def test_invalid_generation_is_replaced_with_backoff() -> None:
    harness = DeploymentHarness().loads("m.1")
    harness.now += 100.0
    assert harness.exit("m.1.holder").generation_labels == ("", "m.2", ["m.1"])
    harness.lose_holder_first("m.1").loads("m.2").exit("m.2.holder")
    assert harness.loading == "m.3"
    harness.lose_holder_first("m.2").loads("m.3").exit("m.3.holder")
    assert harness.loading == ""
    assert harness.deployment.next_tick_at == pytest.approx(harness.now + 0.1)
    assert harness.tick_when_due().loading == "m.4"


# --- update ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(ReplacementPolicy))
def test_update_loads_beside_and_waits_for_switch(policy: ReplacementPolicy) -> None:
    harness = updating_deployment(policy).snapshot_taken(SECOND).builds("m.2").attaches("m.2.w1")
    assert (harness.deployment.is_update_ready, harness.deployment.is_updating) == (False, True)
    harness.attaches("m.2.w2")
    assert (harness.deployment.is_update_ready, harness.deployment.is_updating) == (True, True)
    assert (harness.generation_labels, harness.slot_changes()) == (("m.1", "m.2", []), [])
    harness.take_over()
    assert (harness.deployment.is_update_ready, harness.deployment.is_updating) == (False, False)
    assert harness.generation_labels == ("m.2", "", ["m.1"])
    assert harness.slot_changes() == ["RemoveSlot m.1.w1", "RemoveSlot m.1.w2", "AddSlot m.2.w1", "AddSlot m.2.w2"]


@pytest.mark.parametrize("policy", list(ReplacementPolicy))
def test_update_without_memory_keeps_serving_generation(policy: ReplacementPolicy) -> None:
    harness = updating_deployment(policy, 2 * GENERATION_BYTES - 1).snapshot_taken(SECOND)
    assert (harness.generation_labels, harness.deployment.is_updating, harness.deployment.is_busy) == (
        ("m.1", "", []),
        False,
        False,
    )
    assert harness.deployment.cause.startswith("ascend:0 does not have enough memory: m.2 needs 132 MiB")
    assert not harness.deployment.has_failed


def test_update_needs_all_workers() -> None:
    harness = updating_deployment().snapshot_taken(SECOND).builds("m.2").attaches("m.2.w1").exit("m.2.w2")
    for name in ("m.2.w3", "m.2.w4"):
        harness.tick_when_due().exit(name)
    assert harness.generation_labels == ("m.1", "", ["m.2"])
    assert harness.deployment.cause.startswith("not every worker could load the model: m.2.w4: killed by SIGSEGV")


def test_abandoned_update_is_not_retried() -> None:
    harness = updating_deployment().loads("m.2", SECOND)
    harness.deployment.abandon("another device failed", harness.now)
    harness.reconcile()
    harness.deployment.abandon("twice", harness.now)
    harness.reconcile()
    harness.take_over()
    assert (harness.generation_labels, harness.slot_changes()) == (
        ("m.1", "", ["m.2"]),
        ["RemoveSlot m.2.w1", "RemoveSlot m.2.w2"],
    )
    assert harness.deployment.cause == "another device failed"
    harness.lose_holder_first("m.2")
    assert (harness.generation_labels, harness.deployment.is_busy, harness.deployment.has_failed) == (
        ("m.1", "", []),
        False,
        False,
    )


@pytest.mark.parametrize("fails", [False, True])
def test_lost_generation_is_reloaded_only_if_update_fails(fails: bool) -> None:
    harness = updating_deployment().snapshot_taken(SECOND).exit("m.1.holder")
    assert (harness.generation_labels, harness.deployment.is_busy) == (("", "m.2", ["m.1"]), True)
    if fails:
        harness.exit("m.2.holder")
        assert harness.generations[harness.loading].source == FIRST
    else:
        harness.builds("m.2").attaches("m.2.w1", "m.2.w2").take_over()
        harness.lose_holder_first("m.1")
        assert (harness.generation_labels, harness.deployment.is_busy) == (("m.2", "", []), False)


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_lost_deployment_can_be_updated(loads: bool, fails: bool) -> None:
    harness = DeploymentHarness().loads("m.1").lose_holder_first("m.1").snapshot_taken().lose_holder_first("m.2")
    label = "m.4" if loads else "m.3"
    if loads:
        harness.now += 40.0
        harness.deployment.tick(harness.now)
        harness.reconcile()
        assert harness.loading == "m.3"
    assert (harness.deployment.is_lost, harness.serving) == (True, "")
    harness.deployment.update(SECOND, harness.now)
    if fails:
        harness.snapshot_taken(SECOND).lose_holder_first(label)
        harness.now += 40.0
        harness.deployment.tick(harness.now)
        harness.reconcile()
        assert harness.generations[harness.loading].source == FIRST
    else:
        harness.loads(label, SECOND).take_over()
        assert (harness.generation_labels[:2], harness.deployment.is_busy, harness.deployment.is_lost) == (
            (label, ""),
            False,
            False,
        )


@pytest.mark.parametrize("step_count", range(8))
def test_drain_works_at_every_stage(step_count: int) -> None:
    harness = DeploymentHarness(frozen_deployment=True)
    all_steps: list[Callable[[], object]] = [
        harness.snapshot_taken,
        lambda: harness.builds("m.1"),
        lambda: harness.attaches("m.1.w1", "m.1.w2"),
        lambda: harness.exit("m.1.holder"),
        harness.snapshot_taken,
        lambda: harness.builds("m.2"),
        lambda: harness.attaches("m.2.w1", "m.2.w2"),
    ]
    for step in all_steps[:step_count]:
        step()
    harness.take_actions()
    harness.deployment.drain(harness.now)
    harness.reconcile()
    assert harness.device.leaving == {each.label for each in harness.deployment.generations}
    for label in list(harness.generations):
        harness.exit_all(label)
    assert not any(each.startswith(("Spawn", "TakeSnapshot", "AddSlot")) for each in harness.take_actions())
    assert (harness.generation_labels, harness.device.reserved) == (("", "", []), {})
    assert (harness.deployment.next_tick_at, harness.deployment.has_failed) == (FOREVER, False)
