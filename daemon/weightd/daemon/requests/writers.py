"""Who may still write to the memory of clients, so that these know when it is theirs again.

A worker that has begun with a request cannot be stopped: it writes the outputs where there was room for them even if
the request has ended long before. Nor can be seen from here whether one has begun with what is taken back from it. Only
its answer, or its death, tells that it does so no more. Two never write to the same place: a request that runs again
while the one that had it first may still write is answered in frames.
"""

from __future__ import annotations

from collections.abc import Iterable

from weightd.daemon.requests.request import Request


class Writers:
    """The requests for which processes may still write.

    Attributes:
        begun: by process and number; while there are none nothing has to be asked.
    """

    def __init__(self) -> None:
        self.begun: dict[tuple[str, int], Request] = {}
        # Those that have ended while they were: their clients wait to be told.
        self._owed: set[int] = set()

    def begin(self, processes: Iterable[str], request: Request) -> bool:
        """The processes of a seat are given a request that has room for outputs; return whether they may use it."""
        if self._has_writer(request):
            return False
        self.begun.update(((process, request.number), request) for process in processes)
        return True

    def is_running(self, request: Request) -> bool:
        """The request ends: return whether its client has to be told later that nobody writes any more."""
        if not self._has_writer(request):
            return False
        self._owed.add(request.number)
        return True

    def end(self, process: str, number: int) -> list[Request]:
        """The process has done with a request; return it if its client has to be told."""
        request = self.begun.pop((process, number), None)
        return self._released(request) if request is not None and number in self._owed else []

    def died(self, process: str) -> list[Request]:
        """The process has ended; return the requests whose clients have to be told."""
        requests = [self.begun.pop(key) for key in list(self.begun) if key[0] == process]
        return [released for request in requests for released in self._released(request)]

    def _released(self, request: Request) -> list[Request]:
        if request.number not in self._owed or self._has_writer(request):
            return []
        self._owed.remove(request.number)
        return [request]

    def _has_writer(self, request: Request) -> bool:
        return any(number == request.number for _, number in self.begun)
