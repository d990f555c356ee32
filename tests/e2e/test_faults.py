"""What goes wrong while clients use the service, other than a plain death: each request ends rightly all the same."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit import models
from testkit.service import Service
from testkit.waiting import until
from weightd import Client, Pending
from weightd_protocol.errors import Cancelled, DeadlineExceeded, Internal, RequestError, Unavailable

from .support import (
    ONE_ENGINE,
    BareEngine,
    Load,
    SampleRequest,
    Zoo,
    ask_all,
    core_dump_of,
    core_dumps,
    model_status,
    pairs,
    ready_workers,
)

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

WORKERS = 2
ENDLESS = {"n": np.array([2**40])}
A_WHILE = 10**5  # some tenths of a second


@pytest.fixture(scope="module")
def service(mlp: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    loop = models.loop(tmp_path_factory.mktemp("loop") / "loop.onnx")
    tables: dict[str, dict[str, object]] = {
        # With two threads its workers cannot be forked of the holder: they share pages.
        "mlp": {"path": mlp, "workers": WORKERS, "threads": 2, "predict_timeout": 2.0, "watchdog": 2.0},
        "loop": {"path": loop, "workers": WORKERS, "predict_timeout": 1.0},
    }
    with core_dumps(), Service(tables, verbose=True) as service:
        service.ready()
        yield service


def submit_and_see_it_run(client: Client, service: Service) -> Pending:
    """Return a request that a worker runs. On a busy machine one may end before the status shows it."""

    def attempt() -> Pending | None:
        pending = client.submit("loop", {"n": np.array([A_WHILE])})
        until(lambda: pending.done() or any(each.in_flight for each in ready_workers(service, "loop")), "it runs")
        return None if pending.done() else pending

    return until(attempt, "a request is seen to run")


def pids(service: Service) -> set[int]:
    return {each.pid for each in ready_workers(service, "mlp")}


def wait_for_others(service: Service, old: set[int]) -> None:
    until(lambda: len(now := pids(service)) == WORKERS and not now & old, "others are there instead")


# --- requests that nobody wants any more ------------------------------------------------------------------------------


def test_what_is_taken_back_ends_at_once_and_the_next_is_served(service: Service) -> None:
    with service.client() as client:
        running = [client.submit("loop", {"n": np.array([A_WHILE + number])}) for number in range(2)]
        waiting = [client.submit("loop", {"n": np.array([number])}) for number in range(4)]
        waiting[1].cancel()
        running[0].cancel()
        for cancelled in (waiting[1], running[0]):
            with pytest.raises(Cancelled, match="cancelled by the client"):
                cancelled.result()
        assert [int(waiting[number].result()["y"][0]) for number in (0, 2, 3)] == [0, 2, 3]


def test_what_a_client_asked_that_is_gone_is_dropped(service: Service) -> None:
    """Should their workers be lost to them, too, all these tests together would be taken for an enemy."""
    with service.client() as other:
        client = service.client()
        kept = [client.submit("loop", {"n": np.array([A_WHILE + number])}) for number in range(20)]
        until(lambda: model_status(service, "loop").queued > 10, "they wait")
        client.close()
        until(lambda: model_status(service, "loop").queued == 0, "they are dropped")
        assert other.infer("loop", {"n": np.array([3])})["y"] == [3]
        assert len(kept) == 20


# --- core dumps -------------------------------------------------------------------------------------------------------


def test_no_process_leaves_weights_or_inputs_in_a_core_dump(service: Service) -> None:
    found = {f"{role} {pid}": core_dump_of(pid) for pid, role in service.roles().items()}
    assert {key.split(" ")[0] for key in found} >= {"daemon", "holder", "worker", "fork", "proxy"}, found
    assert [key for key, each in found.items() if each != (0, 0)] == []


# --- the daemon is stopped --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["daemon", "daemon-and-workers"])
def test_the_time_in_which_the_daemon_is_stopped_does_not_count_against_workers(service: Service, whole: bool) -> None:
    """As by SIGSTOP, a debugger, `docker pause` or the freezer: each stop is longer than predict_timeout."""
    workers = [each.pid for each in ready_workers(service, "loop")]
    before = model_status(service, "loop")
    stopped = [service.pid, *(workers if whole else ())]
    with service.client() as client:
        # Content that is lost with two workers would be refused.
        for _ in range(2):
            pending = submit_and_see_it_run(client, service)
            try:
                for pid in stopped:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(1.3)
            finally:
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)
            assert pending.result()["y"] == [A_WHILE]
    after = model_status(service, "loop")
    assert [each.pid for each in ready_workers(service, "loop")] == workers
    assert (after.unexpected_exits, after.failed, after.quarantined) == (
        before.unexpected_exits,
        before.failed,
        before.quarantined,
    )
    assert "daemon did not run for " in service.log


# --- workers that hang ------------------------------------------------------------------------------------------------


def test_an_endless_predict_is_ended_with_its_stacks_in_the_log_and_not_begun_a_third_time(service: Service) -> None:
    with service.client() as client:
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match="took longer than predict_timeout"):
                client.infer("loop", ENDLESS)
        with pytest.raises(Internal, match="this content crashed or hung workers"):
            client.infer("loop", ENDLESS)
        # Others are served all the time.
        assert client.infer("loop", {"n": np.array([7])})["y"] == [7]
        until(lambda: "sessions/base.py" in service.log, "the stacks are told")
        assert "Fatal Python error: Aborted" in service.log
        assert model_status(service, "loop").quarantined >= 1


def test_a_stopped_worker_costs_at_most_the_request_that_it_runs(
    service: Service, questions: list[SampleRequest]
) -> None:
    victim = ready_workers(service, "mlp")[0].pid
    before = model_status(service, "mlp")
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
    wait_for_others(service, {victim})
    after = model_status(service, "mlp")
    assert (after.failed - before.failed, after.unexpected_exits - before.unexpected_exits) == (len(endings), 1)


def test_when_no_worker_answers_health_says_so_and_they_are_replaced(
    service: Service, questions: list[SampleRequest]
) -> None:
    stopped = pids(service)
    failed = model_status(service, "mlp").failed
    with service.client() as client:
        ask_all(client, "mlp", questions * WORKERS)
        assert (client.ready("mlp").ready, client.ready("mlp").reason) == (True, "")
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        assert "mlp" in until(lambda: client.ready("mlp").reason, "it is told that nobody answers")
        wait_for_others(service, stopped)
        assert "no reply to a ping" in service.log
        ask_all(client, "mlp", questions)
        assert (client.ready("mlp").ready, model_status(service, "mlp").failed) == (True, failed)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_a_damaged_store_costs_time_but_no_answer(
    service: Service, questions: list[SampleRequest], damage: str
) -> None:
    [store] = service.cache.glob("*/mlp.*/pages")
    before, failed = pids(service), model_status(service, "mlp").failed
    with Load(service.address, "mlp", questions) as load:
        load.wait_for(30)
        if damage == "truncated":
            os.truncate(store, 4096)
        else:
            with store.open("r+b") as file:
                file.seek(8192)
                file.write(b"\xff" * (store.stat().st_size - 8192))
        wait_for_others(service, before)
        load.wait_for(30)
    assert "the page store was changed or truncated" in service.log
    assert model_status(service, "mlp").failed == failed
    assert all(each.shared_bytes for each in ready_workers(service, "mlp"))


# --- the daemon -------------------------------------------------------------------------------------------------------


def test_a_client_learns_at_once_that_the_daemon_is_dead(service: Service, questions: list[SampleRequest]) -> None:
    """The last one: nobody serves any more."""
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


# --- files that vanish ------------------------------------------------------------------------------------------------


def test_a_cache_that_vanishes_costs_no_answer_and_another_model_is_not_loaded_for_it(
    zoo: Zoo, bare: BareEngine, tmp_path: Path
) -> None:
    good, path = zoo.path("two_inputs", "onnxruntime"), tmp_path / "model.onnx"
    shutil.copyfile(good, path)
    asked = bare.questions(good, pairs((2, 1)))
    with Service({"m": {"path": path, "workers": WORKERS}}) as service:
        service.ready()

        def loses_the_cache_and_a_worker() -> int:
            for each in service.cache.iterdir():
                shutil.rmtree(each) if each.is_dir() else each.unlink()
            victim = ready_workers(service, "m")[0].pid
            os.kill(victim, signal.SIGKILL)
            return victim

        def is_whole(victim: int) -> bool:
            now = {each.pid for each in ready_workers(service, "m")}
            return len(now) == WORKERS and victim not in now

        with service.client() as client:
            victim = loses_the_cache_and_a_worker()
            until(lambda: is_whole(victim), "the worker is replaced")
            assert "the copy of the model in the cache directory is missing" in service.log
            ask_all(client, "m", asked)
            models.tiny(path)
            victim = loses_the_cache_and_a_worker()
            note = until(lambda: model_status(service, "m").note, "the cause is told")
            assert f"{path}: the file has changed since it was loaded: expected sha256 " in note
            assert "weightctl update" in note
            ask_all(client, "m", asked)
            client.update("m", str(good))
            until(lambda: is_whole(victim), "the update serves")
            ask_all(client, "m", asked)
