"""Tests of the MindIR parser, also with truncated, foreign and hostile files."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import List, Tuple, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_common.modelfiles import mindir
from weightd_common.modelfiles.mindir import MindIr, MindIrTensor
from weightd_common.modelfiles.protobuf import Malformed
from weightd_protocol import limits

Value = Union[int, bytes, str]
FREE = 2**64 - 1  # The value -1 as an int64.


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def proto(*fields: Tuple[int, Value]) -> bytes:
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            raw = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(raw)) + raw
    return out


def tensor(datatype: int, *dims: int) -> bytes:
    return proto(*((1, dim) for dim in dims), (2, datatype))


def described(name: str, datatype: int, *dims: int) -> bytes:
    return proto((1, name), (2, tensor(datatype, *dims)))


def leaf(datatype: int, *dims: int) -> bytes:
    return proto((12, tensor(datatype, *dims)))


def several(name: str, *values: bytes) -> bytes:
    """Return an output that is a tuple without a tensor type."""
    return proto((1, name), (4, "Tuple"), (5, proto((16, 20), *((17, each) for each in values))))


def model(*parts: Tuple[int, bytes], producer: str = "MindSpore") -> bytes:
    return proto((1, "0.1.1"), (2, producer), (7, proto((2, "g"), (3, b"\0" * 300), *parts)), (13, 3))


def read(data: bytes) -> MindIr:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return mindir.read(file)


MODEL = model(
    (5, described("3_1_net_construct_3:x", 1, FREE, 16)),
    (5, described("3_1_net_construct_3:mask", 10, 4)),
    (6, described("3_1_net_construct_3:CNode_14:15", 1, FREE, 8)),
)


def test_names_inputs_by_argument_and_numbers_outputs() -> None:
    assert read(MODEL) == MindIr(
        (MindIrTensor("x", "FP32", (-1, 16)), MindIrTensor("mask", "FP16", (4,))),
        (MindIrTensor("output_0", "FP32", (-1, 8)),),
        True,
    )


def test_keeps_names_of_other_producers() -> None:
    data = model((5, described("a:0", 6)), (6, described("sum", 6)), producer="MindSpore Lite")
    assert read(data) == MindIr((MindIrTensor("a:0", "INT32", ()),), (MindIrTensor("sum", "INT32", ()),), False)


def test_flattens_tuples_of_outputs() -> None:
    inner = proto((16, 20), (17, leaf(7, 2)), (17, leaf(9)))
    data = model((6, several("f:CNode_3:1", leaf(6, FREE), inner, leaf(11, 1, 2))))
    names = ["output_0", "output_1", "output_2", "output_3"]
    kinds = [("INT32", (-1,)), ("INT64", (2,)), ("BOOL", ()), ("FP64", (1, 2))]
    assert read(data).outputs == tuple(MindIrTensor(name, *kind) for name, kind in zip(names, kinds))


def test_reads_packed_dimensions() -> None:
    packed = proto((1, varint(FREE) + varint(300)), (2, 1))
    assert read(model((6, proto((1, "y"), (2, packed))))).outputs[0].shape == (-1, 300)


def test_minus_two_means_any_rank() -> None:
    assert read(model((6, described("y", 1, 2**64 - 2)))).outputs[0].shape is None


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([MindIrTensor("x", "FP32", (-1,))], ""),
        ([MindIrTensor("x", "FP32", None)], ""),
        ([MindIrTensor("x", "bfloat16", ())], "bfloat16 is not a supported datatype"),
        ([MindIrTensor("x", "datatype 99", ())], "datatype 99 is not a supported datatype"),
        ([MindIrTensor("x", "FP32", ()), MindIrTensor("x", "FP32", ())], "two of this name"),
        ([MindIrTensor("", "FP32", ())], "expected a name of 1 to 256 bytes"),
        ([MindIrTensor("x" * 257, "FP32", ())], "expected a name of 1 to 256 bytes"),
        ([MindIrTensor("x", "FP32", (1,) * 17)], "expected at most 16 dimensions"),
        ([MindIrTensor("x", "FP32", (2**41,))], "expected at most 1099511627776"),
        ([MindIrTensor(f"x{n}", "FP32", ()) for n in range(65)], "expected at most 64 inputs"),
    ],
)
def test_finds_tensors_beyond_protocol_limits(tensors: List[MindIrTensor], problem: str) -> None:
    found = list(mindir.find_problems("input", tensors))
    assert (problem in found[0]) if problem else not found


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"hello", MODEL[:-200], model(), proto((1, "0.1.1"), (13, 3))])
def test_rejects_other_files(data: bytes) -> None:
    with pytest.raises(Malformed):
        read(data)


def test_rejects_deeply_nested_tuples() -> None:
    value = leaf(1)
    for _ in range(1000):
        value = proto((17, value))
    with pytest.raises(Malformed):
        read(model((6, proto((1, "y"), (5, value)))))


def test_keeps_only_one_tensor_above_the_limit() -> None:
    many = [described(f"x{n}", 1) for n in range(10_000)]
    wide = described("w", 1, *[1] * 10_000)
    data = model(*((5, each) for each in many), (6, several("y", *[leaf(1)] * 10_000)), (6, wide))
    found = read(data)
    assert (len(found.inputs), len(found.outputs)) == (limits.MAX_TENSORS + 1, limits.MAX_TENSORS + 1)
    assert len(read(model((6, wide))).outputs[0].shape or ()) == limits.MAX_RANK + 1


def test_truncates_huge_names() -> None:
    [output] = read(model((6, described("n" * 10_000_000, 1)), producer="another")).outputs
    assert limits.MAX_NAME_BYTES < len(output.name) < 10_000


def test_skips_weights(tmp_path: Path) -> None:
    size = 2**33
    graph = proto((6, described("y", 1, 3)))
    head = varint(3 << 3 | 2) + varint(size)
    path = tmp_path / "large.mindir"
    with path.open("wb") as file:
        file.write(proto((2, "MindSpore")) + varint(7 << 3 | 2) + varint(len(head) + size + len(graph)) + head)
        file.seek(size, io.SEEK_CUR)
        file.write(graph)
    with path.open("rb") as file:
        assert mindir.read(file).outputs == (MindIrTensor("output_0", "FP32", (3,)),)


def survives(data: bytes) -> None:
    try:
        found = read(data)
    except Malformed:
        return
    for what, tensors in (("input", found.inputs), ("output", found.outputs)):
        list(mindir.find_problems(what, tensors))


@given(st.binary(max_size=300))
def test_parses_or_rejects_any_bytes(data: bytes) -> None:
    survives(data)


@given(st.data())
def test_parses_or_rejects_changed_models(data: st.DataObject) -> None:
    whole = bytearray(MODEL + model((6, several("y", leaf(1, 2), leaf(6)))))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(whole[: data.draw(st.integers(0, len(whole)))]))


def fields(depth: int) -> st.SearchStrategy[bytes]:
    value: st.SearchStrategy[Value] = st.integers(0, 2**64 - 1) | st.binary(max_size=20) | st.text(max_size=20)
    if depth:
        value |= fields(depth - 1)
    return st.lists(st.tuples(st.sampled_from([1, 2, 5, 6, 7, 12, 17]), value), max_size=6).map(lambda f: proto(*f))


@given(fields(5))
def test_parses_or_rejects_any_fields(data: bytes) -> None:
    survives(data)
    survives(proto((7, proto((6, data)))))
