from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.tenants.usage import Quota, QuotaExceeded
from weightd_protocol.messages.inference import RequestDescription, TensorSpec


def request_of(*shapes: tuple[int, ...]) -> RequestDescription:
    return RequestDescription("m", tuple(TensorSpec(f"x{index}", "FP32", each) for index, each in enumerate(shapes)))


def config_with(limit: str, value: int) -> TenantConfig:
    change: Any = {limit: value}
    return replace(TenantConfig(), **change)


def quota_with_two_requests() -> Quota:
    """Return a quota with one running and one waiting request."""
    quota = Quota()
    for _ in range(2):
        quota.add_request(TenantConfig(), request_of(()), 100)
    quota.start_request(100)
    return quota


@pytest.mark.parametrize(
    ("limit", "value", "higher_value"),
    [("max_in_flight", 2, 3), ("max_queue", 1, 2), ("max_queue_bytes", 150, 151), ("max_rows", 7, 8)],
)
def test_quota_error_names_the_exceeded_limit(limit: str, value: int, higher_value: int) -> None:
    with pytest.raises(QuotaExceeded, match=rf"{limit} of this tenant is {value}\b") as caught:
        quota_with_two_requests().add_request(config_with(limit, value), request_of((3,), (8, 2)), 51)
    assert caught.value.quota == limit
    # Waiting does not help against max_rows, so there is no retry_after.
    assert (caught.value.retry_after is None) == (limit == "max_rows")
    quota_with_two_requests().add_request(config_with(limit, higher_value), request_of((3,), (8, 2)), 51)
    quota_with_two_requests().add_request(TenantConfig(), request_of((3,), (8, 2)), 51)


def test_single_request_may_exceed_max_queue_bytes() -> None:
    Quota().add_request(TenantConfig(max_queue_bytes=1), request_of(()), 2**40)


def test_ended_requests_do_not_count() -> None:
    quota = quota_with_two_requests()
    quota.end_request(100, has_started=True)
    assert (quota.in_flight, quota.waiting, quota.waiting_bytes) == (1, 1, 100)
    quota.end_request(100, has_started=False)
    assert (quota.in_flight, quota.waiting, quota.waiting_bytes) == (0, 0, 0)


def quota_error_of_message(quota: Quota, config: TenantConfig, now: float) -> QuotaExceeded | None:
    try:
        quota.count_message(config, now)
    except QuotaExceeded as error:
        return error
    return None


@given(
    rate=st.floats(0.1, 1e4),
    steps=st.lists(st.floats(0, 5), min_size=1, max_size=60),
)
def test_rate_limit_allows_one_second_of_burst(rate: float, steps: list[float]) -> None:
    quota, config, now = Quota(), TenantConfig(max_rate=rate), 1000.0
    passed: list[float] = []
    for step in steps:
        now += step
        refused = quota_error_of_message(quota, config, now)
        if refused is not None:
            assert refused.quota == "max_rate"
            assert refused.retry_after is not None
            assert 0 < refused.retry_after <= 1 / rate + 1e-9
            # A message after the suggested waiting time is accepted.
            now += refused.retry_after + 1e-6
            quota.count_message(config, now)
        passed.append(now)
    for first, start in enumerate(passed):
        for last, end in enumerate(passed[first:], first):
            assert last - first + 1 <= max(1.0, rate) + (end - start) * rate + 1e-3


def test_raised_rate_applies_from_then_on() -> None:
    quota, slow, fast = Quota(), TenantConfig(max_rate=1.0), TenantConfig(max_rate=10.0)
    quota.count_message(slow, 0.0)
    refused = quota_error_of_message(quota, slow, 0.25)
    assert refused is not None
    assert refused.retry_after == pytest.approx(0.75)
    assert [quota_error_of_message(quota, fast, 0.45) is None for _ in range(5)] == [True] * 4 + [False]


def test_tenant_without_limits_is_not_limited() -> None:
    quota = Quota()
    for _ in range(1000):
        quota.count_message(TenantConfig(), 0.0)


def test_excess_connection_counts_until_it_is_removed() -> None:
    quota, config = Quota(), TenantConfig(max_connections=1)
    quota.add_connection(config)
    with pytest.raises(QuotaExceeded, match="max_connections of this tenant is 1; closing this connection"):
        quota.add_connection(config)
    assert quota.connections == 2
