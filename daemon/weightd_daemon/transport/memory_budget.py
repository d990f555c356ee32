"""What clients make the daemon keep in memory, and whose turn it is when that is too much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from weightd_daemon.platform import memory
from weightd_daemon.platform.event_loop import Timer

# What an allocator does not give back by itself.
LARGE_BYTES = 1024 * 1024


class MemoryBudget:
    """One bound for all clients together: of bytes that are kept for them.

    Args:
        max_bytes: bytes; what is alone may be more.
        user_of: called with a client; returns on whose account it goes, "" where that is not known. Clients of one user
            share what it gets.
        on_large: called whenever `LARGE_BYTES` or more are taken at once.

    Attributes:
        used_bytes: bytes now.
    """

    def __init__(
        self, max_bytes: int, user_of: Callable[[bytes], str], on_large: Callable[[], object] = lambda: None
    ) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.user_of = user_of
        self._on_large_reservation = on_large
        self._bytes_by_client: dict[bytes, int] = {}

    def can_reserve(self, nbytes: int) -> bool:
        """Whether so much more may be taken."""
        return not self.used_bytes or self.used_bytes + nbytes <= self.max_bytes

    def try_reserve(self, client: bytes, nbytes: int) -> bool:
        """Keep so much more for a client if there is room; return whether there is."""
        used_bytes = self.used_bytes
        if used_bytes and used_bytes + nbytes > self.max_bytes:
            return False
        self._bytes_by_client[client] = self._bytes_by_client.get(client, 0) + nbytes
        self.used_bytes = used_bytes + nbytes
        if nbytes >= LARGE_BYTES:
            self._on_large_reservation()
        return True

    def used_by(self, client: bytes) -> int:
        """Return what is kept for a client."""
        return self._bytes_by_client.get(client, 0)

    def reserve(self, client: bytes, nbytes: int) -> None:
        """So much more is kept for a client."""
        self._bytes_by_client[client] = self._bytes_by_client.get(client, 0) + nbytes
        self.used_bytes += nbytes
        if nbytes >= LARGE_BYTES:
            self._on_large_reservation()

    def release(self, client: bytes, nbytes: int) -> None:
        """So much is kept no more; of a client that was forgotten it no longer counts."""
        client_bytes = self._bytes_by_client.get(client, 0)
        if client_bytes and nbytes <= client_bytes:
            self._bytes_by_client[client] = client_bytes - nbytes
            self.used_bytes -= nbytes
        else:
            self.release_all(client)

    def release_all(self, client: bytes) -> None:
        """The client has gone, or is made to go: what is kept for it goes, too."""
        self.used_bytes -= self._bytes_by_client.pop(client, 0)

    def largest_client(self, client: bytes, nbytes: int) -> bytes:
        """Return whose turn it is if a client wants so much more: who has most of the user that has most."""
        bytes_by_client = {**self._bytes_by_client, client: self.used_by(client) + nbytes}
        clients_by_user: defaultdict[str, dict[bytes, int]] = defaultdict(dict)
        for each, held in bytes_by_client.items():
            clients_by_user[self.user_of(each)][each] = held
        client_bytes = max(clients_by_user.values(), key=lambda clients: sum(clients.values()))
        return max(client_bytes, key=client_bytes.__getitem__)


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
