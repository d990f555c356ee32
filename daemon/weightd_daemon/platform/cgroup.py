"""Limits and usage of the daemon's control group: memory, CPU time and tasks.

Supports control groups of version 1 and version 2, and hosts with both (hybrid), where each controller is in one of the
two versions. The kernel reports the values as text in files. If a file is missing or has an unknown format, its value
is treated as unknown.
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

# Limits of at least this number of bytes mean "no limit": version 1 reports a missing limit as the largest multiple of
# the page size. The number is an exbibyte, more memory than any host has.
_NO_LIMIT = 2**60

_NUMBER = re.compile(r"[0-9]{1,19}")

_PRESSURE = re.compile(
    r"some avg10=(?P<percent>[0-9]{1,3}\.[0-9]{2}) avg60=[0-9]{1,3}\.[0-9]{2} avg300=[0-9]{1,3}\.[0-9]{2} total=[0-9]+"
)

# A line of mountinfo, see proc_pid_mountinfo(5): six fields, any number of optional fields, a hyphen, three fields.
_MOUNT = re.compile(
    r"[0-9]+ [0-9]+ [0-9]+:[0-9]+ (?P<root>[^ ]+) (?P<point>[^ ]+) [^ ]+(?: [^ ]+)*? - "
    r"(?P<kind>cgroup2?) [^ ]* (?P<options>[^ ]+)"
)
_ESCAPE = re.compile(r"\\([0-7]{3})")


class _Names(NamedTuple):
    """The kernel's names for memory figures of a group: the usage file, the limit files, and a key in memory.stat.

    `inactive_key` is the key of the page cache that the kernel reclaims first.
    """

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
        """The directories of the group and its visible ancestors. The limits of an ancestor apply to the group, too."""
        return [self.mount / each for each in (self.relative_path, *self.relative_path.parents)]


def memory(proc: Path = Path("/proc/self")) -> MemoryLimit | None:
    """Return the memory usage and limits of the process's control group; None if the usage is unknown.

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
    """Limit on the tasks (processes and threads) of a control group, and how many tasks the group has.

    Attributes:
        directory: the directory of the group.
        limit: the maximum number of tasks.
        used: the current number of tasks; None if it is unknown.
    """

    directory: Path
    limit: int
    used: int | None


def tasks(proc: Path = Path("/proc/self")) -> TaskLimit | None:
    """Return the lowest task limit among the process's control group and its ancestors; None if no limit is known.

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
    """Return the control group in which a controller limits the process; None if no mount shows the group.

    The paths in both files are relative to the root of the control group namespace. The root of a mount may be a group
    below the root of the namespace (in a container without its own namespace) or a group outside of the namespace
    ("/..").

    Args:
        membership: the content of /proc/PID/cgroup.
        mountinfo: the content of /proc/PID/mountinfo.
        controller: the name of the controller, such as "memory", "cpu" or "pids".
    """
    found = _parse_membership(membership, controller)
    if found is None:
        return None
    path, unified = found
    groups = [
        ControlGroup(Path(point), below, unified)
        for point, below in _find_mounts(mountinfo, path, "" if unified else controller)
    ]
    # Of several mounts that show the group, take the mount that shows the most ancestors, because their limits apply,
    # too.
    return max(groups, key=lambda group: len(group.relative_path.parts), default=None)


def _parse_membership(text: str, controller: str) -> tuple[PurePosixPath, bool] | None:
    """Return the path of the process's group, and whether the group is of version 2; None if it is unknown."""
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
    """Return the first directory whose group has the memory controller, and the directories of its ancestors.

    The kernel counts the memory of groups without this controller in their nearest ancestor that has it.
    """
    for index, directory in enumerate(directories):
        controllers = _read_text(directory / "cgroup.controllers")
        if controllers is None:
            break
        if "memory" in controllers.split():
            return directories[index:]
    return []


def _v2_memory(directories: list[Path]) -> MemoryLimit | None:
    # The host's root group has no memory.current. Return None for it, because its other values, such as the pressure,
    # describe the whole host and not the daemon.
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
    # This value in memory.stat includes the limits of all ancestors, even if no mount shows an ancestor.
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
    # If the group has a limit but its usage is unknown, assume that no memory is free.
    return 0 if used is None else max(0, limit - max(0, used - cached))


def _v2_cores(directory: Path) -> float | None:
    return _read_value(directory / "cpu.max", _parse_quota)


def _v1_cores(directory: Path) -> float | None:
    # A quota of -1 means "no limit". `_parse_number` rejects it, so the quota is None then.
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
    """Return the lowest limit in the contents of limit files; None without a limit, or if a format is unknown.

    A content of None stands for a missing file and sets no limit.
    """
    try:
        limits = [_parse_limit(text) for text in texts if text is not None]
    except ValueError:
        return None
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _parse_limit(text: str) -> int:
    return _NO_LIMIT if text == "max\n" else _parse_number(text)


def _parse_number(text: str) -> int:
    """Parse a number of bytes or a count; raise ValueError if it is too large for a status message."""
    digits = text.removesuffix("\n")
    if not _NUMBER.fullmatch(digits) or int(digits) > MAX_COUNT:
        raise ValueError(text)
    return int(digits)


def _parse_quota(text: str) -> float:
    """Return the number of cores from the text "QUOTA PERIOD"; raise ValueError for "max", which is no limit."""
    quota, _, period = text.partition(" ")
    if _parse_number(period) == 0:
        raise ValueError(text)
    return _parse_number(quota) / _parse_number(period)


def _parse_oom_kills(text: str) -> int:
    return _parse_entry(text, "oom_kill")


def _parse_hierarchical_limit(text: str) -> int:
    return _parse_entry(text, "hierarchical_memory_limit")


def _parse_entry(text: str, key: str) -> int:
    """Return the number of a key in a text that has one "KEY NUMBER" pair in each line."""
    pairs = [line.partition(" ") for line in text.split("\n")]
    values = [value for name, _, value in pairs if name == key]
    if len(values) != 1:
        raise ValueError(f"expected {key} once, got it {len(values)} times")
    return _parse_number(values[0])


def _parse_pressure(text: str) -> float:
    """Return the percentage of the last 10 s in which some process waited for memory (file memory.pressure)."""
    match = _PRESSURE.fullmatch(text.partition("\n")[0])
    if match is None or float(match["percent"]) > 100:
        raise ValueError(text)
    return float(match["percent"])


def usable_core_count() -> int:
    """Return how many cores this process and its children can use by affinity and CPU quota; at least 1."""
    core_count = len(allowed_cores())
    quota = cores()
    return core_count if quota is None else max(1, min(core_count, round(quota)))


def allowed_cores() -> frozenset[int]:
    """Return the numbers of the cores on which this process and its children may run."""
    return frozenset(os.sched_getaffinity(0))
