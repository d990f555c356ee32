"""The exporter: what a scrape may ask, and that strangers who connect are in nobody's way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any, Awaitable, Callable, List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.fakedaemon import FakeDaemon
from weightctl import exit_codes, exporter
from weightctl.exporter import MAX_CONNECTIONS, MAX_HEAD_BYTES, Answer, Exporter, rejection

from .conftest import Ctl, fails

GET = b"GET /metrics HTTP/1.1\r\n\r\n"


def status(head: bytes, *, is_loopback: bool = True) -> int:
    """What a request is answered with; 200: with the metrics."""
    refused = rejection(head, is_loopback=is_loopback)
    return 200 if refused is None else refused.status


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: localhost:9464\r\n\r\n", 200),
        (b"GET /metrics?x=1&y HTTP/1.0\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/ HTTP/1.1\r\n\r\n", 404),
        (b"GET //metrics HTTP/1.1\r\n\r\n", 404),
        (b"GET http://localhost/metrics HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\n", 405),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", 405),
        (b"get /metrics HTTP/1.1\r\n\r\n", 405),
        (b"\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\n\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1 \r\n\r\n", 400),
        (b"GET /met\xffrics HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\r\n\r\n", 400),
    ],
)
def test_there_is_one_thing_to_be_had_and_one_way(head: bytes, expected: int) -> None:
    assert status(head) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b"localhost", 200),
        (b"LOCALHOST.:9464", 200),
        (b"127.0.0.1:9464", 200),
        (b"192.168.1.2", 200),
        (b"[::1]:9464", 200),
        (b"", 200),
        (b"evil.example", 421),
        (b"localhost.evil.example:9464", 421),
        (b"127.0.0.1.evil.example", 421),
        (b"[evil]", 421),
    ],
)
def test_a_page_whose_name_was_made_to_mean_this_host_is_told_nothing(name: bytes, expected: int) -> None:
    head = b"GET /metrics HTTP/1.1\r\nAccept: */*\r\nhost:  " + name + b"\r\nHost: localhost\r\n\r\n"
    assert status(head) == expected
    # Where others can connect, its name is anything.
    assert status(head, is_loopback=False) == 200


@given(st.binary(max_size=200))
def test_whatever_comes_has_an_answer(head: bytes) -> None:
    assert status(head) in exporter._REASONS


def test_an_answer_says_how_long_it_is_and_that_it_is_the_last() -> None:
    assert Answer(405, b"expected GET\n", ["Allow: GET"]).encode().split(b"\r\n") == [
        b"HTTP/1.1 405 Method Not Allowed",
        b"Content-Type: text/plain; charset=utf-8",
        b"Content-Length: 13",
        b"X-Content-Type-Options: nosniff",
        b"Connection: close",
        b"Allow: GET",
        b"",
        b"expected GET\n",
    ]


class Scene:
    """An exporter on a port of its own, and who connects to it."""

    def __init__(self, body: bytes = b"metrics\n") -> None:
        self.fetched = 0
        self.body = body
        self.exporter = Exporter(self.fetch)
        self.port = 0
        self.peers: List[asyncio.StreamWriter] = []

    def fetch(self) -> Answer:
        self.fetched += 1
        return Answer(200, self.body)

    async def peer(self, said: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.peers.append(writer)
        writer.write(said)
        return reader, writer

    async def scrape(self, said: bytes = GET) -> bytes:
        return await (await self.peer(said))[0].read()

    @property
    def open(self) -> int:
        return len(self.exporter._silent) + len(self.exporter._answered)

    async def until_open(self, count: int) -> None:
        while self.open != count:
            await asyncio.sleep(0.01)


def play(act: Callable[[Scene], Awaitable[Any]], body: bytes = b"metrics\n") -> Scene:
    async def run() -> None:
        server = await asyncio.start_server(scene.exporter.on_connection, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)
        sockets: Any = server.sockets
        scene.port = sockets[0].getsockname()[1]
        await asyncio.wait_for(act(scene), 30)
        for writer in scene.peers:
            writer.transport.abort()
        server.close()
        await scene.until_open(0)

    scene = Scene(body)
    asyncio.run(run())
    return scene


def test_however_many_ask_the_metrics_are_fetched_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(scene: Scene) -> None:
        answers = await asyncio.gather(*(scene.scrape() for _ in range(MAX_CONNECTIONS)))
        assert {each.partition(b"\r\n\r\n")[2] for each in answers} == {scene.body}
        assert scene.fetched == 1
        monkeypatch.setattr(exporter, "MAX_AGE_S", 0.0)
        scene.exporter._expires_at = 0.0
        await scene.scrape()
        assert scene.fetched == 2
        await scene.until_open(0)

    play(act)


def test_what_is_no_scrape_is_refused_and_fetches_nothing() -> None:
    async def act(scene: Scene) -> None:
        assert (await scene.scrape(b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        assert (await scene.scrape(b"\x16\x03\x01\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert (await scene.scrape(b"GET /metrics HTTP/1.1\r\n" + MAX_HEAD_BYTES * b"x")).startswith(b"HTTP/1.1 431 ")
        # Requests after the first are not answered.
        assert (await scene.scrape(GET)).count(b"HTTP/1.1 200 OK") == 1

    assert play(act).fetched == 1


def test_who_is_slow_or_silent_goes_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(scene: Scene) -> None:
        peers = [await scene.peer(said) for said in (b"", b"GET /met", GET)]
        await scene.until_open(3)
        for reader, _ in peers[:2]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        await scene.until_open(0)

    monkeypatch.setattr(exporter, "TIMEOUT_S", 0.5)
    play(act, b"x" * 20_000_000)


def test_a_thousand_that_say_nothing_keep_no_scrape_from_its_answer() -> None:
    async def act(scene: Scene) -> None:
        reader, _ = await scene.peer(GET)
        for _ in range(200):
            await scene.peer()
        await scene.until_open(MAX_CONNECTIONS)
        assert (await scene.scrape()).startswith(b"HTTP/1.1 200 ")
        # Who is being answered does not give way to those who say nothing.
        assert len(await reader.read()) > len(scene.body)

    play(act, b"x" * 8_000_000)


def test_those_who_do_not_read_give_way_to_who_comes() -> None:
    async def act(scene: Scene) -> None:
        for _ in range(MAX_CONNECTIONS + 3):
            await scene.peer(GET)
        await scene.until_open(MAX_CONNECTIONS)
        assert (await scene.scrape()).startswith(b"HTTP/1.1 200 ")

    play(act, b"x" * 20_000_000)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_it_serves_until_it_is_stopped_and_says_when_the_daemon_is_away(ctl: Ctl, daemon: FakeDaemon) -> None:
    assert ctl("metrics", "--listen", "0").status == exit_codes.USAGE
    assert ctl("metrics", "--listen", "here:http").status == exit_codes.USAGE
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    command = [sys.executable, "-m", "weightctl", "--socket", daemon.address, "metrics", "--listen", f"0.0.0.0:{port}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, universal_newlines=True) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == f"weightctl: metrics at http://0.0.0.0:{port}/metrics\n"
            assert "any client that reaches this address" in process.stderr.readline()
            with urllib.request.urlopen(url, timeout=30) as answer:
                assert b'weightd_build_info{version="9.9"} 1' in answer.read()
            taken = ctl("metrics", "--listen", str(port))
            assert (taken.status, "already in use" in taken.err) == (exit_codes.CANNOT_WRITE, True)
            daemon.handle = fails("UNAVAILABLE", "weightd is stopping")
            time.sleep(exporter.MAX_AGE_S)
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(url, timeout=30)
            assert (caught.value.code, caught.value.read()) == (503, b"weightd is stopping\n")
        finally:
            process.terminate()
        assert process.wait(30) == 0
