"""Tests of HTTP responses with a daemon that echoes: all are JSON, and each error has its status."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import os
import socket
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.fakedaemon import FakeDaemon, silent
from testkit.httpgateway import HttpGateway
from testkit.waiting import until
from weightd_gateway.auth import Authenticator, Caller, token_digest
from weightd_gateway.http import app
from weightd_gateway.tensors import DTYPES
from weightd_protocol.codec import encode
from weightd_protocol.messages.inference import Cancel, Error, Infer
from weightd_protocol.messages.types import ClientMessage

INFER = "/v2/models/m/infer"
LENGTH = "Inference-Header-Content-Length"
ONE = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [7]}]}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def binary(arrays: dict[str, Any], **more: Any) -> tuple[bytes, dict[str, str]]:
    """Return a request with binary data, and the header with the length of its JSON."""
    datatypes = {dtype: name for name, dtype in DTYPES.items()}
    inputs = [
        {
            "name": name,
            "datatype": datatypes[array.dtype],
            "shape": array.shape,
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in arrays.items()
    ]
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}, **more}).encode()
    return header + b"".join(each.tobytes() for each in arrays.values()), {LENGTH: str(len(header))}


# --- inference ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_binary_data_keeps_its_bits(echo: HttpGateway, datatype: str, shape: Sequence[int]) -> None:
    count = int(np.prod(shape))
    content = np.random.default_rng(1).bytes(count * DTYPES[datatype].itemsize)
    array = np.frombuffer(content, DTYPES[datatype]).reshape(shape)
    if datatype == "BOOL":
        array = array.view(np.uint8).__and__(1).view(np.bool_)
    body, headers = binary({"x": array, "y": np.arange(3)})
    status, answer, response_headers = echo.ask("POST", INFER, body, headers)
    assert status == 200
    assert response_headers["Content-Type"] == "application/octet-stream"
    length = int(response_headers[LENGTH])
    x, y = json.loads(answer[:length])["outputs"]
    assert (x["datatype"], x["shape"]) == (datatype, list(shape))
    size = x["parameters"]["binary_data_size"]
    assert answer[length : length + size] == array.tobytes()
    assert y["parameters"]["binary_data_size"] == 24
    assert answer[length + size :] == np.arange(3).tobytes()


def test_json_values_and_mixed_forms(echo: HttpGateway) -> None:
    assert echo.ask("POST", INFER, {"id": "a", **ONE})[:2] == (
        200,
        {
            "model_name": "m",
            "model_version": "1",
            "id": "a",
            "outputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [7]}],
        },
    )
    body, headers = binary({"x": np.arange(2.0)}, outputs=[{"name": "x", "parameters": {"binary_data": False}}])
    assert echo.ask("POST", INFER, body, headers)[1]["outputs"][0]["data"] == [0.0, 1.0]


def test_large_body_is_not_copied(echo: HttpGateway) -> None:
    array = np.random.default_rng(2).standard_normal((300, 300))
    body, headers = binary({"x": array})
    _, answer, response_headers = echo.ask("POST", INFER, body, headers)
    assert answer[int(response_headers[LENGTH]) :] == array.tobytes()


@pytest.mark.parametrize(
    ("length", "problem"),
    [
        ("100000", "expected at most"),
        ("-1", "expected one number"),
        ("+1", "expected one number"),
        ("0x10", "expected one number"),
        ("1e3", "expected one number"),
        ("9" * 400, "expected one number"),
        ("", "expected one number"),
        ("10", "expected a JSON object"),
        ("0", "expected a JSON object"),
    ],
)
def test_rejects_wrong_header_length(echo: HttpGateway, length: str, problem: str) -> None:
    body, _ = binary({"x": np.arange(2)})
    status, answer, _ = echo.ask("POST", INFER, body, {LENGTH: length})
    assert status == 400
    assert problem in answer["error"]


def test_rejects_duplicate_or_missing_header_length(echo: HttpGateway) -> None:
    body, headers = binary({"x": np.arange(2)})
    connection = http.client.HTTPConnection("127.0.0.1", echo.port)
    connection.putrequest("POST", INFER)
    for name, value in [*headers.items(), *headers.items(), ("Content-Length", str(len(body)))]:
        connection.putheader(name, value)
    connection.endheaders(body)
    assert connection.getresponse().status == 400
    connection.close()
    assert echo.ask("POST", INFER, body)[0] == 400


# --- bodies ---------------------------------------------------------------------------------------------------------


def raw_deflate(content: bytes) -> bytes:
    """Compress without the zlib header, as some clients do."""
    return zlib.compress(content)[2:-4]


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw_deflate)]
)
def test_header_length_refers_to_decompressed_body(echo: HttpGateway, encoding: str, compress: Any) -> None:
    array = np.zeros(100_000)
    body, headers = binary({"x": array})
    small = compress(body)
    assert len(small) < len(body) / 10
    status, answer, response_headers = echo.ask("POST", INFER, small, {**headers, "Content-Encoding": encoding})
    assert status == 200
    assert answer[int(response_headers[LENGTH]) :] == array.tobytes()


@pytest.mark.parametrize(
    ("encoding", "content", "status", "problem"),
    [
        ("gzip", gzip.compress(bytes(2**26), mtime=0), 413, "expected a body of at most 1048576 bytes"),
        ("deflate", zlib.compress(bytes(2**26)), 413, "expected a body of at most 1048576 bytes"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-4], 400, "the compressed body is truncated"),
        ("gzip", gzip.compress(b"{}", mtime=0) + b"more", 400, "unexpected data after the end"),
        ("gzip", b"nonsense", 400, "invalid gzip body"),
        ("deflate", b"nonsense", 400, "invalid deflate body"),
        ("gzip", b"", 400, "expected a JSON object"),
        ("br", b"{}", 415, "expected one of gzip, deflate, identity, got br"),
        ("gzip, gzip", b"{}", 415, "expected one of gzip"),
    ],
)
def test_rejects_invalid_compressed_bodies(
    echo: HttpGateway, encoding: str, content: bytes, status: int, problem: str
) -> None:
    found, answer, _ = echo.ask("POST", INFER, content, {"Content-Encoding": encoding})
    assert found == status
    assert problem in answer["error"]


def spoken(gateway: HttpGateway, content: bytes) -> bytes:
    """Send bytes; return all bytes until the gateway closes the connection."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as connection:
        connection.sendall(content)
        answer = bytearray()
        while chunk := connection.recv(65536):
            answer += chunk
    return bytes(answer)


def head(path: str = INFER, *lines: str) -> bytes:
    """Return the head of a request after which the gateway closes the connection."""
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", *lines, "", "")).encode()


def test_rejects_too_long_body_before_it_is_sent(echo: HttpGateway) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", echo.port, timeout=30)
    connection.putrequest("POST", INFER)
    connection.putheader("Content-Length", "1048577")
    connection.putheader("Expect", "100-continue")
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert "max_body_bytes" in json.loads(response.read())["error"]
    connection.close()


def test_sends_100_continue(echo: HttpGateway) -> None:
    body = json.dumps(ONE).encode()
    answer = spoken(echo, head(INFER, f"Content-Length: {len(body)}", "Expect: 100-continue") + body)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


def test_limit_applies_to_chunked_body(echo: HttpGateway) -> None:
    body = json.dumps(ONE).encode()
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in (body[:10], body[10:])) + b"0\r\n\r\n"
    assert b" 200 OK\r\n" in spoken(echo, head(INFER, "Transfer-Encoding: chunked") + chunked)
    endless = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    assert b" 413 " in spoken(echo, head(INFER, "Transfer-Encoding: chunked") + 20 * endless + b"0\r\n\r\n")
    assert b" 400 " in spoken(echo, head(INFER, "Transfer-Encoding: chunked") + b"nonsense\r\n")


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nX\r\n\r\n",
        b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 10_000 + b"\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + b"X: x\r\n" * 100 + b"\r\n",
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_invalid_http_gets_json_error(echo: HttpGateway, request_: bytes) -> None:
    answer = spoken(echo, request_)
    first, _, rest = answer.partition(b"\r\n")
    assert first.startswith(b"HTTP/1.1 400 ")
    assert json.loads(rest.partition(b"\r\n\r\n")[2])["error"]


# --- paths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "problem"),
    [
        ("GET", "/nothing", 404, "no such path: /nothing"),
        ("GET", INFER, 405, "expected method POST, got GET"),
        ("DELETE", "/v2", 405, "expected method GET, got DELETE"),
        ("POST", "/v2/repository/models/m/load", 403, "model_control"),
        ("POST", "/v2/cudasharedmemory/region/r/register", 400, "not support CUDA shared memory"),
        ("GET", "/v2/systemsharedmemory/status", 400, "shared memory is disabled"),
    ],
)
def test_errors_are_json_with_their_status(
    echo: HttpGateway, method: str, path: str, status: int, problem: str
) -> None:
    found, answer, _ = echo.ask(method, path)
    assert found == status
    assert problem in answer["error"]


def test_allow_header_lists_methods(echo: HttpGateway) -> None:
    assert echo.ask("PUT", "/v2/logging")[2]["Allow"] == "GET, POST"


def test_settings_are_read_only(echo: HttpGateway) -> None:
    # Triton's client sends Content-Length 0 without a body.
    assert echo.ask("POST", "/v2/logging", b"", {"Content-Length": "0"})[0] == 200
    assert echo.ask("GET", "/v2/trace/setting")[1]["trace_level"] == ["OFF"]
    assert echo.ask("POST", "/v2/logging", {})[1]["log_verbose_level"] == 0
    assert echo.ask("POST", "/v2/logging", {"log_info": False})[0] == 400


def test_health_and_readiness(echo: HttpGateway) -> None:
    assert echo.ask("GET", "/v2/health/live")[:2] == (200, {"live": True})
    assert echo.ask("GET", "/v2/health/ready")[:2] == (200, {"ready": True})
    assert echo.ask("GET", "/v2/models/m/ready")[:2] == (200, {"name": "m", "ready": True})
    status, answer, _ = echo.ask("GET", "/v2/models/loading/ready")
    assert (status, answer["ready"], answer["error"]) == (503, False, "loading: attaching 0/4")


def test_limits_anonymous_probes_of_hanging_daemon(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_PROBES", 1)
    ready, fake.handle = fake.handle, silent
    with HttpGateway(fake.address) as gateway:
        waiting = http.client.HTTPConnection("127.0.0.1", gateway.port)
        waiting.request("GET", "/v2/health/ready")
        fake.next()
        assert gateway.ask("GET", "/v2/health/ready")[0] == 429
        assert gateway.ask("GET", "/v2/health/live")[0] == 200
        waiting.close()
        fake.handle = ready
        until(lambda: gateway.ask("GET", "/v2/health/ready")[0] == 200, "a free permit")


def test_connection_serves_several_requests(echo: HttpGateway) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", echo.port)
    for _ in range(3):
        for path in ("/v2", "/nothing"):
            connection.request("GET", path)
            response = connection.getresponse()
            assert json.loads(response.read())
    sock = connection.sock
    connection.request("HEAD", "/v2")
    response = connection.getresponse()
    assert (response.read(), int(response.headers["Content-Length"]) > 0) == (b"", True)
    assert connection.sock is sock
    connection.close()


def test_passes_valid_trace_context(echo: HttpGateway) -> None:
    for path in ("/v2", "/nothing"):
        assert echo.ask("GET", path, headers={"traceparent": TRACE})[2]["traceparent"] == TRACE
    for wrong in ("x", TRACE.upper(), f"ff{TRACE[2:]}", f"{TRACE}-more", "00-" + "0" * 32 + TRACE[35:]):
        assert echo.ask("GET", "/v2", headers={"traceparent": wrong})[2]["traceparent"] is None


# --- callers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"])
def test_accepts_local_host_names(echo: HttpGateway, host: str) -> None:
    assert echo.ask("GET", "/v2", headers={"Host": host})[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8000", "", "localhost@evil.example"])
def test_rejects_foreign_host_names(echo: HttpGateway, host: str) -> None:
    for path in ("/v2", "/v2/health/live", "/nothing"):
        status, answer, _ = echo.ask("GET", path, headers={"Host": host})
        assert status == 403
        assert "`hosts`" in answer["error"]


def token(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_without_token_only_liveness_is_allowed(fake: FakeDaemon) -> None:
    with HttpGateway(fake.address, {"gateway": {"anonymous": ""}}) as gateway:
        gateway.become(Authenticator({token_digest("secret"): Caller("research", "ann")}, {}, {}))
        status, answer, headers = gateway.ask("POST", INFER, ONE)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert "authorization: Bearer TOKEN" in answer["error"]
        assert gateway.ask("POST", INFER, ONE, token("guess"))[0] == 401
        basic = base64.b64encode(b"a:secret").decode()
        assert gateway.ask("POST", INFER, ONE, {"Authorization": f"Basic {basic}"})[0] == 401
        assert gateway.ask("GET", "/v2/health/ready")[:2] == (200, {"ready": True})
        assert fake.next()[0].tenant is None  # type: ignore[union-attr]
        assert gateway.ask("POST", INFER, ONE, token("secret"))[0] == 200
        message, _ = fake.next()
        assert isinstance(message, Infer)
        assert message.parameters.tenant == "research"
        assert gateway.ask("GET", "/v2", headers=token("secret"))[0] == 200
        assert fake.next()[0].tenant == "research"  # type: ignore[union-attr]
        gateway.become(Authenticator({}, {}, {}))
        assert gateway.ask("GET", "/v2", headers=token("secret"))[0] == 401


def test_unix_socket_identifies_caller(fake: FakeDaemon, directory: Path) -> None:
    tables = {"gateway": {"anonymous": "", "http": [f"unix:{directory}/h.sock"]}, "users": {"root": "ops"}}
    with HttpGateway(fake.address, tables) as gateway:
        gateway.become(Authenticator({}, {}, {os.geteuid(): Caller("ops", "me")}))
        assert (directory / "h.sock").stat().st_mode & 0o777 == 0o660
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"{directory}/h.sock")
            connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: whatever\r\nConnection: close\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
        assert fake.next()[0].tenant == "ops"  # type: ignore[union-attr]
    assert not (directory / "h.sock").exists()


# --- the daemon -----------------------------------------------------------------------------------------------------


def refusing(message: ClientMessage, tensors: Sequence[bytes]) -> list[list[Any]]:
    return [encode(Error(message.id, "RESOURCE_EXHAUSTED", "the queue is full", 1_500_000))]


def test_daemon_error_has_status_and_retry_time(fake: FakeDaemon) -> None:
    with HttpGateway(fake.address) as gateway:
        fake.handle = refusing
        status, answer, headers = gateway.ask("POST", INFER, ONE)
        assert (status, answer, headers["Retry-After"]) == (429, {"error": "the queue is full"}, "2")


def test_reconnects_to_daemon(fake: FakeDaemon) -> None:
    with HttpGateway(fake.address) as gateway:
        assert gateway.ask("POST", INFER, ONE)[0] == 200
        fake.stop()
        assert gateway.ask("POST", INFER, ONE)[0] == 503
        assert gateway.ask("GET", "/v2/health/ready")[0] == 503
        assert gateway.ask("GET", "/v2/health/live")[0] == 200
        again = FakeDaemon(fake.address)
        assert gateway.ask("POST", INFER, ONE)[0] == 200
        again.stop()


def test_passes_priority_and_timeout(fake: FakeDaemon) -> None:
    with HttpGateway(fake.address, {"gateway": {"timeout": 12.0}}) as gateway:
        gateway.ask("POST", INFER, {**ONE, "parameters": {"timeout": 2_500_000, "priority": 3}})
        gateway.ask("POST", INFER, ONE)
    (first, _), (second, _) = fake.next(), fake.next()
    assert isinstance(first, Infer)
    assert isinstance(second, Infer)
    assert (first.parameters.timeout_us, first.parameters.priority) == (2_500_000, 3)
    assert (second.parameters.timeout_us, second.parameters.priority) == (12_000_000, None)


def test_disconnect_cancels_request(fake: FakeDaemon) -> None:
    fake.handle = silent
    with HttpGateway(fake.address) as gateway:
        body = json.dumps(ONE).encode()
        with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
            connection.sendall(head(INFER, f"Content-Length: {len(body)}") + body)
            infer, _ = fake.next()
            assert gateway.gateway.daemon_client.admission.in_flight == 1
        cancel, _ = fake.next()
        assert isinstance(cancel, Cancel)
        assert cancel.id == infer.id
        until(lambda: not gateway.gateway.daemon_client.admission.in_flight, "the seat is given back")


def test_rejects_request_beyond_in_flight_limit(fake: FakeDaemon) -> None:
    fake.handle = silent
    with HttpGateway(fake.address, {"gateway": {"max_in_flight": 1}}) as gateway:
        body = json.dumps(ONE).encode()
        with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
            connection.sendall(head(INFER, f"Content-Length: {len(body)}") + body)
            fake.next()
            status, answer, headers = gateway.ask("POST", INFER, ONE)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert "max_in_flight" in answer["error"]


def test_counts_memory_of_decoded_values(fake: FakeDaemon) -> None:
    settings = {"gateway": {"max_body_bytes": 8192, "max_memory_bytes": 16384}}
    with HttpGateway(fake.address, settings) as gateway:
        asked = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [2000], "data": [0] * 2000}]}
        status, answer, _ = gateway.ask("POST", INFER, asked)
    assert (status, "max_memory_bytes" in answer["error"]) == (413, True)


# --- shared memory --------------------------------------------------------------------------------------------------


def test_tensors_in_shared_memory_of_caller(fake: FakeDaemon, directory: Path) -> None:
    array = np.arange(6, dtype=np.float32)
    (directory / "shared").write_bytes(bytes(16) + array.tobytes() + bytes(100))
    region = {"shared_memory_region": "r", "shared_memory_offset": 16, "shared_memory_byte_size": 24}
    place = {"shared_memory_region": "r", "shared_memory_offset": 64, "shared_memory_byte_size": 32}
    asked = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [6], "parameters": region}],
        "outputs": [{"name": "x", "parameters": place}],
    }
    with HttpGateway(fake.address, {"gateway": {"shared_memory": True}}, directory) as gateway:
        assert "system_shared_memory" in gateway.ask("GET", "/v2")[1]["extensions"]
        where = {"key": "/shared", "offset": 0, "byte_size": 140}
        assert gateway.ask("POST", "/v2/systemsharedmemory/region/r/register", where)[:2] == (200, {})
        assert gateway.ask("GET", "/v2/systemsharedmemory/status")[1] == [{"name": "r", **where}]
        status, answer, _ = gateway.ask("POST", INFER, asked)
        assert (status, answer["outputs"][0]["parameters"]) == (200, {**place, "shared_memory_byte_size": 24})
        assert (directory / "shared").read_bytes()[64:88] == array.tobytes()
        wrong = {**asked, "outputs": [{"name": "x", "parameters": {**place, "shared_memory_byte_size": 20}}]}
        assert "expected a region of at least 24 bytes" in gateway.ask("POST", INFER, wrong)[1]["error"]
        assert gateway.ask("POST", "/v2/systemsharedmemory/unregister")[0] == 200
        assert gateway.ask("POST", INFER, asked)[0] == 404


def test_counts_memory_before_reading_shared_memory(fake: FakeDaemon, directory: Path) -> None:
    size = 2**21
    with (directory / "large").open("wb") as file:
        file.truncate(size)
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": size}
    asked = {"inputs": [{"name": "x", "datatype": "INT8", "shape": [size], "parameters": parameters}]}
    settings = {"shared_memory": True, "max_body_bytes": 2**19, "max_memory_bytes": 2**20}
    with HttpGateway(fake.address, {"gateway": settings}, directory) as gateway:
        where = {"key": "/large", "offset": 0, "byte_size": size}
        assert gateway.ask("POST", "/v2/systemsharedmemory/region/r/register", where)[0] == 200
        status, answer, _ = gateway.ask("POST", INFER, asked)
        assert (status, "max_memory_bytes" in answer["error"]) == (413, True)
        assert not gateway.gateway.daemon_client.admission.reserved_bytes


def test_limits_rate_of_logged_failures(fake: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    fake.stop()
    caplog.set_level("WARNING", "weightd.gateway.http")
    with HttpGateway(fake.address) as gateway:
        for _ in range(20):
            assert gateway.ask("POST", INFER, ONE, {"traceparent": TRACE})[0] == 503
    [record] = caplog.records
    assert f"POST {INFER} for anonymous: 503 in " in record.getMessage()
    assert record.getMessage().endswith(f"traceparent {TRACE}")
