"""The demo in one command: four workers answer requests from one copy of the weights.

Starts weightd with the digit classifier, classifies the held-out images through the client, compares every answer with
the engine called directly, and compares the memory with the same number of plain processes.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.demo import model as digits
from testkit import memory, mindir
from testkit.plain import PlainProcess
from testkit.service import Service
from weightd import Client

WORKERS = 4
# Two requests for each worker, one that runs and one in the queue.
IN_FLIGHT = 2 * WORKERS
_BAR_WIDTH = 50
_ORIGINS = {
    "spawned": "spawned",
    "forked": "forked from the fork server",
    "template": "forked from the template, which built the model",
}
_BUILD = Path(__file__).resolve().parents[2] / "build" / "models"


@dataclass(frozen=True)
class Classified:
    """Scores [n, 10] FP32 in the order of the images, latencies of single requests, and the total time, in seconds."""

    scores: np.ndarray
    alone: list[float]
    seconds: float


def main() -> int:
    """Run the demo; return 0 if weightd's answers equal the engine's and weightd saved memory."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--engine", choices=["onnxruntime", "mindspore_lite"], default="onnxruntime")
    engine: str = parser.parse_args().engine
    path = prepare(engine)
    held_out = digits.split()
    images = held_out.held_out_images

    say(f"for comparison: {WORKERS} plain processes of {engine}, each with its own copy of the weights")
    expected, plain_bytes = plain(path, engine, images)

    say(f"weightd with {WORKERS} workers: weightd serve CONFIG")
    with Service({"digits": {"path": path, "workers": WORKERS}}) as service:
        started = time.perf_counter()
        with service.client() as client:
            client.infer("digits", {"image": images[:1]})
            say(f"  first answer after {time.perf_counter() - started:.1f} s")
            service.ready()
            say(f"  all {WORKERS} workers READY after {time.perf_counter() - started:.1f} s")
            got = classify(client, images)
        status = service.status()
        held, roles = service.pss_at_rest(), service.roles()
    equal = np.array_equal(got.scores, expected)
    same = "all equal to those of the engine called directly, bit for bit" if equal else "DIFFERENT from the engine's"
    p50, p99 = (percentile_ms(got.alone, percent) for percent in (50, 99))
    workers = [each for each in status.models[0].generations[0].processes if each.role == "worker"]
    say(f"\n{len(images)} held-out images, one request each, {WORKERS} worker processes")
    say(f"  accuracy        {digits.accuracy(got.scores, held_out.held_out_labels):.1%}")
    say(f"  answers         {same}")
    say(f"  latency         p50 {p50:.1f} ms, p99 {p99:.1f} ms, one in flight (n={len(got.alone)})")
    say(f"  throughput      {len(images) / got.seconds:.0f} images/s, {IN_FLIGHT} in flight")
    say("  served by       " + ", ".join(f"pid {each.pid}: {each.served}" for each in workers))
    shared_bytes = sum(held.values())
    say("\nmemory (PSS: each shared page counts once; weightd: all of its processes)")
    chart([(f"{WORKERS} plain processes", plain_bytes), (f"weightd, {WORKERS} workers", shared_bytes)])
    for role in dict.fromkeys(roles.values()):
        sizes = [f"{size / 1e6:.0f}" for pid, size in held.items() if roles.get(pid) == role]
        say(f"    {role:20} {', '.join(sizes)} MB")
    ways = sorted({each.origin or "spawned" for each in workers})
    say(f"  workers are {' or '.join(_ORIGINS[way] for way in ways)}")
    say(f"  weightd needs {shared_bytes / plain_bytes:.0%} of the memory")
    return 0 if equal and shared_bytes < plain_bytes else 1


def prepare(engine: str) -> Path:
    """Return the classifier's file for `engine`; the first call fits and converts it."""
    _BUILD.mkdir(parents=True, exist_ok=True)
    onnx = _BUILD / "digits.onnx"
    if not onnx.exists():
        say("fitting the digit classifier (random features, ridge regression) and writing it as ONNX")
        digits.write(_complete(onnx))
        shutil.move(_complete(onnx), onnx)
    if engine == "onnxruntime":
        return onnx
    converted = onnx.with_suffix(".mindir")
    python = mindir.interpreter()
    if python is None:
        raise SystemExit(mindir.HOW_TO_GET_IT)
    if not converted.exists():
        say("converting the classifier to MindIR with MindSpore Lite's converter")
        shutil.move(mindir.convert(onnx, _complete(converted), python), converted)
    return converted


def _complete(path: Path) -> Path:
    """Return the temporary path under which a file is written until it is complete."""
    return path.with_name(f"unfinished-{path.name}")


def plain(path: Path, engine: str, images: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the engine's answers, and the memory of one plain process for each worker."""
    with contextlib.ExitStack() as stack:
        plains = [stack.enter_context(PlainProcess(path, engine)) for _ in range(WORKERS)]
        expected = np.concatenate([plains[0].infer({"image": image[None]})["scores"] for image in images])
        for each in plains[1:]:
            each.infer({"image": images[:1]})
        return expected, memory.pss_total([each.pid for each in plains])


def classify(client: Client, images: np.ndarray) -> Classified:
    """Classify each image by a separate request: first several in flight, then one at a time for the latency."""
    began = time.perf_counter()
    pending = [client.submit("digits", {"image": image[None]}) for image in images[:IN_FLIGHT]]
    scores: list[np.ndarray] = []
    for index in range(len(images)):
        scores.append(pending[index].result()["scores"])
        if index + IN_FLIGHT < len(images):
            pending.append(client.submit("digits", {"image": images[index + IN_FLIGHT][None]}))
    seconds = time.perf_counter() - began
    alone: list[float] = []
    for image in images[:200]:
        sent = time.perf_counter()
        client.infer("digits", {"image": image[None]})
        alone.append(time.perf_counter() - sent)
    return Classified(np.concatenate(scores), alone, seconds)


def chart(rows: list[tuple[str, int]]) -> None:
    """Print a table with bars, in MB."""
    longest = max(value for _, value in rows)
    for label, value in rows:
        say(f"  {label:22} {value / 1e6:7.0f} MB  {'█' * max(1, round(_BAR_WIDTH * value / longest))}")


def percentile_ms(seconds: list[float], percent: float) -> float:
    """Return a percentile in milliseconds."""
    return float(np.percentile(seconds, percent)) * 1000


def say(text: str) -> None:
    """Print a line immediately."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
