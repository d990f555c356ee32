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

from . import cut
from .kinds import BLAMING, GATES, LETHAL, Fault
from .ledger import WRONG, Incident
from .material import POISONED

# What a fault has caused may still be on its way when its effect is seen to be over.
AFTERMATH_S = 1.5

# A request of this patience must be served in any weather but a hang or a restart: no fault stops a model for longer.
PATIENT_S = 20.0

# Clocks of the client and of the daemon start a moment apart.
_EARLY_S = 0.002

# What two workers died of is refused for a while, whoever asks for it.
QUARANTINE_S = 600.0

# A row of deaths may have begun so long ago.
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
        """Return whether it can have had to do with what happened between these two moments."""
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
    """At its deadline nobody was there who could have answered."""
    return _late(incident) and _during(*LETHAL, Fault.POISON)(incident, strikes)


def _group_exchanged(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """At its deadline the group that served was gone, as where no port is free for two, and the next one not there."""
    return _late(incident) and incident.model == cut.NAME and _during(Fault.UPDATE, Fault.RELOAD)(incident, strikes)


def _not_forked(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """Workers were lost, and the fork server stopped before it was up: it has 60 s for that."""
    return (
        _late(incident)
        and _during(*LETHAL, Fault.POISON)(incident, strikes)
        and _during(Fault.STOP_FORK_SERVER, everywhere=True)(incident, strikes)
    )


def _count(incident: Incident, strikes: Sequence[Strike], before: float, faults: Collection[Fault]) -> int:
    """How many of these faults can have met the model from so many seconds before the request was sent to its end."""
    begin, end = incident.sent_at - before, incident.ended_at
    return sum(each.fault in faults and each.model == incident.model and each.touches(begin, end) for each in strikes)


def _two_deaths(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """Two workers can have crashed with it, or with the same content before; to be killed does not count."""
    return _count(incident, strikes, QUARANTINE_S, BLAMING) >= 2


def _suspected(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """Workers can have crashed of its client's requests, or of those of its user, which is that of all clients."""
    near = _count(incident, strikes, SUSPICION_S, BLAMING)
    poisons = _count(incident, strikes, SUSPICION_S, {Fault.POISON})
    return near >= MAX_PEER_DEATHS or near + poisons * MAX_PEER_DEATHS >= MAX_PRINCIPAL_DEATHS


def _poisoned(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """It kills workers itself."""
    return incident.question == POISONED and _during(Fault.POISON)(incident, strikes)


def _killed_again_and_again(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """Whatever worker had it was killed."""
    return _count(incident, strikes, 0.0, LETHAL) >= MAX_LOST_SLOTS


def _gate_lost(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """The gate that its client had is gone, and with it the connection."""
    return incident.by_gate and _during(*GATES, everywhere=True)(incident, strikes)


def _cancelled(incident: Incident, _: Sequence[Strike]) -> bool:
    return incident.cancelled


LEGAL: Mapping[str, Sequence[Rule]] = {
    "UNAVAILABLE": (
        _during(Fault.KILL_DAEMON, everywhere=True),
        _gate_lost,
        _no_worker,
        _group_exchanged,
        _killed_again_and_again,
    ),
    "DEADLINE_EXCEEDED": (
        _own_deadline,
        _during(Fault.HANG_WORKER),
        _during(Fault.KILL_DAEMON, everywhere=True),
        _not_forked,
    ),
    "RESOURCE_EXHAUSTED": (_during(Fault.FLOOD), _during(Fault.DEAF_CROWD, everywhere=True), _poisoned, _suspected),
    "INTERNAL": (_two_deaths, _poisoned, _suspected),
    "CANCELLED": (_cancelled,),
    # The bytes that it computes with were changed under it; what weightd promises is to notice soon.
    WRONG: (_during(Fault.OVERWRITE_STORE),),
    "INVALID_ARGUMENT": (),
    "NOT_FOUND": (),
    "FAILED_PRECONDITION": (),
    "PERMISSION_DENIED": (),
    "UNAUTHENTICATED": (),
}


def illegal(incidents: Iterable[Incident], strikes: Sequence[Strike]) -> list[str]:
    """Return what must not have happened, in words."""
    return [_words(each) for each in incidents if not is_legal(each, strikes)]


def is_legal(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """Return whether a request may have ended so."""
    return any(rule(incident, strikes) for rule in LEGAL.get(incident.code, ()))


def _words(incident: Incident) -> str:
    took = incident.ended_at - incident.sent_at
    return (
        f"illegal: {incident.code} for question {incident.question} of {incident.model}, {took:.3f} s after it was "
        f"sent at {incident.sent_at:.3f}{' by ZeroMQ' if incident.by_gate else ''} "
        f"with a timeout of {incident.timeout:g} s: {incident.text}"
    )
