"""Tests of the status poller, which queries the daemon while the page is open."""

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
    """A fake daemon whose polls are one second apart; it raises `error` if that is set."""

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


def polled(page: StatusPoller, *callers: Caller) -> list[Any]:
    async def ask() -> list[bytes]:
        return [await page.status_json(caller) for caller in callers]

    return [json.loads(each) for each in asyncio.run(ask())]


def test_computes_rates_and_rarely_polls_status() -> None:
    daemon = Daemon()
    first, second = polled(StatusPoller(daemon), ALL, ALL)
    assert (first["overview"]["throughput"]["rate"], second["overview"]["throughput"]["rate"]) == (None, 10.0)
    assert daemon.asked == [("metrics", None), ("status", None), ("metrics", None)]


def test_each_tenant_has_its_overview() -> None:
    daemon = Daemon()
    rates = [each["overview"]["throughput"]["rate"] for each in polled(StatusPoller(daemon), ALL, RESEARCH, ALL)]
    assert rates == [None, None, 10.0]
    assert daemon.asked[2] == ("metrics", "research")


@pytest.mark.parametrize("error", [Unavailable("no daemon at /run/weightd"), DeadlineExceeded("30 s")])
def test_keeps_last_overview_without_daemon(error: RequestError) -> None:
    daemon = Daemon()
    page = StatusPoller(daemon)
    [good] = polled(page, ALL)
    daemon.error = error
    [lost] = polled(page, ALL)
    assert lost["overview"] == good["overview"]
    assert lost["daemon"]["error"].startswith("The daemon ")
    assert "/run" not in lost["daemon"]["error"]
    assert lost["daemon"]["age_s"] >= 0
    daemon.error = None
    [back] = polled(page, ALL)
    assert back["daemon"] == {"age_s": 0.0, "error": ""}
    [never] = polled(StatusPoller(Daemon()), ALL)
    assert never["daemon"]["error"] == ""


def test_rejects_unauthorized_caller() -> None:
    daemon = Daemon()
    daemon.error = Unauthenticated("nobody")
    with pytest.raises(Unauthenticated):
        polled(StatusPoller(daemon), ALL)
