"""Tests of the shim launcher: start of the shim, its transfer to the next daemon, and its replacement after a loss."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

import testkit.manager
from testkit.shims import LIMIT_S, ended
from weightd_common.service_manager import ServiceManager
from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.handover import shim_launcher, state
from weightd_daemon.handover.instance_lock import make_private_directory
from weightd_daemon.handover.shim_launcher import SHIM, ShimLauncher
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.processes import reap
from weightd_daemon.processes.shim import client
from weightd_daemon.processes.shim.client import ShimClient, ShimLost
from weightd_daemon.processes.spec import ProcessSpec

ENVIRONMENT = {"PATH": os.environ.get("PATH", os.defpath)}


@pytest.fixture
def config(tmp_path: Path) -> DaemonConfig:
    return DaemonConfig("ipc:///weightd.sock", str(tmp_path / "run"), str(tmp_path / "cache"))


class Service(testkit.manager.Manager):
    """Service manager that stores descriptors, and the shims that the test has started."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "clients", directory / "notify")
        self._environment = {"NOTIFY_SOCKET": str(directory / "notify")}
        self.shims: set[int] = set()

    def start(self, config: DaemonConfig, *more: int) -> ShimLauncher:
        """Return the launcher of the next daemon, which also inherits these descriptors."""
        self.drain_notifications()
        manager = ServiceManager({**self._environment})
        manager.inherited = {SHIM: [os.dup(self.stored_fds[SHIM]), *more]} if self.stored_fds else {}
        created = ShimLauncher(manager, config)
        self.shims.add(created.pid)
        self.drain_notifications()
        return created

    def close(self) -> None:
        super().close()
        for pid in self.shims:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    created = Service(tmp_path)
    yield created
    created.close()


def start_child(daemon: ShimLauncher, name: str, log: Path) -> int:
    """Start a child that prints its arguments; return its pid."""
    child = daemon.start(ProcessSpec(name, ["sh", "-c", 'echo "$0 $1"'], [], log, ENVIRONMENT))
    assert select.select([child.pidfd], [], [], LIMIT_S)[0]
    assert reap(child) == 0
    return child.pid


def test_shim_exits_if_service_manager_forgets_it(service: Service, config: DaemonConfig, tmp_path: Path) -> None:
    daemon = service.start(config)
    assert (daemon.inherited_state, daemon.surviving_processes()) == (None, [])
    assert config.private_dir.stat().st_mode & 0o777 == 0o700
    start_child(daemon, "c", tmp_path / "log")
    assert (tmp_path / "log").read_text() == f"--parent {daemon.pid}\n"
    service.forget()
    daemon.close()
    assert ended(daemon.pid)
    assert not config.private_dir.exists()


def test_next_daemon_takes_over_shim(service: Service, config: DaemonConfig, tmp_path: Path) -> None:
    first = service.start(config)
    child = first.start(ProcessSpec("c", ["sleep", "1000"], [], tmp_path / "log", ENVIRONMENT))
    state.write(first.handover_path, [], [])
    os.close(child.pidfd)
    first.close()
    # The daemon closes unexpected descriptors.
    read, write = os.pipe()
    second = service.start(config, write)
    assert os.read(read, 1) == b""
    os.close(read)
    assert second.pid == first.pid
    assert second.inherited_state == state.read(second.handover_path)
    [survivor] = second.surviving_processes()
    assert (survivor.pid, survivor.name) == (child.pid, "c")
    os.close(second.watch(survivor).pidfd)
    second.close()


def test_without_handover_file_all_models_are_loaded_again(
    service: Service, config: DaemonConfig, caplog: pytest.LogCaptureFixture
) -> None:
    first = service.start(config)
    (config.private_dir / "left").touch()
    first.close()
    with caplog.at_level(logging.INFO, "weightd"):
        second = service.start(config)
    assert second.inherited_state is None
    assert second.pid != first.pid
    assert ended(first.pid)
    assert [path.name for path in config.private_dir.iterdir()] == [client.LOG_NAME]
    warning, *_ = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == f"loading every model again: {first.handover_path}: No such file or directory"
    second.close()


def test_changed_directory_stops_old_processes_first(
    service: Service, config: DaemonConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = service.start(config)
    child = first.start(ProcessSpec("c", ["sleep", "1000"], [], tmp_path / "log", ENVIRONMENT))
    state.write(first.handover_path, [], [])
    first.close()

    def make(path: Path) -> None:
        assert select.select([child.pidfd], [], [], 0)[0]
        make_private_directory(path)

    read, stop = state.read, ShimClient.stop

    def read_and_suspend_shim(path: Path) -> state.Handover:
        os.kill(first.pid, signal.SIGSTOP)
        return read(path)

    def continue_and_stop(shim: ShimClient, timeout_s: float) -> None:
        os.kill(first.pid, signal.SIGCONT)
        stop(shim, timeout_s)

    # The shim can exit only while the new daemon waits for it.
    monkeypatch.setattr(state, "read", read_and_suspend_shim)
    monkeypatch.setattr(ShimClient, "stop", continue_and_stop)
    monkeypatch.setattr(shim_launcher, "make_private_directory", make)
    second = service.start(dataclasses.replace(config, cache_dir=str(tmp_path / "other")))
    assert (second.inherited_state, second.pid != first.pid) == (None, True)
    assert ended(first.pid)
    os.close(child.pidfd)
    second.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_unresponsive_shim_is_replaced_on_restart(
    service: Service, config: DaemonConfig, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    first = service.start(config)
    state.write(first.handover_path, [], [])
    first.close()
    os.kill(first.pid, how)
    if how is signal.SIGSTOP:
        # The shim is slow: it continues and exits while the next daemon waits for the lock.
        monkeypatch.setattr(client, "_TIMEOUT_S", 2.0)
        threading.Timer(2.5, os.kill, (first.pid, signal.SIGCONT)).start()
    second = service.start(config)
    assert (second.inherited_state, second.pid != first.pid, second.surviving_processes()) == (None, True, [])
    assert ended(first.pid)
    second.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_shim_is_replaced_on_next_start(
    service: Service, config: DaemonConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    # Short, but long enough for the start of a shim.
    monkeypatch.setattr(client, "_TIMEOUT_S", 4.0 if how is signal.SIGSTOP else LIMIT_S)
    daemon = service.start(config)
    lost = daemon.pid
    (config.private_dir / "m.1").mkdir()
    os.kill(lost, how)
    pid = start_child(daemon, "c", tmp_path / "log")
    service.shims.add(daemon.pid)
    assert (daemon.pid != lost, ended(lost), pid > 0) == (True, True, True)
    assert (tmp_path / "log").read_text() == f"--parent {daemon.pid}\n"
    # The directories of other generations are kept.
    assert (config.private_dir / "m.1").exists()
    service.drain_notifications()
    state.write(daemon.handover_path, [], [])
    daemon.close()
    following = service.start(config)
    assert following.pid == daemon.pid
    following.close()


def test_lost_shim_is_replaced_after_its_children_exit(
    service: Service, config: DaemonConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(service.start(config)) as daemon:
        os.kill(daemon.pid, signal.SIGKILL)
        with monkeypatch.context() as patch:
            patch.setattr(client, "wait_until_exited", mock.Mock(return_value=False))
            with pytest.raises(ShimLost, match="its children do not exit"):
                start_child(daemon, "c", tmp_path / "log")
        start_child(daemon, "c", tmp_path / "log")
        service.shims.add(daemon.pid)


def test_process_limit_is_named_in_error(
    service: Service, config: DaemonConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    monkeypatch.setattr(client, "start_shim", mock.Mock(side_effect=refused))
    with pytest.raises(PathInUse, match="the limit of processes and threads is reached"):
        service.start(config)


def test_directory_of_other_shim_is_rejected(
    service: Service, config: DaemonConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_private_directory(config.private_dir)
    other = client.start_shim(config.private_dir)
    service.shims.add(other.pid)
    # Simulate a directory that another shim locks right after the check.
    monkeypatch.setattr(shim_launcher, "make_private_directory", mock.Mock())
    with pytest.raises(PathInUse, match=r"^cannot start the shim: .*another shim uses the directory"):
        service.start(config)
    assert other.surviving_processes() == []
    other.kill()
