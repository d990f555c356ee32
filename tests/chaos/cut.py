"""Model of a run that a rank group computes, on simulated cards or with the real MindSpore on the CPU."""

from __future__ import annotations

import shlex
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import ascendsim
from ascendsim import ranks as simulated
from testkit import ranks as real

NAME = "cut"

RANKS = 2
# The engine compiles the model for each number of rows; the real MindSpore takes 0.2 s.
_MOST_ROWS = 4

Arrays = Mapping[str, NDArray[Any]]


class ShardedModel(NamedTuple):
    """A model that is split over ranks, and requests with the right answers.

    Attributes:
        path: path of its slices, with {rank}.
        engine: name of the engine.
        python: interpreter with this engine.
        table: further keys of its configuration.
        questions: requests with their answers.
    """

    path: Path
    engine: str
    python: Path
    table: Mapping[str, object]
    questions: Sequence[tuple[Arrays, Arrays]]


def make(directory: Path, count: int, rng: np.random.Generator, *, is_real: bool) -> ShardedModel:
    """Write the model into the directory, with `count` requests."""
    return _real(directory, count) if is_real else _simulated(directory, count, rng)


def _simulated(directory: Path, count: int, rng: np.random.Generator) -> ShardedModel:
    host = ascendsim.Host(directory / "host", cards=RANKS)
    slices = simulated.mlp(directory / NAME, RANKS)
    asked = [{"x": _whole_numbers(rng, 1 + index % _MOST_ROWS)} for index in range(count)]
    answered = [{"output_0": slices.answers(each["x"])[-1]} for each in asked]
    selftest = directory / "selftest.npz"
    np.savez(selftest, allow_pickle=False, **asked[0], **answered[0])
    table = {"selftest": selftest, "ranks.devices": [f"ascend:{card}" for card in range(RANKS)]}
    python = _interpreter(directory / "python", ascendsim.environment(host))
    path = slices.paths[0].with_name("rank{rank}.mindir")
    return ShardedModel(path, "mindspore_lite", python, table, list(zip(asked, answered, strict=True)))


def _real(directory: Path, count: int) -> ShardedModel:
    slices = real.export(directory / NAME, ranks=RANKS)
    python = real.interpreter()
    if python is None:
        raise RuntimeError(real.HOW_TO_GET_IT)
    asked = [real.inputs(1 + index % _MOST_ROWS, index) for index in range(count)]
    with real.Group(slices.paths, plain=True) as group:
        answered = [group.ask("predict", each)[-1] for each in asked]
    table = {"selftest": slices.selftest_path, "selftest_tolerance": 1e-5, "ranks.devices": ["cpu"] * RANKS}
    return ShardedModel(Path(slices.pattern), "mindspore", python, table, list(zip(asked, answered, strict=True)))


def _whole_numbers(rng: np.random.Generator, rows: int) -> NDArray[np.float32]:
    """Return small whole numbers, for which the slices compute the same bits as the whole model."""
    return rng.integers(-3, 4, (rows, 16)).astype(np.float32)


def _interpreter(path: Path, environment: Mapping[str, str]) -> Path:
    """Write a launcher of this interpreter that finds the simulated library; other models use the real one."""
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()]
    path.write_text(f'#!/bin/sh\n{"".join(lines)}exec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
