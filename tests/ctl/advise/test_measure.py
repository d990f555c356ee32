"""Tests of the order in which rows are requested."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Set, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightctl.advise.measure import BatchTest, BatchTestResult, FileRows, SyntheticRows, block_requests, count_blocks
from weightd.client import Client
from weightd_common.rowtest.rows import RowKind
from weightd_protocol.errors import Internal, InvalidArgument
from weightd_protocol.messages.inference import TensorSignature, TensorSpec

SIZES = st.sets(st.integers(2, 40), min_size=1, max_size=5).map(lambda sizes: [1, *sorted(sizes)])


@given(SIZES)
def test_each_row_runs_alone_and_in_each_size(sizes: List[int]) -> None:
    rows: Dict[int, Set[int]] = {size: set() for size in sizes}
    alone = 0
    for each in block_requests(sizes):
        assert 0 <= each.first < each.end <= max(sizes)
        rows[each.rows] |= {*range(each.first, each.end)}
        if each.rows == 1:
            assert each.first == alone
            alone += 1
        assert each.end <= alone
    assert all(covered == {*range(max(sizes))} for covered in rows.values())


@given(SIZES)
def test_sizes_alternate(sizes: List[int]) -> None:
    ends = dict.fromkeys(sizes, 0)
    for each in block_requests(sizes):
        assert each.end - ends[each.rows] <= each.rows
        ends[each.rows] = each.end
        assert all(each.end - end <= size for size, end in ends.items())


@given(SIZES, st.integers(1, 1000))
def test_number_of_blocks(sizes: List[int], different: int) -> None:
    number = count_blocks(sizes, different)
    assert (number - 1) * max(sizes) < different <= number * max(sizes)


X = TensorSignature("x", "FP32", (-1, 9))


class Model:
    """A fake client of a daemon with one model, which is a function."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer

    def infer(self, _: str, inputs: Dict[str, Any]) -> Dict[str, Any]:
        return {"y": self._answer(inputs["x"])}


def trial(answer: Callable[[Any], Any], signature: TensorSignature = X) -> BatchTest:
    def quiet(x: Any) -> Any:
        with np.errstate(all="ignore"):
            return answer(x)

    return BatchTest(cast(Client, Model(quiet)), "m", [signature])


def generated_rows() -> SyntheticRows:
    return SyntheticRows([TensorSpec("x", "FP32", (32, 9))])


def table(size: int, error: Optional[Exception] = None) -> Callable[[Any], Any]:
    """Return an embedding with float indices."""

    def answer(x: Any) -> Any:
        if (abs(x.astype(int)) >= size).any():
            raise error or InvalidArgument("out of data bounds")
        return x.astype(int).astype(np.float32)

    return answer


@pytest.mark.parametrize("error", [InvalidArgument("out of bounds"), Internal("out of bounds")])
def test_uses_rows_that_the_model_accepts(error: Exception) -> None:
    source = generated_rows()
    assert trial(lambda x: x).find_kind(source, 32) is RowKind.SCALED
    source.kind = trial(table(12, error)).find_kind(source, 32)
    x = source.block(3, 32)["x"]
    # The table would map all scaled values to its first row, so the rows consist of 0 and 1.
    assert table(1 + int(x.max()))(x).max() <= 1
    assert trial(table(12, error)).verify(source, 16, ()) == BatchTestResult("")


def test_finds_differences_at_other_batch_sizes() -> None:
    note = trial(lambda x: x + (len(x) == 3)).verify(generated_rows(), 16, ()).note
    assert note.startswith("output y: 3 of 3 rows that were batched differ")
    # With these sizes the daemon never runs three rows.
    assert trial(lambda x: x + (len(x) == 3)).verify(generated_rows(), 16, (1, 2, 4, 8, 16)) == BatchTestResult("")


def test_input_of_any_rank_has_no_rows() -> None:
    verified = trial(lambda x: x, TensorSignature("x", "FP32", None)).verify(generated_rows(), 16, ())
    assert verified == BatchTestResult("input x has no rows: it may be of any rank")


def test_asks_for_file_if_generated_rows_fail(tmp_path: Any) -> None:
    def positive(x: Any) -> Any:
        if (x < 3).any():
            raise InvalidArgument("expected at least 3")
        return x

    path = tmp_path / "rows.npz"
    np.savez(str(path), x=np.arange(3, 21, dtype=np.float32).reshape(2, 9))
    source = FileRows(str(path), [X])
    assert trial(positive).verify(source, 16, ()) == BatchTestResult("", needs_sample=True)
    assert trial(lambda x: x).verify(source, 16, ()) == BatchTestResult("")
    refused = trial(positive).verify(generated_rows(), 16, ())
    assert refused.note.startswith("the model does not run on 1 rows: expected at least 3; set `selftest`")
