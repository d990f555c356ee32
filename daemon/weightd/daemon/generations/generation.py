"""One weight copy of one model on one device: its holder, its handle, its workers.

Plain decisions: events and the clock go in, `Action`s come out. No process, socket or file is touched here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from weightd.daemon.generations.actions import Action, Dismiss, Enlist, Kill, Pin, Role, Send, Spawn
from weightd.daemon.generations.plan import Canary, Limits, Source
from weightd.daemon.generations.records import ChildRecord, GenerationRecord, SealRecord
from weightd.daemon.generations.restarts import Restarts
from weightd.daemon.generations.states import (
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
from weightd.daemon.generations.tries import Tries, described
from weightd.daemon.generations.unshared import Unshared
from weightd.daemon.host.ends import End
from weightd.daemon.host.logs import about
from weightd.protocol.codec import clip
from weightd.protocol.messages.children import (
    Allow,
    Allowed,
    Attach,
    Attached,
    Broken,
    Built,
    DeviceMemory,
    Hello,
    Probe,
    Probing,
    Settle,
    Stop,
)
from weightd.protocol.version import VERSION

_log = logging.getLogger("weightd.generation")

# An interpreter on a loaded machine needs seconds to import an engine. What comes before HELLO beside that, CANN's
# import and the digest of the model, may take as long as a build.
HELLO_TIMEOUT_S = 60.0

# A child that was told to stop only has to answer what it is computing.
STOP_TIMEOUT_S = 10.0

# A holder that holds has nothing else to do than to let a process attach.
ALLOW_TIMEOUT_S = 10.0

# A child looks for the daemon many times a second. One that computes is not there before it has finished that.
BACK_TIMEOUT_S = 5.0

# What a child that hangs gets to write its stacks down.
ABORT_TIMEOUT_S = 2.0


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
    # Whether the engine lets it attach; where pids are fixed at the build, those are the holder's list.
    listed: bool = False
    # What took it too long, so that it is being killed.
    overdue: str = ""
    aborted: bool = False


@dataclass
class Generation:
    """The life of a generation.

    Attributes:
        label: its name, the model's and a number that is never used again.
        device: where it lives.
        source: what it loads.
        number: the one in its label.
        state: where it is; changed by `_advance` alone.
        cause: why it failed, or why it has fewer workers than it should.
        children: every child that is alive, by name, in the order in which they were started.
        enlisted: the workers that take requests; the other ones that are READY are spares.
        built: what the holder exported, once it has.
        frozen: the holder is lost and the workers go on: nobody can attach any more.
        closed: the engine lets nobody attach who was not there at the build, for the reason given.
        invalid: the weights are gone with the holder: no answer of a worker counts any more.
        process_bytes: what one process takes on the card beside the weights, as far as it has been seen.
        deaths: processes that ended, or had to be ended, without being asked to.
        no_room: the holder found none on the card, where some may come free late.
        killed: the holder was, while it built: that may go better the next time.
        tries: what is known of its canary.
    """

    label: str
    limits: Limits
    device: str = "cpu"
    source: Source = field(default_factory=lambda: Source(""))
    number: int = 1
    state: GenerationState = GenerationState.PINNING
    cause: str = ""
    sha256: str = ""
    children: dict[str, Child] = field(default_factory=dict[str, Child])
    enlisted: dict[str, None] = field(default_factory=dict[str, None])
    built: Built | None = None
    frozen: bool = False
    closed: str = ""
    invalid: bool = False
    process_bytes: int = 0
    deaths: int = 0
    no_room: bool = False
    killed: bool = False
    tries: Tries = field(init=False)
    _actions: list[Action] = field(default_factory=list[Action])
    _restarts: Restarts = field(default_factory=Restarts)
    # Whom the holder was asked to let attach, and until when it may think about that.
    _asked_for: str | None = None
    _ask_until: float = float("inf")
    _free: int | None = None
    # The holder without which the weights are invalid.
    _guarded: str = ""
    _serial: int = 0
    _holders: int = 0
    _stop_timeout: float = STOP_TIMEOUT_S
    _unsettled: bool = False
    _told: str = ""
    _unshared: Unshared = field(default_factory=Unshared)
    # Workers of the daemon before this one.
    _resumed: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.tries = Tries(self.limits.canary)

    # --- events -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._actions.append(Pin())
        self._tell_progress()

    def pinned(self, sha256: str, now: float, canary: Canary | None = None) -> None:
        """The snapshot exists: start the processes. `canary` is what an earlier generation has found out of it."""
        if self.state is not GenerationState.PINNING:
            return
        self.tries = Tries(canary or self.limits.canary)
        self.sha256 = sha256
        self._advance(GenerationEvent.PINNED)
        self._spawn(Role.HOLDER, now)
        self._reconcile(now)

    @classmethod
    def resume(cls, label: str, limits: Limits, source: Source, record: GenerationRecord, now: float) -> Generation:
        """Return a generation that a daemon before this one has loaded; its workers serve once they are `back`."""
        generation = cls(label, limits, record.device, source, record.number, GenerationState.ATTACHING)
        generation.sha256, generation.built, generation.process_bytes = (
            record.sha256,
            record.built,
            record.process_bytes,
        )
        generation.frozen, generation.closed, generation._serial = record.frozen, record.closed, record.serial
        for each in record.children:
            child = Child(each.name, Role(each.role), ChildState.HOLDING, float("inf"), each.hello, listed=True)
            child.shared_bytes, child.note = each.shared_bytes, each.note
            generation.children[each.name] = child
            if child.role is Role.WORKER:
                # It may have to finish what it was given by the daemon before.
                child.state, child.deadline = ChildState.ATTACHING, now + BACK_TIMEOUT_S + limits.predict_timeout
                generation._resumed.add(each.name)
            elif generation._outlived(each.hello):
                generation._guarded = each.name
        return generation

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
        child.listed = not self._fixed(hello)
        self._advance_child(child, ChildEvent.HELLO, deadline=float("inf"))
        if self.state is GenerationState.SPAWNING:
            self._advance(GenerationEvent.GREETED)
        self._reconcile(now)

    def probing(self, name: str, probing: Probing) -> None:
        """The holder runs its model on something that may be its end."""
        child = self.children.get(name)
        if child is not None and child.state is ChildState.BUILDING:
            self.tries.told(probing)
            if probing.trying:
                self._actions.append(Send(name, Probe()))

    def holder_built(self, name: str, built: Built, now: float) -> None:
        """The holder exports the weights."""
        child = self.children.get(name)
        if child is None or child.state is not ChildState.BUILDING or child.hello is None:
            return
        if self.limits.sharing and child.hello.traits.attach_rewrites_weights and not built.canary:
            # Nothing else shows that a worker computes on the right weights.
            why = f"no canary: {built.canary_note}; name an input with the key canary, or set sharing to off"
            self.tries.trying = ()
            self.broken(name, Broken(clip(why)), now)
            return
        self.built = built
        self.tries.found(built)
        if not built.canary:
            _log.warning("%s: no canary: %s", self.label, built.canary_note)
        if self._outlived(child.hello):
            self._guarded = name
        self._free = built.device.free_bytes if built.device else None
        child.shared_bytes = built.shared_bytes
        if self.limits.sharing:
            # That there is nothing to share is no loss.
            self._warn(self._unshared.built(built), name, level=logging.WARNING if built.is_loss else logging.INFO)
        self._advance_child(child, ChildEvent.BUILT, deadline=float("inf"))
        if self.state is GenerationState.BUILDING:
            self._advance(GenerationEvent.BUILT)
            self._unsettled = True
        if not self._shares:
            # It has told the signature and the canary; its copy of the weights is of no use to anybody.
            self._stop(child, now)
        self._reconcile(now)

    def allowed(self, name: str, allowed: Allowed, now: float) -> None:
        """The holder has been asked to let one more process attach."""
        if name not in self.children or self._asked_for is None:
            return
        asked, self._asked_for, self._ask_until = self._asked_for, None, float("inf")
        if allowed.error:
            self._close(allowed.error)
        elif asked in self.children:
            self.children[asked].listed = True
        self._reconcile(now)

    def attached(self, name: str, attached: Attached, now: float) -> None:
        """A worker has built the model; it serves if it reproduces the canary."""
        child = self.children.get(name)
        if child is None or child.state is not ChildState.ATTACHING or self.built is None:
            return
        if self.built.canary and attached.canary != self.built.canary:
            self.broken(name, Broken("the canary's answer is not the holder's: the worker would answer wrongly"), now)
            return
        child.note, child.shared_bytes = attached.note, attached.shared_bytes
        if self.limits.sharing:
            self._warn(self._unshared.attached(self.built, attached), name)
        self._measure(attached.device)
        self._became_ready(child, now)

    def back(self, name: str, now: float) -> None:
        """A worker that was READY for the daemon before this one is connected."""
        child = self.children.get(name)
        if child is not None and self._is_awaited(child):
            self._became_ready(child, now)

    def broken(self, name: str, broken: Broken, now: float) -> None:
        """A child says that it cannot do what it is for."""
        child = self.children.get(name)
        if child is None or child.state not in COUNTED:
            return
        self._stop(child, now)
        self.no_room = broken.no_room and child.role is Role.HOLDER
        self._lost(child, broken.cause, now, no_room=broken.no_room)
        self._reconcile(now)

    def leaving(self, name: str, now: float) -> None:
        """A worker's model may be spoilt: it must go, and a fresh process take its place."""
        child = self.children.get(name)
        if child is None or child.state is not ChildState.READY:
            return
        # It leaves in order and by its own word: no reason to wait with the next one.
        _log.warning(
            "%s: %s leaves: a predict failed and may have spoilt its model", self.label, name, extra=self.about(name)
        )
        self._stop(child, now)
        self._reconcile(now)

    def hung(self, name: str, why: str, now: float, *, useful: bool = False) -> None:
        """A worker does not answer any more: it is ended, and replaced. `useful`: it had answered something."""
        child = self.children.get(name)
        if child is None or (child.state is not ChildState.READY and child.deadline == float("inf")):
            return  # it is being killed already
        if child.state is ChildState.READY:
            self._actions.append(Dismiss(name))
            self.enlisted.pop(name, None)
        self._abort(child, why, now, useful=useful)
        self._reconcile(now)

    def store_lost(self, cause: str, now: float) -> None:
        """What the workers have mapped is not what the holder left there: whatever they compute may be wrong."""
        if self.state in ACTIVE and self.built is not None:
            self._invalidate(cause, now)

    def exited(self, name: str, end: End, now: float, *, useful: bool = False) -> None:
        """A child has exited and has been waited for.

        Args:
            name: of the child.
            end: how.
            now: the clock.
            useful: whether it had answered any request.
        """
        child = self.children.pop(name, None)
        if child is None:
            return
        self.enlisted.pop(name, None)
        unexpected = child.state in COUNTED
        self._advance_child(child, ChildEvent.EXIT, deadline=float("inf"))
        if unexpected:
            blamed = child.role is Role.HOLDER and self.tries.trying and not end.from_outside
            self.deaths += not blamed
            self.killed = child.role is Role.HOLDER and self.built is None and end.killed and not blamed
            self._lost(child, str(end), now, useful=useful, from_outside=end.from_outside)
        elif child.overdue:
            self._explain(child, end.words)
        self._reconcile(now)

    def drain(self, now: float, *, patience: float = 0.0) -> None:
        """No new work: wind down, workers first; to finish what they have, they may take `patience` seconds more."""
        self._stop_timeout = STOP_TIMEOUT_S + patience
        for child in self.children.values():
            if child.state is ChildState.STOPPING and child.deadline < float("inf"):
                child.deadline = min(child.deadline, now + self._stop_timeout)
        if self.state in ACTIVE:
            self._advance(GenerationEvent.DRAIN)
        self._reconcile(now)

    def tick(self, now: float) -> None:
        """Time has passed: kill what has taken too long, start what is due."""
        for child in list(self.children.values()):
            if now < child.deadline:
                continue
            if child.aborted or self.invalid:
                child.deadline = float("inf")
                self._actions.append(Kill(child.name))
            else:
                self._abort(child, f"{child.state.value} took too long", now)
        if now >= self._ask_until:
            self._ask_until = float("inf")
            self._close(f"the holder has not answered for {ALLOW_TIMEOUT_S:g} s")
        self._reconcile(now)

    # --- what it tells ------------------------------------------------------------------------------------------

    def record(self, seal: SealRecord | None) -> GenerationRecord | None:
        """Return what the next daemon has to know to `resume` it; None if it cannot."""
        resuming = self.state is GenerationState.ATTACHING and self._resumed
        if self.built is None or self.invalid or not (self.state is GenerationState.SERVING or resuming):
            return None
        children = [
            ChildRecord(child.name, child.role.value, child.hello, child.shared_bytes, child.note)
            for child in self.children.values()
            if child.hello is not None
            and (child.state in (ChildState.HOLDING, ChildState.READY) or self._is_awaited(child))
        ]
        return GenerationRecord(
            number=self.number,
            source=self.source.number,
            device=self.device,
            sharing=self.limits.sharing,
            sha256=self.sha256,
            frozen=self.frozen,
            closed=self.closed,
            process_bytes=self.process_bytes,
            serial=self._serial,
            built=self.built,
            children=tuple(children),
            seal=seal,
        )

    def take_actions(self) -> list[Action]:
        """Return what is to be done, in order, and forget it."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def next_tick(self) -> float:
        """When `tick` is due, in monotonic seconds."""
        due = min((child.deadline for child in self.children.values()), default=float("inf"))
        due = min(due, self._ask_until) if self.state in ACTIVE else due
        return min(due, self._restarts.due) if self._missing() else due

    @property
    def ended(self) -> bool:
        """Whether nothing is left of it."""
        return self.state in ENDED and not self.children

    @property
    def complete(self) -> bool:
        """Whether it serves with all the workers that it should have, or that it can have for now."""
        if self.state is not GenerationState.SERVING:
            return False
        return self._restarts.failing or (not self._missing() and self._all_ready())

    @property
    def awaits(self) -> bool:
        """Whether it was resumed, and a worker may still be `back`."""
        return self.state in ACTIVE and any(self._is_awaited(child) for child in self.children.values())

    @property
    def full(self) -> bool:
        """Whether all workers and spares that it should have are READY."""
        return self._count(ChildState.READY) == self.limits.attached

    @property
    def needs_renewal(self) -> bool:
        """Whether it has lost workers that only another generation can replace."""
        if self.state is not GenerationState.SERVING or not (self.frozen or self.closed):
            return False
        return self.frozen or len(self._counted(Role.WORKER)) < self.limits.workers

    def trusted(self, holder_lives: Callable[[str], bool]) -> bool:
        """Whether an answer of a worker can be passed on: not if the memory it came from may be invalid by now."""
        return not self.invalid and (not self._guarded or holder_lives(self._guarded))

    @property
    def ready(self) -> list[str]:
        """The workers and spares that are READY, by name."""
        return [child.name for child in self.children.values() if child.state is ChildState.READY]

    @property
    def progress(self) -> str:
        """What it is doing now, for people."""
        ready = self._count(ChildState.READY)
        wanted = self.limits.attached
        if self.state in (GenerationState.SPAWNING, GenerationState.GATHERING):
            up = sum(child.hello is not None for child in self.children.values())
            return f"spawned, {up}/{wanted + 1} processes up"
        if self.frozen and self.state is GenerationState.SERVING:
            return f"serving {ready}/{wanted}, frozen: the holder is lost"
        if self.closed and self.state is GenerationState.SERVING and ready < wanted:
            return f"serving {ready}/{wanted}, nobody can attach any more"
        if self.state in (GenerationState.ATTACHING, GenerationState.SERVING) and ready < wanted:
            return f"serving {ready}/{wanted}, backing off" if self._backs_off else f"attaching {ready}/{wanted}"
        return str(self.state.value)

    @property
    def canary(self) -> str:
        """What its canary is run on, or why it has none; "" before that is known. For people."""
        if self.built is None:
            return ""
        if not self.built.canary:
            return f"none: {self.built.canary_note}"
        return described(self.built.canary_cases)

    @property
    def _backs_off(self) -> bool:
        """Whether the next worker is not started at once."""
        return self._has_served and bool(self._missing()) and self._restarts.delay > 0

    @property
    def _has_served(self) -> bool:
        """Whether it does, or did before its workers were lost: it is tried for ever to have others."""
        return self.state is GenerationState.SERVING

    # --- decisions ----------------------------------------------------------------------------------------------

    def _became_ready(self, child: Child, now: float) -> None:
        child.ready_at = now
        self._advance_child(child, ChildEvent.ATTACHED, deadline=float("inf"))
        self._restarts.became_ready()
        self.cause = ""
        self._unsettled = True
        self._fill()
        if self.state is GenerationState.ATTACHING:
            self._advance(GenerationEvent.READY)
        self._reconcile(now)

    def _is_awaited(self, child: Child) -> bool:
        return child.state is ChildState.ATTACHING and child.name in self._resumed

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
        if self.state in ACTIVE:
            self._dismiss_uninvited(now)
        # One that is still on its way may become READY.
        if not self._counted(Role.WORKER):
            if self._given_up:
                self.failed(self.cause, now)
            elif self.frozen or self.closed:
                lost = "every worker is lost, and nobody can attach any more"
                self.failed(f"{lost}; {self.cause}" if self.cause else lost, now)
        if self.state in ACTIVE and self.state is not GenerationState.PINNING:
            self._fill()
            self._replace_missing(now)
            self._replace_holder(now)
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

    def _replace_holder(self, now: float) -> None:
        """Once one that a canary has killed is gone: no two of them hold the weights at once."""
        if self.state is GenerationState.GATHERING and not any(
            child.role is Role.HOLDER for child in self.children.values()
        ):
            self._spawn(Role.HOLDER, now)

    def _missing(self) -> int:
        """How many workers are to be started."""
        if self.state not in ACTIVE or self.state is GenerationState.PINNING or self._given_up:
            return 0
        if self.frozen or self.closed:
            return 0
        return self.limits.attached - len(self._counted(Role.WORKER))

    @property
    def _given_up(self) -> bool:
        """Whether none of its workers has ever been READY, and none will be."""
        return self._restarts.failing and not self._has_served

    def _all_ready(self) -> bool:
        return all(worker.state is ChildState.READY for worker in self._counted(Role.WORKER))

    def _fill(self) -> None:
        """Let spares take the places of workers that are lost."""
        for worker in self._counted(Role.WORKER):
            if len(self.enlisted) >= self.limits.workers:
                return
            if worker.state is ChildState.READY and worker.name not in self.enlisted:
                self.enlisted[worker.name] = None
                self._actions.append(Enlist(worker.name))

    def _gather(self, now: float) -> None:
        """Order the build once the pids that must be known are."""
        if self.state is not GenerationState.GATHERING:
            return
        holder = next(iter(self._counted(Role.HOLDER)), None)
        if holder is None or holder.hello is None:
            return
        workers = self._counted(Role.WORKER)
        known = [worker for worker in workers if worker.hello is not None]
        if self._fixed(holder.hello) and (self._missing() or len(known) < len(workers)):
            return
        self._advance(GenerationEvent.GATHERED)
        self._advance_child(holder, ChildEvent.BUILD, deadline=now + self.limits.load_timeout)
        for worker in known:
            worker.listed = True
        pids = tuple(worker.hello.pid for worker in known if worker.hello) if self.limits.sharing else ()
        self._actions.append(Send(holder.name, self.tries.order(pids)))

    def _attach_next(self, now: float) -> None:
        """One at a time: each attach loads the model, so this bounds the peak of memory."""
        if self.built is None or self._count(ChildState.ATTACHING):
            return
        if not self._shares and any(child.role is Role.HOLDER for child in self.children.values()):
            return  # it leaves, and its own copy with it
        for worker in self._counted(Role.WORKER):
            if worker.state is ChildState.GREETED and self._shares and not worker.listed:
                self._ask_for(worker, now)
            elif worker.state is ChildState.GREETED:
                self._advance_child(worker, ChildEvent.ATTACH, deadline=now + self.limits.load_timeout)
                self._actions.append(Send(worker.name, Attach(self.built.handle, self.built.canary_cases)))
                return

    def _measure(self, device: DeviceMemory | None) -> None:
        """Attaches come one after another: what a card lost since the last one, this process took."""
        if device is not None and self.limits.sharing:  # else that was its weights too
            taken = 0 if self._free is None else self._free - device.free_bytes
            # The least that was seen: whatever else was loaded on the card meanwhile only makes it more.
            if taken > 0:
                self.process_bytes = min(self.process_bytes or taken, taken)
            self._free = device.free_bytes

    def _ask_for(self, worker: Child, now: float) -> None:
        """Have the holder let a process attach that it did not know at its build: one at a time."""
        holder = next(iter(self._counted(Role.HOLDER)), None)
        if self._asked_for is not None or self.closed or holder is None or worker.hello is None:
            return
        self._asked_for, self._ask_until = worker.name, now + ALLOW_TIMEOUT_S
        self._actions.append(Send(holder.name, Allow((worker.hello.pid,))))

    def _close(self, why: str) -> None:
        self.closed = why
        _log.warning(
            "%s: lost workers are not replaced, they wait for the next generation: %s",
            self.label,
            why,
            extra=self.about(),
        )

    def _dismiss_uninvited(self, now: float) -> None:
        """A process that can never attach only takes memory."""
        if self.closed or self.frozen:
            for worker in self._counted(Role.WORKER):
                if worker.state in (ChildState.SPAWNED, ChildState.GREETED) and (self.frozen or not worker.listed):
                    self._stop(worker, now)

    def _settle(self) -> None:
        """Once no attach is under way or due, what only attaching needed is given back: by the holder, or its heir."""
        if self.state is not GenerationState.SERVING or not self._unsettled:
            return
        if self._all_ready() and (self._restarts.failing or not self._missing()):
            self._unsettled = False
            heirs = self._counted(Role.WORKER) if self._shares and not self.frozen else []
            self._actions += [Send(each.name, Settle()) for each in (self._counted(Role.HOLDER) or heirs)[:1]]

    def _wind_down(self, now: float) -> None:
        """Workers leave and are waited for; then the holder, whose memory they used."""
        workers = [child for child in self.children.values() if child.role is Role.WORKER]
        for child in workers or list(self.children.values()):
            if child.state in COUNTED:
                self._stop(child, now)
        if not self.children and self.state is GenerationState.DRAINING:
            self._advance(GenerationEvent.EMPTY)

    def _abort(self, child: Child, why: str, now: float, *, useful: bool = False) -> None:
        """End a child that hangs: first in a way that shows where it hangs."""
        child.aborted = True
        self._actions.append(Kill(child.name, abort=True))
        if child.state not in COUNTED:
            child.deadline = now + ABORT_TIMEOUT_S
            return
        child.overdue = why
        self.deaths += not (child.role is Role.HOLDER and self.tries.trying)
        self._advance_child(child, ChildEvent.STOP, deadline=now + ABORT_TIMEOUT_S)
        self._lost(child, why, now, useful=useful)

    def _lost(
        self,
        child: Child,
        cause: str,
        now: float,
        *,
        useful: bool = False,
        no_room: bool = False,
        from_outside: bool = False,
    ) -> None:
        """Account for a child that is of no use any more."""
        before = self.state
        if child.role is Role.HOLDER:
            self._holder_lost(child, cause, now, from_outside=from_outside)
        if self.state is before:  # else it has failed with this cause, which is told with what follows
            _log.warning("%s: %s lost: %s", self.label, child.name, cause, extra=self.about(child.name))
        if child.role is Role.HOLDER:
            return
        if self.state not in ACTIVE:
            return
        if child.ready_at is not None:
            self._restarts.died(now - child.ready_at, now, useful=useful)
            if self._restarts.delay and not (self.frozen or self.closed):
                self.cause = f"workers die before they have answered anything; the last: {child.name}: {cause}"
        else:
            self.cause = f"{child.name}: {cause}"
            if child.name in self._resumed:
                # It was READY once: that it is not back says nothing about the next one.
                self._restarts.died(0.0, now, useful=True)
            elif no_room:
                self._restarts.no_room(now, self.limits.room_timeout)
            else:
                self._restarts.start_failed(now)
        if self._backs_off:
            _log.warning(
                "%s: the next worker is started in %.1f s", self.label, self._restarts.delay, extra=self.about()
            )

    def _explain(self, child: Child, words: str) -> None:
        """A child was given up before it was dead: only now its log is complete."""
        if words:
            told = f"{child.name}: {child.overdue}"
            _log.warning("%s: %s; its log ends: %s", self.label, told, words, extra=self.about(child.name))
            self.cause = self.cause.replace(told, f"{told}; its log ends: {words}")

    def _holder_lost(self, holder: Child, cause: str, now: float, *, from_outside: bool = False) -> None:
        tried = described(self.tries.trying)
        is_building, is_slow = self.state is GenerationState.BUILDING, bool(holder.overdue)
        if is_building and self.tries.lost(is_slow=is_slow, from_outside=from_outside):
            _log.warning("%s: the holder is lost while it tries %s as a canary: %s", self.label, tried, cause)
            self.killed = False
            self._advance(GenerationEvent.RETRY)
        elif tried and self.built is None:
            self.failed(f"{holder.name}: {cause}; it ran the configured canary, {tried}", now)
        elif self.built is None or holder.hello is None:
            self.failed(f"{holder.name}: {cause}", now)
        elif self._outlived(holder.hello):
            self._invalidate(f"{holder.name}: {cause}; the shared weights are invalid without it", now)
        elif self._fixed(holder.hello):
            self.frozen = True

    def _invalidate(self, cause: str, now: float) -> None:
        """What the workers compute on may be anything from now on: they have no time to finish."""
        self.invalid = True
        for child in self.children.values():
            # Those that were told to leave, too; not those that are killed already.
            if child.state is ChildState.STOPPING and child.deadline < float("inf"):
                child.deadline = now
        self.failed(cause, now)

    @property
    def _shares(self) -> bool:
        """Whether workers attach to what the holder builds, as far as it is known."""
        return self.limits.sharing and (self.built is None or bool(self.built.handle))

    def _fixed(self, hello: Hello) -> bool:
        """Whether only those can attach whom the holder knew at its build."""
        return self._shares and hello.traits.pids_fixed_at_build

    def _outlived(self, hello: Hello) -> bool:
        """Whether the weights become invalid with the holder."""
        return self._shares and hello.traits.holder_must_outlive and not self.limits.outlives_holder

    # --- the funnels --------------------------------------------------------------------------------------------

    def _spawn(self, role: Role, now: float) -> None:
        self._serial += role is Role.WORKER
        self._holders += role is Role.HOLDER
        holder = f"{self.label}.holder{self._holders if self._holders > 1 else ''}"
        name = holder if role is Role.HOLDER else f"{self.label}.w{self._serial}"
        patience = max(HELLO_TIMEOUT_S, self.limits.load_timeout)
        self.children[name] = Child(name, role, ChildState.SPAWNED, now + patience)
        self._actions.append(Spawn(name, role))

    def _stop(self, child: Child, now: float) -> None:
        if child.state is ChildState.READY:
            self._actions.append(Dismiss(child.name))
        self.enlisted.pop(child.name, None)
        # A child that has not said HELLO cannot be told anything: there may be nobody who would hear it.
        heard = child.state is not ChildState.SPAWNED and not self.invalid
        self._advance_child(child, ChildEvent.STOP, deadline=now + self._stop_timeout if heard else float("inf"))
        self._actions.append(Send(child.name, Stop()) if heard else Kill(child.name))

    def _advance(self, event: GenerationEvent) -> None:
        before, self.state = self.state, advance(GENERATION, self.state, event)
        _log.debug("%s: %s -> %s", self.label, before.value, self.state.value, extra=self.about())

    def about(self, child: str = "") -> Mapping[str, Any]:
        """Return `extra` of an event of this generation, or of one of its children."""
        return about(self.label.rpartition(".")[0], self.number, child)

    def _warn(self, why: str, child: str, *, level: int = logging.WARNING) -> None:
        if why:
            _log.log(level, "%s: %s", self.label, why, extra=self.about(child))

    def _tell_progress(self) -> None:
        """One line each time that there is something new to tell; a failure is told by who knows what follows."""
        if self.progress != self._told:
            self._told = self.progress
            if self.state is not GenerationState.FAILED:
                _log.info("%s: %s", self.label, self._told, extra=self.about())

    def _advance_child(self, child: Child, event: ChildEvent, *, deadline: float) -> None:
        before, child.state = child.state, advance(CHILD, child.state, event)
        child.deadline = deadline
        _log.debug("%s: %s -> %s", child.name, before.value, child.state.value, extra=self.about(child.name))

    def _counted(self, role: Role) -> list[Child]:
        return [child for child in self.children.values() if child.role is role and child.state in COUNTED]

    def _count(self, state: ChildState) -> int:
        return sum(child.state is state for child in self.children.values())

    def alive(self) -> Iterator[Child]:
        """Yield the children that have a process."""
        return (child for child in self.children.values() if child.state in ALIVE)
