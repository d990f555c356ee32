"""The memory and the processes of devices, which a generation reserves before its first process starts.

The reserved sizes are estimates from the size of the model's file and the measured memory of earlier processes, so a
load may still fail on the card. But the estimates show which generations can never fit: the daemon rejects them before
it loads anything, and names the sizes in the error.

The ranks of a group communicate through a library of the cards' vendor, which uses one port on each card. Two rank
groups on the same cards need different ports, so each group gets a port that is free on all its cards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from weightd_common.log_text import format_mib, plural
from weightd_daemon.engines.ranktable import card_bytes

# Maximum number of cards that the name of a `CardGroup` lists in full; the name of a larger group has only the first
# and the last card.
_MAX_NAMES = 8


@dataclass(frozen=True)
class ResourceRequest:
    """The memory and the processes that a generation needs on its device.

    Attributes:
        weight_bytes: the bytes of one copy of the weights.
        copy_count: the number of copies of the weights.
        worker_count: the number of processes that answer requests, spares included.
        process_count: the number of all processes: holder, workers and spares, or the ranks.
        process_bytes: the bytes that each process needs besides the weights.
        buffer_bytes: the bytes that the communication between ranks needs on each card.
        slice_bytes: the bytes of each rank's slice; empty if the weights are not divided among several cards.
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
        """The bytes that the generation needs on one card in total."""
        return (
            self.copy_count * card_bytes(self.weight_bytes)
            + self.process_count * self.process_bytes
            + self.buffer_bytes
        )

    def for_rank(self, rank: int) -> ResourceRequest:
        """Return the part of this request that one rank needs on its card."""
        return ResourceRequest(self.slice_bytes[rank], 1, 1, 1, self.process_bytes, self.buffer_bytes)


class Placement(Protocol):
    """A device, or the cards of a rank group, on which generations reserve memory and processes."""

    name: str

    @property
    def leaving(self) -> Collection[str]:
        """The labels of generations that are or will be drained and will then release their resources."""
        raise NotImplementedError

    @property
    def waiting(self) -> Collection[str]:
        """The labels of generations that wait for resources."""
        raise NotImplementedError

    def reserve(self, label: str, request: ResourceRequest) -> str:
        """Reserve the resources of `request` for a generation; return "", or why that is impossible."""
        raise NotImplementedError

    def rejection_reason(self, label: str, request: ResourceRequest, *, excluding: Collection[str] = ()) -> str:
        """Return why the resources of `request` are not available for a generation, or "" if they are.

        The resources of the generations `excluding` count as free.
        """
        raise NotImplementedError

    def restore(self, label: str, request: ResourceRequest, port: int = 0) -> None:
        """Reserve the resources of a running generation and the port of its ranks, even if this exceeds the limits."""

    def port(self, label: str) -> int:
        """Return the port for the communication of a generation's ranks; 0 if none was assigned."""
        raise NotImplementedError

    def mark_leaving(self, labels: Collection[str]) -> None:
        """Record that these generations will be drained and will then release their resources."""

    def wait_for_release(self, label: str, on_release: Callable[[], object]) -> None:
        """Call `on_release` each time that any generation releases resources.

        The calls end when the generation `label` has reserved its resources or has ended.
        """

    def set_free_bytes(self, free_bytes: int, rank: int) -> None:
        """Record the free memory of a rank's card, as a process has reported it after loading."""

    def set_process_bytes(self, label: str, process_bytes: int) -> None:
        """Raise what a generation reserves for each process besides the weights to `process_bytes`, if this is more."""

    def release(self, label: str) -> None:
        """Release the resources of a generation."""


@dataclass
class DeviceBudget:
    """A device with its limits, and the resources that each generation has reserved on it.

    Attributes:
        capacity_bytes: the bytes that weightd may use on the device; None if unknown or unlimited.
        max_processes: the maximum number of processes that may use the device; None if unlimited.
        reported_bytes: the free memory that the card itself reported before its first use; None if unknown.
        free_bytes: the free memory of the card, as last reported; None if never reported.
        reserved: the resources reserved for each generation, by the label of the generation.
        leaving: the labels of generations that are or will be drained and will then release their resources.
        waiting: for each waiting generation, by its label, the function to call at each release of resources.
        ports: the ports on which ranks communicate, by the label of their generation.
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
        """The reserved bytes."""
        return sum(need.total_bytes for need in self.reserved.values())

    @property
    def process_count(self) -> int:
        """The reserved processes."""
        return sum(need.process_count for need in self.reserved.values())

    def reserve(self, label: str, request: ResourceRequest) -> str:
        """Reserve the resources of `request` for a generation; return "", or why that is impossible."""
        reason = self.rejection_reason(label, request)
        if not reason:
            self.reserved[label] = request
            self.waiting.pop(label, None)
        return reason

    def rejection_reason(self, label: str, request: ResourceRequest, *, excluding: Collection[str] = ()) -> str:
        """Return why the resources of `request` are not available for a generation, or "" if they are.

        The resources of the generations `excluding` count as free.
        """
        other_requests = {each: had for each, had in self.reserved.items() if each not in excluding}
        return self._process_limit_reason(label, request, other_requests) or self._memory_limit_reason(
            label, request, other_requests
        )

    def restore(self, label: str, request: ResourceRequest, port: int = 0) -> None:
        """Reserve the resources of a running generation and the port of its ranks, even if this exceeds the limits."""
        self.reserved[label] = request
        if port:
            self.ports[label] = port

    def port(self, label: str) -> int:
        """Return the port for the communication of a generation's ranks; 0 if none was assigned."""
        return self.ports.get(label, 0)

    def mark_leaving(self, labels: Collection[str]) -> None:
        """Record that these generations will be drained and will then release their resources."""
        self.leaving |= {*labels}

    def wait_for_release(self, label: str, on_release: Callable[[], object]) -> None:
        """Call `on_release` each time that any generation releases resources.

        The calls end when the generation `label` has reserved its resources or has ended.
        """
        self.waiting[label] = on_release

    def set_free_bytes(self, free_bytes: int, rank: int) -> None:
        """Record the free memory of the card, as a process has reported it after loading; `rank` is ignored."""
        self.free_bytes = free_bytes

    def set_process_bytes(self, label: str, process_bytes: int) -> None:
        """Raise what a generation reserves for each process besides the weights to `process_bytes`, if this is more."""
        request = self.reserved.get(label)
        if request is not None and process_bytes > request.process_bytes:
            self.reserved[label] = replace(request, process_bytes=process_bytes)

    def release(self, label: str) -> None:
        """Release all resources of a generation that has ended, and notify the generations that wait for resources."""
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
            f"{self.name} takes at most {plural(self.max_processes, 'process')}: {label} needs {request.process_count}"
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
            f"{self.name} does not have enough memory: {label} needs {format_mib(request.total_bytes)} "
            f"({_format_copies(request)} of "
            f"{format_mib(card_bytes(request.weight_bytes))} weights, {_format_processes(request)}), "
            f"{format_mib(max(0, self.capacity_bytes - used))} of {format_mib(self.capacity_bytes)} are free"
            f"{_format_reservations({each: format_mib(had.total_bytes) for each, had in other_requests.items()})}"
        )


class CardGroup:
    """The cards of a rank group, in the order of its ranks. A generation reserves all of these cards or none.

    Args:
        devices: the cards, each once.
        ports: the ports that rank groups may use for communication; a group gets the first one that is free on all its
            cards. If empty, the library uses its default port, and a card can have only one rank group at a time.
    """

    # The value of `port` with which the communication library uses its default port.
    LIBRARY_PORT = 0

    def __init__(self, devices: Sequence[DeviceBudget], ports: Sequence[int] = ()) -> None:
        names = [device.name for device in devices]
        self.name = "+".join(names) if len(names) <= _MAX_NAMES else f"{names[0]}+...+{names[-1]}, {len(names)} cards"
        self._devices = devices
        self._ports = tuple(ports) or (self.LIBRARY_PORT,)

    @property
    def leaving(self) -> Collection[str]:
        """The labels of generations that are or will be drained and will then release their resources on a card."""
        return {label for device in self._devices for label in device.leaving}

    @property
    def waiting(self) -> Collection[str]:
        """The labels of generations that wait for resources."""
        return {label for device in self._devices for label in device.waiting}

    def reserve(self, label: str, request: ResourceRequest) -> str:
        """Reserve a port and each rank's resources on its card; return "", or why that is impossible."""
        reason = self.rejection_reason(label, request)
        if not reason:
            self.restore(label, request, port=self._free_ports(())[0])
            for device in self._devices:
                device.waiting.pop(label, None)
        return reason

    def rejection_reason(self, label: str, request: ResourceRequest, *, excluding: Collection[str] = ()) -> str:
        """Return why the resources of `request` are not available for a generation, or "" if they are.

        The resources of the generations `excluding` count as free.
        """
        for rank, device in enumerate(self._devices):
            refusal = device.rejection_reason(label, request.for_rank(rank), excluding=excluding)
            if refusal:
                return refusal
        return "" if self._free_ports(excluding) else self._port_conflict(label, excluding)

    def restore(self, label: str, request: ResourceRequest, port: int = LIBRARY_PORT) -> None:
        """Reserve the resources of a running generation and the port of its ranks, even if this exceeds the limits."""
        for rank, device in enumerate(self._devices):
            device.restore(label, request.for_rank(rank))
            device.ports[label] = port

    def port(self, label: str) -> int:
        """Return the port on which the ranks of a generation communicate; 0 for the library's default port."""
        return self._devices[0].port(label)

    def mark_leaving(self, labels: Collection[str]) -> None:
        """Record that these generations will be drained and will then release their resources."""
        for device in self._devices:
            device.mark_leaving(labels)

    def wait_for_release(self, label: str, on_release: Callable[[], object]) -> None:
        """Call `on_release` each time that any generation releases resources of one of the cards.

        The calls end when the generation `label` has reserved its resources or has ended.
        """
        for device in self._devices:
            device.wait_for_release(label, on_release)

    def set_free_bytes(self, free_bytes: int, rank: int) -> None:
        """Record the free memory of a rank's card, as a process has reported it after loading."""
        self._devices[rank].set_free_bytes(free_bytes, rank)

    def set_process_bytes(self, label: str, process_bytes: int) -> None:
        """Raise what a generation reserves for each rank besides its slice to `process_bytes`, if this is more."""
        for device in self._devices:
            device.set_process_bytes(label, process_bytes)

    def release(self, label: str) -> None:
        """Release the resources of a generation on all cards, then notify the generations that wait for resources."""
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
            f"one process of {format_mib(request.process_bytes)}, communication of {format_mib(request.buffer_bytes)}"
        )
    return f"{plural(request.process_count, 'process')} of {format_mib(request.process_bytes)}"
