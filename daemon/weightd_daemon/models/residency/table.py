"""Decides which models are in memory (their residency), within the budgets of the host, the cards and the tenants.

`ResidencyTable` decides without I/O. It receives events and the current time, and `plan` returns the grants and unloads
that are due. The memory of a generation is reserved from before its first process starts until its last process has
exited. So the reservations exceed the budget of a memory pool or of a tenant only after the budget was lowered, or if
an earlier daemon has loaded the generations.

If memory is short, models that load on demand are unloaded to free memory for each other: first the models of the
tenant that uses most memory in relation to its weight, and of these the least recently used one. Models that load at
the start, that have pending requests, or that were loaded less than `min_resident_s` ago are never unloaded for another
model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from weightd_common.log_text import format_mib
from weightd_daemon.models.residency.reservations import (
    HOST,
    Budgets,
    MemoryNeed,
    Reservation,
    ReservationEvent,
    Reservations,
    ReservationState,
    Residence,
)

_NEVER = float("inf")


class Grant(NamedTuple):
    """An action: the memory of the generation with this label is reserved, so its processes may start."""

    label: str


class Unload(NamedTuple):
    """An action: unload a model.

    Attributes:
        model: the name of the model.
        reason: why the model is unloaded, for the log.
    """

    model: str
    reason: str


class ResidencyTable:
    """Decides which generations may start, and which models are unloaded.

    Args:
        budgets: the limits of the reservations.
        find: called with the name of a model; returns the facts about this model.
        charge: called with a tenant, a model and the byte-seconds of memory to charge to the tenant.

    Attributes:
        reservations: the reservations of all generations.
    """

    def __init__(
        self,
        budgets: Budgets,
        find: Callable[[str], Residence],
        charge: Callable[[str, str, float], object] = lambda tenant, model, byte_seconds: None,
    ) -> None:
        self._find = find
        self._charge = charge
        self.reservations = Reservations(budgets)
        self._charged_until: float | None = None
        self._next_event_at = _NEVER

    # --- events -------------------------------------------------------------------------------------------------

    def request(self, label: str, model: str, need: MemoryNeed) -> None:
        """Record that a generation waits for memory until `plan` grants the memory; a second call has no effect."""
        if label not in self.reservations.by_label:
            reservation = self.reservations.by_label[label] = Reservation(label, model, need, self._find(model).owner)
            reservation.advance(ReservationEvent.REQUEST)

    def try_grant(self, label: str, now: float) -> bool:
        """Grant memory to a generation at once if enough is free and no other generation waits.

        Return whether the memory is granted.
        """
        reservation = self.reservations.by_label[label]
        if not reservation.is_waiting:
            return True
        is_alone = all(each is reservation or not each.is_waiting for each in self.reservations)
        is_in_turn = (
            self._find(reservation.model).is_pinned or self._loading_count < self.reservations.budgets.max_loading
        )
        if is_alone and is_in_turn and self.reservations.fits(reservation.need, reservation.owner, {}, ()):
            self._accrue(now)
            reservation.advance(ReservationEvent.GRANT)
        return not reservation.is_waiting

    def restore(self, label: str, model: str, need: MemoryNeed, now: float) -> None:
        """Record a generation that an earlier daemon has loaded, even if it exceeds a budget."""
        self._accrue(now)
        reservation = self.reservations.by_label[label] = Reservation(label, model, need, self._find(model).owner)
        reservation.advance(ReservationEvent.RESTORE)
        reservation.loaded_at = now

    def on_loaded(self, label: str, now: float) -> None:
        """Record that a generation serves."""
        reservation = self.reservations.get(label)
        if reservation is not None and reservation.state is ReservationState.LOADING:
            reservation.advance(ReservationEvent.SERVE)
            reservation.loaded_at = now

    def on_measured(self, label: str, need: MemoryNeed, now: float) -> None:
        """Record the measured memory of a generation.

        If the memory exceeds the reservation, `plan` raises the reservation or unloads a model.
        """
        reservation = self.reservations.get(label)
        if reservation is None or reservation.state is not ReservationState.LOADED:
            return
        self._accrue(now)
        measured = {**reservation.need, **need}
        exceeds = any(nbytes > reservation.need.get(pool, 0) for pool, nbytes in measured.items())
        reservation.excess = measured if exceeds else None
        if not exceeds:
            reservation.need = measured

    def on_release(self, label: str) -> None:
        """Record that the processes of a generation are exiting; its memory stays reserved."""
        reservation = self.reservations.get(label)
        if reservation is not None and reservation.state in (ReservationState.LOADING, ReservationState.LOADED):
            reservation.advance(ReservationEvent.RELEASE)
            reservation.excess = None

    def on_ended(self, label: str, now: float) -> None:
        """Release the memory of a generation whose processes have all exited."""
        reservation = self.reservations.get(label)
        if reservation is not None:
            self._accrue(now)
            reservation.advance(ReservationEvent.END)
            del self.reservations.by_label[label]

    # --- decisions ----------------------------------------------------------------------------------------------

    def rejection_reason(self, model: str, need: MemoryNeed) -> str:
        """Return why a generation can never get this memory, even if other models are unloaded; "" if it can."""
        for pool, nbytes in need.items():
            capacity = self.reservations.budgets.capacities.get(pool)
            pinned = sum(
                each.need.get(pool, 0)
                for each in self.reservations
                if each.is_reserved
                and each.state is not ReservationState.RELEASING
                and (each.model == model or self._find(each.model).is_pinned)
            )
            if capacity is not None and pinned + nbytes > capacity:
                key = "max_model_bytes" if pool == HOST else f"the memory of {pool}"
                others = f", of which {format_mib(pinned)} cannot be unloaded" if pinned else ""
                return f"{model} needs {format_mib(nbytes)}, but {key} is {format_mib(capacity)}{others}"
        return self._update_rejection_reason(model, sum(need.values()))

    def may_fit_later(self, model: str, need: MemoryNeed) -> bool:
        """Return whether a rejected generation fits once models that cannot be unloaded now take less memory.

        This is only for the first generation of a model that loads on demand: an update fails if it does not fit.
        """
        capacities = self.reservations.budgets.capacities
        return (
            not self._find(model).is_pinned
            and not any(
                each.model == model and each.state in (ReservationState.LOADING, ReservationState.LOADED)
                for each in self.reservations
            )
            and all(nbytes <= capacities.get(pool, nbytes) for pool, nbytes in need.items())
        )

    def _update_rejection_reason(self, model: str, nbytes: int) -> str:
        """Return why the tenant's budget can never hold the serving and a new generation of the model together, or "".

        The size of the new generation is `nbytes`.
        """
        parts = [each for each in self.reservations if each.model == model and each.state is ReservationState.LOADED]
        limit = self.reservations.budgets.tenant_limits.get(parts[0].owner) if parts else None
        if limit is None or sum(each.total_bytes for each in parts) + nbytes <= limit:
            return ""
        return (
            f"{model} needs {format_mib(nbytes)} beside the serving version, but max_model_bytes of tenant"
            f" {parts[0].owner} is {format_mib(limit)}"
        )

    def plan(self, now: float) -> list[Grant | Unload]:
        """Return the grants and unloads that are due.

        The table has already recorded the grants. The caller carries out the unloads, and calls `on_release` when each
        one begins.
        """
        self._accrue(now)
        self._next_event_at = _NEVER
        unloads: dict[str, str] = {}
        self._plan_idle_unloads(now, unloads)
        self._settle_excess(now, unloads)
        self._plan_reductions(now, unloads)
        grants: list[Grant | Unload] = []
        promised: dict[str, int] = {}
        loading = self._loading_count
        for waiting in self._waiting_in_turn():
            is_pinned = self._find(waiting.model).is_pinned
            if not is_pinned and loading >= self.reservations.budgets.max_loading:
                continue
            if self.reservations.fits(waiting.need, waiting.owner, promised, ()):
                waiting.advance(ReservationEvent.GRANT)
                loading += not is_pinned
                grants.append(Grant(waiting.label))
                continue
            victims = self._find_victims(waiting, waiting.need, now, promised, unloads)
            if victims is not None:
                unloads.update((each, f"its memory is needed for {waiting.model}") for each in victims)
                # Keep the memory that the unloads free for this generation. Otherwise a smaller generation, whose turn
                # comes later, would take it.
                for pool, nbytes in waiting.need.items():
                    promised[pool] = promised.get(pool, 0) + nbytes
        return [*grants, *(Unload(model, reason) for model, reason in unloads.items())]

    @property
    def next_event_at(self) -> float:
        """The time at which `plan` is due even without an event, in monotonic seconds."""
        return self._next_event_at

    # --- private ------------------------------------------------------------------------------------------------

    @property
    def _loading_count(self) -> int:
        return sum(
            each.state is ReservationState.LOADING and not self._find(each.model).is_pinned
            for each in self.reservations
        )

    def _accrue(self, now: float) -> None:
        """Charge each tenant for the memory that was reserved on its account since the last call."""
        since, self._charged_until = self._charged_until, now
        if since is not None and now > since:
            for each in self.reservations:
                if each.is_reserved:
                    self._charge(each.owner, each.model, (now - since) * each.total_bytes)

    def _plan_idle_unloads(self, now: float, unloads: dict[str, str]) -> None:
        for model, loaded_at in self.reservations.loaded_models().items():
            residence = self._find(model)
            if residence.is_pinned or not residence.idle_unload_s:
                continue
            due_at = max(
                max(residence.last_used_at, loaded_at) + residence.idle_unload_s,
                loaded_at + self.reservations.budgets.min_resident_s,
            )
            if not residence.is_idle:
                due_at = now + residence.idle_unload_s
            if now >= due_at:
                unloads[model] = f"no request for {residence.idle_unload_s:g} s"
            else:
                self._wake_at(due_at)

    def _settle_excess(self, now: float, unloads: dict[str, str]) -> None:
        """Reserve what generations take beyond their reservations, or unload models if too little memory is free."""
        for each in self.reservations:
            if each.excess is None or each.model in unloads:
                continue
            extra = {pool: max(0, nbytes - each.need.get(pool, 0)) for pool, nbytes in each.excess.items()}
            if self.reservations.fits(extra, each.owner, {}, ()):
                each.need, each.excess = dict(each.excess), None
                continue
            victims = self._find_victims(each, extra, now, {}, unloads)
            residence = self._find(each.model)
            if victims is not None:
                unloads.update((victim, f"its memory is needed for {each.model}") for victim in victims)
            elif not residence.is_pinned and residence.is_idle:
                taken, reserved = format_mib(sum(each.excess.values())), format_mib(each.total_bytes)
                unloads[each.model] = f"it takes {taken}, but {reserved} were reserved, and no more can be"

    def _plan_reductions(self, now: float, unloads: dict[str, str]) -> None:
        """Unload models while the reservations exceed the budget of a memory pool, for example after it was lowered."""
        reservations, budgets = self.reservations, self.reservations.budgets
        for pool, capacity in budgets.capacities.items():
            candidates = self._evictable(now, unloads)
            leaving = self._leaving(unloads)
            while reservations.reserved_bytes(pool) - sum(each.need.get(pool, 0) for each in leaving) > capacity:
                usable = {
                    model: parts for model, parts in candidates.items() if any(each.need.get(pool) for each in parts)
                }
                if not usable:
                    break
                model = min(usable, key=lambda each: self._find(each).last_used_at)
                unloads[model] = "the budget was lowered"
                leaving += candidates.pop(model)

    def _leaving(self, unloads: Collection[str]) -> list[Reservation]:
        return [
            each
            for each in self.reservations
            if each.state is ReservationState.RELEASING or (each.is_reserved and each.model in unloads)
        ]

    def _waiting_in_turn(self) -> list[Reservation]:
        """Return the waiting generations in the order in which they get memory.

        Generations of pinned models come first. After them, a generation comes the earlier, the less memory its tenant
        uses in relation to the tenant's weight.
        """
        waiting = [each for each in self.reservations if each.is_waiting]
        if len(waiting) < 2:
            return waiting
        use = {owner: self.reservations.weighted_bytes(owner, 0) for owner in {each.owner for each in waiting}}
        return sorted(waiting, key=lambda each: (not self._find(each.model).is_pinned, use[each.owner]))

    def _find_victims(
        self, wanting: Reservation, need: MemoryNeed, now: float, promised: MemoryNeed, unloads: Collection[str]
    ) -> list[str] | None:
        """Return the models to unload so that `need` fits into the budgets.

        The list is empty if the unloads in progress free enough memory. The result is None if too little memory would
        be free even after unloading all models that may be unloaded now.
        """
        leaving = self._leaving(unloads)
        victims: list[str] = []
        candidates = self._evictable(now, {*unloads, wanting.model})
        while not self.reservations.fits(need, wanting.owner, promised, leaving):
            needs_own = not self.reservations.fits_tenant(need, wanting.owner, leaving)
            usable = [
                (model, parts)
                for model, parts in candidates.items()
                if (
                    parts[0].owner == wanting.owner
                    if needs_own
                    else any(each.need.get(p) for each in parts for p in need)
                )
            ]
            if not usable:
                return None
            change = {
                owner: -sum(each.total_bytes for each in leaving if each.owner == owner)
                for owner in {parts[0].owner for _, parts in usable}
            }
            coming = {wanting.owner: sum(need.values())}
            use = {
                owner: self.reservations.weighted_bytes(owner, freed + coming.get(owner, 0))
                for owner, freed in change.items()
            }
            model = max(usable, key=lambda each: (use[each[1][0].owner], -self._find(each[0]).last_used_at))[0]
            victims.append(model)
            leaving += candidates.pop(model)
        return victims

    def _evictable(self, now: float, excluding: Collection[str]) -> dict[str, list[Reservation]]:
        """Return the models that may be unloaded for another model, each with its reservations."""
        found: dict[str, list[Reservation]] = {}
        for model, loaded_at in self.reservations.loaded_models().items():
            residence = self._find(model)
            if model in excluding or residence.is_pinned:
                continue
            if now < loaded_at + self.reservations.budgets.min_resident_s:
                self._wake_at(loaded_at + self.reservations.budgets.min_resident_s)
            elif residence.is_idle:
                found[model] = [each for each in self.reservations if each.model == model]
        return found

    def _wake_at(self, time: float) -> None:
        self._next_event_at = min(self._next_event_at, time)
