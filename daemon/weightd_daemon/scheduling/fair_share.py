"""Fair shares of device time among tenants: start-time fair queueing with costs that are measured after each batch.

Each device has one clock (`FairClock`) for all models that run on the device. On this clock, each tenant has a virtual
time: the device seconds that the tenant has used, divided by the tenant's weight. Of the tenants with queued requests,
the one with the lowest virtual time is next. The virtual time of the device is the virtual time of the tenant whose
batch started last.

When a batch starts, its expected time counts towards the virtual time of its tenant. When the batch ends, the measured
time replaces the expected time. When an idle tenant sends requests again, its virtual time is raised to the device's
virtual time, so that the tenant gets no credit for being idle.

A running batch cannot be stopped. A batch that takes much longer than the batches of other tenants therefore must not
take the last worker of a model; `Durations` and `Users` determine which batches are long. Nothing is measured while
only one tenant sends requests.

The classes do not read the system's clock; callers pass the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightd_common.devices import CPU, is_cpu
from weightd_daemon.tenants.tenant import Tenant

# Seconds for which a tenant counts as active after each request. With a shorter period, a tenant that sends only
# occasional requests would find all workers held by long batches of others each time.
ACTIVE_S = 60.0

# A batch is long if it takes more than this multiple of the mean batch duration of another active tenant.
_LONG_FACTOR = 2.0

# A measured duration is remembered for this multiple of itself: 1 s for 100 s. If the tenant sends its next long
# request later, the request is not recognized as long. So unrecognized long requests take at most a hundredth of the
# time.
_RETENTION_FACTOR = 100.0

# Weight of the latest batch in the exponentially weighted mean of a tenant's batch durations.
_WEIGHT = 0.2


# Maximum device seconds that a waiting tenant is owed because other tenants used the device. Without this limit, a
# tenant that has waited long for a model with few slots would later hold all slots of another model for as long.
MAX_CREDIT_S = 1.0

# Seconds for which the scheduler assumes several tenants after requests of two tenants have arrived.
MULTI_TENANT_HOLD_S = 10.0

# Inactive tenants are removed from a clock when it has at least this number of tenants, and at least twice the number
# that remained after the last removal.
_MIN_SHARES = 16


@dataclass(eq=False, slots=True)
class _TenantShare:
    """A tenant's virtual time on one device. The tenant with the lowest virtual time is served next.

    Attributes:
        virtual_s: the device seconds that the tenant's ended batches have used, divided by the tenant's weight.
        weight: the weight by which `virtual_s` was divided; after a reload, the tenant may have another weight.
        pending_s: the expected device seconds of running batches.
        active_count: the number of models for which the tenant has runnable requests on the device, plus its running
            batches.
        last_batch_number: the number of the batch that the tenant started last. Of two tenants with equal virtual
            times, the one with the lower number is next.
    """

    virtual_s: float
    weight: float
    pending_s: float = 0.0
    active_count: int = 0
    last_batch_number: int = 0


class FairClock:
    """The virtual times of one device and of the tenants that use the device."""

    def __init__(self) -> None:
        # The virtual time of the device: the virtual time of the tenant whose batch started last, without the estimates
        # for running batches. The device's virtual time never decreases, so an estimate that is too high could not be
        # corrected.
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
            # The device is idle, so no tenant has to wait for another. Forget all tenants; new tenants start at the
            # device's virtual time, which is now at least the virtual time of each forgotten tenant.
            self._virtual_time = max(self._virtual_time, *(each.virtual_s for each in self._shares.values()))
            self._shares.clear()

    def sort_key(self, tenant: Tenant) -> tuple[float, int]:
        """Return the sort key of a tenant that is on the clock; the tenant with the smallest key is next."""
        tenant_share = self._share_of(tenant)
        min_virtual_s = self._virtual_time - MAX_CREDIT_S / tenant_share.weight
        return (
            max(tenant_share.virtual_s + tenant_share.pending_s / tenant_share.weight, min_virtual_s),
            tenant_share.last_batch_number,
        )

    def start_batch(self, shares: Mapping[Tenant, float], expected_s: float) -> Charge:
        """Charge a batch that starts now and is expected to take `expected_s` seconds.

        `shares` has each tenant's fraction of the batch. The first tenant is the one whose turn it was: the device's
        virtual time advances to this tenant's.
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
        """Replace the expected seconds that were charged for a batch by its measured time."""
        for tenant, share, guessed in entries:
            tenant_share = self._share_of(tenant)
            tenant_share.pending_s = max(0.0, tenant_share.pending_s - guessed)
            tenant_share.virtual_s += seconds * share / tenant_share.weight
        for tenant, _, _ in entries:
            self.remove_active(tenant)

    def _share_of(self, tenant: Tenant) -> _TenantShare:
        """Return the tenant's share of this device, after converting its virtual time if its weight has changed.

        Virtual time is device seconds divided by the weight. The conversion keeps the device seconds by which the
        tenant is ahead of the device. Without it, a tenant whose weight is raised would wait longer for the seconds
        that it used before.
        """
        tenant_share, weight = self._shares[tenant], tenant.config.weight
        if tenant_share.weight != weight:
            tenant_share.virtual_s = (
                self._virtual_time + (tenant_share.virtual_s - self._virtual_time) * tenant_share.weight / weight
            )
            tenant_share.weight = weight
        return tenant_share

    def _drop_inactive(self) -> None:
        """Remove inactive tenants whose virtual time is at most the device's, at which new entries start anyway."""
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
    """The expected device time that the tenants of a running batch have been charged.

    Args:
        clock: the clock of the batch's device.
        entries: each tenant of the batch, with the tenant's fraction of the batch and the expected seconds charged.
    """

    __slots__ = ("_clock", "_entries")

    def __init__(self, clock: FairClock, entries: Sequence[tuple[Tenant, float, float]]) -> None:
        self._clock = clock
        self._entries = entries

    def settle(self, seconds: float) -> None:
        """Record that the batch has ended, and replace the charged estimates by the measured `seconds`."""
        self._clock.finish_batch(self._entries, seconds)


class FairClocks:
    """The clocks of all devices, shared by all models. The CPU is one device, whatever set of its cores a model uses.

    Args:
        max_batch_s: the maximum expected seconds of a shared batch, or of a part of a split request, while another
            tenant waits.

    Attributes:
        max_batch_s: as above.
        last_tenant: the tenant of the last request; None before the first request.
        multi_tenant_until: the time until which the scheduler assumes that several tenants send requests. With a single
            tenant, nothing is charged.
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
    """Registers the tenants that have runnable requests for one model on the clocks of the model's devices.

    Callers charge a batch before they call `update`, so that a tenant stays active without a gap when its last queued
    request starts.

    Args:
        is_waiting: called with a tenant; returns whether the tenant has runnable requests.
    """

    def __init__(self, is_waiting: Callable[[Tenant], bool]) -> None:
        self._is_waiting = is_waiting
        self._active: set[Tenant] = set()
        # Tenants that may have become active or inactive since the last call of `update`.
        self._changed_tenants: set[Tenant] = set()
        self._clocks: tuple[FairClock, ...] = ()

    def mark_changed(self, tenant: Tenant) -> None:
        """Record that a tenant's first request has been queued, or that its last request has left the queue."""
        self._changed_tenants.add(tenant)

    def set_clocks(self, clocks: Iterable[FairClock]) -> None:
        """Replace the clocks, because the set of the model's devices has changed. `clocks` must have no duplicates."""
        self.update()
        old_clocks, self._clocks = self._clocks, tuple(clocks)
        for tenant in self._active:
            for clock in self._clocks:
                clock.add_active(tenant)
            for clock in old_clocks:
                clock.remove_active(tenant)

    def update(self) -> set[Tenant]:
        """Register the tenants that have runnable requests now, unregister all others; return the former."""
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
    """Durations of the batches of one model, by tenant and by size of the request.

    Sizes in bytes with equal bit length count as the same size.

    Each tenant has separate durations, because a duration may depend on the values of the inputs: the requests of one
    tenant say nothing about the requests of another.
    """

    def __init__(self) -> None:
        self._by_tenant: dict[Tenant, dict[int, tuple[int, _Measurements]]] = {}

    def add(self, tenant: Tenant, nbytes: int, seconds: float, now: float) -> None:
        """Add the duration of a batch with one request, whose input tensors have `nbytes` bytes."""
        sizes = self._by_tenant.setdefault(tenant, {})
        _, measured = sizes.get(nbytes.bit_length(), (0, ()))
        kept = [each for each in measured if now < each[1] + _RETENTION_FACTOR * each[0]]
        sizes[nbytes.bit_length()] = nbytes, tuple(sorted([*kept, (seconds, now)])[-2:])

    def expected_s(self, tenant: Tenant, nbytes: int) -> float:
        """Return how many seconds a request of this size is expected to take; 0.0 if nothing was measured.

        The estimate is the second longest recent duration, because the longest one may have had another cause than the
        request. For a size that was not measured, the estimate for the nearest measured size is scaled in proportion.
        """
        sizes = self._by_tenant.get(tenant)
        if not sizes:
            return 0.0
        bucket = nbytes.bit_length()
        size, measured = sizes.get(bucket) or sizes[min(sizes, key=lambda each: (abs(each - bucket), each))]
        seconds = measured[0][0]
        return seconds if size.bit_length() == bucket else seconds * nbytes / max(1, size)

    def longest_s(self, tenant: Tenant) -> float:
        """Return the longest expected duration among the tenant's measured sizes; 0.0 if nothing was measured."""
        return max((measured[0][0] for _, measured in self._by_tenant.get(tenant, {}).values()), default=0.0)


class _User:
    __slots__ = ("last_request_at", "long_ended_at", "long_s", "mean_s")

    def __init__(self) -> None:
        self.last_request_at = -float("inf")
        self.mean_s = 0.0
        self.long_s = 0.0
        self.long_ended_at = -float("inf")


class Users:
    """The tenants that use the workers of a model or of a model group, with the times of their requests and batches."""

    def __init__(self) -> None:
        self._users: dict[Tenant, _User] = {}

    def on_request(self, tenant: Tenant, now: float) -> None:
        """Record that a tenant has sent a request."""
        self._user_of(tenant).last_request_at = now

    def add_time(self, tenant: Tenant, seconds: float) -> None:
        """Record the duration of a batch with a single request of a tenant."""
        user = self._user_of(tenant)
        user.mean_s += (_WEIGHT if user.mean_s else 1.0) * (seconds - user.mean_s)

    def long_threshold_s(self, tenant: Tenant, min_s: float, now: float) -> float:
        """Return the duration in seconds above which a tenant's batch is long; infinity if no other tenant is active.

        Args:
            tenant: the tenant of the batch.
            min_s: the minimum duration to return.
            now: the time in monotonic seconds.
        """
        means = [self._users[each].mean_s for each in self._other_active_tenants(tenant, now)]
        return max(min_s, _LONG_FACTOR * min(means)) if means else float("inf")

    def add_long_time(self, tenant: Tenant, seconds: float, now: float) -> None:
        """Record that a long batch of a tenant has held the only worker for `seconds`."""
        user = self._user_of(tenant)
        user.long_s, user.long_ended_at = seconds, now

    def long_allowed_at(self, tenant: Tenant, now: float) -> float:
        """Return when a long batch of a tenant may take the only worker again.

        Until this time, the worker is reserved for the other active tenants. The reservation lasts as long as the
        tenant's last long batch took, multiplied by the total weight of the other tenants and divided by the tenant's
        weight.
        """
        user, weights = (
            self._user_of(tenant),
            sum(each.config.weight for each in self._other_active_tenants(tenant, now)),
        )
        return user.long_ended_at + user.long_s * weights / tenant.config.weight

    def active_until(self, tenant: Tenant, now: float) -> float:
        """Return the time until which another tenant is active if no more requests arrive; `now` if none is active."""
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
