from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightd_common.peers import Peer
from weightd_gateway.connection_limiter import VIOLATION_PENALTY, GatewayConnectionLimiter

A, B = Peer("uid 1"), Peer("host 10.0.0.2")
ROOT = Peer("uid 0", is_operator=True)


def opened(admission: GatewayConnectionLimiter, peer: Peer, count: int, now: float = 0.0) -> int:
    """Return how many of `count` new connections are admitted."""
    return sum(admission.admit(peer, now) is None for _ in range(count))


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_peer_leaves_a_quarter_to_others(most: int, count: int) -> None:
    admission = GatewayConnectionLimiter(most, 0.0)
    has = opened(admission, A, count)
    assert has == min(count, max(1, 3 * most // 4))
    assert most == 1 or opened(admission, B, 1) == 1
    why = admission.admit(A, 0.0) if count > has else "max_connections"
    assert why
    assert "max_connections" in why


def test_closed_connection_frees_its_place() -> None:
    admission = GatewayConnectionLimiter(4, 0.0)
    assert opened(admission, A, 9) == 3
    admission.remove_connection(A)
    assert opened(admission, A, 9) == 1


def test_limits_connection_rate_of_a_peer() -> None:
    admission = GatewayConnectionLimiter(100_000, 10.0)
    burst = int(10 * GatewayConnectionLimiter.BURST_S)
    assert opened(admission, A, 2 * burst) == burst
    assert admission.admit(A, 0.0) == "uid 1 opens more than 10 connections a second (max_connection_rate)"
    assert opened(admission, B, 1) == 1
    assert opened(admission, A, 100, 1.0) == 10


def test_violations_reduce_connection_rate() -> None:
    admission = GatewayConnectionLimiter(100_000, 10.0)
    for _ in range(1000):
        admission.penalize(A, 0.0)
    assert opened(admission, A, 1, GatewayConnectionLimiter.BURST_S) == 0
    assert opened(admission, A, 1000, 3 * GatewayConnectionLimiter.BURST_S) == int(
        10 * GatewayConnectionLimiter.BURST_S
    )
    # One violation costs the configured number of connections.
    admission.penalize(B, 0.0)
    assert opened(admission, B, 1000) == int(10 * GatewayConnectionLimiter.BURST_S - VIOLATION_PENALTY)


def test_operators_have_only_the_total_limit() -> None:
    admission = GatewayConnectionLimiter(10, 1.0)
    admission.penalize(ROOT, 0.0)
    assert opened(admission, ROOT, 20) == 10


def test_forgets_old_peers() -> None:
    admission = GatewayConnectionLimiter(100_000, 1.0)
    for number in range(10_000):
        peer = Peer(f"host {number}")
        admission.admit(peer, float(number))
        admission.remove_connection(peer)
    assert len(admission) < 2000
