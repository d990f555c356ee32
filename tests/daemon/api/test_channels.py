"""Which clients may open a direct channel, and the tenant of a request that comes back from one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.api.channels import ChannelApi, adopt
from weightd_daemon.channels.sockets import ChannelOwner
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.scheduling.request import ClientOrigin
from weightd_daemon.tenants.tenant import PeerCredential, Tenant, TenantResolver
from weightd_daemon.tenants.usage import Usage, UsageTable
from weightd_daemon.transport.connection import ClientConnection, ClientIdentity
from weightd_protocol.codec import decode, encode
from weightd_protocol.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    RemoteProtocolError,
    RequestError,
    Unauthenticated,
    Unavailable,
)
from weightd_protocol.framing import Message
from weightd_protocol.messages.channels import FROM_CHANNEL, OpenChannel
from weightd_protocol.messages.control import ServerReady
from weightd_protocol.messages.inference import Infer, Parameters, RequestDescription, TensorSpec

DESCRIPTION = RequestDescription("m", (TensorSpec("x", "UINT8", (3,)),))


def message_of(*frames: bytes) -> Message:
    return Message(frames, tuple(map(len, frames)))


def owner_of(named_tenant: str | None = None) -> ChannelOwner:
    tenant = Tenant("t", TenantConfig())
    return ChannelOwner(b"c", "1", "m", ClientOrigin("pid 7", "uid 1"), tenant, Usage(), named_tenant)


def test_request_gets_the_tenant_and_the_time_that_is_left() -> None:
    infer = Infer("1", DESCRIPTION, Parameters(timeout_us=10**9, tenant="another"))
    found = adopt(message_of(*encode(infer), b"abc"), owner_of("t"), 7)
    assert decode(found.frames, FROM_CHANNEL) == Infer("1", DESCRIPTION, Parameters(timeout_us=7, tenant="t"))
    assert (found.frames[2], found.lengths) == (b"abc", tuple(map(len, found.frames)))


@pytest.mark.parametrize(
    ("message", "left_us", "error"),
    [
        (ServerReady("1"), 7, RemoteProtocolError),
        (Infer("1", RequestDescription("other", DESCRIPTION.inputs)), 7, InvalidArgument),
        (Infer("1", DESCRIPTION), 0, DeadlineExceeded),
    ],
    ids=["another-type", "another-model", "late"],
)
def test_adopts_only_requests_to_the_model_in_time(message: Any, left_us: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        adopt(message_of(*encode(message), b"abc"), owner_of(), left_us)


ANN, BOB = TenantConfig(user_ids=(1,), models=("m",)), TenantConfig(user_ids=(2,))


class Daemon:
    """The API of direct channels, with two models and a service that keeps the owners of the channels."""

    def __init__(self, **tenants: TenantConfig) -> None:
        self.owners: list[ChannelOwner] = []
        self.refusal: RequestError | None = None
        isolator = SimpleNamespace(check_direct=self._check_direct)
        self.registry = SimpleNamespace(
            models={
                name: SimpleNamespace(name=name, dispatcher=SimpleNamespace(isolator=isolator)) for name in ("m", "n")
            },
            is_closed=False,
        )
        usage_table = UsageTable()
        self.authorizer = Authorizer(TenantResolver(tenants), usage_table, {})
        service: Any = SimpleNamespace(by_client={}, open=lambda owner, now: self.owners.append(owner))
        lookup: Any = SimpleNamespace(registry=self.registry)
        self.api = ChannelApi(service, lookup, self.authorizer, usage_table, cast(Any, None), mock.Mock(), mock.Mock())

    def _check_direct(self, *_: object) -> None:
        if self.refusal is not None:
            raise self.refusal

    def open(
        self, uid: int = 1, model: str = "m", tenant: str | None = None, *, is_direct: bool = True
    ) -> ChannelOwner:
        """Open a channel for a client of a user; return for whom it was opened."""
        identity = ClientIdentity(ClientOrigin("pid 7", f"uid {uid}"), is_direct, PeerCredential(uid), "")
        connection = ClientConnection(b"c", mock.Mock(), identity, 0.0)
        assert self.authorizer.assign_tenant(connection) is None
        self.api.on_open_channel(connection, OpenChannel("1", model, tenant), (), 0.0)
        return self.owners.pop()


def test_channel_belongs_to_the_tenant_of_its_client() -> None:
    daemon = Daemon(ann=ANN, bob=BOB)
    owner = daemon.open(uid=1)
    assert (owner.tenant.name, owner.origin.principal, owner.model) == ("ann", "tenant ann", "m")
    assert daemon.open(uid=2, model="n").tenant.name == "bob"


@pytest.mark.parametrize(
    ("request_for", "error"),
    [
        ({"uid": 3}, Unauthenticated),
        ({"uid": 1, "model": "n"}, FailedPrecondition),
        ({"uid": 1, "model": "missing"}, FailedPrecondition),
        ({"uid": 1, "tenant": "bob"}, PermissionDenied),
        ({"uid": 1, "is_direct": False}, InvalidArgument),
    ],
    ids=["unknown-user", "hidden-model", "missing-model", "another-tenant", "proxy"],
)
def test_client_without_the_right_gets_no_channel(request_for: Any, error: type[RequestError]) -> None:
    daemon = Daemon(ann=ANN, bob=BOB)
    with pytest.raises(error):
        daemon.open(**request_for)
    assert daemon.owners == []


def test_hidden_and_missing_models_get_the_same_error() -> None:
    texts: set[str] = set()
    for model in ("n", "missing"):
        with pytest.raises(FailedPrecondition) as caught:
            Daemon(ann=ANN).open(model=model)
        texts.add(str(caught.value))
    assert len(texts) == 1


@pytest.mark.parametrize("quota", ["max_rate", "max_in_flight", "max_queue", "max_queue_bytes", "max_rows"])
def test_tenant_with_limits_of_requests_gets_no_channel(quota: str) -> None:
    ann = TenantConfig(user_ids=(1,), **cast(Any, {quota: 5}))
    with pytest.raises(FailedPrecondition, match=f"has {quota}"):
        Daemon(ann=ann).open()


def test_tenant_without_infer_gets_no_channel() -> None:
    with pytest.raises(PermissionDenied, match='"infer"'):
        Daemon(ann=TenantConfig(user_ids=(1,), may=("status",))).open()


def test_no_channel_while_requests_must_be_checked_or_weightd_stops() -> None:
    daemon = Daemon()
    daemon.refusal = FailedPrecondition("crashed")
    with pytest.raises(FailedPrecondition, match="crashed"):
        daemon.open()
    daemon.refusal = None
    daemon.registry.is_closed = True
    with pytest.raises(Unavailable, match="stopping"):
        daemon.open()
