"""Costly questions: one step a turn, each user within its share, and none waits for another user's."""

from __future__ import annotations

import contextlib
import itertools
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


class Scene:
    """A clock that only questions and the scene itself move, and what has come of each question."""

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

    def ask(self, client: str, steps: int = 1) -> str:
        """Ask for a client, whose user is its first letter."""
        left = [None] * steps
        asker = MetadataRequest(client.encode(), str(next(self._numbers)), client[0])

        def step() -> bool:
            self.now += COST_S
            left.pop()
            if not left:
                self.answered.append((self.now, client, asker.request_id))
            return not left

        self.reports.add(asker, step)
        return asker.request_id

    def run(self, until: float) -> None:
        """Let the time pass, in which the loop does nothing else."""
        while self.now < until:
            before = self.now
            self.reports.step()
            if self.now == before:
                due = self.reports.timer.due_at
                self.now = min(until, due) if due > self.now else until


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_turn_has_one_step(scene: Scene) -> None:
    scene.ask("a1", steps=3)
    scene.ask("b1")
    scene.loop.run_once(0.0)
    assert scene.now == COST_S
    scene.loop.run_once(0.0)
    # Whoever has had less is first.
    assert [client for _, client, _ in scene.answered] == ["b1"]
    for _ in range(5):
        scene.loop.run_once(0.0)
    assert scene.now == pytest.approx(4 * COST_S)


def test_a_user_over_its_share_goes_on_when_the_timer_fires(scene: Scene) -> None:
    burst = round(BURST_S / COST_S)
    scene.ask("a1", steps=burst + 5)
    for _ in range(burst + 5):
        scene.loop.run_once(0.0)
    used = scene.now
    due_at = scene.reports.timer.due_at
    assert used < due_at < float("inf")
    scene.now = due_at
    scene.reports.timer.fire(due_at)
    assert scene.now == pytest.approx(due_at + COST_S)


def test_a_user_that_asks_all_the_time_has_its_share_and_keeps_nobody_waiting(scene: Scene) -> None:
    waits: list[float] = []
    for _ in range(60):
        with contextlib.suppress(ResourceExhausted):
            while True:
                scene.ask("a1")
        scene.run(scene.now + 0.5)
        asked, number = scene.now, scene.ask("b1")
        scene.reports.step()
        scene.reports.step()
        assert scene.answered[-1][2] == number or scene.answered[-2][2] == number
        waits.append(scene.now - asked)
    own = sum(client == "a1" for _, client, _ in scene.answered) * COST_S
    assert own <= BURST_S + LOOP_SHARE * scene.now + COST_S
    assert own >= LOOP_SHARE * scene.now * 0.9
    assert max(waits) <= 2 * COST_S + 1e-9


def test_a_user_that_asks_now_and_then_never_waits(scene: Scene) -> None:
    for _ in range(100):
        asked = scene.now
        scene.ask("a1")
        scene.run(asked + COST_S)
        assert scene.answered[-1][0] == pytest.approx(asked + COST_S)
        scene.now = asked + 10 * COST_S


@pytest.mark.parametrize(
    ("waiting", "index"),
    [
        # Whoever asks most gives way to who asks once: of clients, and of users.
        (["a1"] * 8 + ["c1", "d1", "e1", "f1", "g1", "h1", "i1", "j1", "b1"], 7),
        (["a1", "a2", "a3", "a4"] * 2 + ["c1"] * 5 + ["d1"] * 3 + ["b1"], 7),
        (["a1"] * 7 + ["b1"] * 7 + ["c1"] * 2 + ["a1"], 16),
        (["a1"] * 3 + ["a2"] * 5 + ["b1"] * 7 + ["c1"] * 2, 7),
    ],
)
def test_who_asks_for_more_than_others_gives_way(scene: Scene, waiting: list[str], index: int) -> None:
    assert len(waiting) == MAX_PENDING + 1
    for client in waiting:
        scene.ask(client)
    assert scene.refused == [(waiting[index], str(index))]


def test_a_user_has_few_that_wait(scene: Scene) -> None:
    for number in range(MAX_PER_USER):
        scene.ask(f"a{number}")
    for _ in range(2):
        with pytest.raises(
            ResourceExhausted, match=f"{MAX_PER_USER} status, metrics and events requests of this user"
        ) as caught:
            scene.ask("a9")
        assert caught.value.retry_after is not None
        scene.ask("b1")
    scene.run(COST_S)
    scene.reports.step()
    scene.ask("a9")


class Desk:
    """A status service whose snapshots are words."""

    def __init__(self, log_files: dict[int, GenerationFiles] | None = None) -> None:
        self.told: list[tuple[bytes, Any]] = []
        self.refused: list[tuple[bytes, str, str]] = []
        self.loop = EventLoop()
        snapshots: Any = SimpleNamespace(
            pids=lambda: [1, 2],
            status=lambda scan: ("status", scan.request_id, len(scan.memory_by_pid)),
            tenant_status=lambda request_id, tenant: ("status", request_id, tenant.name),
            metrics=lambda request_id, viewer: ("metrics", request_id),
            log_files=lambda model: log_files,
        )
        self.service = StatusService(snapshots, EventLog(), self.loop, lambda: self)

    def reply(self, client: bytes, message: Any) -> None:
        self.told.append((client, message))

    def reply_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        self.refused.append((client, request_id, error.code))


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.loop.close()


EVERYTHING = Viewer(DEFAULT_TENANT, can_see_all=True)


def test_a_status_is_sent_when_memory_has_been_read_and_to_a_tenant_at_once(desk: Desk) -> None:
    desk.service.report_status(MetadataRequest(b"c", "7", "a"), EVERYTHING)
    desk.loop.run_once(0.0)
    assert desk.told == []
    desk.service.report_status(
        MetadataRequest(b"d", "8", "ann"), Viewer(Tenant("ann", TenantConfig()), can_see_all=False)
    )
    while len(desk.told) < 2:
        desk.loop.run_once(1.0)
    assert sorted(desk.told) == [(b"c", ("status", "7", 2)), (b"d", ("status", "8", "ann"))]


def test_who_asks_for_what_is_costly_too_often_is_refused(desk: Desk) -> None:
    service = desk.service
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
    assert desk.refused == []
    service.report_status(MetadataRequest(b"modest", "0", "b"), EVERYTHING)
    assert desk.refused == [(b"greedy", "7", "RESOURCE_EXHAUSTED")]


def test_logs_are_read_a_file_a_turn_and_few_are_asked_for_at_once(tmp_path: Path) -> None:
    (tmp_path / "m.1").mkdir()
    for name in ("holder", "w1"):
        (tmp_path / "m.1" / f"m.1.{name}.log").write_text(name)
    desk = Desk({1: GenerationFiles(tmp_path / "m.1")})
    for number in range(4):
        desk.service.report_logs(b"c", Logs(str(number), "m"))
    with pytest.raises(ResourceExhausted):
        desk.service.report_logs(b"c", Logs("4", "m"))
    desk.loop.run_once(0.0)
    assert desk.told == []
    for _ in range(7):
        desk.loop.run_once(0.0)
    assert [(client, each.id, len(each.logs)) for client, each in desk.told] == [
        (b"c", str(each), 2) for each in range(4)
    ]
    desk.service.report_logs(b"c", Logs("4", "m"))
    desk.loop.close()
