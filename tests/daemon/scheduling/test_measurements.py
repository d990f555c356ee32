from __future__ import annotations

import pytest

from weightd_daemon.scheduling.measurements import LatencyWindow


@pytest.mark.parametrize(
    ("values", "percents", "expected"),
    [
        ([], [50], [None]),
        ([0.003, 0.001, 0.002], [0, 33, 34, 50, 66, 67, 100], [1e3, 1e3, 2e3, 2e3, 2e3, 3e3, 3e3]),
        ([each / 1000 for each in range(1000)], [0, 50, 99, 100], [0.0, 500e3, 990e3, 999e3]),
        # Percentiles cover the last 1024 values; the count covers all.
        ([1.0] * 5000 + [2.0] * 1024, [0, 100], [2e6, 2e6]),
        ([1.0] + [2.0] * 1023, [0], [1e6]),
    ],
    ids=["none", "few", "many", "too many", "window"],
)
def test_percentiles_of_recent_latencies_in_microseconds(
    values: list[float], percents: list[float], expected: list[float | None]
) -> None:
    latencies = LatencyWindow()
    for value in values:
        latencies.add(value)
    assert [latencies.percentile_us(percent) for percent in percents] == pytest.approx(expected)
    assert latencies.count == len(values)
