"""Answers of MindSpore Lite alone, each of a process that computes nothing else.

``python fresh_answers.py MODEL OUT SHAPES``: SHAPES is a JSON list of {input: shape}; OUT/N.npz has the answer to the
Nth, and is missing where the process died. Processes are forked before the library has built anything.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np

Shapes = Dict[str, Sequence[int]]


def values(shapes: Shapes) -> Dict[str, Any]:
    """Return the inputs that both sides compute on, FP32."""
    random = np.random.RandomState(sum(sum(shape) for shape in shapes.values()))
    return {name: random.uniform(-1, 1, shapes[name]).astype(np.float32) for name in sorted(shapes)}


def answer(model: str, shapes: Shapes) -> Dict[str, Any]:
    """Return what a new Model answers."""
    import mindspore_lite

    context = mindspore_lite.Context()
    context.target = ["cpu"]
    context.cpu.thread_num = 1
    built = mindspore_lite.Model()
    built.build_from_file(model, mindspore_lite.ModelType.MINDIR, context)
    inputs, arrays = built.get_inputs(), values(shapes)
    built.resize(inputs, [list(shapes[each.name]) for each in inputs])
    inputs = built.get_inputs()
    for each in inputs:
        each.set_data_from_numpy(arrays[each.name])
    return {each.name: np.array(each.get_data_to_numpy()) for each in built.predict(inputs)}


def main(model: str, out: str, shapes: str) -> None:
    """Write the answers."""
    import mindspore_lite  # noqa: F401 - once for all processes

    every: List[Shapes] = json.loads(shapes)
    for number, each in enumerate(every):
        child = os.fork()
        if child == 0:
            np.savez(str(Path(out) / f"{number}.npz"), **answer(model, each))
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
