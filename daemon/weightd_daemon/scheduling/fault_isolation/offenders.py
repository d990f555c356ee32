"""Restricts clients whose requests crash slot after slot, even if each request has a different content.

The module only decides; callers pass the time. The kernel's information identifies a client on two levels: the process
or connection, and the user or address. The second level also covers a client that continues from another process or on
another connection.

A client whose requests crash slots faster than slots are replaced is confined: the slots run one confined request at a
time. After each further crash, the client is refused for a while, longer each time.

If tenants are configured, the tenant is the only level, and its crashes at all models count together. After the first
crash, the tenant gets one slot at a time at every model. After a few more crashes, the tenant is refused for a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weightd_daemon.scheduling.request import ClientOrigin
from weightd_protocol.errors import ResourceExhausted

# Number of slot deaths in a row after which a process or connection (peer), or a user or address (principal), is
# confined. A request that crashes a slot runs a second time, so one request can account for two deaths.
MAX_PEER_DEATHS = 4
MAX_PRINCIPAL_DEATHS = 8

# Number of slot deaths in a row that a tenant may cause without being refused. The first one confines the tenant.
MAX_TENANT_DEATHS = 3

# Seconds without a further slot death after which the deaths of an offender are forgotten. A client that crashes slots
# more slowly is tolerated: most slots are replaced faster, so such a client does less harm than the refusal of an
# innocent client would.
OFFENSE_RETENTION_S = 15.0

# Seconds for which a client is refused at first. Each further slot death doubles them, up to `MAX_REFUSAL_S`.
MIN_REFUSAL_S = 10.0
MAX_REFUSAL_S = 60.0
_MAX_DOUBLINGS = 10

# Maximum number of offenders in a table, of about two hundred bytes each. A full table drops its oldest entry.
_MAX_OFFENDERS = 1024


@dataclass
class _Offender:
    """A process, connection, user, address or tenant whose requests have crashed slots. Times are monotonic seconds.

    Attributes:
        max_deaths: the number of slot deaths that do not lead to a refusal; each further death does.
        confinement_deaths: the number of slot deaths after which the offender's requests are confined.
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
    """Offenders by name: the clients of one model, or the tenants of all models.

    Attributes:
        offenders: the offenders, the one with the oldest death first. This dictionary is never replaced, because
            `FaultIsolator.grounds` refers to it.
    """

    def __init__(self) -> None:
        self.offenders: dict[str, _Offender] = {}

    def record_death(self, name: str, max_deaths: int, confinement_deaths: int, ran_s: float, now: float) -> _Offender:
        """Count a slot death for the offender with this name, after a run of `ran_s` seconds; return the offender."""
        self.drop_expired(now)
        offender = self.offenders.pop(name, None) or _Offender(max_deaths, confinement_deaths)  # the oldest is first
        self.offenders[name] = offender
        if len(self.offenders) > _MAX_OFFENDERS:
            del self.offenders[next(iter(self.offenders))]
        offender.deaths += 1
        if offender.deaths > max_deaths:
            doublings = min(offender.deaths - max_deaths - 1, _MAX_DOUBLINGS)
            offender.refused_until = now + min(MIN_REFUSAL_S * 2.0**doublings, MAX_REFUSAL_S)
        # The client's next request may run as long as this one before it crashes its slot. So remember the offender for
        # `ran_s` seconds more.
        offender.expires_at = max(now, offender.refused_until) + OFFENSE_RETENTION_S + ran_s
        return offender

    def get(self, name: str, now: float) -> _Offender | None:
        """Return the offender of this name; None if there is no entry or the entry has expired."""
        offender = self.offenders.get(name)
        return offender if offender is not None and now < offender.expires_at else None

    def confined_names(self, now: float) -> list[str]:
        """Return the names of the confined offenders."""
        self.drop_expired(now)
        return [name for name, offender in self.offenders.items() if offender.is_confined]

    def drop_expired(self, now: float) -> None:
        """Remove expired offenders."""
        for name in [name for name, offender in self.offenders.items() if now >= offender.expires_at]:
            del self.offenders[name]


class ClientOffenses:
    """The offenders among the clients of one model. Times are monotonic seconds.

    Args:
        tenant_offenders: the tenants whose requests have crashed slots; one object for all models.

    Attributes:
        tables: the tables of all offenders. While they are empty, no client is refused or confined.
    """

    def __init__(self, tenant_offenders: OffenderTable | None = None) -> None:
        self.tenant_offenders = tenant_offenders if tenant_offenders is not None else OffenderTable()
        self._client_offenders = OffenderTable()
        self.tables = self.tenant_offenders, self._client_offenders

    def record_death(self, origin: ClientOrigin, ran_s: float, now: float) -> None:
        """Record that a slot was lost because of a client's request, which had run for `ran_s` seconds."""
        if origin.is_tenant:
            self.tenant_offenders.record_death(origin.principal, MAX_TENANT_DEATHS, 1, ran_s, now)
            return
        peer = self._client_offenders.record_death(origin.peer, MAX_PEER_DEATHS, MAX_PEER_DEATHS, ran_s, now)
        if peer.deaths <= MAX_PEER_DEATHS:
            # Once a process is confined, its further offenses do not count against its user: they say nothing about the
            # user's other processes.
            self._client_offenders.record_death(
                origin.principal, MAX_PRINCIPAL_DEATHS, MAX_PRINCIPAL_DEATHS, ran_s, now
            )

    def check_not_refused(self, origin: ClientOrigin, now: float) -> None:
        """Raise an error if the client's requests are refused now.

        Raises:
            ResourceExhausted: the requests are refused; `retry_after` is the remaining time.
        """
        for name, offender in self._offenders_of(origin, now):
            left = offender.refused_until - now
            if left > 0:
                text = (
                    f"requests of {name} crashed or hung {offender.deaths} workers:"
                    f" they are rejected for {left:.0f} s more"
                )
                raise ResourceExhausted(text, retry_after=left)

    def is_confined(self, origin: ClientOrigin, now: float) -> bool:
        """Return whether the client's requests are confined."""
        return any(offender.is_confined for _, offender in self._offenders_of(origin, now))

    def should_fail_next(self, origin: ClientOrigin, now: float) -> bool:
        """Return whether the client's next request that crashes a slot ends at once, without a second run."""
        return any(offender.deaths > 1 for _, offender in self._offenders_of(origin, now) if offender.is_confined)

    def clear(self) -> None:
        """Forget the clients of this model, because the model version has changed.

        The entries of tenants stay, because tenants may have crashed slots of other models.
        """
        self._client_offenders.offenders.clear()

    def confined_names(self, now: float) -> list[str]:
        """Return the names of the confined clients and tenants."""
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
