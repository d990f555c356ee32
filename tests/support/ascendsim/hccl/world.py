"""Communicators of one process.

Every process of a world sends its numbers to the others and adds the numbers received from each, in the order of the
ranks. Messages identify neither the request nor the batch (hccl HCCL_DFS_CONFIG.md: graph mode is not checked). The
processes wait for a crashed or stuck one until the execution timeout; heartbeats only write to the log.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from pathlib import Path
from typing import Callable, Collection, Dict, Iterable, List, Mapping, Sequence, Set

import numpy as np

from ascendsim import glog, process
from ascendsim.hccl import settings as hccl_settings
from ascendsim.hccl.errors import HcclError
from ascendsim.hccl.link import Link
from ascendsim.hccl.ranktable import RankTable
from ascendsim.hccl.rendezvous import Rendezvous
from ascendsim.hccl.settings import Settings
from ascendsim.modelfile import Floats
from ascendsim.network import WORLD, Collective

_LOST_S = 30
_HEARTBEAT_S = 1
_OUT_OF_BOUNDS = np.float32(1e36)
_SOURCE_FILE = "extendrt/delegate/graph_executor/ge/ge_graph_executor.cc:1508"


class StreamSyncTimeout(Exception):
    """Error: `stream_sync_timeout` has passed, the model is aborted, and its run loop has ended."""


class World:
    """The HCCL state of a process, created once.

    Args:
        directory: directory of the host.
        token: token of this process.
        table: rank table of this process.
        rank: rank of this process.
        settings: the timeouts.
        second: returns the duration of one of their seconds.
    """

    def __init__(
        self,
        directory: Path,
        token: str,
        table: RankTable,
        rank: int,
        settings: Settings,
        second: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._table = table
        self._rank = rank
        self._settings = settings
        self._second = second
        self._rendezvous = Rendezvous(directory, table.devices[rank], table.crc, token)
        self._groups: Dict[str, List[int]] = {WORLD: list(range(len(table.devices)))}
        self._links: Dict[int, Link] = {}
        self._failed = ""
        self._received: Dict[int, Floats] = {}
        self._closed = threading.Event()

    def close(self) -> None:
        """Disconnect without notifying the other ranks."""
        self._closed.set()
        self._rendezvous.close()
        for link in self._links.values():
            link.close()

    def create_group(self, name: str, ranks: Sequence[int]) -> None:
        """HcomCreateGroup: create a group locally. A group without this rank is no error (a guess)."""
        if self._rank in ranks:
            self._groups[name] = sorted(ranks)

    def size(self, group: str) -> int:
        """Return the number of ranks in a group, or 0 if this process is not in that group."""
        return len(self._groups.get(group, ()))

    def link(self, groups: Iterable[str]) -> None:
        """Connect to all ranks of these groups. After a failure, every further attempt fails."""
        if self._failed:
            raise HcclError("EI0006", f"the communicator was not set up: {self._failed}")
        wanted = {rank for group in groups for rank in self._groups[group]} - {self._rank} - set(self._links)
        limit_s = (self._settings.connect_s + hccl_settings.LINK_MORE_S) * self._second()
        try:
            links = self._rendezvous.meet([self._table.devices[rank] for rank in wanted], limit_s)
        except HcclError as error:
            self._failed = str(error)
            raise
        self._links.update(links)
        if links:
            threading.Thread(target=self._watch, args=(dict(links),), daemon=True).start()

    def run(self, collective: Collective, limit_s: float, sent: Callable[[], None]) -> Floats:
        """Take part in an operation; `sent` is called between the sending of this rank's part and the taking."""
        others = [rank for rank in self._groups[collective.group] if rank != self._rank]
        takes = {
            "all_reduce": others,
            "send": [],
            "receive": [collective.peer],
            "broadcast": [] if collective.peer == self._rank else [collective.peer],
        }[collective.operation]
        to = {
            "all_reduce": others,
            "send": [collective.peer],
            "receive": [],
            "broadcast": others if collective.peer == self._rank else [],
        }[collective.operation]
        data = collective.data
        arrived = self._exchange(collective.group, {rank: data.tobytes() for rank in to}, takes, limit_s, sent)
        parts = {rank: self._laid(rank, chunk, data.size).reshape(data.shape) for rank, chunk in arrived.items()}
        if collective.operation == "all_reduce":
            return add([data if rank == self._rank else parts[rank] for rank in self._groups[collective.group]])
        return parts[collective.peer] if takes else data

    def _exchange(
        self,
        group: str,
        sends: Mapping[int, bytes],
        takes: Collection[int],
        limit_s: float,
        sent: Callable[[], None],
    ) -> Dict[int, bytes]:
        exec_s = self._settings.exec_s * self._second() or float("inf")
        end = time.monotonic() + min(exec_s, limit_s)
        for rank, chunk in sends.items():
            self._links[rank].put(group, chunk)
        self._wait(lambda: not any(link.unsent for link in self._links.values()), end, sends)
        sent()
        self._wait(lambda: all(self._links[rank].has(group) for rank in takes), end, takes, is_sync=limit_s < exec_s)
        return {rank: self._links[rank].take(group) for rank in takes}

    def _wait(self, done: Callable[[], bool], end: float, ranks: Collection[int], *, is_sync: bool = False) -> None:
        begin, has_warned = time.monotonic(), False
        while True:
            for link in self._links.values():
                link.flush()
            if done():
                return
            now = time.monotonic()
            if now >= end:
                self._raise_late(ranks, is_sync=is_sync)
            if not has_warned and now - begin > (end - begin) / 2:
                has_warned = True
                _say(f"heartbeat: ranks {sorted(ranks)} may be stuck")
            self._poll(min(end - now, max((end - begin) / 2, 0.01)))

    def _poll(self, seconds: float) -> None:
        poll = select.poll()
        links: Dict[int, Link] = {}
        for link in self._links.values():
            # A closed link is always readable, but has no data.
            if link.is_open:
                poll.register(link, select.POLLIN | (select.POLLOUT if link.unsent else 0))
                links[link.fileno()] = link
        for descriptor, _ in poll.poll(min(seconds * 1000 + 1, 1e6)):
            links[descriptor].read()

    def _raise_late(self, ranks: Collection[int], *, is_sync: bool) -> None:
        if is_sync:
            raise StreamSyncTimeout
        text = f"Reason: The Notify register has not received the Notify record from remote ranks {sorted(ranks)}"
        raise HcclError("EI0002", f"The wait execution of the Notify register times out. {text}")

    def _laid(self, rank: int, chunk: bytes, size: int) -> Floats:
        """Return the buffer of a rank with the chunk at its start; the rest keeps its previous content."""
        numbers: Floats = np.frombuffer(chunk, np.float32)
        buffer = self._received.get(rank, np.zeros(0, np.float32))
        capacity = max(size, numbers.size)
        if buffer.size < capacity:
            larger = np.full(capacity, _OUT_OF_BOUNDS, np.float32)
            larger[: buffer.size] = buffer
            buffer = self._received[rank] = larger
        buffer[: numbers.size] = numbers
        return buffer[:size].copy()

    def _watch(self, links: Mapping[int, Link]) -> None:
        """Log lost ranks and take no action, like the heartbeat (hcomm heartbeat.h:37)."""
        lost: Set[int] = set()
        since: Dict[int, float] = {}
        while len(lost) < len(links) and not self._closed.wait(_HEARTBEAT_S * self._second()):
            for rank, link in links.items():
                with contextlib.suppress(OSError):
                    if rank not in lost and not process.is_alive(self._directory, link.token):
                        began = since.setdefault(rank, time.monotonic())
                        if time.monotonic() - began >= _LOST_S * self._second():
                            lost.add(rank)
                            _say(f"heartbeat: rank {rank} is LOST")


def add(parts: Sequence[Floats]) -> Floats:
    """Return the sum in the order of the ranks, which has the same bits on each rank."""
    total = parts[0]
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total = total + part
    return total


def _say(text: str) -> None:
    glog.warning(_SOURCE_FILE, "HcclHeartbeat", text)
