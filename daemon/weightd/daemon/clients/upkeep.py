"""The daemon's own memory, looked at from outside: what nobody has counted is ended, what nobody needs given back."""

from __future__ import annotations

import logging
import time
from collections import Counter

from weightd.daemon.clients.connections import waiting_bytes
from weightd.daemon.clients.outbox import Outbox
from weightd.daemon.clients.peers import Connection, Peers
from weightd.daemon.clients.room import Room
from weightd.daemon.host import memory
from weightd.daemon.host.timers import Timer

_NEVER = float("inf")

_log = logging.getLogger("weightd.frontend")

# A peer on the same host sends some hundred MiB in this time.
INTERVAL_S = 0.1

# Who sends a lot is not always ahead of the library: it is looked at so many times, a millisecond apart.
_SAMPLES = 10

# After a connection was ended its memory has so long to come back, before the next one is.
_PATIENCE_S = 0.5

# Large traffic that has paused for so long may begin again, and would only have to get its memory again.
_QUIET_S = 1.0
_LARGE_BYTES = 1024 * 1024

# What the daemon itself may come to take.
_OWN_BYTES = 64 * 1024 * 1024

# If memory changes by more than this without any traffic, the library has freed something late, and kept some of it.
_SLACK_BYTES = 8 * 1024 * 1024


class Upkeep:
    """Watches the memory of this process while anybody is connected, and for a while after.

    The library keeps a message until all of its frames have come, and has no bound for these: of a message that does
    not end nobody knows but by the memory that it takes. If that is more than `room.most`, beside what is counted
    there, connections are hung up, one after another, until it is less.

    Args:
        room: what is counted.
        outbox: counts in it.
        peers: who may be hung up.

    Attributes:
        timer: when `tick` is due.
    """

    def __init__(self, room: Room, outbox: Outbox, peers: Peers) -> None:
        self.timer = Timer(self.tick)
        self._room = room
        self._outbox = outbox
        self._peers = peers
        self._seen = 0.0
        self._was_large = self._trimmed = float("-inf")
        self._ended = float("-inf")
        # What it had at the beginning, and after it was last given back.
        self._begin = self._left = memory.private_bytes()

    def seen(self, now: float) -> None:
        """A message has come, or a connection has come or gone."""
        self._seen = now
        if self.timer.due == _NEVER:
            self.timer.set(now + INTERVAL_S)

    def tick(self, now: float) -> None:
        """Look."""
        private = memory.private_bytes()
        if self._room.peak > _LARGE_BYTES:
            self._was_large = now
            self._room.peak = self._room.held
        if self._uncounted(private) > self._room.most and now >= self._ended + _PATIENCE_S:
            # The allocator may have kept what was freed.
            memory.trim()
            self._outbox.forget_written()
            uncounted = self._uncounted(memory.private_bytes())
            if uncounted > self._room.most:
                self._end_one(uncounted, now)
        elif now >= self._was_large + _QUIET_S and (
            self._trimmed < self._was_large or abs(private - self._left) > _SLACK_BYTES
        ):
            self._give_back(now)
        is_over = not self._peers.connections and now >= max(self._seen, self._was_large) + 2 * _QUIET_S
        self.timer.set(_NEVER if is_over else now + INTERVAL_S)

    def _uncounted(self, private: int) -> int:
        return private - self._begin - _OWN_BYTES - self._room.held - self._outbox.orphaned()

    def _give_back(self, now: float) -> None:
        self._outbox.forget_written()
        if self._room.held <= _LARGE_BYTES and not self._outbox.orphaned():
            memory.trim()
            self._trimmed = now
            self._left = memory.private_bytes()

    def _end_one(self, uncounted: int, now: float) -> None:
        """Hang up whoever is the most likely to be sending what does not end."""
        there = [each for each in self._peers.connections.values() if not each.leaving]
        sending = Counter[int]()
        for _ in range(_SAMPLES):
            sending.update(each.descriptor for each in there if waiting_bytes(each.descriptor))
            time.sleep(0.001)
        if there:
            guilty = max(there, key=lambda each: self._suspicion(each, now, sending[each.descriptor]))
            text = "%d MiB of messages that do not end, or wait to be read: a connection of %s is hung up"
            _log.error(text, uncounted // 2**20, guilty.user)
            guilty.hang_up()
            self._ended = now

    def _suspicion(self, connection: Connection, now: float, sending: int) -> tuple[int, int, bool, float]:
        """Who sends but ends no message comes first, and who has a request under way, which would be lost, last."""
        silence = float("inf") if connection.heard is None else now - connection.heard
        idle = not any(self._room.of(client) for client in self._peers.clients_of(connection))
        rank = 2 if sending and silence >= _PATIENCE_S else int(idle)
        return rank, sending, idle, silence
