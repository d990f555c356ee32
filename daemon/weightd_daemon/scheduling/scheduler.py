"""Which batch runs on which slot, and when: the `RequestQueue` of one model and its `SlotPool`, put together.

Batches are formed when a slot is free, of what waits then: where the model's rows allow it, of several requests, or of
a part of one. No slot idles while something waits that it could run, and nothing waits for company. Plain decisions,
fed with the clock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from weightd_daemon.scheduling.batch import FIRST_SPLIT_NUMBER, Batch, BatchItem
from weightd_daemon.scheduling.batching import former
from weightd_daemon.scheduling.batching.policy import NO_BATCHING, BatchingPolicy, BatchKey
from weightd_daemon.scheduling.batching.split import SplitRequest
from weightd_daemon.scheduling.fair_share import MULTI_TENANT_HOLD_S, Durations, FairClocks, Users
from weightd_daemon.scheduling.measurements import ExecutionCounters
from weightd_daemon.scheduling.queues import Deadlines
from weightd_daemon.scheduling.request import Isolation, Request
from weightd_daemon.scheduling.request_queue import AnyQueue, RequestQueue
from weightd_daemon.scheduling.slots import Slot, SlotPool
from weightd_daemon.tenants.tenant import Tenant
from weightd_protocol.errors import DeadlineExceeded, RequestError, ResourceExhausted

# A request that runs is not given up earlier than this after the daemon was stopped: its answer may have to be read.
_GRACE_S = 0.5

# When it is due to look at what is aside.
AT_ONCE = 0.0

# So many requests end in one turn of the loop: between two turns other clients are served.
MAX_ENDED_PER_TURN = 32

# So long after another tenant has asked a model, a slot gets nothing ahead: it may ask again.
_RECENT_REQUEST_S = 1.0


class Scheduler:
    """The requests for one model, and the slots that run them.

    Args:
        max_queue: requests that may wait.
        max_queue_bytes: tensor bytes that may wait.
        predict_timeout: seconds after which a slot that computes is held to hang.
        schedule_by: called with a time that is sooner than what `next_event_at` was, and AT_ONCE for what is to
            be checked first.
        levels: of priority.
        clocks: of the devices, for all models.
        concurrency: how many batches the slots can run at once when all of them are there.

    Attributes:
        execution_counters: what has run.
        slots: where it runs.
        queue: what waits.
        clocks: as above.
        deadlines: of the requests that have not ended.
        users: the tenants that use the slots; one object for all models of one process.
    """

    def __init__(  # noqa: PLR0913
        self,
        max_queue: int,
        max_queue_bytes: int,
        predict_timeout: float = float("inf"),
        schedule_by: Callable[[float], object] = lambda _: None,
        *,
        levels: int = 1,
        clocks: FairClocks | None = None,
        concurrency: int = 1,
    ) -> None:
        self._schedule_by = schedule_by
        self.execution_counters = ExecutionCounters()
        self.clocks = clocks if clocks is not None else FairClocks()
        self.slots = SlotPool(predict_timeout, schedule_by, self.execution_counters, self._update_devices, self._on_ran)
        self.queue = RequestQueue(max_queue, max_queue_bytes, levels, self.slots.is_confined_running)
        self._split_numbers = itertools.count(FIRST_SPLIT_NUMBER)
        self.deadlines = Deadlines()
        # Their deadline had passed when it was their turn: `expire` tells.
        self._expired: dict[int, Request] = {}
        # Who has asked this model last, and when; and when anybody else has. While there is one tenant no time is told.
        self._last_tenant: Tenant | None = None
        self._last_request_at = self._other_request_at = -math.inf
        self.users = Users()
        self._durations = Durations()
        self._concurrency = concurrency
        # When a long request may be given to a slot that it was not given to, without any other event.
        self._next_long_at = math.inf
        # They have given way to others.
        self._evicted: list[tuple[Request, RequestError]] = []

    # --- events -------------------------------------------------------------------------------------------------

    def on_request(self, request: Request, now: float) -> None:
        """A request has come. While one tenant alone asks anything of any model, there is nothing to do."""
        clocks, tenant = self.clocks, request.tenant
        if tenant is clocks.last_tenant and tenant is self._last_tenant and now >= clocks.multi_tenant_until:
            return
        clocks.on_request(tenant, now)
        if self._last_tenant not in (None, tenant):
            clocks.multi_tenant_until = now + MULTI_TENANT_HOLD_S
        if now >= clocks.multi_tenant_until:
            self._last_tenant = tenant
            return
        self.users.on_request(tenant, now)
        if not self.queue.is_multi_tenant:
            self._start_multi_tenant()
            self._last_request_at = now
            if self._last_tenant is not None:
                # When that was is not known.
                self.users.on_request(self._last_tenant, now)
        if tenant is not self._last_tenant:
            self._last_tenant, self._other_request_at = tenant, self._last_request_at
        self._last_request_at = now
        # Whoever comes waits for what runs, and no longer.
        items = self.slots.recall_of_others(tenant)
        if items:
            self.queue.put_back(sorted(items, key=lambda item: item.number))

    def try_start(self, request: Request, now: float) -> tuple[Slot, Batch] | None:
        """Have a request run that has just come, if it is its turn and a slot is free; return None if it has to wait.

        If everything was assigned before that could be, then `submit` alone is left to do: it comes to nothing to
        `assign` after it, unless something has begun, and goes on.
        """
        request_queue = self.queue
        if request_queue.is_multi_tenant or request_queue.next_unsplit_queue() is not None or request.deadline <= now:
            return None
        if request.isolation is Isolation.CONFINED and self.slots.is_confined_running():
            return None
        slot = self.slots.least_loaded(request, None, request_queue.normal, now)
        if slot is None or (request_queue.splitting.count and not slot.is_free):
            return None
        batch_key = slot.policy.batch_key(request.description)
        if (
            batch_key is not None
            and request_queue.splitting.count
            and slot.policy.should_split(batch_key, request.origin.principal)
        ):
            return None
        self._watch_deadline(request)
        return slot, self._assign(slot, request, batch_key, now)

    def submit(self, request: Request, now: float, *, needs_check: bool = False, can_evict: bool = True) -> None:
        """Put a request into the line; `needs_check`: it does not run before it is admitted.

        Where there are several tenants, those of another one may give way to it, if it `can_evict`: see `take_evicted`.

        Raises:
            ResourceExhausted: the line is full.
        """
        count = self.queue.count
        full_reason = self.queue.full_reason(request, count) if count else ""
        if full_reason:
            error = ResourceExhausted(full_reason, retry_after=self.slots.retry_after_s(count, now))
            evicted = self.queue.evict_for(request) if can_evict and self.queue.is_multi_tenant else None
            if evicted is None:
                raise error
            self._evicted += [(each, error) for each in evicted]
        if needs_check:
            self.queue.add_unchecked(request)
            self._schedule_by(AT_ONCE)
        else:
            self.queue.append(request)
        self._watch_deadline(request)

    def take_evicted(self) -> Sequence[tuple[Request, RequestError]]:
        """Return what has given way to other requests, each with its error, and forget it."""
        if not self._evicted:
            return ()
        evicted, self._evicted = self._evicted, []
        return evicted

    def assign(self, now: float) -> Iterator[tuple[Slot, Batch]]:
        """Yield each pair of slot and batch that is due now; what is yielded is running.

        If many requests are found to be late, the rest of the work is left to the next turn of the loop.
        """
        request_queue = self.queue
        if request_queue.is_multi_tenant or now < self.clocks.multi_tenant_until:
            self._update_multi_tenant(now)
        if request_queue.splits:
            self._restart_splits()
        self._next_long_at = math.inf
        self.slots.update_unreplaced(now)
        expired = 0
        while expired < MAX_ENDED_PER_TURN and (candidate := self._next_candidate(now)) is not None:
            queue, request, slot = candidate
            queue.remove(request)
            if request.deadline <= now:
                self._expired[request.number] = request
                self.end_split(request)
                expired += 1
                continue
            batch_key = slot.policy.batch_key(request.description)
            should_split = (
                batch_key is not None
                and slot.policy.should_split(batch_key, request.origin.principal)
                and queue is request_queue.normal
            )
            if batch_key is not None and should_split and request_queue.has_splitting(request.tenant):
                # One after another: what is answered to parts is kept until the last of them.
                self._start_split(request, slot.policy, batch_key)
                request_queue.append(request)
                continue
            yield slot, self._assign(slot, request, batch_key, now, is_long=self._is_head_long(queue, request, now))
        if expired == MAX_ENDED_PER_TURN:
            self._schedule_by(AT_ONCE)

    def release_slot(self, process: str, *, excluding: Sequence[Request] = ()) -> None:
        """The slot of the process is gone, or as good as that: what it has not answered waits again, at the head.

        `excluding`: these have ended.
        """
        slot = self.slots.slot_of(process)
        if slot is not None:
            started = [item for batch in slot.batches.values() if batch.has_started for item in batch.awaited_items]
            self.execution_counters.retried_items += sum(item.request not in excluding for item in started)
            self.queue.put_back([item for item in self.slots.remove(slot) if item.request not in excluding])

    def retry_items_alone(self, batch: Batch, *, excluding: Sequence[Request] = ()) -> None:
        """Something became of a batch that says nothing of any of its parts: each of them runs again, alone.

        `excluding`: these have ended.
        """
        batch.isolate_requests()
        retried = [item for item in batch.awaited_items if item.request not in excluding]
        self.execution_counters.retried_items += len(retried)
        self.queue.put_back(retried)

    def retry_alone(self, item: BatchItem) -> None:
        """A batch was refused that had more parts than this one, which runs again without the others."""
        item.request.require_isolation(Isolation.ALONE)
        self.execution_counters.retried_items += 1
        self.queue.put_back([item])

    def take_overdue(self, now: float) -> list[tuple[Slot, Batch]]:
        """Take out the slots that have computed for too long, each with what it runs.

        What they had beside it waits again; what waits behind a batch that only runs long is taken back, too.
        """
        hung_slots: list[tuple[Slot, Batch]] = []
        for each in self.slots.take_overdue(now):
            self.queue.put_back(each.requeued)
            if each.hung_batch is not None:
                hung_slots.append((each.slot, each.hung_batch))
        return hung_slots

    def require_check(self, matches: Callable[[Request], bool]) -> list[Request]:
        """Have what waits and is `matches` not run before it is admitted; return it. What has begun goes on."""
        if moved := self.queue.move_to_unchecked(matches):
            self._schedule_by(AT_ONCE)
        return moved

    def confine(self, matches: Callable[[Request], bool]) -> None:
        """Have what is `matches` run one at a time: what waits, and what is with a slot if it has to run again."""
        for request in filter(matches, self._outstanding()):
            request.require_isolation(Isolation.CONFINED)
        self.queue.confine(matches)

    def end_split(self, request: Request) -> None:
        """A request has ended: if it runs in parts, nothing more of it runs, and what runs nobody waits for."""
        split = self.queue.remove_split(request)
        if split is not None:
            self.slots.recall_split(split)

    def expire(self, now: float) -> list[tuple[Request, RequestError]]:
        """Give up up to `MAX_ENDED_PER_TURN` requests whose deadlines have passed.

        A late answer to one will find nobody.

        `next_event_at` is not later than `now` while there are more.
        """
        due = self.deadlines.take_due(now, MAX_ENDED_PER_TURN)
        if not due:
            return []
        running = self.slots.end_requests(due)
        expired: list[tuple[Request, RequestError]] = []
        for request in due:
            was_waiting = self._expired.pop(request.number, None) is not None or self.queue.remove(request)
            if was_waiting or request in running:
                self.end_split(request)
                state_text = "running" if running.get(request) else "waiting in the queue"
                expired.append((request, DeadlineExceeded(f"was {state_text} at its deadline")))
        self.queue.active_tenants.update()
        return expired

    def on_suspended(self, seconds: float, now: float) -> None:
        """The clock stood still for so long, but the clients' time went on: bring their deadlines forward."""
        running = {
            item.request for slot in self.slots for batch in slot.batches.values() for item in batch.awaited_items
        }
        for request in {*self.queue, *running}:
            earliest = now + _GRACE_S if request in running else -math.inf
            request.deadline = min(request.deadline, max(request.deadline - seconds, earliest))
            self._watch_deadline(request)

    def end_matching(self, should_end: Callable[[Request], bool]) -> list[tuple[Request, bool]]:
        """Take out each request that is `should_end`, wherever it is; return it with whether a slot is running it."""
        running = self._end_in_slots(should_end)
        return [(request, False) for request in self.take_matching(should_end)] + running

    def end_of_client(self, client: bytes, request_id: str | None = None) -> list[Request]:
        """Take out what the client has asked, or what it has asked under this id; nobody else's is looked at."""
        running = self._end_in_slots(lambda each: each.client == client and request_id in (None, each.id))
        waiting = self.queue.take_of_client(client, request_id)
        for request in waiting:
            self.end_split(request)
        return waiting + [request for request, _ in running]

    def take_matching(self, should_take: Callable[[Request], bool]) -> list[Request]:
        """Return the requests that wait, or have still to be given to a slot in part, and are `should_take`.

        Forget them.
        """
        taken = self.queue.take_matching(should_take)
        for request in taken:
            self.end_split(request)
        self.queue.active_tenants.update()
        return taken

    def take_all_waiting(self) -> list[Request]:
        """Return every request that waits, or has waited until its deadline, and forget it."""
        expired, self._expired = self._expired, {}
        return [*expired.values(), *self.take_matching(lambda _: True)]

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def may_gather(self) -> bool:
        """Whether a batch that could be assigned now may have more, if that comes."""
        free = (slot.policy.max_rows for slot in self.slots.merging.values() if not slot.batches)
        return 0 < self.queue.normal.count < max(free, default=0)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.queue.count and not self._expired and not any(slot.batches for slot in self.slots)

    @property
    def next_event_at(self) -> float:
        """No request and no slot is due for `expire` or `take_overdue` before this (monotonic seconds)."""
        return min(self.deadlines.next_deadline, self.slots.next_check_at, self._next_long_at)

    # --- within -------------------------------------------------------------------------------------------------

    def _next_candidate(self, now: float) -> tuple[AnyQueue, Request, Slot] | None:
        """The request that runs now, out of which queue, and where.

        Nothing is made ready that would run before the one whose turn it is. What has begun may have to wait for slots
        of the model that it has begun on, while others are free that the next can have.
        """
        request_queue, is_first = self.queue, True
        if request_queue.is_multi_tenant and self._has_other_tenants(now):
            return self._next_fair_candidate(now)
        if request_queue.is_multi_tenant:
            request_queue.move_long(lambda request: self._is_long(request, now))
        for queue, request in request_queue.candidates():
            if (
                request_queue.is_multi_tenant
                and queue is not request_queue.splitting
                and not self._may_start(queue, request, now)
            ):
                continue
            slot = self.slots.least_loaded(request, request_queue.splits.get(request.number), request_queue.normal, now)
            if slot is not None and (slot.is_free or is_first):
                return queue, request, slot
            is_first = False
        return None

    def _has_other_tenants(self, now: float) -> bool:
        """Whether another tenant waits beside the first that does, or has asked of late, and may do so again."""
        active = self.queue.active_tenants.update()
        other_request_at = self._other_request_at if self._last_tenant in active else self._last_request_at
        return len(active) > 1 or now < other_request_at + _RECENT_REQUEST_S

    def _next_fair_candidate(self, now: float) -> tuple[AnyQueue, Request, Slot] | None:
        """The same where there are several tenants: nothing is made ready, so that who comes waits for what runs."""
        request_queue = self.queue
        for slot in self.slots.free_slots(now):
            for queue, request in request_queue.fair_candidates(
                self.clocks.clock_of(slot.device), lambda each: self._is_long(each, now)
            ):
                split = request_queue.splits.get(request.number)
                if split is not None and split.policy != slot.policy:
                    continue
                if slot.accepts(request.isolation, now) and (split is not None or self._may_start(queue, request, now)):
                    return queue, request, slot
        return None

    def _is_long(self, request: Request, now: float) -> bool:
        """Whether a request is expected to take so long that other tenants should not have to wait for it."""
        seconds = self._durations.expected_s(request.tenant, request.content_bytes)
        if seconds <= self.clocks.max_batch_s or seconds <= self._long_threshold_s(request.tenant, now):
            return False
        policy = next((slot.policy for slot in self.slots), NO_BATCHING)
        batch_key = policy.batch_key(request.description)
        return batch_key is None or not policy.should_split(batch_key, request.origin.principal)

    def _is_head_long(self, queue: AnyQueue, request: Request, now: float) -> bool:
        """Return the same of the first request of a queue: `normal` has no long one there, see `move_long`."""
        request_queue = self.queue
        return request_queue.is_multi_tenant and queue is not request_queue.normal and self._is_long(request, now)

    def _long_threshold_s(self, tenant: Tenant, now: float) -> float:
        return self.users.long_threshold_s(tenant, self.clocks.max_batch_s, now)

    def _may_start(self, queue: AnyQueue, request: Request, now: float) -> bool:
        """Whether the first request of a queue may have a free slot: a long one leaves the last one to other tenants.

        Where there is only one it may have that, and rests afterwards, so that its tenant gets no more than its share
        of the time even while nothing of the others waits.
        """
        if not self._is_head_long(queue, request, now):
            return True
        if self._concurrency > 1:
            allowed_at = now if self.slots.count_spare(now, self.clocks.max_batch_s) > 1 else math.inf
        else:
            allowed_at = self.users.long_allowed_at(request.tenant, now)
        if allowed_at <= now:
            return True
        self._next_long_at = min(self._next_long_at, allowed_at, self.users.active_until(request.tenant, now))
        self._schedule_by(self._next_long_at)
        return False

    def _on_ran(self, request: Request, seconds: float, now: float) -> None:
        """A slot has run a request."""
        tenant = request.tenant
        self._durations.add(tenant, request.content_bytes, seconds, now)
        self.users.add_time(tenant, seconds)
        if self._concurrency == 1 and seconds > self.clocks.max_batch_s:
            self.users.add_long_time(tenant, seconds, now)

    def _assign(
        self, slot: Slot, request: Request, batch_key: BatchKey | None, now: float, *, is_long: bool = False
    ) -> Batch:
        """Have the slot run a request of this form, as soon as it has nothing before it."""
        if batch_key is None:
            number = request.number
            batch = Batch(number, {number: BatchItem(number, request)})
        else:
            batch = self._form_batch(slot, request, batch_key, now)
        request_queue = self.queue
        request_queue.was_split = batch.number >= FIRST_SPLIT_NUMBER
        if request_queue.is_multi_tenant:
            request_queue.on_batch_formed(request.tenant, is_split=request_queue.was_split)
            batch.is_long = is_long and batch.single_request is request
            self._charge(slot, batch)
        self.slots.assign(slot, batch, now)
        return batch

    def _charge(self, slot: Slot, batch: Batch) -> None:
        """What a batch takes goes by its rows, if it is of several tenants."""
        shares: dict[Tenant, float] = {}
        rows = sum([item.rows for item in batch.items.values()])
        for item in batch.items.values():
            share = item.rows / rows if rows else 1.0 / len(batch.items)
            shares[item.request.tenant] = shares.get(item.request.tenant, 0.0) + share
        batch.charge = self.clocks.clock_of(slot.device).start_batch(shares, self.slots.expected_s(slot, batch))

    def _form_batch(self, slot: Slot, request: Request, batch_key: BatchKey, now: float) -> Batch:
        """The batch of a request, and of what goes with it, or of some of its rows."""
        policy, waiting = slot.policy, self.queue.normal
        split = self.queue.splits.get(request.number)
        if split is None and policy.should_split(batch_key, request.origin.principal):
            split = self._start_split(request, policy, batch_key)
        if split is not None:
            return self._next_split_batch(split, slot, now)
        max_s = self._max_batch_s(math.inf, now)
        candidates = (
            self.queue.fair_order(self.clocks.clock_of(slot.device), self.slots.mean_item_s)
            if self.queue.is_multi_tenant
            else waiting
        )
        group = self.slots.form_batch(
            slot, request, batch_key, former.BatchCandidates(candidates, waiting.count, max_s), now
        )
        for each in group.requests[1:]:
            waiting.remove(each)
        items = [BatchItem(each.number, each) for each in group.requests]
        for item in items:
            item_key = policy.batch_key(item.request.description)
            item.rows = item_key.rows if item_key is not None else 0
        return Batch.from_items(items, batch_key, group.rows)

    def _start_split(self, request: Request, policy: BatchingPolicy, batch_key: BatchKey) -> SplitRequest:
        """Have a request run in parts."""
        split = self.queue.splits[request.number] = SplitRequest(request, policy, batch_key)
        self.execution_counters.split_requests += 1
        return split

    def _max_batch_s(self, default_s: float, now: float) -> float:
        """How many seconds a batch may take of which that can be told; `default_s`: where no other tenant asks."""
        return self.clocks.max_batch_s if self.queue.is_multi_tenant and self._has_other_tenants(now) else default_s

    def _next_split_batch(self, split: SplitRequest, slot: Slot, now: float) -> Batch:
        devices, estimates = self.slots.devices_with(split.policy), self.slots.estimates
        max_s = self._max_batch_s(math.inf if self.queue.is_idle else former.MAX_BATCH_S, now)
        rows = former.next_split_rows(split, slot.device, devices, estimates, max_s)
        first, rows = split.take_rows(rows)
        if split.is_pending:
            self.queue.put_first([split.request])
        item = BatchItem(next(self._split_numbers), split.request, split, first, rows)
        return Batch.from_items([item], split.batch_key, rows)

    def _update_multi_tenant(self, now: float) -> None:
        """See whether there are still several tenants, or by now."""
        request_queue, clocks = self.queue, self.clocks
        if not request_queue.is_multi_tenant:
            self._start_multi_tenant()
        elif len(request_queue.tenants) > 1:
            clocks.multi_tenant_until = max(clocks.multi_tenant_until, now + MULTI_TENANT_HOLD_S)
        elif now >= clocks.multi_tenant_until:
            # What runs may have to wait again.
            active = {request.tenant for request in self._outstanding()}
            if len(active) > 1:
                clocks.multi_tenant_until = now + MULTI_TENANT_HOLD_S
                return
            known = active if self._last_tenant is None else {*active, self._last_tenant}
            if any(self._durations.longest_s(each) > self._long_threshold_s(each, now) for each in known):
                # The last slot is left to other tenants that were active.
                return
            # Whoever asks next is another one, if it is not the one who is there.
            self._last_tenant = next(iter(active), self._last_tenant)
            request_queue.stop_multi_tenant()

    def _start_multi_tenant(self) -> None:
        """What runs has not been charged yet."""
        self.queue.start_multi_tenant()
        self._update_devices()
        for slot in self.slots:
            for batch in slot.batches.values():
                if batch.charge is None:
                    self._charge(slot, batch)

    def _update_devices(self) -> None:
        """The model runs on other devices than before."""
        if self.queue.is_multi_tenant:
            self.queue.active_tenants.set_clocks(
                dict.fromkeys(self.clocks.clock_of(device) for device in self.slots.seen_devices)
            )

    def _restart_splits(self) -> None:
        """What has begun on a model that no slot serves any more runs on the one that is served, all of it."""
        for split in [split for split in self.queue.splits.values() if split.is_pending]:
            if self.slots.accepting and not self.slots.devices_with(split.policy):
                self.end_split(split.request)
                self.queue.put_first([split.request])

    def _watch_deadline(self, request: Request) -> None:
        """A request is outstanding from now on."""
        if self.deadlines.add(request):
            self._schedule_by(request.deadline)

    def _outstanding(self) -> Iterator[Request]:
        yield from self.queue
        yield from (
            item.request for slot in self.slots for batch in slot.batches.values() for item in batch.awaited_items
        )

    def _end_in_slots(self, should_end: Callable[[Request], bool]) -> list[tuple[Request, bool]]:
        running = self.slots.end_matching(should_end)
        for request, _ in running:
            self.end_split(request)
        return running
