"""Parses the JSON of inference requests, and splits the binary data after the JSON. No I/O."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard, cast

import numpy as np

from weightd_gateway import tensors as arrays
from weightd_gateway.error_codes import TooLarge
from weightd_protocol import limits
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.model_names import join_version, split_version
from weightd_protocol.schema import describe_value, label

# Maximum bytes of the JSON of a request. The limit of values does not suffice, because a value may have many digits.
MAX_JSON_BYTES = 16 * 1024 * 1024

# Maximum number of keys in all JSON objects of a request. A request needs a few keys for each tensor; keys take more
# time to parse than values.
MAX_KEYS = 16 * 1024

# Maximum bytes of JSON whose parsed form is cached, because clients send the same JSON repeatedly.
_MAX_CACHED_BYTES = 2048

_FIELDS = frozenset({"id", "parameters", "inputs", "outputs", "model_name", "model_version"})

# Parameters of stateful sequences of requests, which weightd does not support.
_SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")

_REGION_PARAMETER = "shared_memory_region"


@dataclass(frozen=True)
class InputJson:
    """An input whose data are `values`, or `nbytes` of the request's binary data, or in shared memory (`region`)."""

    name: str
    datatype: str
    shape: Sequence[int]
    expected_bytes: int
    values: object = None
    nbytes: int | None = None
    region: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class OutputJson:
    """A requested output, whose data are sent as binary data, in shared memory (`region`) or otherwise in JSON."""

    name: str
    is_binary: bool = False
    region: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class InferRequestJson:
    """The parsed JSON of a request.

    Attributes:
        model: the daemon's name of the model in the path, with the version in the path or in the JSON.
        outputs: the requested outputs; None: all outputs, as binary data if `is_binary`, otherwise as JSON.
    """

    inputs: Sequence[InputJson]
    outputs: Sequence[OutputJson] | None
    is_binary: bool
    id: str = ""
    timeout: float | None = None
    priority: int | None = None
    model: str = ""

    @functools.cached_property
    def without_inputs(self) -> InferRequestJson:
        """The request without the inputs' lists of values, which are many times larger than arrays."""
        return dataclasses.replace(self, inputs=())

    @functools.cached_property
    def output_names(self) -> Sequence[str] | None:
        """The names of the requested outputs; None: all outputs."""
        return None if self.outputs is None else [each.name for each in self.outputs]


def read(header: memoryview, model: str) -> InferRequestJson:
    """Parse the JSON of a request.

    Raises:
        InvalidArgument: a field is invalid; the text names it.
        TooLarge: the JSON exceeds a limit.
    """
    if len(header) <= _MAX_CACHED_BYTES:
        return _read_cached(bytes(header), model)
    if len(header) > MAX_JSON_BYTES:
        raise TooLarge(
            f"expected at most {MAX_JSON_BYTES} bytes of JSON, got {len(header)}; send tensors as binary data"
        )
    text = bytes(header)
    # An upper limit of the number of values: each value follows a comma or the beginning of a list or object.
    if sum(map(text.count, (b",", b"[", b"{"))) > arrays.MAX_VALUES:
        raise TooLarge(f"expected at most {arrays.MAX_VALUES} values in JSON; send tensors as binary data")
    if text.count(b":") > MAX_KEYS:
        raise TooLarge(f"expected at most {MAX_KEYS} keys in JSON")
    # Parsing creates up to a million lists, which would trigger many garbage collections. They would find nothing,
    # because JSON contains no cycles.
    gc.disable()
    try:
        return _read(text, model)
    finally:
        gc.enable()


def read_values(header: bytes, model: str) -> InferRequestJson:
    """Parse the JSON of a request, and convert the inputs' lists of values to arrays.

    Raises:
        InvalidArgument: as in `read` and `arrays.from_values`.
        TooLarge: as in `read`.
    """
    form = read(memoryview(header), model)
    return dataclasses.replace(form, inputs=[_with_array(each) for each in form.inputs])


def _with_array(input_json: InputJson) -> InputJson:
    return (
        input_json
        if input_json.nbytes is not None or input_json.region is not None
        else dataclasses.replace(input_json, values=array_of(input_json))
    )


def array_of(input_json: InputJson) -> arrays.Array:
    """Return the tensor of an input with values.

    Raises:
        InvalidArgument: the values do not match the datatype or shape.
    """
    values = input_json.values
    if _is_array(values):
        return values
    return arrays.from_values(input_json.name, input_json.datatype, input_json.shape, values)


def _is_array(values: object) -> TypeGuard[arrays.Array]:
    return isinstance(values, np.ndarray)


def _read(header: bytes, model: str) -> InferRequestJson:
    return _parse_request(parse_map(header), model)


_read_cached = functools.lru_cache(maxsize=1024)(_read)


def parse_map(text: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        InvalidArgument: the text is not a JSON object.
    """
    try:
        content = json.loads(text.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"expected a JSON object: {error}") from None
    return _check_map("", content)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON cannot represent {name}; send the tensor as binary data")


def _parse_request(json_map: Mapping[str, Any], model: str) -> InferRequestJson:
    content = _without_nulls(json_map)
    unknown = content.keys() - _FIELDS
    if unknown:
        raise InvalidArgument(f"{label(min(unknown))}: unknown field; expected one of {', '.join(sorted(_FIELDS))}")
    name, version = split_version(model)
    for field, expected in (("model_name", name), ("model_version", version)):
        given = content.get(field, "")
        if type(given) is not str or (expected and given not in (expected, "")):
            wanted = f"{expected!r}, as in the path" if expected else "text"
            raise InvalidArgument(f"{field}: expected {wanted}, got {describe_value(given)}")
    parameters = _without_nulls(_check_map("parameters", content.get("parameters", {})))
    for key in _SEQUENCE_PARAMETERS:
        if parameters.get(key):
            raise InvalidArgument(f"parameters.{key}: sequences of requests are not supported")
    is_binary = _check_boolean("parameters.binary_data_output", parameters.get("binary_data_output", False))
    request_id = content.get("id", "")
    if type(request_id) is not str or len(request_id.encode("utf-8", "surrogatepass")) > limits.MAX_ID_BYTES:
        raise InvalidArgument(
            f"id: expected text of at most {limits.MAX_ID_BYTES} bytes, got {describe_value(request_id)}"
        )
    requested = content.get("outputs")
    return InferRequestJson(
        _parse_inputs(content.get("inputs")),
        None if requested is None or requested == [] else _parse_outputs(requested, is_binary_default=is_binary),
        is_binary,
        request_id,
        _parse_timeout(parameters.get("timeout", 0)),
        _parse_priority(parameters.get("priority", 0)),
        join_version(name, version or content.get("model_version", "")),
    )


def _without_nulls(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the map without null values, which many clients send for fields that are not set."""
    return {name: value for name, value in content.items() if value is not None}


def _parse_timeout(microseconds: object) -> float | None:
    if type(microseconds) is not int or not 0 <= microseconds <= limits.MAX_TIMEOUT_US:
        expected = f"expected integer, 0 to {limits.MAX_TIMEOUT_US}, in microseconds"
        raise InvalidArgument(f"parameters.timeout: {expected}, got {describe_value(microseconds)}")
    return microseconds / 1e6 if microseconds else None


def _parse_priority(priority: object) -> int | None:
    if type(priority) is not int or not 0 <= priority <= limits.MAX_PRIORITY:
        raise InvalidArgument(
            f"parameters.priority: expected integer, 0 to {limits.MAX_PRIORITY}, got {describe_value(priority)}"
        )
    return priority or None


def _parse_inputs(content: object) -> list[InputJson]:
    inputs = [_parse_input(each) for each in _check_tensor_maps("inputs", content)]
    if len({each.name for each in inputs}) < len(inputs):
        raise InvalidArgument("inputs: expected each name once")
    return inputs


def _parse_input(content: Mapping[str, Any]) -> InputJson:
    name = _check_name("inputs", content.get("name"))
    datatype = arrays.check_datatype(name, content.get("datatype"))
    shape = arrays.check_shape(name, content.get("shape"))
    expected_bytes = arrays.nbytes_of(name, datatype, shape)
    parameters = _without_nulls(_check_map(f"{label(name)}: parameters", content.get("parameters", {})))
    nbytes = parameters.get("binary_data_size")
    region = parameters if _REGION_PARAMETER in parameters else None
    sources = (
        ("data", "data" in content),
        ("binary_data_size", nbytes is not None),
        (_REGION_PARAMETER, region is not None),
    )
    present = [way for way, is_there in sources if is_there]
    if len(present) != 1:
        expected = "expected either data, or the parameter binary_data_size or shared_memory_region"
        raise InvalidArgument(f"{label(name)}: {expected}, got {' and '.join(present) or 'none of them'}")
    if nbytes is not None and (type(nbytes) is not int or nbytes != expected_bytes):
        raise InvalidArgument(
            f"{label(name)}: binary_data_size: expected {expected_bytes}, for {datatype} {list(shape)}, got"
            f" {describe_value(nbytes)}"
        )
    return InputJson(name, datatype, shape, expected_bytes, content.get("data"), nbytes, region)


def _parse_outputs(content: object, *, is_binary_default: bool) -> list[OutputJson]:
    outputs: list[OutputJson] = []
    for each in _check_tensor_maps("outputs", content):
        name = _check_name("outputs", each.get("name"))
        parameters = _without_nulls(_check_map(f"{label(name)}: parameters", each.get("parameters", {})))
        if parameters.get("classification"):
            raise InvalidArgument(f"{label(name)}: classification of outputs is not supported")
        is_binary = _check_boolean(f"{label(name)}: binary_data", parameters.get("binary_data", is_binary_default))
        outputs.append(OutputJson(name, is_binary, parameters if _REGION_PARAMETER in parameters else None))
    if len({each.name for each in outputs}) < len(outputs):
        raise InvalidArgument("outputs: expected each name once")
    return outputs


def _check_tensor_maps(what: str, content: object) -> list[Mapping[str, Any]]:
    tensors = _as_list(content)
    if tensors is None or len(tensors) > limits.MAX_TENSORS:
        raise InvalidArgument(
            f"{what}: expected a list of at most {limits.MAX_TENSORS} tensors, got {describe_value(content)}"
        )
    return [_without_nulls(_check_map(f"{what}[{index}]", each)) for index, each in enumerate(tensors)]


def _as_list(content: object) -> list[object] | None:
    return cast("list[object]", content) if isinstance(content, list) else None


def _check_map(what: str, content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise InvalidArgument(f"{what}{': ' if what else ''}expected an object, got {describe_value(content)}")
    return cast("dict[str, Any]", content)


def _check_name(what: str, name: object) -> str:
    if type(name) is not str or not name:
        raise InvalidArgument(f"{what}: expected a name, got {describe_value(name)}")
    return name


def _check_boolean(what: str, value: object) -> bool:
    if type(value) is not bool:
        raise InvalidArgument(f"{what}: expected a boolean, got {describe_value(value)}")
    return value


def split_binary(form: InferRequestJson, content: memoryview) -> dict[str, memoryview]:
    """Return the binary data of each input that has binary data.

    Raises:
        InvalidArgument: the length of the data differs from the sum of the announced sizes.
    """
    parts: dict[str, memoryview] = {}
    begin = 0
    for each in form.inputs:
        if each.nbytes is not None:
            parts[each.name] = content[begin : begin + each.nbytes]
            begin += each.nbytes
    if begin != len(content):
        raise InvalidArgument(f"binary data: expected {begin} bytes after the JSON, got {len(content)}")
    return parts
