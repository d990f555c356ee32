"""Reads the rows that workers write. A worker that crashes, or that a request has corrupted, may write anything.

Every value that this module returns is within bounds, whatever the row contains. A value out of bounds marks the row as
implausible; the daemon then replaces the worker and trusts none of its current requests.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from typing import NamedTuple

from weightd_common.channels.pages import (
    ANSWERED,
    BASE,
    BYTES,
    CURRENT_CHANNEL,
    CURRENT_REQUEST,
    REQUESTS,
    RETURNED,
    SECONDS,
    SINCE,
    STAGE,
    STAGE_HANDING_OVER,
    STAGE_IDLE,
    STAGE_RUNNING,
    START,
    USED,
    Layout,
    Page,
)

# Maximum number of requests and bytes that a worker can take from channels in a second. Both are above the speed of any
# worker, so a higher count shows that the worker did not count.
_MAX_REQUESTS_PER_S = 1e6
_MAX_BYTES_PER_S = 1e12

# The lowest weight that a tenant can have. The configuration refuses lower ones.
_MIN_WEIGHT = 0.001

# Seconds that a row may be ahead of the daemon's clock: the expected cost of the running request is charged in advance.
_SLACK_S = 1000.0

# Seconds between the moment at which a caller reads the clock and the moment at which it reads a row. Meanwhile the
# worker may start a request.
_MAX_DELAY_S = 10.0


class Counts(NamedTuple):
    """Counts of a row for one channel slot, since the row was created: the words of the entry in their order."""

    requests: int
    nbytes: int
    seconds: float
    answered: int
    answer_bytes: int
    invalid: int
    failed: int
    late: int
    returned: int

    @property
    def ended(self) -> int:
        """The number of requests that have ended."""
        return self.answered + self.invalid + self.failed + self.late + self.returned


class Current(NamedTuple):
    """The request that an exited worker had."""

    channel: int
    request: int
    stage: int


class Activity(NamedTuple):
    """The latest request of a row."""

    request: int
    started: int
    is_busy: bool


NO_COUNTS = Counts(0, 0, 0.0, 0, 0, 0, 0, 0, 0)


class RowReader:
    """Reads one row.

    Args:
        layout: the layout of the pages.
        page: the memory of the row, filled with zeros.
        created_at: the time of CLOCK_MONOTONIC at which the row was created, in seconds.

    Attributes:
        is_plausible: whether all values that were read since `repair` were within bounds.
    """

    def __init__(self, layout: Layout, page: Page, created_at: float) -> None:
        self._layout = layout
        self._words, self._reals = page
        self._created_at = created_at
        self._counts: dict[int, Counts] = {}
        self.is_plausible = True

    @property
    def activity(self) -> Activity:
        """The latest request of the worker. If it has not changed, no count has changed."""
        words = self._words
        return Activity(words[CURRENT_REQUEST], words[SINCE], words[STAGE] != STAGE_IDLE)

    def counts(self, slot: int, now: float) -> Counts:
        """Return the counts of a channel slot. They never decrease, and never exceed what is possible until `now`."""
        index, words = self._layout.row_channel(slot), self._words
        earlier, age_s = self._counts.get(slot, NO_COUNTS), max(0.0, now - self._created_at) + 1.0
        # A worker counts a request when it takes it, and its outcome last. Read the outcomes first, so that a request
        # that ends now does not look impossible.
        outcomes = [words[each] for each in range(index + ANSWERED, index + RETURNED + 1)]
        counts = Counts(words[index + REQUESTS], words[index + BYTES], self._reals[index + SECONDS], *outcomes)
        if not (
            all(map(operator.le, earlier, counts))
            and counts.requests <= age_s * _MAX_REQUESTS_PER_S
            and max(counts.nbytes, counts.answer_bytes) <= age_s * _MAX_BYTES_PER_S
            and counts.ended <= counts.requests
            and counts.seconds <= age_s + _SLACK_S
        ):
            self.is_plausible = False
            return earlier
        self._counts[slot] = counts
        return counts

    def used_s(self, slot: int, now: float) -> float:
        """Return the virtual seconds that the worker has charged to a tenant slot."""
        return self._time(self._layout.row_tenant(slot) + USED, now)

    def base_s(self, slot: int, now: float) -> float:
        """Return the base of a tenant slot in virtual seconds."""
        return self._time(self._layout.row_tenant(slot) + BASE, now)

    def start_s(self, now: float) -> float:
        """Return the virtual time of the device when this worker's latest request started."""
        return self._time(START, now)

    def running_since(self, now: float) -> float | None:
        """Return when the running request started; None if no request runs.

        The worker may write in the meantime. It stores the start before the stage, so this method reads the stage
        first: the returned time is never older than the start of the request that runs. On processors
        that reorder stores it may be; so the watchdog reads again before it acts.
        """
        if self._words[STAGE] != STAGE_RUNNING:
            return None
        since = self._reals[SINCE]
        if not 0.0 <= since <= now + _MAX_DELAY_S:
            self.is_plausible = False
            return None
        return min(since, now)

    def last_request(self, held: Container[int]) -> Current | None:
        """Return the request that an exited worker had; None if it had none, or if the row is implausible.

        Args:
            held: the serials of the channels that the worker held.
        """
        words = self._words
        current = Current(words[CURRENT_CHANNEL], words[CURRENT_REQUEST], words[STAGE])
        if current.stage == STAGE_IDLE:
            return None
        if current.stage > STAGE_HANDING_OVER or current.channel not in held:
            self.is_plausible = False
            return None
        return current

    def repair(self, tenant_slots: Iterable[int], channel_slots: Iterable[int], now: float) -> None:
        """Replace implausible values before another worker continues the row. No process writes the row now."""
        words, reals, layout = self._words, self._reals, self._layout
        for slot in tenant_slots:
            index = layout.row_tenant(slot)
            reals[index + USED], reals[index + BASE] = self.used_s(slot, now), self.base_s(slot, now)
        for slot in channel_slots:
            index, counts = layout.row_channel(slot), self.counts(slot, now)
            for position, count in enumerate(counts, index):
                words[position] = int(count)
            reals[index + SECONDS] = counts.seconds
        reals[START] = self.start_s(now)
        reals[SINCE] = 0.0
        words[STAGE] = STAGE_IDLE
        self.is_plausible = True

    def _time(self, index: int, now: float) -> float:
        """Return a virtual time. Out of bounds, return 0.0: rows are summed, and only the greatest base counts."""
        value = self._reals[index]
        bound = (max(0.0, now - self._created_at) + _SLACK_S) / _MIN_WEIGHT
        if not -bound <= value <= bound:
            self.is_plausible = False
            return 0.0
        return value


class Rows:
    """The rows of all workers of one device, as one account."""

    def __init__(self) -> None:
        self.readers: list[RowReader] = []

    def counts(self, slot: int, now: float) -> Counts:
        """Return the counts of a channel slot, summed over all rows."""
        return Counts(*map(sum, zip(NO_COUNTS, *[row.counts(slot, now) for row in self.readers], strict=True)))

    def used_s(self, slot: int, now: float) -> float:
        """Return the virtual time of a tenant slot without its offset."""
        return sum(row.used_s(slot, now) for row in self.readers) + max(
            (row.base_s(slot, now) for row in self.readers), default=0.0
        )

    def device_s(self, now: float) -> float:
        """Return the virtual time of the device."""
        return max((row.start_s(now) for row in self.readers), default=0.0)
