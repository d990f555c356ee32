"""Tests of a model with ranks: its rank groups, their start, and their replacement after a loss."""

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
SELFTEST_DONE = SelfTestDone("digest", CASES)
ON_CARDS = RanksConfig(
    size=2,
    groups=(("ascend:0", "ascend:1"),),
    rank_table="generate",
    reply="last",
    device_ips={"ascend:0": "10.0.0.1", "ascend:1": "10.0.0.2"},
)


def digest(source: int, rank: int) -> str:
    return f"{source}{rank}" * 32


def make_snapshot(source: int, size: int = 2) -> Snapshot:
    slices = tuple(
        SliceSnapshot(f"/snapshots/{source}/{rank}", digest(source, rank), (rank + 1) * 10 * MIB, f"known{rank}")
        for rank in range(size)
    )
    whole = f"{source}" * 64
    return Snapshot(slices[0].path, "", whole, 30 * MIB, "/snapshots/s.npz", "known0", slices)


class RankModelHarness:
    """Model with two ranks; the test sends the messages of their processes."""

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

    def started(self) -> RankModelHarness:
        self.model.start(self.now)
        return self.snapshot_taken()

    def snapshot_taken(self) -> RankModelHarness:
        source = self.host.requested_snapshots[-1]
        self.model.on_snapshot_taken(source, make_snapshot(source.number), self.now)
        return self

    def processes_of(self, generation: int) -> list[str]:
        return [name for name in self.host.spawned if name.startswith(f"big.{generation}.")]

    def ranks(self, generation: int) -> list[str]:
        return [name for name in self.processes_of(generation) if ".rank" in name]

    def deliver(self, child: str, message: ChildMessage) -> RankModelHarness:
        self.model.deployments.process_events.on_message(child, message, (), self.now)
        return self

    def connect(self, generation: int = 1, source: int = 1) -> RankModelHarness:
        for name in self.processes_of(generation):
            hello = Hello("1", "broker", {"weightd": VERSION}, CPU)
            if ".rank" in name:
                rank = int(name[-1])
                hello = dataclasses.replace(hello, sha256=digest(source, rank), slice=RankSlice(rank, (X,), (Y,)))
            self.deliver(name, hello)
        return self

    def join(self, generation: int = 1, y: TensorSignature = Y, device: DeviceMemory | None = None) -> RankModelHarness:
        for name in self.ranks(generation):
            self.deliver(name, JoinedGroup((X,), (y,), device))
        return self

    def loads(self, generation: int = 1, source: int = 1) -> RankModelHarness:
        self.connect(generation, source).join(generation)
        for name in self.ranks(generation):
            self.deliver(name, SELFTEST_DONE)
        return self

    def serving(self) -> RankModelHarness:
        self.started().loads()
        self.host.orders.clear()
        return self

    def submit_request(self) -> int:
        submitted = request()
        self.model.dispatcher.infer(submitted, self.now)
        return submitted.number

    def answers(self, number: int, generation: int = 1) -> RankModelHarness:
        first, last = self.ranks(generation)
        return self.deliver(first, PredictDone(number)).deliver(
            last, PredictResult(number, ResponseDescription("m", (OUT,)))
        )

    def exit_processes(self, *names: str, end: ExitCause | None = None) -> RankModelHarness:
        for name in names:
            self.model.deployments.process_events.on_exit(
                name, end or ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON), self.now
            )
        return self

    def take_predicts(self) -> list[tuple[str, int, int]]:
        """Return rank, request and step of each predict since the last call."""
        steps = [(name, order.request, order.step) for name, order in self.host.orders if isinstance(order, Predict)]
        self.host.orders = [each for each in self.host.orders if not isinstance(each[1], Predict)]
        return steps


R0, R1 = "big.1.rank0", "big.1.rank1"


def test_ranks_start_with_their_slices_and_one_rank_table() -> None:
    harness = RankModelHarness().started()
    assert harness.host.spawned == [R0, R1]
    programs = [harness.host.programs[name] for name in (R0, R1)]
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


def test_all_processes_of_group_know_broker_port() -> None:
    harness = RankModelHarness(RanksConfig(size=2, groups=(("cpu", "cpu"),)), engine="mindspore").started()
    assert harness.host.spawned == ["big.1.broker", R0, R1]
    rendezvous = [harness.host.programs[name].rendezvous for name in harness.host.spawned]
    assert [each and each.rank for each in rendezvous] == [-1, 0, 1]
    [port] = {each.port for each in rendezvous if each is not None}
    assert port > 0
    assert {program.rank_table for program in harness.host.programs.values()} == {""}


def test_ranks_join_and_run_selftest_before_they_serve() -> None:
    harness = RankModelHarness().started()
    submitted = harness.submit_request()
    harness.connect().join()
    assert harness.host.orders_of(JoinGroup) == [(R0, JoinGroup()), (R1, JoinGroup())]
    assert harness.host.orders_of(RunSelfTest) == [(R0, RunSelfTest()), (R1, RunSelfTest())]
    harness.deliver(R1, SELFTEST_DONE)
    assert not harness.model.readiness.is_serving
    harness.deliver(R0, SelfTestDone("", ()))
    assert (
        harness.model.readiness.is_serving,
        harness.model.readiness.is_complete,
        harness.model.readiness.unready_reason(harness.now),
    ) == (True, True, "")
    assert harness.take_predicts() == [(R0, submitted, 1), (R1, submitted, 1)]
    second = harness.submit_request()
    harness.deliver(R1, PredictResult(submitted, ResponseDescription("m", (OUT,))))
    assert (harness.host.answers, harness.take_predicts()) == ([], [])
    harness.deliver(R0, PredictDone(submitted))
    assert (harness.host.answers, harness.take_predicts()) == ([submitted], [(R0, second, 2), (R1, second, 2)])


def exit_rank(harness: RankModelHarness, submitted: int) -> None:
    harness.exit_processes(R0, end=ExitCause(-signal.SIGKILL))


def fail_rank(harness: RankModelHarness, submitted: int) -> None:
    harness.deliver(R0, ProcessFailed("step: expected 1, got 2"))


def fail_predict(harness: RankModelHarness, submitted: int) -> None:
    harness.deliver(R0, PredictFailed(submitted, "INTERNAL", "predict failed", is_exiting=True))


def report_unknown_request(harness: RankModelHarness, submitted: int) -> None:
    harness.deliver(R0, PredictDone(submitted + 1000))


def reply_from_wrong_rank(harness: RankModelHarness, submitted: int) -> None:
    harness.deliver(R0, PredictResult(submitted, ResponseDescription("m", (OUT,))))


def send_unexpected_message(harness: RankModelHarness, submitted: int) -> None:
    harness.deliver(R0, BatchMismatch("rows differ"))


def exceed_predict_timeout(harness: RankModelHarness, submitted: int) -> None:
    harness.now += harness.config.predict_timeout + 1.0
    harness.model.tick(harness.now)


@pytest.mark.parametrize(
    "loss",
    [
        exit_rank,
        fail_rank,
        fail_predict,
        report_unknown_request,
        reply_from_wrong_rank,
        send_unexpected_message,
        exceed_predict_timeout,
    ],
)
def test_loss_of_rank_replaces_group_and_requeues_requests(loss: Any) -> None:
    harness = RankModelHarness().serving()
    submitted = harness.submit_request()
    assert len(harness.take_predicts()) == 2
    loss(harness, submitted)
    alive = [name for name in (R0, R1) if not (loss is exit_rank and name == R0)]
    assert (harness.host.killed, harness.host.aborted, harness.host.answers) == (alive, [], [])
    harness.exit_processes(*alive)
    harness.now += 10.0
    harness.model.tick(harness.now)
    assert harness.processes_of(2) == ["big.2.rank0", "big.2.rank1"]
    harness.loads(2)
    assert harness.take_predicts() == [("big.2.rank0", submitted, 1), ("big.2.rank1", submitted, 1)]
    harness.answers(submitted, 2)
    assert (harness.host.answers, harness.host.refusals, harness.model.deployments.deaths) == ([submitted], [], 1)


def test_first_cause_is_reported() -> None:
    harness = RankModelHarness().serving()
    harness.exit_processes(R1, end=ExitCause(-signal.SIGSEGV))
    [cause] = [each.cause for each in harness.model.generations if each.label == "big.1"]
    assert cause.startswith(f"{R1}: killed by SIGSEGV")


def test_error_of_all_ranks_is_error_of_request() -> None:
    harness = RankModelHarness().serving()
    submitted = harness.submit_request()
    for name in (R0, R1):
        harness.deliver(name, PredictFailed(submitted, "INVALID_ARGUMENT", "x: no such shape", is_exiting=False))
    assert harness.host.refused() == [(submitted, "INVALID_ARGUMENT")]
    assert (harness.model.readiness.is_serving, harness.host.killed) == (True, [])


def test_idle_ranks_are_pinged_without_selftest() -> None:
    harness = RankModelHarness(selftest_interval=0.001).serving()
    pings: set[tuple[str, Any]] = set()
    for _ in range(3):
        harness.now = harness.model.timer.due_at
        harness.model.tick(harness.now)
        pings.update(harness.host.orders_of(Ping))
    assert pings == {(name, Ping(run_selftest=False)) for name in (R0, R1)}


def updated(harness: RankModelHarness, path: str = "/new{rank}.mindir", *, rollback: bool = False) -> RankModelHarness:
    path = "" if rollback else path
    harness.model.update(b"o", "u", harness.now, path=path, weights="", rollback=rollback, grant=OPERATOR)
    return harness


def test_update_loads_beside_old_group_with_free_port() -> None:
    harness = updated(
        RankModelHarness(dataclasses.replace(ON_CARDS, device_ports=(16666, 16667))).serving()
    ).snapshot_taken()
    tables = [json.loads(harness.host.programs[name].rank_table) for name in (R0, "big.2.rank0")]
    assert [each["server_list"][0]["device"][0]["device_port"] for each in tables] == ["16666", "16667"]
    harness.loads(2, source=2)
    assert (harness.host.updated[0].path, harness.model.readiness.main_generation.label) == (
        "/new{rank}.mindir",
        "big.2",
    )
    updated(harness, rollback=True)
    assert (harness.processes_of(3), harness.model.readiness.is_serving) == ([], True)
    harness.exit_processes(R0, R1, end=ExitCause(0))
    assert harness.processes_of(3) == ["big.3.rank0", "big.3.rank1"]
    harness.loads(3)
    assert (harness.host.updated[1].path, harness.model.readiness.main_generation.label) == ("/m{rank}.mindir", "big.3")


@pytest.mark.parametrize("succeeds", [True, False])
def test_update_without_free_port_replaces_old_group(succeeds: bool) -> None:
    harness = updated(RankModelHarness().serving()).snapshot_taken()
    assert (
        [name for name, _ in harness.host.orders_of(Stop)],
        harness.processes_of(2),
        harness.model.readiness.is_serving,
    ) == (
        [R0, R1],
        [],
        False,
    )
    submitted = harness.submit_request()
    harness.exit_processes(R0, R1, end=ExitCause(0))
    assert harness.processes_of(2) == ["big.2.rank0", "big.2.rank1"]
    if succeeds:
        harness.loads(2, source=2)
        assert harness.host.updated[0].path == "/new{rank}.mindir"
    else:
        harness.deliver("big.2.rank0", ProcessFailed("no model")).exit_processes("big.2.rank0", "big.2.rank1")
        assert harness.host.errors[0][1:] == ("FAILED_PRECONDITION", "not updated: big.2.rank0: no model")
        harness.loads(3)
    label = "big.2" if succeeds else "big.3"
    assert harness.take_predicts() == [(f"{label}.rank0", submitted, 1), (f"{label}.rank1", submitted, 1)]


def test_overlap_policy_rejects_update_without_free_port() -> None:
    harness = updated(RankModelHarness(policy="overlap").serving()).snapshot_taken()
    [(_, code, why)] = harness.host.errors
    assert (code, "no port is free" in why, harness.model.readiness.is_serving) == ("FAILED_PRECONDITION", True, True)


class ReloadHarness(RankModelHarness):
    """Serving model with a successor of the same name that must replace it on the same cards."""

    def __init__(self, **config: Any) -> None:
        numbers = IdSequence()
        super().__init__(numbers=numbers)
        self.old = self.serving().model
        config = {"engine": "mindspore_lite", "spares": 0, "sharing": "off", "max_queue": 7, **config}
        self.config = ModelConfig("/m{rank}.mindir", devices=ON_CARDS.all_devices, ranks=ON_CARDS, **config)
        factory = model_factory(self.devices, self.host, self.host)
        self.model = factory.make("big", self.config, numbers, predecessor=self.old)
        self.started()

    def exit_old(self) -> RankModelHarness:
        for name in (R0, R1):
            self.old.deployments.process_events.on_exit(name, ExitCause(0), self.now)
        return self


def test_reloaded_model_replaces_old_group_without_free_port() -> None:
    harness = ReloadHarness()
    assert ([name for name, _ in harness.host.orders_of(Stop)], harness.processes_of(2)) == ([R0, R1], [])
    # Requests wait at the old model, because it would serve again if the new one failed to load.
    submitted = request()
    harness.old.dispatcher.infer(submitted, harness.now)
    assert (harness.old.readiness.is_serving, harness.old.readiness.may_serve_soon) == (False, True)
    harness.exit_old().model.tick(harness.now)
    assert harness.processes_of(2) == ["big.2.rank0", "big.2.rank1"]
    harness.loads(2, source=2)
    harness.model.adopt_requests(harness.old, harness.now)
    harness.old.drain(harness.now, is_replaced=True)
    assert [number for _, number, _ in harness.take_predicts()] == [submitted.number] * 2
    assert harness.old.is_gone


def test_old_model_is_reinstated_if_reload_fails() -> None:
    harness = ReloadHarness()
    harness.exit_old().model.tick(harness.now)
    harness.deliver("big.2.rank0", ProcessFailed("no model"))
    assert harness.model.readiness.has_failed
    harness.model.drain(harness.now)
    harness.old.deployments.reinstate(harness.now)
    assert harness.processes_of(3) == []
    harness.exit_processes("big.2.rank0", "big.2.rank1")
    harness.old.tick(harness.now)
    harness.model = harness.old
    harness.loads(3)
    assert (harness.old.readiness.is_serving, harness.old.readiness.main_generation.label) == (True, "big.3")


def test_overlap_policy_keeps_old_group_on_reload() -> None:
    harness = ReloadHarness(policy="overlap")
    assert (harness.model.readiness.has_failed, harness.old.readiness.is_serving, harness.host.orders_of(Stop)) == (
        True,
        True,
        [],
    )


@pytest.mark.parametrize("path", ["/new.mindir", "/new{rank}.onnx"])
def test_update_path_needs_rank_placeholder(path: str) -> None:
    harness = RankModelHarness().serving()
    with pytest.raises(Exception, match="expected"):
        harness.model.update(b"o", "u", harness.now, path=path, weights="", rollback=False, grant=OPERATOR)


def test_incompatible_model_does_not_take_over() -> None:
    harness = RankModelHarness(dataclasses.replace(ON_CARDS, device_ports=(1, 2))).serving()
    harness.model.update(b"o", "u", harness.now, path="/new{rank}.mindir", weights="", rollback=False, grant=OPERATOR)
    harness.snapshot_taken().connect(2, 2).join(2, TensorSignature("y", "FP32", (-1, 4)))
    assert "is not compatible with the serving one" in harness.host.errors[0][2]
    assert harness.model.readiness.main_generation.label == "big.1"


def test_several_groups_share_queue() -> None:
    groups = (("ascend:0", "ascend:1"), ("ascend:2", "ascend:3"))
    harness = RankModelHarness(dataclasses.replace(ON_CARDS, groups=groups, device_ips={})).started()
    assert harness.host.spawned == [R0, R1, "big.2.rank0", "big.2.rank1"]
    harness.loads(1).loads(2)
    first, second = harness.submit_request(), harness.submit_request()
    take_predicts = harness.take_predicts()
    assert {name.rpartition(".")[0]: number for name, number, _ in take_predicts} == {"big.1": first, "big.2": second}
    harness.answers(second, 2).answers(first, 1)
    assert harness.host.answers == [second, first]


def test_free_memory_is_reported_per_card() -> None:
    harness = RankModelHarness().started().connect().join(device=DeviceMemory(100 * MIB, 50 * MIB))
    assert [harness.devices[f"ascend:{rank}"].free_bytes for rank in range(2)] == [50 * MIB] * 2


@pytest.mark.parametrize(("steps", "goes_on"), [((7, 7), True), ((7, 6), False)])
def test_restarted_daemon_resumes_group_with_equal_steps(steps: tuple[int, int], goes_on: bool) -> None:
    harness = RankModelHarness(dataclasses.replace(ON_CARDS, device_ports=(16666, 16667))).serving()
    record = harness.model.record()
    written: ModelRecord = decode(ModelRecord, json.loads(json.dumps(plain(record))))
    following = RankModelHarness(harness.config.ranks or ON_CARDS, harness.host, numbers=IdSequence(written.last_ids))
    following.host.spawned.clear()
    following.model.resume(written, following.now)
    assert following.devices["ascend:0"].ports == {"big.1": 16666}
    submitted = following.submit_request()
    for name, step in zip((R0, R1), steps, strict=True):
        following.deliver(name, Reconnected(step))
    assert following.model.readiness.is_serving == goes_on
    assert following.take_predicts() == [(R0, submitted, 8), (R1, submitted, 8)] * goes_on
    assert following.host.killed == ([] if goes_on else [R0, R1])
    if not goes_on:
        [cause] = [each.cause for each in following.model.generations if each.label == "big.1"]
        assert cause.startswith("the ranks have run different steps")
        following.exit_processes(R0, R1)
        following.now += 10.0
        following.model.tick(following.now)
        following.loads(2)
        assert following.take_predicts() == [("big.2.rank0", submitted, 1), ("big.2.rank1", submitted, 1)]


def test_restarted_daemon_resumes_groups_on_same_device() -> None:
    two = RanksConfig(size=2, groups=(("cpu", "cpu"),) * 2)
    harness = RankModelHarness(two, engine="mindspore").started().loads(1).loads(2)
    written: ModelRecord = decode(ModelRecord, json.loads(json.dumps(plain(harness.model.record()))))
    following = RankModelHarness(two, harness.host, IdSequence(written.last_ids), engine="mindspore")
    following.model.resume(written, following.now)
    assert following.host.resumed == ["big.1", "big.2"]
