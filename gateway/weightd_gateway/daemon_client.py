"""Client of the daemon: sends the requests of HTTP and gRPC callers for inference, metadata, status and metrics."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from numpy.typing import NDArray

from weightd import AsyncClient
from weightd_gateway.auth import Caller
from weightd_gateway.error_codes import to_request_error
from weightd_gateway.fairness import AdmissionControl
from weightd_protocol.errors import WeightdError
from weightd_protocol.messages.control import (
    LoadResponse,
    ModelMetadataResponse,
    ReadyResponse,
    ServerMetadataResponse,
)
from weightd_protocol.messages.metrics import MetricsResponse
from weightd_protocol.messages.status import StatusResponse

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class InferenceRequest:
    """An inference request of a caller, in the same form for HTTP and gRPC.

    Attributes:
        model: the model's name.
        inputs: arrays by input name, little-endian and in C order. They are views of the received bytes, which must not
            change before the response has arrived.
        outputs: the names of the outputs to return, in the order of the response; None: all outputs.
        timeout: seconds after which the request fails; None: the gateway's default.
        priority: 1 is the highest; None: the model's default.
        traceparent: the header of W3C Trace Context; "" without one.
        id: the caller's request id; "" without one.
    """

    model: str
    inputs: Arrays
    outputs: Sequence[str] | None = None
    timeout: float | None = None
    priority: int | None = None
    traceparent: str = ""
    id: str = ""


InferenceResult = Arrays


T = TypeVar("T")

# Seconds for which a response with status or metrics is cached for all callers of a tenant, because each such request
# costs the daemon some milliseconds for each process.
_CACHE_TTL_S = 1.0


class DaemonClient:
    """Sends requests of callers to the daemon, over one connection for each tenant.

    While the daemon cannot be reached, requests fail with `Unavailable`; each new request tries to connect again.

    Args:
        address: the daemon's address; None: the default that `weightctl` uses.
        timeout: seconds after which a request without a timeout fails.
        admission: limits the requests in flight and their bytes; a frontend gets a permit before it stores data of a
            request.
    """

    def __init__(self, address: str | None, timeout: float, admission: AdmissionControl) -> None:
        self._address = address
        self._timeout = timeout
        self._clients: dict[str | None, AsyncClient] = {}
        self._statuses: dict[str | None, _Latest[StatusResponse]] = {}
        self._metrics: dict[str | None, _Latest[MetricsResponse]] = {}
        self.admission = admission

    async def server(self, caller: Caller) -> ServerMetadataResponse:
        """Return the daemon's version and the names of the models that are visible to the caller.

        Raises:
            RequestError: the request failed. All other methods that send requests also raise `RequestError` if they
                fail.
        """
        return await _await_response(self._client(caller).server())

    async def ready(self, caller: Caller, model: str = "") -> ReadyResponse:
        """Return whether a model is ready or, with "", whether all models that the caller can see are ready."""
        return await _await_response(self._client(caller).ready(model))

    async def metadata(self, caller: Caller, model: str) -> ModelMetadataResponse:
        """Return the signature of a model; if the model is still loading, the daemon replies after the load."""
        return await _await_response(self._client(caller).metadata(model))

    async def load(self, caller: Caller, model: str) -> None:
        """Load a model; return once the model serves requests."""
        await self._change(self._client(caller).load(model, timeout=self._timeout))

    async def unload(self, caller: Caller, model: str) -> None:
        """Unload a model; return once all processes of the model have exited."""
        await self._change(self._client(caller).unload(model, timeout=self._timeout))

    async def status(self, caller: Caller) -> StatusResponse:
        """Return the daemon's status, at most one second old."""
        client = self._client(caller)
        latest = self._statuses.setdefault(caller.tenant, _Latest(lambda: _await_response(client.status())))
        return await latest.get()

    async def metrics(self, caller: Caller) -> MetricsResponse:
        """Return the daemon's metrics, at most one second old."""
        client = self._client(caller)
        latest = self._metrics.setdefault(caller.tenant, _Latest(lambda: _await_response(client.metrics())))
        return await latest.get()

    async def infer(self, caller: Caller, request: InferenceRequest) -> InferenceResult:
        """Return the outputs of the model. Cancelling the task cancels the request at the daemon."""
        client = self._clients.get(caller.tenant) or self._client(caller)
        try:
            return await client.infer(
                request.model,
                request.inputs,
                outputs=request.outputs,
                timeout=request.timeout,
                priority=request.priority,
            )
        except WeightdError as error:
            _raise_request_error(error)

    def allocate(self, caller: Caller, nbytes: int) -> Any:
        """Return a byte array for receiving a request; arrays in this memory are sent to the daemon without a copy."""
        return self._client(caller).empty((nbytes,), "u1")

    async def close(self) -> None:
        """Close all connections; requests in flight fail with `Unavailable`."""
        for client in self._clients.values():
            await client.close()

    async def _change(self, response: Awaitable[LoadResponse]) -> None:
        try:
            await _await_response(response)
        finally:
            # Drop the cached responses, so that the next status and the next metrics show the change.
            self._statuses.clear()
            self._metrics.clear()

    def _client(self, caller: Caller) -> AsyncClient:
        client = self._clients.get(caller.tenant)
        if client is None:
            client = AsyncClient(self._address, timeout=self._timeout, tenant=caller.tenant)
            self._clients[caller.tenant] = client
        return client


async def _await_response(response: Awaitable[T]) -> T:
    try:
        return await response
    except WeightdError as error:
        _raise_request_error(error)


def _raise_request_error(error: WeightdError) -> NoReturn:
    """Raise the error of the client as a `RequestError`, within its `except` clause."""
    wanted = to_request_error(error)
    try:
        if wanted is error:
            raise error
        raise wanted from error
    finally:
        # The error's traceback refers to this frame, and the variables would refer to the error. Such a cycle would
        # keep the body of the request in memory until the next garbage collection.
        del wanted, error


class _Latest(Generic[T]):
    """Caches a response of the daemon for `_CACHE_TTL_S` seconds. Concurrent callers of `get` share one request."""

    def __init__(self, fetch: Callable[[], Awaitable[T]]) -> None:
        self._fetch = fetch
        self._lock = asyncio.Lock()
        self._fetched_at = float("-inf")

    async def get(self) -> T:
        async with self._lock:
            if time.monotonic() - self._fetched_at > _CACHE_TTL_S:
                self._response = await self._fetch()
                self._fetched_at = time.monotonic()
            return self._response


TRACEPARENT = "traceparent"

# A traceparent: version, trace id, parent id and flags in hexadecimal. Version ff and ids of only zeros are invalid.
_PATTERN = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def valid_traceparent(traceparent: str) -> str:
    """Return `traceparent` if it is valid, and "" otherwise."""
    return traceparent if traceparent and _PATTERN.fullmatch(traceparent) else ""
