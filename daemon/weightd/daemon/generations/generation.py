"""The life of one weight copy of one model on one device.

Plain decisions: events and the clock go in, `Action`s come out. No process, socket or file is touched here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from weightd.daemon.generations.actions import Role, Send
from weightd.daemon.generations.child import Child, Loss
from weightd.daemon.generations.life import HELLO_TIMEOUT_S, Life, misfit
from weightd.daemon.generations.plan import Canary
from weightd.daemon.generations.progress import Apart, Cause, Outlook
from weightd.daemon.generations.states import (
    ACTIVE,
    COUNTED,
    LOADING,
    ChildEvent,
    ChildState,
    GenerationEvent,
    GenerationState,
)
from weightd.daemon.generations.tries import Tries, described
from weightd.daemon.host.ends import End, Lost
from weightd.protocol import limits
from weightd.protocol.codec import clip
from weightd.protocol.messages.children import Allowed, Attached, Broken, Built, Hello, Probe, Probing

# What a child that hangs gets to write its stacks down.
ABORT_TIMEOUT_S = 2.0


class Generation(Life):
    """The life of a holder and its workers."""

    # --- events -------------------------------------------------------------------------------------------------

    def pinned(self, sha256: str, now: float, canary: Canary | None = None, digests: tuple[str, ...] = ()) -> None:
        """The snapshot exists: start the processes. `canary` is what an earlier generation has found out of it."""
        del digests  # of what is cut
        if self.state is not GenerationState.PINNING:
            return
        self.tries = Tries(canary or self.terms.canary, self.terms.rows)
        self.sha256 = sha256
        self._machine.advance(GenerationEvent.PINNED)
        self._spawn(Role.HOLDER, now)
        self._reconcile(now)

    def hello(self, name: str, hello: Hello, now: float) -> None:
        """A child is up."""
        child = self.children.get(name)
        if child is None or child.state is not ChildState.SPAWNED:
            return
        refusal = misfit(hello, self.sha256)
        if refusal:
            self.broken(name, Broken(refusal), now)
            return
        child.hello = hello
        child.advance(ChildEvent.HELLO)
        self.access.greeted(is_fixed=self._shares and hello.traits.pids_fixed_at_build)
        if self.state is GenerationState.SPAWNING:
            self._machine.advance(GenerationEvent.GREETED)
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
        if self.terms.sharing and child.hello.traits.attach_rewrites_weights and not built.canary:
            # Nothing else shows that a worker computes on the right weights.
            why = f"no canary: {built.canary_note}; name an input with the key canary, or set sharing to off"
            self.tries.trying = ()
            self.broken(name, Broken(clip(why)), now)
            return
        if built.is_template and not (self.terms.forks_built and self.access.is_open):
            self.broken(name, Broken("it says that workers are to be forked of it, and was not asked for that"), now)
            return
        self.built = built
        self.tries.found(built)
        if not built.canary:
            self._teller.tell(f"no canary: {built.canary_note}")
        self.guard(child)
        self.footprint.built(built.device)
        child.shared_bytes = built.shared_bytes
        self._teller.rows(built, exact=self.terms.rows.exact)
        if self.terms.sharing:
            self._teller.built(built, name)
        child.advance(ChildEvent.BUILT)
        if self.state is GenerationState.BUILDING:
            self._machine.advance(GenerationEvent.BUILT)
            self.access.built(is_shared=self._shares, is_template=built.is_template)
        if not self._shares:
            # It has told the signature and the canary; its copy of the weights is of no use to anybody.
            self._stop(child, now)
        self._reconcile(now)

    def unequal(self, note: str, parties: Mapping[int, str] = MappingProxyType({})) -> None:
        """A worker has found that rows together are not what each is alone, though the holder had found them equal.

        Args:
            note: what differs.
            parties: the names of those whose rows differ, by their numbers; none: those of all may. From now on their
                requests share no job, until there is another generation.
        """
        built = self.built
        new = {number: name for number, name in parties.items() if number not in self.apart}
        if parties and len(self.apart) + len(new) <= limits.MAX_TENANTS:
            if new:
                self.apart.update((number, Apart(name, note)) for number, name in new.items())
                self.mishaps.differed()
                self._teller.tell(f"requests of {', '.join(new.values())} are not put together any more: {note}")
            return
        if built is not None and built.rows is not None and built.rows.equal:
            self.built = dataclasses.replace(built, rows=dataclasses.replace(built.rows, equal=False, note=note))
            self.mishaps.differed()
            self._teller.tell(f"requests are not put together any more: {note}")

    def guard(self, holder: Child) -> None:
        """The holder holds; where the weights become invalid with it, no answer counts without it."""
        outlives = holder.hello is not None and holder.hello.traits.holder_must_outlive
        if outlives and self._shares and not self.terms.outlives_holder:
            self.access.guard = holder.name

    def allowed(self, name: str, allowed: Allowed, now: float) -> None:
        """The holder has been asked to let one more process attach."""
        if name in self.children:
            self.access.allowed(allowed)
            self._reconcile(now)

    def attached(self, name: str, attached: Attached, now: float) -> None:
        """A worker has built the model; it serves if it reproduces the canary."""
        child = self.children.get(name)
        if child is None or child.state is not ChildState.ATTACHING or self.built is None:
            return
        if self.built.canary and attached.canary != self.built.canary:
            self.mishaps.canary_failed()
            self.broken(name, Broken("the canary's answer is not the holder's: the worker would answer wrongly"), now)
            return
        child.note, child.shared_bytes = attached.note, attached.shared_bytes
        if self.terms.sharing:
            self._teller.attached(self.built, attached, name)
            self.footprint.attached(attached.device)  # else that was its weights too
        self._became_ready(child, ChildEvent.ATTACHED, now)

    def back(self, name: str, now: float, step: int = 0) -> None:
        """A worker that was READY for the daemon before this one is connected."""
        del step  # of ranks
        child = self.children.get(name)
        if child is not None and child.state is ChildState.AWAITED:
            self._became_ready(child, ChildEvent.BACK, now)

    def broken(self, name: str, broken: Broken, now: float) -> None:
        """A child says that it cannot do what it is for."""
        child = self.children.get(name)
        if child is None or child.state not in COUNTED:
            return
        loss = Loss(broken.cause, child.state, no_room=broken.no_room, transient=broken.transient)
        self._stop(child, now)
        self._lost(child, loss, now)
        self._reconcile(now)

    def leaving(self, name: str, now: float, why: str = "") -> None:
        """A worker's model may be spoilt: it must go, and a fresh process take its place."""
        del why  # the client is told
        child = self.children.get(name)
        if child is None or child.state is not ChildState.READY:
            return
        # It leaves in order and by its own word: no reason to wait with the next one.
        self.mishaps.lost()
        self._teller.tell(f"{name} leaves: a predict failed and may have spoilt its model", name)
        self._stop(child, now)
        self._reconcile(now)

    def hung(self, name: str, why: str, now: float, *, useful: bool = False) -> None:
        """A worker does not answer any more: it is ended, and replaced. `useful`: it had answered something."""
        child = self.children.get(name)
        if child is not None and child.state in (ChildState.READY, ChildState.STOPPING):
            self._abort(child, why, now, useful=useful)
            self._reconcile(now)

    def store_lost(self, cause: str, now: float) -> None:
        """What the workers have mapped is not what the holder left there: whatever they compute may be wrong."""
        if self.state in ACTIVE and self.built is not None:
            self._invalidate(Cause(cause), now)

    def exited(self, name: str, end: End, now: float, *, useful: bool = False) -> None:
        """A child has exited and has been waited for. `useful`: it had answered some request."""
        child = self.children.get(name)
        if child is None:
            return
        was = child.state
        self.roster.exited(child)
        if end.lost is not Lost.NOTHING and self._has_served:
            self.access.files_lost(end.words)
        if was in COUNTED:
            loss = Loss(
                str(end),
                was,
                is_useful=useful,
                by_signal=end.killed,
                from_outside=end.from_outside,
                transient=end.is_transient,
            )
            self._died(child, loss, now)
        elif child.loss is not None and end.words:
            # It was given up before it was dead: only now its log is complete.
            self._teller.tell(str(Cause(child.loss.why, name, end.words)), name)
            if self._cause.child == name:
                self._cause = dataclasses.replace(self._cause, words=end.words)
        self._reconcile(now)

    def drain(self, now: float, *, patience: float = 0.0) -> None:
        """No new work: wind down, workers first; to finish what they have, they may take `patience` seconds more."""
        self._bound_stops(now, patience)
        if self.state in ACTIVE:
            self._machine.advance(GenerationEvent.DRAIN)
        self._reconcile(now)

    def tick(self, now: float) -> None:
        """Time has passed: kill what has taken too long, start what is due."""
        for child in list(self.children.values()):
            # Not those that an earlier one has taken along.
            if now >= child.deadline and child.state is ChildState.ABORTED:
                self.roster.kill(child)
            elif now >= child.deadline:
                self._abort(child, f"{child.state.told} took too long", now)
        if self.state in ACTIVE:
            self.access.tick(now)
        self._reconcile(now)

    # --- decisions ----------------------------------------------------------------------------------------------

    def _reconcile(self, now: float) -> None:
        """Bring what is nearer to what should be; called after each event."""
        if self.state in ACTIVE:
            self.access.dismiss_uninvited(now + self._stop_timeout)
        # One that is still on its way may become READY.
        if not self.roster.counted(Role.WORKER):
            if self._given_up:
                self._fail(self._cause, now)
            elif self.access.is_shut:
                lost = "every worker is lost, and nobody can attach any more"
                self._fail(self._cause.led_to(f"{lost}; ") if self._cause.why else Cause(lost), now)
        if self.state in ACTIVE and self.state is not GenerationState.PINNING:
            self.roster.fill(self.terms.workers)
            self._replace(now)
            self._gather(now)
            # One without anything to share leaves first, and its own copy with it.
            if self.built is not None and (self._shares or not self.roster.has_holder):
                self.access.attach_next(self.tries.attach(self.built), now, self._attach_timeout, self.at_once)
            if self.complete and self.roster.all_ready:
                self.access.settle(is_shared=self._shares)
        elif self.state not in ACTIVE:
            self._wind_down(now)
        self._tell_progress()

    def _replace(self, now: float) -> None:
        """Start what is missing."""
        if self._restarts.due <= now:
            for device in self._missing:
                self._spawn(Role.WORKER, now, device)
        # One that a canary has killed is waited for: no two of them hold the weights at once.
        if self.state is GenerationState.GATHERING and not self.roster.has_holder:
            self._spawn(Role.HOLDER, now)

    def _gather(self, now: float) -> None:
        """Order the build once the pids that must be known are."""
        holder = self.roster.holder
        if self.state is not GenerationState.GATHERING or holder is None or holder.hello is None:
            return
        workers = self.roster.counted(Role.WORKER)
        known = [worker.hello.pid for worker in workers if worker.hello is not None]
        if not self.access.is_open and (self._missing or len(known) < len(workers)):
            return
        self._machine.advance(GenerationEvent.GATHERED)
        holder.advance(ChildEvent.BUILD, now + self.terms.load_timeout)
        self.access.listed()
        self._actions.append(Send(holder.name, self.tries.order(tuple(known) if self.terms.sharing else ())))

    def _wind_down(self, now: float) -> None:
        """Workers leave and are waited for; then the holder, whose memory they used."""
        workers = [child for child in self.children.values() if child.role is Role.WORKER]
        for child in workers or list(self.children.values()):
            if child.state in COUNTED:
                self._stop(child, now)
        if not self.children and self.state is GenerationState.DRAINING:
            self._machine.advance(GenerationEvent.EMPTY)

    def _became_ready(self, child: Child, event: ChildEvent, now: float) -> None:
        child.ready_at = now
        child.advance(event)
        self._restarts.became_ready()
        self._cause = Cause()
        self.access.attached()
        self.roster.fill(self.terms.workers)
        if self.state in LOADING:
            self._machine.advance(GenerationEvent.READY)
        self._reconcile(now)

    def _spawn(self, role: Role, now: float, device: str = "") -> None:
        self.mishaps.started()
        template = self._template if role is Role.WORKER else ""
        deadline = now + max(HELLO_TIMEOUT_S, self.terms.load_timeout)
        self.roster.spawn(role, deadline, device or self.device, template)

    def _stop(self, child: Child, now: float) -> None:
        if self.access.is_valid:
            self.roster.stop(child, now + self._stop_timeout)
        else:
            self.roster.kill(child)

    # --- what is lost -------------------------------------------------------------------------------------------

    def _abort(self, child: Child, why: str, now: float, *, useful: bool = False) -> None:
        """End a child that hangs: first in a way that shows where it hangs."""
        was = child.state
        self.roster.abort(child, now + ABORT_TIMEOUT_S)
        if was in COUNTED:
            child.loss = Loss(why, was, is_useful=useful, is_slow=True)
            self._died(child, child.loss, now)

    def _died(self, child: Child, loss: Loss, now: float) -> None:
        """A child has ended, or has to be, without being asked to; that a try of the holder may cost it is known."""
        if not self._died_of_try(child, loss):
            self.deaths += 1
            self.mishaps.died()
        self._lost(child, loss, now)

    def _died_of_try(self, child: Child, loss: Loss) -> bool:
        return child.role is Role.HOLDER and bool(self.tries.trying) and not loss.from_outside

    def _lost(self, child: Child, loss: Loss, now: float) -> None:
        before = self.state
        if before in ACTIVE:
            self.mishaps.lost()
        if child.role is Role.HOLDER:
            self._holder_lost(child, loss, now)
        if self.state is before:  # else it has failed with this cause, which is told with what follows
            self._teller.tell(f"{child.name} lost: {loss.why}", child.name)
        if child.role is Role.WORKER and self.state in ACTIVE:
            self._worker_lost(child, loss, now)

    def _worker_lost(self, child: Child, loss: Loss, now: float) -> None:
        cause = Cause(loss.why, child.name, transient=loss.transient or loss.no_room)
        if loss.was is ChildState.READY:
            self._restarts.died(now - child.ready_at, now, useful=loss.is_useful)
            if self._restarts.delay and not self.access.is_shut:
                self._cause = cause.led_to("workers die before they have answered anything; the last: ")
        else:
            self._cause = cause
            if loss.was is ChildState.AWAITED:
                # It was READY once: that it is not back says nothing about the next one.
                self._restarts.died(0.0, now, useful=True)
            elif loss.no_room:
                self._restarts.no_room(now, self.terms.room_timeout)
            else:
                self._restarts.start_failed(now)
        if self._backs_off:
            self._teller.tell(f"the next worker is started in {self._restarts.delay:.1f} s")

    def _holder_lost(self, holder: Child, loss: Loss, now: float) -> None:
        tried, died_of_try = described(self.tries.trying), self._died_of_try(holder, loss)
        if self.state is GenerationState.BUILDING and self.tries.lost(
            is_slow=loss.is_slow, from_outside=loss.from_outside
        ):
            self._teller.tell(f"the holder is lost while it tries {tried} as a canary: {loss.why}", holder.name)
            self._machine.advance(GenerationEvent.RETRY)
        elif self.built is None or holder.hello is None:
            outlook = Outlook.BETTER if loss.by_signal and not died_of_try else Outlook.SAME
            after = f"; it ran the configured canary, {tried}" if tried else ""
            outlook = Outlook.ROOM if loss.no_room else outlook
            transient = loss.transient or loss.no_room
            cause = Cause(loss.why, holder.name, after=after, outlook=outlook, transient=transient)
            self._fail(cause, now)
        elif holder.name == self.access.guard:
            after = "; the shared weights are invalid without it"
            self._invalidate(Cause(loss.why, holder.name, after=after), now)
        else:
            self.access.holder_lost()

    def _invalidate(self, cause: Cause, now: float) -> None:
        """What the workers compute on may be anything from now on: they have no time to finish."""
        self.access.invalidate()
        for child in self.children.values():
            # Those that were told to leave, too.
            if child.state in (ChildState.STOPPING, ChildState.ABORTED):
                self.roster.kill(child)
        self._fail(cause, now)

    def _fail(self, cause: Cause, now: float) -> None:
        if self.state in ACTIVE:
            self._cause = cause
            self.mishaps.lost(sum(child.state in COUNTED for child in self.children.values()))
            self._machine.advance(GenerationEvent.FAIL)
            self._reconcile(now)
