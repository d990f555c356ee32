from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from unittest import mock

import pytest

from weightd_common.safe_open import OPERATOR, Grant
from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.config.tenants import RIGHTS, TenantConfig
from weightd_daemon.platform.connection_limiter import NO_TENANT
from weightd_daemon.scheduling.request import ClientOrigin, Request
from weightd_daemon.tenants.tenant import PeerCredential, TenantResolver
from weightd_daemon.tenants.usage import QuotaExceeded, UsageTable
from weightd_daemon.transport.connection import ClientConnection, ClientIdentity
from weightd_protocol.errors import PermissionDenied, RequestError

KEY = "k" * 40

ANN = TenantConfig(user_ids=(1001,), public_keys=(KEY,))
GATEWAY = TenantConfig(user_ids=(1002,), acts_for=("an?",))
STAFF = TenantConfig(user_ids=(1003,), may=RIGHTS)
TABLES = {"ann": ANN, "gateway": GATEWAY, "staff": STAFF}


def access(tables: Mapping[str, TenantConfig], admitted: Mapping[str, Sequence[str]] | None = None) -> Authorizer:
    return Authorizer(TenantResolver(tables), UsageTable(), admitted or {})


def comes(there: Authorizer, proof: PeerCredential, listener: str = "", *, near: bool = True) -> ClientConnection:
    who = f"uid {proof.uid}" if proof.uid is not None else "host 192.0.2.1"
    connection = ClientConnection(
        b"1", mock.Mock(), ClientIdentity(ClientOrigin("pid 7", who), near, proof, listener), 0.0
    )
    assert there.assign_tenant(connection) is None
    return connection


@pytest.mark.parametrize(
    ("proof", "text"),
    [
        (
            PeerCredential(65534),
            "UNAUTHENTICATED: the kernel reports uid 65534: a user namespace hides the client's user",
        ),
        (
            PeerCredential(4242, (4242,)),
            "UNAUTHENTICATED: uid 4242 belongs to no tenant: the operator must add its user to `uids`",
        ),
        (
            PeerCredential(key="x" * 40),
            f"UNAUTHENTICATED: key {'x' * 40} belongs to no tenant: the operator must add its public key",
        ),
        (PeerCredential(), "UNAUTHENTICATED: host 192.0.2.1 belongs to no tenant: the operator must add"),
    ],
)
def test_who_is_nobody_is_told_how_it_could_be_somebody(proof: PeerCredential, text: str) -> None:
    there = access(TABLES)
    stranger = comes(there, proof)
    assert stranger.tenant is None
    for name in (None, "ann"):
        with pytest.raises(RequestError) as told:
            there.resolve_tenant(stranger, name)
        assert f"{told.value.code}: {told.value}".startswith(text)
    with pytest.raises(RequestError):
        there.resolve_viewer(stranger)
    with pytest.raises(PermissionDenied):
        there.check_operator(stranger, "update")


def test_a_listener_is_for_those_alone_whom_it_admits() -> None:
    there = access(TABLES, {"lan": ("ann",)})
    assert comes(there, PeerCredential(key=KEY), "lan").tenant is there.tenants.get("ann")
    assert comes(there, PeerCredential(1002)).tenant is there.tenants.get("gateway")
    refused = comes(there, PeerCredential(1002), "lan")
    with pytest.raises(PermissionDenied, match="listener lan is not for tenant gateway"):
        there.resolve_tenant(refused, None)


def test_only_for_whom_it_acts_does_a_tenant_ask_and_it_learns_no_names() -> None:
    there = access(TABLES)
    gateway, ann = comes(there, PeerCredential(1002)), comes(there, PeerCredential(1001))
    of_ann = there.resolve_tenant(gateway, "ann")
    assert of_ann is ann.tenant
    assert there.resolve_tenant(gateway, "gateway") is there.resolve_tenant(gateway, None) is gateway.tenant
    # What ann's requests do through a gateway is ann's; what one of them does is told apart from her own.
    assert there.authorize_infer(gateway, "ann", 0.0)[1].principal == ann.origin.principal == "tenant ann"
    for asks, name in ((gateway, "staff"), (gateway, "none"), (ann, "gateway")):
        with pytest.raises(PermissionDenied, match=rf"does not act for '{name}' \(acts_for\)$"):
            there.resolve_tenant(asks, name)


def test_who_asks_for_another_sees_what_that_one_does() -> None:
    there = access({**TABLES, "gateway": TenantConfig(user_ids=(1002,), may=RIGHTS, acts_for=("ann", "staff"))})
    gateway, root = comes(there, PeerCredential(1002)), comes(there, PeerCredential(1003, is_operator=True))
    assert there.resolve_viewer(gateway) == (gateway.tenant, True)
    assert there.resolve_viewer(gateway, "ann") == (there.tenants.get("ann"), False)
    assert there.resolve_viewer(gateway, "staff") == (there.tenants.get("staff"), True)
    assert there.resolve_viewer(root) == (there.tenants.operators, True)
    assert there.resolve_viewer(root, "staff") == (there.tenants.get("staff"), True)
    with pytest.raises(PermissionDenied, match="does not act for 'ann'"):
        there.resolve_viewer(root, "ann")


def test_who_operates() -> None:
    there = access(TABLES)
    root = PeerCredential(0, is_operator=True)
    for proof in (PeerCredential(1003), root):
        there.check_operator(comes(there, proof), "update")
    for other in (comes(there, PeerCredential(1001)), comes(there, PeerCredential(1003), "lan", near=False)):
        with pytest.raises(PermissionDenied, match=r'only a tenant that may "operate".* may update.*unix socket$'):
            there.check_operator(other, "update")
    alone = access({})
    alone.check_operator(comes(alone, root), "update")
    with pytest.raises(PermissionDenied, match="only the user that weightd runs as, and root, may update"):
        alone.check_operator(comes(alone, PeerCredential(1001)), "update")


def test_who_reloads_operates_every_model() -> None:
    some = TenantConfig(user_ids=(1001,), may=RIGHTS, models=("a*", "b"))
    there = access({"ann": some, "staff": TenantConfig(user_ids=(1003,), may=RIGHTS)})
    for proof in (PeerCredential(1003), PeerCredential(0, is_operator=True), PeerCredential(1001, is_operator=True)):
        there.check_reload(comes(there, proof))
    with pytest.raises(
        PermissionDenied, match=r'tenant ann may not reload .* expected "\*" in its `models`, got a\*, b$'
    ):
        there.check_reload(comes(there, PeerCredential(1001)))
    with pytest.raises(PermissionDenied, match="on the daemon's unix socket"):
        there.check_reload(comes(there, PeerCredential(1003), "lan", near=False))


def test_files_are_named_by_the_right_of_the_user_or_by_that_of_the_operator() -> None:
    there = access({"ann": TenantConfig(user_ids=(1001,), may=RIGHTS, model_directories=("/models/ann",))})
    assert there.file_grant(comes(there, PeerCredential(1001, (5, 6)))) == Grant(1001, (5, 6), ("/models/ann",))
    assert there.file_grant(comes(there, PeerCredential(1001, (5, 6), is_operator=True))) == OPERATOR
    # Of whom nothing is known, nobody has a right.
    assert there.file_grant(comes(there, PeerCredential())) == Grant(65534)


def test_one_connection_too_many_counts_until_it_leaves() -> None:
    there = access({"ann": TenantConfig(user_ids=(1001,), max_connections=1)})
    first = comes(there, PeerCredential(1001))
    second = ClientConnection(b"2", mock.Mock(), first.identity, 0.0)
    assert isinstance(there.assign_tenant(second), QuotaExceeded)
    there.remove_connection(second)
    there.remove_connection(first)
    comes(there, PeerCredential(1001))


def test_who_is_somebody_else_by_now_counts_there_alone() -> None:
    there = access({})
    [everyone] = there.tenants
    before = everyone.quota.connections
    ann, gateway = comes(there, PeerCredential(1001)), comes(there, PeerCredential(1002))
    assert everyone.quota.connections == before + 2
    there.tenants.configure({"ann": ANN})
    for each in (ann, gateway):
        there.assign_tenant(each)
    assert (ann.user, gateway.user) == ("tenant ann", NO_TENANT)
    assert everyone.quota.connections == before
    there.tenants.configure({"gateway": GATEWAY})
    for each in (ann, gateway):
        there.assign_tenant(each)
    assert (ann.user, gateway.user) == (NO_TENANT, "tenant gateway")


def asked(there: Authorizer, client: ClientConnection, name: str | None = None) -> Request:
    described = SimpleNamespace(model_name="m")
    tenant = there.resolve_tenant(client, name)
    return mock.Mock(spec=Request, client=client.key, tenant=tenant, description=described)


@pytest.mark.parametrize(
    ("tables", "own", "others"),
    [
        (TABLES, False, False),
        ({"ann": ANN, "staff": STAFF}, True, True),
        ({**TABLES, "gateway": TenantConfig(user_ids=(1002,))}, False, True),
        ({**TABLES, "gateway": TenantConfig(user_ids=(1002,), acts_for=("ann",), may=())}, True, False),
        ({**TABLES, "ann": TenantConfig(user_ids=(1001,), may=())}, False, True),
        ({**TABLES, "ann": TenantConfig(user_ids=(1001,), models=("other",))}, False, True),
        ({"gateway": GATEWAY}, False, True),
    ],
)
def test_what_a_reload_takes_away_is_what_waits_of_it(
    tables: Mapping[str, TenantConfig], own: bool, others: bool
) -> None:
    there = access(TABLES)
    gateway = comes(there, PeerCredential(1002))
    requests = asked(there, gateway), asked(there, gateway, "ann")
    before = {gateway.key: gateway.tenant}
    there.tenants.configure(tables)
    there.assign_tenant(gateway)
    may_not = there.revocation_filter(lambda key: gateway if key == gateway.key else None, before)
    assert [may_not(each) for each in requests] == [own, others]
    gone = there.revocation_filter(lambda _: None, before)
    assert [gone(each) for each in requests] == [True, True]


def test_all_users_of_no_tenant_are_one_owner_and_one_account() -> None:
    there = access(TABLES, {"lan": ("ann",)})

    def owner(proof: PeerCredential, far: str) -> str:
        return there.limit_account_of(ClientIdentity(ClientOrigin("pid 7", far), is_direct=True, credential=proof))

    strangers = [PeerCredential(uid) for uid in (100_000, 100_001, 65534)]
    assert {owner(each, f"uid {each.uid}") for each in strangers} == {NO_TENANT}
    assert {
        each.tenant_name for each in (*(comes(there, each) for each in strangers), comes(there, PeerCredential()))
    } == {NO_TENANT}
    # Nor is one a tenant at a listener that does not admit it.
    assert comes(there, PeerCredential(1002), "lan").tenant_name == NO_TENANT
    assert comes(there, PeerCredential(1002)).tenant_name == "gateway"
    assert owner(PeerCredential(1001), "uid 1001") == "uid 1001"
    # A host may show a key later.
    assert owner(PeerCredential(), "host 192.0.2.1") == "host 192.0.2.1"
    # Without tables, everyone is one account.
    there = access({})
    assert owner(strangers[0], "uid 100000") == "uid 100000"
    assert comes(there, strangers[0]).tenant_name == comes(there, strangers[1]).tenant_name != NO_TENANT
