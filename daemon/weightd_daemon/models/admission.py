"""The admission of a deployment's generations: the resources that each needs, and which generations make room.

Two limits apply: the budgets for the memory of models (`residency.py`), for which other models may be unloaded, and the
limits of the device (`placement.py`), for which older generations of the same model may be drained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.spec import GenerationSpec
from weightd_daemon.models.deployment_state import ReplacedDeployments, RolloutPolicy
from weightd_daemon.models.placement import Placement, ResourceRequest
from weightd_daemon.processes.events import Snapshot
from weightd_protocol.messages.worker_common import DeviceMemory

_log = logging.getLogger("weightd.generation")


class ModelMemory(Protocol):
    """The memory of a model's generations within the budgets of the host, its cards and the tenants."""

    def admit(self, label: str, request: ResourceRequest, device: str) -> Verdict:
        """Return whether a generation may start its processes; until then its memory is requested."""
        raise NotImplementedError

    def restore(self, label: str, request: ResourceRequest, device: str) -> None:
        """Record a generation that an earlier daemon has loaded."""

    def on_serving(self, label: str) -> None:
        """Record that a generation serves."""

    def on_leaving(self, label: str) -> None:
        """Record that the processes of a generation are exiting."""

    def on_ended(self, label: str) -> None:
        """Record that no process of a generation is left."""


class Verdict(NamedTuple):
    """The answer to a request for memory.

    Attributes:
        is_granted: whether the memory is reserved.
        rejection_reason: why it can never be; "" if it may be later.
    """

    is_granted: bool
    rejection_reason: str = ""


class UnlimitedMemory:
    """The memory of a model whose memory has no budget."""

    def admit(self, label: str, request: ResourceRequest, device: str) -> Verdict:
        """Grant every request."""
        return Verdict(is_granted=True)

    def restore(self, label: str, request: ResourceRequest, device: str) -> None:
        """Do nothing."""

    def on_serving(self, label: str) -> None:
        """Do nothing."""

    def on_leaving(self, label: str) -> None:
        """Do nothing."""

    def on_ended(self, label: str) -> None:
        """Do nothing."""


class Admission:
    """Decides which generations of a deployment fit its placement.

    Args:
        placement: the device, or the cards of all ranks.
        rollout_policy: the configured memory of a process.
        wake: called when resources were released for which a generation waits.
        predecessor: the deployments whose room may be taken if there is no room for both; None: no such deployments.
        memory: the budgets for the model's memory.

    Attributes:
        memory: as above.
        is_released: whether resources were released since a generation began to wait.
    """

    def __init__(
        self,
        placement: Placement,
        rollout_policy: RolloutPolicy,
        wake: Callable[[], object],
        predecessor: ReplacedDeployments | None = None,
        memory: ModelMemory | None = None,
    ) -> None:
        self.memory = memory or UnlimitedMemory()
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
        request = self.request(generation.spec, snapshot)
        self._placement.restore(generation.label, request, port)
        self.memory.restore(generation.label, request, self._placement.name)

    def has_memory(self, label: str, request: ResourceRequest) -> Verdict:
        """Return whether the budgets have memory for a generation; other models may be unloaded for it meanwhile."""
        return self.memory.admit(label, request, self._placement.name)

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
