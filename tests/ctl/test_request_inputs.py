"""Tests of the shapes and values of generated requests."""

from __future__ import annotations

import argparse
from typing import Any, Callable, Optional, Sequence, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightctl import request_inputs
from weightctl.request_inputs import Shape, WrongShape
from weightd_protocol.datatypes import ITEM_BYTES
from weightd_protocol.messages.inference import TensorSignature, TensorSpec
from weightd_protocol.tensors import to_wire

X = TensorSignature("x", "FP32", (-1, 3, -1))
IDS = TensorSignature("ids", "INT64", (-1,))
FIXED = TensorSignature("w", "FP32", (2, 3))
ANY = TensorSignature("any", "FP32", None)


@pytest.mark.parametrize(
    ("inputs", "shapes", "rows", "made", "number"),
    [
        ([X, IDS], [], None, [(1, 3, 1), (1,)], 1),
        ([X, IDS], [("x", (2, 3, 8))], None, [(2, 3, 8), (1,)], None),
        ([X, IDS, FIXED], [("x", (2, 3, 8))], 5, [(5, 3, 8), (5,), (2, 3)], 5),
        ([ANY], [("any", (4, 4))], 7, [(7, 4)], 7),
        ([ANY], [("any", ())], None, [()], None),
        ([FIXED], [("w", (2, 3))], None, [(2, 3)], None),
    ],
)
def test_free_dimensions_are_1_or_as_given(
    inputs: Sequence[TensorSignature],
    shapes: Sequence[Tuple[str, Shape]],
    rows: Optional[int],
    made: Sequence[Shape],
    number: Optional[int],
) -> None:
    specs = request_inputs.specify(inputs, shapes, rows)
    assert [spec.shape for spec in specs] == made
    assert request_inputs.count_rows(inputs, specs) == number


@pytest.mark.parametrize(
    ("inputs", "shapes", "rows", "text"),
    [
        ([X], [("x", (1, 4, 1))], None, "--shape: input x takes [-1, 3, -1], got [1, 4, 1]"),
        ([X], [("x", (1, 3))], None, "takes [-1, 3, -1], got [1, 3]"),
        ([X], [("y", (1,))], None, "no input 'y'; there are: x FP32 [-1, 3, -1]"),
        ([X], [("x", (1, 3, 1)), ("x", (1, 3, 1))], None, "'x' is given twice"),
        ([X], [("x", (1, 3, 2**40))], None, "a request carries at most"),
        ([ANY], [], None, "input any accepts any rank; set its shape with --shape any=N,N"),
        ([FIXED], [], 2, "--rows 2: no input has a free first dimension: w FP32 [2, 3]"),
    ],
)
def test_error_names_input_that_does_not_fit(
    inputs: Sequence[TensorSignature], shapes: Sequence[Tuple[str, Shape]], rows: Optional[int], text: str
) -> None:
    with pytest.raises(WrongShape) as caught:
        request_inputs.specify(inputs, shapes, rows)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (request_inputs.parse_counts, "0"),
        (request_inputs.parse_counts, "8,"),
        (request_inputs.parse_counts, "4097"),
        (request_inputs.parse_counts, ",".join(map(str, range(1, 18)))),
        (request_inputs.parse_rows, "1,2"),
        (request_inputs.parse_seconds, "nan"),
        (request_inputs.parse_seconds, "0"),
        (request_inputs.parse_seconds, "x"),
    ],
)
def test_limits_numbers(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)


@given(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=3))
def test_samples_fit_and_depend_on_seed(datatype: str, shape: Sequence[int]) -> None:
    spec = TensorSpec("x", datatype, (*shape, 64))
    one, other, again = (request_inputs.make_inputs([spec], seed)["x"] for seed in (1, 2, 1))
    assert one.shape == spec.shape
    assert one.nbytes == spec.nbytes
    assert to_wire(one) is one
    assert one.tobytes() == again.tobytes()
    assert one.size == 0 or one.tobytes() != other.tobytes()
    assert datatype.startswith("FP") or not one.size or one.max() <= 1


def test_samples_have_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_inputs, "MAX_BYTES", 1000)
    for shape, number in (((8,), request_inputs.MAX_SAMPLES), ((100,), 2), ((1000,), 1)):
        assert len(request_inputs.make_many_inputs([TensorSpec("x", "FP32", shape)])) == number
