"""Costly questions: one step a turn, each user within its share, and none waits for another user's."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from weightd_daemon.observability.report_budget import BURST_S, LOOP_SHARE, MAX_PENDING, MAX_PER_USER, Reports
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.scheduling.signature import MetadataRequest
from weightd_protocol.errors import ResourceExhausted

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
