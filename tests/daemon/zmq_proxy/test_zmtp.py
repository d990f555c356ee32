"""ZMTP without I/O, with input split at any position."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as some

from weightd_daemon.zmq_proxy import zmtp
from weightd_daemon.zmq_proxy.zmtp import (
    MAX_COMMAND_BYTES,
    MAX_FRAMES_PER_PARSE,
    MAX_MESSAGES_PER_PARSE,
    NullMechanism,
    ZmtpConnection,
    ZmtpLimits,
)
from weightd_protocol.framing import LARGE_BYTES, MAX_FRAMES

from .peer import COMMAND, CURVE_GREETING, GREETING, MORE, PING, READY, frame, message, metadata

BOUNDS = ZmtpLimits(max_frame_bytes=4 * LARGE_BYTES, max_message_bytes=5 * LARGE_BYTES)

Messages = list[list[bytes]]


def connection(*sent: bytes, bounds: ZmtpLimits = BOUNDS) -> ZmtpConnection:
    made = ZmtpConnection(NullMechanism(), bounds)
    for each in sent:
        assert made.receive(each) == []
    return made


def ready() -> ZmtpConnection:
    made = connection(GREETING, READY)
    assert made.is_ready
    return made


def fed(to: ZmtpConnection, data: bytes) -> Messages:
    """Return the messages completed by these bytes, received as the proxy receives."""
    messages: Messages = []
    while data or to.is_backlogged:
        if to.is_backlogged:
            found = to.receive(b"")
        elif to.missing_bytes >= LARGE_BYTES:
            target = to.read_buffer()
            count = min(len(target), len(data))
            target[:count] = data[:count]
            found, data = to.on_filled(count), data[count:]
        else:
            found, data = to.receive(data[:LARGE_BYTES]), data[LARGE_BYTES:]
        messages += [[bytes(each) for each in frames] for frames in found]
        assert len(found) <= MAX_MESSAGES_PER_PARSE
        assert to.held_bytes <= BOUNDS.max_message_bytes + 2 * LARGE_BYTES
        if to.error:
            break
    return messages


sizes = some.one_of(some.integers(0, 300), some.sampled_from([8191, 8192, 20_000, LARGE_BYTES, 2 * LARGE_BYTES]))
lists = some.lists(
    some.lists(sizes, min_size=1, max_size=4).filter(lambda each: sum(each) <= BOUNDS.max_message_bytes), max_size=6
)


def split_at(data: bytes, cuts: Sequence[float]) -> list[bytes]:
    offsets = [0, *sorted(int(each * len(data)) for each in cuts), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(offsets)]


@given(lists, some.lists(some.floats(0, 1), max_size=8), some.booleans())
def test_messages_do_not_depend_on_splits(lengths: list[list[int]], cuts: list[float], pings: bool) -> None:
    sent = [[bytes([index]) * length for index, length in enumerate(each)] for each in lengths]
    data = GREETING + READY + (PING if pings else b"").join(map(message, sent))
    peer = connection()
    messages: Messages = []
    for part in split_at(data, cuts):
        messages += fed(peer, part)
    assert (messages, peer.error, peer.is_ready) == (sent, "", True)
    assert (peer.held_bytes, peer.missing_bytes) == (0, 0)
    assert peer.replies[1:] == [frame(COMMAND, b"\5READY" + metadata(Socket_Type=b"ROUTER", Identity=b""))]
    assert (peer.pending_pong == b"\4PONGcontext") is (pings and len(sent) > 1)


@given(some.binary(max_size=300), some.lists(some.floats(0, 1), max_size=4), some.sampled_from([0, 64, 1000]))
def test_random_bytes_give_messages_or_one_error(data: bytes, cuts: list[float], begin: int) -> None:
    data = (GREETING + READY)[:begin] + data
    whole, cut = connection(), connection()
    expected = fed(whole, data)
    found = [each for part in split_at(data, cuts) for each in fed(cut, part)]
    assert (found, cut.error, cut.held_bytes) == (expected, whole.error, whole.held_bytes)
    assert not whole.error or cut.receive(b"more") == []


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\n", "expected a greeting of ZMTP"),
        (b"\1\0\6\0hello", "expected a greeting of ZMTP"),
        (b"\xff" * 10, "expected a greeting of ZMTP"),
        (GREETING[:10] + b"\1\5", "expected ZMTP 3.0 or later, got version 1"),
        (CURVE_GREETING, "expected the mechanism NULL, got 'CURVE'"),
        (GREETING + frame(0, b"hello"), "expected a command before the end of the handshake, got a message"),
        (GREETING + frame(COMMAND, b"\5HELLO"), "expected a READY command"),
        (GREETING + frame(COMMAND, bytes(MAX_COMMAND_BYTES + 1))[:9], "of at most 4096 bytes, got 4097"),
        (GREETING + frame(COMMAND, b"\5READY\x0bSocket"), "expected metadata of ZMTP 3"),
        (GREETING + frame(COMMAND, b"\5READY\x0bSocket-Type\0\0\0\7DEALER"), "expected metadata of ZMTP 3"),
        (GREETING + frame(COMMAND, b"\5READY" + metadata(Socket_Type=b"REQ")), "of type DEALER, got 'REQ'"),
        (GREETING + frame(COMMAND, b"\5READY"), "of type DEALER, got ''"),
        (GREETING + READY + b"\x08\0", "got one with the flags 0x8"),
        (
            GREETING + READY + b"\2" + struct.pack(">Q", BOUNDS.max_frame_bytes + 1),
            "262144 bytes in a frame, got 262145",
        ),
        (GREETING + READY + b"\2" + b"\xff" * 8, "262144 bytes in a frame, got 18446744073709551615"),
        (
            GREETING + READY + frame(MORE, bytes(2 * LARGE_BYTES)) + b"\2" + struct.pack(">Q", 4 * LARGE_BYTES),
            "a message of at most 327680 bytes (max_memory_bytes), got 393216 or more",
        ),
        (GREETING + READY + b"\1\0" * MAX_FRAMES + b"\0\0", "a message of at most 66 frames, got more"),
        (GREETING + READY + frame(COMMAND, bytes(MAX_COMMAND_BYTES + 1))[:9], "of at most 4096 bytes, got 4097"),
    ],
)
def test_error_names_the_expectation_and_ends_reading(data: bytes, text: str) -> None:
    peer = connection()
    assert fed(peer, data) == []
    assert text in peer.error
    assert (peer.receive(GREETING), peer.held_bytes, peer.missing_bytes) == ([], 0, 0)


def test_rejected_peer_gets_the_reason() -> None:
    peer = connection()
    fed(peer, GREETING + frame(COMMAND, b"\5READY" + metadata(Socket_Type=b"REQ")))
    text = b"expected a socket of type DEALER, got 'REQ'"
    assert peer.replies[1:] == [frame(COMMAND, b"\5ERROR" + bytes([len(text)]) + text)]


def test_accepts_the_maximum_number_of_frames() -> None:
    assert fed(ready(), b"\1\0" * (MAX_FRAMES - 1) + b"\0\0") == [[b""] * MAX_FRAMES]


def test_ignores_routing_id_and_other_properties() -> None:
    peer = connection()
    fed(peer, GREETING + frame(COMMAND, b"\5READY" + metadata(X=b"", socket_type=b"DEALER", Identity=b"me")))
    assert (peer.error, peer.is_ready) == ("", True)


def test_accepts_zmtp_3_0() -> None:
    peer = connection()
    assert fed(peer, GREETING.replace(b"\3\1", b"\3\0") + READY + frame(0, b"x")) == [[b"x"]]


def test_parses_a_limited_number_per_turn() -> None:
    peer = ready()
    found = peer.receive(frame(0, b"x") * 100)
    assert (len(found), peer.is_backlogged) == (MAX_MESSAGES_PER_PARSE, True)
    peer = ready()
    assert peer.receive(PING * (MAX_FRAMES_PER_PARSE + 1) + frame(0, b"x")) == []
    assert (peer.is_backlogged, peer.pending_pong) == (True, b"\4PONGcontext")
    assert peer.receive(b"") == [[b"x"]]
    assert not peer.is_backlogged


def test_ignores_unknown_commands() -> None:
    peer = ready()
    assert fed(peer, frame(COMMAND, b"\x09SUBSCRIBEx") + frame(COMMAND, b"") + frame(0, b"x")) == [[b"x"]]
    assert (peer.pending_pong, peer.error) == (None, "")


def test_announced_bytes_count_before_they_arrive() -> None:
    peer = ready()
    peer.receive(frame(MORE, bytes(100)) + b"\2" + struct.pack(">Q", 3 * LARGE_BYTES))
    assert (peer.held_bytes, peer.missing_bytes) == (100 + 3 * LARGE_BYTES, 3 * LARGE_BYTES)


@given(lists)
def test_encoded_messages_match_the_test_client(lengths: list[list[int]]) -> None:
    mechanism = ready().mechanism
    sent = [[bytes(length) for length in each] for each in lengths]
    data = b"".join(piece for frames in sent for piece in zmtp.encode_message(mechanism, frames))
    assert data == b"".join(map(message, sent))
    assert zmtp.encode_pong(mechanism, b"\4PONGx") == frame(COMMAND, b"\4PONGx")
