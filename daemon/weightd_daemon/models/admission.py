"""Decides whether a generation may start: computes the memory and processes that it needs, and checks two limits.

First, the memory must fit into the budgets of the host, the cards and the tenants (`residency/table.py`). If a budget
is used up, other models may be unloaded. Second, memory and processes must fit on the device (`placement.py`). If the
device is full, older generations of the same model may be drained.
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
    """Reserves memory for a model's generations in the budgets of the host, the cards and the tenants."""

    def admit(self, label: str, request: ResourceRequest, device: str) -> Verdict:
        """Reserve memory for a generation, and return whether the generation may start its processes.

        If too little is free, the generation waits for memory, and the caller calls this method again later.
        """
        raise NotImplementedError

    def restore(self, label: str, request: ResourceRequest, device: str) -> None:
        """Reserve the memory of a generation that an earlier daemon has loaded."""

    def on_serving(self, label: str) -> None:
        """Record that a generation serves requests."""

    def on_leaving(self, label: str) -> None:
        """Record that a generation is shutting down: its processes are exiting."""

    def on_ended(self, label: str) -> None:
        """Release the memory of a generation whose processes have all exited."""


class Verdict(NamedTuple):
    """Whether the memory of a generation is reserved, and if not, why.

    Attributes:
        is_granted: whether the memory is reserved.
        rejection_reason: why the memory can never be reserved, as text for users; "" if the memory is reserved or may
            be reserved later.
    """

    is_granted: bool
    rejection_reason: str = ""


class UnlimitedMemory:
    """Implementation of `ModelMemory` without budgets: it grants every request."""

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
    """Decides whether the next generation of a deployment fits on its device, which has limited memory and processes.

    Args:
        placement: the device of the deployment, or the cards of its rank group.
        rollout_policy: the configured memory of a process and of the communication between ranks.
        wake: called when another generation has released resources while a generation of this deployment waits for
            resources.
        predecessor: the deployments of the old model that this deployment's model replaces; they may be drained if both
            models do not fit. None: the model replaces no other model.
        memory: reserves memory in the budgets; None: there are no budgets.

    Attributes:
        memory: reserves memory in the budgets.
        is_released: whether resources were released after the last attempt to start the waiting generation.
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
        """Return the memory and the processes that a generation with this configuration needs to load this snapshot."""
        nbytes, slices = snapshot.nbytes, tuple(each.nbytes for each in snapshot.slices)
        if slices:
            buffer_bytes = self._rollout_policy.buffer_bytes
            return ResourceRequest(nbytes, 1, len(slices), len(slices), self._process_bytes, buffer_bytes, slices)
        if spec.rank_group is not None:
            return ResourceRequest(nbytes, 1, 1, 1, self._process_bytes)
        worker_count = spec.process_count
        # Without sharing, each worker has its own copy of the weights. The holder's copy does not count, because the
        # holder exits before a worker loads.
        copy_count = 1 if spec.is_sharing else worker_count
        return ResourceRequest(nbytes, copy_count, worker_count, 1 + worker_count, self._process_bytes)

    def restore(self, generation: GenerationBase, snapshot: Snapshot, port: int) -> None:
        """Reserve the resources of a running generation and the port of its ranks, even if this exceeds the limits."""
        self._learn(generation)
        request = self.request(generation.spec, snapshot)
        self._placement.restore(generation.label, request, port)
        self.memory.restore(generation.label, request, self._placement.name)

    def has_memory(self, label: str, request: ResourceRequest) -> Verdict:
        """Reserve memory for a generation in the budgets, and return whether the memory is reserved.

        If too little memory is free, other models may be unloaded, and the caller calls this method again later.
        """
        return self.memory.admit(label, request, self._placement.name)

    def rejection_reason(self, label: str, request: ResourceRequest, now: float) -> str:
        """Return why the device does not have the resources for a generation now, or "" if it has.

        If the generation would fit without the model that is being replaced, the deployments of that model are drained.
        """
        reason = self._placement.rejection_reason(label, request)
        if not reason or self._predecessor is None:
            return reason
        leaving_labels = [*self._placement.leaving, *(each.label for each in self._predecessor.generations)]
        if not self._placement.rejection_reason(label, request, excluding=leaving_labels):
            self._predecessor.vacate(now)
        return self._placement.rejection_reason(label, request)

    def will_suffice(self, generation: GenerationBase, request: ResourceRequest) -> bool:
        """Return whether a generation fits after all generations that are shutting down have released their resources.

        If so, each release calls `wake`, so that the caller tries to start the generation again.
        """
        if self._placement.rejection_reason(generation.label, request, excluding=self._placement.leaving):
            return False
        if generation.label not in self._placement.waiting:
            labels = ", ".join(sorted(self._placement.leaving))
            _log.info("%s waits for the memory of %s", generation.label, labels, extra=generation.log_extra())
            self._placement.wait_for_release(generation.label, self._on_released)
        return True

    def on_device_memory(self, generation: GenerationBase, memory: DeviceMemory | None, rank: int = 0) -> None:
        """Record the free memory of a card, as reported by a process of the generation after it has loaded.

        Args:
            generation: the generation of the process.
            memory: the memory of the card; None if the process has reported none.
            rank: the number of the rank that has reported; 0 without ranks.
        """
        if memory is not None:
            self._placement.set_free_bytes(memory.free_bytes, rank)
            self._learn(generation)
            self._placement.set_process_bytes(generation.label, self._process_bytes)

    def _learn(self, generation: GenerationBase) -> None:
        self._process_bytes = max(self._rollout_policy.process_bytes, generation.device_usage.process_bytes)

    def _on_released(self) -> None:
        self.is_released = True
        self._wake()
