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


def seconds_by_tenant(queue: TenantReadQueue, seconds: dict[ClientConnection, float], count: int) -> Counter[str]:
    """Serve `count` turns of connections that always have data; return the seconds of each tenant."""
    used: Counter[str] = Counter()
    for _ in range(count):
        tenant, each = queue.take()
        used[tenant.name] += seconds[each]  # type: ignore[assignment]
        queue.put(each)
        queue.on_served(tenant, seconds[each])
    return used


def test_time_is_shared_by_tenant_weight(stream: Stream) -> None:
    a, b = Tenant("a", TenantConfig()), Tenant("b", TenantConfig(weight=3.0))
    many, few = [connection(stream, a) for _ in range(30)], [connection(stream, b)]
    queue = TenantReadQueue()
    for each in many + few:
        queue.put(each)
    seconds = {**dict.fromkeys(many, 1e-3), **dict.fromkeys(few, 1e-4)}
    used = seconds_by_tenant(queue, seconds, 5000)
    assert used["b"] == pytest.approx(3 * used["a"], rel=0.01)


def test_connections_without_tenant_have_the_least_weight(stream: Stream) -> None:
    light, anonymous = connection(stream, Tenant("light", TenantConfig(weight=0.001))), connection(stream, None)
    queue = TenantReadQueue()
    for each in (light, anonymous):
        queue.put(each)
    used = seconds_by_tenant(queue, dict.fromkeys((light, anonymous), 1e-4), 100)
    assert used["light"] == pytest.approx(used["(no tenant)"])


def test_new_tenant_is_next_and_has_no_credit(stream: Stream) -> None:
    a, b = Tenant("a", TenantConfig()), Tenant("b", TenantConfig())
    busy, quiet = connection(stream, a), connection(stream, b)
    queue = TenantReadQueue()
    queue.put(busy)
    seconds = dict.fromkeys((busy, quiet), 1e-4)
    seconds_by_tenant(queue, seconds, 1000)
    queue.put(quiet)
    assert queue.take() == (b, quiet)
    queue.put(quiet)
    queue.on_served(b, 1e-4)
    used = seconds_by_tenant(queue, seconds, 100)
    assert abs(used["a"] - used["b"]) < 3e-4


def test_queue_is_used_only_while_several_tenants_send(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("weightd_daemon.platform.event_loop.now", lambda: now)
    queue = TenantReadQueue()
    a, anonymous = connection(stream, Tenant("a", TenantConfig())), connection(stream, None)
    assert [queue.is_contended(each) for each in (a, a, anonymous, a)] == [False, False, True, True]
    now = 60.0
    assert not queue.is_contended(a)
    now = 0.0
    assert not queue.is_contended(a)


def test_users_of_a_tenant_take_turns(stream: Stream) -> None:
    tenant, queue = Tenant("a", TenantConfig()), TenantReadQueue()
    many = [connection(stream, tenant, "uid 1") for _ in range(30)]
    other = connection(stream, tenant, "uid 2")
    for each in [*many, other]:
        queue.put(each)
    taken: list[str] = []
    for _ in range(40):
        owner, each = queue.take()
        taken.append(each.origin.principal)
        queue.put(each)
        queue.on_served(owner, 1e-4)
    assert taken == ["uid 1", "uid 2"] * 20
    fresh = TenantReadQueue()
    assert [fresh.is_contended(each) for each in (*many[:2], other)] == [False, False, True]


def test_removes_connection_whose_user_has_changed(stream: Stream) -> None:
    queue, each = TenantReadQueue(), connection(stream, None, "uid 1")
    queue.put(each)
    each.origin = ClientOrigin("", "users without a tenant")
    queue.remove(each)
    assert not queue


def test_removed_connection_gets_no_turn(stream: Stream) -> None:
    queue = TenantReadQueue()
    anonymous = connection(stream, None)
    queue.put(anonymous)
    queue.remove(anonymous)
    assert not queue


def test_removal_during_a_turn_of_the_same_tenant(stream: Stream) -> None:
    a, b = Tenant("a", TenantConfig()), Tenant("b", TenantConfig())
    first, second, other = connection(stream, a), connection(stream, a), connection(stream, b)
    queue = TenantReadQueue()
    for each in (first, second, other):
        queue.put(each)
    assert queue.take() == (a, first)
    queue.remove(second)
    queue.on_served(a, 1e-4)
    assert queue.take() == (b, other)
    queue.on_served(b, 1e-4)
    assert not queue
