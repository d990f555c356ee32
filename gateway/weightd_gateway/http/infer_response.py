"""An answer as a caller wants it: JSON, and the bytes of tensors that are not in it; without I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weightd_gateway import tensors
from weightd_gateway.daemon_client import InferenceResult
from weightd_gateway.http.infer_json import InferRequestJson, OutputJson
from weightd_gateway.oip_view import VERSION
from weightd_protocol.tensors import frame_of

# Puts the bytes of an output where the caller wants it.
WriteOutput = Callable[[OutputJson, memoryview], None]


def encode(
    model: str, form: InferRequestJson, result: InferenceResult, write_output: WriteOutput
) -> tuple[bytes, Sequence[memoryview]]:
    """Return the JSON of an answer, and what follows it.

    Raises:
        InvalidArgument: an output has no form in JSON; or what `write_output` raises.
        TooLarge: an output is too large for JSON.
    """
    header, content, _ = summarize(model, form, result, write_output)
    return render(header), content


class ResponseSummary(NamedTuple):
    """An answer before its values are rendered.

    Attributes:
        header: what is to be JSON, with arrays in it.
        content: the binary data that follows.
        value_count: how many values the header has.
    """

    header: Mapping[str, Any]
    content: Sequence[memoryview]
    value_count: int


def render(header: Mapping[str, Any]) -> bytes:
    """Return the JSON of a description.

    Raises:
        InvalidArgument: an output has no form in JSON.
    """
    outputs = [
        {**each, "data": tensors.to_values(each["name"], each["data"])} if "data" in each else each
        for each in header["outputs"]
    ]
    return tensors.to_json({**header, "outputs": outputs}).encode()


def summarize(
    model: str, form: InferRequestJson, result: InferenceResult, write_output: WriteOutput
) -> ResponseSummary:
    """Return an answer as it is to be rendered; outputs that are wanted in shared memory are written there.

    Raises:
        InvalidArgument: what `write_output` raises.
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
    header: dict[str, Any] = {"model_name": model, "model_version": VERSION, "outputs": outputs}
    if form.id:
        header["id"] = form.id
    return ResponseSummary(header, content, tensors.MAX_VALUES - values_left)
