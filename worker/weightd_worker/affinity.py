"""The cores that this process runs on."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Collection


def set_cpu_affinity(cores: Collection[int]) -> None:
    """Have all threads of this process on these cores, and so each that they will start.

    Raises:
        OSError: none of them can be had.
    """
    for task in Path("/proc/self/task").iterdir():
        # One may have ended meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)
