"""Tests of replicas' working directories: one each; the next replica removes the directories of killed replicas."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from textwrap import indent

from weightd_ray.work_dirs import work_dir


def there(base: Path) -> list[str]:
    return sorted(each.name for each in (base / "work").iterdir())


def test_directories_coexist_and_are_removed(tmp_path: Path) -> None:
    with work_dir(tmp_path / "b") as one, work_dir(tmp_path / "b") as other:
        assert there(tmp_path / "b") == sorted([one.path.name, other.path.name])
        assert one.path.stat().st_mode & 0o777 == 0o700
    assert there(tmp_path / "b") == []


PROGRAM = """
import os
from pathlib import Path
from weightd_ray.work_dirs import work_dir
with work_dir(Path({base!r})) as mine:
"""


@contextlib.contextmanager
def another(base: Path, code: str) -> Generator[None]:
    """Create a directory in another process, which runs this code; wait until the process has exited."""
    program = PROGRAM.format(base=str(base)) + indent(code, "  ")
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        process.wait()
        yield


def test_removes_directory_of_killed_replica(tmp_path: Path) -> None:
    with another(tmp_path, "(mine.path / 'cache').mkdir()\nos.kill(os.getpid(), 9)"):
        pass
    assert len(there(tmp_path)) == 1
    with work_dir(tmp_path) as mine:
        assert there(tmp_path) == [mine.path.name]


def test_keeps_directory_of_running_daemon(tmp_path: Path) -> None:
    # A process that has inherited the lock still runs.
    with another(tmp_path, "if os.fork(): os._exit(0)\nos.read(0, 1)"), work_dir(tmp_path):
        assert len(there(tmp_path)) == 2
