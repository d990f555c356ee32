from __future__ import annotations

import stat
from pathlib import Path

from weightd_daemon.processes.files import GenerationFiles, SnapshotFiles


def test_what_belongs_together_is_in_one_directory(tmp_path: Path) -> None:
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
