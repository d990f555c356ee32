"""The answer to a request, put together of the answers to its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from weightd_daemon.scheduling.tensor_location import TensorLocation
from weightd_protocol.errors import Internal
from weightd_protocol.messages.inference import ResponseDescription, TensorSpec


class PartialResult(NamedTuple):
    """What was answered to some rows.

    Attributes:
        rows: how many.
        description: of the outputs.
        frames: one for each output, or where it is.
    """

    rows: int
    description: ResponseDescription
    frames: Sequence[Any]


def join_results(
    partials: Sequence[PartialResult], row_outputs: Collection[str]
) -> tuple[ResponseDescription, list[Any]]:
    """Return the outputs of all pieces, in their order: their description, and a frame for each, or where it is.

    Args:
        partials: at least one.
        row_outputs: the outputs whose first dimension counts rows; of the others each piece has the same.

    Raises:
        Internal: the pieces do not fit together. The text names the output, what was expected and what came.
    """
    first = partials[0].description
    total = sum(partial.rows for partial in partials)
    outputs: list[TensorSpec] = []
    frames: list[Any] = []
    for index, spec in enumerate(first.outputs):
        has_rows = spec.name in row_outputs
        for partial in partials:
            _check_output(spec, partial, index, has_rows=has_rows, frame=partials[0].frames[index])
        if has_rows:
            outputs.append(dataclasses.replace(spec, shape=(total, *spec.shape[1:])))
            frames.append(_join_frames([partial.frames[index] for partial in partials]))
        else:
            outputs.append(spec)
            frames.append(partials[0].frames[index])
    return ResponseDescription(first.model_name, tuple(outputs)), frames


def _join_frames(frames: Sequence[Any]) -> Any:
    """Return where all of these are, if they are one behind the other in memory of a client, else their bytes."""
    first, nbytes = frames[0], 0
    for each in frames:
        if not (isinstance(each, TensorLocation) and each == first.subrange(nbytes, len(each))):
            return b"".join([each[:] for each in frames])
        nbytes += len(each)
    return first.subrange(0, nbytes)


def _check_output(spec: TensorSpec, partial: PartialResult, index: int, *, has_rows: bool, frame: Any) -> None:
    actual = partial.description.outputs[index] if index < len(partial.description.outputs) else None
    expected = dataclasses.replace(spec, shape=(partial.rows, *spec.shape[1:])) if has_rows else spec
    if actual != expected:
        raise Internal(
            f"output {spec.name} of a partial result: expected {_describe_output(expected)}, "
            f"got {_describe_output(actual)}"
        )
    if not has_rows and partial.frames[index][:] != frame[:]:
        raise Internal(f"output {spec.name} has no rows, and differs between the partial results of the request")


def _describe_output(spec: TensorSpec | None) -> str:
    return "none" if spec is None else f"{spec.name} {spec.datatype} {list(spec.shape)}"
