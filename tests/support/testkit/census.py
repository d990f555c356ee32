"""The processes of a service, found in /proc, however each came to be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, Iterable, List, Mapping

SHIM_MARK = b"processes.shim import process"

# What the command line or the name of a process that is no model's shows it to be; the first that fits.
_ROLES: Mapping[str, str] = {
    "weightd_worker.forkserver": "fork server",
    SHIM_MARK.decode(): "shim",
    "weightd_daemon.processes.snapshotter": "snapshotter",
    "name zmq-proxy ": "proxy",
    "name weightd-zygote": "zygote",
}


def shims(directory: Path) -> List[int]:
    """Return the shims that have this private directory; the daemon that has started one may be gone."""
    there = os.fsencode(directory)
    return [pid for pid in _pids() if there in _command(pid) and SHIM_MARK in _command(pid)]


def families(roots: Iterable[int]) -> List[int]:
    """Return the processes in `roots`, and all that they have started, in turn. What has exited is left out."""
    children: Dict[int, List[int]] = {}
    for pid in _pids():
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        if fields and fields[0] not in (b"Z", b"X"):
            children.setdefault(int(fields[1]), []).append(pid)
    found: List[int] = []
    left = list(roots)
    while left:
        found.append(left.pop(0))
        left += sorted(set(children.get(found[-1], ())) - {*found, *left})
    return found


def role(pid: int) -> str:
    """Return what a process is that is neither the daemon nor one of a model."""
    seen = _command(pid).decode("utf-8", "replace") + "name " + _read(pid, "comm").decode("utf-8", "replace")
    return next((name for sign, name in _ROLES.items() if sign in seen), "other")


def log(pid: int) -> str:
    """Return the path of the file to which a process writes its errors; "" where that is not known."""
    try:
        return os.readlink(f"/proc/{pid}/fd/2")
    except OSError:
        return ""


def _pids() -> List[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]  # noqa: PTH208 - there are hundreds


def _command(pid: int) -> bytes:
    return _read(pid, "cmdline")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
