"""Tests of the comparison of shared memory with plain processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testkit import looks
from testkit.looks import MB
from weightd_common.dashboard.memory import MemoryUsage, model_memory, service_memory

sizes = st.integers(0, 10**12)


def test_plain_processes_have_a_copy_each() -> None:
    digits = looks.model("digits", looks.processes("digits", 4, private=10 * MB, weights=200 * MB), copy=200 * MB)
    assert model_memory(digits) == MemoryUsage(
        copy_bytes=200 * MB,
        workers=4,
        private_bytes=40 * MB,
        other_bytes=10 * MB,
        without_sharing_bytes=4 * (10 + 200) * MB,
        processes=4,
    )


# The hypothesis release for Python 3.7 may report too much data if it starts with examples of an earlier run.
@settings(suppress_health_check=[HealthCheck.data_too_large])
@given(st.integers(1, 50), sizes, sizes)
def test_parts_add_up_to_total(workers: int, private: int, weights: int) -> None:
    processes = looks.processes("m", workers, private, weights)
    memory = model_memory(looks.model("m", processes, copy=weights))
    assert memory is not None
    assert memory.total_bytes == sum(each.pss_bytes or 0 for each in processes)
    assert min(memory.copy_bytes, memory.private_bytes, memory.other_bytes) >= 0


def test_copy_on_disk_saves_nothing() -> None:
    processes = looks.processes("m", 2, private=10 * MB, weights=0)
    waiting = [replace(each, shared_bytes=200 * MB) for each in processes]
    assert model_memory(looks.model("m", waiting, copy=0)) == MemoryUsage(0, 0, 0, 30 * MB, 30 * MB, 2)


def test_process_without_sharing_counts_as_it_is() -> None:
    processes = [replace(each, shared_bytes=0) for each in looks.processes("m", 2, private=10 * MB, weights=0)]
    assert model_memory(looks.model("m", processes[1:], copy=0)) == MemoryUsage(0, 0, 0, 20 * MB, 20 * MB, 2)
    one_does_not = [*looks.processes("m", 1, private=10 * MB, weights=50 * MB), processes[1]]
    assert model_memory(looks.model("m", one_does_not, copy=50 * MB)) == MemoryUsage(
        50 * MB, 1, 10 * MB, 20 * MB, (10 + 50 + 10) * MB, 2
    )


def test_adds_memory_of_card() -> None:
    processes = looks.processes("m", 2, private=10 * MB, weights=0)
    on_card = [processes[0], *(replace(each, shared_bytes=500 * MB) for each in processes[1:])]
    memory = model_memory(looks.model("m", on_card, copy=500 * MB, device="ascend:0"))
    assert memory == MemoryUsage(500 * MB, 2, 20 * MB, 10 * MB, 2 * (10 + 500) * MB, 2)


def test_unknown_memory_is_not_guessed() -> None:
    assert model_memory(looks.model("m", looks.processes("m", 2, MB, MB), copy=None)) is None
    assert model_memory(looks.model("m")) is None


def test_service_includes_daemon_and_fork_servers() -> None:
    model = looks.model("m", looks.processes("m", 2, private=10 * MB, weights=90 * MB), copy=90 * MB)
    memory = service_memory(looks.status(1.0, model))
    assert memory == MemoryUsage(90 * MB, 2, 20 * MB, 10 * MB + 30 * MB, 200 * MB, 2)


def test_counts_compared_processes() -> None:
    sharing = looks.model("a", looks.processes("a", 3, private=10 * MB, weights=90 * MB), copy=90 * MB)
    alone = [replace(each, shared_bytes=0) for each in looks.processes("b", 9, private=20 * MB, weights=0)[1:]]
    memory = service_memory(looks.status(1.0, sharing, looks.model("b", alone, copy=0)))
    assert memory is not None
    assert (memory.workers, memory.processes, memory.without_sharing_bytes) == (3, 12, (3 * 100 + 9 * 20) * MB)


def test_counts_ranks_but_not_holders() -> None:
    holder, *two = looks.processes("m", 2, private=10 * MB, weights=0)
    ranks = [replace(each, role="rank", shared_bytes=None) for each in two]
    memory = model_memory(looks.model("m", [holder, *ranks], copy=0))
    assert memory is not None
    assert (memory.workers, memory.processes) == (0, 2)


def test_counts_shared_process_once() -> None:
    processes = looks.processes("m", 1, private=10 * MB, weights=0)[1:]
    models = [looks.model(name, processes, group="g") for name in ("a", "b")]
    memory = service_memory(looks.status(1.0, *models))
    assert memory is not None
    assert memory.total_bytes == (10 + 30) * MB


def test_tenant_view_has_no_memory() -> None:
    assert service_memory(looks.status(1.0, pid=0)) is None


@pytest.mark.parametrize(("origin", "weights_twice"), [("template", False), ("forked", True)])
def test_plain_process_owns_memory_shared_by_forks(origin: str, weights_twice: bool) -> None:
    workers = [
        replace(each, anonymous_bytes=130 * MB, origin=origin)
        for each in looks.processes("m", 2, private=10 * MB, weights=90 * MB)[1:]
    ]
    memory = model_memory(looks.model("m", workers, copy=90 * MB))
    assert memory is not None
    # The weights of a template are anonymous memory.
    assert memory.without_sharing_bytes == 2 * (130 + (90 if weights_twice else 0)) * MB
