"""What the page is told."""

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


def test_it_is_told_what_top_shows_but_no_path_and_no_pid() -> None:
    told = json.loads(status_json(picture()))
    assert told["daemon"] == {"age_s": 0.0, "error": ""}
    assert [each["name"] for each in told["overview"]["models"]] == ["m"]
    assert [each["name"] for each in told["overview"]["processes"]] == ["m.1.holder", "m.1.w1", "m.1.w2"]
    assert told["overview"]["memory"]["copy_bytes"] == MB
    assert {"pid", "note", "path"}.isdisjoint({*told["overview"], *told["overview"]["processes"][0]})
    assert b"/etc" not in status_json(picture())


def test_there_is_a_bound() -> None:
    assert len(json.loads(status_json(picture(2000)))["overview"]["processes"]) == 1024


def test_without_a_picture_it_is_told_why() -> None:
    assert json.loads(status_json(None, 0.0, "gone")) == {"daemon": {"age_s": 0.0, "error": "gone"}, "overview": None}


def test_what_is_no_number_in_json_is_none_of_the_page() -> None:
    assert b"NaN" not in status_json(replace(picture(), metrics=replace(picture().metrics, uptime_s=1e300)))
