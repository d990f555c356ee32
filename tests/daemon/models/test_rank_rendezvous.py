"""A model that is cut over ranks, as the daemon has it: its groups, what they are started with, and what ends them."""

from __future__ import annotations

import dataclasses
import json
import signal
from typing import Any

import pytest

from testkit.model_factory import model_factory
from weightd_common.safe_open import OPERATOR
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.ranks import RanksConfig
from weightd_daemon.models.persisted import ModelRecord
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.versions import IdSequence
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_daemon.platform.memory import MIB
from weightd_daemon.processes.events import SliceSnapshot, Snapshot
from weightd_protocol.messages.inference import ResponseDescription, TensorSignature
from weightd_protocol.messages.ranks import JoinedGroup, JoinGroup, PredictDone, RankSlice, RunSelfTest, SelfTestDone
from weightd_protocol.messages.worker import (
    BatchMismatch,
    ChildMessage,
    Hello,
    Ping,
    Predict,
    PredictFailed,
    PredictResult,
    ProcessFailed,
    Reconnected,
    Stop,
)
from weightd_protocol.messages.worker_common import DeviceMemory, SelfTestCases
from weightd_protocol.schema import decode, plain
from weightd_protocol.version import VERSION

from .fakehost import CPU, OUT, FakeHost, X, Y, request

CASES: SelfTestCases = ({"x": (5, 2)},)
WARMED = SelfTestDone("canary", CASES)
ON_CARDS = RanksConfig(
    size=2,
    groups=(("ascend:0", "ascend:1"),),
    rank_table="generate",
    reply="last",
    device_ips={"ascend:0": "10.0.0.1", "ascend:1": "10.0.0.2"},
)


def digest(source: int, rank: int) -> str:
    return f"{source}{rank}" * 32


def taken(source: int, size: int = 2) -> Snapshot:
    slices = tuple(
        SliceSnapshot(f"/snapshots/{source}/{rank}", digest(source, rank), (rank + 1) * 10 * MIB, f"known{rank}")
        for rank in range(size)
    )
    whole = f"{source}" * 64
    return Snapshot(slices[0].path, "", whole, 30 * MIB, "/snapshots/s.npz", "known0", slices)


class Cut:
    """A model of two ranks, and their side of the talk."""

    def __init__(
        self,
        ranks: RanksConfig = ON_CARDS,
        host: FakeHost | None = None,
        numbers: IdSequence | None = None,
        **config: Any,
    ) -> None:
        self.host, self.now = host or FakeHost(), 1000.0
        config = {"engine": "mindspore_lite", "spares": 0, "sharing": "off", **config}
        self.config = ModelConfig("/m{rank}.mindir", devices=ranks.all_devices, ranks=ranks, **config)
        self.devices = {name: DeviceBudget(name) for name in ("cpu", *ranks.all_devices)}
        self.model = model_factory(self.devices, self.host, self.host).make("big", self.config, numbers or IdSequence())

    def started(self) -> Cut:
        self.model.start(self.now)
        return self.pinned()

    def pinned(self) -> Cut:
        source = self.host.pinned[-1]
        self.model.on_snapshot_taken(source, taken(source.number), self.now)
        return self

    def of(self, generation: int) -> list[str]:
        return [name for name in self.host.spawned if name.startswith(f"big.{generation}.")]

    def ranks(self, generation: int) -> list[str]:
        return [name for name in self.of(generation) if ".rank" in name]

    def says(self, child: str, message: ChildMessage) -> Cut:
        self.model.deployments.process_events.on_message(child, message, (), self.now)
        return self

    def greet(self, generation: int = 1, source: int = 1) -> Cut:
        for name in self.of(generation):
            hello = Hello("1", "broker", {"weightd": VERSION}, CPU)
            if ".rank" in name:
                rank = int(name[-1])
                hello = dataclasses.replace(hello, sha256=digest(source, rank), slice=RankSlice(rank, (X,), (Y,)))
            self.says(name, hello)
        return self

    def enters(self, generation: int = 1, y: TensorSignature = Y, device: DeviceMemory | None = None) -> Cut:
        for name in self.ranks(generation):
            self.says(name, JoinedGroup((X,), (y,), device))
        return self

    def loads(self, generation: int = 1, source: int = 1) -> Cut:
        self.greet(generation, source).enters(generation)
        for name in self.ranks(generation):
            self.says(name, WARMED)
        return self

    def serving(self) -> Cut:
        self.started().loads()
        self.host.orders.clear()
        return self

    def asks(self) -> int:
        asked = request()
        self.model.dispatcher.infer(asked, self.now)
        return asked.number

    def answers(self, number: int, generation: int = 1) -> Cut:
        first, last = self.ranks(generation)
        return self.says(first, PredictDone(number)).says(last, PredictResult(number, ResponseDescription("m", (OUT,))))

    def ends(self, *names: str, end: ExitCause | None = None) -> Cut:
        for name in names:
            self.model.deployments.process_events.on_exit(
                name, end or ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON), self.now
            )
        return self

    def given(self) -> list[tuple[str, int, int]]:
        """Who was given which request since the last time, with which step."""
        steps = [(name, order.request, order.step) for name, order in self.host.orders if isinstance(order, Predict)]
        self.host.orders = [each for each in self.host.orders if not isinstance(each[1], Predict)]
        return steps


R0, R1 = "big.1.rank0", "big.1.rank1"


def test_all_ranks_are_started_each_with_its_slice_and_all_with_the_same_table() -> None:
    stage = Cut().started()
    assert stage.host.spawned == [R0, R1]
    programs = [stage.host.programs[name] for name in (R0, R1)]
    assert [(each.model, each.device, each.snapshot_identity) for each in programs] == [
        (f"/snapshots/1/{rank}", f"ascend:{rank}", f"known{rank}:{digest(1, rank)}") for rank in range(2)
    ]
    assert [
        each.rendezvous and (each.rendezvous.rank, each.rendezvous.reply_rank, each.rendezvous.port)
        for each in programs
    ] == [
        (0, 1, 0),
        (1, 1, 0),
    ]
    assert programs[0].rank_table == programs[1].rank_table
    table = json.loads(programs[0].rank_table)
    assert [each["device_ip"] for each in table["server_list"][0]["device"]] == ["10.0.0.1", "10.0.0.2"]
    assert [each.spawn_reason != "" for each in programs] == [True, True]


def test_where_ranks_need_a_broker_all_of_a_generation_know_its_port() -> None:
    stage = Cut(RanksConfig(size=2, groups=(("cpu", "cpu"),)), engine="mindspore").started()
    assert stage.host.spawned == ["big.1.broker", R0, R1]
    meetings = [stage.host.programs[name].rendezvous for name in stage.host.spawned]
    assert [each and each.rank for each in meetings] == [-1, 0, 1]
    [port] = {each.port for each in meetings if each is not None}
    assert port > 0
    assert {program.rank_table for program in stage.host.programs.values()} == {""}


def test_they_enter_and_run_the_canary_together_and_then_take_requests_in_step() -> None:
    stage = Cut().started()
    asked = stage.asks()
    stage.greet().enters()
    assert stage.host.told(JoinGroup) == [(R0, JoinGroup()), (R1, JoinGroup())]
    assert stage.host.told(RunSelfTest) == [(R0, RunSelfTest()), (R1, RunSelfTest())]
    stage.says(R1, WARMED)
    assert not stage.model.readiness.is_serving
    stage.says(R0, SelfTestDone("", ()))
    assert (
        stage.model.readiness.is_serving,
        stage.model.readiness.is_complete,
        stage.model.readiness.unready_reason(stage.now),
    ) == (True, True, "")
    assert stage.given() == [(R0, asked, 1), (R1, asked, 1)]
    second = stage.asks()
    stage.says(R1, PredictResult(asked, ResponseDescription("m", (OUT,))))
    assert (stage.host.answers, stage.given()) == ([], [])
    stage.says(R0, PredictDone(asked))
    assert (stage.host.answers, stage.given()) == ([asked], [(R0, second, 2), (R1, second, 2)])


def _dies(stage: Cut, asked: int) -> None:
    stage.ends(R0, end=ExitCause(-signal.SIGKILL))


def _breaks(stage: Cut, asked: int) -> None:
    stage.says(R0, ProcessFailed("step: expected 1, got 2"))


def _fails(stage: Cut, asked: int) -> None:
    stage.says(R0, PredictFailed(asked, "INTERNAL", "predict failed", is_exiting=True))


def _tells_what_it_was_not_asked(stage: Cut, asked: int) -> None:
    stage.says(R0, PredictDone(asked + 1000))


def _answers_instead_of_another(stage: Cut, asked: int) -> None:
    stage.says(R0, PredictResult(asked, ResponseDescription("m", (OUT,))))


def _says_what_no_rank_says(stage: Cut, asked: int) -> None:
    stage.says(R0, BatchMismatch("rows differ"))


def _does_not_end(stage: Cut, asked: int) -> None:
    stage.now += stage.config.predict_timeout + 1.0
    stage.model.tick(stage.now)


@pytest.mark.parametrize(
    "loss",
    [
        _dies,
        _breaks,
        _fails,
        _tells_what_it_was_not_asked,
        _answers_instead_of_another,
        _says_what_no_rank_says,
        _does_not_end,
    ],
)
def test_with_one_rank_all_are_lost_and_what_they_had_runs_on_the_next_group(loss: Any) -> None:
    stage = Cut().serving()
    asked = stage.asks()
    assert len(stage.given()) == 2
    loss(stage, asked)
    alive = [name for name in (R0, R1) if not (loss is _dies and name == R0)]
    assert (stage.host.killed, stage.host.aborted, stage.host.answers) == (alive, [], [])
    stage.ends(*alive)
    stage.now += 10.0
    stage.model.tick(stage.now)
    assert stage.of(2) == ["big.2.rank0", "big.2.rank1"]
    stage.loads(2)
    assert stage.given() == [("big.2.rank0", asked, 1), ("big.2.rank1", asked, 1)]
    stage.answers(asked, 2)
    assert (stage.host.answers, stage.host.refusals, stage.model.deployments.deaths) == ([asked], [], 1)


def test_the_first_cause_is_told() -> None:
    stage = Cut().serving()
    stage.ends(R1, end=ExitCause(-signal.SIGSEGV))
    [cause] = [each.cause for each in stage.model.generations if each.label == "big.1"]
    assert cause.startswith(f"{R1}: killed by SIGSEGV")


def test_what_all_refuse_is_its_requests_error() -> None:
    stage = Cut().serving()
    asked = stage.asks()
    for name in (R0, R1):
        stage.says(name, PredictFailed(asked, "INVALID_ARGUMENT", "x: no such shape", is_exiting=False))
    assert stage.host.refused() == [(asked, "INVALID_ARGUMENT")]
    assert (stage.model.readiness.is_serving, stage.host.killed) == (True, [])


def test_idle_ranks_are_pinged_without_the_canary() -> None:
    stage = Cut(selftest_interval=0.001).serving()
    told: set[tuple[str, Any]] = set()
    for _ in range(3):
        stage.now = stage.model.timer.due_at
        stage.model.tick(stage.now)
        told.update(stage.host.told(Ping))
    assert told == {(name, Ping(run_selftest=False)) for name in (R0, R1)}


def updated(stage: Cut, path: str = "/new{rank}.mindir", *, rollback: bool = False) -> Cut:
    path = "" if rollback else path
    stage.model.update(b"o", "u", stage.now, path=path, weights="", rollback=rollback, grant=OPERATOR)
    return stage


def test_where_there_is_a_port_another_group_comes_up_beside_the_old_one() -> None:
    stage = updated(Cut(dataclasses.replace(ON_CARDS, device_ports=(16666, 16667))).serving()).pinned()
    tables = [json.loads(stage.host.programs[name].rank_table) for name in (R0, "big.2.rank0")]
    assert [each["server_list"][0]["device"][0]["device_port"] for each in tables] == ["16666", "16667"]
    stage.loads(2, source=2)
    assert (stage.host.updated[0].path, stage.model.readiness.main_generation.label) == ("/new{rank}.mindir", "big.2")
    updated(stage, rollback=True)
    assert (stage.of(3), stage.model.readiness.is_serving) == ([], True)
    stage.ends(R0, R1, end=ExitCause(0))
    assert stage.of(3) == ["big.3.rank0", "big.3.rank1"]
    stage.loads(3)
    assert (stage.host.updated[1].path, stage.model.readiness.main_generation.label) == ("/m{rank}.mindir", "big.3")


@pytest.mark.parametrize("succeeds", [True, False])
def test_else_it_takes_its_place_and_requests_wait(succeeds: bool) -> None:
    stage = updated(Cut().serving()).pinned()
    assert ([name for name, _ in stage.host.told(Stop)], stage.of(2), stage.model.readiness.is_serving) == (
        [R0, R1],
        [],
        False,
    )
    asked = stage.asks()
    stage.ends(R0, R1, end=ExitCause(0))
    assert stage.of(2) == ["big.2.rank0", "big.2.rank1"]
    if succeeds:
        stage.loads(2, source=2)
        assert stage.host.updated[0].path == "/new{rank}.mindir"
    else:
        stage.says("big.2.rank0", ProcessFailed("no model")).ends("big.2.rank0", "big.2.rank1")
        assert stage.host.errors[0][1:] == ("FAILED_PRECONDITION", "not updated: big.2.rank0: no model")
        stage.loads(3)
    label = "big.2" if succeeds else "big.3"
    assert stage.given() == [(f"{label}.rank0", asked, 1), (f"{label}.rank1", asked, 1)]


def test_with_policy_overlap_what_has_no_place_beside_is_refused() -> None:
    stage = updated(Cut(policy="overlap").serving()).pinned()
    [(_, code, why)] = stage.host.errors
    assert (code, "no port is free" in why, stage.model.readiness.is_serving) == ("FAILED_PRECONDITION", True, True)


class Reloaded(Cut):
    """A model that serves, and another one of its name that is to replace it on the same cards."""

    def __init__(self, **config: Any) -> None:
        numbers = IdSequence()
        super().__init__(numbers=numbers)
        self.old = self.serving().model
        config = {"engine": "mindspore_lite", "spares": 0, "sharing": "off", "max_queue": 7, **config}
        self.config = ModelConfig("/m{rank}.mindir", devices=ON_CARDS.all_devices, ranks=ON_CARDS, **config)
        factory = model_factory(self.devices, self.host, self.host)
        self.model = factory.make("big", self.config, numbers, predecessor=self.old)
        self.started()

    def old_is_gone(self) -> Cut:
        for name in (R0, R1):
            self.old.deployments.process_events.on_exit(name, ExitCause(0), self.now)
        return self


def test_a_changed_configuration_takes_the_place_of_the_old_where_there_is_no_room_for_both() -> None:
    stage = Reloaded()
    assert ([name for name, _ in stage.host.told(Stop)], stage.of(2)) == ([R0, R1], [])
    # Requests wait at the old one, which would serve again if the new one could not be loaded.
    asked = request()
    stage.old.dispatcher.infer(asked, stage.now)
    assert (stage.old.readiness.is_serving, stage.old.readiness.may_serve_soon) == (False, True)
    stage.old_is_gone().model.tick(stage.now)
    assert stage.of(2) == ["big.2.rank0", "big.2.rank1"]
    stage.loads(2, source=2)
    stage.model.adopt_requests(stage.old, stage.now)
    stage.old.drain(stage.now, is_replaced=True)
    assert [number for _, number, _ in stage.given()] == [asked.number] * 2
    assert stage.old.is_gone


def test_what_has_made_way_comes_again_where_the_other_cannot_be_loaded() -> None:
    stage = Reloaded()
    stage.old_is_gone().model.tick(stage.now)
    stage.says("big.2.rank0", ProcessFailed("no model"))
    assert stage.model.readiness.has_failed
    stage.model.drain(stage.now)
    stage.old.deployments.reinstate(stage.now)
    assert stage.of(3) == []
    stage.ends("big.2.rank0", "big.2.rank1")
    stage.old.tick(stage.now)
    stage.model = stage.old
    stage.loads(3)
    assert (stage.old.readiness.is_serving, stage.old.readiness.main_generation.label) == (True, "big.3")


def test_with_policy_overlap_nobody_makes_way_for_a_changed_configuration() -> None:
    stage = Reloaded(policy="overlap")
    assert (stage.model.readiness.has_failed, stage.old.readiness.is_serving, stage.host.told(Stop)) == (True, True, [])


@pytest.mark.parametrize("path", ["/new.mindir", "/new{rank}.onnx"])
def test_an_update_is_to_one_file_for_each_rank(path: str) -> None:
    stage = Cut().serving()
    with pytest.raises(Exception, match="expected"):
        stage.model.update(b"o", "u", stage.now, path=path, weights="", rollback=False, grant=OPERATOR)


def test_a_model_that_takes_something_else_does_not_take_over() -> None:
    stage = Cut(dataclasses.replace(ON_CARDS, device_ports=(1, 2))).serving()
    stage.model.update(b"o", "u", stage.now, path="/new{rank}.mindir", weights="", rollback=False, grant=OPERATOR)
    stage.pinned().greet(2, 2).enters(2, TensorSignature("y", "FP32", (-1, 4)))
    assert "is not compatible with the serving one" in stage.host.errors[0][2]
    assert stage.model.readiness.main_generation.label == "big.1"


def test_several_groups_share_the_queue() -> None:
    groups = (("ascend:0", "ascend:1"), ("ascend:2", "ascend:3"))
    stage = Cut(dataclasses.replace(ON_CARDS, groups=groups, device_ips={})).started()
    assert stage.host.spawned == [R0, R1, "big.2.rank0", "big.2.rank1"]
    stage.loads(1).loads(2)
    first, second = stage.asks(), stage.asks()
    given = stage.given()
    assert {name.rpartition(".")[0]: number for name, number, _ in given} == {"big.1": first, "big.2": second}
    stage.answers(second, 2).answers(first, 1)
    assert stage.host.answers == [second, first]


def test_each_card_says_what_is_free() -> None:
    stage = Cut().started().greet().enters(device=DeviceMemory(100 * MIB, 50 * MIB))
    assert [stage.devices[f"ascend:{rank}"].free_bytes for rank in range(2)] == [50 * MIB] * 2


@pytest.mark.parametrize(("steps", "goes_on"), [((7, 7), True), ((7, 6), False)])
def test_the_next_daemon_goes_on_with_a_group_whose_ranks_are_in_step(steps: tuple[int, int], goes_on: bool) -> None:
    stage = Cut(dataclasses.replace(ON_CARDS, device_ports=(16666, 16667))).serving()
    record = stage.model.record()
    written: ModelRecord = decode(ModelRecord, json.loads(json.dumps(plain(record))))
    following = Cut(stage.config.ranks or ON_CARDS, stage.host, numbers=IdSequence(written.last_ids))
    following.host.spawned.clear()
    following.model.resume(written, following.now)
    assert following.devices["ascend:0"].ports == {"big.1": 16666}
    asked = following.asks()
    for name, step in zip((R0, R1), steps, strict=True):
        following.says(name, Reconnected(step))
    assert following.model.readiness.is_serving == goes_on
    assert following.given() == [(R0, asked, 8), (R1, asked, 8)] * goes_on
    assert following.host.killed == ([] if goes_on else [R0, R1])
    if not goes_on:
        [cause] = [each.cause for each in following.model.generations if each.label == "big.1"]
        assert cause.startswith("the ranks have run different steps")
        following.ends(R0, R1)
        following.now += 10.0
        following.model.tick(following.now)
        following.loads(2)
        assert following.given() == [("big.2.rank0", asked, 1), ("big.2.rank1", asked, 1)]


def test_the_next_daemon_tells_groups_on_one_device_apart() -> None:
    two = RanksConfig(size=2, groups=(("cpu", "cpu"),) * 2)
    stage = Cut(two, engine="mindspore").started().loads(1).loads(2)
    written: ModelRecord = decode(ModelRecord, json.loads(json.dumps(plain(stage.model.record()))))
    following = Cut(two, stage.host, IdSequence(written.last_ids), engine="mindspore")
    following.model.resume(written, following.now)
    assert following.host.resumed == ["big.1", "big.2"]
