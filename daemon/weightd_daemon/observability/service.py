"""Service for status, metrics, events and logs requests, with a limited share of the event loop's time.

Each response is made in steps between other work: `Reports` does one step in each turn of the loop, and limits the time
for the requests of one user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from weightd_daemon.observability.event_log import EventLog
from weightd_daemon.observability.log_tail import LogTailReader
from weightd_daemon.observability.memory import MemoryScan, TtlCache
from weightd_daemon.observability.snapshot import SnapshotBuilder
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop, Timer
from weightd_daemon.scheduling.signature import MetadataRequest
from weightd_daemon.tenants.tenant import Viewer
from weightd_protocol.errors import RequestError, ResourceExhausted
from weightd_protocol.messages.events import Events, Logs
from weightd_protocol.messages.types import DaemonMessage

# Limits of pending requests for one user and for all users: each response may cost milliseconds.
MAX_PER_USER = 8
MAX_PENDING = 16

# The share of the loop's time for the requests of one user.
LOOP_SHARE = 0.1

# Loop time that a user may take at once after a quiet period, so that occasional requests never wait.
BURST_S = 0.1


# Few clients may request logs, and each request may read a megabyte.
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
    """Service that makes the responses and sends each one when it is complete.

    Args:
        snapshots: builds views of the daemon's state.
        event_log: the recent events.
        loop: runs the steps.
        responses: returns the sender of replies, which is created after this service.

    Attributes:
        timer: runs the next step when it is due.
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
        self._memory_cache = TtlCache()
        self._log_readers: list[LogTailReader] = []

    def report_status(self, requester: MetadataRequest, viewer: Viewer) -> None:
        """Answer a status request; for a viewer of everything, after the memory of each process has been read.

        Raises:
            RequestError: the request is rejected.
        """
        if not viewer.can_see_all:
            self._answer(requester, lambda: self._snapshots.tenant_status(requester.request_id, viewer.tenant))
            return
        scan = MemoryScan(requester.request_id, self._snapshots.pids(), self._memory_cache)

        def step() -> bool:
            is_done = scan.step()
            if is_done:
                self._responses().reply(requester.client, self._snapshots.status(scan))
            return is_done

        self._reports.add(requester, step)

    def report_metrics(self, requester: MetadataRequest, viewer: Viewer) -> None:
        """Answer a metrics request; raises as `report_status`."""
        self._answer(requester, lambda: self._snapshots.metrics(requester.request_id, viewer))

    def report_events(self, requester: MetadataRequest, request: Events) -> None:
        """Answer an events request; raises as `report_status`."""
        self._answer(requester, lambda: self._event_log.query(request))

    def report_logs(self, client: bytes, request: Logs) -> None:
        """Answer a logs request once the files have been read; raises as `report_status`."""
        if len(self._log_readers) == _MAX_LOG_READERS:
            raise ResourceExhausted(f"{_MAX_LOG_READERS} log requests are running already")
        self._log_readers.append(LogTailReader(client, request, self._snapshots.log_files(request.model_name)))
        self._loop.call_soon(self._read_next_log)

    def _answer(self, requester: MetadataRequest, make: Callable[[], DaemonMessage]) -> None:
        def step() -> bool:
            self._responses().reply(requester.client, make())
            return True

        self._reports.add(requester, step)

    def _read_next_log(self) -> None:
        """Read one log file for the first request."""
        if self._log_readers[0].step():
            reader = self._log_readers.pop(0)
            self._responses().reply(reader.client, reader.response)
        if self._log_readers:
            self._loop.call_soon(self._read_next_log)


class _PendingReport(NamedTuple):
    """A pending request; `step` does a part of the work, and returns whether the response was sent."""

    requester: MetadataRequest
    step: Callable[[], bool]


class Reports:
    """Queue of pending requests; runs their steps and shares the loop's time among users.

    Args:
        loop: runs the steps.
        reject: called with a request that is dropped from the queue, and the error.
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
        # By user: the time at which the user's share of the loop's time has paid for all steps so far.
        self._paid_until: dict[str, float] = {}
        self.timer = Timer(lambda _: self.step())

    def add(self, requester: MetadataRequest, step: Callable[[], bool]) -> None:
        """Add a request; beyond `MAX_PENDING`, reject a request of the user who has the most.

        Raises:
            ResourceExhausted: the user already has `MAX_PER_USER` requests.
        """
        if self._counts_by_user[requester.user] == MAX_PER_USER:
            text = f"{MAX_PER_USER} status, metrics and events requests of this user are waiting already"
            raise ResourceExhausted(text, retry_after=self._retry_after_s(requester))
        self._pending.append(_PendingReport(requester, step))
        self._counts_by_user[requester.user] += 1
        self._loop.call_soon(self.step)
        if len(self._pending) > MAX_PENDING:
            last = self._next_to_evict()
            self._remove(last)
            text = f"{MAX_PENDING} status, metrics and events requests are waiting already, most of them of this user"
            self._reject(last.requester, ResourceExhausted(text, retry_after=self._retry_after_s(last.requester)))

    def step(self) -> None:
        """Run a step for the user who has had the least time, if that user's next step is due."""
        if not self._pending:
            return
        started_at = self._get_time()
        self._paid_until = {user: at for user, at in self._paid_until.items() if at > started_at}
        pending = min(self._pending, key=lambda each: self._paid_until.get(each.requester.user, 0.0))
        user = pending.requester.user
        due_at = self._paid_until.get(user, 0.0) - BURST_S / LOOP_SHARE
        if due_at > started_at:
            self.timer.set(due_at)
            return
        if pending.step():
            self._remove(pending)
        self._paid_until[user] = (
            max(started_at, self._paid_until.get(user, 0.0)) + (self._get_time() - started_at) / LOOP_SHARE
        )
        if self._pending:
            self._loop.call_soon(self.step)

    def _remove(self, pending: _PendingReport) -> None:
        self._pending.remove(pending)
        self._counts_by_user[pending.requester.user] -= 1
        if not self._counts_by_user[pending.requester.user]:
            del self._counts_by_user[pending.requester.user]

    def _next_to_evict(self) -> _PendingReport:
        """Return the request to reject: the last one of the largest client of the largest user."""
        by_client = Counter(each.requester.client for each in self._pending)
        by_user = self._counts_by_user
        return max(
            reversed(self._pending), key=lambda each: (by_user[each.requester.user], by_client[each.requester.client])
        )

    def _retry_after_s(self, requester: MetadataRequest) -> float:
        """Return after how many seconds another request of the user is likely to be answered."""
        return max(BURST_S, self._paid_until.get(requester.user, 0.0) - BURST_S / LOOP_SHARE - self._get_time())
