"""Writes the ONNX models of these tests into a directory: ``python zoo.py DIRECTORY``.

A script, because only one of the two interpreters that run the tests has onnx. Weights are small integers: on inputs
that are small integers too, every engine answers exactly what numpy does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from testkit import models

fp32, info, node, save = models.fp32, helper.make_tensor_value_info, helper.make_node, models.save


def relu(path: Path) -> Path:
    """No weight: "x" FP32 [N, 4] -> "y"."""
    return save(path, [node("Relu", ["x"], ["y"])], [fp32("x", "N", 4)], [fp32("y", "N", 4)])


def wide(path: Path) -> Path:
    """ "x" FP32 [N, 1024] @ W -> "y", W[i, j] = (i + 3 j) % 5 - 2: 4 MiB of weights."""
    i, j = np.ogrid[:1024, :1024]
    weight = numpy_helper.from_array(((i + 3 * j) % 5 - 2).astype(np.float32), "w")
    return save(path, [node("MatMul", ["x", "w"], ["y"])], [fp32("x", "N", 1024)], [fp32("y", "N", 1024)], [weight])


def convolution(path: Path) -> Path:
    """ "x" FP32 [N, 256, 8, 8] -> "y", 2.3 MiB of weights, which MindSpore Lite rearranges in the first predict."""
    weight = (np.arange(256 * 256 * 9) % 3 - 1).astype(np.float32).reshape(256, 256, 3, 3)
    # MindSpore Lite does not know the defaults of these attributes.
    nodes = [node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 1], dilations=[1, 1])]
    shape = ("N", 256, 8, 8)
    return save(path, nodes, [fp32("x", *shape)], [fp32("y", *shape)], [numpy_helper.from_array(weight, "w")])


def threes(path: Path) -> Path:
    """ "x" FP32 [N, 4] -> "y" FP32 [N / 3, 3, 4]: it runs only where N is a multiple of 3."""
    return _multiples(path, 3)


def fives(path: Path) -> Path:
    """The same for 5, of which no size that a canary tries is a multiple."""
    return _multiples(path, 5)


def _multiples(path: Path, of: int) -> Path:
    shape = numpy_helper.from_array(np.array([-1, of, 4]), "shape")
    nodes = [node("Reshape", ["x", "shape"], ["r"]), node("Relu", ["r"], ["y"])]
    return save(path, nodes, [fp32("x", "N", 4)], [fp32("y", "M", of, 4)], [shape])


def single(path: Path) -> Path:
    """ "x" FP32 [N, 4] -> "y" FP32 [1, 4]: it runs only where N is 1, whatever its signature says."""
    shape = numpy_helper.from_array(np.array([1, 4]), "shape")
    nodes = [node("Reshape", ["x", "shape"], ["r"]), node("Relu", ["r"], ["y"])]
    return save(path, nodes, [fp32("x", "N", 4)], [fp32("y", "M", 4)], [shape])


def positive(path: Path) -> Path:
    """ "x" FP32 [N, 4] -> "y" BOOL [N, 4]: x > 0."""
    zero = numpy_helper.from_array(np.zeros(4, np.float32), "zero")
    outputs = [info("y", TensorProto.BOOL, ["N", 4])]
    return save(path, [node("Greater", ["x", "zero"], ["y"])], [fp32("x", "N", 4)], outputs, [zero])


def scalar(path: Path) -> Path:
    """ "a" FP32 [N, 4], "b" FP32 [] -> "y" = a + b."""
    return save(path, [node("Add", ["a", "b"], ["y"])], [fp32("a", "N", 4), fp32("b")], [fp32("y", "N", 4)])


def total(path: Path) -> Path:
    """ "x" FP32 [N, 4] -> "y" FP32 [], the sum."""
    return save(path, [node("ReduceSum", ["x"], ["y"], keepdims=0)], [fp32("x", "N", 4)], [fp32("y")])


def reshape(path: Path) -> Path:
    """ "x" FP32 [N, 4], "shape" INT64 [K] -> "y" of that shape: nobody knows its rank."""
    inputs = [fp32("x", "N", 4), info("shape", TensorProto.INT64, ["K"])]
    return save(path, [node("Reshape", ["x", "shape"], ["y"])], inputs, [info("y", TensorProto.FLOAT, None)])


def any_rank(path: Path) -> Path:
    """ "x" FP32 -> "y" = -x: of whatever rank a request chooses."""
    inputs, outputs = [info("x", TensorProto.FLOAT, None)], [info("y", TensorProto.FLOAT, None)]
    return save(path, [node("Neg", ["x"], ["y"])], inputs, outputs)


def filled(path: Path) -> Path:
    """ "shape" INT64 [2] -> "y" FP32 of that shape: a request decides how much memory it takes."""
    inputs, outputs = [info("shape", TensorProto.INT64, [2])], [fp32("y", "N", "M")]
    return save(path, [node("ConstantOfShape", ["shape"], ["y"])], inputs, outputs)


def no_inputs(path: Path) -> Path:
    """Nothing -> "y" FP32 [2, 3], all ones."""
    ones = numpy_helper.from_array(np.ones((2, 3), np.float32), "ones")
    return save(path, [node("Relu", ["ones"], ["y"])], [], [fp32("y", 2, 3)], [ones])


def constant(path: Path) -> Path:
    """ "x" FP32 [N, 4] -> "x" as it came, and "k" FP32 [4], which is a weight."""
    weight = numpy_helper.from_array(np.arange(4, dtype=np.float32), "w")
    outputs = [fp32("x", "N", 4), fp32("k", 4)]
    return save(path, [node("Identity", ["w"], ["k"])], [fp32("x", "N", 4)], outputs, [weight])


def twins(path: Path) -> Path:
    """Two outputs named "y"."""
    return save(path, [node("Relu", ["x"], ["y"])], [fp32("x", "N", 4)], [fp32("y", "N", 4), fp32("y", "N", 4)])


def strings(path: Path) -> Path:
    """ "words" STRING [N] -> "y" STRING [N]."""
    inputs, outputs = (info(name, TensorProto.STRING, ["N"]) for name in ("words", "y"))
    return save(path, [node("Identity", ["words"], ["y"])], [inputs], [outputs])


def sequence(path: Path) -> Path:
    """ "x" FP32 [N, 4] -> "many", a sequence of tensors."""
    outputs = [helper.make_tensor_sequence_value_info("many", TensorProto.FLOAT, None)]
    return save(path, [node("SequenceConstruct", ["x"], ["many"])], [fp32("x", "N", 4)], outputs)


ALL: list[Callable[[Path], Path]] = [
    relu, wide, convolution, threes, fives, single, positive, scalar, total, reshape, any_rank, filled, no_inputs,
    constant,
    twins, strings, sequence, models.two_inputs, models.two_batches, models.integers, models.fixed,
    models.with_external_data, models.random_output,
]  # fmt: skip

if __name__ == "__main__":
    for write in ALL:
        write(Path(sys.argv[1], f"{write.__name__}.onnx"))
