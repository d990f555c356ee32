"""Parses and validates `ModelInferRequest` messages; errors name the invalid field."""

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
from weightd_gateway.parser_process import ParserPool
from weightd_gateway.system_shared_memory import RegisteredRegions, ShmSlice
from weightd_gateway.tensors import Array
from weightd_protocol import limits
from weightd_protocol.errors import DeadlineExceeded, InvalidArgument
from weightd_protocol.model_names import join_version
from weightd_protocol.schema import describe_value, label

# For each datatype, the field of `InferTensorContents` that holds the values of a tensor in typed form.
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

# For each field of `InferTensorContents`, numpy's data type of the values.
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

# Maximum number of parameters of a request or tensor. Clients send only a few.
MAX_PARAMETERS = 64

# Parameters of stateful sequences of requests, which weightd does not support. Clients that use no sequences may send
# the values 0, false and "".
_SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")

_NO_CONTENTS = INFERENCE["InferTensorContents"]()

_Request = INFERENCE["ModelInferRequest"]
_LAYOUT = layout_of(_Request.DESCRIPTOR)

# Maximum bytes of a message's header, which is the message without its raw contents. The limit is the same as for JSON.
MAX_HEADER_BYTES = 16 * 1024 * 1024

# Maximum bytes of a message that `fast_parse` cannot split: two bytes of such a message may become an object of a
# hundred bytes.
MAX_UNUSUAL_BYTES = 1024 * 1024

PARSER_PROCESS_BYTES = 16 * 1024
"""Headers with more bytes are parsed in a parser process, because parsing them would block the event loop."""

# Maximum bytes of a header whose parsed form is cached, because clients send the same header repeatedly.
_MAX_CACHED_BYTES = 2048
_CACHE_SIZE = 1024


class ShmResolver(NamedTuple):
    """Objects that parsing a request needs: access to tensors in shared memory, and the parser processes.

    Attributes:
        regions: the regions that callers have registered.
        allocate: returns an array of the given number of bytes for a tensor.
        parsers: the processes that parse long headers.
    """

    regions: RegisteredRegions
    allocate: Callable[[Caller, int], Any]
    parsers: ParserPool


class OutputTarget(NamedTuple):
    """The location in shared memory to which an output will be written.

    Attributes:
        region: the caller's name of the region.
        shm_slice: the part of the region that receives the output.
    """

    region: str
    shm_slice: ShmSlice


class InferRequest(NamedTuple):
    """A parsed request.

    Attributes:
        request: the inference request for the daemon.
        targets: the locations of outputs in shared memory, by output name.
    """

    request: InferenceRequest
    targets: Mapping[str, OutputTarget]


class InputTensor(NamedTuple):
    """An input whose data are `values`, or in shared memory (`region`), or otherwise in the raw contents."""

    name: str
    datatype: str
    shape: Sequence[int]
    values: Array | None
    region: Mapping[str, Any] | None


class ParsedHeader(NamedTuple):
    """The parsed header of a message: the message without its raw contents. Many requests have the same header.

    Attributes:
        regions: by output name, the parameters of each output that will be written to shared memory.
        contents, id: set only if `fast_parse` did not split the message.
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
    """Parse the bytes of a request.

    Raises:
        InvalidArgument: a field is invalid; the text names it.
        NotFound: the version or a region does not exist.
        TooLarge: the message without its raw contents is too long.
        ResourceExhausted: other requests have reserved too many bytes at the moment.
    """
    if len(message) > PARSER_PROCESS_BYTES:
        # Reject an invalid message before it is split and sent to a parser process, which would cost more time.
        parse_message(message, _check_fields)
    header, request_id, contents = fast_parse(message)
    _check_header(len(header), MAX_UNUSUAL_BYTES if header is message else MAX_HEADER_BYTES)
    if len(header) <= _MAX_CACHED_BYTES:
        form = _parse_cached(header)
    elif len(header) <= PARSER_PROCESS_BYTES:
        form = _parse_header(header)
    else:
        # The permit also covers the copy of the header that the parser process receives.
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
        text = f"expected at most {max_bytes} bytes in addition to raw_input_contents, got {nbytes}; send tensors there"
        raise TooLarge(text)


def _check_fields(message: bytes) -> None:
    check_fields(message, _LAYOUT)


def _parse(message: bytes) -> Any:
    _check_fields(message)
    return _Request.FromString(message)


def _parse_header(header: bytes) -> ParsedHeader:
    request = parse_message(header, _parse)
    values = parse_parameters("parameters", request.parameters)
    check_parameters(values)
    outputs, regions = _parse_outputs(request.outputs)
    return ParsedHeader(
        model_of(request.model_name, request.model_version),
        _parse_inputs(request.inputs),
        outputs,
        regions,
        timeout_of(values),
        priority_of(values),
        [*request.raw_input_contents],
        _parse_id(request.id.encode()),
    )


_parse_cached = functools.lru_cache(_CACHE_SIZE)(_parse_header)


def model_of(name: str, version: str = "") -> str:
    """Return the name by which the daemon knows the requested model or, if the request has a version, this version.

    Raises:
        InvalidArgument: the name is empty or too long.
    """
    return _check_name("model_name", join_version(name, version) if name else name)


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
            raise InvalidArgument(f"inputs[{index}].name: duplicate name {label(name)}")
        datatype = tensors.check_datatype(name, tensor.datatype)
        shape = tensors.check_shape(name, tuple(tensor.shape[: limits.MAX_RANK + 1]))
        given = parse_parameters(f"{label(name)}: parameters", tensor.parameters)
        region = given if REGION in given else None
        values = None
        if tensor.HasField("contents"):
            values = _parse_typed(name, datatype, shape, tensor.contents, values_left)
            values_left -= values.size
        if values is not None and region is not None:
            raise InvalidArgument(f"{label(name)}: contents: expected none for a tensor in shared memory")
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
                raise InvalidArgument(f"{label(each.name)}: contents: expected none together with raw_input_contents")
            # The array may be larger than the values in the message, where a small integer takes only one byte.
            call.permit.reserve(each.values.nbytes)
            inputs[each.name] = each.values
        elif used_contents < len(contents):
            inputs[each.name] = tensors.from_bytes(each.name, each.datatype, each.shape, contents[used_contents])
            used_contents += 1
        elif contents:
            raise InvalidArgument(f"raw_input_contents: missing for {label(each.name)}")
        else:
            # An input without any data is valid only if its shape has no elements.
            inputs[each.name] = _parse_typed(each.name, each.datatype, each.shape, _NO_CONTENTS, 0)
    if used_contents != len(contents):
        raise InvalidArgument(
            f"raw_input_contents: expected {used_contents}, one for each input that is not in shared memory"
        )
    return inputs


def _read_shared(input_tensor: InputTensor, shm_slice: ShmSlice, call: RpcContext, shm_resolver: ShmResolver) -> Array:
    """Return a copy of a tensor in shared memory, so that clients cannot change it during the request."""
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
    """Return the tensor of an input with typed contents: at most `max_values` values, all in the datatype's field."""
    expected = _CONTENTS.get(datatype)
    if expected is None:
        raise InvalidArgument(f"{label(name)}: {datatype} can be sent only in raw_input_contents")
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
            raise InvalidArgument(f"outputs[{index}].name: duplicate name {label(name)}")
        given = parse_parameters(f"{label(name)}: parameters", output.parameters)
        if given.get("classification"):
            raise InvalidArgument(f"{label(name)}: classification of outputs is not supported")
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


# --- parameters: options of a request or tensor --------------------------------------------------------------


def parse_parameters(field: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `InferParameter` messages by name; None for a parameter without a value.

    Raises:
        TooLarge: there are too many parameters.
    """
    if len(parameters) > MAX_PARAMETERS:
        raise TooLarge(f"{field}: expected at most {MAX_PARAMETERS}, got {len(parameters)}")
    found: dict[str, Any] = {}
    for name, each in parameters.items():
        kind = each.WhichOneof("parameter_choice")
        found[name] = None if kind is None else getattr(each, kind)
    return found


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Check the parameters of a request; unknown parameters are ignored.

    Raises:
        InvalidArgument: a parameter requests a feature that weightd does not have.
    """
    for name in _SEQUENCE_PARAMETERS:
        if parameters.get(name):
            raise InvalidArgument(f"parameters.{name}: sequences of requests are not supported")


def timeout_of(parameters: Mapping[str, Any]) -> float | None:
    """Return the timeout parameter in seconds; None if it is not set.

    Raises:
        InvalidArgument: the value is invalid.
    """
    timeout_us = parameters.get("timeout", 0)
    if type(timeout_us) is not int or not 0 <= timeout_us <= limits.MAX_TIMEOUT_US:
        raise InvalidArgument(
            f"parameters.timeout: expected integer, 0 to {limits.MAX_TIMEOUT_US}, in microseconds, got"
            f" {describe_value(timeout_us)}"
        )
    return timeout_us / 1e6 if timeout_us else None


def earlier_timeout(requested_s: float | None, time_left_s: float | None) -> float | None:
    """Return the seconds until the requested timeout or the call's deadline, whichever is earlier; None without both.

    Raises:
        DeadlineExceeded: the deadline has passed.
    """
    if time_left_s is None:
        return requested_s
    if time_left_s <= 0.0:
        raise DeadlineExceeded("the deadline of the call has passed")
    return min(time_left_s, limits.MAX_TIMEOUT_US / 1e6 if requested_s is None else requested_s)


def priority_of(parameters: Mapping[str, Any]) -> int | None:
    """Return the priority parameter; None for the model's default.

    Raises:
        InvalidArgument: the value is invalid.
    """
    priority = parameters.get("priority", 0)
    if type(priority) is not int or not 0 <= priority <= limits.MAX_PRIORITY:
        raise InvalidArgument(
            f"parameters.priority: expected integer, 0 to {limits.MAX_PRIORITY}, got {describe_value(priority)}"
        )
    return priority or None


def shm_slice_of(parameters: Mapping[str, Any], call: RpcContext, regions: RegisteredRegions) -> ShmSlice:
    """Return the location of a tensor in shared memory that the tensor's parameters describe.

    Raises:
        InvalidArgument: the caller is not on this host, or the tensor extends beyond the region.
        NotFound: the caller has no region of that name.
    """
    check_local(call)
    return regions.resolve(call.caller, parameters[REGION], parameters.get(OFFSET, 0), parameters.get(SIZE))


def check_local(call: RpcContext) -> None:
    """Check that the caller is on this host, as shared memory requires.

    Raises:
        InvalidArgument: the caller is on another host.
    """
    if not call.is_local:
        raise InvalidArgument("shared memory requires that the caller is on the gateway's host")
