"""A tenant: on whose account requests go."""

from __future__ import annotations

import fnmatch

from weightd.daemon.config.tenants import DEFAULT, RIGHTS, STATUS, TenantConfig


class Tenant:
    """One tenant, the same for as long as the daemon runs.

    Args:
        name: of its table.
        config: what is in force.

    Attributes:
        config: what is in force; a reload puts another in its place.
    """

    __slots__ = ("_seen", "config", "name")

    def __init__(self, name: str, config: TenantConfig) -> None:
        self.name = name
        self._seen: dict[str, bool] = {}
        self.config = config

    def renew(self, config: TenantConfig) -> None:
        """Another configuration is in force."""
        self.config = config
        self._seen.clear()

    def may(self, right: str) -> bool:
        """Return whether it has a right, one of `RIGHTS`."""
        return right in self.config.may

    def sees(self, model: str) -> bool:
        """Return whether there is this model for it; asked of models that there are."""
        seen = self._seen.get(model)
        if seen is None:
            seen = self._seen[model] = matches(model, self.config.models)
        return seen

    def acts_for(self, name: str) -> bool:
        """Return whether its requests may go on another's account."""
        return matches(name, self.config.acts_for)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name is one of those that the patterns allow."""
    return any(fnmatch.fnmatchcase(name, each) for each in patterns)


# Where there are no tables: whoever may connect may do what nobody has to be an operator for.
EVERYONE = Tenant(DEFAULT, TenantConfig(may=(RIGHTS[0], STATUS)))
