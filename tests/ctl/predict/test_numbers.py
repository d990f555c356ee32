"""Tests of numbers in text files: they are converted to the input's datatype, or the error names their position."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightctl.predict.numbers import CsvTable, WrongNumbers, array_of_lists, array_of_table, read_json
from weightd_protocol.datatypes import NUMPY_DTYPE
from weightd_protocol.messages.inference import TensorSignature


def x(datatype: str = "FP32", *shape: int) -> TensorSignature:
    return TensorSignature("x", datatype, shape)


@given(st.data(), st.sampled_from(sorted(NUMPY_DTYPE)), st.lists(st.integers(1, 3), max_size=4))
def test_reads_nested_and_flat_lists_of_numpy(data: Any, datatype: str, shape: Any) -> None:
    dtype = np.dtype(NUMPY_DTYPE[datatype])
    size = int(np.prod(shape, dtype=int))
    raw = data.draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    array = np.frombuffer(raw, "u1") % 2 == 1 if dtype.kind == "b" else np.frombuffer(raw, dtype)
    # NaN does not equal itself.
    array = np.where(np.isnan(array), dtype.type(0), array).reshape(shape)
    signature = TensorSignature("x", datatype, tuple(shape))
    nested = array_of_lists(read_json(json.dumps(array.tolist())), signature)
    assert nested.dtype == dtype
    assert np.array_equal(nested, array)
    assert np.array_equal(array_of_lists(read_json(json.dumps(array.reshape(-1).tolist())), signature), array)


@pytest.mark.parametrize(
    ("text", "signature", "shape"),
    [
        ("3", x("INT64"), ()),
        ("3", x("INT64", 1, 1), (1, 1)),
        ("[1, 2]", x("FP32", -1), (2,)),
        ("[1, 2, 3, 4]", x("FP32", -1, 2), (2, 2)),
        ("[[1, 2], [3, 4]]", x("FP32", -1, -1), (2, 2)),
        ("[[1], [2]]", TensorSignature("x", "FP32", None), (2, 1)),
        ("[1, 2]", TensorSignature("x", "FP32", None), (2,)),
        ("[]", x("FP32", -1), (0,)),
        ("[[], []]", x("FP32", -1, -1), (2, 0)),
    ],
)
def test_shape_of_list(text: str, signature: TensorSignature, shape: Any) -> None:
    assert array_of_lists(read_json(text), signature).shape == shape


@pytest.mark.parametrize(
    ("text", "signature", "expected"),
    [
        ("[0, 256]", x("UINT8", 2), "[1]: expected an integer from 0 to 255 for UINT8, got int 256"),
        ("[[1], [-1]]", x("UINT8", 2, 1), "[1][0]: expected an integer from 0 to 255 for UINT8, got int -1"),
        ("[1.5]", x("INT64", 1), "expected an integer from"),
        ("[true]", x("INT64", 1), "got bool True"),
        ("[2]", x("BOOL", 1), "expected true or false, 0 or 1 for BOOL, got int 2"),
        ('["1"]', x("FP32", 1), "[0]: expected a number for FP32, got str '1'"),
        ("[null]", x("FP32", 1), "got NoneType"),
        ("65505", x("FP16"), "the value: expected at most 65504 for FP16"),
        ("[1e39]", x("FP32", 1), "expected at most 3.40282e+38 for FP32"),
        ("[[1, 2], [3]]", x("FP32", 2, 2), "[1]: expected a list of 2 like the previous ones, got a list of 1"),
        ("[[1], 2]", x("FP32", 2, 1), "[1]: expected a list of 1 like the previous ones, got int 2"),
        ("[1, [2]]", x("FP32", 2), "[1]: expected a number for FP32, got list of 1 items"),
        ("[1, 2, 3]", x("FP32", 2, 2), "expected 4 numbers for [2, 2], got 3"),
        ("[1, 2, 3]", x("FP32", -1, 2), "expected a multiple of 2 numbers for [-1, 2], got 3"),
        ("[1, 2, 3]", x("FP32", -1, -1), "[-1, -1] has several free dimensions"),
        ("[" * 17 + "]" * 17, x(), "expected lists of at most 16 levels"),
        ("[" * 100_000, x(), ""),
        ("9" * 65, x(), "expected numbers of at most 64 digits, got one of 65"),
        ("[1,", x(), "not JSON: "),
        ('{"a": 1, "a": 2}', x(), "duplicate name 'a'"),
    ],
)
def test_error_names_position(text: str, signature: TensorSignature, expected: str) -> None:
    with pytest.raises(WrongNumbers) as caught:
        array_of_lists(read_json(text), signature)
    assert expected in str(caught.value)


def test_keeps_infinities_and_makes_no_new_ones() -> None:
    read = array_of_lists(read_json('[Infinity, "-Infinity", "NaN", NaN, 65504]'), x("FP16", 5))
    assert [*map(float, read[[0, 1, 4]])] == [float("inf"), float("-inf"), 65504.0]
    assert np.isnan(read[2:4]).all()
    assert array_of_table(CsvTable("inf,-Infinity"), x("FP64", -1)).tolist() == [float("inf"), float("-inf")]
    with pytest.raises(WrongNumbers, match="the range of a double, got str '-1e999'"):
        read_json("[-1e999]")
    with pytest.raises(WrongNumbers, match="line 1, column 2: expected a number, got str '1e999'"):
        CsvTable("1,1e999")


def test_reads_table_as_rows_or_flat() -> None:
    table = CsvTable("1, 2\n\n3,4e0\r\n")
    assert array_of_table(table, x("INT64", -1, 2)).tolist() == [[1, 2], [3, 4]]
    assert array_of_table(table, x("FP32", 1, 2, 2)).tolist() == [[[1, 2], [3, 4]]]
    assert array_of_table(table, x("FP32", -1)).tolist() == [1, 2, 3, 4]
    assert array_of_table(CsvTable(""), x("FP32", -1)).tolist() == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,2\n3\n", "line 2: expected 2 numbers, got 1"),
        ("a,b\n", "line 1, column 1: expected a number, got str 'a'"),
        ("1,\n", "line 1, column 2: expected a number, got str ''"),
        ("1_0\n", "line 1, column 1: expected a number"),
        (f"{'9' * 65}\n", "line 1, column 1: expected a number"),
        ("1,2\n\n3,300\n", "line 3, column 2: expected an integer from 0 to 255 for UINT8, got int 300"),
        ("nan\n", "line 1, column 1: expected an integer"),
    ],
)
def test_error_names_line_and_column(text: str, expected: str) -> None:
    with pytest.raises(WrongNumbers) as caught:
        array_of_table(CsvTable(text), x("UINT8", -1, -1))
    assert expected in str(caught.value)
