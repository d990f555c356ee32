"""Processes to share memory between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Callable, Iterator, List

import pytest

Spawn = Callable[..., "Child"]

_LOOP = """
import json, sys
names = {}
for line in sys.stdin:
    verb, code = json.loads(line)
    try:
        answer = [None, eval(code, names) if verb == "ask" else exec(code, names)]
    except Exception as error:
        answer = [type(error).__name__ + ": " + str(error), None]
    print(json.dumps(answer), flush=True)
"""

_SETUP = """
import gc, hashlib, os, sys
import numpy as np
from weightd.worker import pagesharing
from weightd.worker.pagesharing import (chunks, libc, maps, remap, runs, sharing, store)

def weights(seed, mib):
    return np.random.RandomState(seed).randint(0, 2**62, size=mib << 17, dtype=np.int64)

def digest(*arrays):
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()

def rollup(field):
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))

def traces():
    "Open files, and files that are mapped as a whole."
    with open("/proc/self/maps") as lines:
        return len(os.listdir("/proc/self/fd")) + sum("-s " in line.split("/")[0] for line in lines)

def reason(call, *arguments):
    try:
        call(*arguments)
    except pagesharing.Unavailable as error:
        return str(error)
    raise AssertionError("not refused")
"""


class Child:
    """A Python process that does what it is told."""

    def __init__(self, **settings: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            universal_newlines=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **settings},
        )
        self.do(_SETUP)

    def do(self, code: str) -> None:
        """Execute statements."""
        self._exchange("do", code)

    def ask(self, expression: str) -> Any:
        """Evaluate an expression, to something that JSON has."""
        return self._exchange("ask", expression)

    def _exchange(self, verb: str, code: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([verb, code]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the child has ended with status {self.process.wait()}")
        error, value = json.loads(line)
        if error is not None:
            raise AssertionError(f"{error} in {code}")
        return value

    def kill(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start children whose large blocks have mappings of their own; end them after the test."""
    children: List[Child] = []

    def start(**settings: str) -> Child:
        child = Child(**{"MALLOC_MMAP_THRESHOLD_": "1048576", **settings})
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
