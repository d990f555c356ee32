"""Fixtures: models for this interpreter's engine, a native log, and the daemon's end of the socket."""

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
"""The models of the zoo that are asked of MindSpore Lite."""
ENGINE = "mindspore_lite" if importlib.util.find_spec("mindspore_lite") else "onnxruntime"
"""What this interpreter has: .venv has one, .venv-mslite the other."""


@pytest.fixture(scope="session")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the ONNX models. Where there is no onnx, .venv writes them."""
    directory = tmp_path_factory.mktemp("onnx")
    python = sys.executable if importlib.util.find_spec("onnx") else mindir.REPOSITORY / ".venv" / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": str(mindir.REPOSITORY / "tests" / "support")}
    subprocess.run([str(python), str(Path(__file__).with_name("zoo.py")), str(directory)], check=True, env=environment)
    return directory


@pytest.fixture(scope="session")
def model(onnx: Path) -> Callable[[str], Path]:
    """Give the path of a model of the zoo, in the format of this interpreter's engine."""
    if ENGINE == "mindspore_lite":
        mindir.convert_all({onnx / f"{name}.onnx": onnx / f"{name}.mindir" for name in CONVERTED}, Path(sys.executable))
    return lambda name: onnx / f"{name}{SUFFIX[ENGINE]}"


@pytest.fixture
def engine() -> Engine:
    """This interpreter's engine, not built yet."""
    return ENGINES[ENGINE](BuildSettings(1, "cpu"))


@pytest.fixture(scope="session")
def built(model: Callable[[str], Path]) -> Callable[[str], Engine]:
    """Give this interpreter's engine with a model of the zoo. All tests have the same one: it is not to be spoilt."""

    @functools.lru_cache(maxsize=None)
    def build(name: str) -> Engine:
        made = ENGINES[ENGINE](BuildSettings(1, "cpu"))
        made.build(str(model(name)))
        return made

    return build


@pytest.fixture
def fresh(engine: Engine, model: Callable[[str], Path]) -> Callable[[str], Engine]:
    """Give the engine that the test has to itself with a model of the zoo."""

    def build(name: str) -> Engine:
        engine.build(str(model(name)))
        return engine

    return build


@pytest.fixture
def native_log(tmp_path: Path) -> Callable[[], ContextManager[Path]]:
    """Let file descriptor 2 be a file for a block, as the daemon sets it up for a child.

    Not for a whole test: pytest itself redirects the descriptor between a fixture and its test.
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
    """Start a process that reads its arguments from stdin, and whose output goes to the log."""
    with log.open("ab") as file, tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps([*arguments]).encode())
        stdin.seek(0)
        return subprocess.Popen(command, stdin=stdin, stdout=file, stderr=file, env=environment)


class Daemon:
    """The daemon's end: starts children and talks to them."""

    def __init__(self, directory: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.directory = directory
        self.children: Dict[str, Any] = {}
        self.popen: Callable[[List[str], Path, Mapping[str, str], Sequence[str]], Any] = popen
        self.parent = os.getpid()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.RCVTIMEO, LIMIT_MS)
        # The path of a socket has at most 107 bytes.
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
        """Start a child; `more` are further arguments, `variables` of its environment."""
        command = [sys.executable, "-m", "weightd_worker", "--parent", str(parent or self.parent)]
        self.launch(name, command, variables, [*self.arguments(name, model, engine, device), *more])

    def arguments(self, name: str, model: Path, engine: str = ENGINE, device: str = "cpu") -> List[str]:
        """Return those of a child, but for its parent."""
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
        """Start a process, which finds what this one does, and reads its arguments from stdin."""
        environment = {**os.environ, **(variables or {})}
        path = [*environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        self.children[name] = self.popen(command, self.directory / f"{name}.log", environment, arguments)

    def tell(self, name: str, order: object, *frames: Any) -> None:
        """Send an order."""
        self.socket.send_multipart([name.encode(), *encode(order), *frames])

    def hear(self, name: str, kind: Type[M]) -> Tuple[M, List[bytes]]:
        """Wait for the next message, which has to be of this kind and from this child."""
        peer, *frames = self.socket.recv_multipart()
        message = decode(frames, FROM_CHILD)
        if isinstance(message, AnnounceSelfTest):
            if message.cases:
                self.tell(name, ContinueSelfTest())
            return self.hear(name, kind)
        assert (peer.decode(), type(message)) == (name, kind), message
        assert isinstance(message, kind)
        return message, frames[2:]

    def ask(self, name: str, number: int, **inputs: Any) -> None:
        """Send a request."""
        specs = tuple(spec_of(key, array) for key, array in inputs.items())
        self.tell(
            name, Predict(number, RequestDescription("m", specs)), *(frame_of(array) for array in inputs.values())
        )

    def hear_result(self, name: str) -> Tuple[PredictResult, List[bytes]]:
        """Wait for the answer to a request, and its outputs in their order."""
        return self.hear(name, PredictResult)

    def answer(self, name: str, number: int) -> Any:
        """Wait for the one output of a request."""
        result, frames = self.hear_result(name)
        assert result.request == number
        (spec,) = result.description.outputs
        return np.frombuffer(frames[0], NUMPY_DTYPE[spec.datatype]).reshape(spec.shape)

    def stop(self, name: str) -> int:
        """Tell it to stop; return its exit status."""
        self.tell(name, Stop())
        status: int = self.children[name].wait(LIMIT_MS / 1000)
        return status

    def log(self, name: str) -> str:
        """What it has written to stderr."""
        return (self.directory / f"{name}.log").read_text()


@contextlib.contextmanager
def daemon_in(directory: Path) -> Generator[Daemon, None, None]:
    """Be the daemon for a block; what it has started ends with that."""
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
    """The same for all tests of a file."""
    with daemon_in(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon
