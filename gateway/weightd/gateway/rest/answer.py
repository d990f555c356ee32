"""An answer as a caller wants it: JSON, and the bytes of tensors that are not in it; without I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weightd.gateway import arrays
from weightd.gateway.model_view import VERSION
from weightd.gateway.question import Answer
from weightd.gateway.rest.form import Form, OutputForm
from weightd.protocol.tensors import frame_of

# Puts the bytes of an output where the caller wants it.
Placing = Callable[[OutputForm, memoryview], None]


def encode(model: str, form: Form, answer: Answer, place: Placing) -> tuple[bytes, Sequence[memoryview]]:
    """Return the JSON of an answer, and what follows it.

    Raises:
        InvalidArgument: an output has no form in JSON; or what `place` raises.
        TooLarge: an output is too large for JSON.
    """
    header, content, _ = describe(model, form, answer, place)
    return render(header), content


class Description(NamedTuple):
    """An answer before its values are rendered.

    Attributes:
        header: what is to be JSON, with arrays in it.
        content: the binary data that follows.
        values: how many values the header has.
    """

    header: Mapping[str, Any]
    content: Sequence[memoryview]
    values: int


def render(header: Mapping[str, Any]) -> bytes:
    """Return the JSON of a description.

    Raises:
        InvalidArgument: an output has no form in JSON.
    """
    outputs = [
        {**each, "data": arrays.to_values(each["name"], each["data"])} if "data" in each else each
        for each in header["outputs"]
    ]
    return arrays.to_json({**header, "outputs": outputs}).encode()


def describe(model: str, form: Form, answer: Answer, place: Placing) -> Description:
    """Return an answer as it is to be rendered; outputs that are wanted in shared memory are written there.

    Raises:
        InvalidArgument: what `place` raises.
        TooLarge: an output is too large for JSON.
    """
    outputs: list[dict[str, Any]] = []
    content: list[memoryview] = []
    left = arrays.MOST_VALUES
    wanted = {each.name: each for each in form.outputs or ()}
    for name, array in answer.items():
        how = wanted.get(name) or OutputForm(name, form.binary)
        told: dict[str, Any] = {"name": name, "datatype": arrays.datatype_of(array), "shape": array.shape}
        if how.region is not None:
            place(how, frame_of(array))
            told["parameters"] = {
                "shared_memory_region": how.region["shared_memory_region"],
                "shared_memory_offset": how.region.get("shared_memory_offset", 0),
                "shared_memory_byte_size": array.nbytes,
            }
        elif how.binary:
            content.append(frame_of(array))
            told["parameters"] = {"binary_data_size": array.nbytes}
        else:
            arrays.check_count(name, array, left)
            told["data"] = np.ascontiguousarray(array)
            left -= array.size
        outputs.append(told)
    header: dict[str, Any] = {"model_name": model, "model_version": VERSION, "outputs": outputs}
    if form.id:
        header["id"] = form.id
    return Description(header, content, arrays.MOST_VALUES - left)
