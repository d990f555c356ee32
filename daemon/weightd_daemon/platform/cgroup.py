"""Limits and usage of the daemon's control group: memory, CPU time and tasks.

Supports version 1 and version 2 of control groups, and hosts that use both (hybrid), where either version may have a
controller. The kernel reports the values as text in files. If a file is missing or has an unknown format, its value is
treated as unknown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

from weightd_protocol.limits import MAX_COUNT
from weightd_protocol.messages.status import MemoryLimit

T = TypeVar("T")

# Version 1 writes "no limit" as the largest number of whole pages, which depends on the page size; no host has an
# exbibyte of memory.
_NO_LIMIT = 2**60

_NUMBER = re.compile(r"[0-9]{1,19}")

_PRESSURE = re.compile(
    r"some avg10=(?P<percent>[0-9]{1,3}\.[0-9]{2}) avg60=[0-9]{1,3}\.[0-9]{2} avg300=[0-9]{1,3}\.[0-9]{2} total=[0-9]+"
)

# See proc_pid_mountinfo(5): six fields, any number of optional ones, a hyphen, three fields.
_MOUNT = re.compile(
    r"[0-9]+ [0-9]+ [0-9]+:[0-9]+ (?P<root>[^ ]+) (?P<point>[^ ]+) [^ ]+(?: [^ ]+)*? - "
    r"(?P<kind>cgroup2?) [^ ]* (?P<options>[^ ]+)"
)
_ESCAPE = re.compile(r"\\([0-7]{3})")


class _Names(NamedTuple):
    """File names of memory usage and limits, and the key in memory.stat for memory that the kernel reclaims first."""

    usage: str
    limits: tuple[str, ...]
    inactive_key: str


_V2_FILES = _Names("memory.current", ("memory.max", "memory.high"), "inactive_file")
_V1_FILES = _Names("memory.usage_in_bytes", ("memory.limit_in_bytes",), "total_inactive_file")


class ControlGroup(NamedTuple):
    """A control group: the mount point of its hierarchy, its path below the mount point, and its version."""

    mount: Path
    relative_path: PurePosixPath
    is_v2: bool

    @property
    def self_and_ancestors(self) -> list[Path]:
        """The directories of the group and of its visible ancestors, whose limits apply to the group, too."""
        return [self.mount / each for each in (self.relative_path, *self.relative_path.parents)]


def memory(proc: Path = Path("/proc/self")) -> MemoryLimit | None:
    """Return memory usage and limits of the process's control group; None if they are unknown.

    Args:
        proc: the directory of the process in /proc.
    """
    group = _find_group(proc, "memory")
    if group is None:
        return None
    return (
        _v2_memory(_with_memory_controller(group.self_and_ancestors))
        if group.is_v2
        else _v1_memory(group.self_and_ancestors)
    )


def free_bytes(proc: Path = Path("/proc/self")) -> int | None:
    """Return how many more bytes the process's control group may use; None if no limit is known.

    The page cache of inactive files counts as free: the kernel reclaims it before an allocation fails.

    Args:
        proc: the directory of the process in /proc.
    """
    group = _find_group(proc, "memory")
    if group is None:
        return None
    free = (
        _free_in_group(directory, _V2_FILES if group.is_v2 else _V1_FILES) for directory in group.self_and_ancestors
    )
    return min((each for each in free if each is not None), default=None)


class TaskLimit(NamedTuple):
    """Limit of processes and threads in a control group, and their number.

    Attributes:
        directory: the directory of the group.
        limit: the maximum number.
        used: the current number; None if it is unknown.
    """

    directory: Path
    limit: int
    used: int | None


def tasks(proc: Path = Path("/proc/self")) -> TaskLimit | None:
    """Return the smallest limit of processes and threads that applies to the process; None if none is known.

    Args:
        proc: the directory of the process in /proc.
    """
    group = _find_group(proc, "pids")
    found: list[TaskLimit] = []
    for directory in () if group is None else group.self_and_ancestors:
        limit = _read_value(directory / "pids.max", _parse_limit)
        if limit is not None and limit < _NO_LIMIT:
            found.append(TaskLimit(directory, limit, _read_value(directory / "pids.current", _parse_number)))
    return min(found, key=lambda each: each.limit, default=None)


def cores(proc: Path = Path("/proc/self")) -> float | None:
    """Return the CPU quota of the process's control group in cores; None if no limit is known.

    Args:
        proc: the directory of the process in /proc.
    """
    group = _find_group(proc, "cpu")
    if group is None:
        return None
    shares = ((_v2_cores if group.is_v2 else _v1_cores)(directory) for directory in group.self_and_ancestors)
    return min((each for each in shares if each is not None), default=None)


def _find_group(proc: Path, controller: str) -> ControlGroup | None:
    membership, mountinfo = _read_text(proc / "cgroup"), _read_text(proc / "mountinfo")
    return locate(membership, mountinfo, controller) if membership is not None and mountinfo is not None else None


def locate(membership: str, mountinfo: str, controller: str = "memory") -> ControlGroup | None:
    """Return the control group by which a controller limits the process; None if it is not visible.

    The paths in both files are relative to the root of the control group namespace. A mount may begin further down (a
    container without a namespace) or outside of the namespace ("/..").

    Args:
        membership: the content of /proc/PID/cgroup.
        mountinfo: the content of /proc/PID/mountinfo.
        controller: the name of the controller.
    """
    found = _parse_membership(membership, controller)
    if found is None:
        return None
    path, unified = found
    groups = [
        ControlGroup(Path(point), below, unified)
        for point, below in _find_mounts(mountinfo, path, "" if unified else controller)
    ]
    # If there are several mounts, take the one that shows most ancestors.
    return max(groups, key=lambda group: len(group.relative_path.parts), default=None)


def _parse_membership(text: str, controller: str) -> tuple[PurePosixPath, bool] | None:
    """Return the path of the group, and whether it is of version 2."""
    unified: str | None = None
    for line in text.removesuffix("\n").split("\n"):
        hierarchy, *rest = line.split(":", 2)
        if len(rest) != 2:
            return None
        controllers, path = rest
        if controller in controllers.split(","):
            return PurePosixPath(path), False
        if (hierarchy, controllers) == ("0", ""):
            unified = path
    return None if unified is None else (PurePosixPath(unified), True)


def _find_mounts(mountinfo: str, path: PurePosixPath, controller: str) -> Iterator[tuple[str, PurePosixPath]]:
    """Yield each mount point that shows the group, and the group's path below it; controller "" means version 2."""
    for line in mountinfo.split("\n"):
        mount = _MOUNT.fullmatch(line)
        if mount is None or (mount["kind"] == "cgroup2") != (not controller):
            continue
        if controller and controller not in mount["options"].split(","):
            continue
        root = _unescape(mount["root"])
        if path.is_relative_to(root) and ".." not in path.relative_to(root).parts:
            yield _unescape(mount["point"]), path.relative_to(root)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def _with_memory_controller(directories: list[Path]) -> list[Path]:
    """Drop the groups below the first one that has the memory controller: they are accounted in that group."""
    for index, directory in enumerate(directories):
        controllers = _read_text(directory / "cgroup.controllers")
        if controllers is None:
            break
        if "memory" in controllers.split():
            return directories[index:]
    return []


def _v2_memory(directories: list[Path]) -> MemoryLimit | None:
    # The root group of the host has no memory.current; its other values, such as pressure, are not the service's.
    usage = _read_value(directories[0] / "memory.current", _parse_number) if directories else None
    if usage is None:
        return None
    return MemoryLimit(
        usage_bytes=usage,
        limit_bytes=_min_limit(_read_text(each / "memory.max") for each in directories),
        high_bytes=_min_limit(_read_text(each / "memory.high") for each in directories),
        oom_kills=_read_value(directories[0] / "memory.events", _parse_oom_kills),
        pressure_percent=_read_value(directories[0] / "memory.pressure", _parse_pressure),
    )


def _v1_memory(directories: list[Path]) -> MemoryLimit | None:
    usage = _read_value(directories[0] / "memory.usage_in_bytes", _parse_number)
    if usage is None:
        return None
    limits = [_read_text(each / "memory.limit_in_bytes") for each in directories]
    # The kernel reports the limit of all ancestors here, even if they are not mounted.
    hierarchical_limit = _read_value(directories[0] / "memory.stat", _parse_hierarchical_limit)
    return MemoryLimit(
        usage_bytes=usage,
        limit_bytes=_min_limit([*limits, None if hierarchical_limit is None else str(hierarchical_limit)]),
        oom_kills=_read_value(directories[0] / "memory.oom_control", _parse_oom_kills),
    )


def _free_in_group(directory: Path, files: _Names) -> int | None:
    limit = _min_limit(_read_text(directory / each) for each in files.limits)
    if limit is None:
        return None
    used = _read_value(directory / files.usage, _parse_number)
    cached = _read_value(directory / "memory.stat", lambda text: _parse_entry(text, files.inactive_key)) or 0
    # With a limit but without a known usage, no memory can be assumed to be free.
    return 0 if used is None else max(0, limit - max(0, used - cached))


def _v2_cores(directory: Path) -> float | None:
    return _read_value(directory / "cpu.max", _parse_quota)


def _v1_cores(directory: Path) -> float | None:
    # Without a limit, the quota is -1, which does not parse as a number.
    quota, period = (_read_value(directory / f"cpu.cfs_{each}_us", _parse_number) for each in ("quota", "period"))
    return None if quota is None or not period else quota / period


# --- parsing ----------------------------------------------------------------------------------------------------


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "surrogateescape")
    except (OSError, ValueError):
        return None


def _read_value(path: Path, parse: Callable[[str], T]) -> T | None:
    """Return the parsed content of a file; None if the file cannot be read or has an unknown format."""
    text = _read_text(path)
    try:
        return None if text is None else parse(text)
    except ValueError:
        return None


def _min_limit(texts: Iterable[str | None]) -> int | None:
    """Return the smallest limit. A missing file is no limit; if a file has an unknown format, the result is None."""
    try:
        limits = [_parse_limit(text) for text in texts if text is not None]
    except ValueError:
        return None
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _parse_limit(text: str) -> int:
    return _NO_LIMIT if text == "max\n" else _parse_number(text)


def _parse_number(text: str) -> int:
    """Parse a number of bytes or a count; reject a value that exceeds what a status message can carry."""
    digits = text.removesuffix("\n")
    if not _NUMBER.fullmatch(digits) or int(digits) > MAX_COUNT:
        raise ValueError(text)
    return int(digits)


def _parse_quota(text: str) -> float:
    """Return the number of cores, from a quota and its period; raise for the quota "max"."""
    quota, _, period = text.partition(" ")
    if _parse_number(period) == 0:
        raise ValueError(text)
    return _parse_number(quota) / _parse_number(period)


def _parse_oom_kills(text: str) -> int:
    return _parse_entry(text, "oom_kill")


def _parse_hierarchical_limit(text: str) -> int:
    return _parse_entry(text, "hierarchical_memory_limit")


def _parse_entry(text: str, key: str) -> int:
    """Return the number of a key, in a text with one "KEY NUMBER" pair a line."""
    pairs = [line.partition(" ") for line in text.split("\n")]
    values = [value for name, _, value in pairs if name == key]
    if len(values) != 1:
        raise ValueError(f"expected {key} once, got it {len(values)} times")
    return _parse_number(values[0])


def _parse_pressure(text: str) -> float:
    """Return the percentage of the last ten seconds in which some process waited for memory."""
    match = _PRESSURE.fullmatch(text.partition("\n")[0])
    if match is None or float(match["percent"]) > 100:
        raise ValueError(text)
    return float(match["percent"])


def usable_core_count() -> int:
    """Return how many cores this process and its children can use; at least 1."""
    core_count = len(allowed_cores())
    quota = cores()
    return core_count if quota is None else max(1, min(core_count, round(quota)))


def allowed_cores() -> frozenset[int]:
    """Return the cores on which this process and its children may run."""
    return frozenset(os.sched_getaffinity(0))
