"""Tests of expensive status requests: one answer per loop turn, and a fair share for each user."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.observability.event_log import EventLog
from weightd_daemon.observability.service import (
    BURST_S,
    LOOP_SHARE,
    MAX_PENDING,
    MAX_PER_USER,
    Reports,
    StatusService,
)
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.processes.files import GenerationFiles
from weightd_daemon.scheduling.signature import MetadataRequest
from weightd_daemon.tenants.tenant import DEFAULT_TENANT, Tenant, Viewer
from weightd_protocol.errors import RequestError, ResourceExhausted
from weightd_protocol.messages.events import Events, Logs

COST_S = 0.01


class ReportsHarness:
    """Fake clock that only the requests and the test advance, and the result of each request."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answered: list[tuple[float, str, str]] = []
        self.refused: list[tuple[str, str]] = []
        self.loop = EventLoop()
        self.reports = Reports(self.loop, self._refuse, lambda: self.now)
        self._numbers = itertools.count()

    def _refuse(self, asker: MetadataRequest, error: ResourceExhausted) -> None:
        self.refused.append((asker.client.decode(), asker.request_id))
        assert error.retry_after is not None
        assert error.retry_after > 0

    def ask(self, client: str, is_ready: Callable[[], bool] = lambda: True) -> str:
        """Add a request of a client; the user is its first letter."""
        asker = MetadataRequest(client.encode(), str(next(self._numbers)), client[0])

        def answer() -> None:
            self.now += COST_S
            self.answered.append((self.now, client, asker.request_id))

        self.reports.add(asker, answer, is_ready)
        return asker.request_id

    def run(self, until: float) -> None:
        """Let time pass while the loop has no other work."""
        while self.now < until:
            before = self.now
            self.reports.step()
            if self.now == before:
                due = self.reports.timer.due_at
                self.now = min(until, due) if due > self.now else until


@pytest.fixture
def harness() -> ReportsHarness:
    return ReportsHarness()


def test_one_answer_per_loop_turn(harness: ReportsHarness) -> None:
    for client in ("a1", "a1", "a1", "b1"):
        harness.ask(client)
    harness.loop.run_once(0.0)
    assert harness.now == COST_S
    harness.loop.run_once(0.0)
    # The user that has used less time is first.
    assert [client for _, client, _ in harness.answered] == ["a1", "b1"]
    for _ in range(5):
        harness.loop.run_once(0.0)
    assert harness.now == pytest.approx(4 * COST_S)


def test_request_that_is_not_ready_delays_no_other(harness: ReportsHarness) -> None:
    ready: list[str] = []
    harness.ask("a1", lambda: bool(ready))
    harness.ask("a2")
    for _ in range(3):
        harness.loop.run_once(0.0)
    assert [client for _, client, _ in harness.answered] == ["a2"]
    ready.append("a1")
    harness.reports.wake()
    harness.loop.run_once(0.0)
    assert [client for _, client, _ in harness.answered] == ["a2", "a1"]


def test_user_over_share_continues_when_timer_fires(harness: ReportsHarness) -> None:
    while harness.reports.timer.due_at == float("inf"):
        harness.ask("a1")
        harness.loop.run_once(0.0)
    used, due_at = harness.now, harness.reports.timer.due_at
    assert BURST_S <= used < due_at
    harness.now = due_at
    harness.reports.timer.fire(due_at)
    assert harness.now == pytest.approx(due_at + COST_S)


def test_busy_user_gets_share_and_delays_no_other(harness: ReportsHarness) -> None:
    waits: list[float] = []
    for _ in range(60):
        with contextlib.suppress(ResourceExhausted):
            while True:
                harness.ask("a1")
        harness.run(harness.now + 0.5)
        asked, number = harness.now, harness.ask("b1")
        harness.reports.step()
        harness.reports.step()
        assert harness.answered[-1][2] == number or harness.answered[-2][2] == number
        waits.append(harness.now - asked)
    busy_time = sum(client == "a1" for _, client, _ in harness.answered) * COST_S
    assert busy_time <= BURST_S + LOOP_SHARE * harness.now + COST_S
    assert busy_time >= LOOP_SHARE * harness.now * 0.9
    assert max(waits) <= 2 * COST_S + 1e-9


def test_occasional_user_never_waits(harness: ReportsHarness) -> None:
    for _ in range(100):
        asked = harness.now
        harness.ask("a1")
        harness.run(asked + COST_S)
        assert harness.answered[-1][0] == pytest.approx(asked + COST_S)
        harness.now = asked + 10 * COST_S


@pytest.mark.parametrize(
    ("waiting", "index"),
    [
        # The client, or the user, with the most requests loses one to clients with fewer.
        (["a1"] * 8 + ["c1", "d1", "e1", "f1", "g1", "h1", "i1", "j1", "b1"], 7),
        (["a1", "a2", "a3", "a4"] * 2 + ["c1"] * 5 + ["d1"] * 3 + ["b1"], 7),
        (["a1"] * 7 + ["b1"] * 7 + ["c1"] * 2 + ["a1"], 16),
        (["a1"] * 3 + ["a2"] * 5 + ["b1"] * 7 + ["c1"] * 2, 7),
    ],
)
def test_full_queue_rejects_largest_user(harness: ReportsHarness, waiting: list[str], index: int) -> None:
    assert len(waiting) == MAX_PENDING + 1
    for client in waiting:
        harness.ask(client)
    assert harness.refused == [(waiting[index], str(index))]


def test_limits_pending_requests_per_user(harness: ReportsHarness) -> None:
    for number in range(MAX_PER_USER):
        harness.ask(f"a{number}")
    for _ in range(2):
        with pytest.raises(
            ResourceExhausted, match=f"{MAX_PER_USER} status, metrics and events requests of this user"
        ) as caught:
            harness.ask("a9")
        assert caught.value.retry_after is not None
        harness.ask("b1")
    harness.run(COST_S)
    harness.reports.step()
    harness.ask("a9")


class ServiceHarness:
    """Status service whose snapshots are tuples of text."""

    def __init__(self, log_files: dict[int, GenerationFiles] | None = None) -> None:
        self.replies: list[tuple[bytes, Any]] = []
        self.refused: list[tuple[bytes, str, str]] = []
        self.loop = EventLoop()
        snapshots: Any = SimpleNamespace(
            measured=lambda: [1, os.getpid()],
            status=lambda scan: ("status", scan.request_id, scan.pss_bytes(os.getpid()) > 0),
            tenant_status=lambda request_id, tenant: ("status", request_id, tenant.name),
            metrics=lambda request_id, viewer: ("metrics", request_id),
            log_files=lambda model: log_files,
        )
        self.service = StatusService(snapshots, EventLog(), self.loop, lambda: self)

    def reply(self, client: bytes, message: Any) -> None:
        self.replies.append((client, message))

    def reply_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        self.refused.append((client, request_id, error.code))


@pytest.fixture
def status_harness() -> Iterator[ServiceHarness]:
    created = ServiceHarness()
    yield created
    created.loop.close()


EVERYTHING = Viewer(DEFAULT_TENANT, can_see_all=True)


def test_status_waits_for_memory_scan_except_for_tenants(status_harness: ServiceHarness) -> None:
    status_harness.service.report_status(MetadataRequest(b"c", "7", "a"), EVERYTHING)
    status_harness.loop.run_once(0.0)
    assert status_harness.replies == []
    status_harness.service.report_status(
        MetadataRequest(b"d", "8", "ann"), Viewer(Tenant("ann", TenantConfig()), can_see_all=False)
    )
    while len(status_harness.replies) < 2:
        status_harness.loop.run_once(1.0)
    assert sorted(status_harness.replies) == [(b"c", ("status", "7", True)), (b"d", ("status", "8", "ann"))]


def test_frequent_expensive_requests_are_rejected(status_harness: ServiceHarness) -> None:
    service = status_harness.service
    for number in range(6):
        service.report_status(MetadataRequest(b"greedy", str(number), "a"), EVERYTHING)
    service.report_metrics(MetadataRequest(b"greedy", "6", "a"), EVERYTHING)
    service.report_events(MetadataRequest(b"greedy", "7", "a"), Events("7"))
    ninth = MetadataRequest(b"greedy", "8", "a")
    asked: list[Callable[[], None]] = [
        lambda: service.report_status(ninth, EVERYTHING),
        lambda: service.report_metrics(ninth, EVERYTHING),
        lambda: service.report_events(ninth, Events("8")),
    ]
    for ask in asked:
        with pytest.raises(
            ResourceExhausted, match=r"8 status, metrics and events requests of this user are waiting already"
        ):
            ask()
    for number in range(8):
        service.report_status(MetadataRequest(b"%d" % number, "0", str(number)), EVERYTHING)
    assert status_harness.refused == []
    service.report_status(MetadataRequest(b"modest", "0", "b"), EVERYTHING)
    assert status_harness.refused == [(b"greedy", "7", "RESOURCE_EXHAUSTED")]


def test_logs_are_read_one_file_per_turn(tmp_path: Path) -> None:
    (tmp_path / "m.1").mkdir()
    for name in ("holder", "w1"):
        (tmp_path / "m.1" / f"m.1.{name}.log").write_text(name)
    status_harness = ServiceHarness({1: GenerationFiles(tmp_path / "m.1")})
    for number in range(4):
        status_harness.service.report_logs(b"c", Logs(str(number), "m"))
    with pytest.raises(ResourceExhausted):
        status_harness.service.report_logs(b"c", Logs("4", "m"))
    status_harness.loop.run_once(0.0)
    assert status_harness.replies == []
    for _ in range(7):
        status_harness.loop.run_once(0.0)
    assert [(client, each.id, len(each.logs)) for client, each in status_harness.replies] == [
        (b"c", str(each), 2) for each in range(4)
    ]
    status_harness.service.report_logs(b"c", Logs("4", "m"))
    status_harness.loop.close()
