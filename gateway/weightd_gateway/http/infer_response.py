"""Responses to inference requests: JSON, followed by the binary data of outputs that are not in the JSON. No I/O."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weightd_gateway import tensors
from weightd_gateway.daemon_client import InferenceResult
from weightd_gateway.http.infer_json import InferRequestJson, OutputJson
from weightd_protocol.model_names import ONLY_VERSION, split_version
from weightd_protocol.tensors import frame_of

# A function that writes the bytes of an output into the output's shared-memory region.
WriteOutput = Callable[[OutputJson, memoryview], None]


# Number of descriptions of binary responses whose JSON is cached.
_MAX_CACHED = 256


def encode(
    form: InferRequestJson, result: InferenceResult, write_output: WriteOutput
) -> tuple[bytes, Sequence[memoryview]]:
    """Return the JSON of a response and the binary data that follows it.

    Raises:
        InvalidArgument: an output cannot be represented in JSON, or `write_output` raised it.
        TooLarge: an output is too large for JSON.
    """
    header, content, _ = summarize(form, result, write_output)
    return render(header), content


def encode_binary(form: InferRequestJson, result: InferenceResult) -> Sequence[bytes | memoryview]:
    """Return the JSON of a response that has all outputs as binary data, and this data."""
    render_json = _binary_json if form.id else _cached_binary_json
    shapes = tuple([(name, array.dtype, array.shape) for name, array in result.items()])
    return [render_json(_answered(form, result), form.id, shapes), *map(frame_of, result.values())]


def _binary_json(answered: str, request_id: str, shapes: Sequence[tuple[str, Any, Sequence[int]]]) -> bytes:
    outputs = [_binary_output(*each) for each in shapes]
    return tensors.to_json(_response_map(answered, request_id, outputs)).encode()


# Most responses have no id, so their JSON depends only on the shapes.
_cached_binary_json = functools.lru_cache(maxsize=_MAX_CACHED)(_binary_json)


def _binary_output(name: str, dtype: Any, shape: Sequence[int]) -> dict[str, Any]:
    parameters = {"binary_data_size": math.prod(shape) * dtype.itemsize}
    return {**_output_map(name, dtype, shape), "parameters": parameters}


def _output_map(name: str, dtype: Any, shape: Sequence[int]) -> dict[str, Any]:
    return {"name": name, "datatype": tensors.DATATYPES[dtype], "shape": shape}


def _answered(form: InferRequestJson, result: InferenceResult) -> str:
    """Return the name of the version that has answered."""
    answered: str = getattr(result, "model", form.model)
    return answered


def _response_map(answered: str, request_id: str, outputs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    name, version = split_version(answered)
    header: dict[str, Any] = {"model_name": name, "model_version": version or ONLY_VERSION, "outputs": outputs}
    if request_id:
        header["id"] = request_id
    return header


class ResponseSummary(NamedTuple):
    """A response before its values are rendered as JSON.

    Attributes:
        header: the content of the JSON, with arrays instead of lists of values.
        content: the binary data that follows the JSON.
        value_count: the number of the outputs' values that the JSON will contain.
    """

    header: Mapping[str, Any]
    content: Sequence[memoryview]
    value_count: int


def render(header: Mapping[str, Any]) -> bytes:
    """Return the JSON of a response header.

    Raises:
        InvalidArgument: an output cannot be represented in JSON.
    """
    outputs = [
        {**each, "data": tensors.to_values(each["name"], each["data"])} if "data" in each else each
        for each in header["outputs"]
    ]
    return tensors.to_json({**header, "outputs": outputs}).encode()


def summarize(form: InferRequestJson, result: InferenceResult, write_output: WriteOutput) -> ResponseSummary:
    """Return the response with each output in the requested form; write outputs with a region to shared memory.

    Raises:
        InvalidArgument: `write_output` raised it.
        TooLarge: an output is too large for JSON.
    """
    outputs: list[dict[str, Any]] = []
    content: list[memoryview] = []
    values_left = tensors.MAX_VALUES
    requested = {each.name: each for each in form.outputs or ()}
    for name, array in result.items():
        how = requested.get(name) or OutputJson(name, form.is_binary)
        fields = _output_map(name, array.dtype, array.shape)
        if how.region is not None:
            write_output(how, frame_of(array))
            fields["parameters"] = {
                "shared_memory_region": how.region["shared_memory_region"],
                "shared_memory_offset": how.region.get("shared_memory_offset", 0),
                "shared_memory_byte_size": array.nbytes,
            }
        elif how.is_binary:
            content.append(frame_of(array))
            fields = _binary_output(name, array.dtype, array.shape)
        else:
            tensors.check_count(name, array, values_left)
            fields["data"] = np.ascontiguousarray(array)
            values_left -= array.size
        outputs.append(fields)
    header = _response_map(_answered(form, result), form.id, outputs)
    return ResponseSummary(header, content, tensors.MAX_VALUES - values_left)
