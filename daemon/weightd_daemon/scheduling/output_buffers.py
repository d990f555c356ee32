"""Who may still write to the memory of clients, so that these know when it is theirs again.

A worker that has begun with a request cannot be stopped: it writes the outputs where there was room for them even if
the request has ended long before. Nor can be seen from here whether one has begun with what is taken back from it. Only
its answer, or its death, tells that it does so no more. Two never write to the same place: what runs again while the
one that had it first may still write is answered in frames. Parts of a request write to places of their own.

What is known of a request goes with it: it may end with another model than the one on which it has begun.
"""

from __future__ import annotations

from collections.abc import Iterable

from weightd_daemon.scheduling.batch import BatchItem
from weightd_daemon.scheduling.request import Request


class OutputBufferLeases:
    """The processes of a model that may still write.

    Attributes:
        leases: what they have been given, by process and number; while there is none nothing has to be asked.
    """

    def __init__(self) -> None:
        self.leases: dict[tuple[str, int], BatchItem] = {}

    def acquire(self, processes: Iterable[str], item: BatchItem) -> bool:
        """The processes of a slot are given a part that has room for outputs; return whether they may use it."""
        rows, request = item.row_range, item.request
        if any(rows.start < other.stop and other.start < rows.stop for other in request.pending_writes):
            return False
        for process in processes:
            self.leases[process, item.number] = item
            request.pending_writes += (rows,)
        return True

    def release(self, process: str, number: int) -> list[Request]:
        """The process has done with a part; return its request if that has ended, and nobody writes for it any more."""
        item = self.leases.pop((process, number), None)
        if item is None:
            return []
        request = item.request
        index = request.pending_writes.index(item.row_range)
        request.pending_writes = request.pending_writes[:index] + request.pending_writes[index + 1 :]
        return [request] if request.may_still_write and not request.pending_writes else []

    def release_process(self, process: str) -> list[Request]:
        """The process has ended; return the requests whose clients have to be told."""
        return [request for key in list(self.leases) if key[0] == process for request in self.release(*key)]
