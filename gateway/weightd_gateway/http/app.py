"""The HTTP API: REST API of the Open Inference Protocol, Triton's extensions to it, and the status page."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from weightd_common.exposition import CONTENT_TYPE, exposition
from weightd_common.rate_limits import RateLimitedLog
from weightd_gateway import oip_view
from weightd_gateway.auth import Caller
from weightd_gateway.context import Gateway
from weightd_gateway.daemon_client import TRACEPARENT, DaemonClient
from weightd_gateway.error_codes import to_request_error
from weightd_gateway.fairness import FairLimit
from weightd_gateway.http import infer_json
from weightd_gateway.http.head import RequestHead
from weightd_gateway.http.infer import HttpInference
from weightd_gateway.http.messages import (
    ANY_HOST,
    HttpError,
    HttpReply,
    HttpRequest,
    error_reply,
    json_reply,
    read_body,
)
from weightd_gateway.http.routes import Operation
from weightd_gateway.logs import log_failure
from weightd_gateway.page.files import FILES, STATUS_HEADERS
from weightd_gateway.page.poller import StatusPoller
from weightd_protocol.errors import InvalidArgument, NotFound, PermissionDenied, ResourceExhausted, WeightdError
from weightd_protocol.messages.metrics import MetricsResponse
from weightd_protocol.schema import label

_log = logging.getLogger("weightd.gateway.http")

# Maximum bytes of a request body without tensors, such as the parameters of a shared-memory region.
_MAX_PARAMETER_BYTES = 64 * 1024

# Operations without authentication. Health probes have no token, and their responses reveal only whether the server is
# up and ready. The files of the status page are the same for everyone.
_UNAUTHENTICATED = frozenset({Operation.LIVE, Operation.READY, Operation.PAGE})
_PROBE = Caller(None, "probe")

# Maximum number of readiness probes that wait for the daemon. If the daemon hangs, probes cannot take all connections.
MAX_PROBES = 64

_SERVER_ERROR = 500

# Seconds between two log lines about errors of one status for one caller, so that retries do not fill the log.
_LOG_INTERVAL_S = 10.0

# The trace settings of a Triton server whose tracing is off.
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

Handler = Callable[[HttpRequest, Caller, str], Awaitable[HttpReply]]


class HttpApi:
    """The HTTP API, for the gateway's own server and, through `asgi_app`, for any other ASGI server.

    Args:
        gateway: the state that all frontends share.
        hosts: allowed values of the Host header.
        caller: the caller of all requests, for another ASGI server behind a proxy that authenticates the requests;
            None: each request is authenticated.
    """

    def __init__(self, gateway: Gateway, hosts: frozenset[str], caller: Caller | None = None) -> None:
        self._gateway = gateway
        self._daemon_client = gateway.daemon_client
        self._hosts = hosts
        self._caller = caller
        self._error_log = RateLimitedLog(_LOG_INTERVAL_S)
        self._status_poller = StatusPoller(gateway.daemon_client)
        self._expositions: dict[str | None, tuple[MetricsResponse, bytes]] = {}
        self._probe_limit = FairLimit(MAX_PROBES)
        self._handlers: dict[Operation, Handler] = {
            Operation.LIVE: self._live,
            Operation.READY: self._ready,
            Operation.SERVER: self._server,
            Operation.MODEL: self._model,
            Operation.MODEL_READY: self._model_ready,
            Operation.CONFIG: self._config,
            Operation.STATISTICS: self._statistics,
            Operation.INFER: HttpInference(gateway).infer,
            Operation.INDEX: self._index,
            Operation.LOAD: _ModelControl(gateway).load,
            Operation.UNLOAD: _ModelControl(gateway).unload,
            Operation.REGIONS: self._regions,
            Operation.REGISTER: self._register,
            Operation.UNREGISTER: self._unregister,
            Operation.CUDA_REGIONS: self._no_cuda_regions,
            Operation.CUDA_REGISTER: _refuse_cuda_register,
            Operation.CUDA_UNREGISTER: self._no_cuda_regions,
            Operation.TRACE: self._trace,
            Operation.LOGGING: self._logging,
            Operation.CHANGE_SETTING: self._change_setting,
            Operation.METRICS: self._metrics,
            Operation.PAGE: self._page,
            Operation.STATUS_JSON: self._status_json,
        }

    async def reply_to(self, request: HttpRequest) -> HttpReply:
        """Return the response to a request; exceptions become error responses."""
        started_at, head = time.monotonic(), request.head
        caller = _PROBE
        try:
            if head.host not in self._hosts:
                self._check_other_host(request)
            methods, name = head.route
            operation = methods.get("GET" if head.method == "HEAD" else head.method)
            if operation is None:
                allowed = ", ".join(methods)
                raise HttpError(405, f"expected method {allowed}, got {label(head.method)}", allowed)
            if operation not in _UNAUTHENTICATED:
                caller = self._caller or self._gateway.authenticator.authenticate(
                    digest=head.token_digest, common_name=request.common_name, uid=request.uid
                )
            reply = await self._handlers[operation](request, caller, name)
        except WeightdError as error:
            reply = error_reply(to_request_error(error))
        except HttpError as refused:
            reply = refused.reply()
        except Exception as error:  # noqa: BLE001 - the caller gets status 500, and the process continues
            log_failure(_log, f"HTTP request failed: {head.method} {head.raw_path}", error)
            reply = HttpError(_SERVER_ERROR, "internal error of the gateway; see its log").reply()
        if head.traceparent:
            reply.headers[TRACEPARENT] = head.traceparent
        if reply.status >= _SERVER_ERROR or _log.isEnabledFor(logging.DEBUG):
            self._log(head, reply, caller, time.monotonic() - started_at)
        return reply

    def _check_other_host(self, request: HttpRequest) -> None:
        """Check a host that is not listed, against DNS rebinding: a web page makes its own name resolve to this host.

        Raises:
            PermissionDenied: the host is not allowed.
        """
        if ANY_HOST not in self._hosts and request.uid is None:
            host = label(request.head.host)
            raise PermissionDenied(f"expected a host from `hosts` in the gateway's configuration, got {host}")

    def _log(self, head: RequestHead, reply: HttpReply, caller: Caller, seconds: float) -> None:
        more = ""
        level = logging.DEBUG
        if reply.status >= _SERVER_ERROR:
            suppressed_count = self._error_log.record(f"{caller.name} {reply.status}", time.monotonic())
            if suppressed_count is not None:
                level, more = (
                    logging.WARNING,
                    f", and {suppressed_count} more since the last such line" if suppressed_count else "",
                )
        if _log.isEnabledFor(level):
            what = f"{head.method} {head.raw_path} for {caller.name}: {reply.status} in {1000 * seconds:.1f} ms"
            trace = f", traceparent {head.traceparent}" if head.traceparent else ""
            _log.log(level, "%s%s%s", what, trace, more)

    # --- health and metadata -----------------------------------------------------------------------------------

    async def _live(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        return json_reply({"live": True})

    async def _ready(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        if not self._probe_limit.take(None):
            raise ResourceExhausted(f"{MAX_PROBES} readiness probes are waiting for the daemon already")
        try:
            ready = (await self._daemon_client.ready(caller)).ready
        finally:
            self._probe_limit.release(None)
        return json_reply({"ready": ready}, 200 if ready else 503)

    async def _model_ready(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        answer = await self._daemon_client.ready(caller, name)
        content = {"name": name, "ready": answer.ready}
        return json_reply(
            content if answer.ready else {**content, "error": answer.reason}, 200 if answer.ready else 503
        )

    async def _server(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        shared_memory = self._gateway.config.shared_memory
        return json_reply(
            oip_view.server_metadata(await self._daemon_client.server(caller), shared_memory=shared_memory)
        )

    async def _model(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        answer = await self._daemon_client.metadata(caller, name)
        return json_reply(oip_view.model_metadata(answer, (await self._daemon_client.server(caller)).models))

    async def _config(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        return json_reply(oip_view.model_config(await self._daemon_client.metadata(caller, name)))

    async def _statistics(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        return json_reply(oip_view.statistics(await self._daemon_client.metrics(caller), name))

    async def _index(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        ready = (await _read_parameters(self._daemon_client, request, caller)).get("ready", False)
        return json_reply(
            oip_view.repository_index(await self._daemon_client.metrics(caller), only_ready=ready is True)
        )

    async def _metrics(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        metrics = await self._daemon_client.metrics(caller)
        # Within a second, the daemon client returns the same metrics to all callers of a tenant. Render their text only
        # once.
        latest = self._expositions.get(caller.tenant)
        if latest is None or latest[0] is not metrics:
            latest = self._expositions[caller.tenant] = metrics, exposition(metrics).encode()
        return HttpReply([latest[1]], CONTENT_TYPE)

    # --- status page -------------------------------------------------------------------------------------------

    async def _page(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        self._check_page()
        file = FILES[name]
        if request.head.header(b"if-none-match") == file.etag:
            reply = HttpReply([], file.content_type, 304, file.headers)
            reply.body_length = len(file.body)  # the Content-Length that a response with the file would have
            return reply
        return HttpReply([file.body], file.content_type, headers=file.headers)

    async def _status_json(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        self._check_page()
        return HttpReply([await self._status_poller.status_json(caller)], headers=STATUS_HEADERS)

    def _check_page(self) -> None:
        if not self._gateway.config.page:
            raise NotFound("the status page is disabled in the gateway's configuration (page)")

    # --- Triton's trace and log settings, which are read-only --------------------------------------------------

    async def _trace(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        return json_reply(_TRACE_SETTINGS)

    async def _logging(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        return json_reply(_LOG_SETTINGS)

    async def _change_setting(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        if await _read_parameters(self._daemon_client, request, caller):
            raise InvalidArgument("this setting is read-only; the operator sets it in the configuration of weightd")
        return await (self._logging if request.head.raw_path.startswith("/v2/logging") else self._trace)(
            request, caller, name
        )

    # --- shared memory -----------------------------------------------------------------------------------------

    async def _regions(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        return json_reply(self._gateway.regions.status(caller, name))

    async def _register(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        parameters = await _read_parameters(self._daemon_client, request, caller)
        location = parameters.get("key"), parameters.get("offset", 0), parameters.get("byte_size")
        self._gateway.regions.register(caller, name, *location)
        return json_reply({})

    async def _unregister(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        self._gateway.regions.unregister(caller, name)
        return json_reply({})

    async def _no_cuda_regions(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        """Reply to a request to list or remove CUDA regions: weightd has none."""
        return json_reply([] if request.head.method == "GET" else {})


class _ModelControl:
    """Loads and unloads models for callers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._daemon_client = gateway.daemon_client

    async def load(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        """Load a model; reply once the model serves requests."""
        await self._check(request, caller)
        await self._daemon_client.load(caller, name)
        return json_reply({})

    async def unload(self, request: HttpRequest, caller: Caller, name: str) -> HttpReply:
        """Unload a model; reply once all processes of the model have exited."""
        await self._check(request, caller)
        await self._daemon_client.unload(caller, name)
        return json_reply({})

    async def _check(self, request: HttpRequest, caller: Caller) -> None:
        oip_view.check_model_control(is_allowed=self._gateway.config.model_control)
        content = await _read_parameters(self._daemon_client, request, caller)
        oip_view.check_load_parameters(content.get("parameters") or {})


async def _read_parameters(daemon_client: DaemonClient, request: HttpRequest, caller: Caller) -> dict[str, Any]:
    """Return the JSON object in the body of a request; an empty body counts as an empty object."""
    with daemon_client.admission.admit(caller) as permit:
        content = await read_body(request, permit, _MAX_PARAMETER_BYTES, bytearray)
        return infer_json.parse_map(bytes(content)) if content else {}


async def _refuse_cuda_register(request: HttpRequest, caller: Caller, name: str) -> HttpReply:
    raise InvalidArgument("weightd does not support CUDA shared memory")
