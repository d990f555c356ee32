"""Batched requests: each gets the answer that it would get alone, even if others in its batch fail."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit import models
from testkit.service import Service
from weightd import Client, DeadlineExceeded, Internal, InvalidArgument, Pending

from .support import (
    ONE_ENGINE,
    Arrays,
    BareEngine,
    Load,
    SampleRequest,
    Zoo,
    ask_all,
    assert_same,
    kill_a_worker,
    mlp_inputs,
    model_status,
    ready_workers,
)

pytestmark = pytest.mark.e2e

IN_FLIGHT = 32
BATCHING = {"batching": {"max_rows": 16}}


def texts(lengths: tuple[int, ...]) -> list[Arrays]:
    """Return inputs of the lengths model: one array per length."""
    random = np.random.default_rng(10)
    return [{"x": random.standard_normal((1 + at % 3, length), np.float32)} for at, length in enumerate(lengths)]


def test_batched_answers_equal_single_answers(engine: str, zoo: Zoo, bare: BareEngine) -> None:
    mlp, lengths = zoo.path("mlp", engine), zoo.path("lengths", engine)
    # Two models at the same time; some requests exceed the batch limit, and some have different lengths.
    asked = bare.questions(mlp, mlp_inputs((1, 2, 1, 3, 7, 1, 16, 1, 5, 17, 1)))
    others = bare.questions(lengths, texts((5, 7, 5, 5, 7, 64, 5, 7)))
    with Service({"mlp": {"path": mlp, **BATCHING}, "lengths": {"path": lengths, **BATCHING}}) as service:
        service.ready()
        with service.client() as client:
            for _ in range(3):
                pending = [client.submit("lengths", others[at % len(others)].inputs) for at in range(IN_FLIGHT)]
                ask_all(client, "mlp", [asked[at % len(asked)] for at in range(IN_FLIGHT)])
                for at, each in enumerate(pending):
                    assert_same(each.result(), others[at % len(others)].answer)
        for name in ("mlp", "lengths"):
            status = model_status(service, name)
            assert status.executions
            assert 0 < status.executions.count < status.served == 3 * IN_FLIGHT
            assert status.generations[0].batching_note == "requests are batched up to 16 rows, tested bit-equal"


def test_batches_model_with_float_index_inputs(engine: str, zoo: Zoo, bare: BareEngine, tmp_path: Path) -> None:
    path = zoo.path("embedding", engine)
    random = np.random.default_rng(12)
    rows = [{"x": random.integers(0, 12, (1 + at % 3, 9)).astype(np.float32)} for at in range(8)]
    np.savez(tmp_path / "sample.npz", x=rows[0]["x"])
    asked = bare.questions(path, rows)
    tables = {"made_up": {"path": path, **BATCHING}, "sampled": {"path": path, **BATCHING}}
    tables["sampled"]["selftest"] = tmp_path / "sample.npz"
    with Service(tables) as service:
        service.ready()
        with service.client() as client:
            for name in tables:
                ask_all(client, name, [asked[at % len(asked)] for at in range(IN_FLIGHT)])
        for name in tables:
            status = model_status(service, name)
            assert status.generations[0].batching_note == "requests are batched up to 16 rows, tested bit-equal"
            assert status.generations[0].max_rows == 16
            assert status.executions
            assert status.executions.count < status.served == IN_FLIGHT


@ONE_ENGINE
def test_killed_worker_loses_no_request_of_its_batch(mlp: Path, questions: list[SampleRequest]) -> None:
    with Service({"mlp": {"path": mlp, "workers": 2, "batching": {"max_rows": 64}}}) as service:
        service.ready()
        with Load(service.address, "mlp", questions, in_flight=IN_FLIGHT // 2) as load:
            load.wait_for(4 * IN_FLIGHT)
            kill_a_worker(service, load)
        assert model_status(service, "mlp").failed == 0


# --- ONNX Runtime only; one worker per model, so that the content of its queue is known -----------------------------

ODD = ("integers", "patient", "negated", "batch_row_count", "quantized")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("odd")
    paths: dict[str, Path] = {name: getattr(models, name)(directory / f"{name}.onnx") for name in ODD}
    tables = {name: {"path": path, **BATCHING} for name, path in paths.items()}
    tables["too_patient"] = tables["patient"]
    tables["loose"] = {"path": paths["batch_row_count"], "batching": {"max_rows": 16, "exact": False}}
    with Service(tables) as service:
        service.ready()
        yield service


def of(name: str, *values: int) -> Arrays:
    """Return a request with one row per value."""
    row = {"integers": ("ids", np.int64, 3), "patient": ("n", np.int64, 0), "negated": ("a", np.int64, 0)}
    tensor, dtype, width = row[name]
    array = np.array(values, dtype)
    return {tensor: np.repeat(array[:, None], width, 1) if width else array}


def value(pending: Pending) -> Any:
    """Return the only output of the answer."""
    [array] = pending.result().values()
    return array


class Held:
    """Stops the only worker of a model during the block, so that requests submitted in it run as one batch.

    The first request does not: the worker has already received it.
    """

    def __init__(self, service: Service, client: Client, name: str, first: Arrays) -> None:
        [self.worker] = ready_workers(service, name)
        self._service, self._client, self._name, self._first = service, client, name, first

    def __enter__(self) -> Held:
        os.kill(self.worker.pid, signal.SIGSTOP)
        self.first = self._client.submit(self._name, self._first)
        for _ in range(2):
            self._client.status()  # The daemon answers after it has handled the messages that arrived earlier.
        return self

    def __exit__(self, *_: object) -> None:
        self._client.status()  # The daemon has received the requests of the block once it answers.
        os.kill(self.worker.pid, signal.SIGCONT)


def test_dependent_rows_are_batched_only_if_configured(odd: Service) -> None:
    random = np.random.default_rng(11)
    wide = [{"x": random.standard_normal((1 + at % 3, 64), np.float32) * 10**at} for at in range(4)]
    counted = {"x": np.zeros((1, 1), np.float32)}
    with odd.client() as client:
        alone = [client.infer("quantized", each) for each in wide]
        pending = [client.submit("quantized", each) for each in wide * 8]
        for each, expected in zip(pending, alone * 8, strict=True):
            assert_same(each.result(), expected)
        rows: dict[str, list[float]] = {}
        for name in ("batch_row_count", "loose"):
            with Held(odd, client, name, counted) as held:
                asked = [client.submit(name, counted) for _ in range(IN_FLIGHT)]
            rows[name] = [value(each).item() for each in (held.first, *asked)]
    assert rows == {"batch_row_count": [1] * (1 + IN_FLIGHT), "loose": [1] + [16] * IN_FLIGHT}
    for name, why in (("batch_row_count", "output rows: 16 of 16 rows"), ("quantized", "output y: ")):
        assert f"{name}.1: rows of requests: {why}" in odd.log
        assert model_status(odd, name).generations[0].batching_note.startswith(why)


def test_invalid_request_fails_alone_in_its_batch(odd: Service) -> None:
    with odd.client() as client:
        expected = [client.infer("integers", of("integers", number % 16, 3)) for number in range(7)]
        with Held(odd, client, "integers", of("integers", 1)) as held:
            pending = [client.submit("integers", of("integers", number % 16, 3)) for number in range(3)]
            guilty = client.submit("integers", of("integers", 2, 16))
            pending += [client.submit("integers", of("integers", number % 16, 3)) for number in range(3, 7)]
        for each, answer in zip(pending, expected, strict=True):
            assert_same(each.result(), answer)
        with pytest.raises(InvalidArgument, match="out of data bounds"):
            guilty.result()
        held.first.result()
    status = model_status(odd, "integers")
    assert (status.failed, status.unexpected_exits) == (1, 0)


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="integer overflow in a division raises SIGFPE only on x86-64"
)
def test_crashing_request_loses_no_answer_of_its_batch(odd: Service) -> None:
    with odd.client() as client:
        with Held(odd, client, "negated", of("negated", 1)):
            pending = [client.submit("negated", of("negated", number, 5)) for number in range(4)]
            guilty = client.submit("negated", of("negated", -(2**63)))
            pending += [client.submit("negated", of("negated", number, 5)) for number in range(4, 7)]
        for number, each in enumerate(pending):
            assert value(each).tolist() == [-number, -5]
        with pytest.raises(Internal, match="was on 2 workers when they died, the last one killed by SIGFPE"):
            guilty.result()
    status = model_status(odd, "negated")
    assert (status.failed, status.unexpected_exits) == (1, 3)


# One model per case, so that durations learned in one case do not affect the other.
@pytest.mark.parametrize(("model", "then"), [("patient", signal.SIGCONT), ("too_patient", signal.SIGKILL)])
def test_requests_expire_and_cancel_while_their_batch_runs(odd: Service, model: str, then: int) -> None:
    with odd.client() as client:

        def ask(number: int, timeout: float = 60.0) -> Pending:
            return client.submit(model, of("patient", number), timeout=timeout)

        # The daemon expects a batch to take about as long as these requests and the first one below, which runs while
        # the worker is stopped. A request with an earlier deadline would not join the batch.
        for each in [ask(1) for _ in range(4 * IN_FLIGHT)]:
            each.result()
        with Held(odd, client, model, of("patient", 2)) as held:
            pending = [ask(number) for number in (3, 200_000, 4)]
            late, cancelled = ask(5, timeout=3.0), ask(6)
            pending.append(ask(7))
        assert value(held.first).tolist() == [2]
        os.kill(held.worker.pid, signal.SIGSTOP)
        cancelled.cancel()
        with pytest.raises(DeadlineExceeded, match="was running at its deadline"):
            late.result()
        os.kill(held.worker.pid, then)
        assert [value(each).tolist() for each in pending] == [[3], [200_000], [4], [7]]
    status = model_status(odd, model)
    assert (status.failed, status.unexpected_exits, status.queued) == (2, int(then == signal.SIGKILL), 0)
