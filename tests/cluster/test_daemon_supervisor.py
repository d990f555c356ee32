"""Tests of the daemon supervisor, which restarts a replica's daemon and exits with the replica."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit import surroundings
from testkit.examples import examples
from testkit.fakedaemon import directory
from weightd_daemon.config.load import load_text
from weightd_protocol.errors import InvalidArgument
from weightd_ray import daemon_supervisor
from weightd_ray.daemon_supervisor import Backoff, DaemonSupervisor

__all__ = ["directory"]


def test_backoff_grows_and_resets_after_a_long_run() -> None:
    backoff = Backoff()
    assert [backoff.next_delay_s(1) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert [backoff.next_delay_s(60), backoff.next_delay_s(59)] == [0.5, 1]


@pytest.fixture
def lifeline() -> Iterator[tuple[int, int]]:
    """Return the pipe whose end the supervisor waits for: the read end and the write end."""
    reading, writing = os.pipe()
    yield reading, writing
    for each in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(each)


def program(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code])


def test_restarts_daemon(lifeline: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_supervisor, "_INITIAL_BACKOFF_S", 0.001)
    reports: list[Mapping[str, Any]] = []
    codes = ["raise SystemExit(2)", "import os; os.kill(os.getpid(), 9)", "raise SystemExit(78)"]
    DaemonSupervisor(lambda: program(codes.pop(0)), lifeline[:1], reports.append).run()
    assert not codes
    assert [each.get("starts") for each in reports] == [True, True, True, None]
    assert reports[-1]["failed"].startswith("the daemon exited with status 78")


def test_does_not_restart_after_configuration_error(lifeline: tuple[int, int]) -> None:
    reports: list[Mapping[str, Any]] = []
    DaemonSupervisor(lambda: program("raise SystemExit(78)"), lifeline[:1], reports.append).run()
    assert len(reports) == 2


def test_exits_when_the_pipe_closes(lifeline: tuple[int, int]) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        os.close(lifeline[1])
        started.append(program("import time; time.sleep(60)"))
        return started[0]

    DaemonSupervisor(start, lifeline[:1], lambda _: None).run()
    assert started[0].returncode == -signal.SIGTERM


def test_reports_too_long_order(tmp_path: Path) -> None:
    done = subprocess.run(
        daemon_supervisor.supervisor_command(tmp_path), input=b"x" * 2**20, stdout=subprocess.PIPE, check=False
    )
    assert json.loads(done.stdout)["failed"].startswith("expected a command line of at most")


@pytest.mark.parametrize("how", ["ignored,blocked", "ENOSYS"])
def test_runs_with_unusual_parent_and_old_kernel(how: str, directory: Path) -> None:
    command = [*surroundings.command(how), *daemon_supervisor.supervisor_command(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        # The daemon reports the wrong configuration with its exit status.
        process.stdin.write(daemon_supervisor.encode_order({"m": {"path": "/m.onnx", "workers": 0}}))
        process.stdin.flush()
        address, starts, failed = [json.loads(line) for line in process.stdout]
    assert (address.keys(), starts) == ({"address", "pid"}, {"starts": True})
    assert failed["failed"].startswith("the daemon exited with status 78")


def test_reports_full_disk(directory: Path) -> None:
    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    order = daemon_supervisor.encode_order({"m": {"path": "/m.onnx"}})
    guarded = subprocess.run(
        daemon_supervisor.supervisor_command(directory),
        input=order,
        stdout=subprocess.PIPE,
        preexec_fn=full,
        check=False,
    )
    assert json.loads(guarded.stdout) == {"failed": f"{directory}: File too large"}
    assert not list((directory / "work").iterdir())


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SIMPLE = st.one_of(st.text(), st.integers(-(2**40), 2**40), st.booleans(), st.floats(-1e9, 1e9))
_VALUES = st.one_of(_SIMPLE, st.lists(_SIMPLE, max_size=3), st.dictionaries(st.text(min_size=1), _SIMPLE, max_size=2))


@settings(max_examples=examples(25))
@given(st.dictionaries(st.text(min_size=1), _VALUES, max_size=3))
def test_written_configuration_round_trips(table: dict[str, object]) -> None:
    text = daemon_supervisor.config_text(Path("/d"), {"m": table})
    assert tomllib.loads(text)["models"]["m"] == table


def test_daemon_paths_lie_in_its_directory() -> None:
    config = load_text(
        daemon_supervisor.config_text(Path("/d/x"), {"m": {"path": "/a.onnx", "workers": 2}}), Path("/w.toml")
    )
    daemon = config.daemon
    assert f"unix://{daemon.unix_socket}" == daemon_supervisor.client_address(Path("/d/x"))
    for each in (daemon.unix_socket, daemon.channel_socket, daemon.private_dir, daemon.counters_file):
        assert each.is_relative_to("/d/x")
    assert config.models["m"].workers == 2


def test_rejects_too_long_directory() -> None:
    longest = Path("/" + "d" * (daemon_supervisor.MAX_DIRECTORY_BYTES - 1))
    load_text(daemon_supervisor.config_text(longest, {"m": {"path": "/a.onnx"}}), Path("/w.toml"))
    with pytest.raises(InvalidArgument, match=r"directory: .* at most 80 bytes, got 81"):
        daemon_supervisor.config_text(Path(f"{longest}d"), {})
