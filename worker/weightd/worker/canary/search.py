"""How a holder finds its canary: inputs that the model runs on.

A model may refuse a size, fail on it, or die of it: MindSpore Lite crashes where an image is too small for a
convolution. So sizes are tried in the order in which most models take one, and before each the daemon is told: if this
process dies, the next holder leaves it out.

The case that runs is followed by a second one, all of whose free dimensions are larger: it shows that the model can be
resized, and which dimensions of its outputs are free.
"""

from __future__ import annotations

from typing import Callable, Iterator, List, Optional, Tuple

from weightd.protocol import limits
from weightd.protocol.datatypes import ITEM_BYTES
from weightd.protocol.errors import InvalidArgument, RequestError
from weightd.protocol.messages.children import Build
from weightd.protocol.messages.data import TensorSignature
from weightd.protocol.messages.findings import SelfTestCase, SelfTestCases
from weightd.worker.canary import canary
from weightd.worker.canary.canary import Canary
from weightd.worker.engines.engine import Arrays, Engine, Gears, ModelSignature
from weightd.worker.engines.errors import BuildError, Spoilt

Shape = Tuple[int, ...]

Runs = Tuple[Canary, Canary]
"""Two runs on the same cases."""

Tell = Callable[[SelfTestCases, SelfTestCases], None]
"""Tells the daemon what is tried next, and what has been in vain."""

# What free dimensions are set to, the batch included; also where a card has gears and nobody knows which.
_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 224)

# Most networks for images halve them five times; few take less than 32 pixels, some 224 alone. The batch is 1 then.
_IMAGE_SIZES = (64, 224, 32, 48, 1, 2)

# Inputs that may have any rank all have the same. A batch of rows, of images, of sequences; then what is left.
_RANKS = (2, 4, 3, 1, 0)

# What takes more is not made up: every process runs it at its start.
_MAX_BYTES = 16 * 1024 * 1024

_OFF = "it is off: nothing shows whether a worker answers as the model does"
_GIVEN_UP = "the search was given up, it took too long or too many processes died; the key canary can name an input"
_SHOWS_NOTHING = "the model's answer to it has no finite number, which shows nothing"
_NONE = "the model runs on none of {} inputs made from its signature; the key canary can name one"


def find(
    engine: Engine,
    order: Build,
    rebuild: Callable[[], None],
    tell: Tell,
    *,
    sample: Optional[Arrays] = None,
    tolerance: float = 0.0,
) -> Canary:
    """Return the canary of the model that `engine` has built.

    An engine that cannot be rebuilt may stay spoilt, with a model that has no canary: it may share its weights, which
    no predict changes, but must not predict.

    Args:
        engine: built.
        order: whether to search, and what is known.
        rebuild: called where a try has spoilt the engine.
        tell: called before each try, and after the last.
        sample: inputs that were configured.
        tolerance: how far answers to the same input may be apart (`canary.difference`).

    Raises:
        BuildError: what was configured cannot be run, or a further try takes another process.
    """
    if sample is not None:
        shapes = {name: tuple(array.shape) for name, array in sample.items()}
        runs = _required(engine, (shapes,), tell, sample)
    elif order.search:
        search = _Search(engine, order, rebuild, tell)
        found = search.find()
        if found is None:
            return Canary((), "", note=_NONE.format(len(search.unfit)))
        runs = found
    elif order.canary_cases:
        runs = _required(engine, order.canary_cases, tell, None)
    else:
        return Canary((), "", note=_GIVEN_UP if order.unfit else _OFF)
    return _judged(*runs, tolerance)


def candidates(signature: ModelSignature, gears: Gears = ()) -> Iterator[SelfTestCase]:
    """Yield the cases that are worth trying, the most promising first; of a model that has gears, those alone."""
    if gears:
        yield from (_geared(signature, iter(gear)) for gear in gears[: limits.MAX_SELFTEST_UNFIT_CASES])
    elif any(each.shape is None for each in signature.inputs):
        for rank in _RANKS:
            yield from _of_one_rank(_ranked(signature, rank))
    else:
        yield from _of_one_rank(signature)


def _of_one_rank(signature: ModelSignature) -> Iterator[SelfTestCase]:
    shapes = [each.shape or () for each in signature.inputs]
    has_images = any(len(shape) >= 4 and min(shape[1:]) < 0 for shape in shapes)
    seen: List[SelfTestCase] = []
    for size in _IMAGE_SIZES if has_images else _SIZES:
        case = {each.name: _shape(each, 1 if has_images else size, size) for each in signature.inputs}
        # A model that takes no less has to; what no request can carry it never gets.
        most = limits.MAX_FRAME_BYTES if size == 1 else _MAX_BYTES
        if case not in seen and _nbytes(signature, case) <= most:
            seen.append(case)
            yield case


def larger(signature: ModelSignature, case: SelfTestCase) -> Optional[SelfTestCase]:
    """Return the case with every free dimension twice as large, if there is one and it is not too large."""
    free = {each.name: each.shape for each in signature.inputs}
    double = {name: _doubled(free[name], shape) for name, shape in case.items()}
    return double if double != case and _nbytes(signature, double) <= _MAX_BYTES else None


def described(cases: SelfTestCases) -> str:
    """Return the cases for people."""
    return " and ".join(", ".join(f"{name} {list(shape)}" for name, shape in each.items()) for each in cases)


class _Search:
    def __init__(self, engine: Engine, order: Build, rebuild: Callable[[], None], tell: Tell) -> None:
        self.unfit: List[SelfTestCase] = list(order.unfit)
        self._engine = engine
        self._known = order.canary_cases
        self._rebuild = rebuild
        self._tell = tell

    def find(self) -> Optional[Runs]:
        starts = [each for each in self._starts() if not any(case in self.unfit for case in each)]
        found: Optional[Runs] = None
        while starts and found is None:
            found = self._try(starts.pop(0), more=bool(starts))
        if found is not None and found[0].cases != self._known:
            found = self._try_larger(found)
        self._tell((), tuple(self.unfit))
        return found

    def _starts(self) -> Iterator[SelfTestCases]:
        if self._known:
            yield self._known
        for case in candidates(self._engine.signature, self._engine.gears):
            yield (case,)

    def _try_larger(self, found: Runs) -> Runs:
        # Where a failure costs a process, one that runs has to do.
        if self._engine.gears or not self._engine.can_rebuild:
            return found
        case = larger(self._engine.signature, found[0].cases[0])
        if case is None or case in self.unfit:
            return found
        second = self._try((case,), more=False)
        return found if second is None else (_joined(found[0], second[0]), _joined(found[1], second[1]))

    def _try(self, cases: SelfTestCases, *, more: bool) -> Optional[Runs]:
        """Run these twice; if they do not run, they are unfit and the engine is whole again, unless it cannot be."""
        self._tell(cases, tuple(self.unfit))
        try:
            runs = canary.run_twice(self._engine, cases)
            if canary.shows(runs[0]):
                return runs
            self._give_up(cases)
        except InvalidArgument:
            self._give_up(cases)
        except Spoilt as error:
            if more and not self._engine.can_rebuild:
                raise BuildError(f"it does not run on the canary, {described(cases)}: {error}") from None
            self._give_up(cases)
            if self._engine.can_rebuild:
                self._rebuild()
        return None

    def _give_up(self, cases: SelfTestCases) -> None:
        room = limits.MAX_SELFTEST_UNFIT_CASES - len(self.unfit)
        self.unfit += cases[:room]


def _joined(one: Canary, other: Canary) -> Canary:
    return canary.of((*one.cases, *other.cases), (*one.answers, *other.answers))


def _required(engine: Engine, cases: SelfTestCases, tell: Tell, sample: Optional[Arrays]) -> Runs:
    """Run what was configured, twice."""
    for case in cases:
        _check(engine.signature, case)
    tell(cases, ())
    try:
        runs = canary.run_twice(engine, cases, sample)
    except RequestError as error:
        raise BuildError(f"the model does not run on the configured canary, {described(cases)}: {error}") from None
    tell((), ())
    return runs


def _check(signature: ModelSignature, case: SelfTestCase) -> None:
    names = [each.name for each in signature.inputs]
    if sorted(case) != sorted(names):
        raise BuildError(f"canary: expected inputs {', '.join(names)}, got {', '.join(case)}")
    for each in signature.inputs:
        shape = case[each.name]
        if each.shape is not None and not _fits(each.shape, shape):
            raise BuildError(f"canary.{each.name}: expected a shape like {list(each.shape)}, got {list(shape)}")
    nbytes = _nbytes(signature, case)
    if nbytes > limits.MAX_FRAME_BYTES:
        raise BuildError(f"canary: expected at most {limits.MAX_FRAME_BYTES} bytes, got {nbytes}")


def _judged(first: Canary, again: Canary, tolerance: float) -> Canary:
    if not canary.shows(first):
        return first._replace(digest="", note=_SHOWS_NOTHING)
    far = canary.difference(first, again)
    if far <= tolerance:
        return first
    note = "the model gives different answers to the same input"
    if far < float("inf"):
        note += (
            f", {far:.2g} of the largest value apart, canary_tolerance is {tolerance:g}: allow more, or build the "
            "model so that it computes the same each time"
        )
    return first._replace(digest="", note=note)


def _fits(known: Shape, shape: Shape) -> bool:
    return len(shape) == len(known) and all(expected in (dim, -1) for expected, dim in zip(known, shape))


def _shape(tensor: TensorSignature, batch: int, size: int) -> Shape:
    return tuple(dim if dim >= 0 else size if axis else batch for axis, dim in enumerate(tensor.shape or ()))


def _doubled(known: Optional[Shape], shape: Shape) -> Shape:
    return tuple(2 * dim if known is None or known[axis] < 0 else dim for axis, dim in enumerate(shape))


def _geared(signature: ModelSignature, sizes: Iterator[int]) -> SelfTestCase:
    return {each.name: tuple(next(sizes) if dim < 0 else dim for dim in each.shape or ()) for each in signature.inputs}


def _ranked(signature: ModelSignature, rank: int) -> ModelSignature:
    return signature._replace(
        inputs=tuple(
            TensorSignature(each.name, each.datatype, (-1,) * rank if each.shape is None else each.shape)
            for each in signature.inputs
        )
    )


def _nbytes(signature: ModelSignature, case: SelfTestCase) -> int:
    total = 0
    for each in signature.inputs:
        size = ITEM_BYTES[each.datatype]
        for dim in case[each.name]:
            size *= dim
        total += size
    return total
