"""One replica: a daemon, its model, and what Serve asks of both."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from weightd.client import AsyncClient
from weightd.gateway import model_view
from weightd.gateway.callers import Caller, Identities
from weightd.gateway.config.table import GatewayConfig
from weightd.gateway.gateway import Gateway
from weightd.gateway.helper import Helpers
from weightd.gateway.question import Answer, Question
from weightd.gateway.regions import Regions
from weightd.gateway.rest.api import Api
from weightd.gateway.rest.asking import ANY_HOST
from weightd.gateway.rest.reply import Reply, of_error
from weightd.gateway.seats import Seats
from weightd.gateway.service import Service
from weightd.protocol import limits
from weightd.protocol.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    RequestError,
    Unavailable,
    WeightdError,
)
from weightd.protocol.schema import label
from weightd.ray import asgi
from weightd.ray.arguments import Arguments
from weightd.ray.asgi import AsgiRequest, Receive, Scope, Send
from weightd.ray.daemon import Daemon, Own
from weightd.ray.daemon import Service as HostService

# Between two looks at a daemon that does not listen yet.
_PAUSE_S = 0.05

# After a daemon that has ended is started again, its model is loaded: nobody knows how long that takes.
_RETRY_S = 1.0

# Left of a request's time when what it refers to comes in the last moment.
_LEAST_S = 1e-6

_MAX_TIMEOUT_S = limits.MAX_TIMEOUT_US / 1e6


class _Known(Service):
    """A service that answers nothing of a daemon of which nobody knows yet what it has.

    Args:
        check: raises Unavailable as long as that is so.
        address: as Service.
        timeout: likewise.
        seats: likewise.
    """

    def __init__(self, check: Callable[[], None], address: str, timeout: float, seats: Seats) -> None:
        super().__init__(address, timeout, seats)
        self._check = check

    async def infer(self, caller: Caller, question: Question) -> Answer:
        """As Service. The daemon may have been another one when the request came, or be another one by now."""
        self._check()
        answer = await super().infer(caller, question)
        self._check()
        return answer


class Replica:
    """Serves one model on one node. It is made, asked and ended in one event loop, that of Serve for user code.

    Args:
        arguments: what the application was told.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._caller = Caller(arguments.tenant or None, "serve")
        # Whether what serves is known to have the digest that it must have: not before that was looked at.
        self._is_known = False
        # How often its daemon has been started.
        self._starts = 0
        self._looking: asyncio.Task[None] | None = None
        self._wrong = ""
        self._address = ""
        self._daemon: Daemon
        self._service: Service
        self._api: Api
        # What has to be ended, and in which order.
        self._ends = contextlib.AsyncExitStack()

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
        self._daemon = await self._find()
        self._ends.push_async_callback(self._daemon.stop)
        self._address = await self._daemon.start()
        config = GatewayConfig(
            max_body_bytes=arguments.max_body_bytes,
            max_memory_bytes=max(arguments.max_memory_bytes, 2 * arguments.max_body_bytes),
            # Serve counts them: these are never fewer.
            max_in_flight=max(GatewayConfig.max_in_flight, 2 * arguments.max_ongoing_requests),
            timeout=arguments.request_timeout,
            page=False,
        )
        seats = Seats(config.max_in_flight, config.max_memory_bytes)
        self._service = _Known(self._check_known, self._address, config.timeout, seats)
        self._ends.push_async_callback(self._service.close)
        identities = Identities({}, {}, {}, anonymous=self._caller)
        helpers = Helpers()
        self._ends.push_async_callback(helpers.close)
        gateway = Gateway(config, identities, self._service, Regions(enabled=False), helpers)
        self._api = Api(gateway, frozenset({ANY_HOST}))
        await self._until_known()

    async def _find(self) -> Daemon:
        arguments = self._arguments
        if arguments.address:
            return HostService(arguments.address)
        path = arguments.model
        if arguments.published:
            from weightd.ray import publishing  # noqa: PLC0415 - it needs Ray

            taken = await publishing.take(arguments.published, arguments.base)
            # It stays as long as its daemon may be started again.
            self._ends.callback(taken.release)
            path = str(taken.path)
        return Own(arguments.base, {arguments.name: {"path": path, **arguments.table}}, self.daemon_starts)

    def daemon_starts(self) -> None:
        """It starts, or starts again: what it loads has to be looked at, also if it is not the first."""
        self._starts += 1
        if self._is_known:
            self._is_known = False
            self._looking = asyncio.create_task(self._look_again())

    async def _look_again(self) -> None:
        try:
            await self._until_known()
        except WeightdError as error:
            self._wrong = str(error)

    async def _until_known(self) -> None:
        """Return when the model is ready, and has the digest that it must have.

        Raises:
            FailedPrecondition: it never will be ready, or has another one.
        """
        while not self._is_known:
            starts = self._starts
            try:
                self._is_known = await self._is_right() and starts == self._starts
            except FailedPrecondition:
                # Or else a daemon has said so that was there before.
                if starts == self._starts:
                    raise
            if self._daemon.failure:
                raise FailedPrecondition(self._daemon.failure)
            if not self._is_known:
                await asyncio.sleep(_PAUSE_S)

    async def _is_right(self) -> bool:
        """Say whether the model is ready, and known to be the one; wait as long as the daemon does for its signature.

        Raises:
            FailedPrecondition: it never will be.
        """
        try:
            await self._service.metadata(self._caller, self._arguments.name)
            if not (await self._service.ready(self._caller, self._arguments.name)).ready:
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
                f"{self._where()}"
            )

    def _where(self) -> str:
        return self._arguments.model or f"the service at {self._arguments.address}"

    # --- what Serve asks ---------------------------------------------------------------------------------------

    async def infer(
        self,
        inputs: Any,
        *,
        outputs: Sequence[str] | None = None,
        timeout: float | None = None,
        priority: int | None = None,
    ) -> Answer:
        """Return what the model answers: outputs by name.

        Args:
            inputs: arrays by name; references to arrays in the object store are looked up here. Or what is the only
                input of the model.
            outputs: those that are wanted; None: all.
            timeout: seconds to wait; None: `request_timeout`.
            priority: 1 goes first; None: the model's default.

        Raises:
            RequestError: as `weightd.client.Client.infer`.
        """
        if isinstance(inputs, Mapping):
            inputs, timeout = await self._found(cast("Mapping[str, Any]", inputs), timeout)
        question = Question(self._arguments.name, inputs, outputs, timeout, priority)
        return await self._service.infer(self._caller, question)

    async def _found(self, inputs: Mapping[str, Any], timeout: float | None) -> tuple[Any, float | None]:
        """Return inputs with arrays in the place of references to them, and the seconds that are left.

        Raises:
            DeadlineExceeded: what they refer to is not there in time.
            InvalidArgument: it never will be.
        """
        awaited: dict[str, Awaitable[Any]] = {
            name: each for name, each in inputs.items() if isinstance(each, Awaitable)
        }
        patience = self._arguments.request_timeout if timeout is None else timeout
        # What is no time is for the client to refuse.
        if not (awaited and 0 < patience <= _MAX_TIMEOUT_S):
            return inputs, timeout
        found, ends = dict(inputs), time.monotonic() + patience
        for name, each in awaited.items():
            found[name] = await _awaited(name, each, ends - time.monotonic())
        return found, max(ends - time.monotonic(), _LEAST_S)

    async def metadata(self) -> Mapping[str, Any]:
        """Return what the model takes and gives, as the Open Inference Protocol has it.

        Raises:
            RequestError: as `infer`.
        """
        return model_view.model_metadata(await self._service.metadata(self._caller, self._arguments.name))

    async def check_health(self) -> None:
        """Return if requests are answered.

        Raises:
            WeightdError: they are not, and the text says why: Serve has another replica take the place of this one.
        """
        if self._wrong or self._daemon.failure:
            raise FailedPrecondition(self._wrong or self._daemon.failure)
        # A daemon that is started again is waited for as long as Serve is patient: meanwhile it asks other replicas.
        self._check_known()
        ready = await self._service.ready(self._caller, self._arguments.name)
        if not ready.ready:
            raise Unavailable(ready.reason)
        starts = self._starts
        try:
            await self._check_digest()
        except FailedPrecondition as error:
            if starts == self._starts:
                self._is_known, self._wrong = False, str(error)
            raise

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over HTTP, as the gateway does: the Open Inference Protocol."""
        if scope["type"] == "lifespan":
            await asgi.lifespan(receive, send)
        elif scope["type"] != "http":
            await asgi.refuse(send)
        else:
            request = AsgiRequest(scope, receive, self._arguments.request_timeout)
            await asgi.answer(await self._answered(request), request.method, send)

    async def _answered(self, request: AsgiRequest) -> Reply:
        try:
            self._check_known()
        except RequestError as error:
            return of_error(error)
        return await self._api.handle(request)

    def _check_known(self) -> None:
        if not self._is_known:
            text = self._wrong or f"{self._arguments.name}: its daemon has ended, and is started again"
            raise Unavailable(text, retry_after=_RETRY_S)

    async def stop(self) -> None:
        """End the daemon, if it is this replica's, and return when nothing of it is left."""
        if self._looking is not None:
            self._looking.cancel()
        await self._ends.aclose()


async def _awaited(name: object, reference: Awaitable[Any], patience: float) -> Any:
    place = f"input {label(str(name))}"
    try:
        return await asyncio.wait_for(reference, patience)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(f"{place}: what it refers to has not come in time") from None
    except Exception as error:
        # Whatever the task has raised that was to make it, or Ray where it is lost: not the model's errors.
        raise InvalidArgument(f"{place}: what it refers to cannot be had: {type(error).__name__}") from error
