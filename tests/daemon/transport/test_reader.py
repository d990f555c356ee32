from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from weightd_common.stream import Stream
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.scheduling.request import ClientOrigin
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.transport.connection import ClientConnection, ClientIdentity
from weightd_daemon.transport.reader import TenantReadQueue


@pytest.fixture
def stream() -> Iterator[Stream]:
    ours, theirs = socket.socketpair()
    with theirs:
        made = Stream(ours)
        yield made
        made.close()


def connection(stream: Stream, tenant: Tenant | None, user: str = "") -> ClientConnection:
    made = ClientConnection(b"", stream, ClientIdentity(ClientOrigin("", user)), 0.0)
    made.tenant = tenant
    return made


def turns(lanes: TenantReadQueue, seconds: dict[ClientConnection, float], count: int) -> Counter[str]:
    """Who has its turn, where all wait again; in seconds."""
    had: Counter[str] = Counter()
    for _ in range(count):
        tenant, each = lanes.take()
        had[tenant.name] += seconds[each]  # type: ignore[assignment]
        lanes.put(each)
        lanes.on_served(tenant, seconds[each])
    return had


def test_time_goes_by_tenants_and_their_weights_and_not_by_connections(stream: Stream) -> None:
    a, b = Tenant("a", TenantConfig()), Tenant("b", TenantConfig(weight=3.0))
    many, few = [connection(stream, a) for _ in range(30)], [connection(stream, b)]
    lanes = TenantReadQueue()
    for each in many + few:
        lanes.put(each)
    seconds = {**dict.fromkeys(many, 1e-3), **dict.fromkeys(few, 1e-4)}
    had = turns(lanes, seconds, 5000)
    assert had["b"] == pytest.approx(3 * had["a"], rel=0.01)


def test_nobody_has_more_time_than_a_tenant(stream: Stream) -> None:
    light, nobody = connection(stream, Tenant("light", TenantConfig(weight=0.001))), connection(stream, None)
    lanes = TenantReadQueue()
    for each in (light, nobody):
        lanes.put(each)
    had = turns(lanes, dict.fromkeys((light, nobody), 1e-4), 100)
    assert had["light"] == pytest.approx(had["(no tenant)"])


def test_who_comes_is_next_and_has_no_credit_for_its_silence(stream: Stream) -> None:
    a, b = Tenant("a", TenantConfig()), Tenant("b", TenantConfig())
    loud, modest = connection(stream, a), connection(stream, b)
    lanes = TenantReadQueue()
    lanes.put(loud)
    seconds = dict.fromkeys((loud, modest), 1e-4)
    turns(lanes, seconds, 1000)
    lanes.put(modest)
    assert lanes.take() == (b, modest)
    lanes.put(modest)
    lanes.on_served(b, 1e-4)
    had = turns(lanes, seconds, 100)
    assert abs(had["a"] - had["b"]) < 3e-4


def test_there_are_lanes_only_while_several_speak(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("weightd_daemon.platform.event_loop.now", lambda: now)
    lanes = TenantReadQueue()
    a, nobody = connection(stream, Tenant("a", TenantConfig())), connection(stream, None)
    assert [lanes.is_contended(each) for each in (a, a, nobody, a)] == [False, False, True, True]
    now = 60.0
    assert not lanes.is_contended(a)
    now = 0.0
    assert not lanes.is_contended(a)


def test_users_of_one_tenant_take_turns_however_many_connections_they_have(stream: Stream) -> None:
    tenant, lanes = Tenant("a", TenantConfig()), TenantReadQueue()
    many = [connection(stream, tenant, "uid 1") for _ in range(30)]
    other = connection(stream, tenant, "uid 2")
    for each in [*many, other]:
        lanes.put(each)
    taken: list[str] = []
    for _ in range(40):
        who, each = lanes.take()
        taken.append(each.origin.principal)
        lanes.put(each)
        lanes.on_served(who, 1e-4)
    assert taken == ["uid 1", "uid 2"] * 20
    fresh = TenantReadQueue()
    assert [fresh.is_contended(each) for each in (*many[:2], other)] == [False, False, True]


def test_who_has_gone_after_a_reload_changed_its_user_has_no_turn(stream: Stream) -> None:
    lanes, each = TenantReadQueue(), connection(stream, None, "uid 1")
    lanes.put(each)
    each.origin = ClientOrigin("", "users without a tenant")
    lanes.remove(each)
    assert not lanes


def test_who_has_gone_has_no_turn(stream: Stream) -> None:
    lanes = TenantReadQueue()
    nobody = connection(stream, None)
    lanes.put(nobody)
    lanes.remove(nobody)
    assert not lanes


def test_who_is_hung_up_while_another_one_of_its_tenant_has_its_turn_is_no_trouble(stream: Stream) -> None:
    a, b = Tenant("a", TenantConfig()), Tenant("b", TenantConfig())
    first, second, other = connection(stream, a), connection(stream, a), connection(stream, b)
    lanes = TenantReadQueue()
    for each in (first, second, other):
        lanes.put(each)
    assert lanes.take() == (a, first)
    lanes.remove(second)
    lanes.on_served(a, 1e-4)
    assert lanes.take() == (b, other)
    lanes.on_served(b, 1e-4)
    assert not lanes
