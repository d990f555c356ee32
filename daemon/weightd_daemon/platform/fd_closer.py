"""Thread pool that closes descriptors sent by clients, one thread for each user, so that no user delays the others.

close() can block: on the file's file system, which may belong to the user and never answer; on a socket with SO_LINGER
until its peer has read all data; and on the last descriptor of memory until the kernel has freed that memory, which
takes half a second for a GiB.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from weightd_common.rate_limits import RateLimitedLog

# Limit of waiting descriptors of one user. Beyond it, the connections of this user are closed.
MAX_PENDING = 64

# Limit of all threads. A user of this host usually has one user id, which no user namespace changes; with subordinate
# ids (/etc/subuid) it has thousands of them.
_MAX_THREADS = 32

# An idle thread ends after this time. Starting a thread takes longer than most closes, so it does not end at once.
_IDLE_TIMEOUT_S = 1.0

# Identity of a thread that has been assigned to a user, but has not started to close yet.
_NO_THREAD = 0

_CHUNK_BYTES = 64 * 1024

_WARNING_INTERVAL_S = 60.0

# This signal does nothing to a process that has no handler for it.
INTERRUPT = signal.SIGURG


class UnexpectedDescriptors(Exception):
    """A peer has sent descriptors in a place where none are expected."""


class DescriptorCloser:
    """Thread pool that closes descriptors; each thread handles one user at a time.

    Past 32 threads, the descriptors of further users wait until a thread has closed all descriptors of its user. If too
    many descriptors of a user wait, the user's thread is interrupted by `INTERRUPT`, which needs a handler: the signal
    ends the wait of a socket with SO_LINGER, but not the wait for a file system.

    Args:
        report: called with a text for the log when no thread can be started.

    Attributes:
        pending: the waiting descriptors by user; if it is empty, no user is backlogged.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._lock = threading.Lock()
        # By user: the descriptor that is being closed first, then the waiting ones.
        self.pending: dict[str, deque[int]] = {}
        # The users whose descriptors are being closed, with the identity of the thread that does it.
        self._active_threads: dict[str, int] = {}
        self._thread_count = 0
        # One queue for each idle thread, by which it receives its next user.
        self._idle_inboxes: list[SimpleQueue[str]] = []
        self._rate_limited_log = RateLimitedLog(_WARNING_INTERVAL_S)

    def is_backlogged(self, user: str) -> bool:
        """Return whether too many descriptors of a user wait; if so, interrupt the user's thread."""
        # Threads only remove entries, so without the lock the result is at worst a moment old.
        waiting = self.pending.get(user)
        if waiting is None or len(waiting) < MAX_PENDING:
            return False
        # If no thread could be started before, nothing else would try again.
        self._assign_thread(user)
        self._interrupt(user)
        return True

    def close(self, user: str, descriptor: int) -> None:
        """Close a descriptor of a user in a thread, at some time."""
        with self._lock:
            self.pending.setdefault(user, deque()).append(descriptor)
        self._assign_thread(user)

    def close_socket(self, user: str, connection: socket.socket) -> None:
        """Close a connection of a user: at once, or in a thread if its unread data contains descriptors.

        The kernel closes these descriptors together with the connection, in the thread that closes it.
        """
        with contextlib.suppress(OSError):
            # From now on the peer can send nothing more, and it sees the end of the connection at once.
            connection.shutdown(socket.SHUT_RDWR)
        if _has_unread_descriptors(connection):
            self.close(user, connection.detach())
            # If too many descriptors wait, each further one interrupts the close of an earlier one.
            self.is_backlogged(user)
        else:
            connection.close()

    def _assign_thread(self, user: str) -> None:
        """Assign an idle or a new thread to a user; without one, the next thread that becomes free takes the user."""
        with self._lock:
            if user in self._active_threads or user not in self.pending:
                return
            if self._idle_inboxes:
                self._active_threads[user] = _NO_THREAD
                self._idle_inboxes.pop().put(user)
                return
            if self._thread_count >= _MAX_THREADS:
                return
            self._thread_count += 1
            self._active_threads[user] = _NO_THREAD
        try:
            threading.Thread(target=self._run_thread, args=(user,), name="closing", daemon=True).start()
        except RuntimeError as error:
            # The descriptors wait for the next call of this method.
            with self._lock:
                self._thread_count -= 1
                del self._active_threads[user]
            if self._rate_limited_log.record("", time.monotonic()) is not None:
                self._report(f"descriptors of clients are not closed yet: {error}")

    def _interrupt(self, user: str) -> None:
        with self._lock:
            thread = self._active_threads.get(user, _NO_THREAD)
            if thread != _NO_THREAD and callable(signal.getsignal(INTERRUPT)):
                signal.pthread_kill(thread, INTERRUPT)

    def _run_thread(self, user: str | None) -> None:
        """Close the descriptors of one user after another, until the thread has been idle for a while."""
        inbox = SimpleQueue[str]()
        while user is not None:
            self._close_all(user)
            with self._lock:
                user = next((each for each in self.pending if each not in self._active_threads), None)
                if user is None:
                    self._idle_inboxes.append(inbox)
                else:
                    self._active_threads[user] = _NO_THREAD
            user = user or self._wait_for_user(inbox)

    def _wait_for_user(self, inbox: SimpleQueue[str]) -> str | None:
        """Return the user whose descriptors are next; None if this thread has to end."""
        try:
            return inbox.get(timeout=_IDLE_TIMEOUT_S)
        except Empty:
            with self._lock:
                if inbox in self._idle_inboxes:
                    self._idle_inboxes.remove(inbox)
                    self._thread_count -= 1
                    return None
            return inbox.get()

    def _close_all(self, user: str) -> None:
        with self._lock:
            self._active_threads[user] = threading.get_ident()
            waiting = self.pending[user]
        while waiting:
            # Linux frees the descriptor even if close() fails; errors of the file system concern its owner only.
            with contextlib.suppress(OSError):
                os.close(waiting[0])
            with self._lock:
                waiting.popleft()
                if not waiting:
                    del self.pending[user], self._active_threads[user]


def receive(connection: socket.socket, nbytes: int) -> bytes:
    """Read from a Unix socket whose peer may not send descriptors.

    Raises:
        UnexpectedDescriptors: the data comes with descriptors. They are left unread, for `close_socket`: the kernel
            would close them before the read returned.
        OSError: the read has failed.
    """
    data, _, flags, _ = connection.recvmsg(nbytes, 0, socket.MSG_PEEK)
    if flags & socket.MSG_CTRUNC:
        raise UnexpectedDescriptors("expected data alone, got descriptors")
    return connection.recv(len(data)) if data else b""


def has_descriptors(connection: socket.socket, nbytes: int) -> bool:
    """Return whether a read of `nbytes` bytes from a Unix socket would receive descriptors."""
    with contextlib.suppress(OSError):
        return bool(connection.recvmsg(nbytes, 0, socket.MSG_PEEK)[2] & socket.MSG_CTRUNC)
    return False


def _has_unread_descriptors(connection: socket.socket) -> bool:
    """Return whether the unread data contains descriptors; discard the data before them."""
    with contextlib.suppress(OSError):
        connection.setblocking(False)
        try:
            while receive(connection, _CHUNK_BYTES):
                pass
        except UnexpectedDescriptors:
            return True
    return False
