"""The routing ids that the library gives to peers that have chosen none."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None)


def seed_routing_ids() -> None:
    """Let nobody know which ones the next ROUTER socket will give.

    libzmq 4.3.5 counts them up from a number of rand(), which it never seeds, and aborts the process when one that it
    gives is taken: by a peer that has announced it as its own.
    """
    _libc.srand(int.from_bytes(os.urandom(4), "little"))
