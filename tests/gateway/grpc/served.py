"""The gateway's gRPC server in a thread, connected to a fake daemon whose answers the test sets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
import threading
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import grpc
import numpy as np

from weightd_gateway.auth import Authenticator, Caller
from weightd_gateway.config import addresses
from weightd_gateway.config.schema import GatewayConfig
from weightd_gateway.context import Gateway
from weightd_gateway.daemon_client import DaemonClient, InferenceRequest, InferenceResult
from weightd_gateway.fairness import AdmissionControl
from weightd_gateway.grpc.server import GrpcServer
from weightd_gateway.parser_process import ParserPool
from weightd_gateway.system_shared_memory import RegisteredRegions
from weightd_protocol.messages.control import ModelMetadataResponse, ReadyResponse, ServerMetadataResponse
from weightd_protocol.messages.inference import TensorSignature

LIMIT_S = 30.0

ANYBODY = Authenticator({}, {}, {}, Caller(None, "anonymous"))

Model = Callable[[InferenceRequest], Awaitable[InferenceResult]]


async def echo(question: InferenceRequest) -> InferenceResult:
    """Return the inputs as outputs."""
    wanted = question.inputs if question.outputs is None else question.outputs
    return {name: question.inputs[name] for name in wanted}


class FakeService(DaemonClient):
    """A fake daemon client.

    Attributes:
        model: answers all requests.
        asked: the requests, with their callers.
        is_ready: the result of the readiness check, or the error that it raises.
        probed: the number of readiness checks.
    """

    def __init__(self, seats: AdmissionControl) -> None:
        super().__init__("unix:///nowhere", 30.0, seats)
        self.model: Model = echo
        self.asked: list[tuple[Caller, InferenceRequest]] = []
        self.is_ready: bool | Exception = True
        self.probed = 0

    async def infer(self, caller: Caller, question: InferenceRequest) -> InferenceResult:
        self.asked.append((caller, question))
        return await self.model(question)

    async def ready(self, caller: Caller, model: str = "") -> ReadyResponse:
        self.probed += 1
        if isinstance(self.is_ready, Exception):
            raise self.is_ready
        return ReadyResponse("1", self.is_ready)

    async def server(self, caller: Caller) -> ServerMetadataResponse:
        return ServerMetadataResponse("1", "weightd", "9.9", ("echo",), ())

    async def metadata(self, caller: Caller, model: str) -> ModelMetadataResponse:
        signature = (TensorSignature("x", "FP32", (-1, 2)),)
        return ModelMetadataResponse("1", model, "onnxruntime", signature, signature)

    def allocate(self, caller: Caller, nbytes: int) -> Any:
        return np.empty(nbytes, np.uint8)


class Served:
    """A running gRPC server.

    Attributes:
        target: the address for clients.
        service: the fake daemon client.
        gateway: the gateway's context.
        front: the gRPC server.
    """

    def __init__(self, config: GatewayConfig, identities: Authenticator) -> None:
        self.service = FakeService(AdmissionControl(config.max_in_flight, config.max_memory_bytes))
        self.gateway = Gateway(
            config, identities, self.service, RegisteredRegions(enabled=config.shared_memory), ParserPool()
        )
        self.target = ""
        self.front = GrpcServer(self.gateway)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Served:
        self._thread.start()
        try:
            self.target = str(self.call(self.front.start)[0]).partition(" ")[2]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.call(lambda: self.front.stop(0.0))
        self.call(self.gateway.parsers.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    def call(self, coroutine: Callable[[], Awaitable[Any]]) -> Any:
        """Run a coroutine on the gateway's loop and return its result."""

        async def run() -> Any:
            return await coroutine()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(LIMIT_S)

    def stop(self, grace: float) -> None:
        """Stop the gRPC server as the gateway process does."""
        self.call(lambda: self.front.stop(grace))


@contextlib.contextmanager
def connected(target: str, *options: tuple[str, Any]) -> Generator[Any, None, None]:
    """Provide a channel whose messages are bytes."""
    with grpc.insecure_channel(target, options=options) as channel:
        yield channel


@contextlib.contextmanager
def served(identities: Authenticator = ANYBODY, *, tcp: bool = False, **settings: Any) -> Generator[Served, None, None]:
    """Run a server for the block, with these settings of [gateway]."""
    with tempfile.TemporaryDirectory(prefix="weightd-", dir="/tmp") as directory:
        address = "127.0.0.1:0" if tcp else f"unix:{directory}/grpc.sock"
        config = dataclasses.replace(GatewayConfig(**settings), grpc_addresses=(addresses.parse(address),))
        with Served(config, identities) as running:
            yield running
