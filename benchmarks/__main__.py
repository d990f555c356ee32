"""The command `python -m benchmarks NAME`, which runs a measurement and prints a table or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import (
    batching,
    cluster,
    engine,
    fairness,
    gateway,
    latency,
    memory,
    overload,
    ranks,
    recovery,
    requests,
    rival,
    split,
    startup,
    tensors,
    throughput,
)
from benchmarks.lifecycle import run as lifecycle
from benchmarks.material import (
    DEFAULT_TRANSPORT,
    ENGINES,
    MLP,
    TRANSPORTS,
    DifferenceError,
    Setup,
    UnavailableError,
    compile_weightd,
)
from benchmarks.report import Result, as_json, as_table, progress

FAIRNESS = "fairness"
CLUSTER = "cluster"
GATEWAY = "gateway"
LIFECYCLE = "lifecycle"
MEMORY = "memory"
RANKS = "ranks"
REQUESTS = "requests"
RIVAL = "rival"


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A measurement, its default number of workers, and a description in one line."""

    run: Callable[[Setup], Result]
    workers: int
    help: str


BENCHMARKS: Mapping[str, Benchmark] = {
    MEMORY: Benchmark(memory.run, memory.WORKERS, "PSS of the service against the same number of plain processes †"),
    "latency": Benchmark(latency.run, latency.WORKERS, "small requests against a two-hop ZeroMQ echo *"),
    "tensors": Benchmark(tensors.run, tensors.WORKERS, "tensors of 600 KB and 8 MB against an echo without copies *"),
    "throughput": Benchmark(
        throughput.run, throughput.WORKERS, "requests/s against bare processes of the engine, and with a tiny model *"
    ),
    "engine": Benchmark(
        engine.run, engine.WORKERS, "one worker against the bare engine: MLP, convolutions, transformer *"
    ),
    "startup": Benchmark(
        startup.run, startup.WORKERS, "time to the first answer and to all workers READY against one bare build"
    ),
    "recovery": Benchmark(
        recovery.run, recovery.WORKERS, "time from a fault under load until all workers are READY again"
    ),
    "overload": Benchmark(
        overload.run, overload.WORKERS, "the daemon's memory during a minute of ten times its capacity"
    ),
    "batching": Benchmark(
        batching.run, batching.WORKERS, "batching on against batching off, mosec, and the gain of the engine alone"
    ),
    "split": Benchmark(split.run, split.WORKERS, "a request split over two cores against one core and a bare script"),
    LIFECYCLE: Benchmark(
        lifecycle.run, lifecycle.WORKERS, "models on demand: more than fit into memory, cold starts, idle models ‡"
    ),
    FAIRNESS: Benchmark(fairness.run, fairness.WORKERS, "effect of one tenant's load on another tenant; needs root ‡"),
    CLUSTER: Benchmark(
        cluster.run,
        cluster.WORKERS,
        "Ray Serve against an empty deployment and plain replicas; see `make bench-cluster`",
    ),
    GATEWAY: Benchmark(
        gateway.run, gateway.WORKERS, "HTTP and gRPC against MLServer, PyTriton and mosec; see `make bench-gateway`"
    ),
    RANKS: Benchmark(
        ranks.run, ranks.WORKERS, "two ranks of MindSpore with and without weightd; see `make .venv-mindspore` *"
    ),
    REQUESTS: Benchmark(
        requests.run, requests.WORKERS, "weightd against mosec: 1 or 8 requests at a time; see `make bench-rival`"
    ),
    RIVAL: Benchmark(rival.run, rival.WORKERS, "weightd against mosec: start, memory, kills; see `make bench-rival` *"),
}

# Not part of `all`, because they need root, further environments or much time.
_ALONE = (CLUSTER, FAIRNESS, GATEWAY, LIFECYCLE, RANKS, REQUESTS, RIVAL)

_EPILOG = """\
benchmarks, with their default numbers of workers:
{benchmarks}
  all         all except cluster, fairness, gateway, lifecycle, ranks, requests and rival

* --transport unix uses the Unix socket, --transport zmq uses ZeroMQ and the daemon's proxy. latency always measures
  the proxy as well.
‡ --part selects parts; fairness --no-tenants measures without tenants. --quick shortens fairness, lifecycle, cluster
  and gateway, with less precise results.
† --model mlp (192 MiB, default), conv (10 MB, 3 workers) or tiny (16 KB, 1 worker); --models sets how many of it.

Each benchmark compares both sides within one run, checks every answer bit by bit against the engine called directly,
and prints the number of measurements, n. Other load on the machine affects the results, so a missed target is reported
but is not an error.
Exit status: 0 measured, 1 an answer differs from the bare engine's, 2 the benchmark cannot run on this machine."""


def main() -> int:
    """Run the selected benchmarks; return the exit status."""
    options = _parser().parse_args()
    names = [each for each in BENCHMARKS if each not in _ALONE] if options.name == "all" else [options.name]
    results: dict[str, Any] = {}
    try:
        compile_weightd(options.engine)
        for name in names:
            benchmark = BENCHMARKS[name]
            progress(f"{name}, {options.engine}")
            workers = options.workers or (memory.MODELS[options.model][1] if name == MEMORY else benchmark.workers)
            result = benchmark.run(_setup(options, workers))
            results[name] = as_json(result)
            if not options.json:
                print(as_table(result), end="\n\n", flush=True)
    except DifferenceError as error:
        print(f"benchmarks: WRONG ANSWER: {error}", file=sys.stderr)
        return 1
    except UnavailableError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(results if options.name == "all" else results[options.name]))
    return 0


def _setup(options: argparse.Namespace, workers: int) -> Setup:
    return Setup(
        options.engine,
        workers,
        options.transport,
        options.model,
        options.models,
        parts=tuple(options.part),
        quick=options.quick,
        tenants=not options.no_tenants,
    )


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<10}  {each.help} ({each.workers})" for name, each in BENCHMARKS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures weightd against the bare engine, a bare transport and other servers.",
        epilog=_EPILOG.format(benchmarks="\n".join(lines)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=[*BENCHMARKS, "all"], help="benchmark, see below")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="engine (default: %(default)s)")
    parser.add_argument("--workers", type=_positive, metavar="N", help="worker processes")
    parser.add_argument(
        "--transport",
        choices=list(TRANSPORTS),
        default=DEFAULT_TRANSPORT,
        help="transport of requests (default: %(default)s)",
    )
    parser.add_argument(
        "--model", choices=[*memory.MODELS], default=MLP, help="model of the benchmark memory (default: %(default)s)"
    )
    parser.add_argument(
        "--models",
        type=_positive,
        default=1,
        metavar="N",
        help="number of models of the benchmark memory (default: 1) or lifecycle (default: 200)",
    )
    parser.add_argument(
        "--part",
        action="append",
        default=[],
        choices=[*fairness.PARTS, *lifecycle.PARTS],
        help="part of the benchmark fairness or lifecycle; repeatable",
    )
    parser.add_argument(
        "--quick", action="store_true", help="run cluster, fairness, gateway and lifecycle with fewer or shorter rounds"
    )
    parser.add_argument("--no-tenants", action="store_true", help="run fairness without tenants")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and progress on stderr only")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
