from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightd_daemon.processes.files import FileFingerprint, GenerationFiles, SnapshotFiles, fingerprint_of


def test_files_are_in_one_private_directory(tmp_path: Path) -> None:
    generation, snapshot = GenerationFiles(tmp_path / "m.1"), SnapshotFiles(tmp_path / "m.v1")
    of_a_generation = [generation.store, generation.log("m.1.w1")]
    of_a_snapshot = [snapshot.model_dir, snapshot.weights, snapshot.sample, snapshot.log]
    for files, paths in ((generation, of_a_generation), (snapshot, of_a_snapshot)):
        files.create()
        assert stat.S_IMODE(files.directory.stat().st_mode) == 0o700
        for path in paths:
            assert path.parent == files.directory
            path.touch()
        assert len(list(files.directory.iterdir())) == len(paths)
        for _ in range(2):
            files.remove()
            assert not any(tmp_path.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "pages"
    path.write_bytes(b"x" * 8192)
    os.utime(path, ns=(0, 10**18))  # so that a later change differs in time, whatever the clock's resolution
    return path


@pytest.fixture
def sealed(store: Path) -> Iterator[FileFingerprint]:
    before = {each.name for each in Path("/proc/self/fd").iterdir()}
    made = fingerprint_of(store)
    assert made is not None
    yield made
    made.close()
    assert {each.name for each in Path("/proc/self/fd").iterdir()} == before


@pytest.mark.parametrize("damage", ["truncated", "truncated and set back", "overwritten", "appended to"])
def test_changed_file_is_not_intact(store: Path, sealed: FileFingerprint, damage: str) -> None:
    store.read_bytes()
    assert sealed.is_intact()
    if damage.startswith("truncated"):
        os.truncate(store, 4096)
    else:
        with store.open("r+b" if damage == "overwritten" else "ab") as file:
            file.write(b"y")
    if damage.endswith("set back"):
        os.utime(store, ns=(0, 10**18))
    assert not sealed.is_intact()


def test_removed_file_keeps_its_fingerprint(store: Path, sealed: FileFingerprint) -> None:
    store.unlink()
    assert fingerprint_of(store) is None
    store.write_bytes(b"another")
    assert sealed.is_intact()
