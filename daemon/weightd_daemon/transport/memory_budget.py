"""Memory budget: counts the bytes that the daemon keeps for clients, and finds the client with the most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from weightd_daemon.platform import memory
from weightd_daemon.platform.event_loop import Timer

# Minimum bytes of a large message. The freed memory of large messages is returned to the kernel explicitly.
LARGE_BYTES = 1024 * 1024


class MemoryBudget:
    """A common limit on the bytes that the daemon keeps for all clients.

    Args:
        max_bytes: the limit. A reservation may exceed the limit if nothing else is reserved.
        user_of: returns the principal of a client, "" if unknown. The clients of one principal count together.
        on_large: called whenever `LARGE_BYTES` or more are reserved at once.

    Attributes:
        used_bytes: the bytes that are reserved for all clients.
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
        """Return whether `nbytes` more may be reserved."""
        return not self.used_bytes or self.used_bytes + nbytes <= self.max_bytes

    def try_reserve(self, client: bytes, nbytes: int) -> bool:
        """Reserve `nbytes` for a client if the limit allows it; return whether it does."""
        used_bytes = self.used_bytes
        if used_bytes and used_bytes + nbytes > self.max_bytes:
            return False
        self._bytes_by_client[client] = self._bytes_by_client.get(client, 0) + nbytes
        self.used_bytes = used_bytes + nbytes
        if nbytes >= LARGE_BYTES:
            self._on_large_reservation()
        return True

    def used_by(self, client: bytes) -> int:
        """Return the bytes that are reserved for a client."""
        return self._bytes_by_client.get(client, 0)

    def reserve(self, client: bytes, nbytes: int) -> None:
        """Reserve `nbytes` for a client, even beyond the limit."""
        self._bytes_by_client[client] = self._bytes_by_client.get(client, 0) + nbytes
        self.used_bytes += nbytes
        if nbytes >= LARGE_BYTES:
            self._on_large_reservation()

    def release(self, client: bytes, nbytes: int) -> None:
        """Release `nbytes` of a client's reservation, or all of the reservation if it is smaller."""
        client_bytes = self._bytes_by_client.get(client, 0)
        if client_bytes and nbytes <= client_bytes:
            self._bytes_by_client[client] = client_bytes - nbytes
            self.used_bytes -= nbytes
        else:
            self.release_all(client)

    def release_all(self, client: bytes) -> None:
        """Release everything that is reserved for a client, which has disconnected or is being disconnected."""
        self.used_bytes -= self._bytes_by_client.pop(client, 0)

    def largest_client(self, client: bytes, nbytes: int) -> bytes:
        """Return the client to disconnect before `client` reserves `nbytes`.

        This is the client with the most bytes among the clients of the user with the most bytes. The bytes that
        `client` wants to reserve count as reserved.
        """
        bytes_by_client = {**self._bytes_by_client, client: self.used_by(client) + nbytes}
        clients_by_user: defaultdict[str, dict[bytes, int]] = defaultdict(dict)
        for each, held in bytes_by_client.items():
            clients_by_user[self.user_of(each)][each] = held
        client_bytes = max(clients_by_user.values(), key=lambda clients: sum(clients.values()))
        return max(client_bytes, key=client_bytes.__getitem__)


_NEVER = float("inf")

# Seconds from the last large message until freed memory is returned to the kernel. Large messages often follow one
# another, so memory that is returned earlier would be needed again at once.
TRIM_DELAY_S = 1.0


class HeapTrimmer:
    """Returns freed memory to the kernel `TRIM_DELAY_S` after the last large message.

    Args:
        memory_budget: shows whether large messages are still kept.

    Attributes:
        timer: calls `on_timer`.
    """

    def __init__(self, memory_budget: MemoryBudget) -> None:
        self.timer = Timer(self.on_timer)
        self._memory_budget = memory_budget

    def on_large_message(self, now: float) -> None:
        """Restart the delay, because a message of `LARGE_BYTES` or more has arrived or is queued for a client."""
        self.timer.set(now + TRIM_DELAY_S)

    def on_timer(self, now: float) -> None:
        """Return freed memory to the kernel, unless large messages are still kept."""
        if self._memory_budget.used_bytes >= LARGE_BYTES:
            self.timer.set(now + TRIM_DELAY_S)
        else:
            memory.trim_heap()
            self.timer.set(_NEVER)
