"""What a gate does from the moment in which it was forked."""

from __future__ import annotations

import functools
import signal
import socket
import sys
from typing import TYPE_CHECKING

from weightd.daemon.gate import confinement
from weightd.daemon.gate.gate import Gate
from weightd.daemon.gate.link import Terms, to_daemon
from weightd.daemon.gate.memory import go_before_the_daemon, mapped_bytes
from weightd.daemon.gate.separate import Separate
from weightd.daemon.host.accepting import refuse_descriptors
from weightd.daemon.host.crowding import allow_descriptors

if TYPE_CHECKING:
    from weightd.daemon.host.closing import Closing

# Beside what it may take for clients: what the allocator sets aside for each thread, and what only looks like memory.
_MARGIN_BYTES = 256 * 1024 * 1024


def run(link: socket.socket, listener: socket.socket, terms: Terms) -> None:
    """Serve until the daemon's end of the link is closed."""
    confinement.name_process(f"gate {terms.name}")
    allow_descriptors()
    go_before_the_daemon()
    mapped = mapped_bytes()
    listener.setblocking(False)
    separate = Separate() if terms.secret else None
    closing = None if refuse_descriptors(listener) else _closing()
    gate = Gate(listener, to_daemon(link), terms, separate, closing)
    confinement.give_up_rights()
    if separate is not None:
        separate.start()
    # What a client announces is mapped, and then found to be too much.
    confinement.give_up_growth(mapped + 2 * terms.max_memory_bytes + _MARGIN_BYTES, threads=closing is not None)
    gate.run()
    gate.close()


def _closing() -> Closing:
    """Return what closes descriptors that clients send, before Linux 6.16. It starts threads when some come."""
    from weightd.daemon.host.closing import INTERRUPT, Closing  # noqa: PLC0415 - a gate that needs none does without

    signal.signal(INTERRUPT, _interrupted)
    return Closing(functools.partial(print, file=sys.stderr))


def _interrupted(number: int, frame: object) -> None:
    """Only end the system call that waits."""
