"""The life of a unit: processes that live and die together.

These are the ranks of a model that is cut, and their broker if they need one; or the one process of several models.
Plain decisions, as in `generation`. Two promises: nobody is given a request unless every rank is there and has shown
that it computes rightly; and when one is lost all are killed in the same step, and none is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weightd.daemon.generations import accord, symptoms
from weightd.daemon.generations.actions import Role, Send
from weightd.daemon.generations.child import FOREVER, Child, Loss
from weightd.daemon.generations.life import HELLO_TIMEOUT_S, Life, misfit
from weightd.daemon.generations.plan import Canary, RankTerms, Source, Terms
from weightd.daemon.generations.progress import Cause, Outlook
from weightd.daemon.generations.ranks import Ranks, broker_name, rank_name
from weightd.daemon.generations.states import ACTIVE, COUNTED, ChildEvent, ChildState, GenerationEvent, GenerationState
from weightd.daemon.host.ends import By, End
from weightd.protocol.messages.children import Broken, Built, Hello
from weightd.protocol.messages.ranks import Enter, Entered, Warm, Warmed
from weightd.shared.devices import CPU


class Unit(Life):
    """The life of a unit.

    Args:
        label: its name, as in `Standing`.
        terms: what is configured, with `ranks`.
        device: of which deployment it is. Where each rank runs its terms say.
        source: what it loads.
        number: the one in its label.

    Attributes:
        models: what it has loaded: one model, or each of its members.
        step: the last one that its ranks have run for the daemon before this one; 0 for none.
    """

    roster: Ranks
    _rostered = Ranks

    def __init__(
        self, label: str, terms: Terms, device: str = CPU, source: Source | None = None, number: int = 1
    ) -> None:
        super().__init__(label, terms, device, source, number)
        if terms.ranks is None:
            raise ValueError(f"{label}: expected terms of ranks, got those of workers")
        self.ranks: RankTerms = terms.ranks
        self.models: tuple[Built, ...] = ()
        self.step = 0
        self._digests: tuple[str, ...] = ()
        self._names = [rank_name(label, rank) for rank in range(self.ranks.size)]
        self._entered: dict[str, Entered] = {}
        self._warmed: dict[int, Warmed] = {}
        self._steps: dict[str, int] = {}
        # What it has failed of may only follow from what is not known yet.
        self._is_symptom = False

    # --- events -------------------------------------------------------------------------------------------------

    def resumed(self) -> None:
        """It was made of what an earlier daemon has written down; it serves once all ranks are `back`."""
        super().resumed()
        expected = {*self._names, *([broker_name(self.label)] if self.ranks.has_broker else [])}
        if {*self.children} != expected:
            self._end(Cause(f"expected {', '.join(sorted(expected))}, got {', '.join(sorted(self.children))}"))

    def pinned(self, sha256: str, now: float, canary: Canary | None = None, digests: tuple[str, ...] = ()) -> None:
        """The snapshot exists: start all processes, the broker first. `digests` are those of the ranks' slices."""
        del canary  # it is configured, with the right answer
        if self.state is not GenerationState.PINNING:
            return
        self.sha256, self._digests = sha256, digests or (sha256,) * self.ranks.size
        self._machine.advance(GenerationEvent.PINNED)
        deadline = now + max(HELLO_TIMEOUT_S, self.terms.load_timeout)
        if self.ranks.has_broker:
            self.mishaps.started()
            self.roster.begin(Role.BROKER, broker_name(self.label), CPU, deadline)
        for name, device in zip(self._names, self.ranks.devices, strict=True):
            self.mishaps.started()
            self.roster.begin(Role.RANK, name, device, deadline)
        self._tell_progress()

    def hello(self, name: str, hello: Hello, now: float) -> None:
        """A process is up; when all are, they are to find each other, and to load."""
        child = self._due(name, ChildState.SPAWNED, "hello", now)
        if child is None:
            return
        refusal = self._refusal(child, hello)
        if refusal:
            self._lost(child, Loss(refusal, child.state))
            return
        child.hello = hello
        child.advance(ChildEvent.HELLO)
        if self.state is GenerationState.SPAWNING:
            self._machine.advance(GenerationEvent.GREETED)
        if self.roster.count(ChildState.GREETED) == len(self.children):
            self._gathered(now)
        self._tell_progress()

    def entered(self, name: str, entered: Entered, now: float) -> None:
        """A rank is in the group, and has loaded; when all have, they are to run the canary."""
        child = self._due(name, ChildState.BUILDING, "entered", now)
        if child is None:
            return
        self._entered[name] = entered
        child.advance(ChildEvent.ENTERED)
        if len(self._entered) == self.ranks.size:
            self._loaded(now)
        self._tell_progress()

    def warmed(self, name: str, warmed: Warmed, now: float) -> None:
        """A rank has run the canary, and found its answer right; when all have, they serve."""
        child = self._due(name, ChildState.ATTACHING, "warmed", now)
        if child is None:
            return
        if not self.ranks.is_cut and len(warmed.members) != self.ranks.members:
            told = f"expected the canaries of {self.ranks.members} models, got {len(warmed.members)}"
            self._lost(child, Loss(told, child.state))
            return
        self._warmed[self._names.index(name)] = warmed
        child.ready_at = now
        child.advance(ChildEvent.ATTACHED)
        if len(self._warmed) == self.ranks.size:
            refusal = accord.unproven(self._warmed, self.ranks) if self.ranks.is_cut else ""
            if refusal:
                self._end(Cause(refusal))
                return
            self._take(accord.proven(self.models, self._warmed, self.ranks))
            if self.models[0].rows is not None:
                self._teller.rows(self.models[0], exact=self.terms.rows.exact)
            self._serve()
        self._tell_progress()

    def back(self, name: str, now: float, step: int = 0) -> None:
        """A rank that was READY for the daemon before this one is connected; all have to have run the same `step`."""
        child = self._due(name, ChildState.AWAITED, "back", now)
        if child is None:
            return
        self._steps[name] = step
        child.ready_at = now
        child.advance(ChildEvent.BACK)
        if len(self._steps) == self.ranks.size:
            if len({*self._steps.values()}) > 1:
                told = ", ".join(f"{each} the step {self._steps[each]}" for each in self._names)
                self._end(Cause(f"the ranks are not in step: the last that was run is of {told}"))
                return
            self.step = step
            self._serve()
        self._tell_progress()

    def astray(self, name: str, what: str, now: float) -> None:
        """A process says what none of a unit says, or not now."""
        child = self.children.get(name)
        if child is not None and child.state in COUNTED:
            self._lost(child, Loss(f"it said {what}, which nobody has asked it for", child.state))

    def broken(self, name: str, broken: Broken, now: float) -> None:
        """A process says that it cannot do what it is for."""
        child = self._present(name)
        if child is not None:
            loss = Loss(broken.cause, child.state, no_room=broken.no_room, transient=broken.transient)
            self._lost(child, loss, is_symptom=symptoms.in_words(broken.cause))

    def leaving(self, name: str, now: float, why: str = "") -> None:
        """A predict of a rank has failed: what the others have sent for it would be taken for the next one's."""
        child = self._present(name)
        if child is not None:
            told = f"a predict failed: {why}" if why else "a predict failed"
            self._lost(child, Loss(told, child.state), is_symptom=True)

    def hung(self, name: str, why: str, now: float, *, useful: bool = False) -> None:
        """A rank does not answer any more, be it that it waits for another one."""
        del useful
        child = self._present(name)
        if child is not None:
            self._lost(child, Loss(why, child.state, is_slow=True), is_symptom=True)

    def exited(self, name: str, end: End, now: float, *, useful: bool = False) -> None:
        """A process has exited and has been waited for."""
        child = self.children.get(name)
        if child is None:
            return
        was, have_met = child.state, bool(self.models)
        self.roster.exited(child)
        is_symptom = symptoms.in_end(child.role, end, have_met=have_met)
        # A broker may end by itself when its ranks have left.
        if was in COUNTED and not (self.state is GenerationState.DRAINING and end.status == 0):
            port_taken = was is ChildState.HOLDING and symptoms.is_port_taken(end, have_met=have_met)
            transient = end.is_transient
            loss = Loss(str(end), was, is_useful=useful, by_signal=end.killed, no_room=port_taken, transient=transient)
            self._lost(child, loss, is_symptom=is_symptom)
        elif was is ChildState.KILLED:
            self._learned(child, end, is_own=symptoms.is_own(end) and not is_symptom)
        elif end.status != 0:
            # The others may wait for it in what they still compute.
            self.roster.kill_all()
        self._wind_down(now)

    def drain(self, now: float, *, patience: float = 0.0) -> None:
        """No new work: ranks finish what they have, and leave, then the broker. Who loads finishes nothing."""
        self._bound_stops(now, patience)
        if self.state in ACTIVE:
            was_serving = self.state is GenerationState.SERVING
            self._machine.advance(GenerationEvent.DRAIN)
            if not was_serving:
                self.roster.kill_all()
        self._wind_down(now)

    def tick(self, now: float) -> None:
        """Time has passed: who has taken too long ends all."""
        for child in list(self.children.values()):
            if now >= child.deadline and child.state is not ChildState.KILLED:
                loss = Loss(f"{child.state.told} took too long", child.state, is_slow=True)
                self._lost(child, loss, is_symptom=True)

    # --- how it stands ------------------------------------------------------------------------------------------

    @property
    def seats(self) -> Mapping[str, tuple[str, ...]]:
        """The one seat, of all ranks in their order, while it takes requests."""
        return self.roster.seats

    @property
    def complete(self) -> bool:
        """Whether it serves: it has all ranks, or none."""
        return self.state is GenerationState.SERVING

    @property
    def full(self) -> bool:
        """Whether all ranks are READY."""
        return self.complete

    @property
    def needs_renewal(self) -> bool:
        """Never: what has lost a rank has failed."""
        return False

    @property
    def progress(self) -> str:
        """What it is doing now, for people."""
        size, ready = self.ranks.size, self.roster.count(ChildState.READY)
        match self.state:
            case GenerationState.SPAWNING | GenerationState.GATHERING:
                up = sum(child.hello is not None for child in self.children.values())
                return f"spawned, {up}/{size + self.ranks.has_broker} processes up"
            case GenerationState.BUILDING:
                return f"loading, {len(self._entered)}/{size} ranks have entered"
            case GenerationState.ATTACHING | GenerationState.RESUMING:
                return f"attaching {ready}/{size}"
            case _:
                return self.state.told

    @property
    def _missing(self) -> tuple[str, ...]:
        """Nobody: none is started for another one."""
        return ()

    # --- decisions ----------------------------------------------------------------------------------------------

    def _present(self, name: str) -> Child | None:
        """The process, unless it is being killed."""
        child = self.children.get(name)
        return child if child is not None and child.state is not ChildState.KILLED else None

    def _due(self, name: str, state: ChildState, what: str, now: float) -> Child | None:
        """The process, if it is its turn to say this; whoever else says it does not know where it is."""
        child = self.children.get(name)
        if child is None or child.state is state:
            return child
        self.astray(name, what, now)
        return None

    def _refusal(self, child: Child, hello: Hello) -> str:
        if child.role is Role.BROKER:
            return misfit(hello, hello.sha256)
        rank = self._names.index(child.name)
        return misfit(hello, self._digests[rank]) or (accord.misplaced(hello, rank) if self.ranks.is_cut else "")

    def _gathered(self, now: float) -> None:
        """All are up: where they say the same of the model, they are let in, all at once."""
        slices = {each.name: each.hello.slice for each in self.roster.ranks if each.hello and each.hello.slice}
        refusal = accord.discord(slices) if self.ranks.is_cut else ""
        if refusal:
            self._end(Cause(refusal))
            return
        self._machine.advance(GenerationEvent.GATHERED)
        deadline = now + max(self.terms.load_timeout, self.ranks.connect_timeout)
        for child in list(self.children.values()):
            is_rank = child.role is Role.RANK
            child.advance(ChildEvent.BUILD if is_rank else ChildEvent.KEEP, deadline if is_rank else FOREVER)
            self._actions.append(Send(child.name, Enter()))

    def _loaded(self, now: float) -> None:
        """All have: their first predict is where they meet, so they begin it at once."""
        refusal = accord.discord(self._entered)
        found = len(self._entered[self._names[0]].members)
        if not self.ranks.is_cut and found != self.ranks.members:
            refusal = f"expected {self.ranks.members} models in one process, got {found}"
        if refusal:
            self._end(Cause(refusal))
            return
        self._machine.advance(GenerationEvent.BUILT)
        self._take(accord.loaded(self._entered[self._names[0]], self.ranks))
        order = Warm(self.terms.rows.rows, self.terms.rows.sizes)
        for child in self.roster.ranks:
            # Beside the time in which all have to come, the canary itself takes some.
            child.advance(ChildEvent.WARM, now + self.ranks.connect_timeout + self.terms.predict_timeout)
            self._actions.append(Send(child.name, order))

    def _take(self, models: tuple[Built, ...]) -> None:
        self.models, self.built = models, models[0]

    def _serve(self) -> None:
        self._machine.advance(GenerationEvent.READY)
        self.roster.enlist()

    def _wind_down(self, now: float) -> None:
        """Ranks leave and are waited for; then the broker."""
        if self.state is GenerationState.DRAINING:
            for child in self.roster.ranks or ([] if self._has_ranks else list(self.children.values())):
                if child.state in COUNTED:
                    self.roster.stop(child, now + self._stop_timeout)
            if not self.children:
                self._machine.advance(GenerationEvent.EMPTY)
        self._tell_progress()

    @property
    def _has_ranks(self) -> bool:
        return any(child.role is Role.RANK for child in self.children.values())

    # --- what is lost -------------------------------------------------------------------------------------------

    def _lost(self, child: Child, loss: Loss, *, is_symptom: bool = False) -> None:
        """One is of no use any more: all end."""
        if loss.was in COUNTED:
            self.deaths += 1
            self.mishaps.died()
        outlook = self._outlook(loss, is_symptom=is_symptom)
        cause = Cause(loss.why, child.name, outlook=outlook, transient=loss.transient or loss.no_room)
        if self.state in ACTIVE:
            self._is_symptom = is_symptom
            self._end(cause)
        else:
            self._teller.tell(f"{child.name} lost: {loss.why}", child.name)
            self.roster.kill_all()

    def _outlook(self, loss: Loss, *, is_symptom: bool) -> Outlook:
        if loss.no_room:
            return Outlook.ROOM
        return Outlook.BETTER if loss.by_signal or (is_symptom and not loss.is_slow) else Outlook.SAME

    def _learned(self, child: Child, end: End, *, is_own: bool) -> None:
        """One that was killed has ended; it may have done so before, and have been what the others have died of."""
        if self._cause.child == child.name:
            self._cause = replace(self._cause, words=end.words or self._cause.words)
        elif self._is_symptom and is_own:
            # By another signal than the one that the daemon has sent.
            self._cause = replace(self._cause, why=str(replace(end, by=By.UNKNOWN)), child=child.name, words="")
            self._is_symptom = False
            self._teller.tell(f"the first that was lost is {self._cause}", child.name)

    def _fail(self, cause: Cause, now: float) -> None:
        del now  # nobody has time to finish
        self._end(cause)

    def _end(self, cause: Cause) -> None:
        """It cannot go on: no rank is of use without the others, and what they still say is of no worth."""
        if self.state not in ACTIVE:
            return
        if self.state is not GenerationState.PINNING:
            self.mishaps.lost(self.ranks.size + self.ranks.has_broker)
        self._cause = cause
        self.access.invalidate()
        self._machine.advance(GenerationEvent.FAIL)
        self.roster.kill_all()
        self._tell_progress()
