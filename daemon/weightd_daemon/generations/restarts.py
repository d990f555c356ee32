"""Which lost processes are started again, and when: at once the first time, later and later if that is lost, too.

What has served before is tried for ever; what has not is given up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from weightd_daemon.generations.base import GenerationView
from weightd_daemon.generations.process import FOREVER, LossReason, WorkerProcess
from weightd_daemon.generations.states import ACTIVE, ChildState, GenerationState

# A worker that never became READY this many times in a row will hardly become so the next time.
MAX_FAILED_STARTS = 3

# A worker that dies sooner after READY than this is dying of the same cause as the one before it.
EARLY_DEATH_S = 10.0

NEVER = float("inf")

# Of the start of a process, and of the load of a model.
_FIRST_DELAY_S, _FIRST_LOAD_DELAY_S = 0.1, 1.0
_MAX_DELAY_S, _MAX_LOAD_DELAY_S = 30.0, 60.0

# Room is looked for often: each try costs a process, and requests may wait for it.
_MAX_MEMORY_DELAY_S = 2.0

# Doublings that lead well past the longest delay; a float has room for a thousand, deaths are not bounded.
_MAX_DOUBLINGS = 10

# Workers of several models that died of one cause do not all come back at the same moment.
_JITTER = 0.25


class WorkerStarts:
    """Decides which workers of a generation are started, and when.

    Args:
        generation: how it stands.
    """

    def __init__(self, generation: GenerationView) -> None:
        self._generation = generation
        self._backoff = RestartBackoff()
        self._devices = generation.spec.devices or (generation.device,)

    @property
    def missing_devices(self) -> Sequence[str]:
        """Where a worker is to be started, now or later: the device of each, in turn."""
        generation, spec = self._generation, self._generation.spec
        if (
            generation.state not in ACTIVE
            or generation.state is GenerationState.SNAPSHOTTING
            or self.is_given_up
            or generation.attach_control.is_attach_closed
            or (spec.can_fork_from_holder and generation.built is None)
        ):
            return ()
        workers_by_device = generation.processes.workers_by_device()
        if workers_by_device.total() == spec.process_count:
            return ()
        numbers = range(spec.processes_per_device)
        return [device for number in numbers for device in self._devices if workers_by_device[device] <= number]

    def due_devices(self, now: float) -> Sequence[str]:
        """Return where a worker is to be started now."""
        return self.missing_devices if self._backoff.due_at <= now else ()

    @property
    def next_start_at(self) -> float:
        """When the next worker is to be started, in monotonic seconds; `FOREVER` where none is missing."""
        return self._backoff.due_at if self.missing_devices else FOREVER

    @property
    def backoff_delay_s(self) -> float:
        """Seconds by which the next start is put off after a loss; 0 where nothing is put off."""
        has_served = self._generation.state is GenerationState.SERVING
        return self._backoff.delay_s if has_served and self._backoff.delay_s and self.missing_devices else 0.0

    @property
    def is_given_up(self) -> bool:
        """Whether none of the workers has ever been READY, and none will be."""
        return self._backoff.is_exhausted and self._generation.state is not GenerationState.SERVING

    @property
    def is_done(self) -> bool:
        """Whether no start or attach is under way, and none is due or worth waiting for."""
        return self._backoff.is_exhausted or not (self.missing_devices or not self._generation.processes.is_all_ready)

    @property
    def is_short(self) -> bool:
        """Whether a device has fewer workers than take requests there."""
        workers_by_device = self._generation.processes.workers_by_device()
        return any(workers_by_device[device] < self._generation.spec.workers for device in self._devices)

    def on_ready(self) -> None:
        """A worker has become READY: starting works."""
        self._backoff.on_ready()

    def on_worker_lost(self, worker: WorkerProcess, loss: LossReason, now: float) -> bool:
        """A worker is lost; return whether the cause is to be told for as long as it is not replaced."""
        if loss.previous_state is ChildState.READY:
            self._backoff.on_death(now - worker.ready_at, now, has_answered=loss.has_answered)
            return bool(self._backoff.delay_s) and not self._generation.attach_control.is_attach_closed
        if loss.previous_state is ChildState.AWAITED:
            # It was READY once: that it is not back says nothing about the next one.
            self._backoff.on_death(0.0, now, has_answered=True)
        elif loss.is_out_of_memory:
            self._backoff.on_out_of_memory(now, self._generation.spec.memory_timeout_s)
        else:
            self._backoff.on_start_failed(now)
        return True


class RestartBackoff:
    """Counts deaths and says when the next start is due. Times are monotonic seconds.

    Args:
        random_fraction: returns a random number from 0 to 1, by which delays are shortened.

    Attributes:
        due_at: when the next start is.
        delay_s: seconds from the last death to that.
    """

    def __init__(self, random_fraction: Callable[[], float] = random.random) -> None:
        self.due_at = 0.0
        self.delay_s = 0.0
        self._failed_starts = 0
        self._memory_failures = 0
        self._out_of_memory_since: float | None = None
        self._early_deaths = 0
        self._random = random_fraction

    @property
    def is_exhausted(self) -> bool:
        """Whether starts have failed so often in a row that the next one hardly succeeds."""
        return self._failed_starts >= MAX_FAILED_STARTS

    def on_ready(self) -> None:
        """A worker has become READY: starting works."""
        self._failed_starts = self._memory_failures = 0
        self._out_of_memory_since = None

    def on_start_failed(self, now: float) -> None:
        """A worker has died before it was READY."""
        self._failed_starts += 1
        self._schedule(now, self._delay_after(self._failed_starts))

    def on_out_of_memory(self, now: float, timeout_s: float) -> None:
        """A start has found no room where some may come free late: for `timeout_s` seconds that is no failed start."""
        if self._out_of_memory_since is None:
            self._out_of_memory_since = now
        if now >= self._out_of_memory_since + timeout_s:
            self.on_start_failed(now)
        else:
            self._memory_failures += 1
            self._schedule(now, min(_MAX_MEMORY_DELAY_S, self._delay_after(self._memory_failures)))

    def on_death(self, lifetime_s: float, now: float, *, has_answered: bool = False) -> None:
        """A worker has died `lifetime_s` seconds after it was READY.

        Args:
            lifetime_s: how long.
            now: the clock.
            has_answered: whether it had answered anything. Then it was no bad start, and its successor is wanted at
                once: requests that kill workers are the business of `scheduling.fault_isolation`.
        """
        if has_answered or lifetime_s >= EARLY_DEATH_S:
            self._early_deaths = 0
            self._schedule(now, 0.0)
            return
        self._schedule(now, self._delay_after(self._early_deaths) if self._early_deaths else 0.0)
        self._early_deaths += 1

    def _schedule(self, now: float, delay: float) -> None:
        self.due_at, self.delay_s = now + delay, delay

    def _delay_after(self, count: int) -> float:
        delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(count - 1, _MAX_DOUBLINGS))
        return delay_s * (1.0 - _JITTER * self._random())


class LoadBackoff:
    """Exponential back-off between two attempts to load a model. Times are monotonic seconds.

    Attributes:
        due_at: when the next attempt is; `NEVER` if none is planned.
    """

    def __init__(self) -> None:
        self.due_at = NEVER
        self._failures = 0

    def on_failure(self, now: float) -> None:
        """Plan the next attempt, unless one is planned."""
        if self.due_at == NEVER:
            delay_s = min(_MAX_LOAD_DELAY_S, _FIRST_LOAD_DELAY_S * 2.0**self._failures)
            self._failures = min(self._failures + 1, _MAX_DOUBLINGS)
            self.due_at = now + delay_s

    def cancel(self) -> None:
        """Plan no attempt; the delay before the next one is not shorter for that."""
        self.due_at = NEVER

    def on_success(self) -> None:
        """Begin with the shortest delay again."""
        self.due_at = NEVER
        self._failures = 0
