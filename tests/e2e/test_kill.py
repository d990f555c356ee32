"""Killed processes while clients send requests. test_main_path kills one worker on each engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.service import Service
from testkit.waiting import until

from .support import (
    ONE_ENGINE,
    Load,
    SampleRequest,
    Watched,
    Weightd,
    ask_all,
    assert_same,
    children_of,
    kill_a_worker,
    left_behind,
    model_status,
    processes,
    ready_workers,
)

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

WORKERS = 2


@pytest.fixture(scope="module")
def service(mlp: Path) -> Iterator[Service]:
    with Service({"mlp": {"path": mlp, "workers": WORKERS}}, verbose=True) as service:
        service.ready()
        yield service


def names(service: Service) -> set[str]:
    return {each.name for each in ready_workers(service, "mlp")}


def test_requeues_requests_of_last_killed_workers(service: Service, questions: list[SampleRequest]) -> None:
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


def test_killed_holder_interrupts_no_client(service: Service, questions: list[SampleRequest]) -> None:
    [holder] = processes(service, "mlp", "holder")
    before = names(service)
    with Load(service.address, "mlp", questions) as load:
        load.wait_for(50)
        os.kill(holder.pid, signal.SIGKILL)
        until(lambda: not processes(service, "mlp", "holder"), "the holder exits")
        load.wait_for(50)
        assert (model_status(service, "mlp").state, names(service)) == ("serving", before)
        kill_a_worker(service, load)


@pytest.mark.parametrize("loads", [False, True], ids=["serving", "loading"])
def test_children_exit_with_killed_daemon(
    loads: bool, mlp: Path, questions: list[SampleRequest], tmp_path: Path
) -> None:
    # With start = "fork" there are no workers to kill before the holder has built.
    with Service({"mlp": {"path": mlp, "workers": WORKERS, "start": "spawn" if loads else "fork"}}) as service:
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
            assert second.end() == 0
            assert left_behind(runtime, service.cache) == []
