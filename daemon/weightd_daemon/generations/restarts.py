"""The restart policy: which lost processes are started again, and with which delay.

A worker that exits is first replaced at once; failed starts and repeated early exits increase the delay. A generation
or model that has served before is restarted without limit; one that has never served is given up after a few attempts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from weightd_daemon.generations.base import GenerationView
from weightd_daemon.generations.process import FOREVER, LossReason, WorkerProcess
from weightd_daemon.generations.states import ACTIVE, ChildState, GenerationState

# The number of starts in a row that may fail; a further one is unlikely to succeed.
MAX_FAILED_STARTS = 3

# A worker that exits sooner than this after READY probably exits for the same reason as the previous one.
EARLY_DEATH_S = 10.0

NEVER = float("inf")

# The delays of process starts and of model loads.
_FIRST_DELAY_S, _FIRST_LOAD_DELAY_S = 0.1, 1.0
_MAX_DELAY_S, _MAX_LOAD_DELAY_S = 30.0, 60.0

# A start that waits for free memory is retried often, because requests may wait for it; each attempt costs a process.
_MAX_MEMORY_DELAY_S = 2.0

# After this number of doublings, the delay exceeds its maximum; without a limit, many losses would overflow a float.
_MAX_DOUBLINGS = 10

# Random jitter keeps the workers of several models that exited together from restarting at the same moment.
_JITTER = 0.25


class WorkerStarts:
    """Decides which workers of a generation are started, and when.

    Args:
        generation: the generation.
    """

    def __init__(self, generation: GenerationView) -> None:
        self._generation = generation
        self._backoff = RestartBackoff()
        self._devices = generation.spec.devices or (generation.device,)

    @property
    def missing_devices(self) -> Sequence[str]:
        """The device of each missing worker, alternating between the devices; empty if none may start."""
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
        """Return the device of each worker that has to be started now."""
        return self.missing_devices if self._backoff.due_at <= now else ()

    @property
    def next_start_at(self) -> float:
        """When the next worker is started, in monotonic seconds; `FOREVER` if none is missing."""
        return self._backoff.due_at if self.missing_devices else FOREVER

    @property
    def backoff_delay_s(self) -> float:
        """The seconds by which the next start is delayed after a loss, or 0."""
        has_served = self._generation.state is GenerationState.SERVING
        return self._backoff.delay_s if has_served and self._backoff.delay_s and self.missing_devices else 0.0

    @property
    def is_given_up(self) -> bool:
        """Whether no worker has ever been READY, and no more are started."""
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

        Return whether the loss counts as the generation's failure until a worker is READY again.
        """
        if loss.previous_state is ChildState.READY:
            self._backoff.on_death(now - worker.ready_at, now, has_answered=loss.has_answered)
            return bool(self._backoff.delay_s) and not self._generation.attach_control.is_attach_closed
        if loss.previous_state is ChildState.AWAITED:
            # The worker was READY for the previous daemon, so its loss says nothing about the next start.
            self._backoff.on_death(0.0, now, has_answered=True)
        elif loss.is_out_of_memory:
            self._backoff.on_out_of_memory(now, self._generation.spec.memory_timeout_s)
        else:
            self._backoff.on_start_failed(now)
        return True


class RestartBackoff:
    """Counts losses, and computes when the next start is due. Times are monotonic seconds.

    Args:
        random_fraction: returns a random number from 0 to 1, which shortens delays.

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
        """Schedule a start after one found no free memory on the card.

        Such a start counts as failed only after `timeout_s` seconds of attempts.
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
            lifetime_s: the seconds since READY.
            now: the clock.
            has_answered: whether the worker had answered a request. Then its start was good, and its successor starts
                at once; `scheduling.fault_isolation` handles requests that crash workers.
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
        due_at: when the next attempt is due; `NEVER` if none is planned.
        failures: how many attempts have failed since the last success.
    """

    def __init__(self) -> None:
        self.due_at = NEVER
        self.failures = 0

    def on_failure(self, now: float) -> None:
        """Plan the next attempt, unless one is planned."""
        if self.due_at == NEVER:
            delay_s = min(_MAX_LOAD_DELAY_S, _FIRST_LOAD_DELAY_S * 2.0 ** min(self.failures, _MAX_DOUBLINGS))
            self.failures += 1
            self.due_at = now + delay_s

    def cancel(self) -> None:
        """Plan no attempt, but keep the delay of the next one."""
        self.due_at = NEVER

    def on_success(self) -> None:
        """Plan no attempt, and reset the delay."""
        self.due_at = NEVER
        self.failures = 0
