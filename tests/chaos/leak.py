"""`python -m tests.chaos.leak`: resources of daemon, ZeroMQ proxy and workers before and after many requests."""

from __future__ import annotations

import argparse
import itertools
import time
from collections import deque
from collections.abc import Iterable, Mapping

from testkit.waiting import until
from weightd import Client, Pending

from . import material
from .material import Model, NoEngineError, SampleRequest
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

# 4 MiB in 200,000 requests are 21 bytes per request, less than the smallest object that could leak. A descriptor or a
# mapping that leaks in each of 30 loads exceeds the other limits.
TOLERANCE = Usage(fds=2, threads=0, maps=24, rss=4 * MIB, pss=4 * MIB)


def run(service: Service, steady: Model, guest: Model, requests: int, cycles: int) -> list[str]:
    """Send requests to the steady model over both transports, load and unload the guest; return growth as texts.

    Prints the resource use after each tenth.
    """
    service.start()
    service.await_health(_LIMIT_S)
    questions = itertools.cycle(material.load(steady.path))

    def work(count: int, loads: int) -> None:
        for share, address in enumerate((service.unix_address, service.zmq_address)):
            with Client(address, timeout=_LIMIT_S) as client:
                ask(client, steady.name, itertools.islice(questions, _share(count, share, of=2)))
        for _ in range(loads):
            _load_and_unload(service, guest)

    def show(when: str) -> Mapping[str, Usage]:
        """Measure the daemon, the zygote, the proxy and the steady model's workers; these processes do not change."""
        held = service.in_quiet(_LIMIT_S)
        held |= {each.name: usage(each.pid) for each in processes(service.status(), steady.name)}
        print(f"{time.strftime('%H:%M:%S')} {when}", *(f"  {n:<18}{u}" for n, u in held.items()), sep="\n", flush=True)
        return held

    work(_WARM_UP_REQUESTS, _WARM_UP_CYCLES)
    before = after = show("after the warm-up")
    for step in range(STEPS):
        work(_share(requests, step), _share(cycles, step))
        after = show(f"{step + 1}/{STEPS}")
    return [f"{name}: {each}" for name in before for each in growth(before[name], after[name], TOLERANCE)]


def _load_and_unload(service: Service, guest: Model) -> None:
    """Add the guest to the configuration and reload; remove it and reload.

    Meanwhile a client that shares memory with the model sends requests to it.
    """
    service.configure("guest", {"path": guest.path, "python": guest.python, "workers": WORKERS})
    service.reload()
    service.await_health(_LIMIT_S)
    with Client(service.unix_address, timeout=_LIMIT_S) as client:
        ask(client, "guest", material.load(guest.path))
    service.drop("guest")
    service.reload()
    until(lambda: all(each.name != "guest" for each in service.status().models), "the model is unloaded", _LIMIT_S)


def main() -> int:
    """Measure; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.leak", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--cycles", type=int, default=CYCLES)
    options = parser.parse_args()
    place = workspace("leak-")
    try:
        models = {model.name: model for model in material.make(place, seed=0) if not model.table}
    except NoEngineError as error:
        print(error)
        return 2
    steady, guest = models["tiny"], models["elastic"]
    tables = {each.name: {"path": each.path, "python": each.python, "workers": WORKERS} for each in (steady, guest)}
    service = Service(place, {}, tables)
    passed = False
    try:
        grown = run(service, steady, guest, options.requests, options.cycles)
        service.stop()
        print(*(f"LEAK: {each}" for each in grown), "FAILED" if grown else "PASSED", sep="\n")
        passed = not grown
    finally:
        service.remove(keep=not passed)
    return 0 if passed else 1


def ask(client: Client, model: str, questions: Iterable[SampleRequest]) -> None:
    """Send many requests at once, and compare each answer."""
    flights: deque[tuple[Pending, SampleRequest]] = deque()

    def check() -> None:
        pending, question = flights.popleft()
        if not question.answered_by(pending.result()):
            raise AssertionError("an answer differs from the engine's")

    for question in questions:
        if len(flights) == _IN_FLIGHT:
            check()
        flights.append((client.submit(model, question.inputs), question))
    while flights:
        check()


def _share(total: int, step: int, of: int = STEPS) -> int:
    return total * (step + 1) // of - total * step // of


if __name__ == "__main__":
    raise SystemExit(main())
