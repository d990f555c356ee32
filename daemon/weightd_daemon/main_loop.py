"""Behavior of the daemon while it runs: start, reconciliation, signals and shutdown.

The event loop (`platform.event_loop`) waits for events and calls handlers. Each change of a process, a generation or
the configuration schedules `Daemon._reconcile`, which compares the current state with the intended state and acts on
the difference.
"""

from __future__ import annotations

import logging
import signal
from typing import NamedTuple

from weightd_common import process_start
from weightd_common.service_manager import ServiceManager
from weightd_daemon import exit_codes
from weightd_daemon.api.router import RequestRouter
from weightd_daemon.changed_files import ChangedFiles
from weightd_daemon.config.load import Config
from weightd_daemon.config_file import ConfigFile
from weightd_daemon.config_in_force import ConfigInForce
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
from weightd_daemon.reload import Reloader
from weightd_daemon.shutdown import Shutdown, ShutdownEvent
from weightd_daemon.transport.zmq_proxies import ZmqProxies
from weightd_daemon.zmq_proxy.zygote import Zygote

_log = logging.getLogger("weightd")

# Seconds that the daemon may need to exit after the drain timeout. The daemon asks the service manager to wait for the
# sum of both.
_STOP_MARGIN_S = 10.0


class Options(NamedTuple):
    """Options of the command line.

    Attributes:
        config: the configuration to serve.
        file: the configuration file, which is read again on SIGHUP; None if weightd runs without one.
        manager: the service manager, which gets notifications and stores descriptors for the next daemon.
        one_shot: for `weightd run`, the example command that is logged once the model is ready. The daemon then shuts
            down if the model fails. "" for `weightd serve`, where the daemon continues to serve the other models.
        zygote: forks the ZeroMQ proxies; if None, the daemon starts a zygote when it needs one.
    """

    config: Config
    file: ConfigFile | None = None
    manager: ServiceManager = ServiceManager({})
    one_shot: str = ""
    zygote: Zygote | None = None

    def config_note(self) -> str:
        """Return why the configuration in force differs from the configuration file; "" if they are equal."""
        return "" if self.file is None else "\n".join(filter(None, (self.file.note, self.file.repository_note)))


class Parts(NamedTuple):
    """The parts that `app.build` has created and that `Daemon` controls.

    Attributes:
        loop: the event loop of the daemon.
        shutdown: the state machine of the daemon's shutdown.
        supervisor: starts and watches child processes.
        load_monitor: knows the progress of models that are loading.
        registry: the registry of the models.
        router: routes requests and responses between clients and models.
        proxies: the proxies of the ZeroMQ listeners.
        status: answers status, metrics, events and logs requests.
        config: the configuration in force.
        reloader: replaces the configuration in force.
        changed_files: loads failed models again after their files have changed.
        counter_store: persists counters across restarts.
        service: notifies the service manager and hands state over to the next daemon; None without a service manager.
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
    changed_files: ChangedFiles
    counter_store: CounterStore
    service: ManagedService | None


class Daemon:
    """A daemon that serves the configured models.

    Args:
        options: the options of the command line.
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
        self._changed_files = parts.changed_files
        self._counter_store = parts.counter_store
        self._service = parts.service
        self._has_logged_ready = False

    def serve(self, shim: ShimLauncher | None = None) -> int:
        """Serve until the daemon is shut down; return the exit status.

        Args:
            shim: provides the state that the previous daemon has handed over; None without a service manager.
        """
        try:
            with process_start.gc_paused():
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
            # Close the router before the proxies, because its last messages to ZeroMQ clients pass through the proxies.
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
            # Take over the devices of the previous daemon. Keep the processes and files of its models, and remove
            # everything else that it has left.
            self._config.adopt_devices(handover)
            children = [name for record in handover.models for name in record.children]
            entries = [name for record in handover.models for name in record.directories]
            self._supervisor.remove_leftovers(children, [*entries, *shim.own_entries])
        self._config.start_models(handover, now)
        self._reloader.watch_repository()
        if file is not None:
            self._counter_store.open(now)
        self._config.apply_accounting(now)

    # --- the loop -----------------------------------------------------------------------------------------------

    def on_change(self) -> None:
        """Schedule a reconciliation, because a generation or a child process has changed its state."""
        self._load_monitor.on_change()
        self.schedule_reconcile()

    def schedule_reconcile(self) -> None:
        """Make the loop call `_reconcile` once before it waits again."""
        self._loop.call_soon(self._reconcile)

    def _reconcile(self) -> None:
        """Act on changes: update models, notify the service manager, send pending replies, and continue a shutdown.

        While a model is changing or the daemon is shutting down, this method runs at the end of every turn of the loop.
        """
        now = event_loop.now()
        if self._registry.changing:
            self._registry.reconcile(now)
        if not self._shutdown.has_begun:
            self._config.reselect(now)
            self._config.trim_cache()
            self._changed_files.on_change(now)
        loaded_models = self._registry.loaded_models()
        self._config.update_fork_servers(loaded_models, now)
        self._load_monitor.update_if_changed(loaded_models, now)
        if self._service is not None:
            self._service.on_change(now)
        # Send these replies after `on_change`, which records completed updates for the next daemon.
        self._router.admin.send_saved_responses()
        if self._options.one_shot:
            self._reconcile_one_shot(now)
        if self._shutdown.is_draining and all(each.dispatcher.is_idle for each in self._registry.all_models()):
            self.finish_drain(now)
        if self._is_finished():
            self._loop.stop()
        self._loop.on_turn_end(self._reconcile if self._registry.changing or self._shutdown.has_begun else None)

    def _reconcile_one_shot(self, now: float) -> None:
        """Shut down if the model of `weightd run` has failed; log the example command once when the model is ready."""
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
        """Adjust deadlines after the daemon did not run for some seconds, for example because of SIGSTOP.

        Time limits of child processes are extended, because the daemon's clock has stood still. Deadlines that clients
        and the service manager have set continue in real time, so they come sooner on the daemon's clock.
        """
        _log.warning("daemon did not run for %.1f s; extending the time limits of its processes", seconds)
        now = event_loop.now()
        for model in self._registry.all_models():
            model.dispatcher.on_suspended(seconds, now)
        if self._service is not None:
            self._service.on_suspended(seconds, now)

    # --- the end ------------------------------------------------------------------------------------------------

    def on_signals(self, numbers: bytes) -> None:
        """Handle received signals. Each byte of `numbers` is the number of a signal."""
        now = event_loop.now()
        for number in numbers:
            if number == INTERRUPT:
                # The only purpose of this signal is to interrupt a system call in a thread of `fd_closer.py`.
                continue
            _log.info("%s", signal.Signals(number).name)
            if number == signal.SIGHUP and self._reloader.is_possible_by_hangup:
                self._reloader.on_hangup()
            elif number == signal.SIGHUP or not self._shutdown.has_begun:
                # A second SIGHUP does not end the wait for accepted requests, because the kernel and the shell may both
                # send one when a terminal closes.
                self.stop(now)
            else:
                _log.warning("second stop signal; not waiting for requests")
                self._shutdown.handle(ShutdownEvent.FORCE)
                # Stop the models before their processes are killed, because a running model would replace the
                # processes.
                self._stop_models(now)
                if self._service is None:
                    self._supervisor.kill_all()

    def stop(self, now: float) -> None:
        """Begin to shut down: reject new requests, and wait for accepted ones to finish within the drain timeout."""
        if not self._shutdown.has_begun:
            drain_timeout_s = self._config.drain_timeout_s
            _log.info("stopping; finishing accepted requests for at most %g s", drain_timeout_s)
            self._shutdown.handle(ShutdownEvent.STOP)
            self._registry.close()
            if self._service is None:
                # Under a service manager, workers go on reading the channels while the daemon restarts.
                self._router.channels.stop()
            self.schedule_reconcile()
            self._shutdown.timer.set(now + drain_timeout_s)
            timeout_us = int(1e6 * (drain_timeout_s + _STOP_MARGIN_S))
            self._options.manager.notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={timeout_us}")

    def finish_drain(self, now: float) -> None:
        """Shut down the models, or hand them over: all requests are finished, or the drain timeout has passed."""
        if self._shutdown.is_draining:
            self._shutdown.handle(ShutdownEvent.DRAINED)
            self._stop_models(now)

    def _stop_models(self, now: float) -> None:
        if self._service is not None:
            # Under a service manager, leave the processes running: the next daemon takes them over, or the shim stops
            # them.
            self._registry.hand_over(now)
        else:
            self._registry.drain(now)
