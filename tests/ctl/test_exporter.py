"""Tests of the metrics exporter: valid scrapes, and clients that must not disturb others."""

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
    """Return the status of the response; with 200 it has the metrics."""
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
def test_serves_only_get_of_metrics(head: bytes, expected: int) -> None:
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
def test_rejects_foreign_host_names_on_loopback(name: bytes, expected: int) -> None:
    head = b"GET /metrics HTTP/1.1\r\nAccept: */*\r\nhost:  " + name + b"\r\nHost: localhost\r\n\r\n"
    assert status(head) == expected
    # An address that other hosts can reach may have any name.
    assert status(head, is_loopback=False) == 200


@given(st.binary(max_size=200))
def test_any_request_has_a_response(head: bytes) -> None:
    assert status(head) in exporter._REASONS


def test_response_has_length_and_closes() -> None:
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


class RunningExporter:
    """An exporter on a free port, and its clients."""

    def __init__(self, body: bytes = b"metrics\n") -> None:
        self.fetched = 0
        self.body = body
        self.exporter = Exporter(self.fetch)
        self.port = 0
        self.peers: List[asyncio.StreamWriter] = []

    def fetch(self) -> Answer:
        self.fetched += 1
        return Answer(200, self.body)

    async def peer(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.peers.append(writer)
        writer.write(sent)
        return reader, writer

    async def scrape(self, sent: bytes = GET) -> bytes:
        return await (await self.peer(sent))[0].read()

    @property
    def open(self) -> int:
        return len(self.exporter._silent) + len(self.exporter._answered)

    async def until_open(self, count: int) -> None:
        while self.open != count:
            await asyncio.sleep(0.01)


def play(act: Callable[[RunningExporter], Awaitable[Any]], body: bytes = b"metrics\n") -> RunningExporter:
    async def run() -> None:
        server = await asyncio.start_server(running.exporter.on_connection, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)
        sockets: Any = server.sockets
        running.port = sockets[0].getsockname()[1]
        await asyncio.wait_for(act(running), 30)
        for writer in running.peers:
            writer.transport.abort()
        server.close()
        await running.until_open(0)

    running = RunningExporter(body)
    asyncio.run(run())
    return running


def test_fetches_metrics_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(running: RunningExporter) -> None:
        answers = await asyncio.gather(*(running.scrape() for _ in range(MAX_CONNECTIONS)))
        assert {each.partition(b"\r\n\r\n")[2] for each in answers} == {running.body}
        assert running.fetched == 1
        monkeypatch.setattr(exporter, "MAX_AGE_S", 0.0)
        running.exporter._expires_at = 0.0
        await running.scrape()
        assert running.fetched == 2
        await running.until_open(0)

    play(act)


def test_rejected_request_fetches_nothing() -> None:
    async def act(running: RunningExporter) -> None:
        assert (await running.scrape(b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        assert (await running.scrape(b"\x16\x03\x01\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert (await running.scrape(b"GET /metrics HTTP/1.1\r\n" + MAX_HEAD_BYTES * b"x")).startswith(b"HTTP/1.1 431 ")
        # The exporter answers only the first request of a connection.
        assert (await running.scrape(GET)).count(b"HTTP/1.1 200 OK") == 1

    assert play(act).fetched == 1


def test_closes_slow_and_silent_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(running: RunningExporter) -> None:
        peers = [await running.peer(sent) for sent in (b"", b"GET /met", GET)]
        await running.until_open(3)
        for reader, _ in peers[:2]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        await running.until_open(0)

    monkeypatch.setattr(exporter, "TIMEOUT_S", 0.5)
    play(act, b"x" * 20_000_000)


def test_silent_connections_do_not_block_scrapes() -> None:
    async def act(running: RunningExporter) -> None:
        reader, _ = await running.peer(GET)
        for _ in range(200):
            await running.peer()
        await running.until_open(MAX_CONNECTIONS)
        assert (await running.scrape()).startswith(b"HTTP/1.1 200 ")
        # A connection with a response in progress is not closed in favour of silent ones.
        assert len(await reader.read()) > len(running.body)

    play(act, b"x" * 8_000_000)


def test_new_connection_replaces_unread_one() -> None:
    async def act(running: RunningExporter) -> None:
        for _ in range(MAX_CONNECTIONS + 3):
            await running.peer(GET)
        await running.until_open(MAX_CONNECTIONS)
        assert (await running.scrape()).startswith(b"HTTP/1.1 200 ")

    play(act, b"x" * 20_000_000)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_serves_and_reports_missing_daemon(ctl: Ctl, daemon: FakeDaemon) -> None:
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
