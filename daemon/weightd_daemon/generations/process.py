"""The processes of a generation: the state of each, how long that may last, and which of them take requests."""

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

# A child that was told to stop only has to answer what it is computing.
STOP_TIMEOUT_S = 10.0


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

    @classmethod
    def from_exit(cls, exit_cause: ExitCause, previous_state: ChildState, *, has_answered: bool) -> LossReason:
        """Return the loss of a child that has exited without having been asked to."""
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
        """Return the loss of a child that says that it cannot do what it is for."""
        return cls(
            failure.reason,
            previous_state,
            is_out_of_memory=failure.is_out_of_memory,
            is_transient=failure.is_transient,
        )


class WorkerProcess(Machine[ChildState, ChildEvent]):
    """A process of a generation, whatever its role is.

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
        """Change its state; the new one may last until `deadline`."""
        super().advance(event)
        self.deadline = deadline


class GenerationProcesses:
    """The children of one generation, and those of them that take requests.

    Args:
        label: of the generation.
        emit: takes what is to be done.
        log_extra: returns `extra` of a record in the log.
        counters: of what befalls them.
        is_joint: whether all ranks together are one slot; else each worker is one.

    Attributes:
        children: every one that is alive, by name, in the order in which they were started.
        serving: the workers or ranks that take requests; the other workers that are READY are spares.
        started_workers: how many workers have been started.
        deaths: processes that ended, or had to be ended, without being asked to.
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

    def has(self, role: Role) -> bool:
        """Return whether there is one of this role, though it may be on its way out."""
        return any(child.role is role for child in self.children.values())

    def is_ready(self, name: str) -> bool:
        """Return whether this one is READY."""
        child = self.children.get(name)
        return child is not None and child.state is ChildState.READY

    @property
    def is_all_ready(self) -> bool:
        """Whether no worker is on its way."""
        return all(worker.state is ChildState.READY for worker in self.usable(Role.WORKER))

    @property
    def slots(self) -> Mapping[str, tuple[str, ...]]:
        """The slots that take requests, by name: of which processes each is, in their order."""
        if self._is_joint:
            return {self._label: tuple(self.serving)} if self.serving else {}
        return {name: (name,) for name in self.serving}

    def alive(self) -> Iterator[WorkerProcess]:
        """Yield the children that have a process."""
        return (child for child in self.children.values() if child.state in ALIVE)

    # --- what it does -------------------------------------------------------------------------------------------

    def spawn(self, role: Role, deadline: float, device: str, template: str = "") -> None:
        """Start a holder or a worker there, forked of `template` if that is one; it is to say HELLO by `deadline`."""
        self.started_workers += role is Role.WORKER
        self._started_holders += role is Role.HOLDER
        holder = f"{self._label}.holder{self._started_holders if self._started_holders > 1 else ''}"
        name = holder if role is Role.HOLDER else f"{self._label}.w{self.started_workers}"
        self.start(name, role, deadline, device, template)

    def start(self, name: str, role: Role, deadline: float, device: str, template: str = "") -> None:
        """Start a process of this name."""
        self.counters.on_started()
        self.add(name, role, device, deadline)
        self._emit(Spawn(name, role, template))

    def add(self, name: str, role: Role, device: str, deadline: float = FOREVER) -> WorkerProcess:
        """Count on a process that is there; return it."""
        child = self.children[name] = WorkerProcess(name, role, deadline, self._log_extra(name), device)
        return child

    def fill_slots(self, workers_per_device: int) -> None:
        """Let as many take requests on each device; spares take the places of those that are lost there."""
        serving_by_device = Counter(self.children[name].device for name in self.serving)
        for worker in self.usable(Role.WORKER):
            is_free = worker.state is ChildState.READY and worker.name not in self.serving
            if is_free and serving_by_device[worker.device] < workers_per_device:
                serving_by_device[worker.device] += 1
                self.serving[worker.name] = None
                self._emit(AddSlot(worker.name))

    def add_joint_slot(self) -> None:
        """Let all ranks together take requests."""
        self.serving.update((each.name, None) for each in self.usable(Role.RANK))
        self._emit(AddSlot(self._label))

    def stop(self, child: WorkerProcess, now: float) -> None:
        """Tell one to leave."""
        if child.state is ChildState.SPAWNED:
            # It cannot be told anything: there may be nobody who would hear it.
            self.kill(child)
        else:
            self._remove_slot_of(child)
            child.advance(ChildEvent.STOP, now + self._stop_timeout_s)
            self._emit(Send(child.name, Stop()))

    def limit_stops(self, now: float, timeout_s: float) -> None:
        """Give those that leave, and those that will, `timeout_s` seconds more, but none more than it was given."""
        self._stop_timeout_s = STOP_TIMEOUT_S + timeout_s
        for child in self.children.values():
            if child.state is ChildState.STOPPING:
                child.deadline = min(child.deadline, now + self._stop_timeout_s)

    def abort(self, child: WorkerProcess, deadline: float) -> None:
        """End one that hangs, in a way that shows where; it is killed at `deadline`."""
        self._remove_slot_of(child)
        child.advance(ChildEvent.ABORT, deadline)
        self._emit(Kill(child.name, abort=True))

    def kill(self, *children: WorkerProcess) -> None:
        """Kill these, but those that were killed before."""
        for child in children:
            if child.state is not ChildState.KILLED:
                self._remove_slot_of(child)
                child.advance(ChildEvent.KILL)
                self._emit(Kill(child.name))

    def count_death(self) -> None:
        """One has ended, or has to be, without being asked to."""
        self.deaths += 1
        self.counters.on_death()

    def on_exit(self, child: WorkerProcess) -> None:
        """One has exited and has been waited for."""
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
