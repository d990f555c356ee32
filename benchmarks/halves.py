"""A request split by hand: engine processes on one core each, with tensors in shared memory."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHILD = Path(__file__).with_name("halves_child.py")


class Halves:
    """One process for each of `cores` with `model`, whose input x and output y are FP32 of `shape`, rows first.

    Like a script written only for this purpose: it copies the rows into shared memory and sends each process a byte;
    each process runs its share of the rows and replies with a byte when its share of the output is in shared memory.
    """

    def __init__(self, model: Path, shape: Sequence[int], cores: Sequence[int]) -> None:
        self._model = model
        self._shape = tuple(shape)
        self._cores = cores

    def __enter__(self) -> Halves:
        nbytes = 4 * int(np.prod(self._shape))
        # The children open the file by its name, which is removed as soon as they have done so.
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            os.truncate(file.fileno(), 2 * nbytes)
            memory = mmap.mmap(file.fileno(), 2 * nbytes)
            self._x, self._y = np.frombuffer(memory, np.float32).reshape(2, *self._shape)
            shape = ",".join(map(str, self._shape))
            self._processes = [self._start(file.name, shape, core) for core in self._cores]
            try:
                self._wait(len(self._cores))
            except BaseException:
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def infer(self, x: NDArray[Any], count: int) -> NDArray[Any]:
        """Run the model on x; each of the first `count` processes computes an equal share of y."""
        self._x[:] = x
        for process in self._processes[:count]:
            assert process.stdin
            process.stdin.write(bytes([count]))
        self._wait(count)
        y: NDArray[Any] = self._y.copy()
        return y

    def _start(self, memory: str, shape: str, core: int) -> subprocess.Popen[bytes]:
        arguments = [str(self._model), memory, shape, str(self._cores.index(core)), str(core)]
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, str(_CHILD), *arguments], stdin=pipe, stdout=pipe, bufsize=0)

    def _wait(self, count: int) -> None:
        for process in self._processes[:count]:
            assert process.stdout
            if not process.stdout.read(1):
                raise ChildProcessError(f"a process of the bare script exited with status {process.wait()}")
