"""Whether a request's inputs are what the model takes. What passes cannot harm an engine that checks nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from weightd_daemon.scheduling.batching.policy import next_size
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import RequestDescription, TensorSignature, TensorSpec
from weightd_protocol.messages.worker import Built


def check_inputs(signature: Mapping[str, TensorSignature], inputs: Sequence[TensorSpec]) -> None:
    """Check names, datatypes, ranks and dimensions against the model's inputs, by name.

    Raises:
        InvalidArgument: the text names the input, what was expected and what came.
    """
    if len(inputs) != len(signature) or {each.name for each in inputs} != set(signature):
        _raise_wrong_names(signature, inputs)
    for tensor in inputs:
        expected = signature[tensor.name]
        if tensor.datatype != expected.datatype:
            raise InvalidArgument(f"input {tensor.name}: expected {expected.datatype}, got {tensor.datatype}")
        if not _is_shape_allowed(expected.shape, tensor.shape):
            raise InvalidArgument(
                f"input {tensor.name}: expected shape {expected.shape_text}{_hint(expected.shape)}, got"
                f" {list(tensor.shape)}"
            )


def with_declared_shapes(
    signature: Mapping[str, TensorSignature], description: RequestDescription
) -> RequestDescription:
    """Return a request that `check_inputs` has accepted, with the declared shape for each input of one element.

    Engines receive the shape that the model declares: MindSpore Lite does not treat [] and [1] alike.
    """
    inputs = tuple(
        replace(each, shape=shape) if shape is not None and _are_one_element(shape, each.shape) else each
        for each in description.inputs
        for shape in [signature[each.name].shape]
    )
    return description if inputs == description.inputs else replace(description, inputs=inputs)


def check_outputs(outputs: Collection[str], wanted: Sequence[str]) -> None:
    """Check the names of the outputs that are wanted.

    Raises:
        InvalidArgument: the text names the output.
    """
    expected = f"expected some of {', '.join(outputs) or 'none'}"
    if not wanted:
        raise InvalidArgument(f"outputs: none is named; {expected}, or no such field for all")
    for name in wanted:
        if name not in outputs:
            raise InvalidArgument(f"outputs: {name} is not an output of the model; {expected}")
    if len({*wanted}) < len(wanted):
        raise InvalidArgument(f"outputs: one is named twice in {', '.join(wanted)}")


class RowLimits(NamedTuple):
    """How many rows a request may have.

    Attributes:
        max_rows: 0: any number.
        limit_name: the key of the model that says so.
        sizes: to which they are padded, or their last part is; none: they are not.
    """

    max_rows: int = 0
    limit_name: str = ""
    sizes: tuple[int, ...] = ()

    def padded_rows(self, rows: int) -> int:
        """Return how many rows the model is given for so many."""
        return next_size(rows, self.sizes) or max(self.sizes, default=rows)


def check_rows(built: Built, limits: RowLimits, inputs: Sequence[TensorSpec]) -> None:
    """Check how many rows a request has.

    Args:
        built: what the holder has told.
        limits: of the model.
        inputs: that `check_inputs` has let pass.

    Raises:
        InvalidArgument: the text names the input, what was expected and what came.
    """
    counted = built.row_support.inputs if limits.max_rows and built.row_support is not None else ()
    for tensor in inputs:
        if tensor.name in counted and tensor.shape[0] > limits.max_rows:
            expected = (
                f"expected at most {limits.max_rows} rows ({limits.limit_name} of the model), got {tensor.shape[0]}"
            )
            raise InvalidArgument(f"input {tensor.name}: {expected}")


def check_gears(built: Built, limits: RowLimits, inputs: Sequence[TensorSpec]) -> None:
    """Check the sizes of the free dimensions against those that the model was converted for, if these are known.

    Args:
        built: what the holder has told.
        limits: of the model: rows are padded where it has sizes.
        inputs: that `check_rows` has let pass.

    Raises:
        InvalidArgument: the text names the dimensions, the sizes that are taken and what came.
    """
    if not built.gears:
        return
    counted = built.row_support.inputs if built.row_support is not None else ()
    shapes = {
        each.name: (limits.padded_rows(each.shape[0]), *each.shape[1:]) if each.name in counted else each.shape
        for each in inputs
    }
    free = [(each.name, axis) for each in built.inputs for axis, dim in enumerate(each.shape or ()) if dim == -1]
    sizes = tuple(shapes[name][axis] for name, axis in free)
    if sizes not in built.gears:
        raise InvalidArgument(
            f"inputs: the model was converted for some sizes of {', '.join(f'{name}[{axis}]' for name, axis in free)} "
            f"only: expected {_format_gears(built)}, got {_format_sizes(sizes)}"
        )


def _format_sizes(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def _hint(expected: Sequence[int] | None) -> str:
    if expected is None:
        return ", any sizes from 1"
    if not expected:
        return " (one element: a scalar, or any shape in which each size is 1)"
    return " (-1: any size from 1)" if -1 in expected else ""


def _is_shape_allowed(expected: Sequence[int] | None, shape: Sequence[int]) -> bool:
    if expected is None:
        return all(shape)
    if _are_one_element(expected, shape):
        return True
    return len(shape) == len(expected) and all(
        dim == wanted or (wanted == -1 and dim > 0) for wanted, dim in zip(expected, shape, strict=False)
    )


def _are_one_element(expected: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether one of the two shapes is a scalar's, and the other one has exactly one element, too.

    A free dimension does not count as 1: it may be the number of rows, which a scalar does not have.
    """
    return not (expected and shape) and all(dim == 1 for dim in (*expected, *shape))


def _raise_wrong_names(signature: Mapping[str, TensorSignature], inputs: Sequence[TensorSpec]) -> None:
    names = [each.name for each in inputs]
    problems = [f"{name} is missing" for name in signature if name not in names]
    problems += [f"{name} is not an input of the model" for name in names if name not in signature]
    problems += [f"{name} is given twice" for name in sorted({name for name in names if names.count(name) > 1})]
    raise InvalidArgument(f"inputs: {', '.join(problems)}; expected {', '.join(signature) or 'none'}")


def describe_difference(old: Built, new: Built) -> str:
    """Return how the signature of `new` differs from that of `old`, so that a client would notice, or ""."""
    for kind, old_tensors, new_tensors in (("inputs", old.inputs, new.inputs), ("outputs", old.outputs, new.outputs)):
        if {each.name: each for each in old_tensors} != {each.name: each for each in new_tensors}:
            return f"{kind}: expected {_format_tensors(old_tensors)}, got {_format_tensors(new_tensors)}"
    if new.gears and not (old.gears and {*old.gears} <= {*new.gears}):
        return f"sizes: expected {_format_gears(old) or 'any'}, got {_format_gears(new)}"
    return ""


def _format_gears(built: Built) -> str:
    return "; ".join(map(_format_sizes, built.gears))


def _format_tensors(tensors: Sequence[TensorSignature]) -> str:
    return ", ".join(f"{each.name} {each.datatype} {each.shape_text}" for each in tensors) or "none"
