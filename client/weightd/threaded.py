"""Transport of the blocking client. Many threads share one connection for their calls; there is no background thread.

Every thread sends its own messages, holding the lock of `_changed` and without blocking. One thread at a time is the
reader. The reader waits in the kernel, without the lock, until data can be received or unsent data can be sent. Only
the reader closes a connection. The other threads wait for the reader. A thread that expects a response waits in a
`Waiter`. A thread that waits for a change of the connection and not for a response waits at the condition `_changed`. A
thread whose message could be sent only in part also waits there. The reader must notify the threads at `_changed` when
it steps down, because one of them may have to become the next reader.

`ReaderElection` selects the reader among the threads that wait for responses. The reader processes the messages for all
threads until its own response arrives; then another thread takes over. An exception from outside, such as
KeyboardInterrupt, may reach the reader before it steps down. In this case the thread remains the reader and continues
to read at its next call.
"""

from __future__ import annotations

import contextlib
import math
import threading
from time import monotonic
from typing import Any, Generator, cast

from weightd.connection import ConnectionLost, DaemonConnection
from weightd.pending import PendingCall
from weightd.polling import Waker
from weightd.protocol_core import PreparedCall
from weightd.reader_election import ReaderElection, Waiter
from weightd.session import BUSY_RETRY_INTERVAL_S, CONNECTION_LOST_ERRORS, ClientSession, extended_deadline
from weightd_protocol.errors import Unavailable


class ThreadedTransport:
    """Sends the requests of a `Client` and reads their responses.

    Args:
        session: the client's session.

    Raises:
        Unavailable: this process cannot open any more file descriptors.
    """

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._channels = session.channels
        # Reentrant, because a signal handler may close the client while its thread holds the lock.
        self._lock = session.channels.lock
        self._changed = threading.Condition(self._lock)
        self._election = ReaderElection()
        try:
            self._waker = Waker()
        except OSError as error:
            raise Unavailable(f"cannot create a pipe: {error.strerror}") from None
        self._poller = self._waker.make_poller(())
        # The channels that `_poller` polls.
        self._polled = self._channels.by_descriptor
        self._usable = session.core.channels.usable
        self._is_connecting = False

    def connect(self, deadline: float) -> None:
        """Connect to the daemon. If another thread is already connecting, wait until that attempt has ended.

        Raises:
            RequestError: no process listens at the address, or the daemon does not respond in time.
        """
        with self._lock:
            self._connect(deadline)

    def send(self, prepared: PreparedCall, deadline: float) -> PendingCall:
        """Send the message of a call, connecting first if necessary. Return when all of the message has been sent."""
        call, frames = prepared
        with self._lock:
            if (
                call.description_frame in self._usable
                and not self._session.closed
                and self._channels.send(call, frames, deadline)
            ):
                return call
            try:
                target_sent = self._session.send(frames, call)
            except ConnectionLost:
                self._ensure_writable(deadline)
                try:
                    target_sent = self._session.send(frames, call)
                except ConnectionLost as error:
                    # The daemon closed the new connection at once. Read the message in which it gives the reason.
                    self._wait_until_sent(self._session.connection, math.inf, deadline)
                    raise self._session.protocol_error or error from None
            if target_sent or (self._election.reader and not self._session.connection.is_level_triggered):
                self._finish_send(target_sent, deadline)
        return call

    def wait(self, call: PendingCall, deadline: float) -> Any:
        """Return the response of a call. While this thread is the reader, it processes the messages for all threads."""
        started_at = monotonic()
        waiter = self._election.join(call)
        if waiter is None or self._wait_for_turn(waiter, started_at, deadline):
            try:
                while not call.done:
                    if not self._step(deadline):
                        later = extended_deadline(started_at, deadline)
                        if later is None:
                            raise self._session.answer_timeout_error(call)
                        deadline = later
            finally:
                if self._election.step_down():
                    self._notify_blocked()
        return call.result()

    def result(self, call: PendingCall, deadline: float) -> Any:
        """Check that the client is usable, and return the response of a call as `wait` does."""
        self._session.check_usable()
        return call.result() if call.done else self.wait(call, deadline)

    def poll(self, call: PendingCall) -> bool:
        """Process the messages that have arrived. Return whether the call has ended."""
        self._session.check_usable()
        if not call.done:
            self.read_available()
        return call.done

    def read_available(self) -> None:
        """Process the messages that have arrived, unless another thread is the reader."""
        if self._election.try_read():
            try:
                while not self._session.closed and self._step(0.0):
                    pass
            finally:
                if self._election.step_down():
                    self._notify_blocked()

    def cancel(self, call: PendingCall) -> None:
        """Cancel a call that has no response yet."""
        self._session.check_usable()
        if call.done:
            return
        deadline = monotonic() + self._session.timeout
        with self._lock:
            if self._session.cancel_on_channel(call):
                if self._election.reader:
                    self._waker.set()
                return
            try:
                target_sent: float = self._session.send(self._session.core.cancel_frames(call))
            except ConnectionLost:
                target_sent = math.inf  # wait until the lost connection is closed, which ends the call as well
            # The garbage collector may close a `map` generator, which cancels its requests, while this thread reads. In
            # that case return at once, so that the interrupted read can continue.
            if self._election.is_current_reader:
                self._waker.set()
            else:
                self._finish_send(target_sent, deadline)

    def wake_reader(self) -> None:
        """Make the reader check whether its call has ended."""
        self._waker.set()

    def sleep_unless_closed(self, seconds: float) -> None:
        """Sleep for `seconds`. Raise `ClientClosed` or `WrongProcess` if the client is or becomes unusable."""
        deadline = monotonic() + seconds
        with self._lock:
            while monotonic() < deadline:
                self._session.check_usable()
                self._changed.wait(deadline - monotonic())

    def close(self) -> None:
        """End all calls with `ClientClosed`.

        The connection is closed here or, if another thread is the reader, by that thread.
        """
        with self._lock:
            self._session.mark_closed()
            # With this count above 0, every reader that steps down calls `_notify_blocked`, which closes the
            # connection.
            self._election.blocked_count += 1
            self._changed.notify_all()
        # A signal handler may call this method while its thread is reading. `try_read` returns False in this case.
        if self._election.try_read(reentrant=False):
            if self._election.step_down():
                self._notify_blocked()
        else:
            self._waker.set()

    def _finish_send(self, target_sent: float, deadline: float) -> None:
        """Wait until `sent_count` reaches `target_sent`. With a target of 0, wake the reader for unread messages.

        The caller must hold the lock.
        """
        connection = self._session.connection
        if target_sent:
            self._wait_until_sent(connection, target_sent, deadline)
        elif self._election.reader and not connection.is_idle():
            self._waker.set()

    def _ensure_writable(self, deadline: float) -> None:
        """Wait until a message can be sent, connecting if necessary. The caller's lock is released meanwhile."""
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
        """Wait until `sent_count` reaches `target_sent` or the connection is closed. Releases the lock meanwhile."""
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
        """Connect, or wait for another thread's attempt to end. The caller's lock is released meanwhile."""
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
            self._session.on_connected(connection)
            if self._election.try_read():
                self._update_poller()
                self._election.step_down()
            else:
                # The reader waits for answers on direct channels. Let it poll the new connection, too.
                self._polled = {}
                self._waker.set()

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
        """Wait until the call has ended or this thread becomes the reader. Return whether this thread is the reader."""
        try:
            while True:
                waiter.wait(deadline - monotonic())
                later = None if waiter.is_reader or waiter.call.done else extended_deadline(started_at, deadline)
                if later is None:
                    break
                # The whole process was suspended, so the reader could not read either. Wait a little longer.
                deadline = later
        except BaseException:
            if self._election.withdraw(waiter) and self._election.step_down():
                self._notify_blocked()
            raise
        if self._election.withdraw(waiter):
            return True
        if not waiter.call.done:
            raise self._session.answer_timeout_error(waiter.call)
        return False

    def _read_once(self, deadline: float) -> bool:
        """As the reader, wait for one event and process it, then step down. Return False at the deadline."""
        try:
            return self._step(deadline)
        finally:
            if self._election.step_down():
                self._notify_blocked()

    def _step(self, deadline: float) -> bool:
        """As the reader, wait for one event and process it. Return False if the deadline passed first."""
        if self._polled is not self._channels.by_descriptor:
            self._update_poller()
        connection = self._session.connection
        if connection.is_level_triggered or connection.is_idle():
            poller = self._poller
            if connection.unsent_count and connection.is_level_triggered and not connection.closed:
                poller = self._waker.make_poller((*connection.descriptors, *self._polled), to_write=True)
            ready = self._waker.wait(poller, deadline)
            if not ready:
                return False
            is_read = bool(self._polled)
            for descriptor, _ in ready if is_read else ():
                channel = self._polled.get(descriptor)
                if channel is None:
                    is_read = False
                else:
                    self._channels.receive(channel)
            if is_read:
                return True
        return connection.closed or self._read_connection(connection)

    def _read_connection(self, connection: DaemonConnection) -> bool:
        """As the reader, process the messages that have arrived, and send unsent data. Return True."""
        try:
            self._session.receive()
        except BaseException as error:
            with self._lock:
                self._session.drop_connection(error)
                self._update_poller()
                self._changed.notify_all()
            if not isinstance(error, CONNECTION_LOST_ERRORS):
                raise
            return True
        if connection.unsent_count:
            with self._lock:
                connection.flush()
                self._changed.notify_all()
        return True

    def _update_poller(self) -> None:
        """As the reader or without one, poll the descriptors of the present connection and channels."""
        with self._lock:
            self._channels.close_unused()
            connection = self._session.connection
            self._polled = self._channels.by_descriptor
            descriptors = () if connection.closed else connection.descriptors
            self._poller = self._waker.make_poller((*descriptors, *self._polled))

    def _notify_blocked(self) -> None:
        """Wake the threads at `_changed`. If the client is closed, close the connection first.

        The caller must have stepped down as the reader.
        """
        if self._session.closed and self._election.try_read():
            with self._lock:
                self._session.connection.close()
                self._channels.close_all()
                if self._is_connecting:
                    self._waker.set()
                else:
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
