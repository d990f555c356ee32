"""The daemon's one loop: wait, handle, reconcile; and its life from the first bind to the last exit."""

from __future__ import annotations

import functools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import zmq

from weightd_common.devices import is_cpu
from weightd_common.terminal import Terminal, ends_on_hangup
from weightd_daemon import exit_codes
from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.api.connection import proxied_identity
from weightd_daemon.api.router import RequestRouter
from weightd_daemon.api.zmq_proxies import ListenerAuth, ProxyLimits, ZmqProxies
from weightd_daemon.config.devices import DeviceConfig
from weightd_daemon.config.listeners import NONE, allowed_keys
from weightd_daemon.config.load import Config, ConfigError
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.counters import CounterRegistry, DaemonCounterRecord, DaemonCounters, ModelCounterRecord
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.handover import state as handover
from weightd_daemon.handover.config_file import ConfigFile
from weightd_daemon.handover.config_reader import ConfigReader, ReadConfig
from weightd_daemon.handover.counter_store import CounterEntry, CounterStore
from weightd_daemon.handover.instance_lock import lock_instance
from weightd_daemon.handover.shim_launcher import ShimLauncher
from weightd_daemon.handover.state import Handover
from weightd_daemon.handover.systemd import CLIENTS, SHIM, ListenSockets, ServiceManager, SystemdNotifier, listen
from weightd_daemon.metrics_endpoint.page import MetricsPage
from weightd_daemon.metrics_endpoint.scrapes import MetricsEndpoint
from weightd_daemon.models.interfaces import ClientNotifier
from weightd_daemon.models.load_limit import LoadLimiter
from weightd_daemon.models.load_progress import LoadSpeedRecord
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.persisted import DeviceRecord
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.registry import ConfigDiff, ModelRegistry
from weightd_daemon.models.shared_process import ModelFactory
from weightd_daemon.models.versions import IdSequence
from weightd_daemon.observability.load_progress import LoadMonitor
from weightd_daemon.observability.log_tail import LogTailReader
from weightd_daemon.observability.memory import (
    MemoryReport,
    MemorySampler,
    MemoryScan,
    MemorySubject,
    TtlCache,
    memory_subjects,
)
from weightd_daemon.observability.metrics import MetricsInputs, MetricsTime, build_metrics
from weightd_daemon.observability.report_budget import Reports
from weightd_daemon.observability.status import StatusInputs, build_status
from weightd_daemon.observability.tenant_view import build_tenant_status
from weightd_daemon.platform import audit, clock, process_spawner
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.platform.connection_limit import raise_descriptor_limit
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.event_log import EventLog
from weightd_daemon.platform.event_loop import EventLoop, watch_signals
from weightd_daemon.platform.fd_closer import INTERRUPT
from weightd_daemon.platform.listen import is_loopback_listener
from weightd_daemon.platform.memory import MIB, host_memory_bytes
from weightd_daemon.platform.resource_limits import check_threads, with_limit_hint
from weightd_daemon.platform.timers import Timer
from weightd_daemon.processes.process_table import ProcessTable
from weightd_daemon.processes.snapshotter import CopyProgress
from weightd_daemon.processes.supervisor import ProcessSupervisor
from weightd_daemon.scheduling.dispatcher import SharedScheduling
from weightd_daemon.scheduling.signature import MetadataRequest
from weightd_daemon.shutdown import Shutdown, ShutdownEvent
from weightd_daemon.tenants.tenant import DEFAULT_TENANT, TenantResolver, Viewer, tenant_members
from weightd_daemon.tenants.usage import UsageRecord, UsageTable
from weightd_daemon.tenants.usage_log import UsageReporter
from weightd_daemon.zmq_proxy.control import PeerIdentity
from weightd_daemon.zmq_proxy.zygote import Zygote
from weightd_protocol.errors import InvalidArgument, RequestError, ResourceExhausted, Unavailable
from weightd_protocol.messages.control import ReloadResponse
from weightd_protocol.messages.events import Events, Logs
from weightd_protocol.messages.metrics import MetricsResponse
from weightd_protocol.schema import label
from weightd_protocol.version import VERSION

_log = logging.getLogger("weightd")

# What it takes to leave after the last request has ended.
_STOP_MARGIN_S = 10.0

# Of the host's memory, by default, for what clients send and do not read; the models have the rest.
_MEMORY_DIVISOR = 4

# Of libzmq, in a process with one context.
_ZEROMQ_THREADS = 2
# A reload reads the file once for all that wait for it.
_MAX_RELOADS = 16

# For a file, and for those that it names: a file system may not answer.
_READ_TIMEOUT_S = 60.0
_NEVER = float("inf")

# Few may ask for logs, and each question may read a megabyte.
_MAX_LOG_READERS = 4


class Server:
    """Runs the models of one configuration.

    Args:
        config: what to serve, and where.
        file: that it comes from, to be read again on SIGHUP.
        manager: who is told how it goes, and passes sockets and the shim on from one daemon to the next.
        one_shot: end when a model fails instead of serving the others (`weightd run`); it is what asks the model, to be
            told once that serves. "": go on.
        zygote: makes its proxies; None to start one then.
    """

    def __init__(
        self,
        config: Config,
        file: ConfigFile | None = None,
        manager: ServiceManager | None = None,
        *,
        one_shot: str = "",
        zygote: Zygote | None = None,
    ) -> None:
        self._config = config
        self._file = file
        self._manager = manager or ServiceManager({})
        self._systemd_notifier = SystemdNotifier(self._manager.watchdog_s)
        # Without a manager that holds on to it a shim would be of no use.
        self._shim_launcher: ShimLauncher | None = None
        self._devices: dict[str, DeviceBudget] = {}
        self._load_limiter = LoadLimiter()
        self._one_shot = one_shot
        self._has_logged_ready = False
        self._zygote = zygote
        self._loop = EventLoop()
        self._model_factory = ModelFactory()
        self._model_registry = ModelRegistry(self._make_model)
        self._tenant_resolver = TenantResolver(config.tenants)
        self._usage_table = UsageTable()
        self._counter_registry = CounterRegistry()
        self._daemon_counters = DaemonCounters(lambda: self._request_router.dropped_responses)
        self._authorizer = Authorizer(self._tenant_resolver, self._usage_table, _admitted_tenants(config))
        self._usage_reporter = UsageReporter(
            self._tenant_resolver, self._usage_table, lambda: self._model_registry.models
        )
        self._load_monitor = LoadMonitor(self._copy_progress)
        counter_entries = {
            "account": CounterEntry(self._usage_table, UsageRecord),
            "model": CounterEntry(self._counter_registry, ModelCounterRecord),
            "daemon": CounterEntry(self._daemon_counters, DaemonCounterRecord),
            "load": CounterEntry(self._load_monitor, LoadSpeedRecord),
        }
        self._counter_store = CounterStore(config.daemon.counters_file, counter_entries, self._loop.call_soon)
        self._reports = Reports(
            self._loop,
            lambda sink, error: self._request_router.responses.reply_error(sink.client, sink.request_id, error),
        )
        self._memory_cache = TtlCache()
        self._memory_sampler = MemorySampler()
        self._log_readers: list[LogTailReader] = []
        self._event_log, self._client_log = EventLog(), ClientLog()
        self._shared_scheduling = SharedScheduling(
            client_log=self._client_log, counters_of=self._counter_registry.counters_of
        )
        self._has_changed = True
        self._started_at = time.monotonic()
        self._shutdown = Shutdown()
        self._terminal = Terminal()
        self._metrics_endpoint: MetricsEndpoint | None = None
        self._drain_timer = Timer(self._finish_drain)
        self._config_reader = ConfigReader(ProcessTable(self._loop))
        self._config_timer = Timer(lambda _: self._config_reader.abort())
        # Whom to tell of the reload under way, and of the next one.
        self._active_reloads: list[Callable[[ConfigDiff | RequestError], object]] = []
        self._pending_reloads: list[Callable[[ConfigDiff | RequestError], object]] = []
        self._notify_timer = Timer(self._on_notify_timer)

    def run(self) -> int:
        """Serve until told to stop; return the exit status.

        Raises:
            PathInUse: a socket or a directory cannot be had.
        """
        raise_descriptor_limit()
        check_threads(_ZEROMQ_THREADS)
        try:
            process_spawner.start_thread()
        except OSError as error:
            raise PathInUse(with_limit_hint(f"cannot start the thread that starts processes: {error}")) from None
        has_manager = self._manager.is_present
        signal_numbers = [signal.SIGTERM, signal.SIGINT, INTERRUPT]
        # With a file SIGHUP is a reload, even under nohup; without one it ends the daemon, unless it is ignored.
        if self._file is not None or ends_on_hangup():
            signal_numbers.append(signal.SIGHUP)
        with (
            lock_instance(self._config.daemon, keep_private_dir=has_manager),
            listen(self._config, self._manager.inherited.get(CLIENTS, [])) as sockets,
            watch_signals(signal_numbers) as wakeups,
            self._event_log.capture_logs(),
        ):
            if has_manager:
                self._shim_launcher = ShimLauncher(self._manager, self._config.daemon)
            else:
                # Of a service that had one: with nobody to hold on to it, it ends.
                for descriptor in self._manager.inherited.get(SHIM, []):
                    os.close(descriptor)
            context = zmq.Context()
            try:
                self._open(context, wakeups, sockets)
                self._main_loop()
            finally:
                self._close()
                context.destroy()
                self._loop.close()
                if self._shim_launcher is not None:
                    self._shim_launcher.close()
        models = self._model_registry.models.values()
        if any(deployment.is_failing for model in models for deployment in model.deployments):
            return exit_codes.MODEL_FAILED
        if self._model_registry.deaths:
            _log.warning("%d processes ended unexpectedly (see the exit status)", self._model_registry.deaths)
            return exit_codes.PROCESS_DIED
        return exit_codes.OK

    def _open(self, context: zmq.Context[zmq.Socket[bytes]], wakeups: int, sockets: ListenSockets) -> None:
        daemon = self._config.daemon
        _update_devices(self._devices, self._config)
        self._process_supervisor = ProcessSupervisor(
            context, daemon, self._loop, self._devices, self._shim_launcher, self._on_change
        )
        max_memory_bytes = daemon.max_memory_bytes or host_memory_bytes() // _MEMORY_DIVISOR
        max_shm_bytes = daemon.max_shm_bytes or host_memory_bytes() // _MEMORY_DIVISOR
        self._request_router = RequestRouter(
            self._loop,
            self._model_registry,
            max_memory_bytes,
            self,
            max_shm_bytes=max_shm_bytes,
            user_limits=daemon.user_limits,
            authorizer=self._authorizer,
            log=self._client_log,
        )
        self._process_supervisor.messenger.channels.on_message_burst = self._request_router.cork
        for listener in sockets.unix_listeners:
            self._request_router.listen(listener)
        listeners = {name: (each, self._listener_auth(name)) for name, each in sockets.zmq_listeners.items()}
        proxy_limits = ProxyLimits(max_memory_bytes, daemon.user_limits)
        self._zmq_proxies = ZmqProxies(
            listeners, self._loop, self._adopt_connection, proxy_limits, self._client_log, self._zygote
        )
        self._metrics_endpoint = self._start_metrics_endpoint(sockets.metrics_listener)
        self._loop.on_suspended(self._on_suspended)
        self._loop.add(wakeups, lambda: self._on_signals(os.read(wakeups, 64)))
        self._loop.add_timer(self._drain_timer)
        self._loop.add_timer(self._notify_timer)
        self._loop.add_timer(self._reports.timer)
        for timer in (*self._usage_reporter.timers, self._counter_store.timer, self._config_timer):
            self._loop.add_timer(timer)
        if self._manager.is_present:
            self._notify_timer.set(0.0)
        _log.info("weightd %s, pid %d, listens on %s", VERSION, os.getpid(), ", ".join(sockets.addresses))
        for name, each in self._config.listeners.items():
            if each.insecure:
                _log.warning(
                    "listener %s, %s, is insecure: any client that reaches it may send requests", name, each.address
                )
        if self._shim_launcher is not None and self._file is not None:
            self._file.mark_in_force()
        if self._shim_launcher is not None and self._shim_launcher.inherited_state is not None:
            self._resume_models(self._shim_launcher, self._shim_launcher.inherited_state)
        else:
            # They load while snapshots are taken.
            self._process_supervisor.fork_servers.reconcile(self._config.models.values())
            self._model_registry.start(self._config.models, clock.now())
        if self._file is not None:
            self._counter_store.open(clock.now())
        self._apply_accounting(clock.now())

    def _start_metrics_endpoint(self, listener: socket.socket | None) -> MetricsEndpoint | None:
        """Answer who connects there with all that is counted: who reads it is the operator's choice."""
        if listener is None:
            return None
        page = MetricsPage(
            lambda: self.metrics("scrape", Viewer(DEFAULT_TENANT, can_see_all=True)), self._loop.call_soon
        )
        is_loopback = is_loopback_listener(listener)
        _log.info("metrics endpoint at %s", self._config.daemon.metrics)
        if not is_loopback and listener.family != socket.AF_UNIX:
            _log.warning("metrics at %s: any client that reaches it can read them", self._config.daemon.metrics)
        return MetricsEndpoint(listener, self._loop, page, is_loopback=is_loopback)

    def _listener_auth(self, listener: str) -> ListenerAuth:
        config, tenants = self._config.listeners[listener], self._config.tenants
        return ListenerAuth(
            config.secret,
            allowed_keys(config, tenants),
            config.max_connections,
            tenant_members(tenants, config.tenants) if tenants else None,
        )

    def _adopt_connection(self, listener: str, connection: socket.socket, peer: PeerIdentity) -> None:
        self._request_router.adopt(connection, proxied_identity(connection, listener, peer))

    def _resume_models(self, shim_launcher: ShimLauncher, handover: Handover) -> None:
        """Go on with what the daemon before this one has loaded."""
        previous_configs = {record.name: record.config for record in handover.models}
        for name in dict.fromkeys(
            device for config in previous_configs.values() for device in config.devices_by_weight_copy
        ):
            self._devices.setdefault(name, DeviceBudget(name))
        for reason in handover.devices:
            device = self._devices.setdefault(reason.name, DeviceBudget(reason.name))
            device.reported_bytes, device.free_bytes = reason.capacity_bytes, reason.free_bytes
            device.capacity_bytes = device.capacity_bytes or device.reported_bytes
        children = [name for record in handover.models for name in record.children]
        entries = [name for record in handover.models for name in record.directories]
        self._process_supervisor.remove_leftovers(children, [*entries, *shim_launcher.own_entries])
        self._process_supervisor.fork_servers.reconcile(self._config.models.values())
        self._model_registry.resume(handover.models, self._config.models, clock.now())
        self._systemd_notifier.on_resumed(previous_configs)

    def _make_model(self, name: str, config: ModelConfig, numbers: IdSequence) -> ServedModel:
        notifier = ClientNotifier(self._request_router.responses, self._request_router.admin)
        model = self._model_factory.make(
            name,
            config,
            self._devices,
            self._process_supervisor,
            notifier,
            numbers,
            shared_scheduling=self._shared_scheduling,
        )
        model.load_limiter = self._load_limiter
        self._loop.add_timer(model.timer)
        return model

    def _apply_accounting(self, now: float) -> None:
        """The tables of tenants are in force."""
        self._counter_registry.keep_only(self._model_registry.models)
        self._shared_scheduling.clocks.max_batch_s = self._config.daemon.max_batch_seconds
        self._usage_reporter.configure(self._config.daemon.accounting_interval, now)

    def _close(self) -> None:
        """Let clients go, those of the proxies first: they still have to be passed on what was said to them."""
        self._counter_store.close()
        if self._metrics_endpoint is not None:
            self._metrics_endpoint.close()
        self._request_router.close()
        self._zmq_proxies.close()

    # --- the loop -----------------------------------------------------------------------------------------------

    def _main_loop(self) -> None:
        try:
            self._reconcile()
            self._loop.run()
        finally:
            self._loop.on_turn_end(None)
            self._config_reader.abort()
            if self._shim_launcher is None:
                self._process_supervisor.kill_all()
            self._process_supervisor.messenger.channels.close()

    def _on_suspended(self, seconds: float) -> None:
        """The daemon did not run for so long: its processes get that much longer, and others have waited for it."""
        _log.warning("the daemon did not run for %.1f s; extending the time limits of its processes", seconds)
        now = clock.now()
        for model in self._model_registry.all_models():
            model.dispatcher.on_suspended(seconds, now)
        if self._manager.is_present:
            self._systemd_notifier.on_suspended(seconds)
            self._notify_timer.set(now)

    def _is_finished(self) -> bool:
        if not self._shutdown.is_stopping or any(
            model.dispatcher.has_pending_failures for model in self._model_registry.all_models()
        ):
            return False
        return self._shim_launcher is not None or self._process_supervisor.is_empty

    def _on_change(self) -> None:
        """A generation, or a child, is not what it was."""
        self._has_changed = True
        self._schedule_reconcile()

    def _schedule_reconcile(self) -> None:
        """Something has changed, and that is more than a request."""
        self._loop.call_soon(self._reconcile)

    def _reconcile(self) -> None:
        """What is left to do after that; and after anything at all while a model or the daemon is about to leave."""
        now = clock.now()
        if self._model_registry.changing:
            self._model_registry.reconcile(now)
        if self._has_changed:
            self._update_load_progress(now)
        if self._manager.is_present and self._process_supervisor.take_changed():
            self._write_handover()
            self._notify_manager(now)
        # The next daemon knows of it now, too.
        self._request_router.admin.send_saved_responses()
        if self._one_shot:
            self._reconcile_one_shot(now)
        if self._shutdown.is_draining and self._is_idle():
            self._finish_drain(now)
        if self._is_finished():
            self._loop.stop()
        self._loop.on_turn_end(self._reconcile if self._model_registry.changing or self._shutdown.has_begun else None)

    def _copy_progress(self, model: str, source: ModelSource) -> CopyProgress | None:
        return self._process_supervisor.snapshots.copy_progress(model, source)

    def _update_load_progress(self, now: float) -> None:
        self._has_changed = False
        self._load_monitor.update(self._model_registry.all_models(), now)

    def _reconcile_one_shot(self, now: float) -> None:
        """There is one model, for a first look at it."""
        if self._has_failed_model():
            self._stop(now)
        if (
            not self._shutdown.has_begun
            and not self._has_logged_ready
            and all(each.is_complete for each in self._model_registry.models.values())
        ):
            self._has_logged_ready = True
            _log.info("ready; try: %s", self._one_shot)

    def _on_notify_timer(self, now: float) -> None:
        """It is time for a sign of life; the next daemon comes first."""
        if self._process_supervisor.take_changed():
            self._write_handover()
        self._notify_manager(now)

    def _write_handover(self) -> None:
        if self._shim_launcher is not None and not self._shutdown.is_stopping:
            devices = [DeviceRecord(each.name, each.reported_bytes, each.free_bytes) for each in self._devices.values()]
            handover.write(self._shim_launcher.handover_path, self._model_registry.records(), devices)

    def _notify_manager(self, now: float) -> None:
        if self._shutdown.has_begun:
            return
        self._update_load_progress(now)
        models = self._model_registry.models.values()
        self._manager.notify(
            *self._systemd_notifier.poll(
                models, now, self._config_note, lambda each: self._load_monitor.describe_progress(each.label, now)
            )
        )
        self._notify_timer.set(self._systemd_notifier.next_event_at)
        if self._systemd_notifier.has_failed(self._model_registry.models.values()):
            _log.error("a required model has failed")
            self._stop(now)

    def unmap(self, numbers: Sequence[int]) -> None:
        """No client names these regions any more."""
        self._process_supervisor.messenger.unmap(numbers)

    @property
    def _config_note(self) -> str:
        return "" if self._file is None else self._file.note

    def _has_failed_model(self) -> bool:
        return any(model.has_failed for model in self._model_registry.models.values())

    def _is_idle(self) -> bool:
        return all(model.dispatcher.is_idle for model in self._model_registry.all_models())

    # --- the end ------------------------------------------------------------------------------------------------

    def _on_signals(self, numbers: bytes) -> None:
        now = clock.now()
        for number in numbers:
            if number == INTERRUPT:
                # It was for a thread, whose system call has ended by now.
                continue
            _log.info("%s", signal.Signals(number).name)
            if number == signal.SIGHUP:
                self._on_hangup(now)
            elif not self._shutdown.has_begun:
                self._stop(now)
            else:
                _log.warning("second stop signal: not waiting for requests")
                self._shutdown.handle(ShutdownEvent.FORCE)
                # First: a model that does not stop would replace what is killed.
                self._stop_models(now)
                if self._shim_launcher is None:
                    self._process_supervisor.kill_all()

    def _stop(self, now: float) -> None:
        """Take nothing new; finish what was accepted."""
        if not self._shutdown.has_begun:
            drain_timeout_s = self._config.daemon.drain_timeout
            _log.info("stopping: finishing what was accepted, for at most %g s", drain_timeout_s)
            self._shutdown.handle(ShutdownEvent.STOP)
            self._model_registry.close()
            self._schedule_reconcile()
            self._drain_timer.set(now + drain_timeout_s)
            self._manager.notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(1e6 * (drain_timeout_s + _STOP_MARGIN_S))}")

    def _finish_drain(self, now: float) -> None:
        """What was accepted is finished, or the time for that is over."""
        if self._shutdown.is_draining:
            self._shutdown.handle(ShutdownEvent.DRAINED)
            self._stop_models(now)

    def _stop_models(self, now: float) -> None:
        if self._shim_launcher is not None:
            # The shim ends the processes, or the next daemon goes on with them: who knows.
            self._model_registry.hand_over(now)
        else:
            self._model_registry.drain(now)

    # --- another configuration ----------------------------------------------------------------------------------

    def _on_hangup(self, now: float) -> None:
        if self._file is None or self._terminal.has_closed():
            # The kernel and the shell may both send it: that is no request to hurry.
            self._stop(now)
            return
        # READY=1 ends a reload, and a start: before that is over nothing is said of a reload.
        should_notify = self._systemd_notifier.is_ready and not self._shutdown.has_begun
        if should_notify:
            self._manager.notify_reloading()
        try:
            self._request_reload(functools.partial(self._on_hangup_reloaded, should_notify=should_notify))
        except RequestError as error:
            self._on_hangup_reloaded(error, should_notify=should_notify)

    def _on_hangup_reloaded(self, outcome: ConfigDiff | RequestError, *, should_notify: bool) -> None:
        entry = audit.AuditEntry("reload", audit.OPERATOR)
        if isinstance(outcome, RequestError):
            _log.error("not reloaded, nothing has changed: %s", outcome)
            audit.write(entry, audit.FAILED, str(outcome))
        else:
            audit.write(entry, audit.OK)
        if should_notify:
            self._manager.notify("READY=1")

    def reload(self, client: bytes, request_id: str) -> None:
        """A client wants the configuration to be read again: it is told how that has ended.

        Raises:
            RequestError: nothing has changed.
        """
        self._request_reload(functools.partial(self._reply_reload, client, request_id))

    def _reply_reload(self, client: bytes, request_id: str, outcome: ConfigDiff | RequestError) -> None:
        if isinstance(outcome, RequestError):
            self._request_router.admin.reply_failed(client, request_id, outcome)
        else:
            self._request_router.admin.reply_reloaded(client, ReloadResponse(request_id, *outcome))

    def _request_reload(self, on_done: Callable[[ConfigDiff | RequestError], object]) -> None:
        """Have the configuration file read again; call `on_done` once it is in force, or refused.

        Raises:
            RequestError: nothing has changed.
        """
        if self._file is None:
            raise InvalidArgument("weightd was started without a configuration file: there is nothing to reload")
        if self._shutdown.has_begun:
            raise Unavailable("weightd is stopping")
        if len(self._pending_reloads) == _MAX_RELOADS:
            raise ResourceExhausted(f"{_MAX_RELOADS} reloads wait already")
        self._pending_reloads.append(on_done)
        if len(self._pending_reloads) == 1:
            self._loop.call_soon(self._start_config_read)

    def _start_config_read(self) -> None:
        """Have the file read for all that wait; a reload that comes later reads it once more."""
        if self._file is None or self._active_reloads or not self._pending_reloads:
            return
        self._active_reloads, self._pending_reloads = self._pending_reloads, []
        try:
            self._config_reader.start(self._file.path, self._file.listen_addresses, self._on_config_read)
        except OSError as error:
            text = f"{self._file.path}: cannot start the process that reads it: {error.strerror}"
            self._on_config_read(ReadConfig(problems=(text,)))
        else:
            self._config_timer.set(clock.now() + _READ_TIMEOUT_S)

    def _on_config_read(self, result: ReadConfig) -> None:
        self._config_timer.set(_NEVER)
        waiting, self._active_reloads = self._active_reloads, []
        outcome: ConfigDiff | RequestError
        try:
            outcome = self._apply_config(result, clock.now())
            self._daemon_counters.reloads += 1
        except RequestError as error:
            outcome = error
            self._daemon_counters.refused_reloads += 1
        for each in waiting:
            each(outcome)
        self._start_config_read()

    def _apply_config(self, result: ReadConfig, now: float) -> ConfigDiff:
        """Make true what was read of the configuration file.

        Raises:
            InvalidArgument: the file is wrong; nothing has changed.
            Unavailable: not now; nothing has changed.
        """
        file = self._file
        if file is None or self._shutdown.has_begun:
            raise Unavailable("weightd is stopping")
        try:
            config = file.accept(result)
            self._check_fixed_keys(file.path, config)
            change = self._model_registry.compare(config.models)
            # What serves as before needs its files no more.
            file_problems = [
                each for name in (*change.added, *change.changed) for each in result.model_problems.get(name, ())
            ]
            if file_problems:
                raise ConfigError(*file_problems)
        except ConfigError as error:
            file.note = f"not reloaded: {error}"
            raise InvalidArgument(str(error)) from None
        _update_devices(self._devices, config)
        self._process_supervisor.fork_servers.reconcile(config.models.values())
        self._model_registry.apply(change, config.models, now)
        previous, self._config = self._config, config
        if (config.tenants, _admitted_tenants(config)) != (previous.tenants, _admitted_tenants(previous)):
            self._tenant_resolver.configure(config.tenants)
            self._authorizer.listener_tenants = _admitted_tenants(config)
            self._zmq_proxies.update_auth({name: self._listener_auth(name) for name in config.listeners})
            self._request_router.on_tenants_changed()
        self._schedule_reconcile()
        self._apply_accounting(now)
        file.note = ""
        if self._shim_launcher is not None:
            file.mark_in_force()
        _log.info("reloaded %s: %s", file.path, change)
        return change

    def _check_fixed_keys(self, path: Path, config: Config) -> None:
        old_values, new_values = _fixed_values(self._config), _fixed_values(config)
        differ = [
            f"{path}: {key}: expected {old_values.get(key)!r} as before, got {new_values.get(key)!r}: restart"
            for key in {**old_values, **new_values}
            if old_values.get(key) != new_values.get(key)
        ]
        if differ:
            raise ConfigError(*differ)

    # --- status -------------------------------------------------------------------------------------------------

    def report_status(self, requester: MetadataRequest, viewer: Viewer) -> None:
        """A client wants to know how it stands: it is told once that has been measured."""
        if viewer.can_see_all:
            pids = [*self._own_pids(), *(process.pid for process in self._process_supervisor.processes.values())]
            scan = MemoryScan(requester.request_id, pids, self._memory_cache)
            self._reports.add(requester, functools.partial(self._scan_next_process, requester.client, scan))
        else:
            self._reports.add(requester, functools.partial(self._reply_tenant_status, requester, viewer))

    def report_metrics(self, requester: MetadataRequest, viewer: Viewer) -> None:
        """A client wants to know what was counted."""

        def answer() -> bool:
            self._request_router.responses.reply(requester.client, self.metrics(requester.request_id, viewer))
            return True

        self._reports.add(requester, answer)

    def report_events(self, requester: MetadataRequest, request: Events) -> None:
        """A client wants to know what has happened."""

        def answer() -> bool:
            self._request_router.responses.reply(requester.client, self._event_log.query(request))
            return True

        self._reports.add(requester, answer)

    def metrics(self, request_id: str, viewer: Viewer) -> MetricsResponse:
        """Return what was counted, and how things stand."""
        models = list(self._model_registry.models.values())
        memory_report = (
            self._memory_sampler.poll(self._own_pids(), lambda: self._memory_subjects(models))
            if viewer.can_see_all
            else MemoryReport()
        )
        metrics_inputs = MetricsInputs(
            models,
            self._counter_registry,
            self._daemon_counters,
            self._tenant_resolver.all_tenants if self._tenant_resolver.has_tenants else self._tenant_resolver,
            self._usage_table,
            self._request_router.memory_budget.used_bytes,
            self._request_router.memory_budget.max_bytes,
            memory_report.footprints,
            memory_report.pss_bytes,
        )
        state, uptime = self._state_and_uptime()
        return build_metrics(request_id, MetricsTime(state, uptime, clock.now()), viewer, metrics_inputs)

    def _memory_subjects(self, models: Sequence[ServedModel]) -> Mapping[str, Sequence[MemorySubject]]:
        return memory_subjects(models, self._process_supervisor.processes, self._process_supervisor.storage.files)

    def _scan_next_process(self, client: bytes, memory_scan: MemoryScan) -> bool:
        """Look at one process more; return whether the answer has been sent."""
        is_done = memory_scan.step()
        if is_done:
            self._reply_status(client, memory_scan)
        return is_done

    def _reply_tenant_status(self, requester: MetadataRequest, viewer: Viewer) -> bool:
        models = list(self._model_registry.models.values())
        response = build_tenant_status(
            requester.request_id, *self._state_and_uptime(), viewer.tenant, models, self._usage_table
        )
        self._request_router.responses.reply(requester.client, response)
        return True

    def report_logs(self, client: bytes, request: Logs) -> None:
        """A client wants to know what the processes of a model have said: it is told once that has been read."""
        if len(self._log_readers) == _MAX_LOG_READERS:
            raise ResourceExhausted(f"{_MAX_LOG_READERS} questions for logs are being answered")
        generations = self._model_registry.models[request.model_name].generations
        files = self._process_supervisor.storage.files
        generation_files = {each.number: files[each.label] for each in generations if each.label in files}
        self._log_readers.append(LogTailReader(client, request, generation_files))
        self._loop.call_soon(self._read_next_log)

    def _read_next_log(self) -> None:
        """Read one file more."""
        if self._log_readers[0].step():
            reader = self._log_readers.pop(0)
            self._request_router.responses.reply(reader.client, reader.response)
        if self._log_readers:
            self._loop.call_soon(self._read_next_log)

    def _own_pids(self) -> list[int]:
        shim_pids = [] if self._shim_launcher is None else [self._shim_launcher.pid]
        return [os.getpid(), *shim_pids, *self._zmq_proxies.pids]

    def _state_and_uptime(self) -> tuple[str, float]:
        return "stopping" if self._shutdown.has_begun else "running", time.monotonic() - self._started_at

    def _reply_status(self, client: bytes, memory_scan: MemoryScan) -> None:
        supervisor, now = self._process_supervisor, clock.now()
        self._update_load_progress(now)
        inputs = StatusInputs(
            self._model_registry.models.values(),
            self._devices.values(),
            supervisor.processes,
            supervisor.storage.files,
            self._request_router.dropped_responses,
            self._request_router.memory_budget.used_bytes,
            self._request_router.memory_budget.max_bytes,
            self._own_pids(),
            self._config_note,
            self._zmq_proxies.proxies,
            supervisor.fork_servers.servers.values(),
            self._tenant_resolver.all_tenants if self._tenant_resolver.has_tenants else (),
            self._usage_table,
            functools.partial(self._load_monitor.progress, now=now),
        )
        self._request_router.responses.reply(client, build_status(memory_scan, *self._state_and_uptime(), inputs))


def _fixed_values(config: Config) -> dict[str, object]:
    """Return what only a start puts in force, by key."""
    fixed: dict[str, object] = {f"daemon.{key}": value for key, value in vars(config.daemon).items()}
    for key in ("drain_timeout", "accounting_interval", "max_batch_seconds"):
        del fixed[f"daemon.{key}"]
    for name, each in config.listeners.items():
        keys = {"address": each.address, "key": each.key, "max_connections": each.max_connections}
        keys["security"] = "" if each.security == NONE else each.security
        fixed.update((f"listeners.{label(name)}.{key}", value) for key, value in keys.items() if value)
    return fixed


def _admitted_tenants(config: Config) -> dict[str, Sequence[str]]:
    """Return the tenants that each listener is for; none: all."""
    return {name: each.tenants for name, each in config.listeners.items()}


def _update_devices(devices: dict[str, DeviceBudget], config: Config) -> None:
    """Add every device that a model of the configuration uses, and set what it has as far as that is given."""
    for name in dict.fromkeys(device for model in config.models.values() for device in model.devices_by_weight_copy):
        device = devices.setdefault(name, DeviceBudget(name))
        if not is_cpu(name):
            given = config.devices.get(name, DeviceConfig())
            # Where nothing is given, what the card has said before stays true.
            device.capacity_bytes = given.memory_mib * MIB or device.reported_bytes
            device.max_processes = given.processes
