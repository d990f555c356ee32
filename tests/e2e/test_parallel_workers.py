"""Workers of MindSpore Lite that run several predicts at once, by parallel workers of the library's own."""

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

PARALLEL = 3  # one more than a worker has that runs one and has one ready
WORKERS = 2


@pytest.fixture(scope="module")
def service(mlp: Path) -> Iterator[Service]:
    table = {"path": mlp, "workers": WORKERS, "mindspore_lite": {"parallel_workers": PARALLEL}}
    with Service({"mlp": table}) as service:
        service.ready()
        yield service


def test_answers_are_a_models_while_several_run_at_once(service: Service, questions: list[SampleRequest]) -> None:
    with Load(service.address, "mlp", questions, clients=2 * WORKERS * PARALLEL) as load:
        load.wait_for(200)
    workers = processes(service, "mlp", "worker")
    assert [each.concurrency for each in workers] == [PARALLEL] * WORKERS
    assert all(each.served for each in workers)


def test_each_has_as_many_at_once(service: Service, questions: list[SampleRequest]) -> None:
    workers = ready_workers(service, "mlp")
    for each in workers:
        os.kill(each.pid, signal.SIGSTOP)
    try:
        with service.client() as client:
            pending = [client.submit("mlp", question.inputs) for question in questions * 3]

            def in_flight() -> list[int]:
                return [each.in_flight for each in processes(service, "mlp", "worker")]

            until(lambda: min(in_flight()) >= PARALLEL, "each has what it can run")
            for each in workers:
                os.kill(each.pid, signal.SIGCONT)
            for done, question in zip(pending, questions * 3, strict=True):
                assert_same(done.result(), question.answer)
    finally:
        for each in workers:
            os.kill(each.pid, signal.SIGCONT)


def test_one_that_fails_costs_no_other_its_right_answer(zoo: Zoo, bare: BareEngine) -> None:
    """The library would answer later ones with what was asked before it."""
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


def test_no_request_is_lost_with_a_worker_that_is_killed(service: Service, questions: list[SampleRequest]) -> None:
    service.ready()
    with Load(service.address, "mlp", questions, clients=2 * WORKERS * PARALLEL) as load:
        load.wait_for(20)
        kill_a_worker(service, load)
    service.ready()
    assert model_status(service, "mlp").quarantined == 0
