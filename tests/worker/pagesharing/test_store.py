from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import List

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.waiting import until
from weightd_worker import pagesharing
from weightd_worker.pagesharing import PageSharingUnavailable, store
from weightd_worker.pagesharing import memory as hashing
from weightd_worker.pagesharing.libc import PAGE, libc
from weightd_worker.pagesharing.store import NewStore, OpenStore


def make(path: Path, pages: int = 3) -> bytes:
    """Write a finished store of random pages; return the pages."""
    content = np.frombuffer(np.random.RandomState(1).bytes(pages * PAGE), dtype=np.uint8)
    new = NewStore(str(path), pages)
    new.write_pages(0, int(content.ctypes.data), pages * PAGE)
    new.finish(np.arange(pages, dtype=np.uint64))
    return content.tobytes()


def refusal(path: Path) -> str:
    with pytest.raises(PageSharingUnavailable) as caught:
        OpenStore(str(path), libc()).close()
    return str(caught.value)


@pytest.mark.parametrize("pages", [0, 3])
def test_reads_written_pages(pages: int, tmp_path: Path) -> None:
    path = tmp_path / "store"
    content = make(path, pages)
    opened = OpenStore(str(path), libc())
    assert (opened.page_count, opened.read_hashes().tolist()) == (pages, list(range(pages)))
    opened.close()
    assert path.read_bytes()[store.offset_of(0) : store.offset_of(pages)] == content
    assert path.stat().st_size == store.size_of(pages)


def test_store_is_private_and_read_only(tmp_path: Path) -> None:
    path = tmp_path / "store"
    new = NewStore(str(path), 0)
    assert path.stat().st_mode & 0o777 == 0o600
    assert refusal(path) == "the store is incomplete"
    new.finish(np.empty(0, dtype=np.uint64))
    assert path.stat().st_mode & 0o777 == 0o400


def test_does_not_overwrite_files(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("mine")
    with pytest.raises(FileExistsError):
        NewStore(str(tmp_path / "store"), 1)
    assert (tmp_path / "store").read_text() == "mine"


@pytest.mark.parametrize(("error", "is_made"), [(28, False), (95, True), (22, True)])
def test_creates_store_unless_disk_is_full(
    error: int, is_made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, offset: int, length: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    monkeypatch.setattr(store, "is_on_disk", bool)
    if is_made:
        make(tmp_path / "store")
    else:
        with pytest.raises(OSError, match="No space"):
            make(tmp_path / "store")
    assert (tmp_path / "store").exists() == is_made


@pytest.mark.parametrize("size", [0, 1, 10, PAGE, store.size_of(3) - 1, store.size_of(3) + 1])
def test_rejects_store_of_wrong_size(size: int, tmp_path: Path) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    make(tmp_path / "store")
    (tmp_path / "store").chmod(0o600)
    os.truncate(str(tmp_path / "store"), size)
    assert "truncated" in refusal(tmp_path / "store")
    assert sorted(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (0, b"X", "not a page store"),
        (8, b"\2", "format version 2"),
        (12, struct.pack("<I", 12345), "pages of 12345 bytes"),
        (16, b"\xff" * 8, "expected a store of "),
    ],
)
def test_rejects_store_with_wrong_header(at: int, value: bytes, reason: str) -> None:
    header = store.encode_header(7)
    assert store.decode_header(header, store.size_of(7)) == 7
    with pytest.raises(PageSharingUnavailable, match=reason):
        store.decode_header(header[:at] + value + header[at + len(value) :], store.size_of(7))


@given(st.binary(max_size=40), st.integers(0, 2**64))
def test_reads_or_rejects_any_header(header: bytes, size: int) -> None:
    with contextlib.suppress(PageSharingUnavailable):
        assert store.size_of(store.decode_header(header, size)) == size


def test_rejects_file_that_is_not_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    assert "No such file" in refusal(path)
    make(path)
    (tmp_path / "link").symlink_to(path)
    assert "cannot open the store" in refusal(tmp_path / "link")
    (tmp_path / "folder").mkdir()
    assert "not a regular file" in refusal(tmp_path / "folder")
    os.mkfifo(str(tmp_path / "pipe"))
    assert "not a regular file" in refusal(tmp_path / "pipe")
    before = sorted(Path("/proc/self/fd").iterdir())
    for mode in (0o440, 0o404, 0o620, 0o602):
        path.chmod(mode)
        assert "expected a store that only its owner can access, got mode " in refusal(path)
    path.chmod(0o400)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert refusal(path) == f"expected a store of user {user + 1}, got one of user {user}"
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "store"
    assert pagesharing.is_on_disk(str(path)) == pagesharing.is_on_disk(str(tmp_path))
    if Path("/dev/shm").is_dir():
        assert not pagesharing.is_on_disk("/dev/shm/store-that-is-not-there")


def test_evicted_pages_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "store"
    content = make(path, 50)
    resident = pagesharing.resident_bytes(str(path))
    assert resident == 51 * PAGE + -(-50 * 8 // PAGE) * PAGE
    pagesharing.evict(str(path))
    if pagesharing.is_on_disk(str(path)):
        assert pagesharing.resident_bytes(str(path)) == 0
    pagesharing.prefetch(str(path))
    until(lambda: pagesharing.resident_bytes(str(path)) == resident, "its pages")
    assert path.read_bytes()[store.offset_of(0) : store.offset_of(50)] == content


def test_other_functions_reject_invalid_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    for verb in (pagesharing.evict, pagesharing.resident_bytes):
        with pytest.raises(PageSharingUnavailable):
            verb(str(tmp_path / "none"))
    pagesharing.prefetch(str(tmp_path / "none"))
    (tmp_path / "empty").touch(0o600)
    assert pagesharing.resident_bytes(str(tmp_path / "empty")) == 0
    make(tmp_path / "store")
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(PageSharingUnavailable, match="Input/output error"):
        pagesharing.evict(str(tmp_path / "store"))


def hashes_of(data: bytes) -> List[int]:
    memory = np.frombuffer(data, dtype=np.uint8)
    hashes = np.empty(len(data) // PAGE, dtype=np.uint64)
    hashing.hash_pages(int(memory.ctypes.data), hashes)
    return [int(value) for value in hashes]


def test_multipliers_are_fixed_odd_and_different() -> None:
    multipliers = [int(value) for value in hashing.multipliers(PAGE // 8)]
    # These are splitmix64's numbers for seed 0, made odd.
    assert multipliers[:2] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F5]
    assert all(value % 2 for value in multipliers)
    assert len(set(multipliers)) == len(multipliers)


def test_hash_is_sum_of_products() -> None:
    data = np.random.RandomState(3).bytes(3 * PAGE)
    multipliers = [int(value) for value in hashing.multipliers(PAGE // 8)]
    words = [int(value) for value in np.frombuffer(data, dtype=np.uint64)]
    pages = [words[start : start + PAGE // 8] for start in range(0, len(words), PAGE // 8)]
    expected = [sum(a * b for a, b in zip(page, multipliers)) % 2**64 for page in pages]
    count = (16 << 20) // PAGE + 3  # These are more pages than are hashed at once.
    assert hashes_of(data[:PAGE] * (count - 3) + data) == [expected[0]] * (count - 3) + expected
    assert hashes_of(bytes(PAGE)) == [hashing.ZERO_PAGE]
