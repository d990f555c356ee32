"""What goes wrong while clients use the service, other than a plain death: each request ends rightly all the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit import models
from testkit.service import Service
from testkit.waiting import until
from weightd.client.client import Pending
from weightd.protocol.errors import Cancelled, DeadlineExceeded, Internal, RequestError, Unavailable

from .support import (
    EACH_ENGINE,
    ONE_ENGINE,
    Bare,
    Load,
    Question,
    Zoo,
    ask_all,
    mlp_inputs,
    model_status,
    ready_workers,
)

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

WORKERS = 2
ENDLESS = {"n": np.array([2**40])}


@pytest.fixture(scope="module")
def questions(engine: str, zoo: Zoo, bare: Bare) -> list[Question]:
    return bare.questions(zoo.path("mlp", engine), mlp_inputs((1, 2, 40, 7, 64, 1)))


def serving(engine: str, zoo: Zoo, **more: object) -> Service:
    return Service({"mlp": {"path": zoo.path("mlp", engine), "workers": WORKERS, **more}}, verbose=True)


@pytest.fixture
def service(engine: str, zoo: Zoo) -> Iterator[Service]:
    with serving(engine, zoo, predict_timeout=2.0, watchdog=2.0) as service:
        service.ready()
        yield service


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Service]:
    table = {"path": models.loop(tmp_path / "loop.onnx"), "workers": 2, "predict_timeout": 0.5}
    with Service({"loop": table}, verbose=True) as service:
        service.ready()
        yield service


def are_replaced(service: Service, pids: set[int]) -> bool:
    workers = ready_workers(service, "mlp")
    return len(workers) == WORKERS and not pids & {each.pid for each in workers}


# --- workers that hang ------------------------------------------------------------------------------------------------


def test_a_stopped_worker_costs_at_most_the_request_that_it_runs(service: Service, questions: list[Question]) -> None:
    victim = ready_workers(service, "mlp")[0].pid
    endings: list[str] = []
    with service.client() as client:
        # More than the other worker has done by the time that the first one is stopped.
        pending = [client.submit("mlp", each.inputs) for each in questions * 30]
        os.kill(victim, signal.SIGSTOP)
        for each, question in zip(pending, questions * 30, strict=True):
            try:
                assert each.result()["y"].tobytes() == question.answer["y"].tobytes()
            except DeadlineExceeded as error:
                endings.append(str(error))
    assert len(endings) <= 1
    assert all("predict_timeout" in each for each in endings)
    until(lambda: are_replaced(service, {victim}), "the stopped worker is replaced")
    status = model_status(service, "mlp")
    assert (status.failed, status.deaths) == (len(endings), 1)


def test_an_idle_worker_that_is_stopped_is_noticed_and_replaced(service: Service, questions: list[Question]) -> None:
    victim = ready_workers(service, "mlp")[0].pid
    os.kill(victim, signal.SIGSTOP)
    until(lambda: are_replaced(service, {victim}), "the stopped worker is replaced")
    assert "has not answered a ping" in service.log
    with service.client() as client:
        ask_all(client, "mlp", questions)
    assert model_status(service, "mlp").failed == 0


def test_an_endless_predict_is_ended_with_its_stacks_in_the_log_and_not_begun_a_third_time(endless: Service) -> None:
    with endless.client() as client:
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match="took longer than predict_timeout"):
                client.infer("loop", ENDLESS)
        with pytest.raises(Internal, match="workers died of this content or hung in it"):
            client.infer("loop", ENDLESS)
        # Others are served all the time.
        assert client.infer("loop", {"n": np.array([7])})["y"] == [7]
        until(lambda: "session.py" in endless.log, "the stacks are told")
        assert "Fatal Python error: Aborted" in endless.log
        assert model_status(endless, "loop").quarantined == 1


def test_nobody_waits_behind_a_predict_that_takes_long(tmp_path: Path) -> None:
    table = {"path": models.loop(tmp_path / "loop.onnx"), "workers": 2, "predict_timeout": 10.0}
    with Service({"loop": table}) as service, service.client() as client:
        service.ready()
        pending = [client.submit("loop", {"n": np.array([number])}) for number in (2**40, 1, 2, 3, 4, 5)]
        assert [int(each.result()["y"][0]) for each in pending[1:]] == [1, 2, 3, 4, 5]
        # One of them was ready behind the endless one, and was taken back before that was given up.
        assert not pending[0].done()
        service.kill()


# --- requests that nobody wants any more ------------------------------------------------------------------------------


def test_what_is_taken_back_ends_at_once_and_the_next_is_served(endless: Service) -> None:
    with endless.client() as client:
        running = [client.submit("loop", {"n": np.array([10**8 + number])}, timeout=60.0) for number in range(2)]
        waiting = [client.submit("loop", {"n": np.array([number])}) for number in range(4)]
        waiting[1].cancel()
        running[0].cancel()
        for cancelled in (waiting[1], running[0]):
            with pytest.raises(Cancelled, match="taken back by the client"):
                cancelled.result()
        assert [int(waiting[number].result()["y"][0]) for number in (0, 2, 3)] == [0, 2, 3]


def test_what_a_client_asked_that_is_gone_is_dropped(endless: Service) -> None:
    with endless.client() as other:
        client = endless.client()
        kept: list[Pending] = [client.submit("loop", {"n": np.array([10**12 + number])}) for number in range(20)]
        until(lambda: model_status(endless, "loop").queued > 10, "they wait")
        client.close()
        until(lambda: model_status(endless, "loop").queued == 0, "they are dropped")
        assert other.infer("loop", {"n": np.array([3])})["y"] == [3]
        assert len(kept) == 20


# --- files ------------------------------------------------------------------------------------------------------------


@EACH_ENGINE
@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_a_damaged_store_costs_time_but_no_answer(service: Service, questions: list[Question], damage: str) -> None:
    [store] = service.cache.glob("*/mlp.1/pages")
    before = {each.pid for each in ready_workers(service, "mlp")}
    with Load(service.address, "mlp", questions, clients=2, in_flight=4) as load:
        load.wait_for(30)
        if damage == "truncated":
            os.truncate(store, 4096)
        else:
            with store.open("r+b") as file:
                file.seek(8192)
                file.write(b"\xff" * (store.stat().st_size - 8192))
        until(lambda: are_replaced(service, before), "another generation serves")
        load.wait_for(30)
    assert "the page store was changed or truncated" in service.log
    assert model_status(service, "mlp").failed == 0
    assert all(each.shared_bytes for each in ready_workers(service, "mlp"))


# --- health -----------------------------------------------------------------------------------------------------------


def test_health_is_true_only_while_a_worker_answers(engine: str, zoo: Zoo, questions: list[Question]) -> None:
    with serving(engine, zoo, workers=1, watchdog=1.0) as service, service.client() as client:
        assert not client.ready("mlp").ready
        service.ready()
        assert (client.ready("mlp").ready, client.ready().ready) == (True, True)
        [worker] = ready_workers(service, "mlp")
        os.kill(worker.pid, signal.SIGSTOP)
        told = until(lambda: client.ready("mlp").reason, "it is told that nobody answers")
        assert "mlp" in told
        until(lambda: client.ready("mlp").ready, "the worker is replaced")
        ask_all(client, "mlp", questions)


# --- the daemon -------------------------------------------------------------------------------------------------------


def test_a_client_learns_at_once_that_the_daemon_is_dead(service: Service, questions: list[Question]) -> None:
    with service.client() as client:
        ask_all(client, "mlp", questions)
        pending = [client.submit("mlp", questions[2].inputs) for _ in range(50)]
        begun = time.monotonic()
        os.kill(service.pid, signal.SIGKILL)
        endings = [ending(each) for each in pending]
        assert time.monotonic() - begun < 5.0
        assert set(endings) <= {"", "UNAVAILABLE"}
        assert endings[-1] == "UNAVAILABLE"
        with pytest.raises(Unavailable):
            client.infer("mlp", questions[0].inputs)


def ending(pending: Pending) -> str:
    try:
        pending.result()
    except RequestError as error:
        return error.code
    return ""
