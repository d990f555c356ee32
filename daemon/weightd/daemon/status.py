"""What `weightctl status` shows, gathered from models and the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from weightd.daemon.actions import Role
from weightd.daemon.files import GenerationFiles
from weightd.daemon.generation import Child
from weightd.daemon.memory import pss_bytes, resident_bytes
from weightd.daemon.model import Model
from weightd.daemon.processes import Process
from weightd.protocol.messages import GenerationStatus, ModelStatus, ProcessStatus, StatusResponse
from weightd.protocol.version import VERSION
from weightd.protocol.wire import clip


class Survey:
    """Reads the memory of one process a step: reading a large one takes the kernel milliseconds.

    Args:
        client: who asked.
        request_id: the id of the question.
        pids: the processes to look at.
    """

    def __init__(self, client: bytes, request_id: str, pids: Iterable[int]) -> None:
        self.client = client
        self.request_id = request_id
        self.pss: dict[int, int | None] = {}
        self._left = list(pids)

    def step(self) -> bool:
        """Look at one process; return whether that was the last."""
        if self._left:
            pid = self._left.pop()
            self.pss[pid] = pss_bytes(pid)
        return not self._left


def report(
    survey: Survey,
    state: str,
    uptime: float,
    models: Iterable[Model],
    processes: Mapping[str, Process],
    files: Mapping[str, GenerationFiles],
) -> StatusResponse:
    """Return the answer to a status request, with the memory that `survey` has read."""
    return StatusResponse(
        id=survey.request_id,
        version=VERSION,
        state=state,
        pid=os.getpid(),
        uptime_s=uptime,
        pss_bytes=survey.pss.get(os.getpid()) or 0,
        models=tuple(_model(model, survey, processes, files[model.label]) for model in models),
    )


def _model(model: Model, survey: Survey, processes: Mapping[str, Process], files: GenerationFiles) -> ModelStatus:
    return ModelStatus(
        name=model.name,
        engine=model.config.engine,
        path=clip(model.config.path),
        state=model.generation.state.value,
        queued=model.scheduler.queued,
        served=model.latencies.count,
        failed=model.failed,
        generations=(_generation(model, survey, processes, files),),
        p50_us=model.latencies.percentile_us(50),
        p99_us=model.latencies.percentile_us(99),
    )


def _generation(
    model: Model, survey: Survey, processes: Mapping[str, Process], files: GenerationFiles
) -> GenerationStatus:
    generation = model.generation
    children = [child for child in generation.alive() if child.name in processes]
    shared = sum(child.shared_bytes for child in children if child.role is Role.WORKER)
    copy = resident_bytes(files.store)
    return GenerationStatus(
        number=model.number,
        device=model.config.device,
        state=generation.state.value,
        progress=generation.progress,
        cause=clip(generation.cause),
        sha256=generation.sha256,
        copy_bytes=copy,
        saved_bytes=max(0, shared - copy),
        processes=tuple(_process(model, child, processes[child.name].pid, survey) for child in children),
    )


def _process(model: Model, child: Child, pid: int, survey: Survey) -> ProcessStatus:
    latencies = model.by_worker.get(child.name)
    return ProcessStatus(
        name=child.name,
        role=child.role.value,
        state=child.state.value,
        pid=pid,
        served=latencies.count if latencies else 0,
        in_flight=model.scheduler.in_flight(child.name),
        p50_us=latencies.percentile_us(50) if latencies else None,
        p99_us=latencies.percentile_us(99) if latencies else None,
        pss_bytes=survey.pss.get(pid),
        shared_bytes=child.shared_bytes,
        note=clip(child.note),
    )
