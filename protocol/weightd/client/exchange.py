"""Calls of several threads over one connection at a time, without a thread of its own.

Each message is sent by the thread that has it, under the lock of `_changed`, and never waits there. Whose turn it is to
read waits in the kernel, without that lock, for all: for what comes and, while something is unsent, until it can be
sent. Only who reads closes a connection. The others wait for what it tells: for an answer each in a `Turn`, for all
else at `_changed`. Who cannot send is stuck there until the reader leaves, who might be the last.
"""

from __future__ import annotations

import contextlib
import math
import threading
from time import monotonic
from typing import Any, Generator, cast

from weightd.client.connection import Connection, Gone
from weightd.client.core import Call, Question
from weightd.client.session import BUSY_S, LOST, Session, extended
from weightd.client.turns import Turn, Turns
from weightd.client.waker import Waker
from weightd.protocol.errors import Unavailable


class Exchange:
    """Sends what is asked, and reads what is answered.

    Args:
        session: of the client.

    Raises:
        Unavailable: this process has no descriptors left.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        # A signal's handler may close the client wherever its thread is.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._turns = Turns()
        try:
            self._waker = Waker()
        except OSError as error:
            raise Unavailable(f"cannot make a pipe: {error.strerror}") from None
        self._poller = self._waker.poller(())
        self._connects = False

    def connect(self, deadline: float) -> None:
        """Connect, or wait until another thread has tried.

        Raises:
            RequestError: nobody listens there, or answers in time.
        """
        with self._lock:
            self._connect(deadline)

    def send(self, question: Question, deadline: float) -> Call:
        """Begin a call, over a new connection where there is none; wait until all of it has gone."""
        call, frames = question
        with self._lock:
            try:
                sent_at = self._session.send(frames, call)
            except Gone:
                self._make_ready(deadline)
                try:
                    sent_at = self._session.send(frames, call)
                except Gone as error:
                    # Hung up as soon as it was there: the daemon has said why.
                    self._until_sent(self._session.connection, math.inf, deadline)
                    raise self._session.verdict or error from None
            if sent_at or (self._turns.reader and not self._session.connection.is_plain):
                self._see_off(sent_at, deadline)
        return call

    def wait(self, call: Call, deadline: float) -> Any:
        """Return the call's answer; where it is our turn, read until it is there."""
        began = monotonic()
        turn = self._turns.enter(call)
        if turn is None or self._follow(turn, began, deadline):
            try:
                while not call.done:
                    if not self._step(deadline):
                        later = extended(began, deadline)
                        if later is None:
                            raise self._session.no_answer()
                        deadline = later
            finally:
                if self._turns.leave():
                    self._tell_the_stuck()
        return call.result()

    def result(self, call: Call, deadline: float) -> Any:
        """As `wait`, for who was not told yet that the client is closed, or another process's."""
        self._session.check()
        return call.result() if call.done else self.wait(call, deadline)

    def poll(self, call: Call) -> bool:
        """Take in what has come, and return whether the call's answer is there."""
        self._session.check()
        if not call.done:
            self.catch_up()
        return call.done

    def catch_up(self) -> None:
        """Take in what has come, unless another thread does anyway."""
        if self._turns.take():
            try:
                while not self._session.connection.closed and self._step(0.0):
                    pass
            finally:
                if self._turns.leave():
                    self._tell_the_stuck()

    def cancel(self, call: Call) -> None:
        """Take a call back, if it has no answer yet."""
        self._session.check()
        if call.done:
            return
        deadline = monotonic() + self._session.timeout
        with self._lock:
            try:
                sent_at: float = self._session.send(self._session.core.cancel(call))
            except Gone:
                sent_at = math.inf  # The loss ends the call, too.
            # The collector of garbage may take back what a `map` has left, wherever this thread is: if that is in the
            # middle of a read, it is to go on as before.
            if self._turns.is_ours:
                self._waker.set()
            else:
                self._see_off(sent_at, deadline)

    def wake(self) -> None:
        """Have who reads look again at what there is to wait for."""
        self._waker.set()

    def rest(self, seconds: float) -> None:
        """Wait for so long, if the client is not closed meanwhile."""
        end = monotonic() + seconds
        with self._lock:
            while monotonic() < end:
                self._session.check()
                self._changed.wait(end - monotonic())

    def close(self) -> None:
        """End all calls, and have the connection closed."""
        with self._lock:
            self._session.end()
            # Whoever leaves from now on sees to it that the connection is closed.
            self._turns.stuck += 1
            self._changed.notify_all()
        # A signal's handler may call this in the middle of a read.
        if self._turns.take(again=False):
            if self._turns.leave():
                self._tell_the_stuck()
        else:
            self._waker.set()

    def _see_off(self, sent_at: float, deadline: float) -> None:
        """Wait until so much has gone, and tell who reads what they could not know. The lock is ours."""
        connection = self._session.connection
        if sent_at:
            self._until_sent(connection, sent_at, deadline)
        elif self._turns.reader and not connection.is_idle():
            self._waker.set()

    def _make_ready(self, deadline: float) -> None:
        """Have a connection that takes a message now. The lock is ours; meanwhile it is free."""
        session = self._session
        while True:
            if session.closed:
                raise session.ended()
            connection = session.connection
            if connection.closed:
                self._connect(deadline)
            elif connection.is_spoilt:
                self._until_sent(connection, math.inf, deadline)
            elif connection.unsent:
                self._until_sent(connection, connection.sent + connection.unsent, deadline)
            else:
                return

    def _until_sent(self, connection: Connection, sent_at: float, deadline: float) -> None:
        """Wait until so much is sent, or the connection is closed. The lock is ours; meanwhile it is free."""
        self._turns.stuck += 1
        try:
            self._waker.set()
            while connection.sent < sent_at and not connection.closed:
                self._session.check()
                if self._turns.take():
                    with self._unlocked():
                        in_time = self._read_once(deadline)
                else:
                    in_time = self._changed.wait(deadline - monotonic())
                if not in_time:
                    raise self._session.not_read()
        finally:
            self._turns.stuck -= 1

    def _connect(self, deadline: float) -> None:
        """Connect, or wait until another thread has tried. The lock is ours; meanwhile it is free."""
        if self._connects:
            if not self._changed.wait(deadline - monotonic()):
                raise self._session.no_connection()
            return
        self._connects = True
        try:
            with self._unlocked():
                connection = self._new_connection(deadline)
        finally:
            self._connects = False
            self._changed.notify_all()
        if self._session.closed:
            connection.close()
        else:
            self._poller = self._waker.poller(connection.descriptors)
            self._session.connected(connection)

    def _new_connection(self, deadline: float) -> Connection:
        making = self._session.connecting()
        try:
            while True:
                descriptor = next(making)
                self._session.check()
                if descriptor is None:
                    self._waker.sleep(self._waker.poller(()), min(deadline, monotonic() + BUSY_S))
                    if monotonic() > deadline:
                        raise self._session.no_connection()
                elif not self._waker.sleep(self._waker.poller((descriptor,)), deadline):
                    raise self._session.no_connection()
        except StopIteration as made:
            return cast(Connection, made.value)
        finally:
            making.close()

    def _follow(self, turn: Turn, began: float, deadline: float) -> bool:
        """Wait until the call is done, or it is our turn; return whether that is so."""
        try:
            while True:
                turn.sleep(deadline - monotonic())
                later = None if turn.reads or turn.call.done else extended(began, deadline)
                if later is None:
                    break
                # The one who reads was stopped, too.
                deadline = later
        except BaseException:
            if self._turns.give_up(turn) and self._turns.leave():
                self._tell_the_stuck()
            raise
        if self._turns.give_up(turn):
            return True
        if not turn.call.done:
            raise self._session.no_answer()
        return False

    def _read_once(self, deadline: float) -> bool:
        """Take a step, and read no more."""
        try:
            return self._step(deadline)
        finally:
            if self._turns.leave():
                self._tell_the_stuck()

    def _step(self, deadline: float) -> bool:
        """Wait until something has happened, and take it in; return whether it has by the deadline. It is our turn."""
        connection = self._session.connection
        if connection.is_plain or connection.is_idle():
            poller = self._poller
            if connection.unsent and connection.is_plain:
                poller = self._waker.poller(connection.descriptors, to_write=True)
            if not self._waker.sleep(poller, deadline):
                return False
        try:
            for message in connection.receive():
                self._session.core.received(message.frames)
        except BaseException as error:
            with self._lock:
                self._session.hang_up(error)
                self._changed.notify_all()
            if not isinstance(error, LOST):
                raise
            return True
        if connection.unsent:
            with self._lock:
                connection.flush()
                self._changed.notify_all()
        return True

    def _tell_the_stuck(self) -> None:
        """Have what a user has closed closed, and those look who wait at `_changed`. We read no more."""
        if self._session.closed and self._turns.take():
            with self._lock:
                self._session.connection.close()
                if not self._connects:
                    self._waker.close()
            self._turns.leave()
        with self._lock:
            self._changed.notify_all()

    @contextlib.contextmanager
    def _unlocked(self) -> Generator[None, None, None]:
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()
