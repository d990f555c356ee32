"""Processes that are killed while clients use the service."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.service import Service
from testkit.waiting import until

from .support import (
    EACH_ENGINE,
    MLP_WEIGHT_BYTES,
    ONE_ENGINE,
    Bare,
    Load,
    Question,
    Watched,
    Weightd,
    Zoo,
    ask_all,
    children_of,
    config_of,
    left_behind,
    mlp_inputs,
    model_status,
    processes,
    ready_workers,
    runtime_of,
)

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

WORKERS = 2


@pytest.fixture(scope="module")
def questions(engine: str, zoo: Zoo, bare: Bare) -> list[Question]:
    return bare.questions(zoo.path("mlp", engine), mlp_inputs((1, 2, 40, 7, 64, 1)))


@pytest.fixture
def service(engine: str, zoo: Zoo) -> Iterator[Service]:
    with Service({"mlp": {"path": zoo.path("mlp", engine), "workers": WORKERS}}, verbose=True) as service:
        service.ready()
        yield service


def names(service: Service) -> set[str]:
    return {each.name for each in ready_workers(service, "mlp")}


def kill_a_worker_and_wait_for_its_successor(service: Service) -> str:
    """Return the name of the new worker."""
    before = names(service)
    assert len(before) == WORKERS
    os.kill(ready_workers(service, "mlp")[0].pid, signal.SIGKILL)

    def successor() -> str:
        now = names(service)
        return next(iter(now - before), "") if len(now) == WORKERS else ""

    return until(successor, "the worker is replaced")


@EACH_ENGINE
def test_no_request_is_lost_when_workers_are_killed(service: Service, questions: list[Question]) -> None:
    with Load(service.address, "mlp", questions, clients=2, in_flight=6) as load:
        load.wait_for(50)
        for _ in range(2):
            new = kill_a_worker_and_wait_for_its_successor(service)

            def has_served(name: str = new) -> bool:
                return any(each.name == name and each.served for each in ready_workers(service, "mlp"))

            until(has_served, f"{new} serves")
        load.wait_for(50)
    status = model_status(service, "mlp")
    assert (status.state, status.failed) == ("serving", 0)
    for each in status.generations[0].processes:
        assert (each.shared_bytes or 0) >= 0.98 * MLP_WEIGHT_BYTES, each
    assert service.log.count("killed by SIGKILL") == 2


def test_no_request_is_lost_when_the_only_worker_is_killed(engine: str, zoo: Zoo, questions: list[Question]) -> None:
    tables = {"mlp": {"path": zoo.path("mlp", engine), "workers": 1}}
    with Service(tables) as service, service.client() as client:
        ask_all(client, "mlp", questions)
        [worker] = ready_workers(service, "mlp")
        os.kill(worker.pid, signal.SIGSTOP)
        pending = [client.submit("mlp", question.inputs) for question in questions]
        until(lambda: model_status(service, "mlp").queued == len(questions) - 2, "the worker has its two requests")
        os.kill(worker.pid, signal.SIGKILL)
        for each, question in zip(pending, questions, strict=True):
            assert each.result()["y"].tobytes() == question.answer["y"].tobytes()


def test_nobody_notices_when_the_holder_is_killed(service: Service, questions: list[Question]) -> None:
    [holder] = processes(service, "mlp", "holder")
    before = names(service)
    with Load(service.address, "mlp", questions) as load:
        load.wait_for(50)
        os.kill(holder.pid, signal.SIGKILL)
        until(lambda: not processes(service, "mlp", "holder"), "the holder is gone")
        load.wait_for(50)
        assert (model_status(service, "mlp").state, names(service)) == ("serving", before)
        new = kill_a_worker_and_wait_for_its_successor(service)
        load.wait_for(50)
    [successor] = [each for each in ready_workers(service, "mlp") if each.name == new]
    assert (successor.shared_bytes or 0) >= 0.98 * MLP_WEIGHT_BYTES
    assert model_status(service, "mlp").failed == 0


def start_again(service: Service, tmp_path: Path, questions: list[Question]) -> None:
    """A daemon with the same configuration starts, serves, and leaves nothing behind, of its own or older."""
    with (
        Weightd(tmp_path / "weightd.log", "serve", config_of(service)) as second,
        second.client(service.address) as client,
    ):
        ask_all(client, "mlp", questions)
        assert client.status().pid == second.pid
        os.kill(second.pid, signal.SIGTERM)
        assert second.wait() == 0
        assert left_behind(runtime_of(service), service.cache) == []


def test_no_child_survives_a_killed_daemon_and_the_next_one_cleans_up(
    service: Service, questions: list[Question], tmp_path: Path
) -> None:
    children = children_of(service.cache)
    assert len(children) == WORKERS + 1
    with service.client() as client, Watched(children) as watched:
        for question in questions * 5:
            client.submit("mlp", question.inputs)
        client.status()
        service.kill()
        until(lambda: not watched.survivors(), "the children die with the daemon")
    assert left_behind(runtime_of(service), service.cache)
    start_again(service, tmp_path, questions)


def test_no_child_survives_a_daemon_that_is_killed_while_it_loads(
    engine: str, zoo: Zoo, questions: list[Question], tmp_path: Path
) -> None:
    with Service({"mlp": {"path": zoo.path("mlp", engine), "workers": WORKERS}}) as service:
        until(lambda: len(children_of(service.cache)) > WORKERS, "the children are spawned")
        with Watched(children_of(service.cache)) as watched:
            service.kill()
            until(lambda: not watched.survivors(), "the children die with the daemon")
        start_again(service, tmp_path, questions)
