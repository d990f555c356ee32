"""Shares of tenants on a simulated device, counted in answers by their clients."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from weightd_common.channels.pages import BASE, START, USED

from .device import Device, Source

_MAX_ERROR = 0.02
_PREDICT_S = 0.005
_LATE_S = 0.0001  # a worker answers a late request in this time

X, Y = 0, 1  # models
A, B, C = 0, 1, 2  # tenants


class Load(NamedTuple):
    """A load, and the share of the device seconds that each tenant should get."""

    weights: list[float]
    workers: list[int]
    sources: list[Source]
    shares: list[float]
    begin: float = 0.5
    end: float = 4.0


def many(tenant: int, cost_s: float = _PREDICT_S, model: int = X, begin: float = 0.0) -> Source:
    return Source(tenant, 64, cost_s, model, begin)


LOADS = {
    "weights 1:3": Load([1, 3], [X, X], [many(A), many(B)], [0.25, 0.75]),
    "weights 1:2:5": Load([1, 2, 5], [X, X], [many(A), many(B), many(C)], [0.125, 0.25, 0.625]),
    "weights 1:2:5, eight connections, four workers": Load(
        [1, 2, 5], [X] * 4, [Source(tenant, 8) for tenant in (A, B, C) for _ in range(8)], [0.125, 0.25, 0.625]
    ),
    "weights 0.1:1, three workers": Load([0.1, 1], [X] * 3, [many(A, 0.01), many(B, 0.01)], [1 / 11, 10 / 11], 2, 12),
    "many connections against one": Load([1, 1], [X], [*(Source(A, 8) for _ in range(30)), many(B)], [0.5, 0.5]),
    "requests of 1 ms and 100 ms": Load([1, 1], [X, X], [many(A, 0.001), many(B, 0.1)], [0.5, 0.5], 1, 20),
    "a tenant that begins later": Load([1, 1], [X, X], [many(A), many(B, begin=1.5)], [0.5, 0.5], 1.6, 3),
    "a tenant that pauses": Load(
        [1, 1], [X, X], [many(A), Source(B, 64, end=1.0), many(B, begin=3)], [0.5, 0.5], 3.1, 4
    ),
    "a tenant that was slow": Load(
        [1, 1], [X, X], [many(A), Source(B, 1, end=2.0), many(B, begin=2.0)], [0.5, 0.5], 2.1, 3
    ),
    "two models, one tenant on both": Load([1, 1], [X, Y], [many(A), many(B), many(B, model=Y)], [0.5, 0.5]),
    "two models, unequal costs": Load(
        [1, 1, 1], [X, Y], [many(A, 0.002), many(B, 0.1), many(C, 0.002), many(C, 0.002, Y)], [0.25, 0.25, 0.5], 2, 22
    ),
    "a tenant that begins to use a second model": Load(
        [1, 1, 1], [X, Y], [many(A), many(B), many(C, model=Y), Source(A, 1, model=Y, begin=6)], [1 / 3] * 3, 9, 15
    ),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_shares_follow_the_weights(load: Load) -> None:
    device = Device(load.weights, load.workers, load.sources)
    device.run(load.end)
    assert device.shares(load.begin, load.end) == pytest.approx(load.shares, abs=_MAX_ERROR)


@pytest.mark.parametrize(
    "others", [[Source(A, 64)], [Source(A, 64)] * 8, [Source(A, 1)] * 200], ids=["one", "eight", "200"]
)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_one_request_beside_a_flood_waits_one_predict(others: list[Source], workers: int) -> None:
    flood = [Source(each.tenant, each.in_flight) for each in others]
    device = Device([1, 1], [X] * workers, [*flood, Source(B, 1)])
    device.run(3.0)
    waits = device.waits(B)
    assert waits[len(waits) // 2] <= 2.1 * _PREDICT_S
    assert waits[len(waits) * 99 // 100] <= 3.1 * _PREDICT_S


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("clients", [1, 8])
def test_requests_that_do_not_run_leave_other_tenants_their_share(clients: int, workers: int) -> None:
    late = [Source(A, 64, _LATE_S, is_late=True) for _ in range(clients)]
    device = Device([1, 1], [X] * workers, [*late, many(B)])
    device.run(3.0)
    assert device.seconds(B, 0.5, 3.0) >= 0.5 * 2.5 * workers


def test_expected_costs_keep_one_tenant_from_taking_all_workers() -> None:
    """With requests of one second, the charge at the start decides how many workers a tenant holds at once."""
    device = Device([1, 1], [X] * 4, [many(A, 1.0), many(B, 1.0)])
    device.run(101.0)
    assert all(0.9 <= device.seconds(A, begin, begin + 1.0) <= 3.1 for begin in range(20, 100))


def test_reloaded_weights_take_effect_at_once() -> None:
    device = Device([1, 1], [X, X], [many(A), many(B)])
    device.run(1.0)
    device.table.set_weight(B, 3.0, device.now)
    device.run(2.0)
    assert device.shares(1.05, 2.0) == pytest.approx([0.25, 0.75], abs=_MAX_ERROR)
    device.table.set_weight(A, 0.5, device.now)  # the tenant exceeds its quota
    device.run(3.0)
    assert device.shares(2.05, 3.0) == pytest.approx([1 / 7, 6 / 7], abs=_MAX_ERROR)
    device.table.set_weight(A, 3.0, device.now)
    device.run(4.0)
    assert device.shares(3.05, 4.0) == pytest.approx([0.5, 0.5], abs=_MAX_ERROR)


def test_a_raised_weight_forgives_seconds_of_the_lower_weight() -> None:
    """With weight 0.001 a request of 0.1 s is 100 s of virtual time. The tenant must not wait for these."""
    device = Device([1, 0.001], [X], [many(A), many(B, 0.1)])
    device.run(1.0)
    device.table.set_weight(B, 1.0, device.now)
    device.run(3.0)
    assert device.shares(1.2, 3.0)[B] == pytest.approx(0.5, abs=0.05)
    device.table.set_weight(B, 2.0, device.now)
    device.run(6.0)
    assert device.shares(3.2, 6.0)[B] == pytest.approx(2 / 3, abs=0.05)
    device.table.set_weight(B, 0.5, device.now)
    device.run(9.0)
    assert device.shares(6.2, 9.0)[B] == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_implausible_rows_of_other_workers_do_not_count(value: float) -> None:
    device = Device([1, 3], [X, X, Y], [many(A), many(B)])
    reals = device.row_memory[2].reals
    reals[START] = value
    for tenant in (A, B):
        reals[device.layout.row_tenant(tenant) + USED] = value
        reals[device.layout.row_tenant(tenant) + BASE] = value
    device.run(3.0)
    assert device.shares(0.5, 3.0) == pytest.approx([0.25, 0.75], abs=_MAX_ERROR)


def test_a_worker_that_starts_later_continues_the_shares() -> None:
    device = Device([1, 3], [X], [many(A), many(B)])
    device.run(2.0)
    device.add_worker(X)
    device.run(2.2)
    assert device.shares(2.0, 2.2) == pytest.approx([0.25, 0.75], abs=0.04)
    device.run(4.0)
    assert device.shares(2.2, 4.0) == pytest.approx([0.25, 0.75], abs=_MAX_ERROR)
    assert device.seconds(B, 2.2, 4.0) == pytest.approx(2 * 1.8 * 0.75, rel=0.05)


def test_accounts_have_the_seconds_of_all_answers() -> None:
    device = Device([1, 2], [X, X], [many(A), many(B, 0.003), Source(B, 1, 0.02)])
    device.run(2.0)
    for source in device.sources:
        slot = device.table.channels[source.serial].slot
        counts = device.table.rows.counts(slot, device.now)
        assert counts.ended == len(source.waits)
        assert counts.requests - counts.ended in (0, 1, 2)
        assert counts.seconds == pytest.approx(source.cost_s * counts.ended)


def test_a_new_tenant_does_not_inherit_the_seconds_of_its_slot() -> None:
    device = Device([1, 0.001], [X, X], [many(A), Source(B, 1, 1.0, end=0.5), many(B, begin=2.0)])
    device.run(2.0)
    device.table.add_tenant(B, 1.0, device.now)
    device.run(3.0)
    assert device.shares(2.0, 3.0)[B] == pytest.approx(0.5, abs=_MAX_ERROR)
