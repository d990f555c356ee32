"""The TCP addresses that the daemon may listen on, and a client connect to."""

from __future__ import annotations

import re
from typing import Tuple

MAX_PORT = 65535

EXPECTED_FORM = f"tcp://HOST:PORT, PORT from 1 to {MAX_PORT}"
"""For people: what `is_address` takes."""

_ADDRESS = re.compile(r"tcp://(\[[^\]\s]+\]|[^:\s]+):([0-9]{1,5})")


def is_address(address: str) -> bool:
    """Return whether libzmq takes this text for the host and the port that it names.

    It takes ports modulo 65,536, and 0 for any that is free: both sides would be somewhere else in silence.
    """
    match = _ADDRESS.fullmatch(address)
    return match is not None and 1 <= int(match.group(2)) <= MAX_PORT


def split_address(address: str) -> Tuple[str, int]:
    """Return host and port of what `is_address` takes; an IPv6 host is in brackets.

    Raises:
        ValueError: it is none.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(address)
    return match.group(1), int(match.group(2))
