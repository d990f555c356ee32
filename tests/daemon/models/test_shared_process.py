"""Models of a group: one process has them all, gives each its turn, and takes all of them along."""

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


class Home:
    """Two models of a group, and what their process says."""

    def __init__(self, made: Sequence[str] = NAMES, **config: Any) -> None:
        self.host, self.now = FakeHost(), 1000.0
        self.device = DeviceBudget("ascend:0")
        group = Membership("g", "workspace", NAMES, "digest")
        households = model_factory({"ascend:0": self.device}, self.host, self.host)
        self.models: dict[str, ServedModel] = {}
        for name in made:
            there = ModelConfig(
                f"/{name}.mindir",
                "mindspore_lite",
                spares=0,
                sharing="off",
                devices=("ascend:0",),
                group=group,
                **config,
            )
            # As the registry does: one is started before the next one is made.
            self.models[name] = households.make(name, there, IdSequence())
            self.models[name].start(self.now)

    def pinned(self, *names: str) -> Home:
        for name in names or NAMES:
            source = next(each for each in reversed(self.host.pinned) if each.path == f"/{name}.mindir")
            self.models[name].on_snapshot_taken(
                source, Snapshot(f"/s/{name}", "", DIGESTS[name], 100, "", "known"), self.now
            )
        return self

    def says(self, child: str, message: ChildMessage) -> Home:
        self.models["one"].deployments.process_events.on_message(child, message, (), self.now)
        return self

    def loads(self, child: str = P1) -> Home:
        self.says(child, Hello("1", joint_digest([DIGESTS[name] for name in NAMES]), {"weightd": VERSION}, CPU))
        members = tuple(GroupModelSignature((TENSORS[name],), (TENSORS[name],)) for name in NAMES)
        self.says(child, JoinedGroup((), (), None, members))
        proofs = tuple(SelfTestResult(name, ({TENSORS[name].name: (1, 2)},)) for name in NAMES)
        return self.says(child, SelfTestDone("", (), None, None, proofs))

    def serving(self) -> Home:
        self.pinned().loads()
        self.host.orders.clear()
        return self

    def asks(self, name: str) -> int:
        spec = TensorSpec(TENSORS[name].name, "FP32", (5, 2))
        asked = dataclasses.replace(request(), description=RequestDescription(name, (spec,)))
        self.models[name].dispatcher.infer(asked, self.now)
        return asked.number

    def answers(self, number: int, child: str = P1) -> Home:
        return self.says(child, PredictResult(number, ResponseDescription("m", (TensorSpec("y", "FP32", (5, 2)),))))

    def ends(self, child: str, end: ExitCause) -> Home:
        self.models["one"].deployments.process_events.on_exit(child, end, self.now)
        return self

    def later(self) -> Home:
        self.now += 10.0
        for model in self.models.values():
            model.tick(self.now)
        return self

    def given(self) -> list[tuple[str, int, int]]:
        """Who was given which request since the last time, for which of the models."""
        there = [
            (name, order.request, order.model_index) for name, order in self.host.orders if isinstance(order, Predict)
        ]
        self.host.orders = [each for each in self.host.orders if not isinstance(each[1], Predict)]
        return there


def test_the_process_is_started_once_all_snapshots_exist_and_is_told_of_all() -> None:
    home = Home().pinned("two")
    assert home.host.spawned == []
    home.pinned("one")
    assert home.host.spawned == [P1]
    told = json.loads(home.host.programs[P1].members_json)
    assert (told["share"], [each["model"] for each in told["models"]]) == ("workspace", ["/s/one", "/s/two"])
    assert [each["snapshot_identity"] for each in told["models"]] == [f"known:{DIGESTS[name]}" for name in NAMES]
    assert [*home.device.reserved] == ["g@group.1"]


@pytest.mark.parametrize("made", [NAMES, NAMES[::-1]], ids=["as in the group", "in another order"])
def test_each_model_takes_what_is_its_own_and_has_its_turn(made: Sequence[str]) -> None:
    home = Home(made).serving()
    built = {name: model.readiness.built for name, model in home.models.items()}
    assert {name: each.inputs for name, each in built.items() if each} == {name: (TENSORS[name],) for name in NAMES}
    models = json.loads(home.host.programs[P1].members_json)["models"]
    assert [each["model"] for each in models] == ["/s/one", "/s/two"]
    assert [model.readiness.is_serving for model in home.models.values()] == [True, True]
    first, second, other = home.asks("one"), home.asks("one"), home.asks("two")
    assert home.given() == [(P1, first, 0)]
    home.answers(first)
    assert home.given() == [(P1, other, 1)]
    home.answers(other)
    assert home.given() == [(P1, second, 0)]
    home.answers(second)
    assert home.host.answers == [first, other, second]


def _dies(home: Home, running: int) -> None:
    home.ends(P1, ExitCause(-signal.SIGSEGV))


def _breaks(home: Home, running: int) -> None:
    home.says(P1, ProcessFailed("it cannot go on")).ends(P1, ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON))


def _fails(home: Home, running: int) -> None:
    home.says(P1, PredictFailed(running, "INTERNAL", "predict failed", is_exiting=True))
    home.ends(P1, ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON))


def _hangs(home: Home, running: int) -> None:
    home.now += 100.0
    home.models["two"].tick(home.now)
    home.ends(P1, ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON))


@pytest.mark.parametrize("loss", [_dies, _breaks, _fails, _hangs])
def test_all_come_again_and_nothing_that_waits_is_lost(loss: Any) -> None:
    home = Home(timeout=1000.0).serving()
    running, waits = home.asks("one"), home.asks("two")
    home.given()
    loss(home, running)
    assert not any(model.readiness.is_serving for model in home.models.values())
    home.later()
    assert home.host.spawned == [P1, P2]
    home.loads(P2)
    given = home.given()
    while given:
        [(_, number, _)] = given
        home.answers(number, P2)
        given = home.given()
    assert waits in home.host.answers
    refused = [number for number, _ in home.host.refused()]
    assert sorted(home.host.answers + refused) == [running, waits]


def test_without_the_snapshot_of_one_none_is_served() -> None:
    home = Home().pinned("one")
    source = next(each for each in home.host.pinned if each.path == "/two.mindir")
    home.models["two"].on_snapshot_failed(source, "no such file", home.now)
    assert [model.readiness.has_failed for model in home.models.values()] == [True, True]
    assert "two: no such file" in home.models["one"].readiness.unready_reason(home.now)


def test_a_group_that_failed_of_a_transient_cause_is_loaded_again_once_for_all_its_models() -> None:
    home = Home().pinned("one")
    source = next(each for each in home.host.pinned if each.path == "/two.mindir")
    home.models["two"].on_snapshot_failed(source, "no such file", home.now, is_transient=True)
    assert [model.retry_delay_s(home.now) for model in home.models.values()] == [1.0, 1.0]
    home.later()
    assert not any(model.readiness.has_failed for model in home.models.values())
    assert sorted(each.path for each in home.host.pinned) == ["/one.mindir"] * 2 + ["/two.mindir"] * 2
    home.pinned().loads(P2)
    assert all(model.readiness.is_serving for model in home.models.values())


def test_none_is_updated_alone() -> None:
    home = Home().serving()
    with pytest.raises(
        FailedPrecondition, match=r"one shares its processes with two \(group g\) and cannot be updated alone"
    ):
        home.models["one"].update(b"o", "u", home.now, path="/x.mindir", weights="", rollback=False, grant=OPERATOR)


def test_the_process_goes_with_the_last_of_them() -> None:
    home = Home().serving()
    home.models["one"].drain(home.now)
    assert home.models["two"].readiness.is_serving
    asked = home.asks("two")
    assert home.given() == [(P1, asked, 1)]
    home.answers(asked)
    home.models["two"].drain(home.now)
    home.ends(P1, ExitCause(0))
    assert [model.is_gone for model in home.models.values()] == [True, True]
    assert (home.device.reserved, home.models["one"].record()) == ({}, None)


def test_nobody_is_to_wait_for_its_room_while_one_of_them_is_served() -> None:
    """One was removed, and what the other one is to become needs the room: it would wait for ever."""
    home = Home().serving()
    home.models["two"].deployments.mark_leaving("two")
    assert [*home.device.leaving] == []
    home.models["one"].deployments.mark_leaving("one")
    assert [*home.device.leaving] == ["g@group.1"]
