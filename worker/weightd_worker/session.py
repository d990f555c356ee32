"""The life of a holder or a worker (`session_base`): one build, then requests until it is told to stop.

That the process is alive is watched from outside, by its pidfd, and that it answers by pings.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple, Union

from weightd_protocol.codec import clip, encode
from weightd_protocol.errors import InvalidArgument, RemoteProtocolError, RequestError
from weightd_protocol.messages.worker import (
    AllowAttach,
    AnnounceSelfTest,
    Attach,
    AttachAllowed,
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
from weightd_protocol.messages.worker_common import RowSupport, SelfTestCase, SelfTestCases
from weightd_worker import library_pages, nativelog, weights
from weightd_worker.batching import row_support_probe
from weightd_worker.channel import ChannelConnection
from weightd_worker.connection import WorkerConnection
from weightd_worker.engines.engine import Arrays, Engine
from weightd_worker.engines.errors import AttachRefused, BuildError
from weightd_worker.engines.sharing import SharedWeights
from weightd_worker.forking.fork import Forker, InheritedModel
from weightd_worker.malloc_trim import MallocTuner, private_bytes
from weightd_worker.predictor import Predictor
from weightd_worker.selftest import sample, search, selftest, shapes
from weightd_worker.selftest.verifier import AnswerVerifier
from weightd_worker.session_base import SessionBase, all_versions, check_signature
from weightd_worker.sharing_threshold import HOLDER_COST_BYTES, is_holder_worthwhile

_log = logging.getLogger("weightd.worker")

_ROWS_DIFFER = "the answer of this process to many rows is not that of the one that has found out that they can be so"

_SHAPE_DEPENDENT = (
    "answers depend on the shapes that the model has computed before: it is built again at each change of shape; "
    "convert it for fixed shapes to avoid that"
)

# Cases of a self-test that was searched for: one, and the same with larger free dimensions.
_SEARCHED_CASE_COUNT = 2

# When nothing is kept for the next predict.
_IDLE_TIMEOUT_S = 10.0

# How long nothing has come before a worker looks again at what it has run: who comes then waits until that is done.
_SHADOW_CHECK_DELAY_S = 0.1

# What no daemon sends: nothing has come for so long.
_SHADOW_CHECK = TrimStore()


class ChildFiles(NamedTuple):
    """Where a child's files are.

    Attributes:
        model: the model's snapshot.
        store: where the holder may write its page store.
        weights_update: weights that replace those of the model, "" for none.
        sample: what the self-test asks, "" where it is made up.
    """

    model: str
    store: str
    weights_update: str = ""
    sample: str = ""

    @property
    def answers_path(self) -> str:
        """Where the holder leaves the self-test's answers for workers whose own may differ a little."""
        return f"{self.store}.answers"


class ProcessOrigin(NamedTuple):
    """How a process came to be, and why so: see `Hello`; and what it was given, if it was forked from a template."""

    origin: str
    note: str = ""
    inherited_model: Optional[InheritedModel] = None


class SharingPlan(NamedTuple):
    """Those who will share what a holder builds.

    Attributes:
        worker_count: how many they are; 0: whether they are worth the holder is not asked.
        forker: forks them, where the holder may be a template: then it takes no requests.
    """

    sharer_count: int = 0
    forker: Optional[Forker] = None


_SPAWNED = ProcessOrigin("spawned")
_NO_FORK_TARGETS = SharingPlan()


class WorkerSession(SessionBase):
    """Serves one engine over one connection.

    Args:
        connection: to the daemon.
        engine: not built yet, unless it was made before.
        files: its files.
        tolerance: how far the self-test's answers may be apart (`selftest.difference`).
        origin: of this process.
        fork_targets: of a holder.
    """

    def __init__(
        self,
        connection: Union[WorkerConnection, ChannelConnection],
        engine: Engine,
        files: ChildFiles,
        tolerance: float = 0.0,
        *,
        origin: ProcessOrigin = _SPAWNED,
        fork_targets: SharingPlan = _NO_FORK_TARGETS,
    ) -> None:
        super().__init__(connection)
        self._engine = engine
        self._files = files
        self._sample: Optional[Arrays] = None
        self._tolerance = tolerance
        self._origin = origin
        self._fork_targets = fork_targets
        # What those are given that are forked from this process, once it is a template.
        self._template_model: Optional[InheritedModel] = None
        self._sha256 = ""
        self._handle = ""
        self._predictor = Predictor(engine, self._reply)
        self._malloc_tuner = MallocTuner(engine.release_cached_memory)
        # On what the model does not run, as far as it is known.
        self._failed_cases: SelfTestCases = ()

    def _on_predict(self, order: Predict, tensors: Sequence[Any]) -> None:
        if self._fork_targets.forker is not None:
            raise RemoteProtocolError("type: expected no predict where workers are forked, got one")
        super()._on_predict(order, tensors)

    def _do_housekeeping(self) -> None:
        super()._do_housekeeping()
        self._malloc_tuner.limit_retained()
        self._idle_timeout_s = _SHADOW_CHECK_DELAY_S if self._predictor.is_shadow_check_due else _IDLE_TIMEOUT_S

    def _on_idle(self) -> None:
        """What is to be done then comes next, if anything is."""
        if self._predictor.is_shadow_check_due:
            self._inbox.put_back(_SHADOW_CHECK)
        else:
            self._release_idle_memory()

    def _release_idle_memory(self) -> None:
        """Nothing has been asked for a while: keep nothing for what may come."""
        nativelog.truncate_if_too_large()
        self._malloc_tuner.release_retained()
        self._next_housekeeping_at = 0.0
        self._idle_timeout_s = -1.0

    def _make_hello(self, sha256: str) -> Hello:
        self._sha256 = sha256
        found = all_versions(self._engine.versions())
        sharing, (origin, note, _) = self._engine.sharing, self._origin
        return Hello(sharing.current_pid(), sha256, found, sharing.traits, origin, note, self._engine.concurrency)

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
        """Build, find the self-test, export or be a template; and see that the answers are still the same."""
        engine = self._engine
        bytes_before = private_bytes()
        build = functools.partial(self._build_model, pids=order.engine_pids)
        build()
        check_signature(engine.signature)
        self._load_sample()
        # Each known answer is that of a model that has computed no other shape.
        engine.should_rebuild_per_shape = engine.is_limited_by_first_shape
        reference = search.find_selftest(
            engine, order, build, self._announce_selftest, sample=self._sample, tolerance=self._tolerance
        )
        first_case: SelfTestCase = {}
        if engine.is_limited_by_first_shape:
            engine.should_rebuild_per_shape, first_case = self._find_shapes(order, reference, build)
        if reference.digest and self._tolerance:
            sample.save_answers(self._files.answers_path, reference.answers)
        row_support = self._find_row_support(order, reference, build)
        if first_case and row_support is not None and not _can_batch(row_support, order.exact):
            first_case = self._largest_case(reference.cases, 1)
        if engine.was_rebuilt_larger:
            # The holder's memory is shared as it is, so it holds no buffers but those that each worker needs.
            build()
            first_case = self._compute_first(first_case, build)
        # What is in memory now is shared as if it were weights.
        reference = reference._replace(answers=())
        engine.release_cached_memory()
        library_pages.drop_unchanged_pages()
        shared_weights = self._share_weights(reference, bytes_before)
        self._handle = shared_weights.handle
        if self._handle and reference.digest:
            if self._prefer_holder_answers(self._run_selftest(reference.cases)).digest != reference.digest:
                raise BuildError("the self-test's answer changed when the weights were shared")
            engine.release_cached_memory()
            engine.discard_model()
            self._malloc_tuner.trim()
        signature = selftest.with_observed_outputs(engine.signature, reference)
        self._send(
            Built(
                shared_weights.handle,
                signature.inputs,
                signature.outputs,
                reference.cases,
                reference.digest,
                shared_weights.shared_bytes,
                clip(
                    "; ".join(
                        filter(None, [shared_weights.note, _SHAPE_DEPENDENT if engine.should_rebuild_per_shape else ""])
                    )
                ),
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

    def _find_shapes(
        self, order: Build, reference: selftest.SelfTestRun, rebuild: Callable[[], None]
    ) -> Tuple[bool, SelfTestCase]:
        """Return whether answers depend on the shapes before, and which shape each worker computes first.

        They do if an answer differs after a larger shape. Then, and where there is but one shape, the latter is {}.

        Args:
            order: what the daemon has said.
            reference: each answer is that of a model that has computed no other shape.
            rebuild: called where a new model is needed.
        """
        engine, self._failed_cases = self._engine, self._failed_cases or order.failed_cases
        largest_case = self._largest_case(reference.cases, order.max_rows)
        first_case = largest_case or (reference.cases[0] if reference.cases else {})
        extra_run = self._run_extra_case(reference.cases, first_case, rebuild) if reference.digest else None
        engine.should_rebuild_per_shape = False
        if not largest_case and extra_run is None:
            return False, {}
        rebuild()
        if first_case in self._failed_cases:
            first_case = {}
        else:
            self._announce_selftest((first_case,), self._failed_cases)
            first_case = self._compute_first(first_case, rebuild)
            self._announce_selftest((), self._failed_cases)
        if reference.digest and any(self._has_changed_answers(reference, extra_run) for _ in range(2)):
            _log.warning("%s", _SHAPE_DEPENDENT)
            return True, {}
        return False, first_case

    def _has_changed_answers(self, reference: selftest.SelfTestRun, extra_run: Optional[selftest.SelfTestRun]) -> bool:
        if selftest.difference(reference, self._run_selftest(reference.cases)) > self._tolerance:
            return True
        return (
            extra_run is not None
            and selftest.difference(extra_run, self._run_resized(extra_run.cases[0])) > self._tolerance
        )

    def _run_extra_case(
        self, cases: SelfTestCases, first_case: SelfTestCase, rebuild: Callable[[], None]
    ) -> Optional[selftest.SelfTestRun]:
        """Run a new model on a further shape, if there is one: that tells more than the shapes of the self-test.

        It lies between the two that the search has found. Where there is but one, it is smaller than the first shape.
        """
        signature = self._engine.signature
        case = (
            shapes.midpoint_case(*cases)
            if len(cases) == _SEARCHED_CASE_COUNT
            else shapes.halve_case(signature, first_case)
        )
        if case in (*cases, first_case, *self._failed_cases):
            return None
        self._announce_selftest((case,), self._failed_cases)
        try:
            return self._run_resized(case)
        except RequestError:
            rebuild()
            return None
        finally:
            self._announce_selftest((), self._failed_cases)

    def _run_resized(self, case: SelfTestCase) -> selftest.SelfTestRun:
        """Run a shape that is not the sample's."""
        engine = self._engine
        return selftest.from_answers(
            (case,), [engine.predict(shapes.make_inputs(engine.signature, case, self._sample))]
        )

    def _largest_case(self, cases: SelfTestCases, rows: int) -> SelfTestCase:
        """Return the largest shape that is known to be needed, {} where there is but one shape.

        Raises:
            BuildError: the configured `max_shape` is not one of this model.
        """
        engine = self._engine
        max_shape = engine.max_shape
        if max_shape is not None:
            shapes.check_max_shape(engine.signature, max_shape)
            return max_shape
        case = shapes.largest_case(engine.signature, cases, rows)
        return case if any(case != each for each in cases) else {}

    def _compute_first(self, case: SelfTestCase, rebuild: Callable[[], None]) -> SelfTestCase:
        """Compute this shape first, so that none that it covers causes another build later; return {} if that fails.

        Args:
            case: the shape of each input; {}: none is computed.
            rebuild: called where the model does not run on it.

        Raises:
            BuildError: it is the configured `max_shape`, and the model does not run on it.
        """
        engine = self._engine
        try:
            if case:
                engine.predict(shapes.make_inputs(engine.signature, case, self._sample))
        except RequestError as error:
            if engine.max_shape is not None:
                raise BuildError(f"options.max_shape: the model does not run on it: {error}") from None
            rebuild()
            return {}
        return case

    def _find_row_support(
        self, order: Build, reference: selftest.SelfTestRun, rebuild: Callable[[], None]
    ) -> Optional[RowSupport]:
        self._failed_cases = self._failed_cases or order.failed_cases
        if self._engine.should_rebuild_per_shape and order.max_rows > 1:
            return RowSupport((), (), is_equal=False, note=_SHAPE_DEPENDENT)
        row_support = row_support_probe.find_row_support(
            self._engine,
            order,
            reference,
            rebuild,
            lambda trying: self._announce_selftest(trying, self._failed_cases),
            self._sample,
        )
        if row_support is None or not row_support.is_equal or self._tolerance:
            return row_support
        digest = row_support_probe.rows_digest(
            self._engine, reference.cases, order.max_rows, order.allowed_batch_sizes, self._sample, row_support.row_kind
        )
        return dataclasses.replace(row_support, batch_digest=digest)

    def _share_weights(self, reference: selftest.SelfTestRun, bytes_before: int) -> SharedWeights:
        """Share what was built: by a fork where that can be, and where it has a self-test, else as the engine does.

        What is forked from a model that draws at random would all draw the same.
        """
        forker = self._fork_targets.forker if reference.digest and not self._engine.is_stochastic else None
        reason = forker.cannot_fork_reason() if forker is not None else ""
        if reason:
            _log.info("workers are not forked from this process: %s", reason)
            forker = None
        if forker is not None:
            forker.freeze_memory()
        built_bytes, holder_cost_bytes = private_bytes() - bytes_before, HOLDER_COST_BYTES[self._origin.origin]
        if not is_holder_worthwhile(built_bytes, self._fork_targets.sharer_count, holder_cost_bytes):
            text = "weights are not shared: %d MiB, by %d processes, are less than the %d MiB of one that holds them"
            return SharedWeights(
                "", 0, text % (built_bytes >> 20, self._fork_targets.sharer_count, holder_cost_bytes >> 20)
            )
        if forker is None:
            return self._engine.sharing.export(self._files.store)
        self._template_model = InheritedModel(self._engine, self._sha256, built_bytes)
        return SharedWeights("", built_bytes, "")

    def _fork(self, order: Fork) -> None:
        if self._fork_targets.forker is None or self._template_model is None:
            self._report_forked(Forked(order.name, 0, "this process is no template"))
        else:
            self._fork_targets.forker.fork(order, self._report_forked, self._template_model)

    def _report_forked(self, forked: Forked) -> bool:
        return self._connection.send(encode(forked))

    def _build_model(self, *, pids: Sequence[str] = (), handle: str = "") -> None:
        self._engine.build(self._files.model, pids=pids, handle=handle)
        if self._files.weights_update:
            self._engine.update_weights(weights.load(self._files.weights_update))

    def _allow(self, order: AllowAttach) -> None:
        """That this cannot be is no failure of this process: those that are attached stay so."""
        reason = ""
        try:
            self._engine.sharing.allow(order.engine_pids)
        except AttachRefused as error:
            reason = clip(str(error))
        self._send(AttachAllowed(reason))

    def _attach(self, order: Attach) -> None:
        """Build, do what the holder did before it exported, attach; and give the answers that this process gives.

        What was forked from a template has all that: it only answers.
        """
        engine, inherited_model = self._engine, self._origin.inherited_model
        engine.should_rebuild_per_shape = order.rebuilds_per_shape
        if inherited_model is None:
            build = functools.partial(self._build_model, handle=order.handle)
            build()
            self._load_sample()
            self._compute_first(order.first_shapes or {}, build)
            answer_before = self._run_selftest(order.selftest_cases)
            engine.release_cached_memory()
            shared_weights = engine.sharing.attach(order.handle)
            self._handle = order.handle
            answer = self._run_selftest(order.selftest_cases)
        else:
            self._load_sample()
            answer_before = answer = self._run_selftest(order.selftest_cases)
            shared_weights = SharedWeights("", inherited_model.shared_bytes, "")
        reference = self._prefer_holder_answers(answer)
        is_repeatable = selftest.difference(answer_before, answer) <= self._tolerance
        self._predictor.verifier = AnswerVerifier(
            engine, reference if is_repeatable else reference._replace(digest=""), self._sample, self._tolerance
        )
        case = order.selftest_cases[0] if order.selftest_cases else None
        row_support = order.row_support
        # What the holder has compared is known here, too, if it is known that this is the same: `_differs`.
        compared_rows = (
            row_support.compared_rows
            if row_support is not None and (row_support.batch_digest or inherited_model is not None)
            else 0
        )
        special_kinds = () if row_support is None else row_support.unequal_specials
        self._predictor.configure_batching(
            order.max_rows,
            order.allowed_batch_sizes,
            is_exact=order.exact,
            case=case,
            compared_rows=compared_rows,
            special_kinds=special_kinds,
        )
        has_row_difference = self._has_row_difference(order)
        digest = reference.digest
        # What the self-test took is the system's again before this process counts as ready. It is what a predict takes
        # all the same: the heap counts it as needed.
        self._malloc_tuner.retain_freed_memory()
        del answer_before, answer, reference
        self._malloc_tuner.release_retained()
        library_pages.drop_unchanged_pages()
        attached = Attached(digest, shared_weights.shared_bytes, shared_weights.note, engine.memory())
        self._send(attached)
        if has_row_difference:
            self._predictor.stop_batching(_ROWS_DIFFER)

    def _has_row_difference(self, order: Attach) -> bool:
        """Whether the answer to many rows is not the holder's. What was forked from a template has that with it."""
        row_support = order.row_support
        if row_support is None or not row_support.batch_digest or self._origin.inherited_model is not None:
            return False
        try:
            digest = row_support_probe.rows_digest(
                self._engine,
                order.selftest_cases,
                order.max_rows,
                order.allowed_batch_sizes,
                self._sample,
                row_support.row_kind,
            )
        except InvalidArgument:
            return True
        self._engine.release_cached_memory()
        return digest != row_support.batch_digest

    def _announce_selftest(self, cases: SelfTestCases, failed_cases: SelfTestCases) -> None:
        """Tell what is run next, and wait until it is known: that may be the end of this process."""
        self._failed_cases = failed_cases
        self._send(AnnounceSelfTest(cases, failed_cases))
        if cases:
            order, _ = self._next_order()
            if not isinstance(order, ContinueSelfTest):
                self._inbox.put_back(order)
                raise BuildError("stopped during the search for self-test inputs")

    def _load_sample(self) -> None:
        if self._files.sample:
            self._sample = sample.load(self._files.sample, self._engine.signature)

    def _run_selftest(self, cases: SelfTestCases) -> selftest.SelfTestRun:
        return selftest.run(self._engine, cases, self._sample)

    def _prefer_holder_answers(self, answer: selftest.SelfTestRun) -> selftest.SelfTestRun:
        """The holder's answers if these are within the tolerance of them: then they are what the process is held to."""
        if not self._tolerance or not Path(self._files.answers_path).exists():
            return answer
        holder_answers = sample.load_answers(self._files.answers_path, answer.cases)
        return holder_answers if selftest.difference(holder_answers, answer) <= self._tolerance else answer

    def _trim_store(self, order: TrimStore) -> None:
        if order is _SHADOW_CHECK:
            self._predictor.run_shadow_check()
            self._idle_timeout_s = _IDLE_TIMEOUT_S
        elif self._handle:
            self._engine.sharing.trim_store(self._handle)

    def _ping(self, order: Ping) -> None:
        self._send(
            Pong(
                self._predictor.verifier.current_digest()
                if order.run_selftest and self._predictor.verifier is not None
                else ""
            )
        )


def _can_batch(row_support: RowSupport, is_exact: bool) -> bool:
    """Return whether requests share a predict, after what was found of the model's rows."""
    return bool(row_support.inputs) and (row_support.is_equal or not is_exact)
