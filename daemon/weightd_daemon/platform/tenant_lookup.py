"""Mapping from a client's key, user id and group ids to its tenant, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weightd_common.peer_credentials import OVERFLOW_ID


class TenantCredentials(NamedTuple):
    """The identities that belong to a tenant.

    Attributes:
        tenant: the name of the tenant.
        uids: user ids.
        gids: group ids.
        keys: public keys in Z85.
        is_default: whether every client that belongs to no other tenant belongs to this one.
    """

    tenant: str
    uids: Sequence[int] = ()
    gids: Sequence[int] = ()
    keys: Sequence[str] = ()
    is_default: bool = False


class TenantLookup:
    """Lookup tables from identities to tenants.

    Args:
        members: the identities of all tenants; no identity belongs to two tenants.
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
        """Return the name of a client's tenant; None if it belongs to no tenant.

        The key has priority over the user id, and the user id over the groups, which are checked in the kernel's order.

        Args:
            uid: the user id; None if the kernel does not report it.
            gids: the group ids, in the order in which the kernel reports them.
            key: the public key in Z85; "" if the client did not use one.
            default: the tenant for a client that matches no identity, instead of the default tenant.
        """
        tenant = self._by_key.get(key)
        if tenant is not None or uid == OVERFLOW_ID:
            return tenant
        if uid is not None:
            tenant = self._by_uid.get(uid)
            if tenant is None:
                tenant = next((self._by_gid[gid] for gid in gids if gid in self._by_gid), None)
        return tenant if tenant is not None else default or self._default
