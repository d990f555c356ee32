"""Tenants: their rights, their use of quotas, and the lookup of the tenant of a connected peer.

The daemon determines the tenant of a peer only from credentials that the kernel or a key proves, never from a message.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from weightd_daemon.config.tenants import DEFAULT_TENANT_NAME, RIGHTS, STATUS, TenantConfig
from weightd_daemon.platform.connection_limiter import NO_TENANT
from weightd_daemon.platform.tenant_lookup import TenantCredentials, TenantLookup
from weightd_daemon.tenants.usage import Quota
from weightd_protocol.model_names import split_version


class Tenant:
    """A tenant. A reload of the configuration keeps the object of an existing tenant and replaces its `config`.

    Args:
        name: the name of the tenant's table in the configuration.
        config: the configuration of the tenant.

    Attributes:
        name: the name of the tenant.
        config: the current configuration, which a reload replaces.
        quota: the tenant's current use of its quotas.
        known_models: the cached results of `can_see`, by the name of the model.
    """

    __slots__ = ("config", "known_models", "name", "quota")

    def __init__(self, name: str, config: TenantConfig) -> None:
        self.name = name
        self.known_models: dict[str, bool] = {}
        self.config = config
        self.quota = Quota()

    def set_config(self, config: TenantConfig) -> None:
        """Replace the configuration."""
        self.config = config
        self.known_models.clear()

    def has_right(self, right: str) -> bool:
        """Return whether the tenant has a right, one of `RIGHTS`."""
        return right in self.config.may

    def can_see(self, model: str) -> bool:
        """Return whether an existing model, or a version of it, is visible to the tenant."""
        is_visible = self.known_models.get(model)
        if is_visible is None:
            is_visible = self.known_models[model] = matches(split_version(model)[0], self.config.models)
        return is_visible

    def can_act_for(self, name: str) -> bool:
        """Return whether the tenant may send requests on the account of another tenant."""
        return matches(name, self.config.acts_for)


class Viewer(NamedTuple):
    """The models and the data that a client may see in reports of the daemon.

    Attributes:
        tenant: the tenant that determines which models the client can see.
        can_see_all: whether the client may also see the data of other tenants.
    """

    tenant: Tenant
    can_see_all: bool


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name matches one of the patterns."""
    return any(fnmatch.fnmatchcase(name, each) for each in patterns)


# The tenant of every client if the configuration has no tenants: it has all rights that are not reserved for operators.
DEFAULT_TENANT = Tenant(DEFAULT_TENANT_NAME, TenantConfig(may=(RIGHTS[0], STATUS)))

_OPERATORS_CONFIG = TenantConfig(may=RIGHTS)


class PeerCredential(NamedTuple):
    """The proven identity of a connected peer.

    Attributes:
        uid: the user id of a peer on a Unix socket; None over TCP.
        gids: the group ids of a peer on a Unix socket; empty over TCP.
        key: the public CURVE key of the peer in Z85; "" if the peer has none.
        is_operator: whether the peer is root or the user of the daemon, and has connected to the daemon directly.
    """

    uid: int | None = None
    gids: tuple[int, ...] = ()
    key: str = ""
    is_operator: bool = False


class TenantResolver:
    """Finds the tenant of a peer. Without tenants in the configuration, every peer belongs to the default tenant.

    Args:
        tenants: the configured tenants by name.

    Attributes:
        operators: the tenant of the operators that belong to no configured tenant.
    """

    def __init__(self, tenants: Mapping[str, TenantConfig]) -> None:
        self._tenants: dict[str, Tenant] = {}
        # No configured tenant can have this name, because of its parentheses.
        self.operators = Tenant("(operators)", _OPERATORS_CONFIG)
        self.configure(tenants)

    def configure(self, tenants: Mapping[str, TenantConfig]) -> None:
        """Replace the configured tenants; a tenant with the same name as before keeps its object."""
        previous, self._tenants = self._tenants, {}
        for name, config in tenants.items():
            tenant = self._tenants[name] = previous.get(name) or Tenant(name, config)
            tenant.set_config(config)
        self._tenant_lookup = TenantLookup(tenant_members(tenants))

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values() or (DEFAULT_TENANT,))

    @property
    def has_tenants(self) -> bool:
        """Whether tenants are configured."""
        return bool(self._tenants)

    @property
    def all_tenants(self) -> list[Tenant]:
        """All tenants, including the operators."""
        return [*self, self.operators]

    def get(self, name: str) -> Tenant | None:
        """Return the configured tenant of this name, or None."""
        return self._tenants.get(name)

    def tenant_of(self, credential: PeerCredential) -> Tenant | None:
        """Return the tenant of a peer; None if the peer belongs to no tenant.

        A tenant with the peer's key takes precedence, then one with its user id, then one with a group id of the peer;
        groups are checked in the order in which the kernel lists them.
        """
        if not self._tenants:
            return DEFAULT_TENANT
        operator_name = self.operators.name if credential.is_operator else None
        name = self._tenant_lookup.tenant_of(credential.uid, credential.gids, credential.key, operator_name)
        if name is None:
            return None
        return self.operators if name == operator_name else self._tenants[name]


def tenant_members(tenants: Mapping[str, TenantConfig], admitted: Sequence[str] = ()) -> list[TenantCredentials]:
    """Return the user ids, group ids and public keys of each configured tenant.

    Args:
        tenants: the configured tenants by name.
        admitted: the tenants that a listener admits; empty for all. The ids and keys of other tenants are returned
            under the name `NO_TENANT`.
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
