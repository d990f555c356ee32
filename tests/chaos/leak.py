"""`python -m tests.chaos.leak`: many requests, many loads, and what daemon and workers hold before and after."""

from __future__ import annotations

import argparse
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from testkit.waiting import until
from weightd.client import Client
from weightd.client.client import Pending
from weightd.protocol.messages.status import StatusResponse

from . import material
from .material import Model, NoEngineError, Question
from .resources import MIB, Usage, growth, usage
from .service import Service, processes, workspace

REQUESTS = 200_000
CYCLES = 30
STEPS = 10
WORKERS = 2

_WARM_UP_REQUESTS = 20_000
_WARM_UP_CYCLES = 3
_IN_FLIGHT = 16
_LIMIT_S = 120.0

# 4 MiB in 200,000 requests are 21 bytes for each: less than the least object that could be forgotten with one. Thirty
# loads that each leave a descriptor or a mapping of their own are beyond the other bounds.
TOLERANCE = Usage(fds=2, threads=0, maps=24, rss=4 * MIB, pss=4 * MIB)


@dataclass
class Leak:
    """The measurement.

    Args:
        service: serves `steady`, which is asked all the time, and `loaded`, which is loaded again and again.
        steady: the model with small tensors.
        loaded: the other one.
    """

    service: Service
    steady: Model
    loaded: Model

    def run(self, requests: int, cycles: int) -> list[str]:
        """Ask and load; print what is held at each tenth, and return what has grown."""
        self.service.start()
        self.service.await_health(_LIMIT_S)
        questions = itertools.cycle(material.load(self.steady.path))
        self._work(questions, _WARM_UP_REQUESTS, _WARM_UP_CYCLES)
        before = self._show("after the warm-up")
        after = before
        for step in range(STEPS):
            share = _share(cycles, step)
            self._work(questions, _share(requests, step), share)
            after = self._show(f"{step + 1}/{STEPS}")
        return [f"{name}: {each}" for name in before for each in growth(before[name], after[name], TOLERANCE)]

    def _work(self, questions: Iterator[Question], requests: int, cycles: int) -> None:
        with Client(self.service.address, timeout=_LIMIT_S) as client:
            _ask(client, self.steady.name, itertools.islice(questions, requests))
            for _ in range(cycles):
                if hasattr(client, "reload"):
                    self._load_and_unload()
                else:
                    client.update(self.loaded.name, str(self.loaded.path))

    def _load_and_unload(self) -> None:
        """As an operator does: another table in the file and SIGHUP; without the table, and SIGHUP."""
        self.service.add("guest", {"path": self.loaded.path, "python": self.loaded.python, "workers": WORKERS})
        self.service.reload()
        self.service.await_health(_LIMIT_S)
        self.service.drop("guest")
        self.service.reload()
        until(lambda: "guest" not in _names(self.service.status()), "the model is unloaded", _LIMIT_S)

    def _show(self, when: str) -> Mapping[str, Usage]:
        """Measure the daemon and the steady model's workers; they are the same processes all the time."""
        held = {"daemon": self.service.in_quiet(_LIMIT_S)}
        held |= {each.name: usage(each.pid) for each in processes(self.service.status(), self.steady.name)}
        print(f"{time.strftime('%H:%M:%S')} {when}", *(f"  {n:<18}{u}" for n, u in held.items()), sep="\n", flush=True)
        return held


def main() -> int:
    """Measure; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.leak", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--cycles", type=int, default=CYCLES)
    options = parser.parse_args()
    place = workspace("leak-")
    try:
        models = {model.name: model for model in material.make(place, seed=0)}
    except NoEngineError as error:
        print(error)
        return 2
    chosen = [models["tiny"], models["elastic"]]
    tables = {each.name: {"path": each.path, "python": each.python, "workers": WORKERS} for each in chosen}
    service = Service(place, {}, tables)
    passed = False
    try:
        grown = Leak(service, *chosen).run(options.requests, options.cycles)
        service.stop()
        print(*(f"LEAK: {each}" for each in grown), "FAILED" if grown else "PASSED", sep="\n")
        passed = not grown
    finally:
        service.remove(keep=not passed)
    return 0 if passed else 1


def _ask(client: Client, model: str, questions: Iterable[Question]) -> None:
    flights: deque[tuple[Pending, Question]] = deque()
    for question in questions:
        if len(flights) == _IN_FLIGHT:
            _check(*flights.popleft())
        flights.append((client.submit(model, question.inputs), question))
    while flights:
        _check(*flights.popleft())


def _check(pending: Pending, question: Question) -> None:
    if not question.answered_by(pending.result()):
        raise AssertionError("an answer is not the bare engine's")


def _share(total: int, step: int) -> int:
    return total * (step + 1) // STEPS - total * step // STEPS


def _names(status: StatusResponse) -> set[str]:
    return {model.name for model in status.models}


if __name__ == "__main__":
    raise SystemExit(main())
