"""The memory of all processes for the metrics: measured in a thread of its own, once a minute at most.

The kernel takes milliseconds to count the pages of one process, and longer where that is short of memory: the loop is
not to wait for it, and a scrape gets what was measured before. The thread only reads files below /proc and page stores,
and holds nothing that a fork would miss; children are started by the loop's thread alone, with which they die.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from weightd.daemon.generations.actions import Role
from weightd.daemon.generations.life import Life
from weightd.daemon.host.memory import read_process_memory, resident_bytes
from weightd.daemon.host.shortage import with_limit_hint
from weightd.daemon.models.model import Model
from weightd.daemon.observe.metrics import Footing
from weightd.shared.devices import is_cpu

_log = logging.getLogger("weightd")

INTERVAL_S = 60.0


class Process(Protocol):
    """A child."""

    @property
    def pid(self) -> int:
        """As the kernel numbers it."""
        ...


class Files(Protocol):
    """The files of a generation."""

    @property
    def store(self) -> Path:
        """Its pages."""
        ...


class Copy(NamedTuple):
    """What is to be measured of one generation.

    Attributes:
        pids: its processes.
        shared: what its workers share, by their own word.
        nbytes: what its copy of the weights takes, if that is known by the holder's word.
        store: else the file that is looked at.
    """

    pids: tuple[int, ...]
    shared: int
    nbytes: int
    store: Path | None


Subject = Mapping[str, Sequence[Copy]]


class Found(NamedTuple):
    """What was measured: of the daemon and what belongs to it, and of models by name."""

    pss: int | None = None
    footings: Mapping[str, Footing] = {}


def copies(models: Iterable[Model], processes: Mapping[str, Process], files: Mapping[str, Files]) -> Subject:
    """Return what is to be measured of models.

    Args:
        models: those that are served.
        processes: of all of them, by name.
        files: of each generation, by its label.
    """
    return {
        model.name: [_copy(each, processes, files.get(each.label)) for each in model.generations] for model in models
    }


def _copy(generation: Life, processes: Mapping[str, Process], files: Files | None) -> Copy:
    there = [child for child in generation.alive() if child.name in processes]
    built = generation.built
    is_file = is_cpu(generation.device) and not (built is not None and built.is_template)
    return Copy(
        tuple(processes[child.name].pid for child in there),
        sum(child.shared_bytes for child in there if child.role is Role.WORKER),
        0 if is_file or built is None else built.shared_bytes,
        files.store if is_file and files is not None else None,
    )


class Memory:
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
        self._start = start or _in_a_thread
        self._clock = clock
        self._due = -float("inf")
        self._is_measuring = False
        # The thread puts all of it there at once.
        self._found = Found()

    def look(self, own_pids: Sequence[int], subject: Callable[[], Subject]) -> Found:
        """Return what is known; measure again if it is time for that, for those who ask later."""
        now = self._clock()
        if now >= self._due and not self._is_measuring:
            self._due, self._is_measuring = now + INTERVAL_S, True
            asked = subject()
            try:
                self._start(lambda: self._measure(own_pids, asked))
            except RuntimeError as error:
                self._is_measuring = False
                _log.warning("the memory of the processes is not measured: %s", with_limit_hint(str(error)))
        return self._found

    def _measure(self, own_pids: Sequence[int], asked: Subject) -> None:
        try:
            own = [found.pss_bytes for pid in own_pids if (found := read_process_memory(pid)) is not None]
            footings = {name: footing(each) for name, each in asked.items()}
            self._found = Found(sum(own) if own else None, footings)
        finally:
            self._is_measuring = False


def footing(measured: Iterable[Copy]) -> Footing:
    """Measure the memory of a model's generations."""
    pss, shared, saved, copy = 0, 0, 0, 0
    is_told = True
    for each in measured:
        pss += sum(found.pss_bytes for pid in each.pids if (found := read_process_memory(pid)) is not None)
        nbytes = each.nbytes if each.store is None else resident_bytes(each.store)
        shared += each.shared
        if nbytes is None:
            is_told = False
        else:
            copy += nbytes
            # Of a copy that nobody has used yet, all is on disk: that is no merit of sharing.
            saved += max(0, each.shared - nbytes) if nbytes else 0
    return Footing(pss, shared, saved if is_told else None, copy if is_told else None)


def _in_a_thread(what: Callable[[], None]) -> None:
    # If the kernel does not come back from it, nobody waits at the end.
    threading.Thread(target=what, name="memory", daemon=True).start()
