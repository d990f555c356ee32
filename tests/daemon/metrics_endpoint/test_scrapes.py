"""Scrapes by strangers: what each is answered, and that nobody is in anybody's way."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.lingering import lingering
from weightd_common.peers import UNKNOWN, Peer, Peers
from weightd_daemon.metrics_endpoint.http import MAX_HEAD_BYTES
from weightd_daemon.metrics_endpoint.page import MetricsPage
from weightd_daemon.metrics_endpoint.scrapes import MAX_CONNECTIONS, TIMEOUT_S, MetricsEndpoint
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.listen import is_loopback_listener, listen_on
from weightd_protocol.messages.metrics import MetricsResponse, ReloadCounts

GET = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIMIT_S = 30.0


class World:
    """Somebody who is scraped, over a unix socket; its text has so many bytes, about."""

    def __init__(self, path: Path, version: str = "1") -> None:
        # Later than the clock of the loop, which calls no timer so.
        self.now, self.told = 1e9, 0
        self.version = version
        self.loop = EventLoop()
        self._path = path
        self._stack = contextlib.ExitStack()
        listener = self._stack.enter_context(listen_on(f"unix://{path}"))
        page = MetricsPage(self.tell, self.loop.call_soon, lambda: self.now)
        self.scrapes = MetricsEndpoint(listener, self.loop, page, is_loopback=True, clock=lambda: self.now)

    def tell(self) -> MetricsResponse:
        self.told += 1
        return MetricsResponse("7", self.version, "running", 1.0, (1.0,), (1,), (), (), 0, 0, 0, ReloadCounts(0, 0))

    def peer(self, said: bytes = b"") -> socket.socket:
        """Somebody who has connected, and been let in."""
        made = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        made.connect(str(self._path))
        made.sendall(said)
        made.setblocking(False)
        self.loop.run_once(LIMIT_S)
        return made

    def answer(self, peer: socket.socket) -> bytes:
        """What one is answered, until the end."""
        answer = b""
        while True:
            try:
                data = peer.recv(65536)
            except BlockingIOError:
                self.loop.run_once(LIMIT_S)
                continue
            except ConnectionResetError:
                # It had said more, which nobody has read.
                return answer
            if not data:
                return answer
            answer += data

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.scrapes.timer.fire(self.now)

    def close(self) -> None:
        self.scrapes.close()
        self.loop.close()
        self._stack.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "m.sock")
    yield made
    made.close()


def is_open(peer: socket.socket) -> bool:
    try:
        return bool(peer.recv(1))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_a_scrape_is_answered_and_the_connection_ends(world: World) -> None:
    head, _, body = world.answer(world.peer(GET)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n")
    assert f"Content-Length: {len(body)}\r\n".encode() in head
    assert body.startswith(b"# HELP weightd_build_info ")
    assert len(world.scrapes) == 0


def test_a_connection_that_its_client_has_ended_is_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(self: Peers, connection: socket.socket) -> Peer:
        return UNKNOWN

    monkeypatch.setattr(Peers, "identify", of)
    assert not is_open(world.peer())
    assert len(world.scrapes) == 0


def test_however_many_ask_the_text_is_made_once(world: World) -> None:
    peers = [world.peer(GET) for _ in range(MAX_CONNECTIONS)]
    answers = {world.answer(peer) for peer in peers}
    assert (len(answers), world.told) == (1, 1)


def test_what_is_no_scrape_is_refused_and_makes_no_text(world: World) -> None:
    assert world.answer(world.peer(b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
    assert world.answer(world.peer(b"\x16\x03\x01\n\n")).startswith(b"HTTP/1.1 400 ")
    assert world.told == 0


def test_a_text_that_does_not_fit_into_the_kernels_buffer_comes_in_parts(tmp_path: Path) -> None:
    world = World(tmp_path / "m.sock", version="x" * 2_000_000)
    peer = world.peer(GET)
    for _ in range(3):
        world.loop.run_once(0.0)
    # Who does not read keeps nobody, and what it says meanwhile is nothing to anybody; the text is there once.
    assert len(world.scrapes) == 1
    peer.sendall(b"is it there?")
    world.loop.run_once(0.0)
    assert world.answer(world.peer(GET)) == world.answer(peer)
    assert len(world.scrapes) == 0
    world.close()


def test_an_endless_head_is_not_kept(world: World) -> None:
    peer = world.peer(b"GET /metrics HTTP/1.1\r\n")
    peer.setblocking(True)
    for _ in range(MAX_HEAD_BYTES // 1024):
        peer.sendall(b"x" * 1024)
        world.loop.run_once(1.0)
    peer.setblocking(False)
    assert world.answer(peer).startswith(b"HTTP/1.1 431 ")


def test_who_is_slow_or_silent_goes_after_a_while(world: World) -> None:
    silent, slow = world.peer(), world.peer(b"GET /met")
    world.passes(TIMEOUT_S - 1.0)
    slow.sendall(b"rics HTTP/1.1\r\n")
    world.loop.run_once(LIMIT_S)
    late = world.peer()
    assert len(world.scrapes) == 3
    world.passes(1.0)
    assert not is_open(silent)
    assert not is_open(slow)
    assert len(world.scrapes) == 1
    assert world.scrapes.timer.due_at == world.now + TIMEOUT_S - 1.0
    world.passes(TIMEOUT_S)
    assert not is_open(late)


def test_requests_after_the_first_are_not_answered(world: World) -> None:
    peer = world.peer(GET * 100)
    with contextlib.suppress(ConnectionError):
        assert world.answer(peer).count(b"HTTP/1.1 200 OK") == 1
    assert len(world.scrapes) == 0


def test_a_thousand_that_say_nothing_keep_no_scrape_from_its_answer(world: World) -> None:
    silent = [world.peer() for _ in range(200)]
    assert len(world.scrapes) == MAX_CONNECTIONS
    assert sum(map(is_open, silent)) == MAX_CONNECTIONS
    assert world.answer(world.peer(GET)).startswith(b"HTTP/1.1 200 ")


def test_who_is_being_answered_does_not_give_way_to_those_who_say_nothing(tmp_path: Path) -> None:
    world = World(tmp_path / "m.sock", version="x" * 2_000_000)
    reader = world.peer(GET)
    silent = [world.peer() for _ in range(MAX_CONNECTIONS + 1)]
    assert not is_open(silent[0])
    assert len(world.answer(reader)) > 2_000_000
    world.close()


def test_who_goes_is_forgotten_whatever_it_was_to_be_told(world: World) -> None:
    for said in (b"", b"GET /metr", GET):
        world.peer(said).close()
        for _ in range(5):
            world.loop.run_once(0.01)
        assert len(world.scrapes) == 0


def test_one_at_a_time_is_let_in(world: World, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(tmp_path / "m.sock"))
        for count in (1, 2, 3):
            world.loop.run_once(LIMIT_S)
            assert len(world.scrapes) == count


@pytest.mark.parametrize(("address", "expected"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_where_a_page_in_a_browser_could_connect_is_known(address: str, expected: bool, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind((address, 0))
        assert is_loopback_listener(listener) == expected
    with listen_on(f"unix://{tmp_path}/x") as listener:
        assert not is_loopback_listener(listener)


@pytest.mark.parametrize("before", [b"", b"GET "])
def test_a_descriptor_whose_close_waits_holds_nobody_up(world: World, before: bytes) -> None:
    peer = world.peer(before)
    ours, theirs = lingering()
    begin = time.monotonic()
    with theirs:
        socket.send_fds(peer, [GET], [ours.fileno()])
        ours.close()
        assert world.answer(peer) == b""
        assert world.answer(world.peer(GET)).startswith(b"HTTP/1.1 200 ")
        # The close takes 30 s, unless its peer goes.
        assert time.monotonic() - begin < 10


def test_a_user_with_many_connections_has_its_own_hung_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peers, "identify", lambda self, connection: Peer("modest"))
    slow = world.peer(b"GET /metrics")
    monkeypatch.setattr(Peers, "identify", lambda self, connection: Peer("greedy"))
    greedy = [world.peer(b"GET") for _ in range(MAX_CONNECTIONS + 3)]
    assert [each.recv(1) for each in greedy[:4]] == 4 * [b""]
    assert len(world.scrapes) == MAX_CONNECTIONS
    slow.send(GET[len(b"GET /metrics") :])
    assert world.answer(slow).startswith(b"HTTP/1.1 200 ")


def test_those_that_have_gone_do_not_count(world: World) -> None:
    silent = world.peer()
    for _ in range(MAX_CONNECTIONS + 1):
        assert world.answer(world.peer(GET)).startswith(b"HTTP/1.1 200 ")
    assert len(world.scrapes) == 1
    silent.send(GET)
    assert world.answer(silent).startswith(b"HTTP/1.1 200 ")
