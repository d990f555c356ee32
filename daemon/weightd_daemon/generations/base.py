"""The life of every generation, whatever its processes are: a holder and its workers, or ranks.

Plain decisions: events and the clock go in, `Action`s come out. No process, socket or file is touched here. The life
is the same for both kinds; what a kind does at each point of it, its class says in the methods that are abstract here.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weightd_common.devices import CPU
from weightd_daemon.counters import ProcessCounters
from weightd_daemon.generations.actions import Action, TakeSnapshot
from weightd_daemon.generations.attach_control import AttachControl
from weightd_daemon.generations.process import DeviceUsage, GenerationProcesses, LossReason, WorkerProcess
from weightd_daemon.generations.progress import FailureReason, ProgressLogger
from weightd_daemon.generations.spec import GenerationSpec, ModelSource, SelfTestSpec
from weightd_daemon.generations.states import (
    ACTIVE,
    ENDED,
    GENERATION_TRANSITIONS,
    USABLE,
    ChildEvent,
    ChildState,
    GenerationEvent,
    GenerationState,
    Machine,
)
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_protocol.messages.worker import Built, ChildMessage, Hello, ProcessFailed, Reconnected
from weightd_protocol.version import VERSION

# An interpreter on a loaded machine needs seconds to import an engine. What comes before HELLO beside that, CANN's
# import and the digest of the model, may take as long as a build.
HELLO_TIMEOUT_S = 60.0


def one_after_another(generation: GenerationView) -> int:
    """Return how many workers may attach at once: right wherever nothing is known of the room that there is."""
    del generation
    return 1


@dataclass(frozen=True)
class GenerationSetup:
    """What a generation is made of.

    Attributes:
        label: its name, the model's and a number that is never used again.
        spec: what is configured.
        device: where it lives. Its processes are there, or on the devices of its spec.
        source: what it loads.
        number: the one in its label.
        counters: of what befalls its processes.
        attach_limit: returns how many workers of the generation may attach at the same time; at least one.
    """

    label: str
    spec: GenerationSpec
    device: str = CPU
    source: ModelSource = ModelSource("")  # noqa: RUF009 - it is immutable
    number: int = 1
    counters: ProcessCounters = field(default_factory=ProcessCounters)
    attach_limit: Callable[[GenerationView], int] = one_after_another


class GenerationView(Machine[GenerationState, GenerationEvent], abc.ABC):
    """How a generation stands: what it has, and what can be asked of it. Nothing here changes anything.

    Args:
        setup: what it is made of, of which most is an attribute here, too.

    Attributes:
        processes: its processes, and what can be done with them.
        children: every process that is alive, by name, in the order in which they were started.
        attach_control: who may attach, and whether answers count.
        sha256: of the model, once the snapshot is taken.
        built: what the holder exported, or the ranks have loaded, once that is known.
        device_usage: what one process takes on the card beside the weights.
        failure: why it has failed, or has fewer workers than it should.
    """

    def __init__(self, setup: GenerationSetup) -> None:
        label, spec = setup.label, setup.spec
        self._log = ProgressLogger(label, setup.number)
        super().__init__(GENERATION_TRANSITIONS, GenerationState.SNAPSHOTTING, label, self._log.log_extra())
        self.label = label
        self.spec = spec
        self.device = setup.device
        self.source = setup.source
        self.number = setup.number
        self.sha256 = ""
        self.built: Built | None = None
        self.device_usage = DeviceUsage()
        self.failure = FailureReason()
        self._actions: list[Action] = []
        self.processes = GenerationProcesses(
            label,
            self._actions.append,
            self.log_extra,
            setup.counters,
            is_joint=spec.rank_group is not None,
        )
        self.children = self.processes.children
        self.attach_control = AttachControl(
            label, self.processes, self._actions.append, self._log, functools.partial(setup.attach_limit, self)
        )

    @property
    def cause(self) -> str:
        """Why it failed, or why it has fewer workers than it should, for people."""
        return str(self.failure)

    @property
    def next_tick_at(self) -> float:
        """When `tick` is due, in monotonic seconds."""
        due_at = min((child.deadline for child in self.children.values()), default=float("inf"))
        return min(due_at, self.attach_control.deadline) if self.state in ACTIVE else due_at

    @property
    def is_ended(self) -> bool:
        """Whether nothing is left of it."""
        return self.state in ENDED and not self.children

    @property
    def is_complete(self) -> bool:
        """Whether it serves with all the processes that it should have, or that it can have for now."""
        return self.state is GenerationState.SERVING

    @property
    def is_reconnecting(self) -> bool:
        """Whether it was resumed, and a process may still reconnect."""
        return self.state in ACTIVE and self.processes.count(ChildState.AWAITED) > 0

    @property
    def has_all_workers(self) -> bool:
        """Whether all workers and spares, or all ranks, that it should have are READY."""
        return self.processes.count(ChildState.READY) == self.spec.process_count

    @property
    def should_be_replaced(self) -> bool:
        """Whether it has lost processes that only another generation can replace."""
        return False

    @property
    @abc.abstractmethod
    def progress(self) -> str:
        """What it is doing now, for people."""

    def built_model(self, index: int) -> Built | None:
        """Return what has been loaded of a model, once that is known; its processes may have others, too."""
        del index  # of one model
        return self.built

    def log_extra(self, child: str = "") -> Mapping[str, Any]:
        """Return `extra` of an event of this generation, or of one of its children."""
        return self._log.log_extra(child)


class GenerationBase(GenerationView):
    """The life of a generation: events and the clock go in, `Action`s come out."""

    # In which a child that does not answer is ended; in another one only its deadline counts.
    _watched_states = frozenset({ChildState.READY, ChildState.STOPPING})

    # --- events -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._actions.append(TakeSnapshot())
        self._log_progress()

    def on_resumed(self) -> None:
        """An earlier daemon has loaded it; it serves once its processes have reconnected."""
        self.advance(GenerationEvent.RESUME)

    def on_snapshot_taken(
        self, sha256: str, now: float, selftest: SelfTestSpec | None = None, slice_digests: tuple[str, ...] = ()
    ) -> None:
        """The snapshot exists: start the processes.

        Args:
            sha256: of the model.
            now: the clock.
            selftest: what an earlier generation has found out of it.
            slice_digests: of what each rank loads, where the model is cut.
        """
        if self.state is GenerationState.SNAPSHOTTING:
            self.sha256 = sha256
            self.advance(GenerationEvent.SNAPSHOT_TAKEN)
            self._start_processes(now, selftest, slice_digests)
            self._reconcile(now)

    def on_message(self, name: str, message: ChildMessage, now: float) -> None:
        """A child has said something of itself: it is up, it has loaded, it cannot."""
        child = self.children.get(name)
        if child is None:
            return
        match child.state, message:
            case _, ProcessFailed():
                self._on_process_failed(child, message, now)
            case ChildState.SPAWNED, Hello():
                self._on_hello(child, message, now)
            case ChildState.AWAITED, Reconnected():
                child.ready_at = now
                child.advance(ChildEvent.RECONNECTED)
                self._on_ready(child, message.step, now)
            case _:
                self._on_load_message(child, message, now)
        self._reconcile(now)

    def on_leaving(self, name: str, now: float, reason: str = "") -> None:
        """A child's model may be spoilt, for a predict has failed for this reason: it must go."""
        child = self.children.get(name)
        if child is not None:
            self._on_leaving(child, reason, now)
            self._reconcile(now)

    def on_hung(self, name: str, reason: str, now: float, *, has_answered: bool = False) -> None:
        """A child does not answer any more. `has_answered`: it had answered something."""
        child = self.children.get(name)
        if child is not None and child.state in self._watched_states:
            self._on_hung(child, reason, now, has_answered=has_answered)
            self._reconcile(now)

    def on_exit(self, name: str, exit_cause: ExitCause, now: float, *, has_answered: bool = False) -> None:
        """A child has exited and has been waited for. `has_answered`: it had answered some request."""
        child = self.children.get(name)
        if child is not None:
            previous_state = child.state
            self.processes.on_exit(child)
            loss = LossReason.from_exit(exit_cause, previous_state, has_answered=has_answered)
            self._on_exit(child, loss, exit_cause, now)
            self._reconcile(now)

    def drain(self, now: float, *, timeout_s: float = 0.0) -> None:
        """No new work: wind down; to finish what they have, its processes may take `timeout_s` seconds more."""
        self.processes.limit_stops(now, timeout_s)
        if self.state in ACTIVE:
            self.advance(GenerationEvent.DRAIN)
        self._reconcile(now)

    def fail(self, reason: FailureReason, now: float) -> None:
        """It cannot go on: everything that runs is wound down."""
        if self.state in ACTIVE:
            self.failure = reason
            self._count_lost()
            self.advance(GenerationEvent.FAIL)
            self._reconcile(now)

    def tick(self, now: float) -> None:
        """Time has passed: end what has taken too long, start what is due."""
        for child in list(self.children.values()):
            # Not those that an earlier one has taken along.
            if now >= child.deadline and child.state is ChildState.ABORTED:
                self.processes.kill(child)
            elif now >= child.deadline:
                self._on_hung(child, f"{child.state.display_name} took too long", now, has_answered=False)
        self._reconcile(now)

    def take_actions(self) -> list[Action]:
        """Return what is to be done, in order, and forget it."""
        actions = list(self._actions)
        self._actions.clear()
        return actions

    # --- what is common -----------------------------------------------------------------------------------------

    def _on_hello(self, child: WorkerProcess, hello: Hello, now: float) -> None:
        mismatch = self._hello_mismatch(child, hello)
        if mismatch:
            self._on_process_failed(child, ProcessFailed(mismatch), now)
            return
        child.hello = hello
        child.advance(ChildEvent.HELLO)
        if self.state is GenerationState.SPAWNING:
            self.advance(GenerationEvent.GREETED)
        self._on_greeted(hello, now)

    def _stop(self, child: WorkerProcess, now: float) -> None:
        """Have a child leave; where its answers count no more, at once."""
        if self.attach_control.is_valid:
            self.processes.stop(child, now)
        else:
            self.processes.kill(child)

    def _count_lost(self) -> None:
        """Count what is lost with the generation."""
        self.processes.counters.on_lost(self.processes.count(*USABLE))

    def _log_progress(self) -> None:
        self._log.log_progress(self.progress, has_failed=self.state is GenerationState.FAILED)

    # --- what differs -------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _start_processes(self, now: float, selftest: SelfTestSpec | None, slice_digests: tuple[str, ...]) -> None:
        """The snapshot exists."""

    def _hello_mismatch(self, child: WorkerProcess, hello: Hello) -> str:
        """Return why a child that said this is not the one that was started, or ""."""
        del child  # all load the same
        return hello_mismatch(hello, self.sha256)

    @abc.abstractmethod
    def _on_greeted(self, hello: Hello, now: float) -> None:
        """A child is up, and is the one that was started."""

    @abc.abstractmethod
    def _on_load_message(self, child: WorkerProcess, message: ChildMessage, now: float) -> None:
        """A child says what only processes of this kind say, or what it should not, or not now."""

    @abc.abstractmethod
    def _on_ready(self, child: WorkerProcess, step: int, now: float) -> None:
        """A child is READY, as it was for the daemon before this one; `step` is the last one that it has run."""

    @abc.abstractmethod
    def _on_process_failed(self, child: WorkerProcess, failure: ProcessFailed, now: float) -> None:
        """A child says that it cannot do what it is for."""

    @abc.abstractmethod
    def _on_leaving(self, child: WorkerProcess, reason: str, now: float) -> None:
        """A predict of a child has failed, and may have spoilt its model."""

    @abc.abstractmethod
    def _on_hung(self, child: WorkerProcess, reason: str, now: float, *, has_answered: bool) -> None:
        """A child does not answer any more, or takes too long."""

    @abc.abstractmethod
    def _on_exit(self, child: WorkerProcess, loss: LossReason, exit_cause: ExitCause, now: float) -> None:
        """A child has exited; `loss` is what that means if nobody has asked it to."""

    @abc.abstractmethod
    def _reconcile(self, now: float) -> None:
        """Bring what is nearer to what should be; called after each event, and tells the progress."""


def hello_mismatch(hello: Hello, sha256: str) -> str:
    """Return why a child that said this must not load what has this digest, or ""."""
    worker_version = hello.versions.get("weightd", "unknown")
    if worker_version != VERSION:
        return (
            f"its interpreter has weightd {worker_version}, the daemon is {VERSION}: install the same version in both"
        )
    if hello.sha256 != sha256:
        return f"it would load a model of sha256 {hello.sha256:.12}, the snapshot has {sha256:.12}"
    return ""
