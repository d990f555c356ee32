"""The limit of workers that attach at once on this host, for all models, from its cores and its free memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from weightd_daemon.generations.base import GenerationView, one_after_another
from weightd_daemon.generations.states import ChildState
from weightd_daemon.platform import cgroup, memory
from weightd_daemon.platform.memory import MIB

# The memory of a build beside the part that grows with the model: 16 to 60 MiB were measured with 10 MB of
# convolutions.
_PROCESS_BYTES = 64 * MIB


class _LimitedGeneration(NamedTuple):
    """A generation, and the memory that one of its processes takes while it builds."""

    generation: GenerationView
    build_bytes: Callable[[], int]

    @property
    def building_count(self) -> int:
        """Number of the generation's processes that build or attach now."""
        return self.generation.processes.count(ChildState.BUILDING, ChildState.ATTACHING)


class LoadLimiter:
    """Limits how many processes load at the same time: each needs a core, and memory until it shares the weights.

    Args:
        free_bytes: returns the free memory in bytes.
        usable_cores: returns the number of usable cores.
    """

    def __init__(
        self,
        free_bytes: Callable[[], int] = memory.free_bytes,
        usable_cores: Callable[[], int] = cgroup.usable_core_count,
    ) -> None:
        self._free_bytes = free_bytes
        self._usable_cores = usable_cores
        self._generations: list[_LimitedGeneration] = []

    def add(self, generation: GenerationView, model_bytes: Callable[[], int], build_factor: float) -> None:
        """Include a generation in the calculation, and limit its workers from now on.

        Args:
            generation: a generation on the CPU.
            model_bytes: returns the size of the model's files, once that is known.
            build_factor: the memory of a build as a multiple of `model_bytes`.
        """
        limited = _LimitedGeneration(generation, lambda: int(build_factor * model_bytes()) + _PROCESS_BYTES)
        self._generations = [each for each in self._generations if not each.generation.is_ended] + [limited]

    def attach_limit(self, generation: GenerationView) -> int:
        """Return how many workers of a generation may attach at once: one if the generation was not added.

        The full memory of every other build in progress is subtracted from the free memory, although part of it may be
        allocated already. So the limit may be too low, but never too high.
        """
        limited = next((each for each in self._generations if each.generation is generation), None)
        if limited is None:
            return one_after_another(generation)
        other_builds = [
            (each.building_count, each.build_bytes())
            for each in self._generations
            if each is not limited and each.building_count
        ]
        cores_left = self._usable_cores() - sum(count for count, _ in other_builds)
        # The generation's own attaching workers count as if they had not allocated anything yet, either.
        bytes_left = self._free_bytes() - sum(count * need for count, need in other_builds)
        return max(1, min(cores_left, bytes_left // limited.build_bytes()))
