"""The processes of a generation: the state of each, how long that may last, and how one is got rid of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weightd_daemon.generations.actions import Action, AddSlot, Kill, RemoveSlot, Role, Send, Spawn
from weightd_daemon.generations.states import ALIVE, CHILD_TRANSITIONS, USABLE, ChildEvent, ChildState, Machine
from weightd_protocol.messages.worker import Hello, Stop
from weightd_protocol.messages.worker_common import DeviceMemory

FOREVER = float("inf")


@dataclass(frozen=True)
class LossReason:
    """How a child came to be of no use any more.

    Attributes:
        reason: for people.
        previous_state: its state until then.
        has_answered: it had answered some request.
        is_out_of_memory: it found none on the card, where some may come free late.
        has_timed_out: it took too long, and is being ended.
        is_signaled: a signal has ended it.
        is_external: another has ended it.
        is_transient: the cause may go away by itself.
    """

    reason: str
    previous_state: ChildState
    has_answered: bool = False
    is_out_of_memory: bool = False
    has_timed_out: bool = False
    is_signaled: bool = False
    is_external: bool = False
    is_transient: bool = False


class WorkerProcess:
    """A holder or a worker.

    Args:
        name: of the process.
        role: what it is for.
        deadline: when its first state has lasted too long.
        extra: of its records in the log.
        device: where it runs.

    Attributes:
        deadline: when its present state has lasted too long (monotonic seconds).
        hello: what it has said of itself.
        ready_at: since when it is READY.
        shared_bytes: how much of its memory is shared, by its own word.
        note: why that is not more.
        loss: why it was given up, if that was before it was dead.
    """

    def __init__(self, name: str, role: Role, deadline: float, extra: Mapping[str, Any], device: str) -> None:
        self.name = name
        self.role = role
        self.device = device
        self.deadline = deadline
        self.hello: Hello | None = None
        self.ready_at = 0.0
        self.shared_bytes = 0
        self.note = ""
        self.loss: LossReason | None = None
        self._machine = Machine(CHILD_TRANSITIONS, ChildState.SPAWNED, name, extra)

    @property
    def state(self) -> ChildState:
        """Where it is in its life."""
        return self._machine.state

    def advance(self, event: ChildEvent, deadline: float = FOREVER) -> None:
        """Change its state; the new one may last until `deadline`."""
        self._machine.advance(event)
        self.deadline = deadline


class GenerationProcesses:
    """The children of one generation, and those of them that take requests.

    Args:
        label: of the generation.
        emit: takes what is to be done.
        log_extra: returns `extra` of a record in the log.

    Attributes:
        children: every one that is alive, by name, in the order in which they were started.
        serving_processes: the workers that take requests; the other ones that are READY are spares.
        started_workers: how many workers have been started.
    """

    def __init__(
        self, label: str, emit: Callable[[Action], None], log_extra: Callable[[str], Mapping[str, Any]]
    ) -> None:
        self.children: dict[str, WorkerProcess] = {}
        self.serving_processes: dict[str, None] = {}
        self.started_workers = 0
        self._started_holders = 0
        self._label = label
        self._emit = emit
        self._log_extra = log_extra

    # --- what it tells ------------------------------------------------------------------------------------------

    def usable(self, role: Role) -> list[WorkerProcess]:
        """Return those that the generation counts on."""
        return [child for child in self.children.values() if child.role is role and child.state in USABLE]

    def count(self, *states: ChildState) -> int:
        """Return how many are in one of these states."""
        return sum(child.state in states for child in self.children.values())

    def workers_by_device(self) -> Counter[str]:
        """Return how many workers the generation counts on, by device."""
        return Counter(worker.device for worker in self.usable(Role.WORKER))

    @property
    def holder(self) -> WorkerProcess | None:
        """The one that the generation counts on."""
        return next(iter(self.usable(Role.HOLDER)), None)

    @property
    def has_holder(self) -> bool:
        """Whether there is one, though it may be on its way out."""
        return any(child.role is Role.HOLDER for child in self.children.values())

    @property
    def is_all_ready(self) -> bool:
        """Whether no worker is on its way."""
        return all(worker.state is ChildState.READY for worker in self.usable(Role.WORKER))

    def alive(self) -> Iterator[WorkerProcess]:
        """Yield the children that have a process."""
        return (child for child in self.children.values() if child.state in ALIVE)

    # --- what it does -------------------------------------------------------------------------------------------

    def spawn(self, role: Role, deadline: float, device: str, template: str = "") -> None:
        """Start one there, forked of `template` if that is one; it is to say HELLO by `deadline`."""
        self.started_workers += role is Role.WORKER
        self._started_holders += role is Role.HOLDER
        holder = f"{self._label}.holder{self._started_holders if self._started_holders > 1 else ''}"
        child = self.add(
            holder if role is Role.HOLDER else f"{self._label}.w{self.started_workers}", role, device, deadline
        )
        self._emit(Spawn(child.name, role, template))

    def add(self, name: str, role: Role, device: str, deadline: float = FOREVER) -> WorkerProcess:
        """Count on a process that is there; return it."""
        child = self.children[name] = WorkerProcess(name, role, deadline, self._log_extra(name), device)
        return child

    def fill_slots(self, workers_per_device: int) -> None:
        """Let as many take requests on each device; spares take the places of those that are lost there."""
        serving_by_device = Counter(self.children[name].device for name in self.serving_processes)
        for worker in self.usable(Role.WORKER):
            is_free = worker.state is ChildState.READY and worker.name not in self.serving_processes
            if is_free and serving_by_device[worker.device] < workers_per_device:
                serving_by_device[worker.device] += 1
                self.serving_processes[worker.name] = None
                self._emit(AddSlot(worker.name))

    def stop(self, child: WorkerProcess, deadline: float) -> None:
        """Tell one to leave."""
        if child.state is ChildState.SPAWNED:
            # It cannot be told anything: there may be nobody who would hear it.
            self.kill(child)
        else:
            self._remove_slot_of(child)
            child.advance(ChildEvent.STOP, deadline)
            self._emit(Send(child.name, Stop()))

    def abort(self, child: WorkerProcess, deadline: float) -> None:
        """End one that hangs, in a way that shows where; it is killed at `deadline`."""
        self._remove_slot_of(child)
        child.advance(ChildEvent.ABORT, deadline)
        self._emit(Kill(child.name, abort=True))

    def kill(self, child: WorkerProcess) -> None:
        """Kill one."""
        self._remove_slot_of(child)
        child.advance(ChildEvent.KILL)
        self._emit(Kill(child.name))

    def on_exit(self, child: WorkerProcess) -> None:
        """One has exited and has been waited for."""
        del self.children[child.name]
        self.serving_processes.pop(child.name, None)
        child.advance(ChildEvent.EXIT)

    def _remove_slot_of(self, child: WorkerProcess) -> None:
        if child.state is ChildState.READY:
            self._emit(RemoveSlot(child.name))
        self.serving_processes.pop(child.name, None)


class DeviceUsage:
    """What one process takes on a card beside the weights.

    Attributes:
        process_bytes: as far as it has been seen.
    """

    def __init__(self) -> None:
        self.process_bytes = 0
        self._free_bytes: int | None = None

    def on_built(self, device: DeviceMemory | None) -> None:
        """The holder has loaded the weights."""
        self._free_bytes = device.free_bytes if device else None

    def on_attached(self, device: DeviceMemory | None) -> None:
        """Attaches come one after another: what a card lost since the last one, this process took."""
        if device is not None:
            used_bytes = 0 if self._free_bytes is None else self._free_bytes - device.free_bytes
            # The least that was seen: whatever else was loaded on the card meanwhile only makes it more.
            if used_bytes > 0:
                self.process_bytes = min(self.process_bytes or used_bytes, used_bytes)
            self._free_bytes = device.free_bytes
