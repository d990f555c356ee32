"""A `ModelInferRequest`, as the question that it asks; what is not exactly what it says is refused by its field."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pickle import PickleBuffer
from typing import Any, NamedTuple

from weightd.gateway import arrays
from weightd.gateway.arrays import Array
from weightd.gateway.callers import Caller
from weightd.gateway.codes import TooLarge
from weightd.gateway.helper import Helpers
from weightd.gateway.model_view import VERSION
from weightd.gateway.question import Question
from weightd.gateway.regions import Place, Regions
from weightd.gateway.rpc import parameters
from weightd.gateway.rpc.calls import Call, parsed
from weightd.gateway.rpc.cutting import cut
from weightd.gateway.rpc.fields import check, layout_of
from weightd.gateway.rpc.messages import INFERENCE
from weightd.protocol import limits
from weightd.protocol.errors import InvalidArgument, NotFound
from weightd.protocol.schema import describe_value, label

# Where the values of a datatype are that are not in `raw_input_contents`.
_CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}

# What those fields hold.
_WIDE: Mapping[str, str] = {
    "bool_contents": "?",
    "int_contents": "<i4",
    "int64_contents": "<i8",
    "uint_contents": "<u4",
    "uint64_contents": "<u8",
    "fp32_contents": "<f4",
    "fp64_contents": "<f8",
}

_NOTHING = INFERENCE["InferTensorContents"]()

_Request = INFERENCE["ModelInferRequest"]
_LAYOUT = layout_of(_Request.DESCRIPTOR)

# Of a message but for its raw contents, as of JSON: it takes the loop a while, in which nobody else is served.
MOST_HEADER_BYTES = 16 * 1024 * 1024

# Of one with more fields than requests have: two bytes of it may become a message of a hundred.
MOST_ODD_BYTES = 1024 * 1024

HELPER_BYTES = 16 * 1024
"""A header that is longer is parsed by the helper process, as JSON is."""

# Of a header that is remembered with what it means: a client sends the same again and again.
_REMEMBERED_BYTES = 2048
_REMEMBERED = 1024


class Memory(NamedTuple):
    """Where tensors may be that are not in the message.

    Attributes:
        regions: what callers have registered.
        room: returns an array of so many bytes to read a tensor into.
        helpers: the processes that parse many values.
    """

    regions: Regions
    room: Callable[[Caller, int], Any]
    helpers: Helpers


class Target(NamedTuple):
    """Where an output is to be.

    Attributes:
        region: what the caller calls it.
        place: the same.
    """

    region: str
    place: Place


class Asked(NamedTuple):
    """A request.

    Attributes:
        question: what it asks.
        targets: of outputs that are not to be in the answer, by their names.
    """

    question: Question
    targets: Mapping[str, Target]


class Input(NamedTuple):
    """One input, and where it is: `values`, or in a region, or else among the raw contents."""

    name: str
    datatype: str
    shape: Sequence[int]
    values: Array | None
    region: Mapping[str, Any] | None


class Form(NamedTuple):
    """What a request says, but for its tensors: the same for many.

    Attributes:
        regions: of outputs that are to be in one: its parameters, by their names.
        contents, id: of a message that was not cut.
    """

    model: str
    inputs: Sequence[Input]
    outputs: tuple[str, ...] | None
    regions: Mapping[str, Mapping[str, Any]]
    timeout: float | None
    priority: int | None
    contents: Sequence[bytes]
    id: str


async def asked(message: bytes, call: Call, memory: Memory) -> Asked:
    """Return what the bytes of a request ask.

    Raises:
        InvalidArgument: they are not what the protocol says; the text names the field.
        NotFound: the version, or a region, is none.
        TooLarge: what is no raw content is longer than it may be.
        ResourceExhausted: there is no room for its tensors now.
    """
    if len(message) > HELPER_BYTES:
        # A message that is refused for its fields costs less here than in pieces, and on its way to a helper process.
        parsed(message, _check_fields)
    header, request_id, contents = cut(message)
    _check_header(len(header), MOST_ODD_BYTES if header is message else MOST_HEADER_BYTES)
    if len(header) <= _REMEMBERED_BYTES:
        form = _remembered(header)
    elif len(header) <= HELPER_BYTES:
        form = _form(header)
    else:
        # The copy on its way.
        call.seat.take(len(header))
        form = await memory.helpers.run(call.caller, len(header), _form, PickleBuffer(header))
    question = Question(
        form.model,
        _inputs(form, contents or [memoryview(each) for each in form.contents], call, memory),
        form.outputs,
        parameters.earlier(form.timeout, call.left),
        form.priority,
        call.traceparent,
        _id(request_id) if request_id else form.id,
    )
    targets = {
        name: Target(given[parameters.REGION], parameters.place_of(given, call, memory.regions))
        for name, given in form.regions.items()
    }
    return Asked(question, targets)


def _check_header(nbytes: int, most: int) -> None:
    if nbytes > most:
        text = f"expected at most {most} bytes beside raw_input_contents, got {nbytes}: send tensors there"
        raise TooLarge(text)


def _check_fields(message: bytes) -> None:
    check(message, _LAYOUT)


def _parse(message: bytes) -> Any:
    _check_fields(message)
    return _Request.FromString(message)


def _form(header: bytes) -> Form:
    request = parsed(header, _parse)
    check_version(request.model_version)
    given = parameters.values("parameters", request.parameters)
    parameters.check(given)
    outputs, regions = _outputs(request.outputs)
    return Form(
        model_of(request.model_name),
        _described(request.inputs),
        outputs,
        regions,
        parameters.timeout_of(given),
        parameters.priority_of(given),
        [*request.raw_input_contents],
        _id(request.id.encode()),
    )


_remembered = functools.lru_cache(_REMEMBERED)(_form)


def model_of(name: str) -> str:
    """Return the name of a model.

    Raises:
        InvalidArgument: it is none.
    """
    return _name("model_name", name)


def check_version(version: str) -> None:
    """Look at the version of a model that is asked for: there is one at a time.

    Raises:
        NotFound: it is another.
    """
    if version not in ("", VERSION):
        raise NotFound(f"model_version: expected {VERSION!r} or none, got {describe_value(version)}")


def _id(given: bytes) -> str:
    if len(given) > limits.MAX_ID_BYTES:
        raise InvalidArgument(f"id: expected at most {limits.MAX_ID_BYTES} bytes, got {len(given)}")
    try:
        return given.decode()
    except UnicodeDecodeError:
        raise InvalidArgument("id: expected UTF-8") from None


def _described(tensors: Sequence[Any]) -> Sequence[Input]:
    _check_count("inputs", tensors)
    inputs: dict[str, Input] = {}
    left = arrays.MOST_VALUES
    for index, tensor in enumerate(tensors):
        name = _name(f"inputs[{index}].name", tensor.name)
        if name in inputs:
            raise InvalidArgument(f"inputs[{index}].name: {label(name)} is there already")
        datatype = arrays.checked_datatype(name, tensor.datatype)
        shape = arrays.checked_shape(name, tuple(tensor.shape[: limits.MAX_RANK + 1]))
        given = parameters.values(f"{label(name)}: parameters", tensor.parameters)
        region = given if parameters.REGION in given else None
        values = None
        if tensor.HasField("contents"):
            values = _typed(name, datatype, shape, tensor.contents, left)
            left -= values.size
        if values is not None and region is not None:
            raise InvalidArgument(f"{label(name)}: contents: expected none, as it is in a region")
        inputs[name] = Input(name, datatype, shape, values, region)
    return tuple(inputs.values())


def _inputs(form: Form, contents: Sequence[memoryview], call: Call, memory: Memory) -> dict[str, Array]:
    inputs: dict[str, Array] = {}
    taken = 0
    for each in form.inputs:
        if each.region is not None:
            inputs[each.name] = _shared(each, parameters.place_of(each.region, call, memory.regions), call, memory)
        elif each.values is not None:
            if contents:
                raise InvalidArgument(f"{label(each.name)}: contents: expected none beside raw_input_contents")
            # A byte of the message may be a value of eight.
            call.seat.take(each.values.nbytes)
            inputs[each.name] = each.values
        elif taken < len(contents):
            inputs[each.name] = arrays.from_bytes(each.name, each.datatype, each.shape, contents[taken])
            taken += 1
        elif contents:
            raise InvalidArgument(f"raw_input_contents: expected one for {label(each.name)}, too")
        else:
            # One without elements is said so.
            inputs[each.name] = _typed(each.name, each.datatype, each.shape, _NOTHING, 0)
    if taken != len(contents):
        raise InvalidArgument(f"raw_input_contents: expected {taken}, one for each input that is not in a region")
    return inputs


def _shared(each: Input, place: Place, call: Call, memory: Memory) -> Array:
    """Return a tensor that is in shared memory: a copy, that nobody else changes."""
    name, datatype, shape, _, _ = each
    expected = arrays.size_of(name, datatype, shape)
    if place.nbytes != expected:
        raise InvalidArgument(
            f"{label(name)}: shared_memory_byte_size: expected {expected} for {datatype} {[*shape]}, got {place.nbytes}"
        )
    call.seat.take(expected)
    content = memoryview(memory.room(call.caller, expected) if expected else b"")
    place.region.read(place.offset, content)
    return arrays.from_bytes(name, datatype, shape, content)


def _typed(name: str, datatype: str, shape: Sequence[int], contents: Any, most: int) -> Array:
    """Return the tensor whose values are in the field for its datatype, and in no other one; so many at most."""
    expected = _CONTENTS.get(datatype)
    if expected is None:
        raise InvalidArgument(f"{label(name)}: {datatype} has no form but its bytes, in raw_input_contents")
    for field, _ in contents.ListFields():
        if field.name != expected:
            raise InvalidArgument(f"{label(name)}: contents: expected {expected} for {datatype}, got {field.name}")
    return arrays.from_typed(name, datatype, shape, getattr(contents, expected), _WIDE[expected], most)


def _outputs(wanted: Sequence[Any]) -> tuple[tuple[str, ...] | None, Mapping[str, Mapping[str, Any]]]:
    if not wanted:
        return None, {}
    _check_count("outputs", wanted)
    names: list[str] = []
    regions: dict[str, Mapping[str, Any]] = {}
    for index, output in enumerate(wanted):
        name = _name(f"outputs[{index}].name", output.name)
        if name in names:
            raise InvalidArgument(f"outputs[{index}].name: {label(name)} is there already")
        given = parameters.values(f"{label(name)}: parameters", output.parameters)
        if given.get("classification"):
            raise InvalidArgument(f"{label(name)}: weightd has no classification of outputs")
        if parameters.REGION in given:
            regions[name] = given
        names.append(name)
    return tuple(names), regions


def _check_count(field: str, tensors: Sequence[Any]) -> None:
    if len(tensors) > limits.MAX_TENSORS:
        raise InvalidArgument(f"{field}: expected at most {limits.MAX_TENSORS}, got {len(tensors)}")


def _name(field: str, name: str) -> str:
    size = len(name.encode())
    if not 0 < size <= limits.MAX_NAME_BYTES:
        raise InvalidArgument(f"{field}: expected 1 to {limits.MAX_NAME_BYTES} bytes, got {size}")
    return name
