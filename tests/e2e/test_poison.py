"""Requests that fail or crash workers: only their sender gets errors, and later answers stay right."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit import models
from testkit.service import Service
from testkit.waiting import until
from weightd import Internal, InvalidArgument, RequestError

from .support import Arrays, BareEngine, Load, SampleRequest, Zoo, ask_all, model_status, pairs, ready_workers

pytestmark = pytest.mark.e2e

# The engine cannot add 2 rows to 3; the model's signature does not show this.
POISON: Arrays = {"a": np.ones((2, 4), np.float32), "b": np.ones((3, 4), np.float32)}
ERROR: dict[str, type[RequestError]] = {"onnxruntime": InvalidArgument, "mindspore_lite": Internal}


@pytest.fixture(scope="module")
def questions(engine: str, zoo: Zoo, bare: BareEngine) -> list[SampleRequest]:
    """Requests with the shapes of the failing request, and with other shapes."""
    return bare.questions(zoo.path("two_batches", engine), pairs((2, 3, 1, 2, 3, 8)))


@pytest.fixture(scope="module")
def service(engine: str, zoo: Zoo) -> Iterator[Service]:
    with Service({"two_batches": {"path": zoo.path("two_batches", engine), "workers": 2}}) as service:
        service.ready()
        yield service


def test_answers_are_right_after_failed_predict(engine: str, service: Service, questions: list[SampleRequest]) -> None:
    with service.client() as client:
        with pytest.raises(ERROR[engine], match=r"(?i)broadcast|shape|dim"):
            client.infer("two_batches", POISON)
        ask_all(client, "two_batches", questions * 4)


def test_failing_predicts_harm_no_other_client(engine: str, service: Service, questions: list[SampleRequest]) -> None:
    before = model_status(service, "two_batches").failed
    with Load(service.address, "two_batches", questions, in_flight=8) as load:
        load.wait_for(50)
        with service.client() as client:
            pending = [client.submit("two_batches", POISON) for _ in range(2)]
            for each in pending:
                with pytest.raises(ERROR[engine]):
                    each.result()
            load.wait_for(20)
    service.ready()
    status = model_status(service, "two_batches")
    assert (status.state, status.failed) == ("serving", before + 2)


# A client whose requests all cost a worker, each with different content, until the daemon rejects the client.
HOSTILE = """
import sys
import numpy as np
from weightd import (Client, RequestError, ResourceExhausted)

INPUTS = {
    "negated": lambda number: {"a": np.array([-(2**63), number], np.int64)},
    "two_batches": lambda number: {"a": np.full((2, 4), number, np.float32), "b": np.ones((3, 4), np.float32)},
}
with Client(sys.argv[1], timeout=60) as client:
    for number in range(20):
        try:
            client.infer(sys.argv[2], INPUTS[sys.argv[2]](number))
        except RequestError as error:
            print(error.code)
            if isinstance(error, ResourceExhausted):
                break
"""


def hostile(service: Service, model: str) -> list[str]:
    """Run the hostile client; return the error codes that it gets."""
    command = [sys.executable, "-c", HOSTILE, service.address, model]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_rejects_client_whose_requests_make_workers_exit(engine: str, service: Service) -> None:
    codes = hostile(service, "two_batches")
    leaves = engine == "mindspore_lite"
    assert (codes[-1] == "RESOURCE_EXHAUSTED") == leaves
    assert set(codes[:-1]) == {ERROR[engine].code}
    assert (model_status(service, "two_batches").note != "") == leaves


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="integer overflow in a division raises SIGFPE only on x86-64"
)
def test_rejects_client_whose_requests_crash_workers(tmp_path: Path) -> None:
    path = models.negated(tmp_path / "negated.onnx")
    numbers = [np.array([number, -number], np.int64) for number in range(50)]
    questions = [SampleRequest({"a": each}, {"y": -each}) for each in numbers]
    with Service({"negated": {"path": path, "workers": 2}}) as service:
        service.ready()
        with Load(service.address, "negated", questions) as load:
            load.wait_for(50)
            codes = hostile(service, "negated")
            load.wait_for(50)
        assert set(codes[:-1]) == {"INTERNAL"}
        assert codes[-1] == "RESOURCE_EXHAUSTED"
        assert "killed by SIGFPE" in service.log
        until(lambda: len(ready_workers(service, "negated")) == 2, "every worker is replaced")
        status = model_status(service, "negated")
        assert (status.state, status.failed) == ("serving", len(codes) - 1)
