"""Inputs that a model accepts, made up: floats around 0, everything else 0 or 1, for it may be an index."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import numpy as np

from weightd_protocol.messages.inference import TensorSpec
from weightd_protocol.tensors import NUMPY_DTYPE

Arrays = Dict[str, Any]

# Enough that neither an engine nor a cache sees the same again and again; and what they may take of memory.
MAX_SAMPLES = 16
MAX_BYTES = 64 * 2**20


def make_inputs(specs: Sequence[TensorSpec], seed: int) -> Arrays:
    """Return the inputs of a request: others for each seed, the same ones for the same."""
    random = np.random.default_rng(seed)
    return {spec.name: _random_array(spec, random) for spec in specs}


def make_many_inputs(specs: Sequence[TensorSpec]) -> List[Arrays]:
    """Return the inputs of some requests, all different, of bounded size together."""
    size = max(1, sum(spec.nbytes for spec in specs))
    return [make_inputs(specs, seed) for seed in range(max(1, min(MAX_SAMPLES, MAX_BYTES // size)))]


def _random_array(spec: TensorSpec, random: Any) -> Any:
    dtype = np.dtype(NUMPY_DTYPE[spec.datatype])
    if dtype.kind == "f":
        return random.standard_normal(spec.shape, np.float32).astype(dtype, copy=False)
    return random.integers(0, 2, spec.shape, np.uint8).astype(dtype, copy=False)
