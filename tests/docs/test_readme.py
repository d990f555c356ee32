"""README.md: its commands run, its links resolve and it stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testkit import models
from testkit.mindir import REPOSITORY

from .page import blocks, broken_links, daemon_environment, long_lines, output, promised_output, run, sections, served

PAGE = "../README.md"
SECTIONS = sections(PAGE)
MAX_LINES = 120

# Commands that change the host: packages, a checkout and an environment.
INSTALL = ("sudo apt install ", "git clone ", "python3 -m venv ", "pip install ")


@pytest.fixture
def env(directory: Path) -> dict[str, str]:
    socket = directory / "run" / "weightd.sock"
    return {**daemon_environment(directory, socket), "PYTHONPATH": str(REPOSITORY)}


def commands(text: str) -> list[str]:
    """Return the lines of the blocks of shell commands, without comments."""
    lines = [line for block in blocks(text) if block.language == "sh" for line in block.code.splitlines()]
    return [re.sub(r" +# .*$", "", line) for line in lines]


def shell(command: str, directory: Path, env: dict[str, str]) -> str:
    return "\n".join(output(["bash", "-ec", command], directory, env))


@pytest.mark.e2e
def test_quick_start_runs(directory: Path, env: dict[str, str]) -> None:
    lines = commands(SECTIONS["Quick start"])
    assert len(lines) == 8
    assert [line.startswith(prefix) for line, prefix in zip(lines, INSTALL, strict=False)] == [True] * len(INSTALL)
    make_model, serve, predict, status = lines[len(INSTALL) :]
    shell(make_model, directory, env)
    [program] = [block.code for block in blocks(SECTIONS["Quick start"]) if block.language == "python"]
    with served(serve.removesuffix(" &"), directory, env):
        assert "scores" in shell(predict, directory, env)
        assert run({"call": program}, directory, env) == {"call": promised_output(program)}
        assert "digits" in shell(status, directory, env)


@pytest.mark.e2e
def test_service_runs(directory: Path, env: dict[str, str]) -> None:
    for name in ("digits.onnx", "digits-v2.onnx"):
        models.tiny(directory / name)
    section = SECTIONS["Run it as a service"].replace("/srv/models", str(directory))
    [config] = [block.code for block in blocks(section) if block.language == "toml"]
    (directory / "weightd.toml").write_text(config, encoding="utf-8")
    check, serve, *changes = commands(section)
    assert len(changes) == 3
    shell(check, directory, env)
    with served(serve, directory, env):
        for each in changes:
            # A required model serves a moment after the socket listens.
            shell(f"until weightctl health digits; do sleep 0.05; done; {each}", directory, env)


def test_extras_exist() -> None:
    text = (REPOSITORY / "README.md").read_text("utf-8")
    extras = {name for found in re.findall(r"\[([a-z,-]+)\]'", text) for name in found.split(",")}
    project = (REPOSITORY / "pyproject.toml").read_text("utf-8")
    assert extras
    assert [name for name in sorted(extras) if not re.search(rf"^{name} = \[", project, re.MULTILINE)] == []


def test_make_targets_exist() -> None:
    named = set(re.findall(r"`make ([a-z-]+)`", (REPOSITORY / "README.md").read_text("utf-8")))
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    assert named == {"demo", "test"}
    assert [name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_page_is_short_and_its_links_resolve() -> None:
    assert len((REPOSITORY / "README.md").read_text("utf-8").splitlines()) <= MAX_LINES
    assert broken_links(PAGE) == []
    assert long_lines(PAGE) == []


@pytest.mark.parametrize("page", ["performance.md"])
def test_links_of_other_pages_resolve(page: str) -> None:
    assert broken_links(page) == []
    assert long_lines(page) == []
