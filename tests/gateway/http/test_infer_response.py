"""Tests of inference responses as JSON, as binary data and in shared memory."""

from __future__ import annotations

import json

import numpy as np
import pytest

from weightd_gateway.error_codes import TooLarge
from weightd_gateway.http.infer_json import InferRequestJson, OutputJson
from weightd_gateway.http.infer_response import encode
from weightd_gateway.tensors import MAX_VALUES
from weightd_protocol.errors import InvalidArgument

ANSWER = {"y": np.array([[1.5, 2.0]], np.float32), "z": np.array(True)}


def nowhere(how: OutputJson, content: memoryview) -> None:
    raise AssertionError(how)


def test_values() -> None:
    header, content = encode(InferRequestJson([], None, is_binary=False, id="7", model="m"), ANSWER, nowhere)
    assert not content
    assert json.loads(header) == {
        "id": "7",
        "model_name": "m",
        "model_version": "1",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]},
            {"name": "z", "datatype": "BOOL", "shape": [], "data": [True]},
        ],
    }


def test_binary_data_follows_order_of_outputs() -> None:
    header, content = encode(InferRequestJson([], None, is_binary=True), ANSWER, nowhere)
    assert [bytes(each) for each in content] == [ANSWER["y"].tobytes(), b"\x01"]
    response = json.loads(header)
    assert [each["parameters"] for each in response["outputs"]] == [{"binary_data_size": 8}, {"binary_data_size": 1}]
    assert "id" not in response


def test_each_output_has_its_form() -> None:
    region = {"shared_memory_region": "r", "shared_memory_offset": 4, "shared_memory_byte_size": 100}
    placed: list[bytes] = []
    wanted = InferRequestJson([], [OutputJson("y", region=region), OutputJson("z", is_binary=True)], is_binary=False)
    header, content = encode(wanted, ANSWER, lambda _, put: placed.append(bytes(put)))
    assert placed == [ANSWER["y"].tobytes()]
    assert [bytes(each) for each in content] == [b"\x01"]
    y, _ = json.loads(header)["outputs"]
    assert y["parameters"] == {
        "shared_memory_region": "r",
        "shared_memory_offset": 4,
        "shared_memory_byte_size": 8,
    }
    assert "data" not in y


def test_rejects_output_that_json_cannot_represent() -> None:
    values = InferRequestJson([], None, is_binary=False)
    with pytest.raises(InvalidArgument, match="output y: JSON cannot represent NaN"):
        encode(values, {"y": np.array([np.nan])}, nowhere)
    with pytest.raises(
        TooLarge, match=r"output y: expected at most 1048576 values in JSON with 524287 left, got 524289"
    ):
        encode(values, dict.fromkeys("xy", np.zeros(MAX_VALUES // 2 + 1, np.int8)), nowhere)
    encode(InferRequestJson([], None, is_binary=True), {"y": np.array([np.nan])}, nowhere)
