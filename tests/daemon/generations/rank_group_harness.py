"""Test harness for a rank group: passes events to it and returns the actions that it requests."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from weightd_daemon.generations.actions import Action, Kill, Role, Send
from weightd_daemon.generations.base import GenerationSetup
from weightd_daemon.generations.persisted import GenerationRecord, record_generation, resume_generation
from weightd_daemon.generations.rank_group import RankGroup
from weightd_daemon.generations.spec import GenerationSpec, ModelSource, RankGroupSpec, RowTestSpec
from weightd_daemon.generations.states import GenerationState
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.ranks import JoinedGroup, JoinGroup, RankSlice, RunSelfTest, SelfTestDone
from weightd_protocol.messages.worker import Hello, ProcessFailed, Reconnected, Stop
from weightd_protocol.messages.worker_common import AttachAllowed, SelfTestCases, SharingTraits
from weightd_protocol.schema import decode, plain
from weightd_protocol.version import VERSION

LOAD_TIMEOUT_S, CONNECT_TIMEOUT_S, PREDICT_TIMEOUT_S = 500.0, 120.0, 40.0
SHA = "5" * 64
X, Y = TensorSignature("x", "FP32", (-1, 4)), TensorSignature("y", "FP32", (2, 3))
TRAITS = SharingTraits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)
SLOT = "m.7"
BROKER = "m.7.broker"
R0, R1, R2 = (f"m.7.rank{rank}" for rank in range(3))
CASES: SelfTestCases = ({"x": (1, 4)},)
SELFTEST_DONE = SelfTestDone("digest", CASES)
JOIN_GROUP, RUN_SELFTEST, STOP = JoinGroup(), RunSelfTest(), Stop()
EXITED = ExitCause(3)


def digest(rank: int) -> str:
    return str(rank) * 64


def rank_of(name: str) -> int:
    return int(name.rpartition("rank")[2])


def hello_of(name: str, **fields: Any) -> Hello:
    """Return the Hello of a valid process."""
    if name == BROKER:
        return replace(Hello("pid", "broker", {"weightd": VERSION}, TRAITS), **fields)
    rank = rank_of(name)
    hello = Hello("pid", digest(rank), {"weightd": VERSION}, TRAITS, slice=RankSlice(rank, (X,), (Y,)))
    return replace(hello, **fields)


def kills(*names: str) -> list[Action]:
    return [Kill(name) for name in names]


def sends(order: Any, *names: str) -> list[Action]:
    return [Send(name, order) for name in names]


class RankGroupHarness:
    """A rank group under test. Event methods return the requested actions; setup methods return the harness."""

    def __init__(self, size: int = 2, *, rows: RowTestSpec | None = None, **ranks: Any) -> None:
        self.now = 1000.0
        ranks = {"reply_rank": size - 1, "has_broker": True, **ranks}
        devices = tuple(f"ascend:{rank}" for rank in range(size))
        self.ranks = RankGroupSpec(size, devices, CONNECT_TIMEOUT_S, **ranks)
        self.terms = GenerationSpec(
            1,
            LOAD_TIMEOUT_S,
            is_sharing=False,
            predict_timeout=PREDICT_TIMEOUT_S,
            row_test=rows or RowTestSpec(),
            rank_group=self.ranks,
        )
        self.setup = GenerationSetup("m.7", self.terms, "ascend:0", ModelSource("/m{rank}.mindir", number=3), 7)
        self.rank_group = RankGroup(self.setup)
        self.rank_group.start()

    @property
    def state(self) -> GenerationState:
        return self.rank_group.state

    @property
    def cause(self) -> str:
        return self.rank_group.cause

    @property
    def names(self) -> list[str]:
        return [*self.rank_group.children]

    @property
    def rank_names(self) -> list[str]:
        return [each.name for each in self.rank_group.children.values() if each.role is Role.RANK]

    # --- events ---

    def take_actions(self) -> list[Action]:
        return self.rank_group.take_actions()

    def snapshot_taken(self) -> list[Action]:
        self.rank_group.on_snapshot_taken(SHA, self.now, slice_digests=tuple(map(digest, range(self.ranks.size))))
        return self.take_actions()

    def hello(self, *names: str, **fields: Any) -> list[Action]:
        for name in names:
            self.rank_group.on_message(name, hello_of(name, **fields), self.now)
        return self.take_actions()

    def joined(self, *names: str, joined: JoinedGroup | None = None) -> list[Action]:
        for name in names:
            self.rank_group.on_message(name, joined or JoinedGroup((X,), (Y,)), self.now)
        return self.take_actions()

    def selftest_done(self, *names: str, selftest_done: SelfTestDone = SELFTEST_DONE) -> list[Action]:
        for name in names:
            self.rank_group.on_message(name, selftest_done, self.now)
        return self.take_actions()

    def reports_failure(self, name: str, cause: str, *, no_room: bool = False) -> list[Action]:
        self.rank_group.on_message(name, ProcessFailed(cause, is_out_of_memory=no_room), self.now)
        return self.take_actions()

    def leaves(self, name: str, why: str = "") -> list[Action]:
        self.rank_group.on_leaving(name, self.now, why)
        return self.take_actions()

    def sends_unexpected(self, name: str) -> list[Action]:
        """Send a message that no rank sends."""
        self.rank_group.on_message(name, AttachAllowed(""), self.now)
        return self.take_actions()

    def hangs(self, name: str, why: str = "silence") -> list[Action]:
        self.rank_group.on_hung(name, why, self.now)
        return self.take_actions()

    def exits(self, *names: str, end: ExitCause = EXITED) -> list[Action]:
        for name in names:
            self.rank_group.on_exit(name, end, self.now)
        return self.take_actions()

    def reconnected(self, *names: str, step: int = 0) -> list[Action]:
        for name in names:
            self.rank_group.on_message(name, Reconnected(step), self.now)
        return self.take_actions()

    def drain(self, timeout: float = 0.0) -> list[Action]:
        self.rank_group.drain(self.now, timeout_s=timeout)
        return self.take_actions()

    def after(self, seconds: float) -> list[Action]:
        self.now += seconds
        self.rank_group.tick(self.now)
        return self.take_actions()

    # --- setup ---

    def spawned(self) -> RankGroupHarness:
        self.snapshot_taken()
        return self

    def loading(self) -> RankGroupHarness:
        self.spawned().hello(*self.names)
        return self

    def warming(self) -> RankGroupHarness:
        self.loading().joined(*self.rank_names)
        return self

    def serving(self) -> RankGroupHarness:
        self.warming().selftest_done(*self.rank_names)
        return self

    def resumed(self) -> RankGroupHarness:
        """Return the harness of the next daemon, which has read the state of this one."""
        written = record_generation(self.rank_group, None)
        assert written is not None
        written = decode(GenerationRecord, json.loads(json.dumps(plain(written))))
        self.now += 1000.0
        rank_group = resume_generation(self.setup, written, self.now)
        assert isinstance(rank_group, RankGroup)
        self.rank_group = rank_group
        return self
