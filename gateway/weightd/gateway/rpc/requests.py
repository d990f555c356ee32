"""A `ModelInferRequest`, as the question that it asks; what is not exactly what it says is refused by its field."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weightd.gateway import arrays
from weightd.gateway.arrays import Array
from weightd.gateway.callers import Caller
from weightd.gateway.model_view import VERSION
from weightd.gateway.question import Question
from weightd.gateway.regions import Place, Regions
from weightd.gateway.rpc import parameters
from weightd.gateway.rpc.calls import Call
from weightd.protocol import limits
from weightd.protocol.errors import InvalidArgument, NotFound
from weightd.protocol.schema import got, label

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


class Memory(NamedTuple):
    """Where tensors may be that are not in the message.

    Attributes:
        regions: what callers have registered.
        room: returns an array of so many bytes to read a tensor into.
    """

    regions: Regions
    room: Callable[[Caller, int], Any]


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


def asked(request: Any, call: Call, memory: Memory) -> Asked:
    """Return what a request asks.

    Raises:
        InvalidArgument: it is not what the protocol says; the text names the field.
        NotFound: the version, or a region, is none.
    """
    check_version(request.model_version)
    size = len(request.id.encode())
    if size > limits.MAX_ID_BYTES:
        raise InvalidArgument(f"id: expected at most {limits.MAX_ID_BYTES} bytes, got {size}")
    given = parameters.values(request.parameters)
    parameters.check(given)
    names, targets = _outputs(request.outputs, call, memory.regions)
    question = Question(
        model_of(request.model_name),
        _inputs(request, call, memory),
        names,
        parameters.timeout_of(given, call.left),
        parameters.priority_of(given),
        call.traceparent,
        request.id,
    )
    return Asked(question, targets)


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
        raise NotFound(f"model_version: expected {VERSION!r} or none, got {got(version)}")


def _inputs(request: Any, call: Call, memory: Memory) -> dict[str, Array]:
    tensors, raw = request.inputs, request.raw_input_contents
    _check_count("inputs", tensors)
    inputs: dict[str, Array] = {}
    contents: Iterator[bytes] = iter(raw)
    taken = 0
    for index, tensor in enumerate(tensors):
        name = _name(f"inputs[{index}].name", tensor.name)
        if name in inputs:
            raise InvalidArgument(f"inputs[{index}].name: {label(name)} is there already")
        datatype = arrays.checked_datatype(name, tensor.datatype)
        shape = arrays.checked_shape(name, tuple(tensor.shape))
        given = parameters.values(tensor.parameters) if tensor.parameters else {}
        if (raw or parameters.REGION in given) and tensor.HasField("contents"):
            raise InvalidArgument(
                f"{label(name)}: contents: expected none, as its values are, or others' are, elsewhere"
            )
        if parameters.REGION in given:
            inputs[name] = _shared(
                name, datatype, shape, parameters.place_of(given, call, memory.regions), call, memory
            )
        elif raw:
            inputs[name] = arrays.from_bytes(name, datatype, shape, memoryview(_next(contents, name)))
            taken += 1
        else:
            inputs[name] = _typed(name, datatype, shape, tensor.contents)
    if taken != len(raw):
        raise InvalidArgument(f"raw_input_contents: expected {taken}, one for each input that is not in shared memory")
    return inputs


def _shared(name: str, datatype: str, shape: Sequence[int], place: Place, call: Call, memory: Memory) -> Array:
    """Return a tensor that is in shared memory: a copy, that nobody else changes."""
    expected = arrays.size_of(name, datatype, shape)
    if place.nbytes != expected:
        raise InvalidArgument(
            f"{label(name)}: shared_memory_byte_size: expected {expected} for {datatype} {[*shape]}, got {place.nbytes}"
        )
    call.seat.take(expected)
    content = memoryview(memory.room(call.caller, expected) if expected else b"")
    place.region.read(place.offset, content)
    return arrays.from_bytes(name, datatype, shape, content)


def _next(contents: Iterator[bytes], name: str) -> bytes:
    try:
        return next(contents)
    except StopIteration:
        raise InvalidArgument(f"raw_input_contents: expected one for {label(name)}, too") from None


def _typed(name: str, datatype: str, shape: Sequence[int], contents: Any) -> Array:
    """Return the tensor whose values are in the field for its datatype, and in no other one."""
    expected = _CONTENTS.get(datatype)
    if expected is None:
        raise InvalidArgument(f"{label(name)}: {datatype} has no form but its bytes, in raw_input_contents")
    for field, _ in contents.ListFields():
        if field.name != expected:
            raise InvalidArgument(f"{label(name)}: contents: expected {expected} for {datatype}, got {field.name}")
    return arrays.from_values(name, datatype, shape, list(getattr(contents, expected)))


def _outputs(
    wanted: Sequence[Any], call: Call, regions: Regions
) -> tuple[tuple[str, ...] | None, Mapping[str, Target]]:
    if not wanted:
        return None, {}
    _check_count("outputs", wanted)
    names: list[str] = []
    targets: dict[str, Target] = {}
    for index, output in enumerate(wanted):
        name = _name(f"outputs[{index}].name", output.name)
        if name in names:
            raise InvalidArgument(f"outputs[{index}].name: {label(name)} is there already")
        given = parameters.values(output.parameters)
        if given.get("classification"):
            raise InvalidArgument(f"{label(name)}: weightd has no classification of outputs")
        if parameters.REGION in given:
            targets[name] = Target(given[parameters.REGION], parameters.place_of(given, call, regions))
        names.append(name)
    return tuple(names), targets


def _check_count(field: str, tensors: Sequence[Any]) -> None:
    if len(tensors) > limits.MAX_TENSORS:
        raise InvalidArgument(f"{field}: expected at most {limits.MAX_TENSORS}, got {len(tensors)}")


def _name(field: str, name: str) -> str:
    size = len(name.encode())
    if not 0 < size <= limits.MAX_NAME_BYTES:
        raise InvalidArgument(f"{field}: expected 1 to {limits.MAX_NAME_BYTES} bytes, got {size}")
    return name
