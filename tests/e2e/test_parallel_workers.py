"""MindSpore Lite workers that run several predicts at once, with the library's parallel workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.service import Service
from testkit.waiting import until
from weightd import Internal

from .support import (
    BareEngine,
    Load,
    SampleRequest,
    Zoo,
    assert_same,
    kill_a_worker,
    model_status,
    pairs,
    processes,
    ready_workers,
)

pytestmark = [pytest.mark.e2e, pytest.mark.engines("mindspore_lite")]

PARALLEL = 3  # one more than a worker usually has: one running, one prefetched
WORKERS = 2


@pytest.fixture(scope="module")
def service(mlp: Path) -> Iterator[Service]:
    table = {"path": mlp, "workers": WORKERS, "mindspore_lite": {"parallel_workers": PARALLEL}}
    with Service({"mlp": table}) as service:
        service.ready()
        yield service


def test_concurrent_predicts_give_right_answers(service: Service, questions: list[SampleRequest]) -> None:
    with Load(service.address, "mlp", questions, clients=2 * WORKERS * PARALLEL) as load:
        load.wait_for(200)
    workers = processes(service, "mlp", "worker")
    assert [each.concurrency for each in workers] == [PARALLEL] * WORKERS
    assert all(each.served for each in workers)


def test_worker_gets_as_many_requests_as_it_can_run(service: Service, questions: list[SampleRequest]) -> None:
    workers = ready_workers(service, "mlp")
    for each in workers:
        os.kill(each.pid, signal.SIGSTOP)
    try:
        with service.client() as client:
            pending = [client.submit("mlp", question.inputs) for question in questions * 3]

            def in_flight() -> list[int]:
                return [each.in_flight for each in processes(service, "mlp", "worker")]

            until(lambda: min(in_flight()) >= PARALLEL, "each worker has as many requests as it can run")
            for each in workers:
                os.kill(each.pid, signal.SIGCONT)
            for done, question in zip(pending, questions * 3, strict=True):
                assert_same(done.result(), question.answer)
    finally:
        for each in workers:
            os.kill(each.pid, signal.SIGCONT)


def test_failed_predict_spoils_no_other_answer(zoo: Zoo, bare: BareEngine) -> None:
    """After a failed predict, the library itself would answer later requests with inputs of earlier ones."""
    path = zoo.path("two_batches", "mindspore_lite")
    questions = bare.questions(path, pairs((1, 2, 3, 5)))
    table = {"path": path, "workers": WORKERS, "mindspore_lite": {"parallel_workers": PARALLEL}}
    with Service({"two_batches": table}) as service:
        service.ready()
        with Load(service.address, "two_batches", questions, clients=4) as load, service.client() as client:
            load.wait_for(20)
            with pytest.raises(Internal, match="predict failed"):
                client.infer("two_batches", {"a": questions[1].inputs["a"], "b": questions[2].inputs["b"]})
            load.wait_for(50)


def test_requeues_requests_of_killed_parallel_worker(service: Service, questions: list[SampleRequest]) -> None:
    service.ready()
    with Load(service.address, "mlp", questions, clients=2 * WORKERS * PARALLEL) as load:
        load.wait_for(20)
        kill_a_worker(service, load)
    service.ready()
    assert model_status(service, "mlp").quarantined == 0
