"""Generates inputs for requests: shapes from the model's signature and the command line, with random values.

Floating-point inputs have normally distributed values around 0. All other inputs have the values 0 and 1, because they
may be indices, for which larger values could be invalid.
"""

from __future__ import annotations

import argparse
from types import MappingProxyType
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from weightctl import exit_codes
from weightctl.command import CommandError
from weightctl.text import clean
from weightd_protocol import limits
from weightd_protocol.datatypes import NUMPY_DTYPE
from weightd_protocol.messages.control import ModelMetadataResponse
from weightd_protocol.messages.inference import TensorSignature, TensorSpec

Shape = Tuple[int, ...]

# Maximum number of rows, and of requests in flight, on the command line. Models are not configured to batch more rows,
# and the daemon would hardly accept more requests from one client.
MAX_COUNT = 4096
_MAX_COUNTS = 16

_MIN_S, _MAX_S = 0.1, 3600

Arrays = Dict[str, Any]

# Maximum number and total bytes of the different requests that are generated: so many that neither the engine nor a
# cache sees the same input again soon.
MAX_SAMPLES = 16
MAX_BYTES = 64 * 2**20


class WrongShape(CommandError):
    """The command line has a shape that the model does not accept. The error text says which shapes it accepts."""

    status = exit_codes.USAGE


def add_shape_argument(parser: argparse.ArgumentParser, help_suffix: str = "") -> None:
    """Declare the argument `--shape`."""
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        type=_parse_named_shape,
        metavar="NAME=N,N",
        help=f"shape of an input{help_suffix}; repeatable (default: a shape known to work, or 1 for free dimensions)",
    )


def parse_counts(argument: str) -> Tuple[int, ...]:
    """Parse a list of numbers such as 1,8,64. Return the different numbers in ascending order.

    Raises:
        argparse.ArgumentTypeError: the argument is not such a list, or a number is out of range.
    """
    try:
        numbers = sorted({int(each) for each in argument.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1 or numbers[-1] > MAX_COUNT or len(numbers) > _MAX_COUNTS:
        raise argparse.ArgumentTypeError(
            f"expected at most {_MAX_COUNTS} numbers from 1 to {MAX_COUNT:,}, as in 1,8,64, got {argument!r}"
        )
    return tuple(numbers)


def parse_rows(argument: str) -> int:
    """Parse a number of rows.

    Raises:
        argparse.ArgumentTypeError: the argument is not a valid number.
    """
    number, *more = parse_counts(argument)
    if more:
        raise argparse.ArgumentTypeError(f"expected one number, got {argument!r}")
    return number


def parse_seconds(argument: str) -> float:
    """Parse a duration in seconds.

    Raises:
        argparse.ArgumentTypeError: the argument is not a number, or out of range.
    """
    try:
        value = float(argument)
    except ValueError:
        value = 0.0
    if not _MIN_S <= value <= _MAX_S:
        raise argparse.ArgumentTypeError(f"expected seconds from {_MIN_S:g} to {_MAX_S:,}, got {argument!r}")
    return value


def make_example(metadata: ModelMetadataResponse) -> Mapping[str, Shape]:
    """Return shapes with which the model has already run, by input name; empty if the daemon knows none."""
    return {each.name: shape for each, shape in zip(metadata.inputs, metadata.example or ())}


def has_free_rows(signature: TensorSignature) -> bool:
    """Return whether requests choose the first dimension of this input."""
    return signature.shape is None or signature.shape[:1] == (-1,)


def specify(
    inputs: Sequence[TensorSignature],
    requested: Sequence[Tuple[str, Shape]],
    rows: Optional[int] = None,
    example: Mapping[str, Shape] = MappingProxyType({}),
) -> Tuple[TensorSpec, ...]:
    """Return the names, datatypes and shapes of the inputs of a request.

    Args:
        inputs: the inputs in the model's signature.
        requested: input names and shapes from `--shape`.
        rows: the first dimension of each input that has a free one. If None, it is taken from `requested`, else from
            `example`, else it is 1.
        example: shapes with which the model has run, for inputs that are not in `requested`.

    Raises:
        WrongShape: the model does not accept a shape, or the request would be too large.
    """
    shapes = _shapes_by_name(inputs, requested)
    if rows is not None and not any(map(has_free_rows, inputs)):
        raise WrongShape(f"--rows {rows}: no input has a free first dimension: {describe(inputs)}")
    specs = tuple(
        TensorSpec(each.name, each.datatype, _resolve_shape(each, shapes.get(each.name, example.get(each.name)), rows))
        for each in inputs
    )
    for spec in specs:
        if spec.nbytes > limits.MAX_FRAME_BYTES:
            raise WrongShape(
                f"input {clean(spec.name)}: {list(spec.shape)} of {spec.datatype} are {spec.nbytes:,} bytes; "
                f"a request carries at most {limits.MAX_FRAME_BYTES:,}"
            )
    return specs


def count_rows(inputs: Sequence[TensorSignature], specs: Sequence[TensorSpec]) -> Optional[int]:
    """Return a request's number of rows.

    Return None if no input has a free first dimension, or if the first dimensions of these inputs differ.
    """
    rows = {spec.shape[0] for each, spec in zip(inputs, specs) if has_free_rows(each) and spec.shape}
    return rows.pop() if len(rows) == 1 else None


def describe(inputs: Sequence[TensorSignature]) -> str:
    """Return names, datatypes and shapes of inputs as text for messages."""
    return ", ".join(f"{clean(each.name)} {each.datatype} {each.shape_text}" for each in inputs) or "none"


def make_inputs(specs: Sequence[TensorSpec], seed: int) -> Arrays:
    """Return random inputs for a request. The same seed gives the same values."""
    random = np.random.default_rng(seed)
    return {spec.name: _random_array(spec, random) for spec in specs}


def make_many_inputs(specs: Sequence[TensorSpec]) -> List[Arrays]:
    """Return the inputs of several different requests, at most `MAX_SAMPLES` and `MAX_BYTES`."""
    size = max(1, sum(spec.nbytes for spec in specs))
    return [make_inputs(specs, seed) for seed in range(max(1, min(MAX_SAMPLES, MAX_BYTES // size)))]


def _parse_named_shape(argument: str) -> Tuple[str, Shape]:
    name, equals, dims = argument.rpartition("=")
    try:
        shape = tuple(int(each) for each in dims.split(",") if dims)
    except ValueError:
        shape = (-1,)
    if not (name and equals) or not all(0 <= dim <= limits.MAX_DIM for dim in shape) or len(shape) > limits.MAX_RANK:
        raise argparse.ArgumentTypeError(f"expected NAME=N,N, as in x=1,16, got {argument!r}")
    return name, shape


def _shapes_by_name(inputs: Sequence[TensorSignature], requested: Sequence[Tuple[str, Shape]]) -> Mapping[str, Shape]:
    names = {each.name for each in inputs}
    shapes: Dict[str, Shape] = {}
    for name, shape in requested:
        if name not in names:
            raise WrongShape(f"--shape: no input {name!r}; there are: {describe(inputs)}")
        if name in shapes:
            raise WrongShape(f"--shape: {name!r} is given twice")
        shapes[name] = shape
    return shapes


def _resolve_shape(signature: TensorSignature, requested: Optional[Shape], rows: Optional[int]) -> Shape:
    declared = signature.shape
    if requested is None:
        if declared is None:
            name = clean(signature.name)
            raise WrongShape(f"input {name} accepts any rank; set its shape with --shape {name}=N,N")
        requested = tuple(1 if dim < 0 else dim for dim in declared)
    elif declared is not None and not _fits(requested, declared):
        raise WrongShape(f"--shape: input {clean(signature.name)} takes {signature.shape_text}, got {list(requested)}")
    return (rows, *requested[1:]) if rows is not None and requested and has_free_rows(signature) else requested


def _fits(requested: Shape, declared: Shape) -> bool:
    return len(requested) == len(declared) and all(dim in (-1, got) for got, dim in zip(requested, declared))


def _random_array(spec: TensorSpec, random: Any) -> Any:
    dtype = np.dtype(NUMPY_DTYPE[spec.datatype])
    if dtype.kind == "f":
        return random.standard_normal(spec.shape, np.float32).astype(dtype, copy=False)
    return random.integers(0, 2, spec.shape, np.uint8).astype(dtype, copy=False)
