"""Reservations: the memory that each generation takes, and the limits of this memory."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from weightd_daemon.generations.states import Machine

# The pool of the memory of models on the CPU; each card is another pool.
HOST = "host"

# The memory of a generation, in bytes by pool.
MemoryNeed = Mapping[str, int]

_NEVER = float("inf")


class ReservationState(enum.Enum):
    """The state of a generation's reservation."""

    NEW = "new"
    WAITING = "waiting"  # no memory is reserved yet
    LOADING = "loading"  # its processes start
    LOADED = "loaded"  # it serves
    RELEASING = "releasing"  # its processes are exiting
    GONE = "gone"


class ReservationEvent(enum.Enum):
    """An event that changes the state of a reservation."""

    REQUEST = "request"
    RESTORE = "restore"
    GRANT = "grant"
    SERVE = "serve"
    RELEASE = "release"
    END = "end"


RESERVATION_TRANSITIONS: Mapping[tuple[ReservationState, ReservationEvent], ReservationState] = {
    (ReservationState.NEW, ReservationEvent.REQUEST): ReservationState.WAITING,
    (ReservationState.NEW, ReservationEvent.RESTORE): ReservationState.LOADED,
    (ReservationState.WAITING, ReservationEvent.GRANT): ReservationState.LOADING,
    (ReservationState.LOADING, ReservationEvent.SERVE): ReservationState.LOADED,
    (ReservationState.LOADING, ReservationEvent.RELEASE): ReservationState.RELEASING,
    (ReservationState.LOADED, ReservationEvent.RELEASE): ReservationState.RELEASING,
    **{
        (state, ReservationEvent.END): ReservationState.GONE
        for state in ReservationState
        if state not in (ReservationState.NEW, ReservationState.GONE)
    },
}

_RESERVED_STATES = frozenset({ReservationState.LOADING, ReservationState.LOADED, ReservationState.RELEASING})


class Residence(NamedTuple):
    """The facts about a model that decide whether it stays in memory.

    Attributes:
        is_pinned: whether the model is never unloaded for another one, because it loads at the start.
        idle_unload_s: the seconds without requests after which the model is unloaded; 0: never.
        is_idle: whether no accepted request is pending.
        last_used_at: when the last request was accepted, in monotonic seconds.
        owner: the tenant to which its memory is charged; "" for the operators.
    """

    is_pinned: bool = True
    idle_unload_s: float = 0.0
    is_idle: bool = True
    last_used_at: float = 0.0
    owner: str = ""


@dataclass(frozen=True)
class Budgets:
    """The limits of residency.

    Attributes:
        capacities: the bytes of each pool that has a limit.
        tenant_limits: the bytes, over all pools, of each tenant that has a limit.
        weights: the weight of each tenant; 1 if a tenant is missing.
        min_resident_s: the seconds for which a model stays loaded at least.
        max_loading: how many generations may load at the same time, beside the models that load at the start.
    """

    capacities: Mapping[str, int] = field(default_factory=dict[str, int])
    tenant_limits: Mapping[str, int] = field(default_factory=dict[str, int])
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    min_resident_s: float = 0.0
    max_loading: int = 1


class Reservation(Machine[ReservationState, ReservationEvent]):
    """The memory of one generation.

    Attributes:
        label: the label of the generation.
        model: the name of its model.
        need: the memory that it takes or will take.
        owner: the tenant to which the memory is charged.
        excess: the measured memory, while it exceeds `need` and no budget has room for it.
        loaded_at: when the generation began to serve, in monotonic seconds.
    """

    def __init__(self, label: str, model: str, need: MemoryNeed, owner: str) -> None:
        super().__init__(RESERVATION_TRANSITIONS, ReservationState.NEW, f"the memory of {label}", {})
        self.label = label
        self.model = model
        self.need = dict(need)
        self.owner = owner
        self.excess: MemoryNeed | None = None
        self.loaded_at = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether the memory is wanted, but not reserved."""
        return self.state is ReservationState.WAITING

    @property
    def is_reserved(self) -> bool:
        """Whether the memory is reserved."""
        return self.state in _RESERVED_STATES

    @property
    def total_bytes(self) -> int:
        """The bytes in all pools."""
        return sum(self.need.values())


class Reservations:
    """All reservations, in the order of their requests.

    Attributes:
        budgets: the limits.
        by_label: the reservations by the labels of their generations.
    """

    def __init__(self, budgets: Budgets) -> None:
        self.budgets = budgets
        self.by_label: dict[str, Reservation] = {}

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self.by_label.values())

    def get(self, label: str) -> Reservation | None:
        """Return the reservation of a generation; None if it has none."""
        return self.by_label.get(label)

    def reserved_bytes(self, pool: str) -> int:
        """Return the bytes that are reserved in a pool."""
        return sum(each.need.get(pool, 0) for each in self.by_label.values() if each.is_reserved)

    def charged_bytes(self, tenant: str) -> int:
        """Return the bytes that are reserved on the account of a tenant."""
        return sum(each.total_bytes for each in self.by_label.values() if each.is_reserved and each.owner == tenant)

    def model_bytes(self, model: str) -> int:
        """Return the bytes that are reserved for a model, in all pools."""
        return sum(each.total_bytes for each in self.by_label.values() if each.is_reserved and each.model == model)

    @property
    def waiting_count(self) -> int:
        """How many generations wait for memory."""
        return sum(each.is_waiting for each in self.by_label.values())

    def loaded_models(self) -> Mapping[str, float]:
        """Return the models of which every generation is loaded, with the time at which the last one was."""
        loaded: dict[str, float] = {}
        for each in self.by_label.values():
            is_loaded = each.state is ReservationState.LOADED
            loaded[each.model] = max(loaded.get(each.model, 0.0), each.loaded_at if is_loaded else _NEVER)
        return {model: at for model, at in loaded.items() if at != _NEVER}

    def weighted_bytes(self, tenant: str, change: int) -> float:
        """Return the bytes of a tenant for its weight, after a change in bytes."""
        return (self.charged_bytes(tenant) + change) / self.budgets.weights.get(tenant, 1.0)

    def fits(self, need: MemoryNeed, owner: str, promised: MemoryNeed, leaving: Collection[Reservation]) -> bool:
        """Return whether there is room for `need` beside the reservations that are not `leaving`."""
        for pool, nbytes in need.items():
            capacity = self.budgets.capacities.get(pool)
            if nbytes and capacity is not None:
                used = self.reserved_bytes(pool) - sum(each.need.get(pool, 0) for each in leaving)
                if used + promised.get(pool, 0) + nbytes > capacity:
                    return False
        return self.fits_tenant(need, owner, leaving)

    def fits_tenant(self, need: MemoryNeed, owner: str, leaving: Iterable[Reservation]) -> bool:
        """Return whether the budget of a tenant has room for `need`, without the reservations `leaving`."""
        limit, nbytes = self.budgets.tenant_limits.get(owner), sum(need.values())
        if limit is None or not nbytes:
            return True
        left = self.charged_bytes(owner) - sum(each.total_bytes for each in leaving if each.owner == owner)
        return left + nbytes <= limit
