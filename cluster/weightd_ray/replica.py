"""One replica: a daemon, its model, and what Serve asks of both."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from weightd import AsyncClient
from weightd_gateway import oip_view
from weightd_gateway.auth import Authenticator, Caller
from weightd_gateway.config.schema import GatewayConfig
from weightd_gateway.context import Gateway
from weightd_gateway.daemon_client import DaemonClient, InferenceRequest, InferenceResult
from weightd_gateway.fairness import AdmissionControl
from weightd_gateway.http.app import HttpApi
from weightd_gateway.http.messages import ANY_HOST, HttpRequest, Receive, Scope, Send, error_reply
from weightd_gateway.parser_process import ParserPool
from weightd_gateway.system_shared_memory import RegisteredRegions
from weightd_protocol import limits
from weightd_protocol.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    RequestError,
    Unavailable,
    WeightdError,
)
from weightd_protocol.schema import label
from weightd_ray.daemon import DaemonEndpoint, EmbeddedDaemon, HostDaemon
from weightd_ray.options import Arguments

# Between two looks at a daemon that does not listen yet.
_POLL_INTERVAL_S = 0.05

# After a daemon that has ended is started again, its model is loaded: nobody knows how long that takes.
_RETRY_S = 1.0

# Left of a request's time when what it refers to comes in the last moment.
_MIN_TIMEOUT_S = 1e-6

_MAX_TIMEOUT_S = limits.MAX_TIMEOUT_US / 1e6


class _CheckedDaemonClient(DaemonClient):
    """A service that answers nothing of a daemon of which nobody knows yet what it has.

    Args:
        check: raises Unavailable as long as that is so.
        address: as Service.
        timeout: likewise.
        admission: likewise.
    """

    def __init__(self, check: Callable[[], None], address: str, timeout: float, admission: AdmissionControl) -> None:
        super().__init__(address, timeout, admission)
        self._check = check

    async def infer(self, caller: Caller, request: InferenceRequest) -> InferenceResult:
        """As Service. The daemon may have been another one when the request came, or be another one by now."""
        self._check()
        result = await super().infer(caller, request)
        self._check()
        return result


class Replica:
    """Serves one model on one node. It is made, asked and ended in one event loop, that of Serve for user code.

    Args:
        arguments: what the application was told.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._caller = Caller(arguments.tenant or None, "serve")
        # Whether what serves is known to have the digest that it must have: not before that was looked at.
        self._is_verified = False
        # How often its daemon has been started.
        self._start_count = 0
        self._verify_task: asyncio.Task[None] | None = None
        self._failure = ""
        self._address = ""
        self._daemon: DaemonEndpoint
        self._daemon_client: DaemonClient
        self._api: HttpApi
        # What has to be ended, and in which order.
        self._exit_stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Have a daemon, and return when the model is ready.

        Raises:
            FailedPrecondition: it never will be; the text is what the daemon says.
        """
        try:
            await self._open()
        except BaseException:
            await self.stop()
            raise

    async def _open(self) -> None:
        arguments = self._arguments
        self._daemon = await self._make_daemon()
        self._exit_stack.push_async_callback(self._daemon.stop)
        self._address = await self._daemon.start()
        config = GatewayConfig(
            max_body_bytes=arguments.max_body_bytes,
            max_memory_bytes=max(arguments.max_memory_bytes, 2 * arguments.max_body_bytes),
            # Serve counts them: these are never fewer.
            max_in_flight=max(GatewayConfig.max_in_flight, 2 * arguments.max_ongoing_requests),
            timeout=arguments.request_timeout,
            page=False,
        )
        admission = AdmissionControl(config.max_in_flight, config.max_memory_bytes)
        self._daemon_client = _CheckedDaemonClient(self._check_verified, self._address, config.timeout, admission)
        self._exit_stack.push_async_callback(self._daemon_client.close)
        parsers = ParserPool()
        self._exit_stack.push_async_callback(parsers.close)
        nobody, no_regions = Authenticator({}, {}, {}), RegisteredRegions(enabled=False)
        gateway = Gateway(config, nobody, self._daemon_client, no_regions, parsers)
        # Whoever reaches Serve's proxy may ask, whatever authorization is meant for it.
        self._api = HttpApi(gateway, frozenset({ANY_HOST}), self._caller, arguments.request_timeout)
        await self._wait_verified()

    async def _make_daemon(self) -> DaemonEndpoint:
        arguments = self._arguments
        if arguments.address:
            return HostDaemon(arguments.address)
        path = arguments.model
        if arguments.published_digest:
            from weightd_ray import model_store  # noqa: PLC0415 - it needs Ray

            cached = await model_store.fetch(arguments.published_digest, arguments.base_dir)
            # It stays as long as its daemon may be started again.
            self._exit_stack.callback(cached.release)
            path = str(cached.path)
        return EmbeddedDaemon(
            arguments.base_dir, {arguments.name: {"path": path, **arguments.model_table}}, self.on_daemon_start
        )

    def on_daemon_start(self) -> None:
        """It starts, or starts again: what it loads has to be looked at, also if it is not the first."""
        self._start_count += 1
        if self._is_verified:
            self._is_verified = False
            self._verify_task = asyncio.create_task(self._verify_again())

    async def _verify_again(self) -> None:
        try:
            await self._wait_verified()
        except WeightdError as error:
            self._failure = str(error)

    async def _wait_verified(self) -> None:
        """Return when the model is ready, and has the digest that it must have.

        Raises:
            FailedPrecondition: it never will be ready, or has another one.
        """
        while not self._is_verified:
            starts = self._start_count
            try:
                self._is_verified = await self._check_ready() and starts == self._start_count
            except FailedPrecondition:
                # Or else a daemon has said so that was there before.
                if starts == self._start_count:
                    raise
            if self._daemon.failure:
                raise FailedPrecondition(self._daemon.failure)
            if not self._is_verified:
                await asyncio.sleep(_POLL_INTERVAL_S)

    async def _check_ready(self) -> bool:
        """Say whether the model is ready, and known to be the one; wait as long as the daemon does for its signature.

        Raises:
            FailedPrecondition: it never will be.
        """
        try:
            await self._daemon_client.metadata(self._caller, self._arguments.name)
            if not (await self._daemon_client.ready(self._caller, self._arguments.name)).ready:
                return False
            await self._check_digest()
        except (Unavailable, DeadlineExceeded):
            return False  # it does not listen yet, or has ended
        return True

    async def _check_digest(self) -> None:
        expected = self._arguments.sha256
        if not expected:
            return
        # Not from the gateway's service, which may still know what an earlier daemon has said.
        async with AsyncClient(self._address, tenant=self._caller.tenant) as client:
            models = (await client.metrics()).models
        found = next((each.sha256 for each in models if each.name == self._arguments.name), "")
        if found != expected:
            raise FailedPrecondition(
                f"{self._arguments.name}: expected the model with sha256 {expected}, got {found or 'none'} of "
                f"{self._model_source()}"
            )

    def _model_source(self) -> str:
        return self._arguments.model or f"the service at {self._arguments.address}"

    # --- what Serve asks ---------------------------------------------------------------------------------------

    async def infer(
        self,
        inputs: Any,
        *,
        outputs: Sequence[str] | None = None,
        timeout: float | None = None,
        priority: int | None = None,
    ) -> InferenceResult:
        """Return what the model answers: outputs by name.

        Args:
            inputs: arrays by name; references to arrays in the object store are looked up here. Or what is the only
                input of the model.
            outputs: those that are wanted; None: all.
            timeout: seconds to wait; None: `request_timeout`.
            priority: 1 goes first; None: the model's default.

        Raises:
            RequestError: as `weightd.Client.infer`.
        """
        if isinstance(inputs, Mapping):
            inputs, timeout = await self._resolve_references(cast("Mapping[str, Any]", inputs), timeout)
        request = InferenceRequest(self._arguments.name, inputs, outputs, timeout, priority)
        return await self._daemon_client.infer(self._caller, request)

    async def _resolve_references(self, inputs: Mapping[str, Any], timeout: float | None) -> tuple[Any, float | None]:
        """Return inputs with arrays in the place of references to them, and the seconds that are left.

        Raises:
            DeadlineExceeded: what they refer to is not there in time.
            InvalidArgument: it never will be.
        """
        references: dict[str, Awaitable[Any]] = {
            name: each for name, each in inputs.items() if isinstance(each, Awaitable)
        }
        timeout_s = self._arguments.request_timeout if timeout is None else timeout
        # What is no time is for the client to refuse.
        if not (references and 0 < timeout_s <= _MAX_TIMEOUT_S):
            return inputs, timeout
        resolved, deadline = dict(inputs), time.monotonic() + timeout_s
        for name, each in references.items():
            resolved[name] = await _await_reference(name, each, deadline - time.monotonic())
        return resolved, max(deadline - time.monotonic(), _MIN_TIMEOUT_S)

    async def metadata(self) -> Mapping[str, Any]:
        """Return what the model takes and gives, as the Open Inference Protocol has it.

        Raises:
            RequestError: as `infer`.
        """
        return oip_view.model_metadata(await self._daemon_client.metadata(self._caller, self._arguments.name))

    async def check_health(self) -> None:
        """Return if requests are answered.

        Raises:
            WeightdError: they are not, and the text says why: Serve has another replica take the place of this one.
        """
        if self._failure or self._daemon.failure:
            raise FailedPrecondition(self._failure or self._daemon.failure)
        # A daemon that is started again is waited for as long as Serve is patient: meanwhile it asks other replicas.
        self._check_verified()
        ready = await self._daemon_client.ready(self._caller, self._arguments.name)
        if not ready.ready:
            raise Unavailable(ready.reason)
        starts = self._start_count
        try:
            await self._check_digest()
        except FailedPrecondition as error:
            if starts == self._start_count:
                self._is_verified, self._failure = False, str(error)
            raise

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over HTTP, as the gateway does: the Open Inference Protocol."""
        try:
            if scope["type"] == "http":
                self._check_verified()
        except RequestError as error:
            await error_reply(error).send(HttpRequest(scope, receive), send)
        else:
            await self._api(scope, receive, send)

    def _check_verified(self) -> None:
        if not self._is_verified:
            text = self._failure or f"{self._arguments.name}: its daemon has ended, and is started again"
            raise Unavailable(text, retry_after=_RETRY_S)

    async def stop(self) -> None:
        """End the daemon, if it is this replica's, and return when nothing of it is left."""
        if self._verify_task is not None:
            self._verify_task.cancel()
        await self._exit_stack.aclose()


async def _await_reference(name: object, reference: Awaitable[Any], timeout_s: float) -> Any:
    input_label = f"input {label(str(name))}"
    try:
        return await asyncio.wait_for(reference, timeout_s)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(f"{input_label}: what it refers to has not come in time") from None
    except Exception as error:
        # Whatever the task has raised that was to make it, or Ray where it is lost: not the model's errors.
        raise InvalidArgument(f"{input_label}: what it refers to cannot be had: {type(error).__name__}") from error
