"""Requests of real clients, and models that only keep them."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn, cast

import msgpack
import pytest

from weightd_common.safe_open import OPERATOR, Grant
from weightd_common.stream import Stream
from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.api.router import DaemonControl, RequestRouter
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.platform.connection_limiter import UserConnectionLimits
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.scheduling.request import OVERHEAD_BYTES, ClientOrigin, Request
from weightd_daemon.scheduling.signature import MetadataRequest
from weightd_daemon.tenants.tenant import PeerCredential, TenantResolver
from weightd_daemon.tenants.usage import UsageTable
from weightd_daemon.transport.connection import ClientIdentity
from weightd_daemon.transport.memory_budget import MemoryBudget
from weightd_protocol import limits
from weightd_protocol.codec import Decoder, decode, encode, max_request_items
from weightd_protocol.errors import InvalidArgument, RequestError, ResourceExhausted, Unavailable
from weightd_protocol.framing import Message
from weightd_protocol.messages.control import ModelMetadata, Reload, ServerReady, Update, UpdateResponse
from weightd_protocol.messages.events import Events, Logs
from weightd_protocol.messages.inference import (
    Cancel,
    Error,
    Infer,
    Parameters,
    RequestDescription,
    ResponseDescription,
    TensorSignature,
    TensorSpec,
)
from weightd_protocol.messages.regions import Unregister
from weightd_protocol.messages.types import FROM_CLIENT, TO_CLIENT, ClientMessage
from weightd_protocol.messages.worker import Built, PredictResult

LIMIT_S = 20.0
NBYTES = 1000


class FakeModel:
    """Has requests waiting; `frontend` is set before the first."""

    name = "m"
    config = SimpleNamespace(timeout=30.0, default_level=1, priority_levels=2)

    def __init__(self) -> None:
        self.dispatcher = self
        self.signature = SimpleNamespace(built=None)
        self.metadata = SimpleNamespace(request=self.request_metadata, reject=self.reject_metadata_requests)
        self.frontend: RequestRouter
        self.waiting: list[Request] = []
        self.waiters: list[MetadataRequest] = []
        self.turned_away: list[str] = []

    def infer(self, request: Request, now: float) -> None:
        if request.id == "wrong":
            raise InvalidArgument("it is wrong")
        self.waiting.append(request)

    def update(self, *_: object, grant: Grant, **more: object) -> None:
        self.grant = grant
        raise Unavailable("it loads")

    def shed(self, should_reject: Callable[[Request], bool], error: RequestError, now: float) -> None:
        for request in [each for each in self.waiting if should_reject(each)]:
            self.waiting.remove(request)
            self.frontend.responses.reply_request_error(request, error)

    def request_metadata(self, waiter: MetadataRequest) -> None:
        self.waiters.append(waiter)

    def reject_metadata_requests(self, should_reject: Callable[[bytes], bool], error: RequestError) -> None:
        self.turned_away = [each.request_id for each in self.waiters if should_reject(each.client)]

    def on_disconnect(self, client: bytes, now: float) -> None:
        self.shed(lambda each: each.client == client, InvalidArgument("it is gone"), now)

    @property
    def ids(self) -> list[str]:
        return [request.id for request in self.waiting]


class Peer:
    """A client's end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self.stream = Stream(end)
        self._messages: list[Message] = []

    def waits(self) -> bool:
        self._messages += self.stream.receive()
        return bool(self._messages)

    def error(self) -> Error:
        answer = decode(self._messages.pop(0).frames, TO_CLIENT)
        assert isinstance(answer, Error)
        return answer


class World:
    """A frontend with one model and room for three requests, and its clients."""

    def __init__(self, tenants: Mapping[str, TenantConfig] = MappingProxyType({})) -> None:
        self.model = FakeModel()
        self.loop = EventLoop()
        self._peers: list[Peer] = []
        self.models = {"m": self.model}
        self.registry = ModelRegistry(cast(Any, None))
        self.registry.models = cast(Any, self.models)
        kept = NBYTES + OVERHEAD_BYTES
        self.daemon = SimpleNamespace()
        self.accounts = UsageTable()
        self.tenants = TenantResolver(tenants)
        self.memory_budget = MemoryBudget(3 * kept, self._user_of)
        self.frontend = RequestRouter(
            self.loop,
            self.registry,
            self.memory_budget,
            DaemonControl(cast(Any, self.daemon), lambda on_done: None, lambda numbers: None),
            max_shm_bytes=0,
            user_limits=UserConnectionLimits(),
            authorizer=Authorizer(self.tenants, self.accounts, {}),
        )
        self.model.frontend = self.frontend

    def _user_of(self, client: bytes) -> str:
        return self.frontend.user_of(client)

    def client(
        self, *, may_operate: bool = False, is_near: bool = False, uid: int | None = None, gids: tuple[int, ...] = ()
    ) -> Peer:
        ours, theirs = socket.socketpair()
        near = f"process {len(self._peers)}"
        proof = PeerCredential(uid, gids, is_operator=may_operate)
        self.frontend.adopt(ours, ClientIdentity(ClientOrigin(near, near), is_direct=is_near, credential=proof))
        self._peers.append(Peer(theirs))
        return self._peers[-1]

    def close(self) -> None:
        for each in self._peers:
            each.stream.close()
        self.frontend.close()
        self.loop.close()

    def ask(self, client: Peer, request_id: str) -> None:
        asked = RequestDescription("m", (TensorSpec("x", "UINT8", (NBYTES,)),))
        client.stream.send([*encode(Infer(request_id, asked)), bytes(NBYTES)])

    def until(self, check: Callable[[], object]) -> None:
        for _ in range(int(LIMIT_S / 0.05)):
            if check():
                return
            self.loop.run_once(0.05)
        raise TimeoutError

    def refusals(self, client: Peer, count: int) -> list[tuple[str, str]]:
        """Return id and code of so many errors that the client gets."""
        errors: list[tuple[str, str]] = []
        for _ in range(count):
            self.until(client.waits)
            error = client.error()
            errors.append((error.id, error.code))
        return errors


def test_every_message_of_a_client_is_answered_somewhere(world: World) -> None:
    assert {*vars(world.frontend)["_handlers"]} == {*FROM_CLIENT.values()}


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.mark.parametrize(("priority", "level"), [(None, 0), (0, 0), (1, 0), (2, 1), (3, None)])
def test_a_request_is_of_the_level_that_its_model_has(world: World, priority: int | None, level: int | None) -> None:
    client = world.client()
    asked = Infer("x", RequestDescription("m", ()), Parameters(priority=priority))
    client.stream.send(encode(asked))
    if level is None:
        assert world.refusals(client, 1) == [("x", "INVALID_ARGUMENT")]
    else:
        world.until(lambda: world.model.waiting)
        assert [each.priority_level for each in world.model.waiting] == [level]


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
    assert world.memory_budget.used_bytes == world.model.waiting[0].buffered_bytes


def test_answers_that_wait_for_others_to_the_same_request_are_kept_with_it(world: World) -> None:
    world.ask(world.client(), "in parts")
    world.until(lambda: world.model.waiting)
    [request] = world.model.waiting
    world.frontend.responses.reserve_partial_result(request, NBYTES)
    with pytest.raises(ResourceExhausted, match="max_memory_bytes"):
        world.frontend.responses.reserve_partial_result(request, world.memory_budget.max_bytes)
    assert world.memory_budget.used_bytes == request.buffered_bytes > 2 * NBYTES
    world.frontend.responses.reply_request_error(request, InvalidArgument("it is wrong"))
    assert world.memory_budget.used_bytes == 0


def test_a_connection_is_busy_while_a_request_of_it_is_under_way(world: World) -> None:
    client = world.client()
    [connection] = world.frontend._connections  # pyright: ignore[reportPrivateUsage]
    for count, name in enumerate(("answered", "refused", "wrong")):
        world.ask(client, name)
        world.until(lambda: len(world.model.waiting) == count + 1 or client.waits())  # noqa: B023
    counts = [connection.pending_requests]
    world.frontend.responses.reply_result(world.model.waiting[0], PredictResult(1, ResponseDescription("m", ())), ())
    counts.append(connection.pending_requests)
    world.frontend.responses.reply_request_error(world.model.waiting[1], InvalidArgument("as a test"))
    counts.append(connection.pending_requests)
    assert counts == [2, 1, 0]
    assert not connection.is_busy


def test_what_has_ended_is_kept_no_more(world: World) -> None:
    client = world.client()
    world.ask(client, "answered")
    world.ask(client, "refused")
    world.until(lambda: len(world.model.waiting) == 2)
    world.frontend.responses.reply_result(world.model.waiting[0], PredictResult(1, ResponseDescription("m", ())), ())
    world.frontend.responses.reply_request_error(world.model.waiting[1], InvalidArgument("as a test"))
    world.ask(client, "wrong")
    world.until(client.waits)
    assert world.memory_budget.used_bytes == 0
    world.ask(client, "kept")
    world.until(lambda: "kept" in world.model.ids)
    assert world.memory_budget.used_bytes > 0
    client.stream.close()
    world.until(lambda: not world.memory_budget.used_bytes)


@pytest.mark.parametrize(
    ("may_operate", "path", "code"),
    [
        (False, "/m.onnx", "PERMISSION_DENIED"),
        (True, "m.onnx", "INVALID_ARGUMENT"),
        (True, "/m.onnx\0", "INVALID_ARGUMENT"),
        (True, "/m.onnx", "UNAVAILABLE"),
    ],
)
def test_who_may_update_a_model_and_to_what(world: World, may_operate: bool, path: str, code: str) -> None:
    client = world.client(may_operate=may_operate)
    client.stream.send(encode(Update("u", "m", path)))
    assert world.refusals(client, 1) == [("u", code)]
    if code == "UNAVAILABLE":
        assert world.model.grant == OPERATOR


def audited(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "weightd.audit"]


def test_a_refused_right_is_in_the_audit_log(caplog: pytest.LogCaptureFixture) -> None:
    world = World({"ann": TenantConfig(user_ids=(1001,), may=("status",))})
    client, stranger = world.client(is_near=True, uid=1001), world.client(is_near=True, uid=1002)
    for message in (Update("u", "m\n", "/m.onnx"), Infer("i", RequestDescription("m", ())), Reload("r")):
        client.stream.send(encode(message))
        assert [code for _, code in world.refusals(client, 1)] == ["PERMISSION_DENIED"]
    stranger.stream.send(encode(ServerReady("s")))
    assert [code for _, code in world.refusals(stranger, 1)] == ["UNAUTHENTICATED"]
    first, second = audited(caplog)
    begin = 'audit action="update" result="refused" user="process 0" tenant="ann" model="m\\n" path="/m.onnx" detail="'
    assert first.startswith(begin)
    assert second.startswith('audit action="server_ready" result="refused" user="process 1" detail="')
    world.close()


def test_an_update_is_in_the_audit_log_when_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    begun: list[str] = []
    client = world.client(may_operate=True, is_near=True)
    world.model.update = lambda client, request_id, *_, **__: begun.append(request_id)  # type: ignore[method-assign]
    for request_id in ("one", "two", "two"):
        client.stream.send(encode(Update(request_id, "m", "/m.onnx")))
    # An id that is in use cannot hide what is done under it.
    assert world.refusals(client, 1) == [("two", "INVALID_ARGUMENT")]
    assert begun == ["one", "two"]
    [key] = {key for key, _ in world.frontend.admin._pending_operations}
    world.frontend.admin.reply_updated(key, UpdateResponse("one", "m", (1,), "/m.onnx", "", "/old.onnx"))
    world.frontend.admin.reply_failed(key, "two", Unavailable("not updated: no room"))
    assert re.findall(r'result="(\w+)"', "".join(audited(caplog))) == ["refused", "ok", "failed"]
    assert audited(caplog)[2].endswith('path="/m.onnx" detail="not updated: no room"')
    assert not world.frontend.admin._pending_operations
    world.close()


def test_a_tenant_names_files_by_its_own_right() -> None:
    world = World({"default": TenantConfig(may=("operate",), model_directories=("/models",))})
    client = world.client(is_near=True, uid=1001, gids=(7,))
    client.stream.send(encode(Update("u", "m", "/m.onnx")))
    assert world.refusals(client, 1) == [("u", "UNAVAILABLE")]
    assert world.model.grant == Grant(1001, (7,), ("/models",))
    world.close()


@pytest.mark.parametrize(
    ("message", "rights", "may_operate", "is_near", "code"),
    [
        (Events("e"), ("infer", "operate"), False, False, "PERMISSION_DENIED"),
        (Events("e"), ("status",), False, False, "UNAVAILABLE"),
        (Events("e"), ("infer",), True, False, "UNAVAILABLE"),
        (Logs("e", "m"), ("infer", "status"), False, True, "PERMISSION_DENIED"),
        (Logs("e", "m"), ("operate",), False, True, "UNAVAILABLE"),
        (Logs("e", "m"), ("infer",), True, True, "UNAVAILABLE"),
        (Logs("e", "m"), ("operate",), False, False, "PERMISSION_DENIED"),
        (Logs("e", "other"), ("operate",), False, True, "NOT_FOUND"),
        (Logs("e", "hidden"), ("operate",), False, True, "NOT_FOUND"),
    ],
)
def test_who_is_told_what_has_happened_and_what_processes_say(
    message: ClientMessage, rights: tuple[str, ...], may_operate: bool, is_near: bool, code: str
) -> None:
    def asked(*_: object) -> NoReturn:
        raise Unavailable("it was asked")

    world = World({"default": TenantConfig(may=rights, models=("m", "other"))})
    world.daemon.report_events = world.daemon.report_logs = asked
    world.models["hidden"] = world.model
    client = world.client(may_operate=may_operate, is_near=is_near)
    client.stream.send(encode(message))
    assert world.refusals(client, 1) == [("e", code)]
    world.close()


def test_what_is_too_long_is_refused_by_its_id_and_the_next_is_heard(world: World) -> None:
    world.memory_budget.max_bytes = 2**20
    client = world.client()
    asked = encode(Infer("long", RequestDescription("m", ())))
    too_long = bytes(limits.MAX_HEADER_BYTES + 1)
    for frames, request_id, place in (
        ([too_long], "", "envelope: "),
        ([asked[0], too_long, b"x"], "long", "description: "),
        ([b"\xc1", too_long], "", "description: "),
    ):
        client.stream.send(frames)
        world.until(lambda: client.stream.flush() and client.waits())
        error = client.error()
        assert (error.id, error.code) == (request_id, "INVALID_ARGUMENT")
        assert error.error.startswith(f"{place}expected at most 65536 bytes, got 65537")
    # No client may have so much, even if it is alone: in a frame the connection ends, see the connections' tests.
    half = bytes(world.memory_budget.max_bytes // 2 + 1)
    client.stream.send([*encode(Infer("wide", RequestDescription("m", ()))), half, half])
    world.until(lambda: client.stream.flush() and client.waits())
    error = client.error()
    assert (error.id, error.code) == ("wide", "INVALID_ARGUMENT")
    assert "(max_memory_bytes)" in error.error
    # There is room for the header, not for the rest beside what is kept already.
    world.ask(client, "good")
    world.until(lambda: world.model.ids == ["good"])
    client.stream.send([*encode(Infer("large", RequestDescription("m", ()))), bytes(2**20 - 1000)])
    world.until(lambda: client.stream.flush() and client.waits())
    assert world.refusals(client, 1) == [("large", "RESOURCE_EXHAUSTED")]
    world.ask(client, "next")
    world.until(lambda: world.model.ids == ["good", "next"])


# As long as a header may be, and its cost is that of 60,000 items where it is unpacked.
COSTLY = b"\x84" + encode(ServerReady("costly"))[0][1:] + b"\xa1x\xdc\xea\x60" + b"\x80" * 60_000


@pytest.mark.parametrize("config", [TenantConfig(max_rate=1.0), None], ids=["over its rate", "of no tenant"])
def test_a_message_that_is_not_heard_is_not_decoded(
    config: TenantConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World({"default": config} if config else {"nobody": TenantConfig()})
    world.memory_budget.max_bytes = 2**20
    client = world.client()
    world.ask(client, "first")
    world.until(lambda: world.model.waiting or client.waits())

    def decoded(*_: object) -> NoReturn:
        raise AssertionError

    monkeypatch.setattr(Decoder, "decode", decoded)
    client.stream.send([COSTLY])
    code = "RESOURCE_EXHAUSTED" if config else "UNAUTHENTICATED"
    if not config:
        assert world.refusals(client, 1) == [("first", code)]
    world.until(client.stream.flush)
    assert world.refusals(client, 1) == [("costly", code)]
    world.close()


def test_a_message_that_costs_too_much_to_decode_counts_for_the_rate() -> None:
    world = World({"default": TenantConfig(max_rate=1.0)})
    world.memory_budget.max_bytes = 2**20
    client = world.client()
    client.stream.send([COSTLY])
    world.until(client.stream.flush)
    world.ask(client, "next")
    assert world.refusals(client, 2) == [("costly", "INVALID_ARGUMENT"), ("next", "RESOURCE_EXHAUSTED")]
    world.close()


def test_a_description_has_no_more_items_than_the_signature_of_its_model_allows() -> None:
    world = World({"default": TenantConfig(models=("m",))})
    world.memory_budget.max_bytes = 2**20
    client = world.client()

    def refusal(name: str) -> Error:
        asked = RequestDescription(name, tuple(TensorSpec(f"x{each}", "UINT8", (0,)) for each in range(20)))
        client.stream.send([*encode(Infer(name, asked)), *[b""] * 20])
        world.until(client.waits)
        return client.error()

    world.models["hidden"] = world.model
    input_, output = TensorSignature("x", "UINT8", (-1,)), TensorSignature("y", "UINT8", (-1,))
    built = Built("", (input_,), (output,), (), "", 0)
    world.model.signature.built = built
    error = refusal("m")
    assert (error.id, error.code) == ("m", "INVALID_ARGUMENT")
    expected = f"infer: description: expected at most {max_request_items(1, 1)} items, got at least "
    assert error.error.startswith(expected)
    # Neither that it exists nor what it takes is told to who does not see it.
    for name in ("hidden", "none"):
        error = refusal(name)
        assert (error.id, error.code) == (name, "NOT_FOUND")
        assert error.error == f"no model '{name}'; there are: m"
    assert world.accounts.usage_of("default", "").refused["NOT_FOUND"] == 2
    world.model.signature.built = None
    asked = RequestDescription("m", (TensorSpec("x", "UINT8", (1,)),), ("o" * 250,) * 40)
    client.stream.send([*encode(Infer("while it loads", asked)), b"x"])
    world.until(lambda: world.model.ids == ["while it loads"])
    client.stream.send([encode(Infer("no name", asked))[0], msgpack.packb({"inputs": [], "model_name": "x" * 600})])
    world.until(client.waits)
    error = client.error()
    assert (error.id, error.code) == ("no name", "INVALID_ARGUMENT")
    assert error.error.startswith(
        "infer: description: expected model_name before lists and maps if longer than 512 bytes"
    )
    world.close()


def test_a_tenant_that_acts_for_others_names_models_that_it_does_not_see() -> None:
    world = World({"default": TenantConfig(acts_for=("b",), models=()), "b": TenantConfig()})
    world.memory_budget.max_bytes = 2**20
    client = world.client()
    asked = RequestDescription("m", (TensorSpec("x", "UINT8", (1,)),), ("o" * 250,) * 40)
    client.stream.send([*encode(Infer("7", asked, Parameters(tenant="b"))), b"x"])
    world.until(lambda: world.model.ids == ["7"])
    world.close()


def test_what_breaks_the_framing_is_told_without_an_id(world: World) -> None:
    client = world.client()
    client.stream.connection.send(b"GET / HTTP/1.1")
    world.until(client.waits)
    error = client.error()
    assert (error.id, error.code) == ("", "INVALID_ARGUMENT")
    assert error.error.startswith("frames: expected a message of 1 to 66 frames, got ")


def test_no_account_is_called_as_a_model_that_there_is_not_for_a_tenant() -> None:
    world = World({"default": TenantConfig(models=("other",))})
    client = world.client()
    world.ask(client, "hidden")
    client.stream.send(encode(Infer("unknown", RequestDescription("n", ()))))
    assert [code for _, code in world.refusals(client, 2)] == ["NOT_FOUND", "NOT_FOUND"]
    assert [model for model, _ in world.accounts.items("default")] == [""]
    assert world.accounts.usage_of("default", "").requests == 2
    world.close()


def test_what_is_refused_is_on_the_account_of_whom_it_was_asked_for() -> None:
    world = World({"default": TenantConfig(acts_for=("b",)), "b": TenantConfig(models=("other",), max_rate=1.0)})
    client = world.client()
    for number, tenant in enumerate(("b", "b", "c")):
        client.stream.send(encode(Infer(str(number), RequestDescription("m", ()), Parameters(tenant=tenant))))
    codes = [code for _, code in world.refusals(client, 3)]
    assert codes == ["NOT_FOUND", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED"]
    assert world.accounts.usage_of("b", "").refused == {"NOT_FOUND": 1, "max_rate": 1}
    assert world.accounts.usage_of("b", "").requests == 2
    assert world.accounts.total("default").refused == {"PERMISSION_DENIED": 1}
    world.close()


@pytest.mark.parametrize("config", [TenantConfig(max_rate=1.0), None])
def test_what_has_no_answer_has_none_where_it_is_not_heard_either(config: TenantConfig | None) -> None:
    world = World({"default": config} if config else {"nobody": TenantConfig()})
    client = world.client()
    world.ask(client, "first")
    for message in (Cancel("first"), Unregister("r", "0"), ServerReady("last")):
        client.stream.send(encode(message))
    ids = [request_id for request_id, _ in world.refusals(client, 1 if config else 2)]
    assert ids == (["last"] if config else ["first", "last"])
    assert world.model.ids == (["first"] if config else [])
    world.close()


def test_each_request_is_on_the_account_of_its_tenant_and_model(world: World) -> None:
    client = world.client()
    for name in ("wrong", "answered", "refused", "waits"):
        world.ask(client, name)
    client.stream.send(encode(Infer("unknown", RequestDescription("n", ()))))
    client.stream.send(encode(ModelMetadata("elsewhere", "n")))
    world.refusals(client, 3)
    answered, refused = world.model.waiting[:2]
    world.frontend.responses.reply_result(answered, PredictResult(1, ResponseDescription("m", ())), [bytes(7)])
    world.frontend.responses.reply_request_error(refused, InvalidArgument("as a test"))
    account = world.accounts.usage_of("default", "m")
    assert account is answered.usage
    assert (account.requests, account.served, account.in_flight) == (4, 1, 1)
    assert (account.bytes_in, account.bytes_out) == (3 * NBYTES, 7)
    assert account.refused == {"INVALID_ARGUMENT": 2}
    elsewhere = world.accounts.usage_of("default", "")
    assert (elsewhere.requests, elsewhere.refused) == (1, {"NOT_FOUND": 2})


def test_who_may_see_a_model_no_more_is_not_told_either_what_it_takes_once_that_is_known() -> None:
    world = World({"default": TenantConfig()})
    try:
        world.client().stream.send(encode(ModelMetadata("1", "m")))
        world.until(lambda: world.model.waiters)
        world.frontend.on_tenants_changed()
        assert world.model.turned_away == []
        world.tenants.configure({"default": TenantConfig(models=("n",))})
        world.frontend.on_tenants_changed()
        assert world.model.turned_away == ["1"]
    finally:
        world.close()
