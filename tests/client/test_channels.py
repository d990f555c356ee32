"""Requests over direct channels: real sockets, with a fake daemon and workers that are played by the test."""

from __future__ import annotations

import gc
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterator, List

import numpy as np
import pytest

from testkit.fakechannels import FakeChannel, FakeChannels, settle
from testkit.fakedaemon import LIMIT_S, FakeDaemon
from weightd import Cancelled, Client, ClientClosed, DeadlineExceeded, Pending, ProtocolError, Unavailable
from weightd.protocol_core import ClientCore
from weightd_protocol.codec import encode
from weightd_protocol.messages.channels import ChannelOpened, OpenChannel
from weightd_protocol.messages.control import ServerMetadataResponse
from weightd_protocol.messages.inference import Error

X = {"x": np.arange(6, dtype=np.float32)}


@pytest.fixture
def address(directory: Path) -> str:
    return f"unix://{directory}/d.sock"


@pytest.fixture
def channels(daemon: FakeDaemon) -> Iterator[FakeChannels]:
    channels = FakeChannels(daemon)
    yield channels
    channels.close()


@pytest.fixture
def channel(channels: FakeChannels, client: Client) -> FakeChannel:
    return channels.open(client, X)


def submit(client: Client, value: float = 0.0, **options: Any) -> Pending:
    return client.submit("m", {"x": np.full(6, value, np.float32)}, **options)


def value_of(pending: Pending) -> float:
    return float(pending.result()["x"][0])


def test_second_request_of_a_description_takes_the_channel(client: Client, channels: FakeChannels) -> None:
    for _ in range(4):
        client.infer("m", X)
    settle(client)
    assert len(channels.granted) == 1
    assert len(channels.relayed) == 4
    client.infer("m", X)
    pending = submit(client, 7.0)
    request = channels.granted[0].take()
    channels.granted[0].answer(request)
    assert value_of(pending) == 7.0
    assert len(channels.relayed) == 5


def test_asks_with_the_request_after_the_third_answer(client: Client, channels: FakeChannels) -> None:
    client.infer("m", X)
    client.infer("m", X)
    settle(client)
    settle(client)
    client.infer("m", X)
    assert not channels.granted
    client.infer("other", X)
    settle(client)
    assert [each.model for each in channels.granted] == ["m"]


def test_the_packet_has_the_deadline_and_a_decimal_id(client: Client, channel: FakeChannel) -> None:
    before = time.monotonic() + 9.0
    pending = submit(client, timeout=9.0)
    request = channel.take()
    assert before <= request.deadline_us / 1e6 + 1e-6 <= time.monotonic() + 9.0
    assert request.message.id == str(int(request.message.id))
    channel.answer(request)
    pending.result()


@pytest.mark.parametrize(
    "options",
    [{"priority": 0}, {"priority": 1}, {"out": {"x": np.zeros(6, np.float32)}}, {"outputs": ["x"]}],
    ids=["model's priority", "priority", "out", "other outputs"],
)
def test_requests_with_options_go_to_the_daemon(
    client: Client, channels: FakeChannels, channel: FakeChannel, options: Any
) -> None:
    submit(client, **options).result()
    assert len(channels.relayed) == 1
    assert not channel.has_request()


@pytest.mark.parametrize("size", [16 * 1024, 15_000])
def test_large_requests_go_to_the_daemon(client: Client, channels: FakeChannels, size: int) -> None:
    """A request goes to the daemon if a tensor is in shared memory, or if it does not fit into a packet."""
    inputs = {name: np.zeros(size, np.float32) for name in "abc"}
    channel = channels.open(client, X)
    for _ in range(3):
        client.infer("m", inputs)
    assert len(channels.relayed) == 3
    assert not channel.has_request()


def test_a_client_with_a_tenant_sends_no_tenant_on_its_channel(daemon: FakeDaemon, channels: FakeChannels) -> None:
    with Client(daemon.address, timeout=LIMIT_S, tenant="t") as client:
        channel = channels.open(client, X)
        pending = submit(client, 1.0)
        request = channel.take()
        assert request.message.parameters.tenant is None
        assert request.message.parameters.timeout_us == LIMIT_S * 1e6
        channel.lose(request)
        assert value_of(pending) == 1.0
        assert channels.relayed[0].parameters.tenant == "t"


# --- limits ----------------------------------------------------------------------------------------------------------


def test_requests_beyond_the_limit_go_to_the_daemon(client: Client, channels: FakeChannels) -> None:
    channels.max_requests = 2
    channel = channels.open(client, X)
    pending = [submit(client, float(number)) for number in range(3)]
    for _ in range(2):
        channel.answer(channel.take())
    assert [value_of(each) for each in pending] == [0.0, 1.0, 2.0]
    assert len(channels.relayed) == 1
    channel.extend(3)
    settle(client)
    pending = [submit(client) for _ in range(2)]
    channel.answer(channel.take())
    assert [value_of(each) for each in pending] == [0.0, 0.0]
    assert len(channels.relayed) == 2


def test_an_expired_channel_is_not_used(client: Client, channels: FakeChannels) -> None:
    channel = channels.open(client, X)
    channel.extend(100, lifetime_s=0.0)
    settle(client)
    client.infer("m", X)
    assert len(channels.relayed) == 1
    channel.extend(100)
    settle(client)
    pending = submit(client)
    channel.answer(channel.take())
    pending.result()
    assert len(channels.relayed) == 1


def test_a_full_channel_is_not_waited_for(client: Client, channels: FakeChannels, channel: FakeChannel) -> None:
    pending: List[Pending] = []
    while not channels.relayed:
        pending.append(submit(client, float(len(pending))))
        settle(client)
    *queued, relayed = pending
    assert value_of(relayed) == len(queued)
    for number, each in enumerate(queued):
        channel.answer(channel.take())
        assert value_of(each) == number
    other = submit(client, 1.0)
    channel.answer(channel.take())
    assert value_of(other) == 1.0


def test_a_refused_channel_is_not_requested_again(client: Client, channels: FakeChannels) -> None:
    channels.refuses = True
    for _ in range(20):
        client.infer("m", X)
    assert channels.refused == 1
    assert len(channels.relayed) == 20


def test_a_channel_without_a_descriptor_counts_as_refused(
    client: Client, channels: FakeChannels, daemon: FakeDaemon
) -> None:
    daemon.handle = lambda message, tensors: (
        [encode(ChannelOpened(message.id, 9, 9, 9))]
        if isinstance(message, OpenChannel)
        else channels.handle(message, tensors)
    )
    for _ in range(9):
        client.infer("m", X)
    assert len(channels.relayed) == 9


@pytest.mark.parametrize("lifetime_s", [-1000.0, -1.0, 100.0, 1000.0])
def test_a_channel_of_another_clock_counts_as_refused(
    client: Client, channels: FakeChannels, lifetime_s: float
) -> None:
    channels.lifetime_s = lifetime_s
    for _ in range(9):
        client.infer("m", X)
    [channel] = channels.granted
    assert client._core.channels.channels == {}  # pyright: ignore[reportPrivateUsage]
    channel.end.settimeout(LIMIT_S)
    assert channel.end.recv(1) == b""
    assert len(channels.relayed) == 9


# --- answers ---------------------------------------------------------------------------------------------------------


def test_answers_arrive_in_any_order(client: Client, channels: FakeChannels) -> None:
    first, second = channels.open(client, X, "a"), channels.open(client, X, "b")
    for _ in range(20):
        pending = [client.submit(model, X, priority=1 if model == "c" else None) for model in ("a", "b", "a", "c", "b")]
        second.answer(second.take())
        assert pending[1].result()
        assert pending[3].result()
        assert not pending[4].done()
        requests = [first.take(), first.take()]
        for request in reversed(requests):
            first.answer(request)
        assert pending[2].result()
        assert pending[0].done()
        second.answer(second.take())
        assert pending[4].result()


def test_an_error_of_the_worker_ends_the_call(client: Client, channel: FakeChannel) -> None:
    pending = submit(client)
    channel.send(encode(Error(channel.take().message.id, "DEADLINE_EXCEEDED", "too late")))
    with pytest.raises(DeadlineExceeded, match="too late"):
        pending.result()


def test_an_error_of_the_daemon_ends_the_call(client: Client, daemon: FakeDaemon, channel: FakeChannel) -> None:
    pending = submit(client)
    request = channel.take()
    daemon.send(*encode(Error(request.message.id, "DEADLINE_EXCEEDED", "the worker hangs")))
    with pytest.raises(DeadlineExceeded, match="the worker hangs"):
        pending.result()
    channel.answer(request)
    settle(client)


def test_a_worker_ends_only_the_calls_of_its_channel(client: Client, channels: FakeChannels) -> None:
    first, second = channels.open(client, X, "a"), channels.open(client, X, "b")
    pending = client.submit("a", X)
    request = first.take()
    second.answer(request)
    second.send(encode(Error(request.message.id, "INTERNAL", "forged")))
    other = client.submit("b", X)
    second.answer(second.take())
    other.result()
    assert not pending.done()
    first.answer(request)
    pending.result()


@pytest.mark.parametrize(
    "packet",
    [b"\xc1" * 20, b"\1\0\0\0\1\0\0\0\xc1", b"\0"],
    ids=["framing", "envelope", "short"],
)
def test_an_invalid_packet_ends_the_channel(
    client: Client, channels: FakeChannels, channel: FakeChannel, packet: bytes
) -> None:
    pending = [submit(client) for _ in range(2)]
    channel.end.send(packet)
    for each in pending:
        with pytest.raises(ProtocolError, match="the direct channel to model m: "):
            each.result()
    client.infer("m", X)
    assert len(channels.relayed) == 1


@pytest.mark.parametrize("kind", ["type", "id"])
def test_an_unexpected_message_of_a_worker_ends_the_channel(client: Client, channel: FakeChannel, kind: str) -> None:
    pending = submit(client)
    request_id = channel.take().message.id
    message = ServerMetadataResponse(request_id, "n", "v", (), ()) if kind == "type" else Error("", "INTERNAL", "why")
    channel.send(encode(message))
    with pytest.raises(ProtocolError):
        pending.result()
    settle(client)


def test_a_cancelled_call_ends_at_once(client: Client, channel: FakeChannel) -> None:
    pending = submit(client)
    pending.cancel()
    with pytest.raises(Cancelled):
        pending.result()
    channel.answer(channel.take())
    other = submit(client, 2.0)
    channel.answer(channel.take())
    assert value_of(other) == 2.0


def test_a_call_times_out(client: Client, channel: FakeChannel) -> None:
    with pytest.raises(DeadlineExceeded, match="the workers of the model do not respond"):
        client.infer("m", X, timeout=0.05)
    channel.answer(channel.take())
    other = submit(client, 2.0)
    channel.answer(channel.take())
    assert value_of(other) == 2.0


# --- notices ---------------------------------------------------------------------------------------------------------


def test_a_lost_request_is_sent_to_the_daemon(client: Client, channels: FakeChannels, channel: FakeChannel) -> None:
    pending = submit(client, 3.0, timeout=9.0)
    request = channel.take()
    channel.lose(request)
    channel.lose(request)
    assert value_of(pending) == 3.0
    [message] = channels.relayed
    assert message.id == request.message.id
    assert 8e6 < (message.parameters.timeout_us or 0) < 9e6


def test_a_lost_request_is_not_sent_after_its_deadline(
    client: Client, channels: FakeChannels, channel: FakeChannel
) -> None:
    pending = submit(client, timeout=0.05)
    request = channel.take()
    while time.monotonic() * 1e6 < request.deadline_us:
        time.sleep(0.01)
    channel.lose(request)
    settle(client)
    with pytest.raises(DeadlineExceeded, match="was lost on a direct channel, and its deadline has passed"):
        pending.result()
    assert channels.relayed == []


def test_an_adopted_request_is_answered_by_the_daemon(
    client: Client, channels: FakeChannels, channel: FakeChannel, daemon: FakeDaemon
) -> None:
    pending = submit(client, 4.0)
    request = channel.take()
    channel.adopt(request)
    channel.lose(request)
    settle(client)
    channel.send(encode(Error(request.message.id, "INTERNAL", "forged")))
    daemon.send(*request.answer)
    assert value_of(pending) == 4.0
    assert channels.relayed == []


def test_the_end_of_a_channel_sends_its_requests_again(
    client: Client, channels: FakeChannels, channel: FakeChannel
) -> None:
    pending = [submit(client, float(number)) for number in range(3)]
    answered, lost, queued = [channel.take() for _ in pending]
    channel.answer(answered)
    channel.finish()
    settle(client)
    assert [value_of(each) for each in pending] == [0.0, 1.0, 2.0]
    assert [each.id for each in channels.relayed] == [lost.message.id, queued.message.id]
    client.infer("m", X)
    assert len(channels.relayed) == 3


def test_all_answers_are_read_before_a_notice_applies(
    client: Client, channels: FakeChannels, channel: FakeChannel
) -> None:
    pending = [submit(client, float(number)) for number in range(90)]
    for _ in pending[1:]:
        channel.answer(channel.take())
    channel.finish()
    assert value_of(pending[-1]) == 89.0
    assert [value_of(each) for each in pending] == [*range(90)]
    assert len(channels.relayed) == 1


def test_answers_behind_a_reset_are_read(client: Client, channel: FakeChannel) -> None:
    pending = [submit(client, float(number)) for number in range(2)]
    channel.answer(channel.take())
    channel.end.close()
    sockets = client._session.channels  # pyright: ignore[reportPrivateUsage]
    [end] = sockets.by_descriptor.values()
    assert sockets.receive(end)
    assert not sockets.receive(end)
    assert value_of(pending[0]) == 0.0


@pytest.mark.parametrize("is_reset", [False, True])
def test_the_end_of_the_socket_waits_for_the_notice(
    client: Client, channels: FakeChannels, channel: FakeChannel, daemon: FakeDaemon, is_reset: bool
) -> None:
    """A pair whose queue has requests resets the connection before it delivers the answers."""
    pending = [submit(client, float(number)) for number in range(3)]
    channel.answer(channel.take())
    if not is_reset:
        channel.take()
        channel.take()
    channel.close()
    assert value_of(pending[0]) == 0.0
    settle(client)
    assert not pending[1].done()
    assert channels.relayed == []
    channel.notify_end()
    assert [value_of(each) for each in pending[1:]] == [1.0, 2.0]


@pytest.mark.parametrize("how", ["shut down", "closed"])
def test_a_revoked_channel_sends_requests_to_the_daemon(
    client: Client, channels: FakeChannels, channel: FakeChannel, how: str
) -> None:
    pending = submit(client, 1.0)
    request = channel.take()
    if how == "closed":
        channel.answer(request)
        channel.close()
    else:
        channel.end.shutdown(socket.SHUT_RD)
    for _ in range(3):
        client.infer("m", X)
    assert len(channels.relayed) == 3
    assert client._core.channels.usable == {}  # pyright: ignore[reportPrivateUsage]
    if how == "shut down":
        channel.answer(request)
    assert value_of(pending) == 1.0


# --- the connection to the daemon -----------------------------------------------------------------------------------


def test_calls_outlive_the_daemon(client: Client, channel: FakeChannel, daemon: FakeDaemon) -> None:
    pending = submit(client, 5.0)
    daemon.stop()
    channel.answer(channel.take())
    assert value_of(pending) == 5.0
    pending = submit(client, 6.0)
    channel.answer(channel.take())
    assert value_of(pending) == 6.0


def test_a_channel_that_ends_without_a_daemon_fails_its_calls(
    client: Client, channel: FakeChannel, daemon: FakeDaemon
) -> None:
    pending = submit(client)
    daemon.stop()
    channel.take()
    channel.close()
    with pytest.raises(Unavailable, match="may have run the request"):
        pending.result()


def test_a_daemon_that_exits_after_the_end_of_a_channel_fails_its_calls(
    client: Client, channel: FakeChannel, daemon: FakeDaemon
) -> None:
    pending = submit(client)
    channel.take()
    channel.close()
    assert not pending.done()
    daemon.stop()
    with pytest.raises(Unavailable, match="may have run the request"):
        pending.result()


def test_a_new_connection_gets_new_channels(client: Client, channel: FakeChannel, daemon: FakeDaemon) -> None:
    owed = submit(client, 7.0)
    daemon.stop()
    again = FakeDaemon(daemon.address)
    others = FakeChannels(again)
    retry_until_connected(client)
    other = others.open(client, X)
    pending = submit(client, 8.0)
    other.answer(other.take())
    assert value_of(pending) == 8.0
    channel.answer(channel.take())
    assert value_of(owed) == 7.0
    others.close()
    again.stop()


def test_a_reader_that_waits_on_a_channel_reads_the_new_connection(
    client: Client, channel: FakeChannel, daemon: FakeDaemon
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.infer, "m", X)
        request = channel.take()
        daemon.stop()
        again = FakeDaemon(daemon.address)
        retry_until_connected(client)
        assert client.infer("other", X)
        channel.answer(request)
        assert waiting.result(LIMIT_S)
        again.stop()


def retry_until_connected(client: Client) -> None:
    """Send requests until the client has noticed the loss of its connection and has a new one."""
    while True:
        try:
            client.server()
        except Unavailable:
            continue
        return


def test_a_new_connection_closes_idle_channels(client: Client, channel: FakeChannel, daemon: FakeDaemon) -> None:
    daemon.stop()
    again = FakeDaemon(daemon.address)
    retry_until_connected(client)
    client.infer("m", X)
    channel.end.settimeout(LIMIT_S)
    assert channel.end.recv(1) == b""
    again.stop()


# --- threads, processes, ends ---------------------------------------------------------------------------------------


def test_many_threads_share_channels(client: Client, channels: FakeChannels, daemon: FakeDaemon) -> None:
    channel = channels.open(client, X)
    channel.serve()

    def ask(number: int) -> None:
        for index in range(100):
            x = np.full(6, 1000 * number + index, np.float32)
            priority = None if index % 5 else 1
            assert np.array_equal(client.infer("m", {"x": x}, priority=priority)["x"], x)

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(ask, range(8))] == [None] * 8
    assert len(channels.relayed) == 160


def test_map_takes_the_channel(client: Client, channels: FakeChannels, channel: FakeChannel) -> None:
    channel.serve()
    inputs = [{"x": np.full(6, number, np.float32)} for number in range(100)]
    assert [float(each["x"][0]) for each in client.map("m", inputs)] == [*range(100)]
    assert channels.relayed == []


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - Python 3.7


def test_a_closed_client_leaves_no_descriptor(daemon: FakeDaemon, channels: FakeChannels) -> None:
    with Client(daemon.address) as other:
        other.server()
    before = descriptors()
    client = Client(daemon.address, timeout=LIMIT_S)
    channel = channels.open(client, X)
    pending = submit(client)
    channel.take()
    client.close()
    with pytest.raises(ClientClosed):
        pending.result()
    channel.close()
    assert_descriptors(before)


def assert_descriptors(count: int) -> None:
    """Wait until the fake daemon has closed its end, too."""
    deadline = time.monotonic() + LIMIT_S
    while descriptors() > count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_closing_ends_calls_of_other_threads(client: Client, channel: FakeChannel) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.infer, "m", X) for _ in range(2)]
        for _ in waiting:
            channel.take()
        client.close()
        assert all(isinstance(each.exception(LIMIT_S), ClientClosed) for each in waiting)
    channel.end.settimeout(LIMIT_S)
    assert channel.end.recv(1) == b""


def test_a_forked_process_does_not_touch_the_channel(client: Client, channel: FakeChannel) -> None:
    pending = submit(client, 9.0)
    child = os.fork()
    if not child:
        client.close()
        del client, pending
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    channel.answer(channel.take())
    assert value_of(pending) == 9.0


def test_closing_ends_the_channel_of_a_forked_process_too(client: Client, channel: FakeChannel) -> None:
    ended, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
    client.close()
    channel.end.settimeout(LIMIT_S)
    assert channel.end.recv(1) == b""
    os.close(end)
    os.waitpid(child, 0)
    os.close(ended)


def test_an_interrupted_reader_fails_the_calls_of_the_channel(
    client: Client, channels: FakeChannels, channel: FakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = [submit(client) for _ in range(2)]
    channel.answer(channel.take())
    sockets = client._session.channels  # pyright: ignore[reportPrivateUsage]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sockets, "_on_message", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pending[0].result()
    for each in pending:
        with pytest.raises(Unavailable, match="in the middle of an answer"):
            each.result()
    client.infer("m", X)
    assert len(channels.relayed) == 1


def test_an_unclaimed_answer_is_dropped(client: Client, channel: FakeChannel) -> None:
    pending = submit(client)
    del pending
    channel.answer(channel.take())
    other = submit(client, 2.0)
    channel.answer(channel.take())
    assert value_of(other) == 2.0
    core: ClientCore = client._core  # pyright: ignore[reportPrivateUsage]
    assert core.calls == {}


def test_without_poll_the_client_selects(
    daemon: FakeDaemon, channels: FakeChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("select.poll")
    with Client(daemon.address, timeout=LIMIT_S) as client:
        channel = channels.open(client, X)
        pending = submit(client, 3.0)
        channel.answer(channel.take())
        assert value_of(pending) == 3.0
