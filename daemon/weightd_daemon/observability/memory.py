"""Measurement of the memory of the daemon's and the models' processes, for metrics and for the status.

The kernel takes milliseconds to count the pages of a process or a page store, and longer if these are large. The event
loop must not wait for this, so threads measure. Metrics report the previous measurement, at most once a minute; a
status waits for a measurement. A thread only reads files below /proc and page stores. It holds no locks, because a
child forked meanwhile would inherit them locked. It starts no children, because the kernel kills a child when the
thread that started it ends.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from weightd_common.devices import is_cpu
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.models.model import ServedModel
from weightd_daemon.platform.event_loop import EventLoop
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


# Minimum seconds for which the measured memory of a process is kept.
MAX_AGE_S = 1.0

# Maximum share of a core that measuring takes, however often clients ask.
CPU_SHARE = 0.1


Measurable = int | Path
"""The pid of a process, or the path of a page store."""

Memory = ProcessMemory | int | None
"""The memory of a process, or how many bytes of a page store are in memory; None if unknown."""


class _Measurement(NamedTuple):
    """A measured value, and when it expires, in seconds of the reader's clock."""

    value: Memory
    expires_at: float


class MemoryReader:
    """Measures the memory of processes and page stores in the background, and keeps it for some time.

    A measurement that took s seconds is kept for `MAX_AGE_S`, or for s / `CPU_SHARE` seconds if that is longer.

    Args:
        loop: calls `on_measured` after the background thread has ended.
        on_measured: called after each measurement; `find` may have an answer then.
        start: see `MemorySampler`.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        loop: EventLoop,
        on_measured: Callable[[], object],
        start: Callable[[Callable[[], None]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_measured = on_measured
        self._start = start or _start_thread
        self._clock = clock
        self._kept: dict[Measurable, _Measurement] = {}
        self._is_measuring = False
        # No lock is needed, because the measuring thread sets the whole result with one assignment before it wakes the
        # loop.
        self._result: Mapping[Measurable, _Measurement] = {}
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add(self._wakeup, self._on_wakeup)

    def find(self, wanted: Sequence[Measurable]) -> Mapping[Measurable, Memory] | None:
        """Return the memory of each wanted process and page store; None until all are measured, and have them measured.

        `on_measured` is called later if the result is None.
        """
        now = self._clock()
        self._kept = {key: each for key, each in self._kept.items() if now < each.expires_at}
        missing = [key for key in wanted if key not in self._kept]
        if not missing:
            return {key: self._kept[key].value for key in wanted}
        if not self._is_measuring:
            self._is_measuring = True
            try:
                self._start(lambda: self._measure(missing))
            except RuntimeError as error:
                _log.warning("cannot measure process memory: %s", with_limit_hint(str(error)))
                self._set_result(dict.fromkeys(missing), now)
        return None

    def _measure(self, wanted: Sequence[Measurable]) -> None:
        begin = self._clock()
        found: dict[Measurable, Memory] = dict.fromkeys(wanted)
        try:
            for each in wanted:
                found[each] = resident_bytes(each) if isinstance(each, Path) else read_process_memory(each)
        finally:
            self._set_result(found, begin)

    def _set_result(self, found: Mapping[Measurable, Memory], begin: float) -> None:
        now = self._clock()
        expires_at = now + max(MAX_AGE_S, (now - begin) / CPU_SHARE)
        self._result = {key: _Measurement(each, expires_at) for key, each in found.items()}
        os.eventfd_write(self._wakeup, 1)

    def _on_wakeup(self) -> None:
        os.eventfd_read(self._wakeup)
        self._is_measuring = False
        self._kept.update(self._result)
        self._on_measured()


class MemoryScan:
    """The memory of processes and page stores for one status request.

    Args:
        request_id: the id of the status request.
        wanted: the processes and page stores.
        find: see `MemoryReader.find`.
    """

    def __init__(
        self,
        request_id: str,
        wanted: Sequence[Measurable],
        find: Callable[[Sequence[Measurable]], Mapping[Measurable, Memory] | None],
    ) -> None:
        self.request_id = request_id
        self._found: Mapping[Measurable, Memory] | None = None
        self._wanted = wanted
        self._find = find

    def is_complete(self) -> bool:
        """Return whether everything is measured; if not, have it measured."""
        if self._found is None:
            self._found = self._find(self._wanted)
        return self._found is not None

    def resident_bytes(self, store: Path) -> int | None:
        """Return how many bytes of a page store are in memory; None if unknown."""
        found = self._value_of(store)
        return found if isinstance(found, int) else None

    def pss_bytes(self, pid: int) -> int | None:
        """Return the proportional set size of a process in bytes; None if unknown."""
        process_memory = self._memory_of(pid)
        return None if process_memory is None else process_memory.pss_bytes

    def private_bytes(self, pid: int) -> int | None:
        """Return how many bytes of memory a process shares with no other process; None if unknown."""
        process_memory = self._memory_of(pid)
        return None if process_memory is None else process_memory.private_bytes

    def anonymous_bytes(self, pid: int) -> int | None:
        """Return how many bytes of a process's memory are not part of a file; None if unknown."""
        process_memory = self._memory_of(pid)
        return None if process_memory is None else process_memory.anonymous_bytes

    def _memory_of(self, pid: int) -> ProcessMemory | None:
        found = self._value_of(pid)
        return found if isinstance(found, ProcessMemory) else None

    def _value_of(self, key: Measurable) -> Memory:
        return None if self._found is None else self._found.get(key)
