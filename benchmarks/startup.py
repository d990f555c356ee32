"""Time from the start of `weightd serve` to the first answer and to all workers ready, against one bare build."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import material
from benchmarks.material import MLP, MLP_WIDTH, Arrays, Reference, Setup
from benchmarks.report import Result, Target, progress
from testkit.plain import PlainProcess
from testkit.service import Service

WORKERS = 8
REPEATS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Startup(Result):
    """Medians in seconds, with the model's files in the page cache.

    Attributes:
        first_answer_s: time from the start of the daemon to the answer to a request sent as soon as the daemon listens.
        all_ready_s: time from the start of the daemon until every worker is READY.
        bare_build_s: time from the start of one plain process until its model is built.
        by_workers: `first_answer_s` and `all_ready_s` for one worker and for `workers`, by number of workers.
    """

    benchmark = "startup"
    first_answer_s: float
    all_ready_s: float
    bare_build_s: float
    by_workers: Mapping[str, Mapping[str, float]]

    def targets(self) -> Sequence[Target]:
        """Return no bounds."""
        return []

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        rows = [("one bare build", f"{self.bare_build_s:6.2f} s")]
        for workers, values in self.by_workers.items():
            rows.append((f"weightd with {workers}: first answer", f"{values['first_answer_s']:6.2f} s"))
            rows.append((f"weightd with {workers}: all READY", f"{values['all_ready_s']:6.2f} s"))
        return rows


def run(setup: Setup) -> Startup:
    """Start a plain process, a service with one worker and a service with all workers, in turn."""
    engine, workers = setup.engine, setup.workers
    path = material.model(MLP, engine)
    inputs = material.inputs(MLP_WIDTH)
    sizes = sorted({1, workers})
    bare: list[float] = []
    first: dict[int, list[float]] = {size: [] for size in sizes}
    ready: dict[int, list[float]] = {size: [] for size in sizes}
    _read(path)
    for repeat in range(REPEATS):
        progress(f"repeat {repeat + 1} of {REPEATS}")
        with PlainProcess(path, engine) as process:
            bare.append(process.start_seconds)
            reference = Reference(process, inputs)
        for size in sizes:
            first_answer, all_ready = _service(path, size, inputs, reference)
            first[size].append(first_answer)
            ready[size].append(all_ready)
    by_workers = {
        str(size): {
            "first_answer_s": statistics.median(first[size]),
            "all_ready_s": statistics.median(ready[size]),
        }
        for size in sizes
    }
    return Startup(
        engine=engine,
        workers=workers,
        n=REPEATS,
        first_answer_s=by_workers[str(workers)]["first_answer_s"],
        all_ready_s=by_workers[str(workers)]["all_ready_s"],
        bare_build_s=statistics.median(bare),
        by_workers=by_workers,
    )


def _service(path: Path, workers: int, inputs: list[Arrays], reference: Reference) -> tuple[float, float]:
    with Service({MLP: {"path": path, "workers": workers}}) as service, service.client(timeout=300) as client:
        reference.check(0, client.infer(MLP, inputs[0]))
        first_answer = time.perf_counter() - service.begin
        service.ready()
        return first_answer, time.perf_counter() - service.begin


def _read(path: Path) -> None:
    """Read the file into the page cache, so that the first repeat is like the others."""
    with path.open("rb") as file:
        while file.read(2**24):
            pass
