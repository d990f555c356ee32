"""Fair shares of device time among tenants: start-time fair queueing with costs that are measured afterwards.

Each device has a clock of virtual time, for all models that run there. A tenant's account on the clock is the number of
seconds that it has used, divided by its weight; of the tenants with requests in the queue, the one with the least is
next. A batch is charged an estimate when it starts, so that a tenant with several batches in a row does not seem to
have used nothing; when the batch ends, the measured time replaces the estimate. A tenant that was idle starts at the
current value of the clock: idleness gives no credit.

A running batch cannot be stopped. A batch that takes much longer than the batches of other tenants therefore must not
take the last worker of a model; `Durations` and `Users` determine which batches are long. Nothing is measured while
only one tenant sends requests.

The classes have no clock; callers pass the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightd_common.devices import CPU, is_cpu
from weightd_daemon.tenants.tenant import Tenant

# A tenant stays active for this many seconds after each request. A tenant that sends a request now and then would
# otherwise find all workers busy each time.
ACTIVE_S = 60.0

# A batch is long if it takes more than this many times as long as a batch of another tenant.
_LONG_FACTOR = 2.0

# A measured time is replaced by a shorter one only after this many times its own length. A tenant that sends short
# requests for a while to hide a long one can thereby gain at most a hundredth of the time.
_RETENTION_FACTOR = 100.0

# The weight of the latest batch in the mean of a tenant.
_WEIGHT = 0.2


# The maximum time that a queued tenant is owed because others had more, in seconds of the device. A tenant may have
# waited for a model with few slots; without this limit it would later hold all slots of another model for as long.
MAX_CREDIT_S = 1.0

# The time in seconds after requests of two tenants for which the scheduler assumes several tenants.
MULTI_TENANT_HOLD_S = 10.0

# Unused accounts are removed when there are at least this many, and twice as many as after the last removal.
_MIN_SHARES = 16


@dataclass(eq=False, slots=True)
class _TenantShare:
    """A tenant's account on the clock of one device.

    Attributes:
        virtual_s: the time of ended batches, in seconds divided by the weight.
        weight: the weight by which that time was divided.
        pending_s: the estimated seconds of running batches.
        active_count: the number of models for which the tenant has runnable requests on the device, plus its running
            batches.
        last_batch_number: the number of the tenant's last batch. Of two tenants with equal time, the one with the older
            batch is next.
    """

    virtual_s: float
    weight: float
    pending_s: float = 0.0
    active_count: int = 0
    last_batch_number: int = 0


class FairClock:
    """The virtual time of one device, and the accounts of the tenants that use it."""

    def __init__(self) -> None:
        # The virtual time of the tenant whose batch started last. It contains no estimates, because a wrong one would
        # remain.
        self._virtual_time = 0.0
        self._shares: dict[Tenant, _TenantShare] = {}
        self._batch_numbers = itertools.count(1)
        self._drop_size = _MIN_SHARES

    def __len__(self) -> int:
        return len(self._shares)

    def add_active(self, tenant: Tenant) -> None:
        """Count the tenant as active for one more model or batch on this device."""
        tenant_share = self._shares.get(tenant)
        if tenant_share is None:
            self._drop_inactive()
            tenant_share = self._shares[tenant] = _TenantShare(self._virtual_time, tenant.config.weight)
        if not tenant_share.active_count:
            tenant_share.virtual_s = max(tenant_share.virtual_s, self._virtual_time)
        tenant_share.active_count += 1

    def remove_active(self, tenant: Tenant) -> None:
        """Count the tenant as active for one model or batch less."""
        tenant_share = self._shares[tenant]
        tenant_share.active_count -= 1
        if not any(each.active_count for each in self._shares.values()):
            # The device is idle, so no tenant is ahead of another.
            self._virtual_time = max(self._virtual_time, *(each.virtual_s for each in self._shares.values()))
            self._shares.clear()

    def sort_key(self, tenant: Tenant) -> tuple[float, int]:
        """Return the sort key of a tenant with an account; the tenant with the smallest key is next."""
        tenant_share = self._share_of(tenant)
        min_virtual_s = self._virtual_time - MAX_CREDIT_S / tenant_share.weight
        return (
            max(tenant_share.virtual_s + tenant_share.pending_s / tenant_share.weight, min_virtual_s),
            tenant_share.last_batch_number,
        )

    def start_batch(self, shares: Mapping[Tenant, float], expected_s: float) -> Charge:
        """Charge a batch that starts now and is expected to take `expected_s` seconds.

        `shares` has each tenant's share of the batch; the first tenant is the one whose turn it was.
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
        """Replace the estimates of a batch by the measured time."""
        for tenant, share, guessed in entries:
            tenant_share = self._share_of(tenant)
            tenant_share.pending_s = max(0.0, tenant_share.pending_s - guessed)
            tenant_share.virtual_s += seconds * share / tenant_share.weight
        for tenant, _, _ in entries:
            self.remove_active(tenant)

    def _share_of(self, tenant: Tenant) -> _TenantShare:
        """Return the existing account of a tenant, adjusted to the tenant's current weight.

        If the weight has changed, the distance from the clock in device seconds stays the same: a tenant that gets a
        higher weight does not wait for time that it used with the lower one.
        """
        tenant_share, weight = self._shares[tenant], tenant.config.weight
        if tenant_share.weight != weight:
            tenant_share.virtual_s = (
                self._virtual_time + (tenant_share.virtual_s - self._virtual_time) * tenant_share.weight / weight
            )
            tenant_share.weight = weight
        return tenant_share

    def _drop_inactive(self) -> None:
        """Remove the accounts of inactive tenants that would start at the clock's time again."""
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
    """The charge of a running batch.

    Args:
        clock: the clock of the batch's device.
        entries: for each tenant its share of the batch and the estimated seconds that were charged.
    """

    __slots__ = ("_clock", "_entries")

    def __init__(self, clock: FairClock, entries: Sequence[tuple[Tenant, float, float]]) -> None:
        self._clock = clock
        self._entries = entries

    def settle(self, seconds: float) -> None:
        """Record that the batch has ended and has used its slot for `seconds`."""
        self._clock.finish_batch(self._entries, seconds)


class FairClocks:
    """The clocks of all devices, shared by all models. The CPU is one device, whatever set of its cores a model uses.

    Args:
        max_batch_s: the approximate maximum duration of shared batches and parts of split requests while another tenant
            waits, in seconds.

    Attributes:
        max_batch_s: as above.
        last_tenant: the tenant of the last request; None before the first.
        multi_tenant_until: until when several tenants are assumed. With a single tenant, nothing is charged.
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
        """Record that a tenant has sent a request to any model."""
        if tenant is not self.last_tenant:
            if self.last_tenant is not None:
                self.multi_tenant_until = now + MULTI_TENANT_HOLD_S
            self.last_tenant = tenant


class ActiveTenants:
    """The tenants with runnable requests for one model, kept up to date on the clocks of the model's devices.

    A batch is charged before `update` runs, so that a tenant whose last request has just started stays active
    throughout.

    Args:
        is_waiting: called with a tenant; returns whether it has runnable requests.
    """

    def __init__(self, is_waiting: Callable[[Tenant], bool]) -> None:
        self._is_waiting = is_waiting
        self._active: set[Tenant] = set()
        # Tenants whose state may have changed since the last update.
        self._changed_tenants: set[Tenant] = set()
        self._clocks: tuple[FairClock, ...] = ()

    def mark_changed(self, tenant: Tenant) -> None:
        """Record that a tenant's first request has been queued, or that its last one has left the queue."""
        self._changed_tenants.add(tenant)

    def set_clocks(self, clocks: Iterable[FairClock]) -> None:
        """Replace the clocks, because the model runs on other devices now. Each clock is given once."""
        self.update()
        old_clocks, self._clocks = self._clocks, tuple(clocks)
        for tenant in self._active:
            for clock in self._clocks:
                clock.add_active(tenant)
            for clock in old_clocks:
                clock.remove_active(tenant)

    def update(self) -> set[Tenant]:
        """Update the active tenants on the clocks, and return these tenants."""
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
        """Remove all tenants from the clocks."""
        for tenant in self._active:
            for clock in self._clocks:
                clock.remove_active(tenant)
        self._active.clear()
        self._changed_tenants.clear()


_Measurements = tuple[tuple[float, float], ...]
"""Up to two durations in seconds, the longer one last, each with the time of its measurement."""


class Durations:
    """Times of the batches of one model, for each tenant and for sizes of requests within a factor of two.

    There are separate times for each tenant because the time may depend on the values of the inputs: the requests of
    one tenant say nothing about the requests of another.
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

        The estimate is the second longest recent time, because the longest one may have had another cause. For a size
        that was not measured, the time of the nearest size is scaled in proportion.
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
        """Return the time in seconds beyond which a tenant's batch is long; infinity while no other tenant is active.

        Args:
            tenant: the tenant of the batch.
            min_s: the minimum of the result.
            now: the time in monotonic seconds.
        """
        means = [self._users[each].mean_s for each in self._other_active_tenants(tenant, now)]
        return max(min_s, _LONG_FACTOR * min(means)) if means else float("inf")

    def add_long_time(self, tenant: Tenant, seconds: float, now: float) -> None:
        """Record that a long batch of a tenant has held the only worker."""
        user = self._user_of(tenant)
        user.long_s, user.long_ended_at = seconds, now

    def long_allowed_at(self, tenant: Tenant, now: float) -> float:
        """Return when a long batch of a tenant may take the only worker again.

        Until then the other tenants have the worker, for a time in proportion to their weights and to the last long
        batch.
        """
        user, weights = (
            self._user_of(tenant),
            sum(each.config.weight for each in self._other_active_tenants(tenant, now)),
        )
        return user.long_ended_at + user.long_s * weights / tenant.config.weight

    def active_until(self, tenant: Tenant, now: float) -> float:
        """Return how long the other tenants stay active, if none of them sends another request."""
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
