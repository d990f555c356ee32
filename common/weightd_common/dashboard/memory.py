"""What the processes of a model take of memory, and what as many plain processes would.

A plain process has a copy of the weights of its own, and what a worker has besides that is no file's:

    plain = N x (private + copy)

That is more than a worker has alone: after a fork, most of its interpreter and its engine are those of all others.
Files, such as libraries, the kernel shares among plain processes, too: they do not count.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Iterable, Iterator, Optional, Set

from weightd_common.devices import is_cpu
from weightd_protocol.messages.status import GenerationStatus, ModelStatus, ProcessStatus, StatusResponse

# Who takes requests, and has the weights in common with others.
_WORKER_ROLES = ("worker", "spare")

# These run the model, too, each with a slice of its own.
_RUNNING_ROLES = (*_WORKER_ROLES, "rank")


@dataclass(frozen=True)
class MemoryUsage:
    """In bytes.

    Attributes:
        copy_bytes: the copies of weights, each once, as much of them as is in memory.
        workers: how many processes use them.
        processes: all processes that run the models, whether they share weights or not: as many plain processes
            would take `without_sharing_bytes`.
        private_bytes: what these have alone, all together.
        other_bytes: all else: who holds the weights, libraries, processes that share nothing.
        without_sharing_bytes: what would be taken if each of `processes` were a plain process, at least. One that
            shares no weights counts as it is.
    """

    copy_bytes: int
    workers: int
    private_bytes: int
    other_bytes: int
    without_sharing_bytes: int
    processes: int

    @property
    def total_bytes(self) -> int:
        """What is taken."""
        return self.copy_bytes + self.private_bytes + self.other_bytes


def model_memory(model: ModelStatus) -> Optional[MemoryUsage]:
    """Return that of the processes of a model; None where there are none, or the kernel does not tell."""
    generations = [each for each in model.generations if each.processes]
    if not generations or any(each.copy_bytes is None for each in generations):
        return None
    return _sum_memory(map(_generation_memory, generations))


def service_memory(status: StatusResponse) -> Optional[MemoryUsage]:
    """Return that of all there is; None where this client is not told. What several models share counts once."""
    if not status.pid:
        return None
    models = _sum_memory(_generation_memory(each) for each in _unique_generations(status) if each.processes)
    return dataclasses.replace(models, other_bytes=models.other_bytes + _own_bytes(status))


def pss_total(status: StatusResponse) -> int:
    """Return the memory of the daemon and all its processes; that of cards is in no process."""
    processes = (process for generation in _unique_generations(status) for process in generation.processes)
    return _own_bytes(status) + sum(each.pss_bytes or 0 for each in processes)


def _own_bytes(status: StatusResponse) -> int:
    """The memory of the daemon, and of the processes of which others are forked."""
    return status.pss_bytes + sum(each.pss_bytes or 0 for each in status.fork_servers)


def _unique_generations(status: StatusResponse) -> Iterator[GenerationStatus]:
    """All generations, but for those whose processes were told with another model."""
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
        # Of a copy that nobody has used yet, all is on disk: that is no merit of sharing.
        return MemoryUsage(0, 0, 0, pss_bytes, pss_bytes, running)
    if not is_cpu(generation.device):
        pss_bytes += copy_bytes  # a card's memory is in no process
    copy_bytes = min(copy_bytes, pss_bytes)
    private_bytes = min(sum(each.private_bytes or 0 for each in sharing), pss_bytes - copy_bytes)
    unshared_bytes = sum(each.pss_bytes or 0 for each in workers if not each.shared_bytes)
    without_sharing_bytes = sum(_private_bytes(each) + (each.shared_bytes or 0) for each in sharing) + unshared_bytes
    return MemoryUsage(
        copy_bytes, len(sharing), private_bytes, pss_bytes - copy_bytes - private_bytes, without_sharing_bytes, running
    )


def _private_bytes(worker: ProcessStatus) -> int:
    """What it would have for itself if nothing had been forked."""
    # Weights that were inherited of the template are no file's, those in a page store are.
    weights = worker.shared_bytes if worker.origin == "template" else 0
    return max(worker.private_bytes or 0, (worker.anonymous_bytes or 0) - (weights or 0))


def _sum_memory(memories: Iterable[MemoryUsage]) -> MemoryUsage:
    each = [dataclasses.astuple(memory) for memory in memories]
    return MemoryUsage(*map(sum, zip(*each))) if each else MemoryUsage(0, 0, 0, 0, 0, 0)
