from __future__ import annotations

import stat
from pathlib import Path

from weightd.daemon.children.files import GenerationFiles, SnapshotFiles


def test_a_generations_files_are_in_one_directory(tmp_path: Path) -> None:
    files = GenerationFiles(tmp_path / "m.1")
    files.create()
    assert stat.S_IMODE(files.directory.stat().st_mode) == 0o700
    for path in (files.store, files.log("m.1.w1")):
        assert path.parent == files.directory
        path.touch()
    files.remove()
    assert not any(tmp_path.iterdir())
    files.remove()


def test_a_snapshots_files_are_in_one_directory(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path / "m.v1")
    files.create()
    assert stat.S_IMODE(files.directory.stat().st_mode) == 0o700
    for path in (files.model_dir, files.weights, files.log):
        assert path.parent == files.directory
        path.touch()
    files.remove()
    assert not any(tmp_path.iterdir())
    files.remove()
