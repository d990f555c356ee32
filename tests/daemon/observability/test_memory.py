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
    """Says of process N that it has N bytes, and of a file that as many of it are in memory as its name says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        monkeypatch.setattr(memory, "read_process_memory", self.read_process_memory)
        monkeypatch.setattr(memory, "resident_bytes", self.resident_bytes)

    def resident_bytes(self, path: Path) -> int | None:
        return int(path.name) if path.name != "none" else None

    def read_process_memory(self, pid: int) -> ProcessMemory | None:
        self.asked.append(pid)
        return ProcessMemory(pid, pid, 0) if pid != 13 else None


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([], MemoryFootprint(0, 0, 0, 0)),
        # One that is gone meanwhile takes nothing.
        ([MemorySubject((1, 2, 13), 400, 0, Path("100"))], MemoryFootprint(3, 400, 300, 100)),
        # A copy of which nothing is in memory saves nothing; and no copy is ever a loss.
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
def test_what_a_model_takes(measured: list[MemorySubject], expected: MemoryFootprint) -> None:
    assert measure_footprint(measured) == expected


def test_without_a_thread_it_is_measured_later(kernel: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    start = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    known = MemorySampler(start, lambda: now)
    for _ in range(2):
        assert known.poll([1], dict).pss_bytes is None
    assert caplog.text.count("the limit of processes and threads is reached") == 1
    now, start.side_effect = INTERVAL_S, None
    assert known.poll([1], dict).pss_bytes is None
    start.call_args.args[0]()
    assert known.poll([1], dict).pss_bytes == 1


def test_it_is_measured_once_a_minute_at_most_and_who_asks_is_told_what_is_known(kernel: Kernel) -> None:
    now = 0.0
    begun: list[Callable[[], None]] = []
    knows = MemorySampler(begun.append, lambda: now)
    subject = {"m": [MemorySubject((1,), 400, 100, None)]}
    assert knows.poll([7], lambda: subject).pss_bytes is None
    # It takes as long as it takes, and nobody begins again meanwhile.
    now = 10 * INTERVAL_S
    assert knows.poll([7], lambda: subject).footprints == {}
    assert (len(begun), kernel.asked) == (1, [])
    begun[0]()
    assert kernel.asked == [7, 1]
    found = knows.poll([7, 13], dict)
    assert (found.pss_bytes, found.footprints) == (7, {"m": MemoryFootprint(1, 400, 300, 100)})
    assert len(begun) == 2
    begun[1]()
    now += INTERVAL_S - 1.0
    assert knows.poll([13], lambda: subject).footprints == {}
    now += 1.0
    knows.poll([13], lambda: subject)
    assert len(begun) == 3
    begun[2]()
    assert knows.poll([], lambda: subject).pss_bytes is None


def test_a_measurement_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Callable[[], None]] = []
    knows = MemorySampler(begun.append, lambda: 100.0 * len(begun))
    knows.poll([7], dict)
    monkeypatch.setattr(memory, "read_process_memory", mock.Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        begun[0]()
    knows.poll([7], dict)
    assert len(begun) == 2


def test_whoever_asks_does_not_wait_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another thread that reads."""
    said, go_on = threading.Event(), threading.Event()
    readers: list[int] = []

    def slow(pid: int) -> ProcessMemory:
        readers.append(threading.get_ident())
        said.set()
        assert go_on.wait(60.0)
        return ProcessMemory(pid, pid, 0)

    monkeypatch.setattr(memory, "read_process_memory", slow)
    knows = MemorySampler()
    assert knows.poll([os.getpid()], dict).pss_bytes is None
    assert said.wait(60.0)
    assert knows.poll([os.getpid()], dict).pss_bytes is None
    assert readers != [threading.get_ident()]
    [thread] = [each for each in threading.enumerate() if each.name == "memory"]
    go_on.set()
    thread.join(60.0)
    assert knows.poll([], dict).pss_bytes == os.getpid()


def test_which_processes_and_which_copies_there_are() -> None:
    stage, card = ModelHarness().serving(), ModelHarness(CARD, devices=("ascend:0",)).serving()
    processes: dict[str, Any] = {name: SimpleNamespace(pid=pid) for pid, name in enumerate((HOLDER, W1), 10)}
    files: dict[str, Any] = {"digits.1": SimpleNamespace(store=Path("/store"))}
    shared = ATTACHED.shared_bytes
    # The other worker has just gone.
    assert memory_subjects([stage.model], processes, files) == {
        "digits": [MemorySubject((10, 11), shared, 0, Path("/store"))]
    }
    # On a card there is no file: what the copy takes is what the holder says.
    assert memory_subjects([card.model], processes, files) == {
        "digits": [MemorySubject((10, 11), shared, BUILT.shared_bytes, None)]
    }


class CountingKernel:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[int] = []

    def read_process_memory(self, pid: int) -> ProcessMemory | None:
        self.asked.append(pid)
        return None if pid == 7 else ProcessMemory(1000 * pid + len(self.asked), pid, 0)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> CountingKernel:
    made = CountingKernel()
    monkeypatch.setattr(memory, "read_process_memory", made.read_process_memory)
    return made


def steps(one: MemoryScan) -> int:
    """Run the survey to its end; return how many steps it took."""
    count = 1
    while not one.step():
        count += 1
    return count


def test_a_process_is_measured_once_a_second_however_often_is_asked(counting: CountingKernel) -> None:
    measured = TtlCache(lambda: counting.now)
    surveys = [MemoryScan("", [1, 2, 7], measured) for _ in range(16)]
    # The first takes a step for each process: the loop does its other work between.
    assert [steps(each) for each in surveys] == [3] + [1] * 15
    assert counting.asked == [7, 2, 1]
    assert [each.memory_by_pid for each in surveys] == [{7: None, 2: (2002, 2, 0), 1: (1003, 1, 0)}] * 16
    # One that has come since is measured alone.
    counting.now = MAX_AGE_S / 2
    late = MemoryScan("", [1, 3, 2], measured)
    assert (steps(late), late.memory_by_pid) == (2, {2: (2002, 2, 0), 3: (3004, 3, 0), 1: (1003, 1, 0)})
    counting.now = MAX_AGE_S
    assert steps(MemoryScan("", [1, 2], measured)) == 2
    assert counting.asked == [7, 2, 1, 3, 2, 1]


def test_no_value_is_kept_that_is_of_no_use(counting: CountingKernel) -> None:
    measured = TtlCache(lambda: counting.now)
    for pid in range(1000):
        counting.now += MAX_AGE_S / 4
        steps(MemoryScan("", [pid], measured))
    assert len(vars(measured)["_values"]) <= 4
