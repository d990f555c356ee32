"""Which tenant a peer is, by what the kernel or a key proves of it; a message proves nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from weightd_daemon.config.tenants import DEFAULT_TENANT_NAME, RIGHTS, TenantConfig
from weightd_daemon.platform.connection_limit import NO_TENANT
from weightd_daemon.platform.tenant_lookup import TenantCredentials, TenantLookup
from weightd_daemon.tenants.tenant import DEFAULT_TENANT, Tenant

_OPERATORS_CONFIG = TenantConfig(may=RIGHTS)


class PeerCredential(NamedTuple):
    """What is proven of a peer.

    Attributes:
        uid: of a unix socket's peer; None over TCP.
        gids: its groups, likewise.
        key: its public key in Z85; "" where it has shown none.
        is_operator: it is root, or the user that the daemon runs as, and has connected to the daemon itself.
    """

    uid: int | None = None
    gids: tuple[int, ...] = ()
    key: str = ""
    is_operator: bool = False


class TenantResolver:
    """All tenants. Where there are no tables, everyone is one.

    Args:
        tenants: the tables, by name.

    Attributes:
        operators: who operates by its user and is in no table.
    """

    def __init__(self, tenants: Mapping[str, TenantConfig]) -> None:
        self._tenants: dict[str, Tenant] = {}
        # Its name cannot be that of a table.
        self.operators = Tenant("(operators)", _OPERATORS_CONFIG)
        self.configure(tenants)

    def configure(self, tenants: Mapping[str, TenantConfig]) -> None:
        """Other tables are in force; a tenant that stays is the same object."""
        previous, self._tenants = self._tenants, {}
        for name, config in tenants.items():
            tenant = self._tenants[name] = previous.get(name) or Tenant(name, config)
            tenant.set_config(config)
        self._tenant_lookup = TenantLookup(tenant_members(tenants))

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values() or (DEFAULT_TENANT,))

    @property
    def has_tenants(self) -> bool:
        """Whether there are tables."""
        return bool(self._tenants)

    @property
    def all_tenants(self) -> list[Tenant]:
        """All of them, and the operators."""
        return [*self, self.operators]

    def get(self, name: str) -> Tenant | None:
        """Return the tenant of a table, or None."""
        return self._tenants.get(name)

    def tenant_of(self, credential: PeerCredential) -> Tenant | None:
        """Return who a peer is; None where it is nobody.

        Its key comes before its uid, and that before its groups: of these the first that the kernel names.
        """
        if not self._tenants:
            return DEFAULT_TENANT
        operator_name = self.operators.name if credential.is_operator else None
        name = self._tenant_lookup.tenant_of(credential.uid, credential.gids, credential.key, operator_name)
        if name is None:
            return None
        return self.operators if name == operator_name else self._tenants[name]


def tenant_members(tenants: Mapping[str, TenantConfig], admitted: Sequence[str] = ()) -> list[TenantCredentials]:
    """Return who belongs to the tenants of these tables.

    Args:
        tenants: the tables, by name.
        admitted: the tenants that a listener is for; none: all. The others are `NO_TENANT` there.
    """
    return [
        TenantCredentials(
            name if not admitted or name in admitted else NO_TENANT,
            each.user_ids,
            each.group_ids,
            each.public_keys,
            name == DEFAULT_TENANT_NAME,
        )
        for name, each in tenants.items()
    ]
