"""Transport of the asyncio client: the calls of many tasks over one connection at a time.

The event loop always reads. Tasks send directly and wait in futures: one for each call, and the futures in
`_change_waiters` for other changes of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import Any, Callable, List, Optional, cast

from weightd.connection import ConnectionLost, DaemonConnection
from weightd.pending import PendingCall
from weightd.protocol_core import PreparedCall
from weightd.session import BUSY_RETRY_INTERVAL_S, CONNECTION_LOST_ERRORS, ClientSession, extended_deadline
from weightd_protocol.errors import WeightdError
from weightd_protocol.messages.inference import InferResponse


class WrongLoop(WeightdError):
    """An AsyncClient is used outside the event loop in which it is connected.

    Create one client for each loop: they are cheap.
    """


class _PauseEnded(WeightdError):
    """Raised when the pause between two attempts is over."""


class AsyncTransport:
    """Sends requests and reads their responses.

    Args:
        session: the client's session.
    """

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._core = session.core
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._is_connecting = False
        self._is_writer_registered = False
        # Outgoing messages are held back until every task that is ready to run has run.
        self._is_corked = False
        self._change_waiters: List[asyncio.Future[bool]] = []

    def running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the running event loop, after checking that the connection belongs to it.

        Raises:
            WrongLoop: no asyncio loop is running, or the client is connected in another loop.
        """
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongLoop("AsyncClient requires a running asyncio event loop; without one, use Client") from None
        if self._loop is not running:
            if self._loop is not None and not self._session.connection.closed:
                raise WrongLoop("this client is connected in another event loop; create one client for each event loop")
            self._loop = running
        return running

    def close(self) -> None:
        """End all calls and close the connection."""
        self.running_loop()
        self._session.mark_closed()
        self._unregister_descriptors()
        self._session.connection.close()
        self._notify_waiters()

    async def sleep_unless_closed(self, seconds: float) -> None:
        """Sleep for `seconds`. Raise `ClientClosed` or `WrongProcess` if the client becomes unusable meanwhile."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(_PauseEnded):
            while True:
                self._session.check_usable()
                await self._wait_for_change(deadline, _PauseEnded)

    async def send_and_wait(self, prepared: PreparedCall, deadline: float, answer_deadline: float) -> Any:
        """Send a call by `deadline`, and return its response, which must arrive by `answer_deadline`."""
        call, frames = prepared
        try:
            if frames:
                await self._send(frames, deadline, call)
            if not call.done:
                finished = self.running_loop().create_future()
                call.add_done_callback(partial(_resolve_future, finished, in_time=True))
                await self._wait_for(finished, answer_deadline, self._session.answer_timeout_error)
        except asyncio.CancelledError:
            self._cancel_call(call)
            raise
        return call.result()

    async def _send(self, frames: List[Any], deadline: float, call: PendingCall) -> None:
        """Start a call, connecting first if necessary, and wait until its message has been sent completely."""
        session = self._session
        if self._core.calls and not self._is_corked:
            # Responses often arrive together, and their tasks then send requests one after another: join these sends.
            self._is_corked = True
            session.connection.cork()
            self.running_loop().call_soon(self._uncork, session.connection)
        try:
            target_sent = session.send(frames, call)
        except ConnectionLost:
            await self.ensure_writable(deadline)
            try:
                target_sent = session.send(frames, call)
            except ConnectionLost as error:
                # The daemon closed the new connection at once and has sent the reason.
                while not session.connection.closed:
                    self._read()
                raise session.protocol_error or error from None
        connection = session.connection
        self._on_sent(connection)
        while connection.sent_count < target_sent and not connection.closed:
            await self._wait_for_change(deadline, session.send_timeout_error)

    def _uncork(self, connection: DaemonConnection) -> None:
        self._is_corked = False
        if not connection.closed:
            connection.uncork()
            self._update_writer()

    async def ensure_writable(self, deadline: float) -> None:
        """Return once a message can be sent on the connection."""
        session = self._session
        while True:
            session.check_usable()
            connection = session.connection
            if connection.closed:
                await self._connect(deadline)
            elif connection.is_broken:
                while not connection.closed:
                    self._read()
            elif connection.unsent_count:
                await self._wait_for_change(deadline, session.send_timeout_error)
            else:
                return

    async def _connect(self, deadline: float) -> None:
        """Connect, or wait until the connection attempt of another task has ended."""
        if self._is_connecting:
            await self._wait_for_change(deadline, self._session.connect_timeout_error)
            return
        self._is_connecting = True
        try:
            connection = await self._new_connection(deadline)
        finally:
            self._is_connecting = False
            self._notify_waiters()
        self._session.on_connected(connection)
        for descriptor in connection.descriptors:
            self.running_loop().add_reader(descriptor, self._read)

    async def _new_connection(self, deadline: float) -> DaemonConnection:
        steps = self._session.connect_steps()
        loop = self.running_loop()
        try:
            while True:
                descriptor = next(steps)
                if descriptor is None:
                    if time.monotonic() > deadline:
                        raise self._session.connect_timeout_error()
                    await asyncio.sleep(BUSY_RETRY_INTERVAL_S)
                else:
                    loop.add_reader(descriptor, self._notify_waiters)
                    try:
                        await self._wait_for_change(deadline, self._session.connect_timeout_error)
                    finally:
                        loop.remove_reader(descriptor)
                self._session.check_usable()
        except StopIteration as made:
            return cast(DaemonConnection, made.value)
        finally:
            steps.close()

    def _cancel_call(self, call: PendingCall) -> None:
        """Send a cancellation for a request that no task awaits any more, so that no worker starts it."""
        if call.response_type is InferResponse and self._core.is_tracked(call):
            with contextlib.suppress(ConnectionLost):
                self._session.send(self._core.cancel_frames(call))
            self._on_sent(self._session.connection)

    def _on_sent(self, connection: DaemonConnection) -> None:
        if not connection.is_idle():
            self._read()
        self._update_writer()

    def _read(self) -> None:
        """Process the received messages, or the loss of the connection."""
        session = self._session
        connection = session.connection
        try:
            while True:
                for message in connection.receive():
                    self._core.on_message(message.frames)
                self._flush()
                if connection.is_idle():
                    break
        except BaseException as error:
            self._unregister_descriptors()
            session.drop_connection(error)
            self._notify_waiters()
            if not isinstance(error, CONNECTION_LOST_ERRORS):
                raise

    def _flush(self) -> None:
        connection = self._session.connection
        if connection.unsent_count:
            connection.flush()
            self._notify_waiters()
            self._update_writer()

    def _update_writer(self) -> None:
        """Register a writer with the loop if and only if data is waiting to be sent."""
        connection = self._session.connection
        needs_writer = connection.is_level_triggered and connection.unsent_count > 0 and not connection.closed
        if needs_writer != self._is_writer_registered:
            self._is_writer_registered = needs_writer
            loop = self.running_loop()
            if needs_writer:
                loop.add_writer(connection.descriptors[0], self._flush)
            else:
                loop.remove_writer(connection.descriptors[0])

    def _unregister_descriptors(self) -> None:
        """Remove the descriptors from the loop before they are closed: the kernel may reuse their numbers."""
        connection = self._session.connection
        if not connection.closed:
            loop = self.running_loop()
            for descriptor in connection.descriptors:
                loop.remove_reader(descriptor)
            if self._is_writer_registered:
                self._is_writer_registered = False
                loop.remove_writer(connection.descriptors[0])

    async def _wait_for_change(self, deadline: float, timeout_error: Callable[[], WeightdError]) -> None:
        changed = self.running_loop().create_future()
        self._change_waiters.append(changed)
        try:
            await self._wait_for(changed, deadline, timeout_error)
        finally:
            if changed in self._change_waiters:
                self._change_waiters.remove(changed)

    async def _wait_for(
        self, future: asyncio.Future[bool], deadline: float, timeout_error: Callable[[], WeightdError]
    ) -> None:
        loop, started_at = self.running_loop(), time.monotonic()
        timer: asyncio.TimerHandle

        def on_deadline() -> None:
            nonlocal timer
            extended = extended_deadline(started_at, deadline)
            if extended is None:
                _resolve_future(future, in_time=False)
            else:
                # After the process was stopped, the loop runs this timer before it reads the data that has arrived.
                timer = loop.call_later(extended - time.monotonic(), partial(_resolve_future, future, in_time=False))

        timer = loop.call_later(max(0.0, deadline - started_at), on_deadline)
        try:
            if not await future:
                raise timeout_error()
        finally:
            timer.cancel()

    def _notify_waiters(self) -> None:
        waiting, self._change_waiters = self._change_waiters, []
        for each in waiting:
            _resolve_future(each, in_time=True)


def _resolve_future(future: asyncio.Future[bool], *, in_time: bool) -> None:
    if not future.done():
        future.set_result(in_time)
