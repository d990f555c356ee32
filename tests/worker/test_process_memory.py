"""Tests of retained and released memory, in separate processes because malloc settings are permanent."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from weightd_worker import process_memory
from weightd_worker.pagesharing.libc import PAGE, unsupported_reason
from weightd_worker.process_memory import is_unchanged, library_mappings

pytestmark = pytest.mark.skipif(bool(unsupported_reason()), reason="knows the malloc of glibc only")

_BEFORE = """
import resource
import numpy as np
from weightd_worker import pagesharing
from weightd_worker.process_memory import MAX_RETAINED_BYTES, MallocTuner, private_bytes
pagesharing.prepare()
asked = []
tuner = MallocTuner(lambda: asked.append(1))

def predict(nbytes):
    inputs = np.ones(nbytes, np.uint8)
    return inputs + inputs

def faults(times, nbytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        predict(nbytes)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def hole(nbytes, count=20):
    "Memory that is free, but not at the end of the heap."
    blocks = [np.ones(nbytes, np.uint8) for _ in range(count)]
    end = np.ones(500_000, np.uint8)
    del blocks
    return end
"""


def _run(code: str) -> None:
    subprocess.run([sys.executable, "-c", _BEFORE + code], check=True)


def test_does_nothing_before_it_retains_memory() -> None:
    _run("""
tuner.limit_retained(), tuner.release_retained()
assert not asked
assert faults(10, 8_000_000) > 10 * 16_000_000 // 65_536 // 2
""")


@pytest.mark.parametrize("nbytes", [600_000, 8_000_000])
def test_predict_reuses_memory(nbytes: int) -> None:
    _run(f"""
tuner.retain_freed_memory()
predict({nbytes})
assert faults(20, {nbytes}) < 100
""")


def test_retained_memory_is_bounded_and_released() -> None:
    _run("""
tuner.retain_freed_memory()
before = private_bytes()
end = hole(8_000_000)
assert private_bytes() - before > 2 * MAX_RETAINED_BYTES
tuner.limit_retained()
assert private_bytes() - before < 10_000_000
other = hole(2_000_000)
tuner.limit_retained()
assert private_bytes() - before > 30_000_000
assert len(asked) == 1
tuner.release_retained()
assert private_bytes() - before < 10_000_000
assert len(asked) == 2
""")


def test_keeps_memory_that_each_predict_allocates() -> None:
    _run("""
import time
tuner.retain_freed_memory()
ends = []
for _ in range(3):
    ends.append(hole(8_000_000))
    tuner.limit_retained()
assert len(asked) == 1
now = time.monotonic() + 100
time.monotonic = lambda: now
tuner.limit_retained()
assert len(asked) == 2
""")


def test_does_not_count_memory_in_use() -> None:
    _run("""
import time
tuner.retain_freed_memory()
needed = [np.ones(8_000_000, np.uint8) for _ in range(20)]
tuner.limit_retained()
end = hole(2_000_000)
now = time.monotonic() + 100
time.monotonic = lambda: now
tuner.limit_retained()
assert len(asked) == 1
""")


LINES = """\
1000-3000 r-xp 00000000 fe:00 11 /lib/libone.so.1
4000-5000 rw-p 00003000 fe:00 11 /lib/libone.so.1
5000-6000 r--p 00000000 fe:00 12 /cache/m.1/pages
6000-7000 r--p 00000000 00:00 0
7000-9000 r--p 00000000 fe:00 13 /lib/libtwo.cpython-37m.so
"""

# Prints the resident code of a used library in KiB before and after, and checks that the library still works.
SCRIPT = """
import re, sys, numpy
from weightd_worker import process_memory as library_pages
def mapped():
    text = open("/proc/self/smaps").read()
    return sum(map(int, re.findall(r" r-xp .*numpy.*\\.so\\n(?:.*\\n)??Size.*\\n(?:.*\\n)*?Rss: *(\\d+)", text)))
first = numpy.linalg.inv(numpy.eye(40) * 2)
before = mapped()
library_pages.drop_unchanged_pages()
after = mapped()
assert (numpy.linalg.inv(numpy.eye(40) * 2) == first).all()
print(before, after)
"""


def test_finds_library_mappings_that_are_not_writable() -> None:
    assert list(library_mappings(LINES.splitlines())) == [(0x1000, 0x3000), (0x7000, 0x9000)]


def test_mapping_with_private_page_is_changed() -> None:
    """The pages of a private mapping of a file, as the kernel describes them: unread, read, written to."""
    with tempfile.TemporaryFile() as file, Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        file.truncate(3 * PAGE)
        pages = np.memmap(file, np.uint8, "c")

        def unchanged() -> bool:
            return is_unchanged(os.pread(pagemap.fileno(), 3 * 8, pages.ctypes.data // PAGE * 8))

        assert unchanged()
        assert pages[PAGE] == 0
        assert unchanged()
        pages[PAGE] = 1
        assert not unchanged()


def test_swapped_page_is_changed() -> None:
    assert not is_unchanged(np.array([0, 1 << 62], np.uint64).tobytes())
    assert not is_unchanged(b"")


def test_dropped_pages_are_loaded_again() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, check=True, timeout=60)
    before, after = map(int, ran.stdout.split())
    assert after < before / 4


def test_drops_nothing_without_pagemap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_memory, "_PAGEMAP", str(tmp_path / "none"))
    process_memory.drop_unchanged_pages()
