"""Calls of several threads over one connection at a time, without a thread of its own.

Each message is sent by the thread that has it, under the lock of `_changed`, and never waits there. Whose turn it is to
read waits in the kernel, without that lock, for all: for what comes and, while something is unsent, until it can be
sent. Only who reads closes a connection. The others wait for what it tells: for an answer each in a `Waiter`, for all
else at `_changed`. Who cannot send is stuck there until the reader leaves, who might be the last.

`ReaderElection` tells which of the threads that wait for answers reads them, for all: the first one, until it has its
own; then another. An exception from outside, as of Ctrl-C, may hit a thread before it can say that it reads no more. It
still has the right to read then, and uses it when it is back.
"""

from __future__ import annotations

import contextlib
import math
import threading
from time import monotonic
from typing import Any, Callable, Dict, Generator, List, Optional, cast

from weightd.connection import ConnectionLost, DaemonConnection
from weightd.pending import PendingCall
from weightd.polling import Waker
from weightd.protocol_core import PreparedCall
from weightd.session import BUSY_RETRY_INTERVAL_S, CONNECTION_LOST_ERRORS, ClientSession, extended_deadline
from weightd_protocol.errors import Unavailable


class ThreadedTransport:
    """Sends what is asked, and reads what is answered.

    Args:
        session: of the client.

    Raises:
        Unavailable: this process has no descriptors left.
    """

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        # A signal's handler may close the client wherever its thread is.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._election = ReaderElection()
        try:
            self._waker = Waker()
        except OSError as error:
            raise Unavailable(f"cannot make a pipe: {error.strerror}") from None
        self._poller = self._waker.make_poller(())
        self._is_connecting = False

    def connect(self, deadline: float) -> None:
        """Connect, or wait until another thread has tried.

        Raises:
            RequestError: no process listens there, or answers in time.
        """
        with self._lock:
            self._connect(deadline)

    def send(self, prepared: PreparedCall, deadline: float) -> PendingCall:
        """Begin a call, over a new connection where there is none; wait until all of it has gone."""
        call, frames = prepared
        with self._lock:
            try:
                target_sent = self._session.send(frames, call)
            except ConnectionLost:
                self._ensure_writable(deadline)
                try:
                    target_sent = self._session.send(frames, call)
                except ConnectionLost as error:
                    # Hung up as soon as it was there: the daemon has said why.
                    self._wait_until_sent(self._session.connection, math.inf, deadline)
                    raise self._session.protocol_error or error from None
            if target_sent or (self._election.reader and not self._session.connection.is_level_triggered):
                self._finish_send(target_sent, deadline)
        return call

    def wait(self, call: PendingCall, deadline: float) -> Any:
        """Return the call's answer; where it is our turn, read until it is there."""
        started_at = monotonic()
        waiter = self._election.join(call)
        if waiter is None or self._wait_for_turn(waiter, started_at, deadline):
            try:
                while not call.done:
                    if not self._step(deadline):
                        later = extended_deadline(started_at, deadline)
                        if later is None:
                            raise self._session.answer_timeout_error()
                        deadline = later
            finally:
                if self._election.step_down():
                    self._notify_blocked()
        return call.result()

    def result(self, call: PendingCall, deadline: float) -> Any:
        """As `wait`, for who was not told yet that the client is closed, or another process's."""
        self._session.check_usable()
        return call.result() if call.done else self.wait(call, deadline)

    def poll(self, call: PendingCall) -> bool:
        """Take in what has come, and return whether the call's answer is there."""
        self._session.check_usable()
        if not call.done:
            self.read_available()
        return call.done

    def read_available(self) -> None:
        """Take in what has come, unless another thread does anyway."""
        if self._election.try_read():
            try:
                while not self._session.connection.closed and self._step(0.0):
                    pass
            finally:
                if self._election.step_down():
                    self._notify_blocked()

    def cancel(self, call: PendingCall) -> None:
        """Take a call back, if it has no answer yet."""
        self._session.check_usable()
        if call.done:
            return
        deadline = monotonic() + self._session.timeout
        with self._lock:
            try:
                target_sent: float = self._session.send(self._session.core.cancel_frames(call))
            except ConnectionLost:
                target_sent = math.inf  # The loss ends the call, too.
            # The collector of garbage may take back what a `map` has left, wherever this thread is: if that is in the
            # middle of a read, it is to go on as before.
            if self._election.is_current_reader:
                self._waker.set()
            else:
                self._finish_send(target_sent, deadline)

    def wake_reader(self) -> None:
        """Have who reads look again at what there is to wait for."""
        self._waker.set()

    def sleep_unless_closed(self, seconds: float) -> None:
        """Wait for so long, if the client is not closed meanwhile."""
        deadline = monotonic() + seconds
        with self._lock:
            while monotonic() < deadline:
                self._session.check_usable()
                self._changed.wait(deadline - monotonic())

    def close(self) -> None:
        """End all calls, and have the connection closed."""
        with self._lock:
            self._session.mark_closed()
            # Whoever leaves from now on sees to it that the connection is closed.
            self._election.blocked_count += 1
            self._changed.notify_all()
        # A signal's handler may call this in the middle of a read.
        if self._election.try_read(reentrant=False):
            if self._election.step_down():
                self._notify_blocked()
        else:
            self._waker.set()

    def _finish_send(self, target_sent: float, deadline: float) -> None:
        """Wait until so much has gone, and tell who reads what they could not know. The lock is ours."""
        connection = self._session.connection
        if target_sent:
            self._wait_until_sent(connection, target_sent, deadline)
        elif self._election.reader and not connection.is_idle():
            self._waker.set()

    def _ensure_writable(self, deadline: float) -> None:
        """Have a connection that takes a message now. The lock is ours; meanwhile it is free."""
        session = self._session
        while True:
            if session.closed:
                raise session.unusable_error()
            connection = session.connection
            if connection.closed:
                self._connect(deadline)
            elif connection.is_broken:
                self._wait_until_sent(connection, math.inf, deadline)
            elif connection.unsent_count:
                self._wait_until_sent(connection, connection.sent_count + connection.unsent_count, deadline)
            else:
                return

    def _wait_until_sent(self, connection: DaemonConnection, target_sent: float, deadline: float) -> None:
        """Wait until so much is sent, or the connection is closed. The lock is ours; meanwhile it is free."""
        self._election.blocked_count += 1
        try:
            self._waker.set()
            while connection.sent_count < target_sent and not connection.closed:
                self._session.check_usable()
                if self._election.try_read():
                    with self._unlocked():
                        in_time = self._read_once(deadline)
                else:
                    in_time = self._changed.wait(deadline - monotonic())
                if not in_time:
                    raise self._session.send_timeout_error()
        finally:
            self._election.blocked_count -= 1

    def _connect(self, deadline: float) -> None:
        """Connect, or wait until another thread has tried. The lock is ours; meanwhile it is free."""
        if self._is_connecting:
            if not self._changed.wait(deadline - monotonic()):
                raise self._session.connect_timeout_error()
            return
        self._is_connecting = True
        try:
            with self._unlocked():
                connection = self._new_connection(deadline)
        finally:
            self._is_connecting = False
            self._changed.notify_all()
        if self._session.closed:
            connection.close()
        else:
            self._poller = self._waker.make_poller(connection.descriptors)
            self._session.on_connected(connection)

    def _new_connection(self, deadline: float) -> DaemonConnection:
        steps = self._session.connect_steps()
        try:
            while True:
                descriptor = next(steps)
                self._session.check_usable()
                if descriptor is None:
                    self._waker.wait(self._waker.make_poller(()), min(deadline, monotonic() + BUSY_RETRY_INTERVAL_S))
                    if monotonic() > deadline:
                        raise self._session.connect_timeout_error()
                elif not self._waker.wait(self._waker.make_poller((descriptor,)), deadline):
                    raise self._session.connect_timeout_error()
        except StopIteration as made:
            return cast(DaemonConnection, made.value)
        finally:
            steps.close()

    def _wait_for_turn(self, waiter: Waiter, started_at: float, deadline: float) -> bool:
        """Wait until the call is done, or it is our turn; return whether that is so."""
        try:
            while True:
                waiter.wait(deadline - monotonic())
                later = None if waiter.is_reader or waiter.call.done else extended_deadline(started_at, deadline)
                if later is None:
                    break
                # The one who reads was stopped, too.
                deadline = later
        except BaseException:
            if self._election.withdraw(waiter) and self._election.step_down():
                self._notify_blocked()
            raise
        if self._election.withdraw(waiter):
            return True
        if not waiter.call.done:
            raise self._session.answer_timeout_error()
        return False

    def _read_once(self, deadline: float) -> bool:
        """Take a step, and read no more."""
        try:
            return self._step(deadline)
        finally:
            if self._election.step_down():
                self._notify_blocked()

    def _step(self, deadline: float) -> bool:
        """Wait until something has happened, and take it in; return whether it has by the deadline. It is our turn."""
        connection = self._session.connection
        if connection.is_level_triggered or connection.is_idle():
            poller = self._poller
            if connection.unsent_count and connection.is_level_triggered:
                poller = self._waker.make_poller(connection.descriptors, to_write=True)
            if not self._waker.wait(poller, deadline):
                return False
        try:
            for message in connection.receive():
                self._session.core.on_message(message.frames)
        except BaseException as error:
            with self._lock:
                self._session.drop_connection(error)
                self._changed.notify_all()
            if not isinstance(error, CONNECTION_LOST_ERRORS):
                raise
            return True
        if connection.unsent_count:
            with self._lock:
                connection.flush()
                self._changed.notify_all()
        return True

    def _notify_blocked(self) -> None:
        """Have what a user has closed closed, and those look who wait at `_changed`. We read no more."""
        if self._session.closed and self._election.try_read():
            with self._lock:
                self._session.connection.close()
                if not self._is_connecting:
                    self._waker.close()
            self._election.step_down()
        with self._lock:
            self._changed.notify_all()

    @contextlib.contextmanager
    def _unlocked(self) -> Generator[None, None, None]:
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()


# --- who reads -------------------------------------------------------------------------------------------------------


class Waiter:
    """A thread that waits for `call`, while another one reads.

    Attributes:
        is_reader: whether it is its turn to read now.
        thread: which it is.
    """

    __slots__ = ("_lock", "call", "is_reader", "thread")

    def __init__(self, call: PendingCall, thread: int) -> None:
        self.call = call
        self.thread = thread
        self.is_reader = False
        self._lock = threading.Lock()
        self._lock.acquire()

    @property
    def is_awake(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._lock.locked()

    def wait(self, seconds: float) -> None:
        """Wait until somebody has called `wake`."""
        self._lock.acquire(timeout=max(0.0, seconds))

    def wake(self) -> None:
        """End the sleep, or have it not begin. There may be two reasons: the second changes nothing."""
        try:
            self._lock.release()
        except RuntimeError:
            return


class ReaderElection:
    """Gives the right to read to one thread at a time. Whoever has it calls `step_down` in the end.

    Who is alone needs no lock for that: the right is taken in one step, with the name of who has it.

    Args:
        current_thread: tells which one calls; by default `threading.get_ident`.

    Attributes:
        reader: the thread that has the right, under the one key that there is; empty where none has.
        blocked_count: how many wait for something else than an answer, and have to know when somebody leaves.
    """

    def __init__(self, current_thread: Optional[Callable[[], int]] = None) -> None:
        self.reader: Dict[None, int] = {}
        self.blocked_count = 0
        # Looked up now, and not when this module is imported: gevent and eventlet replace it.
        self._current_thread = threading.get_ident if current_thread is None else current_thread
        # Held by those who change what follows.
        self._lock = threading.Lock()
        self._waiters: List[Waiter] = []

    def try_read(self, *, reentrant: bool = True) -> bool:
        """Return whether it is the caller who reads, from now on; not `reentrant`: and has not done so before."""
        thread = self._current_thread()
        return (reentrant or self.reader.get(None) != thread) and self.reader.setdefault(None, thread) == thread

    @property
    def is_current_reader(self) -> bool:
        """Whether it is the caller who reads."""
        return self.reader.get(None) == self._current_thread()

    def join(self, call: PendingCall) -> Optional[Waiter]:
        """Return the turn in which to wait for `call`, None where it is the caller who reads, from now on."""
        thread = self._current_thread()
        if self.reader.setdefault(None, thread) == thread:
            return None
        waiter = Waiter(call, thread)
        with self._lock:
            # In this order, as who leaves looks in the other one.
            self._waiters.append(waiter)
            if self.reader.setdefault(None, thread) == thread:
                self._waiters.remove(waiter)
                return None
        call.add_done_callback(waiter.wake)
        return waiter

    def withdraw(self, waiter: Waiter) -> bool:
        """Wait no more; return whether it is the caller who reads now."""
        with self._lock:
            if not waiter.is_reader:
                self._waiters.remove(waiter)
            return waiter.is_reader

    def step_down(self) -> int:
        """Read no more: somebody who waits does from now on. Return how many are stuck: the caller tells them."""
        if not self._waiters:
            self.reader.clear()
        # Who has begun to wait meanwhile was refused the right, maybe.
        if self._waiters:
            self._elect_next()
        return self.blocked_count

    def _elect_next(self) -> None:
        thread = self._current_thread()
        with self._lock:
            if self.reader.setdefault(None, thread) != thread:
                return
            for turn in self._waiters:
                if not turn.call.done:
                    self._waiters.remove(turn)
                    self.reader[None] = turn.thread
                    turn.is_reader = True
                    turn.wake()
                    return
            self.reader.clear()
