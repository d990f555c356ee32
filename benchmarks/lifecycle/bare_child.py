"""Child process of `benchmarks.lifecycle.cold`: builds models in processes that have loaded onnxruntime.

    python bare_child.py INPUT

Each line of stdin is the path of a model. A fork of this process builds a session and runs INPUT, an .npy file with the
input x, so that each session has fresh memory; it replies with a line, the seconds that this takes.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np


def main() -> None:
    """Build and run a model for each line of stdin until stdin ends."""
    import onnxruntime

    x = np.load(sys.argv[1])
    for line in sys.stdin:
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            continue
        begin = time.perf_counter()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(line.strip(), options, providers=["CPUExecutionProvider"])
        session.run(["y"], {"x": x})
        print(time.perf_counter() - begin, flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
