"""The gate's memory: what nobody has counted is ended, what nobody needs given back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from weightd.daemon.gate import kernel
from weightd.daemon.gate.link import ERROR, Log
from weightd.daemon.gate.memory import Memory
from weightd.daemon.gate.peers import Connection, Peers
from weightd.daemon.host.timers import Timer

_NEVER = float("inf")

# A peer on the same host sends some hundred MiB in this time.
INTERVAL_S = 0.1

# Who sends a lot is not always ahead of the library: it is looked at so many times, a millisecond apart. And on a busy
# machine it may have to wait for a processor: who has never ended a message is waited for so many times.
_SAMPLES = 10
_MOST_SAMPLES = 50

# After a connection was ended its memory has so long to come back, before the next one is.
_PATIENCE_S = 0.5

# Large traffic that has paused for so long may begin again, and would only have to get its memory again.
_QUIET_S = 1.0
_LARGE_BYTES = 1024 * 1024

# What the gate itself may come to take.
OWN_BYTES = 64 * 1024 * 1024

# If memory changes by more than this without any traffic, the library has freed something late, and kept some of it.
_SLACK_BYTES = 8 * 1024 * 1024


class Upkeep:
    """Watches the memory of this process while anybody is connected, and for a while after.

    The library keeps a message until all of its frames have come, and has no bound for these: of a message that does
    not end nobody knows but by the memory that it takes. If that is more than `most`, beside what is counted,
    connections are hung up, one after another, until it is less.

    Args:
        memory: of this process.
        peers: who may be hung up.
        counted: returns how many bytes are known to be kept for clients.
        most: that may be kept for them unknown.
        log: writes what happens.

    Attributes:
        timer: when `tick` is due.
    """

    def __init__(self, memory: Memory, peers: Peers, counted: Callable[[], int], most: int, log: Log) -> None:
        self.timer = Timer(self.tick)
        self._memory = memory
        self._peers = peers
        self._counted = counted
        self._most = most
        self._log = log
        self._seen = 0.0
        self._was_large = self._trimmed = self._ended = float("-inf")
        # What it had at the beginning, after it was last given back, and when it was last looked at.
        self._begin = self._left = self._last = memory.private_bytes()

    def seen(self, now: float) -> None:
        """A message has come, or a connection has come or gone."""
        self._seen = now
        if self.timer.due == _NEVER:
            self.timer.set(now + INTERVAL_S)

    def tick(self, now: float) -> None:
        """Look."""
        private = self._memory.private_bytes()
        if self._counted() > _LARGE_BYTES or abs(private - self._last) > _SLACK_BYTES:
            self._was_large = now
        self._last = private
        if self._uncounted(private) > self._most and now >= self._ended + _PATIENCE_S:
            # The allocator may have kept what was freed.
            self._memory.trim()
            uncounted = self._uncounted(self._memory.private_bytes())
            if uncounted > self._most:
                self._end_one(uncounted, now)
        elif now >= self._was_large + _QUIET_S and (
            self._trimmed < self._was_large or abs(private - self._left) > _SLACK_BYTES
        ):
            self._memory.trim()
            self._trimmed = now
            self._left = self._last = self._memory.private_bytes()
        is_over = not self._peers.connections and now >= max(self._seen, self._was_large) + 2 * _QUIET_S
        self.timer.set(_NEVER if is_over else now + INTERVAL_S)

    def _uncounted(self, private: int) -> int:
        return private - self._begin - OWN_BYTES - self._counted()

    def _end_one(self, uncounted: int, now: float) -> None:
        """Hang up whoever is the most likely to be sending what does not end."""
        there = [each for each in self._peers.connections.values() if not each.leaving]
        sending = Counter[int]()
        mute = [each.descriptor for each in there if each.heard is None]
        for count in range(1, 1 + (_MOST_SAMPLES if mute else _SAMPLES)):
            sending.update(each.descriptor for each in there if kernel.waiting_bytes(each.descriptor))
            if count >= _SAMPLES and any(sending[each] for each in mute):
                break
            time.sleep(0.001)
        if there:
            guilty = max(there, key=lambda each: _suspicion(each, now, sending[each.descriptor]))
            much = f"{uncounted // 2**20} MiB of messages that do not end, or wait to be read"
            self._log(ERROR, f"{much}: a connection of {guilty.user} is hung up")
            guilty.hang_up()
            self._ended = now


def _suspicion(connection: Connection, now: float, sending: int) -> tuple[bool, bool, int, float]:
    """Who sends but ends no message comes first, and of those who has never ended one: others may not be read yet."""
    heard = connection.heard
    silence = now - (connection.since if heard is None else heard)
    return bool(sending) and silence >= _PATIENCE_S, heard is None, sending, silence
