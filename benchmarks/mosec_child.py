"""mosec server of one ONNX model with an input x and an output y, FP32 [1, any], written as mosec documents.

Requests and responses are raw bytes. Without RIVAL_BATCH, a number of rows, the server does not batch. All other
settings are defaults. Runs in mosec's environment:

    RIVAL_MODEL=PATH RIVAL_WORKERS=N python -I mosec_child.py --port PORT --address ADDRESS --path DIRECTORY
"""

from __future__ import annotations

import os
from typing import Any

import mosec
import numpy as np
import onnxruntime


class Predict(mosec.Worker):
    """A session with one thread, as weightd's workers have by default."""

    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            os.environ["RIVAL_MODEL"], options, providers=["CPUExecutionProvider"]
        )

    def deserialize(self, data: bytearray) -> np.ndarray[Any, Any]:
        """Return the body as an array."""
        return np.frombuffer(data, np.float32).reshape(1, -1)

    def forward(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Run the model."""
        return self._session.run(["y"], {"x": data})[0]

    def serialize(self, data: np.ndarray[Any, Any]) -> memoryview:
        """Return the output as bytes."""
        return data.data.cast("B")


class PredictTogether(Predict):
    """The same with batching: one predict for all requests that mosec has combined."""

    def forward(self, data: Any) -> np.ndarray[Any, Any]:
        """Run the model on all requests; return an array with one row for each."""
        return super().forward(np.concatenate(data))


if __name__ == "__main__":
    workers, rows = int(os.environ["RIVAL_WORKERS"]), int(os.environ.get("RIVAL_BATCH", "1"))
    wait_ms = int(os.environ.get("RIVAL_WAIT_MS", "1"))
    server = mosec.Server()
    if rows > 1:
        server.append_worker(PredictTogether, num=workers, max_batch_size=rows, max_wait_time=wait_ms)
    else:
        server.append_worker(Predict, num=workers)
    server.run()
