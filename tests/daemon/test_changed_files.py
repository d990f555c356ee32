"""Tests of the search for changed files of failed models: real models on a fake host, and real files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testkit.model_factory import model_factory
from weightd_daemon.changed_files import INTERVAL_S, ChangedFiles
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.processes.snapshotter import SnapshotOrder, SnapshotRequest, identify_files

from .models.fakehost import FakeHost


class ChangedFilesHarness:
    """Models on a fake host; `search` lets the time pass until the next search."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now = 1000.0
        self.host = FakeHost()
        host: Any = self.host
        factory = model_factory({"cpu": DeviceBudget("cpu")}, host, host)
        self.registry = ModelRegistry(factory.make)
        self.identities: dict[str, str] = {}
        self.searches: list[Callable[[], None]] = []
        self.is_answering = self.can_start = True
        snapshots: Any = self
        self.changed_files = ChangedFiles(self.registry, snapshots, self.search_files)

    def search_files(self, search: Callable[[], None]) -> None:
        if not self.can_start:
            raise RuntimeError("can't start new thread")
        self.searches.append(search)
        if self.is_answering:
            search()

    def order(self, model: str, config: ModelConfig, source: ModelSource) -> SnapshotOrder:
        return SnapshotOrder([SnapshotRequest(source.path, "copy")], "progress")

    def identity(self, model: str, source: ModelSource) -> str:
        return self.identities.get(model, "")

    def path(self, name: str) -> Path:
        return self.directory / f"{name}.onnx"

    def start(self, *names: str, revision: int = 0) -> None:
        configs = {
            name: ModelConfig(str(self.path(name)), "onnxruntime", workers=1, start="spawn", revision=revision)
            for name in names
        }
        for name in names:
            self.path(name).write_bytes(b"\x08\x08")
        self.registry.start(configs, self.now)

    def fail(self, name: str, *, is_transient: bool = False) -> None:
        """Let the load of a model fail, after it has read the present file."""
        model = self.registry.models[name]
        self.identities[name] = identify_files(self.order(name, model.config, model.versions.current))
        model.on_snapshot_failed(model.versions.current, "no model", self.now, is_transient=is_transient)
        self.changed_files.on_change(self.now)

    def search(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += INTERVAL_S
            assert self.changed_files.timer.due_at <= self.now
            self.changed_files.timer.fire(self.now)

    def attempts(self, name: str) -> int:
        path = str(self.path(name))
        return sum(each.path == path for each in self.host.requested_snapshots)


@pytest.fixture
def harness(tmp_path: Path) -> ChangedFilesHarness:
    return ChangedFilesHarness(tmp_path)


def test_loads_only_the_model_whose_file_changes(harness: ChangedFilesHarness) -> None:
    harness.start("a", "b")
    for name in ("a", "b"):
        harness.fail(name)
    harness.search(5)
    harness.path("a").write_bytes(b"\x08\x07")
    harness.search(3)
    assert (harness.attempts("a"), harness.attempts("b")) == (2, 1)


def test_change_before_the_first_search_is_noticed(harness: ChangedFilesHarness) -> None:
    harness.start("a")
    harness.fail("a")
    harness.path("a").write_bytes(b"\x08\x07")
    harness.search(3)
    assert harness.attempts("a") == 2


def test_file_that_is_still_written_is_not_loaded(harness: ChangedFilesHarness) -> None:
    harness.start("a")
    harness.fail("a")
    for size in range(6):
        harness.path("a").write_bytes(b"\x08\x07" * size)
        harness.search()
    assert harness.attempts("a") == 1
    harness.search(2)
    assert harness.attempts("a") == 2


def test_failed_load_of_the_changed_file_is_final_too(harness: ChangedFilesHarness) -> None:
    harness.start("a")
    for attempt in (1, 2, 3):
        assert harness.attempts("a") == attempt
        harness.fail("a")
        harness.search(5)
        harness.path("a").write_bytes(bytes((8, attempt)))
        harness.search(3)


def test_loads_after_a_first_identity_that_is_unknown(harness: ChangedFilesHarness) -> None:
    harness.start("a")
    harness.fail("a")
    del harness.identities["a"]
    harness.search(4)
    assert harness.attempts("a") == 1
    harness.path("a").write_bytes(b"\x08\x07")
    harness.search(3)
    assert harness.attempts("a") == 2


def test_searches_for_files_of_final_failures_only(harness: ChangedFilesHarness) -> None:
    harness.start("serving", "transient")
    harness.fail("transient", is_transient=True)
    harness.start("repository", revision=1)
    harness.fail("repository")
    harness.search()
    assert (harness.searches, harness.changed_files.timer.due_at) == ([], float("inf"))


def test_search_without_an_answer_delays_only_the_next_one(harness: ChangedFilesHarness) -> None:
    harness.start("a")
    harness.fail("a")
    harness.is_answering = False
    harness.search(3)
    assert len(harness.searches) == 1
    harness.path("a").write_bytes(b"\x08\x07")
    harness.searches[0]()
    harness.is_answering = True
    harness.search(3)
    assert harness.attempts("a") == 2


def test_thread_that_cannot_start_is_started_later(harness: ChangedFilesHarness) -> None:
    harness.start("a")
    harness.fail("a")
    harness.can_start = False
    harness.search(2)
    harness.can_start = True
    harness.path("a").write_bytes(b"\x08\x07")
    harness.search(4)
    assert harness.attempts("a") == 2
