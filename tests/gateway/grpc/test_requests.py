"""Tests of decoded inference requests: a request is decoded exactly, or its error names the wrong field."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tritonclient.grpc.service_pb2 import ModelInferRequest

from weightd_gateway.auth import Caller
from weightd_gateway.error_codes import TooLarge
from weightd_gateway.fairness import AdmissionControl
from weightd_gateway.grpc import requests
from weightd_gateway.grpc.handlers import RpcContext
from weightd_gateway.grpc.requests import (
    MAX_HEADER_BYTES,
    MAX_PARAMETERS,
    MAX_UNUSUAL_BYTES,
    InferRequest,
    ShmResolver,
    parse_infer_request,
)
from weightd_gateway.grpc.wire_format import MAX_FIELDS
from weightd_gateway.parser_process import ParserPool
from weightd_gateway.system_shared_memory import RegisteredRegions
from weightd_gateway.tensors import DTYPES, MAX_VALUES, datatype_of
from weightd_protocol.errors import DeadlineExceeded, InvalidArgument, NotFound, ResourceExhausted

CALLER = Caller(None, "test")
CALL = RpcContext(CALLER, AdmissionControl(1, 2**40).reserve_response(CALLER, 0))


def room(caller: Caller, nbytes: int) -> Any:
    return np.empty(nbytes, np.uint8)


def decode_request(content: bytes, call: RpcContext = CALL) -> InferRequest:
    """Decode the bytes of a request."""

    async def make() -> InferRequest:
        helpers = ParserPool()
        try:
            return await parse_infer_request(
                content, call, ShmResolver(RegisteredRegions(enabled=False), room, helpers)
            )
        finally:
            await helpers.close()

    return asyncio.run(make())


TYPED = {
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


def request(**fields: Any) -> ModelInferRequest:
    return ModelInferRequest(**{"model_name": "digits", **fields})


def tensor(name: str = "x", datatype: str = "FP32", shape: Any = (1,), **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


def decode_message(message: ModelInferRequest, call: RpcContext = CALL) -> Any:
    """Decode a request that another project's class has encoded."""
    return decode_request(message.SerializeToString(), call).request


DATATYPES = st.sampled_from(sorted(DTYPES))
SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@given(st.data())
def test_raw_tensors_keep_their_bits(data: st.DataObject) -> None:
    dtypes = data.draw(st.lists(DATATYPES, max_size=4))
    inputs = {f"x{i}": data.draw(arrays.arrays(DTYPES[name], SHAPES)) for i, name in enumerate(dtypes)}
    described = [tensor(name, datatype_of(each), each.shape) for name, each in inputs.items()]
    got = decode_message(
        request(inputs=described, raw_input_contents=[each.tobytes() for each in inputs.values()])
    ).inputs
    assert [*got] == [*inputs]
    for name, array in inputs.items():
        assert (got[name].dtype, got[name].shape, got[name].tobytes()) == (array.dtype, array.shape, array.tobytes())


@given(st.data())
def test_typed_tensors_keep_their_values(data: st.DataObject) -> None:
    datatype = data.draw(st.sampled_from(sorted(TYPED)))
    array = data.draw(arrays.arrays(DTYPES[datatype], SHAPES))
    contents = {TYPED[datatype]: array.ravel().tolist()}
    got = decode_message(request(inputs=[tensor("x", datatype, array.shape, contents=contents)])).inputs["x"]
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize(
    "content",
    [
        request(inputs=[tensor("x", "FP32", [1], contents={"int_contents": [0] * MAX_HEADER_BYTES})]),
        request(inputs=[{}] * 600, raw_input_contents=[bytes(MAX_UNUSUAL_BYTES)]),
    ],
    ids=["values", "many fields"],
)
def test_limits_bytes_outside_raw_contents(content: ModelInferRequest) -> None:
    with pytest.raises(TooLarge, match=r"expected at most \d+ bytes in addition to raw_input_contents"):
        decode_message(content)


def test_limits_number_of_values() -> None:
    contents = {"int_contents": [0] * (MAX_VALUES // 2 + 1)}
    inputs = [tensor(name, "INT8", [MAX_VALUES // 2 + 1], contents=contents) for name in ("w", "x")]
    with pytest.raises(TooLarge, match=r"x: data: expected at most \d+ values"):
        decode_message(request(inputs=inputs))


def test_limits_number_of_parameters() -> None:
    many = {str(number): {"int64_param": 1} for number in range(MAX_PARAMETERS + 1)}
    for fields, where in (
        ({"inputs": [tensor("x", "INT8", [1], parameters=many, contents={"int_contents": [0]})]}, "x: parameters"),
        ({"inputs": [tensor("x", "INT8", [1])], "outputs": [{"name": "y", "parameters": many}]}, "y: parameters"),
        ({"inputs": [tensor("x", "INT8", [1])], "parameters": many}, "parameters"),
    ):
        with pytest.raises(TooLarge, match=rf"^{where}: expected at most {MAX_PARAMETERS}, got {MAX_PARAMETERS + 1}"):
            decode_message(request(**fields))


@pytest.mark.parametrize("count", [MAX_FIELDS, 100_000])
def test_limits_number_of_fields_before_parsing(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise AssertionError("the message is parsed")

    monkeypatch.setattr(requests, "_Request", SimpleNamespace(FromString=fail))
    monkeypatch.setattr(ParserPool, "run", fail)
    many: dict[str, Any] = {str(number): {} for number in range(count)}
    with pytest.raises(TooLarge, match=rf"^inputs\.parameters: expected at most {MAX_FIELDS} fields .* or more$"):
        decode_message(request(inputs=[tensor("x", "INT8", [1], parameters=many)]))


def test_reads_only_allowed_number_of_dimensions() -> None:
    with pytest.raises(InvalidArgument, match=r"x: shape: .* got tuple of 17 items"):
        decode_message(request(inputs=[tensor("x", "INT8", [1] * 1000, contents={"int_contents": [0]})]))


def test_counts_memory_of_decoded_values() -> None:
    admission = AdmissionControl(1, 1000)
    content = request(inputs=[tensor("x", "INT64", [200], contents={"int64_contents": [0] * 200})])
    with admission.admit(CALLER) as permit, pytest.raises(ResourceExhausted, match="max_memory_bytes"):
        decode_message(content, CALL._replace(permit=permit))


def test_decodes_outputs_and_parameters() -> None:
    message = request(
        id="42",
        model_version="1",
        outputs=[{"name": "b"}, {"name": "a", "parameters": {"binary_data": {"bool_param": True}}}],
        parameters={
            "timeout": {"int64_param": 2_500_000},
            "priority": {"uint64_param": 3},
            "their own": {"string_param": "?"},
            "sequence_id": {"int64_param": 0},
        },
    )
    got = decode_message(message, CALL._replace(traceparent="00-a-b-01"))
    assert (got.model, got.id, got.outputs) == ("digits@1", "42", ("b", "a"))
    assert (got.timeout, got.priority, got.traceparent) == (2.5, 3, "00-a-b-01")


def test_rejects_call_after_its_deadline() -> None:
    with pytest.raises(DeadlineExceeded):
        decode_message(request(), CALL._replace(time_left_s=0.0))


def test_shared_memory_is_for_local_callers() -> None:
    with pytest.raises(InvalidArgument, match="on the gateway's host"):
        decode_message(request(inputs=[tensor(parameters={"shared_memory_region": {"string_param": "r"}})]), CALL)


@pytest.mark.parametrize(
    ("own", "left", "expected"),
    [
        (0, None, None),
        (None, None, None),
        (None, 4.0, 4.0),
        (2_000_000, 4.0, 2.0),
        (2_000_000, 1.0, 1.0),
        (0, 9e9, 3600.0),
    ],
)
def test_timeout_is_at_most_the_deadline(own: int | None, left: float | None, expected: float | None) -> None:
    given_own = {} if own is None else {"timeout": {"int64_param": own}}
    assert decode_message(request(parameters=given_own), CALL._replace(time_left_s=left)).timeout == expected


RAW_AND_TYPED = [tensor("a"), tensor("b", contents={"fp32_contents": [1.0]})]
BYTE = {"bool_contents": [True]}

REFUSED = {
    "no name": (request(model_name=""), "model_name: expected 1 to 256 bytes, got 0"),
    "mixed": (
        request(inputs=RAW_AND_TYPED, raw_input_contents=[b"\0" * 4, b"\0" * 4]),
        "b: contents: expected none",
    ),
    "fewer raw": (
        request(inputs=[tensor("a"), tensor("b")], raw_input_contents=[b"\0" * 4]),
        "raw_input_contents: missing for b",
    ),
    "more raw": (
        request(inputs=[tensor()], raw_input_contents=[b"\0" * 4, b""]),
        "raw_input_contents: expected 1, one",
    ),
    "raw alone": (request(raw_input_contents=[b""]), "raw_input_contents: expected 0"),
    "short": (request(inputs=[tensor(shape=[2])], raw_input_contents=[b"\0" * 7]), "x: expected 8 bytes for FP32 [2]"),
    "long": (request(inputs=[tensor(shape=[2])], raw_input_contents=[b"\0" * 9]), "x: expected 8 bytes for FP32 [2]"),
    "nothing": (request(inputs=[tensor()]), "x: data: expected 1 values, got 0"),
    "negative": (request(inputs=[tensor(shape=[-1])]), "x: shape: expected integers"),
    "huge": (request(inputs=[tensor(shape=[2**41])]), "x: shape: expected integers"),
    "huge product": (
        request(inputs=[tensor(shape=[2**40] * 16)], raw_input_contents=[b"\0" * 4]),
        "x: shape: expected at most",
    ),
    "ranks": (request(inputs=[tensor(shape=[1] * 17)]), "x: shape: expected a list of at most 16"),
    "bytes": (request(inputs=[tensor(datatype="BYTES", contents={"bytes_contents": [b"a"]})]), "x: datatype: expected"),
    "bf16": (request(inputs=[tensor(datatype="BF16")], raw_input_contents=[b"\0\0"]), "x: datatype: expected one of"),
    "fp16": (request(inputs=[tensor(datatype="FP16")]), "x: FP16 can be sent only in raw_input_contents"),
    "another list": (request(inputs=[tensor(contents=BYTE)]), "x: contents: expected fp32_contents for FP32, got bool"),
    "two lists": (
        request(inputs=[tensor(contents={"fp32_contents": [1.0], "int_contents": [1]})]),
        "x: contents: expected fp32_contents for FP32, got int_contents",
    ),
    "beyond": (
        request(inputs=[tensor(datatype="INT8", contents={"int_contents": [128]})]),
        "x: data: expected values that INT8 can hold",
    ),
    "bool": (request(inputs=[tensor(datatype="BOOL")], raw_input_contents=[b"\2"]), "x: expected 0 or 1"),
    "twice": (
        request(inputs=[tensor(), tensor()], raw_input_contents=[b"\0" * 4] * 2),
        "inputs[1].name: duplicate name x",
    ),
    "unnamed": (request(inputs=[tensor("")]), "inputs[0].name: expected 1 to 256 bytes, got 0"),
    "many": (request(inputs=[tensor(str(i)) for i in range(65)]), "inputs: expected at most 64, got 65"),
    "many outputs": (request(outputs=[{"name": str(i)} for i in range(65)]), "outputs: expected at most 64, got 65"),
    "output twice": (request(outputs=[{"name": "y"}] * 2), "outputs[1].name: duplicate name y"),
    "output unnamed": (request(outputs=[{"name": "y" * 257}]), "outputs[0].name: expected 1 to 256 bytes, got 257"),
    "classes": (
        request(outputs=[{"name": "y", "parameters": {"classification": {"int64_param": 3}}}]),
        "y: classification of outputs is not supported",
    ),
    "sequence": (
        request(parameters={"sequence_id": {"int64_param": 7}}),
        "parameters.sequence_id: sequences of requests are not supported",
    ),
    "timeout": (request(parameters={"timeout": {"string_param": "1"}}), "parameters.timeout: expected integer, 0 to"),
    "no timeout": (request(parameters={"timeout": {"int64_param": -1}}), "parameters.timeout: expected integer, 0 to"),
    "priority": (request(parameters={"priority": {"bool_param": True}}), "parameters.priority: expected integer"),
    "id": (request(id="7" * 129), "id: expected at most 128 bytes, got 129"),
    "region": (
        request(inputs=[tensor(parameters={"shared_memory_region": {"string_param": "r"}})]),
        "shared memory",
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_error_names_wrong_field(name: str) -> None:
    message, text = REFUSED[name]
    with pytest.raises(InvalidArgument) as refused:
        decode_message(message)
    assert text in str(refused.value)


def test_version_is_part_of_the_name() -> None:
    assert decode_message(request(model_version="2")).model == "digits@2"


@given(st.binary(max_size=200))
def test_decodes_or_rejects_any_message(content: bytes) -> None:
    with contextlib.suppress(InvalidArgument, NotFound):
        decode_request(content)
