"""A digit classifier with 129 MiB of weights that trains in seconds and classifies 99 % of new images correctly.

Two layers of fixed random features, relu(relu(x @ A + b) @ B), then a linear read-out R, fitted by ridge
regression to +1 for the digit and -1 for the nine others. Only R and the mean image are learnt, so there is
no training loop. With n = 1200 images far below m = 8192 features, the ridge solution is cheap in its dual
form, an n x n system:

    R = F.T @ inv(F @ F.T + ridge * I) @ T      F FP32 [n, m] features, T [n, 10] targets

    python -m benchmarks.demo.model OUT.onnx
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

PIXELS, FIRST, SECOND, DIGITS = 64, 4096, 8192, 10  # widths; FIRST x SECOND float32 are 128 MiB
BRIGHTEST = 16.0  # pixel value
SCALE, BIAS = 0.5, 0.5  # deviation of A and b; anything from 0.2 to 1.0 gives 99 %
RIDGE = 1e-3  # relative to the mean squared length of a feature vector; 1e-5 to 1e-2 give the same
TRAINING = 1200  # images, of 1,797
SEED = 0

Floats = NDArray[np.float32]
Labels = NDArray[np.uint8]


class Split(NamedTuple):
    """Images FP32 [n, 64] with pixels 0 to 16, labels uint8 [n]; no image is in both parts."""

    training_images: Floats
    training_labels: Labels
    held_out_images: Floats
    held_out_labels: Labels


class Classifier(NamedTuple):
    """The weights, all FP32."""

    first: Floats  # A [64, 4096]
    bias: Floats  # b [4096], the mean image already subtracted
    second: Floats  # B [4096, 8192]
    readout: Floats  # R [8192, 10]

    def scores(self, images: Floats) -> Floats:
        """Compute the same as the ONNX model with numpy: images FP32 [n, 64] -> scores FP32 [n, 10]."""
        scores: Floats = _features(images, self.first, self.bias, self.second) @ self.readout
        return scores


def split() -> Split:
    """Return the digits, shuffled with a fixed seed: 1,200 for training, 597 held out."""
    with np.load(Path(__file__).with_name("digits.npz")) as digits:
        images = digits["images"].reshape(-1, PIXELS).astype(np.float32)
        labels: Labels = digits["labels"]
    order = np.random.default_rng(SEED).permutation(len(images))
    fit_on, keep = order[:TRAINING], order[TRAINING:]
    return Split(images[fit_on], labels[fit_on], images[keep], labels[keep])


def fit(images: Floats, labels: Labels) -> Classifier:
    """Draw the random layers and fit the read-out to images FP32 [n, 64] and their labels [n]."""
    rng = np.random.default_rng(SEED)
    first = rng.standard_normal((PIXELS, FIRST), dtype=np.float32) * np.float32(SCALE)
    bias = rng.standard_normal(FIRST, dtype=np.float32) * np.float32(BIAS)
    bias -= images.mean(axis=0) / np.float32(BRIGHTEST) @ first
    second = rng.standard_normal((FIRST, SECOND), dtype=np.float32) * np.float32(np.sqrt(2 / FIRST))

    features = _features(images, first, bias, second)
    gram: NDArray[np.float64] = np.asarray(features @ features.transpose(), np.float64)
    gram += np.eye(len(gram)) * (RIDGE * np.trace(gram) / len(gram))
    targets = np.where(labels[:, None] == np.arange(DIGITS), 1.0, -1.0)
    readout: Floats = features.transpose() @ np.asarray(np.linalg.solve(gram, targets), np.float32)
    return Classifier(first, bias, second, readout)


def accuracy(scores: NDArray[Any], labels: Labels) -> float:
    """Return the fraction of scores [n, 10] whose largest value belongs to the label."""
    return float((scores.argmax(axis=1) == labels).mean())


def write(path: Path) -> Path:
    """Fit on the training part and write the ONNX model.

    "image" FP32 [N, 64], pixels 0 to 16 -> "scores" FP32 [N, 10]; the largest score belongs to the digit.
    """
    data = split()
    return export(fit(data.training_images, data.training_labels), path)


def export(classifier: Classifier, path: Path) -> Path:
    """Write the classifier as ONNX (opset 17, IR version 8)."""
    weights = [numpy_helper.from_array(array, name) for name, array in classifier._asdict().items()]
    weights.append(numpy_helper.from_array(np.array([1 / BRIGHTEST], np.float32), "scale"))
    nodes = [
        helper.make_node("Mul", ["image", "scale"], ["x"]),
        helper.make_node("MatMul", ["x", "first"], ["xa"]),
        helper.make_node("Add", ["xa", "bias"], ["xab"]),
        helper.make_node("Relu", ["xab"], ["h"]),
        helper.make_node("MatMul", ["h", "second"], ["hb"]),
        helper.make_node("Relu", ["hb"], ["features"]),
        helper.make_node("MatMul", ["features", "readout"], ["scores"]),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", PIXELS])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", DIGITS])
    graph = helper.make_graph(nodes, "digits", [image], [scores], initializer=weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="weightd")
    path.write_bytes(model.SerializeToString())
    return path


def _features(images: Floats, first: Floats, bias: Floats, second: Floats) -> Floats:
    hidden = np.maximum(images / np.float32(BRIGHTEST) @ first + bias, np.float32(0))
    features: Floats = np.maximum(hidden @ second, np.float32(0))
    return features


def main() -> None:
    """Write the model and print its accuracy."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo.model", description="Writes the digit classifier.")
    parser.add_argument("out", type=Path, metavar="OUT.onnx")
    out: Path = parser.parse_args().out
    data = split()
    classifier = fit(data.training_images, data.training_labels)
    right = accuracy(classifier.scores(data.held_out_images), data.held_out_labels)
    export(classifier, out)
    size = out.stat().st_size / 2**20
    print(f"{out}: {size:.0f} MiB, {right:.1%} of {len(data.held_out_labels)} held-out images correct (with numpy)")


if __name__ == "__main__":
    main()
