from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.tenants.usage import Quota, QuotaExceeded
from weightd_protocol.messages.inference import RequestDescription, TensorSpec


def asked(*shapes: tuple[int, ...]) -> RequestDescription:
    return RequestDescription("m", tuple(TensorSpec(f"x{index}", "FP32", each) for index, each in enumerate(shapes)))


def bounded(bound: str, most: int) -> TenantConfig:
    change: Any = {bound: most}
    return replace(TenantConfig(), **change)


def busy() -> Quota:
    """One runs, one waits."""
    quota = Quota()
    for _ in range(2):
        quota.add_request(TenantConfig(), asked(()), 100)
    quota.start_request(100)
    return quota


@pytest.mark.parametrize(
    ("bound", "most", "enough"),
    [("max_in_flight", 2, 3), ("max_queue", 1, 2), ("max_queue_bytes", 150, 151), ("max_rows", 7, 8)],
)
def test_what_is_at_its_bound_gets_no_more_and_is_told_which(bound: str, most: int, enough: int) -> None:
    with pytest.raises(QuotaExceeded, match=rf"{bound} of this tenant is {most}\b") as told:
        busy().add_request(bounded(bound, most), asked((3,), (8, 2)), 51)
    assert told.value.quota == bound
    # Fewer rows are a matter of the request, not of time.
    assert (told.value.retry_after is None) == (bound == "max_rows")
    busy().add_request(bounded(bound, enough), asked((3,), (8, 2)), 51)
    busy().add_request(TenantConfig(), asked((3,), (8, 2)), 51)


def test_one_that_waits_alone_may_have_more_bytes() -> None:
    Quota().add_request(TenantConfig(max_queue_bytes=1), asked(()), 2**40)


def test_what_has_ended_counts_no_more_begun_or_not() -> None:
    quota = busy()
    quota.end_request(100, has_started=True)
    assert (quota.in_flight, quota.waiting, quota.waiting_bytes) == (1, 1, 100)
    quota.end_request(100, has_started=False)
    assert (quota.in_flight, quota.waiting, quota.waiting_bytes) == (0, 0, 0)


def too_soon(quota: Quota, config: TenantConfig, now: float) -> QuotaExceeded | None:
    try:
        quota.count_message(config, now)
    except QuotaExceeded as error:
        return error
    return None


@given(
    rate=st.floats(0.1, 1e4),
    steps=st.lists(st.floats(0, 5), min_size=1, max_size=60),
)
def test_in_no_stretch_of_time_are_there_more_messages_than_the_rate_and_a_second_more(
    rate: float, steps: list[float]
) -> None:
    quota, config, now = Quota(), TenantConfig(max_rate=rate), 1000.0
    passed: list[float] = []
    for step in steps:
        now += step
        refused = too_soon(quota, config, now)
        if refused is not None:
            assert refused.quota == "max_rate"
            assert refused.retry_after is not None
            assert 0 < refused.retry_after <= 1 / rate + 1e-9
            # Who waits as long is heard.
            now += refused.retry_after + 1e-6
            quota.count_message(config, now)
        passed.append(now)
    for first, start in enumerate(passed):
        for last, end in enumerate(passed[first:], first):
            assert last - first + 1 <= max(1.0, rate) + (end - start) * rate + 1e-3


def test_a_rate_that_a_reload_raises_counts_from_then_on() -> None:
    quota, slow, fast = Quota(), TenantConfig(max_rate=1.0), TenantConfig(max_rate=10.0)
    quota.count_message(slow, 0.0)
    refused = too_soon(quota, slow, 0.25)
    assert refused is not None
    assert refused.retry_after == pytest.approx(0.75)
    assert [too_soon(quota, fast, 0.45) is None for _ in range(5)] == [True] * 4 + [False]


def test_who_is_not_bounded_may_say_what_he_wants() -> None:
    quota = Quota()
    for _ in range(1000):
        quota.count_message(TenantConfig(), 0.0)


def test_a_connection_too_many_counts_until_it_has_gone() -> None:
    quota, config = Quota(), TenantConfig(max_connections=1)
    quota.add_connection(config)
    with pytest.raises(QuotaExceeded, match="max_connections of this tenant is 1; closing this connection"):
        quota.add_connection(config)
    assert quota.connections == 2
