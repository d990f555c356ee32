"""Clients whose requests kill seat after seat, though each has another content: they run apart, or are refused.

Plain decisions, fed with the clock. A client is known by what the kernel says of it, on two levels. Whose requests
kill seats faster than these are replaced is confined: all clients that are have one seat together, which takes one
of their requests at a time. Each death that follows has what that client asks refused for a while, longer each time.
Somebody who begins anew, from another process or on another connection, is met on the second level: by its user or
its address.

Where there are tenants, that level is the tenant, and it is the same for all models: with the first death it has one
seat at a time, wherever it asks, and soon it is refused for a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weightd.daemon.requests.request import Origin
from weightd.protocol.errors import ResourceExhausted

# So many deaths in a row, of a process and of a user. One request of which two seats died has already made two.
NEAR_DEATHS = 4
FAR_DEATHS = 8

# Of a tenant: from the first one on it is confined, and after so many it is refused.
TENANT_DEATHS = 3

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
    """A process, connection, user, address or tenant. Times are monotonic seconds.

    Attributes:
        most: deaths that are borne before it is refused.
        free: deaths after which it is confined.
    """

    most: int
    free: int
    deaths: int = 0
    refused_until: float = 0.0
    forgotten_at: float = 0.0

    @property
    def is_confined(self) -> bool:
        return self.deaths >= self.free


class Known:
    """Parties by their names: of one model, or of all where these are tenants."""

    def __init__(self) -> None:
        self.parties: dict[str, _Party] = {}

    def count(self, name: str, most: int, free: int, ran: float, now: float) -> _Party:
        """Seats were lost to what this one asked once more; return it."""
        self.forget_expired(now)
        party = self.parties.pop(name, None) or _Party(most, free)  # the oldest comes first
        self.parties[name] = party
        if len(self.parties) > _MAX_KNOWN:
            del self.parties[next(iter(self.parties))]
        party.deaths += 1
        if party.deaths > most:
            doublings = min(party.deaths - most - 1, _MAX_DOUBLINGS)
            party.refused_until = now + min(FIRST_REFUSAL_S * 2.0**doublings, LONGEST_REFUSAL_S)
        # The next one may have to run as long before it kills.
        party.forgotten_at = max(now, party.refused_until) + MEMORY_S + ran
        return party

    def get(self, name: str, now: float) -> _Party | None:
        """Return a party that has not been forgotten by now."""
        party = self.parties.get(name)
        return party if party is not None and now < party.forgotten_at else None

    def confined(self, now: float) -> list[str]:
        """Return who is."""
        self.forget_expired(now)
        return [name for name, offender in self.parties.items() if offender.is_confined]

    def forget_expired(self, now: float) -> None:
        """Forget those to whom no seat was lost for long."""
        self.parties = {name: offender for name, offender in self.parties.items() if now < offender.forgotten_at}


class Suspects:
    """The clients of one model that seats were lost to. Times are monotonic seconds.

    Attributes:
        tenants: those to whom seats of any model were lost: one object for all models.
    """

    def __init__(self) -> None:
        self.tenants = Known()
        self._own = Known()

    @property
    def are_known(self) -> bool:
        """Whether there are any; else nobody is refused, or confined."""
        return bool(self._own.parties or self.tenants.parties)

    def died(self, origin: Origin, ran: float, now: float) -> None:
        """A seat has died, left or had to be ended of what this client asked, which it had run for `ran` seconds."""
        if origin.is_tenant:
            self.tenants.count(origin.far, TENANT_DEATHS, 1, ran, now)
            return
        near = self._own.count(origin.near, NEAR_DEATHS, NEAR_DEATHS, ran, now)
        if near.deaths <= NEAR_DEATHS:
            # What a process does that is confined already says nothing about the others of its user.
            self._own.count(origin.far, FAR_DEATHS, FAR_DEATHS, ran, now)

    def check(self, origin: Origin, now: float) -> None:
        """Raise if what the client asks is refused now.

        Raises:
            ResourceExhausted: the text says why, `retry_after` for how long.
        """
        for name, offender in self._parties(origin, now):
            left = offender.refused_until - now
            if left > 0:
                text = f"{offender.deaths} workers were lost to requests of {name}: it is refused for {left:.0f} s more"
                raise ResourceExhausted(text, retry_after=left)

    def confines(self, origin: Origin, now: float) -> bool:
        """Return whether what the client asks runs apart."""
        return any(offender.is_confined for _, offender in self._parties(origin, now))

    def condemns(self, origin: Origin, now: float) -> bool:
        """Return whether the next seat that is lost to what the client asks ends that request, proven or not."""
        return any(offender.deaths > 1 for _, offender in self._parties(origin, now) if offender.is_confined)

    def clear(self) -> None:
        """Forget everything: another model is served. What a tenant has done stays: it may have done it to others."""
        self._own.parties.clear()

    def names(self, now: float) -> list[str]:
        """Return who is confined."""
        return [*self._own.confined(now), *self.tenants.confined(now)]

    def _parties(self, origin: Origin, now: float) -> Iterator[tuple[str, _Party]]:
        known, names = (self.tenants, (origin.far,)) if origin.is_tenant else (self._own, (origin.near, origin.far))
        for name in names:
            offender = known.get(name, now)
            if offender is not None:
                yield name, offender
