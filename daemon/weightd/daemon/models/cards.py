"""The cards of a group of ranks: each has room for its rank, and the same port for their communication, or none has.

A card has one process with the vendor's communication library on each port. Where a group is to come up beside another
one on the same cards, it needs a port that is free on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from weightd.daemon.models.budget import Device, Need

# A name of more is not for people any more.
_MOST_NAMES = 8


class Cards:
    """The cards of a group, in the order of its ranks; a generation is promised all, or nothing.

    Args:
        devices: the cards, each once.
        ports: that a group may use, the first that is free on all cards; none: the library's own, for one group.
    """

    # Stands for the library's own port, which need not be told.
    LIBRARYS = 0

    def __init__(self, devices: Sequence[Device], ports: Sequence[int] = ()) -> None:
        names = [device.name for device in devices]
        self.name = "+".join(names) if len(names) <= _MOST_NAMES else f"{names[0]}+...+{names[-1]}, {len(names)} cards"
        self._devices = devices
        self._ports = tuple(ports) or (self.LIBRARYS,)

    @property
    def leaving(self) -> Collection[str]:
        """The labels of those that will not need a card for long."""
        return {label for device in self._devices for label in device.leaving}

    @property
    def waiting(self) -> Collection[str]:
        """The labels of those that wait for room."""
        return {label for device in self._devices for label in device.waiting}

    def reserve(self, label: str, need: Need) -> str:
        """Promise every card's share of `need` to a generation, and a port; return why that cannot be done, or ""."""
        refusal = self.refusal(label, need)
        if not refusal:
            self.restore(label, need, port=self._free_ports(())[0])
            for device in self._devices:
                device.waiting.pop(label, None)
        return refusal

    def refusal(self, label: str, need: Need, *, without: Collection[str] = ()) -> str:
        """Return why that cannot be promised, though the generations `without` were gone, or ""."""
        for rank, device in enumerate(self._devices):
            refusal = device.refusal(label, need.of_rank(rank), without=without)
            if refusal:
                return refusal
        return "" if self._free_ports(without) else self._occupied(label, without)

    def restore(self, label: str, need: Need, port: int = LIBRARYS) -> None:
        """A generation is there, with that port: whether there is room for it is no question."""
        for rank, device in enumerate(self._devices):
            device.restore(label, need.of_rank(rank))
            device.ports[label] = port

    def port(self, label: str) -> int:
        """Return the port that a generation has; 0 where that is the library's own."""
        return self._devices[0].port(label)

    def will_leave(self, labels: Collection[str]) -> None:
        """These generations will not need the cards for long."""
        for device in self._devices:
            device.will_leave(labels)

    def wait(self, label: str, tell: Callable[[], object]) -> None:
        """A generation waits for room: `tell` is called each time that something is released on one of the cards."""
        for device in self._devices:
            device.wait(label, tell)

    def said_free(self, free: int, rank: int) -> None:
        """The card of that rank has said what is free."""
        self._devices[rank].said_free(free, rank)

    def learn(self, label: str, process_bytes: int) -> None:
        """A rank was seen to take so much beside its slice: so may the others."""
        for device in self._devices:
            device.learn(label, process_bytes)

    def release(self, label: str) -> None:
        """Take back what a generation was promised: whoever waits is told once all cards have it back."""
        for device in self._devices[:-1]:
            device.promised.pop(label, None)
            device.ports.pop(label, None)
        for device in reversed(self._devices):
            device.release(label)

    def _free_ports(self, without: Collection[str]) -> list[int]:
        used = {port for device in self._devices for had, port in device.ports.items() if had not in without}
        return [port for port in self._ports if port not in used]

    def _occupied(self, label: str, without: Collection[str]) -> str:
        users = [
            f"{had} has {port or 'its own'} on {device.name}"
            for device in self._devices
            for had, port in device.ports.items()
            if had not in without
        ]
        told = ", ".join(str(port) for port in self._ports if port)
        which = f"of device_ports {told} " if told else ""
        return f"no port {which}is free for the communication of {label}: {'; '.join(users)}"
