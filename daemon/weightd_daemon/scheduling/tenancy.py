"""Scheduling for several tenants at one model: detects them, holds back long requests, and charges batches."""

from __future__ import annotations

import math
from collections.abc import Callable

from weightd_daemon.scheduling.batch import Batch
from weightd_daemon.scheduling.batching.policy import NO_BATCHING
from weightd_daemon.scheduling.fair_share import MULTI_TENANT_HOLD_S, Durations, FairClocks, Users
from weightd_daemon.scheduling.measurements import BatchTimes
from weightd_daemon.scheduling.queues import AnyQueue
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.request_queue import RequestQueue
from weightd_daemon.scheduling.slots import Slot, SlotPool
from weightd_daemon.tenants.tenant import Tenant

# Maximum seconds for which a slot that was lost because of a tenant counts as used by the tenant. If the slot is
# replaced sooner, it stops counting then.
REPLACEMENT_TIMEOUT_S = 10.0

# Seconds after a request of a tenant for which no batches of other tenants are queued behind running batches. Otherwise
# the tenant's next request, which often follows soon, would have to wait for the queued batches, too.
_RECENT_REQUEST_S = 1.0


class Tenancy:
    """Tracks whether several tenants use one model, holds back long requests, and charges batches to tenants.

    While only one tenant sends requests, nothing is measured or charged.

    Args:
        queue: the queue of the model.
        slots: the slots of the model.
        times: the durations of the model's batches.
        clocks: the fair-share clocks of the devices, for all models.
        users: the tenants that use the slots; one object for all models of a shared process.
        concurrency: the number of batches that the slots can run at once when all of them are available.
        schedule_by: called with the time when a long request that is held back may start.

    Attributes:
        last_tenant: the tenant that sent the last request to this model.
        next_long_at: when a long request that is held back may start, even if no other event happens.
        clocks: as above.
    """

    def __init__(  # noqa: PLR0913
        self,
        queue: RequestQueue,
        slots: SlotPool,
        times: BatchTimes,
        clocks: FairClocks,
        users: Users,
        *,
        concurrency: int,
        schedule_by: Callable[[float], object],
    ) -> None:
        self._queue = queue
        self._slots = slots
        self._times = times
        self.clocks = clocks
        self._users = users
        self._concurrency = concurrency
        self._schedule_by = schedule_by
        self._durations = Durations()
        # `_last_request_at`: when `last_tenant` sent its last request. `_other_request_at`: when any other tenant last
        # sent one. Both are recorded only while several tenants send requests.
        self.last_tenant: Tenant | None = None
        self._last_request_at = self._other_request_at = -math.inf
        self.next_long_at = math.inf
        self._device_count = 0
        # For each tenant that lost a slot: the number of slots before the loss, and when to stop waiting for the
        # replacement.
        self._unreplaced_by_tenant: dict[Tenant, tuple[int, float]] = {}

    def on_request(self, request: Request, now: float) -> bool:
        """Record that a request has arrived; return whether several tenants send requests to the daemon's models."""
        clocks, tenant = self.clocks, request.tenant
        clocks.on_request(tenant, now)
        if self.last_tenant not in (None, tenant):
            clocks.multi_tenant_until = now + MULTI_TENANT_HOLD_S
        if now >= clocks.multi_tenant_until:
            self.last_tenant = tenant
            return False
        self._users.on_request(tenant, now)
        if not self._queue.is_multi_tenant:
            self._start()
            self._last_request_at = now
            if self.last_tenant is not None:
                # Until now, only this tenant sent requests, and their times were not recorded. Record one, so that the
                # tenant counts as active.
                self._users.on_request(self.last_tenant, now)
        if tenant is not self.last_tenant:
            self.last_tenant, self._other_request_at = tenant, self._last_request_at
        self._last_request_at = now
        return True

    def update(self, now: float) -> None:
        """Detect whether there are several tenants now, and switch the queue and the clocks if this has changed."""
        request_queue, clocks = self._queue, self.clocks
        if len(self._slots.seen_devices) != self._device_count:
            self._update_devices()
        if not request_queue.is_multi_tenant:
            self._start()
        elif len(request_queue.tenants) > 1:
            clocks.multi_tenant_until = max(clocks.multi_tenant_until, now + MULTI_TENANT_HOLD_S)
        elif now >= clocks.multi_tenant_until:
            # Tenants with running requests are active, too, because these requests may return to the queue.
            active = {each.tenant for each in self._queue} | {each.request.tenant for each in self._slots.awaited_items}
            if len(active) > 1:
                clocks.multi_tenant_until = now + MULTI_TENANT_HOLD_S
                return
            known = active if self.last_tenant is None else {*active, self.last_tenant}
            if any(self._durations.longest_s(each) > self._long_threshold_s(each, now) for each in known):
                # A tenant with long requests is kept from the last slot only while several tenants are assumed.
                # Continue to assume several tenants, so that the slot stays reserved for tenants that were active
                # recently.
                return
            # Set `last_tenant` to the tenant that is left, because the next request of any other tenant will show that
            # there are several tenants again.
            self.last_tenant = next(iter(active), self.last_tenant)
            request_queue.stop_multi_tenant()

    def has_others(self, now: float) -> bool:
        """Return whether several tenants need slots: they have queued requests, or have sent one very recently."""
        active = self._queue.active_tenants.update()
        other_request_at = self._other_request_at if self.last_tenant in active else self._last_request_at
        return len(active) > 1 or now < other_request_at + _RECENT_REQUEST_S

    def max_batch_s(self, default_s: float, now: float) -> float:
        """Return the maximum expected seconds of a batch; `default_s` while no other tenant waits for a slot."""
        return self.clocks.max_batch_s if self._queue.is_multi_tenant and self.has_others(now) else default_s

    def is_long(self, request: Request, now: float) -> bool:
        """Return whether a request is expected to run longer than other tenants should have to wait."""
        seconds = self._durations.expected_s(request.tenant, request.content_bytes)
        if seconds <= self.clocks.max_batch_s or seconds <= self._long_threshold_s(request.tenant, now):
            return False
        policy = next((slot.policy for slot in self._slots), NO_BATCHING)
        batch_key = policy.batch_key(request.description)
        return batch_key is None or not policy.should_split(batch_key, request.origin.principal)

    def is_head_long(self, queue: AnyQueue, request: Request, now: float) -> bool:
        """Return whether the first request of a queue is long.

        The first request of `normal` never is, because `Turns.move_long` moves long requests to another queue.
        """
        request_queue = self._queue
        return request_queue.is_multi_tenant and queue is not request_queue.normal and self.is_long(request, now)

    def may_start(self, queue: AnyQueue, request: Request, now: float) -> bool:
        """Return whether the first request of a queue may take a free slot.

        A long request leaves the last free slot to other tenants.

        If the model has only one slot, a long request may take it. Further long requests of the same tenant are then
        held back, so that the tenant gets no more than its share of the time even while the other tenants have nothing
        queued.
        """
        if not self.is_head_long(queue, request, now):
            return True
        if self._concurrency > 1:
            max_batch_s = self.clocks.max_batch_s
            spare = sum(max(0, each.concurrency - each.count_long(now, max_batch_s)) for each in self._slots.active)
            allowed_at = now if spare > 1 else math.inf
        else:
            allowed_at = self._users.long_allowed_at(request.tenant, now)
        if allowed_at <= now:
            return True
        self.next_long_at = min(self.next_long_at, allowed_at, self._users.active_until(request.tenant, now))
        self._schedule_by(self.next_long_at)
        return False

    def on_ran(self, request: Request, seconds: float, now: float) -> None:
        """Record that a slot has run a batch of one whole request, which took `seconds`."""
        tenant = request.tenant
        self._durations.add(tenant, request.content_bytes, seconds, now)
        self._users.add_time(tenant, seconds)
        if self._concurrency == 1 and seconds > self.clocks.max_batch_s:
            self._users.add_long_time(tenant, seconds, now)

    def charge(self, slot: Slot, batch: Batch) -> None:
        """Charge the tenants of a batch, in proportion to their rows, on the clock of the slot's device."""
        shares: dict[Tenant, float] = {}
        rows = sum([item.rows for item in batch.items.values()])
        for item in batch.items.values():
            share = item.rows / rows if rows else 1.0 / len(batch.items)
            shares[item.request.tenant] = shares.get(item.request.tenant, 0.0) + share
        batch.charge = self.clocks.clock_of(slot.device).start_batch(shares, self._times.expected_s(slot.device, batch))

    # --- lost slots ---------------------------------------------------------------------------------------------

    def is_confined_running(self, tenant: Tenant | None = None) -> bool:
        """Return whether a slot has a confined request, or was lost because of a tenant and is not replaced yet.

        If `tenant` is given, only the requests and lost slots of this tenant count.
        """
        if self._unreplaced_by_tenant and (tenant is None or tenant in self._unreplaced_by_tenant):
            return True
        return any(slot.has_confined and (tenant is None or tenant in slot.tenants) for slot in self._slots)

    def record_tenant_loss(self, tenant: Tenant, now: float) -> None:
        """Record that a slot is about to be lost because of a tenant's requests.

        The slot counts as used by the tenant until it is replaced, or for at most `REPLACEMENT_TIMEOUT_S`.
        """
        deadline = now + REPLACEMENT_TIMEOUT_S
        self._unreplaced_by_tenant[tenant] = len(self._slots.active), deadline
        self._schedule_by(deadline)

    def update_unreplaced(self, now: float) -> None:
        """Stop counting lost slots that have been replaced, or whose replacement takes too long."""
        if not self._unreplaced_by_tenant:
            return
        slot_count = len(self._slots.active)
        self._unreplaced_by_tenant = {
            tenant: (count, deadline)
            for tenant, (count, deadline) in self._unreplaced_by_tenant.items()
            if slot_count < count and now < deadline
        }

    # --- private ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Prepare the queue and the clocks for several tenants, and charge the batches that run already."""
        self._queue.start_multi_tenant()
        self._update_devices()
        for slot in self._slots:
            for batch in slot.batches.values():
                if batch.charge is None:
                    self.charge(slot, batch)

    def _update_devices(self) -> None:
        """Enter the tenants with queued requests in the fair-share clock (`FairClock`) of each device of the model."""
        self._device_count = len(self._slots.seen_devices)
        if self._queue.is_multi_tenant:
            self._queue.active_tenants.set_clocks(
                dict.fromkeys(self.clocks.clock_of(device) for device in self._slots.seen_devices)
            )

    def _long_threshold_s(self, tenant: Tenant, now: float) -> float:
        return self._users.long_threshold_s(tenant, self.clocks.max_batch_s, now)
