"""The memory of the cards: what is allocated, by whom, for whom. All of it lies in one file, changed under a lock."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any, Dict, Generator, List, NamedTuple, Tuple

from ascendsim import process
from ascendsim.switches import Switches, read

MIB = 1024 * 1024
GRANULE = 2 * MIB
"""Device memory comes in huge pages."""

WEIGHTS = "weights"  # physical memory that can be shared
PRIVATE_WEIGHTS = "private weights"
WORKSPACE = "workspace"
CONTEXT = "context"


class Allocation(NamedTuple):
    """One piece of a card's memory, as a test sees it.

    Attributes:
        kind: "weights" (can be shared), "private weights", "workspace" or "context".
        bytes: its size.
        owner: the pid that allocated it; all pids are the driver's.
        importers: the pids that have imported it and live.
        whitelist: the pids that may import it.
        handle: what names it outside of the owner, "" before the export.
        orphaned: the owner has let go of it, importers hold it.
        valid: False when strict mode took it away from its importers.
    """

    kind: str
    bytes: int
    owner: int
    importers: Tuple[int, ...]
    whitelist: Tuple[int, ...]
    handle: str
    orphaned: bool
    valid: bool


class Card(NamedTuple):
    """One card, as a test sees it: sizes in bytes, and the driver's pids of the processes that use it."""

    capacity: int
    used: int
    free: int
    allocations: Tuple[Allocation, ...]
    processes: Tuple[int, ...]


@dataclasses.dataclass
class Memory:
    """One piece of memory. `owner` and `importers` are tokens, `whitelist` maps a pid to when it was listed."""

    number: int
    device: int
    kind: str
    bytes: int
    owner: str
    owner_pid: int
    whitelist: Dict[str, float]
    importers: List[str]
    owned: bool = True
    handle: int = 0
    valid: bool = True


@dataclasses.dataclass
class Member:
    """A process that the driver knows; `dead_since` is when the driver saw that it has ended, 0 while it lives."""

    token: str
    pid: int
    os_pid: int
    dead_since: float = 0.0


@dataclasses.dataclass
class Ledger:
    """Everything that the driver remembers."""

    numbers: int
    members: List[Member]
    memory: List[Memory]
    counters: Dict[str, int]

    def on(self, device: int) -> List[Memory]:
        """The memory of one card."""
        return [each for each in self.memory if each.device == device]

    def used(self, device: int) -> int:
        """The bytes taken on one card. Memory that strict mode took away is free."""
        return sum(each.bytes for each in self.on(device) if each.valid)

    def find(self, number: int) -> Memory:
        """The piece with this number."""
        return next(each for each in self.memory if each.number == number)

    def count(self, name: str) -> int:
        """How often this was counted before."""
        before = self.counters.get(name, 0)
        self.counters[name] = before + 1
        return before


def card(ledger: Ledger, device: int, capacity: int) -> Card:
    """One card, for a test."""
    pids = {each.token: each.pid for each in ledger.members}
    allocations: List[Allocation] = []
    for each in ledger.on(device):
        importers = tuple(pids[token] for token in each.importers)
        whitelist = tuple(sorted(int(pid) for pid in each.whitelist))
        handle = str(each.handle) if each.handle else ""
        orphaned = not each.owned
        allocations.append(
            Allocation(each.kind, each.bytes, each.owner_pid, importers, whitelist, handle, orphaned, each.valid)
        )
    used = ledger.used(device)
    processes = tuple(each.owner for each in allocations if each.kind == CONTEXT)
    return Card(capacity, used, capacity - used, tuple(allocations), processes)


class Store:
    """The ledger's file in the host's directory; processes that have ended are taken out at each opening."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pages = _Pages(directory)

    @contextlib.contextmanager
    def open(self, self_token: str = "") -> Generator[Tuple[Ledger, Switches], None, None]:
        """Read the ledger, let the block change it, write it; a block that raises has still changed it."""
        with (self._directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            switches = read(self._directory)
            before = self._pages.read()
            ledger = _from_json(before)
            self._reap(ledger, switches, self_token)
            try:
                yield ledger, switches
            finally:
                after = json.dumps(ledger, default=vars)
                if after != before:
                    self._pages.write(after)

    def file(self, memory: Memory) -> Path:
        """The file that is the memory's content."""
        return self._directory / "memory" / str(memory.number)

    def release(self, ledger: Ledger, memory: Memory, token: str, switches: Switches) -> None:
        """The process of `token` lets go of a piece that it owns or has imported."""
        if memory.owner == token:
            memory.owned = False
            if switches.lifetime == "strict" and memory.importers:
                self._invalidate(memory, switches)
        if token in memory.importers:
            memory.importers.remove(token)
        if not memory.owned and not memory.importers:
            ledger.memory.remove(memory)
            file = self.file(memory)
            if file.exists():
                file.unlink()

    def say(self, text: str) -> None:
        """Write a line to the driver's own log, which no process sees."""
        with (self._directory / "driver.log").open("a", encoding="utf-8") as log:
            log.write(text + "\n")

    def _invalidate(self, memory: Memory, switches: Switches) -> None:
        memory.valid = False
        if switches.after_death == "garbage":
            # Somebody else's data lies there now.
            with self.file(memory).open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                file.write(os.urandom(min(size, GRANULE)))

    def _reap(self, ledger: Ledger, switches: Switches, self_token: str) -> None:
        for member in list(ledger.members):
            if member.token == self_token or process.is_alive(self._directory, member.token):
                continue
            member.dead_since = member.dead_since or process.now()
            if process.now() < member.dead_since + switches.release_seconds:
                continue
            for memory in list(ledger.memory):
                if member.token in memory.importers:
                    # v2: a pid leaves the list when a process that imported exits.
                    memory.whitelist.pop(str(member.pid), None)
                if memory.owner == member.token or member.token in memory.importers:
                    self.release(ledger, memory, member.token, switches)
            ledger.members.remove(member)
            process.bury(self._directory, member.token)


class _Pages:
    """The text of the ledger, in the older of two files, so that a process killed while it writes loses only that.

    Replacing a file instead would be simpler, but stalls for long on a file system that has much to do.
    """

    def __init__(self, directory: Path) -> None:
        self._files = [directory / "ledger.0", directory / "ledger.1"]

    def read(self) -> str:
        """The newest text that is whole."""
        return max(map(_page, self._files))[1]

    def write(self, text: str) -> None:
        """Write a newer text."""
        pages = [(_page(file)[0], file) for file in self._files]
        data = text.encode("ascii")
        newest = max(pages)[0]
        head = _HEAD.pack(newest + 1, len(data), zlib.crc32(data))
        descriptor = os.open(min(pages)[1], os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, head + data)
        finally:
            os.close(descriptor)


_HEAD = struct.Struct("<QQI")  # which version it is, the bytes of the text, and their sum


def _page(file: Path) -> Tuple[int, str]:
    """A version and its text; version 0 if there is none, or not a whole one."""
    data = file.read_bytes() if file.exists() else b""
    if len(data) < _HEAD.size:
        return 0, "{}"
    version, size, total = _HEAD.unpack_from(data)
    text = data[_HEAD.size : _HEAD.size + size]
    return (version, text.decode("ascii")) if zlib.crc32(text) == total else (0, "{}")


def _from_json(text: str) -> Ledger:
    values: Dict[str, Any] = json.loads(text)
    return Ledger(
        values.get("numbers", 0),
        [Member(**each) for each in values.get("members", [])],
        [Memory(**each) for each in values.get("memory", [])],
        values.get("counters", {}),
    )
