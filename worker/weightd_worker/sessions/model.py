"""Session of a holder or a worker: builds or attaches once, then serves requests until the daemon stops the process.

The session does not supervise itself: the daemon notices by a pidfd when the process exits, and by pings when it hangs.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, Optional, Sequence

from weightd_common.log_text import plural
from weightd_common.process_attributes import leave_load_priority
from weightd_protocol.codec import clip, encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.worker import (
    AnnounceSelfTest,
    Attach,
    Attached,
    Build,
    Built,
    ChildOrder,
    ContinueSelfTest,
    Fork,
    Forked,
    Hello,
    Ping,
    Pong,
    Predict,
    TrimStore,
)
from weightd_protocol.messages.worker_common import AllowAttach, AttachAllowed, SelfTestCases
from weightd_worker import nativelog
from weightd_worker.channels.direct import ChannelOrder, DirectChannels
from weightd_worker.connection import Connection
from weightd_worker.engines.engine import AttachRefused, BuildError, Engine, SharedWeights
from weightd_worker.forking import Forker, InheritedModel
from weightd_worker.predictor import Predictor
from weightd_worker.process_memory import (
    HOLDER_COST_BYTES,
    MallocTuner,
    drop_unchanged_pages,
    is_holder_worthwhile,
    private_bytes,
)
from weightd_worker.selftest import selftest
from weightd_worker.selftest.selftest import AnswerVerifier
from weightd_worker.sessions.base import Session, all_versions
from weightd_worker.sessions.build import SHAPE_DEPENDENT, ModelBuilder, ModelInputs

_log = logging.getLogger("weightd.worker")
_ROWS_DIFFER = "the answer of this process to many rows differs from the answer of the holder, which tested batching"

# Seconds without messages after which the process releases the free memory that it retains for the next predict.
_IDLE_TIMEOUT_S = 10.0

# Seconds without messages after which a process does work during which a request would have to wait: it compares a kept
# sample batch again (`batch_guard`), or releases the memory that only loading the model needed.
_PENDING_WORK_DELAY_S = 0.1

# An order that the session puts into its own inbox to compare a sample batch. It is recognized by its identity (`is`),
# so that it cannot be confused with a TrimStore order of the daemon.
_SHADOW_CHECK = TrimStore()


class ProcessOrigin(NamedTuple):
    """How this process was started, as reported in `Hello`.

    Attributes:
        origin: "spawned", "forked" or "template".
        note: why the process was not forked, or "".
        inherited_model: the built model, if the process was forked from a template; otherwise None.
        daemon_nice: the nice value that a worker gets after the load (`leave_load_priority`); None to keep its own.
    """

    origin: str
    note: str = ""
    inherited_model: Optional[InheritedModel] = None
    daemon_nice: Optional[int] = None


class SharingPlan(NamedTuple):
    """How a holder shares its model.

    Attributes:
        sharer_count: the number of processes that will share the model; 0 to share it for any number of processes.
        forker: forks workers from the holder, if the holder may become a template; otherwise None.
    """

    sharer_count: int = 0
    forker: Optional[Forker] = None


_SPAWNED = ProcessOrigin("spawned")
_NOT_SHARED = SharingPlan()


class WorkerSession(Session):
    """Session of a holder or a worker with one engine.

    Args:
        connection: the connection to the daemon.
        engine: the engine. It has already built the model if it is inherited from a template.
        model_inputs: the files of the model.
        origin: how this process was started.
        sharing_plan: how a holder shares its model.
        predictor: runs the requests; None for a predictor that runs one request after another in this thread.
    """

    def __init__(
        self,
        connection: Connection,
        engine: Engine,
        model_inputs: ModelInputs,
        *,
        origin: ProcessOrigin = _SPAWNED,
        sharing_plan: SharingPlan = _NOT_SHARED,
        predictor: Optional[Predictor] = None,
    ) -> None:
        self._predictor = Predictor(engine, self._reply) if predictor is None else predictor
        super().__init__(connection, self._predictor)
        self._batch_guard = self._predictor.batch_guard
        self._builder = ModelBuilder(engine, model_inputs, self._announce_selftest)
        self._engine = engine
        self._model_inputs = model_inputs
        self._origin = origin
        self._sharing_plan = sharing_plan
        # The built model that forked workers inherit; None if this process is not a template.
        self._template_model: Optional[InheritedModel] = None
        self._sha256 = ""
        self._handle = ""
        # Whether the process still has memory that only loading the model needed.
        self._has_load_memory = False
        self._malloc_tuner = MallocTuner(engine.release_cached_memory)

    def _on_predict(self, order: Predict, tensors: Sequence[Any]) -> None:
        if self._sharing_plan.forker is not None:
            raise RemoteProtocolError("type: expected no predict in a template, got one")
        super()._on_predict(order, tensors)

    def _on_channel_order(self, order: ChannelOrder) -> None:
        if self._direct_channels is None:
            self._direct_channels = DirectChannels(
                self._connection, self._predictor.predict, self._decoder.descriptions
            )
        self._direct_channels.on_order(order)

    def _do_housekeeping(self) -> None:
        super()._do_housekeeping()
        self._malloc_tuner.limit_retained()
        has_pending_work = self._batch_guard.is_check_due or self._has_load_memory
        self._idle_timeout_s = _PENDING_WORK_DELAY_S if has_pending_work else _IDLE_TIMEOUT_S

    def _on_idle(self) -> None:
        """Queue the comparison of a kept sample batch. If no sample batch is kept, release memory."""
        if self._batch_guard.is_check_due:
            self._inbox.put_back(_SHADOW_CHECK)
        else:
            self._release_idle_memory()

    def _release_idle_memory(self) -> None:
        """Release memory that only a load or the next predict needs. Disable the idle timeout until the next order."""
        nativelog.truncate_if_too_large()
        self._malloc_tuner.release_retained()
        if self._has_load_memory:
            drop_unchanged_pages()
            self._has_load_memory = False
        self._next_housekeeping_at = 0.0
        self._idle_timeout_s = -1.0

    def _make_hello(self, sha256: str) -> Hello:
        self._sha256 = sha256
        found = all_versions(self._engine.versions())
        sharing, origin = self._engine.sharing, self._origin
        pid, concurrency = sharing.current_pid(), self._engine.concurrency
        return Hello(pid, sha256, found, sharing.traits, origin.origin, origin.note, concurrency)

    def _handle_order(self, order: ChildOrder) -> None:
        if isinstance(order, Build):
            self._build(order)
        elif isinstance(order, Attach):
            self._attach(order)
        elif isinstance(order, Fork):
            self._fork(order)
        elif isinstance(order, AllowAttach):
            self._allow(order)
        elif isinstance(order, Ping):
            self._ping(order)
        elif isinstance(order, TrimStore):
            self._trim_store(order)

    def _build(self, order: Build) -> None:
        """Build the model, find its self-test and share its weights.

        Then check that sharing the weights has not changed the self-test's answers.

        Raises:
            BuildError: the model cannot be built, or sharing the weights has changed an answer.
        """
        engine, builder = self._engine, self._builder
        forker = self._sharing_plan.forker
        if forker is not None and engine.is_stochastic(self._model_inputs.model):
            forker = None
        engine.shares_pages = forker is None
        bytes_before = private_bytes()
        reference, row_support, first_case = builder.build_holder(order)
        engine.release_cached_memory()
        shared_weights = self._share_weights(order, forker if reference.digest else None, bytes_before)
        self._handle = shared_weights.handle
        if self._handle and reference.digest:
            if builder.prefer_holder_answers(builder.run_selftest(reference.cases)).digest != reference.digest:
                raise BuildError("the answer to the self-test changed when the weights were shared")
            engine.release_cached_memory()
            engine.discard_model()
            self._malloc_tuner.trim()
        signature = selftest.with_observed_outputs(engine.signature, reference)
        notes = [shared_weights.note, SHAPE_DEPENDENT if engine.should_rebuild_per_shape else ""]
        self._send(
            Built(
                shared_weights.handle,
                signature.inputs,
                signature.outputs,
                reference.cases,
                reference.digest,
                shared_weights.shared_bytes,
                clip("; ".join(filter(None, notes))),
                engine.memory(),
                gears=engine.gears,
                selftest_note=clip(reference.note),
                has_sharing_failed=shared_weights.has_sharing_failed,
                is_template=self._template_model is not None,
                row_support=row_support,
                rebuilds_per_shape=engine.should_rebuild_per_shape,
                first_shapes=first_case or None,
            )
        )
        self._await_idle_after_load()

    def _await_idle_after_load(self) -> None:
        """Release the memory that only the load needed as soon as the process is idle for a short time."""
        self._has_load_memory = True
        self._idle_timeout_s = _PENDING_WORK_DELAY_S

    def _share_weights(self, order: Build, forker: Optional[Forker], bytes_before: int) -> SharedWeights:
        """Share the built model: as a template from which workers are forked if possible, otherwise by the engine.

        A process whose model draws random numbers must not become a template, because all workers forked from it would
        draw the same numbers. A model without a repeatable self-test may draw random numbers, too.

        Args:
            order: the order to build the model.
            forker: forks workers; None if this process must not become a template.
            bytes_before: the private memory of this process before the build.
        """
        reason = forker.cannot_fork_reason() if forker is not None else ""
        if reason:
            _log.info("workers are not forked from this process: %s", reason)
            forker = None
        if forker is not None:
            forker.freeze_memory()
        built_bytes, holder_cost_bytes = private_bytes() - bytes_before, HOLDER_COST_BYTES[self._origin.origin]
        sharer_count = self._sharing_plan.sharer_count
        if not is_holder_worthwhile(built_bytes, sharer_count, holder_cost_bytes):
            saved_mib, cost_mib = built_bytes * (sharer_count - 1) >> 20, holder_cost_bytes >> 20
            text = (
                f"weights are not shared: sharing {built_bytes >> 20} MiB among {plural(sharer_count, 'process')}"
                f" would save {saved_mib} MiB, and the holder would use {cost_mib} MiB"
            )
            return SharedWeights("", 0, text)
        if forker is None:
            if not self._engine.shares_pages:
                self._builder.rebuild_for_pages(order)
            return self._engine.sharing.export(self._model_inputs.store)
        self._template_model = InheritedModel(self._engine, self._sha256, built_bytes)
        return SharedWeights("", built_bytes, "")

    def _fork(self, order: Fork) -> None:
        if self._sharing_plan.forker is None or self._template_model is None:
            self._report_forked(Forked(order.name, 0, "this process is not a template"))
        else:
            self._sharing_plan.forker.fork(order, self._report_forked, self._template_model)

    def _report_forked(self, forked: Forked) -> bool:
        return self._connection.send(encode(forked))

    def _allow(self, order: AllowAttach) -> None:
        """Allow more processes to attach. A failure is reported to the daemon, but does not end this process."""
        reason = ""
        try:
            self._engine.sharing.allow(order.engine_pids)
        except AttachRefused as error:
            reason = clip(str(error))
        self._send(AttachAllowed(reason))

    def _attach(self, order: Attach) -> None:
        """Build the model in the same way as the holder, attach to the weights, and run the self-test.

        A worker that was forked from a template has inherited the built model, and only runs the self-test.
        """
        engine, builder, inherited_model = self._engine, self._builder, self._origin.inherited_model
        engine.should_rebuild_per_shape = order.rebuilds_per_shape
        if inherited_model is None:
            builder.build_worker(order)
            answer_before = builder.run_selftest(order.selftest_cases)
            # Run the self-test again after attaching to shared weights. Without shared weights, a second run is needed
            # only if it is not known whether the model repeats its answers.
            needs_second_run = bool(order.handle) or not order.selftest_digest
            if needs_second_run:
                engine.release_cached_memory()
            shared_weights = engine.sharing.attach(order.handle)
            self._handle = order.handle
            answer = builder.run_selftest(order.selftest_cases) if needs_second_run else answer_before
        else:
            builder.load_sample()
            answer_before = answer = builder.run_selftest(order.selftest_cases)
            shared_weights = SharedWeights("", inherited_model.shared_bytes, "")
        reference = builder.prefer_holder_answers(answer)
        is_repeatable = selftest.difference(answer_before, answer) <= self._model_inputs.tolerance
        self._predictor.verifier = AnswerVerifier(
            engine,
            reference if is_repeatable else reference._replace(digest=""),
            builder.sample,
            self._model_inputs.tolerance,
        )
        self._configure_batching(order)
        # A worker that was forked from a template has the same memory as the holder, so its answers need not be
        # compared with the holder's.
        has_row_difference = inherited_model is None and builder.has_row_difference(order)
        digest = reference.digest
        # The memory of the self-test is retained, because a predict needs as much. It is released when the process is
        # idle, but not now, because the request that has caused the load may be waiting.
        self._malloc_tuner.retain_freed_memory()
        del answer_before, answer, reference
        if self._origin.daemon_nice is not None:
            leave_load_priority(self._origin.daemon_nice)
        self._send(Attached(digest, shared_weights.shared_bytes, shared_weights.note, engine.memory()))
        self._await_idle_after_load()
        if has_row_difference:
            self._batch_guard.stop_batching(_ROWS_DIFFER)

    def _configure_batching(self, order: Attach) -> None:
        found = order.row_support
        # Use the holder's row test only if this process is known to give the same answers as the holder.
        is_known = found is not None and (found.batch_digest or self._origin.inherited_model is not None)
        self._batch_guard.configure(
            order.max_rows,
            order.allowed_batch_sizes,
            is_exact=order.exact,
            case=order.selftest_cases[0] if order.selftest_cases else None,
            compared_rows=found.compared_rows if found is not None and is_known else 0,
            special_kinds=() if found is None else found.unequal_specials,
        )

    def _announce_selftest(self, cases: SelfTestCases, failed_cases: SelfTestCases) -> None:
        """Announce the shapes of the next predict, which may crash this process, and wait for the daemon's reply.

        Raises:
            BuildError: the daemon has sent another order instead of its reply, such as Stop.
        """
        self._send(AnnounceSelfTest(cases, failed_cases))
        if cases:
            order, _ = self._next_order()
            if not isinstance(order, ContinueSelfTest):
                self._inbox.put_back(order)
                raise BuildError("stopped during the search for self-test inputs")

    def _trim_store(self, order: TrimStore) -> None:
        if order is _SHADOW_CHECK:
            self._batch_guard.run_due_check()
            self._idle_timeout_s = _IDLE_TIMEOUT_S
        elif self._handle:
            self._engine.sharing.trim_store(self._handle)

    def _ping(self, order: Ping) -> None:
        verifier = self._predictor.verifier if order.run_selftest else None
        self._send(Pong("" if verifier is None else verifier.current_digest()))
