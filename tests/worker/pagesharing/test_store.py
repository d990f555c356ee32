from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd.worker import pagesharing
from weightd.worker.pagesharing import Unavailable, store
from weightd.worker.pagesharing.libc import PAGE, libc
from weightd.worker.pagesharing.store import NewStore, OpenStore


def make(path: Path, pages: int = 3) -> bytes:
    """Write a finished store of random pages; return these."""
    content = np.frombuffer(np.random.RandomState(1).bytes(pages * PAGE), dtype=np.uint8)
    new = NewStore(str(path), pages)
    new.write_page(0, int(content.ctypes.data), pages * PAGE)
    new.finish(np.arange(pages, dtype=np.uint64))
    return content.tobytes()


def refusal(path: Path) -> str:
    with pytest.raises(Unavailable) as caught:
        OpenStore(str(path), libc()).close()
    return str(caught.value)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "store"
    content = make(path)
    opened = OpenStore(str(path), libc())
    assert opened.pages == 3
    assert opened.hashes().tolist() == [0, 1, 2]
    opened.close()
    assert path.read_bytes()[store.offset_of(0) : store.offset_of(3)] == content
    assert path.stat().st_size == store.size_of(3)


def test_a_store_is_private_and_read_only(tmp_path: Path) -> None:
    path = tmp_path / "store"
    new = NewStore(str(path), 0)
    assert path.stat().st_mode & 0o777 == 0o600
    new.finish(np.empty(0, dtype=np.uint64))
    assert path.stat().st_mode & 0o777 == 0o400


def test_a_store_without_pages(tmp_path: Path) -> None:
    make(tmp_path / "store", 0)
    opened = OpenStore(str(tmp_path / "store"), libc())
    assert (opened.pages, opened.hashes().tolist()) == (0, [])
    opened.close()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("mine")
    with pytest.raises(FileExistsError):
        NewStore(str(tmp_path / "store"), 1)
    assert (tmp_path / "store").read_text() == "mine"


def test_a_store_that_finds_no_space_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(store, "on_disk", bool)
    with pytest.raises(OSError, match="No space"):
        NewStore(str(tmp_path / "store"), 1)
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_cannot_reserve_space_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(fd: int, offset: int, length: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unable)
    make(tmp_path / "store")
    OpenStore(str(tmp_path / "store"), libc()).close()


def test_an_unfinished_store(tmp_path: Path) -> None:
    new = NewStore(str(tmp_path / "store"), 3)
    os.close(new.fd)
    assert refusal(tmp_path / "store") == "the store was never finished"


@pytest.mark.parametrize("size", [0, 1, 10, PAGE, store.size_of(3) - 1, store.size_of(3) + 1])
def test_a_store_of_another_size(tmp_path: Path, size: int) -> None:
    make(tmp_path / "store")
    (tmp_path / "store").chmod(0o600)
    os.truncate(str(tmp_path / "store"), size)
    assert "truncated" in refusal(tmp_path / "store")


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (0, b"X", "not a page store"),
        (8, b"\2", "format version 2"),
        (12, struct.pack("<I", 12345), "pages of 12345 bytes"),
        (16, b"\4", "should have"),
        (16, b"\xff" * 8, "should have"),
    ],
)
def test_a_store_with_another_header(tmp_path: Path, at: int, value: bytes, reason: str) -> None:
    path = tmp_path / "store"
    make(path)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(value)
    assert reason in refusal(path)


@given(st.binary(max_size=40), st.integers(0, 2**64))
def test_any_header_is_read_or_refused(header: bytes, size: int) -> None:
    with contextlib.suppress(Unavailable):
        assert store.size_of(store.decode_header(header, size)) == size


def test_headers_are_read_back() -> None:
    assert store.decode_header(store.encode_header(7), store.size_of(7)) == 7


def test_what_is_no_private_file_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    assert "No such file" in refusal(path)
    make(path)
    (tmp_path / "link").symlink_to(path)
    assert "cannot open the store" in refusal(tmp_path / "link")
    (tmp_path / "folder").mkdir()
    assert "not a regular file" in refusal(tmp_path / "folder")
    os.mkfifo(str(tmp_path / "pipe"))
    assert "not a regular file" in refusal(tmp_path / "pipe")
    for mode in (0o440, 0o404, 0o620, 0o602):
        path.chmod(mode)
        assert "others may use the store" in refusal(path)
    path.chmod(0o400)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert refusal(path) == f"the store belongs to user {user}, this process to {user + 1}"


def test_a_refused_store_leaves_no_open_file(tmp_path: Path) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    test_a_store_of_another_size(tmp_path, 10)
    (tmp_path / "store").chmod(0o666)
    refusal(tmp_path / "store")
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "store"
    assert pagesharing.on_disk(str(path)) == pagesharing.on_disk(str(tmp_path))
    if Path("/dev/shm").is_dir():
        assert not pagesharing.on_disk("/dev/shm/store-that-is-not-there")


def test_evicted_pages_come_back(tmp_path: Path) -> None:
    path = tmp_path / "store"
    content = make(path, 50)
    resident = pagesharing.resident_bytes(str(path))
    assert resident == 51 * PAGE + -(-50 * 8 // PAGE) * PAGE
    pagesharing.evict(str(path))
    if pagesharing.on_disk(str(path)):
        assert pagesharing.resident_bytes(str(path)) == 0
    assert path.read_bytes()[store.offset_of(0) : store.offset_of(50)] == content


def test_residency_of_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.touch(0o600)
    assert pagesharing.resident_bytes(str(path)) == 0


@pytest.mark.parametrize("verb", [pagesharing.evict, pagesharing.resident_bytes])
def test_other_verbs_refuse_too(tmp_path: Path, verb: Callable[[str], object]) -> None:
    with pytest.raises(Unavailable):
        verb(str(tmp_path / "none"))


def test_a_failing_disk_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    make(tmp_path / "store")
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(Unavailable, match="Input/output error"):
        pagesharing.evict(str(tmp_path / "store"))
