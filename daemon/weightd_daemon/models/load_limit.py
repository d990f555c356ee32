"""How many workers may attach at once on this host, as far as its cores and its free memory go for all models."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from weightd_daemon.generations.base import GenerationView, one_after_another
from weightd_daemon.generations.states import ChildState
from weightd_daemon.platform import cgroup, memory
from weightd_daemon.platform.memory import MIB

# What each process takes to build beside what grows with the model: of 10 MB of convolutions 16 and 60 MiB.
_PROCESS_BYTES = 64 * MIB


class _LimitedGeneration(NamedTuple):
    """A generation, and how much memory one of its processes takes while it builds."""

    generation: GenerationView
    build_bytes: Callable[[], int]

    @property
    def building_count(self) -> int:
        """How many of its processes build now."""
        return self.generation.processes.count(ChildState.BUILDING, ChildState.ATTACHING)


class LoadLimiter:
    """Bounds how many processes load a model at the same time: each needs a core, and memory before it shares.

    Args:
        free_bytes: returns how much memory is free.
        usable_cores: returns how many cores there are.
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
        """Take a generation into account, and bound its own workers from now on.

        Args:
            generation: one on the CPU.
            model_bytes: returns the size of the model's files, once it is known.
            build_factor: how many times that much a build takes.
        """
        limited = _LimitedGeneration(generation, lambda: int(build_factor * model_bytes()) + _PROCESS_BYTES)
        self._generations = [each for each in self._generations if not each.generation.is_ended] + [limited]

    def attach_limit(self, generation: GenerationView) -> int:
        """Return how many workers of a generation may attach at once; one after another where it was not added.

        What others build is taken for not begun: free memory tells less of them than they will need, never more.
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
        # Nor have its own that attach taken all they need.
        bytes_left = self._free_bytes() - sum(count * need for count, need in other_builds)
        return max(1, min(cores_left, bytes_left // limited.build_bytes()))
