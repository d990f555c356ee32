"""Directories of replicas: each its own, and those that killed ones have left are removed by the next."""

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


def test_several_are_side_by_side_and_leave_nothing(tmp_path: Path) -> None:
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
    """Have a directory in another process, which does this in it; wait for its end."""
    program = PROGRAM.format(base=str(base)) + indent(code, "  ")
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        process.wait()
        yield


def test_what_a_killed_one_has_left_goes_as_soon_as_nobody_holds_it(tmp_path: Path) -> None:
    with another(tmp_path, "(mine.path / 'cache').mkdir()\nos.kill(os.getpid(), 9)"):
        pass
    assert len(there(tmp_path)) == 1
    with work_dir(tmp_path) as mine:
        assert there(tmp_path) == [mine.path.name]


def test_a_daemon_that_still_lives_keeps_the_directory(tmp_path: Path) -> None:
    # What has inherited the lock lives on.
    with another(tmp_path, "if os.fork(): os._exit(0)\nos.read(0, 1)"), work_dir(tmp_path):
        assert len(there(tmp_path)) == 2
