"""What a gate does from the moment in which it was forked."""

from __future__ import annotations

import ctypes
import os
import socket

import zmq
from zmq.utils.garbage import gc as library_frames

from weightd.daemon.gate import confinement
from weightd.daemon.gate.doorman import HANDSHAKE_MS, allow_descriptors
from weightd.daemon.gate.gate import LINGER_S, Gate
from weightd.daemon.gate.link import Terms
from weightd.daemon.gate.memory import Memory, go_before_the_daemon
from weightd.shared.stream import Stream

# Requests of one client that wait to be read, whatever their size; one that sends faster waits in its own socket.
_RCVHWM = 64

_OPTIONS = {
    zmq.RCVHWM: _RCVHWM,
    zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
    # The kernel finds out within a minute that the host of a TCP client is gone. On a unix socket it knows at once.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}

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
    _seed()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, int(1000 * LINGER_S))
    router.setsockopt(zmq.MAXMSGSIZE, terms.max_frame_bytes)
    # A peer that is gone is an error here, not a silent drop.
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    for option, value in _OPTIONS.items():
        router.setsockopt(option, value)
    gate = Gate(router, Stream(link), terms, memory)
    _accept(router, listener, terms.address)
    gate.run()
    # What was said last gets its time to leave.
    gate.close()
    router.close()
    context.term()


def _seed() -> None:
    """Let nobody know which routing ids the next ROUTER socket will give.

    libzmq 4.3.5 counts them up from a number of rand(), which it never seeds, and aborts the process when one that it
    gives is taken: by a peer that has announced it as its own.
    """
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))


def _accept(router: zmq.Socket[bytes], listener: socket.socket, address: str) -> None:
    if listener.family == socket.AF_INET6:
        router.setsockopt(zmq.IPV6, 1)
    # The library's thread accepts when the kernel says that somebody is there. Where another process, or a gate that is
    # being closed, was faster, an accept that blocks would hold up the thread until the next one comes.
    listener.setblocking(False)
    router.setsockopt(zmq.USE_FD, listener.detach())
    router.bind(address)
