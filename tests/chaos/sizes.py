"""`python -m tests.chaos.sizes`: memory that workers keep and release after requests of mixed sizes.

Pages that a forked worker shares with other processes count as well, so a write, which makes a page private, does not
change the count.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from testkit import mindir, models
from testkit.plain import PlainProcess
from testkit.service import Service
from weightd import Client

from .leak import ask
from .material import Model, SampleRequest, frozen
from .resources import MIB, anonymous, own_by_mapping
from .service import workspace

MINUTES = 10.0
MOST_GROWTH, SLACK = 1.1, MIB
STEPS = 5

# A worker frees kept memory after ten seconds without a request.
_IDLE_S = 15.0

# The latency does not matter here, and the machine may be busy.
_LIMIT_S = 600.0
_WIDTH, _IMAGE = 512, (3, 96, 96)

# Model: its writer, the shape of a row, the maximum of rows, and the number of requests.
_MODELS: Mapping[str, tuple[Callable[[Path], Path], tuple[int, ...], int, int]] = {
    "dense": (lambda path: models.mlp(path, layers=4, width=_WIDTH), (_WIDTH,), 512, 24),
    "conv": (lambda path: models.convolutions(path, size=_IMAGE[1]), _IMAGE, 32, 12),
}


@dataclasses.dataclass(frozen=True)
class _ModelSamples:
    model: Model
    questions: list[SampleRequest]


def main() -> int:
    """Run the load; return 1 if an idle worker uses more memory at the end than at the start."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.sizes", description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--engine", choices=["onnxruntime", "mindspore_lite"], default="onnxruntime")
    options = parser.parse_args()
    place = workspace("sizes-")
    asked = [_make(place, options.engine, name) for name in _MODELS]
    with Service({each.model.name: {"path": each.model.path} for each in asked}) as service:
        service.ready()
        _show("ready", service)
        _ask(service, asked, 0.0)
        before = _idle("after one pass", service)
        for step in range(STEPS):
            _ask(service, asked, options.minutes * 60 / STEPS)
            _show(f"{step + 1}/{STEPS}", service)
        after = _idle("at the end", service)
    grown = [name for name, size in after.items() if size > MOST_GROWTH * before[name] + SLACK]
    print(*(f"GROWN: {name} from {before[name] / MIB:.1f} to {after[name] / MIB:.1f} MiB" for name in grown), sep="\n")
    return 1 if grown else 0


def _make(place: Path, engine: str, name: str) -> _ModelSamples:
    write, shape, most, count = _MODELS[name]
    path = write(place / f"{name}.onnx")
    python = mindir.interpreter()
    if engine == "mindspore_lite":
        if python is None:
            raise SystemExit(mindir.HOW_TO_GET_IT)
        path = mindir.convert(path, path.with_suffix(".mindir"), python)
    rng = np.random.default_rng(0)
    # Minimum, maximum, and a log-uniform distribution between them.
    rows = [1, most, *(int(math.exp(rng.uniform(0, math.log(most)))) for _ in range(count - 2))]
    questions: list[SampleRequest] = []
    with PlainProcess(path, engine) as plain:
        for each in rows:
            x = {"x": rng.standard_normal((each, *shape), dtype=np.float32)}
            questions.append(SampleRequest(x, {key: frozen(array) for key, array in plain.infer(x).items()}))
    return _ModelSamples(Model(name, path, engine, Path(), dense=True), questions)


def _ask(service: Service, asked: list[_ModelSamples], seconds: float) -> None:
    """Send all requests to each model, in shared memory and in frames in turn, for at least `seconds`."""
    end = time.monotonic() + seconds
    rng = np.random.default_rng(0)
    with (
        Client(f"unix://{service.address}", timeout=_LIMIT_S) as unix,
        Client(service.zmq_address, timeout=_LIMIT_S) as zmq,
    ):
        for client, each in itertools.cycle(itertools.product((unix, zmq), asked)):
            rng.shuffle(each.questions)
            ask(client, each.model.name, each.questions)
            if time.monotonic() > end and (client, each) == (zmq, asked[-1]):
                return


def _idle(when: str, service: Service) -> dict[str, int]:
    time.sleep(_IDLE_S)
    return _show(f"{when}, idle", service)


def _show(when: str, service: Service) -> dict[str, int]:
    """Print the memory of each process, and its private part by kind of mapping; return the former."""
    held: dict[str, int] = {}
    print(f"{time.strftime('%H:%M:%S')} {when}")
    for each in service.processes():
        held[each.name] = anonymous(each.pid)
        own = own_by_mapping(each.pid)
        parts = ", ".join(f"{kind} {size / MIB:.1f}" for kind, size in own.items() if size > MIB // 10)
        sums = f"{held[each.name] / MIB:6.1f} MiB, private {sum(own.values()) / MIB:5.1f}"
        print(f"  {each.name:<16}{sums}: {parts}", flush=True)
    return held


if __name__ == "__main__":
    raise SystemExit(main())
