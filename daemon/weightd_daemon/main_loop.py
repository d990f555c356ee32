"""The daemon while it runs: start, main loop, reload and stop.

The loop waits and calls handlers (`platform.event_loop`). Whatever changes more than a request has `Daemon._reconcile`
called, which compares what is there with what should be there.
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

# What it takes to leave after the last request has ended.
_STOP_MARGIN_S = 10.0


class Options(NamedTuple):
    """What the command line has asked for.

    Attributes:
        config: what to serve, and where.
        file: that it comes from, to be read again on SIGHUP.
        manager: who is told how it goes, and passes sockets and the shim on from one daemon to the next.
        one_shot: end when a model fails instead of serving the others (`weightd run`); it is what asks the model, to be
            told once that serves. "": go on.
        zygote: makes its proxies; None to start one then.
    """

    config: Config
    file: ConfigFile | None = None
    manager: ServiceManager = ServiceManager({})
    one_shot: str = ""
    zygote: Zygote | None = None

    def config_note(self) -> str:
        """Return why what is in force is not what the configuration file says, or ""."""
        return "" if self.file is None else self.file.note


class Parts(NamedTuple):
    """What a daemon consists of.

    Attributes:
        loop: waits for everything.
        shutdown: how far the end is.
        supervisor: the processes.
        load_monitor: how far models are that load.
        registry: the models.
        router: the clients.
        proxies: of the ZeroMQ listeners.
        status: answers status, metrics, events and logs requests.
        config: what is in force.
        reloader: puts another configuration in force.
        counter_store: keeps counters for the next daemon.
        service: what is done for a service manager and the next daemon; None where nobody manages this one.
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
    """Runs the models of a configuration.

    Args:
        options: what the command line has asked for.
        parts: do the work.
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
        """Serve until told to stop; return the exit status.

        Args:
            shim: knows what the daemon before this one has left.
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
            # Clients go, those of the proxies first: they still have to be passed on what was said to them.
            self._router.close()
            self._proxies.close()
        if any(each.is_failing for model in self._registry.models.values() for each in model.deployments):
            return exit_codes.MODEL_FAILED
        if self._registry.deaths:
            _log.warning("%d processes ended unexpectedly (see the exit status)", self._registry.deaths)
            return exit_codes.PROCESS_DIED
        return exit_codes.OK

    def _start(self, shim: ShimLauncher | None) -> None:
        config, file, now = self._options.config, self._options.file, event_loop.now()
        handover = None if shim is None else shim.inherited_state
        for name, each in config.listeners.items():
            if each.insecure:
                _log.warning(
                    "listener %s, %s, is insecure: any client that reaches it may send requests", name, each.address
                )
        if self._service is not None:
            self._service.start([] if handover is None else [record.name for record in handover.models])
            if file is not None:
                file.mark_in_force()
        if shim is not None and handover is not None:
            # Go on with what the daemon before this one has loaded.
            self._config.adopt_devices(handover)
            children = [name for record in handover.models for name in record.children]
            entries = [name for record in handover.models for name in record.directories]
            self._supervisor.remove_leftovers(children, [*entries, *shim.own_entries])
        # Fork servers load while snapshots are taken.
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
        """A generation, or a child, is not what it was."""
        self._load_monitor.on_change()
        self.schedule_reconcile()

    def schedule_reconcile(self) -> None:
        """Something has changed, and that is more than a request."""
        self._loop.call_soon(self._reconcile)

    def _reconcile(self) -> None:
        """What is left to do after that; and after anything at all while a model or the daemon is about to leave."""
        now = event_loop.now()
        if self._registry.changing:
            self._registry.reconcile(now)
        self._load_monitor.update_if_changed(self._registry.all_models(), now)
        if self._service is not None:
            self._service.on_change(now)
        # The next daemon knows of it now, too.
        self._router.admin.send_saved_responses()
        if self._options.one_shot:
            self._reconcile_one_shot(now)
        if self._shutdown.is_draining and all(each.dispatcher.is_idle for each in self._registry.all_models()):
            self.finish_drain(now)
        if self._is_finished():
            self._loop.stop()
        self._loop.on_turn_end(self._reconcile if self._registry.changing or self._shutdown.has_begun else None)

    def _reconcile_one_shot(self, now: float) -> None:
        """There is one model, for a first look at it."""
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
        """The daemon did not run for so long: its processes get that much longer, and others have waited for it."""
        _log.warning("the daemon did not run for %.1f s; extending the time limits of its processes", seconds)
        now = event_loop.now()
        for model in self._registry.all_models():
            model.dispatcher.on_suspended(seconds, now)
        if self._service is not None:
            self._service.on_suspended(seconds, now)

    # --- the end ------------------------------------------------------------------------------------------------

    def on_signals(self, numbers: bytes) -> None:
        """Do what signals ask for; `numbers` has one in each byte."""
        now = event_loop.now()
        for number in numbers:
            if number == INTERRUPT:
                # It was for a thread, whose system call has ended by now.
                continue
            _log.info("%s", signal.Signals(number).name)
            if number == signal.SIGHUP and self._reloader.is_possible_by_hangup:
                self._reloader.on_hangup()
            elif number == signal.SIGHUP or not self._shutdown.has_begun:
                # The kernel and the shell may both send SIGHUP: that is no request to hurry.
                self.stop(now)
            else:
                _log.warning("second stop signal: not waiting for requests")
                self._shutdown.handle(ShutdownEvent.FORCE)
                # First: a model that does not stop would replace what is killed.
                self._stop_models(now)
                if self._service is None:
                    self._supervisor.kill_all()

    def stop(self, now: float) -> None:
        """Take nothing new; finish what was accepted."""
        if not self._shutdown.has_begun:
            drain_timeout_s = self._config.drain_timeout_s
            _log.info("stopping: finishing what was accepted, for at most %g s", drain_timeout_s)
            self._shutdown.handle(ShutdownEvent.STOP)
            self._registry.close()
            self.schedule_reconcile()
            self._shutdown.timer.set(now + drain_timeout_s)
            timeout_us = int(1e6 * (drain_timeout_s + _STOP_MARGIN_S))
            self._options.manager.notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={timeout_us}")

    def finish_drain(self, now: float) -> None:
        """What was accepted is finished, or the time for that is over."""
        if self._shutdown.is_draining:
            self._shutdown.handle(ShutdownEvent.DRAINED)
            self._stop_models(now)

    def _stop_models(self, now: float) -> None:
        if self._service is not None:
            # The shim ends the processes, or the next daemon goes on with them: who knows.
            self._registry.hand_over(now)
        else:
            self._registry.drain(now)
