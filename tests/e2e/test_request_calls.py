"""The number of function calls that the daemon and the HTTP gateway make for one small request.

Each call costs about a third of a microsecond, and a request consists of little else. The limits keep additions to the
path of a request visible; lower them when the path becomes shorter.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import pytest

from testkit import models
from testkit.service import Service, toml
from testkit.waiting import until
from weightd import Client

from .support import LIMIT_S, ONE_ENGINE

pytestmark = [pytest.mark.e2e, ONE_ENGINE]


class Calls(NamedTuple):
    """Calls of Python functions and of C functions, for one request."""

    python: float
    c: float


DAEMON_LIMIT = Calls(80, 88)
# On a slow machine, each request of the gateway takes a pass of the event loop more: 12 and 10 calls.
JSON_LIMIT = Calls(162, 130)
BINARY_LIMIT = Calls(138, 113)

FEW, MANY = 200, 1700
ROW = {"x": np.ones((1, 64), np.float32)}

_HTTP = re.compile(r"serving at http 127\.0\.0\.1:(\d+)")


@contextlib.contextmanager
def counting(result: Path, module: str, *arguments: str) -> Generator[IO[str], None, None]:
    """Run a program that counts its calls within the block; yield its log."""
    command = [sys.executable, "-m", "testkit.counting_process", str(result), module, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr
        try:
            yield program.stderr
        finally:
            program.send_signal(signal.SIGTERM)
            program.stderr.read()


def per_request(few: Path, many: Path) -> Calls:
    """Return the calls for one request. The calls of the start differ from run to run."""
    before, after = (json.loads(each.read_text("utf-8")) for each in (few, many))
    calls = Calls(*((after[event] - before[event]) / (MANY - FEW) for event in ("call", "c_call")))
    print(f"{calls.python:.1f} calls of Python functions, {calls.c:.1f} of C functions")
    return calls


def daemon_calls(directory: Path, requests: int) -> Path:
    """Count the calls of a daemon that serves this number of requests, one at a time."""
    config, result = directory / "weightd.toml", directory / f"{requests}.json"
    with counting(result, "weightd_daemon.cli", "serve", str(config)):
        until((directory / "w.sock.unix").exists, "the daemon listens")
        with Client(str(directory / "w.sock"), timeout=LIMIT_S) as client:
            for _ in range(requests):
                client.infer("m", ROW)
    return result


def test_daemon_needs_few_calls(tmp_path: Path) -> None:
    path = models.tiny(tmp_path / "m.onnx")
    (tmp_path / "weightd.toml").write_text(
        f'[daemon]\nsocket = "ipc://{tmp_path}/w.sock"\nruntime_dir = "{tmp_path}"\ncache_dir = "{tmp_path}/cache"\n'
        f'[models.m]\npath = "{path}"\n'
    )
    calls = per_request(daemon_calls(tmp_path, FEW), daemon_calls(tmp_path, MANY))
    assert calls.python <= DAEMON_LIMIT.python
    assert calls.c <= DAEMON_LIMIT.c


def http_request(body: bytes, *fields: str) -> bytes:
    lines = ["POST /v2/models/m/infer HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join([*lines, "", ""]).encode() + body


def json_request() -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": ROW["x"].ravel().tolist()}
    return http_request(json.dumps({"inputs": [tensor]}).encode())


def binary_request() -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64], "parameters": {"binary_data_size": 256}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return http_request(header + ROW["x"].tobytes(), f"Inference-Header-Content-Length: {len(header)}")


def gateway_calls(directory: Path, daemon: str, request: bytes, requests: int) -> Path:
    """Count the calls of a gateway that serves this number of requests over one connection, one at a time."""
    config, result = directory / "gateway.toml", directory / f"{requests}.json"
    config.write_text(
        toml({"gateway": {"daemon": daemon, "http": ["127.0.0.1:0"], "grpc": [], "anonymous": "-"}}), "utf-8"
    )
    with counting(result, "weightd_gateway.cli", str(config)) as log:
        port = next(int(found[1]) for line in log if (found := _HTTP.search(line)))
        with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
            connection.sendall(request)
            size = len(connection.recv(65536))
            for _ in range(requests - 1):
                # In one segment, as clients do that care about latency: two would take another pass of the loop.
                connection.sendall(request)
                response = connection.recv(size, socket.MSG_WAITALL)
                assert response.startswith(b"HTTP/1.1 200 ")
    return result


@pytest.mark.parametrize(
    ("request_of", "limit"), [(json_request, JSON_LIMIT), (binary_request, BINARY_LIMIT)], ids=["json", "binary"]
)
def test_gateway_needs_few_calls(tmp_path: Path, request_of: Callable[[], bytes], limit: Calls) -> None:
    with Service({"m": {"path": models.tiny(tmp_path / "m.onnx")}}) as service:
        service.ready()
        few, many = (gateway_calls(tmp_path, service.address, request_of(), count) for count in (FEW, MANY))
    calls = per_request(few, many)
    assert calls.python <= limit.python
    assert calls.c <= limit.c
