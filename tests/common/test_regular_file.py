"""Regular files of a bounded size are read; whatever else a path leads to is refused at once."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from weightd_common.regular_file import open_regular, read_regular


def test_a_file_is_read_up_to_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    assert read_regular(str(path), 6) == b"12345"
    with pytest.raises(OSError, match="expected a file of at most 4 bytes"):
        read_regular(path, 4)
    link = tmp_path / "link"
    link.symlink_to(path)
    with open_regular(link) as file:
        assert file.read() == b"12345"


def test_of_a_huge_file_no_more_is_read_than_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="at most 1,000 bytes"):
        read_regular(path, 1000)


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "socket", "missing"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    expected = "expected a regular file"
    if kind == "pipe":
        os.mkfifo(str(path))
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "directory":
        path.mkdir()
        expected = "Is a directory"
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
        expected = "No such device or address"
    else:
        expected = "No such file"
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match=expected):
        open_regular(path)
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before
