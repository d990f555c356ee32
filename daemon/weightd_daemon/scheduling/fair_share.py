"""Fair shares of the seconds of devices among tenants: start-time fair queueing, with costs that are known afterwards.

Each device has a clock of virtual time, for all models that run there. A tenant's account on it says how many seconds
it has had, divided by its weight; of the tenants with requests in the queue the one with the least is next. A batch is
charged as it begins, by an estimate, so that a tenant with several batches in a row does not seem to have had nothing;
when it ends, the measured time replaces the estimate. A tenant that was idle begins at what the clock says: idleness
gives no credit.

A batch that runs cannot be stopped. A batch that takes much longer than those of the other tenants therefore must not
take the last worker of a model: `Durations` and `Users` tell which batches are long. Nothing is measured while only one
tenant sends requests.

The classes decide without a clock of their own: callers pass the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightd_common.devices import CPU, is_cpu
from weightd_daemon.tenants.tenant import Tenant

# A tenant is active for so many seconds after each of its requests. One that sends a request now and then would
# otherwise find all workers taken whenever it does.
ACTIVE_S = 60.0

# A batch is long if it takes more than this many times as long as a batch of another tenant.
_LONG_FACTOR = 2.0

# A measured time is replaced by a shorter one only after this many times its own length. A tenant that sends short
# requests for a while to hide a long one so gets at most a hundredth of the time in this way.
_RETENTION_FACTOR = 100.0

# The weight of the latest batch in the mean of a tenant.
_WEIGHT = 0.2


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


_Measurements = tuple[tuple[float, float], ...]
"""Up to two times in seconds, the longer one last, each with when it was measured."""


class Durations:
    """Times of the batches of one model, for each tenant and for sizes of requests within a factor of two.

    There are separate times for each tenant because the time may depend on the values of the inputs: what one tenant
    sends says nothing about the requests of another.
    """

    def __init__(self) -> None:
        self._by_tenant: dict[Tenant, dict[int, tuple[int, _Measurements]]] = {}

    def add(self, tenant: Tenant, nbytes: int, seconds: float, now: float) -> None:
        """Add the time of a batch with one request, whose input tensors have `nbytes` bytes."""
        sizes = self._by_tenant.setdefault(tenant, {})
        _, measured = sizes.get(nbytes.bit_length(), (0, ()))
        kept = [each for each in measured if now < each[1] + _RETENTION_FACTOR * each[0]]
        sizes[nbytes.bit_length()] = nbytes, tuple(sorted([*kept, (seconds, now)])[-2:])

    def expected_s(self, tenant: Tenant, nbytes: int) -> float:
        """Return how many seconds a request of this size is expected to take; 0.0 if nothing is known.

        That is the second longest time lately, because the longest one may have had another cause. For a size that was
        not measured, the time of the nearest size is scaled in proportion.
        """
        sizes = self._by_tenant.get(tenant)
        if not sizes:
            return 0.0
        bucket = nbytes.bit_length()
        size, measured = sizes.get(bucket) or sizes[min(sizes, key=lambda each: (abs(each - bucket), each))]
        seconds = measured[0][0]
        return seconds if size.bit_length() == bucket else seconds * nbytes / max(1, size)

    def longest_s(self, tenant: Tenant) -> float:
        """Return the longest time that is expected of a size that was measured; 0.0 if none was."""
        return max((measured[0][0] for _, measured in self._by_tenant.get(tenant, {}).values()), default=0.0)


class _User:
    __slots__ = ("last_request_at", "long_ended_at", "long_s", "mean_s")

    def __init__(self) -> None:
        self.last_request_at = -float("inf")
        self.mean_s = 0.0
        self.long_s = 0.0
        self.long_ended_at = -float("inf")


class Users:
    """The tenants that use the workers of a model, or of several models that share their processes."""

    def __init__(self) -> None:
        self._users: dict[Tenant, _User] = {}

    def on_request(self, tenant: Tenant, now: float) -> None:
        """Record that a tenant has sent a request."""
        self._user_of(tenant).last_request_at = now

    def add_time(self, tenant: Tenant, seconds: float) -> None:
        """Record the time of a batch with one request of a tenant."""
        user = self._user_of(tenant)
        user.mean_s += (_WEIGHT if user.mean_s else 1.0) * (seconds - user.mean_s)

    def long_threshold_s(self, tenant: Tenant, min_s: float, now: float) -> float:
        """Return the time in seconds beyond which a batch of a tenant is long.

        Infinity while no other tenant is active.

        Args:
            tenant: of the batch.
            min_s: no batch that takes less is long.
            now: monotonic seconds.
        """
        means = [self._users[each].mean_s for each in self._other_active_tenants(tenant, now)]
        return max(min_s, _LONG_FACTOR * min(means)) if means else float("inf")

    def add_long_time(self, tenant: Tenant, seconds: float, now: float) -> None:
        """Record that a long batch of a tenant has held the only worker."""
        user = self._user_of(tenant)
        user.long_s, user.long_ended_at = seconds, now

    def long_allowed_at(self, tenant: Tenant, now: float) -> float:
        """Return until when no long batch of a tenant may take the only worker again.

        The other tenants have it for as long as their weights give them, compared with the last long batch.
        """
        user, weights = (
            self._user_of(tenant),
            sum(each.config.weight for each in self._other_active_tenants(tenant, now)),
        )
        return user.long_ended_at + user.long_s * weights / tenant.config.weight

    def active_until(self, tenant: Tenant, now: float) -> float:
        """Return until when another tenant than this one is active, if none sends another request."""
        return max(
            (self._users[each].last_request_at + ACTIVE_S for each in self._other_active_tenants(tenant, now)),
            default=now,
        )

    def _user_of(self, tenant: Tenant) -> _User:
        user = self._users.get(tenant)
        if user is None:
            user = self._users[tenant] = _User()
        return user

    def _other_active_tenants(self, tenant: Tenant, now: float) -> list[Tenant]:
        return [
            each for each, user in self._users.items() if each is not tenant and now < user.last_request_at + ACTIVE_S
        ]
