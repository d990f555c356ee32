from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightd.daemon.children.seals import seal


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "pages"
    path.write_bytes(b"x" * 8192)
    os.utime(path, ns=(0, 10**18))  # so that the next change has another time, whatever the clock's grain
    return path


def test_a_file_that_is_read_is_intact(store: Path) -> None:
    sealed = seal(store)
    assert sealed is not None
    store.read_bytes()
    assert sealed.intact()
    sealed.close()


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "appended to"])
def test_a_file_that_somebody_has_changed_is_not(store: Path, damage: str) -> None:
    sealed = seal(store)
    assert sealed is not None
    if damage == "truncated":
        os.truncate(store, 4096)
    else:
        with store.open("r+b" if damage == "overwritten" else "ab") as file:
            file.write(b"y")
    assert not sealed.intact()
    sealed.close()


def test_a_file_that_was_removed_is_what_it_was_for_those_who_have_it(store: Path) -> None:
    sealed = seal(store)
    assert sealed is not None
    store.unlink()
    store.write_bytes(b"another")
    assert sealed.intact()
    sealed.close()


def test_where_there_is_no_file_there_is_no_seal(tmp_path: Path) -> None:
    assert seal(tmp_path / "pages") is None


def test_who_truncates_and_sets_the_time_back_is_found_out(store: Path) -> None:
    sealed = seal(store)
    assert sealed is not None
    os.truncate(store, 4096)
    os.utime(store, ns=(0, 10**18))
    assert not sealed.intact()
    sealed.close()


def test_a_seal_gives_its_descriptor_back(store: Path) -> None:
    before = {each.name for each in Path("/proc/self/fd").iterdir()}
    sealed = seal(store)
    assert sealed is not None
    sealed.close()
    assert {each.name for each in Path("/proc/self/fd").iterdir()} == before
