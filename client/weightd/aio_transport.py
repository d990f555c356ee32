"""Transport of the asyncio client. Many tasks share one connection for their calls.

The event loop reads from the connection whenever data arrives. A task sends its message itself and then awaits a
`Wait`. Each call has one for its response. A task that waits for a change of the connection and not for a response, for
example until the connection is established or closed, awaits a wait in `_change_waits`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, List, Optional, Tuple, cast

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


if TYPE_CHECKING:
    _Future = asyncio.Future[bool]
else:
    _Future = asyncio.Future  # Python 3.7 cannot subscript it


class Wait(_Future):
    """The wait of one task for an event. The result is whether the event has happened before the deadline.

    The task goes on in `_Waits.wake_tasks`, as soon as all received messages have been processed. With an ordinary
    future it would go on in the next pass of the event loop, which costs more than encoding a request.

    Attributes:
        waits: the waits of the transport.
    """

    # There is no `__init__`, because calling it would cost as much as creating the future.
    waits: _Waits
    _continue: Callable[[Any], object]
    _context: Optional[contextvars.Context] = None

    def add_done_callback(self, fn: Callable[[Any], object], *, context: Optional[contextvars.Context] = None) -> None:
        """Store the function that lets the task go on. Only one task can wait."""
        self._continue, self._context = fn, context

    def end(self, in_time: bool = True) -> None:
        """End the wait, because the event has happened, or because the deadline has passed."""
        if not self.done():
            self.set_result(in_time)
            self.waits.on_end(self)

    def cancel(self, *args: Any, **kwargs: Any) -> bool:
        """Cancel the wait, because its task is cancelled."""
        if not super().cancel(*args, **kwargs):
            return False
        self.waits.on_end(self)
        return True

    def wake_task(self) -> None:
        """Let the task go on."""
        if self._context is None:
            self._continue(self)
        else:
            self._context.run(self._continue, self)


class _Waits:
    """The waits of an `AsyncTransport` in one event loop, and the only timer for all of their deadlines.

    A timer for each wait would cost more than encoding a request, and nearly all waits end before their deadline.

    Args:
        loop: the event loop.

    Attributes:
        loop: as above.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        # The waits that have not ended: when each began, and its deadline.
        self._limits: Dict[Wait, Tuple[float, float]] = {}
        self._timer: Optional[asyncio.TimerHandle] = None
        self._timer_at = math.inf
        # Waits that have ended, and whose tasks have not gone on.
        self._ended: Deque[Wait] = deque()
        self._is_waking = False

    def new(self, deadline: float) -> Wait:
        """Return a wait, which the caller must await at once."""
        wait = Wait(loop=self.loop)
        wait.waits = self
        self._limits[wait] = time.monotonic(), deadline
        if deadline < self._timer_at:
            self._set_timer(deadline)
        return wait

    def on_end(self, wait: Wait) -> None:
        """Let the task of a wait that has ended go on soon."""
        del self._limits[wait]
        self._ended.append(wait)
        if not self._is_waking:
            self.loop.call_soon(self.wake_tasks)

    def wake_tasks(self, process: Callable[[], object] = lambda: None) -> None:
        """Call `process`, then let the tasks go on whose waits have ended. Not for use within a task."""
        self._is_waking = True
        try:
            process()
        finally:
            try:
                while self._ended:
                    self._ended.popleft().wake_task()
            finally:
                self._is_waking = False

    def stop_timer(self) -> None:
        """Stop the timer, which would keep the client in memory."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, math.inf

    def _set_timer(self, deadline: float) -> None:
        self.stop_timer()
        self._timer_at = deadline
        self._timer = self.loop.call_later(max(0.0, deadline - time.monotonic()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        # The event loop may call a timer up to the resolution of its clock too early.
        now = time.monotonic() + _TIMER_RESOLUTION_S
        for wait, (started_at, deadline) in list(self._limits.items()):
            if deadline > now:
                continue
            extended = extended_deadline(started_at, deadline)
            if extended is None:
                wait.end(in_time=False)
            else:
                # The process was suspended past the deadline, and the loop has not yet read the data that arrived
                # meanwhile. Allow more time for reading this data, once.
                self._limits[wait] = math.inf, extended
        if self._limits:
            self._set_timer(min(deadline for _, deadline in self._limits.values()))


# Seconds by which a deadline may pass too early.
_TIMER_RESOLUTION_S = 1e-4


class AsyncTransport:
    """Sends the requests of an `AsyncClient` and reads their responses.

    Args:
        session: the client's session.
    """

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._core = session.core
        self._channels = session.channels
        self._channels.before_close = self._unregister_channel
        # The channels for which the event loop calls `ChannelSockets.receive`, by descriptor.
        self._registered = self._channels.by_descriptor
        self._waits: Optional[_Waits] = None
        self._is_connecting = False
        self._is_writer_registered = False
        # Whether outgoing messages are held back until the event loop has run every task that is ready.
        self._is_corked = False
        self._change_waits: List[Wait] = []

    def running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the running event loop, after checking that the client is not connected in another event loop.

        Raises:
            WrongLoop: no asyncio event loop is running, or the client is connected in another event loop.
        """
        return self._running_waits().loop

    def _running_waits(self) -> _Waits:
        """Return the waits of the running event loop, after the same check.

        Raises:
            WrongLoop: no asyncio event loop is running, or the client is connected in another event loop.
        """
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongLoop("AsyncClient requires a running asyncio event loop; without one, use Client") from None
        waits = self._waits
        if waits is None or waits.loop is not running:
            if waits is not None and not self._session.connection.closed:
                raise WrongLoop("this client is connected in another event loop; create one client for each event loop")
            self._channels.close_all()
            waits = self._waits = _Waits(running)
        return waits

    def close(self) -> None:
        """End all calls with `ClientClosed`, and close the connection."""
        waits = self._running_waits()
        self._session.mark_closed()
        self._unregister_descriptors()
        self._session.connection.close()
        self._channels.close_all()
        self._notify_waiters()
        waits.stop_timer()

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
        waits = self._running_waits()
        try:
            if call.description_frame in self._core.channels.usable and self._channels.send(call, frames, deadline):
                pass
            elif frames:
                await self._send(frames, deadline, call)
            if not call.done:
                answered = waits.new(answer_deadline)
                call.add_done_callback(answered.end)
                if not await answered:
                    raise self._session.answer_timeout_error(call)
        except asyncio.CancelledError:
            self._cancel_call(call)
            raise
        return call.result()

    async def _send(self, frames: List[Any], deadline: float, call: PendingCall) -> None:
        """Send the message of a call, connecting first if necessary. Return when all of the message has been sent."""
        session = self._session
        if self._core.calls and not self._is_corked and not session.connection.closed:
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
        if target_sent or not connection.is_level_triggered:
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
        self.running_loop()
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
            waits = self._running_waits()
            waits.loop.add_reader(descriptor, waits.wake_tasks, self._read)

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
        if self._session.cancel_on_channel(call):
            return
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
                session.receive()
                if connection.unsent_count:
                    self._flush()
                if connection.is_idle():
                    break
        except BaseException as error:
            self._unregister_descriptors()
            session.drop_connection(error)
            self._notify_waiters()
            if not isinstance(error, CONNECTION_LOST_ERRORS):
                raise
        self._register_channels()

    def _register_channels(self) -> None:
        """Make the event loop call `ChannelSockets.receive` for new channels."""
        self._channels.close_unused()
        known, self._registered = self._registered, self._channels.by_descriptor
        if self._registered is not known:
            waits = self._running_waits()
            for descriptor, channel in self._registered.items():
                if known.get(descriptor) is not channel:
                    waits.loop.add_reader(descriptor, waits.wake_tasks, partial(self._channels.receive, channel))

    def _unregister_channel(self, descriptor: int) -> None:
        """Remove a channel from the event loop before its descriptor is closed."""
        if self._waits is not None and not self._waits.loop.is_closed():
            self._waits.loop.remove_reader(descriptor)

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
        changed = self._running_waits().new(deadline)
        self._change_waits.append(changed)
        try:
            if not await changed:
                raise timeout_error()
        finally:
            if changed in self._change_waits:
                self._change_waits.remove(changed)

    def _notify_waiters(self) -> None:
        waiting, self._change_waits = self._change_waits, []
        for each in waiting:
            each.end()
