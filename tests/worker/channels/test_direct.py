"""A worker's direct channels over real sockets and pages, with a fake engine. Runs on Python 3.7."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import time
from typing import Any, List, Tuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.channels import (
    DESCRIPTION,
    GENERATION_SERIAL,
    LIMIT_S,
    Client,
    Device,
    Worker,
    digest_of,
    now_us,
    packet_of,
    request,
)
from weightd_common.channels.pages import (
    ANSWERED,
    CURRENT_REQUEST,
    DEVICE_LAYOUT,
    EXPIRES_AT,
    FAILED,
    GENERATION,
    INVALID,
    LATE,
    REQUESTS,
    RETURNED,
    SECONDS,
    SLOT_ENDING,
    STAGE,
    STAGE_IDLE,
    STAGE_RUNNING,
    STATE,
)
from weightd_common.stream import refuses_descriptors
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.channels import (
    AllowRequests,
    AnswerDropped,
    ChannelReleased,
    ReleaseChannel,
    RequestHandedOver,
    SetChannelRows,
)
from weightd_protocol.messages.inference import (
    Error,
    Infer,
    Parameters,
    RequestDescription,
    TensorSpec,
)
from weightd_protocol.messages.regions import InputLocation, Regions
from weightd_worker import exit_codes
from weightd_worker.engines.engine import Arrays, ModelCorrupted


def test_requests_are_answered_on_the_channel(device: Device, worker: Worker, client: Client) -> None:
    client.send(request(7, 1, 2, 3, 4))
    client.send(request(8, 5, 6, 7, 8))
    assert worker.serve() == exit_codes.OK
    assert client.answer() == ("7", [2, 4, 6, 8])
    assert client.answer() == ("8", [10, 12, 14, 16])
    assert worker.sent == []
    assert (device.count(REQUESTS), device.count(ANSWERED), device.row().words[STAGE]) == (2, 2, STAGE_IDLE)
    assert 0 < device.row().reals[DEVICE_LAYOUT.row_channel(0) + SECONDS] < LIMIT_S


def test_unknown_description_is_handed_over(device: Device, worker: Worker, client: Client) -> None:
    packet = request(7, description=RequestDescription("m", DESCRIPTION.inputs, ("y",)))
    client.send(packet)
    worker.serve()
    assert worker.connection.sent == [(RequestHandedOver(11, 7), [packet])]
    assert not client.has_answer()
    assert worker.engine.done == []
    assert (device.count(RETURNED), device.row().words[STAGE]) == (1, STAGE_IDLE)


def test_late_request_does_not_run(device: Device, worker: Worker, client: Client) -> None:
    client.send(request(7, deadline_us=now_us() - 1))
    worker.serve()
    error, _ = client.receive()
    assert (error.id, error.code) == ("7", "DEADLINE_EXCEEDED")
    assert worker.engine.done == []
    assert (device.count(LATE), device.row().words[STAGE]) == (1, STAGE_IDLE)
    assert worker.sent == []


@pytest.mark.parametrize(
    "parameters",
    [
        Parameters(priority=1),
        Parameters(tenant="other"),
        Parameters(regions=Regions((InputLocation(0, "ab", 0),))),
    ],
    ids=["priority", "tenant", "regions"],
)
def test_odd_parameters_are_handed_over(worker: Worker, client: Client, parameters: Parameters) -> None:
    frames = encode(Infer("7", DESCRIPTION, parameters))
    packet = packet_of(frames if parameters.regions else [*frames, bytes(16)])
    client.send(packet)
    worker.serve()
    assert worker.connection.sent == [(RequestHandedOver(11, 7), [packet])]
    assert worker.engine.done == []


@pytest.mark.parametrize("number", ["x", "-7", "+7", " 7", "07", "1_0", "0", "٣", str(2**63)])
def test_id_that_is_no_decimal_number_is_handed_over(worker: Worker, client: Client, number: str) -> None:
    client.send(request(number))
    worker.serve()
    assert worker.sent == [RequestHandedOver(11, 0)]
    assert not client.has_answer()


def test_largest_id_is_answered(worker: Worker, client: Client) -> None:
    client.send(request(2**63 - 1))
    worker.serve()
    assert client.answer()[0] == str(2**63 - 1)


def test_each_request_is_answered_once_by_two_workers(device: Device) -> None:
    first, second = Worker(device, 0, 2), Worker(device, 1, 2)
    client = device.open()
    first.add(client)
    second.add(client)
    for number in range(1, 21):
        client.send(request(number))
    ready = first.readable()
    for _ in range(30):
        for each in (first, second):
            assert each.channels.serve(ready if each is first else each.readable()) == exit_codes.OK
    answered = [client.answer()[0] for _ in range(20)]
    assert sorted(map(int, answered)) == [*range(1, 21)]
    assert not client.has_answer()
    taken = [device.count(REQUESTS, row=row) for row in (0, 1)]
    assert sum(taken) == 20
    assert min(taken) > 0
    for each in (first, second):
        each.channels.close()


def test_quicker_worker_leaves_the_other_idle(device: Device, worker: Worker, client: Client) -> None:
    client.send(request(7))
    ready = worker.readable()
    assert device.ends[11].recv(limits.MAX_PACKET_BYTES)
    assert worker.channels.serve(ready) == exit_codes.OK
    assert (device.count(REQUESTS), device.row().words[STAGE]) == (0, STAGE_IDLE)
    assert worker.sent == []


def test_slow_reader_loses_its_answers(device: Device, worker: Worker, client: Client) -> None:
    sent = 0
    while AnswerDropped(11, sent) not in worker.sent:
        sent += 1
        client.send(request(sent))
        worker.serve()
        assert sent < 100_000
    assert (device.count(ANSWERED), device.count(RETURNED), device.row().words[STAGE]) == (sent - 1, 1, STAGE_IDLE)
    for number in range(1, sent):
        assert client.answer()[0] == str(number)
    assert not client.has_answer()


@pytest.mark.parametrize("has_small_buffer", [False, True], ids=["limit", "buffer"])
def test_answer_too_large_is_handed_over(
    device: Device, worker: Worker, client: Client, has_small_buffer: bool
) -> None:
    if has_small_buffer:
        device.ends[11].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    nbytes = 40_000 if has_small_buffer else limits.MAX_PACKET_BYTES
    worker.output = np.zeros(nbytes // 4, np.float32)
    packet = request(7)
    client.send(packet)
    worker.serve()
    assert worker.connection.sent == [(RequestHandedOver(11, 7), [packet])]
    assert not client.has_answer()
    assert (device.count(RETURNED), device.row().words[STAGE]) == (1, STAGE_IDLE)


def test_large_answer_fits(worker: Worker, client: Client) -> None:
    worker.output = np.zeros(100_000 // 4, np.float32)
    client.send(request(7))
    worker.serve()
    assert client.answer()[0] == "7"


def test_overdrawn_channel_is_released(device: Device, worker: Worker) -> None:
    client = device.open(requests=2)
    worker.add(client)
    packets = [request(number) for number in (1, 2, 3, 4)]
    for each in packets:
        client.send(each)
    worker.serve()
    assert [client.answer()[0] for _ in range(2)] == ["1", "2"]
    assert worker.connection.sent == [(RequestHandedOver(11, 3), [packets[2]]), (ChannelReleased(11, "overdrawn"), [])]
    assert worker.connection.watched == set()
    # The daemon reads the rest.
    assert device.ends[11].recv(limits.MAX_PACKET_BYTES) == packets[3]


def test_expired_channel_is_released_unread(device: Device, worker: Worker, client: Client) -> None:
    packet = request(7)
    client.send(packet)
    device.page.reals[DEVICE_LAYOUT.channel(0) + EXPIRES_AT] = time.monotonic()
    worker.serve()
    assert worker.sent == [ChannelReleased(11, "expired")]
    assert device.ends[11].recv(limits.MAX_PACKET_BYTES) == packet
    assert device.count(REQUESTS) == 0


def test_ending_channel_is_released(device: Device, worker: Worker, client: Client) -> None:
    client.send(request(7))
    device.page.words[DEVICE_LAYOUT.channel(0) + STATE] = SLOT_ENDING
    worker.serve()
    assert worker.sent == [ChannelReleased(11, "ordered")]


def test_client_that_has_closed_its_end_is_released(device: Device, worker: Worker, client: Client) -> None:
    client.send(request(7))
    client.send(request(8))
    client.end.close()
    worker.serve()
    assert worker.sent == [ChannelReleased(11, "ended")]
    assert device.ended() == 2


def test_reset_of_the_client_loses_no_request(device: Device, worker: Worker, client: Client) -> None:
    client.send(request(7))
    worker.serve()
    client.send(request(8))
    # The client has not read its answer, so the next read fails with ECONNRESET.
    client.end.close()
    worker.serve()
    assert device.ended() == 2
    assert worker.sent == [ChannelReleased(11, "ended")]


def test_ordered_release_closes_the_descriptor(device: Device, worker: Worker, client: Client) -> None:
    worker.channels.on_order(ReleaseChannel(11))
    assert worker.sent == [ChannelReleased(11, "ordered")]
    device.ends[11].close()
    assert client.end.recv(1) == b""


def test_orders_about_released_channels_are_ignored(worker: Worker, client: Client) -> None:
    worker.channels.on_order(ReleaseChannel(client.serial))
    worker.channels.on_order(ReleaseChannel(client.serial))
    worker.channels.on_order(ReleaseChannel(99))
    worker.channels.on_order(AllowRequests(client.serial, "ab" * 32))
    assert worker.sent == [ChannelReleased(11, "ordered")]


def test_channel_of_another_generation_is_refused(device: Device, worker: Worker) -> None:
    client = device.open()
    device.page.words[DEVICE_LAYOUT.channel(0) + GENERATION] += 1
    worker.add(client)
    assert worker.sent == [ChannelReleased(11, "foreign")]
    assert worker.connection.watched == set()


def test_drain_answers_queued_requests(worker: Worker, client: Client) -> None:
    for number in (1, 2, 3):
        client.send(request(number))
    assert worker.channels.drain() == exit_codes.OK
    assert [client.answer()[0] for _ in range(3)] == ["1", "2", "3"]
    assert worker.sent == [ChannelReleased(11, "ended")]
    with pytest.raises(BrokenPipeError):
        client.send(request(4))


def test_drain_ends_while_a_client_sends(worker: Worker, client: Client) -> None:
    def send_more(inputs: Arrays) -> Arrays:
        with contextlib.suppress(BrokenPipeError):
            client.send(request(8))
        return inputs

    worker.engine.answer = send_more
    client.send(request(7))
    assert worker.channels.drain() == exit_codes.OK
    assert worker.engine.done == ["predict"]


def test_only_allowed_descriptions_run(device: Device, worker: Worker) -> None:
    other = RequestDescription("m", (TensorSpec("x", "FP32", (2, 2)),))
    client, second = device.open(), device.open(1, 22)
    worker.add(client)
    worker.add(second, DESCRIPTION, other)
    for each in (client, second):
        each.send(request(7, description=other))
    worker.serve()
    assert worker.sent == [RequestHandedOver(11, 7)]
    assert second.answer()[0] == "7"


def test_descriptions_of_a_channel_are_limited(worker: Worker, client: Client) -> None:
    shapes = [RequestDescription("m", (TensorSpec("x", "FP32", (1,) * size + (4,)),)) for size in range(2, 10)]
    for number in range(limits.MAX_CHANNEL_DESCRIPTIONS - 1):
        worker.channels.on_order(AllowRequests(11, f"{number:064x}"))
    worker.channels.on_order(AllowRequests(11, digest_of(shapes[0])))
    client.send(request(7, description=shapes[0]))
    client.send(request(8))
    worker.serve()
    assert worker.sent == [RequestHandedOver(11, 7)]
    assert client.answer()[0] == "8"


# --- failures of the model --------------------------------------------------------------------------------------------


def test_error_of_the_model_is_answered(device: Device, worker: Worker, client: Client) -> None:
    worker.error = InvalidArgument("too small")
    client.send(request(7))
    assert worker.serve() == exit_codes.OK
    assert client.receive()[0] == Error("7", "INVALID_ARGUMENT", "too small")
    assert (device.count(INVALID), device.row().words[STAGE]) == (1, STAGE_IDLE)


@pytest.mark.parametrize("error", [ModelCorrupted("broken"), ValueError("broken")])
def test_row_shows_the_request_that_corrupted_the_model(
    device: Device, worker: Worker, client: Client, error: Exception
) -> None:
    worker.error = error
    client.send(request(7))
    client.send(request(8))
    assert worker.serve() == exit_codes.MODEL_CORRUPTED
    answer, _ = client.receive()
    assert (answer.id, answer.code) == ("7", "INTERNAL")
    words = device.row().words
    assert (words[STAGE], words[CURRENT_REQUEST], device.ended()) == (STAGE_RUNNING, 7, 0)
    assert len(worker.engine.done) == 1


# --- restart of the daemon --------------------------------------------------------------------------------------------


def test_requests_are_answered_without_a_daemon(worker: Worker, client: Client) -> None:
    worker.connection.has_daemon = False
    client.send(request(7))
    client.send(request(8, description=RequestDescription("m", DESCRIPTION.inputs, ("y",))))
    worker.serve()
    assert client.answer()[0] == "7"
    error, _ = client.receive()
    assert (error.id, error.code) == ("8", "UNAVAILABLE")
    assert error.error == "the daemon is restarting; the request has not run"


def test_request_that_the_daemon_cannot_take_is_an_error(device: Device, worker: Worker, client: Client) -> None:
    worker.connection.is_full = True
    client.send(request(7, description=RequestDescription("m", DESCRIPTION.inputs, ("y",))))
    client.send(request(8))
    client.send(b"x")
    worker.serve()
    error, _ = client.receive()
    assert (error.id, error.code) == ("7", "UNAVAILABLE")
    assert error.error == "the daemon does not read the messages of its workers; the request has not run"
    assert client.answer()[0] == "8"
    assert not client.has_answer()
    assert worker.sent == []
    assert (device.count(ANSWERED), device.count(FAILED), device.count(RETURNED)) == (1, 2, 0)
    assert device.row().words[STAGE] == STAGE_IDLE


@pytest.mark.parametrize("has_daemon", [False, True], ids=["no daemon", "full"])
def test_answer_too_large_is_an_error_if_the_daemon_cannot_take_the_request(
    device: Device, worker: Worker, client: Client, has_daemon: bool
) -> None:
    worker.connection.has_daemon, worker.connection.is_full = has_daemon, has_daemon
    worker.output = np.zeros(limits.MAX_PACKET_BYTES // 4, np.float32)
    client.send(request(7))
    worker.serve()
    error, _ = client.receive()
    assert (error.id, error.code) == ("7", "UNAVAILABLE")
    assert error.error.endswith("; the answer is too large for a direct channel")
    assert (device.count(FAILED), device.count(RETURNED), device.row().words[STAGE]) == (1, 0, STAGE_IDLE)


def test_next_daemon_hears_nothing_of_earlier_channels(device: Device, worker: Worker, client: Client) -> None:
    client.send(request(7))
    client.send(request(8, description=RequestDescription("m", DESCRIPTION.inputs, ("y",))))
    worker.channels.on_new_daemon()
    with pytest.raises(BrokenPipeError):
        client.send(request(9))
    # The next daemon has its own pages and channels.
    other_device = Device()
    worker.connection.descriptors.append(os.dup(other_device.descriptor))
    worker.channels.on_order(SetChannelRows(GENERATION_SERIAL, 2, 3, (2,)))
    other = other_device.open(0, 12)
    worker.device = other_device
    worker.add(other)
    other.send(request(1))
    worker.serve()
    assert client.answer()[0] == "7"
    error, _ = client.receive()
    assert (error.id, error.code) == ("8", "UNAVAILABLE")
    device.ends[11].close()
    assert client.end.recv(1) == b""
    assert other.answer()[0] == "1"
    assert worker.sent == []
    assert device.ended() == 2
    assert other_device.ended(row=2) == 1
    worker.channels.on_order(ReleaseChannel(12))
    assert worker.sent == [ChannelReleased(12, "ordered")]
    other_device.close()


# --- hostile clients --------------------------------------------------------------------------------------------------


def test_empty_packet_ends_the_channel(device: Device, worker: Worker, client: Client) -> None:
    client.send(b"")
    packet = request(7)
    client.send(packet)
    worker.serve()
    assert worker.sent == [ChannelReleased(11, "ended")]
    assert device.ends[11].recv(limits.MAX_PACKET_BYTES) == packet


def test_packet_that_is_too_long_is_cut(worker: Worker, client: Client) -> None:
    client.send(bytes(limits.MAX_PACKET_BYTES + 100))
    worker.serve()
    assert worker.connection.sent == [(RequestHandedOver(11, 0), [bytes(limits.MAX_PACKET_BYTES + 1)])]


def lingering_socket() -> socket.socket:
    """Return a socket whose close blocks for `LIMIT_S`, because its peer does not read."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        connection = socket.create_connection(listener.getsockname())
        KEPT.append(listener.accept()[0])
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            connection.send(bytes(100_000))
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, int(LIMIT_S)))
    return connection


KEPT: List[socket.socket] = []


def rights_of(connection: socket.socket) -> List[Tuple[int, int, Any]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [connection.fileno()]))]


@pytest.mark.parametrize("is_empty", [False, True], ids=["request", "empty"])
def test_descriptors_of_a_client_do_not_block(device: Device, worker: Worker, is_empty: bool) -> None:
    client = device.open(refuses_descriptors=False)
    worker.add(client)
    client.send(request(6))
    packet = b"" if is_empty else request(7)
    with lingering_socket() as connection:
        client.end.sendmsg([packet], rights_of(connection))
    begin = time.monotonic()
    worker.serve()
    assert time.monotonic() - begin < LIMIT_S / 2
    assert client.answer()[0] == "6"
    number = 0 if is_empty else 7
    assert worker.connection.sent == [(RequestHandedOver(11, number), [packet]), (ChannelReleased(11, "overdrawn"), [])]
    assert len(worker.engine.done) == 1
    assert device.row().words[STAGE] == STAGE_IDLE
    # The peer resets the connection, so the thread that closes the socket ends.
    KEPT.pop().close()


def test_kernel_refuses_descriptors_of_a_client(device: Device, worker: Worker, client: Client) -> None:
    if not refuses_descriptors(device.ends[client.serial]):
        pytest.skip("the kernel cannot refuse descriptors")
    with pytest.raises(PermissionError):
        client.end.sendmsg([request(7)], rights_of(client.end))
    client.send(request(8))
    worker.serve()
    assert client.answer()[0] == "8"


VALID = request(7)


@st.composite
def hostile_packets(draw: Any) -> bytes:
    """Arbitrary bytes, and requests of which a part was changed."""
    if draw(st.booleans()):
        return bytes(draw(st.binary(min_size=1, max_size=300)))
    begin, end = sorted(draw(st.tuples(*[st.integers(0, len(VALID))] * 2)))
    return VALID[:begin] + bytes(draw(st.binary(max_size=20))) + VALID[end:] or b"\0"


@given(st.lists(hostile_packets(), max_size=5))
def test_hostile_packets_are_handed_over_unchanged(packets: List[bytes]) -> None:
    device = Device()
    worker, client = Worker(device), device.open()
    worker.add(client)
    try:
        answered = 0
        for packet in packets:
            client.send(packet)
            assert worker.serve() == exit_codes.OK
            if client.has_answer():
                # Only a request with an allowed description is answered.
                answered += 1
                message, _ = client.receive()
                assert encode(Infer("1", DESCRIPTION))[1] in packet
                assert message.id.encode() in packet
            else:
                (handed, frames) = worker.connection.sent.pop(0)
                assert (handed.channel, frames) == (11, [packet])
        assert worker.connection.sent == []
        assert device.count(REQUESTS) == device.ended() == len(packets)
        assert device.row().words[STAGE] == STAGE_IDLE
        client.send(VALID)
        worker.serve()
        assert client.answer() == ("7", [2, 4, 6, 8])
    finally:
        worker.channels.close()
        device.close()
