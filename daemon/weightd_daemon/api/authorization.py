"""Authorization of clients: determines a client's tenant from its credentials, and checks the tenant's rights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weightd_common.peer_credentials import OVERFLOW_ID
from weightd_common.safe_open import OPERATOR, Grant
from weightd_daemon.config.tenants import ALL_MODELS, INFER, LOAD, OPERATE, STATUS
from weightd_daemon.platform.connection_limiter import NO_TENANT
from weightd_daemon.scheduling.request import ClientOrigin, Request
from weightd_daemon.tenants.tenant import Tenant, TenantResolver, Viewer
from weightd_daemon.tenants.usage import QuotaExceeded, UsageTable
from weightd_daemon.transport.connection import ClientConnection, ClientIdentity
from weightd_protocol.errors import PermissionDenied, RequestError, Unauthenticated

_OVERFLOW_UID_HINT = (
    "a user namespace hides the client's user (PrivateUsers=, a rootless container): connect from outside the "
    "namespace, or with a key"
)

RIGHT_REVOKED = "a reload has revoked the right to send this request"


class Authorizer:
    """Determines the tenant of a client, and checks whether the tenant may do what the client requests.

    Args:
        tenants: the current tenants.
        accounts: the usage counters of all tenants.
        listener_tenants: by name of a listener, the tenants that may connect to it; an empty sequence admits all
            tenants.
    """

    def __init__(
        self, tenants: TenantResolver, accounts: UsageTable, listener_tenants: Mapping[str, Sequence[str]]
    ) -> None:
        self.tenants = tenants
        self.accounts = accounts
        self.listener_tenants = listener_tenants

    def assign_tenant(self, connection: ClientConnection) -> RequestError | None:
        """Determine the tenant of a connection. Called for each new connection and after each change of the tenants.

        Returns:
            The error with which a new connection is closed, if its tenant has too many connections; else None.
        """
        self.remove_connection(connection)
        identity = connection.identity
        tenant = self.tenants.tenant_of(identity.credential)
        allowed_tenants = self.listener_tenants.get(identity.listener, ())
        connection.tenant, connection.origin = None, identity.origin._replace(principal=NO_TENANT)
        if tenant is None:
            connection.rejection = Unauthenticated(_unknown_client_text(identity))
        elif allowed_tenants and tenant.name not in allowed_tenants:
            connection.rejection = PermissionDenied(f"listener {identity.listener} is not for tenant {tenant.name}")
        else:
            connection.tenant, connection.origin = tenant, identity.origin
            if self.tenants.has_tenants:
                connection.origin = ClientOrigin(identity.origin.peer, f"tenant {tenant.name}", is_tenant=True)
            try:
                tenant.quota.add_connection(tenant.config)
            except QuotaExceeded as error:
                return error
        return None

    def limit_account_of(self, identity: ClientIdentity) -> str:
        """Return the account to which a new connection counts before its tenant is determined: its user or host.

        All users of this host without a tenant share one account.
        """
        has_no_tenant = identity.credential.uid is not None and self.tenants.tenant_of(identity.credential) is None
        return NO_TENANT if has_no_tenant else identity.origin.principal

    def remove_connection(self, connection: ClientConnection) -> None:
        """Subtract a connection from its tenant's connections, because it is closed or gets another tenant."""
        if connection.tenant is not None:
            connection.tenant.quota.connections -= 1

    def authorize_infer(
        self, connection: ClientConnection, name: str | None, now: float
    ) -> tuple[Tenant, ClientOrigin]:
        """Return the tenant and the origin of an inference request; it may name another tenant than the client's.

        If the message names another tenant, it also counts toward the rate limit of that tenant.

        Raises:
            RequestError: the client may not act for the named tenant, or the tenant may not send requests now.
        """
        tenant, origin = connection.tenant, connection.origin
        if tenant is None or name is not None:
            tenant = self.resolve_tenant(connection, name)
        if tenant is not connection.tenant:
            tenant.quota.count_message(tenant.config, now)
            peer = f"{connection.identity.origin.peer} for tenant {tenant.name}"
            origin = ClientOrigin(peer, f"tenant {tenant.name}", is_tenant=True)
        if INFER not in tenant.config.may:
            raise PermissionDenied(
                f'tenant {tenant.name} may not send inference requests: "{INFER}" is not in its `may`'
            )
        return tenant, origin

    def charge_viewer(self, connection: ClientConnection, name: str | None, now: float) -> Viewer:
        """Return the tenant for which a client queries the daemon, and whether the client may see all tenants.

        If the message names another tenant, it also counts toward the rate limit of that tenant.

        Raises:
            RequestError: the client may not act for the named tenant, or the tenant exceeds its rate limit.
        """
        viewer = self.resolve_viewer(connection, name)
        if name is not None and viewer.tenant is not connection.tenant:
            viewer.tenant.quota.count_message(viewer.tenant.config, now)
        return viewer

    def resolve_tenant(self, connection: ClientConnection, name: str | None) -> Tenant:
        """Return the tenant that a message names; the client's own tenant if `name` is None.

        Raises:
            RequestError: the client has no tenant, or may not act for the named tenant.
        """
        own_tenant = connection.tenant
        if own_tenant is None:
            raise connection.rejection
        if name is None:
            return own_tenant
        named_tenant = self.tenants.get(name)
        if named_tenant is None or (named_tenant is not own_tenant and not own_tenant.can_act_for(name)):
            # The error is the same whether the named tenant exists or not, so that it does not reveal the names of
            # tenants.
            raise PermissionDenied(f"parameters.tenant: tenant {own_tenant.name} does not act for {name!r} (acts_for)")
        return named_tenant

    def resolve_viewer(self, connection: ClientConnection, name: str | None = None) -> Viewer:
        """Return the tenant whose models a client can see, and whether the client may see data of all tenants.

        An operator may see everything, unless its message names a tenant.

        Raises:
            RequestError: the client has no tenant, or may not act for the named tenant.
        """
        account = self.resolve_tenant(connection, name)
        if name is None and connection.identity.credential.is_operator:
            return Viewer(self.tenants.operators, can_see_all=True)
        return Viewer(account, account.has_right(STATUS))

    def check_status(self, connection: ClientConnection, subject: str) -> None:
        """Check that a client may see data of all tenants; `subject` names the requested data in the error.

        Raises:
            PermissionDenied: the client may see only its own tenant's data.
        """
        tenant, sees_all = self.resolve_viewer(connection)
        if not sees_all:
            raise PermissionDenied(f'tenant {tenant.name} may not see {subject}: "{STATUS}" is not in its `may`')

    def check_operator(self, connection: ClientConnection, action: str) -> None:
        """Check that a client may act as an operator.

        The client must be connected to the daemon's Unix socket, and its user must be an operator or its tenant must
        have the right to operate. `action` names the operation in the error.

        Raises:
            PermissionDenied: the client may not act as an operator.
        """
        tenant, identity = connection.tenant, connection.identity
        # Refuse clients of a ZeroMQ proxy even if their tenant may operate, because the proxy handles input of
        # untrusted clients.
        if not (
            identity.credential.is_operator or (identity.is_direct and tenant is not None and tenant.has_right(OPERATE))
        ):
            raise PermissionDenied(
                f'only a tenant that may "operate", the user that weightd runs as, and root, may {action}, and only on '
                "the daemon's unix socket"
                if self.tenants.has_tenants
                else f"only the user that weightd runs as, and root, may {action}, and only on the daemon's unix socket"
            )

    def authorize_load(self, connection: ClientConnection, name: str | None, now: float) -> Tenant:
        """Return the tenant for which a client loads or unloads a model; `name` is the tenant in the message.

        Raises:
            PermissionDenied: the tenant may not load or unload models, or the client may not act for the tenant.
        """
        tenant = self.charge_viewer(connection, name, now).tenant
        if not (tenant.has_right(LOAD) or tenant.has_right(OPERATE)):
            who = f'tenant {tenant.name} may not load or unload models: "{LOAD}" is not in its `may`'
            raise PermissionDenied(
                who
                if self.tenants.has_tenants
                else "only the user that weightd runs as, and root, may load or unload models"
            )
        return tenant

    def check_reload(self, connection: ClientConnection) -> None:
        """Check that a client may reload the configuration.

        A reload affects all models. So a tenant with the right to operate may reload only if it may use all models.

        Raises:
            PermissionDenied: the client may not reload the configuration.
        """
        self.check_operator(connection, "reload the configuration")
        tenant = connection.tenant
        if tenant is None or connection.identity.credential.is_operator or ALL_MODELS in tenant.config.models:
            return
        raise PermissionDenied(
            f"tenant {tenant.name} may not reload the configuration, which concerns every model: "
            f'expected "{ALL_MODELS}" in its `models`, got {", ".join(tenant.config.models)}'
        )

    def file_grant(self, connection: ClientConnection) -> Grant:
        """Return which files on this host the daemon may read for a client that names their paths."""
        credential, tenant = connection.identity.credential, connection.tenant
        if credential.is_operator:
            return OPERATOR
        uid = OVERFLOW_ID if credential.uid is None else credential.uid
        return Grant(uid, credential.gids, () if tenant is None else tenant.config.model_directories)

    def revocation_filter(
        self,
        find_connection: Callable[[bytes], ClientConnection | None],
        previous_tenants: Mapping[bytes, Tenant | None],
    ) -> Callable[[Request], bool]:
        """Return a function that returns whether a reload has revoked the right to send a queued request.

        Args:
            find_connection: called with the key of a client; returns the client's connection, which has the current
                tenant.
            previous_tenants: by client, the tenant before the reload.
        """

        def may_not(request: Request) -> bool:
            connection = find_connection(request.client)
            own = None if connection is None else connection.tenant
            if own is None:
                return True
            account = own
            if request.tenant is not previous_tenants.get(request.client):
                named = self.tenants.get(request.tenant.name)
                if named is None or not own.can_act_for(named.name):
                    return True
                account = named
            return not (account.has_right(INFER) and account.can_see(request.description.model_name))

        return may_not


def _unknown_client_text(identity: ClientIdentity) -> str:
    credential = identity.credential
    if credential.uid == OVERFLOW_ID:
        return f"the kernel reports uid {OVERFLOW_ID}: {_OVERFLOW_UID_HINT}"
    client = f"key {credential.key}" if credential.key else identity.origin.principal
    remedy = (
        "its public key to `keys`" if credential.uid is None else "its user to `uids`, or a group of it to `groups`,"
    )
    return (
        f"{client} belongs to no tenant: the operator must add {remedy} of a table [tenants.NAME], or"
        " configure [tenants.default]"
    )
