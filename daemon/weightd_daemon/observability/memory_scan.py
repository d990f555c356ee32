"""What a status needs of the kernel, which takes that milliseconds a process: measured at most once a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar, cast

from weightd_daemon.platform.memory import ProcessMemory, read_process_memory

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
