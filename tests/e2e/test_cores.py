"""A model on two sets of cores: placement of holders and workers, and sharing of the weights."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from testkit.managed import ManagedService
from testkit.service import Service
from testkit.waiting import until
from weightd_common.devices import format_cpulist
from weightd_protocol.messages.status import ProcessStatus

from .support import MLP_WEIGHT_BYTES, ONE_ENGINE, Load, SampleRequest, model_status, ready_workers

CORES = sorted(os.sched_getaffinity(0))[:2]
SETS = {f"cpu:{number}": str(core) for number, core in enumerate(CORES)}

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(len(SETS) < 2, reason="there is only one core")]


S = TypeVar("S", bound=Service)


def serve(mlp: Path, kind: type[S], **keys: object) -> S:
    table = {"path": mlp, "devices": list(SETS), **keys}
    return kind({"mlp": table}, devices={name: {"cpus": cpus} for name, cpus in SETS.items()})


def cores_of(pid: int) -> set[str]:
    """Return the cores on which the threads of a process may run."""
    status = [(task / "status").read_text("ascii") for task in Path(f"/proc/{pid}/task").iterdir()]
    return {re.findall(r"Cpus_allowed_list:\s*(.+)", each)[0] for each in status}


def assert_placed(processes: list[ProcessStatus], places: Mapping[str, str]) -> None:
    for each in processes:
        assert cores_of(each.pid) == {places[each.device]}, each


def kill_one(service: Service) -> None:
    """Kill the worker on the second set; check that its replacement serves there."""
    victim = next(each for each in ready_workers(service, "mlp") if each.device == "cpu:1")
    os.kill(victim.pid, signal.SIGKILL)

    def replacement_serves() -> bool:
        there = [each for each in ready_workers(service, "mlp") if each.device == "cpu:1"]
        return bool(there) and there[0].name != victim.name and there[0].served > 0

    until(replacement_serves, "the replacement serves")
    workers = ready_workers(service, "mlp")
    assert [each.device for each in workers] == list(SETS)
    assert_placed(workers, SETS)


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.long), 2])
def test_one_copy_serves_on_both_core_sets(mlp: Path, questions: list[SampleRequest], threads: int) -> None:
    with serve(mlp, Service, threads=threads) as service:
        service.ready()
        [generation] = model_status(service, "mlp").generations
        assert [(each.role, each.device) for each in generation.processes] == [
            ("holder", "cpu"),
            ("worker", "cpu:0"),
            ("worker", "cpu:1"),
        ]
        assert_placed(list(generation.processes), {**SETS, "cpu": format_cpulist(CORES)})
        with Load(service.address, "mlp", questions) as load:
            load.wait_for(20)
            kill_one(service)
        workers = ready_workers(service, "mlp")
        assert all((each.shared_bytes or 0) >= 0.98 * MLP_WEIGHT_BYTES for each in workers)


@ONE_ENGINE
def test_next_daemon_keeps_placement(mlp: Path, questions: list[SampleRequest]) -> None:
    with serve(mlp, ManagedService) as service:
        service.ready()
        before = [(each.pid, each.device) for each in ready_workers(service, "mlp")]
        service.restart(signal.SIGKILL)
        service.ready()
        assert [(each.pid, each.device) for each in ready_workers(service, "mlp")] == before
        with Load(service.address, "mlp", questions):
            kill_one(service)


@ONE_ENGINE
def test_each_core_set_has_its_own_copy(mlp: Path, questions: list[SampleRequest]) -> None:
    with serve(mlp, Service, workers=2, copies="each") as service, Load(service.address, "mlp", questions) as load:
        service.ready()
        load.wait_for(20)
        generations = model_status(service, "mlp").generations
        assert [each.device for each in generations] == ["cpu:0", "cpu:1"]
        for each in generations:
            assert [(process.role, process.device) for process in each.processes] == [
                ("holder", each.device),
                *[("worker", each.device)] * 2,
            ]
            assert_placed(list(each.processes), SETS)
