"""Tests of the ONNX file check, which reads model inputs and outputs without an engine, also from damaged files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper

from testkit import models
from testkit.examples import examples
from weightd_daemon.engines import onnxruntime as onnx_signature
from weightd_protocol import limits


def problems(path: Path) -> list[str]:
    with path.open("rb") as file:
        return onnx_signature.problems(file)


X, Y = models.fp32("x", "N", 4), models.fp32("y", "N", 4)


def typed_value(name: str, datatype: int, *shape: models.Dim) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, datatype, list(shape))


def value_of_kind(name: str, kind: object) -> ValueInfoProto:
    return helper.make_value_info(name, kind)  # type: ignore[arg-type]


TENSOR = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
NOT_SENT = "is not a supported datatype; expected one of BOOL, "


def floats(count: int, name: str = "x", *shape: models.Dim) -> list[ValueInfoProto]:
    return [models.fp32(f"{name}{number}", *(shape or (1,))) for number in range(count)]


GOOD: dict[str, tuple[Sequence[ValueInfoProto], Sequence[ValueInfoProto]]] = {
    "every datatype": ([typed_value(f"x{each}", each, 2) for each in (1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13)], [Y]),
    "any rank": ([helper.make_tensor_value_info("x", TensorProto.FLOAT, None)], [Y]),
    "a scalar": ([models.fp32("x")], [Y]),
    "unknown size": ([models.fp32("x", -1)], [Y]),
    "output without a type": ([X], [ValueInfoProto(name="y")]),
    "maximum sizes": (
        floats(limits.MAX_TENSORS, "x", *[1] * limits.MAX_RANK),
        [models.fp32("y" * limits.MAX_NAME_BYTES, limits.MAX_DIM)],
    ),
}
STRING = typed_value("x", TensorProto.STRING, 1)
BAD: dict[str, tuple[Sequence[ValueInfoProto], Sequence[ValueInfoProto], list[str]]] = {
    "string": ([STRING], [Y], [f"input x: string {NOT_SENT}"]),
    "BF16": ([X], [typed_value("y", TensorProto.BFLOAT16, 1)], [f"output y: BF16 {NOT_SENT}"]),
    "complex": ([typed_value("x", TensorProto.COMPLEX64, 1)], [Y], [f"input x: complex64 {NOT_SENT}"]),
    "packed and small types": (
        [typed_value(f"x{each}", each, 1) for each in (17, 21, 22, 23, 24, 25, 26)],
        [Y],
        [
            f"input x{each}: {name} {NOT_SENT}"
            for each, name in (
                (17, "FLOAT8E4M3FN"),
                (21, "UINT4"),
                (22, "INT4"),
                (23, "FLOAT4E2M1"),
                (24, "FLOAT8E8M0"),
                (25, "UINT2"),
                (26, "INT2"),
            )
        ],
    ),
    "unknown datatype": ([typed_value("x", 99, 1)], [Y], [f"input x: datatype 99 {NOT_SENT}"]),
    "sequence": (
        [value_of_kind("x", helper.make_sequence_type_proto(TENSOR))],
        [Y],
        [f"input x: a sequence {NOT_SENT}"],
    ),
    "optional": (
        [X],
        [value_of_kind("y", helper.make_optional_type_proto(TENSOR))],
        [f"output y: optional {NOT_SENT}"],
    ),
    "too many": (floats(70), floats(65, "y"), ["70 inputs; expected at most 64", "65 outputs; expected at most 64"]),
    "rank": ([models.fp32("x", *[1] * 17)], [Y], ["input x: expected at most 16 dimensions"]),
    "size": ([models.fp32("x", 2**40 + 1)], [Y], [f"input x: a dimension of {2**40 + 1}; expected at most {2**40}"]),
    "no name": ([models.fp32("", 1)], [Y], ["input '': expected a name of 1 to 256 bytes"]),
    "long name": ([models.fp32("ä" * 129, 1)], [Y], [f"input '{'ä' * 36}...: expected a name of 1 to 256 bytes"]),
    "duplicate name": ([X, models.fp32("x", 1)], [Y], ["input x: there are two of this name"]),
    "several problems": (
        [typed_value("x", TensorProto.STRING, *[1] * 17)],
        [typed_value("y", TensorProto.STRING, 1)],
        [f"input x: string {NOT_SENT}", "input x: expected at most 16 dimensions", f"output y: string {NOT_SENT}"],
    ),
}


@pytest.mark.parametrize("case", [*GOOD, *BAD])
def test_checks_datatypes_and_sizes_of_inputs_and_outputs(case: str, tmp_path: Path) -> None:
    inputs, outputs, expected = BAD[case] if case in BAD else (*GOOD[case], [])
    found = problems(models.save(tmp_path / "m.onnx", [], inputs, outputs))
    assert len(found) == len(expected)
    assert [each for each, text in zip(found, expected, strict=True) if not each.startswith(text)] == []


def test_weights_do_not_count_as_inputs(tmp_path: Path) -> None:
    weights = [numpy_helper.from_array(np.zeros(1, np.float32), f"w{number}") for number in range(70)]
    assert problems(models.save(tmp_path / "m.onnx", [], [X, *floats(70, "w")], [Y], weights)) == []


def test_rejects_file_of_other_format(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"no protobuf")
    assert problems(path) == ["expected an ONNX model; the file has another format or is truncated"]


@settings(max_examples=examples(200))
@given(st.data())
def test_damaged_file_gives_printable_errors_or_none(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = models.save(tmp_path_factory.getbasetemp() / "changed.onnx", [], BAD["several problems"][0], [Y])
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    assert all(line.isprintable() for line in problems(path))
