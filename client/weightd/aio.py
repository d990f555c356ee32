"""The client for asyncio. What it knows and sends is `ClientSession`'s, as for `Client`; here is only how it waits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import abc
from functools import partial
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
    cast,
)

from weightd import aio_map, curve, map
from weightd.connection import ConnectionLost, DaemonConnection
from weightd.copying import Uncopied
from weightd.curve import KeyFile
from weightd.inputs import NeedsMetadata, to_typed_inputs
from weightd.model import DEFAULT_IN_FLIGHT, AsyncModel
from weightd.protocol_core import PendingCall, PreparedCall
from weightd.retry import Attempts, Retry, check_retry
from weightd.session import (
    BUSY_RETRY_INTERVAL_S,
    CONNECTION_LOST_ERRORS,
    DEFAULT_TIMEOUT_S,
    ClientSession,
    extended_deadline,
)
from weightd_protocol.errors import RequestError, WeightdError
from weightd_protocol.messages.control import (
    ModelMetadataResponse,
    ReadyResponse,
    ReloadResponse,
    ServerMetadataResponse,
    UpdateResponse,
)
from weightd_protocol.messages.events import EventsResponse, LogsResponse
from weightd_protocol.messages.inference import InferResponse
from weightd_protocol.messages.metrics import MetricsResponse
from weightd_protocol.messages.status import StatusResponse

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightd.inputs import Inputs

T = TypeVar("T")


class WrongLoop(WeightdError):
    """An AsyncClient is used in another event loop than it is connected in, or in none of asyncio.

    Make one for each loop: they are cheap.
    """


class _PauseEnded(WeightdError):
    """A pause is over."""


class AsyncClient(Uncopied):
    """Asks a weightd daemon for inference, for asyncio.

    ::

        async with AsyncClient() as client:
            outputs = await client.infer("digits", {"image": images})

    As `Client`, with two differences: many tasks may await answers at once, so there is no `submit`; and it connects
    when `async with` begins or the first call is made, with the errors that `Client` raises when it is made. A task
    that is cancelled while it awaits `infer` takes the request back. An object is for one event loop.

    Args:
        address: as `Client`.
        timeout: as `Client`.
        tenant: as `Client`.
        key: as `Client`.
        server_key: as `Client`.
        retry: as `Client`.

    Raises:
        InvalidArgument: an argument is not what it has to be, or a key cannot be used.
    """

    def __init__(
        self,
        address: Optional[str] = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        tenant: Optional[str] = None,
        key: Optional[KeyFile] = None,
        server_key: Optional[KeyFile] = None,
        retry: Optional[Retry] = None,
    ) -> None:
        self._retry = check_retry(retry)
        self._session = ClientSession(address, timeout, tenant, curve.read_keys(key, server_key))
        self._core = self._session.core
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._is_connecting = False
        self._is_writer_registered = False
        # What is sent is kept back until all tasks that may go on have done so.
        self._is_corked = False
        self._change_waiters: List[asyncio.Future[bool]] = []

    @property
    def address(self) -> str:
        """Where the daemon is looked for, as it was asked for."""
        return self._session.address.text

    @property
    def transport(self) -> str:
        """How it is, or was last, connected: "unix" or "zmq"; "" before it was."""
        return self._session.connection.transport

    @property
    def timeout(self) -> float:
        """Seconds that a call waits unless it says otherwise."""
        return self._session.timeout

    def empty(self, shape: Union[int, Sequence[int]], dtype: Any) -> Any:
        """Return a new numpy array of any content, in memory that the daemon's workers see: as `Client.empty`."""
        return self._core.shm_tensors.arena.empty(shape, dtype)

    def model(
        self,
        name: str,
        *,
        outputs: Optional[Sequence[str]] = None,
        timeout: Optional[float] = None,
        priority: Optional[int] = None,
    ) -> AsyncModel:
        """Return a model as a function, whose calls are awaited: as `Client.model`."""
        options: Dict[str, Any] = {"outputs": outputs, "timeout": timeout, "priority": priority}
        return AsyncModel(
            name,
            partial(self.infer, name, **options),
            partial(self.map, name, **options),
            partial(self.metadata, name),
        )

    async def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        outputs: Optional[Sequence[str]] = None,
        out: Optional[Mapping[str, Any]] = None,
        timeout: Optional[float] = None,
        priority: Optional[int] = None,
    ) -> Dict[str, NDArray[Any]]:
        """Run `model` on `inputs` and return its outputs: as `Client.infer`.

        The arrays must not be changed before the answer has come: large ones are not copied.
        """
        if self._retry is not None and out is None:
            # An `out`, be it an empty one, is for one attempt.
            infer_once = partial(self.infer, model, inputs, outputs=outputs, out={}, priority=priority)
            return await self._with_retries(lambda left: infer_once(timeout=left), timeout)
        seconds, grace_s = self._resolve_timeout(timeout)
        deadline = time.monotonic() + seconds
        try:
            prepared = self._core.prepare_infer(model, inputs, seconds, outputs, out, priority)
        except NeedsMetadata:
            prepared = None
        if prepared is None:
            typed_inputs, seconds = await self._to_typed_inputs(model, inputs, deadline, grace_s)
            prepared = self._core.prepare_infer(model, typed_inputs, seconds, outputs, out, priority)
        answer: Dict[str, Any] = await self._send_and_wait(prepared, deadline, deadline + grace_s)
        return answer

    def map(
        self,
        model: str,
        inputs: Union[Iterable[Inputs], AsyncIterable[Inputs]],
        *,
        in_flight: int = DEFAULT_IN_FLIGHT,
        outputs: Optional[Sequence[str]] = None,
        timeout: Optional[float] = None,
        priority: Optional[int] = None,
    ) -> AsyncGenerator[Dict[str, NDArray[Any]], None]:
        """Run `model` on each of `inputs`, several at a time; give the outputs of each, in order: as `Client.map`.

        Inputs are waited for beside the outputs, so that one may depend on outputs of an earlier one.
        """
        map.check_map_arguments(inputs, in_flight, (abc.Iterable, abc.AsyncIterable))
        options: Dict[str, Any] = {"outputs": outputs, "timeout": timeout, "priority": priority}
        return aio_map.map_ordered(partial(self.infer, model, **options), inputs, in_flight)

    async def ready(self, model: str = "", *, timeout: Optional[float] = None) -> ReadyResponse:
        """Return whether a model can answer: as `Client.ready`."""
        answer: ReadyResponse = await self._query(partial(self._core.prepare_ready, model), timeout)
        return answer

    async def metadata(self, model: str, *, timeout: Optional[float] = None) -> ModelMetadataResponse:
        """Return what the model takes and gives: as `Client.metadata`."""
        answer: ModelMetadataResponse = await self._query(partial(self._core.prepare_model_metadata, model), timeout)
        return answer

    async def server(self, *, timeout: Optional[float] = None) -> ServerMetadataResponse:
        """Return the daemon's version and the names of its models: as `Client.server`."""
        answer: ServerMetadataResponse = await self._query(self._core.prepare_server_metadata, timeout)
        return answer

    async def status(self, *, timeout: Optional[float] = None) -> StatusResponse:
        """Return what the daemon is doing: as `Client.status`."""
        answer: StatusResponse = await self._query(self._core.prepare_status, timeout)
        return answer

    async def metrics(self, *, timeout: Optional[float] = None) -> MetricsResponse:
        """Return what the daemon has counted: as `Client.metrics`."""
        answer: MetricsResponse = await self._query(self._core.prepare_metrics, timeout)
        return answer

    async def events(self, after: int = 0, model: str = "", *, timeout: Optional[float] = None) -> EventsResponse:
        """Return what has happened after the event of this number, as much as fits: ask again after its `last`.

        Args:
            after: 0 for all that the daemon still knows.
            model: its name; "" for whatever has happened.
            timeout: seconds to wait for this answer.

        Raises:
            RequestError: as `infer`.
        """
        answer: EventsResponse = await self._query(partial(self._core.prepare_events, after, model), timeout)
        return answer

    async def logs(
        self, model: str, process: str = "", *, lines: int = 100, timeout: Optional[float] = None
    ) -> LogsResponse:
        """Return the ends of what the processes of a model have written. Only who may operate is told.

        Args:
            model: the model's name.
            process: the name of one of them, as the status has it; "" for all.
            lines: the most of each.
            timeout: seconds to wait for this answer.

        Raises:
            RequestError: as `infer`.
        """
        answer: LogsResponse = await self._query(partial(self._core.prepare_logs, model, process, lines), timeout)
        return answer

    async def update(
        self,
        model: str,
        path: str = "",
        *,
        weights: str = "",
        rollback: bool = False,
        timeout: Optional[float] = None,
    ) -> UpdateResponse:
        """Have another model, or other weights, loaded beside what serves: as `Client.update`."""
        prepare = partial(self._core.prepare_update, model, path, weights, rollback=rollback)
        answer: UpdateResponse = await self._query_once(prepare, timeout)
        return answer

    async def reload(self, *, timeout: Optional[float] = None) -> ReloadResponse:
        """Have the daemon read its configuration file again: as `Client.reload`."""
        answer: ReloadResponse = await self._query(self._core.prepare_reload, timeout)
        return answer

    async def close(self) -> None:
        """Close the connection. What is under way ends in `ClientClosed`. In a forked process it does nothing."""
        session = self._session
        if session.is_forked_copy or session.closed:
            return
        self._running_loop()
        session.mark_closed()
        self._unregister_descriptors()
        session.connection.close()
        self._notify_waiters()

    async def __aenter__(self) -> AsyncClient:
        await self._with_retries(self._ensure_connected, None)
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        await self.close()

    # --- within -------------------------------------------------------------------------------------------------
    #
    # The loop reads, all the time; tasks send, and wait in futures: for a call, or in `_waiting` for all other changes.

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongLoop("an AsyncClient needs an event loop of asyncio that runs; Client needs none") from None
        if self._loop is not running:
            if self._loop is not None and not self._session.connection.closed:
                raise WrongLoop("this client belongs to the event loop that it is connected in; make one for each loop")
            self._loop = running
        return running

    def _resolve_timeout(self, timeout: Optional[float]) -> Tuple[float, float]:
        """Return what `ClientSession.resolve_timeout` does, if the client may be used."""
        self._session.check_usable()
        self._running_loop()
        return self._session.resolve_timeout(timeout)

    async def _ensure_connected(self, timeout: Optional[float]) -> None:
        await self._ensure_writable(time.monotonic() + self._resolve_timeout(timeout)[0])

    async def _query(self, prepare: Callable[[], PreparedCall], timeout: Optional[float]) -> Any:
        return await self._with_retries(partial(self._query_once, prepare), timeout)

    async def _query_once(self, prepare: Callable[[], PreparedCall], timeout: Optional[float]) -> Any:
        seconds, grace_s = self._resolve_timeout(timeout)
        deadline = time.monotonic() + seconds
        return await self._send_and_wait(prepare(), deadline, deadline + grace_s)

    async def _to_typed_inputs(
        self, model: str, inputs: Inputs, deadline: float, grace_s: float
    ) -> Tuple[Dict[str, Any], float]:
        """Return arrays by name, made of `inputs` by what the model takes, and the seconds that are left."""
        typed_inputs = self._core.typed_inputs(model, inputs)
        if typed_inputs is None:
            prepared = self._core.prepare_metadata_call(model)
            try:
                metadata: ModelMetadataResponse = await self._send_and_wait(prepared, deadline, deadline + grace_s)
            except BaseException as error:
                self._core.abort_metadata_call(prepared, error)
                raise
            typed_inputs = to_typed_inputs(inputs, model, metadata.inputs)
        return typed_inputs, deadline - time.monotonic()

    async def _with_retries(self, attempt: Callable[[Optional[float]], Awaitable[T]], timeout: Optional[float]) -> T:
        """Return what `attempt` does within so many seconds, by further attempts where those may help."""
        if self._retry is None:
            return await attempt(timeout)
        attempts = Attempts(self._retry, self._resolve_timeout(timeout)[0])
        while True:
            try:
                return await attempt(attempts.remaining_s())
            except RequestError as error:
                pause = attempts.pause_after(error)
                if pause is None:
                    raise
            await self._sleep_unless_closed(pause)

    async def _sleep_unless_closed(self, seconds: float) -> None:
        """Wait for so long, if the client is not closed meanwhile."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(_PauseEnded):
            while True:
                self._session.check_usable()
                await self._wait_for_change(deadline, _PauseEnded)

    async def _send_and_wait(self, prepared: PreparedCall, deadline: float, answer_deadline: float) -> Any:
        """Send until the deadline, and wait for the answer until the last moment."""
        call, frames = prepared
        try:
            if frames:
                await self._send(frames, deadline, call)
            if not call.done:
                finished = self._running_loop().create_future()
                call.add_done_callback(partial(_resolve_future, finished, in_time=True))
                await self._wait_for(finished, answer_deadline, self._session.answer_timeout_error)
        except asyncio.CancelledError:
            self._cancel_call(call)
            raise
        return call.result()

    async def _send(self, frames: List[Any], deadline: float, call: PendingCall) -> None:
        """Begin a call, over a new connection where there is none; wait until all of it has gone."""
        session = self._session
        if self._core.calls and not self._is_corked:
            # Answers come together, and then what is asked next: it goes together, too.
            self._is_corked = True
            session.connection.cork()
            self._running_loop().call_soon(self._uncork, session.connection)
        try:
            target_sent = session.send(frames, call)
        except ConnectionLost:
            await self._ensure_writable(deadline)
            try:
                target_sent = session.send(frames, call)
            except ConnectionLost as error:
                # Hung up as soon as it was there: the daemon has said why.
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

    async def _ensure_writable(self, deadline: float) -> None:
        """Have a connection that takes a message now."""
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
        """Connect, or wait until another task has tried."""
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
            self._running_loop().add_reader(descriptor, self._read)

    async def _new_connection(self, deadline: float) -> DaemonConnection:
        steps = self._session.connect_steps()
        loop = self._running_loop()
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
        """Nobody waits for it any more: no worker shall begin with it."""
        if call.response_type is InferResponse and self._core.is_tracked(call):
            with contextlib.suppress(ConnectionLost):
                self._session.send(self._core.cancel_frames(call))
            self._on_sent(self._session.connection)

    def _on_sent(self, connection: DaemonConnection) -> None:
        if not connection.is_idle():
            self._read()
        self._update_writer()

    def _read(self) -> None:
        """Take in what has come, or the loss of the connection."""
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
        """Have the loop tell when there is room to send, as long as something is unsent."""
        connection = self._session.connection
        needs_writer = connection.is_level_triggered and connection.unsent_count > 0 and not connection.closed
        if needs_writer != self._is_writer_registered:
            self._is_writer_registered = needs_writer
            loop = self._running_loop()
            if needs_writer:
                loop.add_writer(connection.descriptors[0], self._flush)
            else:
                loop.remove_writer(connection.descriptors[0])

    def _unregister_descriptors(self) -> None:
        """Before they are closed: their numbers are others' then."""
        connection = self._session.connection
        if not connection.closed:
            loop = self._running_loop()
            for descriptor in connection.descriptors:
                loop.remove_reader(descriptor)
            if self._is_writer_registered:
                self._is_writer_registered = False
                loop.remove_writer(connection.descriptors[0])

    async def _wait_for_change(self, deadline: float, timeout_error: Callable[[], WeightdError]) -> None:
        changed = self._running_loop().create_future()
        self._change_waiters.append(changed)
        try:
            await self._wait_for(changed, deadline, timeout_error)
        finally:
            if changed in self._change_waiters:
                self._change_waiters.remove(changed)

    async def _wait_for(
        self, future: asyncio.Future[bool], deadline: float, timeout_error: Callable[[], WeightdError]
    ) -> None:
        loop, started_at = self._running_loop(), time.monotonic()
        timer: asyncio.TimerHandle

        def on_deadline() -> None:
            nonlocal timer
            extended = extended_deadline(started_at, deadline)
            if extended is None:
                _resolve_future(future, in_time=False)
            else:
                # The loop runs this before it reads what has come while it was stopped.
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
