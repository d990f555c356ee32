"""Requests to models by Zipf's law, and the hit rate of an LRU cache for the same requests."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

import numpy as np

from benchmarks.material import Arrays
from benchmarks.rounds import BackgroundThread
from testkit import memory
from testkit.service import Service
from weightd import RequestError

# How often the reserved memory is read, and the PSS of the service with every n-th of these readings.
_INTERVAL_S = 0.25
_PSS_EVERY = 20


class Sent(NamedTuple):
    """A request: when it was sent (time.perf_counter), its model, its seconds, and the code of its error or ""."""

    at: float
    model: str
    seconds: float
    error: str


class ZipfClients:
    """Clients in threads, each with one request at a time, until the block ends.

    Args:
        service: the service that receives the requests.
        inputs: the inputs of the requests, chosen at random.
        answers: the bytes of the answers to the inputs, by model; the first model is requested most often.
        clients: number of clients.
        timeout: deadline of each request in seconds.

    Attributes:
        sent: the requests that have ended.
        wrong_answers: how many of their answers differ from `answers`.
    """

    def __init__(
        self,
        service: Service,
        inputs: Sequence[Arrays],
        answers: Mapping[str, Sequence[bytes]],
        *,
        clients: int,
        timeout: float = 60.0,
    ) -> None:
        self._service = service
        self._inputs = inputs
        self._answers = answers
        self._timeout = timeout
        self._names = list(answers)
        shares = 1 / np.arange(1, len(self._names) + 1)
        self._probabilities = shares / shares.sum()
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]
        self.sent: list[Sent] = []
        self.wrong_answers = 0

    def __enter__(self) -> ZipfClients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for failure in self._failures:
            raise failure

    def _run(self, number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            with self._service.client(self._timeout) as client:
                while not self._stop.is_set():
                    name = self._names[rng.choice(len(self._names), p=self._probabilities)]
                    index = int(rng.integers(len(self._inputs)))
                    at, code = time.perf_counter(), ""
                    try:
                        answer = client.infer(name, self._inputs[index])
                        self.wrong_answers += answer["y"].tobytes() != self._answers[name][index]
                    except RequestError as error:
                        code = error.code
                    self.sent.append(Sent(at, name, time.perf_counter() - at, code))
        except BaseException as error:  # noqa: BLE001 - raised again at the end of the block
            self._failures.append(error)


class MemoryProbe(BackgroundThread):
    """Reads the memory of a service in a thread until the block ends.

    Attributes:
        max_reserved: the most bytes that were reserved for models at once.
        pss: the readings of the PSS of all processes of the service, in bytes.
        needs: the last reserved bytes of each model.
    """

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service
        self.max_reserved = 0
        self.pss: list[int] = []
        self.needs: dict[str, int] = {}

    def _run(self) -> None:
        with self._service.client() as client:
            number = 0
            while not self._stop.wait(_INTERVAL_S):
                # The status would measure the memory of every process each time.
                loaded = {each.name: each.reserved_bytes for each in client.metrics().models if each.reserved_bytes}
                self.max_reserved = max(self.max_reserved, sum(loaded.values()))
                self.needs.update(loaded)
                if number % _PSS_EVERY == 0:
                    self.pss.append(service_pss(self._service))
                number += 1


def service_pss(service: Service) -> int:
    """Return the PSS of all processes of a service, except processes that exit meanwhile."""
    total = 0
    for pid in service.pids():
        try:
            total += memory.pss(pid)
        except ProcessLookupError:
            continue
    return total


def lru_hit_rate(models: Sequence[str], needs: Mapping[str, int], budget: int) -> float:
    """Return the part of the requests to `models` that an LRU cache of `budget` bytes answers without a load."""
    cache: collections.OrderedDict[str, int] = collections.OrderedDict()
    hits = 0
    for model in models:
        if model in cache:
            cache.move_to_end(model)
            hits += 1
            continue
        while cache and sum(cache.values()) + needs[model] > budget:
            cache.popitem(last=False)
        cache[model] = needs[model]
    return hits / len(models)
