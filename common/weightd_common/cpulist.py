"""Lists of cores, as the kernel writes them: "0-3,8"."""

from __future__ import annotations

import re
from typing import Collection, FrozenSet, List, Set

_LIST = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")


def parse_cpulist(text: str) -> FrozenSet[int]:
    """Return the cores of a list.

    Raises:
        ValueError: it is none.
    """
    if not _LIST.fullmatch(text):
        raise ValueError(text)
    cores: Set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ValueError(text)
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def format_cpulist(cores: Collection[int]) -> str:
    """Return the list that `parse_cpulist` reads, in its shortest form."""
    ranges: List[List[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], core]
        else:
            ranges.append([core])
    return ",".join("-".join(map(str, each)) for each in ranges)
