"""Fixtures: processes that share memory, forked from a server that has imported their modules."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any, Callable, Iterator, List

import pytest

Spawn = Callable[..., "Child"]

_SERVER = """
import ctypes, gc, hashlib, json, mmap, os, select, signal, socket, sys
import numpy as np
from weightd_worker import pagesharing
from weightd_worker.pagesharing import (chunks, libc, remap, runs, sharing, store)

MIB = 1 << 20

def weights(seed, mib):
    return np.random.RandomState(seed).randint(0, 2**62, size=mib << 17, dtype=np.int64)

def digest(*arrays):
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(array)
    return whole.hexdigest()

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
    except pagesharing.PageSharingUnavailable as error:
        return str(error)
    raise AssertionError("not refused")

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
listener = socket.socket(socket.AF_UNIX)
listener.bind("")
listener.listen(8)
print(listener.getsockname().decode("latin-1")[1:], flush=True)
while True:
    if 0 in select.select([0, listener], [], [])[0]:
        sys.exit()
    connection = listener.accept()[0]
    if not os.fork():
        break
    connection.close()
listener.close()
stream = connection.makefile("rw")
names = globals()
for line in stream:
    verb, code = json.loads(line)
    try:
        answer = [None, eval(code, names) if verb == "ask" else exec(code, names)]
    except Exception as error:
        answer = [type(error).__name__ + ": " + str(error), None]
    stream.write(json.dumps(answer) + "\\n")
    stream.flush()
"""


class Child:
    """A Python process that executes code for the test; its malloc maps blocks of at least `threshold` bytes."""

    def __init__(self, address: str, threshold: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(b"\0" + address.encode("latin-1"))
        self._stream = self._socket.makefile("rw")
        self._pid = self.ask("os.getpid()")
        self.do(f"ctypes.CDLL(None).mallopt(-3, {threshold})")

    def do(self, code: str) -> None:
        self._exchange("do", code)

    def ask(self, expression: str) -> Any:
        """Evaluate an expression whose value has a JSON form."""
        return self._exchange("ask", expression)

    def _exchange(self, verb: str, code: str) -> Any:
        self._stream.write(json.dumps([verb, code]) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        assert line, f"the child has died of {code}"
        error, value = json.loads(line)
        assert error is None, f"{error} in {code}"
        return value

    def kill(self) -> None:
        """Kill the process and wait until its memory is free."""
        if self._stream.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ConnectionError):
            self._socket.recv(1)
        self._stream.close()
        self._socket.close()


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Return the address of a process that forks a child for each connection."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        universal_newlines=True,
        env=environment,
    )
    assert process.stdout is not None
    yield process.stdout.readline().rstrip("\n")
    process.communicate()


@pytest.fixture
def spawn(server: str) -> Iterator[Spawn]:
    """Return a function that starts children whose large blocks have separate mappings; end them after the test."""
    children: List[Child] = []

    def start(threshold: int = 1 << 20) -> Child:
        children.append(Child(server, threshold))
        return children[-1]

    yield start
    for child in children:
        child.kill()
