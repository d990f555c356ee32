"""The memory of all processes for the metrics: measured in a thread of its own, once a minute at most.

The kernel takes milliseconds to count the pages of one process, and longer where that is short of memory: the loop is
not to wait for it, and a scrape gets what was measured before. The thread only reads files below /proc and page stores,
and holds nothing that a fork would miss; children are started by the loop's thread alone, with which they die.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast

from weightd_common.devices import is_cpu
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.models.model import ServedModel
from weightd_daemon.platform.memory import ProcessMemory, read_process_memory, resident_bytes
from weightd_daemon.platform.resource_limits import with_limit_hint

_log = logging.getLogger("weightd")

INTERVAL_S = 60.0


class MeasuredProcess(Protocol):
    """A child."""

    @property
    def pid(self) -> int:
        """As the kernel numbers it."""
        ...


class MeasuredFiles(Protocol):
    """The files of a generation."""

    @property
    def store(self) -> Path:
        """Its pages."""
        ...


class MemorySubject(NamedTuple):
    """What is to be measured of one generation.

    Attributes:
        pids: its processes.
        shared_bytes: what its workers share, by their own word.
        weight_bytes: what its copy of the weights takes, if that is known by the holder's word.
        store_path: else the file that is looked at.
    """

    pids: tuple[int, ...]
    shared_bytes: int
    weight_bytes: int
    store_path: Path | None

    def copy_bytes(self, resident: Callable[[Path], int | None]) -> int | None:
        """Return what its copy of the weights has in memory; None where nobody tells. `resident` measures a file."""
        return self.weight_bytes if self.store_path is None else resident(self.store_path)

    def saved_bytes(self, copy_bytes: int | None) -> int | None:
        """Return what its workers share less what the copy takes."""
        # Of a copy that nobody has used yet, all is on disk: that is no merit of sharing.
        return copy_bytes and max(0, self.shared_bytes - copy_bytes)


MemorySubjects = Mapping[str, Sequence[MemorySubject]]


class MemoryFootprint(NamedTuple):
    """What the processes of a model took of memory when that was measured last, in bytes; None: nobody tells."""

    pss_bytes: int | None = None
    shared_bytes: int | None = None
    saved_bytes: int | None = None
    copy_bytes: int | None = None


class MemoryReport(NamedTuple):
    """What was measured: of the daemon and what belongs to it, and of models by name."""

    pss_bytes: int | None = None
    footprints: Mapping[str, MemoryFootprint] = {}


def memory_subjects(
    models: Iterable[ServedModel], processes: Mapping[str, MeasuredProcess], files: Mapping[str, MeasuredFiles]
) -> MemorySubjects:
    """Return what is to be measured of models.

    Args:
        models: those that are served.
        processes: of all of them, by name.
        files: of each generation, by its label.
    """
    return {
        model.name: [memory_subject(each, processes, files.get(each.label)) for each in model.generations]
        for model in models
    }


def memory_subject(
    generation: GenerationBase, processes: Mapping[str, MeasuredProcess], files: MeasuredFiles | None
) -> MemorySubject:
    """Return what is to be measured of a generation."""
    children = [child for child in generation.processes.alive() if child.name in processes]
    built = generation.built
    is_file = is_cpu(generation.device) and not (built is not None and built.is_template)
    return MemorySubject(
        tuple(processes[child.name].pid for child in children),
        sum(child.shared_bytes for child in children if child.role is Role.WORKER),
        0 if is_file or built is None else built.shared_bytes,
        files.store if is_file and files is not None else None,
    )


class MemorySampler:
    """Knows what was measured last.

    Args:
        start: begins to do something that is not waited for.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        start: Callable[[Callable[[], None]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start or _start_thread
        self._clock = clock
        self._due_at = -float("inf")
        self._is_measuring = False
        # The thread puts all of it there at once.
        self._report = MemoryReport()

    def poll(self, daemon_pids: Sequence[int], make_subjects: Callable[[], MemorySubjects]) -> MemoryReport:
        """Return what is known; measure again if it is time for that, for those who ask later."""
        now = self._clock()
        if now >= self._due_at and not self._is_measuring:
            self._due_at, self._is_measuring = now + INTERVAL_S, True
            subjects = make_subjects()
            try:
                self._start(lambda: self._measure(daemon_pids, subjects))
            except RuntimeError as error:
                self._is_measuring = False
                _log.warning("cannot measure process memory: %s", with_limit_hint(str(error)))
        return self._report

    def _measure(self, daemon_pids: Sequence[int], subjects: MemorySubjects) -> None:
        try:
            daemon_pss_bytes = [
                found.pss_bytes for pid in daemon_pids if (found := read_process_memory(pid)) is not None
            ]
            footprints = {name: measure_footprint(each) for name, each in subjects.items()}
            self._report = MemoryReport(sum(daemon_pss_bytes) if daemon_pss_bytes else None, footprints)
        finally:
            self._is_measuring = False


def measure_footprint(subjects: Iterable[MemorySubject]) -> MemoryFootprint:
    """Measure the memory of a model's generations."""
    pss_bytes, shared_bytes, saved_bytes, copy_bytes = 0, 0, 0, 0
    is_complete = True
    for each in subjects:
        pss_bytes += sum(found.pss_bytes for pid in each.pids if (found := read_process_memory(pid)) is not None)
        shared_bytes += each.shared_bytes
        nbytes = each.copy_bytes(resident_bytes)
        is_complete = is_complete and nbytes is not None
        copy_bytes += nbytes or 0
        saved_bytes += each.saved_bytes(nbytes) or 0
    return MemoryFootprint(
        pss_bytes, shared_bytes, saved_bytes if is_complete else None, copy_bytes if is_complete else None
    )


def _start_thread(target: Callable[[], None]) -> None:
    # If the kernel does not come back from it, nobody waits at the end.
    threading.Thread(target=target, name="memory", daemon=True).start()


T = TypeVar("T")

# Whoever asks more often is told what was measured before.
MAX_AGE_S = 1.0


class TtlCache:
    """Values that were measured, for as long as they are of use.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[Hashable, tuple[float, object]] = {}

    def get(self, key: Hashable, measure: Callable[[], T]) -> T:
        """Return the value under `key`, measured now or at most a second ago."""
        if not self.has(key):
            now = self._clock()
            self._values = {each: value for each, value in self._values.items() if now < value[0] + MAX_AGE_S}
            self._values[key] = self._clock(), measure()
        return cast(T, self._values[key][1])

    def has(self, key: Hashable) -> bool:
        """Whether there is such a value."""
        return key in self._values and self._clock() < self._values[key][0] + MAX_AGE_S


class MemoryScan:
    """Reads the memory of one process a step.

    Args:
        request_id: the id of the question.
        pids: the processes to look at.
        cache: what is known.
    """

    def __init__(self, request_id: str, pids: Iterable[int], cache: TtlCache) -> None:
        self.request_id = request_id
        self.memory_by_pid: dict[int, ProcessMemory | None] = {}
        self.cache = cache
        self._remaining_pids = list(pids)

    def step(self) -> bool:
        """Look at one process, and at those whose memory is known; return whether these were the last."""
        is_known = True
        while self._remaining_pids and is_known:
            pid = self._remaining_pids.pop()
            is_known = self.cache.has(pid)
            self.memory_by_pid[pid] = self.cache.get(pid, lambda: read_process_memory(pid))  # noqa: B023 - it is called at once
        return not self._remaining_pids

    def pss_bytes(self, pid: int) -> int | None:
        """Return the proportional set size that a process had; None where it is not known."""
        process_memory = self.memory_by_pid.get(pid)
        return None if process_memory is None else process_memory.pss_bytes

    def private_bytes(self, pid: int) -> int | None:
        """Return likewise what no other process had."""
        process_memory = self.memory_by_pid.get(pid)
        return None if process_memory is None else process_memory.private_bytes

    def anonymous_bytes(self, pid: int) -> int | None:
        """Return likewise what was no file's."""
        process_memory = self.memory_by_pid.get(pid)
        return None if process_memory is None else process_memory.anonymous_bytes
