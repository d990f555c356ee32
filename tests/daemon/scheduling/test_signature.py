from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from weightd_daemon.scheduling import signature
from weightd_daemon.scheduling.signature import (
    NO_ROW_LIMITS,
    RowLimits,
    Signature,
    check_gears,
    check_inputs,
    check_outputs,
    describe_difference,
)
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import RequestDescription, TensorSignature, TensorSpec
from weightd_protocol.messages.worker import Built
from weightd_protocol.messages.worker_common import RowSupport

IMAGE, SCALE = TensorSpec("image", "FP32", (2, 8, 8)), TensorSpec("scale", "FP64", ())
IMAGES, SCALES = TensorSignature("image", "FP32", (-1, 8, 8)), TensorSignature("scale", "FP64", ())
TAKES = {"image": IMAGES, "scale": SCALES}
ANY_RANK = {"x": TensorSignature("x", "FP32", None)}
ONE = "one element: a scalar, or any shape in which each size is 1"
SHAPE = "input image: expected shape [-1, 8, 8] (-1: any size from 1), got"


@pytest.mark.parametrize(
    ("expected", "inputs"),
    [
        (TAKES, [IMAGE, SCALE]),
        (TAKES, [SCALE, replace(IMAGE, shape=(1, 8, 8))]),
        ({}, []),
        *((ANY_RANK, [TensorSpec("x", "FP32", shape)]) for shape in ((), (3,), (2, 4), (1,) * 16)),
    ],
)
def test_accepts_matching_inputs_in_any_order(expected: dict[str, TensorSignature], inputs: list[TensorSpec]) -> None:
    check_inputs(expected, inputs)


@pytest.mark.parametrize(
    ("expected", "inputs", "text"),
    [
        (TAKES, [IMAGE], "inputs: scale is missing; expected image, scale"),
        (TAKES, [], "inputs: image is missing, scale is missing; expected image, scale"),
        (TAKES, [IMAGE, SCALE, IMAGE], "inputs: image is given twice; expected image, scale"),
        (TAKES, [IMAGE, IMAGE], "inputs: scale is missing, image is given twice; expected image, scale"),
        (TAKES, [IMAGE, SCALE, replace(IMAGE, name="mask")],
         "inputs: mask is not an input of the model; expected image, scale"),
        (TAKES, [replace(IMAGE, name="Image"), SCALE],
         "inputs: image is missing, Image is not an input of the model; expected image, scale"),
        ({}, [IMAGE], "inputs: image is not an input of the model; expected none"),
        (
            TAKES,
            [replace(IMAGE, datatype="FP64"), SCALE],
            'input image: expected FP32, got FP64; in numpy, convert it with .astype("float32")',
        ),
        (TAKES, [replace(IMAGE, shape=(8, 8)), SCALE], f"{SHAPE} [8, 8]"),
        (TAKES, [replace(IMAGE, shape=(2, 8, 9)), SCALE], f"{SHAPE} [2, 8, 9]"),
        (TAKES, [replace(IMAGE, shape=(0, 8, 8)), SCALE], f"{SHAPE} [0, 8, 8]"),
        (TAKES, [replace(IMAGE, shape=(2, 8, 8, 1)), SCALE], f"{SHAPE} [2, 8, 8, 1]"),
        *(
            (TAKES, [IMAGE, replace(SCALE, shape=shape)], f"input scale: expected shape [] ({ONE}), got {[*shape]}")
            for shape in ((2,), (0,), (1, 0), (1, 2))
        ),
        (TAKES, [replace(IMAGE, shape=()), SCALE], f"{SHAPE} []"),
        # A free dimension may be the number of rows, which a scalar does not have.
        ({"x": TensorSignature("x", "FP32", (-1,))}, [TensorSpec("x", "FP32", ())],
         "input x: expected shape [-1] (-1: any size from 1), got []"),
        ({"x": TensorSignature("x", "FP32", (1,))}, [TensorSpec("x", "FP32", (1, 1))],
         "input x: expected shape [1], got [1, 1]"),
        (ANY_RANK, [TensorSpec("x", "FP32", (2, 0))],
         "input x: expected shape of any rank, any sizes from 1, got [2, 0]"),
    ],
)  # fmt: skip
def test_input_error_names_expected_and_received(
    expected: dict[str, TensorSignature], inputs: list[TensorSpec], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"^{re.escape(text)}$"):
        check_inputs(expected, inputs)


@pytest.mark.parametrize(
    ("declared", "shape"), [((), ()), ((), (1,)), ((), (1, 1, 1)), ((1,), ()), ((1, 1), ()), ((1,), (1,))]
)
def test_scalar_and_one_element_are_interchangeable(declared: tuple[int, ...], shape: tuple[int, ...]) -> None:
    known, size = Signature(), TensorSignature("scale", "FP64", declared)
    described = RequestDescription("m", (replace(SCALE, shape=shape), IMAGE), ("y",))
    expected = RequestDescription("m", (replace(SCALE, shape=declared), IMAGE), ("y",))
    # Inputs are checked once the model's signature is known.
    assert known.check_request(described) is described
    known.on_built(Built("", (IMAGES, size), (TensorSignature("y", "FP32", None),), (), "", 0))
    for _ in range(2):
        assert known.check_request(described) == expected
    assert known.check_request(expected) is expected


def test_matching_description_is_returned_unchanged() -> None:
    known, described = Signature(), RequestDescription("m", (IMAGE, TensorSpec("x", "FP32", (1, 1))))
    known.on_built(Built("", (IMAGES, *ANY_RANK.values()), (), (), "", 0))
    assert known.check_request(described) is described


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (("mask", "depth"), "outputs: depth is not an output of the model; expected names of box, mask"),
        ((), "outputs: the list is empty; expected names of box, mask, or no such field to get all"),
        (("box", "mask", "box"), "outputs: a name is given twice in box, mask, box"),
    ],
)
def test_output_error_names_the_invalid_selection(wanted: tuple[str, ...], text: str) -> None:
    check_outputs(("box", "mask"), ("mask", "box"))
    with pytest.raises(InvalidArgument, match=f"^{re.escape(text)}$"):
        check_outputs(("box", "mask"), wanted)


def test_checks_each_description_once_per_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []

    def record(expected: object, inputs: object) -> None:
        checked.append(inputs)

    monkeypatch.setattr(signature, "check_inputs", record)
    known, image = Signature(), RequestDescription("m", (IMAGE,))
    known.check_request(image)
    assert not checked
    for _ in range(2):
        known.on_built(Built("", (IMAGES,), (), (), "", 0))
        for _ in range(3):
            known.check_request(image)
    assert len(checked) == 2
    known.set_row_limits(RowLimits())
    known.check_request(image)
    assert len(checked) == 3
    # The cache of checked descriptions has a limit.
    for number in range(3000):
        known.check_request(RequestDescription(f"m{number}", (IMAGE,)))
    assert len(known.checked) <= 1024


# --- fixed sizes, and replacement of a model ------------------------------------------------------------------------

PAIR = (TensorSignature("a", "FP32", (-1, 3, -1)), TensorSignature("b", "FP32", (-1,)))


def test_zero_is_rejected_in_free_dimensions_only() -> None:
    expected = {"x": TensorSignature("x", "FP32", (0, -1))}
    check_inputs(expected, [TensorSpec("x", "FP32", (0, 3))])
    with pytest.raises(InvalidArgument, match=r"got \[0, 0\]$"):
        check_inputs(expected, [TensorSpec("x", "FP32", (0, 0))])


def geared(*gears: tuple[int, ...]) -> Built:
    return Built("", PAIR, PAIR, (), "", 0, gears=gears)


def test_accepts_only_the_sizes_of_the_gears() -> None:
    def check(built: Built, *sizes: int) -> None:
        check_gears(
            built,
            NO_ROW_LIMITS,
            [TensorSpec("b", "FP32", (sizes[2],)), TensorSpec("a", "FP32", (sizes[0], 3, sizes[1]))],
        )

    check(geared(), 7, 8, 9)
    check(geared((1, 2, 3), (7, 8, 9)), 7, 8, 9)
    text = "inputs: the model was converted for some sizes of a[0], a[2], b[0] only: expected 1,2,3; 7,8,9, got 1,8,3"
    with pytest.raises(InvalidArgument, match=f"^{re.escape(text)}$"):
        check(geared((1, 2, 3), (7, 8, 9)), 1, 8, 3)


SCALAR, UNKNOWN = (Built("", (TensorSignature("x", "FP32", shape),), (), (), "", 0) for shape in ((), None))


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        (geared((1, 1, 1)), geared((2, 2, 2), (1, 1, 1)), ""),
        (geared((2, 2, 2), (1, 1, 1)), geared((2, 2, 2), (1, 1, 1)), ""),
        (geared((1, 1, 1)), geared(), ""),
        (geared((2, 2, 2), (1, 1, 1)), geared((1, 1, 1)), "sizes: expected 2,2,2; 1,1,1, got 1,1,1"),
        (geared(), geared((1, 1, 1)), "sizes: expected any, got 1,1,1"),
        (UNKNOWN, UNKNOWN, ""),
        (SCALAR, UNKNOWN, "inputs: expected x FP32 [], got x FP32 of any rank"),
    ],
)
def test_describes_incompatible_replacements(old: Built, new: Built, difference: str) -> None:
    assert describe_difference(old, new) == difference


def test_limits_rows_of_split_requests() -> None:
    built = Built("", (IMAGES,), (), (), "", 0, row_support=RowSupport(("image",), ("y",), is_equal=True))
    limited = Signature(RowLimits(4, "split.max_rows"))
    limited.on_built(built)
    limited.check_request(RequestDescription("m", (replace(IMAGE, shape=(4, 8, 8)),)))
    text = r"^input image: expected at most 4 rows \(split.max_rows of the model\), got 5$"
    with pytest.raises(InvalidArgument, match=text):
        limited.check_request(RequestDescription("m", (replace(IMAGE, shape=(5, 8, 8)),)))


def test_padded_rows_may_differ_from_the_gears() -> None:
    built = Built(
        "", (IMAGES,), (), (), "", 0, gears=((2,), (8,)), row_support=RowSupport(("image",), ("y",), is_equal=True)
    )
    padded = Signature(RowLimits(100, "split.max_rows", (2, 8)))
    padded.on_built(built)
    for rows in (1, 2, 3, 8, 100):
        padded.check_request(RequestDescription("m", (replace(IMAGE, shape=(rows, 8, 8)),)))
    exact = Signature()
    exact.on_built(built)
    with pytest.raises(InvalidArgument, match=r"expected 2; 8, got 3$"):
        exact.check_request(RequestDescription("m", (replace(IMAGE, shape=(3, 8, 8)),)))


# --- example shapes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "cases", "known"),
    [
        ([(-1, 2)], ({"x0": (1, 2)}, {"x0": (2, 2)}), ((1, 2),)),
        ([(-1,), (3,)], ({"x1": (3,), "x0": (7,)},), ((7,), (3,))),
        ([None], ({"x0": ()},), ((),)),
        # No free dimension, no known case, an incomplete case, too long for a header.
        ([(1, 2)], ({"x0": (1, 2)},), None),
        ([(-1, 2)], (), None),
        ([(-1,), (3,)], ({"x0": (7,)},), None),
        ([(-1,) * 16] * 17, ({f"x{number}": (1,) * 16 for number in range(17)},), None),
    ],
)
def test_example_shapes_only_for_free_dimensions(shapes: Any, cases: Any, known: Any) -> None:
    inputs = tuple(TensorSignature(f"x{number}", "FP32", shape) for number, shape in enumerate(shapes))
    assert signature.example_shapes(Built("", inputs, (), cases, "", 0)) == known
