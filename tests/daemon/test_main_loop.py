"""The main loop: in which order things are done after a change, and how the daemon ends."""

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


class Scene:
    """A daemon whose parts write down what they are asked for."""

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
                done.status, done.config, done.reloader, done.counter_store, service,
            ),
        )  # fmt: skip

    def calls(self, *names: str) -> list[str]:
        return [call[0] for call in self.done.mock_calls if call[0] in names]


def test_an_update_is_told_once_the_next_daemon_would_know_of_it() -> None:
    scene = Scene()
    scene = Scene(scene.done.service)
    daemon: Any = scene.daemon
    daemon._service = scene.done.service
    daemon._reconcile()
    assert scene.calls("service.on_change", "router.admin.send_saved_responses") == [
        "service.on_change",
        "router.admin.send_saved_responses",
    ]


@pytest.mark.parametrize("is_managed", [False, True])
def test_a_second_stop_signal_waits_for_no_request(is_managed: bool) -> None:
    scene = Scene(mock.Mock() if is_managed else None)
    scene.daemon.on_signals(bytes([INTERRUPT, signal.SIGTERM]))
    assert (scene.shutdown.is_draining, scene.calls("registry.close", "supervisor.kill_all")) == (
        True,
        ["registry.close"],
    )
    scene.daemon.on_signals(bytes([signal.SIGINT]))
    assert scene.shutdown.is_stopping
    # A shim ends processes, or the next daemon goes on with them.
    assert scene.calls("registry.hand_over", "registry.drain", "supervisor.kill_all") == (
        ["registry.hand_over"] if is_managed else ["registry.drain", "supervisor.kill_all"]
    )


def test_a_hangup_is_a_reload_or_else_a_stop_that_does_not_hurry() -> None:
    scene = Scene()
    scene.daemon.on_signals(bytes([signal.SIGHUP]))
    assert (scene.calls("reloader.on_hangup"), scene.shutdown.has_begun) == (["reloader.on_hangup"], False)
    scene.done.reloader.is_possible_by_hangup = False
    scene.daemon.on_signals(bytes([signal.SIGHUP, signal.SIGHUP]))
    assert (scene.shutdown.is_draining, scene.shutdown.is_stopping) == (True, False)


def test_it_ends_when_what_was_accepted_is_finished_and_says_how_that_went() -> None:
    scene = Scene()
    loop = EventLoop()
    daemon: Any = scene.daemon
    daemon._loop = loop
    scene.shutdown.timer.set(0.0)
    busy = SimpleNamespace(dispatcher=SimpleNamespace(is_idle=False, has_pending_failures=False))
    scene.done.registry.all_models.return_value = [busy]
    loop.call_soon(lambda: daemon.stop(0.0))
    loop.call_soon(lambda: setattr(busy.dispatcher, "is_idle", True))
    scene.done.registry.deaths = 2
    assert daemon.serve() == exit_codes.PROCESS_DIED
    assert scene.calls("supervisor.kill_all", "supervisor.messenger.close", "counter_store.close", "router.close") == [
        "supervisor.kill_all",
        "supervisor.messenger.close",
        "counter_store.close",
        "router.close",
    ]
    loop.close()
