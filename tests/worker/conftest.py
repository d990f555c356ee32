"""Fixtures: models for this interpreter's engine, a native log, and the daemon's side of the child socket."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Generator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
)

import numpy as np
import pytest
import zmq

from testkit import mindir
from weightd_protocol.codec import decode, encode
from weightd_protocol.datatypes import NUMPY_DTYPE
from weightd_protocol.messages.inference import RequestDescription
from weightd_protocol.messages.worker import (
    FROM_CHILD,
    AnnounceSelfTest,
    ContinueSelfTest,
    Predict,
    PredictResult,
    Stop,
)
from weightd_protocol.tensors import frame_of, spec_of
from weightd_worker.engines import ENGINES
from weightd_worker.engines.engine import BuildSettings, Engine

M = TypeVar("M")

LIMIT_MS = 60_000
SUFFIX = {"onnxruntime": ".onnx", "mindspore_lite": ".mindir"}
CONVERTED = (
    *("relu", "wide", "convolution", "threes", "fives", "single", "positive", "scalar"),
    *("two_inputs", "two_batches", "integers", "fixed", "centred", "log"),
    *("embedding", "lstm", "image"),
)
"""The models of the zoo that are converted for MindSpore Lite."""
ENGINE = "mindspore_lite" if importlib.util.find_spec("mindspore_lite") else "onnxruntime"
"""The engine of this interpreter: ONNX Runtime in .venv, MindSpore Lite in .venv-mslite."""


@pytest.fixture(scope="session")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the ONNX models. An interpreter without the package onnx has .venv write them."""
    directory = tmp_path_factory.mktemp("onnx")
    python = sys.executable if importlib.util.find_spec("onnx") else mindir.REPOSITORY / ".venv" / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": str(mindir.REPOSITORY / "tests" / "support")}
    subprocess.run([str(python), str(Path(__file__).with_name("zoo.py")), str(directory)], check=True, env=environment)
    return directory


@pytest.fixture(scope="session")
def model(onnx: Path) -> Callable[[str], Path]:
    """Return a function that maps the name of a zoo model to its path, in the format of this interpreter's engine."""
    if ENGINE == "mindspore_lite":
        mindir.convert_all({onnx / f"{name}.onnx": onnx / f"{name}.mindir" for name in CONVERTED}, Path(sys.executable))
    return lambda name: onnx / f"{name}{SUFFIX[ENGINE]}"


@pytest.fixture
def engine() -> Engine:
    """Return this interpreter's engine before its build."""
    return ENGINES[ENGINE](BuildSettings(1, "cpu"))


@pytest.fixture(scope="session")
def built(model: Callable[[str], Path]) -> Callable[[str], Engine]:
    """Return a function that builds a zoo model. All tests share the engine, so no test may corrupt it."""

    @functools.lru_cache(maxsize=None)
    def build(name: str) -> Engine:
        made = ENGINES[ENGINE](BuildSettings(1, "cpu"))
        made.build(str(model(name)))
        return made

    return build


@pytest.fixture
def fresh(engine: Engine, model: Callable[[str], Path]) -> Callable[[str], Engine]:
    """Return a function that builds a zoo model in an engine that only this test uses."""

    def build(name: str) -> Engine:
        engine.build(str(model(name)))
        return engine

    return build


@pytest.fixture
def native_log(tmp_path: Path) -> Callable[[], ContextManager[Path]]:
    """Return a context manager that redirects file descriptor 2 to a file, as the daemon does for a child.

    It covers a block and not the whole test, because pytest itself redirects the descriptor between a fixture and its
    test.
    """

    @contextlib.contextmanager
    def redirect() -> Generator[Path, None, None]:
        log = tmp_path / "stderr.log"
        saved = os.dup(2)
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        try:
            yield log
        finally:
            os.dup2(saved, 2)
            os.close(saved)

    return redirect


def popen(
    command: List[str], log: Path, environment: Mapping[str, str], arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start a process that reads its arguments from stdin and writes its output to the log."""
    with log.open("ab") as file, tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps([*arguments]).encode())
        stdin.seek(0)
        return subprocess.Popen(command, stdin=stdin, stdout=file, stderr=file, env=environment)


class Daemon:
    """The daemon's side of the protocol with its children: starts them, sends orders and receives their messages."""

    def __init__(self, directory: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.directory = directory
        self.children: Dict[str, Any] = {}
        self.popen: Callable[[List[str], Path, Mapping[str, str], Sequence[str]], Any] = popen
        self.parent = os.getpid()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.RCVTIMEO, LIMIT_MS)
        # The path of a Unix socket has at most 107 bytes.
        self.runtime = Path(tempfile.mkdtemp(prefix="weightd-", dir="/tmp"))
        self.socket.bind(f"ipc://{self.runtime}/children")

    def start(
        self,
        name: str,
        model: Path,
        *more: str,
        engine: str = ENGINE,
        device: str = "cpu",
        parent: int = 0,
        variables: Optional[Mapping[str, str]] = None,
    ) -> None:
        """Start a child; `more` are further arguments, `variables` are added to its environment."""
        command = [sys.executable, "-m", "weightd_worker", "--parent", str(parent or self.parent)]
        self.launch(name, command, variables, [*self.arguments(name, model, engine, device), *more])

    def arguments(self, name: str, model: Path, engine: str = ENGINE, device: str = "cpu") -> List[str]:
        """Return the arguments of a child, except its parent."""
        arguments = ["--address", f"ipc://{self.runtime}/children", "--name", name, "--engine", engine]
        arguments += ["--model", str(model), "--store", str(self.directory / "store")]
        return [*arguments, "--threads", "1", "--device", device]

    def launch(
        self,
        name: str,
        command: List[str],
        variables: Optional[Mapping[str, str]] = None,
        arguments: Sequence[str] = (),
    ) -> None:
        """Start a process with this process's module path; it reads its arguments from stdin."""
        environment = {**os.environ, **(variables or {})}
        path = [*environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        self.children[name] = self.popen(command, self.directory / f"{name}.log", environment, arguments)

    def send(self, name: str, order: object, *frames: Any) -> None:
        self.socket.send_multipart([name.encode(), *encode(order), *frames])

    def receive(self, name: str, kind: Type[M]) -> Tuple[M, List[bytes]]:
        """Wait for the next message and return it; it must have this type and come from this child."""
        peer, *frames = self.socket.recv_multipart()
        message = decode(frames, FROM_CHILD)
        if isinstance(message, AnnounceSelfTest):
            if message.cases:
                self.send(name, ContinueSelfTest())
            return self.receive(name, kind)
        assert (peer.decode(), type(message)) == (name, kind), message
        assert isinstance(message, kind)
        return message, frames[2:]

    def ask(self, name: str, number: int, **inputs: Any) -> None:
        specs = tuple(spec_of(key, array) for key, array in inputs.items())
        self.send(
            name, Predict(number, RequestDescription("m", specs)), *(frame_of(array) for array in inputs.values())
        )

    def receive_result(self, name: str) -> Tuple[PredictResult, List[bytes]]:
        """Wait for the result of a request; return it with the frames of its outputs in order."""
        return self.receive(name, PredictResult)

    def answer(self, name: str, number: int) -> Any:
        """Wait for the result of a request with one output and return that output."""
        result, frames = self.receive_result(name)
        assert result.request == number
        (spec,) = result.description.outputs
        return np.frombuffer(frames[0], NUMPY_DTYPE[spec.datatype]).reshape(spec.shape)

    def stop(self, name: str) -> int:
        """Send STOP to the child and return its exit status."""
        self.send(name, Stop())
        status: int = self.children[name].wait(LIMIT_MS / 1000)
        return status

    def log(self, name: str) -> str:
        """Return the output of the child."""
        return (self.directory / f"{name}.log").read_text()


@contextlib.contextmanager
def daemon_in(directory: Path) -> Generator[Daemon, None, None]:
    """Provide a daemon for a block; end all processes that it has started when the block ends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    daemon = Daemon(directory, context)
    yield daemon
    for child in daemon.children.values():
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.wait()
    daemon.socket.close(linger=0)
    context.term()
    shutil.rmtree(str(daemon.runtime))


@pytest.fixture
def daemon(tmp_path: Path) -> Generator[Daemon, None, None]:
    with daemon_in(tmp_path) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def one_daemon(tmp_path_factory: pytest.TempPathFactory) -> Generator[Daemon, None, None]:
    """Return a daemon that all tests of a file share."""
    with daemon_in(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon
