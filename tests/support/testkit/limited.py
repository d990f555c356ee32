"""A service in a separate control group with a memory limit, like MemoryMax= of a systemd unit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from testkit.service import Service

# The same value as OOMScoreAdjust= of the unit.
_SCORE = 100

_ENTER = f'echo $$ >"$0/cgroup.procs" && echo {_SCORE} >/proc/self/oom_score_adj && exec "$@"'

_REMOVAL_LIMIT_S = 20.0


class NoControlGroup(RuntimeError):
    """Error: this process cannot create a control group with a memory limit."""


class MemoryGroup:
    """A control group with a memory limit, removed at the end of the block once its processes have exited.

    Args:
        limit: limit in bytes.

    Attributes:
        path: directory of the group.
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
            raise NoControlGroup(f"cannot create a control group with a memory limit: {error}") from None
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
        """Peak of the charged memory, in bytes."""
        key = "memory.max_usage_in_bytes" if self._is_legacy else "memory.peak"
        return int((self.path / key).read_text("ascii"))

    @property
    def kills(self) -> int:
        """Number of processes that the kernel has killed at the limit."""
        key = "memory.oom_control" if self._is_legacy else "memory.events"
        lines = (self.path / key).read_text("ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


class LimitedService(Service):
    """A service whose processes are in a control group and have the OOM score adjustment of the unit.

    Args:
        group: the control group.
        args: positional arguments of `Service`.
        kwargs: keyword arguments of `Service`.
    """

    def __init__(self, group: MemoryGroup, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group = group

    def _popen(self, command: list[str]) -> subprocess.Popen[str]:
        return super()._popen(["sh", "-c", _ENTER, str(self._group.path), *command])
