"""Memory of a service against the same number of plain engine processes, as PSS."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import material
from benchmarks.load import answers
from benchmarks.material import (
    CONV,
    CONV_SHAPE,
    MLP,
    MLP_WIDTH,
    TINY,
    TINY_WIDTH,
    Arrays,
    Reference,
    Setup,
    UnavailableError,
)
from benchmarks.report import MB, Result, Target, progress
from testkit.memory import pss_total
from testkit.plain import PlainProcess
from testkit.service import Service
from weightd import Client

WORKERS = 8
REQUESTS = 20  # to each process, before its memory is read
_MAX_ROUNDS = 10  # of REQUESTS to each worker; usually, one or two are enough
_IDLE_S = 11.0  # a worker without requests for ten seconds releases the memory that it keeps for the next request

# The shape of a row and the default number of workers, by model.
MODELS: Mapping[str, tuple[tuple[int, ...], int]] = {
    MLP: ((MLP_WIDTH,), WORKERS),
    TINY: ((TINY_WIDTH,), 1),
    CONV: (CONV_SHAPE, 3),
}

# By engine, model, number of models, and number of workers for each.
_BOUNDS: Mapping[tuple[str, str, int, int], Sequence[Target]] = {
    ("onnxruntime", MLP, 1, 8): [Target("ratio", 0.15), Target("per_worker_mb", 10.0), Target("pss_total_mb", 320.0)],
    ("mindspore_lite", MLP, 1, 8): [Target("ratio", 0.1), Target("per_worker_mb", 20.0), Target("pss_total_mb", 640.0)],
    ("onnxruntime", CONV, 1, 3): [Target("ratio", 0.7)],
    ("mindspore_lite", CONV, 1, 3): [Target("ratio", 0.7)],
    ("onnxruntime", TINY, 20, 1): [Target("ratio", 1.0), Target("pss_total_mb", 250.0)],
    ("mindspore_lite", TINY, 20, 1): [Target("ratio", 1.0)],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Result):
    """Figures in MB of 1,000,000 bytes.

    Attributes:
        model: the model.
        models: number of models, all the same, each with `workers`.
        pss_total_mb: PSS of all processes of the service, shortly after the last request.
        pss_idle_mb: the same after the workers have released the memory that they keep for the next request.
        by_role_mb: number of processes and their part of `pss_total_mb`, by role.
        pss_plain_mb: PSS of one plain process for each worker.
        ratio: `pss_total_mb` divided by `pss_plain_mb`.
        per_worker_mb: PSS of a further worker, or of a further model if there are several, from the difference between
            this service and a service with `few_workers`.
        plain_one_mb: PSS of a single plain process.
        store_resident_mb: part of the page stores that is in memory; PSS includes the part that processes map.
        store_unmapped_mb: part that no process maps: page cache, which the kernel can drop at any time.
    """

    benchmark = "memory"
    model: str
    models: int
    pss_total_mb: float
    pss_idle_mb: float
    by_role_mb: Mapping[str, tuple[int, float]]
    pss_plain_mb: float
    ratio: float
    per_worker_mb: float
    plain_one_mb: float
    few_workers: int
    pss_few_mb: float
    store_resident_mb: float
    store_unmapped_mb: float

    def targets(self) -> Sequence[Target]:
        """Return the bounds; other models and numbers of workers have no bounds."""
        return _BOUNDS.get((self.engine, self.model, self.models, self.workers), [])

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        total = self.models * self.workers
        what = f"{self.models} x {self.workers}" if self.models > 1 else f"{self.workers}"
        return [
            (f"model {self.model}: one plain process", f"{self.plain_one_mb:8,.0f} MB"),
            (f"{total} plain processes", f"{self.pss_plain_mb:8,.0f} MB"),
            (f"weightd with {self.few_workers}", f"{self.pss_few_mb:8,.0f} MB"),
            (f"weightd with {what}", f"{self.pss_total_mb:8,.0f} MB   {self.ratio:.1%} of plain"),
            *((f"… {role}", f"{size:8,.0f} MB   {count}") for role, (count, size) in self.by_role_mb.items()),
            ("the same, idle", f"{self.pss_idle_mb:8,.0f} MB"),
            ("each further worker", f"{self.per_worker_mb:8,.1f} MB"),
            ("page store in memory", f"{self.store_resident_mb:8,.0f} MB   {self.store_unmapped_mb:,.0f} MB unmapped"),
        ]


@dataclasses.dataclass(frozen=True)
class _MemoryBreakdown:
    """Memory of a service in bytes.

    Attributes:
        total: all processes.
        by_role: number of processes and their bytes, by role.
        idle: all processes when idle.
        resident: page stores in memory.
        mapped: part of the page stores that processes map.
    """

    total: int
    by_role: Mapping[str, tuple[int, int]]
    idle: int
    resident: int
    mapped: int


def run(setup: Setup) -> Memory:
    """Measure one plain process, then all, then two services of different sizes."""
    engine, workers, models = setup.engine, setup.workers, setup.models
    path = material.model(setup.model, engine)
    inputs = material.inputs(*MODELS[setup.model][0])
    # The smaller service has one model instead of several, or one worker instead of several.
    few = (1, workers) if models > 1 else (1, 1 if workers > 1 else 2)
    plain_one, plain, reference = _plain(path, engine, models * workers, inputs)
    small = _service(path, *few, inputs, reference)
    held = _service(path, models, workers, inputs, reference)
    return Memory(
        engine=engine,
        workers=workers,
        n=REQUESTS * models * workers,
        model=setup.model,
        models=models,
        pss_total_mb=held.total / MB,
        pss_idle_mb=held.idle / MB,
        by_role_mb={role: (count, size / MB) for role, (count, size) in held.by_role.items()},
        pss_plain_mb=plain / MB,
        ratio=held.total / plain,
        per_worker_mb=(held.total - small.total) / (models * workers - few[0] * few[1]) / MB,
        plain_one_mb=plain_one / MB,
        few_workers=few[0] * few[1],
        pss_few_mb=small.total / MB,
        store_resident_mb=held.resident / MB,
        store_unmapped_mb=max(0, held.resident - held.mapped) / MB,
    )


def _plain(path: Path, engine: str, count: int, inputs: list[Arrays]) -> tuple[int, int, Reference]:
    """Start `count` plain processes one by one; return the bytes of the first alone and of all, and the answers."""
    with contextlib.ExitStack() as stack:
        processes: list[PlainProcess] = []

        def start() -> None:
            progress(f"plain process {len(processes) + 1} of {count}")
            process = stack.enter_context(PlainProcess(path, engine))
            process.repeat(inputs[0], REQUESTS)
            processes.append(process)

        start()
        reference = Reference(processes[0], inputs)
        one = pss_total([processes[0].pid])
        if one * count > _available():
            raise UnavailableError(
                f"{count} plain processes of {one / MB:,.0f} MB do not fit into memory; use fewer workers"
            )
        while len(processes) < count:
            start()
        return one, pss_total(process.pid for process in processes), reference


def _service(path: Path, models: int, workers: int, inputs: list[Arrays], reference: Reference) -> _MemoryBreakdown:
    """Return the memory of a service with this number of models and of workers for each."""
    progress(f"weightd with {models} x {workers}")
    names = [f"model-{number}" for number in range(models)]
    with Service({name: {"path": path, "workers": workers} for name in names}) as service, service.client() as client:
        service.ready()
        for name in names:
            _exercise(service, client, name, workers, inputs, reference)
        # The daemon and its ZeroMQ proxy release unused memory within two seconds; `pss_at_rest` waits for it.
        now, roles = service.pss_at_rest(), service.roles()
        by_role: dict[str, tuple[int, int]] = {}
        for pid, size in now.items():
            count, sum_ = by_role.get(roles[pid], (0, 0))
            by_role[roles[pid]] = count + 1, sum_ + size
        mapped = sum(_mapped(pid, service.cache) for pid in now)
        # If workers are forked from the process that built the model, there are no page stores.
        stores = any(service.cache.glob("*/*/pages"))
        copies = [each.copy_bytes for model in service.status().models for each in model.generations] if stores else []
        if None in copies:
            raise UnavailableError("memory: the kernel does not report which pages of the page store are in memory")
        idle = service.pss_at_rest(_IDLE_S)
        return _MemoryBreakdown(
            sum(now.values()), by_role, sum(idle.values()), sum(each or 0 for each in copies), mapped
        )


def _exercise(
    service: Service, client: Client, name: str, workers: int, inputs: list[Arrays], reference: Reference
) -> None:
    """Send requests until every worker of a model has answered at least `REQUESTS`."""
    for _ in range(_MAX_ROUNDS):
        # With fewer requests in flight, the daemon would always choose the same workers.
        for index, answer in answers(client, name, inputs, REQUESTS * workers, in_flight=2 * workers):
            reference.check(index, answer)
        [model] = [each for each in service.status().models if each.name == name]
        there = [each for generation in model.generations for each in generation.processes if each.role == "worker"]
        if all(process.served >= REQUESTS for process in there):
            return
    raise RuntimeError(
        f"expected {REQUESTS} requests to each worker within {_MAX_ROUNDS * REQUESTS * workers} requests, got fewer"
    )


def _mapped(pid: int, directory: Path) -> int:
    """Return the process's share of the pages of files in `directory` that it maps."""
    size = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text("utf-8").splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            inside = str(directory) in line
        elif inside and words[0] == "Pss:":
            size += int(words[1]) * 1024
        elif inside and words[0] == "Anonymous:":
            size -= int(words[1]) * 1024  # private copies of changed pages
    return size


def _available() -> int:
    """Return the bytes of memory that are available without swapping."""
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
