"""Tests of `weightctl bench` with a fake daemon."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from typing import Any, List, Sequence

import pytest

from testkit.fakedaemon import FakeDaemon, Handler, echo
from weightctl import exit_codes
from weightctl.bench.command import render
from weightctl.bench.windows import Level
from weightd_protocol.codec import encode
from weightd_protocol.messages.control import ModelMetadata, ModelMetadataResponse
from weightd_protocol.messages.inference import Cancel, Error, Infer, TensorSignature, TensorSpec
from weightd_protocol.messages.status import Status
from weightd_protocol.messages.types import ClientMessage

from ..conftest import Ctl, counted, fails

INPUTS = (TensorSignature("x", "FP32", (-1, -1)), TensorSignature("ids", "INT64", (-1,)))


def serves(then: Handler = echo, example: Any = None) -> Handler:
    """Return the handler of a model with INPUTS that is known to run on `example`; `then` answers its requests."""

    def handle(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
        if isinstance(message, ModelMetadata):
            return [encode(ModelMetadataResponse(message.id, message.model_name, "fake", INPUTS, (), example=example))]
        if isinstance(message, Cancel):
            return []
        return (then if isinstance(message, Infer) else echo)(message, tensors)

    return handle


def test_measures_with_given_shapes(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = serves()
    arguments = ("--shape", "x=1,4", "--rows", "3", "--in-flight", "4,1", "--seconds", "0.5")
    ran = ctl("bench", "m", *arguments, "--json")
    assert (ran.status, ran.err) == (exit_codes.OK, "")
    result = json.loads(ran.out)
    assert (result["model_name"], result["rows"]) == ("m", 3)
    assert [each["shape"] for each in result["inputs"]] == [[3, 4], [3]]
    assert [level["in_flight"] for level in result["levels"]] == [1, 4]
    for level in result["levels"]:
        assert level["answers"] > 0
        assert level["rows_per_s"] == 3 * level["requests_per_s"]
        assert 0 < level["p50_us"] <= level["p95_us"] <= level["p99_us"]
        assert (level["errors"], level["rows_per_execution"]) == ({}, None)
    seen = [daemon.next()[0] for _ in range(daemon.seen.qsize())]
    assert {each.description.inputs for each in seen if isinstance(each, Infer)} == {
        (TensorSpec("x", "FP32", (3, 4)), TensorSpec("ids", "INT64", (3,)))
    }


@pytest.mark.parametrize(
    ("arguments", "shapes", "rows"),
    [
        ([], [[2, 64], [2]], 2),
        (["--rows", "3"], [[3, 64], [3]], 3),
        (["--shape", "x=2,9"], [[2, 9], [2]], 2),
    ],
)
def test_measures_with_known_example_shapes(
    ctl: Ctl, daemon: FakeDaemon, arguments: List[str], shapes: Any, rows: int
) -> None:
    daemon.handle = serves(example=((2, 64), (2,)))
    result = json.loads(ctl("bench", "m", *arguments, "--in-flight", "1", "--seconds", "0.1", "--json").out)
    assert ([each["shape"] for each in result["inputs"]], result["rows"]) == (shapes, rows)


def test_batch_size_comes_from_counters_of_daemon(ctl: Ctl, daemon: FakeDaemon) -> None:
    asked = itertools.count()

    def counts(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
        if isinstance(message, Status):
            number = next(asked)
            return counted(message, 70 * number, 10 * number)
        return serves()(message, tensors)

    daemon.handle = counts
    ran = ctl("bench", "m", "--rows", "2", "--in-flight", "2", "--seconds", "0.2", "--json")
    assert [level["rows_per_execution"] for level in json.loads(ran.out)["levels"]] == [14.0]


def test_counts_errors_separately(ctl: Ctl, daemon: FakeDaemon) -> None:
    turn = itertools.count()

    def full(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
        if next(turn) % 2:
            return [encode(Error(message.id, "RESOURCE_EXHAUSTED", "full"))]
        return echo(message, tensors)

    daemon.handle = serves(full)
    ran = ctl("bench", "m", "--in-flight", "2", "--seconds", "3", "--json")
    assert ran.status == exit_codes.OK
    [level] = json.loads(ran.out)["levels"]
    assert level["answers"] > 0
    assert [*level["errors"]] == ["RESOURCE_EXHAUSTED"]


def test_silent_model_is_a_failure(ctl: Ctl, daemon: FakeDaemon) -> None:
    turn = itertools.count()
    daemon.handle = serves(lambda message, tensors: echo(message, tensors) if next(turn) == 0 else [])
    ran = ctl("bench", "m", "--in-flight", "2", "--seconds", "0.2")
    assert ran.status == exit_codes.ERROR
    assert "2 in flight: no request succeeded" in ran.out


@pytest.mark.usefixtures("default_sigint_handler")
def test_interrupt_shows_results_so_far(ctl: Ctl, daemon: FakeDaemon) -> None:
    turn = itertools.count()

    def interrupts(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
        if next(turn) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return echo(message, tensors)

    daemon.handle = serves(interrupts)
    ran = ctl("bench", "m", "--in-flight", "1,8", "--seconds", "600")
    assert (ran.status, ran.err) == (exit_codes.INTERRUPTED, "")
    assert "1 in flight: ended after 0 windows, expected 3 stable ones" in ran.out
    assert "8 in flight" not in ran.out


def test_errors_have_hints(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = fails("UNAVAILABLE", "m has no worker")
    hint = "check `weightctl status m`, or set a longer --timeout"
    assert ctl("bench", "m") == (exit_codes.ERROR, "", f"UNAVAILABLE: m has no worker; {hint}\n")
    daemon.handle = serves(fails("INTERNAL", "too small"))
    hint = "set the free dimensions with --shape: x FP32 [-1, -1], ids INT64 [-1]"
    assert ctl("bench", "m") == (exit_codes.ERROR, "", f"INTERNAL: too small; {hint}\n")
    ran = ctl("bench", "m", "--shape", "x=4")
    assert (ran.status, ran.out) == (exit_codes.USAGE, "")


def test_only_bench_imports_asyncio() -> None:
    program = "import sys, weightctl.cli; sys.exit('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_table() -> None:
    steady = Level(1, 300, 100.0, (0.0098, 0.012, 1.5), Counter(), 3, True, 0.01, 1.0)
    jumpy = Level(64, 300, 1000.0, (0.06, 0.07, 0.08), Counter(UNAVAILABLE=2, INTERNAL=1), 9, False, 0.25, 7.5)
    mute = Level(128, 0, None, None, Counter(), 0, False, None, None)
    lines: List[str] = render("m", [TensorSpec("x", "FP32", (2, 8))], 2, [steady, jumpy, mute]).splitlines()
    assert lines == [
        "m: x FP32 [2, 8]",
        "",
        "IN FLIGHT  REQUESTS/s   ROWS/s  P50 ms  P95 ms    P99 ms  ERRORS  ROWS PER RUN",
        "        1       100.0    200.0    9.80   12.00  1,500.00       -          2.00",
        "       64     1,000.0  2,000.0   60.00   70.00     80.00       3         15.00",
        "      128           -        -       -       -         -       -             -",
        "",
        "64 in flight: not stable: one of the last 3 windows of 9 deviates 25% from their mean, expected at most 10%",
        "64 in flight: 1 request failed with INTERNAL",
        "64 in flight: 2 requests failed with UNAVAILABLE",
        "128 in flight: no request succeeded",
    ]
