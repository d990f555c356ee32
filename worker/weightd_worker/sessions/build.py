"""Builds the model of a process, and examines the built model before the process reports that it is ready.

A holder finds out three things: the self-test, the shape of each worker's first predict, and whether requests may share
a predict. A worker builds the model in the same way and with the same first predict as the holder, so that its memory
has the same content, and then runs the self-test.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import zipfile
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from weightd_protocol.errors import InvalidArgument, RequestError
from weightd_protocol.messages.worker import Attach, Build
from weightd_protocol.messages.worker_common import RowSupport, SelfTestCase, SelfTestCases
from weightd_worker.engines.engine import Arrays, BuildError, Engine
from weightd_worker.selftest import sample, search, selftest
from weightd_worker.selftest.row_support import find_row_support, rows_digest
from weightd_worker.sessions.base import check_signature

_log = logging.getLogger("weightd.worker")

SHAPE_DEPENDENT = (
    "answers depend on earlier shapes, so the model is rebuilt at each change of shape; "
    "convert it for fixed shapes to avoid that"
)

# Maximum number of cases of a self-test that was found by search: a first case, and one with larger free dimensions.
_SEARCHED_CASE_COUNT = 2


class ModelInputs(NamedTuple):
    """The files from which a process builds and checks its model.

    Attributes:
        model: path of the model's snapshot.
        store: path at which the holder may write its page store.
        weights_update: path of a file with arrays that replace some of the model's weights; "" for none.
        sample: path of a file with the self-test's inputs; "" if they are generated.
        tolerance: the largest allowed difference between two answers to the self-test (`selftest.difference`).
    """

    model: str
    store: str
    weights_update: str = ""
    sample: str = ""
    tolerance: float = 0.0

    @property
    def answers_path(self) -> str:
        """The path at which the holder stores its answers to the self-test.

        If a tolerance is configured, workers compare their answers with the stored answers.
        """
        return f"{self.store}.answers"


class BuiltModel(NamedTuple):
    """The findings of a holder about the model that it has built.

    Attributes:
        reference: the run of the self-test, without the answers.
        row_support: how the model supports rows; None if the configuration disables batching.
        first_case: the shape of each worker's first predict; {} if the first predict may have any shape.
    """

    reference: selftest.SelfTestRun
    row_support: Optional[RowSupport]
    first_case: SelfTestCase


class ModelBuilder:
    """Builds the model of one engine, and runs the self-test and other inputs whose answers are compared.

    Args:
        engine: the engine. It has already built the model if it is inherited from a template.
        model_inputs: the files of the model.
        announce: function that announces the shapes of the next predict to the daemon, because this predict may crash
            the process, and reports the shapes on which the model does not run.
    """

    def __init__(self, engine: Engine, model_inputs: ModelInputs, announce: search.AnnounceCases) -> None:
        self.sample: Optional[Arrays] = None
        self._engine = engine
        self._inputs = model_inputs
        self._tolerance = model_inputs.tolerance
        self._announce_cases = announce
        # The cases on which the model does not run.
        self._failed_cases: SelfTestCases = ()

    def build_holder(self, order: Build) -> BuiltModel:
        """Build the model of a holder, and examine it for the workers.

        Raises:
            BuildError: the engine rejects the model, or the model does not run on the configured self-test.
        """
        engine = self._engine
        build = functools.partial(self._build, pids=order.engine_pids)
        build()
        check_signature(engine.signature)
        self.load_sample()
        # During the search, build the model again for each shape, so that no answer depends on an earlier shape.
        engine.should_rebuild_per_shape = engine.is_limited_by_first_shape
        reference = search.find_selftest(
            engine, order, build, self._announce, sample=self.sample, tolerance=self._tolerance
        )
        first_case: SelfTestCase = {}
        if engine.is_limited_by_first_shape:
            engine.should_rebuild_per_shape, first_case = self._find_shapes(order, reference, build)
        if reference.digest and self._tolerance:
            sample.save_answers(self._inputs.answers_path, reference.answers)
        row_support = self._find_row_support(order, reference, build)
        if first_case and row_support is not None and not _can_batch(row_support, order.exact):
            first_case = self._largest_case(reference.cases, 1)
        if engine.was_rebuilt_larger:
            # All memory of the holder is shared. So build the model again, to free the large buffers of the tests.
            build()
            first_case = self._compute_first(first_case, build)
        # Drop the answers: all memory of this process is shared as if it were weights, and workers do not need them.
        return BuiltModel(reference._replace(answers=()), row_support, first_case)

    def rebuild_for_pages(self, order: Build) -> None:
        """Build the model of a holder again, so that its pages can be shared."""
        self._engine.shares_pages = True
        self._build(pids=order.engine_pids)

    def build_worker(self, order: Attach) -> None:
        """Build the model of a worker for the holder's handle, and run the same first predict as the holder."""
        self._engine.shares_pages = bool(order.handle)
        build = functools.partial(self._build, handle=order.handle)
        build()
        self.load_sample()
        self._compute_first(order.first_shapes or {}, build)

    def load_sample(self) -> None:
        """Read the configured inputs of the self-test, if any. The model must have been built before."""
        if self._inputs.sample:
            self.sample = sample.load(self._inputs.sample, self._engine.signature)

    def run_selftest(self, cases: SelfTestCases) -> selftest.SelfTestRun:
        """Run the self-test and return the run."""
        return selftest.run(self._engine, cases, self.sample)

    def prefer_holder_answers(self, answer: selftest.SelfTestRun) -> selftest.SelfTestRun:
        """Return the run against which this process is checked later.

        It has the holder's answers if `answer` differs from them by at most the tolerance. Otherwise it is `answer`.
        """
        if not self._tolerance or not Path(self._inputs.answers_path).exists():
            return answer
        holder_answers = sample.load_answers(self._inputs.answers_path, answer.cases)
        return holder_answers if selftest.difference(holder_answers, answer) <= self._tolerance else answer

    def has_row_difference(self, order: Attach) -> bool:
        """Return whether this process gives another answer than the holder to a predict of many rows.

        The result is False if the holder has not run such a predict.
        """
        found = order.row_support
        if found is None or not found.batch_digest:
            return False
        try:
            digest = rows_digest(
                self._engine,
                order.selftest_cases,
                order.max_rows,
                order.allowed_batch_sizes,
                self.sample,
                found.row_kind,
            )
        except InvalidArgument:
            return True
        self._engine.release_cached_memory()
        return digest != found.batch_digest

    def _build(self, *, pids: Sequence[str] = (), handle: str = "") -> None:
        self._engine.build(self._inputs.model, pids=pids, handle=handle)
        if self._inputs.weights_update:
            self._engine.update_weights(load_weights(self._inputs.weights_update))

    def _announce(self, cases: SelfTestCases, failed_cases: SelfTestCases) -> None:
        self._failed_cases = failed_cases
        self._announce_cases(cases, failed_cases)

    def _find_shapes(
        self, order: Build, reference: selftest.SelfTestRun, rebuild: Callable[[], None]
    ) -> Tuple[bool, SelfTestCase]:
        """Return whether answers depend on earlier shapes, and the shape of each worker's first predict.

        Answers depend on earlier shapes if an answer changes after a predict of a larger shape. In this case, and if
        the model has only one shape, the shape of the first predict is {}.

        Args:
            order: the daemon's build order.
            reference: the run of the self-test, in which each shape was the first one of a newly built model.
            rebuild: function that builds the model again.
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
            self._announce((first_case,), self._failed_cases)
            first_case = self._compute_first(first_case, rebuild)
            self._announce((), self._failed_cases)
        if reference.digest and any(self._has_changed_answers(reference, extra_run) for _ in range(2)):
            _log.warning("%s", SHAPE_DEPENDENT)
            return True, {}
        return False, first_case

    def _has_changed_answers(self, reference: selftest.SelfTestRun, extra_run: Optional[selftest.SelfTestRun]) -> bool:
        if selftest.difference(reference, self.run_selftest(reference.cases)) > self._tolerance:
            return True
        return (
            extra_run is not None
            and selftest.difference(extra_run, self._run_resized(extra_run.cases[0])) > self._tolerance
        )

    def _run_extra_case(
        self, cases: SelfTestCases, first_case: SelfTestCase, rebuild: Callable[[], None]
    ) -> Optional[selftest.SelfTestRun]:
        """Run a further shape on a newly built model, which may reveal a dependency that the self-test does not show.

        The shape is the mean of the two shapes that the search has found, or half of a single shape. The result is None
        if this shape was already used, or if the model does not run on it.
        """
        signature = self._engine.signature
        case = (
            search.midpoint_case(*cases)
            if len(cases) == _SEARCHED_CASE_COUNT
            else search.halve_case(signature, first_case)
        )
        if case in (*cases, first_case, *self._failed_cases):
            return None
        self._announce((case,), self._failed_cases)
        try:
            return self._run_resized(case)
        except RequestError:
            rebuild()
            return None
        finally:
            self._announce((), self._failed_cases)

    def _run_resized(self, case: SelfTestCase) -> selftest.SelfTestRun:
        """Run the model on inputs with the shapes in `case`. Values of the sample are repeated to fill them."""
        engine = self._engine
        return selftest.from_answers((case,), [engine.predict(search.make_inputs(engine.signature, case, self.sample))])

    def _largest_case(self, cases: SelfTestCases, rows: int) -> SelfTestCase:
        """Return the largest known shape of requests: the configured maximum, or else the largest of these cases.

        The result is {} if all cases have this shape.

        Raises:
            BuildError: the configured `max_shape` does not fit this model.
        """
        engine = self._engine
        max_shape = engine.max_shape
        if max_shape is not None:
            search.check_max_shape(engine.signature, max_shape)
            return max_shape
        case = search.largest_case(engine.signature, cases, rows)
        return case if any(case != each for each in cases) else {}

    def _compute_first(self, case: SelfTestCase, rebuild: Callable[[], None]) -> SelfTestCase:
        """Run the first predict of the built model with a large shape, so that smaller shapes cause no build later.

        Return the shape, or {} if the model does not run on it.

        Args:
            case: the shape of each input; {} to run no predict.
            rebuild: function that builds the model again after a failed predict.

        Raises:
            BuildError: the model does not run on the configured `max_shape`.
        """
        engine = self._engine
        try:
            if case:
                engine.predict(search.make_inputs(engine.signature, case, self.sample))
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
            return RowSupport((), (), is_equal=False, note=SHAPE_DEPENDENT)
        row_support = find_row_support(
            self._engine,
            order,
            reference,
            rebuild,
            lambda trying: self._announce(trying, self._failed_cases),
            self.sample,
        )
        if row_support is None or not row_support.is_equal or self._tolerance:
            return row_support
        digest = rows_digest(
            self._engine, reference.cases, order.max_rows, order.allowed_batch_sizes, self.sample, row_support.row_kind
        )
        return dataclasses.replace(row_support, batch_digest=digest)


def _can_batch(row_support: RowSupport, is_exact: bool) -> bool:
    """Return whether requests may share a predict, according to the row test.

    Args:
        row_support: the result of the row test.
        is_exact: whether batched answers must equal answers alone, bit for bit.
    """
    return bool(row_support.inputs) and (row_support.is_equal or not is_exact)


def load_weights(path: str) -> Arrays:
    """Return the arrays of an .npz file.

    Raises:
        BuildError: the file is not an .npz of plain arrays, or contains no array. The text names the file.
    """
    try:
        # Forbid pickled objects in the file, because unpickling them could run any code.
        with np.load(path, allow_pickle=False) as file:
            arrays: Dict[str, Any] = {name: file[name] for name in file.files}
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror or error}") from None
    except (ValueError, EOFError, AttributeError, KeyError, TypeError, zipfile.BadZipFile) as error:
        # Some of the exceptions caught here show that the file is an .npy file: np.load then returns a plain array,
        # which is no context manager and has no attribute `files`.
        raise BuildError(f"{path}: expected an .npz of plain arrays: {_describe_problem(path, str(error))}") from None
    if not arrays:
        raise BuildError(f"{path}: expected at least one array, got none")
    return arrays


def _describe_problem(path: str, message: str) -> str:
    """Return why a file is not an .npz of plain arrays.

    numpy's own message about Python objects is replaced, because it advises to load pickles, which is unsafe.
    """
    if not zipfile.is_zipfile(path):
        return "the file is of another kind or damaged"
    return "the file contains Python objects" if "allow_pickle" in message else message
