from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weightd_worker import process_memory
from weightd_worker.process_memory import unchanged_mappings

LINES = """\
1000-3000 r-xp 00000000 fe:00 11 /lib/libone.so.1
Size: 8 kB
Anonymous: 0 kB
3000-4000 r--p 00002000 fe:00 11 /lib/libone.so.1
Anonymous: 4 kB
4000-5000 rw-p 00003000 fe:00 11 /lib/libone.so.1
Anonymous: 0 kB
5000-6000 r--p 00000000 fe:00 12 /cache/m.1/pages
Anonymous: 0 kB
6000-7000 r--p 00000000 00:00 0
Anonymous: 0 kB
7000-9000 r--p 00000000 fe:00 13 /lib/libtwo.cpython-37m.so
Anonymous: 0 kB
"""

# The code of a library that has been used, in KiB, before and after; and whether it can be used again.
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


def test_what_can_be_let_go_is_code_and_constants_of_libraries_that_nobody_has_changed() -> None:
    assert list(unchanged_mappings(LINES.splitlines())) == [(0x1000, 0x3000), (0x7000, 0x9000)]


def test_what_was_let_go_comes_again_when_it_is_used() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, check=True, timeout=60)
    before, after = map(int, ran.stdout.split())
    assert after < before / 4


def test_where_the_kernel_does_not_tell_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_memory, "_SMAPS", str(tmp_path / "none"))
    process_memory.drop_unchanged_pages()
