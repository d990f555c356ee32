"""KServe's clients against a gateway: ``python kserve_child.py HTTP GRPC MODEL``, with an array x as JSON on stdin.

Runs in an environment with kserve and without weightd; prints the responses as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput


async def main() -> None:
    """Call every method of the HTTP and the gRPC client."""
    http, grpc, model = sys.argv[1:]
    x = np.array(json.load(sys.stdin), np.float32)
    results: dict[str, Any] = {}
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    for name, binary in (("json", False), ("binary", True)):
        answer = await rest.infer(http, _request(model, x, binary=binary), model)
        results[name] = _values(answer)
    results["rest"] = [
        await rest.is_server_live(http),
        await rest.is_server_ready(http),
        await rest.is_model_ready(http, model),
    ]
    await rest.close()
    client = InferenceGRPCClient(grpc)
    for name, binary in (("typed", False), ("raw", True)):
        results[name] = _values(await client.infer(_request(model, x, binary=binary)))
    results["grpc"] = [
        await client.is_server_live(),
        await client.is_server_ready(),
        await client.is_model_ready(model),
    ]
    await client.close()
    print(json.dumps(results))


def _request(model: str, x: Any, *, binary: bool) -> InferRequest:
    given = InferInput("x", list(x.shape), "FP32")
    given.set_data_from_numpy(x, binary_data=binary)
    return InferRequest(model, [given], request_outputs=[RequestedOutput("y", {"binary_data": binary})])


def _values(answer: Any) -> Any:
    return answer.outputs[0].as_numpy().tolist()


asyncio.run(main())
