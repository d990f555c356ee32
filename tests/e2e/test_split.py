"""Requests that are split between two sets of cores: same answer as unsplit, or one error."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit import models
from testkit.service import Service
from testkit.waiting import until
from weightd import Client, DeadlineExceeded, InvalidArgument, Pending

from .support import (
    ONE_ENGINE,
    BareEngine,
    SampleRequest,
    ask_all,
    assert_same,
    mlp_inputs,
    model_status,
    ready_workers,
)

CORES = sorted(os.sched_getaffinity(0))[:2]
SETS = {f"cpu:{number}": {"cpus": str(core)} for number, core in enumerate(CORES)}
PART_ROWS = 8
SPLIT = {"split": {"part_rows": PART_ROWS, "max_rows": 64}, "batching": {"max_rows": 8}}

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(len(SETS) < 2, reason="there is only one core")]


@pytest.fixture(scope="module")
def service(mlp: Path) -> Iterator[Service]:
    table = {"path": mlp, "devices": list(SETS), **SPLIT}
    with Service({"mlp": table}, devices=SETS) as service:
        service.ready()
        yield service


@pytest.fixture(scope="module")
def asked(mlp: Path, bare: BareEngine) -> list[SampleRequest]:
    """Requests with and without a remainder, smaller than a part, and small enough to be batched."""
    return bare.questions(mlp, mlp_inputs((64, 61, 1, 8, 9, 2, 16)))


class Stopped:
    """Stops the worker of one device, so that a split request cannot end before this worker continues or is lost.

    Requests of the test end only after the stopped worker runs again, exits, or is taken out of service.
    """

    def __init__(self, service: Service, client: Client) -> None:
        self._service, self._client = service, client
        until(lambda: not any(each.in_flight for each in ready_workers(service, "mlp")), "the workers are idle")
        self.pid = next(each.pid for each in ready_workers(service, "mlp") if each.device == "cpu:1")
        os.kill(self.pid, signal.SIGSTOP)

    def submit(self, question: SampleRequest, timeout: float = 60.0) -> Pending:
        """Submit a request; return when the other device is idle."""
        pending = self._client.submit("mlp", question.inputs, timeout=timeout)

        def only_stopped_worker_is_busy() -> bool:
            busy = {each.device: each.in_flight for each in ready_workers(self._service, "mlp")}
            return busy["cpu:1"] > 0 and busy["cpu:0"] == 0

        until(only_stopped_worker_is_busy, "only the stopped worker is busy")
        return pending


def test_split_request_has_answer_of_unsplit_request(service: Service, asked: list[SampleRequest]) -> None:
    with service.client() as client:
        ask_all(client, "mlp", asked * 3)
        with pytest.raises(InvalidArgument, match=r"input x: expected at most 64 rows \(split.max_rows of the model"):
            client.infer("mlp", mlp_inputs((65,))[0])
    status = model_status(service, "mlp")
    assert status.executions
    in_parts = [each for each in asked if len(each.inputs["x"]) > PART_ROWS]
    assert (status.failed, status.executions.split) == (0, 3 * len(in_parts))
    assert status.generations[0].batching_note.endswith("requests of more than 8 rows are split, tested bit-equal")


def test_parts_of_lost_worker_run_on_other_device(service: Service, asked: list[SampleRequest]) -> None:
    with service.client() as client:
        stopped = Stopped(service, client)
        pending = stopped.submit(asked[1])
        os.kill(stopped.pid, signal.SIGKILL)
        assert_same(pending.result(), asked[1].answer)
        service.ready()
        ask_all(client, "mlp", asked)
    assert (model_status(service, "mlp").unexpected_exits, model_status(service, "mlp").failed) == (1, 0)


@ONE_ENGINE
def test_deadline_and_cancel_apply_to_all_parts(service: Service, asked: list[SampleRequest]) -> None:
    with service.client() as client:
        stopped = Stopped(service, client)
        stopped.submit(asked[1]).cancel()
        os.kill(stopped.pid, signal.SIGCONT)
        ask_all(client, "mlp", asked)
        stopped = Stopped(service, client)
        late = stopped.submit(asked[0], timeout=0.5)
        with pytest.raises(DeadlineExceeded, match="was running at its deadline"):
            late.result()
        os.kill(stopped.pid, signal.SIGCONT)
        ask_all(client, "mlp", asked)
    status = model_status(service, "mlp")
    assert (status.failed, status.queued) == (2, 0)


@ONE_ENGINE
def test_input_without_rows_is_sent_with_each_part(tmp_path: Path) -> None:
    path = models.scaled(tmp_path / "scaled.onnx")
    x, s = np.arange(61 * 4, dtype=np.float32).reshape(61, 4), np.array([1, -2, 3, -4], np.float32)
    with Service({"mlp": {"path": path, "workers": 2, **SPLIT}}) as service, service.client() as client:
        assert_same(client.infer("mlp", {"x": x, "s": s}), {"y": x * s})
        status = model_status(service, "mlp")
    assert status.executions
    assert (status.executions.count, status.executions.split) == (8, 1)
    assert status.generations[0].batching_note.endswith("no requests are batched: input s has no rows")
