"""The table of legal errors refuses what it should."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from weightd.daemon.requests.blame.guard import MAX_LOSSES
from weightd.daemon.requests.blame.suspects import NEAR_DEATHS
from weightd.protocol.errors import ERRORS

from .kinds import Fault
from .ledger import WRONG, Incident
from .material import POISONED
from .verdict import AFTERMATH_S, LEGAL, QUARANTINE_S, Strike, illegal, is_legal

# Sent at 100, ended at 101: within its patience.
INCIDENT = Incident("m", 0, "INTERNAL", "text", sent_at=100.0, ended_at=101.0, timeout=30.0)


def incident(code: str, **changes: object) -> Incident:
    return dataclasses.replace(INCIDENT, code=code, **changes)  # type: ignore[arg-type]


def strike(fault: Fault, begin: float = 99.0, end: float = 102.0, model: str = "m") -> Strike:
    return Strike(fault, model, begin, end)


def test_every_code_of_the_wire_has_its_row() -> None:
    assert set(LEGAL) == {*ERRORS, WRONG}


@pytest.mark.parametrize("code", [*ERRORS, WRONG, "RemoteProtocolError"])
def test_no_error_is_legal_in_calm_weather(code: str) -> None:
    assert not is_legal(incident(code), [])
    assert illegal([incident(code)], [])[0].startswith(f"illegal: {code} for question 0 of m, 1.000 s after")


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED"])
def test_a_good_request_is_never_called_bad(code: str) -> None:
    assert not is_legal(incident(code), [strike(fault) for fault in Fault])


@pytest.mark.parametrize(
    ("code", "strikes"),
    [
        ("UNAVAILABLE", [strike(Fault.KILL_DAEMON, model="")]),
        ("DEADLINE_EXCEEDED", [strike(Fault.HANG_WORKER)]),
        ("DEADLINE_EXCEEDED", [strike(Fault.KILL_DAEMON, model="")]),
        ("RESOURCE_EXHAUSTED", [strike(Fault.FLOOD)]),
        ("RESOURCE_EXHAUSTED", [strike(Fault.DEAF_CROWD, model="")]),
        ("INTERNAL", [strike(Fault.HANG_WORKER), strike(Fault.SEGV_WORKER)]),
        (WRONG, [strike(Fault.OVERWRITE_STORE)]),
    ],
)
def test_a_fault_explains_its_error_while_it_lasts(code: str, strikes: Sequence[Strike]) -> None:
    def moved(by: float) -> list[Strike]:
        return [dataclasses.replace(each, begin=each.begin + by, end=each.end + by) for each in strikes]

    assert is_legal(incident(code), strikes)
    assert not is_legal(incident(code), moved(+3.0)), "it had not begun"
    if code != "INTERNAL":
        assert not is_legal(incident(code), moved(-3.0 - AFTERMATH_S)), "it was over"
    else:
        assert not is_legal(incident(code), moved(-3.0 - AFTERMATH_S - QUARANTINE_S)), "it was over long ago"


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("RESOURCE_EXHAUSTED", Fault.FLOOD),
        ("DEADLINE_EXCEEDED", Fault.HANG_WORKER),
        (WRONG, Fault.OVERWRITE_STORE),
    ],
)
def test_a_fault_of_one_model_explains_nothing_of_another(code: str, fault: Fault) -> None:
    assert not is_legal(incident(code), [strike(fault, model="other")])


def test_one_death_explains_no_internal_error() -> None:
    assert not is_legal(incident("INTERNAL"), [strike(Fault.SEGV_WORKER)])


def test_what_comes_from_outside_explains_no_internal_error() -> None:
    outside = [Fault.KILL_WORKER, Fault.KILL_HOLDER, Fault.TRUNCATE_STORE, Fault.OVERWRITE_STORE]
    assert not is_legal(incident("INTERNAL"), [strike(fault) for fault in outside] * 2)


@pytest.mark.parametrize("code", ["INTERNAL", "RESOURCE_EXHAUSTED"])
def test_poison_explains_the_errors_of_who_sends_it(code: str) -> None:
    assert is_legal(incident(code, question=POISONED), [strike(Fault.POISON)])
    assert not is_legal(incident(code), [strike(Fault.POISON)])
    assert not is_legal(incident(code, question=POISONED), [])


@pytest.mark.parametrize(
    ("strikes", "legal"),
    [
        ([strike(Fault.SEGV_WORKER)] * NEAR_DEATHS, True),
        ([strike(Fault.SEGV_WORKER)] * (NEAR_DEATHS - 1), False),
        ([strike(Fault.POISON)] * 2, True),
        ([strike(Fault.KILL_WORKER)] * 20, False),
        ([strike(Fault.SEGV_WORKER, begin=-50.0, end=-45.0)] * NEAR_DEATHS, False),
    ],
)
def test_who_is_under_suspicion_may_be_refused(strikes: Sequence[Strike], legal: bool) -> None:
    assert is_legal(incident("RESOURCE_EXHAUSTED"), strikes) is legal


def test_only_many_kills_make_a_patient_request_unavailable() -> None:
    for count in (MAX_LOSSES - 1, MAX_LOSSES):
        assert is_legal(incident("UNAVAILABLE"), [strike(Fault.KILL_WORKER)] * count) == (count == MAX_LOSSES)


def test_a_death_makes_no_answer_wrong() -> None:
    assert not is_legal(incident(WRONG), [strike(fault) for fault in Fault if fault is not Fault.OVERWRITE_STORE])


def test_a_deadline_must_have_passed() -> None:
    assert is_legal(incident("DEADLINE_EXCEEDED", timeout=1.0), [])
    assert not is_legal(incident("DEADLINE_EXCEEDED", timeout=1.1), [])


def test_the_patient_are_served() -> None:
    assert not is_legal(incident("DEADLINE_EXCEEDED", timeout=30.0, ended_at=130.1), [])


def test_unavailable_needs_a_deadline_that_passed_while_a_model_had_no_worker() -> None:
    assert is_legal(incident("UNAVAILABLE", timeout=1.0), [strike(Fault.KILL_WORKER)])
    assert not is_legal(incident("UNAVAILABLE", timeout=1.1), [strike(Fault.KILL_WORKER)])
    assert not is_legal(incident("UNAVAILABLE", timeout=1.0), [])


def test_only_who_cancels_is_cancelled() -> None:
    assert is_legal(incident("CANCELLED", cancelled=True), [])
    assert not is_legal(incident("CANCELLED"), [strike(fault) for fault in Fault])
