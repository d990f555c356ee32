"""Test harness for a generation: passes events to it and returns the actions that it requests."""

from __future__ import annotations

import json
from typing import Any

from weightd_daemon.generations.actions import Action, Kill, Role, Send
from weightd_daemon.generations.base import GenerationSetup
from weightd_daemon.generations.persisted import GenerationRecord, SealRecord, record_generation, resume_generation
from weightd_daemon.generations.progress import FailureReason
from weightd_daemon.generations.shared_weights import Generation
from weightd_daemon.generations.spec import GenerationSpec, ModelSource, SelfTestSpec
from weightd_daemon.generations.states import GenerationState
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker import Attach, Attached, Built, Hello, ProcessFailed, Reconnected, Stop, TrimStore
from weightd_protocol.messages.worker_common import AllowAttach, AttachAllowed, SharingTraits
from weightd_protocol.schema import decode, plain
from weightd_protocol.version import VERSION

FOREVER = float("inf")
SEAL = SealRecord(8192, 10**18)
EXITED = ExitCause(3)
LOAD_TIMEOUT_S, PREDICT_TIMEOUT_S = 500.0, 40.0
SHA = "5" * 64
X = TensorSignature("x", "FP32", (-1, 4))
BUILT = Built("/store", (X,), (X,), ({"x": (2,)},), "digest", 4096, "a note")
ATTACHED = Attached("digest", 4000, "another note")
CPU = SharingTraits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)
CARD = SharingTraits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)
HOLDER, HOLDER2, HOLDER3 = "m.7.holder", "m.7.holder2", "m.7.holder3"
TRIM_STORE = Send(HOLDER, TrimStore())


def worker(number: int) -> str:
    return f"m.7.w{number}"


W1, W2, W3, W4, W5 = map(worker, range(1, 6))


def pid(name: str) -> str:
    return f"pid of {name}"


def abort(name: str) -> Action:
    return Kill(name, abort=True)


def stop(name: str) -> Action:
    return Send(name, Stop())


def attach(name: str, handle: str = BUILT.handle) -> Action:
    return Send(name, Attach(handle, BUILT.selftest_cases, selftest_digest="digest"))


def allow(name: str) -> Action:
    """Return the action that lets the holder admit this process."""
    return Send(HOLDER, AllowAttach((pid(name),)))


class GenerationHarness:
    """A generation under test. Event methods return the requested actions; setup methods return the harness."""

    def __init__(self, workers: int = 2, traits: SharingTraits = CPU, **terms: Any) -> None:
        self.traits = traits
        self.now = 1000.0
        self.terms = GenerationSpec(workers, LOAD_TIMEOUT_S, predict_timeout=PREDICT_TIMEOUT_S, **terms)
        self.setup = GenerationSetup("m.7", self.terms, "ascend:0", ModelSource("/m.mindir", number=3), 7)
        self.generation = Generation(self.setup)
        self.generation.start()

    @property
    def state(self) -> GenerationState:
        return self.generation.state

    @property
    def cause(self) -> str:
        return self.generation.cause

    def names(self, role: Role = Role.WORKER) -> list[str]:
        return [each.name for each in self.generation.children.values() if each.role is role]

    # --- events ---

    def take_actions(self) -> list[Action]:
        return self.generation.take_actions()

    def snapshot_taken(self, known: SelfTestSpec | None = None) -> list[Action]:
        self.generation.on_snapshot_taken(SHA, self.now, known)
        return self.take_actions()

    def hello(self, *names: str) -> list[Action]:
        for name in names:
            self.generation.on_message(name, Hello(pid(name), SHA, {"weightd": VERSION}, self.traits), self.now)
        return self.take_actions()

    def built(self, built: Built = BUILT, holder: str = HOLDER) -> list[Action]:
        self.generation.on_message(holder, built, self.now)
        return self.take_actions()

    def attached(self, *names: str, attached: Attached = ATTACHED) -> list[Action]:
        for name in names:
            self.generation.on_message(name, attached, self.now)
        return self.take_actions()

    def reports_failure(self, name: str, cause: str, *, no_room: bool = False) -> list[Action]:
        self.generation.on_message(name, ProcessFailed(cause, is_out_of_memory=no_room), self.now)
        return self.take_actions()

    def allowed(self, error: str = "", name: str = HOLDER) -> list[Action]:
        self.generation.on_message(name, AttachAllowed(error), self.now)
        return self.take_actions()

    def leaves(self, name: str) -> list[Action]:
        self.generation.on_leaving(name, self.now)
        return self.take_actions()

    def hangs(self, name: str, *, useful: bool = False) -> list[Action]:
        self.generation.on_hung(name, "silence", self.now, has_answered=useful)
        return self.take_actions()

    def exits(self, *names: str, end: ExitCause = EXITED) -> list[Action]:
        for name in names:
            self.generation.on_exit(name, end, self.now)
        return self.take_actions()

    def drain(self, timeout: float = 0.0) -> list[Action]:
        self.generation.drain(self.now, timeout_s=timeout)
        return self.take_actions()

    def fails(self, cause: str) -> list[Action]:
        self.generation.fail(FailureReason(cause), self.now)
        return self.take_actions()

    def after(self, seconds: float) -> list[Action]:
        self.now += seconds
        self.generation.tick(self.now)
        return self.take_actions()

    def when_due(self) -> list[Action]:
        return self.after(max(0.0, self.generation.next_tick_at - self.now))

    def reconnected(self, *names: str) -> list[Action]:
        for name in names:
            self.generation.on_message(name, Reconnected(), self.now)
        return self.take_actions()

    # --- setup ---

    def spawned(self) -> GenerationHarness:
        self.snapshot_taken()
        return self

    def building(self) -> GenerationHarness:
        self.spawned().hello(*self.generation.children)
        return self

    def attaching(self) -> GenerationHarness:
        self.building().built()
        return self

    def serving(self) -> GenerationHarness:
        self.attaching().attached(*self.names())
        return self

    def replaced(self, name: str, by: str) -> list[Action]:
        """Replace a worker that has exited; return the actions after its replacement is up."""
        self.exits(name)
        if by not in self.generation.children:
            self.when_due()
        return self.hello(by)

    def resumed(self) -> GenerationHarness:
        """Return the harness of the next daemon, which has read the state of this one."""
        written = record_generation(self.generation, SEAL)
        assert written is not None
        written = decode(GenerationRecord, json.loads(json.dumps(plain(written))))
        self.now += 1000.0
        generation = resume_generation(self.setup, written, self.now)
        assert isinstance(generation, Generation)
        self.generation = generation
        return self
