"""One replica: a daemon, its model, and what Serve asks of both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, cast

from weightd.client import AsyncClient
from weightd.gateway import model_view
from weightd.gateway.callers import Caller, Identities
from weightd.gateway.config.table import GatewayConfig
from weightd.gateway.gateway import Gateway
from weightd.gateway.question import Answer, Question
from weightd.gateway.regions import Regions
from weightd.gateway.rest.api import Api
from weightd.gateway.rest.asking import ANY_HOST
from weightd.gateway.rest.reply import Reply, of_error
from weightd.gateway.seats import Seats
from weightd.gateway.service import Service
from weightd.protocol.errors import DeadlineExceeded, FailedPrecondition, RequestError, Unavailable, WeightdError
from weightd.ray import asgi
from weightd.ray.arguments import Arguments
from weightd.ray.asgi import AsgiRequest, Receive, Scope, Send
from weightd.ray.daemon import Daemon, Own
from weightd.ray.daemon import Service as HostService

# Between two looks at a daemon that does not listen yet.
_PAUSE_S = 0.05

# After a daemon that has ended is started again, its model is loaded: nobody knows how long that takes.
_RETRY_S = 1.0


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
        self._service = Service(self._address, config.timeout, seats)
        self._ends.push_async_callback(self._service.close)
        identities = Identities({}, {}, {}, anonymous=self._caller)
        gateway = Gateway(config, identities, self._service, Regions(enabled=False))
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
        return Own(arguments.base, {arguments.name: {"path": path, **arguments.table}}, self._starts)

    def _starts(self) -> None:
        """The daemon starts: what it loads has to be looked at, also if it is not the first."""
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
        while not await self._is_ready():
            if self._daemon.failure:
                raise FailedPrecondition(self._daemon.failure)
            await asyncio.sleep(_PAUSE_S)
        await self._check_digest()
        self._is_known = True

    async def _is_ready(self) -> bool:
        """Say whether the model is ready; wait as long as the daemon does for what it takes and gives.

        Raises:
            FailedPrecondition: it never will be.
        """
        try:
            await self._service.metadata(self._caller, self._arguments.name)
            return (await self._service.ready(self._caller, self._arguments.name)).ready
        except (Unavailable, DeadlineExceeded):
            return False  # it does not listen yet, or has ended

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
        self._check_known()
        question = Question(self._arguments.name, await _found(inputs), outputs, timeout, priority)
        return await self._service.infer(self._caller, question)

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
        await self._check_digest()

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


async def _found(inputs: Any) -> Any:
    """Return inputs with arrays in the place of references to them."""
    if not isinstance(inputs, Mapping):
        return inputs
    found = dict(cast("Mapping[str, Any]", inputs))
    for name, each in found.items():
        if isinstance(each, Awaitable):
            found[name] = await each
    return found
