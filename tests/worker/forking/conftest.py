"""Fixtures: a fork server with this interpreter's engine, and the daemon's ends of the channels to servers and
templates."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Dict, Generator, List, Mapping, Optional, Type, TypeVar

import numpy as np
import pytest

from weightd_common.stream import Stream
from weightd_protocol.codec import decode, encode
from weightd_protocol.datatypes import NUMPY_DTYPE
from weightd_protocol.messages.inference import RequestDescription
from weightd_protocol.messages.worker import (
    FROM_CHILD,
    AnnounceSelfTest,
    ContinueSelfTest,
    Fork,
    Forked,
    Predict,
    PredictResult,
)
from weightd_protocol.tensors import frame_of, spec_of

if TYPE_CHECKING:
    from tests.worker.conftest import Daemon

M = TypeVar("M")

LIMIT_MS = 60_000
ENGINE = "mindspore_lite" if importlib.util.find_spec("mindspore_lite") else "onnxruntime"
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class ForkChannel:
    """The daemon's end of the channel to a fork server or template."""

    def __init__(self, connection: socket.socket) -> None:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid: int = struct.unpack("3i", peer)[0]
        self.stream = Stream(connection)
        self._messages: List[Any] = []
        # The frames of the last message.
        self.frames: List[Any] = []

    def send(self, order: object, *frames: Any) -> None:
        self.stream.send([*encode(order), *frames])

    def ask(self, number: int, **inputs: Any) -> Any:
        """Send a request; return its only output."""
        specs = tuple(spec_of(name, array) for name, array in inputs.items())
        self.send(Predict(number, RequestDescription("m", specs)), *map(frame_of, inputs.values()))
        result = self.receive(PredictResult)
        assert result.request == number
        (spec,) = result.description.outputs
        return np.frombuffer(self.frames[2], NUMPY_DTYPE[spec.datatype]).reshape(spec.shape)

    def receive(self, kind: Type[M]) -> M:
        """Wait for the next message and return it; it must have this type."""
        readable = select.poll()
        readable.register(self.stream, select.POLLIN)
        while not self._messages:
            assert readable.poll(LIMIT_MS)
            self._messages += self.stream.receive()
        self.frames = list(self._messages.pop(0).frames)
        found = decode(self.frames, FROM_CHILD)
        if isinstance(found, AnnounceSelfTest):
            if found.cases:
                self.send(ContinueSelfTest())
            return self.receive(kind)
        assert isinstance(found, kind), found
        return found


class Forking:
    """A daemon with one fork server; it keeps a list of the forked processes until it ends."""

    def __init__(self, daemon: Daemon, variables: Mapping[str, str]) -> None:
        self.daemon = daemon
        self.pids: Dict[str, int] = {}
        self._channels: List[ForkChannel] = []
        self._by_name: Dict[str, ForkChannel] = {}
        self.address = f"ipc://{daemon.runtime}/channels"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(LIMIT_MS / 1000)
        self._listener.bind(f"{daemon.runtime}/channels.channel")
        self._listener.listen()
        self.variables = {**ONE_THREAD, **variables}
        daemon.launch("server", self.command(os.getpid()), self.variables, self.arguments())
        self.server = self.accept()

    def command(self, parent: int) -> List[str]:
        """Return the command line of a fork server."""
        return [sys.executable, "-m", "weightd_worker.forkserver", "--engine", ENGINE, "--parent", str(parent)]

    def arguments(self) -> List[str]:
        """Return the arguments that a fork server reads from stdin."""
        return ["--address", self.address, "--name", "server"]

    def accept(self) -> ForkChannel:
        connection, _ = self._listener.accept()
        self._channels.append(ForkChannel(connection))
        return self._channels[-1]

    def channel(self, name: str) -> ForkChannel:
        """Return the channel of the process that was forked under this name."""
        while name not in self._by_name:
            channel = self.accept()
            self._by_name.update((each, channel) for each, pid in self.pids.items() if pid == channel.pid)
        return self._by_name[name]

    def fork(self, name: str, model: Path, *more: str, of: Optional[ForkChannel] = None) -> int:
        """Have the server, or the template `of`, fork a child with further arguments `more`; return its pid."""
        arguments = (*self.daemon.arguments(name, model), *more)
        arguments += ("--address", self.address)
        self._by_name.pop(name, None)
        channel = of or self.server
        channel.send(Fork(name, arguments, str(self.daemon.directory / f"{name}.log")))
        forked = channel.receive(Forked)
        assert (forked.name, forked.error) == (name, "")
        self.pids[name] = forked.pid
        return forked.pid

    def wait(self, name: str) -> int:
        """Wait until the forked process has exited; return its status as `os.waitpid` does."""
        return os.waitpid(self.pids.pop(name), 0)[1]

    def end(self) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for channel in self._channels:
            channel.stream.close()
        self._listener.close()


@contextlib.contextmanager
def forking_for(daemon: Daemon, variables: Mapping[str, str]) -> Generator[Forking, None, None]:
    """Provide a fork server for a block."""
    forking = Forking(daemon, variables)
    try:
        yield forking
    finally:
        forking.end()


@pytest.fixture(scope="module")
def forking(one_daemon: Daemon) -> Generator[Forking, None, None]:
    """Return a fork server that all tests of a file share; no test may end it."""
    with forking_for(one_daemon, {}) as forking:
        yield forking


@pytest.fixture
def served(daemon: Daemon) -> Callable[..., ContextManager[Forking]]:
    """Return a context manager with a fork server that the block may end; it gets the given environment variables."""

    def start(**variables: str) -> ContextManager[Forking]:
        return forking_for(daemon, variables)

    return start


@pytest.fixture(scope="module")
def leaky(one_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Generator[Forking, None, None]:
    """Return a fork server whose engine library has every side effect on its process that an import can have."""
    directory = tmp_path_factory.mktemp("library")
    source = Path(__file__).with_name("leaky.py").read_text()
    for package in (ENGINE, f"{ENGINE}/capi"):
        (directory / package).mkdir()
        (directory / package / "__init__.py").write_text(source if package == ENGINE else "")
    (directory / ENGINE / "capi" / f"{ENGINE}_pybind11_state.py").write_text("")
    with forking_for(one_daemon, {"PYTHONPATH": str(directory), "PYTHONUNBUFFERED": ""}) as forking:
        yield forking
