"""Search for a holder's self-test: shapes of inputs on which the model runs.

A case is a set of shapes, one for each input. On an unsuitable case, the model may raise an error or crash the process:
MindSpore Lite crashes if an image is too small for a convolution. So the search tries common shapes first, and
announces each case to the daemon before it runs. If the case crashes the holder, the next holder skips this case.

After the first case on which the model runs, the search tries a second case, in which all free dimensions are larger.
The second case shows whether the model can be resized, and which dimensions of its outputs are free.
"""

from __future__ import annotations

from typing import Callable, Iterator, List, Optional, Tuple

import numpy as np

from weightd_protocol import limits
from weightd_protocol.datatypes import ITEM_BYTES
from weightd_protocol.errors import InvalidArgument, RequestError
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker import Build
from weightd_protocol.messages.worker_common import SelfTestCase, SelfTestCases
from weightd_worker.engines.engine import Arrays, BuildError, Engine, Gears, ModelCorrupted, ModelSignature
from weightd_worker.selftest import selftest
from weightd_worker.selftest.selftest import SelfTestRun

Shape = Tuple[int, ...]

Runs = Tuple[SelfTestRun, SelfTestRun]
"""Two runs of a self-test with the same cases."""

AnnounceCases = Callable[[SelfTestCases, SelfTestCases], None]
"""Function that reports to the daemon the cases that run next, and the cases that have failed."""

# Sizes that the search tries for all free dimensions, including the batch size. The search also tries these sizes on a
# card whose gears are not known.
_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 224)

# Sizes that the search tries for the free dimensions of images, with batch size 1. Most image networks halve the size
# five times. Only few networks accept less than 32 pixels, and some accept only 224.
_IMAGE_SIZES = (64, 224, 32, 48, 1, 2)

# Numbers of dimensions that the search tries for inputs that may have any rank. All such inputs get the same number.
# First come the numbers for rows of features, images and sequences.
_RANKS = (2, 4, 3, 1, 0)

# Maximum size of generated inputs in bytes, because every process runs the self-test when it starts.
_MAX_BYTES = 16 * 1024 * 1024

_OFF = "the key selftest is off, so weightd cannot check the answers of workers"
_GIVEN_UP = "the search was given up: it took too long or crashed too many processes; set the key selftest to an input"
_INCONCLUSIVE = "the model's answer has no finite number, so it cannot be compared"
_NO_INPUT_RUNS = "the model runs on none of {} inputs generated from its signature; set the key selftest to an input"


def find_selftest(
    engine: Engine,
    order: Build,
    rebuild: Callable[[], None],
    announce: AnnounceCases,
    *,
    sample: Optional[Arrays] = None,
    tolerance: float = 0.0,
) -> SelfTestRun:
    """Find or run the self-test of the model that `engine` has built, and return the run.

    If the engine cannot build the model again and the search finds no self-test, the model may be corrupted afterwards.
    The holder may still share the weights, which predicts do not change, but must not run a predict.

    Args:
        engine: an engine that has built the model.
        order: the daemon's order: whether to search, the cases to run, and the failed cases.
        rebuild: function that builds the model again after a case has corrupted it.
        announce: function that is called before each case runs, and after the last case.
        sample: the configured inputs of the self-test; None if inputs are generated.
        tolerance: the largest allowed difference between two answers to the same inputs (`selftest.difference`).

    Raises:
        BuildError: the model does not run on the configured inputs, or the search needs a new process to continue.
    """
    if sample is not None:
        shapes = {name: tuple(array.shape) for name, array in sample.items()}
        runs = _run_configured(engine, (shapes,), order.selftest_digest, announce, sample)
    elif order.search_selftest:
        search = _Search(engine, order, rebuild, announce)
        found = search.find()
        if found is None:
            return SelfTestRun((), "", note=_NO_INPUT_RUNS.format(len(search.failed_cases)))
        runs = found
    elif order.selftest_cases:
        runs = _run_configured(engine, order.selftest_cases, order.selftest_digest, announce, None)
    else:
        return SelfTestRun((), "", note=_GIVEN_UP if order.failed_cases else _OFF)
    return _assess(*runs, tolerance)


def candidate_cases(signature: ModelSignature, gears: Gears = ()) -> Iterator[SelfTestCase]:
    """Yield the cases that the search tries, the most common shapes first. If the model has gears, yield only gears."""
    if gears:
        yield from (_case_of_gear(signature, iter(gear)) for gear in gears[: limits.MAX_SELFTEST_UNFIT_CASES])
    elif any(each.shape is None for each in signature.inputs):
        for rank in _RANKS:
            yield from _cases_of_ranked(_with_rank(signature, rank))
    else:
        yield from _cases_of_ranked(signature)


def _cases_of_ranked(signature: ModelSignature) -> Iterator[SelfTestCase]:
    shapes = [each.shape or () for each in signature.inputs]
    has_images = any(len(shape) >= 4 and min(shape[1:]) < 0 for shape in shapes)
    seen: List[SelfTestCase] = []
    for size in _IMAGE_SIZES if has_images else _SIZES:
        case = {each.name: _fill_shape(each, 1 if has_images else size, size) for each in signature.inputs}
        # The smallest case may be as large as a request, because smaller shapes are impossible for this model.
        most = limits.MAX_FRAME_BYTES if size == 1 else _MAX_BYTES
        if case not in seen and _case_bytes(signature, case) <= most:
            seen.append(case)
            yield case


def double_case(signature: ModelSignature, case: SelfTestCase) -> Optional[SelfTestCase]:
    """Return the case with all free dimensions doubled; None without free dimensions, or if that is too large."""
    free = {each.name: each.shape for each in signature.inputs}
    double = {name: _double_shape(free[name], shape) for name, shape in case.items()}
    return double if double != case and _case_bytes(signature, double) <= _MAX_BYTES else None


def describe_cases(cases: SelfTestCases) -> str:
    """Return a text with the shapes of the cases, for error messages."""
    return " and ".join(", ".join(f"{name} {list(shape)}" for name, shape in each.items()) for each in cases)


class _Search:
    def __init__(self, engine: Engine, order: Build, rebuild: Callable[[], None], announce: AnnounceCases) -> None:
        self.failed_cases: List[SelfTestCase] = list(order.failed_cases)
        self._engine = engine
        self._known_cases, self._known_digest = order.selftest_cases, order.selftest_digest
        self._rebuild = rebuild
        self._announce = announce

    def find(self) -> Optional[Runs]:
        starts = [each for each in self._start_cases() if not any(case in self.failed_cases for case in each)]
        found: Optional[Runs] = None
        while starts and found is None:
            found = self._try(starts.pop(0), has_more=bool(starts))
        if found is not None and found[0].cases != self._known_cases:
            found = self._try_larger(found)
        self._announce((), tuple(self.failed_cases))
        return found

    def _start_cases(self) -> Iterator[SelfTestCases]:
        if self._known_cases:
            yield self._known_cases
        for case in candidate_cases(self._engine.signature, self._engine.gears):
            yield (case,)

    def _try_larger(self, found: Runs) -> Runs:
        # Try no larger case if a failure would require a new process, or if the model has gears.
        if self._engine.gears or not self._engine.can_rebuild:
            return found
        case = double_case(self._engine.signature, found[0].cases[0])
        if case is None or case in self.failed_cases:
            return found
        larger_runs = self._try((case,), has_more=False)
        return (
            found
            if larger_runs is None
            else (_merge_runs(found[0], larger_runs[0]), _merge_runs(found[1], larger_runs[1]))
        )

    def _try(self, cases: SelfTestCases, *, has_more: bool) -> Optional[Runs]:
        """Run the cases twice (`selftest.run_twice`) and return both runs.

        If the model does not run on the cases, or its answers have no finite number, add the cases to the failed cases
        and return None. A corrupted model is built again if possible.

        Raises:
            BuildError: the model is corrupted and cannot be built again, and `has_more` says that cases are left.
        """
        self._announce(cases, tuple(self.failed_cases))
        try:
            known_digest = self._known_digest if cases == self._known_cases else ""
            runs = selftest.run_twice(self._engine, cases, known_digest=known_digest)
            if selftest.is_conclusive(runs[0]):
                return runs
            self._exclude(cases)
        except InvalidArgument:
            self._exclude(cases)
        except ModelCorrupted as error:
            if has_more and not self._engine.can_rebuild:
                raise BuildError(
                    f"the model does not run on the self-test input {describe_cases(cases)}: {error}"
                ) from None
            self._exclude(cases)
            if self._engine.can_rebuild:
                self._rebuild()
        return None

    def _exclude(self, cases: SelfTestCases) -> None:
        free_count = limits.MAX_SELFTEST_UNFIT_CASES - len(self.failed_cases)
        self.failed_cases += cases[:free_count]


def _merge_runs(one: SelfTestRun, other: SelfTestRun) -> SelfTestRun:
    return selftest.from_answers((*one.cases, *other.cases), (*one.answers, *other.answers))


def _run_configured(
    engine: Engine, cases: SelfTestCases, known_digest: str, announce: AnnounceCases, sample: Optional[Arrays]
) -> Runs:
    """Run the configured cases twice (`selftest.run_twice`) and return both runs."""
    for case in cases:
        _check_case(engine.signature, case)
    announce(cases, ())
    try:
        runs = selftest.run_twice(engine, cases, sample, known_digest)
    except RequestError as error:
        raise BuildError(
            f"the model does not run on the configured self-test input, {describe_cases(cases)}: {error}"
        ) from None
    announce((), ())
    return runs


def _check_case(signature: ModelSignature, case: SelfTestCase) -> None:
    names = [each.name for each in signature.inputs]
    if sorted(case) != sorted(names):
        raise BuildError(f"selftest: expected inputs {', '.join(names)}, got {', '.join(case)}")
    for each in signature.inputs:
        shape = case[each.name]
        if each.shape is not None and not _is_shape_allowed(each.shape, shape):
            raise BuildError(f"selftest.{each.name}: expected a shape like {list(each.shape)}, got {list(shape)}")
    nbytes = _case_bytes(signature, case)
    if nbytes > limits.MAX_FRAME_BYTES:
        raise BuildError(f"selftest: expected at most {limits.MAX_FRAME_BYTES} bytes, got {nbytes}")


def _assess(first: SelfTestRun, second: SelfTestRun, tolerance: float) -> SelfTestRun:
    if not selftest.is_conclusive(first):
        return first._replace(digest="", note=_INCONCLUSIVE)
    difference = selftest.difference(first, second)
    if difference <= tolerance:
        return first
    note = "the model gives different answers to the same input"
    if difference < float("inf"):
        note += (
            f", which differ by {difference:.2g} of the largest value; selftest_tolerance is {tolerance:g}: raise it or"
            " make the model deterministic"
        )
    return first._replace(digest="", note=note)


def _is_shape_allowed(declared: Shape, shape: Shape) -> bool:
    return len(shape) == len(declared) and all(expected in (dim, -1) for expected, dim in zip(declared, shape))


def _fill_shape(tensor: TensorSignature, batch: int, size: int) -> Shape:
    return tuple(dim if dim >= 0 else size if axis else batch for axis, dim in enumerate(tensor.shape or ()))


def _double_shape(declared: Optional[Shape], shape: Shape) -> Shape:
    return tuple(2 * dim if declared is None or declared[axis] < 0 else dim for axis, dim in enumerate(shape))


def _case_of_gear(signature: ModelSignature, sizes: Iterator[int]) -> SelfTestCase:
    return {each.name: tuple(next(sizes) if dim < 0 else dim for dim in each.shape or ()) for each in signature.inputs}


def _with_rank(signature: ModelSignature, rank: int) -> ModelSignature:
    return signature._replace(
        inputs=tuple(
            TensorSignature(each.name, each.datatype, (-1,) * rank if each.shape is None else each.shape)
            for each in signature.inputs
        )
    )


def _case_bytes(signature: ModelSignature, case: SelfTestCase) -> int:
    total = 0
    for each in signature.inputs:
        size = ITEM_BYTES[each.datatype]
        for dim in case[each.name]:
            size *= dim
        total += size
    return total


def largest_case(signature: ModelSignature, cases: SelfTestCases, rows: int) -> SelfTestCase:
    """Return the case in which each dimension is the largest of this dimension in all cases; {} without cases.

    In the result, the first dimension of an input is at least `rows` if it is free.
    """
    case: SelfTestCase = {}
    for each in signature.inputs if cases else ():
        shapes = [known[each.name] for known in cases]
        dims: List[int] = [max(sizes) for sizes in zip(*shapes)]
        if rows > 1 and dims and (each.shape or ())[:1] == (-1,):
            dims[0] = max(dims[0], rows)
        case[each.name] = tuple(dims)
    return case


def midpoint_case(small: SelfTestCase, large: SelfTestCase) -> SelfTestCase:
    """Return the case in which each dimension is the mean of the dimensions in two cases.

    Libraries choose kernels by the divisors of a size. For example, a library may use one kernel for the sizes 64 and
    128, but another for the size 96. Both kernels should be tested.
    """
    return {name: tuple((one + other + 1) // 2 for one, other in zip(small[name], large[name])) for name in small}


def halve_case(signature: ModelSignature, case: SelfTestCase) -> SelfTestCase:
    """Return the case with all free dimensions halved."""
    declared = {each.name: each.shape for each in signature.inputs}
    return {name: _halve_shape(declared[name], shape) for name, shape in case.items()}


def _halve_shape(declared: Optional[Tuple[int, ...]], shape: Tuple[int, ...]) -> Tuple[int, ...]:
    return tuple((dim + 1) // 2 if declared is None or declared[axis] < 0 else dim for axis, dim in enumerate(shape))


def make_inputs(signature: ModelSignature, case: SelfTestCase, sample: Optional[Arrays]) -> Arrays:
    """Return inputs with the shapes in `case`: values of the sample, repeated; without a sample, generated values."""
    if sample is None:
        return selftest.make_inputs(signature, case)
    return {name: np.resize(sample[name], shape) for name, shape in case.items()}


def check_max_shape(signature: ModelSignature, max_shape: SelfTestCase) -> None:
    """Check that the option `max_shape` fits this model.

    Raises:
        BuildError: the option does not fit the model. The text names the input and the expected shape.
    """
    names = [each.name for each in signature.inputs]
    if sorted(max_shape) != sorted(names):
        raise BuildError(f"options.max_shape: expected inputs {', '.join(names)}, got {', '.join(max_shape)}")
    for each in signature.inputs:
        shape = max_shape[each.name]
        dims = each.shape or ()
        fits = len(shape) == len(dims) and all(known in (dim, -1) for known, dim in zip(dims, shape))
        if each.shape is not None and not fits:
            raise BuildError(f"options.max_shape.{each.name}: expected a shape like {list(dims)}, got {list(shape)}")
