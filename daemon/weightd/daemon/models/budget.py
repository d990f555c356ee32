"""What a card has room for: memory and processes, promised to generations before anything of them is started.

The sums are an estimate made from the model's file and from what earlier processes were seen to take; the card has
the last word. They are there to refuse at once what can never fit, with the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from weightd.daemon.engines.ascend import on_card
from weightd.daemon.host.memory import MIB


@dataclass(frozen=True)
class Need:
    """What a generation takes on its device.

    Attributes:
        weights: bytes of one copy.
        copies: how many copies there are.
        users: how many processes answer requests from them, spares too.
        processes: holder, workers and spares, or the ranks.
        process_bytes: what each of them takes beside the weights.
        buffer_bytes: what communication between ranks takes of each card.
        slices: the bytes of what each rank loads, where the weights are cut over several cards.
    """

    weights: int
    copies: int
    users: int
    processes: int
    process_bytes: int
    buffer_bytes: int = 0
    slices: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """The bytes altogether, of one card."""
        return self.copies * on_card(self.weights) + self.processes * self.process_bytes + self.buffer_bytes

    def of_rank(self, rank: int) -> Need:
        """Return what that takes on the card of this rank."""
        return Need(self.slices[rank], 1, 1, 1, self.process_bytes, self.buffer_bytes)


class Room(Protocol):
    """Where a generation may find room: a device, or the cards of all ranks. The methods are those of `Device`."""

    name: str

    @property
    def leaving(self) -> Collection[str]:
        """The labels of those that will not need it for long."""
        raise NotImplementedError

    @property
    def waiting(self) -> Collection[str]:
        """The labels of those that wait."""
        raise NotImplementedError

    def reserve(self, label: str, need: Need) -> str:
        """Promise `need` to a generation; return why that cannot be done, or ""."""
        raise NotImplementedError

    def refusal(self, label: str, need: Need, *, without: Collection[str] = ()) -> str:
        """Return why `need` cannot be promised, though the generations `without` were gone, or ""."""
        raise NotImplementedError

    def restore(self, label: str, need: Need, port: int = 0) -> None:
        """A generation is there, with that port: whether there is room for it is no question."""

    def port(self, label: str) -> int:
        """Return the port that the communication of a generation's ranks has; 0 where nobody was told one."""
        raise NotImplementedError

    def will_leave(self, labels: Collection[str]) -> None:
        """These generations will not need it for long."""

    def wait(self, label: str, tell: Callable[[], object]) -> None:
        """A generation waits for room: `tell` is called each time that something is released."""

    def said_free(self, free: int, rank: int) -> None:
        """The card has said what is free, after a process of that generation has loaded."""

    def learn(self, label: str, process_bytes: int) -> None:
        """A process of a generation was seen to take so much beside the weights."""

    def release(self, label: str) -> None:
        """Take back what a generation was promised."""


@dataclass
class Device:
    """One device, and what has been promised of it.

    Attributes:
        capacity: bytes that weightd may use there; None where that is not known, or not limited.
        max_processes: how many processes may use it; None where any number may.
        said: bytes that the card itself said are there for weightd; None if it has not been asked, or has not said.
        free: bytes that it said are free, last time.
        promised: what each generation was promised, by its label.
        leaving: the labels of those that will not need it for long.
        waiting: whom to tell each time that something is released, by the label of the generation that waits for it.
        ports: on which the communication of ranks listens, by the label of their generation.
    """

    name: str
    capacity: int | None = None
    max_processes: int | None = None
    said: int | None = None
    free: int | None = None
    promised: dict[str, Need] = field(default_factory=dict[str, Need])
    leaving: set[str] = field(default_factory=set[str])
    waiting: dict[str, Callable[[], object]] = field(default_factory=dict[str, Callable[[], object]])
    ports: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def used(self) -> int:
        """Promised bytes."""
        return sum(need.total for need in self.promised.values())

    @property
    def processes(self) -> int:
        """Promised processes."""
        return sum(need.processes for need in self.promised.values())

    def reserve(self, label: str, need: Need) -> str:
        """Promise `need` to a generation; return why that cannot be done, or ""."""
        refusal = self.refusal(label, need)
        if not refusal:
            self.promised[label] = need
            self.waiting.pop(label, None)
        return refusal

    def refusal(self, label: str, need: Need, *, without: Collection[str] = ()) -> str:
        """Return why `need` cannot be promised, though the generations `without` were gone, or ""."""
        others = {each: had for each, had in self.promised.items() if each not in without}
        return self._too_many(label, need, others) or self._too_large(label, need, others)

    def restore(self, label: str, need: Need, port: int = 0) -> None:
        """A generation is there, with that port: whether there is room for it is no question."""
        self.promised[label] = need
        if port:
            self.ports[label] = port

    def port(self, label: str) -> int:
        """Return the port that the communication of a generation's ranks has; 0 where nobody was told one."""
        return self.ports.get(label, 0)

    def will_leave(self, labels: Collection[str]) -> None:
        """These generations will not need it for long."""
        self.leaving |= {*labels}

    def wait(self, label: str, tell: Callable[[], object]) -> None:
        """A generation waits for room: `tell` is called each time that something is released."""
        self.waiting[label] = tell

    def said_free(self, free: int, rank: int) -> None:
        """The card has said what is free, after a process of that generation has loaded; `rank` is for several."""
        self.free = free

    def learn(self, label: str, process_bytes: int) -> None:
        """A process of a generation was seen to take so much beside the weights."""
        need = self.promised.get(label)
        if need is not None and process_bytes > need.process_bytes:
            self.promised[label] = replace(need, process_bytes=process_bytes)

    def release(self, label: str) -> None:
        """Take back what a generation was promised: nothing is left of it. Whoever waits for room is told."""
        self.promised.pop(label, None)
        self.leaving.discard(label)
        self.waiting.pop(label, None)
        self.ports.pop(label, None)
        for tell in list(self.waiting.values()):
            tell()

    def _too_many(self, label: str, need: Need, others: Mapping[str, Need]) -> str:
        used = sum(had.processes for had in others.values())
        if self.max_processes is None or used + need.processes <= self.max_processes:
            return ""
        who = "its rank" if need.buffer_bytes else "holder, workers and spares"
        had = {each: str(had.processes) for each, had in others.items()}
        text = f"{self.name} takes at most {self.max_processes} processes: {label} needs {need.processes} ({who})"
        return f"{text}{_listed(had)}"

    def _too_large(self, label: str, need: Need, others: Mapping[str, Need]) -> str:
        used = sum(had.total for had in others.values())
        if self.capacity is None or used + need.total <= self.capacity:
            return ""
        return (
            f"{self.name} has no room: {label} needs {_mib(need.total)} ({_copies(need)} of "
            f"{_mib(on_card(need.weights))} weights, {_processes(need)}), "
            f"{_mib(max(0, self.capacity - used))} of {_mib(self.capacity)} are free"
            f"{_listed({each: _mib(had.total) for each, had in others.items()})}"
        )


def _listed(had: Mapping[str, str]) -> str:
    return f"; {', '.join(f'{label} has {what}' for label, what in had.items())}" if had else ""


def _copies(need: Need) -> str:
    return "one copy" if need.copies == 1 else f"{need.copies} copies"


def _processes(need: Need) -> str:
    if need.buffer_bytes:
        return f"one process of {_mib(need.process_bytes)}, communication of {_mib(need.buffer_bytes)}"
    return f"{need.processes} processes of {_mib(need.process_bytes)}"


def _mib(size: int) -> str:
    return f"{-(-size // MIB):,} MiB"
