"""Which tenant a client belongs to, by its key, its user id and its groups. Pure: the tables of the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weightd_common.peer_credentials import OVERFLOW_ID


class TenantCredentials(NamedTuple):
    """The identities that belong to a tenant.

    Attributes:
        tenant: its name.
        uids: user ids.
        gids: group ids.
        keys: public keys in Z85.
        is_default: whether every client belongs to it that belongs to no other tenant.
    """

    tenant: str
    uids: Sequence[int] = ()
    gids: Sequence[int] = ()
    keys: Sequence[str] = ()
    is_default: bool = False


class TenantLookup:
    """Finds the tenant of a client.

    Args:
        members: of all tenants; none of their identities is in two tables.
    """

    def __init__(self, members: Iterable[TenantCredentials]) -> None:
        self._by_uid: dict[int, str] = {}
        self._by_gid: dict[int, str] = {}
        self._by_key: dict[str, str] = {}
        self._default: str | None = None
        for each in members:
            self._by_uid.update(dict.fromkeys(each.uids, each.tenant))
            self._by_gid.update(dict.fromkeys(each.gids, each.tenant))
            self._by_key.update(dict.fromkeys(each.keys, each.tenant))
            if each.is_default:
                self._default = each.tenant

    def tenant_of(self, uid: int | None, gids: Sequence[int], key: str, default: str | None = None) -> str | None:
        """Return the name of a client's tenant, None if it belongs to no tenant.

        The key comes before the user id, and the user id before the groups, in the order in which the kernel names
        them.

        Args:
            uid: the user id; None where the kernel does not name it.
            gids: the groups, likewise.
            key: the public key in Z85; "" where the client has shown none.
            default: the tenant of a client that is in no table, instead of the default tenant.
        """
        tenant = self._by_key.get(key)
        if tenant is not None or uid == OVERFLOW_ID:
            return tenant
        if uid is not None:
            tenant = self._by_uid.get(uid)
            if tenant is None:
                tenant = next((self._by_gid[gid] for gid in gids if gid in self._by_gid), None)
        return tenant if tenant is not None else default or self._default
