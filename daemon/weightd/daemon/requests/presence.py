"""Which tenants have something waiting for a model, as the clocks of its devices have to know."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weightd.daemon.requests.shares import Clock
from weightd.daemon.tenants.tenant import Tenant


class Presence:
    """The tenants of which something waits in a line, and may run.

    What is given to a seat is charged before it is looked who is there: so nobody seems to have gone in between.

    Args:
        waits: whether anything does of a tenant.
    """

    def __init__(self, waits: Callable[[Tenant], bool]) -> None:
        self._waits = waits
        self._there: set[Tenant] = set()
        # Those that may not be there any more, or by now.
        self._changed: set[Tenant] = set()
        self._clocks: tuple[Clock, ...] = ()

    def changed(self, tenant: Tenant) -> None:
        """Something of it has come where nothing was, or nothing is left of what was."""
        self._changed.add(tenant)

    def on(self, clocks: Iterable[Clock]) -> None:
        """The model runs on the devices with these clocks, each of which is named once."""
        self.look()
        before, self._clocks = self._clocks, tuple(clocks)
        for tenant in self._there:
            for clock in self._clocks:
                clock.comes(tenant)
            for clock in before:
                clock.goes(tenant)

    def look(self) -> set[Tenant]:
        """Return who is there, and tell the clocks who was not, or is no more."""
        while self._changed:
            tenant = self._changed.pop()
            is_waiting = self._waits(tenant)
            if is_waiting == (tenant in self._there):
                continue
            (self._there.add if is_waiting else self._there.remove)(tenant)
            for clock in self._clocks:
                (clock.comes if is_waiting else clock.goes)(tenant)
        return self._there

    def over(self) -> None:
        """Nobody is counted any more."""
        for tenant in self._there:
            for clock in self._clocks:
                clock.goes(tenant)
        self._there.clear()
        self._changed.clear()
