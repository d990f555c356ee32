"""The direct channels of all devices: opens, extends and ends channels, and watches the workers.

The caller reports the life of each worker, and the messages of workers about channels.
"""

from __future__ import annotations

import itertools
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from weightd_common.channels.messages import (
    AnswerDropped,
    HandedOver,
    Released,
)
from weightd_common.stream import refuse_descriptors
from weightd_daemon.channels.device import ChannelWorker, Device
from weightd_daemon.channels.exclusions import MAX_HANDED_OVER, ChannelExclusions
from weightd_daemon.channels.rows import NO_COUNTS
from weightd_daemon.channels.sockets import (
    ChannelClients,
    ChannelOwner,
    ChannelSockets,
    OpenChannel,
    SendOrder,
    queued_bytes,
)
from weightd_daemon.channels.states import ChannelEvent, ChannelState
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import Timer
from weightd_daemon.scheduling.direct import DirectLoss, DirectRuns, DirectWorker
from weightd_daemon.tenants.usage import Usage
from weightd_protocol import limits
from weightd_protocol.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
)
from weightd_protocol.messages import channels as wire

_log = logging.getLogger("weightd")

# Maximum number of direct channels of one user or tenant.
MAX_USER_CHANNELS = 64

# Seconds between two looks at the rows of the workers while there are channels.
_TICK_S = 0.1

# The same while no worker runs requests. The channels are extended in time.
_IDLE_TICK_S = 1.0

# Seconds for which a channel lives without the daemon, and the remaining seconds below which the daemon extends it.
_LIFETIME_S = 10.0
_EXTEND_BELOW_S = 7.0

# Seconds without a request after which a channel ends.
_IDLE_TIMEOUT_S = 60.0

# Seconds that a request on a channel may run. Longer requests must pass through the daemon, which keeps a worker free
# for short ones.
_MAX_RUN_S = 0.1

# Requests and bytes that a client may send between two looks at the rows: more than any worker can take.
_WINDOW_REQUESTS = 16_384
_WINDOW_BYTES = 2**32


class ChannelService:
    """The direct channels of all devices.

    Args:
        send_order: sends an order to a worker.
        clients: returns the object that sends messages to clients.
        on_used: called with the name of a model and the time when clients have used the model over channels.

    Attributes:
        timer: fires while there are channels.
        by_client: the serials of the channels of each client, by the key of its connection.
        waiting_count: see `ChannelSockets.waiting_count`.
    """

    def __init__(
        self,
        send_order: SendOrder,
        clients: Callable[[], ChannelClients],
        on_used: Callable[[str, float], object],
    ) -> None:
        self.timer = Timer(self._tick)
        self._sockets = ChannelSockets(send_order, clients, self._count)
        self._channels = self._sockets.channels
        self.waiting_count = self._sockets.waiting_count
        self.by_client = self._sockets.by_client
        self._clients = clients
        self._on_used = on_used
        self._devices = self._sockets.devices
        self._device_of: dict[str, Device] = {}
        self._exclusions = ChannelExclusions()
        self._generations: dict[str, int] = {}
        # Serials start at the time in microseconds, so that no channel of an earlier daemon has the same one.
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
            self._sockets.announce_rows(found)
            self._sockets.execute()

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
        self._sockets.execute()

    def remove_worker(self, process: str, now: float) -> DirectLoss | None:
        """Remove a worker that has exited; return the request that it was running, if any."""
        device = self._device_of.pop(process, None)
        if device is None:
            return None
        worker = device.workers[process]
        running = self._running(device, worker, now)
        for channel in self._channels.values():
            self._count_workers(channel, (worker,))
        device.remove_worker(process, time.monotonic())
        if not any(each.generation == worker.generation for each in device.workers.values()):
            self._generations.pop(process.rpartition(".")[0], None)
            device.table.end_generation(worker.generation, ChannelEvent.END_GENERATION)
        self._sockets.announce_rows(device)
        self._sockets.execute()
        return None if running is None else running[1]

    def on_report(self, process: str, message: object, frames: Sequence[Any]) -> None:
        """Handle a message of a worker about a channel; `frames` has the packet of a request that is handed over."""
        device = self._device_of.get(process)
        if device is None:
            return
        if isinstance(message, wire.ChannelReleased):
            device.table.on_report(process, Released(message.channel, message.reason))
        elif isinstance(message, wire.RequestHandedOver):
            packet = bytes(frames[0]) if frames else b""
            channel, now = self._channels.get(message.channel), event_loop.now()
            if channel is not None:
                principal, model = channel.owner.origin.principal, channel.owner.model
                if self._exclusions.count_handover(principal, model, now):
                    self._exclude(
                        principal, model, f"workers have handed over more than {MAX_HANDED_OVER} requests", now
                    )
            device.table.on_report(process, HandedOver(message.channel, message.request, packet, ""))
        elif isinstance(message, wire.AnswerDropped):
            device.table.on_report(process, AnswerDropped(message.channel, message.request, has_run=True))
        self._sockets.execute()

    def is_running(self, process: str) -> bool:
        """Return whether a worker runs a request of a channel."""
        device = self._device_of.get(process)
        if device is None:
            return False
        return device.reader(device.workers[process]).running_since(time.monotonic()) is not None

    def has_work(self, model: str) -> bool:
        """Return whether requests to a model are queued in a channel, or run."""
        if self.waiting_count(model):
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
            ResourceExhausted: the client's user or the device has too many channels.
        """
        self._exclusions.check(owner.origin.principal, owner.model, now)
        device, generation = self._find_generation(owner.model)
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
        # A read on which the kernel drops descriptors, and a close with unread descriptors, can block: a socket with
        # SO_LINGER until its peer has read all data, a file until its file system answers.
        refuse_descriptors(ours)
        serial = device.table.grant("", slot, generation, limits_now, expires_at, real)
        if serial is None:
            ours.close()
            theirs.close()
            raise ResourceExhausted(f"all {limits.MAX_CHANNELS} direct channels of this device are in use")
        slot = device.table.channels[serial].slot
        counted = {row: each.counts(slot, real) for row, each in enumerate(device.table.rows.readers)}
        channel = OpenChannel(device, slot, owner, ours, generation, counted, now)
        self._sockets.add(serial, channel, theirs)
        self._sockets.execute()
        self.timer.set_no_later_than(now + _TICK_S)

    def on_answered(self, client: bytes, usage: Usage, digest: str) -> None:
        """Let workers run the requests of a client with a description, of which a worker has answered a request."""
        for serial in self.by_client.get(client, ()):
            if self._channels[serial].owner.usage is usage:
                self._sockets.allow(serial, digest)

    def on_disconnect(self, client: bytes) -> None:
        """End all channels of a client that has disconnected."""
        for serial in tuple(self.by_client.get(client, ())):
            self._end(serial, ChannelEvent.CLIENT_GONE)

    def reclaim(self, model: str) -> None:
        """End all channels of a model; the daemon dispatches the requests that are queued in them."""
        for serial, channel in tuple(self._channels.items()):
            if channel.owner.model == model:
                self._end(serial, ChannelEvent.RIGHTS_CHANGE)

    def count(self) -> None:
        """Count the requests that workers have run until now."""
        for channel in self._channels.values():
            self._count(channel)

    def close(self) -> None:
        """Close the daemon's descriptors. Clients and workers go on until the channels expire."""
        for channel in self._channels.values():
            channel.duplicate.close()
        self._channels.clear()
        self.by_client.clear()

    def end_all(self, event: ChannelEvent) -> None:
        """End all channels."""
        for serial in tuple(self._channels):
            self._end(serial, event)

    def update_weights(self, now: float) -> None:
        """Apply the weights of the tenants, which a reload may have changed."""
        for device in self._devices.values():
            device.update_weights(time.monotonic())

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
            self._sockets.execute()

    def _running(self, device: Device, worker: ChannelWorker, now: float) -> tuple[OpenChannel, DirectLoss] | None:
        """Return the request that a worker runs, and its channel; None if it runs none, or its row is implausible."""
        reader, real = device.reader(worker), time.monotonic()
        held = {
            serial: each
            for serial, each in self._channels.items()
            if each.device is device and each.generation == worker.generation
        }
        since, current = reader.running_since(real), reader.last_request(held)
        if since is None or current is None:
            return None
        # The loop's clock stands still while the daemon is paused, the worker's does not.
        if worker.seen_run != (current.request, since):
            worker.seen_run, worker.seen_at = (current.request, since), now
        channel = held[current.channel]
        owner = channel.owner
        loss = DirectLoss(owner.client, str(current.request), owner.origin, owner.tenant, now - worker.seen_at)
        return channel, loss

    # --- timer --------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        """Count requests, extend channels, end unused ones, and find requests that run long or hang."""
        is_active = False
        for device in self._devices.values():
            active = device.take_active()
            if not device.table.channels:
                _report_active(device, active, now)
                continue
            changed = {each.process: device.take_changed_slots(each) for each in active}
            device.table.inspect_rows(changed, time.monotonic())
            by_slot = {each.slot: self._channels[serial] for serial, each in device.table.channels.items()}
            for worker in active:
                for slot in changed[worker.process].intersection(by_slot):
                    self._count_workers(by_slot[slot], (worker,))
            for serial in tuple(device.table.channels):
                self._update(device, serial, now)
            self._sockets.execute()
            self._end_hung(device, active, now)
            _report_active(device, active, now)
            is_active |= bool(active)
        if self._channels:
            self.timer.set_no_later_than(now + (_TICK_S if is_active else _IDLE_TICK_S))

    def _update(self, device: Device, serial: int, now: float) -> None:
        entry, channel = device.table.channels[serial], self._channels[serial]
        real = time.monotonic()
        if entry.machine.state is ChannelState.REVOKED and not queued_bytes(channel.duplicate):
            device.table.on_queue_end(serial)
        if entry.machine.state is not ChannelState.OPEN:
            return
        if now >= channel.used_at + _IDLE_TIMEOUT_S:
            device.table.end(serial, ChannelEvent.REVOKE)
            return
        left = entry.limits[0] - channel.taken
        if left < _WINDOW_REQUESTS // 2 or entry.expires_at - real < _EXTEND_BELOW_S:
            taken = min(_WINDOW_REQUESTS, max(0, _WINDOW_REQUESTS - left))
            device.table.refill(serial, taken, _WINDOW_BYTES if taken else 0, real + _LIFETIME_S, real)

    def _count(self, channel: OpenChannel) -> None:
        """Count the requests of a channel since the last call."""
        self._count_workers(channel, channel.device.workers.values())

    def _count_workers(self, channel: OpenChannel, workers: Iterable[ChannelWorker]) -> None:
        """Count the requests of a channel that these workers have run since the last call."""
        for worker in workers:
            if worker.generation == channel.generation:
                self._count_worker(channel, worker)

    def _count_worker(self, channel: OpenChannel, worker: ChannelWorker) -> None:
        counts = channel.device.reader(worker).counts(channel.slot, time.monotonic())
        before = channel.counted.get(worker.row, NO_COUNTS)
        if counts == before:
            return
        channel.counted[worker.row] = counts
        channel.taken += counts.requests - before.requests
        channel.used_at = now = event_loop.now()
        failed = counts.invalid + counts.failed + counts.late - before.invalid - before.failed - before.late
        runs = DirectRuns(counts.answered - before.answered, failed, counts.seconds - before.seconds)
        worker.info.on_ran(worker.process, runs)
        usage = channel.owner.usage
        # The daemon counts a request that was returned to it, or was lost with its worker, when it receives it.
        usage.requests += counts.ended - counts.returned - before.ended + before.returned
        usage.served += counts.answered - before.answered
        usage.bytes_in += counts.nbytes - before.nbytes
        usage.bytes_out += counts.answer_bytes - before.answer_bytes
        usage.slot_seconds += counts.seconds - before.seconds
        usage.count_errors(InvalidArgument.code, counts.invalid - before.invalid)
        usage.count_errors(Internal.code, counts.failed - before.failed)
        usage.count_errors(DeadlineExceeded.code, counts.late - before.late)
        self._on_used(channel.owner.model, now)

    def _exclude(self, principal: str, model: str, reason: str, now: float) -> None:
        """End the open channels of a principal to a model; the daemon dispatches the requests that are queued in them.

        Workers still answer the queues of channels that were revoked before, for example because the daemon stops.
        """
        self._exclusions.exclude(principal, model, reason, now)
        for serial, channel in tuple(self._channels.items()):
            is_open = channel.device.table.channels[serial].machine.state is ChannelState.OPEN
            if is_open and (channel.owner.model, channel.owner.origin.principal) == (model, principal):
                self._end(serial, ChannelEvent.RIGHTS_CHANGE)

    def _end_hung(self, device: Device, active: Sequence[ChannelWorker], now: float) -> None:
        for worker in active:
            running = self._running(device, worker, now)
            if running is None:
                continue
            channel, loss = running
            if loss.ran_s > _MAX_RUN_S:
                self._exclude(
                    loss.origin.principal, worker.info.model, f"a request ran longer than {_MAX_RUN_S:g} s", now
                )
            if worker.is_faulty or loss.ran_s < worker.info.predict_timeout_s:
                continue
            reason = f"a predict took longer than predict_timeout ({worker.info.predict_timeout_s:g} s)"
            error = DeadlineExceeded(f"request {loss.request_id}: {reason}")
            # The row does not count this request, because the worker does not end it.
            channel.owner.usage.count_refused(error, requests=1)
            worker.info.on_ran(worker.process, DirectRuns(answered=0, failed=1, seconds=0.0))
            self._clients().reply_error(loss.client, loss.request_id, error)
            worker.end(loss, reason, now)


def _report_active(device: Device, active: Sequence[ChannelWorker], now: float) -> None:
    """Tell the dispatchers which workers have taken requests, and for how long their requests have run."""
    for worker in active:
        real = time.monotonic()
        since = device.reader(worker).running_since(real)
        worker.info.on_active(worker.process, None if since is None else real - since, now)
