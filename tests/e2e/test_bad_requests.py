"""Invalid requests: each gets a clear error, and the next valid request of the same client succeeds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.service import Service
from weightd import Client, DeadlineExceeded, InvalidArgument, NotFound

from .support import (
    ONE_ENGINE,
    Arrays,
    BareEngine,
    Zoo,
    ask_all,
    embeddings,
    interpreter,
    model_status,
    pairs,
    ready_workers,
)

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

MODELS = ("two_inputs", "integers", "fixed")


class Bad(NamedTuple):
    """A request and words that its error must contain."""

    model: str
    inputs: Arrays
    words: tuple[str, ...]


def fp32(*shape: int) -> NDArray[np.float32]:
    return np.ones(shape, np.float32)


A = fp32(2, 4)
CASES = {
    "missing input": Bad("two_inputs", {"a": A}, ("b is missing", "expected a, b")),
    "misnamed input": Bad("two_inputs", {"a": A, "B": A}, ("b is missing", "B is not an input")),
    "wrong datatype": Bad("two_inputs", {"a": A.astype(np.float64), "b": A}, ("input a", "FP32", "FP64")),
    "rank too low": Bad("two_inputs", {"a": fp32(4), "b": A}, ("input a", "[-1, 4]", "[4]")),
    "batch of a fixed model": Bad("fixed", {"x": fp32(3, 3)}, ("input x", "[2, 3]", "[3, 3]")),
    "batch 0": Bad("two_inputs", {"a": fp32(0, 4), "b": A}, ("input a", "[0, 4]", "any size from 1")),
    "text": Bad("fixed", {"x": np.array([["a"] * 3] * 2)}, ("input x", "<U1")),
}


@pytest.fixture(scope="module")
def service(engine: str, zoo: Zoo) -> Iterator[Service]:
    with Service({name: {"path": zoo.path(name, engine)} for name in MODELS}) as service:
        service.ready()
        yield service


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
    """One client for all tests, so that leftovers of a rejected request would break the next test."""
    with service.client() as client:
        yield client


@pytest.fixture
def good(engine: str, client: Client, zoo: Zoo, bare: BareEngine) -> Iterator[None]:
    """Check after the test that valid requests of the same client succeed."""
    yield
    ask_all(client, "two_inputs", bare.questions(zoo.path("two_inputs", engine), pairs((2, 1))))
    ask_all(client, "integers", bare.questions(zoo.path("integers", engine), embeddings((2, 1), engine)))
    ask_all(client, "fixed", bare.questions(zoo.path("fixed", engine), [{"x": fp32(2, 3)}]))


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize("case", CASES)
def test_error_of_bad_request_names_input(case: str, client: Client) -> None:
    bad = CASES[case]
    with pytest.raises(InvalidArgument) as caught:
        client.infer(bad.model, bad.inputs)
    for word in bad.words:
        assert word in str(caught.value)


@pytest.mark.usefixtures("good")
def test_error_for_unknown_model_lists_known_models(client: Client) -> None:
    for call in (lambda: client.infer("nope", {"x": A}), lambda: client.metadata("nope")):
        with pytest.raises(NotFound, match=r"'nope'.*two_inputs, integers, fixed"):
            call()


@pytest.mark.usefixtures("good")
def test_expired_deadline_ends_request(service: Service, client: Client) -> None:
    [worker] = ready_workers(service, "fixed")
    # The worker is stopped, since it might answer within even the shortest timeout.
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        for timeout in (1e-6, 0.1):
            with pytest.raises(DeadlineExceeded):
                client.infer("fixed", {"x": fp32(2, 3)}, timeout=timeout)
    finally:
        os.kill(worker.pid, signal.SIGCONT)


def test_bad_requests_crash_no_worker(service: Service) -> None:
    for name in MODELS:
        [generation] = model_status(service, name).generations
        assert [each.name.rsplit(".", 1)[1] for each in generation.processes] == ["w1"]


def test_validates_early_requests_after_model_has_loaded(
    engine: str, zoo: Zoo, bare: BareEngine, tmp_path: Path
) -> None:
    path = zoo.path("two_inputs", engine)
    go, python = tmp_path / "go", tmp_path / "python"
    python.write_text(f'#!/bin/sh\nwhile [ ! -e {go} ]; do sleep 0.05; done\nexec {interpreter(engine)} "$@"\n')
    python.chmod(0o700)
    with Service({"two_inputs": {"path": path, "python": python}}) as service, service.client() as client:
        bad = client.submit("two_inputs", {"a": A})
        [question] = bare.questions(path, pairs((2,)))
        good = client.submit("two_inputs", question.inputs)
        assert model_status(service, "two_inputs").state != "serving"
        go.touch()
        with pytest.raises(InvalidArgument, match="b is missing"):
            bad.result()
        assert good.result()["sum"].tobytes() == question.answer["sum"].tobytes()
