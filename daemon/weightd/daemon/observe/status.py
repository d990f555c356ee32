"""What `weightctl status` shows, gathered from models and the kernel."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from weightd.daemon.children.files import GenerationFiles
from weightd.daemon.children.forkservers import ForkServer
from weightd.daemon.engines.ascend import card_bytes
from weightd.daemon.generations.actions import Role
from weightd.daemon.generations.child import Child
from weightd.daemon.generations.life import Life
from weightd.daemon.generations.progress import describe_selftest
from weightd.daemon.generations.unit import Unit
from weightd.daemon.host import cgroup, clock
from weightd.daemon.host.memory import resident_bytes
from weightd.daemon.host.processes import Process
from weightd.daemon.models import rows
from weightd.daemon.models.budget import Device
from weightd.daemon.models.model import Model
from weightd.daemon.models.pace import Share
from weightd.daemon.observe.loading import NOTHING
from weightd.daemon.observe.metrics import role_of
from weightd.daemon.observe.survey import Survey
from weightd.daemon.observe.tenants import told, waiting
from weightd.daemon.requests.tally import Tally
from weightd.daemon.tenants.accounts import Accounts
from weightd.daemon.tenants.tenant import Tenant
from weightd.protocol import limits
from weightd.protocol.codec import clip
from weightd.protocol.messages.children import Built
from weightd.protocol.messages.status import (
    DeviceStatus,
    ExecutionsStatus,
    ForkServerStatus,
    GateStatus,
    GenerationStatus,
    ModelStatus,
    ProcessStatus,
    RowsCount,
    StatusResponse,
)
from weightd.protocol.version import VERSION
from weightd.shared import loading
from weightd.shared.devices import is_cpu


class Gate(Protocol):
    """A gate, as who keeps it knows it: its listener's name and address, its process, and who has come and gone."""

    name: str
    address: str
    pid: int
    peers: int
    restarts: int


class Subject(NamedTuple):
    """What a report is about.

    Attributes:
        models: those that are served.
        devices: those that they use.
        processes: children, by name.
        files: of each generation, by its label.
        dropped: answers that could not be sent.
        held_bytes: that are kept for clients.
        max_memory_bytes: that may be.
        own_pids: the daemon, what makes its gates, these, and its keeper if it has one.
        note: what is wrong with the configuration file.
        gates: how they stand.
        fork_servers: of which children are forked.
        tenants: those of the configuration, and who is none of them but asks; none where there are no tables.
        accounts: of all.
        share: called with the label of a generation; returns how far it is, if it loads.
    """

    models: Iterable[Model]
    devices: Iterable[Device]
    processes: Mapping[str, Process]
    files: Mapping[str, GenerationFiles]
    dropped: int
    held_bytes: int
    max_memory_bytes: int
    own_pids: Iterable[int]
    note: str
    gates: Iterable[Gate] = ()
    fork_servers: Iterable[ForkServer] = ()
    tenants: Sequence[Tenant] = ()
    accounts: Accounts = Accounts()
    share: Callable[[str], Share] = lambda _: NOTHING


def report(survey: Survey, state: str, uptime: float, subject: Subject) -> StatusResponse:
    """Return the answer to a status request, with the memory that `survey` has read."""
    tenants = subject.tenants
    return StatusResponse(
        id=survey.request_id,
        version=VERSION,
        state=state,
        pid=os.getpid(),
        uptime_s=uptime,
        pss_bytes=sum(survey.pss(pid) or 0 for pid in subject.own_pids),
        models=tuple(_model(model, survey, subject) for model in subject.models),
        devices=tuple(_device(device) for device in subject.devices if not is_cpu(device.name)),
        dropped=subject.dropped,
        memory=survey.measured.get("group", cgroup.memory),
        note=clip(subject.note),
        held_bytes=subject.held_bytes,
        max_memory_bytes=subject.max_memory_bytes,
        gates=tuple(
            GateStatus(each.name, clip(each.address), each.pid, each.peers, each.restarts, survey.pss(each.pid))
            for each in subject.gates
        ),
        fork_servers=tuple(_fork_server(each, survey, subject.processes) for each in subject.fork_servers),
        tenants=told(tenants, subject.accounts, waiting(subject.models)) if tenants else (),
    )


def _model(model: Model, survey: Survey, subject: Subject) -> ModelStatus:
    return ModelStatus(
        name=model.name,
        engine=model.config.engine,
        path=clip(model.source.path),
        state=model.state.display_name,
        queued=model.dispatcher.scheduler.line.count,
        served=model.dispatcher.latencies.count,
        failed=model.dispatcher.failed,
        generations=tuple(
            _generation(model, generation, survey, subject)
            for generation in model.generations[: limits.MAX_GENERATIONS]
        ),
        p50_us=model.dispatcher.latencies.percentile_us(50),
        p99_us=model.dispatcher.latencies.percentile_us(99),
        deaths=model.deaths,
        quarantined=model.dispatcher.guard.quarantine.count(clock.now()),
        note=clip(_note(model)),
        weights=clip(model.source.weights),
        executions=_executions(model.dispatcher.scheduler.tally),
        group=model.config.group.name if model.config.group is not None else "",
        retry_s=model.retry_delay_s(clock.now()),
    )


def _executions(tally: Tally) -> ExecutionsStatus:
    histogram = tuple(RowsCount(max_rows, count) for max_rows, count in tally.rows.items())
    return ExecutionsStatus(tally.executions, histogram, tally.padded, tally.cuts, tally.again)


def _note(model: Model) -> str:
    suspects = ", ".join(model.dispatcher.guard.suspects.names(clock.now()))
    blame = f"workers were lost to requests of {suspects}" if suspects else ""
    renewing = [each.cause for each in model.deployments if each.serving is not None and each.serving.should_be_replaced]
    renewal = "; ".join(dict.fromkeys(f"cannot be loaded anew: {cause}" for cause in renewing if cause))
    return "; ".join(each for each in (model.note, renewal, blame) if each)


def _generation(
    model: Model,
    generation: Life,
    survey: Survey,
    subject: Subject,
) -> GenerationStatus:
    processes, files = subject.processes, subject.files.get(generation.label)
    share = subject.share(generation.label)
    children = [child for child in generation.alive() if child.name in processes]
    shared = sum(child.shared_bytes for child in children if child.role is Role.WORKER)
    if is_cpu(generation.device) and not (generation.built is not None and generation.built.is_template):
        copy = 0 if files is None else survey.measured.get(files.store, functools.partial(resident_bytes, files.store))
    else:
        copy = generation.built.shared_bytes if generation.built else 0
    return GenerationStatus(
        number=generation.number,
        device=generation.device,
        state=generation.state.display_name,
        progress=_progress(generation, share),
        cause=clip(generation.cause),
        sha256=generation.sha256,
        copy_bytes=copy,
        # Of a copy that nobody has used yet, all is on disk: that is no merit of sharing.
        saved_bytes=None if copy is None else max(0, shared - copy) if copy else 0,
        canary=clip(describe_selftest(_built(model, generation))),
        processes=tuple(_process(model, generation, child, processes[child.name].pid, survey) for child in children),
        note=clip(generation.built.note) if generation.built is not None else "",
        rows=clip(rows.describe_batching(model.config, generation)),
        done=share.fraction_done,
        left_s=share.remaining_s,
        max_rows=rows.max_rows(model.config, generation),
    )


def _progress(generation: Life, share: Share) -> str:
    """What it is doing; how much of its files is there, where that is all that is known of how long it takes."""
    if share.fraction_done is not None or share.fraction_copied is None:
        return generation.progress
    return f"{generation.progress}, {loading.percent(share.fraction_copied)} % copied"


def _built(model: Model, generation: Life) -> Built | None:
    """What a generation has told of this model: its process may have others, too."""
    group = model.config.group
    if group is None or not isinstance(generation, Unit):
        return generation.built
    return generation.models[group.models.index(model.name)] if generation.models else None


def _process(model: Model, generation: Life, child: Child, pid: int, survey: Survey) -> ProcessStatus:
    latencies = model.dispatcher.by_process.get(child.name)
    hello = child.hello
    return ProcessStatus(
        name=child.name,
        role=role_of(generation, child),
        state=child.state.display_name,
        pid=pid,
        served=latencies.count if latencies else 0,
        in_flight=model.dispatcher.scheduler.seats.in_flight(child.name),
        p50_us=latencies.percentile_us(50) if latencies else None,
        p99_us=latencies.percentile_us(99) if latencies else None,
        pss_bytes=survey.pss(pid),
        shared_bytes=child.shared_bytes,
        note=clip(child.note),
        own_bytes=survey.own(pid),
        anonymous_bytes=survey.anonymous(pid),
        origin=hello.origin if hello is not None else None,
        origin_note=clip(hello.origin_note) if hello is not None else "",
        device=child.device,
        concurrency=hello.concurrency if hello is not None else 1,
        sha256=hello.sha256 if hello is not None and child.role is Role.RANK else "",
    )


def _fork_server(server: ForkServer, survey: Survey, processes: Mapping[str, Process]) -> ForkServerStatus:
    process = processes.get(server.name)
    pid = process.pid if process is not None else 0
    return ForkServerStatus(server.engine, clip(server.python), pid, server.fork_count, survey.pss(pid), clip(server.reason))


def _device(device: Device) -> DeviceStatus:
    needs = device.reserved.values()
    return DeviceStatus(
        name=device.name,
        processes=device.process_count,
        max_processes=device.max_processes or 0,
        weights_bytes=sum(need.copy_count * card_bytes(need.weight_bytes) for need in needs),
        process_bytes=sum(need.process_count * need.process_bytes for need in needs),
        saved_bytes=sum((need.worker_count - need.copy_count) * card_bytes(need.weight_bytes) for need in needs),
        capacity_bytes=device.capacity_bytes,
        free_bytes=device.free_bytes,
        buffer_bytes=sum(need.buffer_bytes for need in needs),
    )
