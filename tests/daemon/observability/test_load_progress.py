"""Tests of the load monitor: progress of loading generations, and load speeds of completed ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.generations.states import GenerationState
from weightd_daemon.models.load_progress import LoadProgress, LoadSpeed, LoadSpeedRecord
from weightd_daemon.observability import load_progress
from weightd_daemon.observability.load_progress import LoadMonitor
from weightd_protocol.schema import decode, plain

SOURCE = ModelSource("/m.onnx", number=7)


class MonitorHarness:
    """Model with one generation, and the progress of its copy."""

    def __init__(self) -> None:
        self.copied: Any = None
        self.queries: set[tuple[str, ModelSource]] = set()
        self.bytes: int | None = None
        self.generation: Any = SimpleNamespace(label="m.1", state=GenerationState.SNAPSHOTTING, source=SOURCE)
        self.deployments = SimpleNamespace(generations=[self.generation])
        versions = SimpleNamespace(snapshots=SimpleNamespace(find=self._find_snapshot))
        self.model: Any = SimpleNamespace(
            name="m", config=SimpleNamespace(group=None), deployments=self.deployments, versions=versions
        )
        self.monitor = LoadMonitor(self._copied)

    def _copied(self, model: str, source: ModelSource) -> Any:
        self.queries.add((model, source))
        return self.copied

    def _find_snapshot(self, source: ModelSource) -> Any:
        return None if self.bytes is None else SimpleNamespace(nbytes=self.bytes)

    def update(self, now: float) -> LoadProgress:
        self.monitor.update([self.model], now)
        return self.monitor.progress(self.generation.label, now)

    def loads(self, label: str, begin: float, seconds: float) -> None:
        """Let a generation with an existing snapshot load and serve."""
        self.bytes, self.generation.label = 100, label
        for state, now in ((GenerationState.SPAWNING, begin), (GenerationState.SERVING, begin + seconds)):
            self.generation.state = state
            self.update(now)


def test_first_load_reports_copy_and_next_one_all() -> None:
    harness = MonitorHarness()
    harness.update(0.0)
    harness.copied = (25, 100)
    assert harness.update(10.0) == LoadProgress(fraction_copied=0.25)
    assert harness.monitor.describe_progress("m.1", 10.0) == "25 % copied"
    assert harness.queries == {("m", SOURCE)}
    harness.bytes, harness.generation.state = 100, GenerationState.SPAWNING
    assert harness.update(40.0) == LoadProgress()
    assert harness.monitor.describe_progress("m.1", 40.0) == ""
    harness.generation.state = GenerationState.SERVING
    assert harness.update(60.0) == LoadProgress()
    assert harness.monitor.speeds == {"m": LoadSpeed(100, 20.0, 40.0)}
    # The next generation uses the same snapshot.
    harness.generation.label, harness.generation.state = "m.2", GenerationState.BUILDING
    assert harness.update(70.0).remaining_s == 20.0
    assert harness.update(80.0) == LoadProgress(0.5, 10.0)
    assert harness.monitor.describe_progress("m.2", 80.0) == "50 %, about 10 s left"


def test_finished_copy_counts_only_for_its_generation() -> None:
    harness = MonitorHarness()
    harness.update(0.0)
    harness.copied = (100, 100)
    harness.bytes, harness.generation.state = 100, GenerationState.SPAWNING
    harness.update(40.0)
    harness.generation.state = GenerationState.SERVING
    harness.update(50.0)
    assert harness.monitor.speeds == {"m": LoadSpeed(100, 10.0, 40.0)}
    harness.loads("m.2", 60.0, 10.0)
    assert harness.monitor.speeds == {"m": LoadSpeed(100, 10.0, 40.0)}


@pytest.mark.parametrize("state", [GenerationState.FAILED, GenerationState.DRAINING])
def test_failed_load_gives_no_speed(state: GenerationState) -> None:
    harness = MonitorHarness()
    harness.generation.state = GenerationState.BUILDING
    harness.update(0.0)
    harness.generation.state = state
    harness.update(1.0)
    assert harness.monitor.speeds == {}
    assert harness.monitor.progress("m.1", 1.0) == LoadProgress()


def test_resumed_and_grouped_models_report_no_progress() -> None:
    for is_grouped, state in ((False, GenerationState.RESUMING), (True, GenerationState.BUILDING)):
        harness = MonitorHarness()
        harness.monitor.restore([LoadSpeedRecord("m", LoadSpeed(1, 1.0))])
        harness.model.config.group = "g" if is_grouped else None
        harness.generation.state = state
        assert harness.update(0.5) == LoadProgress()


def test_speeds_are_limited_and_survive_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_progress, "MAX_SPEEDS", 2)
    harness = MonitorHarness()
    for label in ("a.1", "b.1", "a.2", "c.1"):
        harness.loads(label, 0.0, 5.0)
    assert [*harness.monitor.speeds] == ["a", "c"]
    written = [*harness.monitor.records()]
    assert [each.key for each in written] == ["a", "c"]
    restarted = MonitorHarness()
    restarted.monitor.restore(
        [LoadSpeedRecord("d", LoadSpeed(1, 99.0)), *(decode(LoadSpeedRecord, plain(each)) for each in written)]
    )
    assert restarted.monitor.speeds == harness.monitor.speeds
