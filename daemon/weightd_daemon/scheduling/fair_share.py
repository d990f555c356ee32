"""Fair shares of the seconds of devices among tenants: start-time fair queueing, with costs that are known afterwards.

Each device has a clock of virtual time, for all models that run there. A tenant's account on it says how many seconds
it has had, divided by its weight; whoever has least of those that wait is next. A batch is charged as it begins, by a
guess, so that who has several slots begin at once is not taken to have had nothing; when it ends the guess gives way to
what it took. Who had nothing waiting and nothing running begins at what the clock says: idleness gives no credit.

Plain decisions, without a clock of their own but for what they are told.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightd_common.devices import CPU, is_cpu
from weightd_daemon.tenants.tenant import Tenant

# While somebody waits who has had less than the others, it is owed no more than this, in seconds of its weight: it may
# have waited for a model that has few slots, and would otherwise have all slots of another one for as long, one day.
MAX_CREDIT_S = 1.0

# So long after two tenants have asked, both are counted on.
MULTI_TENANT_HOLD_S = 10.0

# Accounts that nobody needs any more are looked for when there are more than these, and twice as many as were needed.
_MIN_SHARES = 16


@dataclass(eq=False, slots=True)
class _TenantShare:
    """What a tenant has had of a device.

    Attributes:
        virtual_s: for what has ended, in seconds divided by its weight.
        weight: by which that was divided.
        pending_s: for what has not, in seconds.
        active_count: the lines in which something of it waits, and the batches of it that run.
        last_batch_number: the number of the last batch that it had; of two that have had as much, the other is next.
    """

    virtual_s: float
    weight: float
    pending_s: float = 0.0
    active_count: int = 0
    last_batch_number: int = 0


class FairClock:
    """The virtual time of one device, and the accounts of those who use it."""

    def __init__(self) -> None:
        # What who began last had paid: nothing that is only guessed comes into it, or a wrong guess would stay there.
        self._virtual_time = 0.0
        self._shares: dict[Tenant, _TenantShare] = {}
        self._batch_numbers = itertools.count(1)
        self._drop_size = _MIN_SHARES

    def __len__(self) -> int:
        return len(self._shares)

    def add_active(self, tenant: Tenant) -> None:
        """Something of the tenant waits in one more line of a model that runs here."""
        tenant_share = self._shares.get(tenant)
        if tenant_share is None:
            self._drop_inactive()
            tenant_share = self._shares[tenant] = _TenantShare(self._virtual_time, tenant.config.weight)
        if not tenant_share.active_count:
            tenant_share.virtual_s = max(tenant_share.virtual_s, self._virtual_time)
        tenant_share.active_count += 1

    def remove_active(self, tenant: Tenant) -> None:
        """Nothing of it waits there any more."""
        tenant_share = self._shares[tenant]
        tenant_share.active_count -= 1
        if not any(each.active_count for each in self._shares.values()):
            # Nobody uses the device: nobody is before anybody else.
            self._virtual_time = max(self._virtual_time, *(each.virtual_s for each in self._shares.values()))
            self._shares.clear()

    def sort_key(self, tenant: Tenant) -> tuple[float, int]:
        """Return what is less for a tenant that is next. There is an account of it."""
        tenant_share = self._share_of(tenant)
        min_virtual_s = self._virtual_time - MAX_CREDIT_S / tenant_share.weight
        return (
            max(tenant_share.virtual_s + tenant_share.pending_s / tenant_share.weight, min_virtual_s),
            tenant_share.last_batch_number,
        )

    def start_batch(self, shares: Mapping[Tenant, float], expected_s: float) -> Charge:
        """A batch begins that will take about so many seconds, of which these tenants have these shares.

        The first of them is the one whose turn it was.
        """
        virtual_time, batch_number = self._virtual_time, next(self._batch_numbers)
        entries: list[tuple[Tenant, float, float]] = []
        for index, (tenant, share) in enumerate(shares.items()):
            self.add_active(tenant)
            tenant_share = self._share_of(tenant)
            tenant_share.virtual_s = max(tenant_share.virtual_s, virtual_time - MAX_CREDIT_S / tenant_share.weight)
            if not index:
                self._virtual_time = max(virtual_time, tenant_share.virtual_s)
            guessed = expected_s * share
            tenant_share.pending_s += guessed
            tenant_share.last_batch_number = batch_number
            entries.append((tenant, share, guessed))
        return Charge(self, entries)

    def finish_batch(self, entries: Iterable[tuple[Tenant, float, float]], seconds: float) -> None:
        """A batch that had begun has ended after so many seconds."""
        for tenant, share, guessed in entries:
            tenant_share = self._share_of(tenant)
            tenant_share.pending_s = max(0.0, tenant_share.pending_s - guessed)
            tenant_share.virtual_s += seconds * share / tenant_share.weight
        for tenant, _, _ in entries:
            self.remove_active(tenant)

    def _share_of(self, tenant: Tenant) -> _TenantShare:
        """Return the account of a tenant, of which there is one.

        Where its weight has changed, it is as many seconds before the clock, or behind it, as it was: who is given more
        does not wait for what it has had when it was given less.
        """
        tenant_share, weight = self._shares[tenant], tenant.config.weight
        if tenant_share.weight != weight:
            tenant_share.virtual_s = (
                self._virtual_time + (tenant_share.virtual_s - self._virtual_time) * tenant_share.weight / weight
            )
            tenant_share.weight = weight
        return tenant_share

    def _drop_inactive(self) -> None:
        """Who has nothing here, and would begin at the clock's time, needs no account."""
        if len(self._shares) < self._drop_size:
            return
        shares = {
            name: each
            for name, each in self._shares.items()
            if each.active_count or each.virtual_s > self._virtual_time
        }
        self._shares = shares
        self._drop_size = max(_MIN_SHARES, 2 * len(shares))


class Charge:
    """What a batch that runs has been charged.

    Args:
        clock: of the device where it runs.
        entries: of each tenant its share of the batch, and the seconds that were charged.
    """

    __slots__ = ("_clock", "_entries")

    def __init__(self, clock: FairClock, entries: Sequence[tuple[Tenant, float, float]]) -> None:
        self._clock = clock
        self._entries = entries

    def settle(self, seconds: float) -> None:
        """The batch has ended, and has had its slot for so many seconds that count."""
        self._clock.finish_batch(self._entries, seconds)


class FairClocks:
    """The clocks of all devices: one object for all models. The CPU is one device, and so are all sets of its cores.

    Args:
        max_batch_s: while another tenant waits, rows that go together, or are cut, take no longer than this, about.

    Attributes:
        max_batch_s: as above.
        last_tenant: who has asked last; None before anybody has.
        multi_tenant_until: so long there are several tenants, as far as is known. While there is one, nobody is
            charged.
    """

    def __init__(self, max_batch_s: float = 0.1) -> None:
        self.max_batch_s = max_batch_s
        self.last_tenant: Tenant | None = None
        self.multi_tenant_until = -float("inf")
        self._clocks: dict[str, FairClock] = {}

    def clock_of(self, device: str) -> FairClock:
        """Return the clock of a device."""
        clock = self._clocks.get(device)
        if clock is None:
            clock_device = CPU if is_cpu(device) else device
            clock = self._clocks[device] = self._clocks.setdefault(clock_device, FairClock())
        return clock

    def on_request(self, tenant: Tenant, now: float) -> None:
        """Somebody asks for anything."""
        if tenant is not self.last_tenant:
            if self.last_tenant is not None:
                self.multi_tenant_until = now + MULTI_TENANT_HOLD_S
            self.last_tenant = tenant
