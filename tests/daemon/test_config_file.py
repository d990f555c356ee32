"""Configuration file at a start and a reload: reading, checking, and fallback to the previous configuration."""

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


class FakeServiceManager(SimpleNamespace):
    """A service manager that keeps the configuration from one daemon to the next."""

    inherited: dict[str, list[int]]

    def store_descriptor(self, name: str, descriptor: int) -> None:
        self.inherited = {name: [descriptor]}


@pytest.fixture
def manager() -> Iterator[Any]:
    manager = FakeServiceManager(inherited={})
    yield manager
    for descriptors in manager.inherited.values():
        os.close(descriptors[0])


def config_text(directory: Path, workers: int, **daemon: object) -> str:
    """Return a configuration whose values have different lengths for different `workers`."""
    paths = {"runtime_dir": directory / "run", "cache_dir": directory / "cache", **daemon}
    table = "".join(f'{key} = "{value}"\n' for key, value in paths.items())
    return f'[daemon]\n{table}[models.m]\npath = "/m.onnx"\nworkers = {workers}\n'


def start_with(path: Path, manager: Any, text: str) -> tuple[ConfigFile, Config]:
    path.write_text(text)
    file = ConfigFile(path, manager)
    return file, file.load_initial()


def test_invalid_file_fails_the_first_start(tmp_path: Path, manager: Any) -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        start_with(tmp_path / "c", manager, WRONG)


@pytest.mark.parametrize("invalid", [WRONG, "", "[models.m]\npath = 'm.onnx'\nwrokers = 2\n", "below a file", "/proc"])
def test_invalid_file_keeps_the_previous_configuration(
    tmp_path: Path, manager: Any, caplog: pytest.LogCaptureFixture, invalid: str
) -> None:
    path = tmp_path / "c"
    for workers in (3, 20):
        start_with(path, manager, config_text(tmp_path, workers))[0].mark_in_force()
    # Parsing succeeds, but the directory cannot be created.
    directories = {"below a file": path / "below", "/proc": "/proc"}
    text = config_text(tmp_path, 1, cache_dir=directories[invalid]) if invalid in directories else invalid
    # Two starts: the previous configuration stays in force after a fallback.
    for _ in range(2):
        caplog.clear()
        file, config = start_with(path, manager, text)
        assert config.models["m"].workers == 20
        assert file.note.endswith("the previous configuration stays in force")
        assert {each.levelno for each in caplog.records} == {logging.ERROR}
        assert caplog.messages[-1] == f"{path} is not in force: keeping the previous configuration"
        file.mark_in_force()
    # A shorter configuration must replace the longer one completely.
    file, config = start_with(path, manager, config_text(tmp_path, 4))
    assert (file.note, config.models["m"].workers) == ("", 4)
    file.mark_in_force()
    assert start_with(path, manager, WRONG)[1].models["m"].workers == 4


def test_file_that_was_never_in_force_is_not_restored(tmp_path: Path, manager: Any) -> None:
    path = tmp_path / "c"
    file, _ = start_with(path, manager, config_text(tmp_path, 2))
    file.mark_in_force()
    path.write_text(config_text(tmp_path, 5))
    file.read()
    assert start_with(path, manager, WRONG)[1].models["m"].workers == 2


def test_unreadable_saved_configuration_is_ignored(tmp_path: Path, manager: Any) -> None:
    path = tmp_path / "c"
    start_with(path, manager, config_text(tmp_path, 2))[0].mark_in_force()
    os.pwrite(manager.inherited["config"][0], b"\xff", 0)
    with pytest.raises(ConfigError, match="not TOML"):
        start_with(path, manager, WRONG)
    with pytest.raises(PathInUse):
        start_with(path, manager, config_text(tmp_path, 1, cache_dir=tmp_path / "c" / "below a file"))


MODEL = '[models.m]\npath = "m.mindir"\npython = "python3"\n'


class ReaderHarness:
    """A ConfigReader with its loop and results."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.loop = EventLoop()
        self.table = ProcessTable(self.loop)
        self.reader = ConfigReader(self.table)
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
def harness(tmp_path: Path) -> Iterator[ReaderHarness]:
    harness = ReaderHarness(tmp_path / "weightd.toml")
    yield harness
    harness.table.kill_all()
    harness.loop.close()


def test_reads_the_same_configuration_as_a_start(harness: ReaderHarness, tmp_path: Path) -> None:
    harness.path.write_text(
        f'[listeners.l]\naddress = "ipc://{tmp_path}/l"\n[tenants.ann]\nuids = [1]\n'
        f'[devices."cpu:0"]\ncpus = "0"\n{MODEL}'
        'selftest = {x = [1, 2]}\n[models.n]\npath = "n.onnx"\n[models.n.batching]\nmax_rows = 4\n'
    )
    found = harness.read()
    assert found.config == load(harness.path)
    assert (found.text, found.problems) == (harness.path.read_text(), ())
    assert found.model_problems["m"] == [
        f"{harness.path}: models.m.path: {tmp_path}/m.mindir: No such file or directory"
    ]
    (tmp_path / "m.mindir").write_bytes(b"a model")
    assert harness.read().model_problems["m"] == []
    assert not [each for each in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if "weightd-read" in str(each)]


def test_reports_all_errors_of_a_file(harness: ReaderHarness) -> None:
    harness.path.write_text("[daemon]\nkind = 1\n[models.m]\npath = 1\n")
    found = harness.read()
    assert found.config is None
    assert [each.partition(": ")[0] for each in found.problems] == [str(harness.path)] * 2
    assert ["kind" in found.problems[0], "path" in found.problems[1]] == [True, True]


def test_limits_the_number_of_reported_errors(harness: ReaderHarness) -> None:
    harness.path.write_text("".join(f"a{number}.b = 1\n" for number in range(1000)) + MODEL)
    problems = harness.read().problems
    assert (len(problems), problems[-1]) == (101, f"{harness.path}: 900 more errors")


def test_rejects_a_pipe(harness: ReaderHarness) -> None:
    os.mkfifo(harness.path)
    [problem] = harness.read().problems
    assert problem == f"{harness.path}: expected a regular file, got a pipe, a socket or a device"


def test_aborts_a_slow_reader(harness: ReaderHarness) -> None:
    # The parser needs seconds for each line, and more than the time-out for all.
    harness.path.write_text("\n".join(f"{'.'.join(['a'] * 40_000)}{number} = 1" for number in range(20)))
    harness.start()
    harness.reader.abort()
    started = time.monotonic()
    assert harness.wait().problems == (f"{harness.path}: reading and checking the file took too long",)
    assert time.monotonic() - started < 20
    # The next reader is not affected.
    harness.path.write_text("[models")
    assert "not TOML" in harness.read().problems[0]


def test_reports_the_exit_of_a_reader(harness: ReaderHarness) -> None:
    harness.path.write_text(MODEL)
    harness.start()
    [process] = harness.table.processes.values()
    os.kill(process.pid, 9)
    [problem] = harness.wait().problems
    assert problem.startswith(f"{harness.path}: cannot be read: killed by SIGKILL")
