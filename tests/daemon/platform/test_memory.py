from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from weightd_daemon.platform import cgroup, memory
from weightd_daemon.platform.memory import resident_bytes
from weightd_protocol.messages.status import MemoryLimit

PAGE = mmap.PAGESIZE


def test_counts_resident_pages_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with path.open("wb") as file:
        file.truncate(256 * PAGE)
        # The hole was never read or written.
        assert resident_bytes(path) == 0
        file.write(b"x" * 3 * PAGE)
        file.flush()
        assert 3 * PAGE <= (resident_bytes(path) or 0) < 256 * PAGE
    path.write_bytes(b"x" * (PAGE + 1))
    assert resident_bytes(path) == 2 * PAGE


def test_unknown_residency_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    path.write_bytes(b"x")
    libc = memory._libc  # pyright: ignore[reportPrivateUsage]
    for name, refusal in (("mincore", -1), ("mmap", ctypes.c_void_p(-1).value)):
        with monkeypatch.context() as patch:
            patch.setattr(libc, name, mock.Mock(return_value=refusal))
            assert resident_bytes(path) is None


def test_missing_and_empty_files_have_no_resident_pages(tmp_path: Path) -> None:
    assert resident_bytes(tmp_path / "missing") == 0
    assert resident_bytes(tmp_path) == 0
    (tmp_path / "empty").touch()
    assert resident_bytes(tmp_path / "empty") == 0


@pytest.mark.parametrize(("limits", "most"), [((2**20, None), 2**20), ((None, 2**19), 2**19), ((2**62, None), None)])
def test_host_memory_is_the_least_of_host_and_limits(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int | None, int | None], most: int | None
) -> None:
    group = MemoryLimit(usage_bytes=1, limit_bytes=limits[0], high_bytes=limits[1])
    monkeypatch.setattr(cgroup, "memory", lambda: group)
    assert memory.host_memory_bytes() == (most or os.sysconf("SC_PHYS_PAGES") * PAGE)


@pytest.mark.parametrize(
    ("meminfo", "group", "free"),
    [
        ("MemTotal: 9 kB\nMemAvailable:    5 kB\n", None, 5 * 1024),
        ("MemTotal: 9 kB\nMemAvailable:    5 kB\n", 100, 100),
        ("MemAvailable: 5 kB\n", 2**40, 5 * 1024),
        ("MemTotal: 9 kB\n", None, 0),
        ("MemAvailable: x kB\n", 2**40, 0),
        ("garbage\n", None, 0),
    ],
)
def test_free_memory_is_the_least_of_host_and_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meminfo: str, group: int | None, free: int
) -> None:
    (tmp_path / "meminfo").write_text(meminfo)
    monkeypatch.setattr(cgroup, "free_bytes", lambda: group)
    assert memory.free_bytes(tmp_path / "meminfo") == free


# A process with 64 MiB and its fork, until stdin is closed.
FORKS = """
import os, signal, sys
inherited = bytearray(b"x" * 64 * 2**20)
child = os.fork()
if not child:
    signal.pause()
print(child, flush=True)
sys.stdin.read()
os.kill(child, signal.SIGKILL)
"""


def test_inherited_pages_are_anonymous_not_private() -> None:
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        held = memory.read_process_memory(int(process.stdout.readline()))
    assert held is not None
    assert held.private_bytes < 64 * 2**20 < held.anonymous_bytes
