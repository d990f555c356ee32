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


def deaths(suspects: ClientOffenses, origin: ClientOrigin, count: int, now: float = 0.0, ran: float = 0.0) -> None:
    for _ in range(count):
        suspects.record_death(origin, ran, now)


def refused_for(suspects: ClientOffenses, origin: ClientOrigin, now: float) -> float:
    try:
        suspects.check_not_refused(origin, now)
    except ResourceExhausted as error:
        return error.retry_after or 0.0
    return 0.0


def test_who_kills_again_and_again_is_confined_then_refused_and_at_last_forgotten() -> None:
    suspects = ClientOffenses()
    deaths(suspects, ONE, MAX_PEER_DEATHS - 1)
    assert not suspects.is_confined(ONE, 0.0)
    deaths(suspects, ONE, 1)
    assert (suspects.is_confined(ONE, 0.0), refused_for(suspects, ONE, 0.0)) == (True, 0.0)
    assert suspects.confined_names(0.0) == [ONE.peer]
    deaths(suspects, ONE, 1)
    with pytest.raises(
        ResourceExhausted, match=r"^requests of process 1 of user 7 crashed or hung 5 workers: they are rejected for"
    ):
        suspects.check_not_refused(ONE, 0.0)
    assert refused_for(suspects, ONE, MIN_REFUSAL_S) == 0.0
    assert suspects.is_confined(ONE, MIN_REFUSAL_S + OFFENSE_RETENTION_S - 0.1)
    assert not suspects.is_confined(ONE, MIN_REFUSAL_S + OFFENSE_RETENTION_S)
    assert suspects.confined_names(MIN_REFUSAL_S + OFFENSE_RETENTION_S) == []


def test_each_refusal_is_longer_than_the_one_before_up_to_a_bound() -> None:
    suspects, now, refusals = ClientOffenses(), 0.0, list[float]()
    deaths(suspects, ONE, MAX_PEER_DEATHS)
    for _ in range(5):
        deaths(suspects, ONE, 1, now)
        refusals.append(refused_for(suspects, ONE, now))
        now += refusals[-1]
    assert refusals == [MIN_REFUSAL_S, 2 * MIN_REFUSAL_S, 4 * MIN_REFUSAL_S, MAX_REFUSAL_S, MAX_REFUSAL_S]


def test_deaths_that_are_far_apart_are_no_row() -> None:
    suspects = ClientOffenses()
    for count in range(10 * MAX_PEER_DEATHS):
        deaths(suspects, ONE, 1, count * OFFENSE_RETENTION_S)
        assert not suspects.is_confined(ONE, count * OFFENSE_RETENTION_S)


def test_what_runs_long_before_it_kills_is_remembered_as_much_longer() -> None:
    suspects = ClientOffenses()
    for count in range(MAX_PEER_DEATHS):
        deaths(suspects, ONE, 1, count * 60.0, ran=60.0)
    assert suspects.is_confined(ONE, MAX_PEER_DEATHS * 60.0)


def test_nobody_else_is_met() -> None:
    suspects = ClientOffenses()
    deaths(suspects, ONE, 10 * MAX_PRINCIPAL_DEATHS)
    for innocent in (OTHER, STRANGER):
        assert (suspects.is_confined(innocent, 0.0), refused_for(suspects, innocent, 0.0)) == (False, 0.0)


def test_who_begins_anew_from_another_process_is_met_by_its_user() -> None:
    suspects = ClientOffenses()
    processes = (ClientOrigin(f"process {number}", "user 7") for number in itertools.count(100))
    for each in itertools.islice(processes, MAX_PRINCIPAL_DEATHS):
        assert not suspects.is_confined(each, 0.0)
        deaths(suspects, each, 1)
    assert (suspects.is_confined(ONE, 0.0), refused_for(suspects, ONE, 0.0)) == (True, 0.0)
    deaths(suspects, ONE, 1)
    assert refused_for(suspects, OTHER, 0.0) == MIN_REFUSAL_S
    assert refused_for(suspects, STRANGER, 0.0) == 0.0


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 100)), max_size=60))
def test_a_client_is_suspect_only_for_deaths_of_its_own_or_of_its_users(events: list[tuple[int, float]]) -> None:
    suspects, now = ClientOffenses(), 0.0
    origins = [ClientOrigin(f"process {number}", f"user {number % 2}") for number in range(4)]
    seen: list[ClientOrigin] = []
    for number, wait in events:
        now += wait
        suspects.record_death(origins[number], 0.0, now)
        seen.append(origins[number])
        for each in origins:
            near, far = sum(one.peer == each.peer for one in seen), sum(one.principal == each.principal for one in seen)
            if suspects.is_confined(each, now):
                assert near >= MAX_PEER_DEATHS or far >= MAX_PRINCIPAL_DEATHS
            if refused_for(suspects, each, now):
                assert near > MAX_PEER_DEATHS or far > MAX_PRINCIPAL_DEATHS
            assert refused_for(suspects, each, now) <= MAX_REFUSAL_S


def test_what_it_remembers_is_bounded_and_the_oldest_gives_way() -> None:
    suspects = ClientOffenses()
    deaths(suspects, STRANGER, MAX_PEER_DEATHS)
    for number in range(1022):
        deaths(suspects, ClientOrigin(f"process {number}", STRANGER.principal), 1)
    assert suspects.is_confined(STRANGER, 0.0)
    deaths(suspects, ONE, MAX_PEER_DEATHS)
    assert STRANGER.peer not in suspects.confined_names(0.0)
    assert ONE.peer in suspects.confined_names(0.0)
    suspects.clear()  # another model begins anew
    assert not suspects.is_confined(ONE, 0.0)


def test_a_tenant_is_confined_at_its_first_death_and_refused_soon_whatever_its_process_and_the_model() -> None:
    one, other = (ClientOrigin(f"process {number}", "tenant ann", is_tenant=True) for number in (1, 2))
    here = ClientOffenses()
    elsewhere = ClientOffenses(here.tenant_offenders)
    stranger = ClientOrigin("process 1", "tenant ben", is_tenant=True)
    deaths(here, one, 1)
    for each in (here, elsewhere):
        assert any(table.offenders for table in each.tables)
        assert [each.is_confined(who, 0.0) for who in (one, other, stranger)] == [True, True, False]
        assert refused_for(each, other, 0.0) == 0.0
    # Another model is served: what the tenant has done to the last one, it may do to this one, too.
    here.clear()
    deaths(elsewhere, other, MAX_TENANT_DEATHS)
    assert refused_for(here, one, 0.0) == MIN_REFUSAL_S
    deaths(here, one, 1)
    assert refused_for(here, one, 0.0) == 2 * MIN_REFUSAL_S
    assert refused_for(here, stranger, 0.0) == 0.0
    assert here.confined_names(0.0) == elsewhere.confined_names(0.0) == ["tenant ann"]
    later = 2 * MIN_REFUSAL_S + OFFENSE_RETENTION_S
    assert not any(each.is_confined(one, later) for each in (here, elsewhere))
