"""Memory of the cards: allocations, their owners and importers, in one file that is changed under a lock."""

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
BUFFERS = "buffers"  # memory of a communicator


@dataclasses.dataclass
class Memory:
    """One allocation of a card's memory.

    Attributes:
        number: id of the allocation.
        device: the card.
        kind: "weights" (can be shared), "private weights", "workspace", "context" or "buffers".
        bytes: its size.
        owner: the token of the process that allocated it.
        listed: the pids that may import it, and the time when each was listed.
        importers: the tokens of the running processes that have imported it.
        owned: whether the owner has not released it yet.
        handle: its name outside of the owner, 0 before the export.
        valid: False after strict mode has invalidated it for its importers.
    """

    number: int
    device: int
    kind: str
    bytes: int
    owner: str
    listed: Dict[str, float]
    importers: List[str]
    owned: bool = True
    handle: int = 0
    valid: bool = True

    @property
    def whitelist(self) -> List[int]:
        """The pids that may import it."""
        return sorted(map(int, self.listed))


class Card(NamedTuple):
    """State of a card for tests: sizes in bytes, and the driver's pids of the processes that use it."""

    capacity: int
    used: int
    allocations: Tuple[Memory, ...]
    processes: Tuple[int, ...]

    @property
    def weights(self) -> Memory:
        """The only weights that can be shared."""
        [weights] = [each for each in self.allocations if each.kind == WEIGHTS]
        return weights


@dataclasses.dataclass
class Port:
    """A port of a card's network interface; `until`: time at which it is free again after its process has exited."""

    device: int
    number: int
    owner: str
    until: float = 0.0


@dataclasses.dataclass
class DriverState:
    """State of the driver; `members` are the tokens of the registered processes."""

    numbers: int
    members: List[str]
    memory: List[Memory]
    counters: Dict[str, int]
    ports: List[Port]

    def on(self, device: int) -> List[Memory]:
        """The memory of one card."""
        return [each for each in self.memory if each.device == device]

    def used(self, device: int) -> int:
        """Return the bytes in use on one card. Memory that strict mode has invalidated is free."""
        return sum(each.bytes for each in self.on(device) if each.valid)

    def users(self, device: int) -> List[int]:
        """The driver's pids of the processes that use a card."""
        return [process.pid_of(each.owner) for each in self.on(device) if each.kind == CONTEXT]

    def find(self, number: int = 0, handle: int = 0) -> Memory:
        """Return the allocation with this number or handle. Raises LookupError if it does not exist."""
        for each in self.memory:
            if each.number == number or (handle and each.handle == handle):
                return each
        raise LookupError

    def count(self, name: str) -> int:
        """Increment a counter; return its previous value."""
        before = self.counters.get(name, 0)
        self.counters[name] = before + 1
        return before


class Store:
    """The driver's file in the host's directory. Each opening removes processes that have exited."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @contextlib.contextmanager
    def open(self, self_token: str = "") -> Generator[Tuple[DriverState, Switches], None, None]:
        """Read the state, let the block change it, and write it, even if the block raises."""
        with (self._directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            switches = read(self._directory)
            # With two files, a process that is killed while it writes loses only that change. Replacing one file would
            # be simpler, but stalls for long on a busy file system.
            (_, _, older), (version, before, _) = sorted(map(_page, (self._directory / "0", self._directory / "1")))
            state = _from_json(before)
            self._reap(state, switches, self_token)
            try:
                yield state, switches
            finally:
                after = json.dumps(state, default=vars)
                if after != before:
                    _write_page(older, version + 1, after)

    def file(self, memory: Memory) -> Path:
        """The file that is the memory's content."""
        return self._directory / "memory" / str(memory.number)

    def release(self, state: DriverState, memory: Memory, token: str, switches: Switches) -> None:
        """Release an allocation that the process of `token` owns or has imported."""
        if memory.owner == token:
            memory.owned = False
            if switches.lifetime == "strict" and memory.importers:
                self._invalidate(memory, switches)
        if token in memory.importers:
            memory.importers.remove(token)
        if not memory.owned and not memory.importers:
            state.memory.remove(memory)
            if memory.kind == WEIGHTS:
                self.file(memory).unlink()

    def say(self, text: str) -> None:
        """Write a line to the driver's log, which the processes cannot read."""
        with (self._directory / "driver.log").open("a", encoding="utf-8") as log:
            log.write(text + "\n")

    def _invalidate(self, memory: Memory, switches: Switches) -> None:
        memory.valid = False
        if switches.after_death == "garbage":
            # Overwrite the memory, as a new owner would.
            with self.file(memory).open("r+b") as file:
                file.write(os.urandom(min(memory.bytes, GRANULE)))

    def _reap(self, state: DriverState, switches: Switches, self_token: str) -> None:
        for token in list(state.members):
            if token == self_token or process.is_alive(self._directory, token):
                continue
            for memory in list(state.memory):
                if token in memory.importers:
                    # v2: a pid leaves the list when a process that imported exits.
                    memory.listed.pop(str(process.pid_of(token)), None)
                if memory.owner == token or token in memory.importers:
                    self.release(state, memory, token, switches)
            for port in state.ports:
                if port.owner == token and not port.until:
                    port.until = process.now() + switches.port_linger
            state.members.remove(token)
            process.bury(self._directory, token)
        state.ports = [each for each in state.ports if not each.until or process.now() < each.until]


_HEAD = struct.Struct("<QQI")  # version, length of the text in bytes, and checksum


def _page(file: Path) -> Tuple[int, str, Path]:
    """Return a version, its text and its file; version 0 if the file is missing or incomplete."""
    data = file.read_bytes() if file.exists() else b""
    if len(data) >= _HEAD.size:
        version, size, total = _HEAD.unpack_from(data)
        text = data[_HEAD.size : _HEAD.size + size]
        if zlib.crc32(text) == total:
            return version, text.decode("ascii"), file
    return 0, "{}", file


def _write_page(file: Path, version: int, text: str) -> None:
    data = text.encode("ascii")
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, _HEAD.pack(version, len(data), zlib.crc32(data)) + data)
    finally:
        os.close(descriptor)


def _from_json(text: str) -> DriverState:
    values: Dict[str, Any] = json.loads(text)
    memory = [Memory(**each) for each in values.get("memory", [])]
    ports = [Port(**each) for each in values.get("ports", [])]
    return DriverState(values.get("numbers", 0), values.get("members", []), memory, values.get("counters", {}), ports)
