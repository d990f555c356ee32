"""Who loads is looked at; who has loaded has taught how long that takes."""

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


class Stage:
    """A model with one generation, and how far its copy is."""

    def __init__(self) -> None:
        self.copied: Any = None
        self.asked: set[tuple[str, ModelSource]] = set()
        self.bytes: int | None = None
        self.generation: Any = SimpleNamespace(label="m.1", state=GenerationState.SNAPSHOTTING, source=SOURCE)
        self.deployments = SimpleNamespace(generations=[self.generation])
        versions = SimpleNamespace(snapshots=SimpleNamespace(find=self._find_snapshot))
        self.model: Any = SimpleNamespace(
            name="m", config=SimpleNamespace(group=None), deployments=self.deployments, versions=versions
        )
        self.loading = LoadMonitor(self._copied)

    def _copied(self, model: str, source: ModelSource) -> Any:
        self.asked.add((model, source))
        return self.copied

    def _find_snapshot(self, source: ModelSource) -> Any:
        return None if self.bytes is None else SimpleNamespace(nbytes=self.bytes)

    def look(self, now: float) -> LoadProgress:
        self.loading.update([self.model], now)
        return self.loading.progress(self.generation.label, now)

    def loads(self, label: str, begin: float, seconds: float) -> None:
        """A generation, whose snapshot is there, loads and serves."""
        self.bytes, self.generation.label = 100, label
        for state, now in ((GenerationState.SPAWNING, begin), (GenerationState.SERVING, begin + seconds)):
            self.generation.state = state
            self.look(now)


def test_the_first_load_is_told_as_far_as_its_copy_and_the_next_one_in_all() -> None:
    stage = Stage()
    stage.look(0.0)
    stage.copied = (25, 100)
    assert stage.look(10.0) == LoadProgress(fraction_copied=0.25)
    assert stage.loading.describe_progress("m.1", 10.0) == "25 % copied"
    assert stage.asked == {("m", SOURCE)}
    stage.bytes, stage.generation.state = 100, GenerationState.SPAWNING
    assert stage.look(40.0) == LoadProgress()
    assert stage.loading.describe_progress("m.1", 40.0) == ""
    stage.generation.state = GenerationState.SERVING
    assert stage.look(60.0) == LoadProgress()
    assert stage.loading.speeds == {"m": LoadSpeed(100, 20.0, 40.0)}
    # The next one of the same snapshot.
    stage.generation.label, stage.generation.state = "m.2", GenerationState.BUILDING
    assert stage.look(70.0).remaining_s == 20.0
    assert stage.look(80.0) == LoadProgress(0.5, 10.0)
    assert stage.loading.describe_progress("m.2", 80.0) == "50 %, about 10 s left"


def test_a_copy_that_nobody_has_looked_at_is_one_and_one_for_another_generation_is_none() -> None:
    stage = Stage()
    stage.look(0.0)
    stage.copied = (100, 100)
    stage.bytes, stage.generation.state = 100, GenerationState.SPAWNING
    stage.look(40.0)
    stage.generation.state = GenerationState.SERVING
    stage.look(50.0)
    assert stage.loading.speeds == {"m": LoadSpeed(100, 10.0, 40.0)}
    stage.loads("m.2", 60.0, 10.0)
    assert stage.loading.speeds == {"m": LoadSpeed(100, 10.0, 40.0)}


@pytest.mark.parametrize("state", [GenerationState.FAILED, GenerationState.DRAINING])
def test_what_did_not_serve_teaches_nothing(state: GenerationState) -> None:
    stage = Stage()
    stage.generation.state = GenerationState.BUILDING
    stage.look(0.0)
    stage.generation.state = state
    stage.look(1.0)
    assert stage.loading.speeds == {}
    assert stage.loading.progress("m.1", 1.0) == LoadProgress()


def test_what_is_taken_over_and_what_shares_a_process_is_not_looked_at() -> None:
    for is_grouped, state in ((False, GenerationState.RESUMING), (True, GenerationState.BUILDING)):
        stage = Stage()
        stage.loading.restore([LoadSpeedRecord("m", LoadSpeed(1, 1.0))])
        stage.model.config.group = "g" if is_grouped else None
        stage.generation.state = state
        assert stage.look(0.5) == LoadProgress()


def test_what_is_remembered_is_bounded_and_passed_on_to_the_next_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_progress, "MAX_SPEEDS", 2)
    stage = Stage()
    for label in ("a.1", "b.1", "a.2", "c.1"):
        stage.loads(label, 0.0, 5.0)
    assert [*stage.loading.speeds] == ["a", "c"]
    written = [*stage.loading.records()]
    assert [each.key for each in written] == ["a", "c"]
    following = Stage()
    following.loading.restore(
        [LoadSpeedRecord("d", LoadSpeed(1, 99.0)), *(decode(LoadSpeedRecord, plain(each)) for each in written)]
    )
    assert following.loading.speeds == stage.loading.speeds
