"""A process that serves several models, as the daemon starts it: on a simulated card."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, List, Optional, Sequence, Tuple, cast

import numpy as np
import pytest

from ascendsim import Host, driver_state, environment, models
from testkit.fakeengine import FakeEngine, sequence
from testkit.script import Script
from weightd_common.launch_arguments import GroupMember, GroupMembers, joint_digest
from weightd_protocol.codec import encode
from weightd_protocol.messages.inference import RequestDescription, TensorSignature
from weightd_protocol.messages.ranks import JoinedGroup, JoinGroup, RunSelfTest, SelfTestDone
from weightd_protocol.messages.worker import (
    Hello,
    Ping,
    Pong,
    Predict,
    PredictFailed,
    PredictResult,
    ProcessFailed,
    Reconnected,
    Stop,
)
from weightd_protocol.tensors import frame_of, spec_of
from weightd_worker import exit_codes
from weightd_worker.engines.engine import ModelSignature
from weightd_worker.sessions.group import MultiModelSession

if TYPE_CHECKING:
    from tests.worker.conftest import Daemon

X = np.arange(128, dtype=np.float32).reshape(2, 64) % 3 - 1


class House:
    """The process "g" on a card, as the daemon's end sees it."""

    def __init__(self, daemon: Daemon, host: Host, directory: Path) -> None:
        self.daemon = daemon
        self.host = host
        self.paths = [models.mlp(directory / f"m{seed}.mindir", batch=2, seed=seed) for seed in (1, 2)]

    def begin(self, share: str = "workspace", *, device: str = "ascend:0", samples: Sequence[str] = ("", "")) -> None:
        told = GroupMembers(
            share, tuple(GroupMember(str(path), sample=each) for path, each in zip(self.paths, samples))
        )
        arguments = ["--role", "rank", "--models", told.json()]
        variables = environment(self.host)
        self.daemon.start("g", Path(), *arguments, engine="mindspore_lite", device=device, variables=variables)

    def start(self, share: str = "workspace", **settings: Any) -> Hello:
        self.begin(share, **settings)
        return self.daemon.hear("g", Hello)[0]

    def enter(self, share: str = "workspace", **settings: Any) -> SelfTestDone:
        self.start(share, **settings)
        self.daemon.tell("g", JoinGroup())
        self.daemon.hear("g", JoinedGroup)
        self.daemon.tell("g", RunSelfTest())
        return self.daemon.hear("g", SelfTestDone)[0]

    def ask(self, member: int, x: Any, step: int = 0) -> None:
        order = Predict(7, RequestDescription("m", (spec_of("x", x),)), model_index=member, step=step)
        self.daemon.tell("g", order, frame_of(x))

    @property
    def workspaces(self) -> int:
        """How many lie on the card."""
        return [each.kind for each in self.host.card_state(0).allocations].count(driver_state.WORKSPACE)

    def broken(self, order: object) -> str:
        self.daemon.tell("g", order)
        broken, _ = self.daemon.hear("g", ProcessFailed)
        assert self.daemon.stop("g") == exit_codes.CANNOT_BUILD
        return broken.reason

    def answer(self, member: int) -> List[Any]:
        self.ask(member, X)
        _, frames = self.daemon.hear("g", PredictResult)
        values: List[Any] = np.frombuffer(frames[0], np.float32).reshape(2, 64).tolist()
        return values


@pytest.fixture
def house(daemon: Daemon, tmp_path: Path) -> House:
    return House(daemon, Host(tmp_path / "host", cards=1), tmp_path)


@pytest.mark.parametrize("share", ["workspace", "weights", "both"])
def test_each_model_answers_as_it_does_alone(house: House, share: str) -> None:
    hello = house.start(share)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in house.paths]
    assert hello.sha256 == joint_digest(digests)
    house.daemon.tell("g", JoinGroup())
    entered, _ = house.daemon.hear("g", JoinedGroup)
    assert [each.inputs for each in entered.members] == [(TensorSignature("x", "FP32", (2, 64)),)] * 2
    assert (entered.inputs, entered.outputs) == ((), ())
    house.daemon.tell("g", RunSelfTest())
    warmed, _ = house.daemon.hear("g", SelfTestDone)
    assert [each.selftest_cases for each in warmed.members] == [({"x": (2, 64)},)] * 2
    assert len({each.selftest_digest for each in warmed.members}) == 2
    for member in (0, 1, 1, 0):
        assert house.answer(member) == models.answer(house.paths[member], X).tolist()
    house.daemon.tell("g", Ping(run_selftest=True))
    assert house.daemon.hear("g", Pong)[0] == Pong()
    assert house.daemon.stop("g") == exit_codes.OK


def test_a_sample_is_what_a_model_is_proved_by(house: House, tmp_path: Path) -> None:
    house.paths[1] = models.mlp(tmp_path / "free.mindir")
    np.savez(str(tmp_path / "sample.npz"), x=X[:1])
    with_sample = house.enter(samples=("", str(tmp_path / "sample.npz")))
    assert [each.selftest_cases for each in with_sample.members] == [({"x": (2, 64)},), ({"x": (1, 64)},)]
    house.daemon.stop("g")
    without = house.enter()
    assert (without.members[1].selftest_digest, without.members[1].selftest_cases) == ("", ())


def test_they_have_one_workspace_or_one_copy_of_the_weights_of_one_file(house: House) -> None:
    house.host.switch(workspace_mib=64)
    house.enter("workspace")
    assert house.workspaces == 1
    house.daemon.stop("g")
    house.paths[1] = house.paths[0]
    house.enter("weights")
    assert house.workspaces == 2
    assert house.host.copies_of_weights(0) == 1


def test_what_cannot_be_is_told(house: House, tmp_path: Path) -> None:
    house.paths[1] = models.mlp(tmp_path / "exported.mindir", exported=True)
    house.start()
    assert "Model build failed, path: " in house.broken(JoinGroup())


@pytest.mark.parametrize(
    ("share", "device", "problem"),
    [
        ("all", "ascend:0", "models.share: expected one of weights, workspace, both, got 'all'"),
        ("both", "cpu", "device: a group of models runs on a card, expected ascend:N, got 'cpu'"),
    ],
)
def test_a_group_that_cannot_be_is_told(house: House, share: str, device: str, problem: str) -> None:
    house.begin(share, device=device)
    broken, _ = house.daemon.hear("g", ProcessFailed)
    assert broken.reason == problem
    assert house.daemon.stop("g") == exit_codes.CANNOT_BUILD


def test_a_predict_that_fails_is_the_end_of_all(house: House) -> None:
    house.enter()
    house.host.fault("predict", "fail", times=1)
    house.ask(1, X)
    failed, _ = house.daemon.hear("g", PredictFailed)
    assert failed.is_exiting
    assert house.daemon.stop("g") == exit_codes.MODEL_CORRUPTED


def test_a_model_that_there_is_not_breaks_the_protocol(house: House) -> None:
    house.enter()
    house.ask(2, X)
    assert house.daemon.children["g"].wait(30) == exit_codes.FAILED
    assert "model_index: expected one index below 2, got [2]" in house.daemon.log("g")


def play(answers: Sequence[Any], *orders: Optional[Sequence[Any]]) -> Tuple[int, Script]:
    """Run a session with two models, of which the second gives these answers one after another."""
    fixed = ModelSignature((TensorSignature("x", "FP32", (1,)),), (TensorSignature("y", "FP32", (1,)),))
    engines = [FakeEngine(lambda inputs: {"y": inputs["x"]}, fixed), FakeEngine(sequence(*answers), fixed)]
    script, group = Script(*orders), SimpleNamespace(engines=engines, build=lambda: None)
    told: Any = [GroupMember("/m/0"), GroupMember("/m/1")]
    return MultiModelSession(cast(Any, script), cast(Any, group), told).run("ab" * 32), script


def test_a_model_whose_answer_changes_when_others_run_is_told() -> None:
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    status, script = play([zero, one], encode(JoinGroup()), encode(RunSelfTest()), encode(Stop()))
    assert status == exit_codes.CANNOT_BUILD
    assert script.sent[-1] == ProcessFailed(
        "/m/1: the answer to the self-test changed after the other models of the group had run"
    )


def test_another_daemon_is_told_the_last_step() -> None:
    x = np.zeros(1, np.float32)
    order = [
        *encode(Predict(1, RequestDescription("m", (spec_of("x", x),)), model_index=1, step=5)),
        bytes(frame_of(x)),
    ]
    status, script = play([x] * 3, encode(JoinGroup()), encode(RunSelfTest()), order, None, encode(Stop()))
    assert status == exit_codes.OK
    assert script.sent[-1] == Reconnected(5)
