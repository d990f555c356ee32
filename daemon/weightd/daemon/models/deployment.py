"""One model on one device: the generation that serves, the one that is to come, and those that leave.

Plain decisions, as in `generation`: events and the clock go in, actions come out. Two promises: requests go to the
workers of one generation only; and a second copy of the weights exists only while one generation takes over from
another, and only if the device has room for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from weightd.daemon.config.policies import Policy
from weightd.daemon.generations.actions import Action, Enlist, Forget
from weightd.daemon.generations.generation import Generation
from weightd.daemon.generations.plan import Canary, Source, Terms
from weightd.daemon.generations.progress import Outlook
from weightd.daemon.generations.restarts import Restarts
from weightd.daemon.generations.states import ACTIVE, GenerationState
from weightd.daemon.models.budget import Device, Need
from weightd.protocol.messages.children import DeviceMemory

_log = logging.getLogger("weightd.generation")

# Nobody tells a deployment what another one has left.
_LOOK_AGAIN_S = 0.5


class Deployment:
    """Keeps one generation serving.

    Args:
        device: where, and what it has room for.
        terms: of each generation.
        policy: how one is replaced.
        fall_back: whether a generation that cannot share its weights is followed by one that does not.
        process_bytes: what each process takes on the device beside the weights; what was seen counts if it is more.
        make: makes a generation of a source, with a new number.

    Attributes:
        serving: whose workers take requests; None while there is none.
        coming: the one that loads.
        leaving: those that wind down.
        failed: whether no further generation is tried.
        terms: of the next generation.
    """

    def __init__(
        self,
        device: Device,
        terms: Terms,
        policy: Policy,
        *,
        fall_back: bool,
        process_bytes: int,
        make: Callable[[Device, Source, Terms], Generation],
    ) -> None:
        self.device = device
        self.serving: Generation | None = None
        self.coming: Generation | None = None
        self.leaving: list[Generation] = []
        self.failed = False
        self._blamed: Generation | None = None
        self.terms = terms
        self._policy = policy
        self._fall_back = fall_back
        self._make = make
        self._restarts = Restarts()
        self._since = 0.0
        self._has_served = False
        # What the next generation loads, once there may be one.
        self._wanted: Source | None = None
        # Of a generation that is pinned and waits for room.
        self._pinned: tuple[str, int, Canary | None] | None = None
        # When to see whether there is room by now.
        self._look_again = float("inf")
        self._updating = False
        self._least_process_bytes = self._process_bytes = process_bytes
        self._stopping = False
        self._last: Generation | None = None
        self._actions: list[tuple[Generation, Action]] = []

    # --- events -------------------------------------------------------------------------------------------------

    def start(self, source: Source) -> None:
        """Load the first generation."""
        self._load(source)

    def resume(self, generation: Generation, nbytes: int, now: float) -> None:
        """Go on with a generation that a daemon before this one has loaded, of a model of so many bytes."""
        self.coming = self._last = generation
        self.terms = generation.terms
        self._has_served = True
        self._process_bytes = max(self._least_process_bytes, generation.footprint.process_bytes)
        # It is there: whether there is room is no question.
        self.device.promised[generation.label] = self._need(nbytes)
        self.reconcile(now)

    def update(self, source: Source, now: float) -> None:
        """Load a generation that is to take over once `switch` is called.

        What `is_lost` is tried again only if that fails.
        """
        again = self._wanted
        if self.coming is not None and self.is_lost:
            again, old = self.coming.source, self.coming
            self.coming = self._pinned = None
            self._leave(old, now)
        self._updating = True
        self._load(source)
        self._wanted = again

    def pinned(self, source: Source, sha256: str, nbytes: int, now: float, canary: Canary | None = None) -> None:
        """The snapshot of a source exists: the generation that waits for it goes on as soon as there is room.

        `canary` is what an earlier generation of the source has found out of it.
        """
        if self._pins(source):
            self._pinned = sha256, nbytes, canary
            self.reconcile(now)

    def pin_failed(self, source: Source, cause: str, now: float) -> None:
        """There is no snapshot of a source."""
        if self._pins(source) and self.coming is not None:
            self.coming.failed(cause, now)
            self.reconcile(now)

    def switch(self, now: float) -> None:
        """Let the generation that was loaded by `update` take over."""
        if self.coming is not None:
            self._take_over(self.coming, now)
            self.reconcile(now)

    def abandon(self, cause: str, now: float) -> None:
        """Give up the generation that was loaded by `update`."""
        if self.coming is not None and self._updating:
            self.coming.failed(cause, now)
            self.reconcile(now)

    def told(self, generation: Generation, memory: DeviceMemory | None) -> None:
        """The card has said what is free after a process of the generation has loaded."""
        if memory is not None:
            self.device.free = memory.free_bytes
            self._process_bytes = max(self._least_process_bytes, generation.footprint.process_bytes)
            self.device.learn(generation.label, self._process_bytes)

    def will_leave(self) -> None:
        """It will be drained: who needs the room may wait for that."""
        self.device.leaving |= {generation.label for generation in self.generations}

    def drain(self, now: float, *, patience: float = 0.0) -> None:
        """No new work, and no further generation: wind everything down; what runs may take `patience` seconds more."""
        self._stopping = True
        self._wanted, self._look_again = None, float("inf")
        self.will_leave()
        for generation in self.generations:
            generation.drain(now, patience=patience)
        self.reconcile(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        for generation in self.generations:
            if now >= generation.next_tick:
                generation.tick(now)
        self.reconcile(now)

    def reconcile(self, now: float) -> None:
        """Bring what is nearer to what should be; to be called after each event of a generation."""
        self._collect()
        self._forget_ended()
        if self.coming is not None and self.coming.state not in ACTIVE:
            self._coming_failed(self.coming, now)
        if self.serving is not None and self.serving.state not in ACTIVE:
            self._serving_failed(self.serving, now)
        if not self._stopping:
            self._admit(now)
            self._arrive(now)
            self._renew(now)
        self._collect()
        self._forget_ended()

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def generations(self) -> list[Generation]:
        """Every generation of which something is left, the one that serves first."""
        return [each for each in (self.serving, self.coming, *self.leaving) if each is not None]

    @property
    def cause(self) -> str:
        """Why there is no generation, or no better one; more of it may be known once its processes are gone."""
        return self._blamed.cause if self._blamed is not None else ""

    @property
    def may_recover(self) -> bool:
        """Whether what ended the last generation may not end the next one: a kill, or that everything ends."""
        return self._blamed is None or self._blamed.outlook is Outlook.BETTER or self._stopping

    @property
    def main(self) -> Generation:
        """The generation that tells how it stands."""
        generation = self.serving or self.coming or self._last
        if generation is None:
            raise RuntimeError("asked before the start")
        return generation

    @property
    def complete(self) -> bool:
        """Whether what `update` has loaded can take over."""
        return self._updating and self.coming is not None and self.coming.complete and self.coming.full

    @property
    def updating(self) -> bool:
        """Whether what `update` has loaded is still on its way."""
        return self._updating

    @property
    def is_lost(self) -> bool:
        """Whether nothing of what has served is left: it is being loaded again, or will be, and that may be in vain."""
        awaits = self.coming is not None and self.coming.awaits
        return self._has_served and self.serving is None and not (awaits or self.failed or self._updating)

    @property
    def busy(self) -> bool:
        """Whether a generation loads, or has to."""
        return self.coming is not None or self._wanted is not None

    @property
    def next_tick(self) -> float:
        """When `tick` is due, in monotonic seconds."""
        due = min((each.next_tick for each in self.generations), default=float("inf"))
        due = min(due, self._look_again)
        return min(due, self._restarts.due) if self._may_load() else due

    def take_actions(self) -> list[tuple[Generation, Action]]:
        """Return what is to be done, in order, and forget it."""
        actions, self._actions = self._actions, []
        return actions

    # --- decisions ----------------------------------------------------------------------------------------------

    def _load(self, source: Source) -> None:
        self._wanted = None
        self.coming = self._last = self._make(self.device, source, self.terms)
        self.coming.start()
        self._collect()

    def _admit(self, now: float) -> None:
        """Let a generation that is pinned go on, if its device has room."""
        has_waited, self._look_again = self._look_again < float("inf"), float("inf")
        if self._pinned is None or self.coming is None:
            return
        sha256, nbytes, canary = self._pinned
        coming, old, need = self.coming, self.serving, self._need(nbytes)
        alone = self._policy is Policy.REPLACE and not self._updating
        refusal = self.device.refusal(coming.label, need)
        if self.leaving and (alone or refusal or old is not None or len(self.leaving) > 1):
            return  # they make room, and there are never more than two
        if old is not None and self._makes_way(refusal):
            why = refusal or "policy replace"
            refusal = self.device.refusal(coming.label, need, without=[old.label])
            if not refusal:
                _log.info("%s leaves before %s is loaded: %s", old.label, coming.label, why, extra=old.about())
                self._leave(old, now)
                return
        if refusal and not self.device.refusal(coming.label, need, without=self.device.leaving):
            if not has_waited:
                _log.info(
                    "%s waits for the room of %s",
                    coming.label,
                    ", ".join(sorted(self.device.leaving)),
                    extra=coming.about(),
                )
            self._look_again = now + _LOOK_AGAIN_S
            return
        if refusal:
            coming.failed(refusal, now)
            self._coming_failed(coming, now)
        else:
            self._pinned = None
            self.device.reserve(coming.label, need)
            coming.pinned(sha256, now, canary)

    def _makes_way(self, refusal: str) -> bool:
        """Whether the generation that serves leaves before the next one is loaded."""
        if self._updating or self._policy is Policy.OVERLAP:
            return False
        return self._policy is Policy.REPLACE or bool(refusal)

    def _need(self, nbytes: int) -> Need:
        users = self.terms.attached
        # Without sharing the holder has left, and its copy with it, before a worker loads.
        copies = 1 if self.terms.sharing else users
        return Need(nbytes, copies, users, 1 + users, self._process_bytes)

    def _arrive(self, now: float) -> None:
        """The coming generation takes over: at once where nobody serves, else as soon as it is complete."""
        coming = self.coming
        if coming is None or coming.state is not GenerationState.SERVING:
            return
        if self._updating:
            if coming.complete and not coming.full:
                coming.given_up("not every worker could load it", now)
                self._coming_failed(coming, now)
        elif self.serving is None or coming.complete:
            self._take_over(coming, now)

    def _take_over(self, coming: Generation, now: float) -> None:
        old, self.serving, self.coming = self.serving, coming, None
        self._updating, self._wanted = False, None
        self._since, self._has_served = now, True
        self._restarts.became_ready()
        self._blamed = None
        if old is not None:
            _log.info("%s takes over from %s", coming.label, old.label, extra=coming.about())
            self._leave(old, now)
        # After the old one's workers are dismissed: no two generations are given requests.
        self._collect()
        self._actions += [(coming, Enlist(name)) for name in coming.enlisted]

    def _renew(self, now: float) -> None:
        if self.serving is not None and self.serving.needs_renewal and not self.busy:
            self._wanted = self.serving.source
        if self._may_load() and now >= self._restarts.due and self._wanted is not None:
            self._load(self._wanted)

    def _may_load(self) -> bool:
        return self._wanted is not None and self.coming is None and not self._stopping and not self.failed

    def _pins(self, source: Source) -> bool:
        coming = self.coming
        return coming is not None and coming.state is GenerationState.PINNING and coming.source == source

    def _coming_failed(self, coming: Generation, now: float) -> None:
        self.coming, self._pinned = None, None
        self.leaving.append(coming)
        self._blamed = coming
        updating, self._updating = self._updating, False
        if self._stopping:
            return
        if updating:
            if self.serving is None and self._wanted is None:
                self._fail(coming)
        elif coming.outlook is Outlook.ROOM:
            # Copies of the weights in each process would find less.
            self._restarts.no_room(now, self.terms.room_timeout)
            self._try_again(coming)
        elif self._fall_back and self.terms.sharing and coming.sha256 and coming.built is None:
            _log.warning(
                "%s: cannot share weights, so each worker gets its own: %s",
                coming.label,
                coming.cause,
                extra=coming.about(),
            )
            self.terms = self.terms.private()
            self._wanted = coming.source
            return
        elif not self._has_served and coming.outlook is not Outlook.BETTER:
            self._fail(coming)
        else:
            self._restarts.start_failed(now)
            self._try_again(coming)
        self._tell_failed(coming)

    def _try_again(self, coming: Generation) -> None:
        if self._has_served or not self._restarts.failing:
            # What has served before was good: it is not given up, whatever is in its way now.
            self._wanted = coming.source
            delay = self._restarts.delay
            _log.warning("%s is followed by another one in %.1f s", coming.label, delay, extra=coming.about())
        else:
            self._fail(coming)

    def _fail(self, last: Generation) -> None:
        self.failed = True
        _log.error(
            "%s failed: %s; no other is tried on %s", last.label, last.cause, self.device.name, extra=last.about()
        )

    def _tell_failed(self, generation: Generation) -> None:
        """Tell why, unless that was told with what follows."""
        if not self.failed and generation.state is GenerationState.FAILED:
            _log.warning("%s failed: %s", generation.label, generation.cause, extra=generation.about())

    def _serving_failed(self, serving: Generation, now: float) -> None:
        self.serving = None
        self.leaving.append(serving)
        self._blamed = serving
        if self._stopping or serving.state is not GenerationState.FAILED:
            return
        self._restarts.died(now - self._since, now)
        self._wanted = serving.source
        self._tell_failed(serving)

    def _leave(self, old: Generation, now: float) -> None:
        if self.serving is old:
            self.serving = None
        self.leaving.append(old)
        old.drain(now, patience=self.terms.predict_timeout)

    def _forget_ended(self) -> None:
        for generation in [each for each in self.leaving if each.ended]:
            self.leaving.remove(generation)
            self.device.release(generation.label)
            self._actions.append((generation, Forget()))

    def _collect(self) -> None:
        """Take the generations' actions; only the one that serves may have its workers enlisted."""
        self._actions += [
            (generation, action)
            for generation in self.generations
            for action in generation.take_actions()
            if not isinstance(action, Enlist) or generation is self.serving
        ]
