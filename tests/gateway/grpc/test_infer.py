"""Tests of encoded responses, which the generated classes of other projects must be able to read."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelStreamInferResponse

from weightd_gateway.daemon_client import InferenceRequest
from weightd_gateway.grpc.infer import encode_response, encode_stream_error, encode_stream_response
from weightd_gateway.grpc.requests import InferRequest
from weightd_gateway.tensors import DTYPES, datatype_of

ASKED = InferRequest(InferenceRequest("digits", {}, id="42"), {})
SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=200)


@given(st.data())
def test_outputs_keep_their_bits(data: st.DataObject) -> None:
    dtypes = data.draw(st.lists(st.sampled_from(sorted(DTYPES)), max_size=3))
    answer = {f"y{i}": np.zeros(data.draw(SHAPES), DTYPES[name]) for i, name in enumerate(dtypes)}
    for array in answer.values():
        array.reshape(-1)[: data.draw(st.integers(0, 300))] = 1
    read = ModelInferResponse.FromString(encode_response(ASKED, answer))
    assert (read.model_name, read.model_version, read.id) == ("digits", "1", "42")
    assert [(each.name, each.datatype, tuple(each.shape)) for each in read.outputs] == [
        (name, datatype_of(each), each.shape) for name, each in answer.items()
    ]
    assert [*read.raw_output_contents] == [each.tobytes() for each in answer.values()]


def test_stream_response_is_marked_final() -> None:
    content = encode_response(ASKED, {"y": np.zeros(300, "<f4")}, is_final=True)
    read = ModelStreamInferResponse.FromString(encode_stream_response(content))
    assert (read.error_message, read.infer_response.SerializeToString()) == (
        "",
        ModelInferResponse.FromString(content).SerializeToString(),
    )
    assert read.infer_response.parameters["triton_final_response"].bool_param


def test_stream_error_names_its_request() -> None:
    read = ModelStreamInferResponse.FromString(encode_stream_error(b"42", "no"))
    assert (read.error_message, read.infer_response.id) == ("no", "42")
    assert read.infer_response.parameters["triton_final_response"].bool_param
