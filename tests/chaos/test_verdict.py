"""The table of legal errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from weightd_daemon.scheduling.fault_isolation.isolator import MAX_LOST_SLOTS
from weightd_daemon.scheduling.fault_isolation.offenders import MAX_PEER_DEATHS
from weightd_protocol.errors import ERRORS

from . import cut, guests
from .kinds import Fault
from .ledger import WRONG, Incident
from .material import POISONED
from .verdict import AFTERMATH_S, LEGAL, QUARANTINE_S, Strike, illegal, is_legal

# Sent at 100 s, ended at 101 s, within its timeout.
INCIDENT = Incident("m", 0, "INTERNAL", "text", sent_at=100.0, ended_at=101.0, timeout=30.0)
UNAVAILABLE, LATE, FULL, INTERNAL = "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL"


def strike(fault: Fault, begin: float = 99.0, end: float = 102.0, model: str = "m") -> Strike:
    return Strike(fault, model, begin, end)


EVERYTHING = [strike(fault) for fault in Fault]
OUTSIDE = [Fault.KILL_WORKER, Fault.KILL_HOLDER, Fault.TRUNCATE_STORE, Fault.OVERWRITE_STORE]
CRASH, KILL, POISON = map(strike, (Fault.SEGV_WORKER, Fault.KILL_WORKER, Fault.POISON))
OLD_CRASH = strike(Fault.SEGV_WORKER, begin=-50.0, end=-45.0)
PROXIES_LOST = [strike(Fault.KILL_PROXY, model="")]
LOADED_LATE = {"model": guests.NAMES[0], "timeout": 30.0, "ended_at": 130.1}
NOT_DAMAGED = [each for each in EVERYTHING if each.fault is not Fault.OVERWRITE_STORE]


def test_every_error_code_has_a_row() -> None:
    assert set(LEGAL) == {*ERRORS, WRONG}


@pytest.mark.parametrize("code", [*ERRORS, WRONG, "RemoteProtocolError"])
def test_no_error_is_legal_without_faults(code: str) -> None:
    [said] = illegal([dataclasses.replace(INCIDENT, code=code)], [])
    assert said.startswith(f"illegal: {code} for question 0 of m, 1.000 s after")


@pytest.mark.parametrize(
    ("code", "strikes"),
    [
        (UNAVAILABLE, [strike(Fault.KILL_DAEMON, model="")]),
        (UNAVAILABLE, [strike(Fault.UNLOAD)]),
        (LATE, [strike(Fault.HANG_WORKER)]),
        (LATE, [strike(Fault.KILL_DAEMON, model="")]),
        (FULL, [strike(Fault.FLOOD)]),
        (FULL, [strike(Fault.DEAF_CROWD, model="")]),
        (INTERNAL, [strike(Fault.HANG_WORKER), CRASH]),
        (WRONG, [strike(Fault.OVERWRITE_STORE)]),
    ],
)
def test_fault_explains_errors_of_its_time_and_model(code: str, strikes: Sequence[Strike]) -> None:
    def legal(after: float = 0.0, **changes: Any) -> bool:
        moved = [
            dataclasses.replace(each, begin=each.begin + after, end=each.end + after, **changes) for each in strikes
        ]
        return is_legal(dataclasses.replace(INCIDENT, code=code), moved)

    assert legal()
    assert not legal(+3.0), "it had not begun"
    assert not legal(-3.0 - AFTERMATH_S - (QUARANTINE_S if code == INTERNAL else 0.0)), "it was over"
    if strikes[0].model:
        assert not legal(model="other")


@pytest.mark.parametrize(
    ("code", "changes", "strikes", "legal"),
    [
        # A valid request is never invalid; only a cancelled one ends in CANCELLED; a crash makes no answer wrong.
        ("INVALID_ARGUMENT", {}, EVERYTHING, False),
        ("NOT_FOUND", {}, EVERYTHING, False),
        ("PERMISSION_DENIED", {}, EVERYTHING, False),
        ("UNAUTHENTICATED", {}, EVERYTHING, False),
        ("CANCELLED", {"cancelled": True}, [], True),
        ("CANCELLED", {}, EVERYTHING, False),
        (WRONG, {}, NOT_DAMAGED, False),
        # Two crashes explain it, but kills from outside do not.
        (INTERNAL, {}, [CRASH], False),
        (INTERNAL, {}, [strike(fault) for fault in OUTSIDE] * 2, False),
        # Poison explains only errors of the client that sends it.
        (INTERNAL, {"question": POISONED}, [POISON], True),
        (INTERNAL, {}, [POISON], False),
        (INTERNAL, {"question": POISONED}, [], False),
        (FULL, {"question": POISONED}, [POISON], True),
        (FULL, {}, [POISON], False),
        (FULL, {"question": POISONED}, [], False),
        # Suspected requests may be rejected.
        (FULL, {}, [CRASH] * MAX_PEER_DEATHS, True),
        (FULL, {}, [CRASH] * (MAX_PEER_DEATHS - 1), False),
        (FULL, {}, [POISON] * 2, True),
        (FULL, {}, [KILL] * 20, False),
        (FULL, {}, [OLD_CRASH] * MAX_PEER_DEATHS, False),
        # UNAVAILABLE needs many kills, or a deadline that passed while no worker was available.
        (UNAVAILABLE, {}, [KILL] * MAX_LOST_SLOTS, True),
        (UNAVAILABLE, {}, [KILL] * (MAX_LOST_SLOTS - 1), False),
        (UNAVAILABLE, {"timeout": 1.0}, [KILL], True),
        (UNAVAILABLE, {"timeout": 1.1}, [KILL], False),
        (UNAVAILABLE, {"timeout": 1.0}, [], False),
        (UNAVAILABLE, {"timeout": 1.0, "model": cut.NAME}, [strike(Fault.UPDATE, model=cut.NAME)], True),
        (UNAVAILABLE, {"timeout": 1.1, "model": cut.NAME}, [strike(Fault.UPDATE, model=cut.NAME)], False),
        (UNAVAILABLE, {"timeout": 1.0}, [strike(Fault.UPDATE)], False),
        # The loss of a ZeroMQ proxy explains lost connections of ZeroMQ clients only.
        (UNAVAILABLE, {"over_zmq": True}, PROXIES_LOST, True),
        (UNAVAILABLE, {}, PROXIES_LOST, False),
        (UNAVAILABLE, {"over_zmq": True}, [strike(Fault.STOP_PROXY, model="")], False),
        (INTERNAL, {"over_zmq": True}, PROXIES_LOST, False),
        # A deadline must have passed, and requests with long timeouts must succeed.
        (LATE, {"timeout": 1.0}, [], True),
        (LATE, {"timeout": 1.1}, [], False),
        (LATE, {"timeout": 30.0, "ended_at": 130.1}, [], False),
        (LATE, {"timeout": 30.0, "ended_at": 130.1}, [KILL], False),
        (LATE, {"timeout": 30.0, "ended_at": 130.1}, [strike(Fault.STOP_FORK_SERVER, model="")], False),
        (LATE, {"timeout": 30.0, "ended_at": 130.1}, [KILL, strike(Fault.STOP_FORK_SERVER, model="")], True),
        # The load of a guest needs a fork server.
        (LATE, LOADED_LATE, [strike(Fault.STOP_FORK_SERVER, model="")], True),
        (LATE, LOADED_LATE, [KILL], False),
    ],
)
def test_legal_errors(code: str, changes: dict[str, Any], strikes: Sequence[Strike], legal: bool) -> None:
    assert is_legal(dataclasses.replace(INCIDENT, code=code, **changes), strikes) is legal
