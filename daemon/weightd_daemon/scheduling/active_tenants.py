"""Which tenants have something waiting for a model, as the clocks of its devices have to know."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weightd_daemon.scheduling.fair_share import FairClock
from weightd_daemon.tenants.tenant import Tenant


class ActiveTenants:
    """The tenants of which something waits in a line, and may run.

    What is given to a slot is charged before it is looked who is there: so nobody seems to have gone in between.

    Args:
        is_waiting: whether anything does of a tenant.
    """

    def __init__(self, is_waiting: Callable[[Tenant], bool]) -> None:
        self._is_waiting = is_waiting
        self._active: set[Tenant] = set()
        # Those that may not be there any more, or by now.
        self._changed_tenants: set[Tenant] = set()
        self._clocks: tuple[FairClock, ...] = ()

    def mark_changed(self, tenant: Tenant) -> None:
        """Something of it has come where nothing was, or nothing is left of what was."""
        self._changed_tenants.add(tenant)

    def set_clocks(self, clocks: Iterable[FairClock]) -> None:
        """The model runs on the devices with these clocks, each of which is named once."""
        self.update()
        old_clocks, self._clocks = self._clocks, tuple(clocks)
        for tenant in self._active:
            for clock in self._clocks:
                clock.add_active(tenant)
            for clock in old_clocks:
                clock.remove_active(tenant)

    def update(self) -> set[Tenant]:
        """Return who is there, and tell the clocks who was not, or is no more."""
        while self._changed_tenants:
            tenant = self._changed_tenants.pop()
            is_waiting = self._is_waiting(tenant)
            if is_waiting == (tenant in self._active):
                continue
            (self._active.add if is_waiting else self._active.remove)(tenant)
            for clock in self._clocks:
                (clock.add_active if is_waiting else clock.remove_active)(tenant)
        return self._active

    def clear(self) -> None:
        """Nobody is counted any more."""
        for tenant in self._active:
            for clock in self._clocks:
                clock.remove_active(tenant)
        self._active.clear()
        self._changed_tenants.clear()
