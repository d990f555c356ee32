"""Tests of the conversion of lists and numbers to arrays: each value is exact, or the error names its position."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, List

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd.inputs import as_array, to_typed_inputs
from weightd_protocol import limits
from weightd_protocol.datatypes import ITEM_BYTES, NUMPY_DTYPE
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import TensorSignature

INTEGERS = [each for each in ITEM_BYTES if "INT" in each]

ONE = (TensorSignature("x", "FP32", (-1,)),)
TWO = (TensorSignature("a", "INT8", (-1,)), TensorSignature("b", "FP64", ()))


def array_of(value: object, datatype: str) -> Any:
    return as_array("input x", value, datatype)


def bounds(datatype: str) -> Any:
    return np.iinfo(NUMPY_DTYPE[datatype])


@pytest.mark.parametrize("datatype", ITEM_BYTES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3), (1,) * limits.MAX_RANK])
def test_nested_lists_convert_as_in_numpy(datatype: str, shape: Any) -> None:
    expected = np.resize(np.array([1, 0, 1], NUMPY_DTYPE[datatype]), shape)
    array = array_of(expected.tolist(), datatype)
    assert array.dtype == expected.dtype
    assert array.flags.c_contiguous
    # An empty list does not show the sizes of its inner dimensions.
    assert np.array_equal(array, np.array(expected.tolist(), expected.dtype))
    assert array.shape == np.shape(expected.tolist())


@given(st.sampled_from(INTEGERS), st.lists(st.integers(-(2**65), 2**65), min_size=1))
def test_integer_is_exact_or_rejected(datatype: str, values: List[int]) -> None:
    low, high = bounds(datatype).min, bounds(datatype).max
    wrong = [index for index, each in enumerate(values) if not low <= each <= high]
    if wrong:
        with pytest.raises(
            InvalidArgument, match=rf"^input x\[{wrong[0]}\]: expected an integer from {low} to {high},"
        ):
            array_of(values, datatype)
    else:
        assert array_of(values, datatype).tolist() == values


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integer_bounds_are_inclusive(datatype: str) -> None:
    low, high = int(bounds(datatype).min), int(bounds(datatype).max)
    assert array_of([low, high], datatype).tolist() == [low, high]
    for beyond in (low - 1, high + 1):
        with pytest.raises(InvalidArgument, match=rf"got int {beyond}$"):
            array_of(beyond, datatype)


@given(st.sampled_from(["FP16", "FP32", "FP64"]), st.lists(st.floats() | st.integers(-(2**1025), 2**1025), min_size=1))
def test_rounds_numbers_but_never_to_infinity(datatype: str, values: List[float]) -> None:
    form = np.finfo(NUMPY_DTYPE[datatype])
    beyond = int(form.max) + 2 ** (form.maxexp - form.nmant - 2)
    if any((isinstance(each, int) or math.isfinite(each)) and abs(each) >= beyond for each in map(double, values)):
        with pytest.raises(InvalidArgument, match="expected a number within the bounds of float"):
            array_of(values, datatype)
        return
    for each, arrived in zip(values, array_of(values, datatype).tolist()):
        assert arrived == np.array(float(each)).astype(NUMPY_DTYPE[datatype]) or math.isnan(each)
        assert math.isnan(arrived) == math.isnan(each)


def double(value: float) -> Any:
    """Convert to a double, if the value has one."""
    try:
        return float(value)
    except OverflowError:
        return value


@pytest.mark.parametrize(
    ("value", "datatype", "expected"),
    [
        ([1, 2.5], "INT32", r"^input x\[1\]: expected an integer from -2147483648 to 2147483647, got float 2.5$"),
        ([float("nan")], "INT32", r"^input x\[0\]: expected an integer from .*, got float nan$"),
        ([1.0, 1e300], "INT64", r"^input x\[1\]: expected an integer from .*, got float 1e\+300$"),
        (2.5, "INT64", "^input x: expected an integer from .*, got float 2.5$"),
        ([[1, 2], [3, 256]], "UINT8", r"^input x\[1\]\[1\]: expected an integer from 0 to 255, got int 256$"),
        ([1, True], "INT8", r"^input x\[1\]: .*, got bool True$"),
        ([0.5, False], "FP32", r"^input x\[1\]: expected a number within the bounds of float32, got bool False$"),
        ([True, 1], "BOOL", r"^input x\[1\]: expected True or False, got int 1$"),
        ([1.0, 65520], "FP16", r"^input x\[1\]: expected a number within the bounds of float16, got int 65520$"),
        ([1.0, 1e39], "FP32", r"^input x\[1\]: expected a number within the bounds of float32, got float 1e\+39$"),
        ([0, 10**400], "FP64", r"^input x\[1\]: expected a number within the bounds of float64, got int of 1329 bits$"),
        (["1"], "FP32", r"^input x\[0\]: expected a number .*, got str '1'$"),
        ([None], "FP32", r"^input x\[0\]: .*, got NoneType None$"),
        ([Fraction(1, 3)], "FP64", r"^input x\[0\]: .*, got Fraction"),
        ([1j], "FP32", r"^input x\[0\]: .*, got complex 1j$"),
        (np.float64(1.5), "INT64", "^input x: expected an integer from .*, got float64 "),
        (np.datetime64(0, "s"), "INT64", "^input x: expected an integer from .*, got datetime64 "),
        ([[1, 2], [3]], "INT8", r"^input x\[1\]: expected a list of length 2, like the first one, got length 1$"),
        (
            [[[1]], [[1, 2]]],
            "INT8",
            r"^input x\[1\]\[0\]: expected a list of length 1, like the first one, got length 2$",
        ),
        ([[1, 2], 3], "INT8", r"^input x\[1\]: expected a list of length 2, like the first one, got int 3$"),
        ([3, [1, 2]], "INT8", r"^input x\[0\]: expected a list, like other elements, got int 3$"),
        (
            [[np.zeros(2)], [np.zeros(3)]],
            "FP64",
            r"^input x\[1\]\[0\]: expected an array of float64 \[2\], .*, got an array of ",
        ),
        ([np.zeros(2), np.zeros(2, np.int8)], "FP64", r"^input x\[1\]: expected .*, got an array of int8 \[2\]$"),
        ([1.0, np.zeros(())], "FP64", r"^input x\[0\]: expected an array of float64 \[\], .*, got float 1.0$"),
    ],
)
def test_error_names_position_of_wrong_value(value: object, datatype: str, expected: str) -> None:
    with pytest.raises(InvalidArgument, match=expected):
        array_of(value, datatype)


def test_accepts_numpy_scalars() -> None:
    assert array_of(list(np.arange(3, dtype=np.int64)), "INT8").tolist() == [0, 1, 2]
    assert array_of(np.float64(0.1), "FP32") == np.float32(0.1)
    assert array_of([np.float32(0.5), 1, np.uint8(2)], "FP64").tolist() == [0.5, 1.0, 2.0]
    assert array_of([np.bool_(1), False], "BOOL").tolist() == [True, False]
    # numpy would compare these two numbers as doubles, which are equal.
    with pytest.raises(InvalidArgument, match=rf"\[1\]: .*{2**63}\)?$"):
        array_of([np.int64(1), np.uint64(2**63)], "INT64")


@pytest.mark.parametrize("datatype", ["INT8", "UINT8", "INT64", "UINT64"])
def test_accepts_whole_floats_as_integers(datatype: str) -> None:
    made = array_of([[1.0, 2], [np.float32(3), 0.0]], datatype)
    assert (made.tolist(), datatype) == ([[1, 2], [3, 0]], made.dtype.name.upper())


def test_accepts_ranges_and_tuples() -> None:
    assert array_of((range(2), [2, 3]), "INT16").tolist() == [[0, 1], [2, 3]]


def test_list_of_arrays_keeps_datatype() -> None:
    arrays = [[np.full((2, 3), each, np.float64)] for each in range(4)]
    assert array_of(arrays, "FP32").dtype == np.float64
    assert np.array_equal(array_of(arrays, "FP32"), np.array(arrays))


def test_limits_lists_before_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    endless: List[Any] = [0]
    endless[0] = endless
    with pytest.raises(InvalidArgument, match=f"expected at most {limits.MAX_RANK} levels of lists"):
        array_of(endless, "FP32")
    wide: List[Any] = []
    wide.extend([wide, wide])
    monkeypatch.setattr(limits, "MAX_FRAME_BYTES", 8)
    with pytest.raises(InvalidArgument, match="expected at most 8 bytes, got 16"):
        array_of(wide, "FP32")
    assert array_of([1, 2], "FP32").nbytes == 8
    with pytest.raises(InvalidArgument, match="expected at most 8 bytes, got 12"):
        array_of([1, 2, 3], "FP32")


def test_converts_lists_but_not_arrays() -> None:
    given_ = np.zeros(2, np.float64)
    named = to_typed_inputs({"a": [1], "b": 2}, "m", TWO)
    assert {name: array.dtype for name, array in named.items()} == {"a": np.int8, "b": np.float64}
    assert to_typed_inputs({"a": given_}, "m", TWO)["a"] is given_
    assert to_typed_inputs(given_, "m", ONE)["x"] is given_
    assert to_typed_inputs([0.5], "m", ONE)["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("inputs", "takes", "expected"),
    [
        (
            [1.0],
            TWO,
            r'^inputs: expected a mapping by name, as in \{"x": array\}, got list; model m has the inputs a, b$',
        ),
        (np.zeros(1), (), "got ndarray; model m has the inputs none$"),
        ({"y": 1}, TWO, "^input y: model m has no input of this name; it has a, b$"),
        ({7: 1}, TWO, "^input 7: model m has no input of this name"),
    ],
)
def test_rejects_ambiguous_inputs(inputs: Any, takes: Any, expected: str) -> None:
    with pytest.raises(InvalidArgument, match=expected):
        to_typed_inputs(inputs, "m", takes)
