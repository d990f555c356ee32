from __future__ import annotations

import resource
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from weightd_daemon.platform.connection_limiter import EVERYONE as EVERYBODY
from weightd_daemon.platform.connection_limiter import (
    NO_TENANT,
    ConnectionAdmission,
    ConnectionLimiter,
    UserConnectionLimits,
    max_client_descriptors,
    max_total_regions,
    raise_descriptor_limit,
)


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


class Guest:
    def __init__(self, user: str, account: str = EVERYBODY, since: float = 0.0) -> None:
        self.user, self.account, self.connected_at = user, account, since
        self.has_sent_message = self.is_busy = False


class LimiterHarness:
    """A crowd, and the connections in it in the order in which they were opened."""

    def __init__(self, most: int) -> None:
        self.crowd: ConnectionLimiter[Guest] = ConnectionLimiter()
        self.most = most
        self.there: list[Guest] = []

    def opens(self, user: str, account: str = EVERYBODY, *, speaks: bool = True, busy: bool = False) -> list[Guest]:
        """Open a connection; return those that end because of it."""
        guest = Guest(user, account, float(len(self.there)))
        self.there.append(guest)
        self.crowd.add(guest, user, account)
        gone = [each.connection for each in self.crowd.evict_excess(self.most, "KEY")]
        self.there = [each for each in self.there if each not in gone]
        guest.has_sent_message, guest.is_busy = speaks or busy, busy
        return gone

    def of(self, account: str) -> int:
        return sum(each.account == account for each in self.there)


def test_a_tenant_keeps_its_share_whatever_another_one_opens() -> None:
    place = LimiterHarness(100)
    own = place.opens("b", "b") or place.there[:]
    for number in range(49):
        place.opens("b", "b", speaks=number % 2 == 0)
    for number in range(1000):
        gone = place.opens(f"uid {number}", "a", busy=True)
        assert not [each for each in gone if each.account == "b"]
    assert own[0] in place.there
    assert (place.of("a"), place.of("b")) == (50, 50)
    # And it gets its share back from a tenant that has more.
    other = LimiterHarness(100)
    for number in range(200):
        other.opens(f"uid {number}", "a", busy=True)
    for _ in range(50):
        assert [each.account for each in other.opens("b", "b", speaks=False)] == ["a"]


def test_many_users_with_one_connection_each_push_out_nobody_who_has_two_in_use() -> None:
    place = LimiterHarness(100)
    for _ in range(2):
        place.opens("b", busy=True)
    own = place.there[:]
    for number in range(1000):
        place.opens(f"uid {number}", speaks=number % 2 == 0)
    assert set(own) <= set(place.there)
    # Nor between its requests.
    for each in own:
        each.is_busy = False
    for number in range(1000):
        place.opens(f"uid {number}")
    assert set(own) <= set(place.there)


def test_the_reason_names_the_limit_and_the_numbers() -> None:
    crowd: ConnectionLimiter[Guest] = ConnectionLimiter()
    for number in range(9):
        crowd.add(Guest("x"), "uid 1", "a" if number else "b")
    [gone, *_] = crowd.evict_excess(8, "max_connections")
    assert gone.reason == (
        "expected at most 8 connections (max_connections), got 9, of which uid 1 has 8, and tenant a 8"
    )
    for _ in range(3):
        crowd.add(Guest("x"), "uid 2", NO_TENANT)
    assert crowd.evict_excess(11, "KEY")[0].reason == (
        "expected at most 2 of users without a tenant, a part of 11 (KEY), got 3"
    )


def may_end(there: list[Guest], most: int) -> list[Guest]:
    """Return which connection has to end, found the slow way; several where users have as many connections."""

    def of_account(own: list[Guest]) -> list[Guest]:
        count = Counter(each.user for each in own)
        size = max(count.values())
        if size > max(1, most // 32):
            return [first([each for each in own if each.user == user]) for user in count if count[user] == size]
        return [first(own)]

    def first(own: list[Guest]) -> Guest:
        silent = [each for each in own if not each.has_sent_message]
        idle = [each for each in own if not each.is_busy]
        return silent[0] if silent else (idle or own)[-1]

    strangers = [each for each in there if each.account == NO_TENANT]
    if len(strangers) > max(1, most // 4) or (strangers and len(there) > most):
        return of_account(strangers)
    if len(there) <= most:
        return []
    count = Counter(each.account for each in there)
    largest = [account for account in count if count[account] == max(count.values())]
    found = [of_account([each for each in there if each.account == account]) for account in largest]
    if any(len(each) > 1 for each in found):
        return [guest for each in found for guest in each]
    return [
        min((each for (each,) in found), key=lambda each: (each.is_busy, each.has_sent_message, -each.connected_at))
    ]


EVENTS = st.tuples(
    st.sampled_from(["open", "open", "open", "speak", "ask", "answer", "go"]),
    st.integers(0, 60),
    st.sampled_from([EVERYBODY, "a", "b", NO_TENANT]),
)


@given(st.lists(EVENTS, max_size=120), st.sampled_from([1, 4, 9, 40]))
def test_which_connections_end_is_by_the_rule_whatever_has_happened(
    events: list[tuple[str, int, str]], most: int
) -> None:
    crowd: ConnectionLimiter[Guest] = ConnectionLimiter()
    there: list[Guest] = []
    for number, (event, index, account) in enumerate(events):
        if event == "open":
            there.append(Guest(f"{account} {index % 3}", account, float(number)))
            crowd.add(there[-1], there[-1].user, account)
            possible = may_end(there, most)
            gone = [each.connection for each in crowd.evict_excess(most, "KEY")]
            assert len(gone) == bool(possible)
            assert set(gone) <= set(possible)
            there = [each for each in there if each not in gone]
        elif there:
            one = there[index % len(there)]
            if event == "go":
                there.remove(one)
                # The second time changes nothing.
                for _ in range(2):
                    crowd.remove(one)
            elif event == "answer":
                one.is_busy = False
            else:
                one.has_sent_message, one.is_busy = True, event == "ask"
        assert len(crowd) == len(there) <= most


def test_as_many_descriptors_as_the_system_allows_and_some_are_left_for_others() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
        for limit, most in ((300, 44), (1024, 512), (8000, 4000)):
            if limit <= before[1]:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
                assert max_client_descriptors() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("limit", [64, 300, 1024, 524_288])
def test_regions_and_connections_leave_a_part_of_the_descriptors(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def getrlimit(_: int) -> tuple[int, int]:
        return limit, limit

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    assert max_total_regions() >= 31
    assert limit - max_client_descriptors() - max_total_regions() >= 31
