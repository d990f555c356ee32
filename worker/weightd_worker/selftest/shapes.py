"""The shape that a process computes first, on an engine whose first predict decides which shapes follow."""

from __future__ import annotations

from typing import List, Optional, Tuple

import numpy as np

from weightd_protocol.messages.worker_common import SelfTestCase, SelfTestCases
from weightd_worker.engines.engine import Arrays, ModelSignature
from weightd_worker.engines.errors import BuildError
from weightd_worker.selftest import selftest


def largest_case(signature: ModelSignature, cases: SelfTestCases, rows: int) -> SelfTestCase:
    """Return the case that covers all of `cases`, with `rows` in each input that has rows; {} without cases."""
    case: SelfTestCase = {}
    for each in signature.inputs if cases else ():
        shapes = [known[each.name] for known in cases]
        dims: List[int] = [max(sizes) for sizes in zip(*shapes)]
        if rows > 1 and dims and (each.shape or ())[:1] == (-1,):
            dims[0] = max(dims[0], rows)
        case[each.name] = tuple(dims)
    return case


def midpoint_case(small: SelfTestCase, large: SelfTestCase) -> SelfTestCase:
    """Return the case half way between these two.

    Kernels are chosen by what divides a size: 64 and 128 may have the same one, and 96 another.
    """
    return {name: tuple((one + other + 1) // 2 for one, other in zip(small[name], large[name])) for name in small}


def halve_case(signature: ModelSignature, case: SelfTestCase) -> SelfTestCase:
    """Return the case whose free dimensions are half as large."""
    declared = {each.name: each.shape for each in signature.inputs}
    return {name: _halve_shape(declared[name], shape) for name, shape in case.items()}


def _halve_shape(declared: Optional[Tuple[int, ...]], shape: Tuple[int, ...]) -> Tuple[int, ...]:
    return tuple((dim + 1) // 2 if declared is None or declared[axis] < 0 else dim for axis, dim in enumerate(shape))


def make_inputs(signature: ModelSignature, case: SelfTestCase, sample: Optional[Arrays]) -> Arrays:
    """Return inputs of these shapes: the values of the sample, repeated, or made up."""
    if sample is None:
        return selftest.make_inputs(signature, case)
    return {name: np.resize(sample[name], shape) for name, shape in case.items()}


def check_max_shape(signature: ModelSignature, max_shape: SelfTestCase) -> None:
    """Check that the option `max_shape` is one for this model.

    Raises:
        BuildError: it is not; the text names the input and what was expected.
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
