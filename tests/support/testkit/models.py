"""Writers of small ONNX models, with the same bytes for the same seed.

The files have opset 17 and IR version 8: onnxruntime 1.20 and later runs them, MindSpore Lite 2.0.0 converts them. Each
writer takes the path of the file to write and returns it. FP32 is float32, N and M are free batch sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray
from onnx import (
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    external_data_helper,
    helper,
    numpy_helper,
)

OPSET = 17
IR_VERSION = 8

Dim = Union[int, str]


def mlp(path: Path, layers: int = 12, width: int = 2048, batch: Dim = "N", seed: int = 0) -> Path:
    """`layers` times relu(x @ W), W FP32 [width, width]: "x" FP32 [batch, width] -> "y" of the same shape.

    The defaults hold 192 MiB of weights. He scaling: values neither vanish nor explode over the layers.
    """
    rng = np.random.default_rng(seed)
    names = ["x", *(f"h{i}" for i in range(1, layers)), "y"]
    nodes: list[NodeProto] = []
    weights: list[TensorProto] = []
    for i in range(layers):
        weights.append(_weight(f"w{i}", _he(rng, width, width)))
        nodes.append(helper.make_node("MatMul", [names[i], f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Relu", [f"m{i}"], [names[i + 1]]))
    return save(path, nodes, [fp32("x", batch, width)], [fp32("y", batch, width)], weights)


def tiny(path: Path, seed: int = 0) -> Path:
    """Write one MatMul, W FP32 [64, 64]: "x" FP32 [N, 64] -> "y" FP32 [N, 64]."""
    weight = _weight("w", _he(np.random.default_rng(seed), 64, 64))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return save(path, nodes, [fp32("x", "N", 64)], [fp32("y", "N", 64)], [weight])


def thick(path: Path, rows: Dim = 4096, seed: int = 0) -> Path:
    """Write relu(x @ V) @ W, "x" FP32 [rows, 64] -> "y" FP32 [rows, 8], with 16 KiB of activations for each row."""
    rng = np.random.default_rng(seed)
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["m"]),
        helper.make_node("Relu", ["m"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    weights = [_weight("v", _he(rng, 64, 4096)), _weight("w", _he(rng, 4096, 8))]
    return save(path, nodes, [fp32("x", rows, 64)], [fp32("y", rows, 8)], weights)


# Blocks of an inverted residual net: expansion of the channels, output channels, repeats, stride of the first.
_BLOCKS = (
    (1, 12, 1, 1),
    (6, 20, 2, 2),
    (6, 24, 3, 2),
    (6, 48, 4, 2),
    (6, 72, 3, 1),
    (6, 120, 3, 2),
    (6, 240, 1, 1),
)


def convolutions(path: Path, size: int = 224, seed: int = 0) -> Path:
    """Write an image classifier: "x" FP32 [N, 3, size, size] -> "y" FP32 [N, 1000].

    The model has 10 MB of weights in 53 convolutions, most of them 1 x 1, with depthwise 3 x 3 convolutions between.
    """
    net = _Net(seed)
    now, channels = net.convolution("x", 3, 24, kernel=3, stride=2), 24
    for expansion, after, repeats, stride in _BLOCKS:
        for repeat in range(repeats):
            wide = channels * expansion
            inner = net.convolution(now, channels, wide) if expansion > 1 else now
            inner = net.convolution(inner, wide, wide, kernel=3, stride=1 if repeat else stride, group=wide)
            inner = net.convolution(inner, wide, after, bounded=False)
            # The sum is halved, because the values would grow over many blocks.
            now = net.add("Mul", net.add("Add", now, inner), net.weight(np.float32(0.5))) if repeat else inner
            channels = after
    now = net.add("GlobalAveragePool", net.convolution(now, channels, 1280))
    now = net.add("Flatten", now)
    net.nodes.append(helper.make_node("MatMul", [now, net.weight(_he(net.rng, 1280, 1000))], ["y"]))
    return save(path, net.nodes, [fp32("x", "N", 3, size, size)], [fp32("y", "N", 1000)], net.weights)


def transformer(path: Path, layers: int = 4, tokens: int = 64, width: int = 256, heads: int = 4, seed: int = 0) -> Path:
    """An encoder: "x" FP32 [N, tokens, width] -> "y" of the same shape. The defaults hold 13 MB of weights."""
    net = _Net(seed)
    split, joined = net.shape(0, tokens, heads, width // heads), net.shape(0, tokens, width)
    small = net.weight(np.sqrt(heads / width))
    now = "x"
    for _ in range(layers):
        normal = net.normalized(now)
        query, key, value = (
            net.add("Transpose", net.add("Reshape", net.linear(normal, width, width), split), perm=order)
            for order in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
        )
        heard = net.add("Softmax", net.add("Mul", net.add("MatMul", query, key), small), axis=-1)
        values = net.add("Transpose", net.add("MatMul", heard, value), perm=[0, 2, 1, 3])
        now = net.add("Add", now, net.linear(net.add("Reshape", values, joined), width, width))
        wide = net.add("Relu", net.linear(net.normalized(now), width, 4 * width))
        now = net.add("Add", now, net.linear(wide, 4 * width, width))
    net.nodes[-1].output[0] = "y"
    return save(path, net.nodes, [fp32("x", "N", tokens, width)], [fp32("y", "N", tokens, width)], net.weights)


class _Net:
    """A graph under construction: its nodes and weights."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        self.rng = np.random.default_rng(seed)

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; return the name of its output."""
        output = f"h{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def weight(self, values: Any) -> str:
        """Add a weight; return its name."""
        self.weights.append(_weight(f"w{len(self.weights)}", np.asarray(values, np.float32)))
        return self.weights[-1].name

    def shape(self, *dims: int) -> str:
        """Add a shape for a Reshape, in which 0 keeps the dimension; return its name."""
        self.weights.append(numpy_helper.from_array(np.array(dims), f"s{len(self.weights)}"))
        return self.weights[-1].name

    def linear(self, x: str, before: int, after: int) -> str:
        """Add a product with a bias; return the name of the sum."""
        bias = self.rng.standard_normal(after, dtype=np.float32) * np.float32(0.1)
        return self.add("Add", self.add("MatMul", x, self.weight(_he(self.rng, before, after))), self.weight(bias))

    def normalized(self, x: str) -> str:
        """Normalize each row to mean 0 and variance 1 with operators of both engines; return the name of the output."""
        away = self.add("Sub", x, self.add("ReduceMean", x, axes=[-1]))
        variance = self.add("ReduceMean", self.add("Mul", away, away), axes=[-1])
        return self.add("Div", away, self.add("Sqrt", self.add("Add", variance, self.weight(1e-5))))

    def convolution(
        self, x: str, before: int, after: int, kernel: int = 1, stride: int = 1, group: int = 1, *, bounded: bool = True
    ) -> str:
        """Add a convolution with a bias, and a clip to [0, 6]; return the name of the output."""
        weights = _he(self.rng, before // group * kernel**2, after).T.reshape(after, before // group, kernel, kernel)
        bias = self.rng.standard_normal(after, dtype=np.float32) * np.float32(0.1)
        attributes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        y = self.add("Conv", x, self.weight(weights), self.weight(bias), group=group, dilations=[1, 1], **attributes)
        return self.add("Clip", y, self.weight(np.float32(0)), self.weight(np.float32(6))) if bounded else y


def two_inputs(path: Path) -> Path:
    """Write inputs "a", "b" FP32 [N, 4] -> "sum" = a + b, "difference" = a - b, which show swapped inputs."""
    nodes = [
        helper.make_node("Add", ["a", "b"], ["sum"]),
        helper.make_node("Sub", ["a", "b"], ["difference"]),
    ]
    inputs = [fp32("a", "N", 4), fp32("b", "N", 4)]
    return save(path, nodes, inputs, [fp32("sum", "N", 4), fp32("difference", "N", 4)])


def two_batches(path: Path) -> Path:
    """Inputs "a" FP32 [N, 4], "b" FP32 [M, 4] -> "sum": the signature allows N != M, the engine fails on it.

    (A batch of 1 broadcasts.) This failed predict is the one that poisons a MindSpore Lite model.
    """
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"])]
    return save(path, nodes, [fp32("a", "N", 4), fp32("b", "M", 4)], [fp32("sum", "N", 4)])


def integers(path: Path, seed: int = 0) -> Path:
    """An embedding: "ids" INT64 [N, 3], each from 0 to 15, -> "vectors" FP32 [N, 3, 4]."""
    table = _weight("table", np.random.default_rng(seed).standard_normal((16, 4), dtype=np.float32))
    nodes = [helper.make_node("Gather", ["table", "ids"], ["vectors"], axis=0)]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", 3])
    return save(path, nodes, [ids], [fp32("vectors", "N", 3, 4)], [table])


def embedding(path: Path, seed: int = 0) -> Path:
    """Write an embedding of 12 words with float indices: "x" FP32 [N, 9] -> "y" FP32 [N, 9, 8]."""
    table = _weight("table", _he(np.random.default_rng(seed), 12, 8))
    nodes = [
        helper.make_node("Cast", ["x"], ["ids"], to=TensorProto.INT32),
        helper.make_node("Gather", ["table", "ids"], ["y"], axis=0),
    ]
    return save(path, nodes, [fp32("x", "N", 9)], [fp32("y", "N", 9, 8)], [table])


def fixed(path: Path, seed: int = 0) -> Path:
    """No free dimension: "x" FP32 [2, 3] @ W FP32 [3, 5] -> "y" FP32 [2, 5]."""
    weight = _weight("w", _he(np.random.default_rng(seed), 3, 5))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return save(path, nodes, [fp32("x", 2, 3)], [fp32("y", 2, 5)], [weight])


def with_external_data(path: Path, locations: int = 2, width: int = 64, seed: int = 0) -> Path:
    """Write a chain of MatMuls, "x" FP32 [N, width] -> "y"; weight i is in a separate file, STEM.w<i>.bin."""
    rng = np.random.default_rng(seed)
    names = ["x", *(f"h{i}" for i in range(1, locations)), "y"]
    nodes: list[NodeProto] = []
    weights: list[TensorProto] = []
    for i in range(locations):
        weights.append(_external(path.with_name(f"{path.stem}.w{i}.bin"), _weight(f"w{i}", _he(rng, width, width))))
        nodes.append(helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]))
    return save(path, nodes, [fp32("x", "N", width)], [fp32("y", "N", width)], weights)


def loop(path: Path) -> Path:
    """Input "n" INT64 [1] -> "y" INT64 [1] = n, found by counting: each thousand million takes minutes.

    For ONNX Runtime only.
    """
    one = numpy_helper.from_array(np.ones(1, np.int64), "one")
    flag = helper.make_tensor_value_info("going", TensorProto.BOOL, [])
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["goes_on"]),
            helper.make_node("Add", ["so_far", "one"], ["more"]),
        ],
        "count",
        [
            helper.make_tensor_value_info("round", TensorProto.INT64, []),
            flag,
            helper.make_tensor_value_info("so_far", TensorProto.INT64, [1]),
        ],
        [
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("more", TensorProto.INT64, [1]),
        ],
        [one],
    )
    zero = numpy_helper.from_array(np.zeros(1, np.int64), "zero")
    node = helper.make_node("Loop", ["n", "", "zero"], ["y"], body=body)
    number = [helper.make_tensor_value_info(name, TensorProto.INT64, [1]) for name in ("n", "y")]
    return save(path, [node], number[:1], number[1:], [zero])


def patient(path: Path) -> Path:
    """Input "n" INT64 [N] -> "y" INT64 [N] = n, found by counting to the largest n: each million takes a second or so.

    For ONNX Runtime only.
    """
    scalar = [helper.make_tensor_value_info(name, TensorProto.INT64, []) for name in ("round", "so_far", "more")]
    flags = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("going", "goes_on")]
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["goes_on"]),
            helper.make_node("Add", ["so_far", "one"], ["more"]),
        ],
        "count",
        [scalar[0], flags[0], scalar[1]],
        [flags[1], scalar[2]],
        [numpy_helper.from_array(np.ones((), np.int64), "one")],
    )
    nodes = [
        helper.make_node("ReduceMax", ["n"], ["largest"], keepdims=0),
        helper.make_node("Loop", ["largest", "", "zero"], ["counted"], body=body),
        helper.make_node("Sub", ["counted", "largest"], ["nothing"]),
        helper.make_node("Add", ["n", "nothing"], ["y"]),
    ]
    n, y = (helper.make_tensor_value_info(name, TensorProto.INT64, ["N"]) for name in "ny")
    return save(path, nodes, [n], [y], [numpy_helper.from_array(np.zeros((), np.int64), "zero")])


def batch_row_count(path: Path) -> Path:
    """Write input "x" FP32 [N, 1] -> "rows" FP32 [N, 1] = N, the number of rows of the batch."""
    nodes = [
        helper.make_node("Mul", ["x", "zero"], ["zeros"]),
        helper.make_node("Add", ["zeros", "one"], ["ones"]),
        helper.make_node("ReduceSum", ["ones", "first"], ["sum"], keepdims=1),
        helper.make_node("Add", ["zeros", "sum"], ["rows"]),
    ]
    constants = [_weight("zero", np.zeros(1, np.float32)), _weight("one", np.ones(1, np.float32))]
    first = numpy_helper.from_array(np.zeros(1, np.int64), "first")
    return save(path, nodes, [fp32("x", "N", 1)], [fp32("rows", "N", 1)], [*constants, first])


def quantized(path: Path) -> Path:
    """Input "x" FP32 [N, 64] -> "y" FP32 [N, 64], scaled by the largest value of all rows. For ONNX Runtime only."""
    weights = (np.arange(64 * 64) % 251 - 125).astype(np.int8).reshape(64, 64)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "zero"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "scale"], ["y"]),
    ]
    weight = numpy_helper.from_array(weights, "w")
    return save(path, nodes, [fp32("x", "N", 64)], [fp32("y", "N", 64)], [weight])


def scaled(path: Path) -> Path:
    """Inputs "x" FP32 [N, 4], "s" FP32 [4] -> "y" FP32 [N, 4] = x * s: "s" goes with all rows."""
    return save(
        path, [helper.make_node("Mul", ["x", "s"], ["y"])], [fp32("x", "N", 4), fp32("s", 4)], [fp32("y", "N", 4)]
    )


def with_scalar(path: Path) -> Path:
    """Inputs "x" FP32 [N, 2], "rate" INT64 [], "offset" FP32 [1] -> "y" FP32 [N, 2] = x * rate + offset."""
    nodes = [
        helper.make_node("Cast", ["rate"], ["factor"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["x", "factor"], ["product"]),
        helper.make_node("Add", ["product", "offset"], ["y"]),
    ]
    rate = helper.make_tensor_value_info("rate", TensorProto.INT64, [])
    return save(path, nodes, [fp32("x", "N", 2), rate, fp32("offset", 1)], [fp32("y", "N", 2)])


def lengths(path: Path) -> Path:
    """Write input "x" FP32 [N, T] -> "y" FP32 [N, T] = relu(3 * x + 1); each length T is a separate shape."""
    nodes = [
        helper.make_node("Mul", ["x", "three"], ["product"]),
        helper.make_node("Add", ["product", "one"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["y"]),
    ]
    constants = [_weight("three", np.full(1, 3, np.float32)), _weight("one", np.ones(1, np.float32))]
    return save(path, nodes, [fp32("x", "N", "T")], [fp32("y", "N", "T")], constants)


def random_output(path: Path) -> Path:
    """Input "x" FP32 [N, 4] plus noise from [0, 1) -> "y" FP32 [N, 4]: no two answers are equal.

    For ONNX Runtime only: MindSpore Lite's converter does not know RandomUniformLike.
    """
    nodes = [
        helper.make_node("RandomUniformLike", ["x"], ["noise"], low=0.0, high=1.0),
        helper.make_node("Add", ["x", "noise"], ["y"]),
    ]
    return save(path, nodes, [fp32("x", "N", 4)], [fp32("y", "N", 4)])


def declared_for_one(path: Path, node: str = "Relu") -> Path:
    """Write input "x" FP32 [N, 2, 3] -> "y" of the same shape, which the file declares as [1, 2, 3].

    Exports with a batch of 1 look like this. With "RandomNormalLike" no two answers are equal. For ONNX Runtime only.
    """
    return save(path, [helper.make_node(node, ["x"], ["y"])], [fp32("x", "N", 2, 3)], [fp32("y", 1, 2, 3)])


def dies_of_small_images(path: Path) -> Path:
    """Input "x" FP32 [N, 3, H, W] -> "y" FP32 [N, 3, H / 64, W / 64].

    MindSpore Lite 2.0.0 crashes with SIGSEGV in a depthwise 5 x 5 convolution if the output is 1 x 1.
    """
    weight = _weight("w", np.arange(75, dtype=np.float32).reshape(3, 1, 5, 5) % 5 - 2)
    pool = helper.make_node("MaxPool", ["x"], ["p"], kernel_shape=[64, 64], strides=[64, 64], pads=[0] * 4)
    attributes: dict[str, Any] = {
        "kernel_shape": [5, 5],
        "pads": [2] * 4,
        "strides": [1, 1],
        "dilations": [1, 1],
        "group": 3,
    }
    nodes = [pool, helper.make_node("Conv", ["p", "w"], ["y"], **attributes)]
    return save(path, nodes, [fp32("x", "N", 3, "H", "W")], [fp32("y", "N", 3, "A", "B")], [weight])


def floored(path: Path, width: int = 3) -> Path:
    """Input "x" FP32 [N, width] -> "y" of the same shape, rounded down.

    ONNX Runtime computes several values at once, except the last ones, for which a signalling NaN stays signalling.
    """
    return save(path, [helper.make_node("Floor", ["x"], ["y"])], [fp32("x", "N", width)], [fp32("y", "N", width)])


def negated(path: Path) -> Path:
    """Write input "a" INT64 [N] -> "y" INT64 [N] = a / -1. On x86-64 the least INT64 kills ONNX Runtime by SIGFPE.

    ONNX Runtime divides narrower integers as vectors of real numbers, which never traps. For ONNX Runtime only.
    """
    divisor = numpy_helper.from_array(np.full(1, -1, np.int64), "divisor")
    node = helper.make_node("Div", ["a", "divisor"], ["y"])
    a, y = (helper.make_tensor_value_info(name, TensorProto.INT64, ["N"]) for name in "ay")
    return save(path, [node], [a], [y], [divisor])


# Names of the datatypes on the wire.
_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
}


def datatypes(path: Path) -> Path:
    """Write one input [N, 2] of each datatype, and an equal output whose name ends in "_same".

    For ONNX Runtime only.
    """
    nodes = [helper.make_node("Identity", [name], [f"{name}_same"]) for name in _TYPES]
    inputs = [helper.make_tensor_value_info(name, kind, ["N", 2]) for name, kind in _TYPES.items()]
    outputs = [helper.make_tensor_value_info(f"{name}_same", kind, ["N", 2]) for name, kind in _TYPES.items()]
    return save(path, nodes, inputs, outputs)


def fp32(name: str, *shape: Dim) -> ValueInfoProto:
    """An FP32 input or output; a dimension given as text is free."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))


def save(
    path: Path,
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    weights: Sequence[TensorProto] = (),
) -> Path:
    """Write a graph as a model file."""
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, initializer=weights)
    opset = helper.make_opsetid("", OPSET)
    model: ModelProto = helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="testkit")
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def _he(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.float32]:
    """Random FP32 weights [rows, columns] of variance 2 / rows: relu(x @ W) keeps the mean square of x."""
    weights = rng.standard_normal((rows, columns), dtype=np.float32)
    weights *= np.float32(np.sqrt(2 / rows))
    return weights


def _weight(name: str, values: NDArray[np.float32]) -> TensorProto:
    return numpy_helper.from_array(np.ascontiguousarray(values), name)


def _external(file: Path, weight: TensorProto) -> TensorProto:
    """Move the bytes of `weight` into `file`, which must lie in the directory of the model."""
    size = file.write_bytes(weight.raw_data)
    external_data_helper.set_external_data(weight, location=file.name, offset=0, length=size)
    weight.ClearField("raw_data")
    return weight
