"""One weight copy of one model on one device: its holder, its handle, its workers.

Plain decisions: events and the clock go in, `Action`s come out. No process, socket or file is touched here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from weightd.daemon.actions import Action, Dismiss, Enlist, Kill, Pin, Role, Send, Spawn
from weightd.daemon.restarts import Restarts
from weightd.daemon.states import (
    ACTIVE,
    ALIVE,
    CHILD,
    COUNTED,
    ENDED,
    GENERATION,
    ChildEvent,
    ChildState,
    GenerationEvent,
    GenerationState,
    advance,
)
from weightd.protocol.version import VERSION
from weightd.protocol.worker_messages import Attach, Attached, Broken, Build, Built, Hello, Settle, Stop

_log = logging.getLogger("weightd.generation")

# An interpreter on a loaded machine needs seconds to import an engine; one that needs a minute hangs.
HELLO_TIMEOUT_S = 60.0

# A child that was told to stop only has to answer what it is computing.
STOP_TIMEOUT_S = 10.0


@dataclass
class Child:
    """A holder or a worker. `deadline` is when its present state has lasted too long (monotonic seconds)."""

    name: str
    role: Role
    state: ChildState
    deadline: float
    hello: Hello | None = None
    ready_at: float | None = None
    shared_bytes: int = 0
    note: str = ""


@dataclass
class Limits:
    """What the model's configuration says about a generation."""

    workers: int
    load_timeout: float


@dataclass
class Generation:
    """The life of a generation.

    Attributes:
        state: where it is; changed by `_advance` alone.
        cause: why it failed, or why it has fewer workers than it should.
        children: every child that is alive, by name, in the order in which they were started.
        built: what the holder exported, once it has.
    """

    label: str
    limits: Limits
    state: GenerationState = GenerationState.PINNING
    cause: str = ""
    sha256: str = ""
    children: dict[str, Child] = field(default_factory=dict[str, Child])
    built: Built | None = None
    _actions: list[Action] = field(default_factory=list[Action])
    _restarts: Restarts = field(default_factory=Restarts)
    _serial: int = 0
    _unsettled: bool = False
    _told: str = ""

    # --- events -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._actions.append(Pin())
        self._tell_progress()

    def pinned(self, sha256: str, now: float) -> None:
        """The snapshot exists: start the processes."""
        if self.state is not GenerationState.PINNING:
            return
        self.sha256 = sha256
        self._advance(GenerationEvent.PINNED)
        self._spawn(Role.HOLDER, now)
        self._reconcile(now)

    def failed(self, cause: str, now: float) -> None:
        """It cannot go on, for `cause`: everything that runs is wound down."""
        if self.state in ACTIVE:
            self.cause = cause
            self._advance(GenerationEvent.FAIL)
            self._reconcile(now)

    def hello(self, name: str, hello: Hello, now: float) -> None:
        """A child is up."""
        child = self.children.get(name)
        if child is None or child.state is not ChildState.SPAWNED:
            return
        refusal = self._refusal(hello)
        if refusal:
            self.broken(name, Broken(refusal), now)
            return
        child.hello = hello
        self._advance_child(child, ChildEvent.HELLO, deadline=float("inf"))
        if self.state is GenerationState.SPAWNING:
            self._advance(GenerationEvent.GREETED)
        self._reconcile(now)

    def holder_built(self, name: str, built: Built, now: float) -> None:
        """The holder exports the weights."""
        child = self.children.get(name)
        if child is None or child.state is not ChildState.BUILDING:
            return
        self.built = built
        child.note, child.shared_bytes = built.note, built.shared_bytes
        self._advance_child(child, ChildEvent.BUILT, deadline=float("inf"))
        if self.state is GenerationState.BUILDING:
            self._advance(GenerationEvent.BUILT)
            self._unsettled = True
        self._reconcile(now)

    def attached(self, name: str, attached: Attached, now: float) -> None:
        """A worker has built the model; it serves if it reproduces the canary."""
        child = self.children.get(name)
        if child is None or child.state is not ChildState.ATTACHING or self.built is None:
            return
        if self.built.canary and attached.canary != self.built.canary:
            self.broken(name, Broken("the canary's answer is not the holder's: the worker would answer wrongly"), now)
            return
        child.note, child.shared_bytes, child.ready_at = attached.note, attached.shared_bytes, now
        self._advance_child(child, ChildEvent.ATTACHED, deadline=float("inf"))
        self._restarts.became_ready()
        self.cause = ""
        self._unsettled = True
        self._actions.append(Enlist(name))
        if self.state is GenerationState.ATTACHING:
            self._advance(GenerationEvent.READY)
        self._reconcile(now)

    def broken(self, name: str, broken: Broken, now: float) -> None:
        """A child says that it cannot do what it is for."""
        child = self.children.get(name)
        if child is None or child.state not in COUNTED:
            return
        self._stop(child, now)
        self._lost(child, broken.cause, now)
        self._reconcile(now)

    def leaving(self, name: str, now: float) -> None:
        """A worker's model may be spoilt: it must go, and a fresh process take its place."""
        child = self.children.get(name)
        if child is None or child.state is not ChildState.READY:
            return
        # It leaves in order and by its own word: no reason to wait with the next one.
        _log.warning("%s: %s leaves: a predict failed and may have spoilt its model", self.label, name)
        self._stop(child, now)
        self._reconcile(now)

    def exited(self, name: str, how: str, now: float) -> None:
        """A child has exited and has been waited for; `how` tells status or signal, and its last words."""
        child = self.children.pop(name, None)
        if child is None:
            return
        unexpected = child.state in COUNTED
        self._advance_child(child, ChildEvent.EXIT, deadline=float("inf"))
        if unexpected:
            self._lost(child, how, now)
        self._reconcile(now)

    def drain(self, now: float) -> None:
        """No new work: wind down, workers first."""
        if self.state in ACTIVE:
            self._advance(GenerationEvent.DRAIN)
        self._reconcile(now)

    def tick(self, now: float) -> None:
        """Time has passed: kill what has taken too long, start what is due."""
        for child in list(self.children.values()):
            if now < child.deadline:
                continue
            child.deadline = float("inf")
            self._actions.append(Kill(child.name))
            if child.state in COUNTED:
                cause = f"{child.state.value} took too long"
                self._advance_child(child, ChildEvent.STOP, deadline=float("inf"))
                self._lost(child, cause, now)
        self._reconcile(now)

    # --- what it tells ------------------------------------------------------------------------------------------

    def take_actions(self) -> list[Action]:
        """Return what is to be done, in order, and forget it."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def next_tick(self) -> float:
        """When `tick` is due, in monotonic seconds."""
        due = min((child.deadline for child in self.children.values()), default=float("inf"))
        return min(due, self._restarts.due) if self._missing() else due

    @property
    def ended(self) -> bool:
        """Whether nothing is left of it."""
        return self.state in ENDED and not self.children

    @property
    def progress(self) -> str:
        """What it is doing now, for people."""
        ready = self._count(ChildState.READY)
        wanted = self.limits.workers
        if self.state in (GenerationState.SPAWNING, GenerationState.GATHERING):
            up = sum(child.hello is not None for child in self.children.values())
            return f"spawned, {up}/{wanted + 1} processes up"
        if self.state in (GenerationState.ATTACHING, GenerationState.SERVING) and ready < wanted:
            return (
                f"serving {ready}/{wanted}, gave up on the others" if self._gave_up else f"attaching {ready}/{wanted}"
            )
        return str(self.state.value)

    @property
    def _gave_up(self) -> bool:
        return self._restarts.given_up and len(self._counted(Role.WORKER)) == self._count(ChildState.READY)

    # --- decisions ----------------------------------------------------------------------------------------------

    def _refusal(self, hello: Hello) -> str:
        """Why a child that said this must not serve, or ""."""
        theirs = hello.versions.get("weightd", "unknown")
        if theirs != VERSION:
            return f"its interpreter has weightd {theirs}, the daemon is {VERSION}: install the same version in both"
        if hello.sha256 != self.sha256:
            return f"it would load a model of sha256 {hello.sha256:.12}, pinned is {self.sha256:.12}"
        return ""

    def _reconcile(self, now: float) -> None:
        """Bring what is nearer to what should be; called after each event."""
        # One that is still on its way may become READY.
        if self._restarts.given_up and not self._counted(Role.WORKER):
            self.failed(self.cause, now)
        if self.state in ACTIVE and self.state is not GenerationState.PINNING:
            self._replace_missing(now)
            self._gather(now)
            self._attach_next(now)
            self._settle()
        elif self.state not in ACTIVE:
            self._wind_down(now)
        self._tell_progress()

    def _replace_missing(self, now: float) -> None:
        if self._missing() and self._restarts.due <= now:
            for _ in range(self._missing()):
                self._spawn(Role.WORKER, now)

    def _missing(self) -> int:
        """How many workers are to be started."""
        if self.state not in ACTIVE or self.state is GenerationState.PINNING or self._restarts.given_up:
            return 0
        return self.limits.workers - len(self._counted(Role.WORKER))

    def _gather(self, now: float) -> None:
        """Order the build once the pids that must be known are."""
        if self.state is not GenerationState.GATHERING:
            return
        holder = next(iter(self._counted(Role.HOLDER)), None)
        if holder is None or holder.hello is None:
            return
        workers = self._counted(Role.WORKER)
        all_known = not self._missing() and all(worker.hello is not None for worker in workers)
        if holder.hello.traits.pids_fixed_at_build and not all_known:
            return
        self._advance(GenerationEvent.GATHERED)
        self._advance_child(holder, ChildEvent.BUILD, deadline=now + self.limits.load_timeout)
        pids = tuple(worker.hello.pid for worker in workers if worker.hello is not None)
        self._actions.append(Send(holder.name, Build(pids)))

    def _attach_next(self, now: float) -> None:
        """One at a time: each attach loads the model, so this bounds the peak of memory."""
        if self.built is None or self._count(ChildState.ATTACHING):
            return
        for worker in self._counted(Role.WORKER):
            if worker.state is ChildState.GREETED:
                self._advance_child(worker, ChildEvent.ATTACH, deadline=now + self.limits.load_timeout)
                self._actions.append(Send(worker.name, Attach(self.built.handle, self.built.canary_sizes)))
                return

    def _settle(self) -> None:
        """Once no attach is under way or due, the holder gives back what only attaching needed."""
        if self.state is not GenerationState.SERVING or not self._unsettled:
            return
        if all(worker.state is ChildState.READY for worker in self._counted(Role.WORKER)) and not self._missing():
            self._unsettled = False
            for holder in self._counted(Role.HOLDER):
                self._actions.append(Send(holder.name, Settle()))

    def _wind_down(self, now: float) -> None:
        """Workers leave and are waited for; then the holder, whose memory they used."""
        workers = [child for child in self.children.values() if child.role is Role.WORKER]
        for child in workers or list(self.children.values()):
            if child.state in COUNTED:
                self._stop(child, now)
        if not self.children and self.state is GenerationState.DRAINING:
            self._advance(GenerationEvent.EMPTY)

    def _lost(self, child: Child, cause: str, now: float) -> None:
        """Account for a child that is of no use any more."""
        _log.warning("%s: %s lost: %s", self.label, child.name, cause)
        if child.role is Role.HOLDER:
            self._holder_lost(child, cause, now)
            return
        if self.state not in ACTIVE:
            return
        if child.ready_at is not None:
            self._restarts.died(now - child.ready_at, now)
            return
        self.cause = f"{child.name}: {cause}"
        self._restarts.start_failed(now)

    def _holder_lost(self, holder: Child, cause: str, now: float) -> None:
        needed = holder.hello is None or holder.hello.traits.holder_must_outlive or self.built is None
        if needed:
            self.failed(f"{holder.name}: {cause}", now)

    # --- the funnels --------------------------------------------------------------------------------------------

    def _spawn(self, role: Role, now: float) -> None:
        self._serial += role is Role.WORKER
        name = f"{self.label}.holder" if role is Role.HOLDER else f"{self.label}.w{self._serial}"
        self.children[name] = Child(name, role, ChildState.SPAWNED, now + HELLO_TIMEOUT_S)
        self._actions.append(Spawn(name, role))

    def _stop(self, child: Child, now: float) -> None:
        if child.state is ChildState.READY:
            self._actions.append(Dismiss(child.name))
        # A child that has not said HELLO cannot be told anything: there may be nobody who would hear it.
        heard = child.state is not ChildState.SPAWNED
        self._advance_child(child, ChildEvent.STOP, deadline=now + STOP_TIMEOUT_S if heard else float("inf"))
        self._actions.append(Send(child.name, Stop()) if heard else Kill(child.name))

    def _advance(self, event: GenerationEvent) -> None:
        before, self.state = self.state, advance(GENERATION, self.state, event)
        _log.debug("%s: %s -> %s", self.label, before.value, self.state.value)
        if self.state is GenerationState.FAILED:
            _log.error("%s failed: %s", self.label, self.cause)

    def _tell_progress(self) -> None:
        """One line each time that there is something new to tell."""
        if self.progress != self._told:
            self._told = self.progress
            _log.info("%s: %s", self.label, self._told)

    def _advance_child(self, child: Child, event: ChildEvent, *, deadline: float) -> None:
        before, child.state = child.state, advance(CHILD, child.state, event)
        child.deadline = deadline
        _log.debug("%s: %s -> %s", child.name, before.value, child.state.value)

    def _counted(self, role: Role) -> list[Child]:
        return [child for child in self.children.values() if child.role is role and child.state in COUNTED]

    def _count(self, state: ChildState) -> int:
        return sum(child.state is state for child in self.children.values())

    def alive(self) -> Iterator[Child]:
        """Yield the children that have a process."""
        return (child for child in self.children.values() if child.state in ALIVE)
