"""Responses to inference requests: JSON, followed by the binary data of outputs that are not in the JSON. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weightd_gateway import tensors
from weightd_gateway.daemon_client import InferenceResult
from weightd_gateway.http.infer_json import InferRequestJson, OutputJson
from weightd_gateway.oip_view import model_of, version_of
from weightd_protocol.tensors import frame_of

# A function that writes the bytes of an output into the output's shared-memory region.
WriteOutput = Callable[[OutputJson, memoryview], None]


def encode(
    model: str, form: InferRequestJson, result: InferenceResult, write_output: WriteOutput
) -> tuple[bytes, Sequence[memoryview]]:
    """Return the JSON of a response and the binary data that follows it.

    Raises:
        InvalidArgument: an output cannot be represented in JSON, or `write_output` raised it.
        TooLarge: an output is too large for JSON.
    """
    header, content, _ = summarize(model, form, result, write_output)
    return render(header), content


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


def summarize(
    model: str, form: InferRequestJson, result: InferenceResult, write_output: WriteOutput
) -> ResponseSummary:
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
        fields: dict[str, Any] = {"name": name, "datatype": tensors.datatype_of(array), "shape": array.shape}
        if how.region is not None:
            write_output(how, frame_of(array))
            fields["parameters"] = {
                "shared_memory_region": how.region["shared_memory_region"],
                "shared_memory_offset": how.region.get("shared_memory_offset", 0),
                "shared_memory_byte_size": array.nbytes,
            }
        elif how.is_binary:
            content.append(frame_of(array))
            fields["parameters"] = {"binary_data_size": array.nbytes}
        else:
            tensors.check_count(name, array, values_left)
            fields["data"] = np.ascontiguousarray(array)
            values_left -= array.size
        outputs.append(fields)
    answered = getattr(result, "model", model)
    header: dict[str, Any] = {
        "model_name": model_of(answered),
        "model_version": version_of(answered),
        "outputs": outputs,
    }
    if form.id:
        header["id"] = form.id
    return ResponseSummary(header, content, tensors.MAX_VALUES - values_left)
