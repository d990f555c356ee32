"""The client for asyncio. What it knows and sends is `Session`'s, as for `Client`; here is only how it waits."""

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

from weightd.client import aioflow, curve, flow
from weightd.client.connection import Connection, Gone
from weightd.client.copying import Uncopied
from weightd.client.core import Call, Question
from weightd.client.curve import KeyFile
from weightd.client.inputs import Untyped, typed
from weightd.client.model import DEFAULT_IN_FLIGHT, AsyncModel
from weightd.client.retry import Attempts, Retry, checked
from weightd.client.session import BUSY_S, DEFAULT_TIMEOUT_S, LOST, Session, extended
from weightd.protocol.errors import RequestError, WeightdError
from weightd.protocol.messages.control import (
    ModelMetadataResponse,
    ReadyResponse,
    ReloadResponse,
    ServerMetadataResponse,
    UpdateResponse,
)
from weightd.protocol.messages.data import InferResponse
from weightd.protocol.messages.journal import EventsResponse, LogsResponse
from weightd.protocol.messages.metrics import MetricsResponse
from weightd.protocol.messages.status import StatusResponse

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightd.client.inputs import Inputs

T = TypeVar("T")


class WrongLoop(WeightdError):
    """An AsyncClient is used in another event loop than it is connected in, or in none of asyncio.

    Make one for each loop: they are cheap.
    """


class _Rested(WeightdError):
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
        self._retry = checked(retry)
        self._session = Session(address, timeout, tenant, curve.read(key, server_key))
        self._core = self._session.core
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._connects = False
        self._awaits_room = False
        # What is sent is kept back until all tasks that may go on have done so.
        self._holds = False
        self._waiting: List[asyncio.Future[bool]] = []

    @property
    def address(self) -> str:
        """Where the daemon is looked for, as it was asked for."""
        return self._session.address.given

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
        return self._core.sharing.arena.empty(shape, dtype)

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
            once = partial(self.infer, model, inputs, outputs=outputs, out={}, priority=priority)
            return await self._retrying(lambda left: once(timeout=left), timeout)
        seconds, more = self._begin(timeout)
        deadline = time.monotonic() + seconds
        try:
            question = self._core.infer(model, inputs, seconds, outputs, out, priority)
        except Untyped:
            question = None
        if question is None:
            named, seconds = await self._typed(model, inputs, deadline, more)
            question = self._core.infer(model, named, seconds, outputs, out, priority)
        answer: Dict[str, Any] = await self._answer(question, deadline, deadline + more)
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
        flow.check(inputs, in_flight, (abc.Iterable, abc.AsyncIterable))
        options: Dict[str, Any] = {"outputs": outputs, "timeout": timeout, "priority": priority}
        return aioflow.answers(partial(self.infer, model, **options), inputs, in_flight)

    async def ready(self, model: str = "", *, timeout: Optional[float] = None) -> ReadyResponse:
        """Return whether a model can answer: as `Client.ready`."""
        answer: ReadyResponse = await self._ask(partial(self._core.ready, model), timeout)
        return answer

    async def metadata(self, model: str, *, timeout: Optional[float] = None) -> ModelMetadataResponse:
        """Return what the model takes and gives: as `Client.metadata`."""
        answer: ModelMetadataResponse = await self._ask(partial(self._core.model_metadata, model), timeout)
        return answer

    async def server(self, *, timeout: Optional[float] = None) -> ServerMetadataResponse:
        """Return the daemon's version and the names of its models: as `Client.server`."""
        answer: ServerMetadataResponse = await self._ask(self._core.server_metadata, timeout)
        return answer

    async def status(self, *, timeout: Optional[float] = None) -> StatusResponse:
        """Return what the daemon is doing: as `Client.status`."""
        answer: StatusResponse = await self._ask(self._core.status, timeout)
        return answer

    async def metrics(self, *, timeout: Optional[float] = None) -> MetricsResponse:
        """Return what the daemon has counted: as `Client.metrics`."""
        answer: MetricsResponse = await self._ask(self._core.metrics, timeout)
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
        answer: EventsResponse = await self._ask(partial(self._core.events, after, model), timeout)
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
        answer: LogsResponse = await self._ask(partial(self._core.logs, model, process, lines), timeout)
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
        question = partial(self._core.update, model, path, weights, rollback=rollback)
        answer: UpdateResponse = await self._once(question, timeout)
        return answer

    async def reload(self, *, timeout: Optional[float] = None) -> ReloadResponse:
        """Have the daemon read its configuration file again: as `Client.reload`."""
        answer: ReloadResponse = await self._ask(self._core.reload, timeout)
        return answer

    async def close(self) -> None:
        """Close the connection. What is under way ends in `ClientClosed`. In a forked process it does nothing."""
        session = self._session
        if session.is_foreign or session.closed:
            return
        self._running_loop()
        session.end()
        self._forget_descriptors()
        session.connection.close()
        self._notify()

    async def __aenter__(self) -> AsyncClient:
        await self._retrying(self._open, None)
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

    def _begin(self, timeout: Optional[float]) -> Tuple[float, float]:
        """Return what `Session.patience_of` does, if the client may be used."""
        self._session.check()
        self._running_loop()
        return self._session.patience_of(timeout)

    async def _open(self, timeout: Optional[float]) -> None:
        await self._make_ready(time.monotonic() + self._begin(timeout)[0])

    async def _ask(self, question: Callable[[], Question], timeout: Optional[float]) -> Any:
        return await self._retrying(partial(self._once, question), timeout)

    async def _once(self, question: Callable[[], Question], timeout: Optional[float]) -> Any:
        seconds, more = self._begin(timeout)
        deadline = time.monotonic() + seconds
        return await self._answer(question(), deadline, deadline + more)

    async def _typed(self, model: str, inputs: Inputs, deadline: float, more: float) -> Tuple[Dict[str, Any], float]:
        """Return arrays by name, made of `inputs` by what the model takes, and the seconds that are left."""
        named = self._core.typed(model, inputs)
        if named is None:
            question = self._core.asking(model)
            try:
                takes: ModelMetadataResponse = await self._answer(question, deadline, deadline + more)
            except BaseException as error:
                self._core.not_asked(question, error)
                raise
            named = typed(inputs, model, takes.inputs)
        return named, deadline - time.monotonic()

    async def _retrying(self, ask: Callable[[Optional[float]], Awaitable[T]], timeout: Optional[float]) -> T:
        """Return what `ask` does within so many seconds, by further attempts where those may help."""
        if self._retry is None:
            return await ask(timeout)
        attempts = Attempts(self._retry, self._begin(timeout)[0])
        while True:
            try:
                return await ask(attempts.left())
            except RequestError as error:
                pause = attempts.pause_after(error)
                if pause is None:
                    raise
            await self._rest(pause)

    async def _rest(self, seconds: float) -> None:
        """Wait for so long, if the client is not closed meanwhile."""
        end = time.monotonic() + seconds
        with contextlib.suppress(_Rested):
            while True:
                self._session.check()
                await self._until_changed(end, _Rested)

    async def _answer(self, question: Question, deadline: float, last: float) -> Any:
        """Send until the deadline, and wait for the answer until the last moment."""
        call, frames = question
        try:
            if frames:
                await self._send(frames, deadline, call)
            if not call.done:
                ended = self._running_loop().create_future()
                call.when_done(partial(_end, ended, in_time=True))
                await self._until(ended, last, self._session.no_answer)
        except asyncio.CancelledError:
            self._take_back(call)
            raise
        return call.result()

    async def _send(self, frames: List[Any], deadline: float, call: Call) -> None:
        """Begin a call, over a new connection where there is none; wait until all of it has gone."""
        session = self._session
        if self._core.calls and not self._holds:
            # Answers come together, and then what is asked next: it goes together, too.
            self._holds = True
            session.connection.hold()
            self._running_loop().call_soon(self._let_go, session.connection)
        try:
            sent_at = session.send(frames, call)
        except Gone:
            await self._make_ready(deadline)
            try:
                sent_at = session.send(frames, call)
            except Gone as error:
                # Hung up as soon as it was there: the daemon has said why.
                while not session.connection.closed:
                    self._read()
                raise session.verdict or error from None
        connection = session.connection
        self._has_sent(connection)
        while connection.sent < sent_at and not connection.closed:
            await self._until_changed(deadline, session.not_read)

    def _let_go(self, connection: Connection) -> None:
        self._holds = False
        if not connection.closed:
            connection.let_go()
            self._await_room()

    async def _make_ready(self, deadline: float) -> None:
        """Have a connection that takes a message now."""
        session = self._session
        while True:
            session.check()
            connection = session.connection
            if connection.closed:
                await self._connect(deadline)
            elif connection.is_spoilt:
                while not connection.closed:
                    self._read()
            elif connection.unsent:
                await self._until_changed(deadline, session.not_read)
            else:
                return

    async def _connect(self, deadline: float) -> None:
        """Connect, or wait until another task has tried."""
        if self._connects:
            await self._until_changed(deadline, self._session.no_connection)
            return
        self._connects = True
        try:
            connection = await self._new_connection(deadline)
        finally:
            self._connects = False
            self._notify()
        self._session.connected(connection)
        for descriptor in connection.descriptors:
            self._running_loop().add_reader(descriptor, self._read)

    async def _new_connection(self, deadline: float) -> Connection:
        making = self._session.connecting()
        loop = self._running_loop()
        try:
            while True:
                descriptor = next(making)
                if descriptor is None:
                    if time.monotonic() > deadline:
                        raise self._session.no_connection()
                    await asyncio.sleep(BUSY_S)
                else:
                    loop.add_reader(descriptor, self._notify)
                    try:
                        await self._until_changed(deadline, self._session.no_connection)
                    finally:
                        loop.remove_reader(descriptor)
                self._session.check()
        except StopIteration as made:
            return cast(Connection, made.value)
        finally:
            making.close()

    def _take_back(self, call: Call) -> None:
        """Nobody waits for it any more: no worker shall begin with it."""
        if call.expects is InferResponse and self._core.is_under_way(call):
            with contextlib.suppress(Gone):
                self._session.send(self._core.cancel(call))
            self._has_sent(self._session.connection)

    def _has_sent(self, connection: Connection) -> None:
        if not connection.is_idle():
            self._read()
        self._await_room()

    def _read(self) -> None:
        """Take in what has come, or the loss of the connection."""
        session = self._session
        connection = session.connection
        try:
            while True:
                for message in connection.receive():
                    self._core.received(message.frames)
                self._flush()
                if connection.is_idle():
                    break
        except BaseException as error:
            self._forget_descriptors()
            session.hang_up(error)
            self._notify()
            if not isinstance(error, LOST):
                raise

    def _flush(self) -> None:
        connection = self._session.connection
        if connection.unsent:
            connection.flush()
            self._notify()
            self._await_room()

    def _await_room(self) -> None:
        """Have the loop tell when there is room to send, as long as something is unsent."""
        connection = self._session.connection
        wanted = connection.is_plain and connection.unsent > 0 and not connection.closed
        if wanted != self._awaits_room:
            self._awaits_room = wanted
            loop = self._running_loop()
            if wanted:
                loop.add_writer(connection.descriptors[0], self._flush)
            else:
                loop.remove_writer(connection.descriptors[0])

    def _forget_descriptors(self) -> None:
        """Before they are closed: their numbers are others' then."""
        connection = self._session.connection
        if not connection.closed:
            loop = self._running_loop()
            for descriptor in connection.descriptors:
                loop.remove_reader(descriptor)
            if self._awaits_room:
                self._awaits_room = False
                loop.remove_writer(connection.descriptors[0])

    async def _until_changed(self, deadline: float, late: Callable[[], WeightdError]) -> None:
        changed = self._running_loop().create_future()
        self._waiting.append(changed)
        try:
            await self._until(changed, deadline, late)
        finally:
            if changed in self._waiting:
                self._waiting.remove(changed)

    async def _until(self, happens: asyncio.Future[bool], deadline: float, late: Callable[[], WeightdError]) -> None:
        loop, began = self._running_loop(), time.monotonic()
        timer: asyncio.TimerHandle

        def expire() -> None:
            nonlocal timer
            later = extended(began, deadline)
            if later is None:
                _end(happens, in_time=False)
            else:
                # The loop runs this before it reads what has come while it was stopped.
                timer = loop.call_later(later - time.monotonic(), partial(_end, happens, in_time=False))

        timer = loop.call_later(max(0.0, deadline - began), expire)
        try:
            if not await happens:
                raise late()
        finally:
            timer.cancel()

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            _end(each, in_time=True)


def _end(future: asyncio.Future[bool], *, in_time: bool) -> None:
    if not future.done():
        future.set_result(in_time)
