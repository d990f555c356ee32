"""Tests of the model repository: the search for models and versions, and the choice of the versions to serve."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.config.load import Config, ConfigError, check_config, load
from weightd_daemon.config.repository import RepositoryConfig, scan, select_versions
from weightd_daemon.config.versions import VersionSetConfig
from weightd_protocol import limits

HOUR_S = 3600.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    return path


def add(root: Path, name: str, *versions: int, file: str = "model.onnx") -> None:
    for version in versions:
        (root / name / str(version)).mkdir(parents=True)
        (root / name / str(version) / file).write_bytes(b"model")


def configured(root: Path, *lines: str) -> Config:
    """Return the configuration with this repository; new files are served at once."""
    file = root.parent / "weightd.toml"
    file.write_text("\n".join(("[repository]", f'path = "{root.name}"', "settle = 0.0", *lines)), "utf-8")
    return load(file)


def test_versions_become_models(root: Path) -> None:
    add(root, "resnet", 1, 3)
    add(root, "bert", 7, file="bert.mindir")
    config = configured(root, "keep = 2", 'load = "start"')
    assert {name: Path(model.path) for name, model in config.models.items()} == {
        "bert@7": root / "bert/7/bert.mindir",
        "resnet@1": root / "resnet/1/model.onnx",
        "resnet@3": root / "resnet/3/model.onnx",
    }
    assert config.version_sets == {"bert": VersionSetConfig((7,), keep=2), "resnet": VersionSetConfig((1, 3), keep=2)}
    assert {model.load for model in config.models.values()} == {"start"}


def test_config_file_has_keys_of_the_model(root: Path) -> None:
    add(root, "m", 1)
    (root / "m/config.toml").write_text('workers = 3\nload = "manual"\nselftest = "x.npz"\n')
    model = configured(root).models["m@1"]
    assert (model.workers, model.load, model.selftest) == (3, "manual", str(root / "m/x.npz"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("wrokers = 3", "m.wrokers: unknown key; did you mean workers?"),
        ("workers = 0", "m.workers: expected integer"),
        ("workers =", "config.toml: not TOML"),
        ('path = "a.onnx"', "config.toml: path: follows from the directories"),
        ("versions = {}", "config.toml: versions: follows from the directories"),
        ("traffic = 1", "m.traffic: expected"),
    ],
)
def test_broken_model_is_left_out(root: Path, content: str, problem: str) -> None:
    add(root, "m", 1)
    add(root, "other", 1)
    (root / "m/config.toml").write_text(content)
    config = configured(root)
    assert list(config.models) == ["other@1"]
    assert problem in config.repository_problems["m"]


@pytest.mark.parametrize("name", ["a b", "-m", "m@1", "m~"])
def test_rejects_name_that_is_no_model_name(root: Path, name: str) -> None:
    add(root, name, 1)
    config = configured(root)
    assert not config.models
    assert "expected a model name" in config.repository_problems[name]


def test_names_that_are_not_utf8_are_quoted(root: Path) -> None:
    (root / os.fsdecode(b"m\xff")).mkdir()
    add(root, "m", 1, file=os.fsdecode(b"m\xff.onnx"))
    config = configured(root)
    assert not config.models
    [(name, problem)] = config.repository_problems.items()
    assert f"{name} {problem}".isprintable()


def test_ignores_everything_else(root: Path) -> None:
    add(root, "m", 1)
    add(root, ".hidden", 1)
    add(root, "none", 1, file="readme.md")
    add(root, "two", 1, file="a.onnx")
    (root / "two/1/b.onnx").touch()
    (root / "empty").mkdir()
    (root / "file").touch()
    for other in ("latest", "0", "01", "1.5"):
        (root / "m" / other).mkdir()
    (root / "m/2").touch()
    config = configured(root)
    assert list(config.models) == ["m@1"]
    assert not config.repository_problems


def test_prefers_model_by_name(root: Path) -> None:
    add(root, "m", 1)
    (root / "m/1/other.onnx").touch()
    assert Path(configured(root).models["m@1"].path).name == "model.onnx"


def test_configured_model_takes_precedence(root: Path) -> None:
    add(root, "m", 1)
    add(root, "n", 1)
    config = configured(root, "[models.m]", 'path = "m.onnx"', "[models.n.versions]", '1 = "n.onnx"')
    assert [*config.models] == ["m", "n@1"]
    assert config.models["n@1"].path == str(root.parent / "n.onnx")
    assert {*config.repository_problems} == {"m", "n"}


def test_unreadable_directory_is_a_problem_of_all_models(root: Path) -> None:
    config = configured(root.parent / "missing")
    assert not config.models
    assert "No such file or directory" in config.repository_problems[""]


def test_number_of_models_is_limited(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_MODELS", 2)
    add(root, "a", 1)
    add(root, "b", 1)
    add(root, "c", 1)
    config = configured(root)
    assert [*config.models] == ["a@1", "b@1"]
    assert "expected at most 2 models, got more" in config.repository_problems["c"]


def test_table_with_an_error_is_rejected(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"repository\.keep: expected integer, 1 to 64"):
        configured(root, "keep = 0")
    checked = check_config(root.parent / "weightd.toml")
    assert len(checked.problems) == 1


def test_new_files_are_taken_once_they_have_settled(root: Path) -> None:
    add(root, "m", 1, 2)
    table, now = RepositoryConfig(str(root), settle=10.0), time.time()
    assert not scan(table, now).models
    assert scan(table, now).unsettled == {"m@1", "m@2"}
    # A copy that keeps the time of the last write is new nevertheless.
    os.utime(root / "m/1/model.onnx", (0, 0))
    assert not scan(table, now).models
    late = scan(table, now + 11.0)
    assert not late.unsettled
    assert late.models["m"].files.keys() == {"1", "2"}


def test_time_of_the_last_write_may_be_in_the_future(root: Path) -> None:
    add(root, "m", 1)
    os.utime(root / "m/1/model.onnx", (0, time.time() + HOUR_S))
    found = scan(RepositoryConfig(str(root), settle=10.0), time.time() + 11.0)
    assert (list(found.models), found.unsettled) == (["m"], frozenset())


def test_files_that_vanish_and_hidden_files_do_not_matter(root: Path) -> None:
    add(root, "m", 1)
    (root / "m/1/vanished").symlink_to("nowhere")
    (root / "m/1/.swp.onnx").touch()
    assert configured(root).models["m@1"].path == str(root / "m/1/model.onnx")


def test_traffic_of_deleted_versions_is_ignored(root: Path) -> None:
    add(root, "m", 2, 3)
    (root / "m/config.toml").write_text("traffic = { 1 = 1, 2 = 3 }")
    assert configured(root).version_sets["m"].traffic == ((2, 3),)


def test_search_ends_with_same_result_for_any_content(root: Path) -> None:
    add(root, "m", 1)
    (root / "m/config.toml").write_text("timeout = nan")
    table = RepositoryConfig(str(root))
    assert scan(table) == scan(table)


def test_reads_all_versions_up_to_the_limit(root: Path) -> None:
    add(root, "m", *range(1, 12))
    add(root, "m", *range(12, 80), file="none.txt")
    assert len(configured(root).version_sets["m"].versions) == 11


def test_unsettled_version_leaves_older_ones(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(root, "m", 1, 2)
    times = {"1": 100.0, "2": 1000.0}

    def changed_at(path: Path, now: float) -> int:
        return round(1e9 * times[path.name if path.name in times else path.parent.name])

    monkeypatch.setattr("weightd_daemon.config.repository._changed_at", changed_at)
    found = scan(RepositoryConfig(str(root), settle=10.0), 1005.0)
    assert (list(found.models["m"].files), found.unsettled) == (["1"], frozenset({"m@2"}))


def test_changed_file_changes_the_configuration(root: Path) -> None:
    add(root, "m", 1)
    before = configured(root).models["m@1"]
    (root / "m/1/model.onnx").write_bytes(b"another")
    after = configured(root).models["m@1"]
    assert before != after
    assert before.revision < after.revision


# --- the choice of versions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "failed", "proven", "current", "selected"),
    [
        (1, set(), set(), set(), (3,)),
        (2, set(), set(), set(), (2, 3)),
        (9, set(), set(), set(), (1, 2, 3)),
        (1, set(), {2}, {2}, (2, 3)),  # the new version has not served yet
        (1, set(), {2, 3}, {2, 3}, (3,)),  # it has
        (1, {3}, {2}, {2, 3}, (2, 3)),  # it is broken
        (1, {2, 3}, {1}, {1, 2, 3}, (1, 2, 3)),
        (1, {3}, set(), {3}, (2, 3)),  # no other version was there
        (1, {1, 2, 3}, set(), set(), (1, 2, 3)),
        (2, set(), {1, 2}, {1, 2}, (1, 2, 3)),  # version 3 has not served yet
        (2, set(), {1, 2, 3}, {1, 2, 3}, (2, 3)),
        (2, {3}, {1, 2}, {1, 2}, (1, 2, 3)),
    ],
)
def test_older_version_stays_until_a_newer_one_has_served(
    keep: int, failed: set[int], proven: set[int], current: set[int], selected: tuple[int, ...]
) -> None:
    assert select_versions((1, 2, 3), keep, failed=failed, proven=proven, current=current) == selected


NUMBERS = st.sets(st.integers(1, 8))


@given(NUMBERS, st.integers(1, 4), NUMBERS, NUMBERS, NUMBERS)
def test_selection_keeps_newest_and_one_that_works(
    found: set[int], keep: int, failed: set[int], proven: set[int], current: set[int]
) -> None:
    failed, proven, current = failed & found, (proven - failed) & found, current & found
    selected = select_versions(tuple(sorted(found)), keep, failed=failed, proven=proven, current=current)
    assert {*sorted(found)[-keep:]} <= {*selected} <= found
    assert list(selected) == sorted(selected)
    # A version that serves is given up only for as many newer ones that have served.
    assert all(each in selected or len(proven & {*selected}) >= keep for each in proven & current)
    # Any other selected version replaces a broken one, or is there already.
    assert len([each for each in selected if each not in failed and each not in current]) <= keep
    # The choice is stable.
    again = select_versions(tuple(sorted(found)), keep, failed=failed, proven=proven, current={*selected})
    assert again == selected
