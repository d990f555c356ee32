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


def test_refuses_connections_beyond_the_users_limit() -> None:
    admission = ConnectionAdmission(UserConnectionLimits(max_connections=2))
    for _ in range(2):
        assert admission.refusal_reason("a", 0.0) is None
        admission.add_connection("a")
    assert admission.refusal_reason("a", 9.0) == "this user has 2 connections already (max_user_connections)"
    assert admission.refusal_reason("b", 9.0) is None
    admission.remove_connection("a")
    assert admission.refusal_reason("a", 9.0) is None


def test_limits_the_rate_of_new_connections() -> None:
    admission = ConnectionAdmission(UserConnectionLimits(max_connections=20, rate=10.0))
    reasons = [admission.refusal_reason("a", 5.0) for _ in range(21)]
    assert reasons[:20] == 20 * [None]
    assert reasons[20] == "this user opens more than 10 connections a second (max_user_connection_rate)"
    assert admission.refusal_reason("b", 5.0) is None
    assert [admission.refusal_reason("a", 5.35) is None for _ in range(4)] == [True, True, True, False]


@given(
    st.integers(1, 5),
    st.floats(0.5, 50.0),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), max_size=60),
)
def test_never_exceeds_burst_and_rate(most: int, rate: float, events: list[tuple[float, bool]]) -> None:
    limits = UserConnectionLimits(most, rate)
    admission = ConnectionAdmission(limits)
    now, opened, connected = 0.0, 0, 0
    for wait, leaves in events:
        now += wait
        if leaves and connected:
            admission.remove_connection("a")
            connected -= 1
        elif admission.refusal_reason("a", now) is None:
            admission.add_connection("a")
            opened, connected = opened + 1, connected + 1
        assert connected <= most
        assert opened <= limits.burst + now * rate + 1e-6


def test_forgets_users_without_connections() -> None:
    admission = ConnectionAdmission(UserConnectionLimits(max_connections=5, rate=1.0))
    admission.refusal_reason("stays", 0.0)
    admission.add_connection("stays")
    for number in range(10_000):
        admission.refusal_reason(f"host {number}", float(number))
    assert len(admission) <= 1025
    for _ in range(4):
        admission.add_connection("stays")
    assert admission.refusal_reason("stays", 1e4) is not None


class FakePeer:
    def __init__(self, user: str, account: str = EVERYBODY, since: float = 0.0) -> None:
        self.user, self.account, self.connected_at = user, account, since
        self.has_sent_message = self.is_busy = False


class LimiterHarness:
    """A ConnectionLimiter and its connections, in the order in which they were opened."""

    def __init__(self, most: int) -> None:
        self.limiter: ConnectionLimiter[FakePeer] = ConnectionLimiter()
        self.most = most
        self.connected: list[FakePeer] = []

    def connect(
        self, user: str, account: str = EVERYBODY, *, speaks: bool = True, busy: bool = False
    ) -> list[FakePeer]:
        """Open a connection and return the connections evicted for it."""
        peer = FakePeer(user, account, float(len(self.connected)))
        self.connected.append(peer)
        self.limiter.add(peer, user, account)
        evicted = [each.connection for each in self.limiter.evict_excess(self.most, "KEY")]
        self.connected = [each for each in self.connected if each not in evicted]
        peer.has_sent_message, peer.is_busy = speaks or busy, busy
        return evicted

    def count(self, account: str) -> int:
        return sum(each.account == account for each in self.connected)


def test_tenant_keeps_its_share() -> None:
    harness = LimiterHarness(100)
    own = harness.connect("b", "b") or harness.connected[:]
    for number in range(49):
        harness.connect("b", "b", speaks=number % 2 == 0)
    for number in range(1000):
        evicted = harness.connect(f"uid {number}", "a", busy=True)
        assert not [each for each in evicted if each.account == "b"]
    assert own[0] in harness.connected
    assert (harness.count("a"), harness.count("b")) == (50, 50)
    # A tenant also gets its share back from a tenant with more.
    other = LimiterHarness(100)
    for number in range(200):
        other.connect(f"uid {number}", "a", busy=True)
    for _ in range(50):
        assert [each.account for each in other.connect("b", "b", speaks=False)] == ["a"]


def test_busy_user_survives_many_single_connections() -> None:
    harness = LimiterHarness(100)
    for _ in range(2):
        harness.connect("b", busy=True)
    own = harness.connected[:]
    for number in range(1000):
        harness.connect(f"uid {number}", speaks=number % 2 == 0)
    assert set(own) <= set(harness.connected)
    # The connections also survive while they have no request in progress.
    for each in own:
        each.is_busy = False
    for number in range(1000):
        harness.connect(f"uid {number}")
    assert set(own) <= set(harness.connected)


def test_reason_names_limit_and_counts() -> None:
    limiter: ConnectionLimiter[FakePeer] = ConnectionLimiter()
    for number in range(9):
        limiter.add(FakePeer("x"), "uid 1", "a" if number else "b")
    [evicted, *_] = limiter.evict_excess(8, "max_connections")
    assert evicted.reason == (
        "expected at most 8 connections (max_connections), got 9, of which uid 1 has 8, and tenant a 8"
    )
    for _ in range(3):
        limiter.add(FakePeer("x"), "uid 2", NO_TENANT)
    assert limiter.evict_excess(11, "KEY")[0].reason == (
        "expected at most 2 of users without a tenant, a part of 11 (KEY), got 3"
    )


def eviction_candidates(connected: list[FakePeer], most: int) -> list[FakePeer]:
    """Return the connections that may be evicted next, by brute force; several if users are tied."""

    def of_account(own: list[FakePeer]) -> list[FakePeer]:
        count = Counter(each.user for each in own)
        size = max(count.values())
        if size > max(1, most // 32):
            return [first([each for each in own if each.user == user]) for user in count if count[user] == size]
        return [first(own)]

    def first(own: list[FakePeer]) -> FakePeer:
        silent = [each for each in own if not each.has_sent_message]
        idle = [each for each in own if not each.is_busy]
        return silent[0] if silent else (idle or own)[-1]

    strangers = [each for each in connected if each.account == NO_TENANT]
    if len(strangers) > max(1, most // 4) or (strangers and len(connected) > most):
        return of_account(strangers)
    if len(connected) <= most:
        return []
    count = Counter(each.account for each in connected)
    largest = [account for account in count if count[account] == max(count.values())]
    found = [of_account([each for each in connected if each.account == account]) for account in largest]
    if any(len(each) > 1 for each in found):
        return [peer for each in found for peer in each]
    return [
        min((each for (each,) in found), key=lambda each: (each.is_busy, each.has_sent_message, -each.connected_at))
    ]


EVENTS = st.tuples(
    st.sampled_from(["open", "open", "open", "speak", "ask", "answer", "go"]),
    st.integers(0, 60),
    st.sampled_from([EVERYBODY, "a", "b", NO_TENANT]),
)


@given(st.lists(EVENTS, max_size=120), st.sampled_from([1, 4, 9, 40]))
def test_evicts_by_the_rule(events: list[tuple[str, int, str]], most: int) -> None:
    limiter: ConnectionLimiter[FakePeer] = ConnectionLimiter()
    connected: list[FakePeer] = []
    for number, (event, index, account) in enumerate(events):
        if event == "open":
            connected.append(FakePeer(f"{account} {index % 3}", account, float(number)))
            limiter.add(connected[-1], connected[-1].user, account)
            possible = eviction_candidates(connected, most)
            evicted = [each.connection for each in limiter.evict_excess(most, "KEY")]
            assert len(evicted) == bool(possible)
            assert set(evicted) <= set(possible)
            connected = [each for each in connected if each not in evicted]
        elif connected:
            one = connected[index % len(connected)]
            if event == "go":
                connected.remove(one)
                # A second removal changes nothing.
                for _ in range(2):
                    limiter.remove(one)
            elif event == "answer":
                one.is_busy = False
            else:
                one.has_sent_message, one.is_busy = True, event == "ask"
        assert len(limiter) == len(connected) <= most


def test_raises_the_descriptor_limit_and_keeps_a_reserve() -> None:
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
def test_regions_and_connections_leave_descriptors(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def getrlimit(_: int) -> tuple[int, int]:
        return limit, limit

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    assert max_total_regions() >= 31
    assert limit - max_client_descriptors() - max_total_regions() >= 31
