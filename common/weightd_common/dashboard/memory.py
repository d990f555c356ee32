"""Memory use of a model's processes, compared with the estimated use of the same number of processes without sharing.

Without sharing, each of N processes would need private memory and its own copy of the weights:

    memory without sharing = N x (private memory + copy of the weights)

The private memory in this formula is all of a worker's anonymous memory except the weights. It exceeds the memory that
only the worker has now, because a forked worker shares most of the memory of its interpreter and its engine with other
processes. Files such as libraries do not count, because the kernel shares them among all processes in any case.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Iterable, Iterator, Optional, Set

from weightd_common.devices import is_cpu
from weightd_protocol.messages.status import GenerationStatus, ModelStatus, ProcessStatus, StatusResponse

# Roles of processes that run the model with shared weights.
_WORKER_ROLES = ("worker", "spare")

# Roles of processes that run the model, with or without shared weights: each rank has a separate slice.
_RUNNING_ROLES = (*_WORKER_ROLES, "rank")


@dataclass(frozen=True)
class MemoryUsage:
    """Memory use of one or more models in bytes.

    Attributes:
        copy_bytes: the size of the shared copies of weights, as far as they are in memory. Each copy counts once.
        workers: the number of workers that share these copies.
        private_bytes: the sum of the memory that each of these workers has alone.
        other_bytes: all other memory: holders, libraries, and processes that share no weights.
        without_sharing_bytes: the estimated memory use of `processes` without sharing, see the module. A process that
            shares no weights counts with its actual memory use.
        processes: the number of processes that run the models, whether or not they share weights.
    """

    copy_bytes: int
    workers: int
    private_bytes: int
    other_bytes: int
    without_sharing_bytes: int
    processes: int

    @property
    def total_bytes(self) -> int:
        """The total memory use in bytes."""
        return self.copy_bytes + self.private_bytes + self.other_bytes


def model_memory(model: ModelStatus) -> Optional[MemoryUsage]:
    """Return the memory use of a model's processes. None without processes, or if the kernel does not report memory."""
    generations = [each for each in model.generations if each.processes]
    if not generations or any(each.copy_bytes is None for each in generations):
        return None
    return _sum_memory(map(_generation_memory, generations))


def service_memory(status: StatusResponse) -> Optional[MemoryUsage]:
    """Return the memory use of the daemon and all its processes; None if this client may not see it.

    A process that several models share counts once.
    """
    if not status.pid:
        return None
    models = _sum_memory(_generation_memory(each) for each in _unique_generations(status) if each.processes)
    return dataclasses.replace(models, other_bytes=models.other_bytes + _own_bytes(status))


def pss_total(status: StatusResponse) -> int:
    """Return the proportional set size of the daemon and all its processes in bytes, without the memory of cards."""
    processes = (process for generation in _unique_generations(status) for process in generation.processes)
    return _own_bytes(status) + sum(each.pss_bytes or 0 for each in processes)


def _own_bytes(status: StatusResponse) -> int:
    """Return the proportional set size of the daemon and the fork servers in bytes."""
    return status.pss_bytes + sum(each.pss_bytes or 0 for each in status.fork_servers)


def _unique_generations(status: StatusResponse) -> Iterator[GenerationStatus]:
    """Yield all generations, but each set of processes only once: models of a group share their processes."""
    seen: Set[int] = set()
    for model in status.models:
        for generation in model.generations:
            pids = {process.pid for process in generation.processes}
            if not pids & seen:
                yield generation
            seen |= pids


def _generation_memory(generation: GenerationStatus) -> MemoryUsage:
    workers = [each for each in generation.processes if each.role in _WORKER_ROLES]
    sharing = [each for each in workers if each.shared_bytes]
    running = sum(each.role in _RUNNING_ROLES for each in generation.processes)
    pss_bytes = sum(each.pss_bytes or 0 for each in generation.processes)
    copy_bytes = generation.copy_bytes or 0
    if not sharing or not copy_bytes:
        # No worker has used the copy yet, so its pages are only on disk and sharing saves no memory.
        return MemoryUsage(0, 0, 0, pss_bytes, pss_bytes, running)
    if not is_cpu(generation.device):
        pss_bytes += copy_bytes  # the weights are on a card, and the kernel counts a card's memory for no process
    copy_bytes = min(copy_bytes, pss_bytes)
    private_bytes = min(sum(each.private_bytes or 0 for each in sharing), pss_bytes - copy_bytes)
    unshared_bytes = sum(each.pss_bytes or 0 for each in workers if not each.shared_bytes)
    without_sharing_bytes = sum(_private_bytes(each) + (each.shared_bytes or 0) for each in sharing) + unshared_bytes
    return MemoryUsage(
        copy_bytes, len(sharing), private_bytes, pss_bytes - copy_bytes - private_bytes, without_sharing_bytes, running
    )


def _private_bytes(worker: ProcessStatus) -> int:
    """Return the private memory in bytes that the worker would have if it had not been forked."""
    # Weights inherited from a template are anonymous memory; weights in a page store are not.
    weights = worker.shared_bytes if worker.origin == "template" else 0
    return max(worker.private_bytes or 0, (worker.anonymous_bytes or 0) - (weights or 0))


def _sum_memory(memories: Iterable[MemoryUsage]) -> MemoryUsage:
    each = [dataclasses.astuple(memory) for memory in memories]
    return MemoryUsage(*map(sum, zip(*each))) if each else MemoryUsage(0, 0, 0, 0, 0, 0)
