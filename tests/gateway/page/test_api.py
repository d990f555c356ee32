"""Tests of the JSON that the status page receives."""

from __future__ import annotations

import json
from dataclasses import replace

from testkit import looks
from testkit.looks import MB
from weightd_common.dashboard.history import History
from weightd_common.dashboard.overview import Overview
from weightd_gateway.page.api import status_json


def picture(workers: int = 2) -> Overview:
    history = History()
    history.on_metrics(looks.metrics(1.0, looks.counted("m")))
    processes = looks.processes("m", workers, private=MB, weights=MB)
    history.on_status(looks.status(1.0, looks.model("m", processes, copy=MB), note="/etc/weightd/weightd.toml: wrong"))
    return history.overview()


def test_has_data_of_top_without_paths_and_pids() -> None:
    data = json.loads(status_json(picture()))
    assert data["daemon"] == {"age_s": 0.0, "error": ""}
    assert [each["name"] for each in data["overview"]["models"]] == ["m"]
    assert [each["name"] for each in data["overview"]["processes"]] == ["m.1.holder", "m.1.w1", "m.1.w2"]
    assert data["overview"]["memory"]["copy_bytes"] == MB
    assert {"pid", "note", "path"}.isdisjoint({*data["overview"], *data["overview"]["processes"][0]})
    assert b"/etc" not in status_json(picture())


def test_limits_number_of_processes() -> None:
    assert len(json.loads(status_json(picture(2000)))["overview"]["processes"]) == 1024


def test_reports_why_there_is_no_overview() -> None:
    assert json.loads(status_json(None, 0.0, "gone")) == {"daemon": {"age_s": 0.0, "error": "gone"}, "overview": None}


def test_omits_numbers_that_json_cannot_represent() -> None:
    assert b"NaN" not in status_json(replace(picture(), metrics=replace(picture().metrics, uptime_s=1e300)))
