"""Changes the number of workers of a generation while it serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.process import WorkerProcess
from weightd_daemon.generations.states import ChildState, GenerationState


def set_worker_target(generation: GenerationBase, workers: int, idle: Sequence[str], now: float) -> None:
    """Set how many workers of a generation should serve on each device.

    Missing workers are started. Surplus workers are stopped if they are idle; their slots are removed first, so that no
    request is lost. The number of processes of a rank group never changes.

    Args:
        generation: the generation.
        workers: the number of workers on each device, which is limited to the configured minimum and maximum.
        idle: the names of the workers that run no batch, in the order in which to stop them. No other serving worker is
            stopped.
        now: the time (monotonic seconds).
    """
    generation.worker_target = generation.spec.clamp_workers(workers)
    if generation.state is GenerationState.SERVING:
        for worker in _stoppable(generation, idle):
            generation.processes.stop(worker, now)
    generation.tick(now)


def has_surplus_workers(generation: GenerationBase) -> bool:
    """Return whether any device has more workers and spares of a generation than it should have."""
    wanted = generation.worker_target + generation.spec.spares
    return any(count > wanted for count in generation.processes.workers_by_device().values())


def _stoppable(generation: GenerationBase, idle: Sequence[str]) -> list[WorkerProcess]:
    """Return the READY workers to stop so that no device has more workers and spares than it should have."""
    processes, target = generation.processes, generation.worker_target
    surplus = processes.workers_by_device()
    serving_surplus = Counter(processes.children[name].device for name in processes.serving)
    for device in surplus:
        surplus[device] -= target + generation.spec.spares
        serving_surplus[device] -= target
    chosen: list[WorkerProcess] = []
    serving = [processes.children[name] for name in idle if name in processes.serving]
    spares = [each for each in processes.usable(Role.WORKER) if each.name not in processes.serving]
    for worker in serving + spares[::-1]:
        is_serving = worker.name in processes.serving
        may_stop = worker.state is ChildState.READY and (serving_surplus[worker.device] > 0 or not is_serving)
        if may_stop and surplus[worker.device] > 0:
            surplus[worker.device] -= 1
            serving_surplus[worker.device] -= is_serving
            chosen.append(worker)
    return chosen
