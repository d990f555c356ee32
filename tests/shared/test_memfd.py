"""Memory that keeps its size, and what is not that."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import tempfile
from pathlib import Path
from typing import Callable, Dict

import pytest

from weightd.shared import memfd

_SHRINK, _GROW, _SEAL_WRITE = 2, 4, 8
_CLOEXEC, _ALLOW_SEALING, _HUGETLB = 1, 2, 4


def _plain(nbytes: int = 4096, seals: int = 0, flags: int = 0) -> int:
    descriptor: int = ctypes.CDLL(None).memfd_create(b"test", _CLOEXEC | _ALLOW_SEALING | flags)
    assert descriptor >= 0
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, 1033, seals)
    return descriptor


def _pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def _file(directory: str) -> int:
    with tempfile.TemporaryFile(dir=directory) as file:
        file.truncate(4096)
        return os.dup(file.fileno())


def test_what_is_made_keeps_its_size_and_is_taken() -> None:
    descriptor = memfd.create(10_000)
    assert memfd.size(descriptor) == 10_000
    for nbytes in (0, 9_999, 10_001):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, nbytes)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_further_seals_do_no_harm() -> None:
    descriptor = _plain(seals=_SHRINK | _GROW | _SEAL_WRITE)
    assert memfd.size(descriptor) == 4096
    os.close(descriptor)


def _write_only() -> int:
    descriptor = memfd.create(4096)
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY)
    finally:
        os.close(descriptor)


REFUSED: Dict[str, Callable[[], int]] = {
    "got a descriptor of something else": _pipe,
    "a descriptor of something": lambda: os.open("/dev/zero", os.O_RDWR),
    "descriptor of something": lambda: os.open("/", os.O_RDONLY),
    "of something else": lambda: _file(str(Path.home())),
    "F_SEAL_SHRINK is missing": lambda: _file("/dev/shm"),
    "sealed with F_SEAL_SHRINK and F_SEAL_GROW, F_SEAL_SHRINK is missing": lambda: _plain(seals=_GROW),
    "open for writing only": _write_only,
    "F_SEAL_GROW is missing": lambda: _plain(seals=_SHRINK),
    "at least 1 byte": lambda: _plain(0, seals=_SHRINK | _GROW),
    f"of {mmap.PAGESIZE} bytes, got pages of 2097152": lambda: _plain(2**21, _SHRINK | _GROW, _HUGETLB | 21 << 26),
}


@pytest.mark.parametrize("why", REFUSED)
def test_anything_else_is_refused(why: str) -> None:
    descriptor = REFUSED[why]()
    try:
        with pytest.raises(memfd.NotShareable, match=re.escape(why)):
            memfd.size(descriptor)
    finally:
        os.close(descriptor)
