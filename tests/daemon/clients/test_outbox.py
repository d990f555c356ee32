"""Answers to clients that read, and to those that do not, over real sockets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from unittest import mock

import pytest
import zmq

from testkit.waiting import until
from weightd.daemon.clients.outbox import Outbox
from weightd.daemon.clients.room import Room
from weightd.daemon.host.sockets import receive

LIMIT_MS = 20_000
LARGE = bytes(1024 * 1024)

Socket = zmq.Socket[bytes]


def met(router: Socket) -> bytes:
    assert router.poll(LIMIT_MS)
    return next(receive(router)).peer


def make_outbox(router: Socket, max_unread_bytes: int = 2**30, room: Room | None = None) -> Outbox:
    make_room = mock.Mock(return_value=False)
    return Outbox(router, room or Room(2**40, lambda _: "somebody"), make_room, max_unread_bytes)


def test_a_client_that_does_not_read_gets_only_so_much(
    router: Socket, connect: Callable[..., Socket], caplog: pytest.LogCaptureFixture
) -> None:
    outbox = make_outbox(router, max_unread_bytes=8 * len(LARGE))
    client = connect(high_water_mark=2)
    reader = connect()
    silent, other = met(router), met(router)
    with caplog.at_level(logging.WARNING, "weightd.frontend"):
        sent = [outbox.send(silent, [b"", LARGE]) for _ in range(40)]
    # Two that it has received, what is in the kernel's buffers, eight that wait.
    assert 8 <= sum(sent) <= 16
    assert (outbox.dropped, len(caplog.records)) == (40 - sum(sent), 1)
    # Small answers pass, and others are not held up.
    assert outbox.send(silent, [b"sorry"])
    assert outbox.send(other, [b"", LARGE])
    assert reader.poll(LIMIT_MS)
    # Once it reads, all is well.
    for _ in range(sum(sent)):
        assert client.poll(LIMIT_MS)
        client.recv_multipart()
    assert client.recv() == b"sorry"
    # The library tells a moment later that a frame is written.
    until(lambda: outbox.send(silent, [b"", LARGE]), "it may be sent more")


def test_an_answer_may_be_larger_than_the_bound_where_there_is_room(
    router: Socket, connect: Callable[..., Socket]
) -> None:
    room = Room(len(LARGE), lambda _: "somebody")
    outbox = make_outbox(router, 10, room)
    client = connect()
    peer = met(router)
    room.take(b"another", 1)
    assert (outbox.send(peer, [b"", LARGE]), outbox.dropped) == (False, 1)
    room.forget(b"another")
    assert outbox.send(peer, [b"", LARGE])
    assert client.poll(LIMIT_MS)


def test_an_answer_to_who_is_gone_is_dropped_and_counted_and_nothing_is_kept_of_it(router: Socket) -> None:
    outbox = make_outbox(router, room=Room(2**40, lambda _: ""))
    assert outbox.send(b"nobody", [b"small"])
    assert outbox.send(b"another", [b"", LARGE])
    assert (outbox.dropped, vars(outbox)["_unread"]) == (2, {})


def test_small_answers_that_nobody_reads_count_too(router: Socket, connect: Callable[..., Socket]) -> None:
    room = Room(2**40, lambda _: "somebody")
    outbox = make_outbox(router, room=room)
    client = connect(high_water_mark=1)
    silent = met(router)
    frames = [bytes(10_000)] * 30
    for _ in range(100):
        assert outbox.send(silent, [b"header", *frames])
    # What the kernel and the library have taken is written.
    assert 20_000_000 < room.held == room.of(silent) == outbox.unread(silent) < 30_000_600
    for _ in range(100):
        assert client.poll(LIMIT_MS)
        assert client.recv_multipart() == [b"header", *frames]

    def all_is_read() -> bool:
        outbox.forget_written()
        return not room.held

    until(all_is_read, "all is read")


def test_what_was_sent_to_who_has_gone_counts_until_the_library_gives_it_up(
    router: Socket, connect: Callable[..., Socket]
) -> None:
    room = Room(2**40, lambda _: "somebody")
    outbox = make_outbox(router, room=room)
    client = connect(high_water_mark=1)
    silent = met(router)
    for _ in range(20):
        outbox.send(silent, [b"", LARGE])
    held = room.held
    outbox.forget(silent)
    room.forget(silent)
    assert (room.held, outbox.unread(silent)) == (0, 0)
    assert 0 < outbox.orphaned() <= held
    client.close(linger=0)
    until(lambda: router.poll(10) or not outbox.orphaned(), "it is given up")
