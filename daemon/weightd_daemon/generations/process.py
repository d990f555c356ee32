"""The processes of a generation, with the state and the deadline of each, and the slots that serve requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weightd_daemon.counters import ProcessCounters
from weightd_daemon.generations.actions import Action, AddSlot, Kill, RemoveSlot, Role, Send, Spawn
from weightd_daemon.generations.states import ALIVE, CHILD_TRANSITIONS, USABLE, ChildEvent, ChildState, Machine
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_protocol.messages.worker import Hello, ProcessFailed, Stop
from weightd_protocol.messages.worker_common import DeviceMemory

FOREVER = float("inf")

# Seconds that a child has to exit after the order to stop. Until then, it only finishes the batches that it is running.
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class LossReason:
    """Why the generation has lost a child process.

    Attributes:
        reason: the reason, as a text for users.
        previous_state: the state of the child before the loss.
        has_answered: whether the child had answered a request.
        is_out_of_memory: whether the child found no free memory on its card. A later start may find memory.
        has_timed_out: whether the child exceeded its deadline and is being ended.
        is_signaled: whether a signal has ended the child.
        is_external: whether the child was ended from outside, for example by a user or by the kernel.
        is_transient: whether the cause may go away by itself.
    """

    reason: str
    previous_state: ChildState
    has_answered: bool = False
    is_out_of_memory: bool = False
    has_timed_out: bool = False
    is_signaled: bool = False
    is_external: bool = False
    is_transient: bool = False

    @classmethod
    def from_exit(cls, exit_cause: ExitCause, previous_state: ChildState, *, has_answered: bool) -> LossReason:
        """Return the reason for the loss of a child that exited unexpectedly."""
        return cls(
            str(exit_cause),
            previous_state,
            has_answered=has_answered,
            is_signaled=exit_cause.is_killed,
            is_external=exit_cause.is_external,
            is_transient=exit_cause.is_transient,
        )

    @classmethod
    def from_failure(cls, failure: ProcessFailed, previous_state: ChildState) -> LossReason:
        """Return the reason for the loss of a child that has reported a failure."""
        return cls(
            failure.reason,
            previous_state,
            is_out_of_memory=failure.is_out_of_memory,
            is_transient=failure.is_transient,
        )


class WorkerProcess(Machine[ChildState, ChildEvent]):
    """A process of a generation, in any role.

    Args:
        name: the name of the process.
        role: the role of the process.
        deadline: when the process must have left its first state, SPAWNED (monotonic seconds).
        extra: the `extra` of log records about the process.
        device: the device on which the process runs.

    Attributes:
        deadline: when the process must have left its current state (monotonic seconds); infinity for no limit.
        hello: the HELLO message of the process; None before it was received.
        ready_at: when the process became READY (monotonic seconds).
        shared_bytes: how many bytes of its memory are shared, as the process has reported.
        note: why not more bytes are shared, as the process has reported, or "".
        loss: why the daemon gave the process up before it exited; else None.
    """

    def __init__(self, name: str, role: Role, deadline: float, extra: Mapping[str, Any], device: str) -> None:
        super().__init__(CHILD_TRANSITIONS, ChildState.SPAWNED, name, extra)
        self.role = role
        self.device = device
        self.deadline = deadline
        self.hello: Hello | None = None
        self.ready_at = 0.0
        self.shared_bytes = 0
        self.note = ""
        self.loss: LossReason | None = None

    def advance(self, event: ChildEvent, deadline: float = FOREVER) -> None:
        """Change the state by an event. The process must leave the new state by `deadline` (monotonic seconds)."""
        super().advance(event)
        self.deadline = deadline


class GenerationProcesses:
    """The child processes of one generation, and the slots in which they serve requests.

    Args:
        label: the name of the generation.
        emit: called with each action that the daemon has to perform.
        log_extra: returns the `extra` of log records about the child with this name.
        counters: counts starts, losses and failures of processes.
        is_joint: whether all ranks together are one slot; otherwise each worker is a slot.

    Attributes:
        children: every live child, by name, in the order in which they were started.
        serving: the names of the workers or ranks that serve requests; all other READY workers are spares.
        started_workers: how many workers have been started.
        deaths: how many processes exited unexpectedly or had to be killed.
    """

    def __init__(
        self,
        label: str,
        emit: Callable[[Action], None],
        log_extra: Callable[[str], Mapping[str, Any]],
        counters: ProcessCounters,
        *,
        is_joint: bool,
    ) -> None:
        self.children: dict[str, WorkerProcess] = {}
        self.serving: dict[str, None] = {}
        self.started_workers = 0
        self.deaths = 0
        self.counters = counters
        self._started_holders = 0
        self._stop_timeout_s = STOP_TIMEOUT_S
        self._label = label
        self._emit = emit
        self._log_extra = log_extra
        self._is_joint = is_joint

    # --- state --------------------------------------------------------------------------------------------------

    def usable(self, role: Role) -> list[WorkerProcess]:
        """Return the children of this role that are alive and have not been ordered to exit."""
        return [child for child in self.children.values() if child.role is role and child.state in USABLE]

    def count(self, *states: ChildState) -> int:
        """Return the number of children in any of these states."""
        return sum(child.state in states for child in self.children.values())

    def workers_by_device(self) -> Counter[str]:
        """Return the number of workers on each device that have not been ordered to exit."""
        return Counter(worker.device for worker in self.usable(Role.WORKER))

    @property
    def holder(self) -> WorkerProcess | None:
        """The holder, unless it has exited or has been ordered to exit; else None."""
        return next(iter(self.usable(Role.HOLDER)), None)

    def has(self, role: Role) -> bool:
        """Return whether any child has this role, even if it is exiting."""
        return any(child.role is role for child in self.children.values())

    def is_ready(self, name: str) -> bool:
        """Return whether the child of this name is READY."""
        child = self.children.get(name)
        return child is not None and child.state is ChildState.READY

    @property
    def is_all_ready(self) -> bool:
        """Whether all workers that have not been ordered to exit are READY."""
        return all(worker.state is ChildState.READY for worker in self.usable(Role.WORKER))

    @property
    def slots(self) -> Mapping[str, tuple[str, ...]]:
        """The names of the processes of each slot that serves requests, in the order of ranks, by the slot's name."""
        if self._is_joint:
            return {self._label: tuple(self.serving)} if self.serving else {}
        return {name: (name,) for name in self.serving}

    def alive(self) -> Iterator[WorkerProcess]:
        """Yield the children whose processes have not exited."""
        return (child for child in self.children.values() if child.state in ALIVE)

    # --- operations ---------------------------------------------------------------------------------------------

    def spawn(self, role: Role, deadline: float, device: str, template: str = "") -> None:
        """Start a holder or a worker on a device. If `template` is not "", fork the process from this holder.

        The process must send HELLO by `deadline` (monotonic seconds).
        """
        self.started_workers += role is Role.WORKER
        self._started_holders += role is Role.HOLDER
        holder = f"{self._label}.holder{self._started_holders if self._started_holders > 1 else ''}"
        name = holder if role is Role.HOLDER else f"{self._label}.w{self.started_workers}"
        self.start(name, role, deadline, device, template)

    def start(self, name: str, role: Role, deadline: float, device: str, template: str = "") -> None:
        """Start a process with this name, which must send HELLO by `deadline` (monotonic seconds)."""
        self.counters.on_started()
        self.add(name, role, device, deadline)
        self._emit(Spawn(name, role, template))

    def add(self, name: str, role: Role, device: str, deadline: float = FOREVER) -> WorkerProcess:
        """Add a child process, and return its state machine."""
        child = self.children[name] = WorkerProcess(name, role, deadline, self._log_extra(name), device)
        return child

    def fill_slots(self, workers_per_device: int) -> None:
        """Let READY workers serve until `workers_per_device` workers serve on each device; the others stay spares."""
        serving_by_device = Counter(self.children[name].device for name in self.serving)
        for worker in self.usable(Role.WORKER):
            is_free = worker.state is ChildState.READY and worker.name not in self.serving
            if is_free and serving_by_device[worker.device] < workers_per_device:
                serving_by_device[worker.device] += 1
                self.serving[worker.name] = None
                self._emit(AddSlot(worker.name))

    def add_joint_slot(self) -> None:
        """Let all ranks together serve requests as one slot."""
        self.serving.update((each.name, None) for each in self.usable(Role.RANK))
        self._emit(AddSlot(self._label))

    def stop(self, child: WorkerProcess, now: float) -> None:
        """Order a child to exit; kill a child that has not sent HELLO."""
        if child.state is ChildState.SPAWNED:
            # Before HELLO, a process may not be able to receive orders.
            self.kill(child)
        else:
            self._remove_slot_of(child)
            child.advance(ChildEvent.STOP, now + self._stop_timeout_s)
            self._emit(Send(child.name, Stop()))

    def limit_stops(self, now: float, timeout_s: float) -> None:
        """From now on, give each stopping child `timeout_s` seconds in addition to the stop timeout.

        A child that is already stopping keeps its deadline if that is earlier.
        """
        self._stop_timeout_s = STOP_TIMEOUT_S + timeout_s
        for child in self.children.values():
            if child.state is ChildState.STOPPING:
                child.deadline = min(child.deadline, now + self._stop_timeout_s)

    def abort(self, child: WorkerProcess, deadline: float) -> None:
        """End a hung child by a signal on which it logs its stacks. At `deadline`, the child is killed."""
        self._remove_slot_of(child)
        child.advance(ChildEvent.ABORT, deadline)
        self._emit(Kill(child.name, abort=True))

    def kill(self, *children: WorkerProcess) -> None:
        """Kill these children, except for children that were killed before."""
        for child in children:
            if child.state is not ChildState.KILLED:
                self._remove_slot_of(child)
                child.advance(ChildEvent.KILL)
                self._emit(Kill(child.name))

    def count_death(self) -> None:
        """Count a process that exited unexpectedly or has to be killed."""
        self.deaths += 1
        self.counters.on_death()

    def on_exit(self, child: WorkerProcess) -> None:
        """Remove a child that has exited."""
        if self._is_joint:
            self._remove_slot_of(child)
        del self.children[child.name]
        self.serving.pop(child.name, None)
        child.advance(ChildEvent.EXIT)

    def _remove_slot_of(self, child: WorkerProcess) -> None:
        if self._is_joint and self.serving:
            self.serving.clear()
            self._emit(RemoveSlot(self._label))
        elif not self._is_joint and child.state is ChildState.READY:
            self._emit(RemoveSlot(child.name))
        self.serving.pop(child.name, None)


class DeviceUsage:
    """The memory that one process takes on a card in addition to the weights.

    Attributes:
        process_bytes: the smallest number of bytes observed so far; 0 before the first observation.
    """

    def __init__(self) -> None:
        self.process_bytes = 0
        self._free_bytes: int | None = None

    def on_built(self, device: DeviceMemory | None) -> None:
        """Record the card's free memory after the holder has loaded the weights. `device` is None on the CPU."""
        self._free_bytes = device.free_bytes if device else None

    def on_attached(self, device: DeviceMemory | None) -> None:
        """Derive the memory of one process from the decrease of the card's free memory since the last attach.

        Workers attach to a card one after another, so only one process causes the decrease.
        """
        if device is not None:
            used_bytes = 0 if self._free_bytes is None else self._free_bytes - device.free_bytes
            # Other programs on the card can only increase the observed number, so keep the smallest one.
            if used_bytes > 0:
                self.process_bytes = min(self.process_bytes or used_bytes, used_bytes)
            self._free_bytes = device.free_bytes
