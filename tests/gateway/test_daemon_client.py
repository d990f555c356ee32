"""Tests of the daemon client: one connection per tenant, and errors that always have a code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.fakedaemon import FakeDaemon, directory, silent
from weightd_gateway.auth import Caller
from weightd_gateway.daemon_client import DaemonClient, InferenceRequest, valid_traceparent
from weightd_gateway.fairness import AdmissionControl
from weightd_protocol.codec import encode
from weightd_protocol.errors import DeadlineExceeded, InvalidArgument, Unavailable
from weightd_protocol.messages.control import LoadResponse
from weightd_protocol.messages.inference import Cancel
from weightd_protocol.messages.status import Status, StatusResponse

__all__ = ["directory"]

ANN = Caller("ann", "a token")
BEN = Caller("ben", "another")
ITSELF = Caller(None, "itself")


@pytest.fixture
def fake(directory: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(f"unix://{directory}/d.sock")
    yield fake
    fake.stop()


Call = Callable[[DaemonClient], Coroutine[Any, Any, Any]]


def asked(fake: FakeDaemon, call: Call, timeout: float = 30.0) -> Any:
    async def ask() -> Any:
        service = DaemonClient(fake.address, timeout, AdmissionControl(10, 2**20))
        try:
            return await call(service)
        finally:
            await service.close()

    return asyncio.run(ask())


def test_each_request_names_its_tenant(fake: FakeDaemon) -> None:
    async def each(service: DaemonClient) -> None:
        for caller in (ANN, BEN, ITSELF, ANN):
            await service.server(caller)

    asked(fake, each)
    assert [fake.next()[0].tenant for _ in range(4)] == ["ann", "ben", None, "ann"]  # type: ignore[union-attr]


def test_requests_status_once_a_second_per_tenant(fake: FakeDaemon) -> None:
    async def many(service: DaemonClient) -> None:
        both = [service.status(caller) for caller in (ANN, BEN) for _ in range(50)]
        await asyncio.gather(*both)
        await service.status(ANN)

    asked(fake, many)
    assert sorted(fake.next()[0].tenant or "" for _ in range(2)) == ["ann", "ben"]  # type: ignore[union-attr]
    assert fake.seen.empty()


def test_status_after_a_load_shows_the_change(fake: FakeDaemon) -> None:
    fake.handle = silent

    async def load_between(service: DaemonClient) -> str:
        async def answer(make: Callable[[str], Any]) -> None:
            message, _ = await asyncio.to_thread(fake.next)
            fake.send(*encode(make(message.id)))

        def status(version: str) -> Callable[[str], Any]:
            return lambda number: StatusResponse(number, version, "running", 1, 1.0, 1, ())

        await asyncio.gather(service.status(ANN), answer(status("before")))
        await asyncio.gather(service.load(ANN, "m"), answer(lambda number: LoadResponse(number, "m", "serving")))
        latest, _ = await asyncio.gather(service.status(ANN), answer(status("after")))
        return latest.version

    assert asked(fake, load_between, 5.0) == "after"


def test_cancelled_status_does_not_affect_others(fake: FakeDaemon) -> None:
    fake.handle = silent

    async def two(service: DaemonClient) -> StatusResponse:
        first = asyncio.create_task(service.status(ANN))
        second = asyncio.create_task(service.status(ANN))
        await asyncio.to_thread(fake.next)
        first.cancel()
        message, _ = await asyncio.to_thread(fake.next)
        assert isinstance(message, Status)
        fake.send(*encode(StatusResponse(message.id, "9.9", "running", 1, 1.0, 1, ())))
        return await second

    assert asked(fake, two).version == "9.9"


def test_echo_returns_the_same_arrays(fake: FakeDaemon) -> None:
    array = np.arange(100_000.0)

    async def infer(service: DaemonClient) -> Any:
        room = service.allocate(ANN, array.nbytes)
        room[:] = array.view(np.uint8)
        return await service.infer(
            ANN, InferenceRequest("m", {"x": np.ndarray(array.shape, array.dtype, memoryview(room))})
        )

    assert asked(fake, infer)["x"].tobytes() == array.tobytes()


NOTHING_TO_SEND: list[Call] = [
    lambda service: service.metadata(ITSELF, "m" * 300),
    lambda service: service.infer(ITSELF, InferenceRequest("m", {"x": np.array(["text"])})),
    lambda service: service.infer(ITSELF, InferenceRequest("m", {"x" * 300: np.zeros(1)})),
    lambda service: service.infer(ITSELF, InferenceRequest("m", {}, timeout=-1.0)),
    lambda service: service.infer(ITSELF, InferenceRequest("m", {}, priority=99)),
]


@pytest.mark.parametrize("call", NOTHING_TO_SEND)
def test_unsendable_request_is_an_error_with_a_code(fake: FakeDaemon, call: Call) -> None:
    with pytest.raises(InvalidArgument):
        asked(fake, call)
    assert fake.seen.empty()


def test_unresponsive_and_absent_daemon(fake: FakeDaemon) -> None:
    fake.handle = silent
    with pytest.raises(DeadlineExceeded):
        asked(fake, lambda service: service.ready(ITSELF), timeout=0.1)
    fake.stop()
    with pytest.raises(Unavailable):
        asked(fake, lambda service: service.ready(ITSELF))


def test_request_after_close_is_unavailable(fake: FakeDaemon) -> None:
    async def request_after_close(service: DaemonClient) -> None:
        await service.server(ITSELF)
        await service.close()
        await service.server(ITSELF)

    with pytest.raises(Unavailable, match="the gateway is stopping"):
        asked(fake, request_after_close)


def test_cancelled_task_cancels_request(fake: FakeDaemon) -> None:
    fake.handle = silent

    async def cancel(service: DaemonClient) -> None:
        task = asyncio.create_task(service.infer(ANN, InferenceRequest("m", {"x": np.zeros(1)})))
        infer, _ = await asyncio.to_thread(fake.next)
        task.cancel()
        message, _ = await asyncio.to_thread(fake.next)
        assert isinstance(message, Cancel)
        assert message.id == infer.id

    asked(fake, cancel)


GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_passes_trace_context() -> None:
    assert valid_traceparent(GOOD) == GOOD


@pytest.mark.parametrize(
    "given", ["", GOOD.upper(), f"ff{GOOD[2:]}", GOOD.replace("b7ad6b7169203331", "0" * 16), f"{GOOD}\n", f"{GOOD}-x"]
)
def test_ignores_invalid_trace_context(given: str) -> None:
    assert valid_traceparent(given) == ""
