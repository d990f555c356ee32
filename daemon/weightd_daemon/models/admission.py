"""The admission of a deployment's generations: the resources that each needs, and which generations make room."""

from __future__ import annotations

import logging
from collections.abc import Callable

from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.spec import GenerationSpec
from weightd_daemon.models.deployment_state import ReplacedDeployments, RolloutPolicy
from weightd_daemon.models.placement import Placement, ResourceRequest
from weightd_daemon.processes.events import Snapshot
from weightd_protocol.messages.worker_common import DeviceMemory

_log = logging.getLogger("weightd.generation")


class Admission:
    """Decides which generations of a deployment fit its placement.

    Args:
        placement: the device, or the cards of all ranks.
        rollout_policy: the configured memory of a process.
        wake: called when resources were released for which a generation waits.
        predecessor: the deployments whose room may be taken if there is no room for both; None: no such deployments.

    Attributes:
        is_released: whether resources were released since a generation began to wait.
    """

    def __init__(
        self,
        placement: Placement,
        rollout_policy: RolloutPolicy,
        wake: Callable[[], object],
        predecessor: ReplacedDeployments | None = None,
    ) -> None:
        self._predecessor = predecessor
        self.is_released = False
        self._placement = placement
        self._rollout_policy = rollout_policy
        self._process_bytes = rollout_policy.process_bytes
        self._wake = wake

    def request(self, spec: GenerationSpec, snapshot: Snapshot) -> ResourceRequest:
        """Return the resources that a generation needs to load this snapshot."""
        nbytes, slices = snapshot.nbytes, tuple(each.nbytes for each in snapshot.slices)
        if slices:
            buffer_bytes = self._rollout_policy.buffer_bytes
            return ResourceRequest(nbytes, 1, len(slices), len(slices), self._process_bytes, buffer_bytes, slices)
        if spec.rank_group is not None:
            return ResourceRequest(nbytes, 1, 1, 1, self._process_bytes)
        worker_count = spec.process_count
        # Without sharing, the holder and its copy of the weights are gone before a worker loads.
        copy_count = 1 if spec.is_sharing else worker_count
        return ResourceRequest(nbytes, copy_count, worker_count, 1 + worker_count, self._process_bytes)

    def restore(self, generation: GenerationBase, snapshot: Snapshot, port: int) -> None:
        """Reserve the resources and the port of a generation that already runs, even if they exceed the limits."""
        self._learn(generation)
        self._placement.restore(generation.label, self.request(generation.spec, snapshot), port)

    def rejection_reason(self, label: str, request: ResourceRequest, now: float) -> str:
        """Return why there is no room for a generation, or "".

        If the generation fits without its predecessor, the predecessor is vacated.
        """
        reason = self._placement.rejection_reason(label, request)
        if not reason or self._predecessor is None:
            return reason
        leaving_labels = [*self._placement.leaving, *(each.label for each in self._predecessor.generations)]
        if not self._placement.rejection_reason(label, request, excluding=leaving_labels):
            self._predecessor.vacate(now)
        return self._placement.rejection_reason(label, request)

    def will_suffice(self, generation: GenerationBase, request: ResourceRequest) -> bool:
        """Return whether there is room once all leaving generations are gone; if so, wait for their release."""
        if self._placement.rejection_reason(generation.label, request, excluding=self._placement.leaving):
            return False
        if generation.label not in self._placement.waiting:
            labels = ", ".join(sorted(self._placement.leaving))
            _log.info("%s waits for the memory of %s", generation.label, labels, extra=generation.log_extra())
            self._placement.wait_for_release(generation.label, self._on_released)
        return True

    def on_device_memory(self, generation: GenerationBase, memory: DeviceMemory | None, rank: int = 0) -> None:
        """Record the free bytes that the card of this rank reported after a process of the generation has loaded."""
        if memory is not None:
            self._placement.set_free_bytes(memory.free_bytes, rank)
            self._learn(generation)
            self._placement.set_process_bytes(generation.label, self._process_bytes)

    def _learn(self, generation: GenerationBase) -> None:
        self._process_bytes = max(self._rollout_policy.process_bytes, generation.device_usage.process_bytes)

    def _on_released(self) -> None:
        self.is_released = True
        self._wake()
