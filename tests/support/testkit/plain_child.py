"""Child process of `testkit.plain`: one engine and one model, requests on stdin, replies on stdout.

Runs on Python 3.7 and later with numpy and the engine alone:

    python -I plain_child.py ENGINE MODEL THREADS

A message, in either direction, is two lengths (uint64 little-endian), a JSON object and the raw bytes of the
arrays that its "arrays" lists as [name, dtype, shape], one after another. Questions are {"op": "infer"} and
{"op": "repeat", "times": n}; the child first says {"import_seconds", "build_seconds"}. After
{"error": traceback} it exits.
"""

from __future__ import annotations

import importlib
import json
import os
import struct
import sys
import time
import traceback
from typing import Any, Callable, Dict, cast

import numpy as np

Arrays = Dict[str, "np.ndarray[Any, Any]"]
LENGTHS = struct.Struct("<QQ")


class OnnxRuntime:
    """An InferenceSession with default options except for the number of threads."""

    def __init__(self) -> None:
        self.library: Any = importlib.import_module("onnxruntime")

    def build(self, model: str, threads: int) -> None:
        """Load the model."""
        options = self.library.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = self.library.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.outputs: list[str] = [output.name for output in self.session.get_outputs()]

    def infer(self, inputs: Arrays) -> Arrays:
        """Run a predict; the outputs are new arrays."""
        return dict(zip(self.outputs, self.session.run(self.outputs, inputs)))


class MindSporeLite:
    """A Model on the CPU. The comments explain the steps without which the answers are wrong."""

    def __init__(self) -> None:
        self.library: Any = importlib.import_module("mindspore_lite")

    def build(self, model: str, threads: int) -> None:
        """Load the model."""
        context = self.library.Context()
        context.target = ["cpu"]
        context.cpu.thread_num = threads
        self.model = self.library.Model()
        self.model.build_from_file(model, self.library.ModelType.MINDIR, context)

    def infer(self, inputs: Arrays) -> Arrays:
        """Run a predict; the outputs are copies."""
        tensors = self.model.get_inputs()
        # Inputs are bound by position, and datatypes may differ from the file's (INT64 becomes INT32). The library
        # ignores arrays in Fortran order silently.
        arrays = [np.asarray(inputs[t.name], t.dtype.name.lower(), "C") for t in tensors]
        shapes = [list(array.shape) for array in arrays]
        if shapes != [list(tensor.shape) for tensor in tensors]:
            self.model.resize(tensors, shapes)
            tensors = self.model.get_inputs()  # tensors from before the resize keep the old size
        for tensor, array in zip(tensors, arrays):
            tensor.set_data_from_numpy(array)
        # Outputs are views of memory that the next predict overwrites.
        return {output.name: output.get_data_to_numpy().copy() for output in self.model.predict(tensors)}


ENGINES: dict[str, Callable[[], Any]] = {"onnxruntime": OnnxRuntime, "mindspore_lite": MindSporeLite}


def pack(message: dict[str, Any], arrays: Arrays) -> bytes:
    """Return the bytes of a message and its arrays."""
    listed = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    head = json.dumps(dict(message, arrays=listed)).encode()
    body = b"".join(array.tobytes() for array in arrays.values())
    return LENGTHS.pack(len(head), len(body)) + head + body


def receive(read: Callable[[int], bytes]) -> tuple[dict[str, Any], Arrays]:
    """Read one message; `read(n)` returns exactly n bytes or raises EOFError."""
    head_size, body_size = LENGTHS.unpack(read(LENGTHS.size))
    message = json.loads(read(head_size).decode())
    body, offset = read(body_size), 0
    arrays: Arrays = {}
    for name, dtype, shape in message.pop("arrays"):
        arrays[name] = np.ndarray(shape, dtype, body, offset)
        offset += arrays[name].nbytes
    return message, arrays


def answer(engine: Any, message: dict[str, Any], inputs: Arrays) -> Arrays:
    """Handle one request; return the arrays of the reply."""
    if message["op"] == "infer":
        return cast("Arrays", engine.infer(inputs))
    seconds = np.zeros(message["times"])
    for i in range(len(seconds)):
        begin = time.perf_counter()
        engine.infer(inputs)
        seconds[i] = time.perf_counter() - begin
    return {"seconds": seconds}


def main() -> None:
    """Import the engine, build the model, and answer requests until the end of stdin."""
    name, model, threads = sys.argv[1:]
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # output of a library goes to stderr, not between the answers

    def read(size: int) -> bytes:
        data = questions.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def send(message: dict[str, Any], arrays: Arrays) -> None:
        answers.write(pack(message, arrays))
        answers.flush()

    try:
        begin = time.perf_counter()
        engine = ENGINES[name]()
        imported = time.perf_counter()
        engine.build(model, int(threads))
        built = time.perf_counter()
        send({"import_seconds": imported - begin, "build_seconds": built - imported}, {})
        while True:
            message, inputs = receive(read)
            send({}, answer(engine, message, inputs))
    except EOFError:
        pass
    except Exception:  # noqa: BLE001 - any error of the engine is the reply
        send({"error": traceback.format_exc()}, {})
        sys.exit(1)


if __name__ == "__main__":
    main()
