"""The life cycle that both kinds of generations share: a holder with its workers (`Generation`), and a `RankGroup`.

A generation decides without I/O: the daemon passes events and the time to its methods, and performs the `Action`s that
the generation requests. The abstract methods are the steps in which the two kinds differ.
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

# Minimum seconds that a new process has until its HELLO message. An interpreter on a loaded machine needs seconds to
# import an engine. Before HELLO, a process may also import CANN (Ascend's libraries) and compute the digest of the
# model, which can take as long as a build. So a process has `load_timeout` if that is longer.
HELLO_TIMEOUT_S = 60.0


def one_after_another(generation: GenerationView) -> int:
    """Return 1, the number of workers that may attach at once if the free memory is unknown."""
    del generation
    return 1


@dataclass(frozen=True)
class GenerationSetup:
    """The arguments of a generation's constructor.

    Attributes:
        label: the name of the generation: the model's name and `number`, which no other generation of the model gets.
        spec: the configuration of the generation.
        device: the device on which the processes run, unless `spec` lists other devices.
        source: the model files that the processes load.
        number: the number at the end of `label`.
        counters: counts starts, losses and failures of the processes.
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
    """The read-only view of a generation: its processes and its state.

    Args:
        setup: the arguments of the generation; most of them are also attributes of this class.

    Attributes:
        processes: the processes of the generation.
        children: every live process, by name, in the order in which they were started.
        attach_control: tracks which workers may attach, and whether the weights are valid.
        sha256: the digest of the model; "" before the snapshot is taken.
        built: the description of the model that the holder or the ranks have sent after loading; None before.
        device_usage: the memory that one process takes on its card in addition to the weights.
        failure: why the generation has failed, or has fewer workers than configured.
        worker_target: the number of workers on each device that should serve requests now.
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
        self.worker_target = spec.workers
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
        """The text of `failure`, for users."""
        return str(self.failure)

    @property
    def next_tick_at(self) -> float:
        """When the daemon has to call `tick`, in monotonic seconds."""
        due_at = min((child.deadline for child in self.children.values()), default=float("inf"))
        return min(due_at, self.attach_control.deadline) if self.state in ACTIVE else due_at

    @property
    def is_ended(self) -> bool:
        """Whether the generation has ended and all its processes have exited."""
        return self.state in ENDED and not self.children

    @property
    def is_complete(self) -> bool:
        """Whether the generation serves with all configured processes, or with as many as can be started for now."""
        return self.state is GenerationState.SERVING

    @property
    def is_reconnecting(self) -> bool:
        """Whether the generation was taken over from the previous daemon, and a process may still reconnect."""
        return self.state in ACTIVE and self.processes.count(ChildState.AWAITED) > 0

    @property
    def has_all_workers(self) -> bool:
        """Whether all wanted workers and spares, or all ranks, are READY."""
        return self.processes.count(ChildState.READY) >= self.wanted_process_count

    @property
    def wanted_process_count(self) -> int:
        """The number of workers and spares that should run now on all devices, or the number of ranks."""
        return self.spec.process_count_with(self.worker_target)

    @property
    def should_be_replaced(self) -> bool:
        """Whether the generation has lost processes that only a new generation can replace."""
        return False

    @property
    @abc.abstractmethod
    def progress(self) -> str:
        """The current activity as a text for users, such as "attaching 1/4"."""

    def built_model(self, index: int) -> Built | None:
        """Return the description of a model, by its index in its model group; None before the model has loaded."""
        del index  # only a rank group can serve several models
        return self.built

    def log_extra(self, child: str = "") -> Mapping[str, Any]:
        """Return the `extra` of a log record about this generation, or about the process with the name `child`."""
        return self._log.log_extra(child)


class GenerationBase(GenerationView):
    """The life cycle of a generation, which turns events and the clock into `Action`s."""

    # The states in which `on_hung` ends a child. In any other state, a child is only ended when its deadline passes.
    _watched_states = frozenset({ChildState.READY, ChildState.STOPPING})

    # --- events -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Request a snapshot of the model files, the first step of a generation."""
        self._actions.append(TakeSnapshot())
        self._log_progress()

    def on_resumed(self) -> None:
        """Continue a generation that an earlier daemon has loaded. It serves once its processes have reconnected."""
        self.advance(GenerationEvent.RESUME)

    def on_snapshot_taken(
        self, sha256: str, now: float, selftest: SelfTestSpec | None = None, slice_digests: tuple[str, ...] = ()
    ) -> None:
        """Start the processes, which load the snapshot.

        Args:
            sha256: the digest of the model.
            now: the time (monotonic seconds).
            selftest: the self-test that an earlier generation has found, or None.
            slice_digests: the digest of each rank's slice, if the model is divided among ranks.
        """
        if self.state is GenerationState.SNAPSHOTTING:
            self.sha256 = sha256
            self.advance(GenerationEvent.SNAPSHOT_TAKEN)
            self._start_processes(now, selftest, slice_digests)
            self._reconcile(now)

    def on_message(self, name: str, message: ChildMessage, now: float) -> None:
        """Handle a message from a child about its own state, such as `Hello`, `Built` or `ProcessFailed`."""
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
        """Give up a child whose predict failed with the error `reason`, which may have damaged the child's model."""
        child = self.children.get(name)
        if child is not None:
            self._on_leaving(child, reason, now)
            self._reconcile(now)

    def on_hung(self, name: str, reason: str, now: float, *, has_answered: bool = False) -> None:
        """End a child that no longer replies. `has_answered`: whether the child had answered a request before."""
        child = self.children.get(name)
        if child is not None and child.state in self._watched_states:
            self._on_hung(child, reason, now, has_answered=has_answered)
            self._reconcile(now)

    def on_exit(self, name: str, exit_cause: ExitCause, now: float, *, has_answered: bool = False) -> None:
        """Handle the exit of a child. `has_answered`: whether the child had answered a request before."""
        child = self.children.get(name)
        if child is not None:
            previous_state = child.state
            self.processes.on_exit(child)
            loss = LossReason.from_exit(exit_cause, previous_state, has_answered=has_answered)
            self._on_exit(child, loss, exit_cause, now)
            self._reconcile(now)

    def drain(self, now: float, *, timeout_s: float = 0.0) -> None:
        """Shut the generation down. Its processes get `timeout_s` seconds in addition to the stop timeout."""
        self.processes.limit_stops(now, timeout_s)
        if self.state in ACTIVE:
            self.advance(GenerationEvent.DRAIN)
        self._reconcile(now)

    def fail(self, reason: FailureReason, now: float) -> None:
        """Mark the generation as failed, and shut down all its processes."""
        if self.state in ACTIVE:
            self.failure = reason
            self._count_lost()
            self.advance(GenerationEvent.FAIL)
            self._reconcile(now)

    def tick(self, now: float) -> None:
        """End the children whose deadlines have passed, and start the processes that are due."""
        for child in list(self.children.values()):
            # Ending one child may kill other children of the list, too. A killed child has no deadline, so the loop
            # skips it.
            if now >= child.deadline and child.state is ChildState.ABORTED:
                self.processes.kill(child)
            elif now >= child.deadline:
                self._on_hung(child, f"{child.state.display_name} took too long", now, has_answered=False)
        self._reconcile(now)

    def take_actions(self) -> list[Action]:
        """Return the actions that the daemon has to perform, in order, and clear the list."""
        actions = list(self._actions)
        self._actions.clear()
        return actions

    # --- common steps -------------------------------------------------------------------------------------------

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
        """Order a child to exit. If the weights are invalid, kill the child, because its results would be discarded."""
        if self.attach_control.is_valid:
            self.processes.stop(child, now)
        else:
            self.processes.kill(child)

    def _count_lost(self) -> None:
        """Count the processes that are lost because the generation fails."""
        self.processes.counters.on_lost(self.processes.count(*USABLE))

    def _log_progress(self) -> None:
        self._log.log_progress(self.progress, has_failed=self.state is GenerationState.FAILED)

    # --- steps of subclasses ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _start_processes(self, now: float, selftest: SelfTestSpec | None, slice_digests: tuple[str, ...]) -> None:
        """Start the processes after the snapshot was taken."""

    def _hello_mismatch(self, child: WorkerProcess, hello: Hello) -> str:
        """Return why this HELLO message shows that the child cannot be used, or ""."""
        del child  # all children load the same model
        return hello_mismatch(hello, self.sha256)

    @abc.abstractmethod
    def _on_greeted(self, hello: Hello, now: float) -> None:
        """Handle the HELLO message of a child, which `_hello_mismatch` has checked."""

    @abc.abstractmethod
    def _on_load_message(self, child: WorkerProcess, message: ChildMessage, now: float) -> None:
        """Handle a message that is part of loading in this kind of generation, or any unexpected message."""

    @abc.abstractmethod
    def _on_ready(self, child: WorkerProcess, step: int, now: float) -> None:
        """Handle a child that has become READY. `step`: the last step that a rank has run for the previous daemon."""

    @abc.abstractmethod
    def _on_process_failed(self, child: WorkerProcess, failure: ProcessFailed, now: float) -> None:
        """Handle the report of a child that it has failed."""

    @abc.abstractmethod
    def _on_leaving(self, child: WorkerProcess, reason: str, now: float) -> None:
        """Give up a child, because a failed predict may have damaged the child's model."""

    @abc.abstractmethod
    def _on_hung(self, child: WorkerProcess, reason: str, now: float, *, has_answered: bool) -> None:
        """End a child that no longer replies or whose deadline has passed."""

    @abc.abstractmethod
    def _on_exit(self, child: WorkerProcess, loss: LossReason, exit_cause: ExitCause, now: float) -> None:
        """Handle the exit of a child. If the exit was unexpected, `loss` describes it."""

    @abc.abstractmethod
    def _reconcile(self, now: float) -> None:
        """Request the actions that lead from the actual state to the wanted one, and log the progress.

        Called after each event.
        """


def hello_mismatch(hello: Hello, sha256: str) -> str:
    """Return why a child that has sent this HELLO message must not load the model with this digest, or ""."""
    worker_version = hello.versions.get("weightd", "unknown")
    if worker_version != VERSION:
        return (
            f"its interpreter has weightd {worker_version}, the daemon is {VERSION}: install the same version in both"
        )
    if hello.sha256 != sha256:
        return f"expected a model with sha256 {sha256:.12}, got {hello.sha256:.12}"
    return ""
