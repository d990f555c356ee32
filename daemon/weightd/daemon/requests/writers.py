"""Who may still write to the memory of clients, so that these know when it is theirs again.

A worker that has begun with a request cannot be stopped: it writes the outputs where there was room for them even if
the request has ended long before. Nor can be seen from here whether one has begun with what is taken back from it. Only
its answer, or its death, tells that it does so no more. Two never write to the same place: what runs again while the
one that had it first may still write is answered in frames. Parts of a request write to places of their own.

What is known of a request goes with it: it may end with another model than the one on which it has begun.
"""

from __future__ import annotations

from collections.abc import Iterable

from weightd.daemon.requests.part import Part
from weightd.daemon.requests.request import Request


class Writers:
    """The processes of a model that may still write.

    Attributes:
        begun: what they have been given, by process and number; while there is none nothing has to be asked.
    """

    def __init__(self) -> None:
        self.begun: dict[tuple[str, int], Part] = {}

    def begin(self, processes: Iterable[str], part: Part) -> bool:
        """The processes of a seat are given a part that has room for outputs; return whether they may use it."""
        rows, request = part.all_rows, part.request
        if any(rows.start < other.stop and other.start < rows.stop for other in request.written):
            return False
        for process in processes:
            self.begun[process, part.number] = part
            request.written += (rows,)
        return True

    def end(self, process: str, number: int) -> list[Request]:
        """The process has done with a part; return its request if that has ended, and nobody writes for it any more."""
        part = self.begun.pop((process, number), None)
        if part is None:
            return []
        request = part.request
        at = request.written.index(part.all_rows)
        request.written = request.written[:at] + request.written[at + 1 :]
        return [request] if request.running and not request.written else []

    def died(self, process: str) -> list[Request]:
        """The process has ended; return the requests whose clients have to be told."""
        return [request for key in list(self.begun) if key[0] == process for request in self.end(*key)]
