"""Tests of `weightctl advise` with a fake daemon."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import pytest

from testkit.fakedaemon import FakeDaemon, Handler, echo
from weightctl import exit_codes
from weightctl.advise.recommend import (
    BatchSizeResult,
    Comparison,
    Difference,
    Recommendation,
    Verdict,
    config_text,
    render,
)
from weightd_protocol.codec import encode
from weightd_protocol.messages.control import ModelMetadata, ModelMetadataResponse, ModelReady, ReadyResponse
from weightd_protocol.messages.inference import (
    Error,
    Infer,
    InferResponse,
    ResponseDescription,
    TensorSignature,
    TensorSpec,
)
from weightd_protocol.messages.status import GenerationStatus, ModelStatus, Status, StatusResponse
from weightd_protocol.messages.types import ClientMessage

from ..conftest import Ctl, counted, fails

X = TensorSignature("x", "FP32", (-1, -1))
IDS = TensorSignature("ids", "INT64", (-1,))
# The smallest measurement that has a result.
QUICK = ("--rows", "2,4", "--different", "10", "--seconds", "0.1")


def serves(then: Handler = echo, inputs: Sequence[TensorSignature] = (X, IDS), example: Any = None) -> Handler:
    """Return the handler of a model with these inputs that is known to run on `example`; `then` answers its
    requests."""

    def handle(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
        if isinstance(message, ModelMetadata):
            return [
                encode(
                    ModelMetadataResponse(message.id, message.model_name, "fake", tuple(inputs), (), example=example)
                )
            ]
        if isinstance(message, ModelReady):
            return [encode(ReadyResponse(message.id, ready=True))]
        return (then if isinstance(message, Infer) else echo)(message, tensors)

    return handle


def test_rows_have_known_example_shape(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = serves(example=((1, 64), (1,)))
    ctl("advise", "m", *QUICK, "--json")
    seen = [daemon.next()[0] for _ in range(daemon.seen.qsize())]
    shapes = {each.description.inputs[0].shape[1:] for each in seen if isinstance(each, Infer)}
    assert shapes == {(64,)}


def answers(message: Infer, array: Any) -> List[List[Any]]:
    specs = (TensorSpec("y", "FP32", array.shape),)
    return [[*encode(InferResponse(message.id, ResponseDescription("m", specs))), array.tobytes()]]


def received(message: ClientMessage, tensors: Sequence[bytes]) -> Tuple[Infer, Any]:
    assert isinstance(message, Infer)
    return message, np.frombuffer(tensors[0], np.float32).reshape(message.description.inputs[0].shape)


def mixes(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
    infer, x = received(message, tensors)
    return answers(infer, x / np.abs(x).max())


def counts_its_rows(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
    infer, x = received(message, tensors)
    return answers(infer, np.full(1, len(x), np.float32))


def takes_two(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
    assert isinstance(message, Infer)
    if message.description.inputs[0].shape[0] > 2:
        return [encode(Error(message.id, "INVALID_ARGUMENT", "at most 2 rows"))]
    return echo(message, tensors)


def asked(daemon: FakeDaemon) -> List[Tuple[Infer, Sequence[bytes]]]:
    seen = [daemon.next() for _ in range(daemon.seen.qsize())]
    return [(message, tensors) for message, tensors in seen if isinstance(message, Infer)]


def test_compares_distinct_rows(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = serves()
    ran = ctl("advise", "m", "--shape", "x=9,8", *QUICK, "--json")
    assert (ran.status, ran.err) == (exit_codes.OK, "")
    result = json.loads(ran.out)
    assert result["overhead_us"] > 0
    assert [size["rows"] for size in result["sizes"]] == [1, 2, 4]
    for size in result["sizes"]:
        assert size["bits_equal"]
        assert size["answers"] * size["rows"] >= 10
        assert size["rows_compared"] >= (3 if size["rows"] == 1 else 10)
    assert {*result["advice"]} == {"verdict", "max_rows", "sizes", "reason", "configuration"}
    rows = {
        tensors[0]
        for message, tensors in asked(daemon)
        if [each.shape for each in message.description.inputs] == [(1, 8), (1,)]
    }
    assert len(rows) >= 10
    magnitudes = sorted(np.abs(np.frombuffer(row, np.float32)).mean() for row in rows)
    assert magnitudes[-1] > 1000 * magnitudes[0]


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (mixes, "Do not batch: the output of a row depends on the other rows"),
        (counts_its_rows, "Do not batch: output y does not have one row per input row: [1] for 2 rows"),
        (takes_two, "4 rows, refused: at most 2 rows"),
    ],
)
def test_reports_reasons_against_batching(ctl: Ctl, daemon: FakeDaemon, then: Handler, words: str) -> None:
    daemon.handle = serves(then, [X])
    ran = ctl("advise", "m", "--shape", "x=1,8", *QUICK)
    assert ran.status == exit_codes.OK
    assert words in ran.out


def gains(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
    """Answer in the same time for any number of rows; three rows get another answer."""
    infer, x = received(message, tensors)
    time.sleep(0.08)  # This is four times the overhead of a request on a busy machine.
    return answers(infer, x + (len(x) == 3))


GENERATION = GenerationStatus(1, "cpu", "serving", "", "", "", (), batching_note="none are batched", max_rows=1)


def test_does_not_advise_what_the_daemon_would_not_do(ctl: Ctl, daemon: FakeDaemon) -> None:
    def status(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
        if isinstance(message, Status):
            model = ModelStatus("m", "fake", "/m", "serving", 0, 0, 0, (GENERATION,))
            return [encode(StatusResponse(message.id, "9.9", "running", 1, 1.0, 1, (model,)))]
        return serves(gains, [X])(message, tensors)

    for handle, words in (
        (serves(gains, [X]), "Do not batch: the daemon rejects batching with exact outputs: output y: 3 of 3 rows"),
        (status, "Do not batch: the daemon rejects batching with exact outputs: none are batched"),
    ):
        daemon.handle = handle
        ran = ctl("advise", "m", "--shape", "x=1,8", *QUICK)
        assert ran.status == exit_codes.OK
        assert words in " ".join(ran.out.split())


def test_split_request_is_no_single_execution(ctl: Ctl, daemon: FakeDaemon) -> None:
    cut: List[str] = []

    def cuts(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
        if isinstance(message, Status):
            return counted(message, 1, 1, len(cut))
        if isinstance(message, Infer) and message.description.inputs[0].shape[0] > 2:
            cut.append(message.id)
        return serves()(message, tensors)

    daemon.handle = cuts
    ran = ctl("advise", "m", *QUICK, "--json")
    assert [size["split"] for size in json.loads(ran.out)["sizes"]] == [False, False, True]


def counts_for_more(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
    infer, x = received(message, tensors)
    return answers(infer, x * len(x))


def test_uses_rows_of_a_file_in_turn(ctl: Ctl, daemon: FakeDaemon, tmp_path: Path) -> None:
    # The advice is never to batch, so the daemon's test sends only rows of the file.
    daemon.handle = serves(counts_for_more)
    x, ids = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([7, 8, 9])
    path = tmp_path / "rows.npz"
    np.savez(str(path), x=x, ids=ids)
    ran = ctl("advise", "m", "--inputs", str(path), *QUICK)
    assert ran.status == exit_codes.OK
    assert "rows compared, 3 of them different" in ran.out
    alone = [tensors for message, tensors in asked(daemon) if message.description.inputs[0].shape == (1, 2)]
    assert {(bytes(one), bytes(two)) for one, two in alone} == {
        (x[row].tobytes(), ids[row : row + 1].tobytes()) for row in range(3)
    }


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (None, "No such file"),
        ({}, "expected an array x, there are: none"),
        ({"x": np.zeros((2, 2))}, "expected x FP32 [-1, -1], got float64 [2, 2]"),
        ({"x": np.zeros((2, 2), "f4"), "ids": np.zeros((2, 2), "i8")}, "expected ids INT64 [-1], got int64 [2, 2]"),
        ({"x": np.zeros((2, 2), "f4"), "ids": np.zeros(3, "i8")}, "as many rows of each input, at least 1, got [2, 3]"),
        ({"x": np.array([None])}, "x is damaged or not a numeric array"),
    ],
)
def test_rejects_file_that_does_not_fit(ctl: Ctl, daemon: FakeDaemon, tmp_path: Path, arrays: Any, words: str) -> None:
    daemon.handle = serves()
    path = tmp_path / "rows.npz"
    if arrays is not None:
        np.savez(str(path), **arrays)
    ran = ctl("advise", "m", "--inputs", str(path))
    assert (ran.status, ran.out) == (exit_codes.NO_INPUT, "")
    assert words in ran.err


def test_error_names_input_without_rows(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = serves(inputs=[X, TensorSignature("mask", "FP32", (2, 3))])
    text = (
        "FAILED_PRECONDITION: m: its requests cannot be batched: expected a free first dimension of each input, "
        "got mask FP32 [2, 3]\n"
    )
    assert ctl("advise", "m") == (exit_codes.ERROR, "", text)


def test_rejected_row_has_a_hint(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = serves(fails("INTERNAL", "too small"), [X])
    ran = ctl("advise", "m")
    assert (ran.status, ran.out) == (exit_codes.ERROR, "")
    assert ran.err == "INTERNAL: too small; set the free dimensions with --shape: x FP32 [-1, -1]\n"
    assert ctl("advise", "m", "--inputs", "a.npz", "--shape", "x=1,1").status == exit_codes.USAGE


@pytest.mark.usefixtures("default_sigint_handler")
@pytest.mark.parametrize(("after", "words"), [(1, ""), (9, "2 rows")])
def test_interrupt_shows_results_so_far(ctl: Ctl, daemon: FakeDaemon, after: int, words: str) -> None:
    turn = itertools.count()

    def interrupts(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
        if next(turn) == after:
            os.kill(os.getpid(), signal.SIGINT)
        return echo(message, tensors)

    daemon.handle = serves(interrupts)
    ran = ctl("advise", "m", "--seconds", "600", "--rows", "2,4")
    assert ran.status == exit_codes.INTERRUPTED
    assert bool(ran.out) == bool(words)


def size(rows: int, seconds: float, evidence: Optional[Comparison] = None, **more: Any) -> BatchSizeResult:
    return BatchSizeResult(rows, seconds, 0.0005, 9, evidence or Comparison(), **more)


def test_table() -> None:
    equal, unequal = Comparison(), Comparison()
    equal.rows_compared = unequal.rows_compared = 224
    unequal.rows_unequal = 3
    unequal.differences["y"] = Difference(3, 1.2e-6, 2.5e-7)
    refused = Comparison()
    refused.shape_mismatches["z"] = "[] for 16 rows"
    sizes = [
        size(1, 0.0105, equal),
        size(8, 0.0205, unequal, is_split=True),
        BatchSizeResult(16, 0.0, 0.0005, 0, refused, refusal="at most 8 rows"),
    ]
    advice = Recommendation(Verdict.INEXACT, 8, (1, 8), "because")
    assert render("m", sizes, advice, 100).splitlines() == [
        "m: one request at a time, 224 rows compared, 100 of them different",
        "",
        "ROWS     MS  ROWS/s  GAIN  LATENCY             BITS",
        "   1  10.50    95.2  1.00     1.00            equal",
        "   8  20.50   390.2  4.00     1.95  3 of 224 differ",
        "",
        "0.50 ms of each is overhead between client and worker; GAIN excludes it",
        "8 rows: not a single execution, because the daemon splits such requests ([models.X.split])",
        "16 rows, refused: at most 8 rows",
        "output y, from 8 rows on: bits differ, by 1.2e-06 at most, 2.5e-07 of the largest value of a row",
        "output z, from 16 rows on: [] for 16 rows",
        "",
        "Batch only if exact outputs are not required: because",
        "",
        "  [models.m.batching]",
        "  max_rows = 8",
        "  sizes = [1, 8]",
        "  exact = false",
    ]


def test_configuration() -> None:
    with_sample = config_text("m", Recommendation(Verdict.MERGE, 4, (), "", "/a b.npz"))
    assert with_sample == '[models.m]\nselftest = "/a b.npz"\n\n[models.m.batching]\nmax_rows = 4'
    assert config_text("a.b", Recommendation(Verdict.MERGE, 4, (), "")) == '[models."a.b".batching]\nmax_rows = 4'
    assert config_text("m", Recommendation(Verdict.NO, 1, (), "")) == ""
