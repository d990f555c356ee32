from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from weightd_daemon.observability import memory
from weightd_daemon.observability.memory import (
    CPU_SHARE,
    INTERVAL_S,
    MAX_AGE_S,
    MemoryFootprint,
    MemoryReader,
    MemorySampler,
    MemoryScan,
    MemorySubject,
    measure_footprint,
    memory_subjects,
)
from weightd_daemon.platform.event_loop import EventLoop
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


class ReaderHarness:
    """Memory reader with a fake kernel and clock; the test runs the measurements, which take `cost_s` for each process.

    Attributes:
        queries: the measured processes.
        ended: how many measurements have ended.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.cost_s = 0.0
        self.queries: list[int] = []
        self.ended = 0
        self.started: list[Callable[[], None]] = []
        self.loop = EventLoop()
        self.reader = MemoryReader(self.loop, self.on_measured, self.started.append, lambda: self.now)
        monkeypatch.setattr(memory, "read_process_memory", self.read_process_memory)

    def read_process_memory(self, pid: int) -> ProcessMemory | None:
        self.queries.append(pid)
        self.now += self.cost_s
        return None if pid == 7 else ProcessMemory(1000 * pid, pid, 0)

    def on_measured(self) -> None:
        self.ended += 1

    def run(self) -> None:
        """Run the measurement that was started, as a thread would, and let the loop notice its end."""
        self.started.pop()()
        self.loop.run_once(0.0)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReaderHarness]:
    created = ReaderHarness(monkeypatch)
    yield created
    created.loop.close()


def test_processes_are_measured_in_background(harness: ReaderHarness) -> None:
    assert harness.reader.find([1, 2, 7]) is None
    # The caller has not waited for the kernel, and one measurement at a time is enough.
    assert harness.reader.find([1, 2, 7]) is None
    assert (harness.queries, len(harness.started)) == ([], 1)
    harness.run()
    assert harness.ended == 1
    assert harness.reader.find([1, 2, 7]) == {1: (1000, 1, 0), 2: (2000, 2, 0), 7: None}


def test_process_is_measured_once_while_its_memory_is_kept(harness: ReaderHarness) -> None:
    harness.reader.find([1, 2])
    harness.run()
    harness.now = MAX_AGE_S / 2
    assert harness.reader.find([2, 3]) is None
    harness.run()
    assert harness.reader.find([1, 2, 3]) is not None
    assert harness.queries == [1, 2, 3]
    harness.now = MAX_AGE_S
    assert harness.reader.find([1, 3]) is None
    harness.run()
    assert harness.queries == [1, 2, 3, 1]


def test_measuring_takes_limited_share_of_a_core(harness: ReaderHarness) -> None:
    harness.cost_s = 0.5
    for _ in range(1000):
        if harness.reader.find([1, 2]) is None:
            harness.run()
        harness.now += 0.1
    spent_s = harness.cost_s * len(harness.queries)
    assert 0.5 * CPU_SHARE <= spent_s / harness.now <= 1.1 * CPU_SHARE


def test_page_stores_are_measured(harness: ReaderHarness, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.write_bytes(bytes(mmap.PAGESIZE))
    scan = MemoryScan("", [1, store], harness.reader.find)
    assert not scan.is_complete()
    harness.run()
    assert scan.is_complete()
    assert (scan.pss_bytes(1), scan.resident_bytes(store)) == (1000, mmap.PAGESIZE)
    # A process that was started meanwhile is unknown.
    assert (scan.pss_bytes(2), scan.resident_bytes(tmp_path)) == (None, None)


def test_memory_is_unknown_without_a_thread(harness: ReaderHarness) -> None:
    def fail(target: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    reader = MemoryReader(harness.loop, harness.on_measured, fail, lambda: harness.now)
    assert reader.find([1]) is None
    harness.loop.run_once(0.0)
    assert (harness.ended, reader.find([1])) == (1, {1: None})


def test_expired_values_are_removed(harness: ReaderHarness) -> None:
    for pid in range(1000):
        harness.now += MAX_AGE_S / 4
        harness.reader.find([pid])
        harness.run()
    assert len(vars(harness.reader)["_kept"]) <= 5
