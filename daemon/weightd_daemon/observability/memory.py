"""Measurement of the memory of the daemon's and the models' processes, for metrics and for the status.

The kernel takes milliseconds to count the pages of one process, and longer if it is short of memory. The event loop
must not wait for this. So metrics report the previous measurement, which a thread has made, at most once a minute. The
thread only reads files below /proc and page stores. It holds no locks, because a child forked meanwhile would inherit
them locked. It starts no children, because the kernel kills a child when the thread that started it ends.
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
    """The files of a generation, as far as this module needs them."""

    @property
    def store(self) -> Path:
        """The page store."""
        ...


class MemorySubject(NamedTuple):
    """The data that is needed to measure the memory of one generation.

    Attributes:
        pids: the pids of the generation's processes.
        shared_bytes: the sum over all workers of the size of the shared weights, as each worker reports it.
        weight_bytes: the size of the shared copy of the weights, as the holder reports it; 0 if unknown.
        store_path: the path of the page store with the copy of the weights, whose size in memory is measured instead of
            `weight_bytes`; None if the copy is not in a page store.
    """

    pids: tuple[int, ...]
    shared_bytes: int
    weight_bytes: int
    store_path: Path | None

    def copy_bytes(self, resident: Callable[[Path], int | None]) -> int | None:
        """Return how many bytes of the shared copy of the weights are in memory; None if unknown.

        Args:
            resident: returns how many bytes of a file are in memory.
        """
        return self.weight_bytes if self.store_path is None else resident(self.store_path)

    def saved_bytes(self, copy_bytes: int | None) -> int | None:
        """Return how many bytes sharing saves: `shared_bytes` of all workers, minus the one copy; None if unknown."""
        # A size of 0 means that no worker has used the copy yet, so sharing has not saved anything.
        return copy_bytes and max(0, self.shared_bytes - copy_bytes)


MemorySubjects = Mapping[str, Sequence[MemorySubject]]


class MemoryFootprint(NamedTuple):
    """The memory of all generations of a model at the last measurement, in bytes; None if unknown.

    Attributes:
        pss_bytes: the proportional set size of all processes.
        shared_bytes: the sum of `MemorySubject.shared_bytes` of all generations.
        saved_bytes: how many bytes sharing saves, see `MemorySubject.saved_bytes`.
        copy_bytes: how many bytes of the shared copies of the weights are in memory.
    """

    pss_bytes: int | None = None
    shared_bytes: int | None = None
    saved_bytes: int | None = None
    copy_bytes: int | None = None


class MemoryReport(NamedTuple):
    """Result of a measurement: the memory of the daemon with its helper processes, and of each model, by name."""

    pss_bytes: int | None = None
    footprints: Mapping[str, MemoryFootprint] = {}


def memory_subjects(
    models: Iterable[ServedModel], processes: Mapping[str, MeasuredProcess], files: Mapping[str, MeasuredFiles]
) -> MemorySubjects:
    """Return by model name the `MemorySubject` of each of the model's generations.

    Args:
        models: the served models.
        processes: the running processes of all models, by name.
        files: the files of each generation, by its label.
    """
    return {
        model.name: [memory_subject(each, processes, files.get(each.label)) for each in model.generations]
        for model in models
    }


def memory_subject(
    generation: GenerationBase, processes: Mapping[str, MeasuredProcess], files: MeasuredFiles | None
) -> MemorySubject:
    """Return the data that is needed to measure the memory of a generation."""
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
    """Measures the memory of all processes in the background, and keeps the last measurement.

    Args:
        start: called with a function; runs the function in the background. Default: in a new thread.
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
        # No lock is needed, because the measuring thread replaces the whole report with one assignment.
        self._report = MemoryReport()

    def poll(self, daemon_pids: Sequence[int], make_subjects: Callable[[], MemorySubjects]) -> MemoryReport:
        """Return the last measurement; start a new one if `INTERVAL_S` has passed since the last start."""
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
    """Measure the memory of all generations of a model."""
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
    # Use a daemon thread, so that the process can exit even if the kernel does not return from a read.
    threading.Thread(target=target, name="memory", daemon=True).start()


class MemoryMeter:
    """Measures the memory of one model at a time in the background.

    Args:
        subjects_of: called with the name of a model; returns the `MemorySubject` of each of its generations.
        start: see `MemorySampler`.
    """

    def __init__(
        self,
        subjects_of: Callable[[str], Sequence[MemorySubject]],
        start: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._subjects_of = subjects_of
        self._start = start or _start_thread
        # The name of the model that is measured, and the PSS of its processes once it is known.
        self._model = ""
        self._pss_bytes: int | None = None
        self._is_measuring = False

    def poll(self, model: str) -> int | None:
        """Return the PSS of a model's processes in bytes; until it is known, return None and have it measured."""
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

# Seconds for which a measured value stays in the cache.
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
    """Measurement of the memory of processes for one status request. Each step measures one process.

    Args:
        request_id: the id of the status request.
        pids: the pids of the processes to measure.
        cache: the cache of recently measured values.
    """

    def __init__(self, request_id: str, pids: Iterable[int], cache: TtlCache) -> None:
        self.request_id = request_id
        self.memory_by_pid: dict[int, ProcessMemory | None] = {}
        self.cache = cache
        self._remaining_pids = list(pids)

    def step(self) -> bool:
        """Measure the next process; return whether all are measured. Processes with a cached result take no step."""
        is_known = True
        while self._remaining_pids and is_known:
            pid = self._remaining_pids.pop()
            is_known = self.cache.has(pid)
            self.memory_by_pid[pid] = self.cache.get(pid, lambda: read_process_memory(pid))  # noqa: B023 - it is called at once
        return not self._remaining_pids

    def pss_bytes(self, pid: int) -> int | None:
        """Return the proportional set size of a process in bytes; None if unknown."""
        process_memory = self.memory_by_pid.get(pid)
        return None if process_memory is None else process_memory.pss_bytes

    def private_bytes(self, pid: int) -> int | None:
        """Return how many bytes of memory a process shares with no other process; None if unknown."""
        process_memory = self.memory_by_pid.get(pid)
        return None if process_memory is None else process_memory.private_bytes

    def anonymous_bytes(self, pid: int) -> int | None:
        """Return how many bytes of a process's memory are not part of a file; None if unknown."""
        process_memory = self.memory_by_pid.get(pid)
        return None if process_memory is None else process_memory.anonymous_bytes
