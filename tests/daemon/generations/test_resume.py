"""What a daemon writes down of a generation, and what the next one makes of it."""

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

from .life import (
    ATTACHED,
    BUILT,
    CARD,
    CPU,
    FOREVER,
    HOLDER,
    PREDICT_TIMEOUT_S,
    SEAL,
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
    stop,
    worker,
)

PATIENCE_S = RECONNECT_TIMEOUT_S + PREDICT_TIMEOUT_S
KILLED, UNSEEN = ExitCause(-signal.SIGKILL), ExitCause(None, "exited while no daemon was running")


def spawn(name: str) -> Action:
    return Spawn(name, Role.WORKER)


def recorded(life: GenerationHarness) -> list[str]:
    """Who is written down."""
    written = record_generation(life.generation, SEAL)
    return [each.name for each in written.children] if written is not None else []


# --- what is written down -------------------------------------------------------------------------------------------


UNFIT: dict[str, Callable[[GenerationHarness], object]] = {
    "snapshotting": GenerationHarness.wanted,
    "spawning": GenerationHarness.spawned,
    "building": GenerationHarness.building,
    "attaching": GenerationHarness.attaching,
    "draining": lambda life: life.serving().drain(),
    "failed": lambda life: life.serving().fails("why"),
    "invalid": lambda life: life.serving().generation.on_store_lost("truncated", life.now),
}


def ready_of(generation: Generation) -> list[str]:
    return [name for name in generation.children if generation.processes.is_ready(name)]


@pytest.mark.parametrize("how", UNFIT)
def test_only_what_serves_can_be_gone_on_with(how: str) -> None:
    life = GenerationHarness()
    UNFIT[how](life)
    assert record_generation(life.generation, SEAL) is None


def test_what_serves_is_written_down() -> None:
    life = GenerationHarness().serving()
    written = record_generation(life.generation, SEAL)
    assert written is not None
    assert (written.number, written.source, written.device, written.is_sharing) == (7, 3, "ascend:0", True)
    assert (written.sha256, written.built, written.store_fingerprint, written.started_workers) == (SHA, BUILT, SEAL, 2)
    assert (written.attach_state, written.attach_closed_reason) == ("open", "")
    told = [(each.name, each.role, each.shared_bytes, each.note) for each in written.children]
    workers = [(name, "worker", 4000, "another note") for name in (W1, W2)]
    assert told == [(HOLDER, "holder", 4096, ""), *workers]
    assert [each.hello for each in written.children] == [each.hello for each in life.generation.children.values()]


def test_workers_are_where_they_were_before_and_so_is_who_follows_them() -> None:
    after = GenerationHarness(1, devices=("cpu:0", "cpu:1")).serving().resumed()
    assert [child.device for child in after.generation.children.values()] == ["ascend:0", "cpu:0", "cpu:1"]
    after.back(W1, W2)
    after.exits(W2)
    after.when_due()
    assert after.generation.children[W3].device == "cpu:1"


def test_neither_who_attaches_nor_who_leaves_is_written_down() -> None:
    life = GenerationHarness().attaching()
    life.attached(W1)
    # The other one loads: nobody would know what becomes of it.
    assert recorded(life) == [HOLDER, W1]
    life.attached(W2)
    life.leaves(W1)
    assert recorded(life) == [HOLDER, W2]


@pytest.mark.parametrize(("traits", "sharing"), [(CPU, True), (CARD, True), (CARD, False)])
def test_where_nothing_is_shared_workers_come_and_go_without_a_holder(traits: SharingTraits, sharing: bool) -> None:
    life = GenerationHarness(1, traits, is_sharing=sharing).building()
    life.built(replace(BUILT, handle=""))
    life.exits(HOLDER, end=ExitCause(0))
    life.attached(W1)
    written = record_generation(life.generation, SEAL)
    assert written is not None
    assert (written.is_sharing, [each.name for each in written.children]) == (sharing, [W1])
    assert life.resumed().back(W1) == [AddSlot(W1)]
    assert (life.generation.is_complete, life.generation.attach_control.can_trust_answers(lambda _: False)) == (
        True,
        True,
    )
    assert life.replaced(W1, by=W2) == [attach(W2, "")]


# --- who is back ----------------------------------------------------------------------------------------------------


def test_workers_serve_once_they_are_back() -> None:
    life = GenerationHarness().serving().resumed()
    generation = life.generation
    assert (generation.state, life.wanted(), ready_of(generation)) == (GenerationState.RESUMING, [], [])
    assert (generation.built, generation.sha256, generation.number) == (BUILT, SHA, 7)
    assert (generation.next_tick_at, generation.progress) == (life.now + PATIENCE_S, "attaching 0/2")
    assert (life.back(W1), generation.state, ready_of(generation)) == (
        [AddSlot(W1)],
        GenerationState.SERVING,
        [W1],
    )
    assert not generation.is_complete
    assert life.back(W2) == [AddSlot(W2), SETTLE]
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
    assert life.after(1e6) == []


def test_spares_are_spares_again() -> None:
    life = GenerationHarness(1, spares=1).serving().resumed()
    assert life.back(W2, W1) == [AddSlot(W2), SETTLE]
    assert life.exits(W2)[0] == AddSlot(W1)


def test_only_who_was_ready_before_is_back_and_only_once() -> None:
    life = GenerationHarness().serving().resumed()
    assert life.back(HOLDER, worker(9), "stranger") == []
    assert life.back(W1, W1) == [AddSlot(W1)]
    life.back(W2)
    life.exits(W2)
    assert life.back(W3) == []
    assert attach(W3) in life.hello(W3)
    assert life.back(W3) == []
    assert ready_of(life.generation) == [W1]
    assert GenerationHarness().attaching().back(W1) == []


def test_who_never_comes_back_is_aborted_and_replaced() -> None:
    life = GenerationHarness().serving().resumed()
    life.back(W1)
    assert life.after(PATIENCE_S - 0.1) == []
    assert life.after(0.1) == [abort(W2), spawn(W3)]
    assert life.after(ABORT_TIMEOUT_S) == [Kill(W2)]
    life.exits(W2, end=KILLED)
    assert (life.names(), life.generation.processes.deaths) == ([W1, W3], 1)
    assert life.back(W2) == []


def test_who_ended_meanwhile_is_replaced_once_it_is_known_who_else_is_back() -> None:
    life = GenerationHarness().serving().resumed()
    life.exits(W1, end=UNSEEN)
    life.after(1.0)
    assert life.names() == [W2, W3]
    assert life.hello(W3) == []
    assert life.back(W2) == [AddSlot(W2), attach(W3)]


def test_that_many_are_not_back_is_no_reason_to_give_up() -> None:
    life = GenerationHarness(5).serving().resumed()
    life.back(W1)
    life.exits(W2, W3, end=UNSEEN)
    life.after(PATIENCE_S)
    life.exits(W4, W5, end=ExitCause(-signal.SIGABRT))
    life.after(0.1)
    assert life.names() == [W1, *map(worker, range(6, 10))]


def test_if_all_have_ended_others_come() -> None:
    life = GenerationHarness().serving().resumed()
    life.exits(W1, W2, end=UNSEEN)
    assert (life.names(), life.state) == ([W3, W4], GenerationState.RESUMING)
    assert "exited while no daemon was running" in life.cause
    life.hello(W4)
    assert life.attached(W4) == [AddSlot(W4)]
    assert life.state is GenerationState.SERVING


def test_those_that_come_instead_may_not_fail_for_ever() -> None:
    life = GenerationHarness(3).serving().resumed()
    life.exits(W1, W2, W3, end=UNSEEN)
    life.exits(W4, W5, worker(6), end=ExitCause(1))
    life.exits(*life.names(), end=ExitCause(1))
    assert (life.state, life.cause) == (GenerationState.FAILED, f"{worker(6)}: exited with status 1")


def test_it_can_be_handed_on_before_all_are_back() -> None:
    life = GenerationHarness().serving().resumed()
    before = record_generation(life.generation, SEAL)
    assert recorded(life) == [HOLDER, W1, W2]
    life.back(W1)
    assert record_generation(life.generation, SEAL) == before
    life.resumed()
    assert record_generation(life.generation, SEAL) == before
    life.back(W2, W1)
    assert life.generation.is_complete


def test_it_drains_and_stops_all_of_them() -> None:
    life = GenerationHarness().serving().resumed()
    life.back(W1)
    assert life.drain() == [RemoveSlot(W1), stop(W1), stop(W2)]


# --- what it knows --------------------------------------------------------------------------------------------------


def test_names_are_not_used_again() -> None:
    life = GenerationHarness().serving()
    assert life.exits(W2) == [spawn(W3)]
    # The next one is not written down, and its name is not given to another.
    assert life.resumed().names() == [W1]
    assert spawn(W4) in life.back(W1)


def test_without_its_holder_nothing_counts_after_either() -> None:
    life, lost_meanwhile = GenerationHarness(2, CARD).serving(), GenerationHarness(2, CARD).serving().resumed()
    assert not life.generation.attach_control.can_trust_answers(lambda _: False)
    life.resumed().back(W1, W2)
    assert life.generation.attach_control.can_trust_answers(lambda name: name == HOLDER)
    assert not life.generation.attach_control.can_trust_answers(lambda name: name != HOLDER)
    assert [each for each in life.exits(HOLDER) if isinstance(each, Kill)] == [Kill(W1), Kill(W2)]
    lost_meanwhile.exits(HOLDER, end=UNSEEN)
    assert lost_meanwhile.back(W1, W2) == []
    for each in (life, lost_meanwhile):
        assert (each.state, each.generation.attach_control.is_valid) == (GenerationState.FAILED, False)


@pytest.mark.parametrize("terms", [{"can_outlive_holder": True}, {"is_sharing": False}], ids=str)
def test_a_holder_that_need_not_live_is_not_asked_for(terms: dict[str, bool]) -> None:
    life = GenerationHarness(2, CARD, **terms).attaching()
    if "is_sharing" in terms:
        life.exits(HOLDER, end=ExitCause(0))
    life.attached(W1, W2)
    assert life.resumed().generation.attach_control.can_trust_answers(lambda _: False)


def test_what_has_lost_its_holder_stays_frozen() -> None:
    life = GenerationHarness(2, CARD, can_outlive_holder=True).serving()
    life.exits(HOLDER, end=KILLED)
    assert recorded(life) == [W1, W2]
    assert life.resumed().back(W1, W2) == [AddSlot(W1), AddSlot(W2)]
    assert (life.generation.attach_control.is_frozen, life.generation.should_be_replaced) == (True, True)
    assert life.generation.progress == "serving 2/2, frozen: the holder has exited"
    assert life.exits(W1) + life.after(1000.0) == []


def test_where_nobody_can_attach_any_more_that_is_still_so() -> None:
    life = GenerationHarness(2, CARD).serving()
    assert life.replaced(W2, by=W3) == [allow(W3)]
    life.allowed("no such call")
    seen = life.resumed().back(W1)
    assert (life.generation.attach_control.closed_reason, life.generation.should_be_replaced) == ("no such call", True)
    assert not any(isinstance(each, Spawn) for each in [*seen, *life.after(1000.0)])


def test_one_more_worker_of_a_card_has_to_be_let_in() -> None:
    life = GenerationHarness(2, CARD).serving()
    # What was asked when the daemon ended is forgotten.
    assert life.replaced(W2, by=W3) == [allow(W3)]
    life.resumed().back(W1)
    assert life.hello(W4) == [allow(W4)]


def test_what_a_process_takes_of_a_card_is_known() -> None:
    life = GenerationHarness(2, CARD).building()
    life.built(replace(BUILT, device=DeviceMemory(1000, 900)))
    for name, free in ((W1, 880), (W2, 870)):
        life.attached(name, attached=replace(ATTACHED, device=DeviceMemory(1000, free)))
    assert life.resumed().generation.device_usage.process_bytes == 10
