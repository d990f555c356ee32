"""Closes descriptors that clients have sent in threads, one for each user, so that nobody else waits.

close() waits for the file system of the file, which may be a user's own and never answer, for a socket with SO_LINGER
until its peer has read, and for the last descriptor of memory until the kernel has freed it: half a second for a GiB.
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

# Descriptors of one user that may wait. Beyond that the connections of this user end.
MAX_PENDING = 64

# Threads in all. A user of this host has one user id, which no user namespace changes; but with subordinate ids
# (/etc/subuid) it has thousands of them.
_MAX_THREADS = 32

# A thread that has nothing to close ends after so long: to start another one takes longer than most closes.
_IDLE_TIMEOUT_S = 1.0

# In the place of the identity of a thread that has not begun with a user.
_NO_THREAD = 0

_CHUNK_BYTES = 64 * 1024

_WARNING_INTERVAL_S = 60.0

# To a process that has no handler for it this signal does nothing.
INTERRUPT = signal.SIGURG


class UnexpectedDescriptors(Exception):
    """A peer has sent descriptors where there is no use for any."""


class DescriptorCloser:
    """Closes descriptors in threads, each of which closes those of one user at a time.

    Past 32 threads the descriptors of further users wait until a thread has closed all of its user. Where many of a
    user wait its thread is interrupted by `INTERRUPT`, which needs a handler: that ends the wait of a socket with
    SO_LINGER, but not that for a file system.

    Args:
        report: is given a line for the log where no thread can be started.

    Attributes:
        pending: the descriptors that wait, by user; while there are none, no user is backlogged.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._lock = threading.Lock()
        # By user: those that wait, after the one that is being closed.
        self.pending: dict[str, deque[int]] = {}
        # The users whose descriptors a thread is closing, and the identity of that.
        self._active_threads: dict[str, int] = {}
        self._thread_count = 0
        # Of each thread that has nothing to close: where it is given a user.
        self._idle_inboxes: list[SimpleQueue[str]] = []
        self._rate_limited_log = RateLimitedLog(_WARNING_INTERVAL_S)

    def is_backlogged(self, user: str) -> bool:
        """Return whether so many descriptors of a user wait that it may send no more for now."""
        # The threads only take away: without the lock the answer is at worst a moment old.
        waiting = self.pending.get(user)
        if waiting is None or len(waiting) < MAX_PENDING:
            return False
        # There may be no thread yet, and nothing else that would start one.
        self._assign_thread(user)
        self._interrupt(user)
        return True

    def close(self, user: str, descriptor: int) -> None:
        """Close a descriptor of a user at some time."""
        with self._lock:
            self.pending.setdefault(user, deque()).append(descriptor)
        self._assign_thread(user)

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
            self.is_backlogged(user)
        else:
            connection.close()

    def _assign_thread(self, user: str) -> None:
        """Have the descriptors of a user closed: by an idle thread, or by another one."""
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
            # The descriptors wait for the next call.
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
        """Close the descriptors of one user after another, until there are none for a while."""
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
        """Return the user whose descriptors are next, None if this thread is to end."""
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
            # Linux has freed the number whatever close() returns; what the file system reports concerns its owner.
            with contextlib.suppress(OSError):
                os.close(waiting[0])
            with self._lock:
                waiting.popleft()
                if not waiting:
                    del self.pending[user], self._active_threads[user]


def receive(connection: socket.socket, nbytes: int) -> bytes:
    """Read from a Unix socket whose peer may send no descriptors.

    Raises:
        UnexpectedDescriptors: there are some. They are left unread, for `close_socket`: the kernel would close them
            before the read returned.
        OSError: as for any read.
    """
    data, _, flags, _ = connection.recvmsg(nbytes, 0, socket.MSG_PEEK)
    if flags & socket.MSG_CTRUNC:
        raise UnexpectedDescriptors("expected data alone, got descriptors")
    return connection.recv(len(data)) if data else b""


def has_descriptors(connection: socket.socket, nbytes: int) -> bool:
    """Return whether a read of so many bytes from a Unix socket would bring descriptors."""
    with contextlib.suppress(OSError):
        return bool(connection.recvmsg(nbytes, 0, socket.MSG_PEEK)[2] & socket.MSG_CTRUNC)
    return False


def _has_unread_descriptors(connection: socket.socket) -> bool:
    """Return whether descriptors are among the unread data; what comes before them is read and dropped."""
    with contextlib.suppress(OSError):
        connection.setblocking(False)
        try:
            while receive(connection, _CHUNK_BYTES):
                pass
        except UnexpectedDescriptors:
            return True
    return False
