"""The check of size limits of files, classes and packages."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests import structure


def _class(source: str) -> ast.ClassDef:
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    return node


def test_counts_properties_magic_methods_and_coroutines() -> None:
    source = "class C:\n @property\n def a(self): ...\n def __len__(self): ...\n async def b(self): ...\n x = 1"
    assert len(structure.methods(_class(source))) == 3


@pytest.mark.parametrize(
    ("body", "counted"),
    [
        ("def f(self): self.a = self.b = 1", {"a", "b"}),
        ("def f(self): self.a += 1; self.b: int = 1; other.c = 1", {"a", "b"}),
        ("x: int\n def f(self): self.a = 1", {"a", "x"}),
        ("x: int\n y: int", set[str]()),
    ],
)
def test_counts_attributes_except_of_records(body: str, counted: set[str]) -> None:
    assert structure.attributes(_class(f"class C:\n {body}")) == counted


def test_limits_are_exact() -> None:
    def source(methods: int, attributes: int, lines: int) -> str:
        text = "class C:\n" + " def f(self): ...\n" * (methods - 1)
        text += " def g(self):\n  " + "; ".join(f"self.a{each} = 1" for each in range(attributes)) + "\n"
        return text + "\n" * (lines - text.count("\n"))

    bounds = (structure.CLASS_METHODS, structure.CLASS_ATTRIBUTES, structure.FILE_LINES)
    assert list(structure.excesses("m.py", source(*bounds))) == []
    for index in range(3):
        larger = [bound + (index == each) for each, bound in enumerate(bounds)]
        assert len(list(structure.excesses("m.py", source(*larger)))) == 1


def test_public_clients_may_exceed_limits() -> None:
    body = " def f(self): ...\n" * 40
    assert list(structure.excesses("client/weightd/client.py", f"class Client:\n{body}")) == []
    assert list(structure.excesses("client/weightd/client.py", f"class Other:\n{body}"))


def test_reports_files_and_packages_beyond_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    package = tmp_path / "worker" / "package"
    package.mkdir(parents=True)
    for number in range(structure.PACKAGE_MODULES):
        (package / f"m{number}.py").touch()
    (package / "__init__.py").touch()
    assert structure.main() == 0
    (package / "more.py").write_text("\n" * (structure.FILE_LINES + 1))
    assert structure.main() == 1
    long_file, crowded_package = capsys.readouterr().out.splitlines()
    assert (long_file, crowded_package) == (
        "worker/package/more.py: expected at most 450 lines, got 451",
        "worker/package: expected at most 20 modules, got 21",
    )
