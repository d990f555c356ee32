"""The names of devices: "cpu", "cpu:N" for a set of its cores, and "ascend:N" for the card of that number."""

from __future__ import annotations

import re
from typing import Optional

CPU = "cpu"

_CARD = re.compile(r"ascend:(0|[1-9][0-9]{0,2})")
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
