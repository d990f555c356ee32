"""weightd on Ray Serve: requests/s against a deployment that only replies, and memory against plain replicas.

It runs in the environment that has Ray (`make bench-cluster`), with nodes that are processes of this machine.

*Throughput*: one node with the tiny model and one worker, and two deployments that only reply with a few bytes. `empty`
reads the request body first, like every useful deployment: a replica fetches the body from Serve's proxy with another
actor call. `silent` replies without reading the body, for which Serve makes no such call. Eight persistent connections
send requests to each in turn, in short rounds. The comparison shows the time that a replica adds to Serve's path from
proxy to replica and back.

*Memory*: the model with 192 MiB of weights, on three nodes with a replica of four workers each, and then on twelve
replicas of a deployment with the engine inside; all have answered. The result counts the PSS of replicas: for weightd
the replica, its supervisor, the daemon and its descendants. Ray's processes take the same in both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import statistics
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import material
from benchmarks.gateway import RawBinary
from benchmarks.material import MLP, MLP_WIDTH, TINY, TINY_WIDTH, Arrays, Reference, Setup, UnavailableError
from benchmarks.raw_http import RawHttp
from benchmarks.report import MB, Result, Target, progress, ratio, spread
from benchmarks.rounds import Ask, Threads
from testkit.census import families
from testkit.memory import pss_total
from testkit.plain import PlainProcess

if TYPE_CHECKING:
    from testkit.raynodes import Nodes

WORKERS = 4  # per replica, in the measurement of memory
NODES = 3
CLIENTS = 8
ROUNDS, ROUND_S = 11, 3.0
QUICK_ROUNDS, QUICK_S = 3, 1.0
REQUESTS_PER_WORKER = 5  # before memory is read

# Within two seconds, a replica releases the memory that it does not need for the next request.
_REST_S = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterResult(Result):
    """Requests/s as medians over the rounds, and memory in MB of 1,000,000 bytes.

    Attributes:
        throughput_ratio: requests/s of the tiny model divided by requests/s of the deployment `empty`.
        throughput_to_silent: requests/s of the tiny model divided by requests/s of the deployment `silent`.
        spreads: quartiles of both ratios.
        requests_s: requests/s of the three deployments.
        memory_ratio: memory of all replicas divided by the memory of one plain replica for each worker.
        pss_mb: memory of both.
    """

    benchmark = "cluster"
    throughput_ratio: float
    throughput_to_silent: float
    spreads: Mapping[str, tuple[float, float]]
    requests_s: Mapping[str, float]
    memory_ratio: float
    pss_mb: Mapping[str, float]

    def targets(self) -> Sequence[Target]:
        """Return the bounds of the ratios."""
        return [
            Target("throughput_ratio", 0.8, at_least=True),
            Target("memory_ratio", 0.4),
        ]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        return [
            *((f"{name}, {CLIENTS} clients", f"{each:8,.0f} requests/s") for name, each in self.requests_s.items()),
            *((f"to {name}", spread(each)) for name, each in self.spreads.items()),
            *((name, f"{each:8,.0f} MB") for name, each in self.pss_mb.items()),
        ]


def run(setup: Setup) -> ClusterResult:
    """Measure throughput, then memory."""
    try:
        from testkit.raynodes import nodes
    except ImportError as error:
        raise UnavailableError(f"cluster: {error}; run `make bench-cluster`") from None
    if setup.engine != material.ENGINES[0]:
        raise UnavailableError("cluster: expected --engine onnxruntime, the only engine of the plain replicas")
    # Ray prints messages of its processes to stdout, which is reserved for the results.
    with contextlib.redirect_stdout(sys.stderr):
        with nodes(1) as one:
            rates = _throughput(one, setup)
        with nodes(NODES) as several:
            pss = _memory(several, setup.workers)
    ratios = {name: ratio(rates["weightd"], rates[name]) for name in ("empty", "silent")}
    return ClusterResult(
        engine=setup.engine,
        workers=setup.workers,
        n=len(rates["empty"]),
        throughput_ratio=ratios["empty"].median,
        throughput_to_silent=ratios["silent"].median,
        spreads={name: each.spread for name, each in ratios.items()},
        requests_s={name: statistics.median(each) for name, each in rates.items()},
        memory_ratio=pss["weightd"] / pss["plain"],
        pss_mb={name: each / MB for name, each in pss.items()},
    )


# --- throughput ----------------------------------------------------------------------------------------------------


def _throughput(one: Nodes, setup: Setup) -> dict[str, list[float]]:
    from ray import serve

    path = material.model(TINY, setup.engine)
    inputs = material.inputs(TINY_WIDTH)
    with PlainProcess(path) as bare:
        reference = Reference(bare, inputs)
        answers = {id(each): bare.infer(each) for each in inputs}
    one.run(one.application("m", {"model": str(path), "name": TINY}, prefix="/m"))
    for name, cls in (("empty", _Empty), ("silent", _EchoDeployment)):
        serve.run(_deployment(cls).bind(), name=name, route_prefix=f"/{name}")
    rounds, seconds = (QUICK_ROUNDS, QUICK_S) if setup.quick else (ROUNDS, ROUND_S)
    rates: dict[str, list[float]] = {"weightd": [], "empty": [], "silent": []}

    @contextlib.contextmanager
    def ours() -> Generator[Ask]:
        with socket.create_connection(("127.0.0.1", one.http)) as connection:
            yield RawBinary(RawHttp(connection), TINY, "/m").infer

    @contextlib.contextmanager
    def others(prefix: str) -> Generator[Ask]:
        with socket.create_connection(("127.0.0.1", one.http)) as connection:
            asking = RawBinary(RawHttp(connection), TINY, prefix)

            def ask(given: Arrays) -> Arrays:
                asking.send(given)
                asking.http.answer()
                return answers[id(given)]

            yield ask

    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for name, each in rates.items():
            connect = ours if name == "weightd" else partial(others, f"/{name}")
            each.append(Threads(connect, inputs, CLIENTS).requests_per_second(seconds, reference))
    return rates


class _EchoDeployment:
    """A deployment that replies without reading the request body."""

    async def __call__(self, request: Any) -> Any:
        from starlette.responses import Response

        return Response(b"{}", media_type="application/json")


class _Empty(_EchoDeployment):
    """A deployment that reads the request body and replies."""

    async def __call__(self, request: Any) -> Any:
        await request.body()
        return await super().__call__(request)


# --- memory --------------------------------------------------------------------------------------------------------


class _Plain:
    """A replica that runs the engine itself, as in the documentation of Serve."""

    def __init__(self, path: str) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def infer(self, x: Any) -> Any:
        return self._session.run(None, {"x": x})[0]


def _memory(several: Nodes, workers: int) -> dict[str, float]:
    from ray import serve

    path = material.model(MLP, material.ENGINES[0])
    (inputs,) = material.inputs(MLP_WIDTH, count=1)
    count = NODES * workers * REQUESTS_PER_WORKER
    progress(f"{NODES} replicas of {workers} workers")
    several.run(several.application("m", {"model": str(path), "workers": workers}, num_replicas=NODES))
    handle = serve.get_app_handle("m")
    for each in [handle.infer.remote({"x": inputs["x"]}) for _ in range(count)]:
        each.result()
    time.sleep(_REST_S)
    supervisors = several.supervisors("m")
    ours = pss_total([*several.replicas("m"), *families(supervisors)])
    several.delete("m")
    progress(f"{NODES * workers} plain replicas")
    options = {"num_replicas": NODES * workers, "ray_actor_options": {"num_cpus": 1}}
    plain = serve.run(_deployment(_Plain).options(**options).bind(str(path)), name="plain", route_prefix=None)
    for each in [plain.infer.remote(inputs["x"]) for _ in range(count)]:
        each.result()
    time.sleep(_REST_S)
    theirs = pss_total(several.replicas("plain"))
    serve.delete("plain")
    return {"weightd": ours, "plain": theirs}


def _deployment(cls: type) -> Any:
    """Return a deployment of a class of this file, pickled by value because a replica cannot import this file."""
    from ray import cloudpickle, serve

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return serve.deployment(max_ongoing_requests=64)(cls)
