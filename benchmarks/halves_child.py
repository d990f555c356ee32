"""Child process of `benchmarks.halves`: an engine on one core that computes its share of shared memory.

    python halves_child.py MODEL MEMORY SHAPE INDEX CORE

Each byte of stdin is the number of processes that share the rows. The process replies with one byte when its share of
y is complete.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    """Build the model, then run it for each byte of stdin until stdin ends."""
    model, memory, shape, index, core = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    with Path(memory).open("r+b") as file:
        arrays = np.frombuffer(mmap.mmap(file.fileno(), 0), np.float32)
    x, y = arrays.reshape(2, *map(int, shape.split(",")))
    os.write(1, b"!")
    while count := os.read(0, 1):
        rows = len(x) // count[0]
        own = slice(int(index) * rows, (int(index) + 1) * rows)
        y[own] = session.run(["y"], {"x": x[own]})[0]
        os.write(1, b"!")


if __name__ == "__main__":
    main()
