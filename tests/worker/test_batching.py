"""Tests of the layout of batches: merged inputs and the slices of outputs."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_common.rowtest.bits import NotBatchable
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import RequestDescription
from weightd_protocol.tensors import describe_request, describe_response, frame_of
from weightd_worker.batching import BatchLayout

X, INDEX = np.zeros((2, 3), np.float32), np.zeros((2, 1), np.int64)


def described(**arrays: Any) -> RequestDescription:
    return describe_request("m", arrays)


def request(rows: int, seed: int) -> Dict[str, Any]:
    random = np.random.RandomState(seed)
    return {
        "x": random.rand(rows, 3).astype(np.float32),
        "i": random.randint(0, 99, (rows, 1)),
        "n": np.zeros((rows, 0)),
    }


requests = st.lists(st.builds(request, st.integers(0, 5), st.integers(0, 99)), min_size=1, max_size=9)


@given(
    parts=requests,
    turns=st.lists(st.booleans(), min_size=9, max_size=9),
    rows=st.integers(0, 20),
    sizes=st.sampled_from([(), (4, 16)]),
)
def test_concatenates_rows_and_pads_with_the_last(
    parts: List[Dict[str, Any]], turns: Sequence[bool], rows: int, sizes: Tuple[int, ...]
) -> None:
    parts = [{name: part[name] for name in (reversed([*part]) if turn else part)} for part, turn in zip(parts, turns)]
    joint = BatchLayout([described(**part) for part in parts], rows, sizes)
    inputs = joint.merge_inputs([[frame_of(array) for array in part.values()] for part in parts])
    assert list(inputs) == list(parts[0])
    for name, array in inputs.items():
        expected = np.concatenate([part[name] for part in parts])
        used = max(rows, len(expected))
        total = min([size for size in sizes if size >= used], default=used)
        last = expected[-1:] if len(expected) else np.zeros_like(array[:1])
        expected = np.concatenate([expected, *[last] * (total - len(expected))])
        np.testing.assert_array_equal(array, expected)
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        assert array.flags.aligned


@given(parts=requests, rows=st.integers(0, 20))
def test_each_request_gets_its_rows(parts: List[Dict[str, Any]], rows: int) -> None:
    wanted = [("n", "x") if index % 2 else None for index in range(len(parts))]
    joint = BatchLayout([describe_request("m", part, names) for part, names in zip(parts, wanted)], rows)
    inputs = joint.merge_inputs([[frame_of(array) for array in part.values()] for part in parts])
    joint.learn_slices(inputs)
    everything = [frame_of(array) for array in inputs.values()]
    for part, names, (description, cuts) in zip(parts, wanted, joint.slices):
        own = part if names is None else {name: part[name] for name in names}
        assert description == describe_response("m", own)
        assert [bytes(everything[at][begin:end]) for at, begin, end in cuts] == [
            each.tobytes() for each in own.values()
        ]


@pytest.mark.parametrize(
    "other",
    [
        {"x": X},
        {"x": X, "y": INDEX},
        {"x": X, "i": X},
        {"x": np.zeros((2, 4), np.float32), "i": INDEX},
        {"x": X[:1], "i": INDEX},
    ],
)
def test_rejects_requests_that_differ_beyond_rows(other: Dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="expected"):
        BatchLayout([described(x=X, i=INDEX), described(**other)])


def test_scalars_have_no_rows() -> None:
    with pytest.raises(InvalidArgument, match="expected the same number of rows in each input"):
        BatchLayout([described(x=np.float32(1) + np.zeros((), np.float32))])


@pytest.mark.parametrize("shape", [(), (1, 4), (5, 4)])
def test_rejects_answer_with_wrong_number_of_rows(shape: Tuple[int, ...]) -> None:
    joint = BatchLayout([described(x=X), described(x=X)])
    with pytest.raises(NotBatchable, match=r"output z has shape \[.*\] for 4 rows"):
        joint.learn_slices({"y": np.zeros((4, 7)), "z": np.zeros(shape)})
