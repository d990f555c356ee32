"""Table of the errors that are legal during each fault, and the check of a run's errors against it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightd_daemon.scheduling.fault_isolation.isolator import MAX_LOST_SLOTS
from weightd_daemon.scheduling.fault_isolation.offenders import (
    MAX_PEER_DEATHS,
    MAX_PRINCIPAL_DEATHS,
    MAX_REFUSAL_S,
    OFFENSE_RETENTION_S,
)

from . import cut, guests
from .kinds import BLAMING, LETHAL, ON_DEMAND, PROXIES, Fault
from .ledger import WRONG, Incident
from .material import POISONED

# Errors caused by a fault may still arrive this long after the end of its effect.
AFTERMATH_S = 1.5

# A request with this timeout must succeed except during a hang or a restart: other faults stop a model for less.
PATIENT_S = 20.0

# Clocks of the client and of the daemon start a moment apart.
_EARLY_S = 0.002

# The daemon rejects a request that crashed two workers for this time, from every client.
QUARANTINE_S = 600.0

# A series of crashes may have begun this long ago.
SUSPICION_S = MAX_PEER_DEATHS * OFFENSE_RETENTION_S + MAX_REFUSAL_S


@dataclass
class Strike:
    """A fault that has struck, from its beginning until its effect was over (monotonic seconds)."""

    fault: Fault
    model: str
    begin: float
    end: float = float("inf")
    note: str = ""

    def touches(self, begin: float, end: float) -> bool:
        """Return whether the fault can have affected the time between these two moments."""
        return self.begin <= end and begin <= self.end + AFTERMATH_S


Rule = Callable[[Incident, Sequence[Strike]], bool]


def _during(*faults: Fault, everywhere: bool = False) -> Rule:
    """Legal while one of these faults is active, on the request's model or everywhere."""

    def rule(incident: Incident, strikes: Sequence[Strike]) -> bool:
        return any(
            each.fault in faults
            and (everywhere or each.model == incident.model)
            and each.touches(incident.sent_at, incident.ended_at)
            for each in strikes
        )

    return rule


def _late(incident: Incident) -> bool:
    return incident.ended_at - incident.sent_at >= incident.timeout - _EARLY_S


def _own_deadline(incident: Incident, _: Sequence[Strike]) -> bool:
    return _late(incident) and incident.timeout < PATIENT_S


def _no_worker(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """No worker was available at the deadline of the request."""
    return _late(incident) and _during(*LETHAL, Fault.POISON)(incident, strikes)


def _not_loaded(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """The model that loads on demand was not loaded again at the deadline of the request."""
    faults = (*LETHAL, Fault.POISON, Fault.UNLOAD)
    return _late(incident) and incident.model == ON_DEMAND and _during(*faults)(incident, strikes)


def _no_room(incident: Incident, _: Sequence[Strike]) -> bool:
    """The model that loads on demand does not fit beside the present memory of the models that are never evicted."""
    return incident.model in (ON_DEMAND, *guests.NAMES) and "cannot be unloaded" in incident.text


def _group_exchanged(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """At the deadline, the old rank group had exited, as no ports are free for two, and the new one was not ready."""
    return _late(incident) and incident.model == cut.NAME and _during(Fault.UPDATE, Fault.RELOAD)(incident, strikes)


def _not_forked(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """The fork server stopped before new workers were up, for which it has 60 s.

    Workers were needed because others had exited, or because the model had to be loaded.
    """
    return (
        _late(incident)
        and (incident.model in guests.NAMES or _during(*LETHAL, Fault.POISON)(incident, strikes))
        and _during(Fault.STOP_FORK_SERVER, everywhere=True)(incident, strikes)
    )


def _count(incident: Incident, strikes: Sequence[Strike], before: float, faults: Collection[Fault]) -> int:
    """Return how many faults can have hit the model from `before` seconds before the request until its end."""
    begin, end = incident.sent_at - before, incident.ended_at
    return sum(each.fault in faults and each.model == incident.model and each.touches(begin, end) for each in strikes)


def _two_deaths(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """Two workers can have crashed with this request or with an earlier equal one; kills do not count."""
    return _count(incident, strikes, QUARANTINE_S, BLAMING) >= 2


def _suspected(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """Requests of the same user can have crashed workers; all clients have the same user."""
    near = _count(incident, strikes, SUSPICION_S, BLAMING)
    poisons = _count(incident, strikes, SUSPICION_S, {Fault.POISON})
    return near >= MAX_PEER_DEATHS or near + poisons * MAX_PEER_DEATHS >= MAX_PRINCIPAL_DEATHS


def _poisoned(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """The request itself crashes workers."""
    return incident.question == POISONED and _during(Fault.POISON)(incident, strikes)


def _killed_again_and_again(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """Every worker that had the request was killed."""
    return _count(incident, strikes, 0.0, LETHAL) >= MAX_LOST_SLOTS


def _proxy_lost(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """The proxy of the client has exited, which closed the connection."""
    return incident.over_zmq and _during(*PROXIES, everywhere=True)(incident, strikes)


def _cancelled(incident: Incident, _: Sequence[Strike]) -> bool:
    return incident.cancelled


LEGAL: Mapping[str, Sequence[Rule]] = {
    "UNAVAILABLE": (
        _during(Fault.KILL_DAEMON, everywhere=True),
        _during(Fault.UNLOAD),
        _proxy_lost,
        _no_worker,
        _group_exchanged,
        _killed_again_and_again,
    ),
    "DEADLINE_EXCEEDED": (
        _own_deadline,
        _during(Fault.HANG_WORKER),
        _during(Fault.KILL_DAEMON, everywhere=True),
        _not_forked,
        _not_loaded,
    ),
    "RESOURCE_EXHAUSTED": (
        _during(Fault.FLOOD),
        _during(Fault.DEAF_CROWD, everywhere=True),
        _poisoned,
        _suspected,
        _no_room,
    ),
    "INTERNAL": (_two_deaths, _poisoned, _suspected),
    "CANCELLED": (_cancelled,),
    # The weights were overwritten during the request; weightd only guarantees to detect that soon.
    WRONG: (_during(Fault.OVERWRITE_STORE),),
    "INVALID_ARGUMENT": (),
    "NOT_FOUND": (),
    "FAILED_PRECONDITION": (),
    "PERMISSION_DENIED": (),
    "UNAUTHENTICATED": (),
}


def illegal(incidents: Iterable[Incident], strikes: Sequence[Strike]) -> list[str]:
    """Return a text for each incident that must not have happened."""
    return [_words(each) for each in incidents if not is_legal(each, strikes)]


def is_legal(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """Return whether this outcome of a request is legal."""
    return any(rule(incident, strikes) for rule in LEGAL.get(incident.code, ()))


def _words(incident: Incident) -> str:
    took = incident.ended_at - incident.sent_at
    return (
        f"illegal: {incident.code} for question {incident.question} of {incident.model}, {took:.3f} s after it was "
        f"sent at {incident.sent_at:.3f}{' by ZeroMQ' if incident.over_zmq else ''} "
        f"with a timeout of {incident.timeout:g} s: {incident.text}"
    )
