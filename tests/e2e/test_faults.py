"""Faults other than a crash of a worker, while clients send requests: each request still ends correctly."""

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
A_WHILE = 10**5  # runs for some tenths of a second


@pytest.fixture(scope="module")
def service(mlp: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    loop = models.loop(tmp_path_factory.mktemp("loop") / "loop.onnx")
    tables: dict[str, dict[str, object]] = {
        # With two threads, workers cannot be forked from the holder; they share the pages of its store.
        "mlp": {"path": mlp, "workers": WORKERS, "threads": 2, "predict_timeout": 2.0, "watchdog": 2.0},
        "loop": {"path": loop, "workers": WORKERS, "predict_timeout": 1.0},
    }
    with core_dumps(), Service(tables, verbose=True) as service:
        service.ready()
        yield service


def submit_and_see_it_run(client: Client, service: Service) -> Pending:
    """Return a request that a worker runs; on a busy machine a request may end before the status shows it."""

    def attempt() -> Pending | None:
        pending = client.submit("loop", {"n": np.array([A_WHILE])})
        until(
            lambda: pending.done() or any(each.in_flight for each in ready_workers(service, "loop")), "the request runs"
        )
        return None if pending.done() else pending

    return until(attempt, "the status shows a running request")


def pids(service: Service) -> set[int]:
    return {each.pid for each in ready_workers(service, "mlp")}


def wait_for_new_workers(service: Service, old: set[int]) -> None:
    until(lambda: len(now := pids(service)) == WORKERS and not now & old, "new workers are ready")


# --- requests that a client cancels or abandons -----------------------------------------------------------------------


def test_cancelled_requests_end_at_once(service: Service) -> None:
    with service.client() as client:
        running = [client.submit("loop", {"n": np.array([A_WHILE + number])}) for number in range(2)]
        waiting = [client.submit("loop", {"n": np.array([number])}) for number in range(4)]
        waiting[1].cancel()
        running[0].cancel()
        for cancelled in (waiting[1], running[0]):
            with pytest.raises(Cancelled, match="cancelled by the client"):
                cancelled.result()
        assert [int(waiting[number].result()["y"][0]) for number in (0, 2, 3)] == [0, 2, 3]


def test_drops_requests_of_disconnected_client(service: Service) -> None:
    """The requests do not hang: with more lost workers the daemon would isolate the user who runs the tests."""
    with service.client() as other:
        client = service.client()
        kept = [client.submit("loop", {"n": np.array([A_WHILE + number])}) for number in range(20)]
        until(lambda: model_status(service, "loop").queued > 10, "the requests are queued")
        client.close()
        until(lambda: model_status(service, "loop").queued == 0, "the requests are dropped")
        assert other.infer("loop", {"n": np.array([3])})["y"] == [3]
        assert len(kept) == 20


# --- core dumps -------------------------------------------------------------------------------------------------------


def test_core_dumps_are_disabled_in_all_processes(service: Service) -> None:
    found = {f"{role} {pid}": core_dump_of(pid) for pid, role in service.roles().items()}
    assert {key.split(" ")[0] for key in found} >= {"daemon", "holder", "worker", "fork", "proxy"}, found
    assert [key for key, each in found.items() if each != (0, 0)] == []


# --- the daemon is stopped --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["daemon", "daemon-and-workers"])
def test_stopped_daemon_does_not_time_out_workers(service: Service, whole: bool) -> None:
    """Covers SIGSTOP, debuggers, `docker pause` and the freezer: each stop is longer than predict_timeout."""
    workers = [each.pid for each in ready_workers(service, "loop")]
    before = model_status(service, "loop")
    stopped = [service.pid, *(workers if whole else ())]
    with service.client() as client:
        # Only twice, because an input that has crashed two workers is quarantined.
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


def test_kills_endless_predict_and_quarantines_input(service: Service) -> None:
    with service.client() as client:
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match="took longer than predict_timeout"):
                client.infer("loop", ENDLESS)
        with pytest.raises(Internal, match="this content crashed or hung workers"):
            client.infer("loop", ENDLESS)
        # The daemon keeps serving other requests.
        assert client.infer("loop", {"n": np.array([7])})["y"] == [7]
        until(lambda: "sessions/base.py" in service.log, "the log has the stacks")
        assert "Fatal Python error: Aborted" in service.log
        assert model_status(service, "loop").quarantined >= 1


def test_stopped_worker_loses_at_most_its_running_request(service: Service, questions: list[SampleRequest]) -> None:
    victim = ready_workers(service, "mlp")[0].pid
    before = model_status(service, "mlp")
    endings: list[str] = []
    with service.client() as client:
        # More requests than the other worker answers before the first one is stopped.
        pending = [client.submit("mlp", each.inputs) for each in questions * 30]
        os.kill(victim, signal.SIGSTOP)
        for each, question in zip(pending, questions * 30, strict=True):
            try:
                assert each.result()["y"].tobytes() == question.answer["y"].tobytes()
            except DeadlineExceeded as error:
                endings.append(str(error))
    assert len(endings) <= 1
    assert all("predict_timeout" in each for each in endings)
    wait_for_new_workers(service, {victim})
    after = model_status(service, "mlp")
    assert (after.failed - before.failed, after.unexpected_exits - before.unexpected_exits) == (len(endings), 1)


def test_replaces_workers_that_do_not_answer_pings(service: Service, questions: list[SampleRequest]) -> None:
    stopped = pids(service)
    failed = model_status(service, "mlp").failed
    with service.client() as client:
        ask_all(client, "mlp", questions * WORKERS)
        assert (client.ready("mlp").ready, client.ready("mlp").reason) == (True, "")
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        assert "mlp" in until(lambda: client.ready("mlp").reason, "health reports that no worker answers")
        wait_for_new_workers(service, stopped)
        assert "no reply to a ping" in service.log
        ask_all(client, "mlp", questions)
        assert (client.ready("mlp").ready, model_status(service, "mlp").failed) == (True, failed)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_damaged_page_store_loses_no_answer(service: Service, questions: list[SampleRequest], damage: str) -> None:
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
        wait_for_new_workers(service, before)
        load.wait_for(30)
    assert "the page store was changed or truncated" in service.log
    assert model_status(service, "mlp").failed == failed
    assert all(each.shared_bytes for each in ready_workers(service, "mlp"))


# --- the daemon -------------------------------------------------------------------------------------------------------


def test_client_notices_dead_daemon_at_once(service: Service, questions: list[SampleRequest]) -> None:
    """Keep this test behind the others of this service: it kills the daemon."""
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


def test_deleted_cache_loses_no_answer(zoo: Zoo, bare: BareEngine, tmp_path: Path) -> None:
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
            note = until(lambda: model_status(service, "m").note, "the status shows the reason")
            assert f"{path}: the file has changed since it was loaded: expected sha256 " in note
            assert "weightctl update" in note
            ask_all(client, "m", asked)
            client.update("m", str(good))
            until(lambda: is_whole(victim), "the update serves")
            ask_all(client, "m", asked)
