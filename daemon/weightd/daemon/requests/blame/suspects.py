"""Clients whose requests kill seat after seat, though each has another content: they run apart, or are refused.

Plain decisions, fed with the clock. A client is known by what the kernel says of it, on two levels. Whose requests
kill seats faster than these are replaced is confined: all clients that are have one seat together, which takes one
of their requests at a time. Each death that follows has what that client asks refused for a while, longer each time.
Somebody who begins anew, from another process or on another connection, is met on the second level: by its user or
its address.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weightd.daemon.requests.request import Origin
from weightd.protocol.errors import ResourceExhausted

# So many deaths in a row, of a process and of a user. One request of which two seats died has already made two.
NEAR_DEATHS = 4
FAR_DEATHS = 8

# A death is of the same row as the one before if it comes sooner than this. Who kills more slowly takes less from the
# others than to be refused would take from an innocent: most seats are replaced faster.
MEMORY_S = 15.0

# For how long the first death of a client that is confined has it refused, and the later ones at most.
FIRST_REFUSAL_S = 10.0
LONGEST_REFUSAL_S = 60.0
_MAX_DOUBLINGS = 10

# Who is remembered; the oldest gives way. Each costs two hundred bytes.
_MAX_KNOWN = 1024


@dataclass
class _Party:
    """A process, connection, user or address; `most` deaths are borne. Times are monotonic seconds."""

    most: int
    deaths: int = 0
    refused_until: float = 0.0
    forgotten_at: float = 0.0

    @property
    def is_confined(self) -> bool:
        return self.deaths >= self.most


class Suspects:
    """The clients of one model that seats were lost to. Times are monotonic seconds.

    Attributes:
        known: by their names; while there are none nobody is refused, or confined.
    """

    def __init__(self) -> None:
        self.known: dict[str, _Party] = {}

    def died(self, origin: Origin, ran: float, now: float) -> None:
        """A seat has died, left or had to be ended of what this client asked, which it had run for `ran` seconds."""
        self._forget_expired(now)
        near = self._count(origin.near, NEAR_DEATHS, ran, now)
        if near.deaths <= NEAR_DEATHS:
            # What a process does that is confined already says nothing about the others of its user.
            self._count(origin.far, FAR_DEATHS, ran, now)

    def check(self, origin: Origin, now: float) -> None:
        """Raise if what the client asks is refused now.

        Raises:
            ResourceExhausted: the text says why, `retry_after` for how long.
        """
        for name, party in self._parties(origin, now):
            left = party.refused_until - now
            if left > 0:
                text = f"{party.deaths} workers were lost to requests of {name}: it is refused for {left:.0f} s more"
                raise ResourceExhausted(text, retry_after=left)

    def confines(self, origin: Origin, now: float) -> bool:
        """Return whether what the client asks runs apart."""
        return any(party.is_confined for _, party in self._parties(origin, now))

    def clear(self) -> None:
        """Forget everything: another model is served."""
        self.known.clear()

    def names(self, now: float) -> list[str]:
        """Return who is confined."""
        self._forget_expired(now)
        return [name for name, party in self.known.items() if party.is_confined]

    def _parties(self, origin: Origin, now: float) -> Iterator[tuple[str, _Party]]:
        for name in origin:
            party = self.known.get(name)
            if party is not None and now < party.forgotten_at:
                yield name, party

    def _count(self, name: str, most: int, ran: float, now: float) -> _Party:
        party = self.known.pop(name, None) or _Party(most)  # the oldest comes first
        self.known[name] = party
        if len(self.known) > _MAX_KNOWN:
            del self.known[next(iter(self.known))]
        party.deaths += 1
        if party.deaths > most:
            doublings = min(party.deaths - most - 1, _MAX_DOUBLINGS)
            party.refused_until = now + min(FIRST_REFUSAL_S * 2.0**doublings, LONGEST_REFUSAL_S)
        # The next one may have to run as long before it kills.
        party.forgotten_at = max(now, party.refused_until) + MEMORY_S + ran
        return party

    def _forget_expired(self, now: float) -> None:
        self.known = {name: party for name, party in self.known.items() if now < party.forgotten_at}
