"""A device whose workers pull requests: a discrete-event simulation with simulated time and real schedulers."""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from weightd_common.channels.messages import AddChannel
from weightd_common.channels.pages import ANSWERED, LATE, Layout, Page
from weightd_daemon.channels.page import DaemonPage
from weightd_daemon.channels.rows import RowReader
from weightd_daemon.channels.table import ChannelTable
from weightd_worker.channels.pull_scheduler import PulledChannel, PullScheduler
from weightd_worker.channels.session import ChannelSession

from .kernel import new_page, watched

FOREVER_S = 1e9
_SEND_S = 50e-6  # a client sends its next request this long after an answer
_INTERRUPTED = 0.3  # the fraction of a worker's stores before which other workers act
_TAKE_S = 20e-6  # a worker has read the request this long after it has chosen the channel


class Source:
    """A client that always has `in_flight` requests under way, from `begin` to `end`.

    If `is_late` is set, no worker runs the requests, because their deadlines have passed.
    """

    def __init__(
        self,
        tenant: int,
        in_flight: int,
        cost_s: float = 0.005,
        model: int = 0,
        begin: float = 0.0,
        end: float = FOREVER_S,
        *,
        is_late: bool = False,
    ) -> None:
        self.tenant = tenant
        self.in_flight = in_flight
        self.cost_s = cost_s
        self.model = model
        self.begin = begin
        self.end = end
        self.is_late = is_late
        self.serial = 0
        self.queued: collections.deque[float] = collections.deque()
        self.waits: list[tuple[float, float]] = []  # the time of each answer, and how long the client waited for it


class SimulatedWorker:
    """A worker of one model."""

    def __init__(self, device: Device, number: int, model: int) -> None:
        self.device = device
        self.model = model
        self.is_idle = True
        row = watched(device.row_memory[number], device.run_due)
        scheduler = device.scheduler_type(device.memory, device.row_memory, row, device.peers(model))
        self.scheduler = scheduler
        self.session = ChannelSession(device.layout, device.memory, row, scheduler, model)

    def pull(self) -> None:
        """Take the next request if the worker is idle."""
        device = self.device
        readable = [each for each in self.session.channels.values() if device.by_serial[each.serial].queued]
        if not self.is_idle or not readable:
            return
        self.is_idle = False
        channel = self.session.choose(readable, device.now)
        assert channel is not None
        device.at(device.now + _TAKE_S, lambda: self.take(channel))

    def take(self, channel: PulledChannel) -> None:
        """Read the request that `pull` has chosen. Another worker may have been quicker."""
        device = self.device
        source = device.by_serial[channel.serial]
        if not source.queued:
            self.session.on_nothing(channel)
            self.is_idle = True
            self.pull()
            return
        sent_at = source.queued.popleft()
        reason = self.session.on_request(channel, next(device.numbers), 1, device.now)
        assert not reason
        if not source.is_late:
            self.session.run(device.now)
        device.at(device.now + source.cost_s, lambda: self.finish(channel, source, sent_at))

    def finish(self, channel: PulledChannel, source: Source, sent_at: float) -> None:
        device = self.device
        if source.is_late:
            self.session.on_answered(channel, LATE)
        else:
            self.session.on_result(channel, source.cost_s)
            self.session.on_answered(channel, ANSWERED)
        self.is_idle = True
        source.waits.append((device.now, device.now - sent_at))
        if device.now + _SEND_S < source.end:
            device.at(device.now + _SEND_S, lambda: device.send(source))
        self.pull()


class Device:
    """A device, its workers and their clients.

    Args:
        weights: the weights of the tenants.
        workers: the model of each worker.
        sources: the clients.
    """

    def __init__(
        self,
        weights: Sequence[float],
        workers: Sequence[int],
        sources: Sequence[Source],
        scheduler_type: type[PullScheduler] = PullScheduler,
        seed: int = 0,
    ) -> None:
        self._random = Random(seed)
        self.layout = Layout(len(weights), len(sources))
        self.scheduler_type = scheduler_type
        self.now = 0.0
        self._is_interrupted = False
        self.numbers = itertools.count(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.memory = new_page(self.layout.daemon_page_bytes)
        self.row_memory = [new_page(self.layout.row_bytes) for _ in workers]
        self.table = ChannelTable(self.layout, DaemonPage(self.layout, self.memory))
        self.table.rows.readers = [RowReader(self.layout, row, 0.0) for row in self.row_memory]
        for tenant, weight in enumerate(weights):
            self.table.add_tenant(tenant, weight, 0.0)
        self.models = list(workers)
        self.workers = [SimulatedWorker(self, number, model) for number, model in enumerate(workers)]
        self.sources = sources
        self.by_serial: dict[int, Source] = {}
        for source in sources:
            self._open(source)

    def _open(self, source: Source) -> None:
        limits = (10**9, 10**9)
        serial = self.table.grant("client", source.tenant, source.model, limits, FOREVER_S, 0.0)
        assert serial is not None
        source.serial = serial
        self.by_serial[serial] = source
        slot = self.table.channels[serial].slot
        for worker in self.workers:
            if worker.model == source.model:
                assert worker.session.add(AddChannel(slot, serial)) == []
        for _ in range(source.in_flight):
            self.at(source.begin, lambda: self.send(source))

    def add_worker(self, model: int) -> None:
        """Start another worker."""
        row = new_page(self.layout.row_bytes)
        self.row_memory.append(row)
        self.models.append(model)
        self.table.rows.readers.append(RowReader(self.layout, row, self.now))
        for worker in self.workers:
            worker.scheduler.set_rows(self.row_memory, self.peers(worker.model))
        worker = SimulatedWorker(self, len(self.workers), model)
        self.workers.append(worker)
        for source in self.sources:
            if source.model == model:
                worker.session.add(AddChannel(self.table.channels[source.serial].slot, source.serial))
        worker.pull()

    def peers(self, model: int) -> list[Page]:
        """Return the rows of a model's workers."""
        return [row for row, of_model in zip(self.row_memory, self.models, strict=True) if of_model == model]

    def at(self, time: float, action: Callable[[], Any]) -> None:
        heapq.heappush(self._events, (time, next(self.numbers), action))

    def send(self, source: Source) -> None:
        source.queued.append(self.now)
        for worker in self.workers:
            worker.pull()

    def run_due(self) -> None:
        """Let all other workers act that are due now, before some of the stores of a worker."""
        if not self._is_interrupted and self._random.random() < _INTERRUPTED:
            self._is_interrupted = True
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._is_interrupted = False

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = until

    def seconds(self, tenant: int, begin: float, end: float) -> float:
        """Return the device seconds of the tenant's answers in a period, as its clients count them."""
        return sum(
            source.cost_s * sum(begin < at <= end for at, _ in source.waits)
            for source in self.sources
            if source.tenant == tenant
        )

    def shares(self, begin: float, end: float) -> list[float]:
        """Return each tenant's share of the device seconds of all answers in a period."""
        seconds = [self.seconds(tenant, begin, end) for tenant in range(self.layout.tenant_slots)]
        return [each / sum(seconds) for each in seconds]

    def waits(self, tenant: int) -> list[float]:
        return sorted(wait for source in self.sources if source.tenant == tenant for _, wait in source.waits)
