"""A daemon that starts with a wrong file, with and without what was in force before."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightd_daemon.config.load import Config, ConfigError
from weightd_daemon.handover.config_file import ConfigFile
from weightd_daemon.platform.directories import PathInUse

WRONG = "nonsense"


class Holder(SimpleNamespace):
    """A service manager as far as it holds a configuration from one daemon to the next."""

    inherited: dict[str, list[int]]

    def store_descriptor(self, name: str, descriptor: int) -> None:
        self.inherited = {name: [descriptor]}


@pytest.fixture
def holder() -> Iterator[Any]:
    holder = Holder(inherited={})
    yield holder
    for descriptors in holder.inherited.values():
        os.close(descriptors[0])


def good(directory: Path, workers: int, **daemon: object) -> str:
    """A configuration; what it has of the future is as long as it needs."""
    paths = {"runtime_dir": directory / "run", "cache_dir": directory / "cache", **daemon}
    table = "".join(f'{key} = "{value}"\n' for key, value in paths.items())
    return f'[daemon]\n{table}[models.m]\npath = "/m.onnx"\nworkers = {workers}\n'


def begin(path: Path, holder: Any, text: str) -> tuple[ConfigFile, Config]:
    path.write_text(text)
    file = ConfigFile(path, holder)
    return file, file.load_initial()


def test_a_wrong_file_ends_the_first_start(tmp_path: Path, holder: Any) -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        begin(tmp_path / "c", holder, WRONG)


@pytest.mark.parametrize("wrong", [WRONG, "", "[models.m]\npath = 'm.onnx'\nwrokers = 2\n", "below a file", "/proc"])
def test_a_wrong_file_does_not_end_what_was_in_force(
    tmp_path: Path, holder: Any, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    path = tmp_path / "c"
    for workers in (3, 20):
        begin(path, holder, good(tmp_path, workers))[0].mark_in_force()
    # What is there already may still take no directory.
    directories = {"below a file": path / "below", "/proc": "/proc"}
    text = good(tmp_path, 1, cache_dir=directories[wrong]) if wrong in directories else wrong
    # Twice: what was fallen back on stays in force.
    for _ in range(2):
        caplog.clear()
        file, config = begin(path, holder, text)
        assert config.models["m"].workers == 20
        assert file.note.endswith("what was in force before is served")
        assert {each.levelno for each in caplog.records} == {logging.ERROR}
        assert caplog.messages[-1] == f"{path} is not in force: going on with what was in force before"
        file.mark_in_force()
    # A shorter one leaves nothing of the longer one.
    file, config = begin(path, holder, good(tmp_path, 4))
    assert (file.note, config.models["m"].workers) == ("", 4)
    file.mark_in_force()
    assert begin(path, holder, WRONG)[1].models["m"].workers == 4


def test_what_was_read_but_never_in_force_is_not_gone_on_with(tmp_path: Path, holder: Any) -> None:
    path = tmp_path / "c"
    file, _ = begin(path, holder, good(tmp_path, 2))
    file.mark_in_force()
    path.write_text(good(tmp_path, 5))
    file.read()
    assert begin(path, holder, WRONG)[1].models["m"].workers == 2


def test_what_this_version_does_not_understand_is_of_no_use(tmp_path: Path, holder: Any) -> None:
    path = tmp_path / "c"
    begin(path, holder, good(tmp_path, 2))[0].mark_in_force()
    os.pwrite(holder.inherited["config"][0], b"\xff", 0)
    with pytest.raises(ConfigError, match="not TOML"):
        begin(path, holder, WRONG)
    with pytest.raises(PathInUse):
        begin(path, holder, good(tmp_path, 1, cache_dir=tmp_path / "c" / "below a file"))
