"""Rendezvous of the processes of a world: sockets in the host's directory, one for each card and port."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from pathlib import Path
from typing import Any, Dict, Generator, Optional, Sequence

from ascendsim.hccl.errors import HcclError
from ascendsim.hccl.link import Link
from ascendsim.hccl.ranktable import Device

_RETRY_S = 0.01
_BACKLOG = 128
_MAX_HELLO = 4096


class Rendezvous:
    """A rendezvous that listens from its construction on, like the card's network interface, and connects in `meet`.

    Args:
        directory: directory of the host.
        mine: entry of this process in the table.
        crc: checksum of its table.
        token: token of this process.
    """

    def __init__(self, directory: Path, mine: Device, crc: int, token: str) -> None:
        self._directory = directory
        self._mine = mine
        self._hello = {"rank": mine.rank, "crc": crc, "token": token}
        self._listener = socket.socket(socket.AF_UNIX)
        with _address(directory, mine) as address:
            # The previous owner of the socket has exited, because the driver grants each port to one process.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)  # noqa: PTH108 - the path is relative to a descriptor
            self._listener.bind(address)
        self._listener.listen(_BACKLOG)

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def meet(self, others: Sequence[Device], limit_s: float) -> Dict[int, Link]:
        """Connect to each of the lower ranks, and wait for each of the higher ones."""
        end = time.monotonic() + limit_s
        links: Dict[int, Link] = {}
        for other in sorted(others):
            if other.rank < self._mine.rank:
                links[other.rank] = self._reach(other, end)
        missing = {other.rank for other in others} - set(links)
        while missing:
            accepted = self._accept(end)
            if accepted is None:
                raise _timed_out(sorted(missing))
            links.update(accepted)
            missing -= set(accepted)
        return links

    def _reach(self, other: Device, end: float) -> Link:
        while time.monotonic() < end:
            connection = socket.socket(socket.AF_UNIX)
            try:
                with _address(self._directory, other) as address:
                    connection.connect(address)
                connection.sendall(_encode(self._hello))
                return self._link(connection, end)
            except OSError:
                connection.close()
                time.sleep(_RETRY_S)
            except HcclError:
                connection.close()
                raise
        raise _timed_out([other.rank])

    def _accept(self, end: float) -> Optional[Dict[int, Link]]:
        """Return the next live connection, or None if no process connects in time."""
        while _is_readable(self._listener, end):
            connection = self._listener.accept()[0]
            try:
                hello = _receive(connection, end)
                connection.sendall(_encode(self._hello))
            except OSError:
                connection.close()
                continue
            return {int(hello["rank"]): self._checked(connection, hello)}
        return None

    def _link(self, connection: socket.socket, end: float) -> Link:
        return self._checked(connection, _receive(connection, end))

    def _checked(self, connection: socket.socket, hello: Dict[str, Any]) -> Link:
        if hello["crc"] != self._hello["crc"]:
            text = f"The CRC of the rank table of rank {hello['rank']} is another (transport_heterog.cc:516)"
            raise HcclError("EI0005", f"The arguments for collective communication are inconsistent: {text}")
        return Link(connection, hello["token"])


def _timed_out(ranks: Sequence[int]) -> HcclError:
    return HcclError("EI0006", f"Getting socket times out. Reason: wait socket establish timeout, ranks {list(ranks)}")


@contextlib.contextmanager
def _address(directory: Path, device: Device) -> Generator[str, None, None]:
    """Yield the socket path of a card and port through a descriptor, because test paths are too long for an address."""
    folder = directory / "net"
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        name = "".join(each if each.isalnum() else "-" for each in device.server)
        yield f"/proc/self/fd/{descriptor}/{name[:32]}.{device.device}.{device.port}"
    finally:
        os.close(descriptor)


def _is_readable(sock: socket.socket, end: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(0, end - time.monotonic()) * 1000))


def _encode(hello: Dict[str, Any]) -> bytes:
    return json.dumps(hello).encode() + b"\n"


def _receive(connection: socket.socket, end: float) -> Dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        # Read single bytes, because chunks may follow.
        byte = connection.recv(1) if _is_readable(connection, end) and len(data) < _MAX_HELLO else b""
        if not byte:
            raise ConnectionError("no hello")
        data += byte
    hello: Dict[str, Any] = json.loads(data.decode())
    return hello
