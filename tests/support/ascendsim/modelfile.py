"""Simulated model file: a magic, a header in JSON, and the weights without a checksum.

A file with flipped bytes in the weights, or with other weights of the same size, therefore loads without an error.

An exported model is a MindIR file with inputs and outputs (mind_ir.proto: ModelProto.graph, whose input and output have
a name, dimensions with -1 and a datatype), and with all of the above in an additional field.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence

import numpy as np
from numpy.typing import NDArray

from ascendsim import protobuf

Floats = NDArray[np.float32]

_MAGIC = b"ASCENDSIM MINDIR\n"
_ENCRYPTED = b"ASCENDSIM LOCKED\n"
_HEADER_DIGITS = 8
_PAYLOAD = 1000  # the field of a ModelProto that only the simulator knows

# Values of TensorProto.DataType for the types of simulated models.
_PROTO_TYPES = {
    "FLOAT32": 1, "UINT8": 2, "INT8": 3, "UINT16": 4, "INT16": 5, "INT32": 6, "INT64": 7, "BOOL": 9, "FLOAT16": 10,
    "FLOAT64": 11, "UINT32": 12, "UINT64": 13, "BFLOAT16": 16,
}  # fmt: skip


class ModelFileError(Exception):
    """Error: the file is no model file, or incomplete."""


class TensorSpec(NamedTuple):
    """An input or output; a free dimension is -1, `dtype` is a name of `DataType`, or "BFLOAT16"."""

    name: str
    shape: List[int]
    dtype: str = "FLOAT32"


class ModelFile(NamedTuple):
    """Contents of a model file.

    Attributes:
        kind: "mlp", "pair", or "slice" with the steps of `network`.
        layers: of an "mlp".
        width: the last dimension of every input and output.
        inputs: in order.
        outputs: in order.
        weight_bytes: size of the weights on a card; may be more than the file holds.
        bundle: whether the model was converted for `update_weights`.
        weights: the weights in the file.
        gears: the sizes that the model was converted for on a card, each for all free dimensions in their order, or
            for the batch alone; empty: any size.
        dynamic_dims: the converter's record of the gears, which exists only for ge.dynamicDims in the section
            acl_build_options, not for dynamic_batch_size (converter.cc:1065).
        input_shape: the converter's record of the shapes: "x:-1,64;y:-1,4".
        exported: whether the framework exported the model with its operators, for the provider "ge". Otherwise it was
            converted for a card to one operator that holds an OM, for ACL. Neither accepts the other kind.
        steps: steps of a "slice".
        workspace_bytes: size of the workspace; 0: the value of the host's switches.
    """

    kind: str
    layers: int
    width: int
    inputs: List[TensorSpec]
    outputs: List[TensorSpec]
    weight_bytes: int
    bundle: bool
    weights: bytes
    gears: Sequence[Sequence[int]] = ()
    dynamic_dims: str = ""
    input_shape: str = ""
    exported: bool = False
    steps: Sequence[Sequence[Any]] = ()
    workspace_bytes: int = 0

    @property
    def largest(self) -> int:
        """The batch of the largest gear."""
        return max(gear[0] for gear in self.gears)


def write(path: Path, model: ModelFile, key: bytes = b"") -> Path:
    """Write a model file; with a key it can only be read with that key."""
    fields = model._asdict()
    del fields["weights"]
    fields["stored"] = len(model.weights)
    header = json.dumps(fields, sort_keys=True).encode()
    data = _MAGIC + f"{len(header):0{_HEADER_DIGITS}d}".encode() + header + model.weights
    if model.exported:
        data = _graph(model) + protobuf.data(_PAYLOAD, data)
    path.write_bytes(_ENCRYPTED + hashlib.sha256(key).digest() + data if key else data)
    return path


def read(path: Path, key: bytes = b"") -> ModelFile:
    """Read a model file, or raise `ModelFileError`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelFileError(str(error)) from None
    if key:
        data = _decrypt(data, key)
    graph, magic, data = data.partition(_MAGIC)
    data = magic + data
    if not magic:
        raise ModelFileError("not a model")
    begin = len(_MAGIC) + _HEADER_DIGITS
    try:
        end = begin + int(data[len(_MAGIC) : begin])
        fields: Dict[str, Any] = json.loads(data[begin:end].decode())
        stored = fields.pop("stored")
        for each in ("inputs", "outputs"):
            fields[each] = [TensorSpec(*row) for row in fields[each]]
        model = ModelFile(weights=data[end:], **fields)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(f"damaged: {error}") from None
    if len(model.weights) != stored:
        raise ModelFileError("truncated, or followed by other data")
    if graph != (_graph(model) + protobuf.data(_PAYLOAD, data)[: -len(data)] if model.exported else b""):
        raise ModelFileError("the MindIR graph does not match the simulated model")
    return model


def _graph(model: ModelFile) -> bytes:
    """Return a ModelProto: producer_name, producer_version, graph (with name, input, output)."""
    inputs = [protobuf.data(5, _value_info(spec)) for spec in model.inputs]
    outputs = [protobuf.data(6, _value_info(spec)) for spec in model.outputs]
    graph = protobuf.data(2, model.kind.encode()) + b"".join([*inputs, *outputs])
    return protobuf.data(2, b"MindSpore") + protobuf.data(3, b"2.7.0") + protobuf.data(7, graph)


def _value_info(spec: TensorSpec) -> bytes:
    dims = b"".join(protobuf.number(1, dim) for dim in spec.shape)
    tensor = dims + protobuf.number(2, _PROTO_TYPES[spec.dtype]) + protobuf.data(7, spec.name.encode())
    return protobuf.data(1, spec.name.encode()) + protobuf.data(2, tensor)


def compute(model: ModelFile, weights: Floats, inputs: Sequence[Floats]) -> List[Floats]:
    """Run the model with these weights (maybe not its own).

    Products and sums of single rows only: each row's answer is the same bits in every process, with every numpy and
    in every batch.
    """
    with np.errstate(all="ignore"):
        if model.kind == "mlp":
            return [_mlp(model, weights, inputs[0])]
        a, b = inputs
        scale = weights[: model.width]
        return [(a + b) * scale, (a - b) * scale]


def _mlp(model: ModelFile, weights: Floats, x: Floats) -> Floats:
    width = model.width
    layers = weights[: model.layers * width * width].reshape(model.layers, width, width)
    for layer in layers:
        total: Floats = np.zeros(x.shape, np.float32)
        for k in range(width):
            total += x[:, k : k + 1] * layer[k]
        x = np.maximum(total, np.float32(0))
    return x


def as_floats(data: Any, model: ModelFile) -> Floats:
    """Return a view of the model's weights in `data`, without a copy."""
    values: Floats = np.frombuffer(data, np.float32, len(model.weights) // 4)
    return values


def _decrypt(data: bytes, key: bytes) -> bytes:
    head = _ENCRYPTED + hashlib.sha256(key).digest()
    if not data.startswith(head):
        raise ModelFileError("Decrypt failed!")
    return data[len(head) :]
