"""Clients in threads that keep sending requests until the block ends."""

from __future__ import annotations

import abc
import collections
import threading
from typing import TypeVar

from benchmarks.material import MLP, Arrays
from testkit.service import Service
from weightd import Pending

C = TypeVar("C", bound="LoadClients")


class LoadClients(abc.ABC):
    """Keeps `in_flight` requests of each client in flight; a subclass handles the results.

    Args:
        service: the service that receives the requests.
        inputs: the inputs of the requests, used in turn.
        clients: number of clients.
        in_flight: number of requests in flight of each client.
    """

    def __init__(self, service: Service, inputs: list[Arrays], *, clients: int, in_flight: int) -> None:
        self._service = service
        self._inputs = inputs
        self._in_flight = in_flight
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    @abc.abstractmethod
    def take(self, number: int, pending: Pending) -> None:
        """Wait for the end of a request with input `number`. Called in the client's thread."""

    def __enter__(self: C) -> C:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with self._service.client() as client:
                pending: collections.deque[tuple[int, Pending]] = collections.deque()
                number = 0
                while not self._stop.is_set() or pending:
                    while not self._stop.is_set() and len(pending) < self._in_flight:
                        pending.append((number, client.submit(MLP, self._inputs[number % len(self._inputs)])))
                        number += 1
                    self.take(*pending.popleft())
        except BaseException as error:  # noqa: BLE001 - raised again at the end of the block
            self._failure = error
