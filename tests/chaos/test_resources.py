"""Growth is noticed, and nothing else."""

from __future__ import annotations

import os
import subprocess

import pytest

from .resources import Usage, growth, usage

BEFORE = Usage(fds=30, threads=3, maps=200, rss=1000, pss=500)
TOLERANCE = Usage(fds=1, threads=0, maps=10, rss=100, pss=100)


def test_less_and_a_little_more_are_no_growth() -> None:
    assert growth(BEFORE, BEFORE, TOLERANCE) == []
    assert growth(BEFORE, Usage(fds=31, threads=3, maps=210, rss=1100, pss=600), TOLERANCE) == []
    assert growth(BEFORE, Usage(fds=1, threads=1, maps=1, rss=1, pss=1), TOLERANCE) == []


def test_more_is_growth() -> None:
    grown = growth(BEFORE, Usage(fds=32, threads=4, maps=211, rss=1101, pss=601), TOLERANCE)
    assert [each.split()[0] for each in grown] == ["fds", "threads", "maps", "rss", "pss"]


def test_usage_of_this_process() -> None:
    before = usage(os.getpid())
    read, write = os.pipe()
    after = usage(os.getpid())
    os.close(read)
    os.close(write)
    assert after.fds - before.fds == 2
    assert 0 < after.pss <= after.rss


def test_a_process_that_is_gone_has_no_usage() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(ProcessLookupError):
        usage(gone.pid)
