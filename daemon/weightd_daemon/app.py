"""Composition root of the daemon: acquires locks, sockets and other resources, and connects the parts.

`run` acquires locks, sockets, signal handlers and the shim, and releases them when the daemon exits. `build` creates
the parts and connects them. `main_loop.py` defines what the daemon does while it runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Generator, Mapping
from typing import NamedTuple

import zmq

from weightd_common.process_attributes import allow_load_priority
from weightd_common.service_manager import CLIENTS, ServiceManager
from weightd_common.terminal import Terminal, ends_on_hangup
from weightd_daemon.api.admin import DaemonControl
from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.api.model_lookup import ModelLookup
from weightd_daemon.api.router import RequestRouter
from weightd_daemon.api.version_sets import ProvenRecord
from weightd_daemon.changed_files import ChangedFiles
from weightd_daemon.channels.service import ChannelService
from weightd_daemon.config.load import Config
from weightd_daemon.config_file import ConfigReader
from weightd_daemon.config_in_force import (
    ConfigInForce,
    TenantServices,
    admitted_tenants,
    lifecycle_limits,
    listener_auth,
    update_devices,
)
from weightd_daemon.counters import CounterRegistry, DaemonCounterRecord, DaemonCounters, ModelCounterRecord
from weightd_daemon.handover.counter_store import CounterEntry, CounterStore
from weightd_daemon.handover.instance_lock import lock_instance
from weightd_daemon.handover.shim_launcher import SHIM, ShimLauncher
from weightd_daemon.handover.systemd import ListenSockets, ManagedService, listen
from weightd_daemon.main_loop import Daemon, Options, Parts
from weightd_daemon.models.factory import ModelFactory
from weightd_daemon.models.interfaces import ClientNotifier
from weightd_daemon.models.lifecycle import ModelLifecycle
from weightd_daemon.models.load_limit import LoadLimiter
from weightd_daemon.models.load_progress import LoadSpeedRecord
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.models.residency.needs import NeedRecord
from weightd_daemon.observability.event_log import EventLog
from weightd_daemon.observability.load_progress import LoadMonitor
from weightd_daemon.observability.memory import MemoryMeter
from weightd_daemon.observability.service import StatusService
from weightd_daemon.observability.snapshot import Books, SnapshotBuilder, SnapshotSources
from weightd_daemon.platform import event_loop, process_spawner
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.platform.connection_limiter import raise_descriptor_limit
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.event_loop import EventLoop, watch_signals
from weightd_daemon.platform.fd_closer import INTERRUPT
from weightd_daemon.platform.memory import host_memory_bytes
from weightd_daemon.platform.resource_limits import check_threads, with_limit_hint
from weightd_daemon.processes.process_table import ProcessTable
from weightd_daemon.processes.supervisor import ProcessSupervisor
from weightd_daemon.reload import Reloader
from weightd_daemon.scheduling.dispatcher import SharedScheduling
from weightd_daemon.shutdown import Shutdown
from weightd_daemon.tenants.reporting import UsageReporter
from weightd_daemon.tenants.tenant import TenantResolver
from weightd_daemon.tenants.usage import UsageRecord, UsageTable
from weightd_daemon.transport.connection import proxied_identity
from weightd_daemon.transport.memory_budget import HeapTrimmer, MemoryBudget
from weightd_daemon.transport.zmq_proxies import ListenerAuth, ProxyLimits, ZmqProxies
from weightd_protocol.version import VERSION

_log = logging.getLogger("weightd")

# Divisor of the host's memory: by default, a quarter of it is the budget for messages from clients and for replies that
# they have not read. The models can use the rest.
_MEMORY_DIVISOR = 4

# Number of threads that libzmq starts in a process with one ZeroMQ context.
_ZEROMQ_THREADS = 2


class Host(NamedTuple):
    """Resources of the operating system that `run` acquires for the daemon and releases when the daemon exits.

    Attributes:
        loop: the event loop of the daemon.
        context: the ZeroMQ context.
        sockets: the listening sockets for clients.
        wakeups: the descriptor from which the daemon reads the numbers of received signals, one byte for each.
        event_log: keeps recent log lines for clients.
        shim: starts the shim or takes it over from the previous daemon; None without a service manager.
        terminal: the state of this process's terminal before the signal handlers were installed.
    """

    loop: EventLoop
    context: zmq.Context[zmq.Socket[bytes]]
    sockets: ListenSockets
    wakeups: int
    event_log: EventLog
    shim: ShimLauncher | None
    terminal: Terminal


def run(options: Options) -> int:
    """Serve until the daemon is shut down; return the exit status.

    Raises:
        PathInUse: a socket or a directory is in use or cannot be created, or a thread cannot be started.
    """
    config, manager = options.config, options.manager
    raise_descriptor_limit()
    allow_load_priority()
    check_threads(_ZEROMQ_THREADS)
    try:
        process_spawner.start_thread()
    except OSError as error:
        raise PathInUse(with_limit_hint(f"cannot start the process spawner thread: {error}")) from None
    signal_numbers = [signal.SIGTERM, signal.SIGINT, INTERRUPT]
    # With a configuration file, SIGHUP reloads the file, even under nohup. Without a file, SIGHUP shuts the daemon
    # down, except if the parent process has set SIGHUP to be ignored (nohup).
    if options.file is not None or ends_on_hangup():
        signal_numbers.append(signal.SIGHUP)
    terminal, event_log = Terminal(), EventLog()
    with (
        lock_instance(config.daemon, keep_private_dir=manager.is_present),
        listen(config, manager.inherited.get(CLIENTS, [])) as sockets,
        watch_signals(signal_numbers) as wakeups,
        event_log.capture_logs(),
        _shim(manager, config) as shim,
        contextlib.closing(EventLoop()) as loop,
        _zmq_context() as context,
    ):
        return build(options, Host(loop, context, sockets, wakeups, event_log, shim, terminal)).serve(shim)


@contextlib.contextmanager
def _shim(manager: ServiceManager, config: Config) -> Generator[ShimLauncher | None, None, None]:
    if not manager.is_present:
        # An earlier daemon ran under a service manager and has left its shim, which exits once these inherited
        # descriptors are closed.
        for descriptor in manager.inherited.get(SHIM, []):
            os.close(descriptor)
        yield None
        return
    with contextlib.closing(ShimLauncher(manager, config.daemon)) as shim:
        yield shim


@contextlib.contextmanager
def _zmq_context() -> Generator[zmq.Context[zmq.Socket[bytes]], None, None]:
    context = zmq.Context()
    try:
        yield context
    finally:
        context.destroy()


def build(options: Options, host: Host) -> Daemon:
    """Create and connect the parts of a daemon. The daemon loads no models and reads no requests before `Daemon.serve`.

    Two parts that need each other cannot both be created first. So one gets a lambda, which looks up the other part
    only when the lambda is called.
    """
    config, loop, file = options.config, host.loop, options.file
    devices: dict[str, DeviceBudget] = {}
    update_devices(devices, config)
    tenants = TenantResolver(config.tenants)
    books = Books(UsageTable(), CounterRegistry(), DaemonCounters(lambda: router.dropped_responses))
    client_log = ClientLog()
    shutdown = Shutdown(lambda now: daemon.finish_drain(now))
    supervisor = ProcessSupervisor(
        host.context,
        config.daemon,
        loop,
        devices,
        host.shim,
        on_change=lambda: daemon.on_change(),
        on_message_burst=lambda: router.cork(),
        on_direct_report=lambda name, message, frames: channels.on_report(name, message, frames),
    )
    load_monitor = LoadMonitor(supervisor.snapshots.copy_progress)
    lifecycle = ModelLifecycle(
        lifecycle_limits(config),
        lambda name: registry.models.get(name),
        devices,
        books.usage_table.add_resident_time,
        MemoryMeter(lambda name: snapshots.memory_subjects(name)).poll,
    )
    channels = ChannelService(
        supervisor.messenger.send_descriptors,
        lambda: router.channels,
        lambda name, now: registry.on_used(name, now),
    )
    scheduling = SharedScheduling(client_log=client_log, counters_of=books.counters.counters_of, direct=channels)
    registry = ModelRegistry(
        ModelFactory(
            devices,
            supervisor,
            lambda: ClientNotifier(router.responses, router.admin),
            loop.add_timer,
            scheduling,
            LoadLimiter(),
            lifecycle,
        ).make
    )
    lookup = ModelLookup(registry)
    authorizer = Authorizer(tenants, books.usage_table, admitted_tenants(config))
    max_memory_bytes = config.daemon.max_memory_bytes or host_memory_bytes() // _MEMORY_DIVISOR
    memory_budget = MemoryBudget(
        max_memory_bytes,
        lambda client: router.user_of(client),
        lambda: heap_trimmer.on_large_message(event_loop.now()),
    )
    heap_trimmer = HeapTrimmer(memory_budget)
    proxies = ZmqProxies(
        {name: (each, listener_auth(config, name)) for name, each in host.sockets.zmq_listeners.items()},
        loop,
        lambda name, connection, peer: router.adopt(connection, proxied_identity(connection, name, peer)),
        ProxyLimits(max_memory_bytes, config.daemon.user_limits),
        client_log,
        options.zygote,
    )
    service = None
    if host.shim is not None:
        service = ManagedService(
            options.manager,
            host.shim,
            registry,
            supervisor,
            devices,
            rollout_records=lookup.rollout_records,
            load_monitor=load_monitor,
            shutdown=shutdown,
            config_note=options.config_note,
            on_failed=lambda now: daemon.stop(now),
        )
    usage_reporter = UsageReporter(tenants, books.usage_table, lambda: registry.models)

    def on_tenants_changed(auths: Mapping[str, ListenerAuth]) -> None:
        proxies.update_auth(auths)
        router.on_tenants_changed()

    in_force = ConfigInForce(
        config,
        devices,
        registry,
        supervisor,
        TenantServices(tenants, authorizer, usage_reporter, scheduling.clocks, on_tenants_changed),
        lifecycle,
        lookup=lookup,
        counters=books.counters,
        on_applied=lambda: daemon.schedule_reconcile(),
    )
    reloader = Reloader(
        file,
        ConfigReader(ProcessTable(loop)),
        in_force,
        loop,
        books.daemon_counters,
        shutdown=shutdown,
        service=service,
        terminal=host.terminal,
    )
    snapshots = SnapshotBuilder(
        SnapshotSources(
            registry,
            lookup.version_sets,
            supervisor,
            devices,
            load_monitor,
            books,
            tenants,
            memory_budget,
            proxies,
            shutdown,
            lifecycle,
            options.config_note,
            channels,
            [] if host.shim is None else [host.shim],
        )
    )
    status = StatusService(snapshots, host.event_log, loop, lambda: router.responses)
    router = RequestRouter(
        loop,
        lookup,
        memory_budget,
        DaemonControl(
            status, reloader.request, supervisor.messenger.unmap, lifecycle, supervisor.mark_changed, channels
        ),
        max_shm_bytes=config.daemon.max_shm_bytes or host_memory_bytes() // _MEMORY_DIVISOR,
        user_limits=config.daemon.user_limits,
        authorizer=authorizer,
        log=client_log,
    )
    for listener in host.sockets.unix_listeners:
        router.listen(listener)
    counter_store = CounterStore(
        config.daemon.counters_file, _counter_entries(books, load_monitor, lifecycle, lookup), loop.call_soon
    )
    parts = Parts(
        loop,
        shutdown,
        supervisor,
        load_monitor,
        registry,
        router,
        proxies,
        status,
        in_force,
        reloader,
        ChangedFiles(registry, supervisor.snapshots),
        counter_store,
        service,
    )
    daemon = Daemon(options, parts)
    for timer in (
        heap_trimmer.timer,
        channels.timer,
        *usage_reporter.timers,
        counter_store.timer,
        reloader.timer,
        reloader.repository_timer,
        parts.changed_files.timer,
        status.timer,
        shutdown.timer,
        lifecycle.timer,
        *(() if service is None else (service.timer,)),
    ):
        loop.add_timer(timer)
    loop.on_suspended(daemon.on_suspended)
    loop.add(host.wakeups, lambda: daemon.on_signals(os.read(host.wakeups, 64)))
    _log.info("weightd %s, pid %d, listens on %s", VERSION, os.getpid(), ", ".join(host.sockets.addresses))
    return daemon


def _counter_entries(
    books: Books, load_monitor: LoadMonitor, lifecycle: ModelLifecycle, lookup: ModelLookup
) -> dict[str, CounterEntry]:
    return {
        "account": CounterEntry(books.usage_table, UsageRecord),
        "model": CounterEntry(books.counters, ModelCounterRecord),
        "daemon": CounterEntry(books.daemon_counters, DaemonCounterRecord),
        "load": CounterEntry(load_monitor, LoadSpeedRecord),
        "need": CounterEntry(lifecycle.needs, NeedRecord),
        "proven": CounterEntry(lookup.proven, ProvenRecord),
    }
