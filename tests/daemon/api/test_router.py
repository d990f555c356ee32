"""Tests of the request router with real client connections and a fake model."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn, cast

import msgpack
import pytest

from testkit.no_channels import no_channels
from weightd_common.safe_open import OPERATOR, Grant
from weightd_common.stream import Stream
from weightd_daemon.api.admin import DaemonControl
from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.api.model_lookup import ModelLookup
from weightd_daemon.api.router import RequestRouter
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
    """Model that keeps its requests; the harness sets `router` before the first one."""

    name = "m"
    config = SimpleNamespace(timeout=30.0, default_level=1, priority_levels=2)

    def __init__(self) -> None:
        self.dispatcher = self
        self.loading = SimpleNamespace(is_unloaded=False, last_used_at=0.0)
        self.signature = SimpleNamespace(built=None)
        self.metadata = SimpleNamespace(request=self.request_metadata, reject=self.reject_metadata_requests)
        self.router: RequestRouter
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
            self.router.responses.reply_request_error(request, error)

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
    """Client end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self.stream = Stream(end)
        self._messages: list[Message] = []

    def has_message(self) -> bool:
        self._messages += self.stream.receive()
        return bool(self._messages)

    def error(self) -> Error:
        answer = decode(self._messages.pop(0).frames, TO_CLIENT)
        assert isinstance(answer, Error)
        return answer


class RouterHarness:
    """Request router with one fake model, a memory budget for three requests, and its clients."""

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
        self.router = RequestRouter(
            self.loop,
            ModelLookup(self.registry),
            self.memory_budget,
            DaemonControl(
                cast(Any, self.daemon),
                lambda on_done, is_dry_run: None,
                lambda numbers: None,
                cast(Any, None),
                lambda: None,
                no_channels(),
            ),
            max_shm_bytes=0,
            user_limits=UserConnectionLimits(),
            authorizer=Authorizer(self.tenants, self.accounts, {}),
        )
        self.model.router = self.router

    def _user_of(self, client: bytes) -> str:
        return self.router.user_of(client)

    def client(
        self, *, may_operate: bool = False, is_direct: bool = False, uid: int | None = None, gids: tuple[int, ...] = ()
    ) -> Peer:
        ours, theirs = socket.socketpair()
        peer_name = f"process {len(self._peers)}"
        credential = PeerCredential(uid, gids, is_operator=may_operate)
        self.router.adopt(
            ours, ClientIdentity(ClientOrigin(peer_name, peer_name), is_direct=is_direct, credential=credential)
        )
        self._peers.append(Peer(theirs))
        return self._peers[-1]

    def close(self) -> None:
        for each in self._peers:
            each.stream.close()
        self.router.close()
        self.loop.close()

    def ask(self, client: Peer, request_id: str) -> None:
        sent = RequestDescription("m", (TensorSpec("x", "UINT8", (NBYTES,)),))
        client.stream.send([*encode(Infer(request_id, sent)), bytes(NBYTES)])

    def until(self, check: Callable[[], object]) -> None:
        for _ in range(int(LIMIT_S / 0.05)):
            if check():
                return
            self.loop.run_once(0.05)
        raise TimeoutError

    def refusals(self, client: Peer, count: int) -> list[tuple[str, str]]:
        """Return id and code of the next `count` errors that the client receives."""
        errors: list[tuple[str, str]] = []
        for _ in range(count):
            self.until(client.has_message)
            error = client.error()
            errors.append((error.id, error.code))
        return errors


def test_router_handles_every_client_message(harness: RouterHarness) -> None:
    assert {*vars(harness.router)["_handlers"]} == {*FROM_CLIENT.values()}


@pytest.fixture
def harness() -> Iterator[RouterHarness]:
    created = RouterHarness()
    yield created
    created.close()


@pytest.mark.parametrize(("priority", "level"), [(None, 0), (0, 0), (1, 0), (2, 1), (3, None)])
def test_request_gets_priority_level_of_model(harness: RouterHarness, priority: int | None, level: int | None) -> None:
    client = harness.client()
    sent = Infer("x", RequestDescription("m", ()), Parameters(priority=priority))
    client.stream.send(encode(sent))
    if level is None:
        assert harness.refusals(client, 1) == [("x", "INVALID_ARGUMENT")]
    else:
        harness.until(lambda: harness.model.waiting)
        assert [each.priority_level for each in harness.model.waiting] == [level]


def test_memory_pressure_rejects_largest_user_first(harness: RouterHarness) -> None:
    greedy, other = harness.client(), harness.client()
    for number in range(4):
        harness.ask(greedy, f"g{number}")
        harness.until(lambda: harness.model.ids == ["g0", "g1", "g2"][: number + 1])  # noqa: B023
    # The client that uses the most memory is the sender itself.
    assert harness.refusals(greedy, 1) == [("g3", "RESOURCE_EXHAUSTED")]
    harness.ask(other, "o0")
    harness.until(lambda: harness.model.ids == ["o0"])
    assert harness.refusals(greedy, 3) == [(f"g{number}", "RESOURCE_EXHAUSTED") for number in range(3)]
    assert harness.memory_budget.used_bytes == harness.model.waiting[0].buffered_bytes


def test_partial_results_count_for_memory_of_request(harness: RouterHarness) -> None:
    harness.ask(harness.client(), "in parts")
    harness.until(lambda: harness.model.waiting)
    [request] = harness.model.waiting
    harness.router.responses.reserve_partial_result(request, NBYTES)
    with pytest.raises(ResourceExhausted, match="max_memory_bytes"):
        harness.router.responses.reserve_partial_result(request, harness.memory_budget.max_bytes)
    assert harness.memory_budget.used_bytes == request.buffered_bytes > 2 * NBYTES
    harness.router.responses.reply_request_error(request, InvalidArgument("it is wrong"))
    assert harness.memory_budget.used_bytes == 0


def test_connection_is_busy_while_requests_are_pending(harness: RouterHarness) -> None:
    client = harness.client()
    [connection] = harness.router._connections  # pyright: ignore[reportPrivateUsage]
    for count, name in enumerate(("answered", "refused", "wrong")):
        harness.ask(client, name)
        harness.until(lambda: len(harness.model.waiting) == count + 1 or client.has_message())  # noqa: B023
    counts = [connection.pending_requests]
    harness.router.responses.reply_result(harness.model.waiting[0], PredictResult(1, ResponseDescription("m", ())), ())
    counts.append(connection.pending_requests)
    harness.router.responses.reply_request_error(harness.model.waiting[1], InvalidArgument("as a test"))
    counts.append(connection.pending_requests)
    assert counts == [2, 1, 0]
    assert not connection.is_busy


def test_frees_memory_of_completed_requests(harness: RouterHarness) -> None:
    client = harness.client()
    harness.ask(client, "answered")
    harness.ask(client, "refused")
    harness.until(lambda: len(harness.model.waiting) == 2)
    harness.router.responses.reply_result(harness.model.waiting[0], PredictResult(1, ResponseDescription("m", ())), ())
    harness.router.responses.reply_request_error(harness.model.waiting[1], InvalidArgument("as a test"))
    harness.ask(client, "wrong")
    harness.until(client.has_message)
    assert harness.memory_budget.used_bytes == 0
    harness.ask(client, "kept")
    harness.until(lambda: "kept" in harness.model.ids)
    assert harness.memory_budget.used_bytes > 0
    client.stream.close()
    harness.until(lambda: not harness.memory_budget.used_bytes)


@pytest.mark.parametrize(
    ("may_operate", "path", "code"),
    [
        (False, "/m.onnx", "PERMISSION_DENIED"),
        (True, "m.onnx", "INVALID_ARGUMENT"),
        (True, "/m.onnx\0", "INVALID_ARGUMENT"),
        (True, "/m.onnx", "UNAVAILABLE"),
    ],
)
def test_update_requires_operator_and_absolute_path(
    harness: RouterHarness, may_operate: bool, path: str, code: str
) -> None:
    client = harness.client(may_operate=may_operate)
    client.stream.send(encode(Update("u", "m", path)))
    assert harness.refusals(client, 1) == [("u", code)]
    if code == "UNAVAILABLE":
        assert harness.model.grant == OPERATOR


def audited(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "weightd.audit"]


def test_audit_log_records_denied_operations(caplog: pytest.LogCaptureFixture) -> None:
    harness = RouterHarness({"ann": TenantConfig(user_ids=(1001,), may=("status",))})
    client, unknown_client = harness.client(is_direct=True, uid=1001), harness.client(is_direct=True, uid=1002)
    for message in (Update("u", "m\n", "/m.onnx"), Infer("i", RequestDescription("m", ())), Reload("r")):
        client.stream.send(encode(message))
        assert [code for _, code in harness.refusals(client, 1)] == ["PERMISSION_DENIED"]
    unknown_client.stream.send(encode(ServerReady("s")))
    assert [code for _, code in harness.refusals(unknown_client, 1)] == ["UNAUTHENTICATED"]
    first, second = audited(caplog)
    begin = 'audit action="update" result="refused" user="process 0" tenant="ann" model="m\\n" path="/m.onnx" detail="'
    assert first.startswith(begin)
    assert second.startswith('audit action="server_ready" result="refused" user="process 1" detail="')
    harness.close()


def test_audit_log_records_update_on_completion(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    harness = RouterHarness()
    begun: list[str] = []
    client = harness.client(may_operate=True, is_direct=True)
    harness.model.update = lambda client, request_id, *_, **__: begun.append(request_id)  # type: ignore[method-assign]
    for request_id in ("one", "two", "two"):
        client.stream.send(encode(Update(request_id, "m", "/m.onnx")))
    # The audit log also records a request that reuses the id of a pending update.
    assert harness.refusals(client, 1) == [("two", "INVALID_ARGUMENT")]
    assert begun == ["one", "two"]
    [key] = {key for key, _ in harness.router.admin._pending_operations}
    harness.router.admin.reply_updated(key, UpdateResponse("one", "m", (1,), "/m.onnx", "", "/old.onnx"))
    harness.router.admin.reply_failed(key, "two", Unavailable("not updated: no room"))
    assert re.findall(r'result="(\w+)"', "".join(audited(caplog))) == ["refused", "ok", "failed"]
    assert audited(caplog)[2].endswith('path="/m.onnx" detail="not updated: no room"')
    assert not harness.router.admin._pending_operations
    harness.close()


def test_update_uses_file_grant_of_tenant() -> None:
    harness = RouterHarness({"default": TenantConfig(may=("operate",), model_directories=("/models",))})
    client = harness.client(is_direct=True, uid=1001, gids=(7,))
    client.stream.send(encode(Update("u", "m", "/m.onnx")))
    assert harness.refusals(client, 1) == [("u", "UNAVAILABLE")]
    assert harness.model.grant == Grant(1001, (7,), ("/models",))
    harness.close()


@pytest.mark.parametrize(
    ("message", "rights", "may_operate", "is_direct", "code"),
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
def test_events_and_logs_require_rights(
    message: ClientMessage, rights: tuple[str, ...], may_operate: bool, is_direct: bool, code: str
) -> None:
    def sent(*_: object) -> NoReturn:
        raise Unavailable("the daemon was called")

    harness = RouterHarness({"default": TenantConfig(may=rights, models=("m", "other"))})
    harness.daemon.report_events = harness.daemon.report_logs = sent
    harness.models["hidden"] = harness.model
    client = harness.client(may_operate=may_operate, is_direct=is_direct)
    client.stream.send(encode(message))
    assert harness.refusals(client, 1) == [("e", code)]
    harness.close()


def test_rejects_oversized_message_and_reads_next(harness: RouterHarness) -> None:
    harness.memory_budget.max_bytes = 2**20
    client = harness.client()
    sent = encode(Infer("long", RequestDescription("m", ())))
    too_long = bytes(limits.MAX_HEADER_BYTES + 1)
    for frames, request_id, place in (
        ([too_long], "", "envelope: "),
        ([sent[0], too_long, b"x"], "long", "description: "),
        ([b"\xc1", too_long], "", "description: "),
    ):
        client.stream.send(frames)
        harness.until(lambda: client.stream.flush() and client.has_message())
        error = client.error()
        assert (error.id, error.code) == (request_id, "INVALID_ARGUMENT")
        assert error.error.startswith(f"{place}expected at most 65536 bytes, got 65537")
    # The message exceeds the budget of one client even without other clients. A single frame of this size ends the
    # connection; the tests of the connections cover that.
    half = bytes(harness.memory_budget.max_bytes // 2 + 1)
    client.stream.send([*encode(Infer("wide", RequestDescription("m", ()))), half, half])
    harness.until(lambda: client.stream.flush() and client.has_message())
    error = client.error()
    assert (error.id, error.code) == ("wide", "INVALID_ARGUMENT")
    assert "(max_memory_bytes)" in error.error
    # The budget has room for the header, but not for the body beside the request that the model keeps.
    harness.ask(client, "good")
    harness.until(lambda: harness.model.ids == ["good"])
    client.stream.send([*encode(Infer("large", RequestDescription("m", ()))), bytes(2**20 - 1000)])
    harness.until(lambda: client.stream.flush() and client.has_message())
    assert harness.refusals(client, 1) == [("large", "RESOURCE_EXHAUSTED")]
    harness.ask(client, "next")
    harness.until(lambda: harness.model.ids == ["good", "next"])


# Has the maximum length of a header; unpacking it costs as much as 60,000 items.
COSTLY = b"\x84" + encode(ServerReady("costly"))[0][1:] + b"\xa1x\xdc\xea\x60" + b"\x80" * 60_000


@pytest.mark.parametrize("config", [TenantConfig(max_rate=1.0), None], ids=["rate limit", "no tenant"])
def test_rejected_message_is_not_decoded(config: TenantConfig | None, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = RouterHarness({"default": config} if config else {"nobody": TenantConfig()})
    harness.memory_budget.max_bytes = 2**20
    client = harness.client()
    harness.ask(client, "first")
    harness.until(lambda: harness.model.waiting or client.has_message())

    def decoded(*_: object) -> NoReturn:
        raise AssertionError

    monkeypatch.setattr(Decoder, "decode", decoded)
    client.stream.send([COSTLY])
    code = "RESOURCE_EXHAUSTED" if config else "UNAUTHENTICATED"
    if not config:
        assert harness.refusals(client, 1) == [("first", code)]
    harness.until(client.stream.flush)
    assert harness.refusals(client, 1) == [("costly", code)]
    harness.close()


def test_message_too_costly_to_decode_counts_for_rate() -> None:
    harness = RouterHarness({"default": TenantConfig(max_rate=1.0)})
    harness.memory_budget.max_bytes = 2**20
    client = harness.client()
    client.stream.send([COSTLY])
    harness.until(client.stream.flush)
    harness.ask(client, "next")
    assert harness.refusals(client, 2) == [("costly", "INVALID_ARGUMENT"), ("next", "RESOURCE_EXHAUSTED")]
    harness.close()


def test_description_items_are_limited_by_signature() -> None:
    harness = RouterHarness({"default": TenantConfig(models=("m",))})
    harness.memory_budget.max_bytes = 2**20
    client = harness.client()

    def refusal(name: str) -> Error:
        sent = RequestDescription(name, tuple(TensorSpec(f"x{each}", "UINT8", (0,)) for each in range(20)))
        client.stream.send([*encode(Infer(name, sent)), *[b""] * 20])
        harness.until(client.has_message)
        return client.error()

    harness.models["hidden"] = harness.model
    input_, output = TensorSignature("x", "UINT8", (-1,)), TensorSignature("y", "UINT8", (-1,))
    built = Built("", (input_,), (output,), (), "", 0)
    harness.model.signature.built = built
    error = refusal("m")
    assert (error.id, error.code) == ("m", "INVALID_ARGUMENT")
    expected = f"infer: description: expected at most {max_request_items(1, 1)} items, got at least "
    assert error.error.startswith(expected)
    # A client without access to a model learns neither whether the model exists nor its signature.
    for name in ("hidden", "none"):
        error = refusal(name)
        assert (error.id, error.code) == (name, "NOT_FOUND")
        assert error.error == f"no model '{name}'; there are: m"
    assert harness.accounts.usage_of("default", "").refused["NOT_FOUND"] == 2
    harness.model.signature.built = None
    sent = RequestDescription("m", (TensorSpec("x", "UINT8", (1,)),), ("o" * 250,) * 40)
    client.stream.send([*encode(Infer("while it loads", sent)), b"x"])
    harness.until(lambda: harness.model.ids == ["while it loads"])
    client.stream.send([encode(Infer("no name", sent))[0], msgpack.packb({"inputs": [], "model_name": "x" * 600})])
    harness.until(client.has_message)
    error = client.error()
    assert (error.id, error.code) == ("no name", "INVALID_ARGUMENT")
    assert error.error.startswith(
        "infer: description: expected model_name before lists and maps if longer than 512 bytes"
    )
    harness.close()


def test_tenant_may_name_models_of_represented_tenant() -> None:
    harness = RouterHarness({"default": TenantConfig(acts_for=("b",), models=()), "b": TenantConfig()})
    harness.memory_budget.max_bytes = 2**20
    client = harness.client()
    sent = RequestDescription("m", (TensorSpec("x", "UINT8", (1,)),), ("o" * 250,) * 40)
    client.stream.send([*encode(Infer("7", sent, Parameters(tenant="b"))), b"x"])
    harness.until(lambda: harness.model.ids == ["7"])
    harness.close()


def test_framing_error_has_no_request_id(harness: RouterHarness) -> None:
    client = harness.client()
    client.stream.connection.send(b"GET / HTTP/1.1")
    harness.until(client.has_message)
    error = client.error()
    assert (error.id, error.code) == ("", "INVALID_ARGUMENT")
    assert error.error.startswith("frames: expected a message of 1 to 66 frames, got ")


def test_models_hidden_from_tenant_have_no_usage_record() -> None:
    harness = RouterHarness({"default": TenantConfig(models=("other",))})
    client = harness.client()
    harness.ask(client, "hidden")
    client.stream.send(encode(Infer("unknown", RequestDescription("n", ()))))
    assert [code for _, code in harness.refusals(client, 2)] == ["NOT_FOUND", "NOT_FOUND"]
    assert [model for model, _ in harness.accounts.items("default")] == [""]
    assert harness.accounts.usage_of("default", "").requests == 2
    harness.close()


def test_rejection_counts_for_represented_tenant() -> None:
    harness = RouterHarness(
        {"default": TenantConfig(acts_for=("b",)), "b": TenantConfig(models=("other",), max_rate=1.0)}
    )
    client = harness.client()
    for number, tenant in enumerate(("b", "b", "c")):
        client.stream.send(encode(Infer(str(number), RequestDescription("m", ()), Parameters(tenant=tenant))))
    codes = [code for _, code in harness.refusals(client, 3)]
    assert codes == ["NOT_FOUND", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED"]
    assert harness.accounts.usage_of("b", "").refused == {"NOT_FOUND": 1, "max_rate": 1}
    assert harness.accounts.usage_of("b", "").requests == 2
    assert harness.accounts.total("default").refused == {"PERMISSION_DENIED": 1}
    harness.close()


@pytest.mark.parametrize("config", [TenantConfig(max_rate=1.0), None])
def test_messages_without_reply_get_none_when_rejected(config: TenantConfig | None) -> None:
    harness = RouterHarness({"default": config} if config else {"nobody": TenantConfig()})
    client = harness.client()
    harness.ask(client, "first")
    for message in (Cancel("first"), Unregister("r", "0"), ServerReady("last")):
        client.stream.send(encode(message))
    ids = [request_id for request_id, _ in harness.refusals(client, 1 if config else 2)]
    assert ids == (["last"] if config else ["first", "last"])
    assert harness.model.ids == (["first"] if config else [])
    harness.close()


def test_usage_is_counted_per_tenant_and_model(harness: RouterHarness) -> None:
    client = harness.client()
    for name in ("wrong", "answered", "refused", "pending"):
        harness.ask(client, name)
    client.stream.send(encode(Infer("unknown", RequestDescription("n", ()))))
    client.stream.send(encode(ModelMetadata("elsewhere", "n")))
    harness.refusals(client, 3)
    answered, refused = harness.model.waiting[:2]
    harness.router.responses.reply_result(answered, PredictResult(1, ResponseDescription("m", ())), [bytes(7)])
    harness.router.responses.reply_request_error(refused, InvalidArgument("as a test"))
    account = harness.accounts.usage_of("default", "m")
    assert account is answered.usage
    assert (account.requests, account.served, account.in_flight) == (4, 1, 1)
    assert (account.bytes_in, account.bytes_out) == (3 * NBYTES, 7)
    assert account.refused == {"INVALID_ARGUMENT": 2}
    elsewhere = harness.accounts.usage_of("default", "")
    assert (elsewhere.requests, elsewhere.refused) == (1, {"NOT_FOUND": 2})


def test_rejects_metadata_request_after_loss_of_access() -> None:
    harness = RouterHarness({"default": TenantConfig()})
    try:
        harness.client().stream.send(encode(ModelMetadata("1", "m")))
        harness.until(lambda: harness.model.waiters)
        harness.router.on_tenants_changed()
        assert harness.model.turned_away == []
        harness.tenants.configure({"default": TenantConfig(models=("n",))})
        harness.router.on_tenants_changed()
        assert harness.model.turned_away == ["1"]
    finally:
        harness.close()
