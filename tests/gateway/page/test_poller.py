"""The daemon is looked at for whoever has the page open."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from testkit import looks
from testkit.looks import MB
from weightd_gateway.auth import Caller
from weightd_gateway.page.poller import StatusPoller
from weightd_protocol.errors import DeadlineExceeded, RequestError, Unauthenticated, Unavailable
from weightd_protocol.messages.metrics import MetricsResponse
from weightd_protocol.messages.status import StatusResponse

ALL, RESEARCH = Caller(None, "-"), Caller("research", "r")


class Daemon:
    """Each look is a second after the one before; `error` is raised instead, if there is one."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.error: RequestError | None = None
        self._uptime = 0.0

    async def metrics(self, caller: Caller) -> MetricsResponse:
        self.asked.append(("metrics", caller.tenant))
        if self.error is not None:
            raise self.error
        self._uptime += 1.0
        return looks.metrics(self._uptime, looks.counted("m", (int(self._uptime) * 10, 0, 0, 0)))

    async def status(self, caller: Caller) -> StatusResponse:
        self.asked.append(("status", caller.tenant))
        return looks.status(1.0, looks.model("m", looks.processes("m", 1, MB, MB), copy=MB))


def told(page: StatusPoller, *callers: Caller) -> list[Any]:
    async def ask() -> list[bytes]:
        return [await page.status_json(caller) for caller in callers]

    return [json.loads(each) for each in asyncio.run(ask())]


def test_rates_are_those_between_two_looks_and_the_status_is_asked_for_seldom() -> None:
    daemon = Daemon()
    first, second = told(StatusPoller(daemon), ALL, ALL)
    assert (first["overview"]["throughput"]["rate"], second["overview"]["throughput"]["rate"]) == (None, 10.0)
    assert daemon.asked == [("metrics", None), ("status", None), ("metrics", None)]


def test_each_tenant_has_a_picture_of_its_own() -> None:
    daemon = Daemon()
    rates = [each["overview"]["throughput"]["rate"] for each in told(StatusPoller(daemon), ALL, RESEARCH, ALL)]
    assert rates == [None, None, 10.0]
    assert daemon.asked[2] == ("metrics", "research")


@pytest.mark.parametrize("error", [Unavailable("no daemon at /run/weightd"), DeadlineExceeded("30 s")])
def test_a_daemon_that_is_away_is_told_with_the_last_picture(error: RequestError) -> None:
    daemon = Daemon()
    page = StatusPoller(daemon)
    [good] = told(page, ALL)
    daemon.error = error
    [lost] = told(page, ALL)
    assert lost["overview"] == good["overview"]
    assert lost["daemon"]["error"].startswith("The daemon ")
    assert "/run" not in lost["daemon"]["error"]
    assert lost["daemon"]["age_s"] >= 0
    daemon.error = None
    [back] = told(page, ALL)
    assert back["daemon"] == {"age_s": 0.0, "error": ""}
    [never] = told(StatusPoller(Daemon()), ALL)
    assert never["daemon"]["error"] == ""


def test_whoever_may_not_look_is_refused() -> None:
    daemon = Daemon()
    daemon.error = Unauthenticated("nobody")
    with pytest.raises(Unauthenticated):
        told(StatusPoller(daemon), ALL)
