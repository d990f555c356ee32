from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from weightd_daemon.platform.connection_admission import ConnectionAdmission, UserConnectionLimits


def test_a_user_with_as_many_connections_as_it_may_have_is_refused_until_one_ends() -> None:
    admission = ConnectionAdmission(UserConnectionLimits(max_connections=2))
    for _ in range(2):
        assert admission.refusal_reason("a", 0.0) is None
        admission.add_connection("a")
    assert admission.refusal_reason("a", 9.0) == "this user has 2 connections already (max_user_connections)"
    assert admission.refusal_reason("b", 9.0) is None
    admission.remove_connection("a")
    assert admission.refusal_reason("a", 9.0) is None


def test_a_user_opens_connections_at_the_rate_and_as_many_at_once_as_it_may_have() -> None:
    admission = ConnectionAdmission(UserConnectionLimits(max_connections=20, rate=10.0))
    told = [admission.refusal_reason("a", 5.0) for _ in range(21)]
    assert told[:20] == 20 * [None]
    assert told[20] == "this user opens more than 10 connections a second (max_user_connection_rate)"
    assert admission.refusal_reason("b", 5.0) is None
    assert [admission.refusal_reason("a", 5.35) is None for _ in range(4)] == [True, True, True, False]


def test_without_limits_nobody_is_refused() -> None:
    admission = ConnectionAdmission(UserConnectionLimits())
    for _ in range(1000):
        assert admission.refusal_reason("a", 0.0) is None
        admission.add_connection("a")


@given(
    st.integers(1, 5),
    st.floats(0.5, 50.0),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), max_size=60),
)
def test_in_no_time_a_user_opens_more_than_burst_and_rate_allow(
    most: int, rate: float, events: list[tuple[float, bool]]
) -> None:
    limits = UserConnectionLimits(most, rate)
    admission = ConnectionAdmission(limits)
    now, opened, there = 0.0, 0, 0
    for wait, leaves in events:
        now += wait
        if leaves and there:
            admission.remove_connection("a")
            there -= 1
        elif admission.refusal_reason("a", now) is None:
            admission.add_connection("a")
            opened, there = opened + 1, there + 1
        assert there <= most
        assert opened <= limits.burst + now * rate + 1e-6


def test_users_without_connections_are_forgotten() -> None:
    admission = ConnectionAdmission(UserConnectionLimits(max_connections=5, rate=1.0))
    admission.refusal_reason("stays", 0.0)
    admission.add_connection("stays")
    for number in range(10_000):
        admission.refusal_reason(f"host {number}", float(number))
    assert len(admission) <= 1025
    for _ in range(4):
        admission.add_connection("stays")
    assert admission.refusal_reason("stays", 1e4) is not None
