"""Tests of the model repository while the daemon runs: selection by the state of models, and the search for changes."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testkit.waiting import until
from weightd_daemon import repository
from weightd_daemon.api.version_sets import ProvenRecord, ProvenVersions
from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.config.load import Config
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.repository import RepositoryConfig
from weightd_daemon.config.versions import VersionSetConfig
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.repository import (
    RepositoryWatcher,
    keep_handed_over,
    keep_unreadable,
    log_problems,
    select_models,
    unproven_versions,
)
from weightd_protocol import limits

REPOSITORY = RepositoryConfig("/srv/models")
NOTHING = ProvenVersions(dict)


def config_of(*versions: int, keep: int = 1, revision: int = 1) -> Config:
    """Return a configuration with these versions of a model `m` in the repository, and a model `other` in the file."""
    model = ModelConfig("/m.onnx", load="on_demand", revision=revision)
    models = {f"m@{each}": model for each in versions}
    sets = {"m": VersionSetConfig(versions, keep=keep)}
    return Config(DaemonConfig(), {"other": model, **models}, version_sets=sets, repository=REPOSITORY)


def model(state: str, revision: int = 1, name: str = "") -> Any:
    """Return a fake model: "serving", "loading", "failed", "unloaded" after it has served, or "new"."""
    return SimpleNamespace(
        name=name or state,
        config=SimpleNamespace(path="/m.onnx", revision=revision, is_on_demand=True),
        readiness=SimpleNamespace(
            is_complete=state == "serving", is_serving=state == "serving", has_failed=state == "failed"
        ),
        loading=SimpleNamespace(is_unloaded=state in ("unloaded", "new")),
        dispatcher=SimpleNamespace(signature=SimpleNamespace(built=None if state in ("new", "loading") else "built")),
    )


def selected(config: Config, **states: str) -> list[str]:
    models = {f"m@{name[1:]}": model(state) for name, state in states.items()}
    return [name for name in select_models(config, models, ProvenVersions(lambda: models)).models if name != "other"]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({}, ["m@3"]),
        ({"v2": "serving"}, ["m@2", "m@3"]),
        ({"v2": "serving", "v3": "loading"}, ["m@2", "m@3"]),
        ({"v2": "serving", "v3": "new"}, ["m@2", "m@3"]),
        ({"v2": "serving", "v3": "failed"}, ["m@2", "m@3"]),
        ({"v2": "serving", "v3": "serving"}, ["m@3"]),
        ({"v2": "serving", "v3": "unloaded"}, ["m@3"]),
        ({"v2": "unloaded", "v3": "new"}, ["m@2", "m@3"]),
        ({"v3": "failed"}, ["m@2", "m@3"]),
    ],
)
def test_state_of_models_decides(states: dict[str, str], expected: list[str]) -> None:
    assert selected(config_of(1, 2, 3), **states) == expected


def test_changed_files_are_not_proven() -> None:
    models = {"m@1": model("serving"), "m@2": model("serving", revision=0)}
    assert list(select_models(config_of(1, 2), models, ProvenVersions(lambda: models)).models) == [
        "other",
        "m@1",
        "m@2",
    ]


def test_takes_over_versions_of_the_previous_daemon() -> None:
    records: Any = [SimpleNamespace(name="m@1", generations=("one",)), SimpleNamespace(name="m@2", generations=())]
    assert list(select_models(config_of(1, 2), {}, NOTHING, records).models) == ["other", "m@1", "m@2"]
    assert select_models(config_of(1, 2), {}, NOTHING).version_sets == {"m": VersionSetConfig((2,), keep=1)}


def test_serves_the_version_that_an_earlier_daemon_has_loaded() -> None:
    config = config_of(1, 2, 3)
    proven = ProvenVersions(dict)
    proven.restore([ProvenRecord("m@1", "/m.onnx", 0), ProvenRecord("m@2", "/m.onnx", 1)])
    assert list(select_models(config, {}, proven).models) == ["other", "m@2", "m@3"]
    # The next daemon goes on in the same way with the models that it has not loaded yet.
    models = {"m@2": model("new", name="m@2"), "m@3": model("new", name="m@3")}
    assert list(select_models(config, models, proven).models) == ["other", "m@2", "m@3"]
    models["m@2"].readiness.is_serving = True
    assert unproven_versions(config, models, proven) == [models["m@3"]]
    proven.restore([ProvenRecord("m@3", "/m.onnx", 1)])
    assert list(select_models(config, models, proven).models) == ["other", "m@3"]
    assert unproven_versions(config, models, proven) == []


def test_configured_versions_are_all_served() -> None:
    config = dataclasses.replace(config_of(1, 2, keep=0), repository=REPOSITORY)
    assert select_models(config, {}, NOTHING) == config


def test_surplus_models_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_MODELS", 2)
    assert len(select_models(config_of(1, 2), {}, NOTHING).models) == 2
    surplus = select_models(config_of(1, 2, keep=2), {}, NOTHING)
    assert (list(surplus.models), dict(surplus.version_sets)) == (["other"], {})


def test_traffic_names_only_selected_versions() -> None:
    config = config_of(1, 2)
    sets = {"m": VersionSetConfig((1, 2), ((1, 9), (2, 1)), keep=1)}
    assert select_models(dataclasses.replace(config, version_sets=sets), {}, NOTHING).version_sets["m"].traffic == (
        (2, 1),
    )


def test_unsettled_version_stays_as_it_was() -> None:
    before = config_of(1, 2, revision=1)
    now = dataclasses.replace(config_of(2, revision=2), unsettled=frozenset({"m@1", "m@3"}))
    kept = keep_unreadable(now, before)
    assert {name: model.revision for name, model in kept.models.items()} == {"other": 2, "m@1": 1, "m@2": 2}
    assert kept.version_sets["m"].versions == (1, 2)
    nothing = Config(DaemonConfig(), {}, repository=REPOSITORY, unsettled=frozenset({"m@2"}))
    assert list(keep_unreadable(nothing, before).models) == ["m@2"]


@pytest.mark.parametrize("versions", [None, VersionSetConfig((7,))])
def test_configured_model_replaces_the_one_in_the_repository(versions: VersionSetConfig | None) -> None:
    own = ModelConfig("/m.onnx")
    models, sets = ({"m": own}, {}) if versions is None else ({"m@7": own}, {"m": versions})
    now = Config(DaemonConfig(), models, version_sets=sets, repository=REPOSITORY, repository_problems={"m": "twice"})
    assert keep_unreadable(now, config_of(1, 2)) == now


@pytest.mark.parametrize("broken", ["m", ""])
def test_unreadable_model_stays_as_it_was(broken: str) -> None:
    before = config_of(1, 2)
    after = Config(
        DaemonConfig(), {"other": before.models["other"]}, repository=REPOSITORY, repository_problems={broken: "why"}
    )
    assert keep_unreadable(after, before).models == before.models
    assert keep_unreadable(after, before).version_sets == before.version_sets
    gone = dataclasses.replace(after, repository_problems={"another": "why"})
    assert keep_unreadable(gone, before) == gone
    without = dataclasses.replace(after, repository=None)
    assert keep_unreadable(without, before) == without


def test_next_daemon_keeps_model_of_unreadable_directory(caplog: pytest.LogCaptureFixture) -> None:
    record: Any = SimpleNamespace(name="m@2", config=ModelConfig("/m.onnx", revision=5))
    own: Any = SimpleNamespace(name="other", config=ModelConfig("/other.onnx"))
    config = Config(DaemonConfig(), {}, repository=REPOSITORY, repository_problems={"": "no answer\nat all"})
    kept = keep_handed_over(config, [record, own])
    assert kept.models == {"m@2": record.config}
    assert kept.version_sets == {"m": VersionSetConfig((2,), keep=1)}
    log_problems(config, {})
    log_problems(config, config.repository_problems)
    assert [each.getMessage() for each in caplog.records] == ["repository: no answer", "repository: at all"]


@pytest.mark.parametrize(
    ("states", "is_loaded"),
    [
        (("serving", "new"), True),
        (("unloaded", "new"), False),
        (("serving", "failed"), False),
        (("serving", "unloaded"), False),
        (("new",), False),
    ],
)
def test_new_version_is_loaded_beside_one_that_serves(states: tuple[str, ...], *, is_loaded: bool) -> None:
    models = {f"m@{number}": model(state) for number, state in enumerate(states, 1)}
    waiting = unproven_versions(config_of(*range(1, len(states) + 1)), models, ProvenVersions(lambda: models))
    assert [each.name for each in waiting] == (["new"] if is_loaded else [])


# --- the search for changes -----------------------------------------------------------------------------------------


class Watching:
    """A watcher of a directory, and an event loop that counts its reports."""

    def __init__(self, root: Path, settle: float = 0.0, poll: float = 3600.0) -> None:
        self.loop = EventLoop()
        self.count = 0
        table = RepositoryConfig(str(root), settle=settle, poll=poll)
        self.watcher = RepositoryWatcher(table, self.loop, self.on_change)

    def on_change(self) -> None:
        self.count += 1

    def start(self) -> None:
        self.watcher.start()
        self.wait_beyond(0)

    def wait_beyond(self, count: int) -> int:
        def has_more() -> bool:
            self.loop.run_once(0.05)
            return self.count > count

        until(has_more, "the watcher reports a change")
        return self.count


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watching]]:
    there: list[Watching] = []

    def make(**settings: float) -> Watching:
        there.append(Watching(tmp_path, **settings))
        return there[-1]

    yield make
    for each in there:
        each.watcher.stop()
        until(lambda: "repository" not in {thread.name for thread in threading.enumerate()}, "the thread ends")
        each.loop.close()


def write(root: Path, version: int, content: bytes = b"model") -> None:
    (root / f"m/{version}").mkdir(parents=True, exist_ok=True)
    (root / f"m/{version}/model.onnx").write_bytes(content)


def test_kernel_reports_changes(watch: Callable[..., Watching], tmp_path: Path) -> None:
    watching = watch()
    watching.start()
    write(tmp_path, 1)
    count = watching.wait_beyond(1)
    write(tmp_path, 2)
    count = watching.wait_beyond(count)
    write(tmp_path, 2, b"another")
    count = watching.wait_beyond(count)
    (tmp_path / "m/config.toml").write_text("workers = 2")
    watching.wait_beyond(count)


def test_polls_without_reports_of_the_kernel(
    watch: Callable[..., Watching], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(repository, "DirectoryWatch", refuse)
    watching = watch(poll=0.05)
    watching.start()
    write(tmp_path, 1)
    watching.wait_beyond(1)
    assert "the kernel cannot report changes (Too many open files); weightd looks for them every 0.05 s" in caplog.text


def test_looks_again_when_files_have_settled(watch: Callable[..., Watching], tmp_path: Path) -> None:
    watching = watch(settle=0.3)
    watching.start()
    write(tmp_path, 1)
    # The first report says that there is something unsettled, the second one that it is taken.
    watching.wait_beyond(watching.wait_beyond(1))
    os.utime(tmp_path / "m/1/model.onnx")


def test_goes_on_after_an_error(
    watch: Callable[..., Watching], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watching = watch(poll=0.05)
    watching.start()
    with monkeypatch.context() as patch:
        patch.setattr(repository, "scan", None)
        until(lambda: "the search for changes failed" in caplog.text, "the error is logged")
    write(tmp_path, 1)
    watching.wait_beyond(1)
