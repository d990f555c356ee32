"""Clients that share memory: what each may name, and what becomes of what they send."""

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
from weightd_common import memfd
from weightd_common.stream import Stream
from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.api.router import DaemonControl, RequestRouter
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.platform.connection_limiter import UserConnectionLimits
from weightd_daemon.platform.event_loop import EventLoop
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


class World:
    """A frontend with a model that only keeps what it is asked."""

    name = "m"
    config = SimpleNamespace(timeout=30.0, default_level=1, priority_levels=2)

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.waiting: list[Request] = []
        self.dispatcher = self
        registry = ModelRegistry(cast(Any, None))
        registry.models = cast(Any, {"m": self})
        self.unmapped: list[int] = []
        access = Authorizer(TenantResolver({}), UsageTable(), {})
        self.memory_budget = MemoryBudget(10**9, self._user_of)
        self.frontend = RequestRouter(
            self.loop,
            registry,
            self.memory_budget,
            DaemonControl(cast(Any, None), lambda on_done: None, self.unmapped.extend),
            max_shm_bytes=10_000,
            user_limits=UserConnectionLimits(),
            authorizer=access,
        )
        self._clients: list[Stream] = []

    def _user_of(self, client: bytes) -> str:
        return self.frontend.user_of(client)

    def infer(self, request: Request, now: float) -> None:
        self.waiting.append(request)

    def on_disconnect(self, client: bytes, now: float) -> None:
        for request in [each for each in self.waiting if each.client == client]:
            self.waiting.remove(request)
            self.frontend.responses.reply_request_error(request, Cancelled("gone"))

    def client(self, user: str = "uid 1", *, is_near: bool = True) -> Stream:
        ours, theirs = socket.socketpair()
        self.frontend.adopt(
            ours, ClientIdentity(ClientOrigin(f"process {len(self._clients)}", user), is_direct=is_near)
        )
        self._clients.append(Stream(theirs))
        return self._clients[-1]

    def until(self, check: Callable[[], object]) -> None:
        for _ in range(400):
            if check():
                return
            self.loop.run_once(0.05)
        raise TimeoutError

    def hear(self, client: Stream) -> Any:
        messages: list[Any] = []

        def come() -> bool:
            messages.extend(client.receive())
            return bool(messages)

        self.until(come)
        [message] = messages
        return decode(message.frames, TO_CLIENT)

    def register(self, client: Stream, nbytes: int = 5_000) -> str:
        descriptor = memfd.create(nbytes)
        client.send(encode(Register("r")), [descriptor])
        os.close(descriptor)
        answer = self.hear(client)
        assert isinstance(answer, Registered)
        return answer.region

    def ask(self, client: Stream, *places: InputLocation | OutputLocation, request_id: str = "1") -> None:
        inputs = tuple(place for place in places if isinstance(place, InputLocation))
        outputs = tuple(place for place in places if isinstance(place, OutputLocation))
        asked = Infer(request_id, RequestDescription("m", (X,)), Parameters(regions=Regions(inputs, outputs)))
        client.send([*encode(asked), *([] if inputs else [bytes(1000)])])

    def refusal(self, client: Stream) -> str:
        error = self.hear(client)
        assert isinstance(error, Error)
        return f"{error.code}: {error.error}"

    def descriptors(self) -> int:
        gc.collect()
        return len([*Path("/proc/self/fd").iterdir()])

    def close(self) -> None:
        for each in self._clients:
            each.close()
        self.frontend.close()
        self.loop.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_a_request_names_places_and_its_answer_what_was_written(world: World) -> None:
    client = world.client()
    region = world.register(client)
    world.ask(client, InputLocation(0, region, 3000), OutputLocation(0, region, 100, 50))
    world.until(lambda: world.waiting)
    [request] = world.waiting
    found = [(each.offset, each.nbytes) for each in (request.locations.inputs[0], request.locations.outputs[0])]
    assert (found, request.frames, request.nbytes) == ([(3000, 1000), (100, 50)], [], 0)
    request.pending_writes = (range(1),)
    described = ResponseDescription("m", (X,))
    world.frontend.responses.reply_result(request, PredictResult(1, described, (0,)), ())
    assert world.hear(client) == InferResponse("1", described, (0,), may_still_write=True)
    world.frontend.responses.notify_released(request)
    assert world.hear(client) == Released("1")


def test_an_answer_may_have_the_memory_that_its_request_has_had(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    client = world.client()
    world.ask(client)
    world.until(lambda: world.waiting)
    [request] = world.waiting
    used: list[int] = []

    def send(self: ClientConnections, key: bytes, frames: Sequence[Any]) -> bool:
        used.append(world.memory_budget.used_by(key))
        return True

    monkeypatch.setattr(ClientConnections, "send", send)
    assert world.memory_budget.used_by(request.client) == request.buffered_bytes > 0
    world.frontend.responses.reply_result(request, PredictResult(1, ResponseDescription("m", ())), ())
    assert used == [0]


def test_an_error_says_whether_somebody_may_still_write(world: World) -> None:
    client = world.client()
    world.ask(client, OutputLocation(0, world.register(client), 100, 50))
    world.until(lambda: world.waiting)
    [request] = world.waiting
    for running in (True, None):
        request.pending_writes = (range(1),) if running else ()
        world.frontend.responses.reply_request_error(request, InvalidArgument("x"))
        assert world.hear(client) == Error("1", "INVALID_ARGUMENT", "x", may_still_write=running)


@pytest.mark.parametrize("user", ["uid 1", "uid 2"])
def test_a_region_is_nobody_elses(world: World, user: str) -> None:
    region = world.register(world.client())
    other = world.client(user)
    world.register(other, 100)
    for place in (InputLocation(0, region, 0), OutputLocation(0, region, 0, 10)):
        world.ask(other, place)
        refusal = world.refusal(other)
        assert refusal.startswith("NOT_FOUND: parameters.regions.")
        assert region not in refusal
    other.send(encode(Unregister("u", region)))
    world.ask(other, InputLocation(0, region, 0))
    assert world.refusal(other).startswith("NOT_FOUND")
    assert not world.frontend.regions.closed_regions
    assert not world.waiting


def test_behind_a_gate_nothing_is_shared(world: World) -> None:
    client = world.client(is_near=False)
    # The second has no answer, here either.
    for message in (Register("1"), Unregister("1", "0" * 32)):
        client.send(encode(message))
    assert world.refusal(client) == "INVALID_ARGUMENT: memory can be shared only on the unix socket"
    world.ask(client, InputLocation(0, "0" * 32, 0))
    assert "only on the unix socket" in world.refusal(client)


def test_a_region_goes_with_its_connection_and_with_the_last_that_names_it(world: World) -> None:
    before = world.descriptors()
    client = world.client()
    region = world.register(client)
    world.ask(client, InputLocation(0, region, 0))
    world.until(lambda: world.waiting)
    client.send(encode(Unregister("u", region)))
    world.ask(client, InputLocation(0, region, 0))
    assert world.refusal(client).startswith("NOT_FOUND")
    [number] = [memory.number for memory in world.waiting[0].locations.regions]
    assert not world.frontend.regions.closed_regions
    world.register(client, 5_000)
    client.connection.close()
    world.until(lambda: not world.waiting)
    gc.collect()
    world.until(lambda: len(world.unmapped) == 2)
    assert number in world.unmapped
    world.until(lambda: world.descriptors() == before)


@pytest.mark.parametrize(
    "message", [encode(Register("1")), encode(Unregister("1", "x")), [b"junk"]], ids=["register", "unregister", "junk"]
)
def test_what_is_no_memory_is_closed_and_holds_nobody_up(world: World, message: Sequence[bytes]) -> None:
    other = world.client()
    reader, writer = os.pipe()
    before = world.descriptors()
    for _ in range(5):
        client = world.client()
        client.send(message, [writer])
        assert world.refusal(client).startswith("INVALID_ARGUMENT: descriptors: expected a memfd, got a descriptor of")
        with pytest.raises(ConnectionError):
            world.until(client.receive)
        client.close()
    region = world.register(other)
    world.ask(other, InputLocation(0, region, 0))
    world.until(lambda: world.waiting)
    # But for the region, all that came is closed.
    world.until(lambda: world.descriptors() == before + 1)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("where", ["alone", "after 252 others", "within a large frame", "after the end"])
def test_a_socket_that_lingers_holds_nobody_up_wherever_it_comes(world: World, where: str) -> None:
    client, other = world.client(), world.client("uid 2")
    ours, theirs = lingering()
    begin = time.monotonic()
    with theirs:
        if where == "within a large frame":
            client.connection.send(message_prefix([b"e", b"d", bytes(10**6)]) + b"ed" + bytes(1000))
            world.until(lambda: world.memory_budget.used_bytes)
        if where == "after the end":
            client.connection.send(b"GET / HTTP/1.1\r\n")
        others = 252 * [0] if where == "after 252 others" else []
        socket.send_fds(client.connection, [bytes(1000)], [*others, ours.fileno()])
        ours.close()
        with pytest.raises(ConnectionError):
            world.until(lambda: client.receive() and False)
        world.register(other)
        # Its close takes 30 s, unless its peer goes.
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize("count", [2, 4, 9])
def test_a_message_brings_one_descriptor(world: World, count: int) -> None:
    client = world.client()
    memories = [memfd.create(10) for _ in range(count)]
    before = world.descriptors()
    client.send(encode(Register("1")), memories)
    assert world.refusal(client).startswith("INVALID_ARGUMENT")
    client.connection.close()
    world.until(lambda: world.descriptors() <= before - 1)
    for each in memories:
        os.close(each)


def test_who_sends_what_cannot_be_closed_is_hung_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.frontend._connections.reader.fd_closer, "pending", {"another": deque()})
    monkeypatch.setattr("weightd_daemon.platform.fd_closer.DescriptorCloser.is_backlogged", lambda self, user: True)
    client = world.client()
    client.send(encode(Register("1")), [0])
    assert "64 descriptors of this user are not closed yet" in world.refusal(client)
    with pytest.raises(ConnectionError):
        world.until(client.receive)
    # A connection that brings no more of them goes on.
    world.ask(world.client())
    world.until(lambda: world.waiting)
