"""The configuration in force, and its replacement by another one while the daemon runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from weightd_common.devices import is_cpu
from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.api.model_lookup import ModelLookup
from weightd_daemon.config.devices import DeviceConfig
from weightd_daemon.config.listeners import NONE, allowed_keys
from weightd_daemon.config.load import Config, ConfigError
from weightd_daemon.counters import CounterRegistry
from weightd_daemon.handover.state import Handover
from weightd_daemon.models.lifecycle import LifecycleLimits, ModelLifecycle
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.registry import ConfigDiff, ModelRegistry
from weightd_daemon.models.residency.snapshot_cache import CachedModel, excess_models
from weightd_daemon.platform import cgroup
from weightd_daemon.platform.memory import MIB
from weightd_daemon.processes.supervisor import ProcessSupervisor
from weightd_daemon.repository import (
    keep_handed_over,
    keep_unreadable,
    log_problems,
    select_models,
    unproven_versions,
)
from weightd_daemon.scheduling.fair_share import FairClocks
from weightd_daemon.tenants.reporting import UsageReporter
from weightd_daemon.tenants.tenant import TenantResolver, tenant_members
from weightd_daemon.transport.zmq_proxies import ListenerAuth
from weightd_protocol.errors import RequestError, Unavailable
from weightd_protocol.schema import label

# The keys of [daemon] that a reload applies; a change of any other key of [daemon] needs a restart.
_RELOADABLE_KEYS = (
    "drain_timeout",
    "accounting_interval",
    "max_batch_seconds",
    "max_model_bytes",
    "cache_bytes",
    "min_resident",
    "max_load_queue",
)


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
        lookup: finds the models that clients name.
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
        lookup: ModelLookup,
        counters: CounterRegistry,
        on_applied: Callable[[], object],
    ) -> None:
        self.config = config
        self._devices = devices
        self._registry = registry
        self._lookup = lookup
        # The versions of the repository that `reselect` has tried to load; it tries each of them only once.
        self._attempted: set[str] = set()
        self._supervisor = supervisor
        self._tenants = tenants
        self._lifecycle = lifecycle
        self._counters = counters
        self._on_applied = on_applied

    def apply(
        self,
        path: Path,
        config: Config,
        model_problems: Mapping[str, Sequence[str]],
        now: float,
        *,
        retries: bool = True,
    ) -> ConfigDiff:
        """Apply another configuration; return how the set of models has changed.

        Args:
            path: the path of the file, for errors.
            config: the configuration to apply.
            model_problems: by model, errors in the files that the model names.
            now: monotonic seconds.
            retries: whether to load failed models again that have not changed.

        Raises:
            ConfigError: a key has changed that needs a restart, or a file of an added or changed model has an error.
            Unavailable: a model that would change is being updated.
        """
        diff = self.compare(path, config, model_problems, retries=retries)
        previous, self.config = self.config, keep_unreadable(config, self.config)
        log_problems(config, previous.repository_problems)
        self._apply_models(diff, select_models(self.config, self._registry.models, self._lookup.proven), now)
        if (config.tenants, admitted_tenants(config)) != (previous.tenants, admitted_tenants(previous)):
            self._tenants.resolver.configure(config.tenants)
            self._tenants.authorizer.listener_tenants = admitted_tenants(config)
            self._tenants.on_changed({name: listener_auth(config, name) for name in config.listeners})
        self._lifecycle.configure(lifecycle_limits(config))
        self._on_applied()
        self.apply_accounting(now)
        return diff

    def compare(
        self, path: Path, config: Config, model_problems: Mapping[str, Sequence[str]], *, retries: bool = True
    ) -> ConfigDiff:
        """Return the changes that `apply` would make; raise what it would raise."""
        self._check_fixed_keys(path, config)
        selected = select_models(keep_unreadable(config, self.config), self._registry.models, self._lookup.proven)
        diff = self._registry.compare(selected.models)
        needed = dict.fromkeys((*diff.added, *diff.changed))
        if retries:
            # Loaded models serve from their snapshots, so only the others need their files.
            unloaded = [name for name, model in self._registry.models.items() if model.loading.is_unloaded]
            needed.update(dict.fromkeys((*diff.retried, *unloaded)))
        problems = [each for name in needed for each in model_problems.get(name, ())]
        if problems:
            raise ConfigError(*problems)
        return diff if retries else diff._replace(retried=())

    @property
    def drain_timeout_s(self) -> float:
        """How many seconds a daemon that shuts down waits for accepted requests to finish."""
        return self.config.daemon.drain_timeout

    def reselect(self, now: float) -> None:
        """Select again which versions in the repository serve, because a version may be ready now or have failed."""
        if self.config.repository is None:
            return
        selected = select_models(self.config, self._registry.models, self._lookup.proven)
        if selected.models.keys() != self._registry.models.keys():
            with contextlib.suppress(Unavailable):  # one of them is being updated, which calls this method at its end
                diff = self._registry.compare(selected.models)._replace(changed=(), retried=())
                self._apply_models(diff, selected, now)
        for model in unproven_versions(self.config, self._registry.models, self._lookup.proven):
            if model.name not in self._attempted:
                # A refused load, if too many models wait for memory for example, is tried again at the next change.
                with contextlib.suppress(RequestError):
                    self._lifecycle.load(model, "", lambda error: None, "a new version in the repository")
                    self._attempted.add(model.name)

    def trim_cache(self) -> None:
        """Remove snapshots of models that are not loaded, until the other snapshots fit into the limit of the cache."""
        max_bytes = self.config.daemon.cache_bytes
        if not max_bytes:
            return
        cached: list[CachedModel] = []
        for model in self._registry.all_models():
            nbytes = sum(each.snapshot.nbytes for each in model.versions.snapshots.ready())
            if nbytes:
                # A model that is no longer configured removes its snapshots itself, so it counts as in use here.
                is_leaving = self._registry.models.get(model.name) is not model
                is_in_use = is_leaving or not model.loading.is_unloaded or bool(model.deployments.generations)
                cached.append(CachedModel(model.name, nbytes, model.loading.last_used_at, is_in_use))
        for name in excess_models(cached, max_bytes):
            self._registry.models[name].versions.forget_snapshots()

    def update_fork_servers(self, loaded_models: Iterable[ServedModel], now: float) -> None:
        """Start the fork servers of loading models; stop those whose models have been unloaded for some time."""
        configs = [each.config for each in loaded_models if not each.is_draining]
        self._supervisor.fork_servers.reconcile(configs, now)

    def _apply_models(self, diff: ConfigDiff, selected: Config, now: float) -> None:
        update_devices(self._devices, selected)
        self._lookup.configure(selected.version_sets)
        self._registry.apply(diff, selected.models, now)
        self._attempted.intersection_update(set(selected.models) - {*diff.changed})

    def start_models(self, handover: Handover | None, now: float) -> None:
        """Start the models, and take over the models that the previous daemon has loaded."""
        records, rollouts = ((), ()) if handover is None else (handover.models, handover.rollouts)
        self.config = keep_handed_over(self.config, records)
        log_problems(self.config, {})
        selected = select_models(self.config, {}, self._lookup.proven, records)
        # The fork servers come first: they import their engines while the models' snapshots are taken.
        self._supervisor.fork_servers.reconcile([each for each in selected.models.values() if each.loads_at_start], now)
        self._lookup.configure(selected.version_sets, rollouts)
        if handover is not None:
            self._registry.resume(records, selected.models, now)
        else:
            self._registry.start(selected.models, now)

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
        max(1, cgroup.usable_core_count() // 2),  # half of the cores load models; the others serve
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
