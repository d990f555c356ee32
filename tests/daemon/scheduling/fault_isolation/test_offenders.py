from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.scheduling.fault_isolation.offenders import (
    MAX_PEER_DEATHS,
    MAX_PRINCIPAL_DEATHS,
    MAX_REFUSAL_S,
    MAX_TENANT_DEATHS,
    MIN_REFUSAL_S,
    OFFENSE_RETENTION_S,
    ClientOffenses,
)
from weightd_daemon.scheduling.request import ClientOrigin
from weightd_protocol.errors import ResourceExhausted

ONE, OTHER = ClientOrigin("process 1 of user 7", "user 7"), ClientOrigin("process 2 of user 7", "user 7")
STRANGER = ClientOrigin("process 3 of user 8", "user 8")


def record_deaths(
    offenses: ClientOffenses, origin: ClientOrigin, count: int, now: float = 0.0, ran: float = 0.0
) -> None:
    for _ in range(count):
        offenses.record_death(origin, ran, now)


def refused_for(offenses: ClientOffenses, origin: ClientOrigin, now: float) -> float:
    try:
        offenses.check_not_refused(origin, now)
    except ResourceExhausted as error:
        return error.retry_after or 0.0
    return 0.0


def test_confines_then_refuses_then_forgets_a_client() -> None:
    offenses = ClientOffenses()
    record_deaths(offenses, ONE, MAX_PEER_DEATHS - 1)
    assert not offenses.is_confined(ONE, 0.0)
    record_deaths(offenses, ONE, 1)
    assert (offenses.is_confined(ONE, 0.0), refused_for(offenses, ONE, 0.0)) == (True, 0.0)
    assert offenses.confined_names(0.0) == [ONE.peer]
    record_deaths(offenses, ONE, 1)
    with pytest.raises(
        ResourceExhausted, match=r"^requests of process 1 of user 7 crashed or hung 5 workers: they are rejected for"
    ):
        offenses.check_not_refused(ONE, 0.0)
    assert refused_for(offenses, ONE, MIN_REFUSAL_S) == 0.0
    assert offenses.is_confined(ONE, MIN_REFUSAL_S + OFFENSE_RETENTION_S - 0.1)
    assert not offenses.is_confined(ONE, MIN_REFUSAL_S + OFFENSE_RETENTION_S)
    assert offenses.confined_names(MIN_REFUSAL_S + OFFENSE_RETENTION_S) == []


def test_refusals_double_up_to_a_limit() -> None:
    offenses, now, refusals = ClientOffenses(), 0.0, list[float]()
    record_deaths(offenses, ONE, MAX_PEER_DEATHS)
    for _ in range(5):
        record_deaths(offenses, ONE, 1, now)
        refusals.append(refused_for(offenses, ONE, now))
        now += refusals[-1]
    assert refusals == [MIN_REFUSAL_S, 2 * MIN_REFUSAL_S, 4 * MIN_REFUSAL_S, MAX_REFUSAL_S, MAX_REFUSAL_S]


def test_deaths_far_apart_do_not_add_up() -> None:
    offenses = ClientOffenses()
    for count in range(10 * MAX_PEER_DEATHS):
        record_deaths(offenses, ONE, 1, count * OFFENSE_RETENTION_S)
        assert not offenses.is_confined(ONE, count * OFFENSE_RETENTION_S)


def test_deaths_after_long_runs_are_kept_longer() -> None:
    offenses = ClientOffenses()
    for count in range(MAX_PEER_DEATHS):
        record_deaths(offenses, ONE, 1, count * 60.0, ran=60.0)
    assert offenses.is_confined(ONE, MAX_PEER_DEATHS * 60.0)


def test_other_clients_are_not_affected() -> None:
    offenses = ClientOffenses()
    record_deaths(offenses, ONE, 10 * MAX_PRINCIPAL_DEATHS)
    for other in (OTHER, STRANGER):
        assert (offenses.is_confined(other, 0.0), refused_for(offenses, other, 0.0)) == (False, 0.0)


def test_new_processes_are_confined_by_their_user() -> None:
    offenses = ClientOffenses()
    processes = (ClientOrigin(f"process {number}", "user 7") for number in itertools.count(100))
    for each in itertools.islice(processes, MAX_PRINCIPAL_DEATHS):
        assert not offenses.is_confined(each, 0.0)
        record_deaths(offenses, each, 1)
    assert (offenses.is_confined(ONE, 0.0), refused_for(offenses, ONE, 0.0)) == (True, 0.0)
    record_deaths(offenses, ONE, 1)
    assert refused_for(offenses, OTHER, 0.0) == MIN_REFUSAL_S
    assert refused_for(offenses, STRANGER, 0.0) == 0.0


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 100)), max_size=60))
def test_confinement_needs_deaths_of_the_client_or_its_user(events: list[tuple[int, float]]) -> None:
    offenses, now = ClientOffenses(), 0.0
    origins = [ClientOrigin(f"process {number}", f"user {number % 2}") for number in range(4)]
    seen: list[ClientOrigin] = []
    for number, wait in events:
        now += wait
        offenses.record_death(origins[number], 0.0, now)
        seen.append(origins[number])
        for each in origins:
            by_peer, by_principal = (
                sum(one.peer == each.peer for one in seen),
                sum(one.principal == each.principal for one in seen),
            )
            if offenses.is_confined(each, now):
                assert by_peer >= MAX_PEER_DEATHS or by_principal >= MAX_PRINCIPAL_DEATHS
            if refused_for(offenses, each, now):
                assert by_peer > MAX_PEER_DEATHS or by_principal > MAX_PRINCIPAL_DEATHS
            assert refused_for(offenses, each, now) <= MAX_REFUSAL_S


def test_forgets_the_oldest_client_beyond_the_limit() -> None:
    offenses = ClientOffenses()
    record_deaths(offenses, STRANGER, MAX_PEER_DEATHS)
    for number in range(1022):
        record_deaths(offenses, ClientOrigin(f"process {number}", STRANGER.principal), 1)
    assert offenses.is_confined(STRANGER, 0.0)
    record_deaths(offenses, ONE, MAX_PEER_DEATHS)
    assert STRANGER.peer not in offenses.confined_names(0.0)
    assert ONE.peer in offenses.confined_names(0.0)
    offenses.clear()  # another model is deployed
    assert not offenses.is_confined(ONE, 0.0)


def test_tenant_is_confined_across_processes_and_models() -> None:
    one, other = (ClientOrigin(f"process {number}", "tenant ann", is_tenant=True) for number in (1, 2))
    one_model = ClientOffenses()
    other_model = ClientOffenses(one_model.tenant_offenders)
    stranger = ClientOrigin("process 1", "tenant ben", is_tenant=True)
    record_deaths(one_model, one, 1)
    for each in (one_model, other_model):
        assert any(table.offenders for table in each.tables)
        assert [each.is_confined(who, 0.0) for who in (one, other, stranger)] == [True, True, False]
        assert refused_for(each, other, 0.0) == 0.0
    # Offenses of a tenant remain when another model is deployed.
    one_model.clear()
    record_deaths(other_model, other, MAX_TENANT_DEATHS)
    assert refused_for(one_model, one, 0.0) == MIN_REFUSAL_S
    record_deaths(one_model, one, 1)
    assert refused_for(one_model, one, 0.0) == 2 * MIN_REFUSAL_S
    assert refused_for(one_model, stranger, 0.0) == 0.0
    assert one_model.confined_names(0.0) == other_model.confined_names(0.0) == ["tenant ann"]
    later = 2 * MIN_REFUSAL_S + OFFENSE_RETENTION_S
    assert not any(each.is_confined(one, later) for each in (one_model, other_model))
