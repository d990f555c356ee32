"""HTTP clients of a Ray cluster: each request must get one right answer, or one error that allows a retry."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from testkit.plain import PlainProcess

WIDTH = 64
COUNT = 32

# Statuses after which a client may retry: UNAVAILABLE and RESOURCE_EXHAUSTED of the daemon and of Serve, and Serve's
# time-out. Also 500, if it comes from Serve's proxy instead of the gateway: the replica or its node has died.
_LATER = frozenset({503, 429, 408})
_DIED = 500

_PAUSE_S = 0.02


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_ours(self) -> bool:
        """Whether the body is JSON, like all answers of the gateway, and not text of Serve's proxy."""
        return self.headers.get("content-type", "").startswith("application/json")


def ask(
    port: int, path: str, body: bytes | None = None, *, method: str = "", timeout: float = 60.0, **headers: str
) -> Reply:
    """Send one request over a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
        got = connection.getresponse()
        return Reply(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
    finally:
        connection.close()


def inference(x: NDArray[Any]) -> bytes:
    """Return the request body for one input, x."""
    return json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}]}
    ).encode()


def output(body: bytes) -> NDArray[Any]:
    """Return the output y of an answer."""
    (y,) = json.loads(body)["outputs"]
    return np.array(y["data"], np.float32).reshape(y["shape"])


class SampleRequests:
    """Inputs, and the answers of several models, computed by the engine without weightd."""

    def __init__(self, plain: Mapping[str, PlainProcess]) -> None:
        rng = np.random.default_rng(7)
        self.inputs = [rng.standard_normal((1 + i % 3, WIDTH)).astype(np.float32) for i in range(COUNT)]
        self.bodies = [inference(each) for each in self.inputs]
        self.answers = {name: [one.infer({"x": x})["y"] for x in self.inputs] for name, one in plain.items()}

    def model_of(self, index: int, y: NDArray[Any]) -> str:
        """Return the name of the model that gives this answer, or ""."""
        return next((name for name, each in self.answers.items() if np.array_equal(each[index], y)), "")


class RequestOutcomes:
    """Outcomes of all requests.

    Attributes:
        sent: number of requests.
        outcomes: number of requests by name of the answering model, or by status.
        wrong: descriptions of requests that must not have ended as they did.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def enter(self, outcome: str, wrong: str = "") -> None:
        """Count the outcome of a request."""
        with self._lock:
            self.outcomes[outcome] += 1
            if wrong:
                self.wrong.append(wrong)

    def begin(self) -> None:
        """Count a request that is sent."""
        with self._lock:
            self.sent += 1

    def check(self) -> None:
        """Check that each request has ended once, and none wrongly."""
        assert not self.wrong, (len(self.wrong), self.wrong[:5], self.outcomes)
        assert sum(self.outcomes.values()) == self.sent, (self.sent, self.outcomes)


class LoadClients:
    """Client threads that send one request after another within a block.

    Args:
        port: port of Serve's proxy.
        path: path of the model.
        questions: requests to send.
        count: number of clients.

    Attributes:
        results: outcomes of the requests.
        allowed: names of the models that may answer now.
    """

    def __init__(self, port: int, path: str, questions: SampleRequests, count: int = 8) -> None:
        self._port = port
        self._path = path
        self._questions = questions
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(count)]
        self.results = RequestOutcomes()
        self.allowed: Collection[str] = ("a",)
        self.right = 0

    def __enter__(self) -> LoadClients:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for each in self._threads:
            each.join(90)
        assert not any(each.is_alive() for each in self._threads)

    def wait(self, more: int, limit: float = 120.0) -> None:
        """Wait until this many more requests have been answered."""
        wanted, ends = self.right + more, time.monotonic() + limit
        while self.right < wanted:
            assert not self.results.wrong, self.results.wrong[:5]
            assert time.monotonic() < ends, (self.right, wanted, self.results.outcomes)
            time.sleep(0.05)

    def _ask(self, number: int) -> None:
        for index in self._indices(number):
            if self._ends.is_set():
                return
            self.results.begin()
            allowed = {*self.allowed}
            try:
                reply = ask(self._port, self._path, self._questions.bodies[index])
            except Exception as error:  # noqa: BLE001 - any error is counted
                self.results.enter("exception", f"{type(error).__name__}: {error}")
                continue
            self._enter(index, reply, allowed | {*self.allowed})
            # Nodes that start share the machine with the clients.
            time.sleep(_PAUSE_S)

    def _enter(self, index: int, reply: Reply, allowed: Collection[str]) -> None:
        if reply.status == 200:
            model = self._questions.model_of(index, output(reply.body))
            self.results.enter(model or "wrong", "" if model in allowed else f"question {index}: {model or 'no model'}")
            self.right += 1
            return
        is_retryable = reply.status in _LATER or (reply.status == _DIED and not reply.is_ours)
        self.results.enter(str(reply.status), "" if is_retryable else f"{reply.status}: {reply.body[:200]!r}")
        # Like a well-behaved client; short enough not to slow the test down.
        time.sleep(0.1)

    def _indices(self, number: int) -> Iterator[int]:
        index = number
        while True:
            yield index % COUNT
            index += 3
