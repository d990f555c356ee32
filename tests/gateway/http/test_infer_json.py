"""Tests of the JSON of an inference request and of the binary data that follows it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_gateway.error_codes import TooLarge
from weightd_gateway.http.infer_json import (
    MAX_JSON_BYTES,
    MAX_KEYS,
    InferRequestJson,
    InputJson,
    OutputJson,
    read,
    split_binary,
)
from weightd_gateway.tensors import MAX_VALUES
from weightd_protocol.errors import InvalidArgument

X = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}
RAW = {"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}


def form(content: Any) -> InferRequestJson:
    return read(memoryview(json.dumps(content).encode()), "m")


def test_request_with_json_values() -> None:
    assert form({"inputs": [X]}) == InferRequestJson(
        [InputJson("x", "FP32", [2], 8, [1, 2])], None, is_binary=False, model="m"
    )


def test_binary_request_of_tritonclient() -> None:
    content = {
        "id": "7",
        "inputs": [RAW],
        "parameters": {"binary_data_output": True, "timeout": 1500000, "priority": 2},
    }
    inputs = [InputJson("x", "FP32", [2], 8, nbytes=8)]
    assert form(content) == InferRequestJson(inputs, None, is_binary=True, id="7", timeout=1.5, priority=2, model="m")


def test_each_output_has_the_requested_form() -> None:
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    outputs = [
        {"name": "a"},
        {"name": "b", "parameters": {"binary_data": False}},
        {"name": "c", "parameters": region},
    ]
    found = form({"inputs": [X], "outputs": outputs, "parameters": {"binary_data_output": True}})
    assert found.outputs == [OutputJson("a", True), OutputJson("b", False), OutputJson("c", True, region)]
    assert found.output_names == ["a", "b", "c"]


def test_missing_outputs_and_timeout() -> None:
    found = form({"inputs": [], "outputs": [], "parameters": {"timeout": 0, "priority": 0, "anything": "else"}})
    assert (found.output_names, found.timeout, found.priority) == (None, None, None)


def test_null_counts_as_missing() -> None:
    nothing = dict.fromkeys(("id", "parameters", "outputs", "model_name", "model_version"))
    assert form({"inputs": [{**X, "parameters": None}], **nothing}) == form({"inputs": [X]})
    assert form({"inputs": [{**RAW, "data": None}]}) == form({"inputs": [RAW]})
    assert form({"inputs": [X], "parameters": {"timeout": None}}).timeout is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([], "expected an object, got list"),
        ({}, "inputs: expected a list of at most 64 tensors, got NoneType"),
        ({"inputs": {}}, "inputs: expected a list"),
        ({"inputs": [X] * 65}, "inputs: expected a list of at most 64 tensors"),
        ({"inputs": [1]}, r"inputs\[0\]: expected an object, got int"),
        ({"inputs": [X, X]}, "inputs: expected each name once"),
        ({"inputs": [X], "ouputs": []}, "ouputs: unknown field; expected one of id, inputs"),
        ({"inputs": [X], "model_name": "other"}, "model_name: expected 'm', as in the path"),
        ({"inputs": [X], "model_version": 2}, "model_version: expected text, got int 2"),
        ({"inputs": [X], "id": 7}, "id: expected text of at most 128 bytes, got int 7"),
        ({"inputs": [X], "id": "x" * 129}, "id: expected text of at most 128 bytes"),
        ({"inputs": [X], "parameters": []}, "parameters: expected an object"),
        ({"inputs": [X], "parameters": {"timeout": -1}}, "parameters.timeout: expected integer"),
        ({"inputs": [X], "parameters": {"timeout": 3_600_000_001}}, "parameters.timeout: expected integer"),
        ({"inputs": [X], "parameters": {"timeout": True}}, "parameters.timeout: expected integer"),
        ({"inputs": [X], "parameters": {"priority": 17}}, "parameters.priority: expected integer, 0 to 16"),
        (
            {"inputs": [X], "parameters": {"sequence_id": 1}},
            "parameters.sequence_id: sequences of requests are not supported",
        ),
        ({"inputs": [X], "parameters": {"binary_data_output": 1}}, "parameters.binary_data_output: expected a boolean"),
        ({"inputs": [{**X, "name": ""}]}, "inputs: expected a name, got"),
        ({"inputs": [{**X, "datatype": "BYTES"}]}, "x: datatype: expected one of BOOL"),
        ({"inputs": [{**X, "shape": [-1]}]}, "x: shape: expected integers"),
        ({"inputs": [{**X, "parameters": 1}]}, "x: parameters: expected an object"),
        ({"inputs": [{**RAW, "data": [1, 2]}]}, "x: expected either data, or .*, got data and binary_data_size"),
        (
            {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2]}]},
            "x: expected either data, or .*, got none of them",
        ),
        ({"inputs": [{**RAW, "parameters": {"binary_data_size": 7}}]}, r"binary_data_size: expected 8, for FP32 \[2\]"),
        ({"inputs": [{**RAW, "parameters": {"binary_data_size": True}}]}, "binary_data_size: expected 8"),
        ({"inputs": [X], "outputs": [{"name": "y"}, {"name": "y"}]}, "outputs: expected each name once"),
        ({"inputs": [X], "outputs": [{"name": 1}]}, "outputs: expected a name, got"),
        ({"inputs": [X], "outputs": "y"}, "outputs: expected a list"),
        (
            {"inputs": [X], "outputs": [{"name": "y", "parameters": {"classification": 3}}]},
            "y: classification of outputs is not supported",
        ),
    ],
)
def test_error_names_wrong_field(content: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        form(content)


def test_version_of_path_or_json() -> None:
    def model_of(path: str, version: str) -> str:
        return read(memoryview(json.dumps({"inputs": [X], "model_version": version}).encode()), path).model

    assert [model_of(*each) for each in (("m", ""), ("m", "2"), ("m@2", ""), ("m@2", "2"))] == ["m", *["m@2"] * 3]
    with pytest.raises(InvalidArgument, match="model_version: expected '2', as in the path, got str '3'"):
        model_of("m@2", "3")


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[" * 100_000, b"\xff", b'{"inputs": NaN}', b'{"a": Infinity}', b"1" * 5000, b'"x"', b"null"]
)
def test_rejects_non_objects(text: bytes) -> None:
    with pytest.raises(InvalidArgument, match=r"expected an object|expected a JSON object"):
        read(memoryview(text), "m")


def test_limits_bytes_of_json() -> None:
    with pytest.raises(TooLarge, match="send tensors as binary data"):
        read(memoryview(bytes(MAX_JSON_BYTES + 1)), "m")


@pytest.mark.parametrize("values", [b"0," * MAX_VALUES, b"[" * MAX_VALUES, b"{}," * (MAX_VALUES // 2)])
def test_limits_number_of_values(values: bytes) -> None:
    with pytest.raises(TooLarge, match="values in JSON; send tensors as binary data"):
        read(memoryview(b'{"inputs": [' + values), "m")


def test_limits_number_of_keys() -> None:
    with pytest.raises(TooLarge, match="keys in JSON"):
        form({"inputs": [X], "parameters": dict.fromkeys(map(str, range(MAX_KEYS)))})


def test_cache_distinguishes_models() -> None:
    content = memoryview(json.dumps({"inputs": [X], "model_name": "m"}).encode())
    read(content, "m")
    with pytest.raises(InvalidArgument, match="model_name"):
        read(content, "other")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["inputs", "outputs", "name", "shape", "datatype", "data", "parameters", "id"]), inner
            )
        ),
        max_leaves=12,
    )
)
def test_parses_or_rejects_any_json(content: Any) -> None:
    try:
        found = form(content)
    except InvalidArgument:
        return
    assert all(each.name for each in found.inputs)


# --- binary data after the JSON -------------------------------------------------------------------------------------


def test_splits_binary_data_by_input() -> None:
    found = form({"inputs": [{**RAW, "name": "a"}, {**X, "name": "b"}, {**RAW, "name": "c"}]})
    cuts = split_binary(found, memoryview(bytes(range(16))))
    assert {name: bytes(each) for name, each in cuts.items()} == {"a": bytes(range(8)), "c": bytes(range(8, 16))}


@pytest.mark.parametrize("count", [0, 7, 9])
def test_rejects_wrong_number_of_bytes(count: int) -> None:
    with pytest.raises(InvalidArgument, match=f"expected 8 bytes after the JSON, got {count}"):
        split_binary(form({"inputs": [RAW]}), memoryview(bytes(count)))
