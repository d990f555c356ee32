from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightd_daemon.platform.directories import PathInUse, make_directory


def test_rejects_directory_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir()
    if os.getuid() == 0:
        os.chown(directory, 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PathInUse, match="expected a directory of this user, not a link or another user's"):
        make_directory(directory, 0o755)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_rejects_read_only_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PathInUse, match="this user cannot write there; set runtime_dir and cache_dir"):
            make_directory(tmp_path, 0o755)
    finally:
        tmp_path.chmod(0o700)


def test_reports_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(PathInUse, match=f"^cannot make the directory {path}: "):
            make_directory(path, 0o755)
