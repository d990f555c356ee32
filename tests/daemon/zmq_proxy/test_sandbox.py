"""Privileges left to a sandboxed process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weightd_daemon.zmq_proxy import sandbox

_PROGRAM = """
import os, socket, sys
from weightd_daemon.zmq_proxy import sandbox
status, file = open("/proc/self/status"), open(sys.argv[1], "w")
read, write = os.pipe()
sandbox.drop_privileges()
sandbox.limit_growth(1 << 32)

def attempt(what, *arguments):
    try:
        what(*arguments)
    except (OSError, MemoryError) as error:
        print(type(error).__name__, end=" ")
    else:
        print("could", end=" ")

print(*[line.split()[1] for line in status if line.startswith(("CapPrm", "CapEff", "CapBnd", "NoNewPrivs"))])
attempt(lambda: (file.write("x"), file.flush()))
attempt(lambda: bytearray(1 << 33))
attempt(os.write, write, b"x")
attempt(open, "/etc/passwd")
attempt(open, sys.argv[1] + "2", "w")
attempt(os.execv, sys.executable, ["python", "-c", "print('could')"])
attempt(os.kill, os.getppid(), 0)
attempt(socket.create_connection, ("127.0.0.1", 9))
print(flush=True)
os._exit(0)
"""
_NO, _NOT_ALLOWED = "0000000000000000", "PermissionError"


def test_sandbox_allows_no_files_ports_or_processes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "file")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    rights, tries = done.stdout.splitlines()
    assert rights.split() == [_NO, _NO, _NO if os.getuid() == 0 else rights.split()[2], "1"]
    file, memory, pipe, *others = tries.split()
    assert (file, memory, pipe) == ("OSError", "MemoryError", "could")
    if sandbox.landlock_version() < 6:
        pytest.skip("needs Landlock ABI 6")
    assert others == [_NOT_ALLOWED] * 5
