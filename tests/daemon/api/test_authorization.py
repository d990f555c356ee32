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


def make_authorizer(
    tables: Mapping[str, TenantConfig], admitted: Mapping[str, Sequence[str]] | None = None
) -> Authorizer:
    return Authorizer(TenantResolver(tables), UsageTable(), admitted or {})


def connect(
    authorizer: Authorizer, credential: PeerCredential, listener: str = "", *, is_direct: bool = True
) -> ClientConnection:
    who = f"uid {credential.uid}" if credential.uid is not None else "host 192.0.2.1"
    connection = ClientConnection(
        b"1", mock.Mock(), ClientIdentity(ClientOrigin("pid 7", who), is_direct, credential, listener), 0.0
    )
    assert authorizer.assign_tenant(connection) is None
    return connection


@pytest.mark.parametrize(
    ("credential", "text"),
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
def test_unknown_client_gets_error_that_names_remedy(credential: PeerCredential, text: str) -> None:
    authorizer = make_authorizer(TABLES)
    unknown_client = connect(authorizer, credential)
    assert unknown_client.tenant is None
    for name in (None, "ann"):
        with pytest.raises(RequestError) as error:
            authorizer.resolve_tenant(unknown_client, name)
        assert f"{error.value.code}: {error.value}".startswith(text)
    with pytest.raises(RequestError):
        authorizer.resolve_viewer(unknown_client)
    with pytest.raises(PermissionDenied):
        authorizer.check_operator(unknown_client, "update")


def test_listener_rejects_tenants_it_does_not_admit() -> None:
    authorizer = make_authorizer(TABLES, {"lan": ("ann",)})
    assert connect(authorizer, PeerCredential(key=KEY), "lan").tenant is authorizer.tenants.get("ann")
    assert connect(authorizer, PeerCredential(1002)).tenant is authorizer.tenants.get("gateway")
    refused = connect(authorizer, PeerCredential(1002), "lan")
    with pytest.raises(PermissionDenied, match="listener lan is not for tenant gateway"):
        authorizer.resolve_tenant(refused, None)


def test_tenant_acts_only_for_tenants_in_acts_for() -> None:
    authorizer = make_authorizer(TABLES)
    gateway, ann = connect(authorizer, PeerCredential(1002)), connect(authorizer, PeerCredential(1001))
    ann_tenant = authorizer.resolve_tenant(gateway, "ann")
    assert ann_tenant is ann.tenant
    assert authorizer.resolve_tenant(gateway, "gateway") is authorizer.resolve_tenant(gateway, None) is gateway.tenant
    # Requests through the gateway count as ann's, but the faults of one of them are attributed separately.
    assert authorizer.authorize_infer(gateway, "ann", 0.0)[1].principal == ann.origin.principal == "tenant ann"
    for asks, name in ((gateway, "staff"), (gateway, "none"), (ann, "gateway")):
        with pytest.raises(PermissionDenied, match=rf"does not act for '{name}' \(acts_for\)$"):
            authorizer.resolve_tenant(asks, name)


def test_resolve_viewer_uses_rights_of_represented_tenant() -> None:
    authorizer = make_authorizer(
        {**TABLES, "gateway": TenantConfig(user_ids=(1002,), may=RIGHTS, acts_for=("ann", "staff"))}
    )
    gateway, root = (
        connect(authorizer, PeerCredential(1002)),
        connect(authorizer, PeerCredential(1003, is_operator=True)),
    )
    assert authorizer.resolve_viewer(gateway) == (gateway.tenant, True)
    assert authorizer.resolve_viewer(gateway, "ann") == (authorizer.tenants.get("ann"), False)
    assert authorizer.resolve_viewer(gateway, "staff") == (authorizer.tenants.get("staff"), True)
    assert authorizer.resolve_viewer(root) == (authorizer.tenants.operators, True)
    assert authorizer.resolve_viewer(root, "staff") == (authorizer.tenants.get("staff"), True)
    with pytest.raises(PermissionDenied, match="does not act for 'ann'"):
        authorizer.resolve_viewer(root, "ann")


def test_check_operator_requires_right_and_unix_socket() -> None:
    authorizer = make_authorizer(TABLES)
    root = PeerCredential(0, is_operator=True)
    for credential in (PeerCredential(1003), root):
        authorizer.check_operator(connect(authorizer, credential), "update")
    for other in (
        connect(authorizer, PeerCredential(1001)),
        connect(authorizer, PeerCredential(1003), "lan", is_direct=False),
    ):
        with pytest.raises(PermissionDenied, match=r'only a tenant that may "operate".* may update.*unix socket$'):
            authorizer.check_operator(other, "update")
    alone = make_authorizer({})
    alone.check_operator(connect(alone, root), "update")
    with pytest.raises(PermissionDenied, match="only the user that weightd runs as, and root, may update"):
        alone.check_operator(connect(alone, PeerCredential(1001)), "update")


def test_check_reload_requires_access_to_all_models() -> None:
    some = TenantConfig(user_ids=(1001,), may=RIGHTS, models=("a*", "b"))
    authorizer = make_authorizer({"ann": some, "staff": TenantConfig(user_ids=(1003,), may=RIGHTS)})
    operators = PeerCredential(1003), PeerCredential(0, is_operator=True), PeerCredential(1001, is_operator=True)
    for credential in operators:
        authorizer.check_reload(connect(authorizer, credential))
    with pytest.raises(
        PermissionDenied, match=r'tenant ann may not reload .* expected "\*" in its `models`, got a\*, b$'
    ):
        authorizer.check_reload(connect(authorizer, PeerCredential(1001)))
    with pytest.raises(PermissionDenied, match="on the daemon's unix socket"):
        authorizer.check_reload(connect(authorizer, PeerCredential(1003), "lan", is_direct=False))


def test_file_grant_uses_user_or_operator_rights() -> None:
    authorizer = make_authorizer(
        {"ann": TenantConfig(user_ids=(1001,), may=RIGHTS, model_directories=("/models/ann",))}
    )
    assert authorizer.file_grant(connect(authorizer, PeerCredential(1001, (5, 6)))) == Grant(
        1001, (5, 6), ("/models/ann",)
    )
    assert authorizer.file_grant(connect(authorizer, PeerCredential(1001, (5, 6), is_operator=True))) == OPERATOR
    # Without known credentials, file access uses the unprivileged uid 65534.
    assert authorizer.file_grant(connect(authorizer, PeerCredential())) == Grant(65534)


def test_rejected_connection_counts_until_removed() -> None:
    authorizer = make_authorizer({"ann": TenantConfig(user_ids=(1001,), max_connections=1)})
    first = connect(authorizer, PeerCredential(1001))
    second = ClientConnection(b"2", mock.Mock(), first.identity, 0.0)
    assert isinstance(authorizer.assign_tenant(second), QuotaExceeded)
    authorizer.remove_connection(second)
    authorizer.remove_connection(first)
    connect(authorizer, PeerCredential(1001))


def test_changed_tenant_moves_connection_count() -> None:
    authorizer = make_authorizer({})
    [everyone] = authorizer.tenants
    before = everyone.quota.connections
    ann, gateway = connect(authorizer, PeerCredential(1001)), connect(authorizer, PeerCredential(1002))
    assert everyone.quota.connections == before + 2
    authorizer.tenants.configure({"ann": ANN})
    for each in (ann, gateway):
        authorizer.assign_tenant(each)
    assert (ann.user, gateway.user) == ("tenant ann", NO_TENANT)
    assert everyone.quota.connections == before
    authorizer.tenants.configure({"gateway": GATEWAY})
    for each in (ann, gateway):
        authorizer.assign_tenant(each)
    assert (ann.user, gateway.user) == (NO_TENANT, "tenant gateway")


def make_request(authorizer: Authorizer, client: ClientConnection, name: str | None = None) -> Request:
    described = SimpleNamespace(model_name="m")
    tenant = authorizer.resolve_tenant(client, name)
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
def test_reload_rejects_requests_without_rights(tables: Mapping[str, TenantConfig], own: bool, others: bool) -> None:
    authorizer = make_authorizer(TABLES)
    gateway = connect(authorizer, PeerCredential(1002))
    requests = make_request(authorizer, gateway), make_request(authorizer, gateway, "ann")
    before = {gateway.key: gateway.tenant}
    authorizer.tenants.configure(tables)
    authorizer.assign_tenant(gateway)
    is_revoked = authorizer.revocation_filter(lambda key: gateway if key == gateway.key else None, before)
    assert [is_revoked(each) for each in requests] == [own, others]
    is_revoked_after_disconnect = authorizer.revocation_filter(lambda _: None, before)
    assert [is_revoked_after_disconnect(each) for each in requests] == [True, True]


def test_clients_without_tenant_share_one_limit_account() -> None:
    authorizer = make_authorizer(TABLES, {"lan": ("ann",)})

    def owner(credential: PeerCredential, principal: str) -> str:
        identity = ClientIdentity(ClientOrigin("pid 7", principal), is_direct=True, credential=credential)
        return authorizer.limit_account_of(identity)

    unknown_clients = [PeerCredential(uid) for uid in (100_000, 100_001, 65534)]
    assert {owner(each, f"uid {each.uid}") for each in unknown_clients} == {NO_TENANT}
    assert {
        each.tenant_name
        for each in (*(connect(authorizer, each) for each in unknown_clients), connect(authorizer, PeerCredential()))
    } == {NO_TENANT}
    # A listener also treats a tenant that it does not admit as a client without tenant.
    assert connect(authorizer, PeerCredential(1002), "lan").tenant_name == NO_TENANT
    assert connect(authorizer, PeerCredential(1002)).tenant_name == "gateway"
    assert owner(PeerCredential(1001), "uid 1001") == "uid 1001"
    # A client at this host may still authenticate with a key, so the host keeps a separate account.
    assert owner(PeerCredential(), "host 192.0.2.1") == "host 192.0.2.1"
    # Without [tenants] tables all clients belong to one tenant.
    authorizer = make_authorizer({})
    assert owner(unknown_clients[0], "uid 100000") == "uid 100000"
    assert (
        connect(authorizer, unknown_clients[0]).tenant_name
        == connect(authorizer, unknown_clients[1]).tenant_name
        != NO_TENANT
    )
