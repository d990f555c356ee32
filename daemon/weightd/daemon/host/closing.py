"""Closes descriptors that clients have sent in threads, one for each user, so that nobody else waits.

close() waits for the file system of the file, which may be a user's own and never answer, for a socket with SO_LINGER
until its peer has read, and for the last descriptor of memory until the kernel has freed it: half a second for a GiB.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections import deque

from weightd.daemon.host.shortage import explained
from weightd.shared.seldom import Seldom

_log = logging.getLogger("weightd")

# Descriptors of one user that may wait. Beyond that the connections of this user end.
MAX_WAITING = 64

# Threads in all. A user of this host has one user id, which no user namespace changes; but with subordinate ids
# (/etc/subuid) it has thousands of them.
_MAX_THREADS = 32

# What a thread that is being started has in the place of its identity.
_STARTING = 0

_CHUNK_BYTES = 64 * 1024

_WARNINGS_S = 60.0

# To a process that has no handler for it this signal does nothing.
INTERRUPT = signal.SIGURG


class DescriptorsError(Exception):
    """A peer has sent descriptors where there is no use for any."""


class Closing:
    """Closes descriptors in a thread of the user that has sent them, which runs while there is something to close.

    Past 32 threads the descriptors of further users wait until a thread has closed all of its user. Where many of a
    user wait its thread is interrupted by `INTERRUPT`, which needs a handler: that ends the wait of a socket with
    SO_LINGER, but not that for a file system.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By user: those that wait, after the one that is being closed.
        self._waiting: dict[str, deque[int]] = {}
        # The users whose descriptors a thread is closing, and the identity of that.
        self._served: dict[str, int] = {}
        self._warnings = Seldom(_WARNINGS_S)

    def is_behind(self, user: str) -> bool:
        """Return whether so many descriptors of a user wait that it may send no more for now."""
        # The threads only take away: without the lock the answer is at worst a moment old.
        waiting = self._waiting.get(user)
        if waiting is None or len(waiting) < MAX_WAITING:
            return False
        # There may be no thread yet, and nothing else that would start one.
        self._begin(user)
        self._interrupt(user)
        return True

    def close(self, user: str, descriptor: int) -> None:
        """Close a descriptor of a user at some time."""
        with self._lock:
            self._waiting.setdefault(user, deque()).append(descriptor)
        self._begin(user)

    def close_socket(self, user: str, connection: socket.socket) -> None:
        """Close a connection of a user, at once unless descriptors are among its unread data.

        The kernel closes these with the connection, in the thread that closes it.
        """
        with contextlib.suppress(OSError):
            # The peer can send nothing more from now on, and sees the end at once.
            connection.shutdown(socket.SHUT_RDWR)
        if _has_unread_descriptors(connection):
            self.close(user, connection.detach())
            # Where many wait, each one more has an earlier one interrupted.
            self.is_behind(user)
        else:
            connection.close()

    def _begin(self, user: str) -> None:
        with self._lock:
            if user in self._served or user not in self._waiting or len(self._served) >= _MAX_THREADS:
                return
            self._served[user] = _STARTING
        try:
            threading.Thread(target=self._serve, args=(user,), name="closing", daemon=True).start()
        except RuntimeError as error:
            # The descriptors wait for the next call.
            with self._lock:
                del self._served[user]
            if self._warnings.tell("", time.monotonic()) is not None:
                _log.warning("descriptors of clients are not closed yet: %s", explained(str(error)))

    def _interrupt(self, user: str) -> None:
        with self._lock:
            thread = self._served.get(user, _STARTING)
            if thread != _STARTING and callable(signal.getsignal(INTERRUPT)):
                signal.pthread_kill(thread, INTERRUPT)

    def _serve(self, user: str | None) -> None:
        """Close the descriptors of a user, and then those of users that have no thread."""
        while user is not None:
            with self._lock:
                self._served[user] = threading.get_ident()
            waiting = self._waiting[user]
            # Linux has freed the number whatever close() returns; what the file system reports concerns its owner.
            with contextlib.suppress(OSError):
                os.close(waiting[0])
            with self._lock:
                waiting.popleft()
                if waiting:
                    continue
                del self._waiting[user], self._served[user]
                user = next((each for each in self._waiting if each not in self._served), None)
                if user is not None:
                    self._served[user] = _STARTING


def receive(connection: socket.socket, nbytes: int) -> bytes:
    """Read from a Unix socket whose peer may send no descriptors.

    Raises:
        DescriptorsError: there are some. They are left unread, for `close_socket`: the kernel would close them before
            the read returned.
        OSError: as for any read.
    """
    data, _, flags, _ = connection.recvmsg(nbytes, 0, socket.MSG_PEEK)
    if flags & socket.MSG_CTRUNC:
        raise DescriptorsError("expected data alone, got descriptors")
    return connection.recv(len(data)) if data else b""


def _has_unread_descriptors(connection: socket.socket) -> bool:
    """Return whether descriptors are among the unread data; what comes before them is read and dropped."""
    with contextlib.suppress(OSError):
        connection.setblocking(False)
        try:
            while receive(connection, _CHUNK_BYTES):
                pass
        except DescriptorsError:
            return True
    return False
