"""The daemon's own memory: what large messages have taken is given back when nobody needs it any more."""

from __future__ import annotations

from weightd_daemon.api.memory_budget import LARGE_BYTES, MemoryBudget
from weightd_daemon.platform import memory
from weightd_daemon.platform.timers import Timer

_NEVER = float("inf")

# Large traffic that has paused for so long may begin again, and would only have to get its memory again.
TRIM_DELAY_S = 1.0


class HeapTrimmer:
    """Gives memory back to the kernel a while after the last large message.

    Args:
        memory_budget: what is kept for clients.

    Attributes:
        timer: when `on_timer` is due.
    """

    def __init__(self, memory_budget: MemoryBudget) -> None:
        self.timer = Timer(self.on_timer)
        self._memory_budget = memory_budget

    def on_large_message(self, now: float) -> None:
        """A message of `LARGE_BYTES` or more has come, or is not read at once."""
        self.timer.set(now + TRIM_DELAY_S)

    def on_timer(self, now: float) -> None:
        """Give back what can be, unless something large is under way still."""
        if self._memory_budget.used_bytes >= LARGE_BYTES:
            self.timer.set(now + TRIM_DELAY_S)
        else:
            memory.trim_heap()
            self.timer.set(_NEVER)
