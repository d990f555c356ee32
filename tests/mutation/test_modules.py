"""The list of modules for mutation tests, and how their tests are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import modules


def test_each_path_of_the_list_exists_and_has_tests() -> None:
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
def test_a_root_with_one_package_has_its_tests_under_the_name_of_the_root(
    package: str, tests: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "REPOSITORY", tmp_path)
    _make(tmp_path, f"{package}/__init__.py", f"{package}/queues/__init__.py", f"{package}/queues/line.py")
    _make(tmp_path, *(f"{tests}/queues/test_{name}.py" for name in ("line", "fifo", "line_world", "lines")))
    _make(tmp_path, "tests/ray/queues/test_line.py", f"{tests}/test_line.py")
    found = modules.tests_of(Path(package, "queues", "line.py"))
    assert found == [Path(tests, "queues", f"test_{name}.py") for name in ("line", "line_world", "fifo", "lines")]


@pytest.mark.parametrize(("package", "tests"), [("shared", "tests/shared"), ("weightd_shared", "tests/shared")])
def test_a_root_with_several_packages_has_tests_for_each_of_them(
    package: str, tests: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "REPOSITORY", tmp_path)
    _make(tmp_path, f"protocol/{package}/__init__.py", "protocol/other/__init__.py")
    _make(tmp_path, "tests/protocol/test_line.py", f"{tests}/test_line.py")
    assert modules.tests_of(Path("protocol", package, "line.py")) == [Path(tests, "test_line.py")]


def test_a_directory_without_tests_takes_those_of_the_one_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "REPOSITORY", tmp_path)
    _make(tmp_path, *(f"daemon/weightd_daemon{each}/__init__.py" for each in ("", "/queues", "/queues/rows")))
    _make(tmp_path, "tests/daemon/queues/test_rows.py")
    found = modules.tests_of(Path("daemon/weightd_daemon/queues/rows/cut.py"))
    assert found == [Path("tests/daemon/queues/test_rows.py")]


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "REPOSITORY", tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        modules.modules()
