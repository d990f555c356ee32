"""Reload of the configuration, requested by SIGHUP (see `Daemon.on_signals`) or by a client.

A reload has three steps: `Reloader.request` (or `on_hangup`) queues it, a helper process reads and validates the file
(`config_file.py`), and `ConfigInForce.apply` compares the result with the configuration in force and applies the
difference. An invalid file changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from weightd_common.devices import is_cpu
from weightd_common.terminal import Terminal
from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.config.devices import DeviceConfig
from weightd_daemon.config.listeners import NONE, allowed_keys
from weightd_daemon.config.load import Config, ConfigError
from weightd_daemon.config_file import ConfigFile, ConfigReader, ReadConfig
from weightd_daemon.counters import CounterRegistry, DaemonCounters
from weightd_daemon.handover.state import Handover
from weightd_daemon.handover.systemd import ManagedService
from weightd_daemon.models.lifecycle import LifecycleLimits, ModelLifecycle
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.registry import ConfigDiff, ModelRegistry
from weightd_daemon.platform import audit, cgroup, event_loop
from weightd_daemon.platform.event_loop import EventLoop, Timer
from weightd_daemon.platform.memory import MIB
from weightd_daemon.processes.supervisor import ProcessSupervisor
from weightd_daemon.scheduling.fair_share import FairClocks
from weightd_daemon.shutdown import Shutdown
from weightd_daemon.tenants.reporting import UsageReporter
from weightd_daemon.tenants.tenant import TenantResolver, tenant_members
from weightd_daemon.transport.zmq_proxies import ListenerAuth
from weightd_protocol.errors import InvalidArgument, RequestError, ResourceExhausted, Unavailable
from weightd_protocol.schema import label

_log = logging.getLogger("weightd")

# Limit of queued reloads. One read of the file serves all of them.
_MAX_RELOADS = 16

# Time for reading the file and checking the files that it names; a file system may not answer.
_READ_TIMEOUT_S = 60.0
_NEVER = float("inf")

# The keys of [daemon] that a reload applies.
_RELOADABLE_KEYS = (
    "drain_timeout",
    "accounting_interval",
    "max_batch_seconds",
    "max_model_bytes",
    "min_resident",
    "max_load_queue",
)

OnReloaded = Callable[[ConfigDiff | RequestError], object]


class _Waiter(NamedTuple):
    """A queued reload.

    Attributes:
        on_done: called with the changes, or with the error.
        is_dry_run: whether the changes are only reported.
    """

    on_done: OnReloaded
    is_dry_run: bool


class Reloader:
    """Queue of reloads: reads the configuration file once for all queued reloads, and reports the outcome to each.

    Args:
        file: the file to read; None if weightd was started without one.
        reader: reads the file in a helper process.
        in_force: applies the result.
        loop: starts the read at the end of the current turn.
        counters: count successful and failed reloads.
        shutdown: no reload starts after the daemon has begun to stop.
        service: reports reloads by SIGHUP to the service manager; None without one.
        terminal: the terminal of this process, as it was before the handler of SIGHUP was installed.

    Attributes:
        timer: kills a helper process that takes too long.
    """

    def __init__(  # noqa: PLR0913
        self,
        file: ConfigFile | None,
        reader: ConfigReader,
        in_force: ConfigInForce,
        loop: EventLoop,
        counters: DaemonCounters,
        *,
        shutdown: Shutdown,
        service: ManagedService | None,
        terminal: Terminal,
    ) -> None:
        self._file = file
        self._reader = reader
        self._in_force = in_force
        self._loop = loop
        self._counters = counters
        self._shutdown = shutdown
        self._service = service
        self._terminal = terminal
        self.timer = Timer(lambda _: reader.abort())
        # The reloads that the current read serves, and the reloads that wait for the next read.
        self._active: list[_Waiter] = []
        self._pending: list[_Waiter] = []

    @property
    def is_possible_by_hangup(self) -> bool:
        """Whether SIGHUP requests a reload. Without a file, or after the terminal has closed, it stops the daemon."""
        return self._file is not None and not self._terminal.has_closed()

    def on_hangup(self) -> None:
        """Reload after a SIGHUP; report the outcome in the log, in the audit log and to the service manager."""
        service = self._service if self._service is not None and self._service.begin_reload() else None

        def on_done(outcome: ConfigDiff | RequestError) -> None:
            entry = audit.AuditEntry("reload", audit.OPERATOR)
            if isinstance(outcome, RequestError):
                _log.error("reload failed, nothing changed: %s", outcome)
                audit.write(entry, audit.FAILED, str(outcome))
            else:
                audit.write(entry, audit.OK)
            if service is not None:
                service.end_reload()

        try:
            self.request(on_done)
        except RequestError as error:
            on_done(error)

    def request(self, on_done: OnReloaded, is_dry_run: bool = False) -> None:
        """Queue a reload; call `on_done` once the file is in force or has been rejected.

        A dry run only reports what would change.

        Raises:
            InvalidArgument: weightd was started without a file. `on_done` is not called.
            Unavailable: weightd is stopping. `on_done` is not called.
            ResourceExhausted: too many reloads are queued. `on_done` is not called.
        """
        if self._file is None:
            raise InvalidArgument("weightd was started without a configuration file: there is nothing to reload")
        if self._shutdown.has_begun:
            raise Unavailable("weightd is stopping")
        if len(self._pending) == _MAX_RELOADS:
            raise ResourceExhausted(f"{_MAX_RELOADS} reloads are queued already")
        self._pending.append(_Waiter(on_done, is_dry_run))
        if len(self._pending) == 1:
            self._loop.call_soon(self._start_read)

    def abort(self) -> None:
        """Kill the helper process, if one runs."""
        self._reader.abort()

    def _start_read(self) -> None:
        """Read the file for all queued reloads; a reload that is requested later starts another read."""
        if self._file is None or self._active or not self._pending:
            return
        self._active, self._pending = self._pending, []
        try:
            self._reader.start(self._file.path, self._file.listen_addresses, self._on_read)
        except OSError as error:
            text = f"{self._file.path}: cannot start the process that reads the file: {error.strerror}"
            self._on_read(ReadConfig(problems=(text,)))
        else:
            self.timer.set(event_loop.now() + _READ_TIMEOUT_S)

    def _on_read(self, result: ReadConfig) -> None:
        self.timer.set(_NEVER)
        waiting, self._active = self._active, []
        for is_dry_run in (True, False):
            on_done = [each.on_done for each in waiting if each.is_dry_run is is_dry_run]
            if on_done:
                outcome = self._outcome(result, is_dry_run=is_dry_run)
                for each in on_done:
                    each(outcome)
        self._start_read()

    def _outcome(self, result: ReadConfig, *, is_dry_run: bool) -> ConfigDiff | RequestError:
        try:
            diff = self._apply(result, is_dry_run=is_dry_run)
        except RequestError as error:
            self._counters.refused_reloads += not is_dry_run
            return error
        self._counters.reloads += not is_dry_run
        return diff

    def _apply(self, result: ReadConfig, *, is_dry_run: bool) -> ConfigDiff:
        """Put the result of a read in force.

        Raises:
            InvalidArgument: the file is invalid; nothing has changed.
            Unavailable: weightd is stopping, or a model is being updated; nothing has changed.
        """
        file = self._file
        if file is None or self._shutdown.has_begun:
            raise Unavailable("weightd is stopping")
        try:
            config = file.accept(result)
            if is_dry_run:
                return self._in_force.compare(file.path, config, result.model_problems)
            diff = self._in_force.apply(file.path, config, result.model_problems, event_loop.now())
        except ConfigError as error:
            if not is_dry_run:
                file.note = f"not reloaded: {error}"
            raise InvalidArgument(str(error)) from None
        file.note = ""
        if self._service is not None:
            file.mark_in_force()
        _log.info("reloaded %s: %s", file.path, diff)
        return diff


class TenantServices(NamedTuple):
    """The parts that depend on the tenants of the configuration and on usage accounting.

    Attributes:
        resolver: finds the tenant of a peer.
        authorizer: keeps the tenants that each listener admits.
        usage_reporter: keeps and logs the usage of the configured tenants.
        fair_clocks: divide execution slots among tenants.
        on_changed: called with the authentication of each listener after tenants or their listeners have changed.
    """

    resolver: TenantResolver
    authorizer: Authorizer
    usage_reporter: UsageReporter
    fair_clocks: FairClocks
    on_changed: Callable[[Mapping[str, ListenerAuth]], object]


class ConfigInForce:
    """The configuration in force; applies another one to the running parts of the daemon.

    Args:
        config: the configuration at the start.
        devices: the devices that models use, by name.
        registry: the models.
        supervisor: keeps fork servers for the engines that models need.
        tenants: the parts that depend on the tenants.
        lifecycle: loads and unloads models within the configured budgets.
        counters: keeps counters for the configured models.
        on_applied: called after another configuration was applied.

    Attributes:
        config: the configuration in force.
    """

    def __init__(  # noqa: PLR0913
        self,
        config: Config,
        devices: MutableMapping[str, DeviceBudget],
        registry: ModelRegistry,
        supervisor: ProcessSupervisor,
        tenants: TenantServices,
        lifecycle: ModelLifecycle,
        *,
        counters: CounterRegistry,
        on_applied: Callable[[], object],
    ) -> None:
        self.config = config
        self._devices = devices
        self._registry = registry
        self._supervisor = supervisor
        self._tenants = tenants
        self._lifecycle = lifecycle
        self._counters = counters
        self._on_applied = on_applied

    def apply(self, path: Path, config: Config, model_problems: Mapping[str, Sequence[str]], now: float) -> ConfigDiff:
        """Apply another configuration; return how the set of models has changed.

        Args:
            path: the path of the file, for errors.
            config: the configuration to apply.
            model_problems: by model, errors in the files that the model names.
            now: monotonic seconds.

        Raises:
            ConfigError: a key has changed that needs a restart, or a file of an added or changed model has an error.
            Unavailable: a model that would change is being updated.
        """
        diff = self.compare(path, config, model_problems)
        update_devices(self._devices, config)
        self._supervisor.fork_servers.reconcile(config.models.values())
        self._registry.apply(diff, config.models, now)
        previous, self.config = self.config, config
        if (config.tenants, admitted_tenants(config)) != (previous.tenants, admitted_tenants(previous)):
            self._tenants.resolver.configure(config.tenants)
            self._tenants.authorizer.listener_tenants = admitted_tenants(config)
            self._tenants.on_changed({name: listener_auth(config, name) for name in config.listeners})
        self._lifecycle.configure(lifecycle_limits(config))
        self._on_applied()
        self.apply_accounting(now)
        return diff

    def compare(self, path: Path, config: Config, model_problems: Mapping[str, Sequence[str]]) -> ConfigDiff:
        """Return the changes that `apply` would make; raise what it would raise."""
        self._check_fixed_keys(path, config)
        diff = self._registry.compare(config.models)
        # Loaded models serve from their snapshots, so only the others need their files.
        unloaded = [name for name, model in self._registry.models.items() if model.loading.is_unloaded]
        needed = dict.fromkeys((*diff.added, *diff.changed, *diff.retried, *unloaded))
        problems = [each for name in needed for each in model_problems.get(name, ())]
        if problems:
            raise ConfigError(*problems)
        return diff

    @property
    def drain_timeout_s(self) -> float:
        """How many seconds a stopping daemon waits for accepted requests to finish."""
        return self.config.daemon.drain_timeout

    def adopt_devices(self, handover: Handover) -> None:
        """Take over the devices of the previous daemon, with the memory figures that their drivers have reported."""
        for record in handover.models:
            for name in record.config.devices_by_weight_copy:
                self._devices.setdefault(name, DeviceBudget(name))
        for reported in handover.devices:
            device = self._devices.setdefault(reported.name, DeviceBudget(reported.name))
            device.reported_bytes, device.free_bytes = reported.capacity_bytes, reported.free_bytes
            device.capacity_bytes = device.capacity_bytes or device.reported_bytes

    def apply_accounting(self, now: float) -> None:
        """Drop the counters of removed models and tenants; apply the settings of usage accounting and fair sharing."""
        self._counters.keep_only(self._registry.models)
        self._tenants.fair_clocks.max_batch_s = self.config.daemon.max_batch_seconds
        self._tenants.usage_reporter.configure(self.config.daemon.accounting_interval, now)

    def _check_fixed_keys(self, path: Path, config: Config) -> None:
        old_values, new_values = _fixed_values(self.config), _fixed_values(config)
        differ = [
            f"{path}: {key}: expected {old_values.get(key)!r} as before, got {new_values.get(key)!r}; restart weightd"
            for key in {**old_values, **new_values}
            if old_values.get(key) != new_values.get(key)
        ]
        if differ:
            raise ConfigError(*differ)


def listener_auth(config: Config, name: str) -> ListenerAuth:
    """Return which clients may connect to a listener of the configuration, and how they authenticate."""
    listener = config.listeners[name]
    return ListenerAuth(
        listener.secret,
        allowed_keys(listener, config.tenants),
        listener.max_connections,
        tenant_members(config.tenants, listener.tenants) if config.tenants else None,
    )


def admitted_tenants(config: Config) -> dict[str, Sequence[str]]:
    """Return the tenants that each listener admits; an empty sequence admits all."""
    return {name: each.tenants for name, each in config.listeners.items()}


def lifecycle_limits(config: Config) -> LifecycleLimits:
    """Return the limits for loading and unloading models."""
    daemon, tenants = config.daemon, config.tenants
    return LifecycleLimits(
        daemon.max_model_bytes,
        {name: each.max_model_bytes for name, each in tenants.items() if each.max_model_bytes},
        {name: each.weight for name, each in tenants.items()},
        daemon.min_resident,
        daemon.max_load_queue,
        max(1, cgroup.usable_core_count() // 2),  # the other cores serve meanwhile
        daemon.drain_timeout,
    )


def update_devices(devices: MutableMapping[str, DeviceBudget], config: Config) -> None:
    """Add every device that a model of the configuration uses, and set its limits from the configuration."""
    for name in dict.fromkeys(device for model in config.models.values() for device in model.devices_by_weight_copy):
        device = devices.setdefault(name, DeviceBudget(name))
        if not is_cpu(name):
            given = config.devices.get(name, DeviceConfig())
            # Without a configured size, the size that the card's driver has reported stays in force.
            device.capacity_bytes = given.memory_mib * MIB or device.reported_bytes
            device.max_processes = given.processes


def _fixed_values(config: Config) -> dict[str, object]:
    """Return the values, by key, of the settings that only a restart can change."""
    fixed: dict[str, object] = {f"daemon.{key}": value for key, value in vars(config.daemon).items()}
    for key in _RELOADABLE_KEYS:
        del fixed[f"daemon.{key}"]
    for name, each in config.listeners.items():
        keys = {"address": each.address, "key": each.key, "max_connections": each.max_connections}
        keys["security"] = "" if each.security == NONE else each.security
        fixed.update((f"listeners.{label(name)}.{key}", value) for key, value in keys.items() if value)
    return fixed
