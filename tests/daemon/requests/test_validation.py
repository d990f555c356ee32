from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd.daemon.requests.validation import check_gears, check_inputs, check_same
from weightd.protocol.datatypes import ITEM_BYTES
from weightd.protocol.errors import InvalidArgument
from weightd.protocol.messages.children import Built
from weightd.protocol.messages.data import TensorSignature, TensorSpec

SIGNATURE = {
    "image": TensorSignature("image", "FP32", (-1, 8, 8)),
    "scale": TensorSignature("scale", "FP64", ()),
}
IMAGE = TensorSpec("image", "FP32", (2, 8, 8))
SCALE = TensorSpec("scale", "FP64", ())


def refusal(*inputs: TensorSpec) -> str:
    with pytest.raises(InvalidArgument) as caught:
        check_inputs(SIGNATURE, inputs)
    return str(caught.value)


def test_what_the_model_takes_passes_in_any_order() -> None:
    check_inputs(SIGNATURE, [IMAGE, SCALE])
    check_inputs(SIGNATURE, [SCALE, IMAGE])
    check_inputs({}, [])


def test_names() -> None:
    assert refusal(IMAGE) == "inputs: scale is missing; expected image, scale"
    extra = TensorSpec("mask", "BOOL", (1,))
    assert refusal(IMAGE, SCALE, extra) == "inputs: mask is not an input of the model; expected image, scale"
    misnamed = TensorSpec("Image", "FP32", (2, 8, 8))
    assert refusal(misnamed, SCALE) == (
        "inputs: image is missing, Image is not an input of the model; expected image, scale"
    )
    assert refusal(IMAGE, SCALE, IMAGE) == "inputs: image is given twice; expected image, scale"
    assert refusal(IMAGE, IMAGE) == "inputs: scale is missing, image is given twice; expected image, scale"
    assert refusal() == "inputs: image is missing, scale is missing; expected image, scale"


PAIR = (TensorSignature("a", "FP32", (-1, 3, -1)), TensorSignature("b", "FP32", (-1,)))


def geared(*gears: tuple[int, ...]) -> Built:
    return Built("", PAIR, PAIR, (), "", 0, gears=gears)


@pytest.mark.parametrize(
    ("gears", "sizes", "expected"),
    [((), (7, 8, 9), ""), (((1, 2, 3), (7, 8, 9)), (7, 8, 9), ""), (((1, 2, 3), (7, 8, 9)), (1, 8, 3), "1,2,3; 7,8,9")],
)
def test_sizes_are_those_that_the_model_was_converted_for(
    gears: tuple[tuple[int, ...], ...], sizes: tuple[int, int, int], expected: str
) -> None:
    inputs = [TensorSpec("b", "FP32", (sizes[2],)), TensorSpec("a", "FP32", (sizes[0], 3, sizes[1]))]
    if not expected:
        check_gears(geared(*gears), inputs)
        return
    with pytest.raises(InvalidArgument) as caught:
        check_gears(geared(*gears), inputs)
    assert str(caught.value) == (
        "inputs: the model was converted for some sizes of a[0], a[2], b[0] only: "
        f"expected {expected}, got {','.join(map(str, sizes))}"
    )


def test_what_takes_fewer_sizes_is_no_drop_in() -> None:
    one, both, any_size = geared((1, 1, 1)), geared((2, 2, 2), (1, 1, 1)), geared()
    assert [check_same(*each) for each in ((one, both), (both, both), (one, any_size))] == ["", "", ""]
    assert check_same(both, one) == "sizes: expected 2,2,2; 1,1,1, got 1,1,1"
    assert check_same(any_size, one) == "sizes: expected any, got 1,1,1"


def test_a_model_without_inputs_takes_none() -> None:
    with pytest.raises(InvalidArgument, match=r"^inputs: image is not an input of the model; expected none$"):
        check_inputs({}, [IMAGE])


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (TensorSpec("image", "FP64", (2, 8, 8)), "input image: expected FP32, got FP64"),
        (
            TensorSpec("image", "FP32", (8, 8)),
            "input image: expected shape [-1, 8, 8] (-1: any size from 1), got [8, 8]",
        ),
        (
            TensorSpec("image", "FP32", (2, 8, 9)),
            "input image: expected shape [-1, 8, 8] (-1: any size from 1), got [2, 8, 9]",
        ),
        (
            TensorSpec("image", "FP32", (0, 8, 8)),
            "input image: expected shape [-1, 8, 8] (-1: any size from 1), got [0, 8, 8]",
        ),
    ],
)
def test_datatype_rank_fixed_dimension_and_batch_0(tensor: TensorSpec, text: str) -> None:
    assert refusal(tensor, SCALE) == text


def test_a_scalar_is_not_a_vector_of_one() -> None:
    assert refusal(IMAGE, TensorSpec("scale", "FP64", (1,))) == "input scale: expected shape [], got [1]"


@pytest.mark.parametrize("shape", [(), (3,), (2, 4), (1,) * 16])
def test_an_input_of_any_rank_takes_every_shape_but_an_empty_one(shape: tuple[int, ...]) -> None:
    signature = {"x": TensorSignature("x", "FP32", None)}
    check_inputs(signature, [TensorSpec("x", "FP32", shape)])
    with pytest.raises(InvalidArgument, match=r"^input x: expected shape of any rank, any sizes from 1, got \[0\]$"):
        check_inputs(signature, [TensorSpec("x", "FP32", (0,))])


def test_a_scalar_and_any_rank_are_not_the_same_to_a_client() -> None:
    scalar, unknown = (Built("", (TensorSignature("x", "FP32", shape),), (), (), "", 0) for shape in ((), None))
    assert check_same(unknown, unknown) == ""
    assert check_same(scalar, unknown) == "inputs: expected x FP32 [], got x FP32 of any rank"


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
