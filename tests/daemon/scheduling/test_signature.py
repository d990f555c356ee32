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
    ("takes", "inputs"),
    [
        (TAKES, [IMAGE, SCALE]),
        (TAKES, [SCALE, replace(IMAGE, shape=(1, 8, 8))]),
        ({}, []),
        *((ANY_RANK, [TensorSpec("x", "FP32", shape)]) for shape in ((), (3,), (2, 4), (1,) * 16)),
    ],
)
def test_what_the_model_takes_passes_in_any_order(takes: dict[str, TensorSignature], inputs: list[TensorSpec]) -> None:
    check_inputs(takes, inputs)


@pytest.mark.parametrize(
    ("takes", "inputs", "text"),
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
        # A free dimension may count rows, which a scalar has not.
        ({"x": TensorSignature("x", "FP32", (-1,))}, [TensorSpec("x", "FP32", ())],
         "input x: expected shape [-1] (-1: any size from 1), got []"),
        ({"x": TensorSignature("x", "FP32", (1,))}, [TensorSpec("x", "FP32", (1, 1))],
         "input x: expected shape [1], got [1, 1]"),
        (ANY_RANK, [TensorSpec("x", "FP32", (2, 0))],
         "input x: expected shape of any rank, any sizes from 1, got [2, 0]"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_input_what_was_expected_and_what_came(
    takes: dict[str, TensorSignature], inputs: list[TensorSpec], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"^{re.escape(text)}$"):
        check_inputs(takes, inputs)


@pytest.mark.parametrize(
    ("declared", "shape"), [((), ()), ((), (1,)), ((), (1, 1, 1)), ((1,), ()), ((1, 1), ()), ((1,), (1,))]
)
def test_a_scalar_and_one_element_are_alike_and_the_engine_receives_what_it_declares(
    declared: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    known, size = Signature(), TensorSignature("scale", "FP64", declared)
    asked = RequestDescription("m", (replace(SCALE, shape=shape), IMAGE), ("y",))
    expected = RequestDescription("m", (replace(SCALE, shape=declared), IMAGE), ("y",))
    # Before the model is known nothing can be said, and then it can.
    assert known.check_request(asked) is asked
    known.on_built(Built("", (IMAGES, size), (TensorSignature("y", "FP32", None),), (), "", 0))
    for _ in range(2):
        assert known.check_request(asked) == expected
    assert known.check_request(expected) is expected


def test_a_shape_that_is_declared_is_not_described_again() -> None:
    known, asked = Signature(), RequestDescription("m", (IMAGE, TensorSpec("x", "FP32", (1, 1))))
    known.on_built(Built("", (IMAGES, *ANY_RANK.values()), (), (), "", 0))
    assert known.check_request(asked) is asked


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (("mask", "depth"), "outputs: depth is not an output of the model; expected names of box, mask"),
        ((), "outputs: the list is empty; expected names of box, mask, or no such field to get all"),
        (("box", "mask", "box"), "outputs: a name is given twice in box, mask, box"),
    ],
)
def test_a_refusal_names_the_output_that_cannot_be_wanted(wanted: tuple[str, ...], text: str) -> None:
    check_outputs(("box", "mask"), ("mask", "box"))
    with pytest.raises(InvalidArgument, match=f"^{re.escape(text)}$"):
        check_outputs(("box", "mask"), wanted)


def test_what_fits_is_looked_at_once_for_each_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []

    def look(takes: object, inputs: object) -> None:
        looked.append(inputs)

    monkeypatch.setattr(signature, "check_inputs", look)
    known, image = Signature(), RequestDescription("m", (IMAGE,))
    known.check_request(image)
    assert not looked
    for _ in range(2):
        known.on_built(Built("", (IMAGES,), (), (), "", 0))
        for _ in range(3):
            known.check_request(image)
    assert len(looked) == 2
    known.set_row_limits(RowLimits())
    known.check_request(image)
    assert len(looked) == 3
    # However many there are, no more than a bound are remembered.
    for number in range(3000):
        known.check_request(RequestDescription(f"m{number}", (IMAGE,)))
    assert len(known.checked) <= 1024


# --- what the model was converted for, and what may follow it -------------------------------------------------------

PAIR = (TensorSignature("a", "FP32", (-1, 3, -1)), TensorSignature("b", "FP32", (-1,)))


def test_a_dimension_of_0_is_refused_only_where_it_is_free() -> None:
    takes = {"x": TensorSignature("x", "FP32", (0, -1))}
    check_inputs(takes, [TensorSpec("x", "FP32", (0, 3))])
    with pytest.raises(InvalidArgument, match=r"got \[0, 0\]$"):
        check_inputs(takes, [TensorSpec("x", "FP32", (0, 0))])


def geared(*gears: tuple[int, ...]) -> Built:
    return Built("", PAIR, PAIR, (), "", 0, gears=gears)


def test_sizes_are_those_that_the_model_was_converted_for() -> None:
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
def test_what_takes_less_or_other_inputs_is_no_drop_in(old: Built, new: Built, difference: str) -> None:
    assert describe_difference(old, new) == difference


def test_a_request_has_no_more_rows_than_can_be_run_be_it_in_parts() -> None:
    built = Built("", (IMAGES,), (), (), "", 0, row_support=RowSupport(("image",), ("y",), is_equal=True))
    cut = Signature(RowLimits(4, "split.max_rows"))
    cut.on_built(built)
    cut.check_request(RequestDescription("m", (replace(IMAGE, shape=(4, 8, 8)),)))
    text = r"^input image: expected at most 4 rows \(split.max_rows of the model\), got 5$"
    with pytest.raises(InvalidArgument, match=text):
        cut.check_request(RequestDescription("m", (replace(IMAGE, shape=(5, 8, 8)),)))


def test_rows_are_padded_to_the_sizes_of_the_model() -> None:
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


# --- an example -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "cases", "known"),
    [
        ([(-1, 2)], ({"x0": (1, 2)}, {"x0": (2, 2)}), ((1, 2),)),
        ([(-1,), (3,)], ({"x1": (3,), "x0": (7,)},), ((7,), (3,))),
        ([None], ({"x0": ()},), ((),)),
        # Nothing to choose, nothing known, not of all, too much for a header.
        ([(1, 2)], ({"x0": (1, 2)},), None),
        ([(-1, 2)], (), None),
        ([(-1,), (3,)], ({"x0": (7,)},), None),
        ([(-1,) * 16] * 17, ({f"x{number}": (1,) * 16 for number in range(17)},), None),
    ],
)
def test_what_a_model_runs_on_is_told_where_requests_choose(shapes: Any, cases: Any, known: Any) -> None:
    inputs = tuple(TensorSignature(f"x{number}", "FP32", shape) for number, shape in enumerate(shapes))
    assert signature.example_shapes(Built("", inputs, (), cases, "", 0)) == known
