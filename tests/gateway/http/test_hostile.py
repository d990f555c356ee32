"""Tests with hostile HTTP clients: no effect on other clients, no status 500, and slow connections are closed."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.examples import examples
from testkit.fakedaemon import FakeDaemon
from testkit.httpgateway import HttpGateway
from testkit.waiting import until
from weightd_common.peers import UNKNOWN, Peer, Peers

BODY = b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[7]}]}'
INFER = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


@pytest.fixture
def impatient(fake: FakeDaemon) -> Iterator[HttpGateway]:
    """Return a gateway with short time-outs."""
    with HttpGateway(fake.address, {"gateway": {"receive_timeout": 0.1, "idle_timeout": 0.1}}) as gateway:
        yield gateway


def ended(connection: socket.socket) -> bytes:
    """Return the bytes until the other side closes the connection."""
    answer = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            answer += chunk
    return bytes(answer)


@pytest.mark.parametrize(
    "begun", [b"", b"GET /v2 HTTP/1.1\r\nHost: loc", b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
def test_closes_silent_connection(impatient: HttpGateway, begun: bytes) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=30) as connection:
        connection.sendall(begun)
        answer = ended(connection)
    assert answer.startswith(b"HTTP/1.1 200") if begun.endswith(b"\r\n\r\n") else answer == b""


def test_limits_time_of_slow_header(impatient: HttpGateway) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=30) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\n")
        end = time.monotonic() + 30
        with contextlib.suppress(ConnectionError):
            while not select.select([connection], [], [], 0.05)[0]:
                connection.sendall(b"X: x\r\n")
                assert time.monotonic() < end
        assert ended(connection) == b""


def test_missing_body_gets_408(impatient: HttpGateway, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=30) as connection:
        connection.sendall(INFER[:-1])
        answer = ended(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"receive_timeout" in answer
    assert not impatient.gateway.daemon_client.admission.in_flight
    assert not caplog.records


def test_closes_connection_that_does_not_read(fake: FakeDaemon) -> None:
    large = b'{"inputs":[{"name":"x","datatype":"INT8","shape":[4000000],"parameters":{"binary_data_size":4000000}}],'
    large += b'"parameters":{"binary_data_output":true}}'
    lines = (
        f"Inference-Header-Content-Length: {len(large)}\r\nContent-Length: {len(large) + 4_000_000}\r\n\r\n".encode()
    )
    request = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\n" + lines + large + bytes(4_000_000)
    settings = {"gateway": {"receive_timeout": 0.5}}
    with HttpGateway(fake.address, settings) as gateway, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", gateway.port))
        connection.sendall(request)
        seats = gateway.gateway.daemon_client.admission
        until(lambda: not seats.in_flight and seats.reserved_bytes > 4_000_000, "an unread answer")
        until(lambda: not len(gateway.connections), "it is hung up")
        until(lambda: not seats.reserved_bytes, "nothing is kept of it")


def test_closes_pipelining_connection_that_does_not_read(fake: FakeDaemon) -> None:
    settings = {"gateway": {"receive_timeout": 0.5}}
    with HttpGateway(fake.address, settings) as gateway, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", gateway.port))
        until(lambda: len(gateway.connections) == 1, "a connection")
        # All answers together would have 40 MB.
        connection.sendall(b"GET /app.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
        until(lambda: not len(gateway.connections), "it is hung up")


def test_idle_connections_do_not_block_clients(fake: FakeDaemon) -> None:
    with HttpGateway(fake.address, {"gateway": {"max_connections": 500}}) as gateway, contextlib.ExitStack() as stack:
        idle = asking = stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
        for _ in range(10):
            for _ in range(100):
                idle = stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
            asking.sendall(INFER)
            assert asking.recv(65536).startswith(b"HTTP/1.1 200")
        assert gateway.ask("GET", "/v2")[0] == 200
        assert len(gateway.connections) <= 500
        # The latest connection is still open.
        idle.sendall(INFER)
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")


METHODS = st.sampled_from(["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "X"])
PATHS = st.sampled_from(
    [
        "/",
        "/v2",
        "/v2/models/m/infer",
        "/v2/models/m",
        "/v2/models/stats",
        "/v2/health/live",
        "/v2/repository/index",
        "/v2/systemsharedmemory/region/r/register",
        "/v2/logging",
        "/v2/models/%ff%00/ready",
        "/v2/models/m?x=1",
    ]
)
HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "Content-Encoding",
            "Inference-Header-Content-Length",
            "Authorization",
            "Expect",
            "Accept-Encoding",
            "Transfer-Encoding",
            "Content-Type",
            "traceparent",
            "Upgrade",
            "Connection",
            "Host",
        ]
    ),
    st.sampled_from(
        ["gzip", "deflate", "7", "0", "-1", "Bearer x", "100-continue", "chunked", "upgrade", "\x01", "é", ""]
    ),
    max_size=4,
)


def of_one_input(**given: object) -> bytes:
    """Return a request with this input."""
    return json.dumps({"inputs": [given]}).encode()


BODIES = st.one_of(
    st.binary(max_size=100),
    st.sampled_from(
        [b"", BODY, BODY[:-5], b"[" * 5000, b'{"inputs":[{"name":"x","datatype":"FP32","shape":[0,99999]}]}']
    ),
    st.builds(
        of_one_input,
        name=st.sampled_from(["x", "", 1, None, "\ud800", "x" * 300]),
        datatype=st.sampled_from(["FP32", "INT8", "BYTES", None]),
        shape=st.lists(st.integers(-1, 2**70), max_size=3),
        data=st.lists(st.one_of(st.integers(), st.floats(), st.text(max_size=3), st.none()), max_size=4),
    ),
)


LAST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@settings(max_examples=examples(300))
@given(method=METHODS, path=PATHS, headers=HEADERS, body=BODIES)
def test_no_request_causes_status_500(
    echo: HttpGateway, method: str, path: str, headers: dict[str, str], body: bytes
) -> None:
    lines = {"Host": "localhost", "Content-Length": str(len(body)), **headers, "X": "x"}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    with socket.create_connection(("127.0.0.1", echo.port), timeout=30) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        connection.shutdown(socket.SHUT_WR)
        answer = ended(connection)
    status = int(answer[9:12]) if answer else 0
    assert not 500 <= status < 600, answer
    assert status or answer == b""


def test_answers_pipelined_requests_in_order(echo: HttpGateway) -> None:
    one = b"GET /v2/models/m%d/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", echo.port), timeout=30) as connection:
        connection.sendall(b"".join(one % number for number in range(400)))
        answers = bytearray()
        while answers.count(b"HTTP/1.1 ") < 400 or not answers.endswith(b"}"):
            answers += connection.recv(65536)
    assert [int(each) for each in re.findall(rb'"name":"m(\d+)"', answers)] == [*range(400)]


def test_reads_body_of_one_byte_chunks(echo: HttpGateway) -> None:
    body = BODY + b" " * 60_000
    chunked = b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n"
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", echo.port), timeout=30) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked)
        assert b'"data":[7]' in ended(connection)


def test_rejects_upgrade_and_drops_following_bytes(echo: HttpGateway) -> None:
    head = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    # Once the kernel's buffers are full, the client can send no more.
    with socket.create_connection(("127.0.0.1", echo.port), timeout=2) as connection, contextlib.suppress(OSError):
        connection.sendall(head)
        for _ in range(100):
            connection.sendall(bytes(100_000))
    assert echo.ask("GET", "/v2/health/live")[0] == 200


def test_pipelined_requests_wait_at_the_client(echo: HttpGateway) -> None:
    content = BODY + b" " * 60_000
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(content)
    request = head + content
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(("127.0.0.1", echo.port))) for _ in range(2)]
        sent, received = dict.fromkeys(peers, 0), dict.fromkeys(peers, b"")
        for peer in peers:
            peer.setblocking(False)
        while min(answered := [each.count(b"HTTP/1.1 200 OK") for each in received.values()]) < 100:
            readable, writable, _ = select.select(peers, peers, [], 30.0)
            for peer in readable:
                received[peer] += peer.recv(1 << 16)
            for peer in writable:
                sent[peer] += peer.send(memoryview(request)[sent[peer] % len(request) :])
            # The kernel buffers a few megabytes per connection, and the gateway 32 requests.
            assert sum(sent.values()) - sum(answered) * len(request) < 32_000_000


@pytest.mark.parametrize("kind", ["length", "chunked", "refused"])
def test_answers_requests_after_late_bodies(echo: HttpGateway, kind: str) -> None:
    """A body that arrives after its header does not displace the requests behind it."""
    path = b"/v2/none" if kind == "refused" else b"/v2/models/m/infer"
    chunked = kind == "chunked"
    header = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(BODY)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
    get, count = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n", 500
    with socket.create_connection(("127.0.0.1", echo.port), timeout=30) as connection:
        for _ in range(40):
            connection.sendall(
                b"POST %s HTTP/1.1\r\nHost: localhost\r\n%s\r\nExpect: 100-continue\r\n\r\n" % (path, header)
            )
            first = connection.recv(65536)
            connection.sendall(body)
            if kind == "refused":
                assert first.startswith(b"HTTP/1.1 404")
            else:
                assert first == b"HTTP/1.1 100 Continue\r\n\r\n"
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        sender = threading.Thread(target=connection.sendall, args=(get * count,))
        sender.start()
        answers = bytearray()
        while answers.count(b"HTTP/1.1 200") < count and (received := connection.recv(1 << 16)):
            answers += received
        sender.join(30)
    assert answers.count(b"HTTP/1.1 200") == count


def test_parses_many_values_outside_the_loop(echo: HttpGateway) -> None:
    values: list[Any] = [number / 8 for number in range(20_000)]
    nested = [values[begin : begin + 100] for begin in range(0, len(values), 100)]
    for data, shape in ((values, [20_000]), (nested, [200, 100])):
        asked = {"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": data}]}
        status, answer, _ = echo.ask("POST", "/v2/models/m/infer", asked)
        assert (status, answer["outputs"][0]["data"]) == (200, values)
    assert echo.gateway.parsers.large.pid is not None
    # Errors are the same as for short requests.
    values[7] = "seven"
    asked = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [20_000], "data": values}]}
    assert echo.ask("POST", "/v2/models/m/infer", asked)[0] == 400
    assert not echo.gateway.daemon_client.admission.reserved_bytes


def test_limits_connection_rate_of_a_peer(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = [Peer("host 10.0.0.1")] * 30 + [Peer("host 10.0.0.2")]

    def of(self: Peers, connection: socket.socket) -> Peer:
        return peers.pop(0)

    monkeypatch.setattr(Peers, "identify", of)
    with HttpGateway(fake.address, {"gateway": {"max_connection_rate": 1e-3}}) as gateway:
        assert gateway.ask("GET", "/v2/health/live")[0] == 200
        status, answer, headers = gateway.ask("GET", "/v2/health/live")
        assert (status, headers["Retry-After"]) == (429, "1")
        assert answer == {"error": "host 10.0.0.1 opens more than 0.001 connections a second (max_connection_rate)"}
        while len(peers) > 1:
            assert gateway.ask("GET", "/v2/health/live")[0] == 429
        assert gateway.ask("GET", "/v2/health/live")[0] == 200


def test_closed_connection_does_not_count(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = [UNKNOWN, UNKNOWN, Peer("host 10.0.0.1")]

    def of(self: Peers, connection: socket.socket) -> Peer:
        return peers.pop(0)

    monkeypatch.setattr(Peers, "identify", of)
    with HttpGateway(fake.address, {"gateway": {"max_connection_rate": 1e-3}}) as gateway:
        while len(peers) > 1:
            with socket.create_connection(("127.0.0.1", gateway.port), 30.0) as ended:
                assert ended.recv(1) == b""
        assert gateway.ask("GET", "/v2/health/live")[0] == 200
