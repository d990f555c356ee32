"""What cards have room for: memory and processes, promised to generations before anything of them is started.

The sums are an estimate made from the model's file and from what earlier processes were seen to take; the card has
the last word. They are there to refuse at once what can never fit, with the figures.

A card has one process with the vendor's communication library on each port. Where a group of ranks is to come up beside
another one on the same cards, it needs a port that is free on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from weightd_daemon.engines.ranktable import card_bytes
from weightd_daemon.platform.memory import MIB

# A name of more is not for people any more.
_MAX_NAMES = 8


@dataclass(frozen=True)
class ResourceRequest:
    """What a generation takes on its device.

    Attributes:
        weight_bytes: bytes of one copy.
        copy_count: how many copies there are.
        worker_count: how many processes answer requests from them, spares too.
        process_count: holder, workers and spares, or the ranks.
        process_bytes: what each of them takes beside the weights.
        buffer_bytes: what communication between ranks takes of each card.
        slice_bytes: the bytes of what each rank loads, where the weights are cut over several cards.
    """

    weight_bytes: int
    copy_count: int
    worker_count: int
    process_count: int
    process_bytes: int
    buffer_bytes: int = 0
    slice_bytes: tuple[int, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The bytes altogether, of one card."""
        return (
            self.copy_count * card_bytes(self.weight_bytes)
            + self.process_count * self.process_bytes
            + self.buffer_bytes
        )

    def for_rank(self, rank: int) -> ResourceRequest:
        """Return what that takes on the card of this rank."""
        return ResourceRequest(self.slice_bytes[rank], 1, 1, 1, self.process_bytes, self.buffer_bytes)


class Placement(Protocol):
    """Where a generation may find room: a device, or the cards of all ranks.

    The methods are those of `DeviceBudget`.
    """

    name: str

    @property
    def leaving(self) -> Collection[str]:
        """The labels of those that will not need it for long."""
        raise NotImplementedError

    @property
    def waiting(self) -> Collection[str]:
        """The labels of those that wait."""
        raise NotImplementedError

    def reserve(self, label: str, request: ResourceRequest) -> str:
        """Promise `request` to a generation; return why that cannot be done, or ""."""
        raise NotImplementedError

    def rejection_reason(self, label: str, request: ResourceRequest, *, excluding: Collection[str] = ()) -> str:
        """Return why `request` cannot be promised, though the generations `excluding` were gone, or ""."""
        raise NotImplementedError

    def restore(self, label: str, request: ResourceRequest, port: int = 0) -> None:
        """A generation is there, with that port: whether there is room for it is no question."""

    def port(self, label: str) -> int:
        """Return the port that the communication of a generation's ranks has; 0 where nobody was told one."""
        raise NotImplementedError

    def mark_leaving(self, labels: Collection[str]) -> None:
        """These generations will not need it for long."""

    def wait_for_release(self, label: str, on_release: Callable[[], object]) -> None:
        """A generation waits for room: `on_release` is called each time that something is released."""

    def set_free_bytes(self, free_bytes: int, rank: int) -> None:
        """The card has said what is free, after a process of that generation has loaded."""

    def set_process_bytes(self, label: str, process_bytes: int) -> None:
        """A process of a generation was seen to take so much beside the weights."""

    def release(self, label: str) -> None:
        """Take back what a generation was promised."""


@dataclass
class DeviceBudget:
    """One device, and what has been promised of it.

    Attributes:
        capacity_bytes: bytes that weightd may use there; None where that is not known, or not limited.
        max_processes: how many processes may use it; None where any number may.
        reported_bytes: bytes that the card itself said are there for weightd; None if it has not been asked, or has not
            said.
        free_bytes: bytes that it said are free, last time.
        reserved: what each generation was promised, by its label.
        leaving: the labels of those that will not need it for long.
        waiting: whom to tell each time that something is released, by the label of the generation that waits for it.
        ports: on which the communication of ranks listens, by the label of their generation.
    """

    name: str
    capacity_bytes: int | None = None
    max_processes: int | None = None
    reported_bytes: int | None = None
    free_bytes: int | None = None
    reserved: dict[str, ResourceRequest] = field(default_factory=dict[str, ResourceRequest])
    leaving: set[str] = field(default_factory=set[str])
    waiting: dict[str, Callable[[], object]] = field(default_factory=dict[str, Callable[[], object]])
    ports: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def reserved_bytes(self) -> int:
        """Promised bytes."""
        return sum(need.total_bytes for need in self.reserved.values())

    @property
    def process_count(self) -> int:
        """Promised processes."""
        return sum(need.process_count for need in self.reserved.values())

    def reserve(self, label: str, request: ResourceRequest) -> str:
        """Promise `request` to a generation; return why that cannot be done, or ""."""
        reason = self.rejection_reason(label, request)
        if not reason:
            self.reserved[label] = request
            self.waiting.pop(label, None)
        return reason

    def rejection_reason(self, label: str, request: ResourceRequest, *, excluding: Collection[str] = ()) -> str:
        """Return why `request` cannot be promised, though the generations `excluding` were gone, or ""."""
        other_requests = {each: had for each, had in self.reserved.items() if each not in excluding}
        return self._process_limit_reason(label, request, other_requests) or self._memory_limit_reason(
            label, request, other_requests
        )

    def restore(self, label: str, request: ResourceRequest, port: int = 0) -> None:
        """A generation is there, with that port: whether there is room for it is no question."""
        self.reserved[label] = request
        if port:
            self.ports[label] = port

    def port(self, label: str) -> int:
        """Return the port that the communication of a generation's ranks has; 0 where nobody was told one."""
        return self.ports.get(label, 0)

    def mark_leaving(self, labels: Collection[str]) -> None:
        """These generations will not need it for long."""
        self.leaving |= {*labels}

    def wait_for_release(self, label: str, on_release: Callable[[], object]) -> None:
        """A generation waits for room: `on_release` is called each time that something is released."""
        self.waiting[label] = on_release

    def set_free_bytes(self, free_bytes: int, rank: int) -> None:
        """The card has said what is free, after a process of that generation has loaded; `rank` is for several."""
        self.free_bytes = free_bytes

    def set_process_bytes(self, label: str, process_bytes: int) -> None:
        """A process of a generation was seen to take so much beside the weights."""
        request = self.reserved.get(label)
        if request is not None and process_bytes > request.process_bytes:
            self.reserved[label] = replace(request, process_bytes=process_bytes)

    def release(self, label: str) -> None:
        """Take back what a generation was promised: nothing is left of it. Whoever waits for room is told."""
        self.reserved.pop(label, None)
        self.leaving.discard(label)
        self.waiting.pop(label, None)
        self.ports.pop(label, None)
        for callback in list(self.waiting.values()):
            callback()

    def _process_limit_reason(
        self, label: str, request: ResourceRequest, other_requests: Mapping[str, ResourceRequest]
    ) -> str:
        used = sum(had.process_count for had in other_requests.values())
        if self.max_processes is None or used + request.process_count <= self.max_processes:
            return ""
        process_kinds = "its rank" if request.buffer_bytes else "holder, workers and spares"
        reserved_by_label = {each: str(had.process_count) for each, had in other_requests.items()}
        text = (
            f"{self.name} takes at most {self.max_processes} processes: {label} needs {request.process_count}"
            f" ({process_kinds})"
        )
        return f"{text}{_format_reservations(reserved_by_label)}"

    def _memory_limit_reason(
        self, label: str, request: ResourceRequest, other_requests: Mapping[str, ResourceRequest]
    ) -> str:
        used = sum(had.total_bytes for had in other_requests.values())
        if self.capacity_bytes is None or used + request.total_bytes <= self.capacity_bytes:
            return ""
        return (
            f"{self.name} has not enough memory: {label} needs {_format_mib(request.total_bytes)} "
            f"({_format_copies(request)} of "
            f"{_format_mib(card_bytes(request.weight_bytes))} weights, {_format_processes(request)}), "
            f"{_format_mib(max(0, self.capacity_bytes - used))} of {_format_mib(self.capacity_bytes)} are free"
            f"{_format_reservations({each: _format_mib(had.total_bytes) for each, had in other_requests.items()})}"
        )


class CardGroup:
    """The cards of a group, in the order of its ranks; a generation is promised all, or nothing.

    Args:
        devices: the cards, each once.
        ports: that a group may use, the first that is free on all cards; none: the library's own, for one group.
    """

    # Stands for the library's own port, which need not be told.
    LIBRARY_PORT = 0

    def __init__(self, devices: Sequence[DeviceBudget], ports: Sequence[int] = ()) -> None:
        names = [device.name for device in devices]
        self.name = "+".join(names) if len(names) <= _MAX_NAMES else f"{names[0]}+...+{names[-1]}, {len(names)} cards"
        self._devices = devices
        self._ports = tuple(ports) or (self.LIBRARY_PORT,)

    @property
    def leaving(self) -> Collection[str]:
        """The labels of those that will not need a card for long."""
        return {label for device in self._devices for label in device.leaving}

    @property
    def waiting(self) -> Collection[str]:
        """The labels of those that wait for room."""
        return {label for device in self._devices for label in device.waiting}

    def reserve(self, label: str, request: ResourceRequest) -> str:
        """Promise every card's share of `request` to a generation, and a port.

        Return why that cannot be done, or "".
        """
        reason = self.rejection_reason(label, request)
        if not reason:
            self.restore(label, request, port=self._free_ports(())[0])
            for device in self._devices:
                device.waiting.pop(label, None)
        return reason

    def rejection_reason(self, label: str, request: ResourceRequest, *, excluding: Collection[str] = ()) -> str:
        """Return why that cannot be promised, though the generations `excluding` were gone, or ""."""
        for rank, device in enumerate(self._devices):
            refusal = device.rejection_reason(label, request.for_rank(rank), excluding=excluding)
            if refusal:
                return refusal
        return "" if self._free_ports(excluding) else self._port_conflict(label, excluding)

    def restore(self, label: str, request: ResourceRequest, port: int = LIBRARY_PORT) -> None:
        """A generation is there, with that port: whether there is room for it is no question."""
        for rank, device in enumerate(self._devices):
            device.restore(label, request.for_rank(rank))
            device.ports[label] = port

    def port(self, label: str) -> int:
        """Return the port that a generation has; 0 where that is the library's own."""
        return self._devices[0].port(label)

    def mark_leaving(self, labels: Collection[str]) -> None:
        """These generations will not need the cards for long."""
        for device in self._devices:
            device.mark_leaving(labels)

    def wait_for_release(self, label: str, on_release: Callable[[], object]) -> None:
        """A generation waits for room.

        `on_release` is called each time that something is released on one of the cards.
        """
        for device in self._devices:
            device.wait_for_release(label, on_release)

    def set_free_bytes(self, free_bytes: int, rank: int) -> None:
        """The card of that rank has said what is free."""
        self._devices[rank].set_free_bytes(free_bytes, rank)

    def set_process_bytes(self, label: str, process_bytes: int) -> None:
        """A rank was seen to take so much beside its slice: so may the others."""
        for device in self._devices:
            device.set_process_bytes(label, process_bytes)

    def release(self, label: str) -> None:
        """Take back what a generation was promised: whoever waits is told once all cards have it back."""
        for device in self._devices[:-1]:
            device.reserved.pop(label, None)
            device.ports.pop(label, None)
        for device in reversed(self._devices):
            device.release(label)

    def _free_ports(self, excluding: Collection[str]) -> list[int]:
        used = {port for device in self._devices for had, port in device.ports.items() if had not in excluding}
        return [port for port in self._ports if port not in used]

    def _port_conflict(self, label: str, excluding: Collection[str]) -> str:
        port_owners = [
            f"{had} has {port or 'its own'} on {device.name}"
            for device in self._devices
            for had, port in device.ports.items()
            if had not in excluding
        ]
        port_list = ", ".join(str(port) for port in self._ports if port)
        which = f"of device_ports {port_list} " if port_list else ""
        return f"no port {which}is free for the communication of {label}: {'; '.join(port_owners)}"


def _format_reservations(reservations: Mapping[str, str]) -> str:
    return f"; {', '.join(f'{label} has {what}' for label, what in reservations.items())}" if reservations else ""


def _format_copies(request: ResourceRequest) -> str:
    return "one copy" if request.copy_count == 1 else f"{request.copy_count} copies"


def _format_processes(request: ResourceRequest) -> str:
    if request.buffer_bytes:
        return (
            f"one process of {_format_mib(request.process_bytes)}, communication of {_format_mib(request.buffer_bytes)}"
        )
    return f"{request.process_count} processes of {_format_mib(request.process_bytes)}"


def _format_mib(size: int) -> str:
    return f"{-(-size // MIB):,} MiB"
