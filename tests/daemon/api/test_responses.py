"""Tests of shared memory in the request router: regions, descriptors, and the replies to requests that use them."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from testkit.lingering import lingering
from testkit.no_channels import no_channels
from weightd_common import memfd
from weightd_common.stream import Stream
from weightd_daemon.api.admin import DaemonControl
from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.api.model_lookup import ModelLookup
from weightd_daemon.api.router import RequestRouter
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.platform.connection_limiter import UserConnectionLimits
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.fd_closer import DescriptorCloser
from weightd_daemon.scheduling.request import ClientOrigin, Request
from weightd_daemon.tenants.tenant import TenantResolver
from weightd_daemon.tenants.usage import UsageTable
from weightd_daemon.transport.connection import ClientIdentity
from weightd_daemon.transport.connections import ClientConnections
from weightd_daemon.transport.memory_budget import MemoryBudget
from weightd_protocol.codec import decode, encode
from weightd_protocol.errors import Cancelled, InvalidArgument
from weightd_protocol.framing import message_prefix
from weightd_protocol.messages.inference import (
    Error,
    Infer,
    InferResponse,
    Parameters,
    RequestDescription,
    ResponseDescription,
    TensorSpec,
)
from weightd_protocol.messages.regions import (
    InputLocation,
    OutputLocation,
    Regions,
    Register,
    Registered,
    Released,
    Unregister,
)
from weightd_protocol.messages.types import TO_CLIENT
from weightd_protocol.messages.worker import PredictResult

X = TensorSpec("x", "UINT8", (1000,))


class RouterHarness:
    """Request router with one fake model that keeps all requests unanswered, and its clients."""

    name = "m"
    config = SimpleNamespace(timeout=30.0, default_level=1, priority_levels=2)
    loading = SimpleNamespace(is_unloaded=False, last_used_at=0.0)

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.waiting: list[Request] = []
        self.dispatcher = self
        registry = ModelRegistry(cast(Any, None))
        registry.models = cast(Any, {"m": self})
        self.unmapped: list[int] = []
        access = Authorizer(TenantResolver({}), UsageTable(), {})
        self.memory_budget = MemoryBudget(10**9, self._user_of)
        self.router = RequestRouter(
            self.loop,
            ModelLookup(registry),
            self.memory_budget,
            DaemonControl(*cast(Any, (None, None, self.unmapped.extend, None, None, no_channels()))),
            max_shm_bytes=10_000,
            user_limits=UserConnectionLimits(),
            authorizer=access,
        )
        self._clients: list[Stream] = []

    def _user_of(self, client: bytes) -> str:
        return self.router.user_of(client)

    def infer(self, request: Request, now: float) -> None:
        self.waiting.append(request)

    def on_disconnect(self, client: bytes, now: float) -> None:
        for request in [each for each in self.waiting if each.client == client]:
            self.waiting.remove(request)
            self.router.responses.reply_request_error(request, Cancelled("gone"))

    def client(self, user: str = "uid 1", *, is_direct: bool = True) -> Stream:
        ours, theirs = socket.socketpair()
        self.router.adopt(
            ours, ClientIdentity(ClientOrigin(f"process {len(self._clients)}", user), is_direct=is_direct)
        )
        self._clients.append(Stream(theirs))
        return self._clients[-1]

    def until(self, check: Callable[[], object]) -> None:
        for _ in range(400):
            if check():
                return
            self.loop.run_once(0.05)
        raise TimeoutError

    def receive(self, client: Stream) -> Any:
        messages: list[Any] = []

        def has_message() -> bool:
            messages.extend(client.receive())
            return bool(messages)

        self.until(has_message)
        [message] = messages
        return decode(message.frames, TO_CLIENT)

    def register(self, client: Stream, nbytes: int = 5_000) -> str:
        descriptor = memfd.create(nbytes)
        client.send(encode(Register("r")), [descriptor])
        os.close(descriptor)
        answer = self.receive(client)
        assert isinstance(answer, Registered)
        return answer.region

    def ask(self, client: Stream, *places: InputLocation | OutputLocation, request_id: str = "1") -> None:
        inputs = tuple(place for place in places if isinstance(place, InputLocation))
        outputs = tuple(place for place in places if isinstance(place, OutputLocation))
        sent = Infer(request_id, RequestDescription("m", (X,)), Parameters(regions=Regions(inputs, outputs)))
        client.send([*encode(sent), *([] if inputs else [bytes(1000)])])

    def refusal(self, client: Stream) -> str:
        error = self.receive(client)
        assert isinstance(error, Error)
        return f"{error.code}: {error.error}"

    def descriptors(self) -> int:
        gc.collect()
        return len([*Path("/proc/self/fd").iterdir()])

    def close(self) -> None:
        for each in self._clients:
            each.close()
        self.router.close()
        self.loop.close()


@pytest.fixture
def harness() -> Iterator[RouterHarness]:
    created = RouterHarness()
    yield created
    created.close()


def test_request_uses_regions_for_inputs_and_outputs(harness: RouterHarness) -> None:
    client = harness.client()
    region = harness.register(client)
    harness.ask(client, InputLocation(0, region, 3000), OutputLocation(0, region, 100, 50))
    harness.until(lambda: harness.waiting)
    [request] = harness.waiting
    found = [(each.offset, each.nbytes) for each in (request.locations.inputs[0], request.locations.outputs[0])]
    assert (found, request.frames, request.nbytes) == ([(3000, 1000), (100, 50)], [], 0)
    request.pending_writes = (range(1),)
    described = ResponseDescription("m", (X,))
    harness.router.responses.reply_result(request, PredictResult(1, described, (0,)), ())
    assert harness.receive(client) == InferResponse("1", described, (0,), may_still_write=True)
    harness.router.responses.notify_released(request)
    assert harness.receive(client) == Released("1")


def test_reply_frees_memory_of_request_before_send(harness: RouterHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    client = harness.client()
    harness.ask(client)
    harness.until(lambda: harness.waiting)
    [request] = harness.waiting
    used: list[int] = []

    def send(self: ClientConnections, key: bytes, frames: Sequence[Any]) -> bool:
        used.append(harness.memory_budget.used_by(key))
        return True

    monkeypatch.setattr(ClientConnections, "send", send)
    assert harness.memory_budget.used_by(request.client) == request.buffered_bytes > 0
    harness.router.responses.reply_result(request, PredictResult(1, ResponseDescription("m", ())), ())
    assert used == [0]


def test_error_reports_pending_writes(harness: RouterHarness) -> None:
    client = harness.client()
    harness.ask(client, OutputLocation(0, harness.register(client), 100, 50))
    harness.until(lambda: harness.waiting)
    [request] = harness.waiting
    for running in (True, None):
        request.pending_writes = (range(1),) if running else ()
        harness.router.responses.reply_request_error(request, InvalidArgument("x"))
        assert harness.receive(client) == Error("1", "INVALID_ARGUMENT", "x", may_still_write=running)


@pytest.mark.parametrize("user", ["uid 1", "uid 2"])
def test_region_belongs_to_one_connection(harness: RouterHarness, user: str) -> None:
    region = harness.register(harness.client())
    other = harness.client(user)
    harness.register(other, 100)
    for place in (InputLocation(0, region, 0), OutputLocation(0, region, 0, 10)):
        harness.ask(other, place)
        refusal = harness.refusal(other)
        assert refusal.startswith("NOT_FOUND: parameters.regions.")
        assert region not in refusal
    other.send(encode(Unregister("u", region)))
    harness.ask(other, InputLocation(0, region, 0))
    assert harness.refusal(other).startswith("NOT_FOUND")
    assert not harness.router.regions.closed_regions
    assert not harness.waiting


def test_proxied_clients_cannot_share_memory(harness: RouterHarness) -> None:
    client = harness.client(is_direct=False)
    # The router never replies to Unregister.
    for message in (Register("1"), Unregister("1", "0" * 32)):
        client.send(encode(message))
    assert harness.refusal(client) == "INVALID_ARGUMENT: memory can be shared only on the unix socket"
    harness.ask(client, InputLocation(0, "0" * 32, 0))
    assert "only on the unix socket" in harness.refusal(client)


def test_region_is_freed_after_connection_and_requests(harness: RouterHarness) -> None:
    before = harness.descriptors()
    client = harness.client()
    region = harness.register(client)
    harness.ask(client, InputLocation(0, region, 0))
    harness.until(lambda: harness.waiting)
    client.send(encode(Unregister("u", region)))
    harness.ask(client, InputLocation(0, region, 0))
    assert harness.refusal(client).startswith("NOT_FOUND")
    [number] = [memory.number for memory in harness.waiting[0].locations.regions]
    assert not harness.router.regions.closed_regions
    harness.register(client, 5_000)
    client.connection.close()
    harness.until(lambda: not harness.waiting)
    gc.collect()
    harness.until(lambda: len(harness.unmapped) == 2)
    assert number in harness.unmapped
    harness.until(lambda: harness.descriptors() == before)


@pytest.mark.parametrize(
    "message", [encode(Register("1")), encode(Unregister("1", "x")), [b"junk"]], ids=["register", "unregister", "junk"]
)
def test_descriptor_without_memfd_is_closed(harness: RouterHarness, message: Sequence[bytes]) -> None:
    other = harness.client()
    reader, writer = os.pipe()
    before = harness.descriptors()
    for _ in range(5):
        client = harness.client()
        client.send(message, [writer])
        assert harness.refusal(client).startswith(
            "INVALID_ARGUMENT: descriptors: expected a memfd, got a descriptor of"
        )
        with pytest.raises(ConnectionError):
            harness.until(client.receive)
        client.close()
    region = harness.register(other)
    harness.ask(other, InputLocation(0, region, 0))
    harness.until(lambda: harness.waiting)
    # The router has closed all descriptors except that of the region.
    harness.until(lambda: harness.descriptors() == before + 1)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("where", ["alone", "after 252 others", "within a large frame", "after the end"])
def test_slow_close_of_socket_does_not_block_router(harness: RouterHarness, where: str) -> None:
    client, other = harness.client(), harness.client("uid 2")
    ours, theirs = lingering()
    begin = time.monotonic()
    with theirs:
        if where == "within a large frame":
            client.connection.send(message_prefix([b"e", b"d", bytes(10**6)]) + b"ed" + bytes(1000))
            harness.until(lambda: harness.memory_budget.used_bytes)
        if where == "after the end":
            client.connection.send(b"GET / HTTP/1.1\r\n")
        others = 252 * [0] if where == "after 252 others" else []
        socket.send_fds(client.connection, [bytes(1000)], [*others, ours.fileno()])
        ours.close()
        with pytest.raises(ConnectionError):
            harness.until(lambda: client.receive() and False)
        harness.register(other)
        # close() of this socket takes 30 s unless its peer closes first.
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize("count", [2, 4, 9])
def test_message_carries_at_most_one_descriptor(harness: RouterHarness, count: int) -> None:
    client = harness.client()
    memories = [memfd.create(10) for _ in range(count)]
    before = harness.descriptors()
    client.send(encode(Register("1")), memories)
    assert harness.refusal(client).startswith("INVALID_ARGUMENT")
    client.connection.close()
    harness.until(lambda: harness.descriptors() <= before - 1)
    for each in memories:
        os.close(each)


@pytest.fixture
def backlog(harness: RouterHarness, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that is not empty while too many descriptors of each user are not closed yet."""
    backlog = [True]
    monkeypatch.setattr(harness.router._connections.reader.fd_closer, "pending", {"another": deque()})
    monkeypatch.setattr(DescriptorCloser, "is_backlogged", lambda self, user: bool(backlog))
    return backlog


def test_descriptor_waits_while_many_are_unclosed(harness: RouterHarness, backlog: list[bool]) -> None:
    client = harness.client()
    memory = memfd.create(5_000)
    client.send(encode(Register("1")), [memory])
    os.close(memory)
    # The router still serves connections of this user that send no descriptors.
    harness.ask(harness.client())
    harness.until(lambda: harness.waiting)
    backlog.clear()
    assert isinstance(harness.receive(client), Registered)


@pytest.mark.usefixtures("backlog")
def test_disconnects_user_with_backlog_of_descriptors(harness: RouterHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightd_daemon.transport.reader._MAX_CLOSING_WAIT_S", 0.1)
    client = harness.client()
    client.send(encode(Register("1")), [0])
    assert "64 descriptors of this user are not closed yet" in harness.refusal(client)
    with pytest.raises(ConnectionError):
        harness.until(client.receive)
