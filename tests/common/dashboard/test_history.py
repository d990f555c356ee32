"""Tests of the history, which computes rates and quantiles from the daemon's latest metrics."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import replace
from typing import List, Optional, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import looks
from testkit.looks import MB
from weightd_common.dashboard.history import RATE_WINDOW_S, SPARKLINE_POINTS, History, count_difference, quantile, rate
from weightd_common.dashboard.overview import ModelRow, Overview, RatePoint
from weightd_protocol.messages.metrics import Histogram, MetricsResponse


def seen(*responses: MetricsResponse, gap: float = 1e9) -> Overview:
    history = History(gap)
    for each in responses:
        history.on_metrics(each)
    return history.overview()


def only(overview: Overview) -> ModelRow:
    [row] = overview.models
    return row


def test_first_metrics_have_no_rate() -> None:
    overview = seen(looks.metrics(10.0, looks.counted("m", (5, 5, 0, 0), queued=3, running=2)))
    assert (overview.throughput.rate, only(overview).throughput.rate, only(overview).refused_rate) == (None, None, None)
    assert (overview.queued, overview.running, overview.memory, overview.processes) == (3, 2, None, ())


def test_rates_and_quantiles_cover_the_last_seconds() -> None:
    responses = [looks.metrics(10.0 + second, looks.counted("m", (100 * second, 0, 0, 0))) for second in range(20)]
    responses.append(looks.metrics(30.0, looks.counted("m", (1900, 200, 0, 0))))
    overview = seen(*responses)
    row = only(overview)
    assert row.throughput.rate == pytest.approx((200 + 4 * 100) / RATE_WINDOW_S)
    assert row.throughput.p50_s == pytest.approx(0.001 * 300 / 400)
    assert row.throughput.p99_s == pytest.approx(0.001 + 0.009 * (594 - 400) / 200)
    assert row.throughput.rate_points[-1] == pytest.approx((200.0, 0.001 + 0.009 * 198 / 200))
    assert overview.throughput == row.throughput


def test_sums_models_of_service() -> None:
    before = looks.metrics(1.0, looks.counted("a"), looks.counted("b"))
    now = looks.metrics(3.0, looks.counted("a", (10, 0, 0, 0)), looks.counted("b", (0, 30, 0, 0)))
    overview = seen(before, now)
    assert [row.throughput.rate for row in overview.models] == [5.0, 15.0]
    assert overview.throughput.rate == 20.0
    assert overview.throughput.p50_s == pytest.approx(0.001 + 0.009 / 3)


def test_restarted_daemon_has_no_rate_at_first() -> None:
    before = looks.metrics(100.0, looks.counted("m", (1000, 0, 0, 0)))
    # A daemon may continue the counters of the one before.
    for counts in ((10, 0, 0, 0), (2000, 0, 0, 0)):
        again = looks.metrics(2.0, looks.counted("m", counts))
        assert only(seen(before, again)).throughput.rate is None
        later = looks.metrics(3.0, looks.counted("m", (counts[0] + 7, 0, 0, 0)))
        row = only(seen(before, again, later))
        assert row.throughput.rate == 7.0
        assert [moment.rate for moment in row.throughput.rate_points] == [None, None, 7.0]


def test_reloaded_model_restarts_its_rates() -> None:
    responses = [
        looks.metrics(1.0, looks.counted("a", (50, 0, 0, 0)), looks.counted("b")),
        looks.metrics(2.0, looks.counted("a", (3, 0, 0, 0)), looks.counted("b", (10, 0, 0, 0))),
        looks.metrics(3.0, looks.counted("a", (8, 0, 0, 0)), looks.counted("b", (20, 0, 0, 0))),
    ]
    assert [row.throughput.rate for row in seen(*responses[:2]).models] == [None, 10.0]
    overview = seen(*responses)
    assert [row.throughput.rate for row in overview.models] == [5.0, 10.0]
    assert overview.throughput.rate == 10.0


def test_changed_buckets_are_not_compared() -> None:
    before = looks.metrics(1.0, looks.counted("m", (5, 0, 0, 0)))
    now = replace(looks.metrics(2.0, looks.counted("m", (9, 0, 0, 0))), seconds_bounds=(0.002, 0.02, 0.2))
    assert only(seen(before, now)).throughput == seen(looks.metrics(1.0, looks.counted("m"))).throughput._replace(
        rate_points=(RatePoint(None, None),) * 2
    )


def test_ignores_repeated_response() -> None:
    responses = [looks.metrics(float(second), looks.counted("m", (second, 0, 0, 0))) for second in (1, 2)]
    assert seen(*responses, responses[-1]) == seen(*responses)


def test_sparks_restart_after_a_pause() -> None:
    responses = [looks.metrics(float(second), looks.counted("m", (second, 0, 0, 0))) for second in (1, 2, 60)]
    assert only(seen(*responses)).throughput.rate == pytest.approx(58 / 58)
    assert only(seen(*responses, gap=5.0)).throughput == seen(responses[2]).throughput


def test_limits_sparks_and_forgets_removed_models() -> None:
    history = History()
    for second in range(SPARKLINE_POINTS + 30):
        history.on_metrics(
            looks.metrics(float(second), looks.counted("m", (second, 0, 0, 0)), looks.counted(f"m{second}"))
        )
    rows = history.overview().models
    assert [len(row.throughput.rate_points) for row in rows] == [SPARKLINE_POINTS, 1]
    assert set(vars(history)["_rate_points"]) == {"", "m", f"m{SPARKLINE_POINTS + 29}"}


steps = st.lists(st.tuples(st.floats(0, 3), st.integers(-5, 50)), min_size=1, max_size=30)


@given(steps)
def test_rates_are_never_negative(steps: List[Tuple[float, int]]) -> None:
    history, uptime, count = History(), 0.0, 0
    for seconds, more in steps:
        uptime, count = (uptime + seconds, max(0, count + more)) if seconds > 0.1 else (seconds, count)
        history.on_metrics(looks.metrics(uptime, looks.counted("m", (count, 0, 0, 0))))
        for pace in (history.overview().throughput, only(history.overview()).throughput):
            assert pace.rate is None or pace.rate >= 0
            assert all(rate is None or rate >= 0 for rate, _ in pace.rate_points)


# --- data of the status -------------------------------------------------------------------------------------------


def looked(*uptimes: Tuple[float, int]) -> Overview:
    history = History()
    history.on_metrics(looks.metrics(1.0, looks.counted("m")))
    for uptime, served in uptimes:
        processes = looks.processes("m", 2, private=10 * MB, weights=90 * MB, served=served)
        history.on_status(looks.status(uptime, looks.model("m", processes, copy=90 * MB)))
    return history.overview()


@pytest.mark.parametrize(
    ("uptimes", "rate"),
    [(((10.0, 100),), None), (((10.0, 100), (20.0, 150)), 5.0), (((10.0, 100), (2.0, 150)), None)],
)
def test_process_rates_need_two_statuses(uptimes: Tuple[Tuple[float, int], ...], rate: Optional[float]) -> None:
    processes = looked(*uptimes).processes
    assert [each.status.name for each in processes] == ["m.1.holder", "m.1.w1", "m.1.w2"]
    assert [each.rate for each in processes[1:]] == [rate, rate]


def test_memory_comes_from_status() -> None:
    overview = looked((10.0, 0))
    assert overview.memory is not None
    assert overview.memory.without_sharing_bytes == 200 * MB
    assert only(overview).memory == replace(overview.memory, other_bytes=overview.memory.other_bytes - 30 * MB)


def test_group_memory_is_shown_with_its_first_model() -> None:
    history = History()
    history.on_metrics(looks.metrics(1.0, *map(looks.counted, "abc")))
    processes = looks.processes("g", 1, private=10 * MB, weights=0)
    groups = {"a": "g", "b": "g", "c": ""}
    history.on_status(looks.status(1.0, *(looks.model(name, processes, group=group) for name, group in groups.items())))
    assert [row.memory is not None for row in history.overview().models] == [True, False, True]


def test_requests_status_rarely_and_after_changes() -> None:
    history = History()
    history.on_metrics(looks.metrics(1.0, looks.counted("m", workers=2)))
    assert [history.should_request_status(now) for now in (5.0, 6.0, 14.9, 15.0, 15.1)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    history.on_metrics(looks.metrics(2.0, looks.counted("m", workers=1)))
    assert [history.should_request_status(now) for now in (16.9, 17.0, 17.1, 26.0)] == [False, True, False, False]
    history.on_metrics(looks.metrics(0.5, looks.counted("m", workers=1)))
    assert history.should_request_status(18.0)


# --- tenants ------------------------------------------------------------------------------------------------------


def test_tenant_is_sum_of_its_accounts() -> None:
    before = looks.tenant("research", looks.account("a", 100), looks.account("", 7), share=0.4)
    now = looks.tenant(
        "research", looks.account("a", 120, {"max_rate": 4}, in_flight=3, queued=2), looks.account("", 7), share=0.5
    )
    overview = seen(
        looks.metrics(1.0, looks.counted("a"), tenants=[before]), looks.metrics(3.0, looks.counted("a"), tenants=[now])
    )
    [row] = overview.tenants
    assert (row.rate, row.refused_rate, row.status.share, row.total.in_flight, row.total.queued) == (
        10.0,
        2.0,
        0.5,
        3,
        2,
    )
    assert (row.total.served, row.total.refused, row.total.mean_queue_s) == pytest.approx((127, 4, 1 / 500))
    assert only(overview).refused_rate == 2.0


def test_tenant_view_has_rates_of_its_account() -> None:
    nothing = Histogram((), 0.0)
    responses: List[MetricsResponse] = []
    for uptime, served in ((1.0, 100), (3.0, 120)):
        model = replace(looks.counted("a"), request_seconds=nothing, processes=())
        mine = looks.tenant("research", looks.account("a", served))
        responses.append(replace(looks.metrics(uptime, model, tenants=[mine]), seconds_bounds=()))
    overview = seen(*responses)
    assert only(overview).throughput == (10.0, None, None, ((None, None), (10.0, None)))
    assert overview.throughput.rate == 10.0


BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.1)

values = st.lists(st.floats(0, 0.1), min_size=1, max_size=200)


def counts_of(values: List[float]) -> List[int]:
    counts = [0] * (len(BOUNDS) + 1)
    for value in values:
        counts[bisect.bisect_left(BOUNDS, value)] += 1
    return counts


@pytest.mark.parametrize(
    ("before", "after", "seconds", "expected"),
    [(10, 30, 4.0, 5.0), (10, 10, 1.0, 0.0), (10, 9, 1.0, None), (10, 20, 0.0, None), (10, 20, -1.0, None)],
)
def test_rate_of_a_counter(before: int, after: int, seconds: float, expected: object) -> None:
    assert rate(before, after, seconds) == expected


@given(values, values)
def test_difference_of_histograms(before: List[float], more: List[float]) -> None:
    first, second = Histogram(tuple(counts_of(before)), 0.0), Histogram(tuple(counts_of(before + more)), 0.0)
    assert count_difference(first, second) == tuple(counts_of(more))
    assert count_difference(second, first) is None


def test_no_difference_with_other_buckets() -> None:
    assert count_difference(Histogram((1, 2), 0.0), Histogram((1, 2, 3), 0.0)) is None


@given(values, st.floats(0.01, 1))
def test_quantile_lies_in_bucket_of_its_value(values: List[float], share: float) -> None:
    responses = quantile(share, BOUNDS, counts_of(values))
    assert responses is not None
    index = bisect.bisect_left(BOUNDS, sorted(values)[math.ceil(share * len(values)) - 1])
    assert (0.0, *BOUNDS)[index] <= responses * (1 + 1e-9)
    assert responses <= BOUNDS[index] * (1 + 1e-9)


@given(values)
def test_quantiles_are_monotonic(values: List[float]) -> None:
    responses = [quantile(share / 20, BOUNDS, counts_of(values)) for share in range(1, 21)]
    known = [each for each in responses if each is not None]
    assert all(one <= other for one, other in zip(known, itertools.islice(known, 1, None)))


def test_quantile_interpolates_within_bucket() -> None:
    assert quantile(0.5, (1.0, 3.0), (0, 4, 0)) == 2.0
    assert quantile(0.25, (1.0, 3.0), (4, 4, 0)) == 0.5


def test_quantile_is_at_most_the_last_bound() -> None:
    assert quantile(0.99, (1.0, 3.0), (1, 0, 99)) == 3.0


def test_no_quantile_without_values() -> None:
    assert quantile(0.5, (1.0,), (0, 0)) is None
    assert quantile(0.5, (), ()) is None
    assert quantile(0.5, (1.0,), (1, 1, 1)) is None
