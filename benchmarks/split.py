"""One request split over two sets of cores, against one set and against a script that splits by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import material
from benchmarks.halves import Halves
from benchmarks.material import (
    MLP,
    MLP_WIDTH,
    TRANSFORMER,
    TRANSFORMER_SHAPE,
    Arrays,
    Reference,
    Setup,
    UnavailableError,
)
from benchmarks.report import Ratio, Result, Target, progress, ratio, spread
from testkit.plain import PlainProcess
from testkit.service import Service

WORKERS = 1  # on each set of cores
ROWS = 64
PART_ROWS = ROWS // 2
ROUNDS = 31  # of each side, alternating
MODELS: Mapping[str, tuple[int, ...]] = {MLP: (MLP_WIDTH,), TRANSFORMER: TRANSFORMER_SHAPE}

_ONE, _TWO, _BARE_ONE, _BARE_TWO = "one", "two", "one by hand", "two by hand"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split(Result):
    """Results of one request of `request_rows` rows; times are medians, ratios are compared round by round.

    Attributes:
        ratio: weightd's time on two sets of one core each, divided by its time on one set; the smallest of all models.
        bare_ratio: the time of a script that splits by hand over two processes, divided by weightd's time on two sets;
            the smallest of all models.
        bare_two_to_one: the script's time with two processes divided by its time with one, which shows what the machine
            allows; the smallest of all models.
        ratios, bare_ratios, bare_two_to_ones: the ratios of each model.
        seconds: times of each side, by model.
        spreads: quartiles of the ratios.
    """

    benchmark = "split"
    request_rows: int
    ratio: float
    bare_ratio: float
    bare_two_to_one: float
    ratios: Mapping[str, float]
    bare_ratios: Mapping[str, float]
    bare_two_to_ones: Mapping[str, float]
    seconds: Mapping[str, Mapping[str, float]]
    spreads: Mapping[str, tuple[float, float]]

    def targets(self) -> Sequence[Target]:
        """Return the bounds of the ratios."""
        return [Target("ratio", 0.6), Target("bare_ratio", 0.95, at_least=True)]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        rows = [
            (f"{name}, {self.request_rows} rows, {who}", f"{1e3 * each:6.1f} ms")
            for name, ms in self.seconds.items()
            for who, each in ms.items()
        ]
        rows += [
            (
                f"{name}: ratio, bare_ratio, bare_two_to_one",
                f"{self.ratios[name]:.3f}, {self.bare_ratios[name]:.3f}, {self.bare_two_to_ones[name]:.3f}",
            )
            for name in self.ratios
        ]
        return rows + [(name, spread(each)) for name, each in self.spreads.items()]


def run(setup: Setup) -> Split:
    """Measure each model on one set of cores, on two sets and with the script, in turn."""
    if setup.engine != "onnxruntime":
        raise UnavailableError("split: expected --engine onnxruntime")
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise UnavailableError("split: expected at least two cores")
    seconds: dict[str, dict[str, list[float]]] = {}
    for name, shape in MODELS.items():
        seconds[name] = _seconds(setup, name, shape, cores)
    on_two = {name: ratio(each[_TWO], each[_ONE]) for name, each in seconds.items()}
    by_hand = {name: ratio(each[_BARE_TWO], each[_TWO]) for name, each in seconds.items()}
    two_to_one = {name: ratio(each[_BARE_TWO], each[_BARE_ONE]) for name, each in seconds.items()}
    compared = {"ratio": on_two, "bare_ratio": by_hand, "bare_two_to_one": two_to_one}
    return Split(
        engine=setup.engine,
        workers=setup.workers,
        n=ROUNDS,
        request_rows=ROWS,
        ratio=min(each.median for each in on_two.values()),
        bare_ratio=min(each.median for each in by_hand.values()),
        bare_two_to_one=min(each.median for each in two_to_one.values()),
        ratios=_medians(on_two),
        bare_ratios=_medians(by_hand),
        bare_two_to_ones=_medians(two_to_one),
        seconds={name: {who: statistics.median(each) for who, each in of.items()} for name, of in seconds.items()},
        spreads={f"{key}, {name}": each.spread for key, of in compared.items() for name, each in of.items()},
    )


def _seconds(setup: Setup, name: str, shape: tuple[int, ...], cores: Sequence[int]) -> dict[str, list[float]]:
    """Return the seconds of each request, by side."""
    path = material.model(name, setup.engine)
    inputs = material.inputs(*shape, rows=ROWS)
    with PlainProcess(path) as plain:
        reference = Reference(plain, inputs)
    seconds: dict[str, list[float]] = {who: [] for who in (_ONE, _TWO, _BARE_ONE, _BARE_TWO)}
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(_service(path, setup.workers, cores))
        service.ready()
        client = stack.enter_context(setup.client(service))
        halves = stack.enter_context(Halves(path, (ROWS, *shape), cores))
        senders: dict[str, Callable[[Arrays], Arrays]] = {
            _ONE: lambda each: client.infer(_ONE, each),
            _TWO: lambda each: client.infer(_TWO, each),
            _BARE_ONE: lambda each: {"y": halves.infer(each["x"], 1)},
            _BARE_TWO: lambda each: {"y": halves.infer(each["x"], 2)},
        }
        for number in range(ROUNDS + 1):
            progress(f"{name}, round {number} of {ROUNDS}")
            for who, ask in senders.items():
                index = number % len(inputs)
                begin = time.perf_counter()
                answer = ask(inputs[index])
                took = time.perf_counter() - begin
                reference.check(index, answer)
                if number:
                    seconds[who].append(took)
    return seconds


def _service(path: Path, workers: int, cores: Sequence[int]) -> Service:
    devices = {f"cpu:{index}": {"cpus": str(core)} for index, core in enumerate(cores)}
    table = {"path": path, "workers": workers}
    split = {"devices": list(devices), "split": {"part_rows": PART_ROWS}}
    return Service({_ONE: {**table, "devices": list(devices)[:1]}, _TWO: {**table, **split}}, devices=devices)


def _medians(ratios: Mapping[str, Ratio]) -> Mapping[str, float]:
    return {name: each.median for name, each in ratios.items()}
