"""Decides which batch runs on which slot, and when, for one model.

A batch is formed when a slot is free, from the requests that are queued at that time. If the batching policy allows it,
a batch has several requests, or a part of one. No slot is idle while a request that it could run is queued, except that
a long request leaves the last slot to other tenants (`tenancy`). The scheduler only decides; callers pass the time and
send the batches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence

from weightd_daemon.counters import ModelCounters
from weightd_daemon.scheduling.batch import Batch, BatchItem
from weightd_daemon.scheduling.batch_former import BatchFormer
from weightd_daemon.scheduling.batching.policy import BatchKey
from weightd_daemon.scheduling.fair_share import FairClocks, Users
from weightd_daemon.scheduling.measurements import BatchTimes
from weightd_daemon.scheduling.queues import AnyQueue
from weightd_daemon.scheduling.request import Isolation, Request, isolate
from weightd_daemon.scheduling.request_queue import QueueLimits, RequestQueue, Turns
from weightd_daemon.scheduling.running_batches import RunningBatches
from weightd_daemon.scheduling.slots import Slot, SlotPool
from weightd_daemon.scheduling.tenancy import Tenancy
from weightd_protocol.errors import DeadlineExceeded, RequestError, ResourceExhausted

# Minimum seconds that a running request gets after the daemon was paused, to read an answer that has arrived.
_GRACE_S = 0.5

# Passed to `schedule_by` as the time of an event that is due now.
AT_ONCE = 0.0

# The heap of deadlines is rebuilt when its size exceeds twice the size after the last rebuild by this number.
_MIN_STALE_ENTRIES = 64

# Maximum number of requests that end in one turn of the event loop, so that other clients are served in between.
MAX_ENDED_PER_TURN = 32


class Scheduler:
    """Schedules the requests for one model on the slots that run it.

    Args:
        max_queue: the maximum number of queued requests.
        max_queue_bytes: the maximum number of queued tensor bytes.
        predict_timeout: seconds after which a computing slot is considered to hang.
        schedule_by: called with the time of each new event; AT_ONCE if the event is due now.
        levels: the number of priority levels.
        clocks: the fair-share clocks of the devices, for all models.
        concurrency: the number of batches that the slots can run at once when all of them are available.
        users: the tenants that use the slots; one object for all models of a shared process.
        counters: the counters of the model.

    Attributes:
        queue: the queued requests.
        slots: the slots of the model.
        running: the batches at the slots.
        clocks: as above.
        tenancy: handles several tenants.
        deadlines: the deadlines of the requests that have not ended.
        wait_limit_s: `schedule_by` is called with the time at which a request has waited for this number of seconds.
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
        users: Users | None = None,
        counters: ModelCounters | None = None,
    ) -> None:
        self._schedule_by = schedule_by
        self.wait_limit_s = math.inf
        self.deadlines = Deadlines(schedule_by)
        self._times = BatchTimes()
        self.slots = SlotPool()
        self.queue = RequestQueue(levels)
        self.clocks = clocks or FairClocks()
        self._limits = QueueLimits(self.queue, max_queue, max_queue_bytes)
        self.tenancy = Tenancy(
            self.queue,
            self.slots,
            self._times,
            self.clocks,
            users or Users(),
            concurrency=concurrency,
            schedule_by=schedule_by,
        )
        self._turns = Turns(self.queue, self.tenancy.is_confined_running)
        self.running = RunningBatches(
            self.slots, self._times, predict_timeout, schedule_by, counters or ModelCounters(), self.tenancy.on_ran
        )
        self._former = BatchFormer(
            self.queue, self._turns, self.slots, self._times, self.tenancy, self.running.execution_counters
        )
        # Requests whose deadlines had passed when their turn came. `expire` ends them.
        self._expired: dict[int, Request] = {}

    # --- events -------------------------------------------------------------------------------------------------

    def on_request(self, request: Request, now: float) -> None:
        """Record that a request has arrived. Callers may skip this call while a single tenant uses all models."""
        if self.tenancy.on_request(request, now):
            # Recall queued batches of other tenants from slots: the request should only wait for running batches.
            tenants = {request.tenant}
            items = self.running.recall(lambda batch: [*batch.items] if batch.tenants - tenants else [])
            self.queue.put_back(sorted(items, key=lambda item: item.number))

    def try_start(self, request: Request, now: float) -> tuple[Slot, Batch] | None:
        """Start a request that has just arrived; return its slot and batch, or None if the request must be queued.

        If this method returns None, the caller has to `submit` the request. After this method, the caller can skip
        `assign` if no other batch could start before and no split request has rows left.
        """
        queue = self.queue
        if queue.is_multi_tenant or queue.normal.count or request.deadline <= now:
            return None
        if queue.confined.count and self._turns.next_unsplit_queue() is not None:
            return None
        if request.isolation is Isolation.CONFINED and self.tenancy.is_confined_running():
            return None
        slot = self.slots.idle_slot() or self._former.choose_slot(request, None, now)
        if slot is None or (queue.splitting.count and not slot.is_free):
            return None
        policy = slot.policy
        batch_key = policy.batch_key(request.description) if policy.inputs else None
        if batch_key is not None and queue.splitting.count and policy.should_split(batch_key, request.origin.principal):
            return None
        self.deadlines.add(request)
        return slot, self._assign(slot, request, batch_key, False, now)

    def submit(
        self, request: Request, now: float, *, needs_check: bool = False, can_evict: bool = True
    ) -> Sequence[tuple[Request, RequestError]]:
        """Put a request into the queue; return the requests of other tenants that it evicts, each with its error.

        Args:
            request: the request.
            now: the time.
            needs_check: the request must not run before `RequestQueue.admit` is called for it.
            can_evict: requests of other tenants may be evicted to make room.

        Raises:
            ResourceExhausted: the queue is full.
        """
        queue, evicted = self.queue, []
        count = queue.count
        full_reason = self._limits.full_reason(request, count) if count else ""
        if full_reason:
            busy_s = max((now - slot.busy_since for slot in self.slots if slot.batches), default=0.0)
            retry_after = self._times.retry_after_s(count, len(self.slots.active), busy_s)
            error = ResourceExhausted(full_reason, retry_after=retry_after)
            given_way = self._limits.evict_for(request) if can_evict and queue.is_multi_tenant else None
            if given_way is None:
                raise error
            evicted = [(each, error) for each in given_way]
        if needs_check:
            queue.unchecked.append(request)
            self._schedule_by(AT_ONCE)
        else:
            queue.append(request)
        self.deadlines.add(request)
        self._schedule_by(now + self.wait_limit_s)
        return evicted

    def assign(self, now: float) -> Iterator[tuple[Slot, Batch]]:
        """Yield each batch that can run now, with its slot. A yielded batch counts as running.

        If many queued requests turn out to have expired, the next turn of the event loop continues the work.
        """
        request_queue = self.queue
        if request_queue.is_multi_tenant or now < self.clocks.multi_tenant_until:
            self.tenancy.update(now)
        if request_queue.splits:
            self._restart_splits()
        self.tenancy.next_long_at = math.inf
        self.tenancy.update_unreplaced(now)
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
                # A tenant's split requests run one after another, because the partial results of each request stay in
                # memory until its last part has ended.
                self._former.start_split(request, slot.policy, batch_key)
                request_queue.append(request)
                continue
            is_long = self.tenancy.is_head_long(queue, request, now)
            yield slot, self._assign(slot, request, batch_key, is_long, now)
        if expired == MAX_ENDED_PER_TURN:
            self._schedule_by(AT_ONCE)

    def release_slot(self, process: str, *, excluding: Sequence[Request] = ()) -> None:
        """Remove the slot of a process; queue its awaited items at the head, except for requests in `excluding`."""
        slot = self.slots.slot_of(process)
        if slot is not None:
            started = [item for batch in slot.batches.values() if batch.has_started for item in batch.awaited_items]
            self.running.execution_counters.retried_items += sum(item.request not in excluding for item in started)
            self.queue.put_back([item for item in self.slots.remove(slot) if item.request not in excluding])

    def retry_alone(self, items: Sequence[BatchItem], *, excluding: Sequence[Request] = ()) -> None:
        """Queue items again, each to run alone, because their failed batch did not show which of them is the cause.

        Requests in `excluding` have ended, and are not queued.
        """
        for item in items:
            isolate(item.request, Isolation.ALONE)
        retried = [item for item in items if item.is_awaited and item.request not in excluding]
        self.running.execution_counters.retried_items += len(retried)
        self.queue.put_back(retried)

    def take_overdue(self, now: float) -> list[tuple[Slot, Batch]]:
        """Remove and return the slots in which a batch has exceeded `predict_timeout`, each with this batch.

        Other batches of a removed slot, and batches behind one that has run for `MAX_QUICK_S`, are queued again.
        """
        hung_slots: list[tuple[Slot, Batch]] = []
        for slot, batch, requeued in self.running.take_overdue(now):
            self.queue.put_back(requeued)
            hung_slots += [] if batch is None else [(slot, batch)]
        return hung_slots

    def require_check(self, matches: Callable[[Request], bool]) -> list[Request]:
        """Move the matching queued requests to `unchecked` and return them. Requests that have started continue."""
        if moved := self.queue.move_to_unchecked(matches):
            self._schedule_by(AT_ONCE)
        return moved

    def confine(self, matches: Callable[[Request], bool]) -> None:
        """Confine the matching requests in the queue now, and matching requests at slots if they have to run again."""
        for request in filter(matches, [*self.queue, *(item.request for item in self.slots.awaited_items)]):
            isolate(request, Isolation.CONFINED)
        self.queue.confine(matches)

    def end_split(self, request: Request) -> None:
        """Stop a split request that has ended: recall its queued parts and drop the rows that no slot has received."""
        split = self.queue.remove_split(request)
        if split is not None:
            self.running.recall(lambda batch: [each.number for each in batch.items.values() if each.split is split])

    def expire(self, now: float) -> list[tuple[Request, RequestError]]:
        """End and return up to `MAX_ENDED_PER_TURN` requests whose deadlines have passed, each with its error.

        Later results for these requests are dropped. While more requests are due, `next_event_at` is at most `now`.
        """
        due = self.deadlines.take_due(now, MAX_ENDED_PER_TURN)
        if not due:
            return []
        running = self.running.end_requests(due)
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
        """Bring deadlines forward by the seconds for which the daemon, and with it its clock, was paused."""
        running = {item.request for item in self.slots.awaited_items}
        for request in {*self.queue, *running}:
            earliest = now + _GRACE_S if request in running else -math.inf
            request.deadline = min(request.deadline, max(request.deadline - seconds, earliest))
            self.deadlines.add(request)

    def end_matching(self, should_end: Callable[[Request], bool]) -> list[tuple[Request, bool]]:
        """End and return the matching requests in the queue and at slots, each with whether a slot is running it."""
        running = self.running.end_matching(should_end)
        for request, _ in running:
            self.end_split(request)
        return [(request, False) for request in self.take_matching(should_end)] + running

    def end_of_client(self, client: bytes, request_id: str | None = None) -> list[Request]:
        """End and return the requests of a client, or only those with this id, without a search of the whole queue."""
        running = self.running.end_matching(lambda each: each.client == client and request_id in (None, each.id))
        # End running split requests first, because this removes their other parts from the queue.
        for request, _ in running:
            self.end_split(request)
        waiting = self.queue.take_of_client(client, request_id)
        for request in waiting:
            self.end_split(request)
        return waiting + [request for request, _ in running]

    def take_matching(self, should_take: Callable[[Request], bool]) -> list[Request]:
        """Remove and return the matching queued requests, including split requests with rows in the queue."""
        taken = self.queue.take_matching(should_take)
        for request in taken:
            self.end_split(request)
        self.queue.active_tenants.update()
        return taken

    def take_all_waiting(self) -> list[Request]:
        """Remove and return all queued requests, including expired ones."""
        expired, self._expired = self._expired, {}
        return [*expired.values(), *self.take_matching(lambda _: True)]

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def may_gather(self) -> bool:
        """Whether a batch that could be assigned now has room for more requests."""
        free = (slot.policy.max_rows for slot in self.slots.merging.values() if not slot.batches)
        return 0 < self.queue.normal.count < max(free, default=0)

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued and no slot has a batch."""
        return not self.queue.count and not self._expired and not any(slot.batches for slot in self.slots)

    @property
    def next_event_at(self) -> float:
        """The earliest time at which `expire`, `take_overdue` or `assign` has something to do, in monotonic seconds."""
        return min(self.deadlines.next_deadline, self.running.next_check_at, self.tenancy.next_long_at)

    # --- private ------------------------------------------------------------------------------------------------

    def _next_candidate(self, now: float) -> tuple[AnyQueue, Request, Slot] | None:
        """Return the next request to run, with its queue and its slot; None if nothing can run.

        Only the first candidate may be queued behind a busy slot. Another candidate gets a free slot that the first one
        cannot use, for example because the first one is a split request that started on another model version.
        """
        request_queue, is_first = self.queue, True
        if request_queue.is_multi_tenant and self.tenancy.has_others(now):
            return self._next_fair_candidate(now)
        if request_queue.is_multi_tenant:
            self._turns.move_long(lambda request: self.tenancy.is_long(request, now))
        for queue, request in self._turns.candidates():
            if (
                request_queue.is_multi_tenant
                and queue is not request_queue.splitting
                and not self.tenancy.may_start(queue, request, now)
            ):
                continue
            slot = self._former.choose_slot(request, request_queue.splits.get(request.number), now)
            if slot is not None and (slot.is_free or is_first):
                return queue, request, slot
            is_first = False
        return None

    def _next_fair_candidate(self, now: float) -> tuple[AnyQueue, Request, Slot] | None:
        """Return the next request to run as `_next_candidate` does, while several tenants have requests.

        No batch is queued behind another, so that a new request only waits for running batches.
        """
        request_queue = self.queue
        for slot in self.slots.free_slots(now):
            for queue, request in self._turns.fair_candidates(
                self.clocks.clock_of(slot.device), lambda each: self.tenancy.is_long(each, now)
            ):
                split = request_queue.splits.get(request.number)
                if split is not None and split.policy != slot.policy:
                    continue
                if slot.accepts(request.isolation, now) and (
                    split is not None or self.tenancy.may_start(queue, request, now)
                ):
                    return queue, request, slot
        return None

    def _assign(self, slot: Slot, request: Request, batch_key: BatchKey | None, is_long: bool, now: float) -> Batch:
        """Form the batch of a request and assign it to a slot."""
        if batch_key is None:
            batch = Batch(request.number, {request.number: BatchItem(request.number, request)})
            is_split = False
        else:
            batch, is_split = self._former.form_batch(slot, request, batch_key, now)
        queue = self.queue
        queue.was_split = is_split
        if queue.is_multi_tenant:
            queue.on_batch_formed(request.tenant, is_split=is_split)
            batch.is_long = is_long and batch.single_request is request
            self.tenancy.charge(slot, batch)
        self.running.assign(slot, batch, now)
        return batch

    def _restart_splits(self) -> None:
        """Restart split requests from their first row if no slot has their batching policy any more."""
        for split in [split for split in self.queue.splits.values() if split.is_pending]:
            if self.slots.accepting and not self.slots.devices_with(split.policy):
                self.end_split(split.request)
                self.queue.put_first([split.request])


class Deadlines:
    """Finds requests whose deadlines have passed. The heap contains only numbers, so it keeps no ended request alive.

    Args:
        schedule_by: called with each deadline that is the next one.

    Attributes:
        requests: the watched requests by number. The code that ends a request also removes its entry.
    """

    def __init__(self, schedule_by: Callable[[float], object]) -> None:
        self._schedule_by = schedule_by
        self.requests: dict[int, Request] = {}
        self._heap: list[tuple[float, int]] = []
        self._rebuild_size = _MIN_STALE_ENTRIES

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request, or update its deadline to a sooner one."""
        deadline, number, heap = request.deadline, request.number, self._heap
        if deadline == math.inf:
            return
        self.requests[number] = request
        heapq.heappush(heap, (deadline, number))
        if len(heap) > self._rebuild_size:
            heap[:] = [(each.deadline, each.number) for each in self.requests.values()]
            heapq.heapify(heap)
            self._rebuild_size = 2 * len(heap) + _MIN_STALE_ENTRIES
        if heap[0][1] == number:
            self._schedule_by(deadline)

    @property
    def next_deadline(self) -> float:
        """A time before which no deadline passes, in monotonic seconds."""
        return self._heap[0][0] if self._heap else math.inf

    def take_due(self, now: float, max_count: int) -> list[Request]:
        """Remove and return up to `max_count` requests whose deadlines have passed."""
        due: list[Request] = []
        while self._heap and self._heap[0][0] <= now and len(due) < max_count:
            if (request := self.requests.pop(heapq.heappop(self._heap)[1], None)) is not None:
                due.append(request)
        return due
