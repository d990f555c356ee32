"""The restart policy: which lost processes are started again, and after which delay.

A worker that exits is replaced at once. Only failed starts and repeated early exits delay the next start. A generation
or model that has served is restarted without limit; a generation or model that has never served is given up after a few
attempts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from weightd_daemon.generations.base import GenerationView
from weightd_daemon.generations.process import FOREVER, LossReason, WorkerProcess
from weightd_daemon.generations.states import ACTIVE, ChildState, GenerationState

# Maximum number of failed starts in a row. After that, a further start is unlikely to succeed.
MAX_FAILED_STARTS = 3

# Seconds after READY within which the exit of a worker counts as early. Workers that repeatedly exit early probably do
# so for the same reason, so the next start is delayed.
EARLY_DEATH_S = 10.0

NEVER = float("inf")

# Seconds before the first retry, and the maximum before any retry. The first number of each pair is for the start of a
# process, the second for the load of a model.
_FIRST_DELAY_S, _FIRST_LOAD_DELAY_S = 0.1, 1.0
_MAX_DELAY_S, _MAX_LOAD_DELAY_S = 30.0, 60.0

# Maximum delay in seconds of a start that waits for free memory. Such a start is retried often, because requests may
# wait for the worker, but not without delay, because each attempt starts a process.
_MAX_MEMORY_DELAY_S = 2.0

# Maximum number of times that a delay is doubled. The delay then exceeds its maximum in any case. Without this limit,
# the result could exceed the range of a float after many losses.
_MAX_DOUBLINGS = 10

# Maximum fraction by which a delay is shortened at random, so that workers of several models that have exited together
# do not restart at the same time.
_JITTER = 0.25


class WorkerStarts:
    """Decides which workers of a generation are started, and when.

    Args:
        generation: the generation of the workers.
    """

    def __init__(self, generation: GenerationView) -> None:
        self._generation = generation
        self._backoff = RestartBackoff()
        self._devices = generation.spec.devices or (generation.device,)

    @property
    def missing_devices(self) -> Sequence[str]:
        """The device of each missing worker, alternating between the devices; empty if no worker may be started."""
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
        wanted = generation.worker_target + spec.spares
        if all(workers_by_device[device] >= wanted for device in self._devices):
            return ()
        numbers = range(wanted)
        return [device for number in numbers for device in self._devices if workers_by_device[device] <= number]

    def due_devices(self, now: float) -> Sequence[str]:
        """Return the device of each missing worker if workers may be started now; else an empty sequence."""
        return self.missing_devices if self._backoff.due_at <= now else ()

    @property
    def next_start_at(self) -> float:
        """When the next worker may be started, in monotonic seconds; `FOREVER` if no worker is missing."""
        return self._backoff.due_at if self.missing_devices else FOREVER

    @property
    def backoff_delay_s(self) -> float:
        """The seconds by which a serving generation delays the next start after a loss, or 0."""
        has_served = self._generation.state is GenerationState.SERVING
        return self._backoff.delay_s if has_served and self._backoff.delay_s and self.missing_devices else 0.0

    @property
    def is_given_up(self) -> bool:
        """Whether no worker is started any more: too many starts have failed, and no worker was ever READY."""
        return self._backoff.is_exhausted and self._generation.state is not GenerationState.SERVING

    @property
    def is_done(self) -> bool:
        """Whether every worker is READY, or further starts are unlikely to succeed."""
        return self._backoff.is_exhausted or not (self.missing_devices or not self._generation.processes.is_all_ready)

    @property
    def is_short(self) -> bool:
        """Whether a device has fewer workers than are configured to serve there."""
        workers_by_device = self._generation.processes.workers_by_device()
        return any(workers_by_device[device] < self._generation.spec.workers for device in self._devices)

    def on_ready(self) -> None:
        """Reset the count of failed starts, because a worker has become READY."""
        self._backoff.on_ready()

    def on_worker_lost(self, worker: WorkerProcess, loss: LossReason, now: float) -> bool:
        """Schedule the replacement of a lost worker.

        Return whether the generation should report the loss as its failure until a worker is READY again.
        """
        if loss.previous_state is ChildState.READY:
            self._backoff.on_death(now - worker.ready_at, now, has_answered=loss.has_answered)
            return bool(self._backoff.delay_s) and not self._generation.attach_control.is_attach_closed
        if loss.previous_state is ChildState.AWAITED:
            # The worker was READY for the previous daemon, so its loss is no sign that the next start will fail.
            self._backoff.on_death(0.0, now, has_answered=True)
        elif loss.is_out_of_memory:
            self._backoff.on_out_of_memory(now, self._generation.spec.memory_timeout_s)
        else:
            self._backoff.on_start_failed(now)
        return True


class RestartBackoff:
    """Counts the failed starts and early exits of workers, and computes when the next start is due.

    Times are monotonic seconds.

    Args:
        random_fraction: returns a random number from 0 to 1, by which delays are shortened.

    Attributes:
        due_at: when the next start is due.
        delay_s: the seconds from the last loss to `due_at`.
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
        """Whether MAX_FAILED_STARTS starts in a row have failed, so that another one is unlikely to succeed."""
        return self._failed_starts >= MAX_FAILED_STARTS

    def on_ready(self) -> None:
        """Reset the count of failed starts, because a worker has become READY."""
        self._failed_starts = self._memory_failures = 0
        self._out_of_memory_since = None

    def on_start_failed(self, now: float) -> None:
        """Schedule a start after a worker was lost before it was READY."""
        self._failed_starts += 1
        self._schedule(now, self._delay_after(self._failed_starts))

    def on_out_of_memory(self, now: float, timeout_s: float) -> None:
        """Schedule a start after a worker has found no free memory on its card.

        Starts without free memory count as failed starts only if they have failed for `timeout_s` seconds.
        """
        if self._out_of_memory_since is None:
            self._out_of_memory_since = now
        if now >= self._out_of_memory_since + timeout_s:
            self.on_start_failed(now)
        else:
            self._memory_failures += 1
            self._schedule(now, min(_MAX_MEMORY_DELAY_S, self._delay_after(self._memory_failures)))

    def on_death(self, lifetime_s: float, now: float, *, has_answered: bool = False) -> None:
        """Schedule a start after a worker was lost `lifetime_s` seconds after it became READY.

        Args:
            lifetime_s: the seconds from READY to the loss.
            now: the time.
            has_answered: whether the worker had answered a request. If so, its start was successful, and the next
                worker starts at once. `scheduling.fault_isolation` handles requests that crash workers.
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
        due_at: when the next attempt is due; `NEVER` if none is scheduled.
        failures: how many attempts have failed since the last success.
    """

    def __init__(self) -> None:
        self.due_at = NEVER
        self.failures = 0

    def on_failure(self, now: float) -> None:
        """Schedule the next attempt, unless an attempt is scheduled already."""
        if self.due_at == NEVER:
            delay_s = min(_MAX_LOAD_DELAY_S, _FIRST_LOAD_DELAY_S * 2.0 ** min(self.failures, _MAX_DOUBLINGS))
            self.failures += 1
            self.due_at = now + delay_s

    def cancel(self) -> None:
        """Cancel the scheduled attempt, but keep the count of failures, from which the next delay follows."""
        self.due_at = NEVER

    def on_success(self) -> None:
        """Cancel the scheduled attempt, and reset the count of failures."""
        self.due_at = NEVER
        self.failures = 0
