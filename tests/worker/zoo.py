"""Writer of the ONNX models of these tests: ``python zoo.py DIRECTORY``.

The writer is a script, because only one of the two interpreters that run the tests has onnx. Weights and inputs are
small integers, so that every engine returns exactly the result of numpy.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from testkit import models

fp32, info, node = models.fp32, helper.make_tensor_value_info, helper.make_node

X, Y = fp32("x", "N", 4), fp32("y", "N", 4)
ANY_X, ANY_Y = (info(name, TensorProto.FLOAT, None) for name in "xy")
WORDS, SAME_WORDS = (info(name, TensorProto.STRING, ["N"]) for name in ("words", "y"))
IMAGES = ("N", 256, 8, 8)

# MindSpore Lite does not know the defaults of these attributes.
CONV: dict[str, Any] = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [1, 1], "dilations": [1, 1]}

LSTM = ["Sigmoid", "Tanh", "Tanh"]


class Graph(NamedTuple):
    """Arguments of `models.save`."""

    nodes: list[Any]
    inputs: list[Any]
    outputs: list[Any]
    weights: Mapping[str, Any] = types.MappingProxyType({})


def reshaped(*shape: int) -> Graph:
    """ "x" FP32 [N, 4] -> relu(x) in another shape: it runs only where N fits, whatever its signature says."""
    nodes = [node("Reshape", ["x", "shape"], ["r"]), node("Relu", ["r"], ["y"])]
    return Graph(nodes, [X], [fp32("y", "M", *shape[1:])], {"shape": np.array(shape)})


def small(*shape: int) -> Any:
    """Return random weights with mean 0 and standard deviation 0.3."""
    return (np.random.RandomState(len(shape)).standard_normal(shape) * 0.3).astype(np.float32)


def branch(kind: str) -> Any:
    """Return a graph of one node on "x" @ "w"; "w" has 4 MiB."""
    nodes = [node("Constant", [], ["w"], value=numpy_helper.from_array(np.eye(1024, dtype=np.float32)))]
    nodes += [node("MatMul", ["x", "w"], ["xw"]), node(kind, ["xw"], ["out"])]
    return helper.make_graph(nodes, "branch", [], [fp32("out", "N", 1024)])


MODELS = {
    "relu": Graph([node("Relu", ["x"], ["y"])], [X], [Y]),
    # 4 MiB of weights: W[i, j] = (i + 3 j) % 5 - 2.
    "wide": Graph(
        [node("MatMul", ["x", "w"], ["y"])],
        [fp32("x", "N", 1024)],
        [fp32("y", "N", 1024)],
        {"w": (np.add.outer(np.arange(1024), 3 * np.arange(1024)) % 5 - 2).astype(np.float32)},
    ),
    # 2.3 MiB of weights, which MindSpore Lite rearranges in the first predict.
    "convolution": Graph(
        [node("Conv", ["x", "w"], ["y"], **CONV)],
        [fp32("x", *IMAGES)],
        [fp32("y", *IMAGES)],
        {"w": (np.arange(256 * 256 * 9) % 3 - 1).astype(np.float32).reshape(256, 256, 3, 3)},
    ),
    # MindSpore Lite sizes the buffers of an LSTM, and chooses the kernel of a convolution, in a model's first predict.
    "lstm": Graph(
        [node("LSTM", ["x", "w", "r", "b", "", "h", "h"], ["y", "y_h", "y_c"], hidden_size=32, activations=LSTM)],
        [fp32("x", 5, "N", 8), fp32("h", 1, "N", 32)],
        [fp32("y", 5, 1, "N", 32)],
        {"w": small(1, 128, 8), "r": small(1, 128, 32), "b": small(1, 256)},
    ),
    "image": Graph(
        [node("Conv", ["x", "w"], ["c"], **CONV), node("Relu", ["c"], ["r"]), node("Conv", ["r", "v"], ["y"], **CONV)],
        [fp32("x", "N", 3, "H", "W")],
        [fp32("y", "N", 8, "H", "W")],
        {"w": small(16, 3, 3, 3), "v": small(8, 16, 3, 3)},
    ),
    # These models run only where N is a multiple of 3 or of 5, or is 1. No size that a self-test tries is a multiple of
    # 5.
    "threes": reshaped(-1, 3, 4),
    "fives": reshaped(-1, 5, 4),
    "single": reshaped(1, 4),
    # The model draws random numbers only if the sum of x is large, which a test must search for.
    "rarely_random": Graph(
        [
            node("ReduceSum", ["x"], ["sum"], keepdims=0),
            node("Greater", ["sum", "large"], ["rare"]),
            node("If", ["rare"], ["y"], then_branch=branch("RandomUniformLike"), else_branch=branch("Neg")),
        ],
        [fp32("x", "N", 1024)],
        [fp32("y", "N", 1024)],
        {"large": np.array(1e30, np.float32)},
    ),
    # Dropout without and with training mode; the former equals Identity.
    "dropout": Graph([node("Dropout", ["x", "half"], ["y"])], [X], [Y], {"half": np.array(0.5, np.float32)}),
    "trained": Graph(
        [node("Dropout", ["x", "half", "yes"], ["y"])],
        [X],
        [Y],
        {"half": np.array(0.5, np.float32), "yes": np.array(True)},
    ),
    # Other types, ranks and numbers of inputs and outputs.
    "positive": Graph(
        [node("Greater", ["x", "zero"], ["y"])],
        [X],
        [info("y", TensorProto.BOOL, ["N", 4])],
        {"zero": np.zeros(4, np.float32)},
    ),
    "scalar": Graph([node("Add", ["a", "b"], ["y"])], [fp32("a", "N", 4), fp32("b")], [Y]),
    "total": Graph([node("ReduceSum", ["x"], ["y"], keepdims=0)], [X], [fp32("y")]),
    "reshape": Graph([node("Reshape", ["x", "shape"], ["y"])], [X, info("shape", TensorProto.INT64, ["K"])], [ANY_Y]),
    "any_rank": Graph([node("Neg", ["x"], ["y"])], [ANY_X], [ANY_Y]),
    # The request decides how much memory the output takes.
    "filled": Graph(
        [node("ConstantOfShape", ["shape"], ["y"])], [info("shape", TensorProto.INT64, [2])], [fp32("y", "N", "M")]
    ),
    "no_inputs": Graph([node("Relu", ["ones"], ["y"])], [], [fp32("y", 2, 3)], {"ones": np.ones((2, 3), np.float32)}),
    # The outputs are "x", unchanged, and the weight "k".
    "constant": Graph([node("Identity", ["w"], ["k"])], [X], [X, fp32("k", 4)], {"w": np.arange(4, dtype=np.float32)}),
    # Rows that depend on each other: by their sum or mean, by the largest value of all rows, or, where a row is not a
    # multiple of a processor vector, by their position in it.
    "softmax": Graph([node("Softmax", ["x"], ["y"], axis=0)], [X], [Y]),
    "centred": Graph(
        [node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1), node("Sub", ["x", "mean"], ["y"])], [X], [Y]
    ),
    "quantized": Graph(
        [
            node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
            node("MatMulInteger", ["q", "w", "zero"], ["i"]),
            node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
            node("Mul", ["f", "scale"], ["y"]),
        ],
        [fp32("x", "N", 64)],
        [fp32("y", "N", 64)],
        {"w": (np.arange(64 * 64) % 251 - 125).astype(np.int8).reshape(64, 64)},
    ),
    "log": Graph(
        [node("Abs", ["x"], ["positive"]), node("Log", ["positive"], ["y"])], [fp32("x", "N", 37)], [fp32("y", "N", 37)]
    ),
    "elu": Graph([node("Elu", ["x"], ["y"], alpha=1.0)], [fp32("x", "N", 37)], [fp32("y", "N", 37)]),
    "strings": Graph([node("Identity", ["words"], ["y"])], [WORDS], [SAME_WORDS]),
    "sequence": Graph(
        [node("SequenceConstruct", ["x"], ["many"])],
        [X],
        [helper.make_tensor_sequence_value_info("many", TensorProto.FLOAT, None)],
    ),
}
SHARED = (
    *(models.two_inputs, models.two_batches, models.integers, models.embedding, models.fixed),
    *(models.with_external_data, models.random_output, models.floored),
)

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    for name, (nodes, inputs, outputs, weights) in MODELS.items():
        arrays = [numpy_helper.from_array(array, key) for key, array in weights.items()]
        models.save(directory / f"{name}.onnx", nodes, inputs, outputs, arrays)
    for write in SHARED:
        write(directory / f"{write.__name__}.onnx")
