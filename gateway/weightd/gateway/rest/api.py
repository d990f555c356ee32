"""What is done for each request: who asks, what is asked, and the answer that comes of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from aiohttp import hdrs

from weightd.gateway import model_view
from weightd.gateway.callers import Caller
from weightd.gateway.codes import told
from weightd.gateway.gateway import Gateway
from weightd.gateway.page.files import FILES, NUMBERS_HEADERS
from weightd.gateway.page.looks import Looks
from weightd.gateway.rest import body, form
from weightd.gateway.rest.asking import caller_of, check_host, trace_of
from weightd.gateway.rest.connection import Phase
from weightd.gateway.rest.infer import Inference
from weightd.gateway.rest.reply import Refused, Reply, as_json, of_error
from weightd.gateway.rest.request import Connection, Request
from weightd.gateway.rest.routes import Verb, route
from weightd.gateway.shares import Shares
from weightd.gateway.traces import TRACEPARENT
from weightd.protocol.errors import InvalidArgument, NotFound, ResourceExhausted, WeightdError
from weightd.protocol.messages.metrics import MetricsResponse
from weightd.protocol.schema import label
from weightd.shared.exposition import CONTENT_TYPE, exposition
from weightd.shared.seldom import Seldom

_log = logging.getLogger("weightd.gateway.rest")

# What is not a tensor is short: the parameters of a region, or of an index.
_MOST_ASKED_BYTES = 64 * 1024

# What is asked of no model, and answered with no more than whether there is somebody: for probes, which have no token.
# The files of the page are the same for everybody.
_OPEN = frozenset({Verb.LIVE, Verb.READY, Verb.PAGE})
_PROBE = Caller(None, "probe")

# Of those who wait for the daemon: should it hang, strangers do not have all connections.
MOST_PROBES = 64

_SERVER_ERROR = 500

# Between two lines of the log about errors of one status to one caller: who asks again and again fills no log.
_QUIET_S = 10.0

# What Triton would say that traces nothing.
_TRACE_SETTINGS: Mapping[str, Any] = {
    "trace_level": ["OFF"],
    "trace_rate": "0",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
_LOG_SETTINGS: Mapping[str, Any] = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}

Handler = Callable[[Request, Caller, str], Awaitable[Reply]]


class Api:
    """Answers requests.

    Args:
        gateway: what all protocols share.
        hosts: names under which callers may know this host.
    """

    def __init__(self, gateway: Gateway, hosts: frozenset[str]) -> None:
        self._gateway = gateway
        self._service = gateway.service
        self._hosts = hosts
        self._seldom = Seldom(_QUIET_S)
        self._looks = Looks(gateway.service)
        self._expositions: dict[str | None, tuple[MetricsResponse, bytes]] = {}
        self._probes = Shares(MOST_PROBES)
        self._handlers: dict[Verb, Handler] = {
            Verb.LIVE: self._live,
            Verb.READY: self._ready,
            Verb.SERVER: self._server,
            Verb.MODEL: self._model,
            Verb.MODEL_READY: self._model_ready,
            Verb.CONFIG: self._config,
            Verb.STATISTICS: self._statistics,
            Verb.INFER: Inference(gateway).infer,
            Verb.INDEX: self._index,
            Verb.LOAD: self._load,
            Verb.REGIONS: self._regions,
            Verb.REGISTER: self._register,
            Verb.UNREGISTER: self._unregister,
            Verb.CUDA_REGIONS: self._nothing,
            Verb.CUDA_REGISTER: self._register_cuda,
            Verb.CUDA_UNREGISTER: self._nothing,
            Verb.TRACE: self._trace,
            Verb.LOGGING: self._logging,
            Verb.SET: self._set,
            Verb.METRICS: self._metrics,
            Verb.PAGE: self._page,
            Verb.NUMBERS: self._numbers,
        }

    async def handle(self, request: Request) -> Reply:
        """Return the answer to a request, whatever comes of it."""
        connection = cast(Connection, request.protocol)
        connection.enter(Phase.ANSWER)
        begun, trace = time.monotonic(), trace_of(request)
        caller = _PROBE
        try:
            check_host(request, self._hosts)
            methods, name = route(request.raw_path.partition("?")[0])
            verb = methods.get("GET" if request.method == "HEAD" else request.method)
            if verb is None:
                allowed = ", ".join(methods)
                raise Refused(405, f"expected method {allowed}, got {label(request.method)}", allowed)
            if verb not in _OPEN:
                caller = caller_of(request, self._gateway.identities)
            reply = await self._handlers[verb](request, caller, name)
        except WeightdError as error:
            reply = of_error(told(error))
        except Refused as refused:
            reply = refused.reply()
        if trace:
            reply.headers[TRACEPARENT] = trace
        self._log(request, reply, caller, time.monotonic() - begun, trace)
        return reply

    def _log(self, request: Request, reply: Reply, caller: Caller, seconds: float, trace: str) -> None:
        more = ""
        level = logging.DEBUG
        if reply.status >= _SERVER_ERROR:
            untold = self._seldom.record(f"{caller.name} {reply.status}", time.monotonic())
            if untold is not None:
                level, more = logging.WARNING, f", and {untold} more since the last line of this" if untold else ""
        if _log.isEnabledFor(level):
            what = f"{request.method} {request.raw_path} for {caller.name}: {reply.status} in {1000 * seconds:.1f} ms"
            _log.log(level, "%s%s%s", what, f", traceparent {trace}" if trace else "", more)

    # --- health, metadata --------------------------------------------------------------------------------------

    async def _live(self, request: Request, caller: Caller, name: str) -> Reply:
        return as_json({"live": True})

    async def _ready(self, request: Request, caller: Caller, name: str) -> Reply:
        if not self._probes.take(None):
            raise ResourceExhausted(f"{MOST_PROBES} who ask this wait for the daemon already")
        try:
            ready = (await self._service.ready(caller)).ready
        finally:
            self._probes.give(None)
        return as_json({"ready": ready}, 200 if ready else 503)

    async def _model_ready(self, request: Request, caller: Caller, name: str) -> Reply:
        answer = await self._service.ready(caller, name)
        told = {"name": name, "ready": answer.ready}
        return as_json(told if answer.ready else {**told, "error": answer.reason}, 200 if answer.ready else 503)

    async def _server(self, request: Request, caller: Caller, name: str) -> Reply:
        shared_memory = self._gateway.config.shared_memory
        return as_json(model_view.server_metadata(await self._service.server(caller), shared_memory=shared_memory))

    async def _model(self, request: Request, caller: Caller, name: str) -> Reply:
        return as_json(model_view.model_metadata(await self._service.metadata(caller, name)))

    async def _config(self, request: Request, caller: Caller, name: str) -> Reply:
        return as_json(model_view.model_config(await self._service.metadata(caller, name)))

    async def _statistics(self, request: Request, caller: Caller, name: str) -> Reply:
        return as_json(model_view.statistics(await self._service.metrics(caller), name))

    async def _index(self, request: Request, caller: Caller, name: str) -> Reply:
        ready = (await self._asked(request, caller)).get("ready", False)
        return as_json(model_view.repository_index(await self._service.metrics(caller), ready=ready is True))

    async def _metrics(self, request: Request, caller: Caller, name: str) -> Reply:
        metrics = await self._service.metrics(caller)
        # The same for everybody who asks within a second, as the service returns the same metrics.
        latest = self._expositions.get(caller.tenant)
        if latest is None or latest[0] is not metrics:
            latest = self._expositions[caller.tenant] = metrics, exposition(metrics).encode()
        return Reply([latest[1]], CONTENT_TYPE)

    # --- the page ----------------------------------------------------------------------------------------------

    async def _page(self, request: Request, caller: Caller, name: str) -> Reply:
        self._check_page()
        file = FILES[name]
        if request.headers.get(hdrs.IF_NONE_MATCH) == file.etag:
            reply = Reply([], file.content_type, 304, file.headers)
            reply.body_length = len(file.body)  # that of what the browser has
            return reply
        return Reply([file.body], file.content_type, headers=file.headers)

    async def _numbers(self, request: Request, caller: Caller, name: str) -> Reply:
        self._check_page()
        return Reply([await self._looks.status_json(caller)], headers=NUMBERS_HEADERS)

    def _check_page(self) -> None:
        if not self._gateway.config.page:
            raise NotFound("there is no page: so says the gateway's configuration (page)")

    # --- what Triton has and weightd does otherwise ------------------------------------------------------------

    async def _load(self, request: Request, caller: Caller, name: str) -> Reply:
        raise InvalidArgument("models are loaded and changed by `weightctl update` and `weightctl reload` alone")

    async def _trace(self, request: Request, caller: Caller, name: str) -> Reply:
        return as_json(_TRACE_SETTINGS)

    async def _logging(self, request: Request, caller: Caller, name: str) -> Reply:
        return as_json(_LOG_SETTINGS)

    async def _set(self, request: Request, caller: Caller, name: str) -> Reply:
        if await self._asked(request, caller):
            raise InvalidArgument("this setting is the operator's, in the configuration of weightd")
        return await (self._logging if request.path.startswith("/v2/logging") else self._trace)(request, caller, name)

    # --- shared memory -----------------------------------------------------------------------------------------

    async def _regions(self, request: Request, caller: Caller, name: str) -> Reply:
        return as_json(self._gateway.regions.status(caller, name))

    async def _register(self, request: Request, caller: Caller, name: str) -> Reply:
        asked = await self._asked(request, caller)
        place = asked.get("key"), asked.get("offset", 0), asked.get("byte_size")
        self._gateway.regions.register(caller, name, *place)
        return as_json({})

    async def _unregister(self, request: Request, caller: Caller, name: str) -> Reply:
        self._gateway.regions.unregister(caller, name)
        return as_json({})

    async def _register_cuda(self, request: Request, caller: Caller, name: str) -> Reply:
        raise InvalidArgument("weightd has no memory of CUDA devices")

    async def _nothing(self, request: Request, caller: Caller, name: str) -> Reply:
        """There is none of it, and so it is when it is gone."""
        return as_json([] if request.method == "GET" else {})

    # --- within ------------------------------------------------------------------------------------------------

    async def _asked(self, request: Request, caller: Caller) -> dict[str, Any]:
        """Return the map that a request has, which may be empty."""
        connection = cast(Connection, request.protocol)
        with self._service.seats.one(caller) as seat:
            connection.reads(request.content)
            content = await body.read(request, seat, _MOST_ASKED_BYTES, bytearray)
            connection.enter(Phase.ANSWER)
            return form.parsed(bytes(content)) if content else {}
