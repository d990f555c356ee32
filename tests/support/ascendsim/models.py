"""Writers of simulated models, with the same bytes for the same arguments, and their right answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
from numpy.typing import NDArray

from ascendsim import modelfile
from ascendsim.modelfile import Floats, ModelFile, TensorSpec

_MIB = 1024 * 1024


def mlp(
    path: Path,
    layers: int = 2,
    width: int = 64,
    batch: Optional[int] = None,
    seed: int = 0,
    *,
    bundle: bool = False,
    size_mib: int = 0,
    key: bytes = b"",
    dtype: str = "FLOAT32",
    gears: Sequence[int] = (),
    has_gear_info: bool = False,
    exported: bool = False,
    workspace_mib: int = 0,
) -> Path:
    """`layers` times relu(x @ W), W [width, width]: "x" [batch, width] -> "y" of the same shape and dtype.

    Args:
        path: path of the file to write, which is returned.
        layers: number of W.
        width: width of each W and of a row.
        batch: batch size; None: free.
        seed: seed of the weights.
        bundle: whether the model is converted for `update_weights`.
        size_mib: pretended size of the weights on a card; 0: their real size.
        key: key with which the file is encrypted.
        dtype: type of "x" and "y"; the model computes in float32.
        gears: batch sizes on a card; empty: any.
        has_gear_info: whether `get_model_info` reports the gears.
        exported: whether the model is for the provider "ge", not converted for ACL.
        workspace_mib: size of the workspace; 0: the value of the host's switches.
    """
    rng = np.random.RandomState(seed)
    weights: Floats = rng.standard_normal(layers * width * width).astype(np.float32)
    weights *= np.float32((2 / width) ** 0.5)
    shape = [-1 if batch is None else batch, width]
    specs = [TensorSpec("x", shape, dtype)], [TensorSpec("y", shape, dtype)]
    size = size_mib * _MIB or weights.nbytes
    recorded = (";".join(map(str, gears)), f"x:-1,{width}") if has_gear_info else ("", "")
    model = ModelFile(
        "mlp", layers, width, *specs, size, bundle, weights.tobytes(), _batches(gears), *recorded, exported
    )
    return modelfile.write(path, model._replace(workspace_bytes=workspace_mib * _MIB), key)


def two_inputs(path: Path, seed: int = 0, *, padding: str = "", gears: Sequence[int] = ()) -> Path:
    """Inputs "a", "b" float32 [N, 4] -> "sum" = (a + b) * w, "difference" = (a - b) * w, w [4]: a swap shows.

    Args:
        path: path of the file to write, which is returned.
        seed: seed of the weights.
        padding: suffix of each name.
        gears: batch sizes on a card; empty: any.
    """
    weights: Floats = np.random.RandomState(seed).standard_normal(4).astype(np.float32)
    inputs = [TensorSpec(name + padding, [-1, 4]) for name in ("a", "b")]
    outputs = [TensorSpec(name + padding, [-1, 4]) for name in ("sum", "difference")]
    model = ModelFile("pair", 0, 4, inputs, outputs, weights.nbytes, False, weights.tobytes(), _batches(gears))
    return modelfile.write(path, model)


def _batches(gears: Sequence[int]) -> List[List[int]]:
    return [[gear] for gear in gears]


def answers(path: Path, inputs: Dict[str, NDArray[Any]], key: bytes = b"") -> Dict[str, Floats]:
    """Return the answer of the model, bit for bit."""
    model = modelfile.read(path, key)
    weights = modelfile.as_floats(model.weights, model)
    arrays: List[Floats] = [np.asarray(inputs[each.name.rstrip()], np.float32) for each in model.inputs]
    outputs = modelfile.compute(model, weights, arrays)
    return {spec.name.rstrip(): array.astype(spec.dtype.lower()) for spec, array in zip(model.outputs, outputs)}


def answer(path: Path, x: NDArray[Any], key: bytes = b"") -> Floats:
    """Return the answer of an `mlp` to `x`, bit for bit."""
    return answers(path, {"x": x}, key)["y"]


def weights(path: Path, key: bytes = b"") -> Dict[str, Floats]:
    """Return the weights of an `mlp` by their names in `update_weights`: "w0", "w1" ... float32 [width, width]."""
    model = modelfile.read(path, key)
    layers = modelfile.as_floats(model.weights, model).reshape(model.layers, model.width, model.width)
    return {f"w{index}": layer for index, layer in enumerate(layers)}
