"""PyTriton server of ONNX models with input x and output y, FP32 [any, any]; no batching, one thread.

Runs in the environment of PyTriton:

    python -I pytriton_child.py HTTP_PORT GRPC_PORT METRICS_PORT NAME=PATH...
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnxruntime
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def main() -> None:
    """Serve until a signal stops the server."""
    http, grpc, metrics = map(int, sys.argv[1:4])
    config = TritonConfig(
        http_address="127.0.0.1", http_port=http, grpc_address="127.0.0.1", grpc_port=grpc, metrics_port=metrics
    )
    with Triton(config=config) as triton:
        for each in sys.argv[4:]:
            name, _, path = each.partition("=")
            triton.bind(
                model_name=name,
                infer_func=_predict(path),
                inputs=[Tensor(name="x", dtype=np.float32, shape=(-1, -1))],
                outputs=[Tensor(name="y", dtype=np.float32, shape=(-1, -1))],
                config=ModelConfig(batching=False),
            )
        triton.serve()


def _predict(path: str) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def predict(requests: Any) -> Any:
        return [{"y": session.run(["y"], {"x": each.data["x"]})[0]} for each in requests]

    return predict


if __name__ == "__main__":
    main()
