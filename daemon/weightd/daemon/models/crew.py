"""The processes of one model: whose each is, what becomes of what it says, and what is done to it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from weightd.daemon.children.owner import Owner
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.generations.actions import Action, Dismiss, Enlist, Forget, Kill, Pin, Send, Spawn
from weightd.daemon.generations.generation import Generation
from weightd.daemon.generations.life import Life
from weightd.daemon.generations.plan import Source
from weightd.daemon.generations.records import GenerationRecord
from weightd.daemon.generations.resume import resume, resume_unit
from weightd.daemon.generations.unit import Unit
from weightd.daemon.host.ends import End, Lost
from weightd.daemon.models import rows, units
from weightd.daemon.models.deployment import Deployment
from weightd.daemon.models.ports import Children
from weightd.daemon.models.ranks import Places
from weightd.daemon.models.snapshots import Snapshots
from weightd.daemon.requests.desk import Desk
from weightd.protocol.codec import clip
from weightd.protocol.messages.children import (
    Allowed,
    Attached,
    Back,
    Broken,
    Built,
    ChildMessage,
    Failed,
    Forked,
    Hello,
    Pong,
    Probing,
    Result,
    Skipped,
    Unequal,
)
from weightd.protocol.messages.ranks import Done

_log = logging.getLogger("weightd")


class Crew:
    """Stands between the processes of a model, its generations and its desk.

    Args:
        owner: who is told of them.
        config: of the model.
        children: the processes.
        snapshots: of the model's sources.
        desk: where its requests are.
        settle: called after each event of a generation.

    Attributes:
        past_deaths: processes of generations of which nothing is left that ended without being asked to.
    """

    def __init__(
        self,
        owner: Owner,
        config: ModelConfig,
        children: Children,
        snapshots: Snapshots,
        desk: Desk,
        settle: Callable[[float], None],
    ) -> None:
        self.past_deaths = 0
        self._children = children
        self._owner = owner
        self._config = config
        self._snapshots = snapshots
        self._desk = desk
        self._settle = settle
        # Whose child it is, by the child's name.
        self._owners: dict[str, tuple[Deployment, Life]] = {}
        self._places = Places()

    def __bool__(self) -> bool:
        return bool(self._owners)

    def resume(
        self, label: str, deployment: Deployment, sources: Mapping[int, Source], record: GenerationRecord, now: float
    ) -> Life | None:
        """Go on with a generation that a daemon before this one has loaded; None if its page store was changed."""
        terms = deployment.terms if record.sharing else deployment.terms.private()
        again = resume if terms.ranks is None else resume_unit
        generation: Life = again(label, terms, sources[record.source], record, now)
        if not self._children.resume(self._owner, generation, record.seal):
            _log.error(
                "%s: loaded anew: the page store was changed while no daemon was there", label, extra=generation.about()
            )
            return None
        self._owners.update((child, (deployment, generation)) for child in generation.children)
        if record.built.canary_cases:
            known = dataclasses.replace(terms.canary, cases=record.built.canary_cases)
            self._snapshots.learned(generation.source, known)
        return generation

    # --- from children ------------------------------------------------------------------------------------------

    def heard(self, child: str, message: ChildMessage, frames: Sequence[Any], now: float) -> None:
        """A child has sent `message`."""
        owner = self._owners.get(child)
        if owner is None:
            return
        deployment, generation = owner
        match message:
            case Result() if self._is_sound(generation):
                self._breached(child, deployment, generation, self._desk.result(child, message, frames, now), now)
            case Done() if self._is_sound(generation) and isinstance(generation, Unit):
                self._breached(child, deployment, generation, self._desk.done(child, message.request, now), now)
            case Failed() if self._is_sound(generation):
                self._job_failed(child, deployment, generation, message, now)
            case Result() | Failed():
                self.examine(deployment, generation, now)
            case Skipped():
                self._breached(child, deployment, generation, self._desk.skipped(child, message.request, now), now)
            case Pong():
                self._pong(child, generation, message, now)
            case Forked():
                pass  # it is for who has asked for it, which no generation does
            case _:
                self._heard_loading(child, deployment, generation, message, now)
                self._changed(deployment, now)

    def _heard_loading(
        self, child: str, deployment: Deployment, generation: Life, message: ChildMessage, now: float
    ) -> None:
        match message:
            case Hello():
                generation.hello(child, message, now)
            case Back():
                generation.back(child, now, message.step)
                self._watch_if_ready(child, generation, now)
            case Broken():
                if child in generation.ready:
                    # By its own word: what it has is not to blame.
                    self._desk.broke(child, message.cause, now)
                generation.broken(child, message, now)
            case _ if isinstance(generation, Generation):
                self._heard_sharing(child, deployment, generation, message, now)
            case _:
                units.heard(child, deployment, generation, self._desk, message, now)

    def _heard_sharing(
        self, child: str, deployment: Deployment, generation: Generation, message: ChildMessage, now: float
    ) -> None:
        match message:
            case Probing():
                generation.probing(child, message)
            case Built():
                self._children.exported(generation)
                self._built(child, generation, message, now)
                self._snapshots.learned(generation.source, generation.tries.known)
                deployment.told(generation, message.device)
            case Allowed():
                generation.allowed(child, message, now)
            case Attached():
                generation.attached(child, message, now)
                self._watch_if_ready(child, generation, now)
                deployment.told(generation, message.device)
            case Unequal():
                generation.unequal(message.note, {each: self._desk.names.of(each) for each in message.parties})
                self._rate(generation)
            case _:
                units.heard(child, deployment, generation, self._desk, message, now)

    def exited(self, child: str, end: End, now: float) -> None:
        """A child has exited."""
        owner = self._owners.pop(child, None)
        if owner is not None and end.lost is Lost.SNAPSHOT:
            self._snapshots.lost(owner[1].source)
        if owner is not None and not self._is_sound(owner[1]):
            self.examine(*owner, now)
            # It may have died of its holder's death, or of a damaged store: what it had is not to blame.
            self._desk.release(child)
        useful, mates = self._desk.has_answered(child), self._desk.mates(child)
        self._desk.died(child, end, now)
        for mate in mates:
            # A unit ends all that it has, and tells the first cause.
            if mate != child and owner is not None and isinstance(owner[1], Generation):
                self.drop(mate, f"{child}, without which it is of no use, is gone", now)
        if owner is not None:
            deployment, generation = owner
            generation.exited(child, end, now, useful=useful)
            self._changed(deployment, now)

    # --- what is done to them -----------------------------------------------------------------------------------

    def perform(self, deployment: Deployment, generation: Life, action: Action, now: float) -> None:
        """Do what a generation wants."""
        match action:
            case Pin():
                self._snapshots.want(generation.source, now + self._config.load_timeout)
            case Spawn(name, role, template):
                self._owners[name] = deployment, generation
                snapshot = self._snapshots[generation.source]
                what = self._places.program(self._config, generation, snapshot, name, deployment.device)
                self._children.spawn(self._owner, generation, what, name, role, template)
            case Send(name, order):
                self._children.order(name, order)
            case Kill(name, abort):
                self._children.kill(name, abort=abort)
            case Enlist(name):
                self._enlist(name, generation, now)
            case Dismiss(name):
                self._desk.dismiss(name)
                if not generation.access.is_valid:
                    # It will not answer what it has, and is not to blame.
                    self._desk.release(name)
            case Forget():
                self.past_deaths += generation.deaths
                self._places.forget(generation.label)
                self._children.forget(generation)

    def reconfigure(self, config: ModelConfig, serving: Iterable[Life]) -> None:
        """Have what serves do as another configuration says that has the same loaded."""
        self._config = config
        for generation in serving:
            self._rate(generation)

    def watch(self, serving: Iterable[tuple[Deployment, Life]], now: float) -> None:
        """End who computes for too long, ping who has been idle and end who does not answer; look at the stores."""
        for process, why in self._desk.overdue(now):
            self.drop(process, why, now)
        if now < self._desk.guard.watchdog.next_event:
            return
        for deployment, generation in serving:
            self.examine(deployment, generation, now)
        for process in self._desk.silent(now):
            self.drop(process, "it has not answered a ping", now)

    def drop(self, process: str, why: str, now: float) -> None:
        """End a process that is of no use any more, and its seat with it."""
        everyone = dict.fromkeys((process, *self._desk.mates(process)))
        self._desk.release(process)
        for mate in everyone:
            owner = self._owners.get(mate)
            if owner is not None:
                deployment, generation = owner
                generation.hung(mate, why, now, useful=self._desk.has_answered(mate))
                self._changed(deployment, now)

    def examine(self, deployment: Deployment, generation: Life, now: float) -> None:
        """Have a generation replaced whose page store was changed; of a holder that is dead it will be told."""
        if not isinstance(generation, Generation):
            return  # a unit has none
        if generation.access.trusts(self._children.lives) and not self._children.intact(generation):
            generation.store_lost("the page store was changed or truncated by somebody: its pages are not trusted", now)
            self._changed(deployment, now)

    # --- within -------------------------------------------------------------------------------------------------

    def _enlist(self, name: str, generation: Life, now: float) -> None:
        if isinstance(generation, Unit):
            units.enlist(generation, self._config, self._desk, now)
            return
        terms = rows.terms(self._config, generation)
        child = generation.children[name]
        concurrency = child.hello.concurrency if child.hello is not None else 1
        self._desk.enlist(name, device=child.device, terms=terms, concurrency=concurrency)

    def _rate(self, generation: Life) -> None:
        terms = rows.terms(self._config, generation)
        for each in generation.seats:
            self._desk.scheduler.seats.rate(each, terms)

    def _is_sound(self, generation: Life) -> bool:
        """Whether what the generation's workers say can be passed on."""
        return generation.access.trusts(self._children.lives) and self._children.intact(generation)

    def _changed(self, deployment: Deployment, now: float) -> None:
        deployment.reconcile(now)
        self._settle(now)

    def _job_failed(self, child: str, deployment: Deployment, generation: Life, failed: Failed, now: float) -> None:
        why = self._desk.job_failed(child, failed, now)
        if failed.leaving:
            generation.leaving(child, now, failed.error)
            self._changed(deployment, now)
        else:
            self._breached(child, deployment, generation, why, now)

    def _breached(self, child: str, deployment: Deployment, generation: Life, why: str, now: float) -> None:
        """End who computes together and is not in step any more, for this reason; "": they are."""
        if why:
            generation.broken(child, Broken(clip(why)), now)
            self._changed(deployment, now)

    def _pong(self, child: str, generation: Life, pong: Pong, now: float) -> None:
        self._desk.guard.watchdog.pong(child, now)
        built = generation.built
        if built is not None and pong.canary and built.canary and pong.canary != built.canary:
            generation.mishaps.canary_failed()
            self.drop(child, "the canary's answer is not the holder's any more: it would answer wrongly", now)

    def _watch_if_ready(self, child: str, generation: Life, now: float) -> None:
        if child in generation.ready and isinstance(generation, Generation):
            self._desk.guard.watchdog.watch(child, now)

    def _built(self, child: str, generation: Generation, built: Built, now: float) -> None:
        difference = self._desk.signature.differs(built)
        if difference:
            generation.failed(f"the new model is not a drop-in for the one that serves: {difference}", now)
        else:
            generation.holder_built(child, built, now)
