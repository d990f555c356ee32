"""Limits how many workers of all models may attach on the CPU at the same time, by free cores and free memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from weightd_daemon.generations.base import GenerationView, one_after_another
from weightd_daemon.generations.states import ChildState
from weightd_daemon.platform import cgroup, memory
from weightd_daemon.platform.memory import MIB

# Bytes of a build's memory that do not depend on the size of the model. Measured: 16 to 60 MiB for models with 10 MB of
# convolution weights.
_PROCESS_BYTES = 64 * MIB


class _LimitedGeneration(NamedTuple):
    """A generation, and a function that returns the bytes that one of its processes needs for a build."""

    generation: GenerationView
    build_bytes: Callable[[], int]

    @property
    def building_count(self) -> int:
        """The number of the generation's processes that build or attach now."""
        return self.generation.processes.count(ChildState.BUILDING, ChildState.ATTACHING)


class LoadLimiter:
    """Limits how many processes load at the same time.

    Each loading process needs a core, and memory for its own copy of the weights until it shares them.

    Args:
        free_bytes: returns the free memory of the host in bytes.
        usable_cores: returns the number of cores that the daemon and its children may use.
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
        """Limit the workers of a generation from now on, and count its builds when other generations are limited.

        Args:
            generation: a generation on the CPU.
            model_bytes: returns the size of the model's files in bytes; 0 before their snapshot exists.
            build_factor: the memory of one build as a multiple of `model_bytes`.
        """
        limited = _LimitedGeneration(generation, lambda: int(build_factor * model_bytes()) + _PROCESS_BYTES)
        self._generations = [each for each in self._generations if not each.generation.is_ended] + [limited]

    def attach_limit(self, generation: GenerationView) -> int:
        """Return how many workers of a generation may attach at the same time; 1 if the generation was not added.

        The full memory of every other build in progress is subtracted from the free memory, although such a build may
        have allocated part of it already. So the limit may be too low, but never too high.
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
        # The limit counts the workers of this generation that are already attaching. The memory that they have
        # allocated is no longer free, so the limit may be too low, but never too high.
        bytes_left = self._free_bytes() - sum(count * need for count, need in other_builds)
        return max(1, min(cores_left, bytes_left // limited.build_bytes()))
