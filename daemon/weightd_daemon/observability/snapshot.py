"""Responses with the state of the daemon at one moment: complete, or limited to the data of one tenant.

`SnapshotBuilder` is the only code that collects this state. Metrics consist of numbers that the daemon keeps up to
date. A status also has values that the kernel must measure first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from weightd_common.devices import is_cpu
from weightd_daemon.channels.service import ChannelService
from weightd_daemon.counters import ROWS_BOUNDS, SECONDS_BOUNDS, CounterRegistry, DaemonCounters
from weightd_daemon.engines.ranktable import card_bytes
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.process import WorkerProcess
from weightd_daemon.generations.progress import describe_selftest
from weightd_daemon.models import batching
from weightd_daemon.models.lifecycle import ModelLifecycle
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.models.residency.reservations import HOST
from weightd_daemon.observability.load_progress import LoadMonitor, copied_text
from weightd_daemon.observability.memory import (
    Measurable,
    MemoryFootprint,
    MemoryReport,
    MemorySampler,
    MemoryScan,
    MemorySubject,
    memory_subject,
    memory_subjects,
)
from weightd_daemon.observability.model_metrics import (
    model_metrics,
    queued_counts,
    role_of,
    tenant_model_metrics,
    tenant_model_status,
)
from weightd_daemon.platform import cgroup, event_loop
from weightd_daemon.platform.processes import ChildProcess
from weightd_daemon.processes.files import GenerationFiles
from weightd_daemon.processes.fork_servers import ForkServer
from weightd_daemon.processes.supervisor import ProcessSupervisor
from weightd_daemon.scheduling.measurements import ExecutionCounters
from weightd_daemon.shutdown import Shutdown
from weightd_daemon.tenants.reporting import QueuedCounts, tenant_statuses
from weightd_daemon.tenants.tenant import Tenant, TenantResolver, Viewer
from weightd_daemon.tenants.usage import UsageTable
from weightd_daemon.transport.memory_budget import MemoryBudget
from weightd_daemon.transport.zmq_proxies import ProxyInfo, ZmqProxies
from weightd_protocol import limits
from weightd_protocol.codec import clip
from weightd_protocol.messages.accounts import TenantStatus
from weightd_protocol.messages.metrics import MetricsResponse, ReloadCounts
from weightd_protocol.messages.status import (
    DeviceStatus,
    ExecutionsStatus,
    ForkServerStatus,
    GenerationStatus,
    ModelStatus,
    ProcessStatus,
    ProxyStatus,
    RowsCount,
    StatusResponse,
    VersionSetStatus,
    WorkersStatus,
)
from weightd_protocol.version import VERSION


class Books(NamedTuple):
    """Counters that survive restarts of the daemon.

    Attributes:
        usage_table: the usage of tenants.
        counters: the counters of each model.
        daemon_counters: the counters of the daemon.
    """

    usage_table: UsageTable
    counters: CounterRegistry
    daemon_counters: DaemonCounters


class ShimView(Protocol):
    """The shim, as far as a snapshot needs it: its pid."""

    @property
    def pid(self) -> int:
        """The process id of the shim."""
        ...


@dataclass(frozen=True)
class SnapshotSources:
    """The parts of a daemon whose state a snapshot contains.

    Attributes:
        registry: the models.
        version_sets: returns the status of the models with several versions that a tenant can see; for None, of all
            such models.
        supervisor: child processes, their files, and the fork servers.
        devices: the devices of all models, by name.
        load_monitor: the progress of models that are loading.
        books: the persistent counters.
        tenants: the tenants.
        memory_budget: the budget for memory that is held for clients.
        proxies: the proxies of the ZeroMQ listeners.
        shutdown: knows whether the daemon is shutting down.
        lifecycle: knows how much memory is reserved for each model.
        config_note: returns why the configuration in force differs from the configuration file; "" if it does not.
        channels: counts the requests of direct channels.
        shims: the shim, as the only entry; empty if the daemon has no shim.
    """

    registry: ModelRegistry
    version_sets: Callable[[Tenant | None], tuple[VersionSetStatus, ...]]
    supervisor: ProcessSupervisor
    devices: Mapping[str, DeviceBudget]
    load_monitor: LoadMonitor
    books: Books
    tenants: TenantResolver
    memory_budget: MemoryBudget
    proxies: ZmqProxies
    shutdown: Shutdown
    lifecycle: ModelLifecycle
    config_note: Callable[[], str]
    channels: ChannelService
    shims: Sequence[ShimView] = ()


class SnapshotBuilder:
    """Builds status and metrics responses from the current state of the daemon.

    Args:
        sources: the parts of the daemon from which the state is collected.
        sampler: measures the memory of processes for metrics.
    """

    def __init__(self, sources: SnapshotSources, sampler: MemorySampler | None = None) -> None:
        self._sources = sources
        self._sampler = sampler or MemorySampler()
        self._started_at = time.monotonic()

    def measured(self) -> list[Measurable]:
        """Return the processes and page stores whose memory is part of the complete status."""
        supervisor = self._sources.supervisor
        pids = [*self._daemon_pids(), *(process.pid for process in supervisor.processes.values())]
        return [*pids, *(each.store for each in supervisor.storage.files.values())]

    def log_files(self, model: str) -> dict[int, GenerationFiles]:
        """Return the files of each generation of a model, by generation number."""
        files = self._sources.supervisor.storage.files
        generations = self._sources.registry.models[model].generations
        return {each.number: files[each.label] for each in generations if each.label in files}

    def memory_subjects(self, model: str) -> Sequence[MemorySubject]:
        """Return the `MemorySubject` of each generation of a model; empty for an unknown model."""
        sources = self._sources
        found = sources.registry.models.get(model)
        models = [] if found is None else [found]
        return memory_subjects(models, sources.supervisor.processes, sources.supervisor.storage.files).get(model, ())

    def status(self, memory_scan: MemoryScan) -> StatusResponse:
        """Return the complete status, with the memory of processes that `memory_scan` has measured."""
        sources = self._sources
        sources.channels.count()
        supervisor, models = sources.supervisor, list(sources.registry.models.values())
        sources.load_monitor.update(sources.registry.all_models(), event_loop.now())
        return StatusResponse(
            id=memory_scan.request_id,
            version=VERSION,
            state=self._state,
            pid=os.getpid(),
            uptime_s=self._uptime_s,
            pss_bytes=sum(memory_scan.pss_bytes(pid) or 0 for pid in self._daemon_pids()),
            models=tuple(_model_status(model, memory_scan, sources) for model in models),
            devices=tuple(_device_status(device) for device in sources.devices.values() if not is_cpu(device.name)),
            dropped_responses=sources.books.daemon_counters.dropped_by_this_daemon,
            memory=cgroup.memory(),
            note=clip(sources.config_note()),
            buffered_bytes=sources.memory_budget.used_bytes,
            max_memory_bytes=sources.memory_budget.max_bytes,
            zmq_proxies=tuple(_proxy_status(each, memory_scan) for each in sources.proxies.proxies),
            fork_servers=tuple(
                _fork_server_status(each, memory_scan, supervisor.processes)
                for each in supervisor.fork_servers.servers.values()
            ),
            tenants=self._tenant_statuses(models) if sources.tenants.has_tenants else (),
            model_bytes=sources.lifecycle.reservations.reserved_bytes(HOST),
            max_model_bytes=sources.lifecycle.reservations.budgets.capacities.get(HOST, 0),
            version_sets=sources.version_sets(None),
        )

    def tenant_status(self, request_id: str, tenant: Tenant) -> StatusResponse:
        """Return the status for one tenant, without processes, paths, memory and other tenants."""
        models, queued, tenants = self._own(tenant)
        return StatusResponse(
            id=request_id,
            version=VERSION,
            state=self._state,
            pid=0,
            uptime_s=self._uptime_s,
            pss_bytes=0,
            models=tuple(
                tenant_model_status(model, tenant, self._sources.books.usage_table, queued) for model in models
            ),
            tenants=tenants,
            version_sets=self._sources.version_sets(tenant),
        )

    def metrics(self, request_id: str, viewer: Viewer) -> MetricsResponse:
        """Return the metrics: complete, or limited to the viewer's tenant if the viewer may not see other tenants."""
        if not viewer.can_see_all:
            return self._tenant_metrics(request_id, viewer.tenant)
        sources = self._sources
        sources.channels.count()
        models = list(sources.registry.models.values())
        report = self._measured(models)
        return MetricsResponse(
            id=request_id,
            version=VERSION,
            state=self._state,
            uptime_s=self._uptime_s,
            seconds_bounds=SECONDS_BOUNDS,
            rows_bounds=ROWS_BOUNDS,
            models=tuple(
                model_metrics(
                    model,
                    sources.books.counters,
                    report.footprints.get(model.name, MemoryFootprint()),
                    ready=self._is_ready(model),
                    reserved_bytes=sources.lifecycle.reservations.model_bytes(model.name),
                )
                for model in models
            ),
            tenants=self._tenant_statuses(models),
            buffered_bytes=sources.memory_budget.used_bytes,
            max_memory_bytes=sources.memory_budget.max_bytes,
            dropped_responses=sources.books.daemon_counters.dropped_responses,
            reloads=ReloadCounts(sources.books.daemon_counters.reloads, sources.books.daemon_counters.refused_reloads),
            pss_bytes=report.pss_bytes,
        )

    def _tenant_metrics(self, request_id: str, tenant: Tenant) -> MetricsResponse:
        models, queued, tenants = self._own(tenant)
        return MetricsResponse(
            id=request_id,
            version=VERSION,
            state=self._state,
            uptime_s=self._uptime_s,
            seconds_bounds=(),
            rows_bounds=(),
            models=tuple(
                tenant_model_metrics(model, queued.get((tenant.name, model.name), 0), ready=self._is_ready(model))
                for model in models
            ),
            tenants=tenants,
            buffered_bytes=0,
            max_memory_bytes=0,
            dropped_responses=0,
            reloads=ReloadCounts(0, 0),
        )

    def _own(self, tenant: Tenant) -> tuple[list[ServedModel], QueuedCounts, tuple[TenantStatus, ...]]:
        """Return the models that a tenant can see, the numbers of queued requests, and the tenant's usage."""
        models = [model for model in self._sources.registry.models.values() if tenant.can_see(model.name)]
        queued = queued_counts(models)
        return (
            models,
            queued,
            tenant_statuses([tenant], self._sources.books.usage_table, queued, {model.name for model in models}),
        )

    def _tenant_statuses(self, models: Iterable[ServedModel]) -> tuple[TenantStatus, ...]:
        resolver = self._sources.tenants
        tenants = resolver.all_tenants if resolver.has_tenants else resolver
        return tenant_statuses(tenants, self._sources.books.usage_table, queued_counts(models))

    def _measured(self, models: Iterable[ServedModel]) -> MemoryReport:
        supervisor = self._sources.supervisor
        return self._sampler.poll(
            self._daemon_pids(), lambda: memory_subjects(models, supervisor.processes, supervisor.storage.files)
        )

    def _daemon_pids(self) -> list[int]:
        """Return the pids of the daemon, the shim and the ZeroMQ proxies."""
        return [os.getpid(), *(shim.pid for shim in self._sources.shims), *self._sources.proxies.pids]

    @property
    def _state(self) -> str:
        return "stopping" if self._sources.shutdown.has_begun else "running"

    @property
    def _uptime_s(self) -> float:
        return time.monotonic() - self._started_at

    def _is_ready(self, model: ServedModel) -> bool:
        return not self._sources.shutdown.has_begun and not model.readiness.unready_reason(event_loop.now())


def _model_status(model: ServedModel, memory_scan: MemoryScan, sources: SnapshotSources) -> ModelStatus:
    requests, source = model.dispatcher.status(event_loop.now()), model.versions.current
    return ModelStatus(
        name=model.name,
        engine=model.config.engine,
        path=clip(source.path),
        state=model.readiness.state_name,
        queued=requests.queued,
        served=requests.latencies.count,
        failed=requests.failed,
        generations=tuple(
            _generation_status(model, generation, memory_scan, sources)
            for generation in model.generations[: limits.MAX_GENERATIONS]
        ),
        p50_us=requests.latencies.percentile_us(50),
        p99_us=requests.latencies.percentile_us(99),
        unexpected_exits=model.deployments.deaths,
        quarantined=requests.quarantined,
        note=clip(_model_note(model, requests.confined_clients)),
        weights=clip(source.weights),
        executions=_executions_status(requests.execution_counters),
        group=model.config.group.name if model.config.group is not None else "",
        retry_s=model.loading.retry_delay_s(event_loop.now()),
        attempts=model.loading.backoff.failures,
        load=model.config.load,
        reserved_bytes=sources.lifecycle.reservations.model_bytes(model.name),
        owner=model.loading.owner if sources.tenants.get(model.loading.owner) is not None else "",
        workers=None if model.workers.number is None else WorkersStatus(*model.workers.number),
    )


def _executions_status(execution_counters: ExecutionCounters) -> ExecutionsStatus:
    histogram = tuple(RowsCount(max_rows, count) for max_rows, count in execution_counters.batches_by_rows.items())
    return ExecutionsStatus(
        execution_counters.executions,
        histogram,
        execution_counters.padded_rows,
        execution_counters.split_requests,
        execution_counters.retried_items,
    )


def _model_note(model: ServedModel, confined_clients: Sequence[str]) -> str:
    offenders = ", ".join(confined_clients)
    offense_text = f"requests of {offenders} ended workers" if offenders else ""
    being_replaced = [
        each.cause for each in model.deployments if each.serving is not None and each.serving.should_be_replaced
    ]
    replacement_text = "; ".join(dict.fromkeys(f"cannot be reloaded: {cause}" for cause in being_replaced if cause))
    return "; ".join(each for each in (model.note, replacement_text, offense_text) if each)


def _generation_status(
    model: ServedModel,
    generation: GenerationBase,
    memory_scan: MemoryScan,
    sources: SnapshotSources,
) -> GenerationStatus:
    processes, files = sources.supervisor.processes, sources.supervisor.storage.files.get(generation.label)
    progress = sources.load_monitor.progress(generation.label, event_loop.now())
    children = [child for child in generation.processes.alive() if child.name in processes]
    subject = memory_subject(generation, processes, files)
    copy_bytes = subject.copy_bytes(memory_scan.resident_bytes)
    return GenerationStatus(
        number=generation.number,
        device=generation.device,
        state=generation.state.display_name,
        progress=", ".join(filter(None, (generation.progress, copied_text(progress)))),
        reason=clip(generation.cause),
        sha256=generation.sha256,
        copy_bytes=copy_bytes,
        saved_bytes=subject.saved_bytes(copy_bytes),
        selftest=clip(describe_selftest(generation.built_model(model.readiness.index))),
        processes=tuple(
            _process_status(model, generation, child, processes[child.name].pid, memory_scan) for child in children
        ),
        note=clip(generation.built.note) if generation.built is not None else "",
        batching_note=clip(batching.describe_batching(model.config, generation)),
        load_fraction=progress.fraction_done,
        remaining_s=progress.remaining_s,
        max_rows=batching.max_rows(model.config, generation),
    )


def _process_status(
    model: ServedModel, generation: GenerationBase, child: WorkerProcess, pid: int, memory_scan: MemoryScan
) -> ProcessStatus:
    latencies = model.dispatcher.results.latencies_by_process.get(child.name)
    hello = child.hello
    return ProcessStatus(
        name=child.name,
        role=role_of(generation, child),
        state=child.state.display_name,
        pid=pid,
        served=latencies.count if latencies else 0,
        in_flight=model.dispatcher.processes.in_flight(child.name),
        p50_us=latencies.percentile_us(50) if latencies else None,
        p99_us=latencies.percentile_us(99) if latencies else None,
        pss_bytes=memory_scan.pss_bytes(pid),
        shared_bytes=child.shared_bytes,
        note=clip(child.note),
        private_bytes=memory_scan.private_bytes(pid),
        anonymous_bytes=memory_scan.anonymous_bytes(pid),
        origin=hello.origin if hello is not None else None,
        origin_note=clip(hello.origin_note) if hello is not None else "",
        device=child.device,
        concurrency=hello.concurrency if hello is not None else 1,
        sha256=hello.sha256 if hello is not None and child.role is Role.RANK else "",
    )


def _proxy_status(proxy: ProxyInfo, memory_scan: MemoryScan) -> ProxyStatus:
    pss_bytes = memory_scan.pss_bytes(proxy.pid)
    return ProxyStatus(proxy.name, clip(proxy.address), proxy.pid, proxy.peers, proxy.restarts, pss_bytes)


def _fork_server_status(
    server: ForkServer, memory_scan: MemoryScan, processes: Mapping[str, ChildProcess]
) -> ForkServerStatus:
    process = processes.get(server.name)
    pid = process.pid if process is not None else 0
    return ForkServerStatus(
        server.engine, clip(server.python), pid, server.fork_count, memory_scan.pss_bytes(pid), clip(server.reason)
    )


def _device_status(device: DeviceBudget) -> DeviceStatus:
    reservations = device.reserved.values()
    return DeviceStatus(
        name=device.name,
        processes=device.process_count,
        max_processes=device.max_processes or 0,
        weights_bytes=sum(need.copy_count * card_bytes(need.weight_bytes) for need in reservations),
        process_bytes=sum(need.process_count * need.process_bytes for need in reservations),
        saved_bytes=sum((need.worker_count - need.copy_count) * card_bytes(need.weight_bytes) for need in reservations),
        capacity_bytes=device.capacity_bytes,
        free_bytes=device.free_bytes,
        buffer_bytes=sum(need.buffer_bytes for need in reservations),
    )
