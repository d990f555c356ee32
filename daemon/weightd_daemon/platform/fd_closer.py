"""Thread pool that closes descriptors sent by clients. Each user gets a thread, so that no user delays another one.

close(2) can block:

- on a file, until the file system answers. A file system of the user may never answer.
- on a socket with SO_LINGER, until its peer has read all data.
- on the last descriptor of a shared memory region, until the kernel has freed the memory: half a second for a GiB.
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

# If a user has at least this number of descriptors that are not closed yet, the daemon does not read further ones. It
# closes the connections on which they arrive if that does not change within seconds.
MAX_PENDING = 64

# Maximum number of threads. One thread for each user would not be a limit: with subordinate ids (/etc/subuid), a person
# can be thousands of users.
_MAX_THREADS = 32

# Seconds after which an idle thread ends. It does not end at once, because starting a thread takes longer than most
# calls of close(2).
_IDLE_TIMEOUT_S = 1.0

# Placeholder in `_active_threads` until the thread that has been assigned to a user begins to close descriptors.
_NO_THREAD = 0

_CHUNK_BYTES = 64 * 1024

_WARNING_INTERVAL_S = 60.0

# The signal that interrupts a thread. A process that has no handler for this signal ignores it.
INTERRUPT = signal.SIGURG


class UnexpectedDescriptors(Exception):
    """A peer has sent descriptors with data that must not have any."""


class DescriptorCloser:
    """Thread pool that closes descriptors of users; each thread handles one user at a time.

    The pool has at most 32 threads. The descriptors of further users wait until a thread has closed all descriptors of
    its user. If too many descriptors of a user wait, the pool sends the signal `INTERRUPT` to the user's thread,
    provided that the process has a handler for the signal. The signal interrupts the close of a socket with SO_LINGER,
    but not the close of a file.

    Args:
        report: called with a text for the log when no thread can be started.

    Attributes:
        pending: by user, the descriptors that are not closed yet. While `pending` is empty, `is_backlogged` returns
            False for all users.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._lock = threading.Lock()
        # The first descriptor of each user is being closed. The others wait.
        self.pending: dict[str, deque[int]] = {}
        # By user: the identity of the thread that closes the user's descriptors.
        self._active_threads: dict[str, int] = {}
        self._thread_count = 0
        # One queue for each idle thread, over which the thread receives the next user to handle.
        self._idle_inboxes: list[SimpleQueue[str]] = []
        self._rate_limited_log = RateLimitedLog(_WARNING_INTERVAL_S)

    def is_backlogged(self, user: str) -> bool:
        """Return whether too many descriptors of a user wait; if so, interrupt the user's thread."""
        # No lock is needed: threads only remove descriptors, so the result is at worst slightly out of date.
        waiting = self.pending.get(user)
        if waiting is None or len(waiting) < MAX_PENDING:
            return False
        # If no thread could be started for this user before, try again now: no other code does.
        self._assign_thread(user)
        self._interrupt(user)
        return True

    def close(self, user: str, descriptor: int) -> None:
        """Have a thread close a descriptor of a user; return without waiting for it."""
        with self._lock:
            self.pending.setdefault(user, deque()).append(descriptor)
        self._assign_thread(user)

    def close_socket(self, user: str, connection: socket.socket) -> None:
        """Close a connection of a user: in a thread if its unread data contains descriptors, else at once.

        The kernel closes the unread descriptors together with the connection, in the thread that closes the connection.
        """
        with contextlib.suppress(OSError):
            # The peer sees at once that the connection has ended, and can send no more descriptors.
            connection.shutdown(socket.SHUT_RDWR)
        if _has_unread_descriptors(connection):
            self.close(user, connection.detach())
            # If too many descriptors wait, this call interrupts the close that the user's thread is waiting for.
            self.is_backlogged(user)
        else:
            connection.close()

    def _assign_thread(self, user: str) -> None:
        """Assign an idle or a new thread to a user; without one, the next thread that becomes free handles the user."""
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
            # No thread can be started. The user's descriptors wait until this method is called again or another thread
            # becomes free.
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
        """Close the descriptors of one user after another, until this thread has been idle for `_IDLE_TIMEOUT_S`."""
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
        """Wait for a user with descriptors to close, and return it; None if this thread has been idle for too long."""
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
            # Ignore errors of the user's file system: Linux frees the descriptor even if close(2) fails.
            with contextlib.suppress(OSError):
                os.close(waiting[0])
            with self._lock:
                waiting.popleft()
                if not waiting:
                    del self.pending[user], self._active_threads[user]


def receive(connection: socket.socket, nbytes: int) -> bytes:
    """Read from a Unix socket whose peer may not send descriptors.

    Raises:
        UnexpectedDescriptors: the data comes with descriptors. They are left unread, so that `close_socket` can close
            them in a thread. A read would make the kernel close them in this thread.
        OSError: the read has failed.
    """
    data, _, flags, _ = connection.recvmsg(nbytes, 0, socket.MSG_PEEK)
    if flags & socket.MSG_CTRUNC:
        raise UnexpectedDescriptors("expected data alone, got descriptors")
    return connection.recv(len(data)) if data else b""


def has_descriptors(connection: socket.socket, nbytes: int) -> bool:
    """Return whether descriptors come with the next `nbytes` bytes of a Unix socket; read nothing."""
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
