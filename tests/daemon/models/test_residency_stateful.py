"""Stateful test of residency: random loads, failures, measurements and evictions never exceed a budget."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from weightd_daemon.models.residency.reservations import HOST, Budgets, ReservationState, Residence
from weightd_daemon.models.residency.table import Grant, ResidencyTable, Unload

CARD = "ascend:0"
POOLS = (HOST, CARD)
TENANTS = ("", "a", "b", "c")
MODELS = 6


class ResidencyMachine(RuleBasedStateMachine):
    """Models of several tenants within random budgets; a generation is one model's part of the reservations."""

    @initialize(
        host=st.none() | st.integers(4, 20),
        card=st.none() | st.integers(4, 20),
        limit=st.none() | st.integers(2, 12),
        weights=st.dictionaries(st.sampled_from(TENANTS), st.sampled_from([0.5, 1.0, 4.0])),
        min_resident_s=st.sampled_from([0.0, 3.0]),
        max_loading=st.integers(1, 3),
        pinned=st.sets(st.integers(0, MODELS - 1), max_size=2),
        idle_unload_s=st.sampled_from([0.0, 5.0]),
    )
    def start(
        self,
        *,
        host: int | None,
        card: int | None,
        limit: int | None,
        weights: dict[str, float],
        min_resident_s: float,
        max_loading: int,
        pinned: set[int],
        idle_unload_s: float,
    ) -> None:
        self.now = 0.0
        self.models = {
            f"m{number}": Residence(number in pinned, idle_unload_s, is_idle=True) for number in range(MODELS)
        }
        self.charged: dict[str, float] = {}
        capacities = {pool: each for pool, each in ((HOST, host), (CARD, card)) if each is not None}
        limits = {} if limit is None else {"a": limit}
        self.budgets = Budgets(capacities, limits, weights, min_resident_s, max_loading)
        self.table = ResidencyTable(self.budgets, self.models.__getitem__, self.charge)

    def charge(self, tenant: str, model: str, byte_seconds: float) -> None:
        self.charged[tenant] = self.charged.get(tenant, 0.0) + byte_seconds

    @rule(
        number=st.integers(0, MODELS - 1),
        owner=st.sampled_from(TENANTS),
        nbytes=st.integers(2, 8),
        part=st.sampled_from([1, 1, 1, 2]),
    )
    def request(self, *, number: int, owner: str, nbytes: int, part: int) -> None:
        """Request memory for a generation; part 2 is one beside the first, as in an update."""
        model = f"m{number}"
        if part == 2 and not self.in_state(ReservationState.LOADED, f"{model}.1"):
            return
        if not any(each.model == model for each in self.table.reservations):
            self.models[model] = self.models[model]._replace(owner=owner)
        need = {POOLS[number % 2]: nbytes}
        if not self.table.rejection_reason(model, need):
            self.table.request(f"{model}.{part}", model, need)
        self.plan()

    @rule(draw=st.integers(0, 100))
    def try_grant(self, draw: int) -> None:
        for label in self.one_in(draw, ReservationState.WAITING):
            self.table.try_grant(label, self.now)

    @rule()
    def serve(self) -> None:
        for each in list(self.table.reservations):
            self.table.on_loaded(each.label, self.now)
        self.plan()

    @rule(draw=st.integers(0, 100))
    def fail(self, draw: int) -> None:
        for label in self.one_in(draw, ReservationState.LOADING, ReservationState.LOADED):
            self.table.on_release(label)

    @rule()
    def end(self) -> None:
        for each in list(self.table.reservations):
            if each.state is ReservationState.RELEASING:
                self.table.on_ended(each.label, self.now)
        self.plan()

    @rule(draw=st.integers(0, 100), nbytes=st.integers(1, 12))
    def measure(self, draw: int, nbytes: int) -> None:
        for label in self.one_in(draw, ReservationState.LOADED):
            reservation = self.table.reservations.by_label[label]
            self.table.on_measured(label, dict.fromkeys(reservation.need, nbytes), self.now)
        self.plan()

    @rule(number=st.integers(0, MODELS - 1), idle=st.booleans())
    def use(self, *, number: int, idle: bool) -> None:
        self.models[f"m{number}"] = self.models[f"m{number}"]._replace(is_idle=idle, last_used_at=self.now)

    def in_state(self, state: ReservationState, label: str) -> bool:
        there = self.table.reservations.get(label)
        return there is not None and there.state is state

    def one_in(self, draw: int, *states: ReservationState) -> list[str]:
        """Return one of the generations in these states, if there is any."""
        found = [each.label for each in self.table.reservations if each.state in states]
        return [found[draw % len(found)]] if found else []

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.plan()

    def plan(self) -> None:
        reservations = self.table.reservations
        before = {each.label: each.state for each in reservations}
        for action in self.table.plan(self.now):
            if isinstance(action, Grant):
                assert before[action.label] is ReservationState.WAITING
                continue
            assert isinstance(action, Unload)
            residence = self.models[action.model]
            parts = [each for each in reservations if each.model == action.model]
            assert not residence.is_pinned, "a model that loads at the start was unloaded"
            assert residence.is_idle, "a model with requests was unloaded"
            excess = any(each.excess is not None for each in parts)
            young = any(self.now < each.loaded_at + self.budgets.min_resident_s for each in parts)
            assert excess or not young, "a model was unloaded too early"
            for each in parts:
                self.table.on_release(each.label)
        self.check_progress()

    def check_progress(self) -> None:
        """Check that no generation waits for memory that is free, unless an unload or another load is in progress."""
        reservations = list(self.table.reservations)
        if any(each.state in (ReservationState.RELEASING, ReservationState.LOADING) for each in reservations):
            return
        for each in reservations:
            if each.is_waiting:
                assert not self.table.reservations.fits(each.need, each.owner, {}, ()), f"{each.label} should load"

    @invariant()
    def budgets_hold(self) -> None:
        if not hasattr(self, "table"):
            return
        reservations = self.table.reservations
        for pool, capacity in self.budgets.capacities.items():
            assert reservations.reserved_bytes(pool) <= capacity
        for tenant, limit in self.budgets.tenant_limits.items():
            assert reservations.charged_bytes(tenant) <= limit

    @invariant()
    def loads_are_limited(self) -> None:
        if hasattr(self, "table"):
            loading = [
                each
                for each in self.table.reservations
                if each.state is ReservationState.LOADING and not self.models[each.model].is_pinned
            ]
            assert len(loading) <= self.budgets.max_loading


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
