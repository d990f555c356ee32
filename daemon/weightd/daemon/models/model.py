"""One model of the configuration: what clients and the server ask of it, and what follows from that."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping

from weightd.daemon.children.owner import Snapshot
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.config.policies import Policy
from weightd.daemon.generations.generation import Generation
from weightd.daemon.generations.life import Life
from weightd.daemon.generations.plan import Rows, Source, Terms
from weightd.daemon.generations.records import GenerationRecord
from weightd.daemon.generations.resume import record as record_generation
from weightd.daemon.generations.states import GenerationState, advance
from weightd.daemon.generations.unit import Unit
from weightd.daemon.host.timers import Timer
from weightd.daemon.meters.meter import Mishaps
from weightd.daemon.models import standing
from weightd.daemon.models.attaching import Attaching
from weightd.daemon.models.budget import Device, Room
from weightd.daemon.models.crew import Crew
from weightd.daemon.models.deployment import Deployment
from weightd.daemon.models.ports import Children, Clients
from weightd.daemon.models.ranks import rooms, succession
from weightd.daemon.models.records import ModelRecord
from weightd.daemon.models.retries import NEVER, Retries
from weightd.daemon.models.sources import Numbers, Sources
from weightd.daemon.models.stage import Predecessor
from weightd.daemon.models.standing import PHASE, Phase, PhaseEvent, Refusal
from weightd.daemon.models.update import Updates
from weightd.daemon.requests.desk import Desk
from weightd.daemon.requests.request import Request
from weightd.daemon.requests.signature import Waiter
from weightd.protocol.errors import RequestError, Unavailable
from weightd.shared.devices import is_cpu
from weightd.shared.reach import Grant

_log = logging.getLogger("weightd")


class Model:
    """Serves one model from one generation on each of its devices.

    Attributes:
        desk: where its requests are.
        deployments: one for each device, but one for all sets of cores that have one copy of the weights, and one for
            each group of ranks.
        note: what went wrong with the last change of the configuration.
        successor: what loads to replace it, after such a change.
        timer: when `tick` is due.
        attaching: bounds how many workers load at once, of all models; None: they attach one after another.
    """

    attaching: Attaching | None = None

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        devices: Mapping[str, Device],
        children: Children,
        clients: Clients,
        numbers: Numbers | None = None,
    ) -> None:
        self.name = name
        self.note = ""
        self.successor: Model | None = None
        self.config = config
        self.timer = Timer(self.tick)
        self.desk = Desk(name, config, clients, children.order, self.timer.due_by)
        self.deployments = [
            Deployment(room, terms, succession(config), make=self._make, wake=self._wake)
            for room, terms in rooms(config, devices)
        ]
        self._children = children
        self._numbers = numbers or Numbers()
        self._sources = Sources(
            config.path,
            self._numbers,
            functools.partial(children.pin, self, name, config),
            functools.partial(children.unpin, name),
        )
        self._crew = Crew(self, config, children, self._sources.snapshots, self.desk, self._settle)
        # What its children say, and their ends, are the crew's business.
        self.heard = self._crew.heard
        self.exited = self._crew.exited
        self._updates = Updates(name, config, self.deployments, self._sources, self.desk, clients)
        self._phase = Phase.OPEN
        self._refusal: Refusal | None = None
        # Of what its devices and snapshots wait for.
        self._next_tick = float("inf")
        self._retries = Retries()

    # --- from clients -------------------------------------------------------------------------------------------

    def infer(self, request: Request, now: float) -> None:
        """Accept a request. While the model loads it waits, and is checked once it is known what the model takes.

        Raises:
            RequestError: it is refused.
        """
        if self._refusal is not None:
            raise self._refusal.error()
        self.desk.infer(request, now)

    def cancel(self, client: bytes, request_id: str, now: float) -> None:
        """The client takes its request back."""
        self.desk.cancel(client, request_id, now)

    def vanished(self, client: bytes, now: float) -> None:
        """The client is gone: nobody waits for what it asked."""
        self.desk.vanished(client, now)

    def shed(self, unfit: Callable[[Request], bool], error: RequestError, now: float) -> None:
        """Refuse what waits and is `unfit`; what runs goes on."""
        self.desk.shed(unfit, error, now)

    def turn_away(self, unfit: Callable[[bytes], bool], error: RequestError) -> None:
        """Refuse who waits for the metadata and is `unfit`."""
        self.desk.turn_away(unfit, error)

    def metadata(self, waiter: Waiter) -> None:
        """Tell somebody what the model takes and gives, at once or when it is known.

        Raises:
            RequestError: it is refused.
        """
        if self._refusal is not None:
            raise self._refusal.error()
        self.desk.metadata(waiter)

    def update(  # noqa: PLR0913
        self, client: bytes, request_id: str, now: float, *, path: str, weights: str, rollback: bool, grant: Grant
    ) -> None:
        """Load what is at `path` beside what serves, and let it take over; the client is told how that ends.

        Args:
            client: who asked.
            request_id: the id of the question.
            now: the clock.
            path: of the new model, "" for the one that serves.
            weights: of arrays to load over the model's weights, or "".
            rollback: go back to what served before the last update instead.
            grant: the right by which the client names these paths.

        Raises:
            RequestError: it is refused; nothing has changed.
        """
        if self._refusal is not None and not self.may_retry:
            raise self._refusal.error()
        self._updates.begin(client, request_id, now, path=path, weights=weights, rollback=rollback, grant=grant)
        self._settle(now)

    # --- from the server ----------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Begin to load."""
        for deployment in self.deployments:
            deployment.start(self._sources.current)
        self._settle(now)

    def resume(self, record: ModelRecord, now: float) -> None:
        """Begin with what a daemon before this one has loaded; load what is not there."""
        sources = self._sources.restore(record.source, record.previous, record.sources)
        loaded = list(record.generations)
        for deployment in self.deployments:
            # Several groups of ranks on the CPU are on one device.
            there = next((each for each in loaded if each.device == deployment.device.name), None)
            loaded = [each for each in loaded if each is not there]
            if there is None or not self._resume(deployment, sources, there, now):
                deployment.start(self._sources.current)
        self._settle(now)

    def record(self) -> ModelRecord | None:
        """Return what the next daemon has to know to `resume` it; None if it has to load it anew."""
        source, sources = self._sources.current.number, self._sources.records()
        kept = [(each.device, each.serving or each.coming) for each in self.deployments]
        generations = [
            record_generation(each, self._children.seal(each), device.port(each.label))
            for device, each in kept
            if each is not None
        ]
        known = [each for each in generations if each is not None and each.source == source]
        if self.draining or not known or source not in [each.number for each in sources]:
            return None
        previous = sum(each.number for each in sources[1:])
        made = self._numbers.made
        return ModelRecord(self.name, self.config, source, previous, made, tuple(sources), tuple(known))

    def pinned(self, source: Source, snapshot: Snapshot, now: float) -> None:
        """The snapshot of a source exists."""
        self._sources.snapshots.taken(source, snapshot)
        self._tell_pinned(now)
        self._settle(now)

    def pin_failed(self, source: Source, cause: str, now: float, *, transient: bool = False) -> None:
        """There is no snapshot of a source; `transient`: the cause may go away by itself."""
        self._sources.snapshots.failed(source)
        for deployment in self.deployments:
            deployment.pin_failed(source, cause, now, transient=transient)
        self._settle(now)

    def retry(self, now: float) -> None:
        """Load again what has failed, from the files as they are now."""
        if not self.may_retry:
            return
        source = self._sources.anew() if self.has_failed else self._sources.current
        for deployment in self.deployments:
            if deployment.failed:
                deployment.retry(source)
        self._settle(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self.desk.expire(now, lambda error: standing.explained(error, self.name, self.deployments))
        for source in self._sources.snapshots.overdue(now):
            cause = f"no snapshot within load_timeout, {self.config.load_timeout:g} s"
            self.pin_failed(source, cause, now, transient=True)
        self.desk.guard.look(now)
        self._crew.watch([(each, each.serving) for each in self.deployments if each.serving is not None], now)
        due = [deployment for deployment in self.deployments if now >= deployment.next_tick]
        for deployment in due:
            deployment.tick(now)
        if due:
            self._settle(now)
        if now >= self._retries.due and self.may_retry:
            self.retry(now)
        self.desk.dispatch_gathered(now)
        self._update_next_tick()

    def drain(self, now: float, *, patience: float = 0.0, replaced: bool = False) -> None:
        """Take no new work and wind down.

        Args:
            now: the clock.
            patience: how many seconds more what runs may take.
            replaced: another model of the name adopts what waits, and what comes to wait because a worker dies; else
                that is given up.
        """
        self._phase = advance(PHASE, self._phase, PhaseEvent.REPLACE if replaced else PhaseEvent.CLOSE)
        if not replaced:
            self.desk.give_up(Unavailable("weightd is stopping"))
        self._sources.snapshots.abandon()
        for deployment in self.deployments:
            deployment.drain(now, patience=patience)
        self._settle(now)

    def reconfigure(self, config: ModelConfig) -> bool:
        """Do as another configuration says, if all that is loaded is right for it; return whether that is so."""
        tested = self.deployments[0].terms.rows
        if not config.has_same_load(self.config) or not tested.covers(Rows.configured(config)):
            return False
        self.config = config
        self.desk.reconfigure(config)
        self._crew.reconfigure(config, [each.serving for each in self.deployments if each.serving is not None])
        self._children.changed()
        return True

    def will_leave(self) -> None:
        """It is served no more, and will be drained once it has answered what waits."""
        for deployment in self.deployments:
            deployment.will_leave()

    def replaces(self, old: Model) -> None:
        """It is to take the place of another model, and its room, where there is none for both."""
        if old.config.ranks is None or self.config.ranks is None or self.config.policy == Policy.OVERLAP.value:
            return
        predecessor = Predecessor(lambda: [each.label for each in old.generations], old.make_way)
        for deployment in self.deployments:
            deployment.predecessor = predecessor

    def make_way(self, now: float) -> None:
        """The model that is to replace it needs its room: what serves leaves, and what comes waits."""
        for deployment in self.deployments:
            deployment.make_way(now)
        self._settle(now)

    def come_again(self, now: float) -> None:
        """What was to replace it cannot: where it has made way it is loaded again."""
        for deployment in self.deployments:
            deployment.come_again(now)
        self._settle(now)

    def leave(self, now: float) -> None:
        """The daemon ends before its workers: answer what has not been answered."""
        self.desk.leave(now)

    def dispose(self) -> None:
        """Remove what is left on the disk of a model that is gone."""
        self._sources.snapshots.drop_all()

    def adopt(self, old: Model, now: float) -> None:
        """Take over what waits at the model that this one replaces."""
        for request in self.desk.adopt(old.desk):
            try:
                self.infer(request, now)
            except RequestError as error:
                self.desk.refuse(request, error)
        self._settle(now)

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def next_event(self) -> float:
        """Nothing is due before this, in monotonic seconds."""
        tick, event = self._next_tick, self.desk.next_event
        return tick if tick < event else event

    @property
    def draining(self) -> bool:
        """Whether it was told to wind down."""
        return self._phase is not Phase.OPEN

    @property
    def gone(self) -> bool:
        """Whether nothing is left of it after `drain`."""
        is_over = self.draining and not self.desk.has_to_refuse
        return is_over and not self._crew and not any(each.generations for each in self.deployments)

    @property
    def serves(self) -> bool:
        """Whether any device serves it."""
        return any(each.serving is not None for each in self.deployments)

    @property
    def will_serve(self) -> bool:
        """Whether any device serves it, or will as soon as a worker of the daemon before this one is back.

        Or if that cannot be loaded for which it has made way.
        """
        awaits = any(generation.awaits for each in self.deployments for generation in each.generations)
        return self.serves or awaits or any(each.is_away for each in self.deployments)

    @property
    def complete(self) -> bool:
        """Whether each device serves it with all its workers, or has failed while another one does not."""
        return self.serves and all(
            each.failed or (each.serving is not None and each.serving.complete) for each in self.deployments
        )

    @property
    def source(self) -> Source:
        """What it serves, or is to, if no update is under way."""
        return self._sources.current

    def pinned_bytes(self, generation: Life) -> int | None:
        """Return of how many bytes the snapshot is that a generation loads; None while it is being taken."""
        snapshot = self._sources.snapshots.find(generation.source)
        return None if snapshot is None else snapshot.nbytes

    @property
    def updating(self) -> bool:
        """Whether an update is under way."""
        return self._updates.under_way

    @property
    def generations(self) -> list[Life]:
        """Every generation of which something is left; where nothing is, the last one that was."""
        there = [generation for deployment in self.deployments for generation in deployment.generations]
        for deployment in self.deployments:
            if deployment.main not in there:
                there.append(deployment.main)
        return there + (self.successor.generations if self.successor is not None else [])

    @property
    def state(self) -> GenerationState:
        """How it stands: it serves if any device does, and has failed if all have."""
        if self.serves:
            return GenerationState.SERVING
        loading = [each for each in self.deployments if not each.failed]
        return (loading or self.deployments)[0].main.state

    @property
    def has_failed(self) -> bool:
        """Whether no device serves it, or loads it."""
        return all(each.failed for each in self.deployments)

    @property
    def may_retry(self) -> bool:
        """Whether `retry` would load something."""
        return any(each.failed for each in self.deployments) and not self.updating and not self.draining

    def retry_in(self, now: float) -> float | None:
        """Return the seconds until what has failed is loaded again by itself; None if it is not."""
        return max(0.0, self._retries.due - now) if self.may_retry and self._retries.due != NEVER else None

    @property
    def deaths(self) -> int:
        """Processes that ended, or had to be ended, without being asked to."""
        there = (generation for deployment in self.deployments for generation in deployment.generations)
        return self._crew.past_deaths + sum(generation.deaths for generation in there)

    def unready(self, now: float) -> str:
        """Return why it is not ready to answer, or "" if it is: a worker has been heard of of late."""
        return standing.unready(self.name, self.deployments, self.desk.guard.watchdog, now)

    @property
    def main(self) -> Life:
        """The generation that tells how it stands."""
        return standing.main(self.deployments).main

    # --- within -------------------------------------------------------------------------------------------------

    def _make(self, device: Room, source: Source, terms: Terms) -> Life:
        number = self._numbers.generation()
        kind = Generation if terms.ranks is None else Unit
        generation: Life = kind(f"{self.name}.{number}", terms, device.name, source, number=number)
        self._bound(generation)
        return generation

    def _resume(
        self, deployment: Deployment, sources: Mapping[int, Source], there: GenerationRecord, now: float
    ) -> bool:
        generation = self._crew.resume(f"{self.name}.{there.number}", deployment, sources, there, now)
        if generation is None:
            return False
        self._bound(generation)
        deployment.resume(generation, self._sources.snapshots[generation.source], now, there.port)
        return True

    def _bound(self, generation: Life) -> None:
        generation.mishaps = Mishaps(self.desk.meter)
        # On a card an attach may write what others compute on, and what it takes is told by what is free after it.
        if self.attaching is not None and is_cpu(generation.device):
            nbytes = functools.partial(self._nbytes, generation.source)
            self.attaching.bound(generation, nbytes, self.config.engine_spec.build_factor)

    def _nbytes(self, source: Source) -> int:
        snapshot = self._sources.snapshots.find(source)
        return 0 if snapshot is None else snapshot.nbytes

    def _wake(self) -> None:
        """A device has room again that one of the deployments waits for."""
        self._next_tick = 0.0
        self.timer.due_by(0.0)

    def _settle(self, now: float) -> None:
        """After each event of a generation: do what it wants, and serve what it now allows."""
        self._children.changed()
        self._perform_all(now)
        if self._updates.settle(now):
            self._perform_all(now)
        if self.desk.signature.built is None and (built := standing.built(self.deployments)) is not None:
            self.desk.learn(built)
        self._plan_retry(now)
        self._refusal = standing.refusal(self.name, self.deployments)
        if self._refusal is not None and self._phase is not Phase.REPLACED:
            self.desk.close(self._refusal.error())
        self.desk.dispatch(now)
        self._update_next_tick()

    def _plan_retry(self, now: float) -> None:
        """Plan the next attempt to load what has failed of a cause that may go away by itself."""
        if all(each.serving is not None for each in self.deployments):
            self._retries.succeeded()
        elif self.updating:
            pass  # should that fail, the next attempt is due as before
        elif not any(each.failed for each in self.deployments):
            self._retries.cancel()
        elif self._retries.due == NEVER and any(each.transient for each in self.deployments):
            self._retries.failed(now)
            extra = self.main.about()
            _log.warning("%s: next attempt to load it in %g s", self.name, self._retries.due - now, extra=extra)

    def _perform_all(self, now: float) -> None:
        """Perform what is wanted, and what comes of it."""
        while True:
            wanted = [(each, action) for each in self.deployments for action in each.take_actions()]
            if not wanted:
                return
            for deployment, (generation, action) in wanted:
                self._crew.perform(deployment, generation, action, now)
            self._tell_pinned(now)

    def _tell_pinned(self, now: float) -> None:
        for source, snapshot in self._sources.snapshots.ready():
            for deployment in self.deployments:
                canary = self._sources.snapshots.canary(source)
                deployment.pinned(source, snapshot, now, canary)

    def _update_next_tick(self) -> None:
        due = self._sources.snapshots.next_event
        due = min(due, self._retries.due) if self.may_retry else due
        self._next_tick = min(due, *(each.next_tick for each in self.deployments))
        # Whatever is due sooner after this tells the timer: the loop looks at that alone.
        self.timer.set(self.next_event)
