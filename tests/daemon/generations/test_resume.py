"""Tests of a generation across a restart of the daemon: its record, and the generation resumed from it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from weightd_daemon.generations.actions import Action, AddSlot, Kill, RemoveSlot, Role, Spawn
from weightd_daemon.generations.persisted import RECONNECT_TIMEOUT_S, record_generation
from weightd_daemon.generations.shared_weights import ABORT_TIMEOUT_S, Generation
from weightd_daemon.generations.states import GenerationState
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_protocol.messages.worker_common import DeviceMemory, SharingTraits

from .generation_harness import (
    ATTACHED,
    BUILT,
    CARD,
    CPU,
    FOREVER,
    HOLDER,
    PREDICT_TIMEOUT_S,
    SEAL,
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
    stop,
    worker,
)

TIMEOUT_S = RECONNECT_TIMEOUT_S + PREDICT_TIMEOUT_S
KILLED, UNSEEN = ExitCause(-signal.SIGKILL), ExitCause(None, "exited while no daemon was running")


def spawn(name: str) -> Action:
    return Spawn(name, Role.WORKER)


def recorded(harness: GenerationHarness) -> list[str]:
    """Return the names of the recorded processes."""
    written = record_generation(harness.generation, SEAL)
    return [each.name for each in written.children] if written is not None else []


# --- records --------------------------------------------------------------------------------------------------------


NOT_SERVING: dict[str, Callable[[GenerationHarness], object]] = {
    "snapshotting": GenerationHarness.take_actions,
    "spawning": GenerationHarness.spawned,
    "building": GenerationHarness.building,
    "attaching": GenerationHarness.attaching,
    "draining": lambda harness: harness.serving().drain(),
    "failed": lambda harness: harness.serving().fails("why"),
    "invalid": lambda harness: harness.serving().generation.on_store_lost("truncated", harness.now),
}


def ready_workers(generation: Generation) -> list[str]:
    return [name for name in generation.children if generation.processes.is_ready(name)]


@pytest.mark.parametrize("how", NOT_SERVING)
def test_only_serving_generations_are_recorded(how: str) -> None:
    harness = GenerationHarness()
    NOT_SERVING[how](harness)
    assert record_generation(harness.generation, SEAL) is None


def test_record_contains_processes_and_model() -> None:
    harness = GenerationHarness().serving()
    written = record_generation(harness.generation, SEAL)
    assert written is not None
    assert (written.number, written.source, written.device, written.is_sharing) == (7, 3, "ascend:0", True)
    assert (written.sha256, written.built, written.store_fingerprint, written.started_workers) == (SHA, BUILT, SEAL, 2)
    assert (written.attach_state, written.attach_closed_reason) == ("open", "")
    processes = [(each.name, each.role, each.shared_bytes, each.note) for each in written.children]
    workers = [(name, "worker", 4000, "another note") for name in (W1, W2)]
    assert processes == [(HOLDER, "holder", 4096, ""), *workers]
    assert [each.hello for each in written.children] == [each.hello for each in harness.generation.children.values()]


def test_workers_and_replacements_keep_devices() -> None:
    after = GenerationHarness(1, devices=("cpu:0", "cpu:1")).serving().resumed()
    assert [child.device for child in after.generation.children.values()] == ["ascend:0", "cpu:0", "cpu:1"]
    after.reconnected(W1, W2)
    after.exits(W2)
    after.when_due()
    assert after.generation.children[W3].device == "cpu:1"


def test_attaching_and_leaving_workers_are_not_recorded() -> None:
    harness = GenerationHarness().attaching()
    harness.attached(W1)
    # W2 is still attaching, so the next daemon could not know its state.
    assert recorded(harness) == [HOLDER, W1]
    harness.attached(W2)
    harness.leaves(W1)
    assert recorded(harness) == [HOLDER, W2]


@pytest.mark.parametrize(("traits", "sharing"), [(CPU, True), (CARD, True), (CARD, False)])
def test_private_weights_are_resumed_without_holder(traits: SharingTraits, sharing: bool) -> None:
    harness = GenerationHarness(1, traits, is_sharing=sharing).building()
    harness.built(replace(BUILT, handle=""))
    harness.exits(HOLDER, end=ExitCause(0))
    harness.attached(W1)
    written = record_generation(harness.generation, SEAL)
    assert written is not None
    assert (written.is_sharing, [each.name for each in written.children]) == (sharing, [W1])
    assert harness.resumed().reconnected(W1) == [AddSlot(W1)]
    assert (harness.generation.is_complete, harness.generation.attach_control.can_trust_answers(lambda _: False)) == (
        True,
        True,
    )
    assert harness.replaced(W1, by=W2) == [attach(W2, "")]


# --- reconnection ---------------------------------------------------------------------------------------------------


def test_workers_serve_after_reconnect() -> None:
    harness = GenerationHarness().serving().resumed()
    generation = harness.generation
    assert (generation.state, harness.take_actions(), ready_workers(generation)) == (GenerationState.RESUMING, [], [])
    assert (generation.built, generation.sha256, generation.number) == (BUILT, SHA, 7)
    assert (generation.next_tick_at, generation.progress) == (harness.now + TIMEOUT_S, "attaching 0/2")
    assert (harness.reconnected(W1), generation.state, ready_workers(generation)) == (
        [AddSlot(W1)],
        GenerationState.SERVING,
        [W1],
    )
    assert not generation.is_complete
    assert harness.reconnected(W2) == [AddSlot(W2), TRIM_STORE]
    assert (
        generation.is_complete,
        generation.has_all_workers,
        generation.next_tick_at,
        generation.processes.deaths,
    ) == (
        True,
        True,
        FOREVER,
        0,
    )
    assert [each.shared_bytes for each in generation.children.values()] == [4096, 4000, 4000]
    assert harness.after(1e6) == []


def test_spares_remain_spares() -> None:
    harness = GenerationHarness(1, spares=1).serving().resumed()
    assert harness.reconnected(W2, W1) == [AddSlot(W2), TRIM_STORE]
    assert harness.exits(W2)[0] == AddSlot(W1)


def test_only_recorded_workers_reconnect_once() -> None:
    harness = GenerationHarness().serving().resumed()
    assert harness.reconnected(HOLDER, worker(9), "unknown") == []
    assert harness.reconnected(W1, W1) == [AddSlot(W1)]
    harness.reconnected(W2)
    harness.exits(W2)
    assert harness.reconnected(W3) == []
    assert attach(W3) in harness.hello(W3)
    assert harness.reconnected(W3) == []
    assert ready_workers(harness.generation) == [W1]
    assert GenerationHarness().attaching().reconnected(W1) == []


def test_missing_worker_is_aborted_and_replaced() -> None:
    harness = GenerationHarness().serving().resumed()
    harness.reconnected(W1)
    assert harness.after(TIMEOUT_S - 0.1) == []
    assert harness.after(0.1) == [abort(W2), spawn(W3)]
    assert harness.after(ABORT_TIMEOUT_S) == [Kill(W2)]
    harness.exits(W2, end=KILLED)
    assert (harness.names(), harness.generation.processes.deaths) == ([W1, W3], 1)
    assert harness.reconnected(W2) == []


def test_replacement_attaches_after_others_reconnected() -> None:
    harness = GenerationHarness().serving().resumed()
    harness.exits(W1, end=UNSEEN)
    harness.after(1.0)
    assert harness.names() == [W2, W3]
    assert harness.hello(W3) == []
    assert harness.reconnected(W2) == [AddSlot(W2), attach(W3)]


def test_many_missing_workers_do_not_fail_generation() -> None:
    harness = GenerationHarness(5).serving().resumed()
    harness.reconnected(W1)
    harness.exits(W2, W3, end=UNSEEN)
    harness.after(TIMEOUT_S)
    harness.exits(W4, W5, end=ExitCause(-signal.SIGABRT))
    harness.after(0.1)
    assert harness.names() == [W1, *map(worker, range(6, 10))]


def test_all_workers_are_replaced_if_none_survived() -> None:
    harness = GenerationHarness().serving().resumed()
    harness.exits(W1, W2, end=UNSEEN)
    assert (harness.names(), harness.state) == ([W3, W4], GenerationState.RESUMING)
    assert "exited while no daemon was running" in harness.cause
    harness.hello(W4)
    assert harness.attached(W4) == [AddSlot(W4)]
    assert harness.state is GenerationState.SERVING


def test_failing_replacements_fail_generation() -> None:
    harness = GenerationHarness(3).serving().resumed()
    harness.exits(W1, W2, W3, end=UNSEEN)
    harness.exits(W4, W5, worker(6), end=ExitCause(1))
    harness.exits(*harness.names(), end=ExitCause(1))
    assert (harness.state, harness.cause) == (GenerationState.FAILED, f"{worker(6)}: exited with status 1")


def test_can_be_recorded_again_before_reconnect() -> None:
    harness = GenerationHarness().serving().resumed()
    before = record_generation(harness.generation, SEAL)
    assert recorded(harness) == [HOLDER, W1, W2]
    harness.reconnected(W1)
    assert record_generation(harness.generation, SEAL) == before
    harness.resumed()
    assert record_generation(harness.generation, SEAL) == before
    harness.reconnected(W2, W1)
    assert harness.generation.is_complete


def test_drain_stops_all_workers() -> None:
    harness = GenerationHarness().serving().resumed()
    harness.reconnected(W1)
    assert harness.drain() == [RemoveSlot(W1), stop(W1), stop(W2)]


# --- resumed state --------------------------------------------------------------------------------------------------


def test_worker_names_are_not_reused() -> None:
    harness = GenerationHarness().serving()
    assert harness.exits(W2) == [spawn(W3)]
    # W3 is not in the record, but the next worker must not get its name.
    assert harness.resumed().names() == [W1]
    assert spawn(W4) in harness.reconnected(W1)


def test_loss_of_holder_on_card_ends_resumed_generation() -> None:
    harness, lost_meanwhile = GenerationHarness(2, CARD).serving(), GenerationHarness(2, CARD).serving().resumed()
    assert not harness.generation.attach_control.can_trust_answers(lambda _: False)
    harness.resumed().reconnected(W1, W2)
    assert harness.generation.attach_control.can_trust_answers(lambda name: name == HOLDER)
    assert not harness.generation.attach_control.can_trust_answers(lambda name: name != HOLDER)
    assert [each for each in harness.exits(HOLDER) if isinstance(each, Kill)] == [Kill(W1), Kill(W2)]
    lost_meanwhile.exits(HOLDER, end=UNSEEN)
    assert lost_meanwhile.reconnected(W1, W2) == []
    for each in (harness, lost_meanwhile):
        assert (each.state, each.generation.attach_control.is_valid) == (GenerationState.FAILED, False)


@pytest.mark.parametrize("terms", [{"can_outlive_holder": True}, {"is_sharing": False}], ids=str)
def test_resumed_generation_may_not_need_holder(terms: dict[str, bool]) -> None:
    harness = GenerationHarness(2, CARD, **terms).attaching()
    if "is_sharing" in terms:
        harness.exits(HOLDER, end=ExitCause(0))
    harness.attached(W1, W2)
    assert harness.resumed().generation.attach_control.can_trust_answers(lambda _: False)


def test_frozen_generation_stays_frozen() -> None:
    harness = GenerationHarness(2, CARD, can_outlive_holder=True).serving()
    harness.exits(HOLDER, end=KILLED)
    assert recorded(harness) == [W1, W2]
    assert harness.resumed().reconnected(W1, W2) == [AddSlot(W1), AddSlot(W2)]
    assert (harness.generation.attach_control.is_frozen, harness.generation.should_be_replaced) == (True, True)
    assert harness.generation.progress == "serving 2/2, frozen: the holder has exited"
    assert harness.exits(W1) + harness.after(1000.0) == []


def test_closed_attaching_stays_closed() -> None:
    harness = GenerationHarness(2, CARD).serving()
    assert harness.replaced(W2, by=W3) == [allow(W3)]
    harness.allowed("no such call")
    seen = harness.resumed().reconnected(W1)
    assert (harness.generation.attach_control.closed_reason, harness.generation.should_be_replaced) == (
        "no such call",
        True,
    )
    assert not any(isinstance(each, Spawn) for each in [*seen, *harness.after(1000.0)])


def test_new_worker_on_card_needs_permission() -> None:
    harness = GenerationHarness(2, CARD).serving()
    # The pending request of the previous daemon is lost.
    assert harness.replaced(W2, by=W3) == [allow(W3)]
    harness.resumed().reconnected(W1)
    assert harness.hello(W4) == [allow(W4)]


def test_process_memory_is_kept() -> None:
    harness = GenerationHarness(2, CARD).building()
    harness.built(replace(BUILT, device=DeviceMemory(1000, 900)))
    for name, free in ((W1, 880), (W2, 870)):
        harness.attached(name, attached=replace(ATTACHED, device=DeviceMemory(1000, free)))
    assert harness.resumed().generation.device_usage.process_bytes == 10
