"""Numbers that stand for tenants and users where workers have to tell their requests apart.

A worker may outlive the daemon: so the number follows from the name alone. 48 bits of a digest are not met by chance.
"""

from __future__ import annotations

import functools
import hashlib

# Names that are remembered, for people.
_MAX_NAMES = 4096


@functools.lru_cache(_MAX_NAMES)
def principal_id(principal: str) -> int:
    """Return the number of a tenant or a user (`ClientOrigin.principal`)."""
    return int.from_bytes(hashlib.blake2b(principal.encode(), digest_size=6).digest(), "big")


class RecentNames:
    """The names of those whose numbers workers were told of late."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def number_of(self, principal: str) -> int:
        """Return the number of a tenant or a user, and remember whose it is."""
        number = principal_id(principal)
        if number not in self._names:
            if len(self._names) >= _MAX_NAMES:
                del self._names[next(iter(self._names))]
            self._names[number] = principal
        return number

    def name_of(self, number: int) -> str:
        """Return the tenant or the user with this number."""
        return self._names.get(number, "a tenant or user of a previous daemon")
