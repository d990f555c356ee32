"""The main loop: order of actions after a change, signals and shutdown."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from weightd_common.service_manager import ServiceManager
from weightd_daemon import exit_codes
from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.config.load import Config
from weightd_daemon.main_loop import Daemon, Options, Parts
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.fd_closer import INTERRUPT
from weightd_daemon.shutdown import Shutdown


class LoopHarness:
    """A Daemon with mocks as its parts."""

    def __init__(self, service: Any = None) -> None:
        self.done = mock.Mock()
        self.shutdown = Shutdown()
        self.done.registry.changing, self.done.registry.deaths = [], 0
        self.done.registry.models = {}
        self.done.registry.all_models.return_value = []
        self.done.supervisor.is_empty = True
        self.done.config.drain_timeout_s = 30.0
        self.done.reloader.is_possible_by_hangup = True
        done = self.done
        config = Config(DaemonConfig("ipc:///s", "/run", "/cache"), {})
        self.daemon = Daemon(
            Options(config, manager=ServiceManager({})),
            Parts(
                done.loop, self.shutdown, done.supervisor, done.load_monitor, done.registry, done.router, done.proxies,
                done.status, done.config, done.reloader, done.changed_files, done.counter_store, service,
            ),
        )  # fmt: skip

    def calls(self, *names: str) -> list[str]:
        return [call[0] for call in self.done.mock_calls if call[0] in names]


def test_replies_to_updates_after_saving_the_state() -> None:
    harness = LoopHarness()
    harness = LoopHarness(harness.done.service)
    daemon: Any = harness.daemon
    daemon._service = harness.done.service
    daemon._reconcile()
    assert harness.calls("service.on_change", "router.admin.send_saved_responses") == [
        "service.on_change",
        "router.admin.send_saved_responses",
    ]


@pytest.mark.parametrize("is_managed", [False, True])
def test_second_stop_signal_ends_at_once(is_managed: bool) -> None:
    harness = LoopHarness(mock.Mock() if is_managed else None)
    harness.daemon.on_signals(bytes([INTERRUPT, signal.SIGTERM]))
    assert (harness.shutdown.is_draining, harness.calls("registry.close", "supervisor.kill_all")) == (
        True,
        ["registry.close"],
    )
    harness.daemon.on_signals(bytes([signal.SIGINT]))
    assert harness.shutdown.is_stopping
    # With a shim, the next daemon takes the processes over.
    assert harness.calls("registry.hand_over", "registry.drain", "supervisor.kill_all") == (
        ["registry.hand_over"] if is_managed else ["registry.drain", "supervisor.kill_all"]
    )


def test_sighup_reloads_or_drains() -> None:
    harness = LoopHarness()
    harness.daemon.on_signals(bytes([signal.SIGHUP]))
    assert (harness.calls("reloader.on_hangup"), harness.shutdown.has_begun) == (["reloader.on_hangup"], False)
    harness.done.reloader.is_possible_by_hangup = False
    harness.daemon.on_signals(bytes([signal.SIGHUP, signal.SIGHUP]))
    assert (harness.shutdown.is_draining, harness.shutdown.is_stopping) == (True, False)


def test_exits_after_draining_with_the_status_of_lost_processes() -> None:
    harness = LoopHarness()
    loop = EventLoop()
    daemon: Any = harness.daemon
    daemon._loop = loop
    harness.shutdown.timer.set(0.0)
    busy = SimpleNamespace(dispatcher=SimpleNamespace(is_idle=False, has_pending_failures=False))
    harness.done.registry.all_models.return_value = [busy]
    loop.call_soon(lambda: daemon.stop(0.0))
    loop.call_soon(lambda: setattr(busy.dispatcher, "is_idle", True))
    harness.done.registry.deaths = 2
    assert daemon.serve() == exit_codes.PROCESS_DIED
    assert harness.calls(
        "supervisor.kill_all", "supervisor.messenger.close", "counter_store.close", "router.close"
    ) == [
        "supervisor.kill_all",
        "supervisor.messenger.close",
        "counter_store.close",
        "router.close",
    ]
    loop.close()
