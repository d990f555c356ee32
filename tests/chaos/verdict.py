"""Which error is legal when: the table, and who judges by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .kinds import LETHAL, STORE, Fault
from .ledger import WRONG, Incident

# What a fault has caused may still be on its way when its effect is seen to be over.
AFTERMATH_S = 1.5

# A request of this patience must be served in any weather but a hang or a restart: no fault stops a model for longer.
PATIENT_S = 20.0

# Clocks of the client and of the daemon start a moment apart.
_EARLY_S = 0.002

# What two workers died of is refused for a while, whoever asks for it.
QUARANTINE_S = 600.0


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


def _own_deadline(incident: Incident, _: Sequence[Strike]) -> bool:
    late = incident.ended_at - incident.sent_at >= incident.timeout - _EARLY_S
    return late and incident.timeout < PATIENT_S


def _no_worker(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """At its deadline nobody was there who could have answered."""
    late = incident.ended_at - incident.sent_at >= incident.timeout - _EARLY_S
    return late and _during(*LETHAL)(incident, strikes)


def _two_deaths(incident: Incident, strikes: Sequence[Strike]) -> bool:
    """Two workers can have died with it, or had with the same content before."""
    deaths = sum(
        2 if each.fault in STORE else 1
        for each in strikes
        if each.fault in LETHAL
        and each.model == incident.model
        and each.touches(incident.sent_at - QUARANTINE_S, incident.ended_at)
    )
    return deaths >= 2


def _cancelled(incident: Incident, _: Sequence[Strike]) -> bool:
    return incident.cancelled


LEGAL: Mapping[str, Sequence[Rule]] = {
    "UNAVAILABLE": (_during(Fault.KILL_DAEMON, everywhere=True), _no_worker),
    "DEADLINE_EXCEEDED": (
        _own_deadline,
        _during(Fault.HANG_WORKER),
        _during(Fault.KILL_DAEMON, everywhere=True),
    ),
    "RESOURCE_EXHAUSTED": (_during(Fault.FLOOD), _during(Fault.DEAF_CROWD, everywhere=True)),
    "INTERNAL": (_two_deaths,),
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
        f"sent at {incident.sent_at:.3f} with a timeout of {incident.timeout:g} s: {incident.text}"
    )
