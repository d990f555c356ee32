"""Asyncio client of a weightd daemon. `AsyncClient` and the blocking `Client` share the class `ClientSession`."""

from __future__ import annotations

import asyncio
import time
from collections import abc
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Dict,
    Iterable,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
    Union,
)

from weightd import queries
from weightd.address import KeyFile, read_keys
from weightd.aio_transport import AsyncTransport
from weightd.inputs import NeedsMetadata, to_typed_inputs
from weightd.model import DEFAULT_IN_FLIGHT, AsyncModel, check_map_arguments
from weightd.pending import Uncopied
from weightd.queries import Query
from weightd.retry import Attempts, Retry, check_retry
from weightd.session import (
    DEFAULT_TIMEOUT_S,
    ClientSession,
)
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.control import (
    LOAD,
    LoadResponse,
    ModelMetadataResponse,
    ReadyResponse,
    ReloadResponse,
    RolloutResponse,
    ServerMetadataResponse,
    UpdateResponse,
)
from weightd_protocol.messages.events import EventsResponse, LogsResponse
from weightd_protocol.messages.metrics import MetricsResponse
from weightd_protocol.messages.status import StatusResponse

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightd.inputs import Inputs

    InputSeries = Union[Iterable[Inputs], AsyncIterable[Inputs]]
    InferCall = Callable[[Inputs], Coroutine[Any, Any, Any]]
    # The requests that have been started, in the order of the inputs. None at the end means that no request follows.
    StartedRequests = asyncio.Queue[Optional[asyncio.Future[Any]]]

R = TypeVar("R")
T = TypeVar("T")


class AsyncClient(Uncopied):
    """Asyncio client of a weightd daemon.

    ::

        async with AsyncClient() as client:
            outputs = await client.infer("digits", {"image": images})

    `AsyncClient` has the methods of `Client`, with two differences. There is no `submit`: to run several requests at
    once, await `infer` in several tasks. And the client connects at `async with` or at the first call, not when it is
    created; errors of the connection are raised there. Cancelling a task that awaits `infer` cancels the request. A
    client must be used in one event loop only.

    Args:
        address: as `Client`.
        timeout: as `Client`.
        tenant: as `Client`.
        key: as `Client`.
        server_key: as `Client`.
        retry: as `Client`.

    Raises:
        InvalidArgument: an argument is invalid, or a key file cannot be used.
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
        self._session = ClientSession(address, timeout, tenant, read_keys(key, server_key))
        self._core = self._session.core
        self._transport = AsyncTransport(self._session)

    @property
    def address(self) -> str:
        """The daemon's address in the form in which the caller or the environment gave it."""
        return self._session.address.text

    @property
    def transport(self) -> str:
        """Transport of the current or last connection: "unix" or "zmq"; "" before the first connection."""
        return self._session.connection.transport

    @property
    def timeout(self) -> float:
        """Default timeout of this client's calls in seconds."""
        return self._session.timeout

    def empty(self, shape: Union[int, Sequence[int]], dtype: Any) -> Any:
        """Return an uninitialized numpy array in memory shared with the daemon's workers, as `Client.empty`."""
        return self._core.shm_tensors.arena.empty(shape, dtype)

    def model(
        self,
        name: str,
        *,
        outputs: Optional[Sequence[str]] = None,
        timeout: Optional[float] = None,
        priority: Optional[int] = None,
    ) -> AsyncModel:
        """Return an object for one model whose calls are awaited, as `Client.model`."""
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
        """Run `model` on `inputs` and return its outputs, as `Client.infer`.

        Do not modify the input arrays until the response has arrived: the client does not copy large arrays.
        """
        if self._retry is not None and out is None:
            # This method calls itself once per attempt. `out={}` disables retries within each attempt.
            infer_once = partial(self.infer, model, inputs, outputs=outputs, out={}, priority=priority)
            return await self._with_retries(lambda left: infer_once(timeout=left), timeout)
        seconds, grace_s = self._session.resolve_timeout(timeout)
        deadline = time.monotonic() + seconds
        try:
            prepared = self._core.prepare_infer(model, inputs, seconds, outputs, out, priority)
        except NeedsMetadata:
            prepared = None
        if prepared is None:
            typed_inputs, seconds = await self._to_typed_inputs(model, inputs, deadline, grace_s)
            prepared = self._core.prepare_infer(model, typed_inputs, seconds, outputs, out, priority)
        answer: Dict[str, Any] = await self._transport.send_and_wait(prepared, deadline, deadline + grace_s)
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
        """Run `model` on each of `inputs`, several at a time, and yield the outputs in input order, as `Client.map`.

        `inputs` may also be an asynchronous iterable. The generator takes inputs and yields outputs concurrently, so an
        input may depend on the outputs of an earlier input.
        """
        check_map_arguments(inputs, in_flight, (abc.Iterable, abc.AsyncIterable))
        options: Dict[str, Any] = {"outputs": outputs, "timeout": timeout, "priority": priority}
        return map_ordered(partial(self.infer, model, **options), inputs, in_flight)

    async def ready(self, model: str = "", *, timeout: Optional[float] = None) -> ReadyResponse:
        """Return whether a model can serve requests, as `Client.ready`."""
        return await self._query(queries.ready(model), timeout)

    async def metadata(self, model: str, *, timeout: Optional[float] = None) -> ModelMetadataResponse:
        """Return the signature of a model, as `Client.metadata`."""
        return await self._query(queries.metadata(model), timeout)

    async def server(self, *, timeout: Optional[float] = None) -> ServerMetadataResponse:
        """Return the daemon's version and the names of its models, as `Client.server`."""
        return await self._query(queries.SERVER, timeout)

    async def status(self, *, timeout: Optional[float] = None) -> StatusResponse:
        """Return the state of the daemon, its models and its processes, as `Client.status`."""
        return await self._query(queries.STATUS, timeout)

    async def metrics(self, *, timeout: Optional[float] = None) -> MetricsResponse:
        """Return the daemon's counters and gauges, as `Client.metrics`."""
        return await self._query(queries.METRICS, timeout)

    async def events(self, after: int = 0, model: str = "", *, timeout: Optional[float] = None) -> EventsResponse:
        """Return the daemon's events that follow event number `after`, as `Client.events`."""
        return await self._query(queries.events(after, model), timeout)

    async def logs(
        self, model: str, process: str = "", *, lines: int = 100, timeout: Optional[float] = None
    ) -> LogsResponse:
        """Return the last log lines of a model's processes, as `Client.logs`."""
        return await self._query(queries.logs(model, process, lines), timeout)

    async def update(
        self,
        model: str,
        path: str = "",
        *,
        weights: str = "",
        rollback: bool = False,
        timeout: Optional[float] = None,
    ) -> UpdateResponse:
        """Load another model file or other weights beside the serving version, as `Client.update`."""
        return await self._query_once(queries.update(model, path, weights, rollback=rollback), timeout)

    async def load(
        self, model: str, *, action: str = LOAD, wait: bool = True, timeout: Optional[float] = None
    ) -> LoadResponse:
        """Load a model that is not loaded, and wait until it serves, as `Client.load`."""
        return await self._query_once(queries.load(model, action, wait=wait), timeout)

    async def unload(self, model: str, *, wait: bool = True, timeout: Optional[float] = None) -> LoadResponse:
        """Unload a model once the requests that it has accepted have ended, as `Client.unload`."""
        return await self._query_once(queries.unload(model, wait=wait), timeout)

    async def rollout(
        self, model: str, action: str, version: int = 0, percent: float = 0.0, *, timeout: Optional[float] = None
    ) -> RolloutResponse:
        """Change which versions of a model answer the requests that name no version: as `Client.rollout`."""
        return await self._query_once(queries.rollout(model, action, version, percent), timeout)

    async def reload(self, *, dry_run: bool = False, timeout: Optional[float] = None) -> ReloadResponse:
        """Make the daemon read its configuration file again, as `Client.reload`."""
        return await self._query(queries.reload(dry_run=dry_run), timeout)

    async def close(self) -> None:
        """Close the connection. Calls in progress fail with `ClientClosed`. Does nothing in a forked process."""
        if not (self._session.is_forked_copy or self._session.closed):
            self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        await self._with_retries(self._ensure_connected, None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- within -------------------------------------------------------------------------------------------------

    async def _ensure_connected(self, timeout: Optional[float]) -> None:
        await self._transport.ensure_writable(time.monotonic() + self._session.resolve_timeout(timeout)[0])

    async def _query(self, query: Query[R], timeout: Optional[float]) -> R:
        return await self._with_retries(partial(self._query_once, query), timeout)

    async def _query_once(self, query: Query[R], timeout: Optional[float]) -> R:
        seconds, grace_s = self._session.resolve_timeout(timeout)
        deadline = time.monotonic() + seconds
        prepared = self._core.prepare_query(query)
        answer: R = await self._transport.send_and_wait(prepared, deadline, deadline + grace_s)
        return answer

    async def _to_typed_inputs(
        self, model: str, inputs: Inputs, deadline: float, grace_s: float
    ) -> Tuple[Dict[str, Any], float]:
        """Return `inputs` as arrays of the datatypes in the model's signature, and the seconds until `deadline`.

        If the signature is not cached, request it first.
        """
        typed_inputs = self._core.typed_inputs(model, inputs)
        if typed_inputs is None:
            prepared = self._core.prepare_metadata_call(model)
            try:
                metadata: ModelMetadataResponse = await self._transport.send_and_wait(
                    prepared, deadline, deadline + grace_s
                )
            except BaseException as error:
                self._core.abort_metadata_call(prepared, error)
                raise
            typed_inputs = to_typed_inputs(inputs, model, metadata.inputs)
        return typed_inputs, deadline - time.monotonic()

    async def _with_retries(self, attempt: Callable[[Optional[float]], Awaitable[T]], timeout: Optional[float]) -> T:
        """Await `attempt`, and repeat it within the timeout if it fails with an error that the retry policy covers."""
        if self._retry is None:
            return await attempt(timeout)
        attempts = Attempts(self._retry, self._session.resolve_timeout(timeout)[0])
        while True:
            try:
                return await attempt(attempts.remaining_s())
            except RequestError as error:
                pause = attempts.pause_after(error)
                if pause is None:
                    raise
            await self._transport.sleep_unless_closed(pause)


# --- map -------------------------------------------------------------------------------------------------------------


async def map_ordered(infer: InferCall, inputs: InputSeries, in_flight: int) -> AsyncGenerator[Any, None]:
    """Start a request for each of `inputs`, and yield the responses in the order of the inputs.

    A task takes the inputs while the generator waits for responses, so an input may depend on an earlier response. When
    the generator ends for any reason, it cancels the requests in progress.
    """
    permits = asyncio.Semaphore(in_flight)
    started: StartedRequests = asyncio.Queue()
    tasks: List[asyncio.Future[Any]] = [asyncio.ensure_future(_start_requests(infer, inputs, permits, started))]
    try:
        while True:
            request = await started.get()
            if request is None:
                break
            tasks.append(request)
            answer = await request
            tasks.remove(request)
            permits.release()
            yield answer
        await tasks[0]
    finally:
        await _cancel_all(tasks, started)


async def _start_requests(
    infer: InferCall, inputs: InputSeries, permits: asyncio.Semaphore, started: StartedRequests
) -> None:
    """Take inputs and start a request for each, at most as many at a time as `permits` allows.

    One task takes all inputs, because the iterable that produces them may rely on running in a single task.
    """
    try:
        await permits.acquire()
        async for each in _iterate(inputs):
            started.put_nowait(asyncio.ensure_future(infer(each)))
            await permits.acquire()
    finally:
        started.put_nowait(None)


async def _iterate(inputs: InputSeries) -> AsyncIterator[Inputs]:
    if isinstance(inputs, abc.AsyncIterable):
        async for each in inputs:
            yield each
    else:
        for each in inputs:
            yield each


async def _cancel_all(tasks: List[asyncio.Future[Any]], started: StartedRequests) -> None:
    """Cancel the task that takes inputs and the requests that it has started; wait until all of them have ended."""
    while tasks:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()
        while not started.empty():
            request = started.get_nowait()
            if request is not None:
                tasks.append(request)
