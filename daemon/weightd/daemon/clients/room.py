"""What clients make the daemon keep in memory, and whose turn it is when that is too much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

# What an allocator does not give back by itself.
LARGE_BYTES = 1024 * 1024


class Room:
    """One bound for all clients together: of bytes that are kept for them.

    Args:
        most: bytes; what is alone may be more.
        user: called with a client; returns on whose account it goes, "" where that is not known. Clients of one user
            share what it gets.
        on_large: called whenever `LARGE_BYTES` or more are taken at once.

    Attributes:
        held: bytes now.
    """

    def __init__(self, most: int, user: Callable[[bytes], str], on_large: Callable[[], object] = lambda: None) -> None:
        self.most = most
        self.held = 0
        self.user = user
        self._on_large = on_large
        self._by_client: dict[bytes, int] = {}

    def fits(self, nbytes: int) -> bool:
        """Whether so much more may be taken."""
        return not self.held or self.held + nbytes <= self.most

    def of(self, client: bytes) -> int:
        """Return what is kept for a client."""
        return self._by_client.get(client, 0)

    def take(self, client: bytes, nbytes: int) -> None:
        """So much more is kept for a client."""
        self._by_client[client] = self._by_client.get(client, 0) + nbytes
        self.held += nbytes
        if nbytes >= LARGE_BYTES:
            self._on_large()

    def give(self, client: bytes, nbytes: int) -> None:
        """So much is kept no more; of a client that was forgotten it no longer counts."""
        has = self._by_client.get(client, 0)
        if has and nbytes <= has:
            self._by_client[client] = has - nbytes
            self.held -= nbytes
        else:
            self.forget(client)

    def forget(self, client: bytes) -> None:
        """The client has gone, or is made to go: what is kept for it goes, too."""
        self.held -= self._by_client.pop(client, 0)

    def largest(self, client: bytes, nbytes: int) -> bytes:
        """Return whose turn it is if a client wants so much more: who has most of the user that has most."""
        wanted = {**self._by_client, client: self.of(client) + nbytes}
        users: defaultdict[str, dict[bytes, int]] = defaultdict(dict)
        for each, held in wanted.items():
            users[self.user(each)][each] = held
        most = max(users.values(), key=lambda clients: sum(clients.values()))
        return max(most, key=most.__getitem__)
