"""Several models in one process on each of their devices: they come up together, and are lost together.

A household owns the deployments, and so the units, of all its members. Each member is a model as any other to those who
ask it; what it would do with generations of its own, it has the household do for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightd.daemon.children.launch import Program
from weightd.daemon.children.owner import Snapshot
from weightd.daemon.config.membership import Membership
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.config.policies import Policy
from weightd.daemon.generations.life import Life
from weightd.daemon.generations.plan import RankTerms, Source, Terms
from weightd.daemon.generations.states import ACTIVE, advance
from weightd.daemon.generations.unit import Unit
from weightd.daemon.host.memory import MIB
from weightd.daemon.meters.meter import Mishaps
from weightd.daemon.models import standing
from weightd.daemon.models.budget import Device, Room
from weightd.daemon.models.deployment import Deployment
from weightd.daemon.models.housecrew import HouseCrew
from weightd.daemon.models.model import Model
from weightd.daemon.models.ports import Children, Clients
from weightd.daemon.models.records import ModelRecord
from weightd.daemon.models.sources import Numbers
from weightd.daemon.models.stage import Succession
from weightd.daemon.models.standing import PHASE, Phase, PhaseEvent
from weightd.daemon.requests.desk import Desk
from weightd.daemon.requests.long_jobs import Users
from weightd.daemon.requests.turns import Turns
from weightd.protocol.errors import FailedPrecondition, Unavailable
from weightd.protocol.messages.children import Built
from weightd.shared.members import Member as ToldMember
from weightd.shared.members import Members, joint_digest
from weightd.shared.reach import Grant


class Household:
    """The process of several models on each of their devices.

    Args:
        config: of its first member.
        devices: by name.
        children: the processes.
        numbers: of its generations.

    Attributes:
        members: in their order, as far as they have been made.
        deployments: one for each device.
        users: the tenants that use its processes.
    """

    def __init__(
        self, config: ModelConfig, devices: Mapping[str, Device], children: Children, numbers: Numbers
    ) -> None:
        if config.group is None:
            raise ValueError("expected a model of a group")
        self.group = config.group
        self.members: list[Member] = []
        self.children = children
        self._numbers = numbers
        self._source = Source(self.group.name, number=numbers.source())
        self._started = 0
        self._is_settling = False
        count = len(self.group.models)
        self.deployments = [
            Deployment(
                devices[device],
                _terms(config, device, count),
                Succession(Policy(config.policy), process_bytes=config.process_mib * MIB),
                make=self._make,
                wake=self._wake,
            )
            for device in config.devices
        ]
        self.turns: dict[str, Turns] = {}
        self.users = Users()

    @property
    def desks(self) -> Sequence[Desk]:
        """Where the requests of each member are."""
        return [each.desk for each in self.members]

    def start(self, now: float) -> None:
        """One more member is to be loaded: when all are, they begin."""
        self._started += 1
        if self._started == len(self.group.models):
            for deployment in self.deployments:
                deployment.start(self._source)
        self.settle(now)

    def pinned(self, now: float) -> None:
        """One more snapshot exists; when all do, the process may start."""
        there = self._snapshots()
        if there is not None:
            nbytes = sum({each.path: each.nbytes for each in there}.values())
            joint = Snapshot(there[0].path, "", joint_digest([each.sha256 for each in there]), nbytes)
            for deployment in self.deployments:
                deployment.pinned(self._source, joint, now)

    def pin_failed(self, cause: str, now: float, *, transient: bool) -> None:
        """There is no snapshot of one member: nobody can be loaded."""
        for deployment in self.deployments:
            deployment.pin_failed(self._source, cause, now, transient=transient)
        self.settle(now)

    def retry(self, now: float) -> None:
        """Load again what has failed."""
        if all(each.failed for each in self.deployments):
            self._source = Source(self.group.name, number=self._numbers.source())
            for member in self.members:
                member.renew_source()
        for deployment in self.deployments:
            if deployment.failed:
                deployment.retry(self._source)
        self.settle(now)

    def will_leave(self) -> None:
        """One more member will be drained: once all will, who needs the room may wait for that."""
        if all(each.is_leaving for each in self.members):
            for deployment in self.deployments:
                deployment.will_leave()

    def drain(self, now: float, patience: float) -> None:
        """A member winds down; the process goes with the last one that is served."""
        if all(each.draining for each in self.members):
            for deployment in self.deployments:
                deployment.drain(now, patience=patience)
        self.settle(now)

    def settle(self, now: float) -> None:
        """After each event: do what is wanted, and let each member serve what that allows."""
        if self._is_settling:
            return
        self._is_settling = True
        self.children.changed()
        self.pinned(now)
        while wanted := [(each, action) for each in self.deployments for action in each.take_actions()]:
            for deployment, (generation, action) in wanted:
                self.members[0].house.perform(deployment, generation, action, now)
            self.pinned(now)
        self._is_settling = False
        for member in self.members:
            member.settled(now)

    def want_snapshots(self, now: float) -> None:
        """A process is to be started."""
        for member in self.members:
            member.want_snapshot(now)

    def snapshots_lost(self) -> None:
        """The files of snapshots have vanished: all are taken anew."""
        for member in self.members:
            member.snapshot_lost()

    def program(self, config: ModelConfig, device: str) -> Program:
        """Return what the process runs there: models of one file have one copy of it, and so may share its weights."""
        there = self._snapshots() or ()
        first: dict[str, Snapshot] = {}
        told: list[ToldMember] = []
        for member, snapshot in zip(self.members, there, strict=True):
            copy = first.setdefault(member.config.path, snapshot)
            pinned = f"{copy.identity}:{copy.sha256}" if copy.identity else ""
            options, tolerance = member.config.engine_options.json(), member.config.canary_tolerance
            told.append(ToldMember(copy.path, pinned, options, snapshot.sample, tolerance))
        return Program(
            config.python,
            config.engine,
            told[0].model,
            device,
            threads=config.threads,
            sharing=False,
            why_spawned="what drives a card does not survive a fork",
            members=Members(self.group.share, tuple(told)).json(),
        )

    def _snapshots(self) -> list[Snapshot] | None:
        there = [each.snapshot for each in self.members]
        return None if None in there else [each for each in there if each is not None]

    def _make(self, device: Room, source: Source, terms: Terms) -> Life:
        number = self._numbers.generation()
        unit = Unit(f"{self.group.name}@group.{number}", terms, device.name, source, number=number)
        unit.mishaps = Mishaps(*(each.desk.meter for each in self.members))
        return unit

    def _wake(self) -> None:
        for member in self.members:
            member.wake()


class Member(Model):
    """A model whose process serves others, too.

    Args:
        household: all of them.
        model: as those of `Model`.

    Attributes:
        is_leaving: it was removed, and will be drained.
    """

    def __init__(self, household: Household, *model: Any) -> None:
        super().__init__(*model)
        self._household = household
        self._index = len(household.members)
        self.is_leaving = False
        self.deployments = household.deployments
        self.desk.scheduler.users = household.users
        if household.members:
            self._house = household.members[0].house
        else:
            there = self.config, household.children, self._sources.snapshots
            self._house = HouseCrew(household, self, *there, self.desk, household.settle)
        self._crew = self._house
        self.heard, self.exited = self._house.heard, self._house.exited
        household.members.append(self)

    @property
    def house(self) -> HouseCrew:
        """The processes of all members."""
        return self._house

    @property
    def snapshot(self) -> Snapshot | None:
        """The copy of what it loads, if that exists."""
        return self._sources.snapshots.find(self._sources.current)

    def update(  # noqa: PLR0913
        self, client: bytes, request_id: str, now: float, *, path: str, weights: str, rollback: bool, grant: Grant
    ) -> None:
        """Refuse it: the process of all members would have to go.

        Raises:
            FailedPrecondition: always.
        """
        group = self._household.group
        others = ", ".join(each for each in group.models if each != self.name)
        raise FailedPrecondition(
            f"{self.name} is in one process with {others}, the group {group.name}: it cannot be updated alone; "
            "change the configuration and reload"
        )

    def start(self, now: float) -> None:
        """Begin to load, once all members do."""
        self._household.start(now)

    def resume(self, record: ModelRecord, now: float) -> None:
        """Load it: what a daemon before this one had loaded of a household, it does not hand over."""
        self.start(now)

    def record(self) -> ModelRecord | None:
        """Return None: it is loaded anew."""
        return None

    def pinned(self, source: Source, snapshot: Snapshot, now: float) -> None:
        """The snapshot of a source exists."""
        self._sources.snapshots.taken(source, snapshot)
        self._household.settle(now)

    def pin_failed(self, source: Source, cause: str, now: float, *, transient: bool = False) -> None:
        """There is no snapshot of a source; `transient`: the cause may go away by itself."""
        self._sources.snapshots.failed(source)
        self._household.pin_failed(f"{self.name}: {cause}", now, transient=transient)

    def retry(self, now: float) -> None:
        """Load the group again, as far as it has failed."""
        if self.may_retry:
            self._household.retry(now)

    def will_leave(self) -> None:
        """It is served no more; who waits for the room of the process waits for all members."""
        self.is_leaving = True
        self._household.will_leave()

    def drain(self, now: float, *, patience: float = 0.0, replaced: bool = False) -> None:
        """Take no new work; the process goes when all members wind down."""
        event = PhaseEvent.REPLACE if replaced else PhaseEvent.CLOSE
        self._phase = advance(PHASE, self._phase, event)
        if not replaced:
            self.desk.give_up(Unavailable("weightd is stopping"))
        self._sources.snapshots.abandon()
        self._household.drain(now, patience)

    def reconfigure(self, config: ModelConfig) -> bool:
        """Return whether nothing has changed: another configuration is that of another household."""
        return config == self.config

    # --- from the household -------------------------------------------------------------------------------------

    def want_snapshot(self, now: float) -> None:
        """A process is to be started."""
        self._sources.snapshots.want(self._sources.current, now + self.config.load_timeout)

    def snapshot_lost(self) -> None:
        """The files of its snapshot have vanished."""
        self._sources.snapshots.lost(self._sources.current)

    def renew_source(self) -> None:
        """Read the model's files again."""
        self._sources.anew()

    def wake(self) -> None:
        """A device has room again."""
        self._wake()

    def settled(self, now: float) -> None:
        """Serve what a generation now allows."""
        built = self._built()
        if self.desk.signature.built is None and built is not None:
            self.desk.learn(built)
        self._plan_retry(now)
        self._refusal = standing.refusal(self.name, self.deployments)
        if self._refusal is not None and self._phase is not Phase.REPLACED:
            self.desk.close(self._refusal.error())
        self.desk.dispatch(now)
        self._update_next_tick()

    def _settle(self, now: float) -> None:
        self._household.settle(now)

    def _tell_pinned(self, now: float) -> None:
        self._household.pinned(now)

    def _built(self) -> Built | None:
        """What the process has told of this model."""
        there = (each for deployment in self.deployments for each in deployment.generations if each.state in ACTIVE)
        loaded = (each.models for each in there if isinstance(each, Unit) and each.models)
        return next((models[self._index] for models in loaded), None)


class Households:
    """Makes models, those of a group as members of one household."""

    def __init__(self) -> None:
        self._incomplete: dict[Membership, Household] = {}
        self._numbers: dict[str, Numbers] = {}

    def make(
        self,
        name: str,
        config: ModelConfig,
        devices: Mapping[str, Device],
        children: Children,
        clients: Clients,
        numbers: Numbers,
    ) -> Model:
        """Return a model that has not started; the arguments are those of `Model`."""
        group = config.group
        if group is None:
            return Model(name, config, devices, children, clients, numbers)
        household = self._incomplete.pop(group, None)
        if household is None:
            own = self._numbers.setdefault(group.name, Numbers())
            household = Household(config, devices, children, own)
        member = Member(household, name, config, devices, children, clients, numbers)
        if len(household.members) < len(group.models):
            self._incomplete[group] = household
        return member


def _terms(config: ModelConfig, device: str, members: int) -> Terms:
    ranks = RankTerms(1, (device,), config.load_timeout, 0, is_cut=False, members=members)
    return Terms(1, config.load_timeout, sharing=False, predict_timeout=config.predict_timeout, devices=(), ranks=ranks)
