"""Target for the page store: a file raises Unavailable, or its size agrees with its header and its index with its
pages.

An input is a byte of flags, a byte with the number of surplus bytes of the file, eight with its size, the number of
pages of this process, a byte for each of them, the length of the file's end, the end, and the beginning of the file.
With `FITTING` the header determines the size; between beginning and end the file is zero.
"""

from __future__ import annotations

import os
import struct
import tempfile

import numpy as np

from targets.reader import Reader
from weightd_worker.pagesharing import PageSharingUnavailable, store
from weightd_worker.pagesharing.libc import PAGE, libc
from weightd_worker.pagesharing.runs import find_matches
from weightd_worker.pagesharing.store import OpenStore

FITTING = 1

# The limit of the sparse file: a thousand pages and their index.
_MAX_SIZE = 1024 * (PAGE + 8) + PAGE

_IN_MEMORY = next((each for each in ("/dev/shm",) if os.access(each, os.W_OK)), None)

MAX_BYTES = 8192
WORDS = (
    store.MAGIC,
    struct.pack("<I", store.VERSION),
    struct.pack("<I", PAGE),
    *(store.encode_header(pages) for pages in (0, 1, 2, 511, 512)),
)


def one_input(data: bytes) -> None:
    reader = Reader(data)
    flags, surplus, size = reader.number(), reader.number(), reader.number(8)
    own_pages = reader.take(reader.number())
    end = reader.take(reader.number())
    begin = reader.rest()
    _check_header(begin, size)
    if flags & FITTING and len(begin) >= 24:
        size = store.size_of(struct.unpack_from("<Q", begin, 16)[0])
    with tempfile.NamedTemporaryFile(dir=_IN_MEMORY, prefix="weightd-fuzz-") as file:
        _write(file.fileno(), begin, end, min(size + surplus, _MAX_SIZE))
        _check_file(file.name, file.fileno(), own_pages)


def written(begin: bytes, end: bytes = b"", own_pages: bytes = b"", size: int | None = None, surplus: int = 0) -> bytes:
    """Return the input for a file; without a size, for one whose length agrees with its header."""
    return b"".join(
        (
            bytes([FITTING if size is None else 0, surplus]),
            (size or 0).to_bytes(8, "little"),
            bytes([len(own_pages)]) + own_pages,
            bytes([len(end)]) + end,
            begin,
        )
    )


def _write(fd: int, begin: bytes, end: bytes, size: int) -> None:
    os.ftruncate(fd, size)
    os.pwrite(fd, begin[:size], 0)
    os.pwrite(fd, end[:size], max(size - len(end), 0))


def _check_header(header: bytes, size: int) -> None:
    try:
        pages = store.decode_header(header, size)
    except PageSharingUnavailable as error:
        _check_refusal(str(error))
    else:
        assert pages >= 0
        assert size == PAGE + pages * (PAGE + 8)


def _check_refusal(text: str) -> None:
    assert text.isprintable()
    assert len(text) < 200


def _check_file(path: str, fd: int, own_pages: bytes) -> None:
    open_files = _open_files()
    try:
        opened = OpenStore(path, libc())
    except PageSharingUnavailable as error:
        _check_refusal(str(error))
    else:
        try:
            assert os.fstat(fd).st_size == PAGE + opened.page_count * (PAGE + 8)
            hashes = opened.read_hashes()
        finally:
            opened.close()
        assert hashes.tobytes() == os.pread(fd, opened.page_count * 8, PAGE + opened.page_count * PAGE)
        _check_runs(hashes, own_pages)
    assert _open_files() == open_files


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - at each input, and a Path for each name costs more


def _check_runs(stored: np.ndarray[tuple[int], np.dtype[np.uint64]], own_pages: bytes) -> None:
    """Check that for any hashes a run covers existing pages on both sides, in the order of addresses."""
    addresses: list[int] = []
    hashes: list[int] = []
    for each in own_pages:
        # The highest bit: whether a gap precedes this page. The other bits: the equal page of the store.
        addresses.append((addresses[-1] if addresses else 0) + PAGE * (1 + (each >> 7)))
        hashes.append(int(stored[each & 127]) if each & 127 < len(stored) else each)
    at = 0
    for run in find_matches(np.array(addresses, dtype=np.uint64), np.array(hashes, dtype=np.uint64), stored, PAGE):
        index = addresses.index(run.address)
        assert index >= at
        at = index + run.page_count
        assert run.page_count > 0
        assert 0 <= run.first_page <= len(stored) - run.page_count
        assert addresses[index:at] == [run.address + PAGE * page for page in range(run.page_count)]
        assert hashes[index:at] == stored[run.first_page : run.first_page + run.page_count].tolist()
