from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from weightd_common.coredump import disable_core_dumps

# Allows core dumps first, which a test runner or a container may not.
_DIES = """
import os, resource, sys
sys.path[:] = {path!r}
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
with open("/proc/self/coredump_filter", "w") as file:
    file.write("0x33")
from weightd_common.coredump import disable_core_dumps
if {leaves_out}:
    disable_core_dumps()
print(resource.getrlimit(resource.RLIMIT_CORE) == (0, hard), open("/proc/self/coredump_filter").read(), flush=True)
os.abort()
"""


def dies(directory: Path, *, leaves_out: bool) -> str:
    """Have a process die of SIGABRT in a directory; return its limit and its filter."""
    program = _DIES.format(path=sys.path, leaves_out=leaves_out)
    done = subprocess.run([sys.executable, "-c", program], cwd=str(directory), stdout=subprocess.PIPE, check=False)
    assert done.returncode < 0
    return done.stdout.decode()


def test_a_process_that_crashes_leaves_no_core(tmp_path: Path) -> None:
    assert dies(tmp_path, leaves_out=False) == "False 00000033\n\n"
    for left in tmp_path.iterdir():
        left.unlink()
    # What a program gets to which the kernel pipes the dump has no memory either.
    assert dies(tmp_path, leaves_out=True) == "True 00000000\n\n"
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_without_core_dumps(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        disable_core_dumps(tmp_path / "none" / "coredump_filter")
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
