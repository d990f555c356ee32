"""Reservations of memory, one for each generation, and the budgets that limit them."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from weightd_daemon.generations.states import Machine

# The memory pool of all models on the CPU. Each card is a separate pool with the name of the card.
HOST = "host"

# The bytes that a generation needs in each memory pool, by the name of the pool.
MemoryNeed = Mapping[str, int]

_NEVER = float("inf")


class ReservationState(enum.Enum):
    """The state of a generation's reservation."""

    NEW = "new"
    WAITING = "waiting"  # the generation waits; no memory is reserved yet
    LOADING = "loading"  # the memory is reserved, and the processes are starting
    LOADED = "loaded"  # the generation serves
    RELEASING = "releasing"  # the processes are exiting; the memory is still reserved
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
        is_pinned: whether the model is never unloaded for another model, because it loads at the start.
        idle_unload_s: the seconds without requests after which the model is unloaded; 0: never.
        is_idle: whether all accepted requests of the model have ended.
        last_used_at: when the last request was accepted, in monotonic seconds.
        owner: the tenant to which the memory of the model is charged; "" for the operators.
    """

    is_pinned: bool = True
    idle_unload_s: float = 0.0
    is_idle: bool = True
    last_used_at: float = 0.0
    owner: str = ""


@dataclass(frozen=True)
class Budgets:
    """The limits of the memory that models may reserve, and of loads and unloads.

    Attributes:
        capacities: the capacity in bytes of each memory pool that has a limit.
        tenant_limits: the maximum bytes in all pools together, for each tenant that has a limit.
        weights: the configured weight of each tenant; 1 for tenants that are missing here.
        min_resident_s: the minimum seconds for which a model stays loaded before it is unloaded for another one.
        max_loading: the maximum number of generations that may load at the same time; models that load at the start do
            not count.
    """

    capacities: Mapping[str, int] = field(default_factory=dict[str, int])
    tenant_limits: Mapping[str, int] = field(default_factory=dict[str, int])
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    min_resident_s: float = 0.0
    max_loading: int = 1


class Reservation(Machine[ReservationState, ReservationEvent]):
    """The reservation of memory for one generation.

    Attributes:
        label: the label of the generation.
        model: the name of the generation's model.
        need: the bytes that the generation takes or will take, by memory pool.
        owner: the tenant to which the memory is charged; "" for the operators.
        excess: the measured bytes by memory pool, while they exceed `need` and have not been reserved yet; None
            otherwise.
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
        """Whether the generation waits for memory, which is not reserved yet."""
        return self.state is ReservationState.WAITING

    @property
    def is_reserved(self) -> bool:
        """Whether the memory is reserved."""
        return self.state in _RESERVED_STATES

    @property
    def total_bytes(self) -> int:
        """The bytes of the reservation in all memory pools together."""
        return sum(self.need.values())


class Reservations:
    """All reservations, in the order of their requests.

    Attributes:
        budgets: the limits of the reservations.
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
        """Return the bytes that all generations have reserved in a memory pool."""
        return sum(each.need.get(pool, 0) for each in self.by_label.values() if each.is_reserved)

    def charged_bytes(self, tenant: str) -> int:
        """Return the reserved bytes, in all memory pools, that are charged to a tenant."""
        return sum(each.total_bytes for each in self.by_label.values() if each.is_reserved and each.owner == tenant)

    def model_bytes(self, model: str) -> int:
        """Return the bytes that are reserved for a model in all memory pools."""
        return sum(each.total_bytes for each in self.by_label.values() if each.is_reserved and each.model == model)

    @property
    def waiting_count(self) -> int:
        """The number of generations that wait for memory."""
        return sum(each.is_waiting for each in self.by_label.values())

    def loaded_models(self) -> Mapping[str, float]:
        """Return the models whose generations have all loaded.

        The value for each model is the time at which its last generation began to serve, in monotonic seconds.
        """
        loaded: dict[str, float] = {}
        for each in self.by_label.values():
            is_loaded = each.state is ReservationState.LOADED
            loaded[each.model] = max(loaded.get(each.model, 0.0), each.loaded_at if is_loaded else _NEVER)
        return {model: at for model, at in loaded.items() if at != _NEVER}

    def weighted_bytes(self, tenant: str, change: int) -> float:
        """Return the bytes charged to a tenant plus `change` bytes, divided by the weight of the tenant."""
        return (self.charged_bytes(tenant) + change) / self.budgets.weights.get(tenant, 1.0)

    def fits(self, need: MemoryNeed, owner: str, promised: MemoryNeed, leaving: Collection[Reservation]) -> bool:
        """Return whether all budgets have enough free memory for a generation.

        Args:
            need: the bytes that the generation needs, by memory pool.
            owner: the tenant to which the memory would be charged.
            promised: further bytes that are kept free for other generations, by memory pool.
            leaving: reservations that count as released.
        """
        for pool, nbytes in need.items():
            capacity = self.budgets.capacities.get(pool)
            if nbytes and capacity is not None:
                used = self.reserved_bytes(pool) - sum(each.need.get(pool, 0) for each in leaving)
                if used + promised.get(pool, 0) + nbytes > capacity:
                    return False
        return self.fits_tenant(need, owner, leaving)

    def fits_tenant(self, need: MemoryNeed, owner: str, leaving: Iterable[Reservation]) -> bool:
        """Return whether the budget of a tenant has memory for `need`; the reservations `leaving` count as released."""
        limit, nbytes = self.budgets.tenant_limits.get(owner), sum(need.values())
        if limit is None or not nbytes:
            return True
        left = self.charged_bytes(owner) - sum(each.total_bytes for each in leaving if each.owner == owner)
        return left + nbytes <= limit
