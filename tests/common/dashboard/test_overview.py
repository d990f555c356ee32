"""Tests of the JSON form of the overview."""

from __future__ import annotations

import json

from testkit import looks
from testkit.looks import MB
from weightd_common.dashboard.history import History
from weightd_common.dashboard.overview import to_json_values


def test_has_all_data_in_json_types() -> None:
    history = History()
    for uptime in (1.0, 2.0):
        history.on_metrics(looks.metrics(uptime, looks.counted("m", (int(uptime) * 100, 0, 0, 0))))
    processes = looks.processes("m", 2, private=10 * MB, weights=90 * MB)
    history.on_status(looks.status(1.0, looks.model("m", processes, copy=90 * MB)))
    values = to_json_values(history.overview())
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    [model] = values["models"]
    assert model["throughput"] == {
        "rate": 100.0, "p50_s": 0.0005, "p99_s": 0.00099, "rates": [None, 100.0], "p99s_s": [None, 0.00099],
    }  # fmt: skip
    assert model["memory"] == {
        "copy_bytes": 90 * MB, "workers": 2, "private_bytes": 20 * MB, "other_bytes": 10 * MB,
        "without_sharing_bytes": 200 * MB, "processes": 2, "total_bytes": 120 * MB,
    }  # fmt: skip
    assert [each["name"] for each in values["processes"]] == ["m.1.holder", "m.1.w1", "m.1.w2"]
    assert [each["name"] for each in values["tenants"]] == ["default"]


def test_rounds_numbers() -> None:
    history = History()
    history.on_metrics(looks.metrics(1234567.8901, looks.counted("m"), tenants=[looks.tenant("t", share=1 / 3)]))
    values = to_json_values(history.overview())
    assert (values["uptime_s"], values["tenants"][0]["share"]) == (1234567.9, 0.3333)
