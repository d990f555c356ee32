"""Tests of a model group: one process serves all models in turn, and its loss affects all of them."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from testkit.model_factory import model_factory
from weightd_common.launch_arguments import joint_digest
from weightd_common.safe_open import OPERATOR
from weightd_daemon.config.model import Membership, ModelConfig
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.versions import IdSequence
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_daemon.processes.events import Snapshot
from weightd_protocol.errors import FailedPrecondition
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSignature, TensorSpec
from weightd_protocol.messages.ranks import GroupModelSignature, JoinedGroup, SelfTestDone, SelfTestResult
from weightd_protocol.messages.worker import ChildMessage, Hello, Predict, PredictFailed, PredictResult, ProcessFailed
from weightd_protocol.version import VERSION

from .fakehost import CPU, FakeHost, request

NAMES = ("one", "two")
P1, P2 = "g@group.1.rank0", "g@group.2.rank0"
DIGESTS = {"one": "1" * 64, "two": "2" * 64}
TENSORS = {name: TensorSignature(f"x_{name}", "FP32", (-1, 2)) for name in NAMES}


class GroupHarness:
    """Two models of a group; the test sends the messages of their process."""

    def __init__(self, made: Sequence[str] = NAMES, **config: Any) -> None:
        self.host, self.now = FakeHost(), 1000.0
        self.device = DeviceBudget("ascend:0")
        group = Membership("g", "workspace", NAMES, "digest")
        factory = model_factory({"ascend:0": self.device}, self.host, self.host)
        self.models: dict[str, ServedModel] = {}
        for name in made:
            member_config = ModelConfig(
                f"/{name}.mindir",
                "mindspore_lite",
                spares=0,
                sharing="off",
                devices=("ascend:0",),
                group=group,
                **config,
            )
            # The registry also starts each model before it creates the next one.
            self.models[name] = factory.make(name, member_config, IdSequence())
            self.models[name].start(self.now)

    def snapshot_taken(self, *names: str) -> GroupHarness:
        for name in names or NAMES:
            source = next(each for each in reversed(self.host.requested_snapshots) if each.path == f"/{name}.mindir")
            self.models[name].on_snapshot_taken(
                source, Snapshot(f"/s/{name}", "", DIGESTS[name], 100, "", "known"), self.now
            )
        return self

    def deliver(self, child: str, message: ChildMessage) -> GroupHarness:
        self.models["one"].deployments.process_events.on_message(child, message, (), self.now)
        return self

    def loads(self, child: str = P1) -> GroupHarness:
        self.deliver(child, Hello("1", joint_digest([DIGESTS[name] for name in NAMES]), {"weightd": VERSION}, CPU))
        members = tuple(GroupModelSignature((TENSORS[name],), (TENSORS[name],)) for name in NAMES)
        self.deliver(child, JoinedGroup((), (), None, members))
        selftests = tuple(SelfTestResult(name, ({TENSORS[name].name: (1, 2)},)) for name in NAMES)
        return self.deliver(child, SelfTestDone("", (), None, None, selftests))

    def serving(self) -> GroupHarness:
        self.snapshot_taken().loads()
        self.host.orders.clear()
        return self

    def submit_request(self, name: str) -> int:
        spec = TensorSpec(TENSORS[name].name, "FP32", (5, 2))
        submitted = dataclasses.replace(request(), description=RequestDescription(name, (spec,)))
        self.models[name].dispatcher.infer(submitted, self.now)
        return submitted.number

    def answers(self, number: int, child: str = P1) -> GroupHarness:
        return self.deliver(child, PredictResult(number, ResponseDescription("m", (TensorSpec("y", "FP32", (5, 2)),))))

    def exit_process(self, child: str, end: ExitCause) -> GroupHarness:
        self.models["one"].deployments.process_events.on_exit(child, end, self.now)
        return self

    def advance(self) -> GroupHarness:
        self.now += 10.0
        for model in self.models.values():
            model.tick(self.now)
        return self

    def take_predicts(self) -> list[tuple[str, int, int]]:
        """Return process, request and model index of each predict since the last call."""
        member_config = [
            (name, order.request, order.model_index) for name, order in self.host.orders if isinstance(order, Predict)
        ]
        self.host.orders = [each for each in self.host.orders if not isinstance(each[1], Predict)]
        return member_config


def test_process_starts_after_all_snapshots() -> None:
    group = GroupHarness().snapshot_taken("two")
    assert group.host.spawned == []
    group.snapshot_taken("one")
    assert group.host.spawned == [P1]
    members = json.loads(group.host.programs[P1].members_json)
    assert (members["share"], [each["model"] for each in members["models"]]) == ("workspace", ["/s/one", "/s/two"])
    assert [each["snapshot_identity"] for each in members["models"]] == [f"known:{DIGESTS[name]}" for name in NAMES]
    assert [*group.device.reserved] == ["g@group.1"]


@pytest.mark.parametrize("made", [NAMES, NAMES[::-1]], ids=["group order", "reverse order"])
def test_each_model_has_own_signature_and_turn(made: Sequence[str]) -> None:
    group = GroupHarness(made).serving()
    built = {name: model.readiness.built for name, model in group.models.items()}
    assert {name: each.inputs for name, each in built.items() if each} == {name: (TENSORS[name],) for name in NAMES}
    models = json.loads(group.host.programs[P1].members_json)["models"]
    assert [each["model"] for each in models] == ["/s/one", "/s/two"]
    assert [model.readiness.is_serving for model in group.models.values()] == [True, True]
    first, second, other = group.submit_request("one"), group.submit_request("one"), group.submit_request("two")
    assert group.take_predicts() == [(P1, first, 0)]
    group.answers(first)
    assert group.take_predicts() == [(P1, other, 1)]
    group.answers(other)
    assert group.take_predicts() == [(P1, second, 0)]
    group.answers(second)
    assert group.host.answers == [first, other, second]


def crash(group: GroupHarness, running: int) -> None:
    group.exit_process(P1, ExitCause(-signal.SIGSEGV))


def fail_process(group: GroupHarness, running: int) -> None:
    group.deliver(P1, ProcessFailed("it cannot go on")).exit_process(
        P1, ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON)
    )


def fail_predict(group: GroupHarness, running: int) -> None:
    group.deliver(P1, PredictFailed(running, "INTERNAL", "predict failed", is_exiting=True))
    group.exit_process(P1, ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON))


def hang(group: GroupHarness, running: int) -> None:
    group.now += 100.0
    group.models["two"].tick(group.now)
    group.exit_process(P1, ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON))


@pytest.mark.parametrize("loss", [crash, fail_process, fail_predict, hang])
def test_lost_process_is_replaced_without_lost_requests(loss: Any) -> None:
    group = GroupHarness(timeout=1000.0).serving()
    running, waits = group.submit_request("one"), group.submit_request("two")
    group.take_predicts()
    loss(group, running)
    assert not any(model.readiness.is_serving for model in group.models.values())
    group.advance()
    assert group.host.spawned == [P1, P2]
    group.loads(P2)
    take_predicts = group.take_predicts()
    while take_predicts:
        [(_, number, _)] = take_predicts
        group.answers(number, P2)
        take_predicts = group.take_predicts()
    assert waits in group.host.answers
    refused = [number for number, _ in group.host.refused()]
    assert sorted(group.host.answers + refused) == [running, waits]


def test_failed_snapshot_of_one_model_fails_group() -> None:
    group = GroupHarness().snapshot_taken("one")
    source = next(each for each in group.host.requested_snapshots if each.path == "/two.mindir")
    group.models["two"].on_snapshot_failed(source, "no such file", group.now)
    assert [model.readiness.has_failed for model in group.models.values()] == [True, True]
    assert "two: no such file" in group.models["one"].readiness.unready_reason(group.now)


def test_transient_failure_reloads_group_once() -> None:
    group = GroupHarness().snapshot_taken("one")
    source = next(each for each in group.host.requested_snapshots if each.path == "/two.mindir")
    group.models["two"].on_snapshot_failed(source, "no such file", group.now, is_transient=True)
    assert [model.loading.retry_delay_s(group.now) for model in group.models.values()] == [1.0, 1.0]
    group.advance()
    assert not any(model.readiness.has_failed for model in group.models.values())
    assert sorted(each.path for each in group.host.requested_snapshots) == ["/one.mindir"] * 2 + ["/two.mindir"] * 2
    group.snapshot_taken().loads(P2)
    assert all(model.readiness.is_serving for model in group.models.values())


def test_single_member_cannot_be_updated() -> None:
    group = GroupHarness().serving()
    with pytest.raises(
        FailedPrecondition, match=r"one shares its processes with two \(group g\) and cannot be updated alone"
    ):
        group.models["one"].update(b"o", "u", group.now, path="/x.mindir", weights="", rollback=False, grant=OPERATOR)


def test_process_stops_after_last_model_drained() -> None:
    group = GroupHarness().serving()
    group.models["one"].drain(group.now)
    assert group.models["two"].readiness.is_serving
    submitted = group.submit_request("two")
    assert group.take_predicts() == [(P1, submitted, 1)]
    group.answers(submitted)
    group.models["two"].drain(group.now)
    group.exit_process(P1, ExitCause(0))
    assert [model.is_gone for model in group.models.values()] == [True, True]
    assert (group.device.reserved, group.models["one"].record()) == ({}, None)


def test_memory_is_not_promised_while_one_model_serves() -> None:
    """One model was removed, and a new deployment needs the memory. It would wait without end."""
    group = GroupHarness().serving()
    group.models["two"].deployments.mark_leaving("two")
    assert [*group.device.leaving] == []
    group.models["one"].deployments.mark_leaving("one")
    assert [*group.device.leaving] == ["g@group.1"]
