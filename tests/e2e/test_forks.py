"""Forked processes: the reported origin of each, and the replacement of a lost fork server or template."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.service import Service
from testkit.waiting import until
from weightd_protocol.messages.status import ForkServerStatus, ProcessStatus

from .support import (
    ONE_ENGINE,
    Load,
    SampleRequest,
    ask_all,
    kill_a_worker,
    model_status,
    processes,
    ready_workers,
)

pytestmark = pytest.mark.e2e

WORKERS = 2


@pytest.fixture
def service(mlp: Path) -> Iterator[Service]:
    with Service({"mlp": {"path": mlp, "workers": WORKERS}}, verbose=True) as service:
        service.ready()
        yield service


def fork_server(service: Service) -> ForkServerStatus:
    [server] = service.status().fork_servers
    return server


def all_processes(service: Service) -> list[ProcessStatus]:
    return [each for role in ("holder", "worker") for each in processes(service, "mlp", role)]


def origins(service: Service) -> dict[str, set[str | None]]:
    return {role: {each.origin for each in processes(service, "mlp", role)} for role in ("holder", "worker")}


def test_status_shows_origin_of_each_process(service: Service, engine: str) -> None:
    workers = "template" if engine == "onnxruntime" else "forked"
    assert origins(service) == {"holder": {"forked"}, "worker": {workers}}
    assert fork_server(service).forked == (1 if engine == "onnxruntime" else 1 + WORKERS)
    # All are children of the daemon, and each leads its own session.
    for each in all_processes(service):
        stat = Path(f"/proc/{each.pid}/stat").read_text("ascii", "replace").rpartition(") ")[2].split()
        assert (int(stat[1]), int(stat[3])) == (service.pid, each.pid)
        words = ["-m", "weightd_worker", "--role", each.role, "--parent", str(service.pid)]
        assert Path(f"/proc/{each.pid}/cmdline").read_text().rstrip("\0").split("\0")[1:] == words


def test_spawned_processes_report_reason(mlp: Path, questions: list[SampleRequest]) -> None:
    with Service({"mlp": {"path": mlp, "workers": WORKERS, "start": "spawn"}}) as service:
        service.ready()
        assert origins(service)["worker"] == {"spawned"}
        assert {each.origin_note for each in all_processes(service)} == {'start = "spawn"'}
        assert service.status().fork_servers == ()
        with service.client() as client:
            ask_all(client, "mlp", questions)


def test_forked_processes_outlive_killed_fork_server(service: Service, questions: list[SampleRequest]) -> None:
    before, names = fork_server(service), {each.name for each in ready_workers(service, "mlp")}
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: fork_server(service).pid not in (0, before.pid), "the daemon starts another fork server")
    assert {each.name for each in ready_workers(service, "mlp")} == names
    with Load(service.address, "mlp", questions) as load:
        kill_a_worker(service, load)
    service.ready()
    assert {each.origin_note for each in all_processes(service)} == {""}


@pytest.mark.long
@pytest.mark.engines("mindspore_lite")
def test_spawns_worker_if_fork_server_hangs(service: Service, questions: list[SampleRequest]) -> None:
    os.kill(fork_server(service).pid, signal.SIGSTOP)
    with Load(service.address, "mlp", questions) as load:
        kill_a_worker(service, load)
    service.ready()
    notes = {each.origin: each.origin_note for each in ready_workers(service, "mlp")}
    assert notes.keys() == {"forked", "spawned"}
    assert "exited before it forked this process" in notes["spawned"]


@ONE_ENGINE
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)], ids=["crashes", "hangs"]
)
def test_workers_outlive_their_template(
    service: Service, questions: list[SampleRequest], number: signal.Signals
) -> None:
    [holder] = processes(service, "mlp", "holder")
    with Load(service.address, "mlp", questions) as load:
        os.kill(holder.pid, number)
        load.wait_for(50)
        assert [each.number for each in model_status(service, "mlp").generations] == [1]
        os.kill(ready_workers(service, "mlp")[0].pid, signal.SIGKILL)
        until(
            lambda: [each.number for each in model_status(service, "mlp").generations] == [2],
            "the next generation serves",
        )
        load.wait_for(50)
    service.ready()
    assert origins(service) == {"holder": {"forked"}, "worker": {"template"}}
