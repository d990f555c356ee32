"""MindSpore Lite's ModelParallelRunner in a separate process, as a reference for throughput."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.material import Arrays, Reference, UnavailableError
from testkit import mindir, plain_child

_CHILD = Path(__file__).with_name("parallel_runner_child.py")


class ParallelRunner:
    """A runner with `workers` workers for `model`, which twice as many threads use.

    Args:
        model: a .mindir file.
        workers: replicas of the model in the process.
        inputs: inputs of the requests, used in turn.
    """

    def __init__(self, model: Path, workers: int, inputs: list[Arrays]) -> None:
        self._arguments = [str(model), str(workers), str(2 * workers)]
        self._inputs = inputs

    def __enter__(self) -> ParallelRunner:
        python = mindir.interpreter()
        if python is None:
            raise UnavailableError(mindir.HOW_TO_GET_IT)
        command = [str(python), str(_CHILD), *self._arguments]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def requests_per_second(self, count: int, reference: Reference) -> float:
        """Run `count` requests as fast as possible, and check the answers."""
        seconds, outputs = self._ask(count)
        for index, output in enumerate(outputs):
            reference.check(index, {"y": output})
        return count / seconds

    def _ask(self, count: int) -> tuple[float, NDArray[Any]]:
        assert self._process.stdin
        assert self._process.stdout
        x = np.stack([self._inputs[index % len(self._inputs)]["x"] for index in range(count)])
        self._process.stdin.write(plain_child.pack({}, {"x": x}))
        self._process.stdin.flush()
        message, arrays = plain_child.receive(self._read)
        return float(message["seconds"]), arrays["y"]

    def _read(self, size: int) -> bytes:
        assert self._process.stdout
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise UnavailableError(f"the process of the ModelParallelRunner exited with status {self._process.wait()}")
        return data
