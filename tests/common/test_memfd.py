"""Tests of sealed memfds, and of descriptors that are none."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

from weightd_common import memfd

_SHRINK, _GROW, _SEAL_WRITE = 2, 4, 8
_O_PATH = 0o10000000
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


def test_created_memfd_has_a_fixed_size() -> None:
    descriptor = memfd.create(10_000)
    assert memfd.checked_size(descriptor) == 10_000
    for nbytes in (0, 9_999, 10_001):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, nbytes)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_accepts_additional_seals() -> None:
    descriptor = _plain(seals=_SHRINK | _GROW | _SEAL_WRITE)
    assert memfd.checked_size(descriptor) == 4096
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
def test_rejects_other_descriptors(why: str) -> None:
    descriptor = REFUSED[why]()
    try:
        with pytest.raises(memfd.NotShareable, match=re.escape(why)):
            memfd.checked_size(descriptor)
    finally:
        os.close(descriptor)


def _path_of_memory() -> int:
    descriptor = memfd.create(4096)
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | _O_PATH)
    finally:
        os.close(descriptor)


def _system_call(number: int, *arguments: Any) -> int:
    descriptor: int = ctypes.CDLL(None).syscall(number, *arguments)
    if descriptor < 0:
        pytest.skip(f"this process may not use system call {number}")
    return descriptor


NO_MEMORY: Dict[str, Callable[[], int]] = {
    "pipe": _pipe,
    "path": _path_of_memory,
    "directory": lambda: os.open("/", os.O_RDONLY),
    "epoll": lambda: _system_call(291, 0),
    "socket": lambda: socket.socket().detach(),
    "pidfd": lambda: _system_call(434, os.getpid(), 0),
    "io_uring": lambda: _system_call(425, 1, (ctypes.c_uint32 * 30)()),
}


@pytest.mark.parametrize("kind", NO_MEMORY)
def test_other_descriptor_is_no_memory(kind: str) -> None:
    descriptor = NO_MEMORY[kind]()
    assert not memfd.is_memory(descriptor)
    os.close(descriptor)


def test_memfd_is_memory_with_and_without_seals() -> None:
    for descriptor in (memfd.create(1), _plain()):
        assert memfd.is_memory(descriptor)
        os.close(descriptor)
