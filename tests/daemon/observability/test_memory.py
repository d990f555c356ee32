from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from weightd_daemon.observability import memory
from weightd_daemon.observability.memory import (
    INTERVAL_S,
    MAX_AGE_S,
    MemoryFootprint,
    MemorySampler,
    MemoryScan,
    MemorySubject,
    TtlCache,
    measure_footprint,
    memory_subjects,
)
from weightd_daemon.platform.memory import ProcessMemory

from ..models.fakehost import ATTACHED, BUILT, CARD, HOLDER, W1, ModelHarness


class Kernel:
    """Fake kernel: process N uses N bytes, and the name of a file is its number of resident bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queries: list[int] = []
        monkeypatch.setattr(memory, "read_process_memory", self.read_process_memory)
        monkeypatch.setattr(memory, "resident_bytes", self.resident_bytes)

    def resident_bytes(self, path: Path) -> int | None:
        return int(path.name) if path.name != "none" else None

    def read_process_memory(self, pid: int) -> ProcessMemory | None:
        self.queries.append(pid)
        return ProcessMemory(pid, pid, 0) if pid != 13 else None


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([], MemoryFootprint(0, 0, 0, 0)),
        # Process 13 has exited.
        ([MemorySubject((1, 2, 13), 400, 0, Path("100"))], MemoryFootprint(3, 400, 300, 100)),
        # A copy without resident pages saves nothing, and a copy never causes negative savings.
        (
            [MemorySubject((1,), 400, 0, Path("0")), MemorySubject((2,), 50, 0, Path("60"))],
            MemoryFootprint(3, 450, 0, 60),
        ),
        ([MemorySubject((1,), 400, 100, None), MemorySubject((2,), 30, 10, None)], MemoryFootprint(3, 430, 320, 110)),
        (
            [MemorySubject((1,), 400, 100, None), MemorySubject((2,), 30, 0, Path("none"))],
            MemoryFootprint(3, 430, None, None),
        ),
    ],
)
@pytest.mark.usefixtures("kernel")
def test_footprint_of_model(measured: list[MemorySubject], expected: MemoryFootprint) -> None:
    assert measure_footprint(measured) == expected


def test_measurement_is_retried_after_thread_failure(kernel: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    start = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    sampler = MemorySampler(start, lambda: now)
    for _ in range(2):
        assert sampler.poll([1], dict).pss_bytes is None
    assert caplog.text.count("the limit of processes and threads is reached") == 1
    now, start.side_effect = INTERVAL_S, None
    assert sampler.poll([1], dict).pss_bytes is None
    start.call_args.args[0]()
    assert sampler.poll([1], dict).pss_bytes == 1


def test_measures_at_most_once_a_minute(kernel: Kernel) -> None:
    now = 0.0
    threads: list[Callable[[], None]] = []
    sampler = MemorySampler(threads.append, lambda: now)
    subject = {"m": [MemorySubject((1,), 400, 100, None)]}
    assert sampler.poll([7], lambda: subject).pss_bytes is None
    # The sampler starts no second measurement while one runs.
    now = 10 * INTERVAL_S
    assert sampler.poll([7], lambda: subject).footprints == {}
    assert (len(threads), kernel.queries) == (1, [])
    threads[0]()
    assert kernel.queries == [7, 1]
    found = sampler.poll([7, 13], dict)
    assert (found.pss_bytes, found.footprints) == (7, {"m": MemoryFootprint(1, 400, 300, 100)})
    assert len(threads) == 2
    threads[1]()
    now += INTERVAL_S - 1.0
    assert sampler.poll([13], lambda: subject).footprints == {}
    now += 1.0
    sampler.poll([13], lambda: subject)
    assert len(threads) == 3
    threads[2]()
    assert sampler.poll([], lambda: subject).pss_bytes is None


def test_failed_measurement_does_not_stop_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[Callable[[], None]] = []
    sampler = MemorySampler(threads.append, lambda: 100.0 * len(threads))
    sampler.poll([7], dict)
    monkeypatch.setattr(memory, "read_process_memory", mock.Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        threads[0]()
    sampler.poll([7], dict)
    assert len(threads) == 2


def test_poll_does_not_wait_for_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread reads the memory."""
    started, proceed = threading.Event(), threading.Event()
    readers: list[int] = []

    def slow(pid: int) -> ProcessMemory:
        readers.append(threading.get_ident())
        started.set()
        assert proceed.wait(60.0)
        return ProcessMemory(pid, pid, 0)

    monkeypatch.setattr(memory, "read_process_memory", slow)
    sampler = MemorySampler()
    assert sampler.poll([os.getpid()], dict).pss_bytes is None
    assert started.wait(60.0)
    assert sampler.poll([os.getpid()], dict).pss_bytes is None
    assert readers != [threading.get_ident()]
    [thread] = [each for each in threading.enumerate() if each.name == "memory"]
    proceed.set()
    thread.join(60.0)
    assert sampler.poll([], dict).pss_bytes == os.getpid()


def test_memory_subjects_of_models() -> None:
    cpu, card = ModelHarness().serving(), ModelHarness(CARD, devices=("ascend:0",)).serving()
    processes: dict[str, Any] = {name: SimpleNamespace(pid=pid) for pid, name in enumerate((HOLDER, W1), 10)}
    files: dict[str, Any] = {"digits.1": SimpleNamespace(store=Path("/store"))}
    shared = ATTACHED.shared_bytes
    # The other worker has just exited.
    assert memory_subjects([cpu.model], processes, files) == {
        "digits": [MemorySubject((10, 11), shared, 0, Path("/store"))]
    }
    # On a card there is no page store; the holder reports the size of its copy.
    assert memory_subjects([card.model], processes, files) == {
        "digits": [MemorySubject((10, 11), shared, BUILT.shared_bytes, None)]
    }


class CountingKernel:
    """Fake kernel that counts its queries."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queries: list[int] = []

    def read_process_memory(self, pid: int) -> ProcessMemory | None:
        self.queries.append(pid)
        return None if pid == 7 else ProcessMemory(1000 * pid + len(self.queries), pid, 0)


@pytest.fixture
def counting_kernel(monkeypatch: pytest.MonkeyPatch) -> CountingKernel:
    created = CountingKernel()
    monkeypatch.setattr(memory, "read_process_memory", created.read_process_memory)
    return created


def steps(one: MemoryScan) -> int:
    """Run the scan to its end; return the number of steps."""
    count = 1
    while not one.step():
        count += 1
    return count


def test_process_is_measured_once_within_cache_lifetime(counting_kernel: CountingKernel) -> None:
    measured = TtlCache(lambda: counting_kernel.now)
    scans = [MemoryScan("", [1, 2, 7], measured) for _ in range(16)]
    # The first scan takes one step for each process, so that the event loop can do other work in between.
    assert [steps(each) for each in scans] == [3] + [1] * 15
    assert counting_kernel.queries == [7, 2, 1]
    assert [each.memory_by_pid for each in scans] == [{7: None, 2: (2002, 2, 0), 1: (1003, 1, 0)}] * 16
    # Only the process that is new is measured.
    counting_kernel.now = MAX_AGE_S / 2
    late = MemoryScan("", [1, 3, 2], measured)
    assert (steps(late), late.memory_by_pid) == (2, {2: (2002, 2, 0), 3: (3004, 3, 0), 1: (1003, 1, 0)})
    counting_kernel.now = MAX_AGE_S
    assert steps(MemoryScan("", [1, 2], measured)) == 2
    assert counting_kernel.queries == [7, 2, 1, 3, 2, 1]


def test_expired_values_are_removed(counting_kernel: CountingKernel) -> None:
    measured = TtlCache(lambda: counting_kernel.now)
    for pid in range(1000):
        counting_kernel.now += MAX_AGE_S / 4
        steps(MemoryScan("", [pid], measured))
    assert len(vars(measured)["_values"]) <= 4
