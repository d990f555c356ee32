"""The gateway against other servers of the Open Inference Protocol with the same client, and against mosec.

weightd behind its gateway, MLServer and PyTriton serve the same ONNX models with one engine thread, each in a separate
environment (`make bench-gateway`). MLServer runs in two configurations: with a process for its models, the default and
the same as in weightd, and without one, which is faster. Unmodified tritonclient, in a separate process and
environment, sends each server one request at a time in turn: over gRPC, and over HTTP with binary tensors, which
MLServer rejects. mosec does not speak this protocol, so a minimal HTTP client sends raw bytes to mosec and to the
gateway.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks import material
from benchmarks.material import LARGEST, TINY, TINY_WIDTH, Arrays, Reference, Setup
from benchmarks.mosec_server import MosecServer
from benchmarks.oip import servers
from benchmarks.oip.client import Round, TritonClient
from benchmarks.oip.servers import Server
from benchmarks.raw_http import RawHttp
from benchmarks.report import Result, Target, percentile, progress, ratio
from benchmarks.rounds import seconds_of
from testkit.plain import PlainProcess

WORKERS = 1
ROUNDS = 15
REQUESTS, LARGE_REQUESTS = 150, 30  # in a round
QUICK_ROUNDS = 3
LARGE_WIDTH = 150_000  # 600 KB

OURS, MLSERVER, ALONE, PYTRITON, MOSEC = "weightd", "mlserver", "mlserver_alone", "pytriton", "mosec"

_SERVE: Mapping[str, servers.Serve] = {
    OURS: servers.weightd,
    MLSERVER: servers.mlserver,
    ALONE: lambda models, _: servers.mlserver(models, 0),
    PYTRITON: servers.pytriton,
}

_HEADER_LENGTH = re.compile(rb"\r\ninference-header-content-length: (\d+)\r\n", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gateway(Result):
    """Ratios of p50, the gateway divided by another server, medians over the rounds.

    Attributes:
        grpc_to_mlserver: tiny requests over gRPC; MLServer with a separate process for its models.
        grpc_to_mlserver_alone: tiny requests over gRPC; MLServer with the models in its own process.
        http_to_pytriton: tiny requests over HTTP with binary tensors.
        http_to_mosec: tiny requests over HTTP with raw bytes.
        grpc_600k_to_mlserver: as `grpc_to_mlserver`, with an input of 600 KB and one number as output.
        grpc_600k_to_mlserver_alone: as `grpc_to_mlserver_alone`, with an input of 600 KB.
        http_600k_to_pytriton: as `http_to_pytriton`, with an input of 600 KB.
        http_600k_to_mosec: as `http_to_mosec`, with an input of 600 KB.
        p50_us: p50 of each server and protocol, medians of the rounds.
        spreads: quartiles of the ratios.
    """

    benchmark = "gateway"
    grpc_to_mlserver: float
    grpc_to_mlserver_alone: float
    http_to_pytriton: float
    http_to_mosec: float
    grpc_600k_to_mlserver: float
    grpc_600k_to_mlserver_alone: float
    http_600k_to_pytriton: float
    http_600k_to_mosec: float
    p50_us: Mapping[str, float]
    spreads: Mapping[str, tuple[float, float]]

    def targets(self) -> Sequence[Target]:
        """Return the bounds of the ratios."""
        return [
            Target("grpc_to_mlserver", 0.9),
            Target("http_to_pytriton", 0.8),
            Target("grpc_600k_to_mlserver", 0.9),
            Target("http_600k_to_pytriton", 0.8),
        ]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        rows = [(name, f"p50 {each:7.0f} us") for name, each in self.p50_us.items()]
        rows += [
            (name, f"half of the rounds within {low:.2f} to {high:.2f}") for name, (low, high) in self.spreads.items()
        ]
        return rows


class _Size(NamedTuple):
    model: str
    inputs: list[Arrays]
    requests: int


_SIZES: Mapping[str, tuple[str, int, int]] = {
    "": (TINY, TINY_WIDTH, REQUESTS),
    "_600k": (LARGEST, LARGE_WIDTH, LARGE_REQUESTS),
}


def run(setup: Setup) -> Gateway:
    """Measure rounds of requests to each server in turn."""
    sizes = {suffix: _Size(model, material.inputs(width), count) for suffix, (model, width, count) in _SIZES.items()}
    paths = {each.model: material.model(each.model, material.ENGINES[0]) for each in sizes.values()}
    references: dict[str, Reference] = {}
    pairs: dict[str, list[tuple[Arrays, Arrays]]] = {}
    for each in sizes.values():
        with PlainProcess(paths[each.model]) as bare:
            references[each.model] = Reference(bare, each.inputs)
            pairs[each.model] = [(inputs, bare.infer(inputs)) for inputs in each.inputs]
    rounds = QUICK_ROUNDS if setup.quick else ROUNDS
    p50: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        triton_client = stack.enter_context(TritonClient(pairs))
        found: dict[str, Server] = {}
        for name, serve in _SERVE.items():
            progress(f"starting {name}")
            found[name] = stack.enter_context(serve(paths, setup.workers))
        mosecs: dict[str, Callable[[Arrays], Arrays]] = {}
        raws: dict[str, Callable[[Arrays], Arrays]] = {}
        for each in sizes.values():
            server = stack.enter_context(MosecServer(paths[each.model], setup.workers))
            server.ready()
            mosecs[each.model] = stack.enter_context(server.client()).infer
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", found[OURS].http)))
            raws[each.model] = RawBinary(RawHttp(connection), each.model).infer
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for suffix, size in sizes.items():
                for way, names in (("grpc", (OURS, MLSERVER, ALONE)), ("http", (OURS, PYTRITON))):
                    for name in names:
                        address = f"127.0.0.1:{getattr(found[name], way)}"
                        order = Round(way, address, size.model, size.model, size.requests)
                        p50.setdefault(f"{name} {way}{suffix}", []).append(percentile(triton_client.seconds(order), 50))
                check = references[size.model].check
                for name, senders in ((OURS, raws), (MOSEC, mosecs)):
                    seconds = seconds_of(senders[size.model], size.inputs, size.requests, check)
                    p50.setdefault(f"{name} raw{suffix}", []).append(percentile(seconds, 50))
    return _result(setup, rounds, p50)


def _result(setup: Setup, rounds: int, p50: Mapping[str, list[float]]) -> Gateway:
    compared = [("grpc", MLSERVER), ("grpc", ALONE), ("http", PYTRITON), ("raw", MOSEC)]
    ratios = {
        f"{'http' if way == 'raw' else way}{suffix}_to_{rival}": ratio(
            p50[f"{OURS} {way}{suffix}"], p50[f"{rival} {way}{suffix}"]
        )
        for suffix in _SIZES
        for way, rival in compared
    }
    return Gateway(
        engine=setup.engine,
        workers=setup.workers,
        n=rounds * (REQUESTS + LARGE_REQUESTS),
        p50_us={name: 1e6 * statistics.median(each) for name, each in p50.items()},
        spreads={name: each.spread for name, each in ratios.items()},
        **{name: each.median for name, each in ratios.items()},
    )


class RawBinary:
    """Minimal client for binary tensors of the Open Inference Protocol, which parses only lengths and shapes.

    Args:
        http: the connection.
        model: name of the model.
        prefix: prefix of the protocol's paths.

    Attributes:
        http: the connection.
    """

    def __init__(self, http: RawHttp, model: str, prefix: str = "") -> None:
        self.http = http
        self._path = f"{prefix}/v2/models/{model}/infer"

    def infer(self, inputs: Arrays) -> Arrays:
        """Send x and return y."""
        self.send(inputs)
        reply = self.http.answer()
        found = _HEADER_LENGTH.search(reply.head)
        if found is None:
            raise ConnectionError(f"expected an answer with binary tensors, got {bytes(reply.body[:200])!r}")
        size = int(found[1])
        (output,) = json.loads(bytes(reply.body[:size]))["outputs"]
        return {"y": np.frombuffer(reply.body, np.float32, offset=size).reshape(output["shape"])}

    def send(self, inputs: Arrays) -> None:
        """Send x."""
        x = inputs["x"]
        input_description = {
            "name": "x",
            "datatype": "FP32",
            "shape": x.shape,
            "parameters": {"binary_data_size": x.nbytes},
        }
        body = json.dumps({"inputs": [input_description], "parameters": {"binary_data_output": True}}).encode()
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\n"
            f"Inference-Header-Content-Length: {len(body)}\r\nContent-Length: {len(body) + x.nbytes}\r\n\r\n"
        )
        self.http.send(head.encode() + body, x.data.cast("B"))
