"""The direct channels of all devices: opens and ends channels, and executes the actions of `ChannelTable`.

This module does the I/O: it makes the socket pairs, and sends their ends to clients and workers. The caller reports the
life of each worker, and the messages of workers about channels.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import logging
import socket
import termios
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from weightd_common.channels.messages import AddChannel as AddChannelValue
from weightd_common.channels.messages import (
    Adopted,
    AnswerDropped,
    Ended,
    Granted,
    HandedOver,
    Lost,
    Notice,
    Refilled,
    Released,
)
from weightd_daemon.channels.device import ChannelWorker, Device
from weightd_daemon.channels.packets import request_number
from weightd_daemon.channels.rows import Counts
from weightd_daemon.channels.states import ChannelEvent, ChannelState
from weightd_daemon.channels.table import (
    Action,
    CloseDuplicate,
    Notify,
    Order,
    ReadQueue,
    Relay,
    ReplaceWorker,
    ShutDown,
)
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import Timer
from weightd_daemon.scheduling.direct import DirectLoss, DirectWorker
from weightd_daemon.scheduling.request import ClientOrigin
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.tenants.usage import Usage
from weightd_protocol import limits
from weightd_protocol.errors import DeadlineExceeded, FailedPrecondition, RequestError, ResourceExhausted
from weightd_protocol.messages import channels as wire
from weightd_protocol.messages.types import DaemonMessage
from weightd_protocol.messages.worker import ChildOrder

_log = logging.getLogger("weightd")

# Maximum number of direct channels of one connection, and of one user.
MAX_CLIENT_CHANNELS = 8
MAX_USER_CHANNELS = 64

# Seconds between two looks at the rows of the workers while there are channels.
_TICK_S = 0.1

# Seconds for which a channel lives without the daemon, and the remaining seconds below which the daemon extends it.
_LIFETIME_S = 10.0
_EXTEND_BELOW_S = 7.0

# Seconds without a request after which a channel ends.
_IDLE_TIMEOUT_S = 60.0

# Requests and bytes that a client may send between two looks at the rows: more than any worker can take.
_WINDOW_REQUESTS = 16_384
_WINDOW_BYTES = 2**32


class ChannelClients(Protocol):
    """Sends messages to clients, and receives requests that the daemon has taken from channels."""

    def send_channel(self, client: bytes, message: wire.ChannelOpened, descriptor: int) -> bool:
        """Send a client its end of a channel; return False if it could not be sent."""

    def reply(self, client: bytes, message: DaemonMessage) -> None:
        """Send a message to a client."""

    def reply_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Send an error to a client."""

    def on_packet(self, client: bytes, packet: bytes) -> None:
        """Handle a request that was sent on a channel, as if the client had sent it on its connection."""


SendOrder = Callable[[str, ChildOrder, Sequence[int]], bool]
"""Sends an order to a worker, with descriptors; returns False if the worker has no connection."""


class ChannelOwner(NamedTuple):
    """For whom a channel is opened.

    Attributes:
        client: the key of the client's connection.
        open_id: the id of the client's message, which names the channel.
        model: the name of the model.
        origin: the client.
        tenant: the tenant.
        usage: counts the requests.
    """

    client: bytes
    open_id: str
    model: str
    origin: ClientOrigin
    tenant: Tenant
    usage: Usage


@dataclass(eq=False)
class _Channel:
    """What the daemon knows about a channel beside the table.

    Attributes:
        device: the device.
        owner: for whom the channel was opened.
        duplicate: the daemon's descriptor of the workers' end.
        counted: the counts that the usage has already.
        used_at: when the counts last changed.
        digests: the digests of the descriptions that workers run.
    """

    device: Device
    owner: ChannelOwner
    duplicate: socket.socket
    counted: Counts
    used_at: float
    digests: set[str] = field(default_factory=set[str])


class ChannelService:
    """The direct channels of all devices.

    Args:
        send_order: sends an order to a worker.
        clients: returns the object that sends messages to clients.
        on_used: called with the name of a model and the time when clients have used the model over channels.

    Attributes:
        timer: fires while there are channels.
        by_client: the serials of the channels of each client, by the key of its connection.
    """

    def __init__(
        self,
        send_order: SendOrder,
        clients: Callable[[], ChannelClients],
        on_used: Callable[[str, float], object],
    ) -> None:
        self.timer = Timer(self._tick)
        self.by_client: dict[bytes, set[int]] = {}
        self._send_order = send_order
        self._clients = clients
        self._on_used = on_used
        self._devices: dict[str, Device] = {}
        self._device_of: dict[str, Device] = {}
        self._generations: dict[str, int] = {}
        self._channels: dict[int, _Channel] = {}
        # The clients' ends of channels, until they are sent.
        self._client_ends: dict[int, socket.socket] = {}
        self._is_executing = False
        # Serials start at the time in microseconds, so that they differ from those of earlier daemons.
        self._first_serial = time.time_ns() // 1000
        self._generation_serials = itertools.count(self._first_serial)

    # --- workers ------------------------------------------------------------------------------------------------

    def add_worker(self, worker: DirectWorker, now: float) -> None:
        """Add a worker that is ready."""
        process, device = worker.process, worker.device
        label = process.rpartition(".")[0]
        generation = self._generations.get(label)
        if generation is None:
            generation = self._generations[label] = next(self._generation_serials)
        found = self._devices.get(device)
        if found is None:
            # Serials of different devices must differ, too: clients and workers know only the serial.
            found = self._devices[device] = Device(self._first_serial + (len(self._devices) << 52))
        if process not in found.workers and found.add_worker(ChannelWorker(worker, generation), time.monotonic()):
            self._device_of[process] = found
            self._announce_rows(found)
            self._execute()

    def retire_worker(self, process: str) -> None:
        """Take all channels from a worker that is about to stop. The last worker of a generation answers the queues."""
        device = self._device_of.get(process)
        if device is None:
            return
        worker = device.workers[process]
        worker.is_leaving = True
        if any(each.generation == worker.generation and not each.is_leaving for each in device.workers.values()):
            device.table.release_worker(process)
        else:
            device.table.end_generation(worker.generation, ChannelEvent.REVOKE)
        self._execute()

    def remove_worker(self, process: str, now: float) -> DirectLoss | None:
        """Remove a worker that has exited; return the request that it was running, if any."""
        device = self._device_of.pop(process, None)
        if device is None:
            return None
        worker = device.workers[process]
        loss = self._running(device, worker)
        device.remove_worker(process, time.monotonic())
        if not any(each.generation == worker.generation for each in device.workers.values()):
            self._generations.pop(process.rpartition(".")[0], None)
            device.table.end_generation(worker.generation, ChannelEvent.END_GENERATION)
        self._announce_rows(device)
        self._execute()
        return loss

    def on_report(self, process: str, message: object, frames: Sequence[Any]) -> None:
        """Handle a message of a worker about a channel; `frames` has the packet of a request that is handed over."""
        device = self._device_of.get(process)
        if device is None:
            return
        if isinstance(message, wire.ChannelReleased):
            device.table.on_report(process, Released(message.channel, message.reason))
        elif isinstance(message, wire.RequestHandedOver):
            packet = bytes(frames[0]) if frames else b""
            device.table.on_report(process, HandedOver(message.channel, message.request, packet, ""))
        elif isinstance(message, wire.AnswerDropped):
            device.table.on_report(process, AnswerDropped(message.channel, message.request, has_run=True))
        self._execute()

    def is_running(self, process: str) -> bool:
        """Return whether a worker runs a request of a channel."""
        device = self._device_of.get(process)
        if device is None:
            return False
        return device.reader(device.workers[process]).running_since(time.monotonic()) is not None

    def has_work(self, model: str) -> bool:
        """Return whether requests to a model are queued in a channel, or run."""
        if any(each.owner.model == model and _queued_bytes(each.duplicate) for each in self._channels.values()):
            return True
        return any(
            worker.info.model == model and self.is_running(worker.process)
            for device in self._devices.values()
            for worker in device.workers.values()
        )

    # --- clients ------------------------------------------------------------------------------------------------

    def open(self, owner: ChannelOwner, now: float) -> None:
        """Open a channel, and send its end to the client.

        Raises:
            FailedPrecondition: the model has no direct channels.
            ResourceExhausted: the client, its user or the device has too many channels.
        """
        device, generation = self._find_generation(owner.model)
        if len(self.by_client.get(owner.client, ())) >= MAX_CLIENT_CHANNELS:
            raise ResourceExhausted(f"this connection already has {MAX_CLIENT_CHANNELS} direct channels")
        users = Counter(each.owner.origin.principal for each in self._channels.values())
        if users[owner.origin.principal] >= MAX_USER_CHANNELS:
            raise ResourceExhausted(f"this user already has {MAX_USER_CHANNELS} direct channels")
        used = {each.tenant for each in device.table.channels.values()}
        real = time.monotonic()
        slot = device.tenant_slot(owner.tenant, used, real)
        limits_now, expires_at = (_WINDOW_REQUESTS, _WINDOW_BYTES), real + _LIFETIME_S
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise ResourceExhausted(f"no descriptor is left for a direct channel: {error.strerror}") from None
        serial = device.table.grant("", slot, generation, limits_now, expires_at, real)
        if serial is None:
            ours.close()
            theirs.close()
            raise ResourceExhausted(f"all {limits.MAX_CHANNELS} direct channels of this device are in use")
        counts = device.table.rows.counts(device.table.channels[serial].slot, real)
        self._channels[serial] = _Channel(device, owner, ours, counts, now)
        self.by_client.setdefault(owner.client, set()).add(serial)
        self._client_ends[serial] = theirs
        self._execute()
        self.timer.set_no_later_than(now + _TICK_S)

    def on_answered(self, client: bytes, usage: Usage, digest: str) -> None:
        """Let workers run the requests of a client with a description, of which a worker has answered a request."""
        for serial in self.by_client.get(client, ()):
            channel = self._channels[serial]
            if (
                channel.owner.usage is usage
                and digest not in channel.digests
                and len(channel.digests) < limits.MAX_CHANNEL_DESCRIPTIONS
            ):
                channel.digests.add(digest)
                for process in channel.device.table.channels[serial].workers:
                    self._send_order(process, wire.AllowRequests(serial, digest), ())

    def on_disconnect(self, client: bytes) -> None:
        """End all channels of a client that has disconnected."""
        for serial in tuple(self.by_client.get(client, ())):
            self._end(serial, ChannelEvent.CLIENT_GONE)

    def reclaim(self, model: str) -> None:
        """End all channels of a model; the daemon dispatches the requests that are queued in them."""
        for serial, channel in tuple(self._channels.items()):
            if channel.owner.model == model:
                self._end(serial, ChannelEvent.RIGHTS_CHANGE)

    def end_all(self, event: ChannelEvent) -> None:
        """End all channels."""
        for serial in tuple(self._channels):
            self._end(serial, event)

    def update_weights(self, now: float) -> None:
        """Apply the weights of the tenants, which a reload may have changed."""
        for device in self._devices.values():
            device.update_weights(time.monotonic())

    def close(self) -> None:
        """Close the daemon's descriptors. Clients and workers go on until the channels expire."""
        for channel in self._channels.values():
            channel.duplicate.close()
        self._channels.clear()

    # --- private ------------------------------------------------------------------------------------------------

    def _find_generation(self, model: str) -> tuple[Device, int]:
        serving = [
            (device, worker.generation)
            for device in self._devices.values()
            for worker in device.workers.values()
            if worker.info.model == model and not worker.is_leaving
        ]
        if not serving:
            raise FailedPrecondition(f"{model} has no workers that read direct channels")
        if len({*serving}) > 1:
            raise FailedPrecondition(f"{model} is on several devices, or is being updated: it has no direct channels")
        return serving[0]

    def _end(self, serial: int, event: ChannelEvent) -> None:
        channel = self._channels.get(serial)
        if channel is not None:
            channel.device.table.end(serial, event)
            self._execute()

    def _announce_rows(self, device: Device) -> None:
        for worker in device.workers.values():
            if worker.has_pages:
                self._send_order(worker.process, device.rows_order(worker), ())

    def _execute(self) -> None:
        """Execute the actions of all tables, and those that follow from them."""
        if self._is_executing:
            # An action has caused an event, such as the loss of a client. The loop below executes its actions, too.
            return
        self._is_executing = True
        try:
            while actions := [
                (each, action) for each in self._devices.values() for action in each.table.take_actions()
            ]:
                for owner, action in actions:
                    self._execute_one(owner, action)
        finally:
            self._is_executing = False

    def _execute_one(self, device: Device, action: Action) -> None:
        match action:
            case Notify(_, notice):
                self._notify(notice)
            case Order(process, AddChannelValue(slot, serial)):
                self._add_channel(device, process, slot, serial)
            case Order(process, order):
                self._send_order(process, wire.ReleaseChannel(order.channel), ())
            case ShutDown(serial):
                with contextlib.suppress(OSError):
                    self._channels[serial].duplicate.shutdown(socket.SHUT_RD)
            case ReadQueue(serial):
                self._read_queue(device, serial)
            case Relay(_, serial, _, payload):
                self._clients().on_packet(self._channels[serial].owner.client, payload)
            case CloseDuplicate(serial):
                self._forget(serial)
            case ReplaceWorker(process):
                reason = "its row in the pages of direct channels is implausible"
                device.workers[process].info.on_fault(process, None, reason, event_loop.now())

    def _add_channel(self, device: Device, process: str, slot: int, serial: int) -> None:
        worker, channel = device.workers[process], self._channels[serial]
        if not worker.has_pages:
            worker.has_pages = self._send_order(process, device.rows_order(worker), (device.memfd,))
        order = wire.AddChannel(slot, serial)
        if worker.has_pages and self._send_order(process, order, (channel.duplicate.fileno(),)):
            for digest in channel.digests:
                self._send_order(process, wire.AllowRequests(serial, digest), ())
        else:
            device.table.on_not_sent(process, serial)

    def _notify(self, notice: Notice) -> None:
        channel = self._channels[notice.channel]
        client, open_id, clients = channel.owner.client, channel.owner.open_id, self._clients()
        match notice:
            case Granted(_, requests, nbytes, expires_at):
                opened = wire.ChannelOpened(open_id, requests, nbytes, int(expires_at * 1e6))
                with self._client_ends.pop(notice.channel) as client_end:
                    is_sent = clients.send_channel(client, opened, client_end.fileno())
                if not is_sent:
                    channel.device.table.end(notice.channel, ChannelEvent.CLIENT_GONE)
            case Refilled(_, requests, nbytes, expires_at):
                clients.reply(client, wire.ChannelExtended(open_id, requests, nbytes, int(expires_at * 1e6)))
            case Adopted(_, request):
                clients.reply(client, wire.RequestAdopted(str(request), open_id))
            case Lost(_, request, _):
                clients.reply(client, wire.RequestLost(str(request), open_id))
            case Ended():
                clients.reply(client, wire.ChannelEnded(open_id))

    def _read_queue(self, device: Device, serial: int) -> None:
        """Read the queue of a channel to its end."""
        duplicate = self._channels[serial].duplicate
        while True:
            try:
                packet = duplicate.recv(limits.MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
            except OSError:
                break
            if packet:
                device.table.on_queued(serial, request_number(packet), packet)
            elif not _queued_bytes(duplicate):
                break
        device.table.on_queue_end(serial)

    def _forget(self, serial: int) -> None:
        channel = self._channels.pop(serial)
        channel.duplicate.close()
        client = channel.owner.client
        serials = self.by_client[client]
        serials.discard(serial)
        if not serials:
            del self.by_client[client]

    def _running(self, device: Device, worker: ChannelWorker) -> DirectLoss | None:
        """Return the request that a worker runs; None if it runs none, or if its row is implausible."""
        reader, now = device.reader(worker), time.monotonic()
        since, current = reader.running_since(now), reader.last_request(self._channels)
        if since is None or current is None:
            return None
        owner = self._channels[current.channel].owner
        return DirectLoss(owner.client, str(current.request), owner.origin, owner.tenant, max(0.0, now - since))

    # --- timer --------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        """Count requests, extend channels, end unused ones, and find hung workers."""
        for device in self._devices.values():
            if not device.table.channels:
                continue
            device.table.inspect_rows(time.monotonic())
            for serial in tuple(device.table.channels):
                self._update(device, serial, now)
            self._execute()
            self._end_hung(device, now)
        if self._channels:
            self.timer.set_no_later_than(now + _TICK_S)

    def _update(self, device: Device, serial: int, now: float) -> None:
        entry, channel = device.table.channels[serial], self._channels[serial]
        real = time.monotonic()
        counts = device.table.rows.counts(entry.slot, real)
        if counts != channel.counted:
            self._count(channel, counts, now)
        if entry.machine.state is ChannelState.REVOKED and not _queued_bytes(channel.duplicate):
            device.table.on_queue_end(serial)
        if entry.machine.state is not ChannelState.OPEN:
            return
        if now >= channel.used_at + _IDLE_TIMEOUT_S:
            device.table.end(serial, ChannelEvent.REVOKE)
            return
        left = entry.limits[0] - (counts.requests - entry.base_requests)
        if left < _WINDOW_REQUESTS // 2 or entry.expires_at - real < _EXTEND_BELOW_S:
            taken = min(_WINDOW_REQUESTS, max(0, _WINDOW_REQUESTS - left))
            device.table.refill(serial, taken, _WINDOW_BYTES if taken else 0, real + _LIFETIME_S, real)

    def _count(self, channel: _Channel, counts: Counts, now: float) -> None:
        before, usage = channel.counted, channel.owner.usage
        channel.counted, channel.used_at = counts, now
        usage.requests += counts.requests - before.requests
        usage.served += counts.ended - before.ended
        usage.bytes_in += counts.nbytes - before.nbytes
        usage.slot_seconds += counts.seconds - before.seconds
        self._on_used(channel.owner.model, now)

    def _end_hung(self, device: Device, now: float) -> None:
        for worker in tuple(device.workers.values()):
            loss = self._running(device, worker)
            if loss is None or loss.ran_s < worker.info.predict_timeout_s:
                continue
            reason = f"a predict took longer than predict_timeout ({worker.info.predict_timeout_s:g} s)"
            error = DeadlineExceeded(f"request {loss.request_id}: {reason}")
            self._clients().reply_error(loss.client, loss.request_id, error)
            worker.info.on_fault(worker.process, loss, reason, now)


def _queued_bytes(connection: socket.socket) -> int:
    """Return the number of bytes in the queue of a channel (SIOCINQ)."""
    found = array.array("i", [0])
    fcntl.ioctl(connection.fileno(), termios.FIONREAD, found)
    return found[0]
