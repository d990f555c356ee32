"""The connection to the daemon, which may end and come back: a daemon that restarts leaves its children running."""

from __future__ import annotations

import select

import zmq

from weightd.shared import monitor

# How soon after its start the next daemon hears of its children. In between they ask the kernel this often.
_RECONNECT_MS = 20

# Plain integers: the library's own constants cost a microsecond each time.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


class Connection:
    """Waits for messages, and notices when the connection has been made anew.

    Args:
        socket: a DEALER, not connected yet.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket = socket
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._connections = 0
        # Cheaper than the library's own poll: this is done before each request of an idle worker.
        self._readable = select.epoll()
        for each in (socket, self._monitor):
            self._readable.register(int(each.getsockopt(zmq.FD)), select.EPOLLIN)

    def wait(self) -> bool:
        """Return False when a message can be read, True when another daemon is there."""
        # The descriptors only tell that the library has something to look at; asking for the events is looking.
        while not int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
            if int(self._monitor.getsockopt(_EVENTS)) & _POLLIN:
                monitor.receive(self._monitor)
                self._connections += 1
                if self._connections > 1:
                    return True
            else:
                self._readable.poll()
        return False
