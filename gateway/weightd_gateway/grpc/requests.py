"""A `ModelInferRequest`, as the question that it asks; what is not exactly what it says is refused by its field."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pickle import PickleBuffer
from typing import Any, NamedTuple

from weightd_gateway import tensors
from weightd_gateway.auth import Caller
from weightd_gateway.daemon_client import InferenceRequest
from weightd_gateway.error_codes import TooLarge
from weightd_gateway.grpc.handlers import RpcContext, parse_message
from weightd_gateway.grpc.schema import INFERENCE
from weightd_gateway.grpc.wire_format import check_fields, fast_parse, layout_of
from weightd_gateway.oip_view import VERSION
from weightd_gateway.parser_process import ParserPool
from weightd_gateway.system_shared_memory import RegisteredRegions, ShmSlice
from weightd_gateway.tensors import Array
from weightd_protocol import limits
from weightd_protocol.errors import DeadlineExceeded, InvalidArgument, NotFound
from weightd_protocol.schema import describe_value, label

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
_SOURCE_DTYPES: Mapping[str, str] = {
    "bool_contents": "?",
    "int_contents": "<i4",
    "int64_contents": "<i8",
    "uint_contents": "<u4",
    "uint64_contents": "<u8",
    "fp32_contents": "<f4",
    "fp64_contents": "<f8",
}

REGION, OFFSET, SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"

# Of a request, or of one of its tensors: clients send a few.
MAX_PARAMETERS = 64

# What only makes sense if requests know of each other. 0, false and "" are what clients send who want nothing.
_SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")

_NO_CONTENTS = INFERENCE["InferTensorContents"]()

_Request = INFERENCE["ModelInferRequest"]
_LAYOUT = layout_of(_Request.DESCRIPTOR)

# Of a message but for its raw contents, as of JSON: it takes the loop a while, in which nobody else is served.
MAX_HEADER_BYTES = 16 * 1024 * 1024

# Of one with more fields than requests have: two bytes of it may become a message of a hundred.
MAX_UNUSUAL_BYTES = 1024 * 1024

PARSER_PROCESS_BYTES = 16 * 1024
"""A header that is longer is parsed by the parser process, as JSON is."""

# Of a header that is remembered with what it means: a client sends the same again and again.
_MAX_CACHED_BYTES = 2048
_CACHE_SIZE = 1024


class ShmResolver(NamedTuple):
    """Where tensors may be that are not in the message.

    Attributes:
        regions: what callers have registered.
        allocate: returns an array of so many bytes to read a tensor into.
        parsers: the processes that parse many values.
    """

    regions: RegisteredRegions
    allocate: Callable[[Caller, int], Any]
    parsers: ParserPool


class OutputTarget(NamedTuple):
    """Where an output is to be.

    Attributes:
        region: what the caller calls it.
        shm_slice: the same.
    """

    region: str
    shm_slice: ShmSlice


class InferRequest(NamedTuple):
    """A request.

    Attributes:
        request: what it asks.
        targets: of outputs that are not to be in the answer, by their names.
    """

    request: InferenceRequest
    targets: Mapping[str, OutputTarget]


class InputTensor(NamedTuple):
    """One input, and where it is: `values`, or in a region, or else among the raw contents."""

    name: str
    datatype: str
    shape: Sequence[int]
    values: Array | None
    region: Mapping[str, Any] | None


class ParsedHeader(NamedTuple):
    """What a request says, but for its tensors: the same for many.

    Attributes:
        regions: of outputs that are to be in one: its parameters, by their names.
        contents, id: of a message that was not cut.
    """

    model: str
    inputs: Sequence[InputTensor]
    outputs: tuple[str, ...] | None
    regions: Mapping[str, Mapping[str, Any]]
    timeout: float | None
    priority: int | None
    contents: Sequence[bytes]
    id: str


async def parse_infer_request(message: bytes, call: RpcContext, shm_resolver: ShmResolver) -> InferRequest:
    """Return what the bytes of a request ask.

    Raises:
        InvalidArgument: they are not what the protocol says; the text names the field.
        NotFound: the version, or a region, is none.
        TooLarge: what is no raw content is longer than it may be.
        ResourceExhausted: there is no room for its tensors now.
    """
    if len(message) > PARSER_PROCESS_BYTES:
        # A message that is refused for its fields costs less here than in pieces, and on its way to a parser process.
        parse_message(message, _check_fields)
    header, request_id, contents = fast_parse(message)
    _check_header(len(header), MAX_UNUSUAL_BYTES if header is message else MAX_HEADER_BYTES)
    if len(header) <= _MAX_CACHED_BYTES:
        form = _parse_cached(header)
    elif len(header) <= PARSER_PROCESS_BYTES:
        form = _parse_header(header)
    else:
        # The copy on its way.
        call.permit.reserve(len(header))
        form = await shm_resolver.parsers.run(call.caller, len(header), _parse_header, PickleBuffer(header))
    request = InferenceRequest(
        form.model,
        _make_inputs(form, contents or [memoryview(each) for each in form.contents], call, shm_resolver),
        form.outputs,
        earlier_timeout(form.timeout, call.time_left_s),
        form.priority,
        call.traceparent,
        _parse_id(request_id) if request_id else form.id,
    )
    targets = {
        name: OutputTarget(given[REGION], shm_slice_of(given, call, shm_resolver.regions))
        for name, given in form.regions.items()
    }
    return InferRequest(request, targets)


def _check_header(nbytes: int, max_bytes: int) -> None:
    if nbytes > max_bytes:
        text = f"expected at most {max_bytes} bytes beside raw_input_contents, got {nbytes}: send tensors there"
        raise TooLarge(text)


def _check_fields(message: bytes) -> None:
    check_fields(message, _LAYOUT)


def _parse(message: bytes) -> Any:
    _check_fields(message)
    return _Request.FromString(message)


def _parse_header(header: bytes) -> ParsedHeader:
    request = parse_message(header, _parse)
    check_version(request.model_version)
    values = parse_parameters("parameters", request.parameters)
    check_parameters(values)
    outputs, regions = _parse_outputs(request.outputs)
    return ParsedHeader(
        model_of(request.model_name),
        _parse_inputs(request.inputs),
        outputs,
        regions,
        timeout_of(values),
        priority_of(values),
        [*request.raw_input_contents],
        _parse_id(request.id.encode()),
    )


_parse_cached = functools.lru_cache(_CACHE_SIZE)(_parse_header)


def model_of(name: str) -> str:
    """Return the name of a model.

    Raises:
        InvalidArgument: it is none.
    """
    return _check_name("model_name", name)


def check_version(version: str) -> None:
    """Look at the version of a model that is asked for: there is one at a time.

    Raises:
        NotFound: it is another.
    """
    if version not in ("", VERSION):
        raise NotFound(f"model_version: expected {VERSION!r} or none, got {describe_value(version)}")


def _parse_id(content: bytes) -> str:
    if len(content) > limits.MAX_ID_BYTES:
        raise InvalidArgument(f"id: expected at most {limits.MAX_ID_BYTES} bytes, got {len(content)}")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise InvalidArgument("id: expected UTF-8") from None


def _parse_inputs(input_messages: Sequence[Any]) -> Sequence[InputTensor]:
    _check_count("inputs", input_messages)
    inputs: dict[str, InputTensor] = {}
    values_left = tensors.MAX_VALUES
    for index, tensor in enumerate(input_messages):
        name = _check_name(f"inputs[{index}].name", tensor.name)
        if name in inputs:
            raise InvalidArgument(f"inputs[{index}].name: {label(name)} is there already")
        datatype = tensors.check_datatype(name, tensor.datatype)
        shape = tensors.check_shape(name, tuple(tensor.shape[: limits.MAX_RANK + 1]))
        given = parse_parameters(f"{label(name)}: parameters", tensor.parameters)
        region = given if REGION in given else None
        values = None
        if tensor.HasField("contents"):
            values = _parse_typed(name, datatype, shape, tensor.contents, values_left)
            values_left -= values.size
        if values is not None and region is not None:
            raise InvalidArgument(f"{label(name)}: contents: expected none, as it is in a region")
        inputs[name] = InputTensor(name, datatype, shape, values, region)
    return tuple(inputs.values())


def _make_inputs(
    template: ParsedHeader, contents: Sequence[memoryview], call: RpcContext, shm_resolver: ShmResolver
) -> dict[str, Array]:
    inputs: dict[str, Array] = {}
    used_contents = 0
    for each in template.inputs:
        if each.region is not None:
            inputs[each.name] = _read_shared(
                each, shm_slice_of(each.region, call, shm_resolver.regions), call, shm_resolver
            )
        elif each.values is not None:
            if contents:
                raise InvalidArgument(f"{label(each.name)}: contents: expected none beside raw_input_contents")
            # A byte of the message may be a value of eight.
            call.permit.reserve(each.values.nbytes)
            inputs[each.name] = each.values
        elif used_contents < len(contents):
            inputs[each.name] = tensors.from_bytes(each.name, each.datatype, each.shape, contents[used_contents])
            used_contents += 1
        elif contents:
            raise InvalidArgument(f"raw_input_contents: expected one for {label(each.name)}, too")
        else:
            # One without elements is said so.
            inputs[each.name] = _parse_typed(each.name, each.datatype, each.shape, _NO_CONTENTS, 0)
    if used_contents != len(contents):
        raise InvalidArgument(
            f"raw_input_contents: expected {used_contents}, one for each input that is not in a region"
        )
    return inputs


def _read_shared(input_tensor: InputTensor, shm_slice: ShmSlice, call: RpcContext, shm_resolver: ShmResolver) -> Array:
    """Return a tensor that is in shared memory: a copy, that nobody else changes."""
    name, datatype, shape, _, _ = input_tensor
    expected = tensors.nbytes_of(name, datatype, shape)
    if shm_slice.nbytes != expected:
        raise InvalidArgument(
            f"{label(name)}: shared_memory_byte_size: expected {expected} for {datatype} {[*shape]}, got"
            f" {shm_slice.nbytes}"
        )
    call.permit.reserve(expected)
    content = memoryview(shm_resolver.allocate(call.caller, expected) if expected else b"")
    shm_slice.region.read(shm_slice.offset, content)
    return tensors.from_bytes(name, datatype, shape, content)


def _parse_typed(name: str, datatype: str, shape: Sequence[int], contents: Any, max_values: int) -> Array:
    """Return the tensor whose values are in the field for its datatype, and in no other one; so many at most."""
    expected = _CONTENTS.get(datatype)
    if expected is None:
        raise InvalidArgument(f"{label(name)}: {datatype} has no form but its bytes, in raw_input_contents")
    for field, _ in contents.ListFields():
        if field.name != expected:
            raise InvalidArgument(f"{label(name)}: contents: expected {expected} for {datatype}, got {field.name}")
    return tensors.from_typed(name, datatype, shape, getattr(contents, expected), _SOURCE_DTYPES[expected], max_values)


def _parse_outputs(output_messages: Sequence[Any]) -> tuple[tuple[str, ...] | None, Mapping[str, Mapping[str, Any]]]:
    if not output_messages:
        return None, {}
    _check_count("outputs", output_messages)
    names: list[str] = []
    regions: dict[str, Mapping[str, Any]] = {}
    for index, output in enumerate(output_messages):
        name = _check_name(f"outputs[{index}].name", output.name)
        if name in names:
            raise InvalidArgument(f"outputs[{index}].name: {label(name)} is there already")
        given = parse_parameters(f"{label(name)}: parameters", output.parameters)
        if given.get("classification"):
            raise InvalidArgument(f"{label(name)}: weightd has no classification of outputs")
        if REGION in given:
            regions[name] = given
        names.append(name)
    return tuple(names), regions


def _check_count(field: str, messages: Sequence[Any]) -> None:
    if len(messages) > limits.MAX_TENSORS:
        raise InvalidArgument(f"{field}: expected at most {limits.MAX_TENSORS}, got {len(messages)}")


def _check_name(field: str, name: str) -> str:
    size = len(name.encode())
    if not 0 < size <= limits.MAX_NAME_BYTES:
        raise InvalidArgument(f"{field}: expected 1 to {limits.MAX_NAME_BYTES} bytes, got {size}")
    return name


# --- parameters: what a request says beside its tensors ---------------------------------------------------------------


def parse_parameters(field: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each `InferParameter` in a field; None of one that has none.

    Raises:
        TooLarge: they are too many.
    """
    if len(parameters) > MAX_PARAMETERS:
        raise TooLarge(f"{field}: expected at most {MAX_PARAMETERS}, got {len(parameters)}")
    found: dict[str, Any] = {}
    for name, each in parameters.items():
        kind = each.WhichOneof("parameter_choice")
        found[name] = None if kind is None else getattr(each, kind)
    return found


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Look at the parameters of a request: those that nobody knows are let pass.

    Raises:
        InvalidArgument: one asks for what is not in weightd.
    """
    for name in _SEQUENCE_PARAMETERS:
        if parameters.get(name):
            raise InvalidArgument(f"parameters.{name}: weightd has no sequences of requests")


def timeout_of(parameters: Mapping[str, Any]) -> float | None:
    """Return the seconds that a request says it may take; None: it does not.

    Raises:
        InvalidArgument: it says something else.
    """
    timeout_us = parameters.get("timeout", 0)
    if type(timeout_us) is not int or not 0 <= timeout_us <= limits.MAX_TIMEOUT_US:
        raise InvalidArgument(
            f"parameters.timeout: expected integer, 0 to {limits.MAX_TIMEOUT_US}, in microseconds, got"
            f" {describe_value(timeout_us)}"
        )
    return timeout_us / 1e6 if timeout_us else None


def earlier_timeout(requested_s: float | None, time_left_s: float | None) -> float | None:
    """Return the seconds that a request may take, by what it says and by its call; None: as many as it takes.

    Raises:
        DeadlineExceeded: its call has none left.
    """
    if time_left_s is None:
        return requested_s
    if time_left_s <= 0.0:
        raise DeadlineExceeded("the deadline of the call has passed")
    return min(time_left_s, limits.MAX_TIMEOUT_US / 1e6 if requested_s is None else requested_s)


def priority_of(parameters: Mapping[str, Any]) -> int | None:
    """Return the priority of a request; None: the model's default.

    Raises:
        InvalidArgument: it is none.
    """
    priority = parameters.get("priority", 0)
    if type(priority) is not int or not 0 <= priority <= limits.MAX_PRIORITY:
        raise InvalidArgument(
            f"parameters.priority: expected integer, 0 to {limits.MAX_PRIORITY}, got {describe_value(priority)}"
        )
    return priority or None


def shm_slice_of(parameters: Mapping[str, Any], call: RpcContext, regions: RegisteredRegions) -> ShmSlice:
    """Return where a tensor is, by its parameters.

    Raises:
        InvalidArgument: the caller may have none there, or it is not within the region.
        NotFound: the caller has no such region.
    """
    check_local(call)
    return regions.resolve(call.caller, parameters[REGION], parameters.get(OFFSET, 0), parameters.get(SIZE))


def check_local(call: RpcContext) -> None:
    """Look at where a caller is who speaks of shared memory.

    Raises:
        InvalidArgument: not on this host.
    """
    if not call.is_local:
        raise InvalidArgument("shared memory is for callers on the host of the gateway")
