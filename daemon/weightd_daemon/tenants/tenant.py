"""A tenant: on whose account requests go."""

from __future__ import annotations

import fnmatch
from typing import NamedTuple

from weightd_daemon.config.tenants import DEFAULT_TENANT_NAME, RIGHTS, STATUS, TenantConfig
from weightd_daemon.tenants.quota import Quota


class Tenant:
    """One tenant, the same for as long as the daemon runs.

    Args:
        name: of its table.
        config: what is in force.

    Attributes:
        config: what is in force; a reload puts another in its place.
        quota: what it has of what that bounds.
    """

    __slots__ = ("_visible_models", "config", "name", "quota")

    def __init__(self, name: str, config: TenantConfig) -> None:
        self.name = name
        self._visible_models: dict[str, bool] = {}
        self.config = config
        self.quota = Quota()

    def set_config(self, config: TenantConfig) -> None:
        """Another configuration is in force."""
        self.config = config
        self._visible_models.clear()

    def has_right(self, right: str) -> bool:
        """Return whether it has a right, one of `RIGHTS`."""
        return right in self.config.may

    def can_see(self, model: str) -> bool:
        """Return whether there is this model for it; asked of models that there are."""
        is_visible = self._visible_models.get(model)
        if is_visible is None:
            is_visible = self._visible_models[model] = matches(model, self.config.models)
        return is_visible

    def can_act_for(self, name: str) -> bool:
        """Return whether its requests may go on another's account."""
        return matches(name, self.config.acts_for)


class Viewer(NamedTuple):
    """Who asks for what there is.

    Attributes:
        tenant: for whom it has to be there.
        can_see_all: whether it is told what concerns others, too.
    """

    tenant: Tenant
    can_see_all: bool


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name is one of those that the patterns allow."""
    return any(fnmatch.fnmatchcase(name, each) for each in patterns)


# Where there are no tables: whoever may connect may do what nobody has to be an operator for.
DEFAULT_TENANT = Tenant(DEFAULT_TENANT_NAME, TenantConfig(may=(RIGHTS[0], STATUS)))
