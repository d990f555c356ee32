"""`python -m benchmarks NAME`: one measurement, as a table or as JSON."""

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
    rival,
    split,
    startup,
    tensors,
    throughput,
)
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
MEMORY = "memory"
RANKS = "ranks"
RIVAL = "rival"


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One measurement, the workers that it has unless told otherwise, and a line about it."""

    run: Callable[[Setup], Result]
    workers: int
    help: str


BENCHMARKS: Mapping[str, Benchmark] = {
    MEMORY: Benchmark(memory.run, memory.WORKERS, "PSS of the whole service against as many plain processes †"),
    "latency": Benchmark(latency.run, latency.WORKERS, "a small request against a bare two-hop ZeroMQ echo *"),
    "tensors": Benchmark(tensors.run, tensors.WORKERS, "600 KB and 8 MB against an echo that copies nothing *"),
    "throughput": Benchmark(
        throughput.run, throughput.WORKERS, "requests/s against bare processes of the engine; tiny ones/s *"
    ),
    "engine": Benchmark(
        engine.run, engine.WORKERS, "one worker against the bare engine: MLP, convolutions, transformer *"
    ),
    "startup": Benchmark(startup.run, startup.WORKERS, "first answer and all workers READY against one bare build"),
    "recovery": Benchmark(recovery.run, recovery.WORKERS, "from a fault until every worker is READY again, under load"),
    "overload": Benchmark(
        overload.run, overload.WORKERS, "the daemon's memory while ten times too much is sent, for a minute"
    ),
    "batching": Benchmark(
        batching.run, batching.WORKERS, "requests that run together: on against off, mosec, and the engine's own gain"
    ),
    "split": Benchmark(
        split.run, split.WORKERS, "a request in parts on two cores against one, and against a bare script"
    ),
    FAIRNESS: Benchmark(fairness.run, fairness.WORKERS, "what one tenant can do to another; as root ‡"),
    CLUSTER: Benchmark(
        cluster.run,
        cluster.WORKERS,
        "on Ray Serve beside an empty deployment and plain replicas; `make bench-cluster`",
    ),
    GATEWAY: Benchmark(
        gateway.run, gateway.WORKERS, "HTTP and gRPC beside MLServer, PyTriton and mosec; see `make bench-gateway`"
    ),
    RANKS: Benchmark(
        ranks.run, ranks.WORKERS, "two ranks of MindSpore against the same without weightd; `make .venv-mindspore` *"
    ),
    RIVAL: Benchmark(rival.run, rival.WORKERS, "weightd and mosec side by side; see `make bench-rival` *"),
}

# They need more than the others.
_ALONE = (CLUSTER, FAIRNESS, GATEWAY, RANKS, RIVAL)

_EPILOG = """\
benchmarks, with the workers that each has unless --workers is given:
{benchmarks}
  all         each of them but cluster, fairness, gateway, ranks and rival

* over --transport unix, the unix socket, or zmq, ZeroMQ and the daemon's proxy. latency shows the proxy beside it.
‡ --part chooses some of it, --no-tenants tells nobody apart. --quick, with cluster and gateway too: less is said.
† of --model mlp (192 MiB, the default), conv (10 MB, 3 workers) or tiny (16 KB, 1 worker), --models times.

Each compares within one run, checks every answer bit by bit against the engine called directly, and prints its n.
Figures of a busy machine are those of a busy machine: missing a target is reported, and is no error.
Exit status: 0 measured, 1 an answer differs from the bare engine's, 2 it cannot run here."""


def main() -> int:
    """Run what the command line asks for; return the exit status."""
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
        description="Measures weightd against the bare engine, a bare transport and a rival.",
        epilog=_EPILOG.format(benchmarks="\n".join(lines)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=[*BENCHMARKS, "all"], help="which one, see below")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="the library (default: %(default)s)")
    parser.add_argument("--workers", type=_positive, metavar="N", help="worker processes")
    parser.add_argument(
        "--transport", choices=list(TRANSPORTS), default=DEFAULT_TRANSPORT, help="of requests (default: %(default)s)"
    )
    parser.add_argument("--model", choices=[*memory.MODELS], default=MLP, help="of memory (default: %(default)s)")
    parser.add_argument("--models", type=_positive, default=1, metavar="N", help="how many of it (default: 1)")
    parser.add_argument(
        "--part", action="append", default=[], choices=[*fairness.PARTS], help="of fairness; several times for several"
    )
    parser.add_argument("--quick", action="store_true", help="cluster, fairness and gateway in fewer or shorter rounds")
    parser.add_argument("--no-tenants", action="store_true", help="fairness without [tenants], where all are one")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and progress on stderr only")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
