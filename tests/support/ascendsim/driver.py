"""Simulated driver below the library, with the functions that the library calls: one `Driver` in each process.

Errors raise `AclError` with the vendor's number; only `Host.driver_log` has the reason.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from pathlib import Path
from typing import Dict, Generator, List, Sequence, Tuple

from ascendsim import driver_state, process
from ascendsim.driver_state import GRANULE, MIB, DriverState, Memory, Store
from ascendsim.switches import Switches, read

INVALID_PARAM = 107000
NO_CONTEXT = 107002
NOT_SUPPORTED = 207000
NO_MEMORY = 207001
DRIVER_ERROR = 507899

MAX_PIDS = 65535
"""Of one handle: svm_define.h:197, DEVMM_SHARE_MEM_MAX_PID_CNT."""

_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"

# Above 2**53 and 2**31, so that a handle changes if code converts it to a float or a C int.
_FIRST_HANDLE = 0x5A00_0000_0000_0001


class AclError(Exception):
    """A call that did not return 0."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class Driver:
    """The driver, for this process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._store = Store(directory)
        self._cards = _visible(int((directory / "cards").read_text(encoding="ascii")))
        self._identity = process.Identity(directory, read(directory).pid_offset)
        self._devices: Dict[int, List[int]] = {}  # device: count of set calls, and the number of its context's memory

    @property
    def switches(self) -> Switches:
        """The host's switches now."""
        return read(self._directory)

    @property
    def cards(self) -> int:
        """The number of cards that this process sees, numbered from 0."""
        return len(self._cards)

    @property
    def pid(self) -> int:
        """aclrtDeviceGetBareTgid: the pid outside of any container (devdrv_manager_container.c)."""
        return self._identity.pid

    @property
    def uses_a_card(self) -> bool:
        """Whether this process has a card open."""
        return bool(self._devices)

    @property
    def token(self) -> str:
        """A name of this process that is never reused."""
        return self._identity.token

    @property
    def directory(self) -> Path:
        """The directory of the host."""
        return self._directory

    def physical(self, device: int) -> int:
        """Return the number of a card on the host, the N of /dev/davinciN."""
        return self._cards[device]

    def holds_memory(self, device: int) -> bool:
        """Return whether this process has allocated memory of a card, apart from its context."""
        with self._open() as (entries, _):
            mine = [each for each in entries.on(self._cards[device]) if each.owner == self._identity.token]
            return any(each.kind != driver_state.CONTEXT for each in mine)

    def open_port(self, device: int, number: int, limit: int) -> bool:
        """Open a port of a card for HCCL; return False if the port is in use or `limit` processes have one."""
        with self._open() as (entries, _):
            taken = [each for each in entries.ports if each.device == self._cards[device]]
            if len(taken) >= limit or any(each.number == number for each in taken):
                self._store.say(f"{self.pid}: port {number} of card {device}: {len(taken)} are taken")
                return False
            entries.ports.append(driver_state.Port(self._cards[device], number, self._identity.token))
            return True

    def close_port(self, device: int, number: int) -> None:
        """Close a port."""
        mine = (self._cards[device], number, self._identity.token)
        with self._open() as (entries, _):
            entries.ports = [each for each in entries.ports if (each.device, each.number, each.owner) != mine]

    def count(self, name: str) -> int:
        """Increment a counter that all processes share; return its previous value."""
        with self._open() as (entries, _):
            return entries.count(name)

    def set_device(self, device: int) -> None:
        """aclrtSetDevice: register this process with the card, and allocate memory for a context."""
        if not 0 <= device < self.cards:
            raise self._refusal(INVALID_PARAM, f"no card {device}")
        if device in self._devices:
            self._devices[device][0] += 1
            return
        with self._open() as (entries, switches):
            users = len(entries.users(self._cards[device]))
            if users >= switches.max_processes:
                raise self._refusal(DRIVER_ERROR, f"card {device} has {users} processes already")
            memory = self._take(entries, switches, device, switches.context_mib * MIB, driver_state.CONTEXT)
        self._devices[device] = [1, memory.number]

    def reset_device(self, device: int) -> None:
        """aclrtResetDevice: undo one `set_device`."""
        self._devices[device][0] -= 1
        if self._devices[device][0] == 0:
            self.free(self._devices.pop(device)[1])

    def allocate(self, device: int, size: int, kind: str) -> int:
        """aclrtMalloc, aclrtMallocPhysical: allocate memory of this kind; return its number."""
        with self._open() as (entries, switches):
            memory = self._take(entries, switches, device, size, kind)
            if kind == driver_state.WEIGHTS:
                with self._store.file(memory).open("wb") as file:
                    file.truncate(memory.bytes)
            return memory.number

    def export(self, number: int) -> int:
        """aclrtMemExportToShareableHandle: once for each piece of memory."""
        with self._open() as (entries, switches):
            if not switches.exports:
                raise self._refusal(NOT_SUPPORTED, "this card cannot export")
            memory = entries.find(number)
            if memory.handle:
                raise self._refusal(DRIVER_ERROR, "Blk has been shared")
            memory.handle = _FIRST_HANDLE + 16 * number
            return memory.handle

    def set_pids(self, handle: int, pids: Sequence[int]) -> None:
        """aclrtMemSetPidToShareableHandle: add pids; the time of a pid that is added again is renewed (v2)."""
        if not pids:
            raise self._refusal(INVALID_PARAM, "no pids")
        with self._open() as (entries, switches):
            if switches.acl_set_pid == "unsupported":
                raise self._refusal(NOT_SUPPORTED, "set pid is not supported")
            memory = self._exported(entries, handle)
            if memory.owner != self._identity.token or not memory.owned:
                raise self._refusal(DRIVER_ERROR, "only the process that exported may set pids (EACCES)")
            listed = [pid for pid in pids if pid != 0]
            if not listed:
                raise self._refusal(INVALID_PARAM, "all pids are 0 (EINVAL)")
            for pid in listed:
                if len(memory.listed) >= MAX_PIDS:
                    raise self._refusal(DRIVER_ERROR, f"the list is full, {pid} is not on it")
                memory.listed[str(pid)] = process.now()

    def import_(self, handle: int, device: int) -> int:
        """aclrtMemImportFromShareableHandle: return the number of the memory of the handle."""
        with self._open() as (entries, switches):
            memory = self._exported(entries, handle)
            self._check_import(memory, self._cards[device], switches)
            memory.importers.append(self._identity.token)
            return memory.number

    def map(self, number: int, size: int, length: int) -> mmap.mmap:
        """aclrtMapMem: the first `length` bytes, for reading and writing (there is no read-only mapping)."""
        with self._open() as (entries, _):
            memory = entries.find(number)
            if size > memory.bytes:
                raise self._refusal(INVALID_PARAM, f"{size} bytes to map, {memory.bytes} allocated")
            with self._store.file(memory).open("r+b") as file:
                return mmap.mmap(file.fileno(), max(1, length))

    def free(self, number: int) -> None:
        """aclrtFree, aclrtFreePhysical: release memory that was allocated or imported."""
        with self._open() as (entries, switches), contextlib.suppress(LookupError):
            self._store.release(entries, entries.find(number), self._identity.token, switches)

    def is_valid(self, number: int) -> bool:
        """Return whether the memory is valid. In strict mode, the exit of its owner invalidates it for importers."""
        with self._open() as (entries, _):
            return any(each.number == number and each.valid for each in entries.memory)

    def memory_info(self, device: int) -> Tuple[int, int]:
        """aclrtGetMemInfo: free and total bytes."""
        with self._open() as (entries, switches):
            total = switches.capacity_mib * MIB
            return max(0, total - entries.used(self._cards[device])), total

    def is_inherited(self) -> bool:
        """True in a forked child."""
        return os.getpid() != self._identity.os_pid

    def _check_fork(self) -> None:
        """Fail every call in a child forked from a process with an open card (docs: do not fork)."""
        if self.is_inherited():
            raise self._refusal(DRIVER_ERROR, "ACL was used before the fork")

    def _exported(self, entries: DriverState, handle: int) -> Memory:
        try:
            memory = entries.find(handle=handle)
        except LookupError:
            raise self._refusal(DRIVER_ERROR, "Share handle doesn't exist") from None
        if not memory.valid:
            raise self._refusal(DRIVER_ERROR, "Share handle doesn't exist any more")
        return memory

    def _check_import(self, memory: Memory, device: int, switches: Switches) -> None:
        reason = ""
        listed = memory.listed.get(str(self._identity.pid))
        if switches.vnpu:
            reason = "a virtual instance cannot import"
        elif memory.device != device:
            reason = f"the memory is on card {memory.device}, and no peer access to it is enabled"
        elif memory.owner == self._identity.token:
            reason = "the exporter cannot import its own handle"
        elif self._identity.token in memory.importers:
            reason = "Can not import multi times"
        elif listed is None:
            reason = f"pid {self._identity.pid} is not on the list (EACCES)"
        elif listed < self._identity.start:
            reason = f"Time check fail: pid {self._identity.pid} was set before the process started (EACCES)"
        if reason:
            raise self._refusal(DRIVER_ERROR, reason)

    def _take(self, entries: DriverState, switches: Switches, device: int, size: int, kind: str) -> Memory:
        rounded = -(-size // GRANULE) * GRANULE
        device = self._cards[device]
        if entries.used(device) + rounded > switches.capacity_mib * MIB:
            raise self._refusal(NO_MEMORY, f"no {rounded} bytes for {kind} on card {device}")
        entries.numbers += 1
        memory = Memory(entries.numbers, device, kind, rounded, self._identity.token, {}, [])
        entries.memory.append(memory)
        return memory

    def _refusal(self, code: int, reason: str) -> AclError:
        self._store.say(f"{self._identity.pid}: {reason}")
        return AclError(code, reason)

    @contextlib.contextmanager
    def _open(self) -> Generator[Tuple[DriverState, Switches], None, None]:
        self._check_fork()
        token = self._identity.token
        with self._store.open(token) as (entries, switches):
            if token not in entries.members:
                entries.members.append(token)
            yield entries, switches


def _visible(cards: int) -> List[int]:
    """Return the host's numbers of the cards that a process sees, in the order of the process's numbers.

    ASCEND_RT_VISIBLE_DEVICES lists them: "2,3". The list ends at the first invalid number (a guess).
    """
    listed = os.environ.get(_VISIBLE)
    if listed is None:
        return list(range(cards))
    seen: List[int] = []
    for text in listed.split(","):
        if not text.strip().isdigit() or int(text) >= cards or int(text) in seen:
            break
        seen.append(int(text))
    return seen


@functools.lru_cache(maxsize=None)
def _driver() -> Driver:
    return Driver(Path(os.environ["ASCENDSIM"]))


def driver() -> Driver:
    """Return the driver of this process. A child forked from a process without an open card has a usable driver."""
    this = _driver()
    if this.is_inherited() and not this.uses_a_card:
        _driver.cache_clear()
        this = _driver()
    return this


def switches() -> Switches:
    """Return the host's current switches, without opening a card."""
    return read(Path(os.environ["ASCENDSIM"]))
