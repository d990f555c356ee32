"""One model of the configuration: its queue, its generations on each device, and what passes between the two."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightd.daemon.config.load import SUFFIX_OF_ENGINE, ModelConfig
from weightd.daemon.config.policies import Policy
from weightd.daemon.generations.actions import Action, Dismiss, Enlist, Forget, Kill, Pin, Send, Spawn
from weightd.daemon.generations.generation import Generation
from weightd.daemon.generations.plan import Canary, Limits, Source
from weightd.daemon.generations.records import GenerationRecord
from weightd.daemon.generations.states import ACTIVE, GenerationState
from weightd.daemon.host.ends import End
from weightd.daemon.host.memory import MIB
from weightd.daemon.host.timers import Timer
from weightd.daemon.models.budget import Device
from weightd.daemon.models.deployment import Deployment
from weightd.daemon.models.ports import Children, Clients, Snapshot
from weightd.daemon.models.records import ModelRecord
from weightd.daemon.models.sources import Numbers, Sources
from weightd.daemon.requests.blame.guard import Guard
from weightd.daemon.requests.latency import Latencies
from weightd.daemon.requests.request import Request
from weightd.daemon.requests.scheduler import Scheduler
from weightd.daemon.requests.signature import Signature
from weightd.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    RequestError,
    Unavailable,
    request_error,
)
from weightd.protocol.messages.children import (
    Allowed,
    Attached,
    Back,
    Broken,
    Built,
    ChildMessage,
    Failed,
    Hello,
    Pong,
    Predict,
    Probing,
    Result,
    Skip,
)
from weightd.protocol.messages.control import ModelMetadataResponse, UpdateResponse

_log = logging.getLogger("weightd")


@dataclass
class _Update:
    """An update under way, and who waits for its end."""

    client: bytes
    request_id: str
    source: Source


class Model:
    """Serves one model from one generation on each of its devices.

    Attributes:
        latencies: from a request's arrival to its answer, in the daemon.
        by_worker: the same for each worker's answers, by the worker's name.
        failed: requests that ended in an error after they were accepted.
        deployments: one for each device.
        note: what went wrong with the last change of the configuration.
        draining: it was told to wind down.
        successor: what loads to replace it, after such a change.
        timer: when `tick` is due.
    """

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
        self.draining = False
        self._replaced = False
        self.config = config
        self.scheduler = Scheduler(config.max_queue, config.max_queue_bytes, config.predict_timeout)
        self.guard = Guard(config, self.scheduler, self._refuse)
        self.latencies = Latencies()
        self.by_worker: dict[str, Latencies] = {}
        self.failed = 0
        self.next_tick = float("inf")
        self.timer = Timer(self.tick)
        limits = Limits(
            config.workers,
            config.load_timeout,
            spares=config.spares or 0,
            sharing=config.sharing != "off",
            outlives_holder=config.holder_loss == "frozen",
            predict_timeout=config.predict_timeout,
            canary=Canary.configured(config.canary),
        )
        self.deployments = [
            Deployment(
                devices[device],
                limits,
                Policy(config.policy),
                # On the CPU each process falls back by itself.
                fall_back=config.sharing == "auto" and device != "cpu",
                process_bytes=config.process_mib * MIB,
                make=self._make,
            )
            for device in config.devices
        ]
        self._children = children
        self._clients = clients
        self._signature = Signature()
        self._numbers = numbers or Numbers()
        self._sources = Sources(
            config.path, self._numbers, functools.partial(children.pin, self), functools.partial(children.unpin, self)
        )
        self._update: _Update | None = None
        # Whose child it is, by the child's name.
        self._owners: dict[str, tuple[Deployment, Generation]] = {}
        self._refusal = ""
        self._past_deaths = 0

    # --- from clients -------------------------------------------------------------------------------------------

    def infer(self, request: Request, now: float) -> None:
        """Accept a request. While the model loads it waits, and is checked once it is known what the model takes.

        Raises:
            RequestError: it is refused.
        """
        self._check_alive()
        self._signature.check(request.inputs)
        self.guard.submit(request, now)
        self._look_soon()
        self._dispatch(now)

    def cancel(self, client: bytes, request_id: str, now: float) -> None:
        """The client takes its request back."""
        self._end(self.scheduler.end_of(client, request_id), Cancelled("taken back by the client"), now)

    def vanished(self, client: bytes, now: float) -> None:
        """The client is gone: nobody waits for what it asked."""
        self._signature.take_waiters(lambda waiter: waiter[0] == client)
        self._end(self.scheduler.end_of(client), Cancelled("its client is gone"), now)

    def shed(self, client: bytes, error: RequestError, now: float) -> None:
        """Refuse what the client has waiting; what runs goes on."""
        for request in self.scheduler.withdraw(lambda request: request.client == client):
            self._refuse(request, error)
        self._dispatch(now)

    def metadata(self, client: bytes, request_id: str) -> None:
        """Tell the client what the model takes and gives, at once or when it is known.

        Raises:
            RequestError: it is refused.
        """
        self._check_alive()
        self._signature.ask((client, request_id), self.config.max_queue)
        self._tell_metadata()

    def update(self, client: bytes, request_id: str, now: float, *, path: str, weights: str, rollback: bool) -> None:
        """Load what is at `path` beside what serves, and let it take over; the client is told how that ends.

        Args:
            client: who asked.
            request_id: the id of the question.
            now: the clock.
            path: of the new model, "" for the one that serves.
            weights: of arrays to load over the model's weights, or "".
            rollback: go back to what served before the last update instead.

        Raises:
            RequestError: it is refused; nothing has changed.
        """
        self._check_alive()
        if self._update is not None:
            raise Unavailable(f"{self.name} is being updated already")
        for each in self.deployments:
            if each.failed:
                raise FailedPrecondition(f"{self.name} has failed on {each.device.name}: {each.cause}")
            if not each.is_lost and (each.serving is None or each.busy):
                raise Unavailable(f"{self.name} is loading on {each.device.name}: try again once it serves")
        if rollback:
            source = self._previous()
        else:
            self._check_file(path)
            source = self._sources.new(path, weights)
        self._update = _Update(client, request_id, source)
        for deployment in self.deployments:
            deployment.update(source, now)
        self._settle(now)

    def _previous(self) -> Source:
        """What a rollback goes back to: once. A second one would bring back what was found wanting."""
        there = self._sources
        if there.previous is not None:
            return there.previous
        if there.undone is not None:
            went = f"from {there.undone} to {there.current}"
            raise FailedPrecondition(f"{self.name} was rolled back already, {went}: update it to go forth again")
        raise FailedPrecondition(
            f"there is nothing to go back to: {self.name} serves {there.current}, and nothing before it is kept"
        )

    def _check_file(self, path: str) -> None:
        """By the suffix it is known which other files belong to a model: no other reader may find more."""
        suffix = SUFFIX_OF_ENGINE[self.config.engine]
        if path and Path(path).suffix != suffix:
            raise InvalidArgument(f"expected a {suffix} file for engine {self.config.engine}, got {path!r}")

    # --- from children ------------------------------------------------------------------------------------------

    def heard(self, child: str, message: ChildMessage, frames: Sequence[Any], now: float) -> None:
        """A child has sent `message`."""
        owner = self._owners.get(child)
        if owner is None:
            return
        deployment, generation = owner
        if isinstance(message, Result):
            self._result(child, generation, message, frames, now)
        elif isinstance(message, Failed):
            self._predict_failed(child, generation, message, now)
        elif isinstance(message, Pong):
            self._pong(child, generation, message, now)
        else:
            self._heard_loading(child, deployment, generation, message, now)
            deployment.reconcile(now)
            self._settle(now)

    def _heard_loading(
        self,
        child: str,
        deployment: Deployment,
        generation: Generation,
        message: Hello | Back | Probing | Built | Allowed | Attached | Broken,
        now: float,
    ) -> None:
        if isinstance(message, Hello):
            generation.hello(child, message, now)
        elif isinstance(message, Back):
            generation.back(child, now)
            if child in generation.ready:
                self.guard.watchdog.watch(child, now)
        elif isinstance(message, Probing):
            generation.probing(child, message)
        elif isinstance(message, Built):
            self._children.exported(generation)
            self._holder_built(child, generation, message, now)
            self._sources.snapshots.learned(generation.source, generation.tries.known)
            deployment.told(generation, message.device)
        elif isinstance(message, Allowed):
            generation.allowed(child, message, now)
        elif isinstance(message, Attached):
            generation.attached(child, message, now)
            if child in generation.ready:
                self.guard.watchdog.watch(child, now)
            deployment.told(generation, message.device)
        else:
            if child in generation.ready:
                # By its own word: what it has is not to blame.
                self.scheduler.release(child)
            generation.broken(child, message, now)

    def exited(self, child: str, end: End, now: float) -> None:
        """A child has exited."""
        owner = self._owners.pop(child, None)
        if owner is not None and not self._trusted(owner[1], now):
            # It may have died of its holder's death, or of a damaged store: what it had is not to blame.
            self.scheduler.release(child)
        self.guard.died(child, end, now)
        self.guard.watchdog.forget(child)
        useful = self._useful(child)
        self.by_worker.pop(child, None)
        if owner is not None:
            deployment, generation = owner
            generation.exited(child, end, now, useful=useful)
            deployment.reconcile(now)
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
        loaded = {each.device: each for each in record.generations}
        for deployment in self.deployments:
            there = loaded.get(deployment.device.name)
            generation = self._resumed(deployment, sources, there, now) if there is not None else None
            if generation is None:
                deployment.start(self._sources.current)
            else:
                deployment.resume(generation, self._sources.snapshots[generation.source].nbytes, now)
        self._settle(now)

    def record(self) -> ModelRecord | None:
        """Return what the next daemon has to know to `resume` it; None if it has to load it anew."""
        source, sources = self._sources.current.number, self._sources.records()
        kept = [each.serving or each.coming for each in self.deployments]
        generations = [each.record(self._children.seal(each)) for each in kept if each is not None]
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

    def pin_failed(self, source: Source, cause: str, now: float) -> None:
        """There is no snapshot of a source."""
        self._sources.snapshots.failed(source)
        for deployment in self.deployments:
            deployment.pin_failed(source, cause, now)
        self._settle(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        for request, error in self.scheduler.expire(now):
            self._refuse(request, self._explained(error))
        self._end_overdue(now)
        self._end_pinning(now)
        self.guard.look(now)
        self._watch(now)
        due = [deployment for deployment in self.deployments if now >= deployment.next_tick]
        for deployment in due:
            deployment.tick(now)
        if due:
            self._settle(now)
        self._dispatch(now)
        self._update_next_tick()

    def drain(self, now: float, *, patience: float = 0.0, replaced: bool = False) -> None:
        """Take no new work and wind down.

        Args:
            now: the clock.
            patience: how many seconds more what runs may take.
            replaced: another model of the name adopts what waits, and what comes to wait because a worker dies; else
                that is given up.
        """
        self.draining = True
        self._replaced = replaced
        for request in [] if replaced else self.scheduler.give_up():
            self._refuse(request, Unavailable("weightd is stopping"))
        self._sources.snapshots.abandon()
        for deployment in self.deployments:
            deployment.drain(now, patience=patience)
        self._settle(now)

    def will_leave(self) -> None:
        """It is served no more, and will be drained once it has answered what waits."""
        for deployment in self.deployments:
            deployment.will_leave()

    def leave(self, now: float) -> None:
        """The daemon ends before its workers: answer what has not been answered."""
        everything = [request for request, _ in self.scheduler.end(lambda _: True)]
        self._end(everything, Unavailable("weightd is restarting"), now)

    def dispose(self) -> None:
        """Remove what is left on the disk of a model that is gone."""
        self._sources.snapshots.drop_all()

    def adopt(self, old: Model, now: float) -> None:
        """Take over what waits at the model that this one replaces."""
        for request in old.scheduler.give_up():
            try:
                self.infer(request, now)
            except RequestError as error:
                self._refuse(request, error)
        self._signature.adopt(old._signature)
        self._tell_metadata()
        self._settle(now)

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def gone(self) -> bool:
        """Whether nothing is left of it after `drain`."""
        return self.draining and not self._owners and not any(each.generations for each in self.deployments)

    @property
    def serves(self) -> bool:
        """Whether any device serves it."""
        return any(each.serving is not None for each in self.deployments)

    @property
    def will_serve(self) -> bool:
        """Whether any device serves it, or will as soon as a worker of the daemon before this one is back."""
        return self.serves or any(generation.awaits for each in self.deployments for generation in each.generations)

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

    @property
    def updating(self) -> bool:
        """Whether an update is under way."""
        return self._update is not None

    @property
    def generations(self) -> list[Generation]:
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
        """Whether no device will ever serve it."""
        return all(each.failed for each in self.deployments)

    @property
    def deaths(self) -> int:
        """Processes that ended, or had to be ended, without being asked to."""
        there = (generation for deployment in self.deployments for generation in deployment.generations)
        return self._past_deaths + sum(generation.deaths for generation in there)

    def unready(self, now: float) -> str:
        """Return why it is not ready to answer, or "" if it is: a worker has been heard of of late."""
        serving = self._serving
        if not serving:
            main = self.main
            return self._refusal or f"{self.name}: {main.progress}{f', {main.cause}' if main.cause else ''}"
        silence = self.guard.watchdog.unheard_of([name for each in serving for name in each.enlisted], now)
        if silence is None:
            return ""
        if silence == float("inf"):
            return f"{self.name}: no worker is there; they are being replaced"
        return f"{self.name}: no worker has answered for {silence:.1f} s, watchdog is {self.guard.watchdog.period:g} s"

    @property
    def main(self) -> Generation:
        """The generation that tells how it stands."""
        return next((each for each in self.deployments if each.serving is not None), self.deployments[0]).main

    # --- within -------------------------------------------------------------------------------------------------

    def _resumed(
        self, deployment: Deployment, sources: Mapping[int, Source], record: GenerationRecord, now: float
    ) -> Generation | None:
        label = f"{self.name}.{record.number}"
        limits = deployment.limits if record.sharing else deployment.limits.private()
        generation = Generation.resume(label, limits, sources[record.source], record, now)
        if not self._children.resume(self, generation, record.seal):
            _log.error(
                "%s: loaded anew: the page store was changed while no daemon was there", label, extra=generation.about()
            )
            return None
        self._owners.update((child, (deployment, generation)) for child in generation.children)
        if record.built.canary_cases:
            known = dataclasses.replace(limits.canary, cases=record.built.canary_cases)
            self._sources.snapshots.learned(generation.source, known)
        return generation

    def _make(self, device: Device, source: Source, limits: Limits) -> Generation:
        number = self._numbers.generation()
        return Generation(f"{self.name}.{number}", limits, device.name, source, number=number)

    def _check_alive(self) -> None:
        if self._refusal:
            raise self._no_answer()

    def _refuses(self) -> str:
        """Return why nobody will ever serve it, or ""."""
        if self.has_failed:
            causes = list(dict.fromkeys(each.cause for each in self.deployments))
            return f"{self.name} failed: {'; '.join(causes)}"
        if any(each.serving is not None or each.busy for each in self.deployments):
            return ""
        return f"{self.name} is being unloaded"

    def _no_answer(self) -> RequestError:
        """What is said where nobody will ever serve it: what has failed is not tried again, whoever waits."""
        return (FailedPrecondition if self.has_failed else Unavailable)(self._refusal)

    @property
    def _serving(self) -> list[Generation]:
        return [each.serving for each in self.deployments if each.serving is not None]

    def _explained(self, error: RequestError) -> RequestError:
        """What a deadline says where there was nobody who could have answered."""
        if not isinstance(error, DeadlineExceeded) or any(each.enlisted for each in self._serving):
            return error
        main = self.main
        if self.serves and not main.cause:
            return error  # a worker has died, and the next one is on its way
        cause = main.cause or self.deployments[0].cause or "not ready yet"
        return Unavailable(f"{self.name} has no worker: {main.progress}, {cause}")

    def _trusted(self, generation: Generation, now: float) -> bool:
        """Return whether what the generation's workers say can be passed on; if it cannot, it is being replaced."""
        if not generation.trusted(self._children.lives):
            # The holder has died: the request is still this worker's, and is run again when that is told.
            return False
        if not self._children.intact(generation):
            generation.store_lost("the page store was changed or truncated by somebody: its pages are not trusted", now)
            self._reconcile(generation, now)
            return False
        return True

    def _result(self, child: str, generation: Generation, result: Result, frames: Sequence[Any], now: float) -> None:
        if not self._trusted(generation, now):
            return
        self.guard.watchdog.heard(child, now)
        job = self.scheduler.finish(child, result.request, now)
        if job is not None:
            [request] = job.parts
            self._clients.answer(request, result.outputs, frames)
            latency = now - request.arrived
            self.latencies.add(latency)
            self.by_worker[child].add(latency)
            self.guard.answered(request, now)
            self._look_soon()
        self._dispatch(now)

    def _predict_failed(self, child: str, generation: Generation, failed: Failed, now: float) -> None:
        if not self._trusted(generation, now):
            return
        self.guard.watchdog.heard(child, now)
        if failed.leaving:
            self.guard.leaves(child, failed.request, now)
        job = self.scheduler.finish(child, failed.request, now)
        if job is not None and job.sole is not None:
            self._refuse(job.sole, request_error(failed.code, failed.error))
        elif job is not None:
            self.scheduler.part(job)
        if failed.leaving:
            self.scheduler.release(child)
            generation.leaving(child, now)
            self._reconcile(generation, now)
        self._dispatch(now)

    def _pong(self, child: str, generation: Generation, pong: Pong, now: float) -> None:
        self.guard.watchdog.pong(child, now)
        self._update_next_tick()
        built = generation.built
        if built is not None and pong.canary and built.canary and pong.canary != built.canary:
            self._drop(child, "the canary's answer is not the holder's any more: it would answer wrongly", now)

    # --- workers that hang, requests that end before their time ---------------------------------------------------

    def _end(self, requests: Iterable[Request], error: RequestError, now: float) -> None:
        for request in requests:
            self._refuse(request, error)
        self._dispatch(now)

    def _end_overdue(self, now: float) -> None:
        for seat, why in list(self.guard.overdue(now)):
            for process in seat.processes:
                self._drop(process, why, now)

    def _end_pinning(self, now: float) -> None:
        for source in self._sources.snapshots.overdue(now):
            self.pin_failed(source, f"no snapshot within load_timeout, {self.config.load_timeout:g} s", now)

    def _watch(self, now: float) -> None:
        """Ping who has been idle; end who does not answer; look at the stores."""
        if now < self.guard.watchdog.next_event:
            return
        for generation in self._serving:
            self._trusted(generation, now)
        for worker, ping in list(self.guard.pings(now)):
            if ping is not None:
                self._children.order(worker, ping)
            else:
                self._drop(worker, "it has not answered a ping", now)

    def _drop(self, worker: str, why: str, now: float) -> None:
        """End a worker that is of no use any more."""
        owner = self._owners.get(worker)
        if owner is None:
            return
        self.scheduler.release(worker)
        owner[1].hung(worker, why, now, useful=self._useful(worker))
        self._reconcile(owner[1], now)

    def _useful(self, worker: str) -> bool:
        """Whether the worker has answered any request."""
        latencies = self.by_worker.get(worker)
        return latencies is not None and latencies.count > 0

    def _reconcile(self, generation: Generation, now: float) -> None:
        for deployment in self.deployments:
            if generation in deployment.generations:
                deployment.reconcile(now)
        self._settle(now)

    def _holder_built(self, child: str, generation: Generation, built: Built, now: float) -> None:
        difference = self._signature.differs(built)
        if difference:
            generation.failed(f"the new model is not a drop-in for the one that serves: {difference}", now)
        else:
            generation.holder_built(child, built, now)

    def _settle(self, now: float) -> None:
        """After each event of a generation: do what it wants, and serve what it now allows."""
        self._children.changed()
        self._perform_all(now)
        if self._update is not None:
            self._settle_update(self._update, now)
        if self._signature.built is None:
            self._learn_signature()
        self._refusal = self._refuses()
        if self._refusal and not self._replaced:
            self._give_up(self._no_answer())
        self._dispatch(now)
        self._update_next_tick()

    def _perform_all(self, now: float) -> None:
        """Perform what is wanted, and what comes of it."""
        while True:
            wanted = [(each, action) for each in self.deployments for action in each.take_actions()]
            if not wanted:
                return
            for deployment, (generation, action) in wanted:
                self._perform(deployment, generation, action, now)
            self._tell_pinned(now)

    def _tell_pinned(self, now: float) -> None:
        for source, snapshot in self._sources.snapshots.ready():
            for deployment in self.deployments:
                canary = self._sources.snapshots.canary(source)
                deployment.pinned(source, snapshot.sha256, snapshot.nbytes, now, canary)

    def _perform(self, deployment: Deployment, generation: Generation, action: Action, now: float) -> None:
        match action:
            case Pin():
                self._sources.snapshots.want(generation.source, now + self.config.load_timeout)
            case Spawn(name, role):
                self._owners[name] = deployment, generation
                self._children.spawn(self, generation, self._sources.snapshots[generation.source], name, role)
            case Send(name, order):
                self._children.order(name, order)
            case Kill(name, abort):
                self._children.kill(name, abort=abort)
            case Enlist(name):
                self.by_worker[name] = Latencies()
                self.scheduler.enlist(name, (name,))
            case Dismiss(name):
                self.scheduler.dismiss(name)
                self.guard.watchdog.forget(name)
                if generation.invalid:
                    # It will not answer what it has, and is not to blame.
                    self.scheduler.release(name)
            case Forget():
                self._past_deaths += generation.deaths
                self._children.forget(generation)

    def _settle_update(self, update: _Update, now: float) -> None:
        """All devices take over together, or none."""
        failed = next((each for each in self.deployments if not each.updating), None)
        if failed is not None:
            self._update = None
            cause = failed.cause or "weightd is stopping"
            for deployment in self.deployments:
                deployment.abandon(f"given up: {cause}", now)
            self._sources.drop(update.source)
            error = Unavailable if failed.may_recover else FailedPrecondition
            self._clients.tell_error(update.client, update.request_id, error(f"not updated: {cause}"))
        elif all(each.complete for each in self.deployments):
            self._update = None
            for deployment in self.deployments:
                deployment.switch(now)
            self._sources.took_over(update.source)
            self.guard.clear()
            self._relearn_signature()
            self._clients.tell_updated(update.client, self._updated(update))
        else:
            return
        self._perform_all(now)

    def _updated(self, update: _Update) -> UpdateResponse:
        numbers = tuple(each.main.number for each in self.deployments)
        serves = self.source
        return UpdateResponse(
            update.request_id, self.name, numbers, serves.path, serves.weights, configured=self.config.path
        )

    def _learn_signature(self) -> None:
        built = next((each.built for each in self._live() if each.built is not None), None)
        if built is None:
            return
        self._signature.learn(built)
        unfit = self._signature.refusals(list(self.scheduler.waiting()))
        for request in self.scheduler.withdraw(lambda each: each.number in unfit):
            self._refuse(request, unfit[request.number])
        self._tell_metadata()

    def _relearn_signature(self) -> None:
        """What took over may take more sizes than what served before."""
        built = self.main.built
        if built is not None:
            self._signature.learn(built)

    def _live(self) -> Iterator[Generation]:
        return (each for deployment in self.deployments for each in deployment.generations if each.state in ACTIVE)

    def _tell_metadata(self) -> None:
        built = self._signature.built
        if built is None:
            return
        for client, request_id in self._signature.take_waiters():
            self._clients.tell_metadata(
                client,
                ModelMetadataResponse(request_id, self.name, self.config.engine, built.inputs, built.outputs),
            )

    def _give_up(self, error: RequestError) -> None:
        for request in self.scheduler.give_up():
            self._refuse(request, error)
        for client, request_id in self._signature.take_waiters():
            self._clients.tell_error(client, request_id, error)

    def _dispatch(self, now: float) -> None:
        for seat, number in self.scheduler.take_recalled():
            for process in seat.processes:
                self._children.order(process, Skip(number))
        for seat, job in self.scheduler.assign(now):
            [request] = job.parts
            for process in seat.processes:
                self._children.order(process, Predict(job.number, tuple(request.inputs)), request.frames)
        self._set_timer()

    def _refuse(self, request: Request, error: RequestError) -> None:
        self.failed += 1
        self._clients.refuse(request, error)

    def _update_next_tick(self) -> None:
        due = min(self.guard.watchdog.next_event, self._sources.snapshots.next_event)
        self.next_tick = min(due, *(each.next_tick for each in self.deployments))
        self._look_soon()
        self._set_timer()

    def _look_soon(self) -> None:
        if self.guard.looks:
            self.next_tick = 0.0

    def _set_timer(self) -> None:
        """Whatever has happened ends here: the loop looks at the timer alone."""
        tick, event = self.next_tick, self.scheduler.next_event
        self.timer.set(tick if tick < event else event)
