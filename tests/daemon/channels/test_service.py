"""The service of direct channels over real sockets and pages, with clients and workers that the test plays itself."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Iterator, Sequence

import pytest

from weightd_common.channels.pages import (
    ANSWER_BYTES,
    ANSWERED,
    CURRENT_CHANNEL,
    CURRENT_REQUEST,
    DEVICE_BYTES,
    DEVICE_LAYOUT,
    FAILED,
    INVALID,
    LATE,
    REQUESTS,
    RETURNED,
    SINCE,
    STAGE,
    STAGE_IDLE,
    STAGE_RUNNING,
    row_page,
)
from weightd_daemon.channels.exclusions import MAX_HANDED_OVER
from weightd_daemon.channels.service import MAX_USER_CHANNELS, ChannelService
from weightd_daemon.channels.sockets import ChannelOwner
from weightd_daemon.channels.states import ChannelEvent
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.scheduling.direct import DirectLoss, DirectRuns, DirectWorker
from weightd_daemon.scheduling.request import ClientOrigin
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.tenants.usage import Usage
from weightd_protocol import limits
from weightd_protocol.errors import FailedPrecondition, RequestError, ResourceExhausted
from weightd_protocol.messages.channels import (
    ORDERED,
    AddChannel,
    AllowRequests,
    ChannelEnded,
    ChannelExtended,
    ChannelOpened,
    ChannelReleased,
    ReleaseChannel,
    RequestAdopted,
    RequestHandedOver,
    SetChannelRows,
)
from weightd_protocol.messages.types import DaemonMessage
from weightd_protocol.messages.worker import ChildOrder

ANN = ClientOrigin("process 1", "uid 1")


class Peers:
    """The workers and clients of a service. They keep the descriptors that they receive."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, ChildOrder]] = []
        self.messages: list[tuple[bytes, DaemonMessage]] = []
        self.packets: list[bytes] = []
        self.ends: list[socket.socket] = []
        self.worker_ends: dict[int, socket.socket] = {}
        self.client_ends: dict[str, socket.socket] = {}
        self.used: list[str] = []
        self.faults: list[str] = []
        self.ran: list[tuple[str, DirectRuns]] = []
        self.active: list[tuple[str, int | None]] = []
        self.pages = memoryview(b"")
        self.usage = Usage()
        self.tenant = Tenant("t", TenantConfig())
        self.service = ChannelService(self._send_order, lambda: self, lambda model, now: self.used.append(model))

    def _send_order(self, process: str, order: ChildOrder, descriptors: Sequence[int]) -> bool:
        self.orders.append((process, order))
        if isinstance(order, SetChannelRows) and descriptors:
            self.pages = memoryview(mmap.mmap(descriptors[0], DEVICE_BYTES))
        if isinstance(order, AddChannel):
            end = socket.socket(fileno=os.dup(descriptors[0]))
            self.worker_ends[order.channel] = end
            self.ends.append(end)
        return True

    def send_channel(self, client: bytes, message: ChannelOpened, descriptor: int) -> bool:
        self.messages.append((client, message))
        self.client_ends[message.id] = socket.socket(fileno=os.dup(descriptor))
        return True

    def reply(self, client: bytes, message: DaemonMessage) -> None:
        self.messages.append((client, message))

    def reply_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        raise AssertionError(error)

    def on_packet(self, owner: ChannelOwner, packet: bytes) -> None:
        self.packets.append(packet)

    def _on_fault(self, process: str, loss: DirectLoss | None, reason: str, now: float) -> None:
        self.faults.append(process)

    def _on_ran(self, process: str, runs: DirectRuns) -> None:
        self.ran.append((process, runs))

    def _on_active(self, process: str, seconds: float | None, now: float) -> None:
        self.active.append((process, None if seconds is None else round(seconds)))

    def add_worker(self, name: str, model: str = "m", device: str = "cpu") -> None:
        self.service.add_worker(
            DirectWorker(f"{model}.1.{name}", model, device, 5.0, self._on_fault, self._on_ran, self._on_active), 0.0
        )

    def open(self, name: str = "1", client: bytes = b"c", origin: ClientOrigin = ANN, model: str = "m") -> int:
        """Open a channel; return its serial."""
        self.service.open(ChannelOwner(client, name, model, origin, self.tenant, self.usage), 0.0)
        return [each.channel for _, each in self.orders if isinstance(each, AddChannel)][-1]

    def tick(self, now: float) -> None:
        """Let the timer of the service fire."""
        self.service.timer.set(0.0)
        self.service.timer.fire(now)

    def taken(self, kind: type[object]) -> list[object]:
        """Remove and return the orders and messages of a type."""
        found: list[object] = [each for _, each in [*self.orders, *self.messages] if isinstance(each, kind)]
        self.orders = [each for each in self.orders if not isinstance(each[1], kind)]
        self.messages = [each for each in self.messages if not isinstance(each[1], kind)]
        return found

    def close(self) -> None:
        self.service.close()
        for each in (*self.ends, *self.client_ends.values()):
            each.close()


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    peers.add_worker("w1")
    yield peers
    peers.close()


def test_worker_gets_pages_before_its_first_channel(peers: Peers) -> None:
    peers.open()
    peers.open("2")
    assert [type(each) for _, each in peers.orders] == [SetChannelRows, AddChannel, AddChannel]


def test_packet_reaches_the_worker_and_its_answer_the_client(peers: Peers) -> None:
    serial = peers.open()
    peers.client_ends["1"].send(b"request")
    assert peers.worker_ends[serial].recv(100) == b"request"
    peers.worker_ends[serial].send(b"answer")
    assert peers.client_ends["1"].recv(100) == b"answer"


def test_model_without_workers_has_no_channels(peers: Peers) -> None:
    with pytest.raises(FailedPrecondition, match="other has no workers"):
        peers.open(model="other")
    peers.add_worker("w2", device="cpu:1")
    with pytest.raises(FailedPrecondition, match="several devices"):
        peers.open()


def test_channels_of_a_user_are_limited(peers: Peers) -> None:
    for number in range(MAX_USER_CHANNELS):
        peers.open(str(number), client=b"%d" % (number % 2))
    with pytest.raises(ResourceExhausted, match="this user already has"):
        peers.open("more", client=b"another")
    peers.open("other", client=b"another", origin=ClientOrigin("process 2", "uid 2"))


def test_descriptions_of_a_channel_are_limited(peers: Peers) -> None:
    peers.open()
    for number in range(limits.MAX_CHANNEL_DESCRIPTIONS + 5):
        peers.service.on_answered(b"c", peers.usage, str(number))
        peers.service.on_answered(b"c", peers.usage, "0")
    assert len(peers.taken(AllowRequests)) == limits.MAX_CHANNEL_DESCRIPTIONS


def test_next_worker_of_a_generation_gets_the_open_channels(peers: Peers) -> None:
    serial = peers.open()
    peers.service.on_answered(b"c", peers.usage, "digest")
    peers.orders.clear()
    peers.add_worker("w2")
    found = [each for process, each in peers.orders if process == "m.1.w2"]
    assert [type(each) for each in found] == [SetChannelRows, AddChannel, AllowRequests]
    assert found[2] == AllowRequests(serial, "digest")
    # The first worker learns that there is another row.
    assert [process for process, each in peers.orders if isinstance(each, SetChannelRows)] == ["m.1.w1", "m.1.w2"]


def test_request_that_is_handed_over_is_dispatched(peers: Peers) -> None:
    serial = peers.open()
    peers.service.on_report("m.1.w1", RequestHandedOver(serial, 7), [b"packet"])
    assert (peers.packets, peers.taken(RequestAdopted)) == ([b"packet"], [RequestAdopted("7", "1")])


def test_disconnect_closes_the_channel_once_the_worker_has_released_it(peers: Peers) -> None:
    serial = peers.open()
    peers.service.on_disconnect(b"c")
    assert peers.taken(ReleaseChannel) == [ReleaseChannel(serial)]
    assert peers.service.by_client
    peers.service.on_report("m.1.w1", ChannelReleased(serial, ORDERED), ())
    assert not peers.service.by_client


def test_reclaimed_requests_are_dispatched_in_order(peers: Peers) -> None:
    serial = peers.open()
    for packet in (b"one", b"two"):
        peers.client_ends["1"].send(packet)
    peers.service.reclaim("m")
    peers.service.on_report("m.1.w1", ChannelReleased(serial, ORDERED), ())
    assert (peers.packets, peers.taken(ChannelEnded)) == ([b"one", b"two"], [ChannelEnded("1")])
    with pytest.raises(BrokenPipeError):
        peers.client_ends["1"].send(b"three")


def test_exit_of_the_last_worker_ends_the_channels(peers: Peers) -> None:
    peers.open()
    peers.client_ends["1"].send(b"queued")
    assert peers.service.remove_worker("m.1.w1", 0.0) is None
    assert (peers.packets, peers.taken(ChannelEnded)) == ([b"queued"], [ChannelEnded("1")])


def test_retired_worker_leaves_the_channel_to_the_others(peers: Peers) -> None:
    peers.add_worker("w2")
    serial = peers.open()
    peers.service.retire_worker("m.1.w1")
    assert peers.taken(ReleaseChannel) == [ReleaseChannel(serial)]
    peers.service.on_report("m.1.w1", ChannelReleased(serial, ORDERED), ())
    peers.client_ends["1"].send(b"request")
    assert not peers.taken(ChannelEnded)


def test_last_retired_worker_answers_the_queue(peers: Peers) -> None:
    serial = peers.open()
    peers.client_ends["1"].send(b"queued")
    peers.service.retire_worker("m.1.w1")
    with pytest.raises(BrokenPipeError):
        peers.client_ends["1"].send(b"more")
    assert peers.worker_ends[serial].recv(100) == b"queued"
    assert not peers.packets


def test_last_requests_of_a_channel_are_counted_by_outcome(peers: Peers) -> None:
    serial = peers.open()
    slots = [order.slot for _, order in peers.orders if isinstance(order, AddChannel)]
    index, words = DEVICE_LAYOUT.row_channel(slots[0]), row_page(peers.pages, 0).words
    # One of the requests is lost with its worker.
    counts = {REQUESTS: 12, ANSWERED: 5, ANSWER_BYTES: 50, INVALID: 2, FAILED: 1, LATE: 1, RETURNED: 2}
    for word, count in counts.items():
        words[index + word] = count
    peers.service.on_disconnect(b"c")
    peers.service.on_report("m.1.w1", ChannelReleased(serial, ORDERED), ())
    usage = peers.usage
    assert (usage.requests, usage.served, usage.bytes_out) == (9, 5, 50)
    assert usage.refused == {"INVALID_ARGUMENT": 2, "INTERNAL": 1, "DEADLINE_EXCEEDED": 1}
    assert peers.ran == [("m.1.w1", DirectRuns(answered=5, failed=4, seconds=0.0))]


def test_unused_channel_ends(peers: Peers) -> None:
    peers.open()
    for second in range(70):
        peers.tick(float(second))
        if peers.taken(ReleaseChannel):
            assert second >= 60
            return
    raise AssertionError("the channel is still open")


def test_long_request_ends_the_channels_of_its_user(peers: Peers) -> None:
    serial = peers.open()
    peers.client_ends["1"].send(b"queued")
    row = row_page(peers.pages, 0)
    row.words[CURRENT_CHANNEL], row.words[CURRENT_REQUEST] = serial, 7
    row.reals[SINCE] = time.monotonic() - 1.0
    row.words[STAGE] = STAGE_RUNNING
    # The daemon sees the request for the first time. It may have been paused since the request has started.
    peers.tick(1.0)
    peers.tick(1.05)
    assert not peers.taken(ReleaseChannel)
    peers.tick(1.2)
    assert peers.taken(ReleaseChannel) == [ReleaseChannel(serial)]
    assert peers.packets == [b"queued"]
    with pytest.raises(FailedPrecondition, match="ran longer"):
        peers.open("2")
    peers.open("2", origin=ClientOrigin("process 2", "uid 2"))
    assert not peers.faults


def test_hung_request_fails_and_is_counted(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[tuple[bytes, str, str]] = []
    monkeypatch.setattr(peers, "reply_error", lambda client, name, error: errors.append((client, name, error.code)))
    serial = peers.open()
    row = row_page(peers.pages, 0)
    row.words[CURRENT_CHANNEL], row.words[CURRENT_REQUEST] = serial, 7
    row.reals[SINCE] = time.monotonic()
    row.words[STAGE] = STAGE_RUNNING
    for now in (1.0, 5.9, 6.0):
        assert not errors
        peers.tick(now)
    assert (errors, peers.faults) == ([(b"c", "7", "DEADLINE_EXCEEDED")], ["m.1.w1"])
    assert (peers.usage.requests, peers.usage.refused) == (1, {"DEADLINE_EXCEEDED": 1})
    assert peers.ran == [("m.1.w1", DirectRuns(answered=0, failed=1, seconds=0.0))]


def test_worker_blames_no_client_of_another_model(peers: Peers) -> None:
    peers.add_worker("w1", model="other")
    serial = peers.open()
    # The worker of the other model writes the channel into its row.
    row = row_page(peers.pages, 1)
    row.words[CURRENT_CHANNEL], row.words[CURRENT_REQUEST] = serial, 7
    row.reals[SINCE] = time.monotonic()
    row.words[STAGE] = STAGE_RUNNING
    row.words[DEVICE_LAYOUT.row_channel(DEVICE_LAYOUT.channel_slots - 1) + REQUESTS] = 1000
    row.words[DEVICE_LAYOUT.row_channel(DEVICE_LAYOUT.channel_slots - 1) + ANSWERED] = 1000
    peers.tick(1.0)
    peers.tick(9.0)
    assert peers.service.remove_worker("other.1.w1", 9.0) is None
    assert (peers.usage.requests, peers.taken(ReleaseChannel)) == (0, [])


def test_many_handed_over_requests_end_the_channels_of_their_user(peers: Peers) -> None:
    serial = peers.open()
    peers.open("2", client=b"d")
    for number in range(MAX_HANDED_OVER + 1):
        assert not peers.taken(ReleaseChannel)
        peers.service.on_report("m.1.w1", RequestHandedOver(serial, number), [b"packet"])
    assert len(peers.taken(ReleaseChannel)) == 2
    with pytest.raises(FailedPrecondition, match="handed over more than"):
        peers.open("3")


def test_running_requests_are_reported_at_each_tick(peers: Peers) -> None:
    serial = peers.open()
    peers.tick(0.1)
    peers.active.clear()
    row = row_page(peers.pages, 0)
    row.words[CURRENT_CHANNEL], row.words[CURRENT_REQUEST] = serial, 7
    row.reals[SINCE] = time.monotonic() - 3.0
    row.words[STAGE] = STAGE_RUNNING
    peers.tick(0.2)
    peers.tick(0.3)
    row.words[STAGE] = STAGE_IDLE
    # The end of the request is also reported if the last channel has ended meanwhile.
    peers.service.on_disconnect(b"c")
    peers.service.on_report("m.1.w1", ChannelReleased(serial, ORDERED), ())
    peers.tick(0.4)
    peers.tick(0.5)
    assert peers.active == [("m.1.w1", 3), ("m.1.w1", 3), ("m.1.w1", None)]


def test_all_channels_end_with_their_rights(peers: Peers) -> None:
    peers.open()
    peers.service.end_all(ChannelEvent.RIGHTS_CHANGE)
    with pytest.raises(BrokenPipeError):
        peers.client_ends["1"].send(b"request")
    assert len(peers.taken(ReleaseChannel)) == 1
    assert not peers.taken(ChannelExtended)
