"""Decides how many workers a model has, if the configuration gives a range instead of a number.

`WorkerScaling` decides without I/O: it receives the load and the current time, and returns the wanted number. It
guarantees:

- The number stays within the configured range.
- One step at most doubles the number. The number grows again only after all workers of the last step serve.
- The number falls at most by the number of workers that were idle for `WorkerRange.idle` seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from weightd_daemon.config.workers import WorkerRange
from weightd_daemon.generations.restarts import NEVER

# Seconds for which requests must have waited before more workers are started. A pause of the daemon or a burst of short
# requests ends sooner and needs no further worker. A worker starts within a few milliseconds.
WAIT_S = 0.1

# Seconds until the daemon checks again whether surplus workers, which were busy at the last check, can be stopped.
_SURPLUS_CHECK_S = 1.0


class WorkerUse(NamedTuple):
    """A worker that serves requests, and the time since which it is idle.

    Attributes:
        name: the name of the worker's process.
        device: the device on which the worker runs.
        idle_since: when the worker answered its last batch, in monotonic seconds; None while it has a batch.
    """

    name: str
    device: str
    idle_since: float | None


class WorkerLoad(NamedTuple):
    """The load of a model at one moment.

    Attributes:
        waiting: the number of requests that wait for a worker.
        workers: the workers that serve.
        has_surplus: whether more workers run than are wanted.
    """

    waiting: int
    workers: Sequence[WorkerUse]
    has_surplus: bool = False


class WorkerScaling:
    """Decides how many workers a model has on each device. Times are monotonic seconds.

    Args:
        bounds: the configured range of the number of workers, and the idle time after which a worker is stopped.
        device_count: the number of devices on which the model runs.

    Attributes:
        next_check_at: when `decide` has to be called next, unless requests begin to wait sooner.
        reason: why the model has this number of workers, as text for users.
    """

    def __init__(self, bounds: WorkerRange, device_count: int) -> None:
        self._bounds = bounds
        self._device_count = max(1, device_count)
        self._waiting_since: float | None = None
        self._grown_at: float | None = None
        self.next_check_at = 0.0
        self.reason = "no requests have waited"

    def reset(self) -> None:
        """Forget the recorded load, because no worker serves."""
        self._waiting_since = self._grown_at = None
        self.next_check_at = 0.0
        self.reason = "no requests have waited"

    def wait_limit_s(self, target: int) -> float:
        """Return how many seconds a request may wait before `observe` has to be called.

        The result is infinite if the number of workers has reached its maximum.
        """
        return WAIT_S if target < self._bounds.max else NEVER

    def observe(self, target: int, waiting: int, now: float) -> None:
        """Record whether requests wait."""
        if not waiting or target >= self._bounds.max:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
            self.next_check_at = min(self.next_check_at, now + WAIT_S)

    def decide(self, target: int, load: WorkerLoad, now: float) -> int:
        """Return the wanted number of workers on each device.

        Args:
            target: the number of workers on each device that was wanted until now.
            load: the load of the model.
            now: the time in monotonic seconds.
        """
        if self._grown_at is None:
            # This is the first call. How long the workers have been idle is unknown, so their idle time begins now.
            self._grown_at = now
        self.observe(target, load.waiting, now)
        wanted = self._grown(target, load, now)
        if wanted == target and not load.waiting:
            wanted = self._shrunk(target, load, now)
        self._plan(wanted, load, now)
        return wanted

    def _grown(self, target: int, load: WorkerLoad, now: float) -> int:
        is_effective = len(load.workers) >= target * self._device_count
        if self._waiting_since is None or now < self._waiting_since + WAIT_S or not is_effective:
            return target
        # A step at most doubles the number: a few steps reach any number, but one burst of requests does not start all
        # workers.
        step = min(-(-load.waiting // self._device_count), target)
        wanted = min(target + step, self._bounds.max)
        self._waiting_since, self._grown_at = None, now
        self.reason = "requests waited"
        return wanted

    def _shrunk(self, target: int, load: WorkerLoad, now: float) -> int:
        idle = Counter(each.device for each in load.workers if self._idle_at(each, now) <= now)
        devices = Counter(each.device for each in load.workers)
        if target <= self._bounds.min or len(devices) < self._device_count:
            return target
        wanted = max(self._bounds.min, target - min(idle[device] for device in devices))
        if wanted < target:
            at_least = " (the minimum)" if wanted == self._bounds.min else ""
            self.reason = f"further workers were idle for {self._bounds.idle:g} s{at_least}"
        return wanted

    def _idle_at(self, worker: WorkerUse, now: float) -> float:
        """Return when the worker will have been idle long enough to be stopped, if it gets no batch until then."""
        since = now if worker.idle_since is None else worker.idle_since
        return max(since, now if self._grown_at is None else self._grown_at) + self._bounds.idle

    def _plan(self, target: int, load: WorkerLoad, now: float) -> None:
        due_at = [NEVER]
        if self._waiting_since is not None:
            grow_at = self._waiting_since + WAIT_S
            due_at.append(grow_at if grow_at > now else now + WAIT_S)
        if target > self._bounds.min and load.workers:
            idle_at = min(self._idle_at(each, now) for each in load.workers)
            due_at.append(max(idle_at, now + _SURPLUS_CHECK_S))
        elif target > self._bounds.min:
            due_at.append(now + self._bounds.idle)
        if load.has_surplus:
            due_at.append(now + _SURPLUS_CHECK_S)
        self.next_check_at = min(due_at)
