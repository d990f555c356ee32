"""Unmodified tritonclient that times rounds of requests: the same client for every server.

Runs in the environment of the client. Each line of stdin is a JSON object with the fields of `client.Round`; each line
of stdout is an object with the seconds of this round:

    python -I client_child.py ARRAYS.npz

ARRAYS.npz contains the inputs and the correct answers of each model: MODEL.INDEX.x and MODEL.INDEX.y.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

_LIBRARIES: dict[str, Any] = {"grpc": grpc_client, "http": http_client}


def main() -> None:
    """Run rounds until stdin ends."""
    arrays = np.load(sys.argv[1])
    clients: dict[tuple[str, str], Any] = {}
    for line in sys.stdin:
        order = json.loads(line)
        library = _LIBRARIES[order["kind"]]
        key = order["kind"], order["address"]
        if key not in clients:
            clients[key] = library.InferenceServerClient(order["address"])
        print(json.dumps(_round(library, clients[key], order, arrays)), flush=True)


def _round(library: Any, client: Any, order: dict[str, Any], arrays: Any) -> dict[str, Any]:
    """Send `count` requests, after a tenth more that do not count."""
    model, count = order["model"], order["count"]
    pairs: list[tuple[Any, Any]] = []
    while f"{order['arrays']}.{len(pairs)}.x" in arrays:
        name = f"{order['arrays']}.{len(pairs)}"
        pairs.append((arrays[f"{name}.x"], arrays[f"{name}.y"]))
    seconds: list[float] = []
    more = count // 10 + 1
    for index in range(more + count):
        x, y = pairs[index % len(pairs)]
        begin = time.perf_counter()
        inputs = library.InferInput("x", list(x.shape), "FP32")
        inputs.set_data_from_numpy(x)
        answer = client.infer(model, [inputs]).as_numpy("y")
        seconds.append(time.perf_counter() - begin)
        if (answer.dtype, answer.shape) != (y.dtype, y.shape) or answer.tobytes() != y.tobytes():
            return {"wrong": index}
    return {"seconds": seconds[more:]}


if __name__ == "__main__":
    main()
