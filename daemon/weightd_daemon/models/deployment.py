"""A deployment: a model on one device or rank group, with all its generations.

At most one generation serves and at most one loads; any number of generations may be draining. A deployment makes
decisions without I/O: it receives events and the current time, and returns actions.

A deployment guarantees that the workers of only one generation receive requests. It also guarantees that a second copy
of the weights exists only while one generation takes over from another, and only if the device has enough memory.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from weightd_daemon.config.model import ReplacementPolicy
from weightd_daemon.generations.actions import Action, AddSlot, DeleteFiles
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.progress import FailureReason, RetryHint
from weightd_daemon.generations.restarts import RestartBackoff
from weightd_daemon.generations.shared_weights import Generation
from weightd_daemon.generations.spec import GenerationSpec, ModelSource, SelfTestSpec
from weightd_daemon.generations.states import ACTIVE, GenerationState
from weightd_daemon.models.admission import Admission
from weightd_daemon.models.deployment_state import (
    LOADING_STATES,
    DeploymentEvent,
    DeploymentState,
    DeploymentView,
    RolloutPolicy,
)
from weightd_daemon.models.placement import Placement
from weightd_daemon.processes.events import Snapshot

_log = logging.getLogger("weightd.generation")


class Deployment(DeploymentView):
    """Keeps one generation of a model serving; the base class `DeploymentView` has the queries of its state.

    Args:
        placement: the device or the cards of the rank group, with their limits of memory and processes.
        spec: the configuration with which generations are made.
        rollout_policy: how one generation replaces another.
        make_generation: called with a placement, a source and a configuration; returns a new generation that loads the
            source.
        admission: decides whether the next generation fits on the device.

    Attributes:
        admission: the argument `admission`.
    """

    def __init__(
        self,
        placement: Placement,
        spec: GenerationSpec,
        rollout_policy: RolloutPolicy,
        make_generation: Callable[[Placement, ModelSource, GenerationSpec], GenerationBase],
        admission: Admission,
    ) -> None:
        super().__init__(placement, spec)
        self._rollout_policy = rollout_policy
        self.admission = admission
        self._make_generation = make_generation
        self._backoff = RestartBackoff()
        self._serving_since = 0.0
        # The snapshot and the known self-test of the loading generation, while this generation waits for resources.
        self._pending_snapshot: tuple[Snapshot, SelfTestSpec | None] | None = None
        self._actions: list[tuple[GenerationBase, Action]] = []

    # --- events -------------------------------------------------------------------------------------------------

    def load(self, source: ModelSource) -> None:
        """Start to load this source without delay; the deployment must be UNLOADED or FAILED."""
        self.advance(DeploymentEvent.LOAD if self.is_unloaded else DeploymentEvent.RETRY)
        self._backoff = RestartBackoff()
        self.start(source)

    def start(self, source: ModelSource) -> None:
        """Make a new generation of this source, and start to load it."""
        self._wanted_source = None
        self.loading = self._last_generation = self._make_generation(self.placement, source, self.spec)
        self.loading.worker_target = self.worker_target
        self.loading.start()
        self._collect_actions()

    def resume(self, generation: GenerationBase, snapshot: Snapshot, port: int = 0) -> None:
        """Take over a running generation that the previous daemon has loaded.

        Args:
            generation: the generation.
            snapshot: the snapshot from which the generation was loaded.
            port: the port on which the ranks of the generation communicate; 0 for none.
        """
        self.loading = self._last_generation = generation
        self.spec = generation.spec
        self.worker_target = generation.worker_target
        self.advance(DeploymentEvent.SERVE)
        self.admission.restore(generation, snapshot, port)

    def update(self, source: ModelSource, now: float) -> None:
        """Load a generation of a new source, which serves after a call of `take_over`.

        The deployment may already be loading another generation, because the serving one was lost or lacks workers.
        That other generation is drained, and its source is loaded again only if the update fails.
        """
        wanted_again = self._wanted_source
        if self.loading is not None and (self.is_lost or self.is_being_replaced):
            wanted_again, old = self.loading.source, self.loading
            self.loading = self._pending_snapshot = None
            self._drain_generation(old, now)
        self.advance(DeploymentEvent.UPDATE)
        self.start(source)
        self._wanted_source = wanted_again

    def on_snapshot_taken(self, source: ModelSource, snapshot: Snapshot, selftest: SelfTestSpec | None = None) -> bool:
        """Let the generation that waits for this snapshot continue as soon as it fits on the device.

        Args:
            source: the source of the snapshot.
            snapshot: the snapshot.
            selftest: the self-test that an earlier generation of the source has found, or None.

        Return whether a generation waits for the snapshot.
        """
        is_awaited = self.is_awaiting_snapshot(source)
        if selftest is not None and self._failed_generation is not None:
            # The last generation has failed, perhaps because it used the stored description (`built`) of an earlier
            # holder. Without this description, the next generation starts a holder again.
            selftest = dataclasses.replace(selftest, built=None)
        if is_awaited:
            self._pending_snapshot = snapshot, selftest
        return is_awaited

    def on_snapshot_failed(self, source: ModelSource, cause: str, now: float, *, is_transient: bool = False) -> None:
        """Fail the generation that waits for the snapshot of this source.

        Args:
            source: the source.
            cause: why the snapshot could not be taken.
            now: the time in monotonic seconds.
            is_transient: whether the cause may disappear without an operator, such as a full disk.
        """
        if self.is_awaiting_snapshot(source) and self.loading is not None:
            self.loading.fail(FailureReason(cause, is_transient=is_transient), now)

    def take_over(self, now: float) -> None:
        """Let the loaded generation serve, and drain the one that served before; the caller calls `reconcile` next."""
        loading = self.loading
        if loading is None:
            return
        old, self.serving, self.loading = self.serving, loading, None
        self._wanted_source, self._serving_since = None, now
        if self.state is DeploymentState.INITIAL:
            self.advance(DeploymentEvent.SERVE)
        elif self.is_updating:
            self.advance(DeploymentEvent.FINISH_UPDATE)
        self._backoff.on_ready()
        self._failed_generation = None
        self._is_failing = False
        if old is not None:
            _log.info("%s takes over from %s", loading.label, old.label, extra=loading.log_extra())
            self._drain_generation(old, now)
        # The new slots are added after the old generation's slots were removed, so that two generations never receive
        # requests at the same time.
        self._collect_actions()
        self._actions += [(loading, AddSlot(name)) for name in loading.processes.slots]

    def abandon(self, cause: str, now: float) -> None:
        """Give up an update for this cause: fail the generation that `update` loads."""
        if self.loading is not None and self.is_updating:
            self.loading.fail(FailureReason(cause), now)

    def mark_leaving(self) -> None:
        """Announce that all generations will be drained, so that other generations can wait for their memory."""
        self.placement.mark_leaving([generation.label for generation in self.generations])

    def unload(self, now: float, event: DeploymentEvent = DeploymentEvent.UNLOAD) -> None:
        """Drain all generations and load no others; running batches may take `predict_timeout` seconds more.

        Args:
            now: the time in monotonic seconds.
            event: UNLOAD: the deployment loads nothing until `load` is called. VACATE: it loads nothing until
                `reinstate` is called; meanwhile, a changed model of the same name can use the memory.
        """
        self.advance(event)
        self.mark_leaving()
        self._wanted_source = None
        self._is_failing = False
        self.worker_target = self.spec.workers
        for generation in (self.serving, self.loading):
            if generation is not None:
                if event is DeploymentEvent.VACATE:
                    _log.info("%s stops: a changed model replaces it", generation.label, extra=generation.log_extra())
                self._drain_generation(generation, now)
        self.loading = self._pending_snapshot = None

    def reinstate(self) -> None:
        """After VACATE, load the last source again, because the changed model could not be loaded."""
        if self.is_vacated:
            self.advance(DeploymentEvent.REINSTATE)
            self._wanted_source = self.main_generation.source

    def drain(self, now: float, *, timeout_s: float = 0.0) -> None:
        """Shut down all generations and start no others; running batches may take `timeout_s` seconds more."""
        if self.state in LOADING_STATES or self.is_vacated:
            self.advance(DeploymentEvent.STOP)
        self._wanted_source = None
        self.mark_leaving()
        for generation in self.generations:
            generation.drain(now, timeout_s=timeout_s)

    def tick(self, now: float) -> None:
        """Call `tick` of each generation whose next event is due."""
        for generation in self.generations:
            if now >= generation.next_tick_at:
                generation.tick(now)

    def reconcile(self, now: float) -> None:
        """Admit, start, replace or give up generations as the present state requires, and collect their actions.

        The caller calls this method after each event of the deployment or of its generations.
        """
        self._collect_actions()
        if self.loading is not None and self.loading.state not in ACTIVE:
            self._on_loading_failed(self.loading, now)
        if self.serving is not None and self.serving.state not in ACTIVE:
            self._on_serving_failed(self.serving, now)
        if self.state is not DeploymentState.STOPPING:
            self._admit(now)
            self._take_over_if_ready(now)
            if self.serving is not None and self.serving.should_be_replaced and not self.is_busy:
                self._wanted_source = self.serving.source
            if self.may_load and now >= self._backoff.due_at and self._wanted_source is not None:
                self.start(self._wanted_source)
        self._collect_actions()

    @property
    def next_tick_at(self) -> float:
        """The time at which `tick` is due, in monotonic seconds."""
        if self.admission.is_released and self._pending_snapshot is not None:
            return 0.0
        due_at = min((each.next_tick_at for each in self.generations), default=float("inf"))
        return min(due_at, self._backoff.due_at) if self.may_load else due_at

    def take_actions(self) -> list[tuple[GenerationBase, Action]]:
        """Remove and return the pending actions in order, each with its generation."""
        actions, self._actions = self._actions, []
        return actions

    # --- decisions ----------------------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """Let the loading generation start its processes if its snapshot exists and its device has enough resources."""
        self.admission.is_released = False
        if self._pending_snapshot is None or self.loading is None:
            return
        snapshot, selftest = self._pending_snapshot
        coming, old, need = self.loading, self.serving, self.admission.request(self.spec, snapshot)
        verdict = self.admission.has_memory(coming.label, need)
        if verdict.rejection_reason:
            coming.fail(FailureReason(verdict.rejection_reason), now)
            self._on_loading_failed(coming, now)
        if not verdict.is_granted:
            return
        is_replacing = self._rollout_policy.policy is ReplacementPolicy.REPLACE and not self.is_updating
        reason = self.admission.rejection_reason(coming.label, need, now)
        if self.draining and (is_replacing or reason or old is not None or len(self.draining) > 1):
            return  # wait until the draining generations have ended: at most two may run at once
        # An update loads the new generation beside the serving one. Rank groups are the exception: two of them may be
        # unable to run on the same cards even with enough memory, so the old group may be drained first.
        is_beside = self.is_updating and self.spec.rank_group is None
        if old is not None and not is_beside and self._rollout_policy.vacates_first(has_room=not reason):
            vacate_reason = reason or "policy replace"
            reason = self.placement.rejection_reason(coming.label, need, excluding=[old.label])
            if not reason:
                _log.info("%s stops before %s loads: %s", old.label, coming.label, vacate_reason, extra=old.log_extra())
                if self.is_updating:
                    # If the update fails, the source that serves now is loaded again.
                    self._wanted_source = old.source
                self._drain_generation(old, now)
                return
        if reason and self.admission.will_suffice(coming, need):
            return
        if reason:
            coming.fail(FailureReason(reason), now)
            self._on_loading_failed(coming, now)
        else:
            self._pending_snapshot = None
            self.placement.reserve(coming.label, need)
            coming.on_snapshot_taken(snapshot.sha256, now, selftest, tuple(each.sha256 for each in snapshot.slices))

    def _take_over_if_ready(self, now: float) -> None:
        """Let the loaded generation take over: at once if none serves, otherwise once none of its workers still loads.

        During an update, `Rollouts` decides when the new generations of all devices take over; this method only fails
        the loaded generation if one of its workers could not load the model.
        """
        loading = self.loading
        if loading is None or loading.state is not GenerationState.SERVING:
            return
        if self.is_updating:
            if loading.is_complete and not loading.has_all_workers:
                loading.fail(loading.failure.with_prefix("not every worker could load the model: "), now)
                self._on_loading_failed(loading, now)
        elif self.serving is None or loading.is_complete:
            self.take_over(now)

    def _on_loading_failed(self, failed: GenerationBase, now: float) -> None:
        self.loading, self._pending_snapshot = None, None
        self.draining.append(failed)
        self._failed_generation = failed
        if self.state is DeploymentState.STOPPING:
            return
        if self.state is DeploymentState.REPAIRING:
            self._fail(failed)
        elif self.is_updating:
            self.advance(DeploymentEvent.FINISH_UPDATE)
        elif failed.failure.retry_hint is RetryHint.WAIT_FOR_MEMORY:
            # There is no fallback to one copy of the weights for each process, because the copies would need even more
            # memory.
            self._backoff.on_out_of_memory(now, self.spec.memory_timeout_s)
            self._retry_or_fail(failed)
        elif self._rollout_policy.should_fall_back and self.spec.is_sharing and _may_sharing_be_why(failed):
            _log.warning(
                "%s: weights cannot be shared, so each worker loads its own copy: %s",
                failed.label,
                failed.cause,
                extra=failed.log_extra(),
            )
            self.spec = self.spec.without_sharing()
            self._wanted_source = failed.source
            return
        elif failed.built is not None and failed.built.is_template and not failed.failure.is_transient:
            _log.warning(
                "%s: workers forked from the template cannot serve, so each worker builds the model: %s",
                failed.label,
                failed.cause,
                extra=failed.log_extra(),
            )
            self.spec = self.spec.without_forking()
            self._wanted_source = failed.source
            return
        elif isinstance(failed, Generation) and failed.is_without_holder and not failed.failure.is_transient:
            _log.warning(
                "%s: workers cannot load without a holder, so the next generation has one: %s",
                failed.label,
                failed.cause,
                extra=failed.log_extra(),
            )
            self._wanted_source = failed.source
            return
        elif self.state is DeploymentState.INITIAL and failed.failure.retry_hint is not RetryHint.MAY_SUCCEED:
            self._fail(failed)
        else:
            self._backoff.on_start_failed(now)
            self._retry_or_fail(failed)
        if not self.has_failed:
            _log_failure(failed)

    def _retry_or_fail(self, failed: GenerationBase) -> None:
        if self.state is DeploymentState.ESTABLISHED or not self._backoff.is_exhausted:
            # A deployment that has served before loads its source again after any failure, however often it fails.
            self._wanted_source = failed.source
            delay_s = self._backoff.delay_s
            _log.warning("%s: starting the next generation in %.1f s", failed.label, delay_s, extra=failed.log_extra())
        else:
            self._fail(failed)

    def _fail(self, last: GenerationBase) -> None:
        self.advance(DeploymentEvent.FAIL)
        self._is_failing = True
        need = f"; no further attempt on {self.placement.name} before its files change, a retry, a reload or an update"
        consequence = "" if last.failure.is_transient else need
        _log.error("%s failed: %s%s", last.label, last.cause, consequence, extra=last.log_extra())

    def _on_serving_failed(self, serving: GenerationBase, now: float) -> None:
        self.serving = None
        self.draining.append(serving)
        self._failed_generation = serving
        if self.state is DeploymentState.STOPPING or serving.state is not GenerationState.FAILED:
            return
        self._backoff.on_death(now - self._serving_since, now)
        self._wanted_source = serving.source
        if not self.has_failed:
            _log_failure(serving)

    def _drain_generation(self, old: GenerationBase, now: float) -> None:
        if self.serving is old:
            self.serving = None
        self.draining.append(old)
        old.drain(now, timeout_s=self.spec.predict_timeout)

    def _collect_actions(self) -> None:
        """Collect the actions of all generations, and release the resources of the generations that have ended.

        Actions that add slots are collected only from the serving generation, so that no other generation receives
        requests.
        """
        if self.serving is not None:
            self.admission.memory.on_serving(self.serving.label)
        self.placement.mark_leaving([generation.label for generation in self.draining])
        for generation in self.draining:
            self.admission.memory.on_leaving(generation.label)
        self._actions += [
            (generation, action)
            for generation in self.generations
            for action in generation.take_actions()
            if not isinstance(action, AddSlot) or generation is self.serving
        ]
        for generation in [each for each in self.draining if each.is_ended]:
            self.draining.remove(generation)
            self.placement.release(generation.label)
            self.admission.memory.on_ended(generation.label)
            self._actions.append((generation, DeleteFiles()))


def _may_sharing_be_why(failed: GenerationBase) -> bool:
    """Return whether the failure may come from sharing the weights, so that each process should load its own copy."""
    return bool(failed.sha256) and failed.built is None and not failed.failure.is_transient


def _log_failure(generation: GenerationBase) -> None:
    """Log why a generation has failed; a generation that was drained has no failure to log."""
    if generation.state is GenerationState.FAILED:
        _log.warning("%s failed: %s", generation.label, generation.cause, extra=generation.log_extra())
