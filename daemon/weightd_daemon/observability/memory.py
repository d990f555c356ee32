"""Memory of all processes for metrics and status. For metrics, a thread measures it, at most once a minute.

The kernel takes milliseconds to count the pages of one process, and longer if it is short of memory. The event loop
must not wait for that, so metrics report the previous measurement. The thread only reads files below /proc and page
stores, and holds no locks that a forked child would miss. It starts no children, because children die with the thread
that started them.
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
    """A child process."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...


class MeasuredFiles(Protocol):
    """The files of a generation."""

    @property
    def store(self) -> Path:
        """The page store."""
        ...


class MemorySubject(NamedTuple):
    """The parts of one generation whose memory is measured.

    Attributes:
        pids: the processes of the generation.
        shared_bytes: the sum of the weights that each worker reports to share.
        weight_bytes: the size of the copy of the weights as the holder reports it; 0 if unknown.
        store_path: the page store, whose resident size is measured instead; None if the copy is not in a file.
    """

    pids: tuple[int, ...]
    shared_bytes: int
    weight_bytes: int
    store_path: Path | None

    def copy_bytes(self, resident: Callable[[Path], int | None]) -> int | None:
        """Return the resident size of the copy of the weights, None if unknown; `resident` measures a file."""
        return self.weight_bytes if self.store_path is None else resident(self.store_path)

    def saved_bytes(self, copy_bytes: int | None) -> int | None:
        """Return the memory that sharing saves: the weights that the workers share, less the copy."""
        # A copy that no worker has used yet is not in memory: sharing has saved nothing then.
        return copy_bytes and max(0, self.shared_bytes - copy_bytes)


MemorySubjects = Mapping[str, Sequence[MemorySubject]]


class MemoryFootprint(NamedTuple):
    """The memory of a model's processes at the last measurement, in bytes; None if unknown."""

    pss_bytes: int | None = None
    shared_bytes: int | None = None
    saved_bytes: int | None = None
    copy_bytes: int | None = None


class MemoryReport(NamedTuple):
    """The last measurement: the memory of the daemon with its helper processes, and of models by name."""

    pss_bytes: int | None = None
    footprints: Mapping[str, MemoryFootprint] = {}


def memory_subjects(
    models: Iterable[ServedModel], processes: Mapping[str, MeasuredProcess], files: Mapping[str, MeasuredFiles]
) -> MemorySubjects:
    """Return the subjects to measure for each model.

    Args:
        models: the served models.
        processes: the processes of all models, by name.
        files: the files of each generation, by its label.
    """
    return {
        model.name: [memory_subject(each, processes, files.get(each.label)) for each in model.generations]
        for model in models
    }


def memory_subject(
    generation: GenerationBase, processes: Mapping[str, MeasuredProcess], files: MeasuredFiles | None
) -> MemorySubject:
    """Return the subject to measure for a generation."""
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
    """Background sampler of memory that keeps the last measurement.

    Args:
        start: starts a function without waiting for it.
        clock: returns monotonic seconds.
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
        # The measuring thread replaces the whole report at once, so no lock is needed.
        self._report = MemoryReport()

    def poll(self, daemon_pids: Sequence[int], make_subjects: Callable[[], MemorySubjects]) -> MemoryReport:
        """Return the last measurement; start a new one if it is due."""
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
    # A daemon thread: if the kernel does not return from a read, the process can still exit.
    threading.Thread(target=target, name="memory", daemon=True).start()


class MemoryMeter:
    """Measures the memory of one model at a time in the background.

    Args:
        subjects_of: returns what to measure for a model.
        start: starts a function without waiting for it.
    """

    def __init__(
        self,
        subjects_of: Callable[[str], Sequence[MemorySubject]],
        start: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._subjects_of = subjects_of
        self._start = start or _start_thread
        # The model that is being measured, and its memory once that is known.
        self._model = ""
        self._pss_bytes: int | None = None
        self._is_measuring = False

    def poll(self, model: str) -> int | None:
        """Return the memory of a model's processes in bytes (PSS); until it is known, return None and measure it."""
        if self._is_measuring:
            return None
        if self._model == model and self._pss_bytes is not None:
            self._model = ""
            return self._pss_bytes
        self._model, self._pss_bytes, self._is_measuring = model, None, True
        subjects = self._subjects_of(model)
        try:
            self._start(lambda: self._measure(subjects))
        except RuntimeError as error:
            self._is_measuring = False
            _log.warning("cannot measure process memory: %s", with_limit_hint(str(error)))
        return None

    def _measure(self, subjects: Sequence[MemorySubject]) -> None:
        try:
            self._pss_bytes = measure_footprint(subjects).pss_bytes
        finally:
            self._is_measuring = False


T = TypeVar("T")

# A value is measured again only if it is older than this.
MAX_AGE_S = 1.0


class TtlCache:
    """Cache of measured values that expire after `MAX_AGE_S`.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[Hashable, tuple[float, object]] = {}

    def get(self, key: Hashable, measure: Callable[[], T]) -> T:
        """Return the value for `key`, measured now or at most `MAX_AGE_S` ago."""
        if not self.has(key):
            now = self._clock()
            self._values = {each: value for each, value in self._values.items() if now < value[0] + MAX_AGE_S}
            self._values[key] = self._clock(), measure()
        return cast(T, self._values[key][1])

    def has(self, key: Hashable) -> bool:
        """Return whether the cache has a value for `key` that has not expired."""
        return key in self._values and self._clock() < self._values[key][0] + MAX_AGE_S


class MemoryScan:
    """Scan of the memory of processes for one status request, one process a step.

    Args:
        request_id: the id of the request.
        pids: the processes to measure.
        cache: recently measured values.
    """

    def __init__(self, request_id: str, pids: Iterable[int], cache: TtlCache) -> None:
        self.request_id = request_id
        self.memory_by_pid: dict[int, ProcessMemory | None] = {}
        self.cache = cache
        self._remaining_pids = list(pids)

    def step(self) -> bool:
        """Measure one process, besides processes with a cached result; return whether all are done."""
        is_known = True
        while self._remaining_pids and is_known:
            pid = self._remaining_pids.pop()
            is_known = self.cache.has(pid)
            self.memory_by_pid[pid] = self.cache.get(pid, lambda: read_process_memory(pid))  # noqa: B023 - it is called at once
        return not self._remaining_pids

    def pss_bytes(self, pid: int) -> int | None:
        """Return the proportional set size of a process; None if unknown."""
        process_memory = self.memory_by_pid.get(pid)
        return None if process_memory is None else process_memory.pss_bytes

    def private_bytes(self, pid: int) -> int | None:
        """Return the memory of a process that no other process has; None if unknown."""
        process_memory = self.memory_by_pid.get(pid)
        return None if process_memory is None else process_memory.private_bytes

    def anonymous_bytes(self, pid: int) -> int | None:
        """Return the memory of a process that belongs to no file; None if unknown."""
        process_memory = self.memory_by_pid.get(pid)
        return None if process_memory is None else process_memory.anonymous_bytes
