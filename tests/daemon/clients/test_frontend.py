"""Requests of real clients, and models that only keep them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgpack
import pytest
import zmq

from weightd.daemon.clients import frontend
from weightd.daemon.clients.frontend import Daemon, Frontend
from weightd.daemon.clients.listening import listen
from weightd.daemon.host.loop import Loop
from weightd.daemon.models.fleet import Fleet
from weightd.daemon.requests.request import Request
from weightd.protocol.codec import decode, encode
from weightd.protocol.errors import InvalidArgument, RequestError, Unavailable
from weightd.protocol.messages.children import Result
from weightd.protocol.messages.control import Update
from weightd.protocol.messages.data import Error, Infer, Parameters, RequestDescription, ResponseDescription, TensorSpec
from weightd.protocol.messages.regions import InputPlace, Regions, Register, Unregister
from weightd.protocol.messages.types import TO_CLIENT

LIMIT_S = 20.0
NBYTES = 1000

Socket = zmq.Socket[bytes]


class FakeModel:
    """Has requests waiting; `frontend` is set before the first."""

    name = "m"
    config = SimpleNamespace(timeout=30.0)

    def __init__(self) -> None:
        self.frontend: Frontend
        self.waiting: list[Request] = []

    def infer(self, request: Request, now: float) -> None:
        if request.id == "wrong":
            raise InvalidArgument("it is wrong")
        self.waiting.append(request)

    def update(self, client: bytes, request_id: str, now: float, *, path: str, weights: str, rollback: bool) -> None:
        raise Unavailable("it loads")

    def shed(self, client: bytes, error: RequestError, now: float) -> None:
        for request in [each for each in self.waiting if each.client == client]:
            self.waiting.remove(request)
            self.frontend.refuse(request, error)

    def vanished(self, client: bytes, now: float) -> None:
        self.shed(client, InvalidArgument("it is gone"), now)

    @property
    def ids(self) -> list[str]:
        return [request.id for request in self.waiting]


class World:
    """A frontend with one model and room for three requests, and its clients."""

    def __init__(self, context: zmq.Context[Socket], address: str) -> None:
        self.model = FakeModel()
        self.loop = Loop()
        self._context, self._address = context, address
        self._clients: list[Socket] = []
        fleet = SimpleNamespace(models={"m": self.model}, everyone=lambda: [self.model])
        router = listen(context, address)
        kept = Request(1, b"", "", RequestDescription("m", ()), (), 0.0, 0.0, NBYTES).kept_bytes
        daemon = SimpleNamespace(stopping=False)
        self.frontend = Frontend(router, self.loop, cast(Fleet, fleet), 3 * kept, cast(Daemon, daemon))
        self.model.frontend = self.frontend

    def client(self) -> Socket:
        self._clients.append(self._context.socket(zmq.DEALER))
        self._clients[-1].connect(self._address)
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close(linger=0)
        self.loop.close()

    def ask(self, client: Socket, request_id: str) -> None:
        specs = [{"name": "x", "datatype": "UINT8", "shape": [NBYTES]}]
        header: list[dict[str, object]] = [
            {"v": 1, "type": "infer", "id": request_id},
            {"model_name": "m", "inputs": specs},
        ]
        client.send_multipart([*map(msgpack.packb, header), bytes(NBYTES)])

    def until(self, check: Callable[[], object]) -> None:
        for _ in range(int(LIMIT_S / 0.05)):
            if check():
                return
            self.loop.wait(0.05)
        raise TimeoutError

    def refusals(self, client: Socket, count: int) -> list[tuple[str, str]]:
        """Return id and code of so many errors that the client gets."""
        errors: list[tuple[str, str]] = []
        for _ in range(count):
            self.until(functools.partial(client.poll, 0))
            error = decode(client.recv_multipart(), TO_CLIENT)
            assert isinstance(error, Error)
            errors.append((error.id, error.code))
        return errors


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with zmq.Context() as context:
        made = World(context, f"ipc://{tmp_path}/s")
        yield made
        made.close()
        context.destroy(linger=0)


def test_who_has_most_of_the_memory_makes_room_for_others(world: World) -> None:
    greedy, other = world.client(), world.client()
    for number in range(4):
        world.ask(greedy, f"g{number}")
        world.until(lambda: world.model.ids == ["g0", "g1", "g2"][: number + 1])  # noqa: B023
    # It has most itself.
    assert world.refusals(greedy, 1) == [("g3", "RESOURCE_EXHAUSTED")]
    world.ask(other, "o0")
    world.until(lambda: world.model.ids == ["o0"])
    assert world.refusals(greedy, 3) == [(f"g{number}", "RESOURCE_EXHAUSTED") for number in range(3)]
    assert world.frontend.room.held == world.model.waiting[0].kept_bytes


def test_what_has_ended_is_kept_no_more(world: World) -> None:
    client = world.client()
    world.ask(client, "answered")
    world.ask(client, "refused")
    world.until(lambda: len(world.model.waiting) == 2)
    world.frontend.answer(world.model.waiting[0], Result(1, ResponseDescription("m", ())), ())
    world.frontend.refuse(world.model.waiting[1], InvalidArgument("as a test"))
    world.ask(client, "wrong")
    world.until(lambda: client.poll(0))
    assert world.frontend.room.held == 0
    world.ask(client, "kept")
    world.until(lambda: "kept" in world.model.ids)
    assert world.frontend.room.held > 0
    client.close(linger=0)
    world.until(lambda: not world.frontend.room.held)


@pytest.mark.parametrize(
    "message",
    [
        Register("1"),
        Unregister("1", "0" * 32),
        Infer(
            "1",
            RequestDescription("m", (TensorSpec("x", "UINT8", (8,)),)),
            Parameters(regions=Regions((InputPlace(0, "0" * 32, 0),))),
        ),
    ],
)
def test_memory_is_not_shared_over_zeromq(world: World, message: object) -> None:
    client = world.client()
    client.send_multipart(encode(message))
    assert world.refusals(client, 1) == [("1", "INVALID_ARGUMENT")]


@pytest.mark.parametrize(
    ("uid", "path", "code"),
    [
        (os.getuid() + 1, "/m.onnx", "PERMISSION_DENIED"),
        (os.getuid(), "m.onnx", "INVALID_ARGUMENT"),
        (os.getuid(), "/m.onnx\0", "INVALID_ARGUMENT"),
        (os.getuid(), "/m.onnx", "UNAVAILABLE"),
    ],
)
def test_who_may_update_a_model_and_to_what(
    world: World, monkeypatch: pytest.MonkeyPatch, uid: int, path: str, code: str
) -> None:
    def peer_uid(identity: zmq.Frame) -> int:
        return uid

    monkeypatch.setattr(frontend, "peer_uid", peer_uid)
    client = world.client()
    client.send_multipart(encode(Update("u", "m", path)))
    assert world.refusals(client, 1) == [("u", code)]
