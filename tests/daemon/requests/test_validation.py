from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd.daemon.requests.validation import check_gears, check_inputs, check_same
from weightd.protocol.datatypes import ITEM_BYTES
from weightd.protocol.errors import InvalidArgument
from weightd.protocol.messages.children import Built
from weightd.protocol.messages.data import TensorSignature, TensorSpec

IMAGE, SCALE = TensorSpec("image", "FP32", (2, 8, 8)), TensorSpec("scale", "FP64", ())
IMAGES, SCALES = TensorSignature("image", "FP32", (-1, 8, 8)), TensorSignature("scale", "FP64", ())
TAKES = {"image": IMAGES, "scale": SCALES}
ANY_RANK = {"x": TensorSignature("x", "FP32", None)}
SHAPE = "input image: expected shape [-1, 8, 8] (-1: any size from 1), got"


@pytest.mark.parametrize(
    ("signature", "inputs", "text"),
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
        (TAKES, [replace(IMAGE, datatype="FP64"), SCALE], "input image: expected FP32, got FP64"),
        (TAKES, [replace(IMAGE, shape=(8, 8)), SCALE], f"{SHAPE} [8, 8]"),
        (TAKES, [replace(IMAGE, shape=(2, 8, 9)), SCALE], f"{SHAPE} [2, 8, 9]"),
        (TAKES, [replace(IMAGE, shape=(0, 8, 8)), SCALE], f"{SHAPE} [0, 8, 8]"),
        (TAKES, [IMAGE, replace(SCALE, shape=(1,))], "input scale: expected shape [], got [1]"),
        (ANY_RANK, [TensorSpec("x", "FP32", (0,))], "input x: expected shape of any rank, any sizes from 1, got [0]"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_input_what_was_expected_and_what_came(
    signature: dict[str, TensorSignature], inputs: list[TensorSpec], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"^{re.escape(text)}$"):
        check_inputs(signature, inputs)


# --- what the model was converted for, and what may follow it -------------------------------------------------------

PAIR = (TensorSignature("a", "FP32", (-1, 3, -1)), TensorSignature("b", "FP32", (-1,)))


def geared(*gears: tuple[int, ...]) -> Built:
    return Built("", PAIR, PAIR, (), "", 0, gears=gears)


def test_sizes_are_those_that_the_model_was_converted_for() -> None:
    def check(built: Built, *sizes: int) -> None:
        check_gears(built, [TensorSpec("b", "FP32", (sizes[2],)), TensorSpec("a", "FP32", (sizes[0], 3, sizes[1]))])

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
    assert check_same(old, new) == difference


# --- for any signature ----------------------------------------------------------------------------------------------

signatures = st.lists(
    st.builds(
        TensorSignature,
        st.text("abcd", min_size=1, max_size=2),
        st.sampled_from(sorted(ITEM_BYTES)),
        st.one_of(st.none(), st.lists(st.one_of(st.just(-1), st.integers(1, 5)), max_size=4).map(tuple)),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda each: each.name,
)


@st.composite
def fitting(draw: st.DrawFn) -> tuple[dict[str, TensorSignature], list[TensorSpec]]:
    signature = draw(signatures)
    tensors = [
        TensorSpec(each.name, each.datatype, tuple(draw(st.integers(1, 9)) if dim == -1 else dim for dim in dims))
        for each in signature
        for dims in [(-1,) * draw(st.integers(0, 5)) if each.shape is None else each.shape]
    ]
    return {each.name: each for each in signature}, draw(st.permutations(tensors))


@given(fitting())
def test_what_fits_passes(case: tuple[dict[str, TensorSignature], list[TensorSpec]]) -> None:
    check_inputs(*case)


@given(fitting(), st.data())
def test_one_thing_wrong_is_refused_with_its_name(
    case: tuple[dict[str, TensorSignature], list[TensorSpec]], data: st.DataObject
) -> None:
    signature, tensors = case
    index = data.draw(st.integers(0, len(tensors) - 1))
    good = tensors[index]
    bad = data.draw(st.sampled_from(_spoilt(signature[good.name], good)))
    with pytest.raises(InvalidArgument, match=good.name):
        check_inputs(signature, [*tensors[:index], *bad, *tensors[index + 1 :]])


def _spoilt(expected: TensorSignature, good: TensorSpec) -> Sequence[list[TensorSpec]]:
    """What may come instead of the good tensor, each wrong in one way."""
    other = "BOOL" if good.datatype != "BOOL" else "INT8"
    name, datatype, shape = good.name, good.datatype, good.shape
    wrong = [
        [],
        [good, good],
        [TensorSpec(name + "x", datatype, shape)],
        [TensorSpec(name, other, shape)],
    ]
    if expected.shape is None:
        return [*wrong, [TensorSpec(name, datatype, (*shape, 0))]]
    wrong.append([TensorSpec(name, datatype, (*shape, 1))])
    wrong += [[TensorSpec(name, datatype, shape[:-1])]] if shape else []
    for axis, dim in enumerate(expected.shape):
        for size in (0,) if dim == -1 else (0, dim + 1):
            wrong.append([TensorSpec(name, datatype, (*shape[:axis], size, *shape[axis + 1 :]))])
    return wrong
