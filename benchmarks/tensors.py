"""Latency of requests with large tensors, against a two-hop ZeroMQ echo of the same bytes without copies.

Two models without weights, whose computation is negligible:

- `relu` has an output as large as its input: the echo returns as many bytes as it receives (`ratio_600k`, `ratio_8m`).
- `largest` has one number as output, similar to an image classifier: the echo returns one number
  (`largest_ratio_600k`, `largest_ratio_8m`).

The time of a request is measured in the client, from the input array to the output array of `infer`. It includes the
time in which the engine reads and writes tensors; no process of the echo reads the bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from benchmarks import material
from benchmarks.echo import Echo
from benchmarks.latency import HEADER
from benchmarks.material import LARGEST, RELU, Reference, Setup
from benchmarks.report import Ratio, Result, Target, median_over_blocks, percentile, progress, ratio, spread
from benchmarks.rounds import seconds_of
from testkit.plain import PlainProcess
from testkit.service import Service

WORKERS = 1
ROUNDS = 10  # of each side, alternating
SIZES = {"600k": (600_000, 60), "8m": (8_000_000, 10)}  # bytes of the input, and requests per round


@dataclasses.dataclass(frozen=True)
class _Compared:
    p50_us: float
    echo_p50_us: float
    predict_us: float
    ratio: Ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensors(Result):
    """Medians of the rounds' p50 in microseconds; ratios of weightd to the echo, compared round by round.

    Attributes:
        ratio_600k: input and output of 600,000 bytes.
        ratio_8m: input and output of 8,000,000 bytes.
        largest_ratio_600k: input of 600,000 bytes, output of one number.
        largest_ratio_8m: input of 8,000,000 bytes, output of one number.
        spreads: quartiles of the ratios, by model and size.
        p50_us: weightd, by model and size.
        echo_p50_us: the echo, by model and size.
        bare_predict_us: the engine alone, by model and size.
    """

    benchmark = "tensors"
    transport: str
    ratio_600k: float
    ratio_8m: float
    largest_ratio_600k: float
    largest_ratio_8m: float
    spreads: dict[str, tuple[float, float]]
    p50_us: dict[str, float]
    echo_p50_us: dict[str, float]
    bare_predict_us: dict[str, float]

    def targets(self) -> Sequence[Target]:
        """Return the bounds of the ratios for the Unix socket, the only transport with shared memory."""
        return [Target("ratio_600k", 0.35), Target("ratio_8m", 0.4)] if self.transport == "unix" else []

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        times = [
            (
                f"{key} over {self.transport}",
                f"p50 {p50:6.0f} us   echo {self.echo_p50_us[key]:6.0f}   engine {self.bare_predict_us[key]:5.0f}",
            )
            for key, p50 in self.p50_us.items()
        ]
        return [*times, *((f"{key}, ratio", spread(each)) for key, each in self.spreads.items())]


def run(setup: Setup) -> Tensors:
    """Measure each size with each model, alternating between weightd and the echo."""
    paths = {name: material.model(name, setup.engine) for name in (RELU, LARGEST)}
    found: dict[str, _Compared] = {}
    with Service({name: {"path": path, "workers": setup.workers} for name, path in paths.items()}) as service:
        service.ready()
        for name, path in paths.items():
            for size, (nbytes, count) in SIZES.items():
                progress(f"{name}, {nbytes:,} bytes")
                with PlainProcess(path, setup.engine) as bare:
                    found[f"{name}_{size}"] = _compare(setup, service, name, bare, nbytes // 4, count)
    return Tensors(
        engine=setup.engine,
        workers=setup.workers,
        n=ROUNDS * sum(count for _, count in SIZES.values()) * len(paths),
        transport=setup.transport,
        ratio_600k=found["relu_600k"].ratio.median,
        ratio_8m=found["relu_8m"].ratio.median,
        largest_ratio_600k=found["largest_600k"].ratio.median,
        largest_ratio_8m=found["largest_8m"].ratio.median,
        spreads={key: each.ratio.spread for key, each in found.items()},
        p50_us={key: each.p50_us for key, each in found.items()},
        echo_p50_us={key: each.echo_p50_us for key, each in found.items()},
        bare_predict_us={key: each.predict_us for key, each in found.items()},
    )


def _compare(setup: Setup, service: Service, name: str, bare: PlainProcess, width: int, count: int) -> _Compared:
    inputs = material.inputs(width)
    messages = [[HEADER, each["x"]] for each in inputs]
    reference = Reference(bare, inputs)
    answer = [len(HEADER), *(array.nbytes for array in bare.infer(inputs[0]).values())]
    predict = bare.times(inputs[0], 2 * count)[count:]
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    with setup.client(service) as client, Echo(answer, copy=False) as echo:
        ask = functools.partial(client.infer, name)
        for _ in range(ROUNDS):
            ours.append(seconds_of(ask, inputs, count, reference.check))
            theirs.append(seconds_of(echo.ask, messages, count))
    return _Compared(
        p50_us=1e6 * median_over_blocks(ours, 50),
        echo_p50_us=1e6 * median_over_blocks(theirs, 50),
        predict_us=1e6 * float(np.median(predict)),
        ratio=ratio([percentile(each, 50) for each in ours], [percentile(each, 50) for each in theirs]),
    )
