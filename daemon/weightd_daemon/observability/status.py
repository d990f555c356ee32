"""What `weightctl status` shows, gathered from models and the kernel."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from weightd_common import log_text
from weightd_common.devices import is_cpu
from weightd_daemon.engines.ranktable import card_bytes
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.process import WorkerProcess
from weightd_daemon.generations.progress import describe_selftest
from weightd_daemon.generations.rank_group import RankGroup
from weightd_daemon.models import batching
from weightd_daemon.models.load_progress import LoadProgress
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.observability.load_progress import NO_PROGRESS
from weightd_daemon.observability.memory import MemoryScan
from weightd_daemon.observability.metrics import role_of
from weightd_daemon.observability.tenant_status import queued_counts, tenant_statuses
from weightd_daemon.platform import cgroup, clock
from weightd_daemon.platform.memory import resident_bytes
from weightd_daemon.platform.processes import ChildProcess
from weightd_daemon.processes.files import GenerationFiles
from weightd_daemon.processes.fork_servers import ForkServer
from weightd_daemon.scheduling.measurements import ExecutionCounters
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.tenants.usage import UsageTable
from weightd_protocol import limits
from weightd_protocol.codec import clip
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
)
from weightd_protocol.messages.worker import Built
from weightd_protocol.version import VERSION


class ProxyView(Protocol):
    """A proxy, as who keeps it knows it: its listener's name and address, its process, and who has come and gone."""

    name: str
    address: str
    pid: int
    peers: int
    restarts: int


class StatusInputs(NamedTuple):
    """What a report is about.

    Attributes:
        models: those that are served.
        devices: those that they use.
        processes: children, by name.
        files: of each generation, by its label.
        dropped: answers that could not be sent.
        buffered_bytes: that are kept for clients.
        max_buffered_bytes: that may be.
        daemon_pids: the daemon, what makes its proxies, these, and its shim if it has one.
        config_note: what is wrong with the configuration file.
        zmq_proxies: how they stand.
        fork_servers: of which children are forked.
        tenants: those of the configuration, and who is none of them but asks; none where there are no tables.
        usage_table: of all.
        load_progress: called with the label of a generation; returns how far it is, if it loads.
    """

    models: Iterable[ServedModel]
    devices: Iterable[DeviceBudget]
    processes: Mapping[str, ChildProcess]
    files: Mapping[str, GenerationFiles]
    dropped: int
    buffered_bytes: int
    max_buffered_bytes: int
    daemon_pids: Iterable[int]
    config_note: str
    zmq_proxies: Iterable[ProxyView] = ()
    fork_servers: Iterable[ForkServer] = ()
    tenants: Sequence[Tenant] = ()
    usage_table: UsageTable = UsageTable()
    load_progress: Callable[[str], LoadProgress] = lambda _: NO_PROGRESS


def build_status(memory_scan: MemoryScan, state: str, uptime_s: float, inputs: StatusInputs) -> StatusResponse:
    """Return the answer to a status request, with the memory that `memory_scan` has read."""
    tenants = inputs.tenants
    return StatusResponse(
        id=memory_scan.request_id,
        version=VERSION,
        state=state,
        pid=os.getpid(),
        uptime_s=uptime_s,
        pss_bytes=sum(memory_scan.pss_bytes(pid) or 0 for pid in inputs.daemon_pids),
        models=tuple(_model_status(model, memory_scan, inputs) for model in inputs.models),
        devices=tuple(_device_status(device) for device in inputs.devices if not is_cpu(device.name)),
        dropped_responses=inputs.dropped,
        memory=memory_scan.cache.get("group", cgroup.memory),
        note=clip(inputs.config_note),
        buffered_bytes=inputs.buffered_bytes,
        max_memory_bytes=inputs.max_buffered_bytes,
        zmq_proxies=tuple(
            ProxyStatus(
                each.name, clip(each.address), each.pid, each.peers, each.restarts, memory_scan.pss_bytes(each.pid)
            )
            for each in inputs.zmq_proxies
        ),
        fork_servers=tuple(_fork_server_status(each, memory_scan, inputs.processes) for each in inputs.fork_servers),
        tenants=tenant_statuses(tenants, inputs.usage_table, queued_counts(inputs.models)) if tenants else (),
    )


def _model_status(model: ServedModel, memory_scan: MemoryScan, inputs: StatusInputs) -> ModelStatus:
    requests = model.dispatcher.status(clock.now())
    return ModelStatus(
        name=model.name,
        engine=model.config.engine,
        path=clip(model.source.path),
        state=model.state.display_name,
        queued=requests.queued,
        served=requests.latencies.count,
        failed=requests.failed,
        generations=tuple(
            _generation_status(model, generation, memory_scan, inputs)
            for generation in model.generations[: limits.MAX_GENERATIONS]
        ),
        p50_us=requests.latencies.percentile_us(50),
        p99_us=requests.latencies.percentile_us(99),
        unexpected_exits=model.deaths,
        quarantined=requests.quarantined,
        note=clip(_model_note(model, requests.confined_clients)),
        weights=clip(model.source.weights),
        executions=_executions_status(requests.execution_counters),
        group=model.config.group.name if model.config.group is not None else "",
        retry_s=model.retry_delay_s(clock.now()),
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
    inputs: StatusInputs,
) -> GenerationStatus:
    processes, files = inputs.processes, inputs.files.get(generation.label)
    progress = inputs.load_progress(generation.label)
    children = [child for child in generation.processes.alive() if child.name in processes]
    shared_bytes = sum(child.shared_bytes for child in children if child.role is Role.WORKER)
    if is_cpu(generation.device) and not (generation.built is not None and generation.built.is_template):
        copy_bytes = (
            0 if files is None else memory_scan.cache.get(files.store, functools.partial(resident_bytes, files.store))
        )
    else:
        copy_bytes = generation.built.shared_bytes if generation.built else 0
    return GenerationStatus(
        number=generation.number,
        device=generation.device,
        state=generation.state.display_name,
        progress=_progress_text(generation, progress),
        reason=clip(generation.cause),
        sha256=generation.sha256,
        copy_bytes=copy_bytes,
        # Of a copy that nobody has used yet, all is on disk: that is no merit of sharing.
        saved_bytes=None if copy_bytes is None else max(0, shared_bytes - copy_bytes) if copy_bytes else 0,
        selftest=clip(describe_selftest(_find_built(model, generation))),
        processes=tuple(
            _process_status(model, generation, child, processes[child.name].pid, memory_scan) for child in children
        ),
        note=clip(generation.built.note) if generation.built is not None else "",
        batching_note=clip(batching.describe_batching(model.config, generation)),
        load_fraction=progress.fraction_done,
        remaining_s=progress.remaining_s,
        max_rows=batching.max_rows(model.config, generation),
    )


def _progress_text(generation: GenerationBase, progress: LoadProgress) -> str:
    """What it is doing; how much of its files is there, where that is all that is known of how long it takes."""
    if progress.fraction_done is not None or progress.fraction_copied is None:
        return generation.progress
    return f"{generation.progress}, {log_text.percent(progress.fraction_copied)} % copied"


def _find_built(model: ServedModel, generation: GenerationBase) -> Built | None:
    """What a generation has told of this model: its process may have others, too."""
    group = model.config.group
    if group is None or not isinstance(generation, RankGroup):
        return generation.built
    return generation.models[group.models.index(model.name)] if generation.models else None


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
