"""The names of devices, and lists of cores as the kernel writes them: "0-3,8".

A device is "cpu", "cpu:N" for a set of its cores, or "ascend:N" for the card of that number.
"""

from __future__ import annotations

import re
from typing import Collection, FrozenSet, List, Optional, Set

CPU = "cpu"

_CARD = re.compile(r"ascend:(0|[1-9][0-9]{0,2})")
_CPU_LIST = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")
_CORES = re.compile(r"cpu:(0|[1-9][0-9]{0,2})")


def card_of(device: str) -> Optional[int]:
    """Return the number of the card, None where the name is no card's."""
    match = _CARD.fullmatch(device)
    return int(match.group(1)) if match else None


def has_cores(device: str) -> bool:
    """Whether the name is that of a set of cores."""
    return _CORES.fullmatch(device) is not None


def is_cpu(device: str) -> bool:
    """Whether the name is that of the CPU, or of some of its cores."""
    return device == CPU or has_cores(device)


def parse_cpulist(text: str) -> FrozenSet[int]:
    """Return the cores of a list.

    Raises:
        ValueError: it is none.
    """
    if not _CPU_LIST.fullmatch(text):
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
