"""One worker against the bare engine: the overhead of the service for one model."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence

from benchmarks import material
from benchmarks.load import answers
from benchmarks.material import (
    CONV,
    CONV_SHAPE,
    MLP,
    MLP_WIDTH,
    TRANSFORMER,
    TRANSFORMER_SHAPE,
    Arrays,
    Reference,
    Setup,
)
from benchmarks.report import Ratio, Result, Target, progress, ratio, spread
from testkit.plain import PlainProcess
from testkit.service import Service
from weightd import Client

WORKERS = 1
IN_FLIGHT = 4  # requests for each worker, so that its queue is never empty
ROUNDS = 15  # of each model and each side, alternating
REQUESTS = 50  # per round
_MORE = 10  # uncounted requests at the start of a round, until caches and cores have adapted to this side

MODELS: Mapping[str, tuple[int, ...]] = {MLP: (MLP_WIDTH,), CONV: CONV_SHAPE, TRANSFORMER: TRANSFORMER_SHAPE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine(Result):
    """Requests per second, batch 1, medians of the rounds.

    The other side is one engine process with default settings and one thread, which only runs predicts.

    Attributes:
        rps: requests/s of one client of weightd over `transport`, with `in_flight` requests for each worker, by model.
        bare_rps: predicts/s of the bare process, multiplied by the number of workers, by model.
        mlp_ratio, conv_ratio, transformer_ratio: `rps` divided by `bare_rps`, median of the rounds.
        worst_ratio: the smallest of these ratios.
        spreads: quartiles of the ratios, by model.
    """

    benchmark = "engine"
    transport: str
    in_flight: int
    rps: Mapping[str, float]
    bare_rps: Mapping[str, float]
    mlp_ratio: float
    conv_ratio: float
    transformer_ratio: float
    worst_ratio: float
    spreads: Mapping[str, tuple[float, float]]

    def targets(self) -> Sequence[Target]:
        """Return the bounds for one worker; several workers share the memory bandwidth, so they have no bounds."""
        return (
            [Target(f"{name}_ratio", 0.97, at_least=True) for name in (*MODELS, "worst")] if self.workers == 1 else []
        )

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        return [
            (
                name,
                f"{self.rps[name]:8,.1f} requests/s   bare {self.bare_rps[name]:8,.1f}   {spread(self.spreads[name])}",
            )
            for name in MODELS
        ]


def run(setup: Setup) -> Engine:
    """Measure each model in turn; the worker and the bare engine alternate in going first."""
    rps: dict[str, list[float]] = {name: [] for name in MODELS}
    bare_rps: dict[str, list[float]] = {name: [] for name in MODELS}
    with contextlib.ExitStack() as stack:
        paths = {name: material.model(name, setup.engine) for name in MODELS}
        inputs = {name: material.inputs(*shape) for name, shape in MODELS.items()}
        bare = {name: stack.enter_context(PlainProcess(path, setup.engine)) for name, path in paths.items()}
        references = {name: Reference(bare[name], inputs[name]) for name in MODELS}
        tables = {name: {"path": path, "workers": setup.workers} for name, path in paths.items()}
        service = stack.enter_context(Service(tables))
        service.ready()
        client = stack.enter_context(setup.client(service))
        for number in range(ROUNDS):
            progress(f"round {number + 1} of {ROUNDS}")
            for name in MODELS:
                for ours in (True, False) if number % 2 else (False, True):
                    if ours:
                        rps[name].append(_weightd(client, name, inputs[name], setup.workers, references[name]))
                    else:
                        seconds = bare[name].times(inputs[name][0], _MORE + REQUESTS)[_MORE:].sum()
                        bare_rps[name].append(REQUESTS * setup.workers / float(seconds))
    ratios: dict[str, Ratio] = {name: ratio(rps[name], bare_rps[name]) for name in MODELS}
    return Engine(
        engine=setup.engine,
        workers=setup.workers,
        n=ROUNDS * REQUESTS * setup.workers,
        transport=setup.transport,
        in_flight=IN_FLIGHT,
        rps={name: statistics.median(each) for name, each in rps.items()},
        bare_rps={name: statistics.median(each) for name, each in bare_rps.items()},
        mlp_ratio=ratios[MLP].median,
        conv_ratio=ratios[CONV].median,
        transformer_ratio=ratios[TRANSFORMER].median,
        worst_ratio=min(each.median for each in ratios.values()),
        spreads={name: each.spread for name, each in ratios.items()},
    )


def _weightd(client: Client, model: str, inputs: list[Arrays], workers: int, reference: Reference) -> float:
    """Return requests per second, from the last uncounted answer to the last answer."""
    more, count = _MORE * workers, REQUESTS * workers
    received: list[Arrays] = []
    begin = 0.0
    for index, answer in answers(client, model, inputs, more + count, IN_FLIGHT * workers):
        received.append(answer)
        if index == more - 1:
            begin = time.perf_counter()
    seconds = time.perf_counter() - begin
    for index, answer in enumerate(received):
        reference.check(index, answer)
    return count / seconds
