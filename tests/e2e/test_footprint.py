"""Memory of a service compared with the same number of plain engine processes, for small and large models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from testkit import memory, mindir, models
from testkit.plain import PlainProcess
from testkit.service import Service
from testkit.waiting import until

from .support import Arrays, mlp_inputs

pytestmark = pytest.mark.e2e

REQUESTS = 5  # of each process, before its memory is measured


class Case(NamedTuple):
    """A model, a request, and a number of workers with which the service must not use more memory."""

    write: Callable[[Path], Path]
    inputs: Arrays
    workers: int


CASES = {
    # The whole service counts. Without workers (daemon, proxy, fork server) it takes as much memory as three plain
    # processes of a small model, so the small models have six workers.
    "10 KB": Case(models.tiny, mlp_inputs((1,), 64)[0], 6),
    "10 MB": Case(models.convolutions, {"x": mlp_inputs((3 * 224,), 224)[0]["x"].reshape(1, 3, 224, 224)}, 6),
    "200 MB": Case(models.mlp, mlp_inputs((1,), 2048)[0], 3),
}


@pytest.mark.engines("onnxruntime")
@pytest.mark.parametrize("size", ["10 KB", pytest.param("200 MB", marks=pytest.mark.long)])
def test_onnx_runtime_uses_no_more_memory_than_plain_processes(size: str, engine: str, tmp_path: Path) -> None:
    compare(size, engine, tmp_path)


@pytest.mark.engines("mindspore_lite")
@pytest.mark.parametrize("size", [pytest.param("10 KB", marks=pytest.mark.long), "10 MB"])
def test_mindspore_lite_uses_no_more_memory_than_plain_processes(size: str, engine: str, tmp_path: Path) -> None:
    compare(size, engine, tmp_path)


SELF_TEST_BYTES = 128 * 2**20  # two batches of 4096 rows of 16 KiB, with all activations in memory at once


@pytest.mark.engines("onnxruntime")
def test_worker_frees_memory_of_self_test_once_idle(engine: str, tmp_path: Path) -> None:
    path = models.thick(tmp_path / "model.onnx")
    with Service({"m": {"path": path, "workers": 1}}) as service:
        service.ready()
        [status] = service.status().models
        pids = [each.pid for each in status.generations[0].processes]
        assert pids

        def is_freed() -> bool:
            return max(map(memory.pss_anonymous, pids)) < SELF_TEST_BYTES // 2

        until(is_freed, "the workers free the memory of the self-test")


def compare(size: str, engine: str, tmp_path: Path) -> None:
    case = CASES[size]
    path = case.write(tmp_path / "model.onnx")
    if engine == "mindspore_lite":
        python = mindir.interpreter()
        assert python, mindir.HOW_TO_GET_IT
        path = mindir.convert(path, tmp_path / "model.mindir", python)
    plain = plain_processes(path, engine, case)
    with Service({"model": {"path": path, "workers": case.workers}}) as service, service.client() as client:
        service.ready()

        def all_have_served() -> bool:
            for pending in [client.submit("model", case.inputs) for _ in range(2 * case.workers)]:
                pending.result()
            return all(each.served >= REQUESTS for each in service.processes() if each.role == "worker")

        until(all_have_served, "each worker has served")
        held, roles = service.pss_at_rest(), service.roles()
    assert sum(held.values()) <= plain, {f"{roles[pid]} {pid}": size for pid, size in held.items()}


def plain_processes(path: Path, engine: str, case: Case) -> int:
    """Return the minimum bytes of as many plain processes: the first one, plus the unshared memory of the others."""
    with PlainProcess(path, engine) as process:
        process.repeat(case.inputs, REQUESTS)
        return memory.pss(process.pid) + (case.workers - 1) * memory.pss_anonymous(process.pid)
