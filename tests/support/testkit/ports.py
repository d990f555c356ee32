"""Unused ports of the loopback interface."""

from __future__ import annotations

import contextlib
import socket
from typing import List


def free_ports(count: int) -> List[int]:
    """Return `count` different ports. Other processes may bind them at any time."""
    with contextlib.ExitStack() as stack:
        # CPython 3.7 has no create_server.
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in probes:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in probes]
