"""Tests of a process that serves several models, as the daemon starts it, on a simulated card."""

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


class GroupProcess:
    """The process "g" of a model group on a simulated card, as the daemon sees it."""

    def __init__(self, daemon: Daemon, host: Host, directory: Path) -> None:
        self.daemon = daemon
        self.host = host
        self.paths = [models.mlp(directory / f"m{seed}.mindir", batch=2, seed=seed) for seed in (1, 2)]

    def begin(self, share: str = "workspace", *, device: str = "ascend:0", samples: Sequence[str] = ("", "")) -> None:
        members = GroupMembers(
            share, tuple(GroupMember(str(path), sample=each) for path, each in zip(self.paths, samples))
        )
        arguments = ["--role", "rank", "--models", members.json()]
        variables = environment(self.host)
        self.daemon.start("g", Path(), *arguments, engine="mindspore_lite", device=device, variables=variables)

    def start(self, share: str = "workspace", **settings: Any) -> Hello:
        self.begin(share, **settings)
        return self.daemon.receive("g", Hello)[0]

    def enter(self, share: str = "workspace", **settings: Any) -> SelfTestDone:
        self.start(share, **settings)
        self.daemon.send("g", JoinGroup())
        self.daemon.receive("g", JoinedGroup)
        self.daemon.send("g", RunSelfTest())
        return self.daemon.receive("g", SelfTestDone)[0]

    def ask(self, member: int, x: Any, step: int = 0) -> None:
        order = Predict(7, RequestDescription("m", (spec_of("x", x),)), model_index=member, step=step)
        self.daemon.send("g", order, frame_of(x))

    @property
    def workspaces(self) -> int:
        """Return the number of workspaces on the card."""
        return [each.kind for each in self.host.card_state(0).allocations].count(driver_state.WORKSPACE)

    def broken(self, order: object) -> str:
        self.daemon.send("g", order)
        broken, _ = self.daemon.receive("g", ProcessFailed)
        assert self.daemon.stop("g") == exit_codes.CANNOT_BUILD
        return broken.reason

    def answer(self, member: int) -> List[Any]:
        self.ask(member, X)
        _, frames = self.daemon.receive("g", PredictResult)
        values: List[Any] = np.frombuffer(frames[0], np.float32).reshape(2, 64).tolist()
        return values


@pytest.fixture
def group(daemon: Daemon, tmp_path: Path) -> GroupProcess:
    return GroupProcess(daemon, Host(tmp_path / "host", cards=1), tmp_path)


@pytest.mark.parametrize("share", ["workspace", "weights", "both"])
def test_each_model_answers_as_alone(group: GroupProcess, share: str) -> None:
    hello = group.start(share)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in group.paths]
    assert hello.sha256 == joint_digest(digests)
    group.daemon.send("g", JoinGroup())
    entered, _ = group.daemon.receive("g", JoinedGroup)
    assert [each.inputs for each in entered.members] == [(TensorSignature("x", "FP32", (2, 64)),)] * 2
    assert (entered.inputs, entered.outputs) == ((), ())
    group.daemon.send("g", RunSelfTest())
    warmed, _ = group.daemon.receive("g", SelfTestDone)
    assert [each.selftest_cases for each in warmed.members] == [({"x": (2, 64)},)] * 2
    assert len({each.selftest_digest for each in warmed.members}) == 2
    for member in (0, 1, 1, 0):
        assert group.answer(member) == models.answer(group.paths[member], X).tolist()
    group.daemon.send("g", Ping(run_selftest=True))
    assert group.daemon.receive("g", Pong)[0] == Pong()
    assert group.daemon.stop("g") == exit_codes.OK


def test_sample_is_the_selftest_of_its_model(group: GroupProcess, tmp_path: Path) -> None:
    group.paths[1] = models.mlp(tmp_path / "free.mindir")
    np.savez(str(tmp_path / "sample.npz"), x=X[:1])
    with_sample = group.enter(samples=("", str(tmp_path / "sample.npz")))
    assert [each.selftest_cases for each in with_sample.members] == [({"x": (2, 64)},), ({"x": (1, 64)},)]
    group.daemon.stop("g")
    without = group.enter()
    assert (without.members[1].selftest_digest, without.members[1].selftest_cases) == ("", ())


def test_models_share_workspace_or_weights(group: GroupProcess) -> None:
    group.host.switch(workspace_mib=64)
    group.enter("workspace")
    assert group.workspaces == 1
    group.daemon.stop("g")
    group.paths[1] = group.paths[0]
    group.enter("weights")
    assert group.workspaces == 2
    assert group.host.copies_of_weights(0) == 1


def test_reports_failed_build_and_attach(group: GroupProcess, tmp_path: Path) -> None:
    group.paths[1] = models.mlp(tmp_path / "exported.mindir", exported=True)
    group.start()
    assert "Model build failed, path: " in group.broken(JoinGroup())


@pytest.mark.parametrize(
    ("share", "device", "problem"),
    [
        ("all", "ascend:0", "models.share: expected one of weights, workspace, both, got 'all'"),
        ("both", "cpu", "device: a group of models runs on a card, expected ascend:N, got 'cpu'"),
    ],
)
def test_reports_invalid_group(group: GroupProcess, share: str, device: str, problem: str) -> None:
    group.begin(share, device=device)
    broken, _ = group.daemon.receive("g", ProcessFailed)
    assert broken.reason == problem
    assert group.daemon.stop("g") == exit_codes.CANNOT_BUILD


def test_failed_predict_ends_process(group: GroupProcess) -> None:
    group.enter()
    group.host.fault("predict", "fail", times=1)
    group.ask(1, X)
    failed, _ = group.daemon.receive("g", PredictFailed)
    assert failed.is_exiting
    assert group.daemon.stop("g") == exit_codes.MODEL_CORRUPTED


def test_unknown_model_index_breaks_protocol(group: GroupProcess) -> None:
    group.enter()
    group.ask(2, X)
    assert group.daemon.children["g"].wait(30) == exit_codes.FAILED
    assert "model_index: expected one index below 2, got [2]" in group.daemon.log("g")


def play(answers: Sequence[Any], *orders: Optional[Sequence[Any]]) -> Tuple[int, Script]:
    """Run a session with two models, of which the second returns these answers in sequence."""
    fixed = ModelSignature((TensorSignature("x", "FP32", (1,)),), (TensorSignature("y", "FP32", (1,)),))
    engines = [FakeEngine(lambda inputs: {"y": inputs["x"]}, fixed), FakeEngine(sequence(*answers), fixed)]
    script, group = Script(*orders), SimpleNamespace(engines=engines, build=lambda: None)
    members: Any = [GroupMember("/m/0"), GroupMember("/m/1")]
    return MultiModelSession(cast(Any, script), cast(Any, group), members).run("ab" * 32), script


def test_reports_answer_changed_by_other_models() -> None:
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    status, script = play([zero, one], encode(JoinGroup()), encode(RunSelfTest()), encode(Stop()))
    assert status == exit_codes.CANNOT_BUILD
    assert script.sent[-1] == ProcessFailed(
        "/m/1: the answer to the self-test changed after the other models of the group had run"
    )


def test_reports_last_step_to_next_daemon() -> None:
    x = np.zeros(1, np.float32)
    order = [
        *encode(Predict(1, RequestDescription("m", (spec_of("x", x),)), model_index=1, step=5)),
        bytes(frame_of(x)),
    ]
    status, script = play([x] * 3, encode(JoinGroup()), encode(RunSelfTest()), order, None, encode(Stop()))
    assert status == exit_codes.OK
    assert script.sent[-1] == Reconnected(5)
