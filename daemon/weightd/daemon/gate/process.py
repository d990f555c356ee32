"""What a gate does from the moment in which it was forked."""

from __future__ import annotations

import socket

import zmq
from zmq.utils.garbage import gc as library_frames

from weightd.daemon.gate import confinement
from weightd.daemon.gate.gate import Gate
from weightd.daemon.gate.link import Terms
from weightd.daemon.gate.listening import accept, make_router
from weightd.daemon.gate.memory import Memory, go_before_the_daemon
from weightd.daemon.host.crowding import allow_descriptors
from weightd.shared.stream import Stream

# Beside what it may take for clients: what the allocator sets aside for each thread, and what only looks like memory.
_MARGIN_BYTES = 256 * 1024 * 1024


def run(link: socket.socket, listener: socket.socket, terms: Terms) -> None:
    """Serve until the daemon's end of the link is closed."""
    confinement.name_process(f"gate {terms.name}")
    allow_descriptors()
    go_before_the_daemon()
    memory = Memory()
    confinement.give_up_rights()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # All threads there will be: the library's, and the one that lets go of frames it has written.
    context.socket(zmq.PAIR).close()
    library_frames.start()
    most = memory.mapped_bytes() + terms.max_memory_bytes + _MARGIN_BYTES
    confinement.give_up_growth(most)
    router = make_router(context, terms.max_frame_bytes, terms.secret)
    gate = Gate(router, Stream(link), terms, memory)
    accept(router, listener, terms.address)
    gate.run()
    # What was said last gets its time to leave.
    gate.close()
    router.close()
    context.term()
