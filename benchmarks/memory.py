"""Memory of a service against as many plain processes of the same engine, as the kernel counts it (PSS)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from benchmarks import material
from benchmarks.load import answers
from benchmarks.material import MLP, MLP_WIDTH, Arrays, Reference, Setup, UnavailableError
from benchmarks.report import MB, Result, Target, progress
from testkit.memory import pss_total
from testkit.plain import PlainProcess
from testkit.service import Service
from weightd.client import Client

WORKERS = 8
REQUESTS = 20  # of each process, before its memory is read
_MOST_ROUNDS = 10  # of that many to all workers: one or two are enough

# ratio and per_worker_mb, for 8 workers.
_BOUNDS = {"mindspore_lite": (0.12, 45.0), "onnxruntime": (0.25, 35.0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Result):
    """Figures in MB of 1,000,000 bytes.

    Attributes:
        pss_total_mb: daemon, holder and workers.
        pss_plain_mb: as many plain processes as there are workers.
        ratio: the former by the latter.
        per_worker_mb: what one more worker costs, from this service and one of `few_workers`.
        plain_one_mb: one plain process while it is alone.
        store_resident_mb: what of the page store on disk is in memory; PSS counts the part that processes map.
        store_unmapped_mb: the part that no process maps: page cache, which the kernel can drop at any time.
    """

    benchmark = "memory"
    pss_total_mb: float
    pss_plain_mb: float
    ratio: float
    per_worker_mb: float
    plain_one_mb: float
    few_workers: int
    pss_few_mb: float
    store_resident_mb: float
    store_unmapped_mb: float

    def targets(self) -> Sequence[Target]:
        """Return the bounds, which are for 8 workers."""
        if self.workers != WORKERS:
            return []
        ratio, per_worker = _BOUNDS[self.engine]
        targets = [Target("ratio", ratio), Target("per_worker_mb", per_worker)]
        if self.engine == "mindspore_lite":
            targets.append(Target("pss_total_mb", self.plain_one_mb))
        return targets

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        return [
            ("one plain process", f"{self.plain_one_mb:8,.0f} MB"),
            (f"{self.workers} plain processes", f"{self.pss_plain_mb:8,.0f} MB"),
            (f"weightd with {self.few_workers}", f"{self.pss_few_mb:8,.0f} MB"),
            (f"weightd with {self.workers}", f"{self.pss_total_mb:8,.0f} MB   {self.ratio:.1%} of plain"),
            ("each further worker", f"{self.per_worker_mb:8,.1f} MB"),
            ("page store in memory", f"{self.store_resident_mb:8,.0f} MB   {self.store_unmapped_mb:,.0f} MB unmapped"),
        ]


def run(setup: Setup) -> Memory:
    """Measure one plain process, then all, then two services of different size."""
    engine, workers = setup.engine, setup.workers
    path = material.model(MLP, engine)
    inputs = material.inputs(MLP_WIDTH)
    few = 1 if workers > 1 else 2
    plain_one, plain, reference = _plain(path, engine, workers, inputs)
    few_pss, _, _ = _service(path, few, inputs, reference)
    pss, resident, mapped = _service(path, workers, inputs, reference)
    return Memory(
        engine=engine,
        workers=workers,
        n=REQUESTS * workers,
        pss_total_mb=pss / MB,
        pss_plain_mb=plain / MB,
        ratio=pss / plain,
        per_worker_mb=(pss - few_pss) / (workers - few) / MB,
        plain_one_mb=plain_one / MB,
        few_workers=few,
        pss_few_mb=few_pss / MB,
        store_resident_mb=resident / MB,
        store_unmapped_mb=max(0, resident - mapped) / MB,
    )


def _plain(path: Path, engine: str, count: int, inputs: list[Arrays]) -> tuple[int, int, Reference]:
    """Return the bytes of one plain process and of `count`, and the answers; started one after another."""
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
                f"{count} plain processes of {one / MB:,.0f} MB do not fit into memory: try fewer workers"
            )
        while len(processes) < count:
            start()
        return one, pss_total(process.pid for process in processes), reference


def _service(path: Path, workers: int, inputs: list[Arrays], reference: Reference) -> tuple[int, int, int]:
    """Return the bytes of a service's processes, of its page store in memory, and of the part that they map."""
    progress(f"weightd with {workers}")
    with Service({MLP: {"path": path, "workers": workers}}) as service, service.client() as client:
        service.ready()
        _exercise(service, client, workers, inputs, reference)
        pids = service.pids()
        resident = service.status().models[0].generations[0].copy_bytes
        if resident is None:
            raise UnavailableError("the kernel does not tell what of the page store is in memory")
        return pss_total(pids), resident, sum(_mapped(pid, service.cache) for pid in pids)


def _exercise(service: Service, client: Client, workers: int, inputs: list[Arrays], reference: Reference) -> None:
    """Have every worker answer `REQUESTS` at least."""
    for _ in range(_MOST_ROUNDS):
        # Few at once would always reach the same workers.
        for index, answer in answers(client, MLP, inputs, REQUESTS * workers, in_flight=2 * workers):
            reference.check(index, answer)
        if all(process.served >= REQUESTS for process in service.processes() if process.role == "worker"):
            return
    raise RuntimeError(f"not every worker got {REQUESTS} of {_MOST_ROUNDS * REQUESTS * workers} requests")


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
            size -= int(words[1]) * 1024  # its own copies of pages that it changed
    return size


def _available() -> int:
    """Return how much memory can be had without swapping."""
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
