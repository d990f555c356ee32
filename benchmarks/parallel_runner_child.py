"""Child process of `benchmarks.parallel_runner`, run by MindSpore Lite's interpreter (Python 3.7).

    python parallel_runner_child.py MODEL WORKERS THREADS

Messages have the format of `testkit.plain_child`. A request is the array "x", FP32 [count, batch, width]; the answer is
"y" of the same shape, and the duration in seconds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import mindspore_lite
import numpy as np

from testkit import plain_child


def _build(model: str, workers: int) -> mindspore_lite.ModelParallelRunner:
    context = mindspore_lite.Context()
    context.target = ["cpu"]
    context.cpu.thread_num = 1
    context.cpu.inter_op_parallel_num = 1
    context.parallel.workers_num = workers
    runner = mindspore_lite.ModelParallelRunner()
    runner.build_from_file(model, context)
    return runner


def _run(runner: mindspore_lite.ModelParallelRunner, threads: int, x: Any, y: Any) -> float:
    """Run the model on each entry of `x` into `y`; return the duration in seconds."""
    todo = iter(range(len(x)))
    lock = threading.Lock()
    errors: list[BaseException] = []
    name = runner.get_inputs()[0].name

    def work() -> None:
        # A runner cannot resize the model, but takes the shape from the input tensor.
        tensor = mindspore_lite.Tensor()
        tensor.name, tensor.dtype, tensor.shape = name, mindspore_lite.DataType.FLOAT32, list(x.shape[1:])
        try:
            while True:
                with lock:
                    index = next(todo, None)
                if index is None:
                    return
                tensor.set_data_from_numpy(x[index])
                y[index] = runner.predict([tensor])[0].get_data_to_numpy()
        except BaseException as error:
            errors.append(error)
            raise

    workers = [threading.Thread(target=work) for _ in range(threads)]
    begin = time.perf_counter()
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - begin


def main() -> None:
    """Build the model, then answer requests until stdin ends."""
    model, workers, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # redirect output of the library to stderr, so that it does not mix with the answers

    def read(size: int) -> bytes:
        data = sys.stdin.buffer.read(size)
        if len(data) < size:
            raise SystemExit(0)
        return data

    runner = _build(model, workers)
    while True:
        _, arrays = plain_child.receive(read)
        y = np.zeros_like(arrays["x"])
        seconds = _run(runner, threads, arrays["x"], y)
        answers.write(plain_child.pack({"seconds": seconds}, {"y": y}))
        answers.flush()


if __name__ == "__main__":
    main()
