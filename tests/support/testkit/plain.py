"""An engine called directly in a separate process: the reference for weightd's answers, memory and speed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from testkit import mindir, plain_child

Inputs = Mapping[str, "np.ndarray[Any, Any]"]
Outputs = plain_child.Arrays

STOP_LIMIT_S = 10
LOG_LINES = 30  # of the engine's native log, in an error


class PlainError(RuntimeError):
    """Error: the engine raised or its process crashed. The process has ended; the text has traceback and native log."""


class PlainProcess:
    """A process that builds `model` with the engine's public API and answers over a pipe.

        with PlainProcess(path, engine="mindspore_lite", threads=1) as plain:
            plain.infer({"x": x})["y"]

    `python` is the interpreter: by default this one, for MindSpore Lite the repository's. `timeout` bounds
    the wait for the build and for each answer, in seconds. For use from one thread. An error ends the
    process, because a failed predict poisons a MindSpore Lite model.
    """

    def __init__(
        self,
        model: Path,
        engine: str = "onnxruntime",
        python: Path | None = None,
        threads: int = 1,
        timeout: float = 120.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._command = [str(python or _interpreter(engine)), "-I", plain_child.__file__]
        self._command += [engine, str(model), str(threads)]
        self._timeout = timeout
        self._env = {**os.environ, **(env or {})}

    def __enter__(self) -> PlainProcess:
        begin = time.perf_counter()
        self._log = tempfile.TemporaryFile()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=self._log, env=self._env, bufsize=0
        )
        try:
            ready, _ = self._receive()
        except BaseException:
            self.__exit__()
            raise
        self.pid: int = self._process.pid
        # Import of the engine's library without numpy, build of the model, and the whole start from the spawn on.
        self.import_seconds: float = ready["import_seconds"]
        self.build_seconds: float = ready["build_seconds"]
        self.start_seconds: float = time.perf_counter() - begin
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def infer(self, inputs: Inputs) -> Outputs:
        """Run one prediction."""
        self._send({"op": "infer"}, inputs)
        return self._receive()[1]

    def repeat(self, inputs: Inputs, n: int) -> float:
        """Return the total seconds of n predictions inside the process, with setting inputs and copying outputs."""
        return float(self.times(inputs, n).sum())

    def times(self, inputs: Inputs, n: int) -> NDArray[np.float64]:
        """Return the seconds of each of n predictions inside the process, float64 [n]; the first ones are slow."""
        return concurrent_times([self], inputs, n)[0]

    def log(self) -> str:
        """The text that the engine has written to stdout and stderr."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _send(self, message: dict[str, Any], inputs: Inputs) -> None:
        assert self._process.stdin
        data = memoryview(plain_child.pack(message, dict(inputs)))
        try:
            while data:
                data = data[self._process.stdin.write(data) :]
        except BrokenPipeError:
            raise self._error("has exited") from None

    def _receive(self) -> tuple[dict[str, Any], Outputs]:
        assert self._process.stdout
        fd, deadline = self._process.stdout.fileno(), time.monotonic() + self._timeout

        def read(size: int) -> bytes:
            data = bytearray()
            while len(data) < size:
                if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    self._process.kill()
                    raise self._error(f"gave no answer within {self._timeout} s")
                part = os.read(fd, size - len(data))
                if not part:
                    self._process.wait(STOP_LIMIT_S)
                    raise self._error(f"died with status {self._process.returncode}")
                data += part
            return bytes(data)

        message, outputs = plain_child.receive(read)
        if "error" in message:
            raise self._error("failed: " + message["error"].strip())
        return message, outputs

    def _error(self, what: str) -> PlainError:
        return PlainError("\n".join([f"the plain process {what}", *self.log().splitlines()[-LOG_LINES:]]))


def concurrent_times(processes: Sequence[PlainProcess], inputs: Inputs, n: int) -> list[NDArray[np.float64]]:
    """Return `times` of several processes that run at the same time."""
    for process in processes:
        process._send({"op": "repeat", "times": n}, inputs)  # pyright: ignore[reportPrivateUsage]
    return [process._receive()[1]["seconds"] for process in processes]  # pyright: ignore[reportPrivateUsage]


def _interpreter(engine: str) -> Path:
    if engine != "mindspore_lite":
        return Path(sys.executable)
    python = mindir.interpreter()
    if python is None:
        raise PlainError(mindir.HOW_TO_GET_IT)
    return python
