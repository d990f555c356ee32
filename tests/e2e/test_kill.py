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
    MLP_WEIGHT_BYTES,
    ONE_ENGINE,
    Load,
    Question,
    Watched,
    Weightd,
    ask_all,
    assert_same,
    children_of,
    left_behind,
    model_status,
    processes,
    ready_workers,
)

pytestmark = pytest.mark.e2e

WORKERS = 2


@pytest.fixture(scope="module")
def service(mlp: Path) -> Iterator[Service]:
    with Service({"mlp": {"path": mlp, "workers": WORKERS}}, verbose=True) as service:
        service.ready()
        yield service


def names(service: Service) -> set[str]:
    return {each.name for each in ready_workers(service, "mlp")}


def kill_a_worker_and_wait_for_its_successor(service: Service, load: Load) -> None:
    before = names(service)
    os.kill(ready_workers(service, "mlp")[0].pid, signal.SIGKILL)
    until(lambda: len(names(service)) == WORKERS and names(service) != before, "the worker is replaced")

    def has_served() -> bool:
        return all(each.served for each in ready_workers(service, "mlp"))

    until(has_served, "its successor serves")
    load.wait_for(50)
    status = model_status(service, "mlp")
    assert (status.state, status.failed) == ("serving", 0)
    for each in status.generations[0].processes:
        assert (each.shared_bytes or 0) >= 0.98 * MLP_WEIGHT_BYTES, each


def test_no_request_is_lost_when_a_worker_is_killed(service: Service, questions: list[Question]) -> None:
    with Load(service.address, "mlp", questions, in_flight=6) as load:
        load.wait_for(50)
        kill_a_worker_and_wait_for_its_successor(service, load)
    assert service.log.count("killed by SIGKILL") == 1


@ONE_ENGINE
def test_no_request_is_lost_when_the_last_workers_are_killed(service: Service, questions: list[Question]) -> None:
    service.ready()
    workers = [each.pid for each in ready_workers(service, "mlp")]
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    with service.client() as client:
        pending = [client.submit("mlp", question.inputs) for question in questions]
        until(lambda: model_status(service, "mlp").queued == len(questions) - 4, "each worker has its two requests")
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        for each, question in zip(pending, questions, strict=True):
            assert_same(each.result(), question.answer)
    service.ready()


@ONE_ENGINE
def test_nobody_notices_when_the_holder_is_killed(service: Service, questions: list[Question]) -> None:
    [holder] = processes(service, "mlp", "holder")
    before = names(service)
    with Load(service.address, "mlp", questions) as load:
        load.wait_for(50)
        os.kill(holder.pid, signal.SIGKILL)
        until(lambda: not processes(service, "mlp", "holder"), "the holder is gone")
        load.wait_for(50)
        assert (model_status(service, "mlp").state, names(service)) == ("serving", before)
        kill_a_worker_and_wait_for_its_successor(service, load)


@ONE_ENGINE
@pytest.mark.parametrize("loads", [False, True], ids=["serves", "loads"])
def test_no_child_survives_a_killed_daemon_and_the_next_one_cleans_up(
    loads: bool, mlp: Path, questions: list[Question], tmp_path: Path
) -> None:
    with Service({"mlp": {"path": mlp, "workers": WORKERS}}) as service:
        if loads:
            until(lambda: len(children_of(service.cache)) > WORKERS, "the children are spawned")
        else:
            service.ready()
        children = children_of(service.cache)
        with service.client() as client, Watched(children) as watched:
            for question in questions * 5:
                client.submit("mlp", question.inputs)
            client.status()
            service.kill()
            until(lambda: not watched.survivors(), "the children die with the daemon")
        runtime = service.config.parent
        assert left_behind(runtime, service.cache)
        if loads:
            return
        with (
            Weightd(tmp_path / "weightd.log", "serve", service.config) as second,
            second.client(service.address) as client,
        ):
            ask_all(client, "mlp", questions)
            assert client.status().pid == second.pid
            os.kill(second.pid, signal.SIGTERM)
            assert second.wait() == 0
            assert left_behind(runtime, service.cache) == []
