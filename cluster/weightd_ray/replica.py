"""A replica of a Ray Serve deployment: one daemon with its model, and the methods that Serve calls."""

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
from weightd_gateway.http.asgi import AsgiApp, Receive, Scope, Send, asgi_app, send_reply
from weightd_gateway.http.messages import ANY_HOST, error_reply
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

# Seconds between two checks of a daemon that does not listen yet.
_POLL_INTERVAL_S = 0.05

# While a restarted daemon loads its model, the replica asks clients to retry after this number of seconds. The actual
# duration of the load is not known.
_RETRY_S = 1.0

# Minimum timeout of a request in seconds. It applies if the references of a request were resolved just before its
# deadline.
_MIN_TIMEOUT_S = 1e-6

_MAX_TIMEOUT_S = limits.MAX_TIMEOUT_US / 1e6


class _CheckedDaemonClient(DaemonClient):
    """A daemon client that rejects requests until the daemon's model has been verified.

    Args:
        check: raises `Unavailable` until the model has been verified.
        address: as in `DaemonClient`.
        timeout: as in `DaemonClient`.
        admission: as in `DaemonClient`.
    """

    def __init__(self, check: Callable[[], None], address: str, timeout: float, admission: AdmissionControl) -> None:
        super().__init__(address, timeout, admission)
        self._check = check

    async def infer(self, caller: Caller, request: InferenceRequest) -> InferenceResult:
        """Run inference. `check` is called before and after, because the daemon may restart during the request."""
        self._check()
        result = await super().infer(caller, request)
        self._check()
        return result


class Replica:
    """Serves one model on one node. All methods run in the same event loop: Serve's loop for user code.

    Args:
        arguments: the arguments of the application.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._caller = Caller(arguments.tenant or None, "serve")
        # Whether the digest of the loaded model has been verified since the last start of the daemon.
        self._is_verified = False
        # The number of starts and restarts of the daemon.
        self._start_count = 0
        self._verify_task: asyncio.Task[None] | None = None
        self._failure = ""
        self._address = ""
        self._daemon: DaemonEndpoint
        self._daemon_client: DaemonClient
        self._app: AsgiApp
        # Stops everything that this replica has started, in reverse order.
        self._exit_stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Start the daemon and return when the model is ready.

        Raises:
            FailedPrecondition: the model cannot become ready; the text is the daemon's error.
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
            # The gateway's limit is never reached, because Serve limits the concurrent requests of the replica to a
            # lower number.
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
        # Access control is up to Serve's proxy, so any `authorization` header is ignored.
        api = HttpApi(gateway, frozenset({ANY_HOST}), self._caller)
        self._app = asgi_app(api.reply_to, arguments.request_timeout)
        await self._wait_verified()

    async def _make_daemon(self) -> DaemonEndpoint:
        arguments = self._arguments
        if arguments.address:
            return HostDaemon(arguments.address)
        path = arguments.model
        if arguments.published_digest:
            from weightd_ray import model_store  # noqa: PLC0415 - the module imports Ray

            cached = await model_store.fetch(arguments.published_digest, arguments.base_dir)
            # The cached files must stay on disk until the replica stops, because a restarted daemon reads them again.
            self._exit_stack.callback(cached.release)
            path = str(cached.path)
        return EmbeddedDaemon(
            arguments.base_dir, {arguments.name: {"path": path, **arguments.model_table}}, self.on_daemon_start
        )

    def on_daemon_start(self) -> None:
        """Handle a start or restart of the daemon: the model that the daemon loads must be verified again."""
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
        """Wait until the model is ready and has the expected digest.

        Raises:
            FailedPrecondition: the model cannot become ready, or has another digest.
        """
        while not self._is_verified:
            starts = self._start_count
            try:
                self._is_verified = await self._check_ready() and starts == self._start_count
            except FailedPrecondition:
                # If the daemon has been restarted during the check, the error came from the previous daemon. In that
                # case, ignore the error and check again.
                if starts == self._start_count:
                    raise
            if self._daemon.failure:
                raise FailedPrecondition(self._daemon.failure)
            if not self._is_verified:
                await asyncio.sleep(_POLL_INTERVAL_S)

    async def _check_ready(self) -> bool:
        """Return whether the model is ready and has the expected digest; wait while the daemon loads the model.

        Raises:
            FailedPrecondition: the model cannot become ready, or has another digest.
        """
        try:
            await self._daemon_client.metadata(self._caller, self._arguments.name)
            if not (await self._daemon_client.ready(self._caller, self._arguments.name)).ready:
                return False
            await self._check_digest()
        except (Unavailable, DeadlineExceeded):
            return False  # the daemon does not listen yet, or has exited
        return True

    async def _check_digest(self) -> None:
        expected = self._arguments.sha256
        if not expected:
            return
        # A separate client is used, because `DaemonClient` may have cached a response of a previous daemon.
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

    # --- methods for Serve -------------------------------------------------------------------------------------

    async def infer(
        self,
        inputs: Any,
        *,
        outputs: Sequence[str] | None = None,
        timeout: float | None = None,
        priority: int | None = None,
    ) -> InferenceResult:
        """Run inference and return the outputs by name.

        Args:
            inputs: arrays by name, or the array of the model's only input. References to arrays in the object store are
                resolved.
            outputs: the names of the outputs to return; None: all.
            timeout: seconds to wait; None: `request_timeout`.
            priority: 1 is the highest; None: the model's default.

        Raises:
            RequestError: as in `weightd.Client.infer`.
        """
        if isinstance(inputs, Mapping):
            inputs, timeout = await self._resolve_references(cast("Mapping[str, Any]", inputs), timeout)
        request = InferenceRequest(self._arguments.name, inputs, outputs, timeout, priority)
        return await self._daemon_client.infer(self._caller, request)

    async def _resolve_references(self, inputs: Mapping[str, Any], timeout: float | None) -> tuple[Any, float | None]:
        """Return the inputs with references replaced by their arrays, and the remaining seconds of the timeout.

        Raises:
            DeadlineExceeded: a reference was not resolved in time.
            InvalidArgument: a reference cannot be resolved.
        """
        references: dict[str, Awaitable[Any]] = {
            name: each for name, each in inputs.items() if isinstance(each, Awaitable)
        }
        timeout_s = self._arguments.request_timeout if timeout is None else timeout
        # Without references there is nothing to resolve. An invalid timeout is returned unchanged, because the daemon
        # client rejects it.
        if not (references and 0 < timeout_s <= _MAX_TIMEOUT_S):
            return inputs, timeout
        resolved, deadline = dict(inputs), time.monotonic() + timeout_s
        for name, each in references.items():
            resolved[name] = await _await_reference(name, each, deadline - time.monotonic())
        return resolved, max(deadline - time.monotonic(), _MIN_TIMEOUT_S)

    async def metadata(self) -> Mapping[str, Any]:
        """Return the model's metadata in the form of the Open Inference Protocol.

        Raises:
            RequestError: as in `infer`.
        """
        return oip_view.model_metadata(await self._daemon_client.metadata(self._caller, self._arguments.name), ())

    async def check_health(self) -> None:
        """Check that the replica serves requests.

        Raises:
            WeightdError: the replica does not serve requests; the text has the reason. After repeated failures, Serve
                replaces the replica.
        """
        if self._failure or self._daemon.failure:
            raise FailedPrecondition(self._failure or self._daemon.failure)
        # The check also fails while the daemon restarts. Serve then sends requests to other replicas, and replaces this
        # replica only after repeated failures.
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
        """Handle an HTTP connection with the gateway's implementation of the Open Inference Protocol."""
        try:
            if scope["type"] == "http":
                self._check_verified()
        except RequestError as error:
            await send_reply(error_reply(error), scope["method"], send)
        else:
            await self._app(scope, receive, send)

    def _check_verified(self) -> None:
        if not self._is_verified:
            text = self._failure or f"{self._arguments.name}: the replica's daemon has exited and is restarting"
            raise Unavailable(text, retry_after=_RETRY_S)

    async def stop(self) -> None:
        """Stop the daemon if it is embedded; return after the daemon's files have been removed."""
        if self._verify_task is not None:
            self._verify_task.cancel()
        await self._exit_stack.aclose()


async def _await_reference(name: object, reference: Awaitable[Any], timeout_s: float) -> Any:
    input_label = f"input {label(str(name))}"
    try:
        return await asyncio.wait_for(reference, timeout_s)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(f"{input_label}: the referenced object did not arrive in time") from None
    except Exception as error:
        # The task that should have created the object has failed, or Ray has lost the object. This is no error of the
        # model, so report an invalid argument.
        raise InvalidArgument(f"{input_label}: cannot get the referenced object: {type(error).__name__}") from error
