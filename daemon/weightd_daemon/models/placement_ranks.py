"""The cards of a group of ranks: each has room for its rank, and the same port for their communication, or none has.

A card has one process with the vendor's communication library on each port. Where a group is to come up beside another
one on the same cards, it needs a port that is free on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from weightd_daemon.models.placement import DeviceBudget, ResourceRequest

# A name of more is not for people any more.
_MAX_NAMES = 8


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
