"""Cores: which there are, and how many processes can compute at the same time with the time that their group has."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from weightd.daemon.host import cgroup

_LIST = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")


def usable() -> int:
    """Return how many cores there are for this process and its children; at least 1."""
    cores = len(allowed())
    quota = cgroup.cores()
    return cores if quota is None else max(1, min(cores, round(quota)))


def allowed() -> frozenset[int]:
    """Return the cores on which this process and its children may run."""
    return frozenset(os.sched_getaffinity(0))


def parse(text: str) -> frozenset[int]:
    """Return the cores of a list as the kernel writes them: "0-3,8".

    Raises:
        ValueError: it is no such list.
    """
    if not _LIST.fullmatch(text):
        raise ValueError(text)
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
        if int(last or first) < int(first):
            raise ValueError(text)
    return frozenset(cores)


def listed(cores: Collection[int]) -> str:
    """Return the list that `parse` reads, in its shortest form."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], core]
        else:
            ranges.append([core])
    return ",".join("-".join(map(str, each)) for each in ranges)
