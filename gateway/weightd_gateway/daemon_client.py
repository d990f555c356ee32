"""The daemon as callers see it: inference requests and results of any protocol, metadata and metrics."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from weightd import AsyncClient
from weightd_gateway.auth import Caller
from weightd_gateway.error_codes import to_request_error
from weightd_gateway.fairness import AdmissionControl
from weightd_protocol.errors import WeightdError
from weightd_protocol.messages.control import ModelMetadataResponse, ReadyResponse, ServerMetadataResponse
from weightd_protocol.messages.metrics import MetricsResponse
from weightd_protocol.messages.status import StatusResponse

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class InferenceRequest:
    """An inference request.

    Attributes:
        model: its name.
        inputs: by name, little-endian and in C order: views into what was received. Nobody changes that before the
            answer has come.
        outputs: the names of those that are wanted, in the order in which they shall come; None: all.
        timeout: seconds that the caller waits; None: as long as the gateway does of its own accord.
        priority: 1 goes first; None: the model's default.
        traceparent: of W3C Trace Context, "" where the caller has given none.
        id: what the caller calls it, "" where it has no name.
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

# Of what costs the daemon milliseconds for each process, whoever asks for it and how often.
_CACHE_TTL_S = 1.0


class DaemonClient:
    """Asks the daemon for callers, with a connection for each tenant.

    A daemon that is away is `Unavailable`, and found again by whoever asks next.

    Args:
        address: of the daemon; None: where `weightctl` looks.
        timeout: seconds that a question takes at most which says nothing of that itself.
        admission: one is to be had by each request before anything of it is kept.
    """

    def __init__(self, address: str | None, timeout: float, admission: AdmissionControl) -> None:
        self._address = address
        self._timeout = timeout
        self._clients: dict[str | None, AsyncClient] = {}
        self._statuses: dict[str | None, _Latest[StatusResponse]] = {}
        self._metrics: dict[str | None, _Latest[MetricsResponse]] = {}
        self.admission = admission

    async def server(self, caller: Caller) -> ServerMetadataResponse:
        """Return the daemon's version and the names of the models that there are for the caller.

        Raises:
            RequestError: as all these do; whatever goes wrong is one.
        """
        return await _await_response(self._client(caller).server())

    async def ready(self, caller: Caller, model: str = "") -> ReadyResponse:
        """Return whether a model, or with "" each of the caller's, can answer."""
        return await _await_response(self._client(caller).ready(model))

    async def metadata(self, caller: Caller, model: str) -> ModelMetadataResponse:
        """Return what a model takes and gives, as soon as it is loaded."""
        return await _await_response(self._client(caller).metadata(model))

    async def status(self, caller: Caller) -> StatusResponse:
        """Return what the daemon is doing, or was a second ago."""
        client = self._client(caller)
        latest = self._statuses.setdefault(caller.tenant, _Latest(lambda: _await_response(client.status())))
        return await latest.get()

    async def metrics(self, caller: Caller) -> MetricsResponse:
        """Return what the daemon has counted, or had a second ago."""
        client = self._client(caller)
        latest = self._metrics.setdefault(caller.tenant, _Latest(lambda: _await_response(client.metrics())))
        return await latest.get()

    async def infer(self, caller: Caller, request: InferenceRequest) -> InferenceResult:
        """Return what the model answers. A task that is cancelled meanwhile takes the request back."""
        client = self._client(caller)
        return await _await_response(
            client.infer(
                request.model,
                request.inputs,
                outputs=request.outputs,
                timeout=request.timeout,
                priority=request.priority,
            )
        )

    def allocate(self, caller: Caller, nbytes: int) -> Any:
        """Return an array of so many bytes to receive a request into, which need not be copied to be sent."""
        return self._client(caller).empty((nbytes,), "u1")

    async def close(self) -> None:
        """Close all connections; what is under way ends in `Unavailable`."""
        for client in self._clients.values():
            await client.close()

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
        wanted = to_request_error(error)
        try:
            if wanted is error:
                raise
            raise wanted from error
        finally:
            # The error refers to this frame, and to those of its callers, which have the body of a request.
            del wanted


class _Latest(Generic[T]):
    """An answer that is good for everybody who asks within a second; who comes while it is asked for waits for that."""

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

# Version, trace, parent, flags; version ff is forbidden, and so are ids of zeros.
_PATTERN = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def valid_traceparent(traceparent: str) -> str:
    """Return what was given; "" where that is none."""
    return traceparent if traceparent and _PATTERN.fullmatch(traceparent) else ""
