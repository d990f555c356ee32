"""Transport of the asyncio client. Many tasks share one connection for their calls.

The event loop reads from the connection whenever data arrives. A task sends its message itself and then awaits a
future. Each call has a future for its response. A task that waits for a change of the connection and not for a
response, for example until the connection is established or closed, awaits a future in `_change_waiters`.
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
    """An AsyncClient was used outside the event loop in which it is connected.

    Create one client for each event loop: a client costs little.
    """


class _PauseEnded(WeightdError):
    """Raised when the pause of `sleep_unless_closed` is over; that method catches it."""


class AsyncTransport:
    """Sends the requests of an `AsyncClient` and reads their responses.

    Args:
        session: the client's session.
    """

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._core = session.core
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._is_connecting = False
        self._is_writer_registered = False
        # Whether outgoing messages are held back until the event loop has run every task that is ready.
        self._is_corked = False
        self._change_waiters: List[asyncio.Future[bool]] = []

    def running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the running event loop, after checking that the client is not connected in another event loop.

        Raises:
            WrongLoop: no asyncio event loop is running, or the client is connected in another event loop.
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
        """End all calls with `ClientClosed`, and close the connection."""
        self.running_loop()
        self._session.mark_closed()
        self._unregister_descriptors()
        self._session.connection.close()
        self._notify_waiters()

    async def sleep_unless_closed(self, seconds: float) -> None:
        """Sleep for `seconds`. Raise `ClientClosed` or `WrongProcess` if the client is or becomes unusable."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(_PauseEnded):
            while True:
                self._session.check_usable()
                await self._wait_for_change(deadline, _PauseEnded)

    async def send_and_wait(self, prepared: PreparedCall, deadline: float, answer_deadline: float) -> Any:
        """Send the message of a call by `deadline`, and return the response, which must arrive by `answer_deadline`."""
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
        """Send the message of a call, connecting first if necessary. Return when all of the message has been sent."""
        session = self._session
        if self._core.calls and not self._is_corked:
            # When several responses arrive together, their tasks often send new requests one after another. The cork
            # makes the connection send these requests together.
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
                # The daemon closed the new connection at once. Read the message in which it gives the reason.
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
        """Wait until the client is connected and no data is waiting to be sent. Connect first if necessary."""
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
        """Connect to the daemon. If another task is already connecting, wait until that attempt has ended."""
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
        """Send a cancellation of a call whose task was cancelled, so that no worker starts the request."""
        if call.response_type is InferResponse and self._core.is_tracked(call):
            with contextlib.suppress(ConnectionLost):
                self._session.send(self._core.cancel_frames(call))
            self._on_sent(self._session.connection)

    def _on_sent(self, connection: DaemonConnection) -> None:
        if not connection.is_idle():
            self._read()
        self._update_writer()

    def _read(self) -> None:
        """Process the received messages. If the connection is lost, fail all calls."""
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
        """Make the event loop call `_flush` when the socket is writable, but only while data is waiting to be sent."""
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
        """Remove the connection's descriptors from the event loop.

        This must happen before the descriptors are closed, because the kernel may reuse their numbers.
        """
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
                # The process was suspended past the deadline, and the loop has not yet read the data that arrived
                # meanwhile. Allow more time for reading this data.
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
