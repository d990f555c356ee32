"""Lookup of a client's tenant by the client's public key, user id and group ids, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weightd_common.peer_credentials import OVERFLOW_ID


class TenantCredentials(NamedTuple):
    """The credentials by which a client is recognized as a member of a tenant.

    Attributes:
        tenant: the name of the tenant.
        uids: the user ids of the tenant's clients.
        gids: the group ids of the tenant's clients.
        keys: the public CURVE keys of the tenant's clients, in Z85.
        is_default: whether this is the tenant of every client that matches no credentials.
    """

    tenant: str
    uids: Sequence[int] = ()
    gids: Sequence[int] = ()
    keys: Sequence[str] = ()
    is_default: bool = False


class TenantLookup:
    """Tables that map public keys, user ids and group ids to tenants.

    Args:
        members: the credentials of all tenants; no two tenants have the same key or id.
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
        """Return the name of a client's tenant; None if the client has no tenant.

        The key is looked up first, then the user id, then the group ids in their order.

        Args:
            uid: the user id; None if the kernel does not report it.
            gids: the group ids, in the order in which the kernel reports them.
            key: the client's public key in Z85; "" without a key.
            default: the result for a client that matches no credentials; None for the tenant with `is_default`, if any.
        """
        tenant = self._by_key.get(key)
        if tenant is not None or uid == OVERFLOW_ID:
            return tenant
        if uid is not None:
            tenant = self._by_uid.get(uid)
            if tenant is None:
                tenant = next((self._by_gid[gid] for gid in gids if gid in self._by_gid), None)
        return tenant if tenant is not None else default or self._default
