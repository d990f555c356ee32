"""Latency of a small request, against a bare two-hop ZeroMQ echo of frames of the same sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from benchmarks import material
from benchmarks.echo import Echo
from benchmarks.material import TINY, TINY_WIDTH, Arrays, Reference
from benchmarks.report import Result, Target, median_over_blocks, progress
from testkit.plain import PlainProcess
from testkit.service import Service
from weightd.client.core import ClientCore
from weightd.protocol.codec import encode
from weightd.protocol.messages.data import InferResponse
from weightd.protocol.tensors import spec_of

T = TypeVar("T")

WORKERS = 1
BLOCKS = 10  # of each, in turn
BLOCK = 500  # requests
WARM_UP = 200  # requests, not counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency(Result):
    """Figures in microseconds, each the median of the blocks' percentiles.

    Attributes:
        p50_us: a request to weightd, in the client, from array to array.
        two_hop_p50_us: the same frames to the worker and back, with nothing done on the way.
        ratio: the former by the latter.
        bare_predict_us: what the engine alone takes of p50_us; the echo has no such part.
    """

    benchmark = "latency"
    p50_us: float
    p99_us: float
    two_hop_p50_us: float
    two_hop_p99_us: float
    ratio: float
    bare_predict_us: float

    def targets(self) -> Sequence[Target]:
        """Return the bound of the ratio."""
        return [Target("ratio", 1.5)]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        return [
            ("weightd", f"p50 {self.p50_us:5.0f} us   p99 {self.p99_us:5.0f} us"),
            ("two-hop echo", f"p50 {self.two_hop_p50_us:5.0f} us   p99 {self.two_hop_p99_us:5.0f} us"),
            ("the engine's part", f"p50 {self.bare_predict_us:5.0f} us"),
        ]


def run(engine: str, workers: int = WORKERS) -> Latency:
    """Measure blocks of requests to weightd and to the echo in turn."""
    path = material.model(TINY, engine)
    inputs = material.inputs(TINY_WIDTH)
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(PlainProcess(path, engine))
        reference = Reference(bare, inputs)
        predict = bare.times(inputs[0], BLOCK + WARM_UP)[WARM_UP:]
        frames = _request(inputs[0])
        echo = stack.enter_context(Echo(_answer_sizes(bare.infer(inputs[0]))))
        service = stack.enter_context(Service({TINY: {"path": path, "workers": workers}}))
        service.ready()
        client = stack.enter_context(service.client())

        def infer(index: int) -> Arrays:
            return client.infer(TINY, inputs[index % len(inputs)])

        def ask(_: int) -> list[bytes]:
            return echo.ask(frames)

        _block(infer, WARM_UP)
        _block(ask, WARM_UP)
        ours: list[list[float]] = []
        theirs: list[list[float]] = []
        for block in range(BLOCKS):
            progress(f"block {block + 1} of {BLOCKS}")
            seconds, answers = _block(infer, BLOCK)
            ours.append(seconds)
            for index, answer in enumerate(answers):
                reference.check(index, answer)
            theirs.append(_block(ask, BLOCK)[0])
    p50, two_hop_p50 = median_over_blocks(ours, 50), median_over_blocks(theirs, 50)
    return Latency(
        engine=engine,
        workers=workers,
        n=BLOCKS * BLOCK,
        p50_us=1e6 * p50,
        p99_us=1e6 * median_over_blocks(ours, 99),
        two_hop_p50_us=1e6 * two_hop_p50,
        two_hop_p99_us=1e6 * median_over_blocks(theirs, 99),
        ratio=p50 / two_hop_p50,
        bare_predict_us=1e6 * float(np.median(predict)),
    )


def _block(request: Callable[[int], T], count: int) -> tuple[list[float], list[T]]:
    """Return the seconds that each of `count` requests takes, one after another, and their answers."""
    seconds: list[float] = []
    answers: list[T] = []
    for index in range(count):
        begin = time.perf_counter()
        answer = request(index)
        seconds.append(time.perf_counter() - begin)
        answers.append(answer)
    return seconds, answers


def _request(inputs: Arrays) -> list[bytes]:
    """Return the frames that a request of weightd's client has."""
    _, frames = ClientCore().infer(TINY, inputs, 30.0)
    return [bytes(frame) for frame in frames]


def _answer_sizes(outputs: Arrays) -> list[int]:
    """Return the sizes of the frames that weightd answers with."""
    specs = tuple(spec_of(name, array) for name, array in outputs.items())
    header = encode(InferResponse("12345-100", TINY, specs))
    return [len(header), *(array.nbytes for array in outputs.values())]
