"""Device names, and core lists in the kernel's format, such as "0-3,8".

A device is "cpu", "cpu:N" for a set of cores, or "ascend:N" for a card.
"""

from __future__ import annotations

import re
from typing import Collection, FrozenSet, List, Optional, Set

CPU = "cpu"

_CARD = re.compile(r"ascend:(0|[1-9][0-9]{0,2})")
_CPU_LIST = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")
_CORES = re.compile(r"cpu:(0|[1-9][0-9]{0,2})")


def card_of(device: str) -> Optional[int]:
    """Return the number of a card, or None if the device is not a card."""
    match = _CARD.fullmatch(device)
    return int(match.group(1)) if match else None


def has_cores(device: str) -> bool:
    """Return whether the device is a set of cores."""
    return _CORES.fullmatch(device) is not None


def is_cpu(device: str) -> bool:
    """Return whether the device is the CPU or a set of its cores."""
    return device == CPU or has_cores(device)


def parse_cpulist(text: str) -> FrozenSet[int]:
    """Return the core numbers in a core list such as "0-3,8".

    Raises:
        ValueError: `text` is not a core list.
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
    """Return the shortest core list with these core numbers, such as "0-3,8"."""
    ranges: List[List[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], core]
        else:
            ranges.append([core])
    return ",".join("-".join(map(str, each)) for each in ranges)
