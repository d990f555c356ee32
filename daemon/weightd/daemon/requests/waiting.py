"""Requests that wait, first come first served, and found by their client and id without a look at any other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from weightd.daemon.requests.request import Request


class Queue:
    """Requests in the order in which they are to run.

    Attributes:
        count: how many there are; cheaper than `len`, which is asked for with every message.
        nbytes: of the tensors of all of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.nbytes = 0
        self._requests: OrderedDict[int, Request] = OrderedDict()
        # By client and id; nobody keeps a client from using an id twice.
        self._index: dict[bytes, dict[str, dict[int, Request]]] = {}

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.number in self._requests

    @property
    def first(self) -> Request:
        """The one whose turn it is."""
        return next(iter(self._requests.values()))

    def append(self, request: Request) -> None:
        """Put a request at the end."""
        self._requests[request.number] = request
        self._index.setdefault(request.client, {}).setdefault(request.id, {})[request.number] = request
        self.count += 1
        self.nbytes += request.nbytes

    def put_back(self, requests: Sequence[Request]) -> None:
        """Put requests at the head, in their order."""
        for request in reversed(requests):
            self.append(request)
            self._requests.move_to_end(request.number, last=False)

    def take(self) -> Request:
        """Take out the first."""
        _, request = self._requests.popitem(last=False)
        self._forget(request)
        return request

    def remove(self, request: Request) -> None:
        """Take one out."""
        del self._requests[request.number]
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.count -= 1
        self.nbytes -= request.nbytes
        of_client = self._index[request.client]
        of_id = of_client[request.id]
        del of_id[request.number]
        if not of_id:
            del of_client[request.id]
            if not of_client:
                del self._index[request.client]

    def withdraw(self, unfit: Callable[[Request], bool]) -> list[Request]:
        """Take out all that are `unfit`, at the cost of a look at each."""
        return self._withdrawn([request for request in self if unfit(request)])

    def withdraw_of(self, client: bytes, request_id: str | None = None) -> list[Request]:
        """Take out a client's requests, or those of its requests that have this id."""
        of_client = self._index.get(client)
        if of_client is None:
            return []
        found = of_client.values() if request_id is None else [of_client.get(request_id, {})]
        return self._withdrawn([request for each in found for request in each.values()])

    def _withdrawn(self, requests: list[Request]) -> list[Request]:
        for request in requests:
            self.remove(request)
        return requests
