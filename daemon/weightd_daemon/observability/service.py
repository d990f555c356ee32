"""Service that answers requests for status, metrics, events and logs with a limited share of the loop's time.

In each turn of the loop, `Reports` answers one request, so that the loop can do other work in between. It limits the
time that the requests of one user take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from weightd_daemon.observability.event_log import EventLog
from weightd_daemon.observability.log_tail import LogTailReader
from weightd_daemon.observability.memory import MemoryReader, MemoryScan
from weightd_daemon.observability.snapshot import SnapshotBuilder
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop, Timer
from weightd_daemon.scheduling.signature import MetadataRequest
from weightd_daemon.tenants.tenant import Viewer
from weightd_protocol.errors import RequestError, ResourceExhausted
from weightd_protocol.messages.events import Events, Logs
from weightd_protocol.messages.types import DaemonMessage

# Maximum number of pending requests of one user, and of all users. Each response may take milliseconds of the loop's
# time.
MAX_PER_USER = 8
MAX_PENDING = 16

# Fraction of the loop's time that the requests of one user may take.
LOOP_SHARE = 0.1

# Seconds of the loop's time that a user's requests may take at once after a pause, so that occasional requests are
# answered without delay.
BURST_S = 0.1


# Maximum number of pending logs requests. Each may read a megabyte, and only operators may send them.
_MAX_LOG_READERS = 4


class Responses(Protocol):
    """Sender of replies to clients."""

    def reply(self, client: bytes, message: DaemonMessage) -> None:
        """Send a message."""
        ...

    def reply_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Send an error."""
        ...


class StatusService:
    """Collects the daemon's state for requests of clients, and sends each response when it is complete.

    Args:
        snapshots: builds responses from the daemon's state.
        event_log: keeps the recent events.
        loop: the event loop that answers the requests.
        responses: returns the sender of replies. It is a function, because the sender is created after this service.

    Attributes:
        timer: answers the next request when the requesting user has time left again; the caller adds it to the loop.
    """

    def __init__(
        self, snapshots: SnapshotBuilder, event_log: EventLog, loop: EventLoop, responses: Callable[[], Responses]
    ) -> None:
        self._snapshots = snapshots
        self._event_log = event_log
        self._loop = loop
        self._responses = responses
        self._reports = Reports(
            loop, lambda requester, error: responses().reply_error(requester.client, requester.request_id, error)
        )
        self.timer = self._reports.timer
        self._memory_reader = MemoryReader(loop, self._reports.wake)
        self._log_readers: list[LogTailReader] = []

    def report_status(self, requester: MetadataRequest, viewer: Viewer) -> None:
        """Answer a status request. If the viewer can see all tenants, the response includes each process's memory.

        Raises:
            ResourceExhausted: too many requests of the user are pending.
        """
        if not viewer.can_see_all:
            self._answer(requester, lambda: self._snapshots.tenant_status(requester.request_id, viewer.tenant))
            return
        scan = MemoryScan(requester.request_id, self._snapshots.measured(), self._memory_reader.find)
        self._answer(requester, lambda: self._snapshots.status(scan), scan.is_complete)

    def report_metrics(self, requester: MetadataRequest, viewer: Viewer) -> None:
        """Answer a metrics request; raise the same errors as `report_status`."""
        self._answer(requester, lambda: self._snapshots.metrics(requester.request_id, viewer))

    def report_events(self, requester: MetadataRequest, request: Events) -> None:
        """Answer an events request; raise the same errors as `report_status`."""
        self._answer(requester, lambda: self._event_log.query(request))

    def report_logs(self, client: bytes, request: Logs) -> None:
        """Answer a logs request when the log files have been read.

        Raises:
            ResourceExhausted: too many logs requests are pending.
        """
        if len(self._log_readers) == _MAX_LOG_READERS:
            raise ResourceExhausted(f"{_MAX_LOG_READERS} log requests are running already")
        self._log_readers.append(LogTailReader(client, request, self._snapshots.log_files(request.model_name)))
        self._loop.call_soon(self._read_next_log)

    def _answer(
        self,
        requester: MetadataRequest,
        make: Callable[[], DaemonMessage],
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._reports.add(requester, lambda: self._responses().reply(requester.client, make()), is_ready)

    def _read_next_log(self) -> None:
        """Read one log file for the first pending logs request."""
        if self._log_readers[0].step():
            reader = self._log_readers.pop(0)
            self._responses().reply(reader.client, reader.response)
        if self._log_readers:
            self._loop.call_soon(self._read_next_log)


class _PendingReport(NamedTuple):
    """A pending request. `answer` sends the response.

    `is_ready` returns whether `answer` may be called; if not, `Reports.wake` is called later.
    """

    requester: MetadataRequest
    answer: Callable[[], object]
    is_ready: Callable[[], bool]


class Reports:
    """Queue of pending requests. It answers them one by one, and divides the loop's time among users.

    Args:
        loop: the event loop that calls `step`.
        reject: called with a request that is dropped because the queue is full, and the error for its client.
        get_time: returns monotonic seconds.
    """

    def __init__(
        self,
        loop: EventLoop,
        reject: Callable[[MetadataRequest, ResourceExhausted], object],
        get_time: Callable[[], float] = event_loop.now,
    ) -> None:
        self._loop = loop
        self._reject = reject
        self._get_time = get_time
        self._pending: list[_PendingReport] = []
        self._counts_by_user = Counter[str]()
        # An answer that takes s seconds uses up its user's share of the next s / `LOOP_SHARE` seconds. By user: until
        # when the share is used up.
        self._paid_until: dict[str, float] = {}
        self.timer = Timer(lambda _: self.step())

    def add(
        self, requester: MetadataRequest, answer: Callable[[], object], is_ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Add a request. If more than `MAX_PENDING` are pending, reject one of the user with the most requests.

        Raises:
            ResourceExhausted: `MAX_PER_USER` requests of the user are already pending.
        """
        if self._counts_by_user[requester.user] == MAX_PER_USER:
            text = f"{MAX_PER_USER} status, metrics and events requests of this user are waiting already"
            raise ResourceExhausted(text, retry_after=self._retry_after_s(requester))
        self._pending.append(_PendingReport(requester, answer, is_ready))
        self._counts_by_user[requester.user] += 1
        self.wake()
        if len(self._pending) > MAX_PENDING:
            last = self._next_to_evict()
            self._remove(last)
            text = f"{MAX_PENDING} status, metrics and events requests are waiting already, most of them of this user"
            self._reject(last.requester, ResourceExhausted(text, retry_after=self._retry_after_s(last.requester)))

    def wake(self) -> None:
        """Continue, because a request may be ready now."""
        self._loop.call_soon(self.step)

    def step(self) -> None:
        """Answer the user who has used the least loop time; if the user's share is used up, set `timer`."""
        ready = [each for each in self._pending if each.is_ready()]
        if not ready:
            return
        started_at = self._get_time()
        self._paid_until = {user: at for user, at in self._paid_until.items() if at > started_at}
        pending = min(ready, key=lambda each: self._paid_until.get(each.requester.user, 0.0))
        user = pending.requester.user
        due_at = self._paid_until.get(user, 0.0) - BURST_S / LOOP_SHARE
        if due_at > started_at:
            self.timer.set(due_at)
            return
        pending.answer()
        self._remove(pending)
        self._paid_until[user] = (
            max(started_at, self._paid_until.get(user, 0.0)) + (self._get_time() - started_at) / LOOP_SHARE
        )
        if self._pending:
            self.wake()

    def _remove(self, pending: _PendingReport) -> None:
        self._pending.remove(pending)
        self._counts_by_user[pending.requester.user] -= 1
        if not self._counts_by_user[pending.requester.user]:
            del self._counts_by_user[pending.requester.user]

    def _next_to_evict(self) -> _PendingReport:
        """Return the request to reject: of the user with most requests, the newest of the client with most."""
        by_client = Counter(each.requester.client for each in self._pending)
        by_user = self._counts_by_user
        return max(
            reversed(self._pending), key=lambda each: (by_user[each.requester.user], by_client[each.requester.client])
        )

    def _retry_after_s(self, requester: MetadataRequest) -> float:
        """Return in how many seconds the user will have loop time for another request; at least `BURST_S`."""
        return max(BURST_S, self._paid_until.get(requester.user, 0.0) - BURST_S / LOOP_SHARE - self._get_time())
