"""Tests of two ranks as the daemon starts them: real processes on simulated cards that combine all data they
receive."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Type, TypeVar

import numpy as np
import pytest

from ascendsim import Host, environment, ranks
from weightd_common.launch_arguments import RendezvousInfo
from weightd_protocol.codec import decode
from weightd_protocol.messages.inference import RequestDescription, TensorSignature
from weightd_protocol.messages.ranks import JoinedGroup, JoinGroup, PredictDone, RunSelfTest, SelfTestDone
from weightd_protocol.messages.worker import FROM_CHILD, Hello, Predict, PredictFailed, PredictResult, ProcessFailed
from weightd_protocol.tensors import frame_of, spec_of
from weightd_worker import exit_codes

if TYPE_CHECKING:
    from tests.worker.conftest import Daemon

M = TypeVar("M")

X = np.arange(48, dtype=np.float32).reshape(3, 16) % 5 - 2
INPUTS = (TensorSignature("x", "FP32", (-1, 16)),)


class Group:
    """The ranks "r0" and "r1" as the daemon sees them."""

    def __init__(self, daemon: Daemon, host: Host, directory: Path) -> None:
        self.daemon = daemon
        self.host = host
        self.directory = directory
        self.cut = ranks.mlp(directory / "slices")
        self.table = ranks.table(directory / "table.json", [0, 1])
        self.selftest = directory / "selftest.npz"
        np.savez(str(self.selftest), x=X, output_0=ranks.whole(X))
        self.step = 0

    def start(self, rank: int, *, model: Optional[Path] = None, name: str = "", **options: Any) -> None:
        """Start one rank, optionally under another name."""
        groups = str(self.cut.group_infos[rank]) if self.cut.group_infos else ""
        meeting = RendezvousInfo(rank, 2, 120, 68, 1, rank_table=str(self.table), group_info=groups, buffer_mib=64)
        meeting = meeting._replace(**options)
        arguments = ["--role", "rank", "--rendezvous", meeting.json(), "--selftest-inputs", str(self.selftest)]
        path = model or self.cut.paths[rank]
        self.daemon.start(
            name or f"r{rank}",
            path,
            *arguments,
            engine="mindspore_lite",
            device=f"ascend:{rank}",
            variables=environment(self.host),
        )

    def receive(self, kind: Type[M]) -> List[M]:
        """Wait until both ranks have sent a message of this type; return the messages."""
        replies: Dict[str, Any] = {}
        while len(replies) < 2:
            peer, *frames = self.daemon.socket.recv_multipart()
            message = decode(frames, FROM_CHILD)
            assert isinstance(message, kind), message
            replies[peer.decode()] = message
        return [replies["r0"], replies["r1"]]

    def send(self, order: object, *frames: Any) -> None:
        for name in ("r0", "r1"):
            self.daemon.send(name, order, *frames)

    def enter(self, **options: Any) -> List[SelfTestDone]:
        """Start both ranks and run their self-test, so that they can serve."""
        for rank in (0, 1):
            self.start(rank, **options)
        self.receive(Hello)
        self.send(JoinGroup())
        self.receive(JoinedGroup)
        self.send(RunSelfTest())
        return self.receive(SelfTestDone)

    def ask(self, x: Any) -> None:
        self.step += 1
        order = Predict(self.step, RequestDescription("m", (spec_of("x", x),)), step=self.step)
        self.send(order, frame_of(x))

    def answers(self) -> List[Any]:
        """Return each rank's reply to the last request: its output, or another message."""
        replies: Dict[str, Any] = {}
        while len(replies) < 2:
            peer, *frames = self.daemon.socket.recv_multipart()
            message: Any = decode(frames, FROM_CHILD)
            if isinstance(message, PredictResult):
                (spec,) = message.description.outputs
                message = np.frombuffer(frames[2], np.float32).reshape(spec.shape)
            replies[peer.decode()] = message
        return [replies["r0"], replies["r1"]]

    def stop(self) -> List[int]:
        return [self.daemon.stop(name) for name in ("r0", "r1")]


@pytest.fixture
def group(daemon: Daemon, tmp_path: Path) -> Group:
    return Group(daemon, Host(tmp_path / "host", cards=2), tmp_path)


def test_life_cycle(group: Group) -> None:
    daemon = group.daemon
    for rank in (0, 1):
        group.start(rank)
    hellos = group.receive(Hello)
    own = int(Path("/proc/self/oom_score_adj").read_text("ascii"))
    for rank, hello in enumerate(hellos):
        assert hello.slice is not None
        assert (hello.slice.rank, hello.slice.inputs) == (rank, INPUTS)
        assert hello.sha256 == hashlib.sha256(group.cut.paths[rank].read_bytes()).hexdigest()
        # Each rank has a working directory where libraries may write; the kernel kills it before the daemon.
        assert os.readlink(f"/proc/{hello.engine_pid}/cwd") == str(daemon.directory / f"r{rank}.files")
        assert int(Path(f"/proc/{hello.engine_pid}/oom_score_adj").read_text("ascii")) == min(own + 400, 1000)
    group.send(JoinGroup())
    entered = group.receive(JoinedGroup)
    assert entered[0].inputs == entered[1].inputs == INPUTS
    assert entered[0].outputs == entered[1].outputs
    group.send(RunSelfTest(8))
    quiet, proven = group.receive(SelfTestDone)
    assert (quiet.selftest_digest, quiet.row_support) == ("", None)
    assert len(proven.selftest_digest) == 64
    assert proven.row_support is not None
    assert (proven.row_support.inputs, len(proven.row_support.outputs), proven.row_support.is_equal) == (
        ("x",),
        1,
        False,
    )
    for rows in (1, 3, 2):
        group.ask(X[:rows])
        done, y = group.answers()
        assert done == PredictDone(group.step)
        assert np.array_equal(y, ranks.whole(X[:rows]))
    assert group.stop() == [exit_codes.OK, exit_codes.OK]


def test_both_ranks_answer_with_their_rows(group: Group) -> None:
    group.cut = ranks.mlp(group.directory / "sliced", output="sliced")
    np.savez(str(group.selftest), x=X[:2], output_0=ranks.whole(X[:2]))
    warmed = group.enter(reply_rank=None)
    assert all(each.selftest_digest for each in warmed)
    x = np.concatenate([X, X])
    group.ask(x)
    assert np.array_equal(np.concatenate(group.answers()), ranks.whole(x))
    # All ranks reject rows that leave a rank without a share, before anything is sent, and continue.
    group.ask(np.concatenate([X, X])[:3])
    refused = group.answers()
    assert [(each.is_exiting, each.code) for each in refused] == [(False, "INVALID_ARGUMENT")] * 2
    assert refused[0].error == "input x: expected a multiple of 2 rows, one for each rank, got 3"
    group.ask(x)
    assert np.array_equal(np.concatenate(group.answers()), ranks.whole(x))


def test_pipeline_stages_have_separate_groups(group: Group) -> None:
    group.cut = ranks.mlp(group.directory / "staged", stages=2)
    np.savez(str(group.selftest), x=X, output_0=ranks.whole(X, layers=4))
    group.enter()
    group.ask(X[:1])
    assert np.array_equal(group.answers()[1], ranks.whole(X[:1], layers=4))


def test_selftest_reveals_duplicate_slice(group: Group) -> None:
    for rank in (0, 1):
        group.start(rank, model=group.cut.paths[0])
    group.receive(Hello)
    group.send(JoinGroup())
    group.receive(JoinedGroup)
    group.send(RunSelfTest())
    replies = group.answers()
    assert isinstance(replies[0], SelfTestDone)
    assert isinstance(replies[1], ProcessFailed)
    assert "the answer to the self-test is wrong: output output_0: differs by " in replies[1].reason


def test_rank_times_out_after_other_is_killed(group: Group) -> None:
    group.enter()
    group.daemon.children["r0"].kill()
    group.daemon.children["r0"].wait()
    group.host.switch(hccl_second=0.003)
    order = Predict(1, RequestDescription("m", (spec_of("x", X),)), step=1)
    group.daemon.send("r1", order, frame_of(X))
    failed, _ = group.daemon.receive("r1", PredictFailed)
    assert failed.is_exiting
    assert "EI0002" in failed.error
    assert group.daemon.stop("r1") == exit_codes.MODEL_CORRUPTED


def test_rank_out_of_step_fails_before_predict(group: Group) -> None:
    group.enter()
    order = Predict(1, RequestDescription("m", (spec_of("x", X),)), step=2)
    group.send(order, frame_of(X))
    assert group.receive(ProcessFailed) == [ProcessFailed("step: expected 1, got 2")] * 2
    assert group.stop() == [exit_codes.MODEL_CORRUPTED] * 2


def test_sigterm_ends_rank(group: Group) -> None:
    group.enter()
    group.daemon.children["r0"].send_signal(signal.SIGTERM)
    assert group.daemon.children["r0"].wait(30) == -signal.SIGTERM


def test_reports_failed_join_and_load(group: Group, tmp_path: Path) -> None:
    group.start(0, rank_table=str(tmp_path / "none.json"))
    group.daemon.receive("r0", Hello)
    group.daemon.send("r0", JoinGroup())
    broken, _ = group.daemon.receive("r0", ProcessFailed)
    assert "none.json" in broken.reason
    assert group.daemon.stop("r0") == exit_codes.CANNOT_BUILD
    (tmp_path / "junk.mindir").write_bytes(b"junk")
    group.start(1, model=tmp_path / "junk.mindir")
    broken, _ = group.daemon.receive("r1", ProcessFailed)
    assert broken.reason == f"{tmp_path}/junk.mindir: expected a complete MindIR file"
    assert group.daemon.stop("r1") == exit_codes.CANNOT_BUILD


def test_waits_for_port_in_use(group: Group) -> None:
    group.enter()
    group.start(0, name="late")
    group.daemon.receive("late", Hello)
    group.daemon.send("late", JoinGroup())
    broken, _ = group.daemon.receive("late", ProcessFailed)
    assert broken.is_out_of_memory
    assert "EI0019" in broken.reason
