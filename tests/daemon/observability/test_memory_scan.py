from __future__ import annotations

import pytest

from weightd_daemon.observability import memory_scan
from weightd_daemon.observability.memory_scan import MAX_AGE_S, MemoryScan, TtlCache
from weightd_daemon.platform.memory import ProcessMemory


class Kernel:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[int] = []

    def read_process_memory(self, pid: int) -> ProcessMemory | None:
        self.asked.append(pid)
        return None if pid == 7 else ProcessMemory(1000 * pid + len(self.asked), pid, 0)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(memory_scan, "read_process_memory", made.read_process_memory)
    return made


def steps(one: MemoryScan) -> int:
    """Run the survey to its end; return how many steps it took."""
    count = 1
    while not one.step():
        count += 1
    return count


def test_a_process_is_measured_once_a_second_however_often_is_asked(kernel: Kernel) -> None:
    measured = TtlCache(lambda: kernel.now)
    surveys = [MemoryScan("", [1, 2, 7], measured) for _ in range(16)]
    # The first takes a step for each process: the loop does its other work between.
    assert [steps(each) for each in surveys] == [3] + [1] * 15
    assert kernel.asked == [7, 2, 1]
    assert [each.memory_by_pid for each in surveys] == [{7: None, 2: (2002, 2, 0), 1: (1003, 1, 0)}] * 16
    # One that has come since is measured alone.
    kernel.now = MAX_AGE_S / 2
    late = MemoryScan("", [1, 3, 2], measured)
    assert (steps(late), late.memory_by_pid) == (2, {2: (2002, 2, 0), 3: (3004, 3, 0), 1: (1003, 1, 0)})
    kernel.now = MAX_AGE_S
    assert steps(MemoryScan("", [1, 2], measured)) == 2
    assert kernel.asked == [7, 2, 1, 3, 2, 1]


def test_no_value_is_kept_that_is_of_no_use(kernel: Kernel) -> None:
    measured = TtlCache(lambda: kernel.now)
    for pid in range(1000):
        kernel.now += MAX_AGE_S / 4
        steps(MemoryScan("", [pid], measured))
    assert len(vars(measured)["_values"]) <= 4
