"""Tests of the conversion between tensors and arrays, for every datatype and for invalid input."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from weightd_gateway.tensors import (
    DTYPES,
    check_datatype,
    check_shape,
    datatype_of,
    from_bytes,
    from_values,
    nbytes_of,
    to_values,
)
from weightd_protocol import limits
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.tensors import frame_of

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@st.composite
def arrays(draw: st.DrawFn, datatypes: list[str], *, finite: bool) -> Any:
    dtype = DTYPES[draw(st.sampled_from(datatypes))]
    limited: dict[str, Any] = {"allow_nan": False, "allow_infinity": False} if finite and dtype.kind == "f" else {}
    return draw(hnp.arrays(dtype, SHAPES, elements=hnp.from_dtype(dtype, **limited)))


@given(arrays([*DTYPES], finite=False))
def test_bytes_keep_their_bits(array: Any) -> None:
    content = bytes(frame_of(array))
    datatype = datatype_of(array)
    assert len(content) == nbytes_of("x", datatype, list(array.shape))
    again = from_bytes("x", datatype, array.shape, memoryview(content))
    assert (again.shape, again.tobytes(), datatype_of(again)) == (array.shape, array.tobytes(), datatype)


@given(arrays([each for each in DTYPES if each != "FP16"], finite=True))
def test_json_values_keep_their_bits(array: Any) -> None:
    for values in (to_values("x", array), array.tolist()):
        if array.shape:
            again = from_values("x", datatype_of(array), array.shape, json.loads(json.dumps(values)))
            # The comparison distinguishes 0.0 from -0.0.
            assert (again.shape, again.tobytes()) == (array.shape, array.tobytes())


def test_scalar_is_a_list_of_one() -> None:
    assert from_values("x", "INT64", [], [7]).shape == ()
    assert to_values("x", np.array(7)) == [7]


@pytest.mark.parametrize(
    ("datatype", "shape", "values", "problem"),
    [
        ("FP16", [1], [1.0], "FP16 can be sent only as binary data"),
        ("FP32", [2], [1.0], "expected 2 values, got 1"),
        ("FP32", [1], 1.0, "expected a list, got float 1.0"),
        ("FP32", [1], [True], "expected numbers for FP32, got bool True"),
        ("FP32", [1], ["1"], "expected numbers for FP32, got str '1'"),
        ("FP32", [1], [None], "expected numbers for FP32, got NoneType None"),
        ("FP32", [1], [1e39], "expected values that FP32 can hold"),
        ("FP64", [1], [float("1e999")], "expected values that FP64 can hold"),
        ("FP64", [1], [10**400], "expected values that FP64 can hold"),
        ("INT8", [1], [128], "expected values that INT8 can hold"),
        ("UINT8", [1], [-1], "expected values that UINT8 can hold"),
        ("UINT64", [1], [2**64], "expected values that UINT64 can hold"),
        ("INT64", [2], [1.0, 1.5], "expected integers for INT64, got float 1.5"),
        ("INT64", [1], [float("nan")], "expected integers for INT64, got float nan"),
        ("INT64", [1], [1e300], "expected values that INT64 can hold"),
        ("UINT8", [1], [-1.0], "expected values that UINT8 can hold"),
        ("INT64", [1], [True], "expected integers for INT64, got bool True"),
        ("BOOL", [1], [1], "expected booleans for BOOL, got int 1"),
        ("INT64", [2, 2], [[1, 2], 3], "expected lists nested as the shape [2, 2], got int 3"),
        ("INT64", [2, 2], [[1, 2], [3]], "got 3 items at depth 1, not 4"),
        ("INT64", [2, 2], [[1, 2]], "got 1 items at depth 0, not 2"),
        ("INT64", [2], [[1, 2]], "got 1 items at depth 0, not 2"),
        ("INT64", [1], [[1]], "expected integers for INT64, got list of 1 items"),
        ("INT64", [1, 1], [1, [1]], "expected 1 values, got 2"),
    ],
)
def test_rejects_values_that_do_not_fit(datatype: str, shape: list[int], values: object, problem: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        from_values("x", datatype, shape, values)
    assert str(caught.value).startswith("x: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize("datatype", ["INT8", "UINT8", "INT64", "UINT64"])
def test_accepts_whole_floats_as_integers(datatype: str) -> None:
    assert from_values("x", datatype, [3], [1.0, 2, 0.0]).tolist() == [1, 2, 0]


@pytest.mark.parametrize("datatype", ["BYTES", "BF16", "fp32", "", None, 7, ["FP32"]])
def test_rejects_unknown_datatype(datatype: object) -> None:
    with pytest.raises(InvalidArgument, match="x: datatype: expected one of BOOL, UINT8"):
        check_datatype("x", datatype)


@pytest.mark.parametrize("shape", [None, 1, "12", [-1], [1.0], [True], [2**40 + 1], [1] * 17, {"0": 1}])
def test_rejects_invalid_shape(shape: object) -> None:
    with pytest.raises(InvalidArgument, match="x: shape: expected"):
        check_shape("x", shape)


@pytest.mark.parametrize("shape", [[limits.MAX_DIM] * limits.MAX_RANK, [0, limits.MAX_DIM, limits.MAX_DIM]])
def test_rejects_huge_shape_even_if_empty(shape: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="x: shape: expected at most"):
        nbytes_of("x", "FP64", shape)


def test_rejects_wrong_length_and_invalid_booleans() -> None:
    with pytest.raises(InvalidArgument, match=r"expected 8 bytes for FP32 \[2\], got 7"):
        from_bytes("x", "FP32", [2], memoryview(bytes(7)))
    with pytest.raises(InvalidArgument, match="expected 0 or 1 in each byte of a BOOL"):
        from_bytes("x", "BOOL", [2], memoryview(b"\x00\x02"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_json_rejects_nan_and_infinity(value: float) -> None:
    with pytest.raises(InvalidArgument, match="request binary data"):
        to_values("y", np.array([1.0, value], np.float32))


def test_json_rejects_half_floats() -> None:
    with pytest.raises(InvalidArgument, match="JSON cannot represent FP16"):
        to_values("y", np.array([1.0], np.float16))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=20))
def test_converts_or_rejects_any_json(values: Any) -> None:
    for datatype in DTYPES:
        for shape in ([2], [2, 1]):
            try:
                array = from_values("x", datatype, shape, values)
            except InvalidArgument:
                continue
            assert list(array.shape) == shape
