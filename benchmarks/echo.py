"""A two-hop ZeroMQ echo of client, ROUTER/ROUTER broker and worker: the lower bound of a brokered request.

Each is a separate process, all written in Python, and none decodes, checks, queues or computes anything. All three wait
in a zmq.Poller, like programs with deadlines or several sockets.

    python echo.py broker MODE FRONTEND BACKEND
    python echo.py worker MODE BACKEND BYTES...
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import zmq

_WORKER = b"worker"
_LIMIT_MS = 30_000
_COPY, _NO_COPY = "copy", "no-copy"


class Echo:
    """Client of an echo whose worker answers each message with frames of `answer_sizes`.

    By default libzmq copies frames, which is faster for small ones. With `copy=False` it passes the memory itself,
    which is faster for large ones.
    """

    def __init__(self, answer_sizes: Sequence[int], *, copy: bool = True) -> None:
        self._answer_sizes = answer_sizes
        self._copy = copy

    def __enter__(self) -> Echo:
        self._directory = tempfile.TemporaryDirectory(prefix="echo-", dir="/tmp")
        frontend, backend = (f"ipc://{self._directory.name}/{name}" for name in ("frontend", "backend"))
        mode = _COPY if self._copy else _NO_COPY
        self._processes = [
            _start("broker", mode, frontend, backend),
            _start("worker", mode, backend, *map(str, self._answer_sizes)),
        ]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(frontend)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)
        for process in self._processes:
            process.kill()
            process.wait()
        self._directory.cleanup()

    def ask(self, frames: Sequence[Any]) -> Sequence[Any]:
        """Send `frames`, which are bytes or arrays; return the frames of the answer."""
        self._socket.send_multipart(frames, copy=self._copy)
        if not self._poller.poll(_LIMIT_MS):
            raise TimeoutError(f"the echo gave no answer within {_LIMIT_MS} ms")
        return self._socket.recv_multipart(0, self._copy)


def broker(mode: str, frontend_address: str, backend_address: str) -> None:
    """Forward the messages of clients to the worker, and its answers to the clients."""
    copy = mode == _COPY
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    frontend, backend = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    backend.bind(backend_address)
    backend.recv_multipart()  # the worker has connected, so the socket can route messages to it
    frontend.bind(frontend_address)
    poller = zmq.Poller()
    poller.register(frontend, zmq.POLLIN)
    poller.register(backend, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            if socket is frontend:
                backend.send_multipart([_WORKER, *frontend.recv_multipart(0, copy)], copy=copy)
            else:
                frontend.send_multipart(backend.recv_multipart(0, copy)[1:], copy=copy)


def worker(mode: str, address: str, answer_sizes: Sequence[int]) -> None:
    """Answer each message with the same frames."""
    copy = mode == _COPY
    answer = [bytes(size) for size in answer_sizes]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, _WORKER)
    socket.connect(address)
    socket.send(b"hello")
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    while True:
        poller.poll()
        client = socket.recv_multipart(0, copy)[0]
        socket.send_multipart([client, *answer], copy=copy)


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, *arguments], stdin=subprocess.DEVNULL)


def main() -> None:
    """Run the broker or the worker until it is killed."""
    role, mode, *arguments = sys.argv[1:]
    if role == "broker":
        broker(mode, *arguments)
    else:
        worker(mode, arguments[0], [int(size) for size in arguments[1:]])


if __name__ == "__main__":
    main()
