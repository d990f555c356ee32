"""Main loop of the daemon: start, reconciliation, signals and stop.

The event loop (`platform.event_loop`) waits and calls handlers. Every change beyond a single request schedules
`Daemon._reconcile`, which compares the current state with the intended state and acts on the difference.
"""

from __future__ import annotations

import logging
import signal
from typing import NamedTuple

from weightd_common.service_manager import ServiceManager
from weightd_daemon import exit_codes
from weightd_daemon.api.router import RequestRouter
from weightd_daemon.config.load import Config
from weightd_daemon.config_file import ConfigFile
from weightd_daemon.handover.counter_store import CounterStore
from weightd_daemon.handover.shim_launcher import ShimLauncher
from weightd_daemon.handover.systemd import ManagedService
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.observability.load_progress import LoadMonitor
from weightd_daemon.observability.service import StatusService
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.fd_closer import INTERRUPT
from weightd_daemon.processes.supervisor import ProcessSupervisor
from weightd_daemon.reload import ConfigInForce, Reloader
from weightd_daemon.shutdown import Shutdown, ShutdownEvent
from weightd_daemon.transport.zmq_proxies import ZmqProxies
from weightd_daemon.zmq_proxy.zygote import Zygote

_log = logging.getLogger("weightd")

# Time that the daemon needs to exit after the last request has ended.
_STOP_MARGIN_S = 10.0


class Options(NamedTuple):
    """Options of the command line.

    Attributes:
        config: the configuration to serve.
        file: the configuration file, read again on SIGHUP; None without one.
        manager: the service manager: gets state notifications, and keeps sockets and the shim for the next daemon.
        one_shot: for `weightd run`: an example command, logged once the model is ready; the daemon stops if the model
            fails. "" otherwise: if a model fails, the daemon goes on serving the others.
        zygote: forks the ZeroMQ proxies; None if the daemon has to start one when it needs it.
    """

    config: Config
    file: ConfigFile | None = None
    manager: ServiceManager = ServiceManager({})
    one_shot: str = ""
    zygote: Zygote | None = None

    def config_note(self) -> str:
        """Return why the configuration in force differs from the configuration file; "" if it does not."""
        return "" if self.file is None else self.file.note


class Parts(NamedTuple):
    """Parts of a daemon.

    Attributes:
        loop: the event loop.
        shutdown: the state machine of the stop.
        supervisor: starts and watches child processes.
        load_monitor: the progress of models that are loading.
        registry: the models.
        router: routes requests and responses between clients and models.
        proxies: the proxies of the ZeroMQ listeners.
        status: answers status, metrics, events and logs requests.
        config: the configuration in force.
        reloader: replaces the configuration in force.
        counter_store: persists counters across restarts.
        service: reports to the service manager and hands state over to the next daemon; None without a service manager.
    """

    loop: EventLoop
    shutdown: Shutdown
    supervisor: ProcessSupervisor
    load_monitor: LoadMonitor
    registry: ModelRegistry
    router: RequestRouter
    proxies: ZmqProxies
    status: StatusService
    config: ConfigInForce
    reloader: Reloader
    counter_store: CounterStore
    service: ManagedService | None


class Daemon:
    """A daemon that serves the models of a configuration.

    Args:
        options: options of the command line.
        parts: the parts that the daemon controls.
    """

    def __init__(self, options: Options, parts: Parts) -> None:
        self._options = options
        self._loop = parts.loop
        self._shutdown = parts.shutdown
        self._supervisor = parts.supervisor
        self._load_monitor = parts.load_monitor
        self._registry = parts.registry
        self._router = parts.router
        self._proxies = parts.proxies
        self._config = parts.config
        self._reloader = parts.reloader
        self._counter_store = parts.counter_store
        self._service = parts.service
        self._has_logged_ready = False

    def serve(self, shim: ShimLauncher | None = None) -> int:
        """Serve until the daemon is stopped; return the exit status.

        Args:
            shim: has the state that the previous daemon handed over; None without a service manager.
        """
        try:
            self._start(shim)
            self._reconcile()
            self._loop.run()
        finally:
            self._loop.on_turn_end(None)
            self._reloader.abort()
            if self._service is None:
                self._supervisor.kill_all()
            self._supervisor.messenger.close()
            self._counter_store.close()
            # The router closes first: its last messages to ZeroMQ clients still have to pass through the proxies.
            self._router.close()
            self._proxies.close()
        if any(each.is_failing for model in self._registry.models.values() for each in model.deployments):
            return exit_codes.MODEL_FAILED
        if self._registry.deaths:
            _log.warning(
                "child processes exited unexpectedly: %d; exiting with status %d",
                self._registry.deaths,
                exit_codes.PROCESS_DIED,
            )
            return exit_codes.PROCESS_DIED
        return exit_codes.OK

    def _start(self, shim: ShimLauncher | None) -> None:
        config, file, now = self._options.config, self._options.file, event_loop.now()
        handover = None if shim is None else shim.inherited_state
        for name, each in config.listeners.items():
            if each.insecure:
                _log.warning(
                    "listener %s (%s) is insecure: any client that reaches it may send requests", name, each.address
                )
        if self._service is not None:
            self._service.start([] if handover is None else [record.name for record in handover.models])
            if file is not None:
                file.mark_in_force()
        if shim is not None and handover is not None:
            # Take over the models that the previous daemon has loaded.
            self._config.adopt_devices(handover)
            children = [name for record in handover.models for name in record.children]
            entries = [name for record in handover.models for name in record.directories]
            self._supervisor.remove_leftovers(children, [*entries, *shim.own_entries])
        # Start the fork servers first: they import their engines while the models' snapshots are taken.
        self._supervisor.fork_servers.reconcile(config.models.values())
        if handover is not None:
            self._registry.resume(handover.models, config.models, now)
        else:
            self._registry.start(config.models, now)
        if file is not None:
            self._counter_store.open(now)
        self._config.apply_accounting(now)

    # --- the loop -----------------------------------------------------------------------------------------------

    def on_change(self) -> None:
        """Schedule a reconciliation after the state of a generation or of a child process has changed."""
        self._load_monitor.on_change()
        self.schedule_reconcile()

    def schedule_reconcile(self) -> None:
        """Schedule `_reconcile` to run once before the loop waits again."""
        self._loop.call_soon(self._reconcile)

    def _reconcile(self) -> None:
        """Bring models, service manager and pending replies up to date, and finish a stop.

        While a model is changing or the daemon is stopping, this runs at the end of every turn of the loop.
        """
        now = event_loop.now()
        if self._registry.changing:
            self._registry.reconcile(now)
        self._load_monitor.update_if_changed(self._registry.all_models(), now)
        if self._service is not None:
            self._service.on_change(now)
        # The service has recorded the update for the next daemon by now.
        self._router.admin.send_saved_responses()
        if self._options.one_shot:
            self._reconcile_one_shot(now)
        if self._shutdown.is_draining and all(each.dispatcher.is_idle for each in self._registry.all_models()):
            self.finish_drain(now)
        if self._is_finished():
            self._loop.stop()
        self._loop.on_turn_end(self._reconcile if self._registry.changing or self._shutdown.has_begun else None)

    def _reconcile_one_shot(self, now: float) -> None:
        """Stop if the only model of `weightd run` has failed; log the example command once it is ready."""
        models = self._registry.models.values()
        if any(model.readiness.has_failed for model in models):
            self.stop(now)
        if (
            not self._shutdown.has_begun
            and not self._has_logged_ready
            and all(each.readiness.is_complete for each in models)
        ):
            self._has_logged_ready = True
            _log.info("ready; try: %s", self._options.one_shot)

    def _is_finished(self) -> bool:
        if not self._shutdown.is_stopping or any(
            model.dispatcher.has_pending_failures for model in self._registry.all_models()
        ):
            return False
        return self._service is not None or self._supervisor.is_empty

    def on_suspended(self, seconds: float) -> None:
        """Extend the time limits of child processes by the seconds in which the daemon did not run.

        Deadlines of clients and of the service manager go by real time, so they come sooner on the daemon's clock.
        """
        _log.warning("daemon did not run for %.1f s; extending the time limits of its processes", seconds)
        now = event_loop.now()
        for model in self._registry.all_models():
            model.dispatcher.on_suspended(seconds, now)
        if self._service is not None:
            self._service.on_suspended(seconds, now)

    # --- the end ------------------------------------------------------------------------------------------------

    def on_signals(self, numbers: bytes) -> None:
        """Handle received signals; each byte of `numbers` is the number of one signal."""
        now = event_loop.now()
        for number in numbers:
            if number == INTERRUPT:
                # This signal interrupts a system call of one thread (`fd_closer.py`); there is nothing left to do.
                continue
            _log.info("%s", signal.Signals(number).name)
            if number == signal.SIGHUP and self._reloader.is_possible_by_hangup:
                self._reloader.on_hangup()
            elif number == signal.SIGHUP or not self._shutdown.has_begun:
                # When a terminal closes, the kernel and the shell may both send SIGHUP: the second one forces nothing.
                self.stop(now)
            else:
                _log.warning("second stop signal; not waiting for requests")
                self._shutdown.handle(ShutdownEvent.FORCE)
                # Stop the models first: a running model would replace the killed processes.
                self._stop_models(now)
                if self._service is None:
                    self._supervisor.kill_all()

    def stop(self, now: float) -> None:
        """Reject new requests, finish the accepted ones within the drain timeout, then stop the models."""
        if not self._shutdown.has_begun:
            drain_timeout_s = self._config.drain_timeout_s
            _log.info("stopping; finishing accepted requests for at most %g s", drain_timeout_s)
            self._shutdown.handle(ShutdownEvent.STOP)
            self._registry.close()
            self.schedule_reconcile()
            self._shutdown.timer.set(now + drain_timeout_s)
            timeout_us = int(1e6 * (drain_timeout_s + _STOP_MARGIN_S))
            self._options.manager.notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={timeout_us}")

    def finish_drain(self, now: float) -> None:
        """End draining: every accepted request is finished, or the drain timeout has passed."""
        if self._shutdown.is_draining:
            self._shutdown.handle(ShutdownEvent.DRAINED)
            self._stop_models(now)

    def _stop_models(self, now: float) -> None:
        if self._service is not None:
            # Under a service manager the processes stay: either the next daemon takes them over, or the shim ends them.
            self._registry.hand_over(now)
        else:
            self._registry.drain(now)
