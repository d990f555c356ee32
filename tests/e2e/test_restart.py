"""Restart of the daemon under a service manager: models stay loaded, and clients get right answers or an error."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import census
from testkit.managed import ManagedService
from testkit.waiting import until
from weightd import Client, RequestError, Unavailable

from .support import (
    ONE_ENGINE,
    BareEngine,
    SampleRequest,
    Watched,
    Zoo,
    ask_all,
    assert_same,
    children_of,
    left_behind,
    mlp_inputs,
    model_status,
    ready_workers,
)

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

WORKERS = 2


@pytest.fixture(scope="module")
def service(mlp: Path) -> Iterator[ManagedService]:
    table = {"path": mlp, "workers": WORKERS, "required": True, "predict_timeout": 2}
    with ManagedService({"mlp": table}) as service:
        service.ready()
        yield service


def processes_by_name(service: ManagedService) -> dict[str, int]:
    """Return the name and pid of each process of the serving generation."""
    (generation,) = model_status(service, "mlp").generations
    return {each.name: each.pid for each in generation.processes}


class Clients:
    """Client threads that send requests all the time and count the results; a wrong answer fails the test."""

    def __init__(self, address: str, questions: list[SampleRequest]) -> None:
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(address, questions)) for _ in range(2)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for_more(self) -> None:
        enough = self.ends["OK"] + 30
        until(lambda: self.ends["OK"] >= enough or self.wrong, "30 more requests are answered")

    def _ask(self, address: str, questions: list[SampleRequest]) -> None:
        while not self._stop.is_set():
            try:
                with Client(address, timeout=30) as client:
                    for question in questions:
                        assert_same(client.infer("mlp", question.inputs), question.answer)
                        self.ends["OK"] += 1
            except RequestError as error:
                self.ends[error.code] += 1
                self._stop.wait(0.05)
            except Exception as error:  # noqa: BLE001 - any error fails the test
                self.wrong.append(f"{type(error).__name__}: {error}")
                return


def test_notifies_service_manager(service: ManagedService) -> None:
    first = service.manager.wait_for_notification("READY=1")
    loading = [each for each in service.manager.notifications[:first] if each.startswith("STATUS=")]
    assert any("1 model is attaching" in each for each in loading), service.manager.notifications
    assert not any("mlp" in each for each in service.manager.notifications)
    assert any(each.startswith("EXTEND_TIMEOUT_USEC=") for each in service.manager.notifications[:first])
    service.manager.wait_for_notification("WATCHDOG=1")
    service.manager.wait_for_notification("STATUS=serving 1 models from 2 workers")
    os.kill(service.pid, signal.SIGHUP)
    reloading = service.manager.wait_for_notification("RELOADING=1", first)
    assert service.manager.notifications[reloading].startswith("MONOTONIC_USEC=")
    service.manager.wait_for_notification("READY=1", reloading)
    service.restart(signal.SIGTERM)
    stopping = service.manager.wait_for_notification("STOPPING=1", reloading)
    service.manager.wait_for_notification("READY=1", stopping)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_outlive_daemon(
    service: ManagedService, questions: list[SampleRequest], number: signal.Signals
) -> None:
    before = processes_by_name(service)
    with Clients(service.address, questions) as clients:
        for _ in range(2):
            clients.wait_for_more()
            assert service.restart(number) == (0 if number == signal.SIGTERM else -number)
        clients.wait_for_more()
    assert not clients.wrong
    assert set(clients.ends) <= {"OK", "UNAVAILABLE"}
    service.ready()
    assert processes_by_name(service) == before


def test_replaces_worker_that_does_not_reconnect(service: ManagedService, questions: list[SampleRequest]) -> None:
    before = processes_by_name(service)
    hung = ready_workers(service, "mlp")[0]
    os.kill(hung.pid, signal.SIGSTOP)
    service.restart(signal.SIGKILL)
    with service.client() as client:
        ask_all(client, "mlp", questions)  # by the other worker
    until(
        lambda: len(ready_workers(service, "mlp")) == WORKERS and hung.name not in processes_by_name(service),
        "the worker is replaced",
    )
    after = processes_by_name(service)
    assert {name: pid for name, pid in before.items() if name != hung.name}.items() <= after.items()


def test_reloads_models_of_workers_with_other_protocol(service: ManagedService, questions: list[SampleRequest]) -> None:
    before = processes_by_name(service)
    os.kill(service.pid, signal.SIGTERM)
    service.wait()
    (handover,) = service.cache.glob("*/handover")
    handover.write_text(json.dumps({**json.loads(handover.read_text()), "protocol": 99, "version": "9.9"}))
    with Watched(set(before.values())) as watched:
        service.start_again()
        until(lambda: not watched.survivors(), "the processes exit")
    service.ready()
    with service.client() as client:
        ask_all(client, "mlp", questions)
    assert not set(processes_by_name(service).values()) & set(before.values())
    assert "loading every model again: weightd 9.9 uses protocol 99 with its workers" in service.log


def test_replaces_killed_shim_and_reloads_models(service: ManagedService, questions: list[SampleRequest]) -> None:
    before = processes_by_name(service)
    (shim,) = census.shims(service.cache)
    os.kill(shim, signal.SIGKILL)
    with service.client() as client:

        def served() -> bool:
            try:
                ask_all(client, "mlp", questions)
            except Unavailable:
                return False
            return True

        until(served, "the daemon serves again")
    service.ready()
    assert not set(processes_by_name(service).values()) & set(before.values())
    service.restart(signal.SIGKILL)
    service.ready()


def test_update_survives_restart(service: ManagedService, zoo: Zoo, bare: BareEngine, mlp: Path) -> None:
    other = zoo.path("other_mlp", "onnxruntime")
    questions = bare.questions(other, mlp_inputs((1, 3)))
    with service.client() as client:
        client.update("mlp", path=str(other))
    until(lambda: len(model_status(service, "mlp").generations) == 1, "the old generation exits")
    before = processes_by_name(service)
    service.restart(signal.SIGKILL)
    with service.client() as client:
        ask_all(client, "mlp", questions)
        service.ready()
        assert processes_by_name(service) == before
        client.update("mlp", rollback=True)
        ask_all(client, "mlp", bare.questions(mlp, mlp_inputs((1, 3))))


def test_end_of_service_ends_all_processes(service: ManagedService) -> None:
    until(lambda: len(model_status(service, "mlp").generations) == 1, "the old generation exits")
    service.ready()
    assert len(census.shims(service.cache)) == 1
    service.restart(signal.SIGKILL)
    service.ready()
    os.kill(service.pid, signal.SIGTERM)
    assert service.wait() == 0
    with Watched(children_of(service.cache)) as watched:
        service.manager.forget()
        until(lambda: not watched.survivors(), "the processes exit")
    runtime = service.config.parent
    others = [str(runtime / name) for name in ("notify", "weightd.sock", "weightd.sock.unix")]
    until(lambda: left_behind(runtime, service.cache) == others, "no files are left")
    service.start_again()
    service.ready()
    assert model_status(service, "mlp").generations[0].number == 1


def test_start_fails_if_required_model_fails(tmp_path: Path, engine: str) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    with ManagedService({"broken": {"path": broken, "required": True}}) as service:
        assert service.wait() == 1
        assert not any(each == "READY=1" for each in service.manager.notifications)
        assert "a required model has failed" in service.log
