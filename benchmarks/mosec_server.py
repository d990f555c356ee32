"""A mosec server in separate processes, and a minimal client for it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from benchmarks.material import Arrays, UnavailableError
from benchmarks.raw_http import RawHttp
from testkit.mindir import REPOSITORY
from testkit.ports import free_ports

PYTHON = REPOSITORY / ".venv-rival" / "bin" / "python"

_CHILD = Path(__file__).with_name("mosec_child.py")
_LIMIT_S = 120
_LOOK_S = 0.005
_CONNECTED = re.compile(r"socket connected to")  # logged once for each worker that has built its model
_HEAD = b"POST /inference HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


class MosecServer:
    """A mosec server of `model` with `workers` workers, which runs until the end of the block.

    It combines up to `rows` requests in a batch, and waits at most `wait_ms` for a full batch.

    Attributes:
        pid: pid of the main process.
        port: its port on 127.0.0.1.
        begin: time of the start (time.perf_counter).
    """

    def __init__(self, model: Path, workers: int, rows: int = 1, wait_ms: int = 1) -> None:
        self._model = model
        self._workers = workers
        self._env = {"RIVAL_BATCH": str(rows), "RIVAL_WAIT_MS": str(wait_ms)}

    def __enter__(self) -> MosecServer:
        if not PYTHON.exists():
            raise UnavailableError(f"mosec is not installed in {PYTHON.parent.parent}; run `make bench-rival`")
        self._directory = tempfile.TemporaryDirectory(prefix="mosec-", dir="/tmp")
        self._log = Path(self._directory.name, "log")
        self.port = free_ports(1)[0]
        arguments = ["--port", str(self.port), "--address", "127.0.0.1", "--path", f"{self._directory.name}/ipc"]
        env = {**os.environ, "RIVAL_MODEL": str(self._model), "RIVAL_WORKERS": str(self._workers), **self._env}
        self.begin = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(PYTHON), "-I", str(_CHILD), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
            )
        self.pid = self._process.pid
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pids = self.pids()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            self._process.wait()
        self._directory.cleanup()

    def ready(self) -> None:
        """Wait until every worker has built its model and is connected."""
        self.until_connected(self._workers)

    def until_connected(self, count: int) -> None:
        """Wait until `count` workers have connected since the start, including workers that have exited."""
        self._until(lambda: self.connected() >= count)

    def connected(self) -> int:
        """Return the number of workers that have connected since the start."""
        return len(_CONNECTED.findall(self._log.read_text("utf-8", "replace")))

    @contextlib.contextmanager
    def client(self) -> Generator[MosecClient, None, None]:
        """Connect as soon as the server listens."""
        found: list[socket.socket] = []

        def connect() -> bool:
            with contextlib.suppress(ConnectionRefusedError):
                found.append(socket.create_connection(("127.0.0.1", self.port)))
            return bool(found)

        self._until(connect)
        with found[0] as connection:
            yield MosecClient(connection)

    def pids(self) -> list[int]:
        """Return the pids of the main process, the HTTP server, the workers, and Python's helper processes."""
        return [self.pid, *(pid for pid in _children(self.pid))]

    def workers(self) -> list[int]:
        """Return the pids of the workers."""
        return [pid for pid in _children(self.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def _until(self, check: Callable[[], bool]) -> None:
        limit = time.monotonic() + _LIMIT_S
        while not check():
            if self._process.poll() is not None or time.monotonic() > limit:
                raise UnavailableError(f"mosec does not serve:\n{self._log.read_text('utf-8', 'replace')[-2000:]}")
            time.sleep(_LOOK_S)


class MosecClient:
    """A connection to a mosec server, which sends the bytes of x and receives the bytes of y."""

    def __init__(self, connection: socket.socket) -> None:
        self._http = RawHttp(connection)

    def infer(self, inputs: Arrays) -> Arrays:
        """Send the bytes of x and return y."""
        self.send(inputs)
        return self.answer()

    def fileno(self) -> int:
        """Return the descriptor of the connection, for a selector."""
        return self._http.fileno()

    def send(self, inputs: Arrays) -> None:
        """Send the bytes of x."""
        x = inputs["x"]
        self._http.send(_HEAD % x.nbytes, x.data.cast("B"))

    def answer(self) -> Arrays:
        """Wait for the answer to the sent request, and return y."""
        return {"y": np.frombuffer(self._http.answer().body, np.float32).reshape(1, -1)}


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text("ascii").split():
                yield int(child)
                yield from _children(int(child))
