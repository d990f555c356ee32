"""One model on one device: the generation that serves, the one that is to come, and those that leave.

Plain decisions, as in `generation`: events and the clock go in, actions come out. Two promises: requests go to the
workers of one generation only; and a second copy of the weights exists only while one generation takes over from
another, and only if the device has room for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from weightd.daemon.children.owner import Snapshot
from weightd.daemon.config.policies import Policy
from weightd.daemon.generations.actions import Action, Enlist, Forget
from weightd.daemon.generations.life import Life
from weightd.daemon.generations.plan import Canary, Source, Terms
from weightd.daemon.generations.progress import Outlook
from weightd.daemon.generations.restarts import Restarts
from weightd.daemon.generations.states import ACTIVE, GenerationState
from weightd.daemon.models.budget import Need, Room
from weightd.daemon.models.stage import LOADS, Deployed, Stage, StageEvent, Succession
from weightd.protocol.messages.findings import DeviceMemory

_log = logging.getLogger("weightd.generation")


class Deployment(Deployed):
    """Keeps one generation serving; how it stands is that of `Deployed`.

    Args:
        device: where, and what it has room for: one device, or the cards of all ranks.
        terms: of each generation.
        succession: how one follows another.
        make: makes a generation of a source, with a new number.
        wake: called when there may be room by now for what waits for it: `tick` is due.
    """

    def __init__(
        self,
        device: Room,
        terms: Terms,
        succession: Succession,
        make: Callable[[Room, Source, Terms], Life],
        wake: Callable[[], object],
    ) -> None:
        super().__init__(device, terms)
        self._succession = succession
        self._process_bytes = succession.process_bytes
        self._make = make
        self._wake = wake
        self._restarts = Restarts()
        self._since = 0.0
        # Of a generation that is pinned and waits for room.
        self._pinned: tuple[Snapshot, Canary | None] | None = None
        # Something has been released since it was refused.
        self._is_woken = False
        self._actions: list[tuple[Life, Action]] = []

    # --- events -------------------------------------------------------------------------------------------------

    def start(self, source: Source) -> None:
        """Load the first generation."""
        self._load(source)

    def resume(self, generation: Life, snapshot: Snapshot, now: float, port: int = 0) -> None:
        """Go on with a generation that a daemon before this one has loaded of this, and given that port."""
        self.coming = self._last = generation
        self.terms = generation.terms
        self._machine.advance(StageEvent.SERVE)
        self._process_bytes = max(self._succession.process_bytes, generation.footprint.process_bytes)
        # It is there: whether there is room is no question.
        self.device.restore(generation.label, self._need(snapshot), port)
        self.reconcile(now)

    def update(self, source: Source, now: float) -> None:
        """Load a generation that is to take over once `switch` is called.

        What `is_lost`, or `renews`, is tried again only if that fails.
        """
        again = self._wanted
        if self.coming is not None and (self.is_lost or self.renews):
            again, old = self.coming.source, self.coming
            self.coming = self._pinned = None
            self._leave(old, now)
        self._machine.advance(StageEvent.UPDATE)
        self._load(source)
        self._wanted = again

    def retry(self, source: Source) -> None:
        """Load again what has `failed`."""
        self._machine.advance(StageEvent.RETRY)
        self._restarts = Restarts()
        self._load(source)

    def pinned(self, source: Source, snapshot: Snapshot, now: float, canary: Canary | None = None) -> None:
        """The snapshot of a source exists: the generation that waits for it goes on as soon as there is room.

        `canary` is what an earlier generation of the source has found out of it.
        """
        if self._pins(source):
            self._pinned = snapshot, canary
            self.reconcile(now)

    def pin_failed(self, source: Source, cause: str, now: float, *, transient: bool = False) -> None:
        """There is no snapshot of a source; `transient`: the cause may go away by itself."""
        if self._pins(source) and self.coming is not None:
            self.coming.failed(cause, now, transient=transient)
            self.reconcile(now)

    def switch(self, now: float) -> None:
        """Let the generation that was loaded by `update` take over."""
        if self.coming is not None:
            self._take_over(self.coming, now)
            self.reconcile(now)

    def abandon(self, cause: str, now: float) -> None:
        """Give up the generation that was loaded by `update`."""
        if self.coming is not None and self.updating:
            self.coming.failed(cause, now)
            self.reconcile(now)

    def told(self, generation: Life, memory: DeviceMemory | None, rank: int = 0) -> None:
        """The card, or that of this rank, has said what is free after a process of the generation has loaded."""
        if memory is not None:
            self.device.said_free(memory.free_bytes, rank)
            self._process_bytes = max(self._succession.process_bytes, generation.footprint.process_bytes)
            self.device.learn(generation.label, self._process_bytes)

    def will_leave(self) -> None:
        """It will be drained: who needs the room may wait for that."""
        self.device.will_leave([generation.label for generation in self.generations])

    def make_way(self, now: float) -> None:
        """Another model of the name comes in the place of this one: what serves leaves, and nothing is loaded."""
        if self._stage is not Stage.KEEPING:
            return
        self._machine.advance(StageEvent.MAKE_WAY)
        self.will_leave()
        self._wanted = None
        for generation in (self.serving, self.coming):
            if generation is not None:
                _log.info("%s leaves: another one is to take its place", generation.label, extra=generation.about())
                self._leave(generation, now)
        self.coming = self._pinned = None
        self.reconcile(now)

    def come_again(self, now: float) -> None:
        """The other one could not be loaded: what served before does again, as soon as there is room."""
        if self.is_away:
            self._machine.advance(StageEvent.COME_AGAIN)
            self._wanted = self.main.source
            self.reconcile(now)

    def drain(self, now: float, *, patience: float = 0.0) -> None:
        """No new work, and no further generation: wind everything down; what runs may take `patience` seconds more."""
        if self._stage in LOADS or self.is_away:
            self._machine.advance(StageEvent.STOP)
        self._wanted = None
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
        if self._stage is not Stage.STOPPING:
            self._admit(now)
            self._arrive(now)
            self._renew(now)
        self._collect()
        self._forget_ended()

    @property
    def next_tick(self) -> float:
        """When `tick` is due, in monotonic seconds."""
        if self._is_woken and self._pinned is not None:
            return 0.0
        due = min((each.next_tick for each in self.generations), default=float("inf"))
        return min(due, self._restarts.due) if self._may_load() else due

    def take_actions(self) -> list[tuple[Life, Action]]:
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
        self._is_woken = False
        if self._pinned is None or self.coming is None:
            return
        snapshot, canary = self._pinned
        coming, old, need = self.coming, self.serving, self._need(snapshot)
        alone = self._succession.policy is Policy.REPLACE and not self.updating
        refusal = self._refusal(coming.label, need, now)
        if self.leaving and (alone or refusal or old is not None or len(self.leaving) > 1):
            return  # they make room, and there are never more than two
        if old is not None and self._makes_way(refusal):
            why = refusal or "policy replace"
            refusal = self.device.refusal(coming.label, need, without=[old.label])
            if not refusal:
                _log.info("%s leaves before %s is loaded: %s", old.label, coming.label, why, extra=old.about())
                if self.updating:
                    # Should that fail, what serves now comes again.
                    self._wanted = old.source
                self._leave(old, now)
                return
        if refusal and not self.device.refusal(coming.label, need, without=self.device.leaving):
            if coming.label not in self.device.waiting:
                labels = ", ".join(sorted(self.device.leaving))
                _log.info("%s waits for the room of %s", coming.label, labels, extra=coming.about())
                self.device.wait(coming.label, self._room_released)
            return
        if refusal:
            coming.failed(refusal, now)
            self._coming_failed(coming, now)
        else:
            self._pinned = None
            self.device.reserve(coming.label, need)
            coming.pinned(snapshot.sha256, now, canary, tuple(each.sha256 for each in snapshot.slices))

    def _refusal(self, label: str, need: Need, now: float) -> str:
        """Why there is no room for a generation, or ""; whose place it may take has made way for it."""
        refusal = self.device.refusal(label, need)
        if not refusal or self.predecessor is None:
            return refusal
        others = [*self.device.leaving, *self.predecessor.labels()]
        if not self.device.refusal(label, need, without=others):
            self.predecessor.make_way(now)
        return self.device.refusal(label, need)

    def _room_released(self) -> None:
        self._is_woken = True
        self._wake()

    def _makes_way(self, refusal: str) -> bool:
        """Whether the generation that serves leaves before the next one is loaded."""
        # Two groups of ranks may not go beside each other, whatever room there is: they are updated in their place.
        is_beside = self.updating and self.terms.ranks is None
        if is_beside or self._succession.policy is Policy.OVERLAP:
            return False
        return self._succession.policy is Policy.REPLACE or bool(refusal)

    def _need(self, snapshot: Snapshot) -> Need:
        nbytes, slices = snapshot.nbytes, tuple(each.nbytes for each in snapshot.slices)
        if slices:
            buffers = self._succession.buffer_bytes
            return Need(nbytes, 1, len(slices), len(slices), self._process_bytes, buffers, slices)
        if self.terms.ranks is not None:
            return Need(nbytes, 1, 1, 1, self._process_bytes)
        users = self.terms.attached
        # Without sharing the holder has left, and its copy with it, before a worker loads.
        copies = 1 if self.terms.sharing else users
        return Need(nbytes, copies, users, 1 + users, self._process_bytes)

    def _arrive(self, now: float) -> None:
        """The coming generation takes over: at once where nobody serves, else as soon as it is complete."""
        coming = self.coming
        if coming is None or coming.state is not GenerationState.SERVING:
            return
        if self.updating:
            if coming.complete and not coming.full:
                coming.given_up("not every worker could load it", now)
                self._coming_failed(coming, now)
        elif self.serving is None or coming.complete:
            self._take_over(coming, now)

    def _take_over(self, coming: Life, now: float) -> None:
        old, self.serving, self.coming = self.serving, coming, None
        self._wanted, self._since = None, now
        if self._stage is Stage.FIRST:
            self._machine.advance(StageEvent.SERVE)
        elif self.updating:
            self._machine.advance(StageEvent.SETTLE)
        self._restarts.became_ready()
        self._blamed = None
        self._is_unserved = False
        if old is not None:
            _log.info("%s takes over from %s", coming.label, old.label, extra=coming.about())
            self._leave(old, now)
        # After the old one's workers are dismissed: no two generations are given requests.
        self._collect()
        self._actions += [(coming, Enlist(name)) for name in coming.seats]

    def _renew(self, now: float) -> None:
        if self.serving is not None and self.serving.needs_renewal and not self.busy:
            self._wanted = self.serving.source
        if self._may_load() and now >= self._restarts.due and self._wanted is not None:
            self._load(self._wanted)

    def _may_load(self) -> bool:
        return self._wanted is not None and self.coming is None and self._stage in LOADS

    def _pins(self, source: Source) -> bool:
        coming = self.coming
        return coming is not None and coming.state is GenerationState.PINNING and coming.source == source

    def _coming_failed(self, coming: Life, now: float) -> None:
        self.coming, self._pinned = None, None
        self.leaving.append(coming)
        self._blamed = coming
        if self._stage is Stage.STOPPING:
            return
        if self._stage is Stage.REPAIRING:
            self._fail(coming)
        elif self.updating:
            self._machine.advance(StageEvent.SETTLE)
        elif coming.outlook is Outlook.ROOM:
            # Copies of the weights in each process would find less.
            self._restarts.no_room(now, self.terms.room_timeout)
            self._try_again(coming)
        elif self._falls_back(coming):
            _log.warning(
                "%s: cannot share weights, so each worker gets its own: %s",
                coming.label,
                coming.cause,
                extra=coming.about(),
            )
            self.terms = self.terms.private()
            self._wanted = coming.source
            return
        elif coming.built is not None and coming.built.is_template and not coming.transient:
            _log.warning(
                "%s: no worker that is forked of the template can serve, so each builds for itself: %s",
                coming.label,
                coming.cause,
                extra=coming.about(),
            )
            self.terms = self.terms.unforked()
            self._wanted = coming.source
            return
        elif self._stage is Stage.FIRST and coming.outlook is not Outlook.BETTER:
            self._fail(coming)
        else:
            self._restarts.start_failed(now)
            self._try_again(coming)
        self._tell_failed(coming)

    def _falls_back(self, coming: Life) -> bool:
        """Whether each process is to load its own weights next, since the cause may lie in the sharing of them."""
        cannot_share = self.terms.sharing and bool(coming.sha256) and coming.built is None
        return self._succession.fall_back and cannot_share and not coming.transient

    def _try_again(self, coming: Life) -> None:
        if self._stage is Stage.KEEPING or not self._restarts.failing:
            # What has served before was good: it is not given up, whatever is in its way now.
            self._wanted = coming.source
            delay = self._restarts.delay
            _log.warning("%s is followed by another one in %.1f s", coming.label, delay, extra=coming.about())
        else:
            self._fail(coming)

    def _fail(self, last: Life) -> None:
        self._machine.advance(StageEvent.FAIL)
        self._is_unserved = True
        follows = "" if last.transient else f"; nothing is loaded on {self.device.name} before a reload or an update"
        _log.error("%s failed: %s%s", last.label, last.cause, follows, extra=last.about())

    def _tell_failed(self, generation: Life) -> None:
        """Tell why, unless that was told with what follows."""
        if not self.failed and generation.state is GenerationState.FAILED:
            _log.warning("%s failed: %s", generation.label, generation.cause, extra=generation.about())

    def _serving_failed(self, serving: Life, now: float) -> None:
        self.serving = None
        self.leaving.append(serving)
        self._blamed = serving
        if self._stage is Stage.STOPPING or serving.state is not GenerationState.FAILED:
            return
        self._restarts.died(now - self._since, now)
        self._wanted = serving.source
        self._tell_failed(serving)

    def _leave(self, old: Life, now: float) -> None:
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
