"""Fair shares of the seconds of devices among tenants: start-time fair queueing, with costs that are known afterwards.

Each device has a clock of virtual time, for all models that run there. A tenant's account on it says how many seconds
it has had, divided by its weight; whoever has least of those that wait is next. A job is charged as it begins, by a
guess, so that who has several seats begin at once is not taken to have had nothing; when it ends the guess gives way to
what it took. Who had nothing waiting and nothing running begins at what the clock says: idleness gives no credit.

Plain decisions, without a clock of their own but for what they are told.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightd.daemon.tenants.tenant import Tenant
from weightd.shared.devices import CPU, is_cpu

# While somebody waits who has had less than the others, it is owed no more than this, in seconds of its weight: it may
# have waited for a model that has few seats, and would otherwise have all seats of another one for as long, one day.
MOST_OWED_S = 1.0

# So long after two tenants have asked, both are counted on.
SEVERAL_S = 10.0

# Accounts that nobody needs any more are looked for when there are more than these, and twice as many as were needed.
_LEAST_KEPT = 16


@dataclass(eq=False, slots=True)
class _Account:
    """What a tenant has had of a device.

    Attributes:
        paid: for what has ended, in seconds divided by its weight.
        weight: by which that was divided.
        guessed: for what has not, in seconds.
        stays: the lines in which something of it waits, and the jobs of it that run.
        turn: the number of the last job that it had; of two that have had as much, the other is next.
    """

    paid: float
    weight: float
    guessed: float = 0.0
    stays: int = 0
    turn: int = 0


class Clock:
    """The virtual time of one device, and the accounts of those who use it."""

    def __init__(self) -> None:
        # What who began last had paid: nothing that is only guessed comes into it, or a wrong guess would stay there.
        self._now = 0.0
        self._accounts: dict[Tenant, _Account] = {}
        self._turns = itertools.count(1)
        self._look_at = _LEAST_KEPT

    def __len__(self) -> int:
        return len(self._accounts)

    def comes(self, tenant: Tenant) -> None:
        """Something of the tenant waits in one more line of a model that runs here."""
        account = self._accounts.get(tenant)
        if account is None:
            self._forget()
            account = self._accounts[tenant] = _Account(self._now, tenant.config.weight)
        if not account.stays:
            account.paid = max(account.paid, self._now)
        account.stays += 1

    def goes(self, tenant: Tenant) -> None:
        """Nothing of it waits there any more."""
        account = self._accounts[tenant]
        account.stays -= 1
        if not any(each.stays for each in self._accounts.values()):
            # Nobody uses the device: nobody is before anybody else.
            self._now = max(self._now, *(each.paid for each in self._accounts.values()))
            self._accounts.clear()

    def order(self, tenant: Tenant) -> tuple[float, int]:
        """Return what is less for a tenant that is next. There is an account of it."""
        account = self._of(tenant)
        owed = self._now - MOST_OWED_S / account.weight
        return max(account.paid + account.guessed / account.weight, owed), account.turn

    def begin(self, shares: Mapping[Tenant, float], guess: float) -> Bill:
        """A job begins that will take about so many seconds, of which these tenants have these shares.

        The first of them is the one whose turn it was.
        """
        now, turn = self._now, next(self._turns)
        entries: list[tuple[Tenant, float, float]] = []
        for index, (tenant, share) in enumerate(shares.items()):
            self.comes(tenant)
            tenant_share = self._of(tenant)
            tenant_share.paid = max(tenant_share.paid, now - MOST_OWED_S / tenant_share.weight)
            if not index:
                self._now = max(now, tenant_share.paid)
            guessed = guess * share
            tenant_share.guessed += guessed
            tenant_share.turn = turn
            entries.append((tenant, share, guessed))
        return Bill(self, entries)

    def end(self, entries: Iterable[tuple[Tenant, float, float]], seconds: float) -> None:
        """A job that had begun has ended after so many seconds."""
        for tenant, share, guessed in entries:
            tenant_share = self._of(tenant)
            tenant_share.guessed = max(0.0, tenant_share.guessed - guessed)
            tenant_share.paid += seconds * share / tenant_share.weight
        for tenant, _, _ in entries:
            self.goes(tenant)

    def _of(self, tenant: Tenant) -> _Account:
        """Return the account of a tenant, of which there is one.

        Where its weight has changed, it is as many seconds before the clock, or behind it, as it was: who is given more
        does not wait for what it has had when it was given less.
        """
        account, weight = self._accounts[tenant], tenant.config.weight
        if account.weight != weight:
            account.paid = self._now + (account.paid - self._now) * account.weight / weight
            account.weight = weight
        return account

    def _forget(self) -> None:
        """Who has nothing here, and would begin at the clock's time, needs no account."""
        if len(self._accounts) < self._look_at:
            return
        kept = {name: each for name, each in self._accounts.items() if each.stays or each.paid > self._now}
        self._accounts = kept
        self._look_at = max(_LEAST_KEPT, 2 * len(kept))


class Bill:
    """What a job that runs has been charged.

    Args:
        clock: of the device where it runs.
        entries: of each tenant its share of the job, and the seconds that were charged.
    """

    __slots__ = ("_clock", "_entries")

    def __init__(self, clock: Clock, entries: Sequence[tuple[Tenant, float, float]]) -> None:
        self._clock = clock
        self._entries = entries

    def settle(self, seconds: float) -> None:
        """The job has ended, and has had its seat for so many seconds that count."""
        self._clock.end(self._entries, seconds)


class Clocks:
    """The clocks of all devices: one object for all models. The CPU is one device, and so are all sets of its cores.

    Args:
        max_job_s: while another tenant waits, rows that go together, or are cut, take no longer than this, about.

    Attributes:
        max_job_s: as above.
        last: who has asked last; None before anybody has.
        until: so long there are several tenants, as far as is known. While there is one, nobody is charged.
    """

    def __init__(self, max_job_s: float = 0.1) -> None:
        self.max_job_s = max_job_s
        self.last: Tenant | None = None
        self.until = -float("inf")
        self._clocks: dict[str, Clock] = {}

    def of(self, device: str) -> Clock:
        """Return the clock of a device."""
        clock = self._clocks.get(device)
        if clock is None:
            whole = CPU if is_cpu(device) else device
            clock = self._clocks[device] = self._clocks.setdefault(whole, Clock())
        return clock

    def asks(self, tenant: Tenant, now: float) -> None:
        """Somebody asks for anything."""
        if tenant is not self.last:
            if self.last is not None:
                self.until = now + SEVERAL_S
            self.last = tenant
