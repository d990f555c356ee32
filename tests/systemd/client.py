"""Client process inside the manager: runs a command against an address and prints one JSON object.

    ask ADDRESS QUESTIONS [MODEL]   send each request once
    load ADDRESS QUESTIONS          send requests until the end of standard input
    probe PATH                      connect to PATH and PATH.unix repeatedly until the end of standard input
    reload ADDRESS                  reload the configuration
    greedy ADDRESS COUNT            make a worker of the model "greedy" fill in COUNT numbers

`load` prints "begun" after its first answer, `probe` when it starts.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from weightd import Client, RequestError, WeightdError

TIMEOUT_S = 60.0

# Like a well-behaved client, wait before the next attempt after an error. The pause after answers leaves the CPU to the
# processes that the test waits for.
PAUSE_S = 0.02

Report = Mapping[str, object]
Questions = Sequence[tuple[Any, Any]]


def ask(address: str, file: str, model: str = "mlp") -> Report:
    """Send each request once; count wrong answers."""
    questions = _questions(file)
    with Client(address, timeout=TIMEOUT_S) as client:
        wrong = sum(client.infer(model, {"x": x})["y"].tobytes() != y.tobytes() for x, y in questions)
    return {"answered": len(questions), "wrong": wrong}


def load(address: str, file: str) -> Report:
    """Send requests until the end of input; count answers and errors."""
    questions = _questions(file)
    ended = _end_of_input()
    tally = _Outcomes()
    while not ended.is_set():
        try:
            with Client(address, timeout=TIMEOUT_S) as client:
                while not ended.is_set():
                    _round(client, questions, tally)
                    ended.wait(PAUSE_S)
        except WeightdError as error:
            tally.error(error)
            ended.wait(PAUSE_S)
    return tally.report()


def _round(client: Client, questions: Questions, tally: _Outcomes) -> None:
    """Submit all requests at once; count each answer or error."""
    pending = [(client.submit("mlp", {"x": x}), y) for x, y in questions]
    for each, y in pending:
        try:
            tally.answer(each.result()["y"].tobytes() == y.tobytes())
        except RequestError as error:
            tally.error(error)


class _Outcomes:
    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._texts: Counter[str] = Counter()
        self._gap = 0.0
        self._last = 0.0

    def answer(self, right: bool) -> None:
        now = time.monotonic()
        if not self._count["answered"]:
            print("begun", flush=True)
        self._gap = max(self._gap, now - (self._last or now))
        self._last = now
        self._count["answered" if right else "wrong"] += 1

    def error(self, error: WeightdError) -> None:
        self._errors[getattr(error, "code", type(error).__name__)] += 1
        self._texts[str(error)] += 1

    def report(self) -> Report:
        """`gap` is the longest time between two answers."""
        texts = dict(self._texts.most_common(8))
        counts = {"answered": self._count["answered"], "wrong": self._count["wrong"]}
        return {**counts, "errors": self._errors, "texts": texts, "gap": self._gap}


def probe(path: str) -> Report:
    """Connect to both sockets repeatedly, without a protocol; count results."""
    ended = _end_of_input()
    outcomes: Counter[str] = Counter()
    print("begun", flush=True)
    while not ended.wait(PAUSE_S):
        for each in (path, f"{path}.unix"):
            with socket.socket(socket.AF_UNIX) as connection:
                outcomes[errno.errorcode.get(connection.connect_ex(each), "connected")] += 1
    return outcomes


def reload(address: str) -> Report:
    """Reload the configuration, if this user may."""
    with Client(address, timeout=TIMEOUT_S) as client:
        client.reload()
    return {}


def greedy(address: str, count: str) -> Report:
    """Make a worker fill in `count` numbers."""
    with Client(address, timeout=TIMEOUT_S) as client:
        answer = client.infer("greedy", {"n": np.array([int(count)], np.int64)})
    return {"y": float(answer["y"][0])}


def _questions(file: str) -> Questions:
    with np.load(file) as arrays:
        half = len(arrays.files) // 2
        return [(arrays[f"arr_{i}"], arrays[f"arr_{half + i}"]) for i in range(half)]


def _end_of_input() -> threading.Event:
    ended = threading.Event()

    def read() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    return ended


VERBS: Mapping[str, Callable[..., Report]] = {
    "ask": ask, "load": load, "probe": probe, "reload": reload, "greedy": greedy,
}  # fmt: skip


def main() -> None:
    """Run the command; print its report, or the error."""
    try:
        report = VERBS[sys.argv[1]](*sys.argv[2:])
    except WeightdError as error:
        report = {"error": getattr(error, "code", type(error).__name__), "text": str(error)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
