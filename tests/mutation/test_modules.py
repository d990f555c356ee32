"""Tests of the list of modules for mutation tests, and of the search for their tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import modules


def test_listed_modules_exist_and_have_tests() -> None:
    without = [str(each) for each in modules.modules() if not modules.tests_of(each)]
    assert without == []


def _make(repository: Path, *names: str) -> None:
    for name in names:
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize(
    ("package", "tests"),
    [
        ("daemon/weightd_daemon", "tests/daemon"),
        ("cluster/weightd_ray", "tests/cluster"),
    ],
)
def test_single_package_has_tests_of_its_root(
    package: str, tests: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "REPOSITORY", tmp_path)
    _make(tmp_path, f"{package}/__init__.py", f"{package}/queues/__init__.py", f"{package}/queues/line.py")
    _make(tmp_path, *(f"{tests}/queues/test_{name}.py" for name in ("line", "fifo", "line_world", "lines")))
    _make(tmp_path, "tests/ray/queues/test_line.py", f"{tests}/test_line.py")
    found = modules.tests_of(Path(package, "queues", "line.py"))
    assert found == [Path(tests, "queues", f"test_{name}.py") for name in ("line", "line_world", "fifo", "lines")]


@pytest.mark.parametrize(("package", "tests"), [("shared", "tests/shared"), ("weightd_shared", "tests/shared")])
def test_several_packages_have_separate_tests(
    package: str, tests: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "REPOSITORY", tmp_path)
    _make(tmp_path, f"protocol/{package}/__init__.py", "protocol/other/__init__.py")
    _make(tmp_path, "tests/protocol/test_line.py", f"{tests}/test_line.py")
    assert modules.tests_of(Path("protocol", package, "line.py")) == [Path(tests, "test_line.py")]


def test_uses_tests_of_parent_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "REPOSITORY", tmp_path)
    _make(tmp_path, *(f"daemon/weightd_daemon{each}/__init__.py" for each in ("", "/queues", "/queues/rows")))
    _make(tmp_path, "tests/daemon/queues/test_rows.py")
    found = modules.tests_of(Path("daemon/weightd_daemon/queues/rows/cut.py"))
    assert found == [Path("tests/daemon/queues/test_rows.py")]


def test_missing_path_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "REPOSITORY", tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        modules.modules()
