"""Tests of the printed output of `weightctl top`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, List, Sequence

import pytest

from testkit import looks
from testkit.fakedaemon import FakeDaemon, silent
from testkit.looks import MB
from weightctl import exit_codes
from weightd_protocol.codec import encode
from weightd_protocol.messages.metrics import Metrics
from weightd_protocol.messages.types import ClientMessage

from ..conftest import Ctl, fails


class Busy:
    """A daemon with a model that gets ten requests per second; polls are one second apart."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self, message: ClientMessage, _: Sequence[bytes]) -> List[List[Any]]:
        if isinstance(message, Metrics):
            self.looks += 1
            model = looks.counted("m\x1b", (10 * self.looks, 0, 0, 0))
            return [encode(replace(looks.metrics(float(self.looks), model), id=message.id))]
        model_status = looks.model("m\x1b", looks.processes("m", 2, private=10 * MB, weights=90 * MB), copy=90 * MB)
        return [encode(replace(looks.status(float(self.looks), model_status), id=message.id))]


def test_prints_once_without_a_terminal(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = Busy()
    status, out, err = ctl("top", "-d", "0.2")
    assert (status, err) == (exit_codes.OK, "")
    lines = out.splitlines()
    assert lines[:2] == ["weightd 0.1.0: running, up 2 s", "requests 10.0/s, 0 queued, 0 running"]
    assert lines[7].startswith("m\\x1b  serving    1   2/2   10.0 ")
    assert out.count("weightd 0.1.0") == 1


def test_prints_as_often_as_requested(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = Busy()
    assert [each for each in ctl("top", "-b", "-d", "0.2", "-n", "3").out.splitlines() if "up" in each] == [
        f"weightd 0.1.0: running, up {seconds} s" for seconds in (2, 3, 4)
    ]


def test_prints_json_lines(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = Busy()
    overviews = [json.loads(each) for each in ctl("--json", "top", "-d", "0.2", "-n", "2").out.splitlines()]
    assert [each["throughput"]["rate"] for each in overviews] == [10.0, 10.0]
    assert overviews[0]["memory"]["without_sharing_bytes"] == 200 * MB


@pytest.mark.parametrize("arguments", [("-d", "0.1"), ("-d", "nan"), ("-d", "3601"), ("-n", "-1"), ("-n", "x")])
def test_rejects_invalid_arguments(alone: Ctl, arguments: Sequence[str]) -> None:
    status, _, err = alone("top", *arguments)
    assert status == exit_codes.USAGE
    assert "expected" in err


def test_without_a_daemon(alone: Ctl) -> None:
    assert alone("--timeout", "0.2", "top").status == exit_codes.UNAVAILABLE


def test_silent_daemon(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    assert ctl("--timeout", "0.2", "top").status == exit_codes.UNAVAILABLE


def test_reports_error_of_daemon(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = fails("UNAUTHENTICATED", "user 1000 is in no table")
    assert ctl("top") == (exit_codes.ERROR, "", "UNAUTHENTICATED: user 1000 is in no table\n")
