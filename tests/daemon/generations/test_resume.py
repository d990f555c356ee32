"""What a daemon writes down of a generation, and what the next one makes of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from weightd.daemon.generations.actions import Action, Dismiss, Enlist, Kill, Role, Send, Spawn
from weightd.daemon.generations.generation import ABORT_TIMEOUT_S, Generation
from weightd.daemon.generations.plan import Source, Terms
from weightd.daemon.generations.records import GenerationRecord, SealRecord
from weightd.daemon.generations.resume import BACK_TIMEOUT_S, record, resume
from weightd.daemon.generations.states import GenerationState
from weightd.daemon.host.ends import End
from weightd.daemon.host.memory import MIB
from weightd.protocol.messages.children import (
    Allow,
    Allowed,
    Attach,
    Attached,
    Built,
    DeviceMemory,
    Hello,
    Settle,
    Stop,
    Traits,
)
from weightd.protocol.messages.data import TensorSignature, TensorSpec
from weightd.protocol.schema import decode, plain
from weightd.protocol.version import VERSION

FOREVER = float("inf")
SHA = "5" * 64
X = TensorSignature("x", "FP32", (-1, 4))
SPEC = TensorSpec("x", "FP32", (1, 4))
BUILT = Built("/store", (X,), (X,), ({"x": (2,)},), "canary", 4096, "a note")
ATTACHED = Attached("canary", 4000, "another note")
CPU = Traits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)
CARD = Traits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)
SEAL = SealRecord(8192, 10**18)
PREDICT_TIMEOUT_S = 40.0
PATIENCE_S = BACK_TIMEOUT_S + PREDICT_TIMEOUT_S
HOLDER, W1, W2, W3 = "m.7.holder", "m.7.w1", "m.7.w2", "m.7.w3"

_pids = itertools.count(1000)


def hello(traits: Traits) -> Hello:
    return Hello(str(next(_pids)), SHA, {"weightd": VERSION}, traits)


class Life:
    """A generation from one daemon to the next."""

    def __init__(self, workers: int = 2, traits: Traits = CPU, **more: Any) -> None:
        self.terms = Terms(workers, 500.0, predict_timeout=PREDICT_TIMEOUT_S, **more)
        self.traits = traits
        self.now = 1000.0
        self.generation = Generation("m.7", self.terms, "ascend:0", Source("/m.mindir", number=3), number=7)
        self.generation.start()

    def names(self, role: Role) -> list[str]:
        return [each.name for each in self.generation.children.values() if each.role is role]

    def state(self) -> GenerationState:
        return self.generation.state

    def actions(self) -> list[Action]:
        return self.generation.take_actions()

    def spawned(self) -> Life:
        self.generation.pinned(SHA, self.now)
        return self

    def greeted(self) -> Life:
        for name in self.spawned().generation.children:
            self.generation.hello(name, hello(self.traits), self.now)
        return self

    def built(self) -> Life:
        self.greeted().generation.holder_built(HOLDER, BUILT, self.now)
        return self

    def serving(self) -> Life:
        for name in self.built().names(Role.WORKER):
            self.generation.attached(name, ATTACHED, self.now)
        self.actions()
        return self

    def record(self, seal: SealRecord | None = SEAL) -> GenerationRecord | None:
        return record(self.generation, seal)

    def resumed(self) -> Life:
        """The next daemon has read what this one wrote."""
        record = self.record()
        assert record is not None
        record = decode(GenerationRecord, json.loads(json.dumps(plain(record))))
        self.now += 1000.0
        self.generation = resume("m.7", self.terms, self.generation.source, record, self.now)
        return self

    def back(self, *names: str) -> Life:
        for name in names:
            self.generation.back(name, self.now)
        return self

    def exit(self, name: str, end: End | None = None) -> list[Action]:
        self.generation.exited(name, end or End(None, "it ended while no daemon was there"), self.now)
        return self.actions()

    def tick(self, seconds: float = 0.0) -> list[Action]:
        self.now += seconds
        self.generation.tick(self.now)
        return self.actions()

    def recorded(self) -> list[str]:
        record = self.record()
        return [each.name for each in record.children] if record is not None else []


def pinning(life: Life) -> None:
    """It has only begun."""


def draining(life: Life) -> None:
    life.serving().generation.drain(life.now)


def failed(life: Life) -> None:
    life.serving().generation.failed("why", life.now)


def invalid(life: Life) -> None:
    life.serving().generation.store_lost("truncated", life.now)


@pytest.mark.parametrize(
    "go",
    [pinning, Life.spawned, Life.greeted, Life.built, draining, failed, invalid],
    ids=["pinning", "spawning", "building", "attaching", "draining", "failed", "invalid"],
)
def test_only_what_serves_can_be_gone_on_with(go: Callable[[Life], object]) -> None:
    life = Life()
    go(life)
    assert life.record() is None


def test_what_serves_is_written_down() -> None:
    life = Life().serving()
    record = life.record()
    assert record is not None
    assert (record.number, record.source, record.device, record.sharing) == (7, 3, "ascend:0", True)
    assert (record.sha256, record.built, record.seal, record.serial) == (SHA, BUILT, SEAL, 2)
    assert (record.access, record.closed) == ("open", "")
    told = [(each.name, each.role, each.shared_bytes, each.note) for each in record.children]
    assert told == [
        (HOLDER, "holder", 4096, ""),
        (W1, "worker", 4000, "another note"),
        (W2, "worker", 4000, "another note"),
    ]
    assert [each.hello for each in record.children] == [each.hello for each in life.generation.children.values()]


def test_the_first_worker_is_enough() -> None:
    life = Life().built()
    life.generation.attached(W1, ATTACHED, life.now)
    # The other one loads: nobody would know what becomes of it.
    assert life.recorded() == [HOLDER, W1]


def test_who_leaves_is_not_written_down() -> None:
    life = Life().serving()
    life.generation.leaving(W1, life.now)
    assert life.recorded() == [HOLDER, W2]
    life.exit(W1, End(0))
    assert life.recorded() == [HOLDER, W2]


def test_without_sharing_there_is_no_holder() -> None:
    life = Life(sharing=False).built()
    life.exit(HOLDER, End(0))
    for name in (W1, W2):
        life.generation.attached(name, ATTACHED, life.now)
    record = life.record()
    assert record is not None
    assert (record.sharing, [each.name for each in record.children]) == (False, [W1, W2])


@pytest.mark.parametrize("traits", [CPU, CARD])
def test_where_nothing_is_shared_workers_come_and_go_without_a_holder(traits: Traits) -> None:
    life = Life(1, traits).greeted()
    life.generation.holder_built(HOLDER, dataclasses.replace(BUILT, handle=""), life.now)
    life.exit(HOLDER, End(0))
    life.generation.attached(W1, ATTACHED, life.now)
    life.resumed().back(W1)
    assert life.actions() == [Enlist(W1)]
    assert (life.generation.complete, life.generation.access.trusts(lambda _: False)) == (True, True)
    life.exit(W1)
    life.generation.hello(W2, hello(traits), life.now)
    assert life.actions() == [Send(W2, Attach("", BUILT.canary_cases))]


def test_workers_serve_once_they_are_back() -> None:
    life = Life().serving().resumed()
    generation = life.generation
    assert (generation.state, life.actions(), generation.ready) == (GenerationState.RESUMING, [], [])
    assert (generation.built, generation.sha256, generation.number) == (BUILT, SHA, 7)
    assert generation.next_tick == life.now + PATIENCE_S
    assert generation.progress == "attaching 0/2"
    life.back(W1)
    assert (generation.state, life.actions(), generation.ready) == (GenerationState.SERVING, [Enlist(W1)], [W1])
    assert not generation.complete
    life.back(W2)
    assert life.actions() == [Enlist(W2), Send(HOLDER, Settle())]
    assert (generation.complete, generation.full, generation.next_tick, generation.deaths) == (True, True, FOREVER, 0)
    assert [each.shared_bytes for each in generation.children.values()] == [4096, 4000, 4000]
    assert life.tick(1e6) == []


def test_spares_are_spares_again() -> None:
    life = Life(1, spares=1).serving().resumed().back(W2, W1)
    assert life.actions() == [Enlist(W2), Send(HOLDER, Settle())]
    assert life.exit(W2, End(-signal.SIGSEGV))[0] == Enlist(W1)


def test_somebody_elses_word_is_ignored() -> None:
    life = Life(3).serving().resumed()
    life.back(HOLDER, "m.7.w9", "stranger")
    assert (life.actions(), life.generation.ready) == ([], [])
    life.back(W1, W1)
    assert life.actions() == [Enlist(W1)]


def test_who_was_not_there_before_cannot_be_back() -> None:
    life = Life().serving().resumed().back(W1, W2)
    life.exit(W2, End(-signal.SIGKILL))
    life.actions()
    life.back(W3)
    life.generation.hello(W3, hello(CPU), life.now)
    assert Send(W3, Attach("/store", ({"x": (2,)},))) in life.actions()
    life.back(W3)
    assert (life.actions(), life.generation.ready) == ([], [W1])
    assert Life().built().back(W1).generation.ready == []


def test_who_never_comes_back_is_aborted_and_replaced() -> None:
    life = Life().serving().resumed().back(W1)
    life.actions()
    assert life.tick(PATIENCE_S - 0.1) == []
    assert life.tick(0.1) == [Kill(W2, abort=True), Spawn(W3, Role.WORKER)]
    assert life.tick(ABORT_TIMEOUT_S) == [Kill(W2)]
    life.exit(W2, End(-signal.SIGKILL))
    assert life.names(Role.WORKER) == [W1, W3]
    assert life.generation.deaths == 1
    life.back(W2)
    assert life.generation.ready == [W1]


def test_who_ended_meanwhile_is_replaced() -> None:
    life = Life().serving().resumed()
    life.exit(W1)
    life.tick(1.0)
    assert life.names(Role.WORKER) == [W2, W3]
    assert life.back(W2).actions() == [Enlist(W2)]


def test_nobody_attaches_before_it_is_known_who_is_back() -> None:
    life = Life().serving().resumed()
    life.exit(W1)
    life.tick(1.0)
    life.generation.hello(W3, hello(CPU), life.now)
    assert life.actions() == []
    life.back(W2)
    assert life.actions() == [Enlist(W2), Send(W3, Attach("/store", ({"x": (2,)},)))]


def test_that_many_are_not_back_is_no_reason_to_give_up() -> None:
    life = Life(5).serving().resumed().back(W1)
    for name in (W2, W3):
        life.exit(name)
    life.tick(PATIENCE_S)
    for name in ("m.7.w4", "m.7.w5"):
        life.exit(name, End(-signal.SIGABRT))
    life.tick(0.1)
    assert life.names(Role.WORKER) == [W1, "m.7.w6", "m.7.w7", "m.7.w8", "m.7.w9"]


def test_if_all_have_ended_others_come() -> None:
    life = Life(4).serving().resumed()
    for name in life.names(Role.WORKER):
        life.exit(name)
    assert life.names(Role.WORKER) == ["m.7.w5", "m.7.w6", "m.7.w7", "m.7.w8"]
    assert life.state() is GenerationState.RESUMING
    assert "ended while no daemon was there" in life.generation.cause
    life.generation.hello("m.7.w6", hello(CPU), life.now)
    life.generation.attached("m.7.w6", ATTACHED, life.now)
    assert life.state() is GenerationState.SERVING


def test_those_that_come_instead_may_not_fail_for_ever() -> None:
    life = Life(3).serving().resumed()
    for name in (W1, W2, W3):
        life.exit(name)
    for name in ("m.7.w4", "m.7.w5", "m.7.w6"):
        life.exit(name, End(1))
    for name in life.names(Role.WORKER):
        life.exit(name, End(1))
    assert life.state() is GenerationState.FAILED
    assert life.generation.cause == "m.7.w6: exited with status 1"


def test_it_can_be_handed_on_before_all_are_back() -> None:
    life = Life().serving().resumed()
    before = life.record()
    assert life.recorded() == [HOLDER, W1, W2]
    life.back(W1)
    assert life.record() == before
    life.resumed()
    assert life.record() == before
    assert life.back(W2, W1).generation.complete


def test_it_drains_and_stops_all_of_them() -> None:
    life = Life().serving().resumed().back(W1)
    life.actions()
    life.generation.drain(life.now)
    assert life.actions() == [Dismiss(W1), Send(W1, Stop()), Send(W2, Stop())]


# --- what it knows --------------------------------------------------------------------------------------------------


def test_names_are_not_used_again() -> None:
    life = Life().serving()
    life.exit(W2, End(-signal.SIGKILL))
    assert W3 in life.generation.children
    life.actions()
    # The next one is not written down, and its name is not given to another.
    life.resumed()
    assert life.names(Role.WORKER) == [W1]
    life.back(W1)
    assert Spawn("m.7.w4", Role.WORKER) in life.actions()


def test_without_its_holder_nothing_counts_after_either() -> None:
    life = Life(traits=CARD).serving()
    assert not life.generation.access.trusts(lambda _: False)
    life.resumed().back(W1, W2)
    assert life.generation.access.trusts(lambda name: name == HOLDER)
    assert not life.generation.access.trusts(lambda name: name != HOLDER)
    assert [each for each in life.exit(HOLDER) if isinstance(each, Kill)] == [Kill(W1), Kill(W2)]
    assert (life.state(), life.generation.access.is_valid) == (GenerationState.FAILED, False)
    assert life.record() is None


def test_the_holder_of_a_card_that_ended_meanwhile_takes_the_workers_along() -> None:
    life = Life(traits=CARD).serving().resumed()
    life.exit(HOLDER)
    assert (life.generation.access.is_valid, life.state()) == (False, GenerationState.FAILED)
    life.back(W1, W2)
    assert life.generation.ready == []


@pytest.mark.parametrize("more", [{"outlives_holder": True}, {"sharing": False}])
def test_a_holder_that_need_not_live_is_not_asked_for(more: Mapping[str, bool]) -> None:
    life = Life(traits=CARD, **more).built()
    if "sharing" in more:
        life.exit(HOLDER, End(0))
    for name in (W1, W2):
        life.generation.attached(name, ATTACHED, life.now)
    life.resumed()
    assert life.generation.access.trusts(lambda _: False)


def test_what_has_lost_its_holder_stays_frozen() -> None:
    life = Life(traits=CARD, outlives_holder=True).serving()
    life.exit(HOLDER, End(-signal.SIGKILL))
    assert life.generation.access.is_frozen
    assert life.recorded() == [W1, W2]
    life.resumed().back(W1, W2)
    assert (life.generation.access.is_frozen, life.generation.needs_renewal) == (True, True)
    assert life.generation.progress == "serving 2/2, frozen: the holder is lost"
    assert not any(isinstance(each, Spawn) for each in [*life.actions(), *life.exit(W1), *life.tick(1000.0)])


def test_where_nobody_can_attach_any_more_that_is_still_so() -> None:
    life = Life(traits=CARD).serving()
    life.exit(W2, End(-signal.SIGKILL))
    life.generation.hello(W3, hello(CARD), life.now)
    assert [each for each in life.actions() if isinstance(each, Send) and isinstance(each.order, Allow)]
    life.generation.allowed(HOLDER, Allowed("no such call"), life.now)
    life.resumed().back(W1)
    assert (life.generation.access.why, life.generation.needs_renewal) == ("no such call", True)
    assert not any(isinstance(each, Spawn) for each in [*life.actions(), *life.tick(1000.0)])


def test_one_more_worker_of_a_card_has_to_be_let_in() -> None:
    life = Life(traits=CARD).serving().resumed().back(W1, W2)
    life.exit(W2, End(-signal.SIGKILL))
    life.tick(1.0)
    greeting = hello(CARD)
    life.generation.hello(W3, greeting, life.now)
    assert life.actions() == [Send(HOLDER, Allow((greeting.pid,)))]


def test_what_a_process_takes_of_a_card_is_known() -> None:
    life = Life(traits=CARD)
    life.greeted().generation.holder_built(
        HOLDER, dataclasses.replace(BUILT, device=DeviceMemory(1000 * MIB, 900 * MIB)), life.now
    )
    for name, free in ((W1, 880), (W2, 870)):
        attached = dataclasses.replace(ATTACHED, device=DeviceMemory(1000 * MIB, free * MIB))
        life.generation.attached(name, attached, life.now)
    assert life.resumed().generation.footprint.process_bytes == 10 * MIB
