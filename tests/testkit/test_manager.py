"""Tests of the service manager that passes descriptors to daemons."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from testkit.manager import Manager

# Prints the content of the files behind the descriptors after the two listeners, and then all open descriptors.
_CHILD = """
import os
print(os.pread(5, 9, 0).decode(), os.pread(6, 9, 0).decode(), *sorted(map(int, os.listdir("/proc/self/fd"))))
"""


def test_daemon_inherits_stored_descriptors_from_100_on(tmp_path: Path) -> None:
    manager = Manager(tmp_path / "clients", tmp_path / "notify")
    for name in ("shim", "config"):
        path = tmp_path / name
        path.write_text(name)
        with path.open() as file:
            manager.stored_fds[name] = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 100)
    with manager.popen([sys.executable, "-S", "-c", _CHILD], {}, stdout=subprocess.PIPE, text=True) as child:
        output, _ = child.communicate()
    manager.close()
    # 7 is the directory that the child lists.
    assert output.split() == ["shim", "config", *map(str, range(8))]
