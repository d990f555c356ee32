"""A service in a control group of its own with a limit of memory, as MemoryMax= of its unit makes it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from testkit.service import Service

# As OOMScoreAdjust= of the unit.
_SCORE = 100

_ENTER = f'echo $$ >"$0/cgroup.procs" && echo {_SCORE} >/proc/self/oom_score_adj && exec "$@"'

_REMOVAL_LIMIT_S = 20.0


class NoControlGroup(RuntimeError):
    """This process cannot make a control group with a limit of memory; the text says why."""


class MemoryGroup:
    """A control group with a limit of memory, gone after the block. Whatever is in it then has to end by itself.

    Args:
        limit: bytes.

    Attributes:
        path: its directory.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __enter__(self) -> MemoryGroup:
        legacy = Path("/sys/fs/cgroup/memory")
        self._is_legacy = legacy.is_dir()
        parent = legacy if self._is_legacy else Path("/sys/fs/cgroup")
        self.path = parent / f"weightd-test-{os.getpid()}"
        try:
            self.path.mkdir()
            key = "memory.limit_in_bytes" if self._is_legacy else "memory.max"
            (self.path / key).write_text(f"{self._limit}\n", "ascii")
        except OSError as error:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            raise NoControlGroup(f"a control group with a limit of memory cannot be made: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + _REMOVAL_LIMIT_S
        while True:
            try:
                self.path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    @property
    def peak(self) -> int:
        """The most memory that was charged, in bytes."""
        key = "memory.max_usage_in_bytes" if self._is_legacy else "memory.peak"
        return int((self.path / key).read_text("ascii"))

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed at the limit."""
        key = "memory.oom_control" if self._is_legacy else "memory.events"
        lines = (self.path / key).read_text("ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


class LimitedService(Service):
    """A service all of whose processes are in a control group, with the score for the want of memory of the unit.

    Args:
        group: the control group.
        args: of `Service`.
        kwargs: likewise.
    """

    def __init__(self, group: MemoryGroup, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group = group

    def _popen(self, command: list[str]) -> subprocess.Popen[str]:
        return super()._popen(["sh", "-c", _ENTER, str(self._group.path), *command])
