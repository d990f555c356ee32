"""Measurement of a process's resources, and detection of growth."""

from __future__ import annotations

import mmap
import os
import subprocess

import pytest

from .resources import MIB, Usage, growth, own_by_mapping, usage

BEFORE = Usage(fds=30, threads=3, maps=200, rss=1000, pss=500)
TOLERANCE = Usage(fds=1, threads=0, maps=10, rss=100, pss=100)


@pytest.mark.parametrize(
    ("after", "grown"),
    [
        (BEFORE, []),
        (Usage(fds=31, threads=3, maps=210, rss=1100, pss=600), []),
        (Usage(fds=1, threads=1, maps=1, rss=1, pss=1), []),
        (Usage(fds=32, threads=4, maps=211, rss=1101, pss=601), ["fds", "threads", "maps", "rss", "pss"]),
    ],
)
def test_growth_beyond_tolerance(after: Usage, grown: list[str]) -> None:
    assert [each.split()[0] for each in growth(BEFORE, after, TOLERANCE)] == grown


def test_usage_of_running_and_exited_process() -> None:
    before = usage(os.getpid())
    read, write = os.pipe()
    after = usage(os.getpid())
    os.close(read)
    os.close(write)
    assert after.fds - before.fds == 2
    assert 0 < after.pss <= after.rss
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(ProcessLookupError):
        usage(gone.pid)


def test_private_memory_by_kind_of_mapping() -> None:
    before = own_by_mapping(os.getpid())
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE) as private, mmap.mmap(_region(4 * MIB), 4 * MIB) as region:
        private.write(b"x" * len(private))
        region.write(b"x" * len(region))
        after = own_by_mapping(os.getpid())
    assert after["regions"] - before.get("regions", 0) == 4 * MIB
    # The kernel chooses the address, which may look like an arena's; and other memory may have been freed.
    grown = [after.get(kind, 0) - before.get(kind, 0) for kind in ("anonymous", "arenas")]
    assert sum(grown) >= 56 * MIB
    with pytest.raises(ProcessLookupError):
        own_by_mapping(2**22 + 1)


def _region(size: int) -> int:
    descriptor = os.memfd_create("weightd")
    os.ftruncate(descriptor, size)
    return descriptor
