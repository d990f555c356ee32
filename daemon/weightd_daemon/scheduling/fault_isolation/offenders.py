"""Clients whose requests kill slot after slot, though each has another content: they run apart, or are refused.

Plain decisions, fed with the clock. A client is known by what the kernel says of it, on two levels. Whose requests
kill slots faster than these are replaced is confined: all clients that are have one slot together, which takes one
of their requests at a time. Each death that follows has what that client asks refused for a while, longer each time.
Somebody who begins anew, from another process or on another connection, is met on the second level: by its user or
its address.

Where there are tenants, that level is the tenant, and it is the same for all models: with the first death it has one
slot at a time, wherever it asks, and soon it is refused for a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weightd_daemon.scheduling.request import ClientOrigin
from weightd_protocol.errors import ResourceExhausted

# So many deaths in a row, of a process and of a user. One request of which two slots died has already made two.
MAX_PEER_DEATHS = 4
MAX_PRINCIPAL_DEATHS = 8

# Of a tenant: from the first one on it is confined, and after so many it is refused.
MAX_TENANT_DEATHS = 3

# A death is of the same row as the one before if it comes sooner than this. Who kills more slowly takes less from the
# others than to be refused would take from an innocent: most slots are replaced faster.
OFFENSE_RETENTION_S = 15.0

# For how long the first death of a client that is confined has it refused, and the later ones at most.
MIN_REFUSAL_S = 10.0
MAX_REFUSAL_S = 60.0
_MAX_DOUBLINGS = 10

# Who is remembered; the oldest gives way. Each costs two hundred bytes.
_MAX_OFFENDERS = 1024


@dataclass
class _Offender:
    """A process, connection, user, address or tenant. Times are monotonic seconds.

    Attributes:
        max_deaths: deaths that are borne before it is refused.
        confinement_deaths: deaths after which it is confined.
    """

    max_deaths: int
    confinement_deaths: int
    deaths: int = 0
    refused_until: float = 0.0
    expires_at: float = 0.0

    @property
    def is_confined(self) -> bool:
        return self.deaths >= self.confinement_deaths


class OffenderTable:
    """Principals by their names: of one model, or of all where these are tenants.

    Attributes:
        offenders: those that are known, the oldest first; always the same dictionary.
    """

    def __init__(self) -> None:
        self.offenders: dict[str, _Offender] = {}

    def record_death(self, name: str, max_deaths: int, confinement_deaths: int, ran_s: float, now: float) -> _Offender:
        """Slots were lost to what this one asked once more; return it."""
        self.drop_expired(now)
        offender = self.offenders.pop(name, None) or _Offender(max_deaths, confinement_deaths)  # the oldest comes first
        self.offenders[name] = offender
        if len(self.offenders) > _MAX_OFFENDERS:
            del self.offenders[next(iter(self.offenders))]
        offender.deaths += 1
        if offender.deaths > max_deaths:
            doublings = min(offender.deaths - max_deaths - 1, _MAX_DOUBLINGS)
            offender.refused_until = now + min(MIN_REFUSAL_S * 2.0**doublings, MAX_REFUSAL_S)
        # The next one may have to run as long before it kills.
        offender.expires_at = max(now, offender.refused_until) + OFFENSE_RETENTION_S + ran_s
        return offender

    def get(self, name: str, now: float) -> _Offender | None:
        """Return a principal that has not been forgotten by now."""
        offender = self.offenders.get(name)
        return offender if offender is not None and now < offender.expires_at else None

    def confined_names(self, now: float) -> list[str]:
        """Return who is."""
        self.drop_expired(now)
        return [name for name, offender in self.offenders.items() if offender.is_confined]

    def drop_expired(self, now: float) -> None:
        """Forget those to whom no slot was lost for long."""
        for name in [name for name, offender in self.offenders.items() if now >= offender.expires_at]:
            del self.offenders[name]


class ClientOffenses:
    """The clients of one model that slots were lost to. Times are monotonic seconds.

    Args:
        tenant_offenders: those to whom slots of any model were lost: one object for all models.

    Attributes:
        tables: of all offenders; while they are empty, nobody is refused or confined.
    """

    def __init__(self, tenant_offenders: OffenderTable | None = None) -> None:
        self.tenant_offenders = tenant_offenders if tenant_offenders is not None else OffenderTable()
        self._client_offenders = OffenderTable()
        self.tables = self.tenant_offenders, self._client_offenders

    def record_death(self, origin: ClientOrigin, ran_s: float, now: float) -> None:
        """A slot has died, left or had to be ended of what this client asked, which it had run for `ran_s` seconds."""
        if origin.is_tenant:
            self.tenant_offenders.record_death(origin.principal, MAX_TENANT_DEATHS, 1, ran_s, now)
            return
        peer = self._client_offenders.record_death(origin.peer, MAX_PEER_DEATHS, MAX_PEER_DEATHS, ran_s, now)
        if peer.deaths <= MAX_PEER_DEATHS:
            # What a process does that is confined already says nothing about the others of its user.
            self._client_offenders.record_death(
                origin.principal, MAX_PRINCIPAL_DEATHS, MAX_PRINCIPAL_DEATHS, ran_s, now
            )

    def check_not_refused(self, origin: ClientOrigin, now: float) -> None:
        """Raise if what the client asks is refused now.

        Raises:
            ResourceExhausted: the text says why, `retry_after` for how long.
        """
        for name, offender in self._offenders_of(origin, now):
            left = offender.refused_until - now
            if left > 0:
                text = f"requests of {name} ended {offender.deaths} workers: they are rejected for {left:.0f} s more"
                raise ResourceExhausted(text, retry_after=left)

    def is_confined(self, origin: ClientOrigin, now: float) -> bool:
        """Return whether what the client asks runs apart."""
        return any(offender.is_confined for _, offender in self._offenders_of(origin, now))

    def should_fail_next(self, origin: ClientOrigin, now: float) -> bool:
        """Return whether the next slot that is lost to what the client asks ends that request, proven or not."""
        return any(offender.deaths > 1 for _, offender in self._offenders_of(origin, now) if offender.is_confined)

    def clear(self) -> None:
        """Forget everything: another model is served. What a tenant has done stays: it may have done it to others."""
        self._client_offenders.offenders.clear()

    def confined_names(self, now: float) -> list[str]:
        """Return who is confined."""
        return [*self._client_offenders.confined_names(now), *self.tenant_offenders.confined_names(now)]

    def _offenders_of(self, origin: ClientOrigin, now: float) -> Iterator[tuple[str, _Offender]]:
        table, names = (
            (self.tenant_offenders, (origin.principal,))
            if origin.is_tenant
            else (self._client_offenders, (origin.peer, origin.principal))
        )
        for name in names:
            offender = table.get(name, now)
            if offender is not None:
                yield name, offender
