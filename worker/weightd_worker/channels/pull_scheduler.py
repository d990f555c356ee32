"""Decides which direct channel an idle worker reads next: weighted fair queueing without a broker. No I/O, no clock.

Each worker reads the requests of all clients of its model itself. It takes the next request of the tenant with the
lowest virtual time, and of this tenant's channels the one that it served longest ago. The virtual time of a tenant is
the device seconds that all workers of the device have spent on the tenant, divided by the tenant's weight. The rows of
the workers have these seconds (`weightd_common.channels.pages`), so the workers of all models of a device share them.

When a worker chooses among channels, it charges the expected cost of the request at once, so that workers which choose
at the same time see it. If only one channel is readable, it charges the cost when it has the request. When the request
ends, the measured time replaces the expected cost. If the model does not run the request, a small fixed cost replaces
it. A tenant that was idle is raised to the virtual time of the model,
at which the latest request of the model started: the tenant gets no credit for the past. Raising is idempotent. Each
worker that raises a tenant stores a base, and only the greatest base of all workers counts. So two workers that raise a
tenant at the same time raise it once.

A tenant that is alone at another model of the device gets ahead of all others. A request for which no other tenant
waits at this worker is free for a tenant that is more than a second ahead of the tenants of the other models. Without
this limit, a tenant that begins to use a second model would be raised to a time that the first model never reaches.

The daemon changes the weight of a tenant by one store, and the tenant's offset by another. A request that runs at that
time is charged by the weight with which it started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from weightd_common.channels.pages import (
    BASE,
    BYTE_LIMIT,
    BYTES,
    EXPIRES_AT,
    FINISH,
    MAX_VIRTUAL_S,
    OFFSET,
    REQUEST_LIMIT,
    REQUESTS,
    SINCE,
    SLOT_OPEN,
    STAGE,
    STAGE_RUNNING,
    START,
    STATE,
    Layout,
    Page,
)
from weightd_protocol.messages.channels import EXPIRED, FOREIGN, ORDERED, OVERDRAWN

if TYPE_CHECKING:
    from weightd_common.channels.pages import Reals

# A tenant that sends requests again after it was idle starts this number of expected costs behind the device's virtual
# time. With less, a tenant with one request at a time would fall behind by the time of a round trip.
_RETURN_COSTS = 2.0

# A tenant that is alone at a worker gets at most this number of device seconds, divided by its weight, ahead of the
# tenants that run requests of other models, plus the cost of one request.
_MAX_LEAD_S = 1.0

# Seconds for which a worker counts as active after it has started a request.
_ACTIVE_S = 1.0

# Seconds after which a worker reads again how far the workers of other models are.
_FINISH_INTERVAL_S = 0.01

# Number of rows from which on one operation of numpy on all rows takes less time than a loop.
_MIN_TABLE_ROWS = 32

# Device seconds that a request costs its tenant although the model does not run it: the worker has read it, and has
# answered it or handed it over. If such requests cost nothing, a tenant that sends only them would always be served
# first.
_REFUSED_S = 0.0002

# Weight of the latest request in the exponentially weighted mean of a tenant's costs.
_MEAN_WEIGHT = 0.2


class PulledChannel:
    """A channel that this worker reads.

    Attributes:
        serial: the channel's serial.
        tenant: the tenant slot.
        index: the index of the channel's entry in the daemon's page.
        row_index: the index of the channel's entry in each row.
        weight_index: the index of the tenant's entry in the daemon's page.
        used_index: the index of the tenant's entry in each row.
        last_turn: the number of the decision that last chose this channel; 0 if none has.
    """

    __slots__ = ("index", "last_turn", "row_index", "serial", "tenant", "used_index", "weight_index")

    def __init__(self, layout: Layout, slot: int, serial: int, tenant: int) -> None:
        self.serial = serial
        self.tenant = tenant
        self.index = layout.channel(slot)
        self.row_index = layout.row_channel(slot)
        self.weight_index = layout.tenant(tenant)
        self.used_index = layout.row_tenant(tenant)
        self.last_turn = 0


class PullScheduler:
    """Chooses the next channel, and charges the requests that this worker runs to their tenants.

    Args:
        page: the daemon's page of the device.
        rows: the rows of all workers of the device, including this worker's.
        own: this worker's row.
        peers: the rows of the workers of this worker's model, including its own.

    Attributes:
        stopped: the readable channels that `choose` has found to have ended, each with the reason. The worker has to
            release them, because they stay readable.
    """

    def __init__(self, page: Page, rows: Sequence[Page], own: Page, peers: Sequence[Page]) -> None:
        self._page_words, self._page_reals = page
        self._own = own.reals
        # By channel: the requests and bytes in the rows of other models, which belong to earlier channels of the slot.
        self._other_counts: Dict[int, Tuple[int, int]] = {}
        self.set_rows(rows, peers)
        self._turn = 0
        # The mean cost of a request of each tenant.
        self._costs: Dict[int, float] = {}
        # The charged request: the virtual seconds for a device second, and the tenant's seconds before the request;
        # None if the request is not charged yet.
        self._charged: Optional[Tuple[float, float]] = None
        # The lowest virtual time of other models' workers, and the time at which it is read again.
        self._finish = 0.0
        self.stopped: List[Tuple[PulledChannel, str]] = []

    def set_rows(self, rows: Sequence[Page], peers: Sequence[Page], table: Any = None) -> None:
        """Replace the rows: a worker of the device has started. Keep the rows of workers that have exited.

        Args:
            rows: the rows of all workers of the device.
            peers: the rows of the workers of this worker's model.
            table: the same rows as an array of doubles with two dimensions; None to read the rows one by one.
        """
        self._row_reals = [row.reals for row in rows]
        self._peer_words = [row.words for row in peers]
        self._peer_reals = [row.reals for row in peers]
        self._other_rows = [row for row in rows if not any(row is peer for peer in peers)]
        self._table = table if len(rows) >= _MIN_TABLE_ROWS else None
        self._other_counts.clear()
        self._next_finish_at = 0.0

    def choose(self, readable: Sequence[PulledChannel], now: float) -> Optional[PulledChannel]:
        """Return the channel from which this worker reads the next request; None if no readable channel is usable."""
        if len(readable) == 1 and not self._end_reason(readable[0], now):
            self._charged = None
            return readable[0]
        chosen, time, is_alone = self._lowest(readable)
        if chosen is not None and self._end_reason(chosen, now):
            chosen, time, is_alone = self._lowest(self._usable(readable, now))
        if chosen is None:
            return None
        self._charge(chosen, time, now, is_alone)
        return chosen

    def refusal(self, channel: PulledChannel, now: float) -> str:
        """Return why this worker must not run a request that it has taken and counted; "" if it may."""
        index, row_index = channel.index, channel.row_index
        requests, nbytes = self._other_counts.get(channel.serial) or self._count_others(channel)
        for row in self._peer_words:
            requests += row[row_index]
            nbytes += row[row_index + BYTES]
        words = self._page_words
        if requests > words[index + REQUEST_LIMIT] or nbytes > words[index + BYTE_LIMIT]:
            return OVERDRAWN
        return self._end_reason(channel, now)

    def charge(self, channel: PulledChannel, now: float) -> None:
        """Charge the expected cost of a request that this worker has taken, unless `choose` has charged it."""
        if self._charged is None:
            self._charge(channel, self.virtual_time(channel), now, is_alone=True)

    def cancel(self, channel: PulledChannel) -> None:
        """Take back the charge: this worker has read no request."""
        if self._charged is not None:
            self._own[channel.used_index] = self._charged[1]

    def settle_refused(self, channel: PulledChannel) -> None:
        """Replace the charged expectation by the fixed cost of a request that the model does not run."""
        self._settle(channel, _REFUSED_S)

    def settle(self, channel: PulledChannel, seconds: float) -> None:
        """Replace the charged expectation by the measured device seconds of the request."""
        self._settle(channel, seconds)
        mean = self._costs.get(channel.tenant)
        self._costs[channel.tenant] = seconds if mean is None else mean + _MEAN_WEIGHT * (seconds - mean)

    def virtual_time(self, channel: PulledChannel) -> float:
        """Return the virtual time of a channel's tenant in seconds."""
        index = channel.used_index
        base_index = index + BASE
        if self._table is not None:
            used = float(np.add.reduce(self._table[:, index]))
            base = float(np.maximum.reduce(self._table[:, base_index]))
            if -MAX_VIRTUAL_S <= used <= MAX_VIRTUAL_S and 0 <= base <= MAX_VIRTUAL_S:
                return used + base + self._page_reals[channel.weight_index + OFFSET]
        used = base = 0.0
        for row in self._row_reals:
            used += row[index]
            value = row[base_index]
            # NaN compares false. A worker that has crashed may have written anything.
            if base < value <= MAX_VIRTUAL_S:
                base = value
        if not -MAX_VIRTUAL_S <= used <= MAX_VIRTUAL_S:
            used = self._plausible_used(index)
        return used + base + self._page_reals[channel.weight_index + OFFSET]

    def _used(self, channel: PulledChannel) -> float:
        """Return the virtual time of a channel's tenant without its base."""
        return self._plausible_used(channel.used_index) + self._page_reals[channel.weight_index + OFFSET]

    def _plausible_used(self, index: int) -> float:
        values = [row[index] for row in self._row_reals]
        return sum([value for value in values if -MAX_VIRTUAL_S <= value <= MAX_VIRTUAL_S])

    def _charge(self, channel: PulledChannel, time: float, now: float, is_alone: bool) -> None:
        """Charge the expected cost of a request to a tenant, whose virtual time is `time`.

        `is_alone` says that no other tenant waits at this worker.
        """
        self._turn += 1
        channel.last_turn = self._turn
        own, index = self._own, channel.used_index
        rate = 1.0 / self._page_reals[channel.weight_index]
        expected_s = self._costs.get(channel.tenant, 0.0)
        model_time = _greatest(self._peer_reals, START)
        floor = model_time - _RETURN_COSTS * expected_s * rate
        if time < floor:
            # Another worker may have raised the tenant since this worker has read `time`. The base does not depend on
            # earlier bases, so the tenant is raised once.
            own[index + BASE] = floor - self._used(channel)
            time = floor
        if is_alone and self._other_rows and time > self._lowest_finish(now) + _MAX_LEAD_S * rate:
            rate = 0.0
        before = own[index]
        own[index] = before + expected_s * rate
        own[START] = time if time > model_time else model_time
        own[FINISH] = time + expected_s * rate
        self._charged = rate, before

    def _settle(self, channel: PulledChannel, seconds: float) -> None:
        assert self._charged is not None  # noqa: S101 - the caller has called `charge`
        rate, before = self._charged
        self._own[channel.used_index] = before + seconds * rate

    def _lowest(self, readable: Sequence[PulledChannel]) -> Tuple[Optional[PulledChannel], float, bool]:
        """Return the next channel, the virtual time of its tenant, and whether no other tenant has a channel."""
        times: Dict[int, float] = {}
        chosen: Optional[PulledChannel] = None
        chosen_time = 0.0
        for channel in readable:
            time = times.get(channel.tenant)
            if time is None:
                time = times[channel.tenant] = self.virtual_time(channel)
            if chosen is None or time < chosen_time or (time == chosen_time and channel.last_turn < chosen.last_turn):
                chosen, chosen_time = channel, time
        return chosen, chosen_time, len(times) == 1

    def _usable(self, readable: Iterable[PulledChannel], now: float) -> List[PulledChannel]:
        """Return the channels that this worker may read. Add all others to `stopped`."""
        usable: List[PulledChannel] = []
        for channel in readable:
            reason = self._end_reason(channel, now)
            if reason:
                self.stopped.append((channel, reason))
            else:
                usable.append(channel)
        return usable

    def _end_reason(self, channel: PulledChannel, now: float) -> str:
        """Return why this worker must not read a channel any more; "" if it may."""
        words, index = self._page_words, channel.index
        if words[index] != channel.serial:
            return FOREIGN
        if words[index + STATE] != SLOT_OPEN:
            return ORDERED
        return "" if now < self._page_reals[index + EXPIRES_AT] else EXPIRED

    def _lowest_finish(self, now: float) -> float:
        """Return the lowest virtual time that an active worker of another model has charged; infinity without one.

        A worker is active while it runs a request, and for a short time after it has started one. The result may be
        slightly out of date.
        """
        if now >= self._next_finish_at:
            lowest = float("inf")
            for words, reals in self._other_rows:
                if (words[STAGE] == STAGE_RUNNING or now < reals[SINCE] + _ACTIVE_S) and reals[FINISH] < lowest:
                    lowest = reals[FINISH]
            self._finish, self._next_finish_at = lowest, now + _FINISH_INTERVAL_S
        return self._finish

    def _count_others(self, channel: PulledChannel) -> Tuple[int, int]:
        index = channel.row_index
        counts = [(row.words[index + REQUESTS], row.words[index + BYTES]) for row in self._other_rows]
        total = sum([requests for requests, _ in counts]), sum([nbytes for _, nbytes in counts])
        self._other_counts[channel.serial] = total
        return total


def _greatest(rows: Sequence[Reals], index: int) -> float:
    """Return the greatest plausible value of a word, at least 0.0. NaN compares false."""
    greatest = 0.0
    for row in rows:
        value = row[index]
        if greatest < value <= MAX_VIRTUAL_S:
            greatest = value
    return greatest
