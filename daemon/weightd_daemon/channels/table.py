"""The direct channels of one device: grants, credits, revocation, and the requests of workers that exit.

No I/O and no clock. Each method takes an event and the time, and appends actions for the caller. The caller takes them
with `take_actions` and executes them in order.

The caller reports the exit of a worker only after it has reaped the process, and after it has passed on every message
that the worker has sent. The row of a worker that has handed a request over does not show this request any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from weightd_common.channels.messages import (
    AddChannel,
    Adopted,
    Ended,
    Granted,
    HandedOver,
    Lost,
    Notice,
    Refilled,
    ReleaseChannel,
    Released,
    WorkerReport,
)
from weightd_common.channels.pages import STAGE_RUNNING, STAGE_TAKING, Layout
from weightd_daemon.channels.page import DaemonPage
from weightd_daemon.channels.rows import RowReader, Rows
from weightd_daemon.channels.states import (
    CHANNEL_TRANSITIONS,
    READABLE,
    SELF_READ,
    ChannelEvent,
    ChannelMachine,
    ChannelState,
)
from weightd_protocol.messages.channels import ORDERED


class Notify(NamedTuple):
    """Send a notice to a client."""

    client: str
    notice: Notice


class Order(NamedTuple):
    """Send an order to a worker; with `AddChannel`, also a descriptor of the workers' end."""

    worker: str
    order: AddChannel | ReleaseChannel


class ShutDown(NamedTuple):
    """Call `shutdown(SHUT_RD)` on the duplicate of the workers' end: the client's next send fails with EPIPE."""

    channel: int


class ReadQueue(NamedTuple):
    """Read the queue through the duplicate to its end.

    Call `on_queued` for each request and `on_queue_end` at the end of the queue.
    """

    channel: int


class Relay(NamedTuple):
    """Dispatch a request through the daemon, as if the client had sent it on its connection."""

    client: str
    channel: int
    request: int
    payload: bytes


class CloseDuplicate(NamedTuple):
    """Close the duplicate of the workers' end. The client then reads the end of the channel."""

    channel: int


class ReplaceWorker(NamedTuple):
    """Kill a worker and start another: its row is implausible."""

    worker: str


Action = Notify | Order | ShutDown | ReadQueue | Relay | CloseDuplicate | ReplaceWorker


@dataclass(eq=False, slots=True)
class DirectChannel:
    """A direct channel.

    Attributes:
        slot: the slot in the pages.
        client: the client that holds the other end.
        tenant: the tenant slot.
        generation: the serial of the generation.
        machine: the state.
        limits: the limits of requests and bytes that the client has been granted so far.
        expires_at: the expiry in seconds of CLOCK_MONOTONIC.
        workers: the workers that hold a descriptor, or to which one has been sent.
        may_have_run: whether requests may have run of which no row and no message is left.
    """

    slot: int
    client: str
    tenant: int
    generation: int
    machine: ChannelMachine
    limits: tuple[int, int]
    expires_at: float
    workers: set[str] = field(default_factory=set[str])
    may_have_run: bool = False


class ChannelTable:
    """The direct channels of one device.

    Args:
        layout: the layout of the pages.
        page: the daemon's page.
        first_serial: the serial of the first channel, greater than all serials of earlier daemons.

    Attributes:
        rows: the rows of the device's workers.
        channels: the channels that are not closed, by serial.
    """

    def __init__(self, layout: Layout, page: DaemonPage, first_serial: int = 1) -> None:
        self._layout = layout
        self._page = page
        self._serials = itertools.count(first_serial)
        self._free_slots = list(range(layout.channel_slots))
        self._tenant_slots: set[int] = set()
        self._workers: dict[str, tuple[int, RowReader]] = {}
        # Workers that release their channels although these stay open.
        self._leaving: set[str] = set()
        self._actions: list[Action] = []
        self.rows = Rows()
        self.channels: dict[int, DirectChannel] = {}

    def take_actions(self) -> list[Action]:
        """Return the actions to execute, in order, and forget them."""
        actions, self._actions = self._actions, []
        return actions

    # --- tenants ----------------------------------------------------------------------------------------------------

    def add_tenant(self, slot: int, weight: float, now: float) -> None:
        """Give a free tenant slot to a tenant."""
        self._tenant_slots.add(slot)
        self._page.assign_tenant(slot, weight, self.rows.used_s(slot, now), self.rows.device_s(now))

    def set_weight(self, slot: int, weight: float, now: float) -> None:
        """Change a tenant's weight: after a reload, or while the tenant exceeds its quota."""
        ahead_s = self.rows.used_s(slot, now) + self._page.offset(slot) - self.rows.device_s(now)
        self._page.set_weight(slot, weight, ahead_s)

    # --- grants -----------------------------------------------------------------------------------------------------

    def grant(
        self, client: str, tenant: int, generation: int, limits: tuple[int, int], expires_at: float, now: float
    ) -> int | None:
        """Grant a channel with limits of requests and bytes; return its serial, or None if all slots are in use."""
        if not self._free_slots:
            return None
        slot, serial = self._free_slots.pop(), next(self._serials)
        machine = ChannelMachine(CHANNEL_TRANSITIONS, ChannelState.OPEN, f"channel {serial}", {})
        counts = self.rows.counts(slot, now)
        channel = DirectChannel(slot, client, tenant, generation, machine, limits, expires_at)
        self.channels[serial] = channel
        page_limits = counts.requests + limits[0], counts.nbytes + limits[1]
        self._page.open_channel(slot, serial, generation, tenant, page_limits, expires_at)
        for worker, (of_generation, _) in self._workers.items():
            if of_generation == generation and worker not in self._leaving:
                self._send_channel(worker, serial, channel)
        self._notify(channel, Granted(serial, *limits, expires_at))
        return serial

    def refill(self, serial: int, requests: int, nbytes: int, expires_at: float, now: float) -> None:
        """Give an open channel more credits and a later expiry. A channel that has expired ends instead."""
        channel = self.channels.get(serial)
        if channel is None or channel.machine.state is not ChannelState.OPEN:
            return
        if now >= channel.expires_at:
            self.end(serial, ChannelEvent.EXPIRE)
            return
        # Workers see the new limits before the client does.
        self._page.raise_limits(channel.slot, requests, nbytes, expires_at)
        channel.limits = channel.limits[0] + requests, channel.limits[1] + nbytes
        channel.expires_at = expires_at
        self._notify(channel, Refilled(serial, *channel.limits, expires_at))

    # --- ends -------------------------------------------------------------------------------------------------------

    def end(self, serial: int, event: ChannelEvent) -> None:
        """End a channel; nothing if it is ending already, unless `event` makes it end sooner."""
        channel = self.channels.get(serial)
        if channel is None or (channel.machine.state, event) not in CHANNEL_TRANSITIONS:
            return
        earlier = channel.machine.state
        channel.machine.advance(event)
        state = channel.machine.state
        if earlier is ChannelState.OPEN:
            self._actions.append(ShutDown(serial))
        if earlier in READABLE and state not in READABLE:
            self._page.end_channel(channel.slot)
            self._actions += [Order(worker, ReleaseChannel(serial)) for worker in sorted(channel.workers)]
        if state in SELF_READ:
            self._actions.append(ReadQueue(serial))
        if state is ChannelState.CLOSED:
            self._close(serial, channel)
        else:
            self._check_released(serial, channel)

    def expire(self, now: float) -> None:
        """End the channels that have expired."""
        for serial, channel in list(self.channels.items()):
            if now >= channel.expires_at:
                self.end(serial, ChannelEvent.EXPIRE)

    def end_generation(self, generation: int, event: ChannelEvent) -> None:
        """End all channels of a generation, by REVOKE if it drains, or by END_GENERATION."""
        for serial, channel in list(self.channels.items()):
            if channel.generation == generation:
                self.end(serial, event)

    # --- queue ------------------------------------------------------------------------------------------------------

    def on_queued(self, serial: int, request: int, payload: bytes) -> None:
        """Relay a request that the daemon has read from the queue. No worker has taken it."""
        self._adopt(serial, request, payload)

    def on_queue_end(self, serial: int) -> None:
        """The daemon has read a queue to its end, or has found the queue of a revoked channel empty (SIOCINQ).

        Workers read the end of a channel in the tenant's turn, which may be far away. So the daemon looks at the queues
        of revoked channels now and then, and makes the workers release a channel at once when its queue is empty.
        """
        self.end(serial, ChannelEvent.EMPTIED)

    # --- workers ----------------------------------------------------------------------------------------------------

    def add_worker(self, worker: str, generation: int, row: RowReader) -> None:
        """Add a worker that is ready, with its row, and send it the open channels of its generation."""
        if row not in self.rows.readers:
            self.rows.readers.append(row)
        self._workers[worker] = generation, row
        for serial, channel in self.channels.items():
            if channel.generation == generation and channel.machine.state is ChannelState.OPEN:
                self._send_channel(worker, serial, channel)

    def release_worker(self, worker: str) -> None:
        """Make a worker close all its channels. Other workers of its generation go on reading them."""
        self._leaving.add(worker)
        for serial, channel in self.channels.items():
            if worker in channel.workers:
                self._actions.append(Order(worker, ReleaseChannel(serial)))

    def on_not_sent(self, worker: str, serial: int) -> None:
        """A channel could not be sent to a worker, which has no connection."""
        channel = self.channels[serial]
        channel.workers.discard(worker)
        if channel.machine.state is not ChannelState.OPEN:
            self._check_released(serial, channel)

    def on_report(self, worker: str, report: WorkerReport) -> None:
        """Process a message of a worker."""
        channel = self.channels.get(report.channel)
        if channel is None or worker not in channel.workers:
            return
        if isinstance(report, Released):
            if worker not in self._leaving or report.reason != ORDERED:
                self.end(report.channel, ChannelEvent.STOP)
            channel.workers.discard(worker)
            self._check_released(report.channel, channel)
        elif isinstance(report, HandedOver):
            self._adopt(report.channel, report.request, report.payload)
        else:
            self._notify(channel, Lost(report.channel, report.request, report.has_run))
            self.end(report.channel, ChannelEvent.SLOW_READER)

    def on_worker_exit(self, worker: str, now: float) -> RowReader:
        """Decide what became of the request of a worker that has exited. Return its row, repaired for a successor."""
        _, row = self._workers.pop(worker)
        self._leaving.discard(worker)
        held = {serial: channel for serial, channel in self.channels.items() if worker in channel.workers}
        self._judge_request(row, held, now)
        for serial, channel in held.items():
            channel.workers.discard(worker)
            self._check_released(serial, channel)
        row.repair(self._tenant_slots, range(self._layout.channel_slots), now)
        return row

    def inspect_rows(self, changed: Mapping[str, Container[int]], now: float) -> None:
        """Read the rows of workers, and replace the workers whose rows are implausible.

        Args:
            changed: the channel slots to read, by worker.
            now: the time.
        """
        for worker, slots in changed.items():
            _, row = self._workers[worker]
            self._inspect(row, [each for each in self.channels.values() if each.slot in slots], now)
            if not row.is_plausible:
                self._actions.append(ReplaceWorker(worker))

    def _inspect(self, row: RowReader, channels: Iterable[DirectChannel], now: float) -> None:
        row.start_s(now)
        row.running_since(now)
        for slot in self._tenant_slots:
            row.used_s(slot, now)
            row.base_s(slot, now)
        for channel in channels:
            row.counts(channel.slot, now)

    def _judge_request(self, row: RowReader, held: dict[int, DirectChannel], now: float) -> None:
        self._inspect(row, held.values(), now)
        current = row.last_request(held)
        if not row.is_plausible:
            for serial, channel in held.items():
                channel.may_have_run = True
                self.end(serial, ChannelEvent.REVOKE)
        elif current is None:
            return
        elif current.stage == STAGE_TAKING:
            # One request may be lost, and the row does not have its number yet. When the channel has ended, every
            # request without an answer is known not to have run.
            self.end(current.channel, ChannelEvent.REVOKE)
        else:
            # If the worker had handed the request over, the client has received `Adopted` before, and ignores `Lost`.
            may_have_run = current.stage == STAGE_RUNNING
            self._notify(held[current.channel], Lost(current.channel, current.request, may_have_run))

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _send_channel(self, worker: str, serial: int, channel: DirectChannel) -> None:
        channel.workers.add(worker)
        self._actions.append(Order(worker, AddChannel(channel.slot, serial)))

    def _notify(self, channel: DirectChannel, notice: Notice) -> None:
        if channel.machine.state is not ChannelState.ABANDONED:
            self._actions.append(Notify(channel.client, notice))

    def _adopt(self, serial: int, request: int, payload: bytes) -> None:
        channel = self.channels.get(serial)
        if channel is not None and channel.machine.state is not ChannelState.ABANDONED:
            self._notify(channel, Adopted(serial, request))
            self._actions.append(Relay(channel.client, serial, request, payload))

    def _check_released(self, serial: int, channel: DirectChannel) -> None:
        """Advance a channel that is ending if no worker holds it any more."""
        if not channel.workers:
            self.end(serial, ChannelEvent.RELEASED)

    def _close(self, serial: int, channel: DirectChannel) -> None:
        del self.channels[serial]
        self._notify(channel, Ended(serial, channel.may_have_run))
        self._actions.append(CloseDuplicate(serial))
        self._page.free_channel(channel.slot)
        self._free_slots.append(channel.slot)
