"""Explains errors by the system limit that caused them: the resource, the limit's value, and how to raise the limit.

The errors themselves name no limit, for example when Python, libzmq or an engine cannot start a thread.
"""

from __future__ import annotations

import enum
import re
import resource
import threading
from collections.abc import Mapping
from pathlib import Path

from weightd_daemon.platform import cgroup
from weightd_daemon.platform.directories import PathInUse

_EAGAIN_TEXT = "Resource temporarily unavailable"


class ResourceShortage(enum.Enum):
    """Resource that a process could not get because a limit was reached. The value is the resource in words."""

    TASKS = "a process or thread"
    FILES = "an open file"
    HOST_FILES = "an open file of the host"
    MEMORY = "memory"


# Texts that show a shortage, in the order in which they are searched. HOST_FILES must come before FILES, because the
# text of HOST_FILES contains the text of FILES.
_PATTERNS = {
    ResourceShortage.TASKS: re.compile(
        r"can't start new thread"
        rf"|pthread_create\b[^|]{{0,200}}(?:fail|EAGAIN|{_EAGAIN_TEXT})"
        rf"|{_EAGAIN_TEXT} \([\w/]*thread\.cpp"
        r"|(?:\bfork\b|fork_exec|\bclone\b|posix_spawn|system_error|cannot (?:be )?(?:start|run)|cannot take a snap)"
        rf".{{0,300}}{_EAGAIN_TEXT}",
        re.DOTALL,
    ),
    ResourceShortage.HOST_FILES: re.compile("Too many open files in system"),
    ResourceShortage.FILES: re.compile("Too many open files"),
    ResourceShortage.MEMORY: re.compile(r"Cannot allocate memory|\bMemoryError\b|std::bad_alloc"),
}


def find_shortage(text: str) -> ResourceShortage | None:
    """Return the resource whose shortage an error text or the end of a log shows; None if it shows none."""
    return next((what for what, sign in _PATTERNS.items() if sign.search(text)), None)


def with_limit_hint(text: str, proc: Path = Path("/proc/self")) -> str:
    """Return an error text. If it shows that a system limit was reached, put the limit and how to raise it in front.

    Args:
        text: the error, or the end of a child's log.
        proc: the directory of this process in /proc. Its limits also apply to its children.
    """
    kind = find_shortage(text)
    return text if kind is None else f"{_EXPLANATIONS[kind](proc)}; original error: {text}"


def check_threads(count: int) -> None:
    """Check that this process can start `count` more threads.

    libzmq would abort the process if it could not start its threads.

    Raises:
        PathInUse: the threads cannot be started; the text names the limit.
    """
    stop = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=stop.wait)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise PathInUse(with_limit_hint(str(error))) from None
    finally:
        stop.set()
        for thread in started:
            thread.join()


def _explain_tasks(proc: Path) -> str:
    limits = _own_limit("RLIMIT_NPROC", resource.RLIMIT_NPROC, "LimitNPROC= or ulimit -u")
    group = cgroup.tasks(proc)
    if group is not None:
        limits[f"pids.max {group.limit} of {group.directory}{_used_suffix(group.used)}"] = (
            "TasksMax= or the container's limit"
        )
    return _format_explanation(
        "cannot start a process or thread: the limit of processes and threads is reached",
        limits or {"kernel.threads-max or kernel.pid_max": "these settings of the host"},
    )


def _explain_files(_: Path) -> str:
    limits = _own_limit("RLIMIT_NOFILE", resource.RLIMIT_NOFILE, "LimitNOFILE= or ulimit -n")
    return _format_explanation("cannot open a file: the limit of open files is reached", limits)


def _explain_host_files(_: Path) -> str:
    limits = {"fs.file-max": "this setting of the host"}
    return _format_explanation("cannot open a file: the limit of open files of the host is reached", limits)


def _explain_memory(proc: Path) -> str:
    limits = _own_limit("RLIMIT_AS", resource.RLIMIT_AS, "ulimit -v")
    group = cgroup.memory(proc)
    if group is not None and group.limit_bytes is not None:
        used = _used_suffix(group.usage_bytes)
        limits[f"{group.limit_bytes} bytes for the control group{used}"] = "MemoryMax= or the container's limit"
    return _format_explanation(
        "cannot allocate memory: the limit of memory is reached",
        limits or {"the memory of the host, vm.overcommit_memory or vm.max_map_count": "it, or load fewer workers"},
    )


_EXPLANATIONS = {
    ResourceShortage.TASKS: _explain_tasks,
    ResourceShortage.FILES: _explain_files,
    ResourceShortage.HOST_FILES: _explain_host_files,
    ResourceShortage.MEMORY: _explain_memory,
}


def _own_limit(name: str, number: int, remedy: str) -> dict[str, str]:
    """Return this process's soft limit in words, mapped to `remedy` (how to raise it); empty if it has no limit."""
    soft, _ = resource.getrlimit(number)
    return {} if soft == resource.RLIM_INFINITY else {f"{name} {soft}": remedy}


def _used_suffix(used: int | None) -> str:
    return "" if used is None else f", {used} in use"


def _format_explanation(what: str, limits: Mapping[str, str]) -> str:
    """Return a sentence: the problem `what`, the limits that may be its cause, and how to raise each of them."""
    return f"{what} ({'; '.join(limits)}); raise {', '.join(limits.values())}"
