"""Tests of the special float values in test rows, and of how they are found."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_common.rowtest.bits import differing_rows
from weightd_common.rowtest.rows import SPECIALS, SpecialFloats, TestRows, rows_with_special_values
from weightd_protocol.messages.inference import TensorSignature

DTYPES = {"FP16": ("<f2", 10), "FP32": ("<f4", 23), "FP64": ("<f8", 52)}


def kind_of(bits: int, nbytes: int, mantissa: int) -> Any:
    """Return the kind of a float from its bits, or None for an ordinary one."""
    sign = 1 << (8 * nbytes - 1)
    exponent, rest = (bits & ~sign) >> mantissa, bits & ((1 << mantissa) - 1)
    if exponent == (sign >> mantissa) - 1:
        return SpecialFloats.NAN if rest else SpecialFloats.INFINITY
    if exponent:
        return None
    return SpecialFloats.SUBNORMAL if rest else SpecialFloats.NEGATIVE_ZERO if bits & sign else None


@pytest.mark.parametrize("datatype", DTYPES)
@given(data=st.data())
def test_classifies_floats_by_their_bits(datatype: str, data: Any) -> None:
    dtype, mantissa = np.dtype(DTYPES[datatype][0]), DTYPES[datatype][1]
    sign, least = 1 << (8 * dtype.itemsize - 1), 1 << mantissa
    edges = [0, 1, least - 1, least, sign - least - 1, sign - least, sign - least + 1, sign - 1]
    some = st.sampled_from([*edges, *[each | sign for each in edges]]) | st.integers(0, 2 * sign - 1)
    bits = data.draw(st.lists(some, min_size=1, max_size=8))
    rows = {"x": np.array(bits, f"u{dtype.itemsize}").view(dtype)[:, None]}
    for special in SPECIALS:
        expected = [kind_of(each, dtype.itemsize, mantissa) is special for each in bits]
        assert rows_with_special_values(rows, ["x"], [special]).tolist() == expected
    assert rows_with_special_values(rows, ["x"], SPECIALS).any() == any(
        kind_of(each, dtype.itemsize, mantissa) for each in bits
    )


@pytest.mark.parametrize("dims", [(), (1,), (3,), (7, 9), (0,)])
@pytest.mark.parametrize("datatype", DTYPES)
def test_every_other_row_has_special_values(datatype: str, dims: Tuple[int, ...]) -> None:
    inputs = [TensorSignature("x", datatype, (-1, *dims)), TensorSignature("i", "INT32", (-1, 2))]
    rows = TestRows(inputs, {"x": (1, *dims), "i": (1, 2)})
    assert rows.has_floats
    found = rows.with_special_values(16, SPECIALS)
    if dims == (0,):
        return
    assert rows_with_special_values(found, ["i", "x"], SPECIALS)[::2].all()
    assert all(rows_with_special_values(found, ["x"], [special]).any() for special in SPECIALS)
    # The other rows, and earlier selections, are unchanged.
    before = rows.select([*range(16)])
    assert found["x"][1::2].tobytes() == before["x"][1::2].tobytes()
    assert not rows_with_special_values(before, ["x"], [SpecialFloats.NAN, SpecialFloats.INFINITY]).any()
    assert not TestRows(inputs[1:], {"i": (1, 2)}).has_floats


def test_compares_all_bits_of_all_outputs() -> None:
    alone: Dict[str, Any] = {"y": np.zeros((4, 2), np.float32), "z": np.zeros((4, 0)), "i": np.zeros(4, np.int8)}
    together = {name: array.copy() for name, array in alone.items()}
    together["y"][1, 1] = -0.0
    together["i"][3] = 1
    assert differing_rows(together, alone).tolist() == [False, True, False, True]
