"""Search for the processes of a service in /proc, whether spawned or forked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, Iterable, List, Mapping

SHIM_MARK = b"processes.shim import process"

# Text in the command line or the name of a process: its role. The first match counts.
_ROLES: Mapping[str, str] = {
    "weightd_worker.forkserver": "fork server",
    SHIM_MARK.decode(): "shim",
    "weightd_daemon.processes.snapshotter": "snapshotter",
    "name zmq-proxy ": "proxy",
    "name weightd-zygote": "zygote",
}


def shims(directory: Path) -> List[int]:
    """Return the pids of the shims with this private directory, even if the daemon that started them has exited."""
    there = os.fsencode(directory)
    return [pid for pid in _pids() if there in _command(pid) and SHIM_MARK in _command(pid)]


def families(roots: Iterable[int]) -> List[int]:
    """Return the pids in `roots` and of all their descendants, without processes that have exited."""
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
    """Return the role of a process that is neither the daemon nor belongs to a model; "other" if it is unknown."""
    seen = _command(pid).decode("utf-8", "replace") + "name " + _read(pid, "comm").decode("utf-8", "replace")
    return next((name for sign, name in _ROLES.items() if sign in seen), "other")


def log(pid: int) -> str:
    """Return the path of a process's stderr, or "" if it cannot be read."""
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
