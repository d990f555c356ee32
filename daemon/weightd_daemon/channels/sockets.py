"""Executes the actions of `ChannelTable`: makes socket pairs, and sends their ends to clients and workers."""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from weightd_common.channels.messages import AddChannel as AddChannelValue
from weightd_common.channels.messages import Adopted, Ended, Granted, Lost, Notice, Refilled
from weightd_common.stream import ANCILLARY_BYTES, descriptors_in
from weightd_daemon.channels.device import Device
from weightd_daemon.channels.packets import request_number
from weightd_daemon.channels.rows import Counts
from weightd_daemon.channels.states import ChannelEvent
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
from weightd_daemon.platform.fd_closer import DescriptorCloser
from weightd_daemon.platform.log_setup import log_resource_error
from weightd_daemon.scheduling.request import ClientOrigin
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.tenants.usage import Usage
from weightd_protocol import limits
from weightd_protocol.errors import RequestError
from weightd_protocol.messages import channels as wire
from weightd_protocol.messages.types import DaemonMessage
from weightd_protocol.messages.worker import ChildOrder

_RECEIVE_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


class ChannelClients(Protocol):
    """Sends messages to clients, and receives requests that the daemon has taken from channels."""

    def send_channel(self, client: bytes, message: wire.ChannelOpened, descriptor: int) -> bool:
        """Send a client its end of a channel; return False if it could not be sent."""
        raise NotImplementedError

    def reply(self, client: bytes, message: DaemonMessage) -> None:
        """Send a message to a client."""

    def reply_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Send an error to a client."""

    def on_packet(self, owner: ChannelOwner, packet: bytes) -> None:
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
        named_tenant: the name of the tenant in the client's message; None if the message named none.
    """

    client: bytes
    open_id: str
    model: str
    origin: ClientOrigin
    tenant: Tenant
    usage: Usage
    named_tenant: str | None = None


@dataclass(eq=False)
class OpenChannel:
    """A channel: the part that is not in the table.

    Attributes:
        device: the device.
        slot: the slot in the device's pages.
        owner: for whom the channel was opened.
        duplicate: the daemon's descriptor of the workers' end.
        generation: the serial of the generation whose workers read it.
        counted: the counts that the usage has already, by row.
        used_at: when the counts last changed.
        digests: the digests of the descriptions that workers run.
        taken: the number of requests that workers have taken, as far as they are counted.
    """

    device: Device
    slot: int
    owner: ChannelOwner
    duplicate: socket.socket
    generation: int
    counted: dict[int, Counts]
    used_at: float
    digests: set[str] = field(default_factory=set[str])
    taken: int = 0


class ChannelSockets:
    """The sockets of all channels, and the connections over which their ends are sent.

    Args:
        send_order: sends an order to a worker.
        clients: returns the object that sends messages to clients.
        count: called with a channel that has ended, to count its last requests.

    Attributes:
        devices: the devices with workers that can read channels, by name.
        channels: the channels by serial.
        by_client: the serials of the channels of each client, by the key of its connection.
    """

    def __init__(
        self, send_order: SendOrder, clients: Callable[[], ChannelClients], count: Callable[[OpenChannel], object]
    ) -> None:
        self.devices: dict[str, Device] = {}
        self.channels: dict[int, OpenChannel] = {}
        self.by_client: dict[bytes, set[int]] = {}
        self._send_order = send_order
        self._clients = clients
        self._count = count
        # The clients' ends of channels, until they are sent.
        self._client_ends: dict[int, socket.socket] = {}
        self._is_executing = False
        self._fd_closer = DescriptorCloser(log_resource_error)

    def add(self, serial: int, channel: OpenChannel, client_end: socket.socket) -> None:
        """Add a channel that was just granted."""
        self.channels[serial] = channel
        self.by_client.setdefault(channel.owner.client, set()).add(serial)
        self._client_ends[serial] = client_end

    def allow(self, serial: int, digest: str) -> None:
        """Let the workers of a channel run its requests with a description that has this digest."""
        channel = self.channels[serial]
        if digest not in channel.digests and len(channel.digests) < limits.MAX_CHANNEL_DESCRIPTIONS:
            channel.digests.add(digest)
            entry = channel.device.table.channels.get(serial)
            for process in () if entry is None else entry.workers:
                self._send_order(process, wire.AllowRequests(serial, digest), ())

    def announce_rows(self, device: Device) -> None:
        """Tell the workers of a device which rows are in use."""
        for worker in device.workers.values():
            if worker.has_pages:
                self._send_order(worker.process, device.rows_order(worker), ())

    def waiting_count(self, model: str) -> int:
        """Return the number of channels of a model with requests that no worker has taken."""
        return sum(each.owner.model == model and bool(queued_bytes(each.duplicate)) for each in self.channels.values())

    def execute(self) -> None:
        """Execute the actions of all tables, and the actions that follow from them."""
        if self._is_executing:
            # An action has caused an event, such as the loss of a client. The loop below executes its actions, too.
            return
        self._is_executing = True
        try:
            while actions := [(each, action) for each in self.devices.values() for action in each.table.take_actions()]:
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
                    self.channels[serial].duplicate.shutdown(socket.SHUT_RD)
            case ReadQueue(serial):
                self._read_queue(device, serial)
            case Relay(_, serial, _, payload):
                self._clients().on_packet(self.channels[serial].owner, payload)
            case CloseDuplicate(serial):
                self._forget(serial)
            case ReplaceWorker(process):
                reason = "its row in the pages of direct channels is implausible"
                device.workers[process].end(None, reason, event_loop.now())

    def _add_channel(self, device: Device, process: str, slot: int, serial: int) -> None:
        worker, channel = device.workers[process], self.channels[serial]
        if not worker.has_pages:
            worker.has_pages = self._send_order(process, device.rows_order(worker), (device.memfd,))
        order = wire.AddChannel(slot, serial)
        if worker.has_pages and self._send_order(process, order, (channel.duplicate.fileno(),)):
            for digest in channel.digests:
                self._send_order(process, wire.AllowRequests(serial, digest), ())
        else:
            device.table.on_not_sent(process, serial)

    def _notify(self, notice: Notice) -> None:
        channel = self.channels[notice.channel]
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
        channel = self.channels[serial]
        duplicate = channel.duplicate
        while True:
            try:
                packet, ancillary, _, _ = duplicate.recvmsg(limits.MAX_PACKET_BYTES, ANCILLARY_BYTES, _RECEIVE_FLAGS)
            except OSError:
                break
            for descriptor in descriptors_in(ancillary):
                self._fd_closer.close(channel.owner.origin.principal, descriptor)
            if packet:
                device.table.on_queued(serial, request_number(packet), packet)
            elif not queued_bytes(duplicate):
                break
        device.table.on_queue_end(serial)

    def _forget(self, serial: int) -> None:
        channel = self.channels.pop(serial)
        self._count(channel)
        # The queue may have descriptors of the client, which the kernel closes with it. Closing one can block.
        self._fd_closer.close(channel.owner.origin.principal, channel.duplicate.detach())
        client = channel.owner.client
        serials = self.by_client[client]
        serials.discard(serial)
        if not serials:
            del self.by_client[client]


def queued_bytes(connection: socket.socket) -> int:
    """Return the number of bytes in the queue of a channel (SIOCINQ)."""
    found = array.array("i", [0])
    fcntl.ioctl(connection.fileno(), termios.FIONREAD, found)
    return found[0]
