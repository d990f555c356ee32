"""A daemon that starts with a wrong file, with and without what was in force before."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightd_daemon.config.load import Config, ConfigError, load
from weightd_daemon.config_file import ConfigFile, ConfigReader, ReadConfig
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.processes.process_table import ProcessTable

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
        assert file.note.endswith("the previous configuration stays in force")
        assert {each.levelno for each in caplog.records} == {logging.ERROR}
        assert caplog.messages[-1] == f"{path} is not in force: keeping the previous configuration"
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


MODEL = '[models.m]\npath = "m.mindir"\npython = "python3"\n'


class Scene:
    """A loop with a reader, and what it has read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.loop = EventLoop()
        self.running = ProcessTable(self.loop)
        self.reader = ConfigReader(self.running)
        self.found: list[ReadConfig] = []

    def start(self) -> None:
        self.reader.start(self.path, (), self.found.append)

    def read(self) -> ReadConfig:
        self.start()
        return self.wait()

    def wait(self) -> ReadConfig:
        while not self.found:
            self.loop.run_once(30)
        return self.found.pop()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "weightd.toml")
    yield scene
    scene.running.kill_all()
    scene.loop.close()


def test_what_a_file_says_is_read_as_at_a_start(scene: Scene, tmp_path: Path) -> None:
    scene.path.write_text(
        f'[listeners.l]\naddress = "ipc://{tmp_path}/l"\n[tenants.ann]\nuids = [1]\n'
        f'[devices."cpu:0"]\ncpus = "0"\n{MODEL}'
        'selftest = {x = [1, 2]}\n[models.n]\npath = "n.onnx"\n[models.n.batching]\nmax_rows = 4\n'
    )
    found = scene.read()
    assert found.config == load(scene.path)
    assert (found.text, found.problems) == (scene.path.read_text(), ())
    assert found.model_problems["m"] == [f"{scene.path}: models.m.path: {tmp_path}/m.mindir: No such file or directory"]
    (tmp_path / "m.mindir").write_bytes(b"a model")
    assert scene.read().model_problems["m"] == []
    assert not [each for each in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if "weightd-read" in str(each)]


def test_all_that_is_wrong_with_a_file_is_told(scene: Scene) -> None:
    scene.path.write_text("[daemon]\nkind = 1\n[models.m]\npath = 1\n")
    found = scene.read()
    assert found.config is None
    assert [each.partition(": ")[0] for each in found.problems] == [str(scene.path)] * 2
    assert ["kind" in found.problems[0], "path" in found.problems[1]] == [True, True]


def test_of_many_problems_the_first_are_told(scene: Scene) -> None:
    scene.path.write_text("".join(f"a{number}.b = 1\n" for number in range(1000)) + MODEL)
    problems = scene.read().problems
    assert (len(problems), problems[-1]) == (101, f"{scene.path}: 900 more errors")


def test_a_pipe_is_no_file(scene: Scene) -> None:
    os.mkfifo(scene.path)
    [problem] = scene.read().problems
    assert problem == f"{scene.path}: expected a regular file, got a pipe, a socket or a device"


def test_a_reader_that_takes_too_long_is_ended(scene: Scene) -> None:
    # The parser needs seconds for each of these, and longer than anybody waits for all of them.
    scene.path.write_text("\n".join(f"{'.'.join(['a'] * 40_000)}{number} = 1" for number in range(20)))
    scene.start()
    scene.reader.abort()
    started = time.monotonic()
    assert scene.wait().problems == (f"{scene.path}: reading and checking the file took too long",)
    assert time.monotonic() - started < 20
    # The next one is not late.
    scene.path.write_text("[models")
    assert "not TOML" in scene.read().problems[0]


def test_a_reader_that_dies_tells_how(scene: Scene) -> None:
    scene.path.write_text(MODEL)
    scene.start()
    [process] = scene.running.processes.values()
    os.kill(process.pid, 9)
    [problem] = scene.wait().problems
    assert problem.startswith(f"{scene.path}: cannot be read: killed by SIGKILL")
